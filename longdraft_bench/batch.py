"""Texts written side by side, compared with one after another: tokens per second by number of texts; `bench batch`.

    longdraft bench batch --prompt-file novel.txt --contexts 1024,8192 --texts 1,2,4,8,16

Each text has its own prompt, a stretch of the file. The same texts take turns: all side by side, then each alone, so
that a slow moment of the machine affects both. Ratios are medians over neighbouring turns, by wall clock and by
processor time (which is the better measure on a busy machine). Plain decoding can gain at most the bytes that it need
not read again:

    floor = (weights + texts * cache) / read bandwidth        seconds for a token of each text
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

from longdraft import drafters
from longdraft.checkpoint import hub
from longdraft.drafters.auto.settings import AUTO_SETTINGS
from longdraft.engine import run_statistics
from longdraft.engine.batching import Batch
from longdraft.engine.engine import Engine
from longdraft.engine.generation import Generation
from longdraft.errors import UsageError
from longdraft.report.table import Table
from longdraft.report.turns import Record
from longdraft.request.sampling_params import SamplingParams
from longdraft_bench import peers
from longdraft_bench.limits import Limits
from longdraft_bench.systems import System


class BatchPlan(NamedTuple):
    """The measurements to make.

    ids       tokens of the prompt file
    texts     numbers of texts
    settings  drafters
    turn      tokens that each text writes in a turn
    variants  how the peer is set up: name -> its program; empty: no peer
    limit_s   seconds that one answer of the peer may take
    """

    ids: Sequence[int]
    contexts: Sequence[int]
    texts: Sequence[int]
    settings: Sequence[str]
    turn: int
    repeats: int
    variants: Mapping[str, peers.PeerProgram]
    python: str
    limit_s: float

    @property
    def num_new(self) -> int:
        """Tokens that a text may write: per repeat one step and two turns, each with the surplus of its last step."""
        longest_step = AUTO_SETTINGS.max_depth
        return len(self.texts) * (self.repeats + 1) * (1 + 2 * self.turn + 3 * longest_step)

    def prompt(self, context: int, place: int) -> list[int]:
        distance = max(1, (len(self.ids) - context) // max(self.texts))
        return list(self.ids[place * distance : place * distance + context])

    def check(self, engine: Engine) -> None:
        """Raise UsageError for a short prompt file, too many positions and unknown drafters."""
        longest, limit = max(self.contexts), engine.model.config.max_positions
        least = longest + max(self.texts) - 1
        if len(self.ids) < least:
            raise UsageError(f"the prompt file has {len(self.ids)} tokens; allowed: {least} or more, for "
                             f"{max(self.texts)} texts after {longest} tokens each")
        if longest + self.num_new > limit:
            raise UsageError(f"--contexts, --turn and --repeats come to {longest + self.num_new} positions; allowed: "
                             f"{limit} (the model's context limit)")
        for setting in self.settings:
            system = System.named(setting)
            drafters.parse_options(system.drafter, system.options)


def measure_batches(engine: Engine, plan: BatchPlan, limits: Limits, filled: Record,
                    status: Callable[[str], Any]) -> None:
    """Fill the document: `texts`, a record for each context, drafter and number of texts, and `peer`."""
    filled |= {"contexts": list(plan.contexts), "turn": plan.turn, "repeats": plan.repeats, "texts": [], "peer": []}
    for context in plan.contexts:
        with ExitStack() as stack:
            slots = {name: found for name, program in plan.variants.items() if (
                found := stack.enter_context(_slots(name, program, plan, engine, context, filled["peer"], status)))}
            for setting in plan.settings:
                with status(f"{context:,} tokens: prompts of {max(plan.texts)} texts, {setting}"):
                    group = TextGroup(engine, plan, context, setting)
                for count in plan.texts:
                    with status(f"{context:,} tokens: {count} texts, {setting}"):
                        filled["texts"].append(measure_texts(engine, plan, group, count, limits, slots))
                slots = {}  # the peer is measured once per context
                group.batch.close()  # frees its memory for the next group


class TurnTime(NamedTuple):
    """The tokens of a turn, its wall-clock seconds, and the processor seconds of all threads."""

    tokens: int
    seconds: float
    processor_s: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class TextGroup:
    """Texts after prompts of one length, whose prompts are read."""

    def __init__(self, engine: Engine, plan: BatchPlan, context: int, setting: str) -> None:
        system = System.named(setting)
        self.context, self.setting = context, setting
        self.batch: Batch = engine.with_drafter(system.drafter, system.options).batch()
        self.texts: dict[int, Generation] = {}  # by their numbers in the batch
        for place in range(max(plan.texts)):  # one after another, because large chunks of a prompt are read faster
            params = SamplingParams(max_new_tokens=plan.num_new, seed=place, min_p=0.1, repetition_penalty=1.2,
                                    ignore_eos=True, on_loop="off")
            text = self.batch.add(plan.prompt(context, place), params)
            self.texts[text] = self.batch[text]
            self.write([text], 1)

    def write(self, texts: Sequence[int], tokens: int) -> TurnTime:
        """Write `tokens` tokens of each text side by side; the last step of a text may write a few more.

        A text that has written its share pauses until all have. A finished text writes less.
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
        return TurnTime(written, time.perf_counter() - began, time.process_time() - used)

    def write_one_by_one(self, texts: Sequence[int], tokens: int) -> TurnTime:
        alone = [self.write([text], tokens) for text in texts]
        return TurnTime(*(sum(part) for part in zip(*alone, strict=True)))


