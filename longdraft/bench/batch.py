"""Texts written side by side beside one after another: total tokens per second by how many there are.

    longdraft bench batch --prompt-file novel.txt --contexts 1024,8192 --texts 1,2,4,8,16

Every text is a real one, behind its own stretch of the file. The same texts write in turns: all side by side, and
each alone, so that the machine's moods meet both; what one is to the other is the median over neighbouring turns, by
the clock and by the processor's time (which tells more where others are at work). What plain decoding could gain at
most is the bytes that need not be read again:

    floor = (weights + texts * cache) / read bandwidth        for a token of each text
    limit = texts * (weights + cache) / (weights + texts * cache)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from longdraft import drafters, run_statistics
from longdraft.batching import Batch
from longdraft.bench import peers
from longdraft.bench.experiment import System
from longdraft.bench.measure import Limits
from longdraft.core import SamplingParams
from longdraft.engine import Engine
from longdraft.errors import UsageError
from longdraft.generation import Generation
from longdraft.model import hub

Record = dict[str, Any]
_SETTLE_S = 0.3  # before another engine's turn, so that the threads of this one have gone to sleep


class Plan(NamedTuple):
    """What is to be measured."""

    ids: Sequence[int]  # the prompts' tokens: each text begins at a place of its own
    contexts: Sequence[int]
    texts: Sequence[int]
    settings: Sequence[str]  # drafters
    turn: int  # tokens that each text writes in a turn
    repeats: int
    ways: Mapping[str, peers.Kind]  # in which a peer is set up; none: it is left out
    python: str
    limit_s: float

    @property
    def num_new(self) -> int:
        """Tokens that a text may write: for each repeat a step and two turns, and what a step brings beyond them."""
        return len(self.texts) * (self.repeats + 1) * (1 + 2 * self.turn + 3 * drafters.cost_model.SETTINGS.max_depth)

    def prompt(self, context: int, place: int) -> list[int]:
        apart = max(1, (len(self.ids) - context) // max(self.texts))
        return list(self.ids[place * apart : place * apart + context])

    def check(self, engine: Engine) -> None:
        longest, limit = max(self.contexts), engine.model.config.max_positions
        least = longest + max(self.texts) - 1
        if len(self.ids) < least:
            raise UsageError(f"the prompt file has {len(self.ids)} tokens; allowed: {least} or more, for "
                             f"{max(self.texts)} texts behind {longest} tokens each")
        if longest + self.num_new > limit:
            raise UsageError(f"--contexts, --turn and --repeats come to {longest + self.num_new} positions; allowed: "
                             f"{limit} (the model's context limit)")
        for setting in self.settings:
            system = System.named(setting)  # unknown ones are told before anything is measured
            drafters.parse_options(system.drafter, system.options)


def measure(engine: Engine, plan: Plan, limits: Limits, report: Record, doing: Callable[[str], Any]) -> None:
    """Fill the report: `texts`, a record for each context, drafter and number of texts, and `peer`."""
    report |= {"contexts": list(plan.contexts), "turn": plan.turn, "repeats": plan.repeats, "texts": [], "peer": []}
    for context in plan.contexts:
        with ExitStack() as stack:
            slots = {name: found for name, kind in plan.ways.items() if (
                found := stack.enter_context(_slots(name, kind, plan, engine, context, report["peer"], doing)))}
            for setting in plan.settings:
                with doing(f"{context:,} tokens: prompts of {max(plan.texts)} texts, {setting}"):
                    group = Group(engine, plan, context, setting)
                for count in plan.texts:
                    with doing(f"{context:,} tokens: {count} texts, {setting}"):
                        report["texts"].append(_record(engine, plan, group, count, limits, slots))
                slots = {}  # measured once
                group.batch.close()  # its memory is the next one's


class Turn(NamedTuple):
    """What some texts wrote, the time that it took, and the processor's, of all threads."""

    tokens: int
    seconds: float
    processor_s: float


class Group:
    """Texts behind prompts of one length, read and under way."""

    def __init__(self, engine: Engine, plan: Plan, context: int, setting: str) -> None:
        system = System.named(setting)
        engine = engine.with_drafter(system.drafter, system.options)
        self.context, self.setting = context, setting
        self.batch: Batch = engine.batch()
        self.texts: dict[int, Generation] = {}  # by their numbers in the batch
        for place in range(max(plan.texts)):  # one after the other: large pieces of a prompt are read faster
            params = SamplingParams(max_new_tokens=plan.num_new, seed=place, min_p=0.1, repetition_penalty=1.2,
                                    ignore_eos=True, on_loop="off")
            text = self.batch.add(plan.prompt(context, place), params)
            self.texts[text] = self.batch[text]
            self.write([text], 1)

    def write(self, texts: Sequence[int], tokens: int) -> Turn:
        """Let these texts write so many tokens each, or a few more, side by side.

        A text that has written its share stands by while the others end theirs; one that has come to its end writes
        less.
        """
        left = dict.fromkeys(texts, tokens)
        written, began, used = 0, time.perf_counter(), time.process_time()
        while left:
            for text, event in self.batch.step(left):
                written += len(event.tokens)
                if event.error:
                    raise event.error
                left[text] -= len(event.tokens)
            left = {text: more for text, more in left.items() if more > 0 and text in self.batch}
        return Turn(written, time.perf_counter() - began, time.process_time() - used)

    def write_in_turn(self, texts: Sequence[int], tokens: int) -> Turn:
        """The same, one text after another."""
        alone = [self.write([text], tokens) for text in texts]
        return Turn(*(sum(part) for part in zip(*alone, strict=True)))


