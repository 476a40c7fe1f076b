"""Several texts written together: each round runs one forward per model for all of them.

    batch = engine.batch()
    first, second = batch.add("It was", params), batch.add("Once upon", params)
    while batch:
        for text, event in batch.step():
            print(text, event.text)

A round runs the next forward of every text: a draft of one, a verification of another and a piece of a third one's
prompt are rows of one forward, which reads the weights once. Texts join and leave between rounds. No row depends on
another text's rows, so every text is bit for bit the text that `generate` writes; only time is shared.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from longdraft import kernels
from longdraft.engine.generation import Generation
from longdraft.engine.loaded_model import DrafterChoice, LoadedModel
from longdraft.errors import LongdraftError, UsageError, check
from longdraft.kernels.launched import Launched, read_together
from longdraft.model.transformer import Forward, ForwardRequest
from longdraft.request.context import Prompt
from longdraft.request.events import Event
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation.reuse import Waiting
from longdraft.speculation.routine import run_batched


class Batch:
    """Texts that are being written, by the numbers that `add` returns.

    Close it, or use it in a `with` statement, to stop all texts that are left.
    """

    def __init__(self, model: LoadedModel, drafter: DrafterChoice) -> None:
        self._model = model
        self._drafter = drafter
        self._texts: dict[int, Generation] = {}
        # What each text needs to go on: a forward, the end of work that a device has begun, or the beginning that it
        # shares with another text, which reads it now. Between two steps a text needs nothing.
        self._needs: dict[int, ForwardRequest | Launched | Waiting] = {}
        self._numbers = count()
        self.own_seconds: dict[int, float] = {}  # processor time of texts in the latest round, forwards apart

    def __len__(self) -> int:
        """Number of texts in the batch."""
        return len(self._texts)

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._texts))

    def __getitem__(self, text: int) -> Generation:
        """A text in the batch, for its tokens and statistics so far. Do not iterate over it: `step` does."""
        return self._texts[text]

    def add(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> int:
        """Start a text in the next round; returns its number. Options and errors are those of `Engine.generate`."""
        return self.admit(Generation.start(self._model, self._drafter, prompt, params, **options))

    def resume(self, journal: str | Path, **options: Any) -> int:
        """Resume a journal's text; returns its number. Options and errors are those of `Engine.resume`."""
        return self.admit(Generation.resume(self._model, self._drafter, journal, **options))

    def admit(self, generation: Generation) -> int:
        """Add a generation that was not iterated over yet; returns its number. UsageError for anything else.

        It may belong to another engine. Texts of one model share forwards; texts of other models share only rounds.
        """
        is_open = isinstance(generation, Generation) and generation.finish_reason is None
        check(is_open and generation not in self._texts.values(), "generation", generation,
              "one that has not ended and is not in the batch", "engine.generate(...) begins one")
        number = next(self._numbers)
        self._texts[number] = generation
        return number

    def remove(self, text: int) -> Generation:
        """Stop a text and return it. Its events remain valid and its journal can be resumed.

        UsageError for an unknown number.
        """
        if text not in self._texts:
            known = ", ".join(map(str, self._texts)) or "none"
            raise UsageError(f"text {text} is not in the batch; there are: {known}")
        self._needs.pop(text, None)
        generation = self._texts.pop(text)
        generation.close()
        return generation

    def step(self, only: Iterable[int] | None = None) -> list[tuple[int, Event]]:
        """One round: its events, each with the number of its text. A round may give a text no event.

        only  the texts that take part; default: all

        A text's last event has a finish reason, or the error that ended it (no memory for it, a full disk for its
        journal, logits that are not finite). The text then leaves the batch, and all other texts continue.
        """
        events: list[tuple[int, Event]] = []
        self.own_seconds.clear()
        began = time.perf_counter()
        with kernels.single_threaded_torch(self._model.target.kernels):
            chosen = list(self._texts) if only is None else [text for text in only if text in self._texts]
            clocks = [self._texts[text].clock for text in chosen if not isinstance(self._needs.get(text), Waiting)]
            batch_size = max(1, len(clocks))
            charged = sum(clock.charged for clock in clocks)
            for text in chosen:
                if isinstance(self._needs.get(text), Waiting | None):
                    self._advance(text, None, batch_size, events)
            while launched := {text: work for text in chosen if isinstance(work := self._needs.get(text), Launched)}:
                self._read_launched(launched)
                for text in launched:
                    self._advance(text, None, batch_size, events)
            requests = {text: need for text in chosen if isinstance(need := self._needs.get(text), ForwardRequest)}
            texts = list(requests)
            results = run_batched(list(requests.values()), lambda indices, seconds: self._charge(
                {texts[index]: requests[texts[index]] for index in indices}, seconds))
            for text, result in zip(requests, results, strict=True):
                self._advance(text, result, batch_size, events)
        own = sum(clock.charged for clock in clocks) - charged
        for clock in clocks:  # the round's own work is a part of the step of each text
            clock.charge(max(0.0, time.perf_counter() - began - own) / len(clocks))
        return events

    def _read_launched(self, launched: dict[int, Launched]) -> None:
        """Wait once for the work of several texts. Each is charged an equal part of the time."""
        began = time.perf_counter()
        read_together(list(launched.values()))
        seconds = time.perf_counter() - began
        for clock in [self._texts[text].clock for text in launched]:
            clock.charge(seconds / len(launched))
            clock.together = len(launched)

    def _advance(self, text: int, result: Forward | Exception | None, batch_size: int,
                 events: list[tuple[int, Event]]) -> None:
        """Advance a text to the next forward that it needs, to work that it has launched, or to the end of a step.

        A text can be stopped at the end of a step, on all ranks that write it.
        """
        generation = self._texts[text]
        self._needs.pop(text, None)
        began = time.thread_time()
        try:
            outcome = generation.advance(result, batch_size)
            while isinstance(outcome, Event):
                events.append((text, outcome))
                if not generation.is_finished:
                    return
                outcome = generation.advance(batch_size=batch_size)
            self._needs[text] = outcome
        except StopIteration:
            self.remove(text)
        except Exception as error:  # ends this text only, as the error of its last event
            last = Event((), "", stats=_stats(generation))
            if events and events[-1][0] == text and events[-1][1].finish_reason:  # its journal could not be closed
                last = events.pop()[1]
            events.append((text, last._replace(finish_reason=None, error=error)))
            self.remove(text)
        self.own_seconds[text] = self.own_seconds.get(text, 0.0) + time.thread_time() - began

    def _charge(self, requests: dict[int, ForwardRequest], seconds: float) -> None:
        """Charge a forward's time to the texts it served: reading the weights in equal parts, the rest by rows.

        Forwards of smaller draft models are charged by rows.
        """
        shares: list[float] = [len(request.rows.tokens) for request in requests.values()]
        clocks = [self._texts[text].clock for text in requests]
        if next(iter(requests.values())).model.identity is self._model.target.identity:
            for clock in clocks:
                clock.sharers = len(requests)
            contexts = [request.cache.length for request in requests.values()]
            costs = self._model.knowledge_for(self._drafter).forward
            shares = costs.at(shares, contexts, len(shares), clocks[0].batch_size).tolist()
        total = sum(shares)
        for clock, share in zip(clocks, shares, strict=True):
            clock.charge(seconds * share / total)

    def close(self) -> None:
        """Stop all texts."""
        for text in self:
            self.remove(text)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _stats(generation: Generation) -> dict[str, Any] | None:
    """The statistics of a text that failed; None if these fail as well, which must not end other texts."""
    try:
        return generation.stats()
    except Exception:
        return None


def generate_many(model: LoadedModel, drafter: DrafterChoice, prompts: Iterator[Prompt],
                  params: SamplingParams | Sequence[SamplingParams] | None,
                  batch_size: int) -> Iterator[tuple[int, Event]]:
    """See `Engine.generate_many`."""
    indices: dict[int, int] = {}  # number in the batch -> index of the prompt
    waiting = enumerate(prompts)
    with Batch(model, drafter) as batch:
        while True:
            while len(batch) < batch_size and (item := next(waiting, None)):
                index, prompt = item
                if isinstance(params, Sequence) and index == len(params):
                    raise UsageError(f"params has {index} settings and there are more prompts; give one for each, or "
                                     "one for all")
                try:
                    number = batch.add(prompt, params[index] if isinstance(params, Sequence) else params)
                except (LongdraftError, MemoryError) as error:
                    yield index, Event((), "", error=error)
                    continue
                indices[number] = index
            if not batch:
                return
            for number, event in batch.step():
                is_last = event.finish_reason is not None or event.error is not None
                yield indices.pop(number) if is_last else indices[number], event
