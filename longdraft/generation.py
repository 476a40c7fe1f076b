"""One text being written, as an iterator of events: prefill, then the one loop, until the text ends or is stopped.

All of it is work that asks for forwards (longdraft/model/routine.py). Iterating does it alone; a batch
(longdraft/batching.py) does that of several texts side by side.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from longdraft import drafters, kernels, run_statistics
from longdraft.cache.full import FullCache
from longdraft.core import Context, Event, Finish, SamplingParams
from longdraft.drafters.corpus import Corpora
from longdraft.drafters.cost_model import SharedStatistics
from longdraft.errors import JournalError, translate_memory_errors
from longdraft.journal import Journal
from longdraft.loops import Foresight
from longdraft.model import sizing
from longdraft.model.glide import Glide
from longdraft.model.heads import Heads
from longdraft.model.routine import CostClock, Routine, run_batched
from longdraft.model.tokenizer import Tokenizer
from longdraft.model.transformer import Forward, ForwardRequest, Transformer, chain_rows, tree_rows
from longdraft.parallel import Request, SingleProcess
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Accepted, Counts, Drafter, Verified, memory_of
from longdraft.speculation.recorder import Recorder
from longdraft.speculation.step import Step, Tally, Timings
from longdraft.text_stream import TextStream, Written
from longdraft.tree import root_only
from longdraft.version import __version__

log = logging.getLogger(__name__)
PREFILL_CHUNK = 512  # prompt tokens in one forward; on the CPU any number gives the same text
PREFILL_SHARED = 64  # ... while others write in the same forwards: they wait for each
WRITTEN_CHUNK = 128  # on a device, of tokens that were written before, when a text is resumed
LARGEST_TREE = 1024  # rows behind the text for which a reserved cache has room
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
    shared_statistics: SharedStatistics
    draft: Transformer | None
    team: SingleProcess


class Generation(Iterator[Event]):
    """One text being written: an iterator of events that can be closed and asked for its statistics.

    on_step  told of each step and of the seconds it took; set it to watch
    """

    def __init__(self, engine: Means, prompt: list[int], params: SamplingParams,
                 on_prefill: Callable[[int, int], None] | None = None,
                 written: Sequence[int] | NDArray[np.int32] = (), is_pure: bool = True,
                 logprobs: int | None = None, sampler_of: Callable[..., Sampler] = Sampler) -> None:
        """written: tokens that are there already; is_pure: they and the rest are of one arithmetic; logprobs: tell
        each token's log-probability, and those of so many of the likeliest; sampler_of: who makes the sampler, as
        `Sampler` does."""
        self.on_step: Callable[[Accepted, float], None] | None = None
        self._engine = engine
        self._params = params
        self._on_prefill = on_prefill
        self._journal: Journal | None = None
        self._is_pure = is_pure
        self.num_resumed = len(written)
        self.is_closed = False
        length = len(prompt) + params.max_new_tokens
        model = engine.model.for_length(length)
        window = engine.options.draft_window or length
        draft = engine.draft and engine.draft.for_length(min(length, window, engine.draft.config.max_positions))
        self._text_stream = TextStream(engine.tokenizer, params, model.config.eos_token_ids)
        self._cache = cache = model.new_cache()
        if model.kernels.is_device:
            _reserve(model, cache, length)
        stop_ids, is_fast = self._text_stream.stop_ids, model.kernels.name != kernels.REFERENCE
        # Another law than ours is decided on the host.
        sampler = (Sampler(params, stop_ids, is_fast, model.kernels) if sampler_of is Sampler
                   else sampler_of(params, stop_ids, is_fast))
        self._recorder = None if logprobs is None else Recorder(params, stop_ids, is_fast, logprobs)
        clock = CostClock(agree=engine.team.agree)
        resources = drafters.Resources(model, cache, sampler, params, engine.heads, engine.glide, engine.corpora,
                                       draft, clock=clock, shared_statistics=engine.shared_statistics)
        drafter: Drafter = drafters.new_drafter(engine.drafter, engine.options, resources)
        context = Context(prompt)
        context.extend(int(token) for token in written)
        self._step = Step(model, cache, drafter, self._recorder or sampler, context, Timings(), Tally())
        self.clock = clock
        self._accepted = 0
        self._foresight = Foresight()
        self._plain_speed = run_statistics.PlainSpeed(model.weights_in_tokens)
        self._prefill_seconds = 0.0
        self._decode_seconds = 0.0
        self._work = self._run()

    def write_to(self, journal: Journal) -> None:
        """Every token goes there before it is given; for a text that nobody has begun to iterate over. Closes it."""
        self._journal = journal

    def __next__(self) -> Event:
        """Go on, alone, up to the next event."""
        with kernels.single_threaded_torch(self._engine.model.kernels):
            done = self.go_on()
            while isinstance(done, ForwardRequest):
                try:
                    answer, = run_batched([done], lambda places, seconds: self.clock.charge(seconds))
                except BaseException:  # interrupted
                    self._work.close()
                    raise
                done = self.go_on(answer)
        return done

    def go_on(self, answer: Forward | Exception | None = None) -> ForwardRequest | Event:
        """Go on up to the next event, or the next forward that it takes: to be called again with the answer to that.

        answer  the forward that was asked for, or why there is none, which ends the text

        Raises StopIteration behind the last event, and whatever ends the text on the way.
        """
        self.clock.start()
        try:
            return self._work.throw(answer) if isinstance(answer, Exception) else self._work.send(answer)
        finally:
            self.clock.stop()

    def close(self) -> None:
        """Stop the work. What was given so far stands, and a journal can be resumed."""
        self._work.close()
        self.is_closed = True
        if self._journal:
            self._journal.close()

    @property
    def params(self) -> SamplingParams:
        """The settings in use, the seed among them."""
        return self._params

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        return [int(token) for token in self._step.context.slice(0, self._step.context.prompt_length)]

    @property
    def decode_seconds(self) -> float:
        """Time of this text's own steps so far."""
        return self._decode_seconds

    def time_plain(self) -> float:
        """Seconds that plain decoding would take for the next token: a forward of the root alone, tried now, and what
        else a step of this text takes besides drafting and verifying. Changes nothing: the row is dropped."""
        model, cache, context = self._step.model, self._step.cache, self._step.context
        start = time.perf_counter()
        with kernels.single_threaded_torch(self._engine.model.kernels):
            model.forward(tree_rows(root_only(context.last), len(context) - 1), cache, 1)
        seconds = time.perf_counter() - start
        cache.commit(())
        timings, steps = self._step.timings, self._step.tally.steps
        besides = self._decode_seconds - timings.draft - timings.verify
        return seconds + (max(0.0, besides) / steps if steps else 0.0)

    @property
    def finish_reason(self) -> Finish | None:
        """Why the text ended; None while it has not."""
        return self._text_stream.finish_reason or ("cancelled" if self.is_closed else None)

    @property
    def is_finished(self) -> bool:
        """Whether the text came to its own end."""
        return self._text_stream.finish_reason is not None

    @property
    def held_text(self) -> str:
        """Text of the last tokens that was held back: the possible beginning of a stop text, or of a character."""
        return self._text_stream.rest()

    @property
    def distinct(self) -> float | None:
        """Distinct 4-grams over 4-grams of the latest tokens; None with on_loop off."""
        return self._text_stream.distinct

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
        return self._step.context.slice(start, start + self._text_stream.num_tokens)

    def _run(self) -> Generator[ForwardRequest | Event, Forward | None, None]:
        team, context = self._engine.team, self._step.context
        try:
            written = context.slice(context.prompt_length, len(context))
            team.begin(Request(context.slice(0, context.prompt_length), self._params, written))
            try:  # a text that may not begin must not end the one that others are at
                with translate_memory_errors():
                    yield from self._replay()
                    if not self.is_finished:
                        yield from self._prefill()
                    while not self.is_finished:
                        yield (yield from self._advance())
            finally:
                team.end(is_finished=self.is_finished)
        finally:
            if self._journal:
                self._journal.close()

    def _replay(self) -> Iterator[Event]:
        """What was written before, as one event."""
        if self.num_resumed:
            start = self._step.context.prompt_length
            written = self._step.context.slice(start, start + self.num_resumed).tolist()
            new = self._text_stream.push(written)
            if len(new.tokens) < len(written):
                raise JournalError("the journal holds tokens behind the text's end; it cannot be used")
            yield self._event(new)._replace(sources=("",) * len(new.tokens))

    def _advance(self) -> Routine[Event]:
        """One step, in the journal before anybody sees it."""
        start, writing, drafting = time.perf_counter(), self._text_stream, self._step.timings.draft
        with self._engine.team.unit(self._step.context):
            accepted = yield from self._step.run(self._params.max_new_tokens - writing.num_tokens)
        had_loop = writing.loop is not None
        new = writing.push(accepted.tokens)
        if behind := len(accepted.tokens) - len(new.tokens):
            self._step.uncount(accepted, behind)
        self._accepted += min(len(new.tokens), len(accepted.sources))
        self._foresight.push(len(accepted.sources), accepted.depth)
        seconds = time.perf_counter() - start
        self._decode_seconds += seconds
        if self.clock.texts == 1:  # the seconds of a step that other texts share are not this text's
            self._plain_speed.add(accepted.drafted + 1, len(self._step.context), len(new.tokens),
                                  seconds - (self._step.timings.draft - drafting))
        if self._journal:
            self._journal.append(new.tokens, accepted.drafted, seconds)
        if self.on_step:
            self.on_step(accepted, seconds)
        if writing.loop and not had_loop:
            sure = ", and nearly every draft is right to its end" if self._foresight.is_stuck else ""
            log.warning("%s%s; a repetition penalty or a higher temperature helps, on_loop=stop ends such a text",
                        writing.loop, sure)
        count = len(new.tokens)
        told = tuple(self._recorder.last[:count]) if self._recorder else ()
        return self._event(new)._replace(sources=(*accepted.sources, "")[:count], drafted=accepted.drafted,
                                         depth=accepted.depth, logprobs=told)

    def _event(self, new: Written) -> Event:
        reason = self._text_stream.finish_reason
        if reason and self._journal:
            self._journal.finish(reason)
        return Event(new.tokens, new.text, reason, self.stats() if reason else None, pieces=new.pieces)

    def _prefill(self) -> Routine[None]:
        """All of the text but its last token, which is the first root."""
        began = time.perf_counter()
        step = self._step
        last = len(step.context) - 1
        verified: Verified | None = None
        while step.cache.length < last:
            start = step.cache.length
            end, is_prompt = self._chunk(start, last)
            chunk = step.context.slice(start, end).tolist()
            with self._engine.team.unit(step.context):
                result = yield ForwardRequest(step.model, chain_rows(chunk, start), step.cache, is_prompt=is_prompt)
            step.cache.commit(range(len(chunk)))
            verified = Verified(result, range(max(0, len(chunk) - _QUERY_ROWS), len(chunk)))
            if self._on_prefill:
                self._on_prefill(start + len(chunk), last)
        step.drafter.begin(step.context, verified)
        self._prefill_seconds = time.perf_counter() - began

    def _chunk(self, start: int, last: int) -> tuple[int, bool]:
        """Where the chunk that begins at `start` ends, and whether it is the prompt's.

        On a device a prompt's chunks are of one size. Its last token and what was written were computed by steps in
        the uncut run, and are so again: as rows of verification, which do not depend on one another.
        """
        if not self._step.model.kernels.is_device:
            return min(start + (PREFILL_CHUNK if self.clock.texts == 1 else PREFILL_SHARED), last), True
        prompt = min(self._step.context.prompt_length - 1, last)
        if start < prompt:
            return min(start + PREFILL_CHUNK, prompt), True
        return min(start + WRITTEN_CHUNK, last), False

    def stats(self) -> dict[str, Any]:
        """The statistics so far, under the names of the `--stats` file."""
        engine, step, model = self._engine, self._step, self._engine.model
        writing, loop = self._text_stream, self._text_stream.loop
        is_exact = model.kernels.is_row_invariant and self._is_pure
        return {
            "prompt_tokens": step.context.prompt_length,
            "sha256_prompt": run_statistics.sha256_tokens(step.context.slice(0, step.context.prompt_length)),
            "new_tokens": writing.num_tokens,
            "resumed_tokens": self.num_resumed,
            "finish_reason": self.finish_reason,
            "seed": self._params.seed,
            "prefill_seconds": self._prefill_seconds,
            **run_statistics.of_steps(writing.num_tokens - self.num_resumed, self._accepted, self._decode_seconds,
                                  step.tally, step.timings),
            **self._plain_speed.figures(),
            **run_statistics.of_tokens(self.tokens),
            "recent_distinct_4": writing.distinct,
            "loop": loop and loop._asdict(),
            "exactness": "bit-exact" if is_exact else "distribution",
            "kernels": model.kernels.name,
            "device": str(model.kernels.device),
            "dtype": str(model.kernels.dtype).removeprefix("torch."),
            "quantize": model.weights.quantize,
            "threads": kernels.threads(model.kernels),
            "peak_memory_bytes": run_statistics.peak_memory_bytes(),
            "cache_bytes": self.cache_bytes,
            "drafter_memory_bytes": self.drafter_bytes,
            "model": engine.name,
            "drafter": engine.drafter,
            "drafter_options": asdict(engine.options),
            **(step.drafter.summary() if isinstance(step.drafter, Counts) else {}),
            "sampling": asdict(self._params),
            "longdraft_version": __version__,
            "torch_version": str(torch.__version__),
        }


def _reserve(model: Transformer, cache: FullCache, length: int) -> None:
    """The whole cache of a text of `length` tokens, or a MemoryError that says what would fit."""
    per_token, free = model.cache_bytes_per_token, model.kernels.free_bytes()
    wanted = length + LARGEST_TREE  # rows behind the text
    fits = wanted if free is None else int(free * sizing.USABLE) // per_token
    if fits < wanted:
        small = "" if model.kernels.name.endswith("-fp8") else f", {kernels.VARIABLE}={model.kernels.name}-fp8"
        raise MemoryError(f"the cache of {length} tokens takes {wanted * per_token / 2**30:.1f} GiB, and "
                          f"{(free or 0) / 2**30:.1f} GiB of {model.kernels.device} are free; "
                          f"{max(0, fits - LARGEST_TREE)} tokens would fit, prompt and new ones together; write "
                          f"fewer, or take --quantize int8{small}")
    with translate_memory_errors():
        cache.reserve(wanted)
