"""Several texts written side by side: each round, one forward for all that they ask for.

    batch = engine.batch()
    first, second = batch.add("It was", params), batch.add("Once upon", params)
    while batch:
        for text, event in batch.step():
            print(text, event.text)

A round answers what every text asks next: a draft of one, a verification of another, a piece of a third one's prompt
are rows of one forward, which reads the weights once. Texts come and go between rounds. Nothing a text is made of
depends on another (no row does), so it is the text that it would be alone, to the bit; what it shares is time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from longdraft import kernels
from longdraft.core import Event, Prompt, SamplingParams
from longdraft.drafters.cost_model import ForwardCost
from longdraft.errors import LongdraftError, UsageError
from longdraft.generation import PREFILL_SHARED, Generation
from longdraft.model.routine import run_batched
from longdraft.model.transformer import Forward, ForwardRequest, Transformer


class Opens(Protocol):
    """What a batch needs of an engine."""

    @property
    def model(self) -> Transformer: ...

    @property
    def generate(self) -> Callable[..., Generation]: ...

    @property
    def resume(self) -> Callable[..., Generation]: ...


class Batch:
    """Texts under way, by numbers that `add` gives. Close it, or use it in a `with`, to stop all that is left."""

    def __init__(self, engine: Opens) -> None:
        self._engine = engine
        self._texts: dict[int, Generation] = {}
        self._asks: dict[int, ForwardRequest] = {}  # what each waits for; none: it is between two steps, or has not begun
        self._numbers = count()
        self._cost = ForwardCost(engine.model.weights_in_tokens)

    def __len__(self) -> int:
        """Texts under way."""
        return len(self._texts)

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._texts))

    def __getitem__(self, text: int) -> Generation:
        """A text under way, for its tokens and statistics so far. Iterating over it is the batch's business."""
        return self._texts[text]

    def add(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> int:
        """Begin a text with the next round; its number. Options and errors are those of `Engine.generate`."""
        return self.admit(self._engine.generate(prompt, params, **options))

    def resume(self, journal: str | Path, **options: Any) -> int:
        """Go on with a journal's text; its number. Options and errors are those of `Engine.resume`."""
        return self.admit(self._engine.resume(journal, **options))

    def admit(self, generation: Generation) -> int:
        """Write this text, which nobody has begun to iterate over, with the others; its number.

        It may be of another engine: texts whose models are one share their forwards, the others only the rounds.
        """
        number = next(self._numbers)
        self._texts[number] = generation
        return number

    def remove(self, text: int) -> Generation:
        """Stop a text. What it gave so far stands, and its journal can be resumed. UsageError for an unknown number."""
        if text not in self._texts:
            there = ", ".join(map(str, self._texts)) or "none"
            raise UsageError(f"text {text} is not in the batch; there are: {there}")
        self._asks.pop(text, None)
        generation = self._texts.pop(text)
        generation.close()
        return generation

    def step(self, only: Iterable[int] | None = None) -> list[tuple[int, Event]]:
        """One round: the events that it brought, each with its text's number; a text may have none yet.

        only  texts that go on; the others stand by (whose reader is slow, say)

        A text's last event has a finish reason, or the error that cut it (no memory for it, a full disk for its
        journal, logits that are not numbers), and the text leaves the batch. The others go on.
        """
        events: list[tuple[int, Event]] = []
        with kernels.single_threaded_torch(self._engine.model.kernels):
            chosen = list(self._texts) if only is None else [text for text in only if text in self._texts]
            for text in chosen:
                self._texts[text].clock.texts = len(chosen)
            for text in chosen:
                if text not in self._asks:
                    self._go_on(text, None, events)
            asking = {text: self._asks[text] for text in chosen if text in self._asks}
            texts = list(asking)
            found = run_batched(list(asking.values()), lambda places, seconds: self._charge(
                {texts[place]: asking[texts[place]] for place in places}, seconds))
            for text, answer in zip(asking, found, strict=True):
                self._go_on(text, answer, events)
        return events

    def _go_on(self, text: int, answer: Forward | Exception | None, events: list[tuple[int, Event]]) -> None:
        """Up to what it asks for next, or the end of a step: there it can be stopped, on all ranks that write it."""
        generation = self._texts[text]
        self._asks.pop(text, None)
        try:
            done = generation.go_on(answer)
            while isinstance(done, Event):
                events.append((text, done))
                if not generation.is_finished:
                    return
                done = generation.go_on()
            self._asks[text] = done
        except StopIteration:
            self.remove(text)
        except Exception as error:  # ends this text only, and is told in its place
            last = Event((), "", stats=generation.stats())
            if events and events[-1][0] == text and events[-1][1].finish_reason:  # its journal could not be closed
                last = events.pop()[1]
            events.append((text, last._replace(finish_reason=None, error=error)))
            self.remove(text)

    def _charge(self, asking: dict[int, ForwardRequest], seconds: float) -> None:
        """A forward's time to those that it served, who ask one model: the weights' part to all alike, the rest to whom
        the rows are.

        Smaller models' forwards are shared by the rows, and teach nothing of what this model's cost.
        """
        parts = [(len(ask.rows.tokens), ask.cache.length) for ask in asking.values()]
        is_ours = next(iter(asking.values())).model.identity is self._engine.model.identity
        if is_ours and max(rows for rows, _ in parts) < PREFILL_SHARED:
            self._cost.add(parts, seconds)
        shares = [self._cost.at(rows, context, len(parts)) if is_ours else rows for rows, context in parts]
        for text, share in zip(asking, shares, strict=True):
            self._texts[text].clock.charge(seconds * share / sum(shares) if sum(shares) else seconds / len(shares))

    def close(self) -> None:
        """Stop all texts."""
        for text in self:
            self.remove(text)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def generate_many(engine: Opens, prompts: Iterator[Prompt], params: SamplingParams | Sequence[SamplingParams] | None,
                  batch_size: int) -> Iterator[tuple[int, Event]]:
    """See `Engine.generate_many`."""
    places: dict[int, int] = {}  # of texts under way: number in the batch -> place among the prompts
    waiting = enumerate(prompts)
    with Batch(engine) as batch:
        while True:
            while len(batch) < batch_size and (found := next(waiting, None)):
                place, prompt = found
                if isinstance(params, Sequence) and place == len(params):
                    raise UsageError(f"params has {place} settings and there are more prompts; give one for each, or "
                                     "one for all")
                try:
                    number = batch.add(prompt, params[place] if isinstance(params, Sequence) else params)
                except (LongdraftError, MemoryError) as error:
                    yield place, Event((), "", error=error)
                    continue
                places[number] = place
            if not batch:
                return
            for number, event in batch.step():
                is_last = event.finish_reason is not None or event.error is not None
                yield places.pop(number) if is_last else places[number], event