def measure_texts(engine: Engine, plan: BatchPlan, group: TextGroup, count: int, limits: Limits,
                  slots: Mapping[str, PeerSlots]) -> Record:
    """Turns of `count` texts side by side, of the same texts one after another, and of the peer's slots."""
    texts = list(group.texts)[:count]
    turns: dict[str, list[TurnTime]] = {"side by side": [], "one after another": [], **{name: [] for name in slots}}
    before = [group.texts[text].stats() for text in texts]
    orders = [("side by side", group.write), ("one after another", group.write_one_by_one)]
    for _ in range(plan.repeats + 1):
        group.write(texts, 1)  # wakes the threads and refills the processor's caches after another engine's turn
        for name, write in orders:
            turns[name].append(write(texts, plan.turn))
        orders.reverse()  # each comes first equally often
        for name, peer in slots.items():
            if turn := peer.write(count, plan.turn):
                turns[name].append(turn)
    ours, single, *others = (found[1:] for found in turns.values())  # the first turns are the warm-up
    record: Record = {"context": group.context, "drafter": group.setting, "texts": count}
    # Turns in which every text wrote its share. They come first, because a finished text stays finished.
    whole = sum(min(a.tokens, b.tokens) >= count * plan.turn for a, b in zip(ours, single, strict=True))
    if not whole:
        return record | {"error": "all texts ended before the first whole turn; give fewer --repeats or --texts"}
    ours, single, *others = (found[:whole] for found in (ours, single, *others))
    after = [group.texts[text].stats() for text in texts]
    grown = {key: sum(b[key] - a[key] for a, b in zip(before, after, strict=True)) for key in ("new_tokens", "steps")}
    weights = engine.model.weights_bytes
    cache = group.context * engine.model.cache_bytes_per_token
    record |= {
        "tokens_per_second": _median_rate(ours),
        "alone_tokens_per_second": _median_rate(single),
        "to_one_after_another": _median_ratio(ours, single),
        "of_processor_to_one_after_another": median(
            a.tokens / a.processor_s * b.processor_s / b.tokens for a, b in zip(ours, single, strict=True)),
        "limit": count * (weights + cache) / (weights + count * cache),
        "floor_tokens_per_second": count * limits.read_bandwidth / (weights + count * cache),
        "mean_accepted_length": grown["new_tokens"] / grown["steps"],
        "turns": {name: [turn._asdict() for turn in found]
                  for name, found in zip(turns, (ours, single, *others), strict=True)},
    }
    if measured := {name: found for name, found in zip(slots, others, strict=True) if found}:
        best = max(measured, key=lambda name: _median_rate(measured[name]))
        record |= {"peer": best, "peer_tokens_per_second": _median_rate(measured[best]),
                   "to_peer": _median_ratio(ours, measured[best])}
    return record


