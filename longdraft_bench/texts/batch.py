"""Texts written side by side, compared with one after another: tokens per second by number of texts; `bench batch`.

    longdraft bench batch --prompt-file novel.txt --contexts 1024,8192 --texts 1,2,4,8,16
    longdraft bench batch-turns --prompt-file novel.txt --context 1024 --texts 8 --drafters "plain plain auto"

Each text has its own prompt, a stretch of the file. The same texts take turns: all side by side, then each alone, so
that a slow moment of the machine affects both. Ratios are medians over neighbouring turns, by wall clock and by
processor time (which is the better measure on a busy machine). Plain decoding can gain at most the bytes that it need
not read again:

    floor = (weights + texts * cache) / read bandwidth        seconds for a token of each text
    limit = texts * (weights + cache) / (weights + texts * cache)

In `batch-turns` the drafters take turns instead, each with a batch of the same texts, from the first token on, and no
text waits for another one of its batch. Ratios are those of the seconds for each token to the first drafter's, over 256
tokens of each text. A control is in `--drafters "plain plain auto"`: the ratio of plain decoding to itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from longdraft import drafters
from longdraft.checkpoint import hub
from longdraft.drafters.auto.settings import AUTO_SETTINGS
from longdraft.engine.batching import Batch
from longdraft.engine.engine import Engine
from longdraft.engine.generation import Generation
from longdraft.errors import UsageError
from longdraft.report.table import Table
from longdraft.report.turns import Record
from longdraft.request.sampling_params import SamplingParams
from longdraft_bench.machine.limits import Limits
from longdraft_bench.peers import process as peers
from longdraft_bench.systems import System, systems_named
from longdraft_bench.timing import in_rounds, median_ratio

PART = 256  # tokens of each text for which `batch-turns` gives a ratio


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

    def prompts(self, context: int) -> list[list[int]]:
        return stretches(self.ids, context, max(self.texts))

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
            slots = {name: peer for name, program in plan.variants.items() if (
                peer := stack.enter_context(_slots(name, program, plan, engine, context, filled["peer"], status)))}
            for setting in plan.settings:
                with status(f"{context:,} tokens: prompts of {max(plan.texts)} texts, {setting}"):
                    group = TextGroup(engine, setting, plan.prompts(context), plan.num_new)
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


def stretches(ids: Sequence[int], context: int, count: int) -> list[list[int]]:
    """`count` prompts of `context` tokens, at even distances in the file."""
    distance = max(1, (len(ids) - context) // count)
    return [list(ids[number * distance : number * distance + context]) for number in range(count)]


class TextGroup:
    """A batch of texts by one drafter, whose prompts are read. All prompts have one length."""

    def __init__(self, engine: Engine, setting: str, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        system = System.named(setting)
        self.setting = setting
        self.context = len(prompts[0])
        self.batch: Batch = engine.with_drafter(system.drafter, system.options).batch()
        self.texts: dict[int, Generation] = {}  # by their numbers in the batch
        for seed, prompt in enumerate(prompts):  # one after another, because large chunks of a prompt are read faster
            params = SamplingParams(max_new_tokens=num_new, seed=seed, min_p=0.1, repetition_penalty=1.2,
                                    ignore_eos=True, on_loop="off")
            text = self.batch.add(list(prompt), params)
            self.texts[text] = self.batch[text]
            self.write([text], 1)

    def _step(self, texts: Iterable[int] | None) -> Iterator[tuple[int, int]]:
        """A round of these texts, or of all. The number of each text and of the tokens that it wrote."""
        for text, event in self.batch.step(texts):
            if event.error:
                raise event.error
            yield text, len(event.tokens)

    def write(self, texts: Sequence[int], tokens: int) -> TurnTime:
        """Write `tokens` tokens of each text side by side; the last step of a text may write a few more.

        A text that has written its share pauses until all have. A finished text writes less.
        """
        left = dict.fromkeys(texts, tokens)
        written = 0
        began = time.perf_counter()
        used = time.process_time()
        while left:
            for text, count in self._step(left):
                written += count
                left[text] -= count
            left = {text: more for text, more in left.items() if more > 0 and text in self.batch}
        return TurnTime(written, time.perf_counter() - began, time.process_time() - used)

    def write_all(self, tokens: int) -> TurnTime:
        """Write `tokens` tokens of all texts together, and what the last round writes beyond them. None pauses."""
        written = 0
        began = time.perf_counter()
        used = time.process_time()
        while written < tokens:
            written += sum(count for _, count in self._step(None))
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
    ours, single, *others = (of_way[1:] for of_way in turns.values())  # the first turns are the warm-up
    record: Record = {"context": group.context, "drafter": group.setting, "texts": count}
    # Turns in which every text wrote its share. They come first, because a finished text stays finished.
    whole = sum(min(a.tokens, b.tokens) >= count * plan.turn for a, b in zip(ours, single, strict=True))
    if not whole:
        return record | {"error": "all texts ended before the first whole turn; give fewer --repeats or --texts"}
    ours, single, *others = (of_way[:whole] for of_way in (ours, single, *others))
    after = [group.texts[text].stats() for text in texts]
    grown = {key: sum(b[key] - a[key] for a, b in zip(before, after, strict=True)) for key in ("new_tokens", "steps")}
    weights = engine.model.weights_bytes
    cache = group.context * engine.model.cache_bytes_per_token
    record |= {
        "tokens_per_second": _median_rate(ours),
        "alone_tokens_per_second": _median_rate(single),
        "to_one_after_another": _median_ratio(ours, single),
        "of_processor_to_one_after_another": median_ratio([turn.tokens / turn.processor_s for turn in ours],
                                                          [turn.tokens / turn.processor_s for turn in single]),
        "limit": count * (weights + cache) / (weights + count * cache),
        "floor_tokens_per_second": count * limits.read_bandwidth / (weights + count * cache),
        "mean_accepted_length": grown["new_tokens"] / grown["steps"],
        "turns": {name: [turn._asdict() for turn in of_way]
                  for name, of_way in zip(turns, (ours, single, *others), strict=True)},
    }
    if measured := {name: of_peer for name, of_peer in zip(slots, others, strict=True) if of_peer}:
        best = max(measured, key=lambda name: _median_rate(measured[name]))
        record |= {"peer": best, "peer_tokens_per_second": _median_rate(measured[best]),
                   "to_peer": _median_ratio(ours, measured[best])}
    return record


def _median_rate(turns: Sequence[TurnTime]) -> float:
    return median(turn.rate for turn in turns)


def _median_ratio(one: Sequence[TurnTime], other: Sequence[TurnTime]) -> float:
    return median_ratio([turn.rate for turn in one], [turn.rate for turn in other])


def measure_batch_turns(engine: Engine, settings: Sequence[str], prompts: Sequence[Sequence[int]], tokens: int,
                        turn: int) -> Record:
    """A record for each drafter, which wrote `tokens` tokens of each text in turns of `turn` tokens of each text.

    seconds_for_each_token  of each turn
    tokens_by_choice        of drafter `auto`: tokens by the drafter that it chose
    to_first                for each PART of tokens, seconds for each token of the first drafter / those of this one

    Raises UsageError if two drafters write different texts.
    """
    names = list(systems_named(settings))
    groups = {name: TextGroup(engine, setting, prompts, 2 * tokens)
              for name, setting in zip(names, settings, strict=True)}
    rounds = in_rounds({name: partial(group.write_all, len(prompts) * turn) for name, group in groups.items()},
                       tokens // turn, alternates=True)
    reference = groups[names[0]]
    for name, group in groups.items():
        for ours, theirs in zip(group.texts.values(), reference.texts.values(), strict=True):
            shared = min(len(ours.tokens), len(theirs.tokens))
            if not np.array_equal(ours.tokens[:shared], theirs.tokens[:shared]):
                raise UsageError(f"{name} wrote another text than {names[0]}")
    paces = {name: [1 / taken.rate for taken in turns] for name, turns in rounds.items()}
    return {name: {"seconds_for_each_token": paces[name], "tokens_by_choice": _choices(group),
                   "to_first": _by_part(paces[names[0]], paces[name], PART // turn)}
            for name, group in groups.items()}


def _choices(group: TextGroup) -> dict[str, int]:
    chosen: Counter[str] = Counter()
    for text in group.texts.values():
        chosen.update(text.stats().get("tokens_by_choice", {}))
    return dict(chosen)


def _by_part(first: Sequence[float], paces: Sequence[float], turns: int) -> list[float]:
    """The ratio of each whole part of so many turns."""
    return [sum(first[start : start + turns]) / sum(paces[start : start + turns])
            for start in range(0, len(paces) - turns + 1, turns)]


def turns_table(runs: Sequence[Record]) -> Table:
    """The lowest, the median and the highest ratio of the runs, part by part."""
    rows = []
    for name in runs[0]:
        parts = zip(*(run[name]["to_first"] for run in runs), strict=True)
        rows.append([name, *(f"{min(part):.2f} {median(part):.2f} {max(part):.2f}" for part in parts)])
    columns = ["drafter", *(f"to {PART * (number + 1):,}" for number in range(len(rows[0]) - 1))]
    return Table("Batches by drafters in turns: speed to the first", columns, rows,
                 "Of each part: lowest, median and highest of the runs.")


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
def _slots(name: str, program: peers.PeerProgram, plan: BatchPlan, engine: Engine, context: int,
           records: list[Record], status: Callable[[str], Any]) -> Iterator[PeerSlots | None]:
    """The peer with random keys and values in its slots. None if it fails, with the reason in the document."""
    with (TemporaryDirectory() as folder, peers.PeerProcess(program, plan.python) as process,
          status(f"{context:,} tokens: {name}")):
        record: Record = {"engine": name, "context": context}
        records.append(record)
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
    all_tables = [Table.of_records("Texts side by side, all together", (
        ("context", "context", ","), ("drafter", "drafter", ""), ("texts", "texts", ","),
        ("tokens/s", "tokens_per_second", ",.1f"), ("one after another", "alone_tokens_per_second", ",.1f"),
        ("times", "to_one_after_another", ".2f"),
        ("of processor time", "of_processor_to_one_after_another", ".2f"), ("bytes would give", "limit", ".2f"),
        ("mean accepted length", "mean_accepted_length", ".2f"), ("peer's slots", "peer", ""),
        ("tokens/s", "peer_tokens_per_second", ",.1f"), ("to it", "to_peer", ".2f"), ("error", "error", "")),
        document["texts"])]
    if document["peer"]:
        columns = (("context", "context", ","), ("engine", "engine", ""), ("version", "version", ""),
                   ("error", "error", ""))
        all_tables.append(Table.of_records("The peer", columns, document["peer"]))
    return all_tables
