"""One text being written, as an iterator of events: prefill, then the one loop, until the text ends or is stopped."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from longdraft import drafters, kernels, statistics
from longdraft.cache.full import FullCache
from longdraft.core import Context, Event, Finish, SamplingParams
from longdraft.drafters.auto import AutoDrafter
from longdraft.drafters.corpus import Corpora
from longdraft.errors import JournalError
from longdraft.journal import Journal
from longdraft.loops import Foresight
from longdraft.model import sizing
from longdraft.model.glide import Glide
from longdraft.model.heads import Heads
from longdraft.model.tokenizer import Tokenizer
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Drafter, Verified, memory_of
from longdraft.speculation.step import Step, Tally, Timings
from longdraft.version import __version__
from longdraft.writing import Writing

log = logging.getLogger(__name__)
PREFILL_CHUNK = 512  # prompt tokens in one forward; on the CPU any number gives the same text
WRITTEN_CHUNK = 128  # of tokens that were written before, when a text is resumed; any number gives the same text
_LARGEST_TREE = 1024  # rows behind the text for which a reserved cache has room
_QUERY_ROWS = 128  # last prompt rows that drafters are told of


class Means(Protocol):
    """What a generation needs of an engine."""

    name: str
    model: Transformer
    tokenizer: Tokenizer
    drafter: str
    options: Any
    heads: Heads | None
    glide: Glide | None
    corpora: Corpora
    draft: Transformer | None


class Generation(Iterator[Event]):
    """One text being written: an iterator of events that can be closed and asked for its statistics."""

    def __init__(self, engine: Means, prompt: list[int], params: SamplingParams,
                 on_prefill: Callable[[int, int], None] | None, journal: Journal | None = None,
                 written: Sequence[int] | NDArray[np.int32] = (), is_pure: bool = True) -> None:
        """written: tokens that are there already; is_pure: they and the rest are of one arithmetic."""
        self._engine = engine
        self._params = params
        self._on_prefill = on_prefill
        self._journal = journal
        self._is_pure = is_pure
        self.num_resumed = len(written)
        self.is_closed = False
        length = len(prompt) + params.max_new_tokens
        model = engine.model.for_length(length)
        reads = getattr(engine.options, "reads", 0) or length  # of drafters that have a model of their own
        draft = engine.draft and engine.draft.for_length(min(length, reads, engine.draft.config.max_positions))
        self._writing = Writing(engine.tokenizer, params, model.config.eos_token_ids)
        self._cache = cache = model.new_cache()
        if model.kernels.reserves:
            _reserve(model, cache, length)
        sampler = Sampler(params, self._writing.stop_ids, is_fast=model.kernels.name != kernels.REFERENCE,
                          kernels=model.kernels)
        resources = drafters.Resources(model, cache, sampler, params, engine.heads, engine.glide, engine.corpora,
                                       draft)
        drafter: Drafter = drafters.KINDS[engine.drafter].build(engine.options, resources)
        context = Context(prompt)
        context.extend(int(token) for token in written)
        self._step = Step(model, cache, drafter, sampler, context, Timings(), Tally())
        self._accepted = 0
        self._foresight = Foresight()
        self._prefill_seconds = 0.0
        self._decode_seconds = 0.0
        self._events = self._run()

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        """Stop the work. What was given so far stands, and a journal can be resumed."""
        self._events.close()
        self.is_closed = True
        if self._journal:
            self._journal.close()

    @property
    def finish_reason(self) -> Finish | None:
        """Why the text ended; None while it has not."""
        return self._writing.finish_reason or ("cancelled" if self.is_closed else None)

    @property
    def is_finished(self) -> bool:
        """Whether the text came to its own end."""
        return self._writing.finish_reason is not None

    @property
    def held_text(self) -> str:
        """Text of the last tokens that was held back: the possible beginning of a stop text, or of a character."""
        return self._writing.rest()

    @property
    def distinct(self) -> float | None:
        """Distinct 4-grams over 4-grams of the latest tokens; None with on_loop off."""
        return self._writing.distinct

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache, which grows with the text."""
        return self._cache.nbytes

    @property
    def drafter_bytes(self) -> int:
        """Bytes of the drafter's own caches."""
        return memory_of(self._step.drafter)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The new token ids so far."""
        start = self._step.context.prompt_length
        return self._step.context.slice(start, start + self._writing.num_tokens)

    def _run(self) -> Generator[Event, None, None]:
        try:
            with _memory_told():
                yield from self._replay()
                if not self.is_finished:
                    self._prefill()
                while not self.is_finished:
                    yield self._advance()
        finally:
            if self._journal:
                self._journal.close()

    def _replay(self) -> Iterator[Event]:
        """What was written before, as one event."""
        if self.num_resumed:
            start = self._step.context.prompt_length
            written = self._step.context.slice(start, start + self.num_resumed).tolist()
            tokens, text = self._writing.push(written)
            if len(tokens) < len(written):
                raise JournalError("the journal holds tokens behind the text's end; it cannot be used")
            yield self._event(tokens, text)

    def _advance(self) -> Event:
        """One step, in the journal before anybody sees it."""
        start, writing = time.perf_counter(), self._writing
        with kernels.alone(self._engine.model.kernels):
            accepted = self._step.run(self._params.max_new_tokens - writing.num_tokens)
        had_loop = writing.loop is not None
        tokens, text = writing.push(accepted.tokens)
        self._accepted += min(len(tokens), len(accepted.sources))
        self._foresight.push(len(accepted.sources), accepted.depth)
        seconds = time.perf_counter() - start
        self._decode_seconds += seconds
        if self._journal:
            self._journal.append(tokens, accepted.drafted, seconds)
        if writing.loop and not had_loop:
            sure = ", and nearly every draft is right to its end" if self._foresight.is_stuck else ""
            log.warning("%s%s; a repetition penalty or a higher temperature helps, on_loop=stop ends such a text",
                        writing.loop, sure)
        return self._event(tokens, text)

    def _event(self, tokens: tuple[int, ...], text: str) -> Event:
        reason = self._writing.finish_reason
        if reason and self._journal:
            self._journal.finish(reason)
        return Event(tokens, text, reason, self.stats() if reason else None)

    def _prefill(self) -> None:
        """All of the text but its last token, which is the first root."""
        began = time.perf_counter()
        step = self._step
        last = len(step.context) - 1
        verified: Verified | None = None
        with kernels.alone(self._engine.model.kernels):
            for start, end, is_prompt in self._chunks(last):
                chunk = step.context.slice(start, end).tolist()
                result = step.model.forward(chain_rows(chunk, start), step.cache, is_prompt)
                step.cache.commit(range(len(chunk)))
                verified = Verified(result, range(max(0, len(chunk) - _QUERY_ROWS), len(chunk)))
                if self._on_prefill:
                    self._on_prefill(start + len(chunk), last)
            step.drafter.begin(step.context, verified)
        self._prefill_seconds = time.perf_counter() - began

    def _chunks(self, last: int) -> Iterator[tuple[int, int, bool]]:
        """Where the chunks of [0, last) begin and end, and whether they are the prompt's.

        The prompt's last token and what was written were computed by steps in the uncut run, and are so again: as
        rows of verification, which do not depend on one another.
        """
        prompt = min(self._step.context.prompt_length - 1, last)
        for start in range(0, prompt, PREFILL_CHUNK):
            yield start, min(start + PREFILL_CHUNK, prompt), True
        for start in range(prompt, last, WRITTEN_CHUNK):
            yield start, min(start + WRITTEN_CHUNK, last), False

    def stats(self) -> dict[str, Any]:
        """The statistics so far, under the names of the `--stats` file."""
        engine, step, model = self._engine, self._step, self._engine.model
        writing, loop = self._writing, self._writing.loop
        is_exact = model.kernels.is_row_invariant and self._is_pure
        return {
            "prompt_tokens": step.context.prompt_length,
            "sha256_prompt": statistics.sha256_tokens(step.context.slice(0, step.context.prompt_length)),
            "new_tokens": writing.num_tokens,
            "resumed_tokens": self.num_resumed,
            "finish_reason": self.finish_reason,
            "seed": self._params.seed,
            "prefill_seconds": self._prefill_seconds,
            **statistics.of_steps(writing.num_tokens - self.num_resumed, self._accepted, self._decode_seconds,
                                  step.tally, step.timings),
            **statistics.of_tokens(self.tokens),
            "recent_distinct_4": writing.distinct,
            "loop": loop and loop._asdict(),
            "exactness": "bit-exact" if is_exact else "distribution",
            "kernels": model.kernels.name,
            "device": str(model.kernels.device),
            "dtype": str(model.kernels.dtype).removeprefix("torch."),
            "quantize": model.weights.quantize,
            "threads": kernels.threads(model.kernels),
            "peak_memory_bytes": statistics.peak_memory_bytes(),
            "cache_bytes": self.cache_bytes,
            "drafter_memory_bytes": self.drafter_bytes,
            "model": engine.name,
            "drafter": engine.drafter,
            "drafter_options": asdict(engine.options),
            **(step.drafter.summary() if isinstance(step.drafter, AutoDrafter) else {}),
            "sampling": asdict(self._params),
            "longdraft_version": __version__,
            "torch_version": str(torch.__version__),
        }


def _reserve(model: Transformer, cache: FullCache, length: int) -> None:
    """The whole cache of a text of `length` tokens, or a MemoryError that says what would fit."""
    per_token, free = model.cache_bytes_per_token, model.kernels.free_bytes()
    wanted = length + _LARGEST_TREE  # rows behind the text
    fits = wanted if free is None else int(free * sizing.USABLE) // per_token
    if fits < wanted:
        small = "" if model.kernels.name.endswith("-fp8") else f", {kernels.VARIABLE}={model.kernels.name}-fp8"
        raise MemoryError(f"the cache of {length} tokens takes {wanted * per_token / 2**30:.1f} GiB, and "
                          f"{(free or 0) / 2**30:.1f} GiB of {model.kernels.device} are free; "
                          f"{max(0, fits - _LARGEST_TREE)} tokens would fit, prompt and new ones together; write "
                          f"fewer, or take --quantize int8{small}")
    with _memory_told():
        cache.reserve(wanted)


@contextmanager
def _memory_told() -> Iterator[None]:
    """Whoever ran out of memory, it is a MemoryError."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error) for sign in ("can't allocate memory", "not enough memory", "out of memory")):
            raise MemoryError(str(error).splitlines()[0]) from error
        raise
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(str(error)) from error
        raise
