"""One request: prefill, then one step after the other (speculation/step.py), until the text ends or is stopped.

    a token is drafted   by the drafter's `propose`              longdraft/drafters/
    a token is chosen    by the target's sampler, in the step    longdraft/sampling/sampler.py
    a token is written   in `Generation._advance`: to the text, to the journal, to the event that the caller gets

A generation yields the forwards that it needs (longdraft/speculation/routine.py). Iterating over it runs each of them
alone; a batch (longdraft/engine/batching.py) runs the forwards of several generations together.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from longdraft import drafters, kernels
from longdraft.checkpoint import memory_plan
from longdraft.drafters.plain import PlainDrafter
from longdraft.engine.loaded_model import DrafterChoice, LoadedModel
from longdraft.engine.provenance import create_journal, open_for_resume
from longdraft.engine.rewind import settle
from longdraft.engine.run_statistics import RunStatistics
from longdraft.engine.thinking import closed_here, new_phrase_filter, new_sampler, require_closable
from longdraft.errors import OutputError, translate_memory_errors
from longdraft.journal.format import Closing
from longdraft.journal.snapshot import Snapshot
from longdraft.journal.snapshot_folder import SnapshotOptions
from longdraft.journal.writer import Journal, parse_fsync
from longdraft.kernels.launched import Launched
from longdraft.model.transformer import Forward, ForwardRequest
from longdraft.parallel import Request
from longdraft.request.context import Context, Prompt
from longdraft.request.events import Event, Finish, TokenLogprob
from longdraft.request.loops import FullAcceptance
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.settings import Range
from longdraft.sampling.sampler import Sampler
from longdraft.sampling.thinking_sampler import ThinkingSampler
from longdraft.sampling.thought import INSIDE, Thought
from longdraft.speculation.ahead import PlainAhead
from longdraft.speculation.cost_clock import CostClock
from longdraft.speculation.drafter import Drafter
from longdraft.speculation.logprobs import text_logprobs
from longdraft.speculation.prefill import prefill
from longdraft.speculation.reuse import WAITING, PrefixReuse, Waiting
from longdraft.speculation.routine import Routine, run_batched
from longdraft.speculation.step import Step, Tally, Timings
from longdraft.system.files import named_folder
from longdraft.text.stream import DecodedTokens, TextStream, stop_ids

log = logging.getLogger(__name__)


class Generation(Iterator[Event]):
    """One text being written: an iterator of events that can be closed and asked for its statistics.

    params  the settings in use, with the seed
    step    the parts of its next step: context, cache, drafter, sampler
    stream  its decoded text
    reuse   its use of the prefix tree
    clock   measures its own cost
    statistics  what it counts
    """

    def __init__(self, model: LoadedModel, drafter: DrafterChoice, prompt: list[int], params: SamplingParams, *,
                 on_prefill: Callable[[int, int], None] | None = None,
                 written: Sequence[int] | NDArray[np.int32] = (), is_pure: bool = True,
                 logprobs: int | None = None, prompt_logprobs: int | None = None,
                 sampler: Sampler | None = None, cache_salt: str | None = "") -> None:
        """A request whose prompt and settings are checked already; see `start` and `resume`.

        written   new tokens of earlier runs
        is_pure   whether those runs had this one's arithmetic
        logprobs  likeliest tokens to report beside each token; None: no log-probabilities
        sampler   chooses the target's tokens; default: the sampler of `params`
        prompt_logprobs, cache_salt  see `Engine.generate`
        """
        self.model, self.choice, self.params = model, drafter, params
        self._on_prefill = on_prefill
        self._journal: Journal | None = None
        self.on_journal_error: Callable[[OutputError], None] | None = None  # then the text goes on without a journal
        self.num_resumed = len(written)
        self.is_closed = False
        length = len(prompt) + params.max_new_tokens
        target, draft = model.target_for(length, drafter), model.draft_for(length, drafter)
        rules = model.thought_rules(params, prompt)
        thought = Thought(rules) if rules else None
        self.stream = TextStream(model.tokenizer, params, target.config.eos_token_ids, thought)
        cache = target.new_cache()
        if target.kernels.is_device:
            memory_plan.reserve_cache(target, cache, length)
        ends = stop_ids(params, target.config.eos_token_ids)
        sampler = sampler or new_sampler(model, target, params, prompt, rules)
        self.clock = CostClock(agree=model.ranks.agree)
        draft_copy = model.draft_copy_for(length, drafter)
        self._resources = drafters.Resources(
            target, cache, sampler, params, model.heads, model.glide, model.corpora, draft, clock=self.clock,
            knowledge=model.knowledge_for(drafter), draft_copy=draft_copy, eagle=model.eagle, block=model.block)
        context = Context(prompt)
        context.extend(int(token) for token in written)
        drafts = drafter.name != "plain"
        has_rules = isinstance(sampler, ThinkingSampler)
        # A ranker of a text under rules may guess wrong beyond its thought.
        ahead = None if has_rules or logprobs is not None else PlainAhead(target, cache, sampler, self.clock)
        self.step = Step(target, cache, self._new_drafter(sampler), sampler, context, Timings(), Tally(), logprobs,
                         drafts and (bool(params.structured_outputs) or has_rules), ahead)
        self.phrases = new_phrase_filter(model.tokenizer, params, context, ends, rules)
        if self.phrases and cache.states:
            cache.states.hold(len(context) - 1)
        scores = prompt_logprobs is not None  # of all rows, so that they are all computed
        self.reuse = PrefixReuse(model.prefixes, None if scores else cache_salt, target, cache, context)
        self._num_prompt_logprobs = prompt_logprobs
        self._prompt_logprobs = [TokenLogprob(prompt[0], None)] if scores else []
        self._full_acceptance = FullAcceptance()
        self.statistics = RunStatistics(model, drafter, params, draft_copy, self.num_resumed, is_pure)
        self._is_asked_to_answer = False
        self._work = self._run()
        self._is_asked_to_close = False

    @classmethod
    @translate_memory_errors()
    def start(cls, model: LoadedModel, drafter: DrafterChoice, prompt: Prompt, params: SamplingParams | None = None, *,
              journal: str | Path | None = None, fsync: str | float = 1.0,
              on_prefill: Callable[[int, int], None] | None = None, logprobs: int | None = None,
              prompt_logprobs: int | None = None, cache_salt: str | None = "",
              snapshot: str = "auto", snapshot_max: float = 8.0) -> Generation:
        """A new text. See `Engine.generate`."""
        snapshot_options = SnapshotOptions.parse(snapshot, snapshot_max)
        params = model.settings(params)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        ids = model.encode(prompt)
        params = model.completed(params, ids).with_seed(seed)
        model.check_request(ids, params)
        interval, folder = parse_fsync(fsync), None if journal is None else named_folder(journal)
        for name, number in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
            if number is not None:
                Range(0, model.target.config.vocab_size).require(name, number)
        generation = cls(model, drafter, ids, params, on_prefill=on_prefill, logprobs=logprobs,
                         prompt_logprobs=prompt_logprobs, cache_salt=cache_salt)
        if folder is not None:  # created last, so that a request that is refused leaves none
            opened = generation._open_snapshot(folder, snapshot_options)
            generation._journal = create_journal(model, drafter, ids, params, folder, interval)
            generation._journal.snapshot = opened
        return generation

    @classmethod
    @translate_memory_errors()
    def resume(cls, model: LoadedModel, drafter: DrafterChoice, journal: str | Path, *, fsync: str | float = 1.0,
               allow_different_kernels: bool = False, on_prefill: Callable[[int, int], None] | None = None,
               cache_salt: str | None = "", snapshot: str = "auto", snapshot_max: float = 8.0) -> Generation:
        """The text of a journal. See `Engine.resume`."""
        snapshot_options = SnapshotOptions.parse(snapshot, snapshot_max)
        folder = named_folder(journal)
        content, params, is_pure, run, writer = open_for_resume(folder, model, drafter, parse_fsync(fsync),
                                                                allow_different_kernels)
        try:
            generation = cls(model, drafter, content.header.prompt, params, on_prefill=on_prefill,
                             written=content.tokens, is_pure=is_pure, cache_salt=cache_salt)
            if writer:
                writer.snapshot = generation._open_snapshot(folder, snapshot_options)
                writer.begin(run)
        except BaseException:
            if writer:
                writer.close()
            raise
        generation._journal = writer
        return generation

    def _open_snapshot(self, folder: Path, options: SnapshotOptions) -> Snapshot | None:
        step = self.step
        return Snapshot.open(folder, options, lambda: self.model.identity, step.model, step.cache, step.context)

    def save_journal(self, folder: str | Path) -> None:
        """Create a journal of what was written so far, for `resume`. JournalError if `folder` holds one already."""
        with create_journal(self.model, self.choice, self.prompt, self.params, named_folder(folder), 1.0) as journal:
            if len(self.tokens):
                journal.append(self.tokens.tolist(), 0, self.statistics.decode_seconds)

    def __next__(self) -> Event:
        """The next event. Its forwards serve this text alone."""
        with kernels.single_threaded_torch(self.model.target.kernels):
            forward: Forward | Exception | None = None
            while not isinstance(outcome := self.advance(forward), Event):
                forward = None
                if not isinstance(outcome, Launched):
                    assert isinstance(outcome, ForwardRequest), "only a text of a batch waits for others"
                    try:
                        forward, = run_batched([outcome], lambda indices, seconds: self.clock.charge(seconds))
                    except BaseException:  # interrupted
                        self._work.close()
                        raise
        return outcome

    def advance(self, forward: Forward | Exception | None = None, batch_size: int | None = None
                ) -> ForwardRequest | Launched | Event | Waiting:
        """Work up to the next event, the next forward that is needed (pass it to the next call), or work that a device
        has begun. A text of a batch may wait for another text of the batch to read their common beginning.

        forward     the requested forward, or the error that it failed with, which ends the text
        batch_size  number of texts that share forwards now; None: the text is written alone

        Raises StopIteration after the last event, and every error that ends the text.
        """
        self.clock.start(batch_size or 1)
        self.reuse.is_in_batch = batch_size is not None
        try:
            return self._work.throw(forward) if isinstance(forward, Exception) else self._work.send(forward)
        finally:
            self.clock.stop()
            if self._is_asked_to_close:
                self.close()

    @property
    def is_thinking(self) -> bool:
        """Whether the text is in a thought that the model may go on with."""
        return self.stream.thought is not None and self.stream.thought.state.phase == INSIDE

    def answer_now(self) -> None:
        """End the thought at the next step, and begin the answer. Any thread may call this.

        Without effect outside of a thought. The statistics have the place as `thinking_close_at`; a text with that
        setting is the same text. UsageError where several processes share the model, and for gpt-oss beside tools.
        """
        require_closable(self.model, self.params)
        self._is_asked_to_answer = True

    def close(self) -> None:
        """Stop writing. The events so far remain valid, and a journal can be resumed. Any thread may call this: a step
        that another thread is in ends first."""
        self._is_asked_to_close = True
        try:
            self._work.close()
        except ValueError as error:
            if "already executing" not in str(error):
                raise
            return  # `advance` closes it
        self._is_asked_to_close = False
        self.reuse.close()
        self.is_closed = True
        self._record(Journal.close)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        return [int(token) for token in self.step.context.slice(0, self.step.context.prompt_length)]

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The new token ids so far."""
        start = self.step.context.prompt_length
        return self.step.context.slice(start, start + self.stream.num_tokens)

    @property
    def finish_reason(self) -> Finish | None:
        """Why the text ended; None while it has not."""
        return self.stream.finish_reason or ("cancelled" if self.is_closed else None)

    @property
    def is_finished(self) -> bool:
        """Whether the text reached its own end."""
        return self.stream.finish_reason is not None

    def stats(self) -> dict[str, Any]:
        """The statistics so far, under the names of the `--stats` file."""
        return self.statistics.figures(self.step, self.stream, self.reuse, self.finish_reason,
                                       self.phrases.num_rewinds if self.phrases else 0)

    def _run(self) -> Generator[ForwardRequest | Launched | Event | Waiting, Forward | None, None]:
        ranks, context = self.model.ranks, self.step.context
        try:
            written = context.slice(context.prompt_length, len(context))
            ranks.start_request(Request(context.slice(0, context.prompt_length), self.params, written,
                                        self._num_prompt_logprobs))
            try:  # inside, because a request that the ranks refuse must not end the one they work on
                with translate_memory_errors():
                    yield from self._replay()
                    if not self.is_finished:
                        began = time.perf_counter()
                        if self.num_resumed and self._journal and self._journal.snapshot:
                            yield from self.reuse.restore(self._journal.snapshot.restore)
                        yield from self.reuse.begin(ranks)
                        yield from prefill(self.step, ranks, lambda: self.clock.batch_size > 1, self._on_prefill,
                                           self.reuse, self._score if self._prompt_logprobs else None)
                        self.statistics.prefill_seconds = time.perf_counter() - began
                    scores = tuple(self._prompt_logprobs)
                    while not self.is_finished:
                        event = (yield from self._advance()) if self.params.max_new_tokens else self._end_unwritten()
                        if event.tokens or event.finish_reason:  # all tokens of a step may be held, or taken back
                            yield event._replace(prompt_logprobs=scores)
                            scores = ()
            finally:
                ranks.end_request(is_finished=self.is_finished)
        finally:
            self.reuse.end_reading()
            self._record(Journal.close)

    def _record(self, write: Callable[[Journal], None]) -> None:
        """Write to the journal, if the text has one."""
        try:
            if self._journal:
                write(self._journal)
        except OutputError as error:
            if not self._journal or not self.on_journal_error:
                raise
            self._journal.discard()
            self._journal = None
            self.on_journal_error(error)

    def _replay(self) -> Iterator[Event | Waiting]:
        """The text of earlier runs, as one event. In a batch, other texts go on while it is decoded."""
        if not self.num_resumed:
            return
        start, pieces = self.step.context.prompt_length, list[str]()
        written = self.step.context.slice(start, start + self.num_resumed).tolist()
        for _ in self.stream.replay(written, pieces):
            if self.reuse.is_in_batch:
                yield WAITING
        yield self._event(DecodedTokens(tuple(written), tuple(pieces)), sources=("",) * len(written))

    def _score(self, hidden: Tensor, tokens: list[int]) -> None:
        """Add the log-probabilities of tokens of the prompt, from the last layer's output for those before them."""
        assert self._num_prompt_logprobs is not None
        self._prompt_logprobs += text_logprobs(self.step.model, hidden, tokens, self._num_prompt_logprobs)

    def _end_unwritten(self) -> Event:
        self.stream.finish_reason = "length"
        return self._event(DecodedTokens((), ()))

    def _advance(self) -> Routine[Event]:
        """One step. Its tokens are in the journal before the caller sees them."""
        if self._is_asked_to_answer:
            self._close_thought()
        start, stream, drafting = time.perf_counter(), self.stream, self.step.timings.draft
        with self.model.ranks.synchronized(self.step.context):
            accepted = yield from self.step.run(self.params.max_new_tokens - self.step.context.num_new)
        (tokens, sources, logprobs), self.step = settle(self.phrases, accepted, self.step, self._new_drafter)
        had_loop, new = stream.loop is not None, stream.push(tokens)
        count = len(new.tokens)  # tokens after the end of the text are dropped
        self.statistics.accepted.update(filter(None, sources[:count]))
        self._full_acceptance.push(len(accepted.sources), accepted.depth)
        seconds = time.perf_counter() - start
        self.statistics.decode_seconds += seconds
        if self.clock.batch_size == 1:  # in a batch, a step's seconds include other texts' work
            self.statistics.plain_speed.add(accepted.drafted + 1, len(self.step.context), count,
                                            seconds - (self.step.timings.draft - drafting))
        self._record(lambda journal: journal.append(new.tokens, accepted.drafted, seconds))
        if stream.loop and not had_loop:
            drafts = ", and nearly every draft is accepted whole" if self._full_acceptance.is_high else ""
            log.warning("%s%s; a repetition penalty or a higher temperature helps, on_loop=stop ends such a text",
                        stream.loop, drafts)
        return self._event(new, sources=sources[:count], drafted=accepted.drafted, depth=accepted.depth,
                           logprobs=logprobs[:count], seconds=seconds)

    def _close_thought(self) -> None:
        """Close the thought from the next token on, if the text is in one that may end here. The journal has the place
        first."""
        self._is_asked_to_answer = False
        context, model, thought = self.step.context, self.model, self.stream.thought
        params = closed_here(model, self.params, thought.rules, context) if thought else None
        if thought is None or params is None:
            return
        rules = replace(thought.rules, forced=params.thinking_close, close_at=context.num_new)
        sampler = new_sampler(model, self.step.model, params, self.prompt, rules)
        assert isinstance(sampler, ThinkingSampler)
        if not sampler.survives(context, params.thinking_close):
            if not sampler.is_whole(context):
                self._is_asked_to_answer = True  # again, when the text does not end within a character
                return
            log.warning("the thought cannot be closed, because structured_outputs covers it and does not let it end "
                        "here; a prompt that ends with the opening of a thought, or a thinking_budget, leaves it free")
            return
        self._record(lambda journal: journal.close_thought(Closing(context.num_new, list(params.thinking_close))))
        self.params = self.statistics.params = params
        thought.replace_rules(rules)
        self.step = self.step._replace(sampler=sampler, drafts_forced=self.choice.name != "plain", ahead=None)

    def _new_drafter(self, sampler: Sampler) -> Drafter:
        if not self.params.max_new_tokens:  # others would read the prompt for nothing
            return PlainDrafter()
        return self.choice.build(self._resources._replace(sampler=sampler))

    def _event(self, new: DecodedTokens, **about: Any) -> Event:
        reason = self.stream.finish_reason
        if reason:
            self._record(lambda journal: journal.finish(reason))
            self.reuse.close()
        return Event(new.tokens, new.text, reason, self.stats() if reason else None, pieces=new.pieces, **about)