def _median_rate(turns: Sequence[TurnTime]) -> float:
    return median(turn.rate for turn in turns)


def _median_ratio(one: Sequence[TurnTime], other: Sequence[TurnTime]) -> float:
    """Over the turns that both have. A peer that failed has fewer."""
    return median(a.tokens / a.seconds * b.seconds / b.tokens for a, b in zip(one, other))


def sha256(ids: Sequence[int]) -> str:
    return run_statistics.sha256_tokens(np.array(ids, dtype=np.int32))


class PeerSlots:
    """llama.cpp in its own process, with as many slots as there are texts."""

    def __init__(self, process: peers.PeerProcess, limit_s: float, record: Record) -> None:
        self._process: peers.PeerProcess | None = process
        self._limit_s = limit_s
        self._record = record

    def write(self, count: int, steps: int) -> TurnTime | None:
        """Steps of `count` slots together. None after a failure, whose reason is in the document."""
        if self._process is None:
            return None
        time.sleep(peers.SETTLE_S)
        try:
            answer = self._process.ask(self._limit_s, do="together", slots=count, count=steps)
        except peers.PeerError as error:
            self._record["error"], self._process = str(error), None
            return None
        time.sleep(peers.SETTLE_S)
        return TurnTime(count * steps, sum(answer["seconds"]), answer["processor_s"])


@contextmanager
def _slots(name: str, program: peers.PeerProgram, plan: BatchPlan, engine: Engine, context: int, found: list[Record],
           status: Callable[[str], Any]) -> Iterator[PeerSlots | None]:
    """The peer with random keys and values in its slots. None if it fails, with the reason in the document."""
    with (TemporaryDirectory() as folder, peers.PeerProcess(program, plan.python) as process,
          status(f"{context:,} tokens: {name}")):
        record: Record = {"engine": name, "context": context}
        found.append(record)
        try:
            model = peers.portable_model(hub.resolve(engine.name), Path(folder))
            answer = process.open(model, context + plan.num_new, plan.limit_s, slots=max(plan.texts))
            record |= {"version": answer["version"]}
            record |= process.ask(plan.limit_s, do="fill", length=context, within_s=plan.limit_s)
        except peers.PeerError as error:
            record["error"] = str(error)
            yield None
            return
        yield PeerSlots(process, plan.limit_s, record)


def tables(document: Mapping[str, Any]) -> list[Table]:
    found = [Table.of_records("Texts side by side, all together", (
        ("context", "context", ","), ("drafter", "drafter", ""), ("texts", "texts", ","),
        ("tokens/s", "tokens_per_second", ",.1f"), ("one after another", "alone_tokens_per_second", ",.1f"),
        ("times", "to_one_after_another", ".2f"),
        ("of processor time", "of_processor_to_one_after_another", ".2f"), ("bytes would give", "limit", ".2f"),
        ("mean accepted length", "mean_accepted_length", ".2f"), ("peer's slots", "peer", ""),
        ("tokens/s", "peer_tokens_per_second", ",.1f"), ("to it", "to_peer", ".2f"), ("error", "error", "")),
        document["texts"])]
    if document["peer"]:
        found.append(Table.of_records("The peer", (("context", "context", ","), ("engine", "engine", ""),
                                                   ("version", "version", ""), ("error", "error", "")),
                                      document["peer"]))
    return found