def _record(engine: Engine, plan: Plan, group: Group, count: int, limits: Limits,
            slots: Mapping[str, Slots]) -> Record:
    """`count` texts side by side, each by itself, and as many slots of the peer, in turns."""
    texts = list(group.texts)[:count]
    turns: dict[str, list[Turn]] = {"side by side": [], "one after another": [], **{name: [] for name in slots}}
    before = [group.texts[text].stats() for text in texts]
    ways = [("side by side", group.write), ("one after another", group.write_in_turn)]
    for _ in range(plan.repeats + 1):
        group.write(texts, 1)  # wakes the threads and fills the processor's caches, whoever was at work before
        for name, write in ways:
            turns[name].append(write(texts, plan.turn))
        ways.reverse()  # each comes first as often
        for name, peer in slots.items():
            if turn := peer.write(count, plan.turn):
                turns[name].append(turn)
    ours, single, *others = (found[1:] for found in turns.values())  # the first turns warm up
    record: Record = {"context": group.context, "drafter": group.setting, "texts": count}
    # Turns in which every text wrote its share: the first ones, because a text that has ended stays so.
    whole = sum(min(a.tokens, b.tokens) >= count * plan.turn for a, b in zip(ours, single, strict=True))
    if not whole:
        return record | {"error": "the texts came to their end; give fewer --repeats or --texts"}
    ours, single, *others = (found[:whole] for found in (ours, single, *others))
    after = [group.texts[text].stats() for text in texts]
    grown = {key: sum(b[key] - a[key] for a, b in zip(before, after, strict=True)) for key in ("new_tokens", "steps")}
    weights = sum(linear.nbytes for linear in engine.model.linears)
    cache = group.context * engine.model.cache_bytes_per_token
    record |= {
        "tokens_per_second": _rate(ours),
        "alone_tokens_per_second": _rate(single),
        "to_one_after_another": _ratio(ours, single),
        "of_processor_to_one_after_another": median(
            a.tokens / a.processor_s * b.processor_s / b.tokens for a, b in zip(ours, single, strict=True)),
        "limit": count * (weights + cache) / (weights + count * cache),
        "floor_tokens_per_second": count * limits.read_bandwidth / (weights + count * cache),
        "mean_accepted_length": grown["new_tokens"] / grown["steps"],
        "turns": {name: [turn._asdict() for turn in found]
                  for name, found in zip(turns, (ours, single, *others), strict=True)},
    }
    if theirs := {name: found for name, found in zip(slots, others, strict=True) if found}:
        best = max(theirs, key=lambda name: _rate(theirs[name]))
        record |= {"peer": best, "peer_tokens_per_second": _rate(theirs[best]), "to_peer": _ratio(ours, theirs[best])}
    return record


def _rate(turns: Sequence[Turn]) -> float:
    return median(turn.tokens / turn.seconds for turn in turns)


def sha256(ids: Sequence[int]) -> str:
    return run_statistics.sha256_tokens(np.array(ids, dtype=np.int32))


def _ratio(one: Sequence[Turn], other: Sequence[Turn]) -> float:
    """Over the turns that both have: a peer may have failed behind some."""
    return median(a.tokens / a.seconds * b.seconds / b.tokens for a, b in zip(one, other))


class Slots:
    """llama.cpp with as many slots as there are texts, in a process of its own."""

    def __init__(self, worker: peers.Worker, limit_s: float, found: Record) -> None:
        self._worker: peers.Worker | None = worker
        self._limit_s = limit_s
        self._found = found

    def write(self, count: int, steps: int) -> Turn | None:
        """So many steps of so many slots together; None where it failed, with the reason in the report."""
        if self._worker is None:
            return None
        time.sleep(_SETTLE_S)
        try:
            answer = self._worker.ask(self._limit_s, do="together", slots=count, count=steps)
        except peers.Failed as error:
            self._found["error"], self._worker = str(error), None
            return None
        time.sleep(_SETTLE_S)
        return Turn(count * steps, sum(answer["seconds"]), answer["processor_s"])


@contextmanager
def _slots(name: str, kind: peers.Kind, plan: Plan, engine: Engine, context: int, found: list[Record],
           doing: Callable[[str], Any]) -> Iterator[Slots | None]:
    """The peer, its slots filled with random keys and values; None, with the reason in the report, where it is not."""
    with TemporaryDirectory() as place, peers.Worker(kind, plan.python) as worker, doing(f"{context:,} tokens: {name}"):
        record: Record = {"engine": name, "context": context}
        found.append(record)
        try:
            peers.portable(hub.resolve(engine.name), Path(place))
            room = context + plan.num_new
            answer = worker.open(Path(place), room, plan.limit_s, slots=max(plan.texts))
            record |= {"version": answer["version"]}
            record |= worker.ask(plan.limit_s, do="fill", length=context, within_s=plan.limit_s)
        except peers.Failed as error:
            record["error"] = str(error)
            yield None
            return
        yield Slots(worker, plan.limit_s, record)
