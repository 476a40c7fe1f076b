"""The yardstick of `auto`: texts that it writes by a simulated clock, and how fast it writes them.

    PYTHONPATH=tests python -m helpers.auto_scenarios --output before.json
    PYTHONPATH=tests python -m helpers.auto_scenarios --output after.json --against before.json

The text of a scenario is fixed, as keyed sampling fixes it in a real run: whether a guess at a position is right does
not depend on what was drafted before. So two versions of `auto` write the same text with the same luck, and a change of
its rate is a change of its decisions. All seconds are simulated: the result does not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from helpers.simulated_text import FORWARD, Clock
from longdraft.drafters.auto.costs import Costs, DraftCosts, ForwardCosts
from longdraft.drafters.auto.drafter import AutoDrafter
from longdraft.drafters.auto.shared import Guesser, SharedStatistics
from longdraft.drafters.confidence import Confidence
from longdraft.drafters.suffix import SuffixDrafter, SuffixOptions
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree, chain, from_paths, root_only
from longdraft.speculation.drafter import Accepted
from longdraft.speculation.routine import atomic, run_alone

PART = 256  # tokens over which the slowest part of a text is measured
DEAR_ROWS = ForwardCosts(0.0, (1.0, 1.2, 1.6, 2.0, 2.4, 4.0, 7.2), 1e6)
SHARED_ROWS = ForwardCosts(0.0, (1.0, 1.0, 1.02, 1.06, 1.1, 2.0, 3.8), 1e6)
LEADS = (0.05, 0.2, 0.4, 0.8, 1.5, 3.0, 9.0)  # of the guesses of a drafter of kind "confident"
LEAD_RATES = (0.5, 0.75, 0.9, 0.93, 0.96, 0.97, 0.99)


@dataclass(frozen=True)
class Simulated:
    """A drafter of a scenario.

    seconds    for each drafted token
    rates      share of right guesses; over a text, the parts of `turns` tokens take turns with these rates
    kind       "chain"; "tree": each guess has a sibling, which is right in a third of the other cases;
               "confident": a chain that ends by itself; "suffix": the drafter `suffix` itself
    base       seconds for each draft
    believed   factor: what `auto` is given as the costs of a draft, over what a draft takes
    first      seconds that the first draft takes longer
    short      its drafts have at most so many tokens, whatever `auto` asks for
    prior, model  see `DrafterSpec`
    """

    seconds: float
    rates: tuple[float, ...] = (0.0,)
    kind: str = "chain"
    base: float = 0.0
    believed: float = 1.0
    first: float = 0.0
    short: int = 16
    prior: float = 0.8
    model: str = ""


@dataclass(frozen=True)
class Scenario:
    """A text, or several at the same time.

    forward    seconds of a step by its rows; `believed` is what `auto` is given
    between    seconds between two steps; text: and for each token of the step before
    ahead      seconds that a step of plain decoding saves where it is computed ahead; `auto` is given the share
               `known_ahead` of it
    turns      tokens after which the rates of drafters change
    num_texts  that share what they know; is_batch: and their forwards
    batch_draft  factor for the seconds of a draft in a batch
    noise      mean of the noise that adds to each time, as a share of it
    interruption  seconds that one in 200 times takes longer
    speeds     factors for all times; they change every `speed_tokens` tokens
    decision, reading  seconds that a decision and a reading of the clock take
    source     "" for random tokens; else the tokens of a text that is replayed
    """

    drafters: dict[str, Simulated]
    forward: ForwardCosts = FORWARD
    believed: ForwardCosts | None = None
    tokens: int = 2000
    between: float = 0.0
    text: float = 0.0
    ahead: float = 0.0
    known_ahead: float = 1.0
    turns: int = 10**9
    num_texts: int = 1
    is_batch: bool = False
    batch_draft: float = 1.0
    noise: float = 0.0
    interruption: float = 0.0
    speeds: tuple[float, ...] = (1.0,)
    speed_tokens: int = 300
    decision: float = 0.0
    reading: float = 0.0
    prompt: int = 1
    source: str = ""


def chains(*drafters: tuple[float, float], **options: Any) -> dict[str, Simulated]:
    return {f"chain-{number}": Simulated(seconds, (rate,), **options)
            for number, (seconds, rate) in enumerate(drafters, 1)}


CONFIDENT = {"self": Simulated(0.12, kind="confident", prior=0.92, model="target"),
             "heads": Simulated(0.11, kind="confident", base=0.3, prior=0.92, model="target"),
             "medusa": Simulated(0.01, (0.45,), "tree", base=0.1, prior=0.45, short=4)}
NOISY = {"noise": 0.08, "interruption": 4.0}

SCENARIOS: dict[str, Scenario] = {
    "fast and slow": Scenario(chains((0.1, 0.9), (0.9, 0.9))),
    "fast, noisy": Scenario(chains((0.1, 0.9), (0.3, 0.9)), **NOISY),
    "dear tokens": Scenario(chains((0.3, 0.9), (0.35, 0.92))),
    "turns": Scenario({"one": Simulated(0.2, (0.9, 0.2)), "other": Simulated(0.2, (0.4, 0.9))}, tokens=6000,
                      turns=1000),
    "turns, noisy": Scenario({"one": Simulated(0.2, (0.9, 0.2)), "other": Simulated(0.2, (0.4, 0.9))}, tokens=6000,
                             turns=1000, **NOISY),
    "sometimes": Scenario({"one": Simulated(0.4, (0.9, 0.1))}, tokens=6000, turns=700),
    **{f"always wrong, {seconds}": Scenario(chains(*[(seconds, 0.0)] * 3)) for seconds in (0.1, 0.4, 0.8)},
    "always wrong, short text": Scenario(chains(*[(0.2, 0.0)] * 3), tokens=256),
    "right, short text": Scenario(chains((0.2, 0.85), (0.1, 0.6)), tokens=256),
    **{f"break even, {rate}": Scenario(chains(*[(0.4, rate)] * 3)) for rate in (0.3, 0.4, 0.5)},
    "break even, noisy": Scenario(chains(*[(0.4, 0.4)] * 3), **NOISY),
    "first draft reads": Scenario(
        {"reads": Simulated(0.02, (0.0,), first=100.0, prior=0.2), "chain": Simulated(0.1, (0.9,), prior=0.2)},
        tokens=4000),
    "suffix and chain": Scenario({"suffix": Simulated(0.002, kind="suffix", base=0.01, prior=0.2),
                                  "chain": Simulated(0.3, (0.85,))}, source="phrases", tokens=3000),
    "suffix, novel": Scenario({"suffix": Simulated(0.002, kind="suffix", base=0.01, prior=0.2),
                               "chain": Simulated(0.3, (0.8,))}, source="novel", tokens=3000),
    "suffix alone": Scenario({"suffix": Simulated(0.002, kind="suffix", base=0.02, prior=0.2)}, source="phrases",
                             tokens=3000, **NOISY),
    "loop": Scenario({"suffix": Simulated(0.002, kind="suffix", base=0.02, prior=0.2)}, source="loop", tokens=1000,
                     forward=DEAR_ROWS, **NOISY),
    "dear forwards": Scenario(chains((0.3, 0.9)), tokens=1024, believed=FORWARD,
                              forward=FORWARD._replace(rows=(1.0, *(4.0 * each for each in FORWARD.rows[1:])))),
    "drafts are dearer": Scenario(chains((0.8, 0.7), believed=0.125), tokens=4000),
    "drafts are cheaper": Scenario(chains((0.4, 0.9), believed=3.0, prior=0.92)),
    "drafts are cheaper, noisy": Scenario(chains((0.4, 0.9), (0.2, 0.6), believed=2.0), **NOISY),
    "forwards are cheaper": Scenario(chains((0.15, 0.9)),
                                     believed=FORWARD._replace(rows=(1.0, 3.0, 3.05, 3.1, 3.2, 3.4, 3.6))),
    "some forwards are dearer": Scenario(chains((0.08, 0.9)), believed=FORWARD, tokens=3000, **NOISY,
                                         forward=FORWARD._replace(rows=(1.0, 1.02, 1.05, 1.4, 1.5, 2.2, 2.6))),
    "dear as said": Scenario(chains((1.2, 0.9), (3.0, 0.9), (2.0, 0.5)), tokens=3000),
    "interrupted": Scenario(chains((0.1, 0.9)), tokens=1000, interruption=60.0),
    "busy machine": Scenario(chains((0.15, 0.9)), tokens=1000, speeds=(2.5,)),
    "machine that changes": Scenario(chains((0.15, 0.85), (0.4, 0.95)), tokens=3000, speeds=(1.0, 2.5, 1.3),
                                     noise=0.05),
    "machine that changes, plain": Scenario(chains((0.5, 0.5), (0.7, 0.6)), tokens=3000, speeds=(1.0, 2.5, 1.3),
                                            noise=0.05),
    "work between steps": Scenario(chains((0.9, 0.8)), between=1.0),
    "work for each token": Scenario(chains((0.35, 0.85), (0.3, 0.7)), between=0.05, text=0.03, tokens=3000),
    "computed ahead": Scenario(chains((0.45, 0.7), (0.5, 0.8)), ahead=0.4, between=0.05, text=0.02, tokens=3000),
    "computed ahead, drafts gain": Scenario(chains((0.2, 0.85), (0.3, 0.7)), ahead=0.3, text=0.02, tokens=3000),
    "computed ahead, noisy": Scenario(chains((0.45, 0.7), (0.5, 0.8)), ahead=0.4, between=0.05, text=0.02,
                                      tokens=3000, **NOISY),
    "computed ahead, more than known": Scenario(chains((0.45, 0.7), (0.5, 0.8)), ahead=0.4, known_ahead=0.3,
                                                between=0.02, text=0.01, tokens=3000, **NOISY),
    "computed ahead, less than known": Scenario(chains((0.2, 0.7)), ahead=0.1, known_ahead=3.0, between=0.02,
                                                text=0.01, tokens=3000, **NOISY),
    "loop, computed ahead": Scenario({"suffix": Simulated(0.002, kind="suffix", base=0.02, prior=0.2)}, source="loop",
                                     tokens=1000, forward=DEAR_ROWS, ahead=0.3, known_ahead=0.3, **NOISY),
    "suffix, computed ahead": Scenario({"suffix": Simulated(0.002, kind="suffix", base=0.02, prior=0.2)},
                                       source="phrases", tokens=3000, forward=DEAR_ROWS, ahead=0.3, known_ahead=0.3,
                                       decision=0.05, **NOISY),
    "dear rows": Scenario(chains((0.01, 0.7)), forward=DEAR_ROWS, tokens=3000),
    "dear rows, trees": Scenario({"tree": Simulated(0.02, (0.7,), "tree"), "chain": Simulated(0.01, (0.7,))},
                                 forward=DEAR_ROWS, tokens=3000),
    "trees": Scenario({"tree": Simulated(0.05, (0.6,), "tree"), "chain": Simulated(0.05, (0.7,))}, tokens=3000),
    "text whose rows are dear": Scenario(chains((0.01, 0.9)), forward=ForwardCosts(0.0, FORWARD.rows, 100.0, 0.43)),
    "growing text": Scenario({"one": Simulated(1.0, (0.85,)), "other": Simulated(0.7, (0.7,))}, tokens=6000,
                             forward=ForwardCosts(0.05, FORWARD.rows, 800.0, 0.02), **NOISY),
    "confident": Scenario(CONFIDENT, tokens=4000),
    "confident, noisy": Scenario(CONFIDENT, tokens=4000, **NOISY),
    "confident, dear rows": Scenario(CONFIDENT, forward=SHARED_ROWS, tokens=4000, **NOISY),
    "confident, long text": Scenario({name: replace(drafter, seconds=3 * drafter.seconds)
                                      for name, drafter in CONFIDENT.items()}, tokens=4000,
                                     forward=ForwardCosts(0.02, FORWARD.rows, 1500.0, 0.05, 300.0, 6000.0), **NOISY),
    "delivers less": Scenario({"chain": Simulated(0.01, (0.95,), base=1.49, short=1)}),
    "short steps": Scenario(chains((0.6, 0.5), (0.8, 0.6)), decision=0.2, reading=0.005, between=0.05),
    "short steps, drafts": Scenario(chains((0.1, 0.85), (0.15, 0.8)), decision=0.1, reading=0.005, between=0.05),
    "several texts": Scenario(chains((0.4, 0.0), (0.4, 0.0)), num_texts=8, tokens=256),
    "several texts that gain": Scenario(chains((0.3, 0.85), (0.3, 0.7)), num_texts=8, tokens=512, **NOISY),
    "batch": Scenario(chains((0.1, 0.8)), num_texts=8, is_batch=True, batch_draft=0.25,
                      tokens=600),
    "batch, noisy": Scenario(CONFIDENT, forward=SHARED_ROWS, num_texts=4, is_batch=True, batch_draft=0.4,
                             tokens=600, **NOISY),
    "batch, drafts lose": Scenario(chains((0.2, 0.5), (0.3, 0.6)), forward=SHARED_ROWS, num_texts=8, is_batch=True,
                                   tokens=600, **NOISY),
    "batch, long texts": Scenario(CONFIDENT, forward=ForwardCosts(0.02, SHARED_ROWS.rows, 1500.0, 0.05), num_texts=4,
                                  is_batch=True, batch_draft=0.5, tokens=800, prompt=3000, **NOISY),
}


class Machine:
    """Makes all work of a scenario take its time."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario, self._numbers, self._is_noisy = scenario, random.Random(seed), scenario.noise > 0
        self.speed = 1.0

    def seconds(self, seconds: float) -> float:
        seconds *= self.speed
        if self._is_noisy:
            seconds *= 1 + self._scenario.noise * self._numbers.expovariate(1.0)
        if self._scenario.interruption and self._numbers.random() < 0.005:
            seconds += self._scenario.interruption
        return seconds


class ReadClock(Clock):
    """A clock whose readings take time."""

    def __init__(self, reading: float) -> None:
        super().__init__()
        self.reading = reading

    def __call__(self) -> float:
        now = self.now
        self.now += self.reading
        return now


class SimulatedDrafter:
    """Proposes the text itself where its luck says so, else another token."""

    def __init__(self, given: Simulated, text: ScenarioText, seed: str) -> None:
        self.given, self.text = given, text
        numbers = random.Random(seed)
        self.luck = [numbers.random() for _ in range(len(text.truth))]
        self.sibling_luck = [numbers.random() for _ in range(len(text.truth))]
        self.leads = [numbers.choices(range(len(LEADS)), (1, 1, 1, 1, 2, 3, 6))[0] for _ in range(len(text.truth))]
        self.confidence = Confidence() if given.kind == "confident" else None
        self.num_drafts = 0

    def begin(self, context: Context, verified: object) -> None:
        pass

    def rate(self, position: int) -> float:
        if self.given.kind == "confident":
            return LEAD_RATES[self.leads[position]]
        rates = self.given.rates
        return rates[position // self.text.scenario.turns % len(rates)]

    def guess(self, position: int) -> int:
        return int(self.text.truth[position]) + (self.luck[position] >= self.rate(position))

    def spend(self, depth: int) -> None:
        seconds = self.given.base + self.given.seconds * depth
        if self.text.scenario.is_batch:
            seconds *= self.text.scenario.batch_draft
        self.num_drafts += 1
        seconds += self.given.first * (self.num_drafts == 1)
        self.text.clock.now += self.text.machine.seconds(seconds)

    @atomic
    def propose(self, context: Context, max_depth: int) -> Tree:
        begin, depth = len(context), min(max_depth, self.given.short, 16)
        if self.confidence:
            depth = self.chain_length(begin, depth)
        guesses = [self.guess(position) for position in range(begin, begin + depth)]
        self.spend(depth)
        if self.confidence:
            self.confidence.expect(guesses, [LEADS[self.leads[begin + place]] for place in range(depth)])
        if self.given.kind == "tree":
            paths = [guesses]
            for place in range(depth):
                is_right = self.sibling_luck[begin + place] < 1 / 3
                truth = int(self.text.truth[begin + place])
                paths.append([*guesses[:place], truth if is_right and guesses[place] != truth else truth + 2])
            return from_paths(context.last, paths, "self")
        return chain(context.last, guesses, "self")

    def chain_length(self, begin: int, most: int) -> int:
        end, reach = self.confidence.end(), 1.0
        for place in range(most):
            reach *= end.rates[bisect_right(end.edges, LEADS[self.leads[begin + place]])]
            if reach < end.least:
                return place + 1
        return most

    def observe(self, context: Context, accepted: Accepted) -> None:
        if self.confidence:
            self.confidence.learn(accepted.tokens)


class TimedSuffix(SuffixDrafter):
    """`suffix` itself, by the simulated clock."""

    confidence = None

    def __init__(self, given: Simulated, text: ScenarioText) -> None:
        super().__init__(SuffixOptions(), SamplingParams())
        self.given, self.text = given, text

    @atomic
    def propose(self, context: Context, max_depth: int) -> Tree:
        self.text.clock.now += self.text.machine.seconds(self.given.base + self.given.seconds * min(8, max_depth))
        return run_alone(super().propose(context, max_depth))


def truth_of(scenario: Scenario, seed: int) -> np.ndarray:
    """The tokens of the text."""
    num_tokens, numbers = scenario.prompt + scenario.tokens + 128, random.Random(seed)
    if scenario.source == "phrases":  # a text that repeats phrases, and now and then does not
        phrases = [[numbers.randrange(500) for _ in range(numbers.randrange(4, 24))] for _ in range(30)]
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            is_new = (len(tokens) // 600 % 2) and numbers.random() < 0.8
            tokens += [numbers.randrange(500) for _ in range(8)] if is_new else numbers.choice(phrases)
        return np.array(tokens[:num_tokens], np.int32)
    if scenario.source == "loop":  # a text that repeats one passage from its hundredth token on, with a word exchanged
        passage = [numbers.randrange(500) for _ in range(40)]
        tokens = [numbers.randrange(500) for _ in range(100)]
        while len(tokens) < num_tokens:
            passage[numbers.randrange(40)] = numbers.randrange(500)
            tokens += passage
        return np.array(tokens[:num_tokens], np.int32)
    if scenario.source == "novel" and NOVELS:
        novel = NOVELS[seed % len(NOVELS)]
        begin = seed * 500 % max(1, len(novel) - num_tokens)
        return np.ascontiguousarray(novel[begin : begin + num_tokens], np.int32)
    return np.array([numbers.randrange(500) for _ in range(num_tokens)], np.int32)


NOVELS: list[np.ndarray] = []  # texts of a model, if files of them are given


class Fixed:
    """One drafter at one depth, or plain decoding, in place of `auto`."""

    def __init__(self, drafter: Any, depth: int) -> None:
        self.drafter, self.depth = drafter, depth

    @property
    def plain_steps(self) -> bool:
        return not self.depth

    def propose(self, context: Context, max_depth: int) -> Any:
        if not self.depth:
            return atomic(lambda: root_only(context.last))()
        return self.drafter.propose(context, self.depth)

    def observe(self, context: Context, accepted: Accepted) -> None:
        if self.depth:
            self.drafter.observe(context, accepted)


class ScenarioText:
    """One text of a scenario."""

    def __init__(self, scenario: Scenario, seed: int, shared: SharedStatistics, fixed: tuple[str, int] | None = None
                 ) -> None:
        self.scenario, self.machine, self.clock = scenario, Machine(scenario, seed), ReadClock(scenario.reading)
        self.truth = truth_of(scenario, seed)
        if scenario.is_batch:
            self.clock.batch_size = self.clock.together = self.clock.sharers = scenario.num_texts
        self.drafters: dict[str, Any] = {
            name: TimedSuffix(given, self) if given.kind == "suffix" else SimulatedDrafter(
                given, self, f"{name} {seed}") for name, given in scenario.drafters.items()}
        self.context = Context(self.truth[: scenario.prompt].tolist())
        self.ends = [0.0]  # when each token was written
        if fixed:
            self.auto: Any = Fixed(self.drafters.get(fixed[0]), fixed[1])
            for drafter in self.drafters.values():
                drafter.begin(self.context, None)
            return
        costs = {"plain": DraftCosts(0.0, 0.0, 0.0, 0)} | {
            name: DraftCosts(given.base * given.believed, given.seconds * given.believed,
                             2.0 if given.kind == "tree" else 1.0, min(16, given.short if given.kind == "tree" else 16))
            for name, given in scenario.drafters.items()}
        guessers = {"plain": Guesser("plain", 0.0)} | {
            name: Guesser(given.model or name, given.prior) for name, given in scenario.drafters.items()}
        self.auto = AutoDrafter(
            {"plain": PlainCandidate()} | self.drafters,
            lambda: shared.begin(
                Costs((scenario.believed or scenario.forward)._replace(
                    ahead=scenario.ahead * scenario.known_ahead), costs), guessers),
            lambda: None, shared, self.clock)
        self.auto.begin(self.context, None)
        if scenario.decision:
            self.auto.policy.decide = self.slow(self.auto.policy.decide)

    def slow(self, decide: Callable[..., None]) -> Callable[..., None]:
        def slowly(*args: Any) -> None:
            self.clock.now += self.scenario.decision
            decide(*args)
        return slowly

    @property
    def num_written(self) -> int:
        return len(self.context) - self.scenario.prompt

    def draft(self) -> Tree:
        speeds = self.scenario.speeds
        self.machine.speed = speeds[self.num_written // self.scenario.speed_tokens % len(speeds)]
        return run_alone(self.auto.propose(self.context, 99))

    def verify(self, tree: Tree, rows: float, sharers: int) -> None:
        forward = self.scenario.forward.at([rows], len(self.context), sharers, self.clock.batch_size)
        is_ahead = self.auto.plain_steps > 0 and not self.scenario.is_batch
        self.clock.now += self.machine.seconds(float(forward[0]) - is_ahead * self.scenario.ahead)
        self.clock.sharers = sharers
        path = [0]
        for token in self.truth[len(self.context) :].tolist():
            if (child := tree.children.get((path[-1], token))) is None:
                break
            path.append(child)
        tokens = tuple(self.truth[len(self.context) : len(self.context) + len(path)].tolist())
        self.context.extend(tokens)
        self.auto.observe(self.context, Accepted(
            tokens, tuple(path), tuple(tree.sources[node] for node in path[1:]),
            None if is_ahead else SimpleNamespace(), len(tree) - 1, max(tree.depths)))
        self.clock.now += self.machine.seconds(self.scenario.between + self.scenario.text * len(tokens))
        self.ends += [self.clock.now] * len(path)

    @property
    def is_finished(self) -> bool:
        return self.num_written >= self.scenario.tokens

    def slowest(self) -> float:
        """Tokens for each second in the slowest part of the text."""
        return min(PART / (end - begin) for begin, end in zip(self.ends, self.ends[PART:], strict=False))


class PlainCandidate:
    def begin(self, context: Context, verified: object) -> None:
        pass

    @atomic
    def propose(self, context: Context, max_depth: int) -> Tree:
        return root_only(context.last)

    def observe(self, context: Context, accepted: Accepted) -> None:
        pass


@dataclass
class Outcome:
    """Tokens for each simulated second: of the whole, and in the slowest part of any text."""

    rate: float
    slowest: float
    choices: dict[str, int] = field(default_factory=dict)


def write(scenario: Scenario, seed: int, fixed: tuple[str, int] | None = None) -> Outcome:
    shared = SharedStatistics()
    texts = [ScenarioText(scenario, 100 * seed + number, shared, fixed) for number in range(scenario.num_texts)]
    while any(not text.is_finished for text in texts):
        writing = texts if scenario.is_batch else [text for text in texts if not text.is_finished]
        trees = [text.draft() for text in writing]
        if scenario.is_batch:
            for has_drafts in (False, True):
                group = [pair for pair in zip(writing, trees, strict=True) if (len(pair[1]) > 1) == has_drafts]
                for text, tree in group:
                    text.verify(tree, sum(len(each) for _, each in group) / len(group), len(group))
            if max(text.num_written for text in texts) >= scenario.tokens + 100:
                break
        else:
            for text, tree in zip(writing, trees, strict=True):
                text.verify(tree, len(tree), 1)
    seconds = sum(text.clock.now for text in texts)
    outcome = Outcome(sum(text.num_written for text in texts) / seconds, min(
        (text.slowest() for text in texts if len(text.ends) > PART), default=math.nan))
    if not fixed:
        for text in texts:
            for name, count in text.auto.summary(text.num_written)["tokens_by_choice"].items():
                outcome.choices[name] = outcome.choices.get(name, 0) + count
    return outcome


def best_single(scenario: Scenario, seed: int) -> tuple[str, float]:
    """The fastest single drafter at the best of some depths, plain decoding among them, and its tokens per second."""
    tries = [("plain", 0), *((name, depth) for name in scenario.drafters for depth in (1, 2, 4, 8, 12, 16))]
    rates = {f"{name} {depth}": write(scenario, seed, (name, depth)).rate for name, depth in tries}
    best = max(rates, key=rates.__getitem__)
    return best, rates[best]


def measure(names: Sequence[str], seeds: Sequence[int], with_singles: bool = False) -> dict[str, Any]:
    """The mean rate, the rate of the slowest part, and the rates by seed, of each scenario."""
    figures: dict[str, Any] = {}
    for name in names:
        outcomes = [write(SCENARIOS[name], seed) for seed in seeds]
        figures[name] = {"rate": statistics.fmean(each.rate for each in outcomes),
                         "slowest": min(each.slowest for each in outcomes),
                         "rates": [each.rate for each in outcomes], "choices": outcomes[0].choices}
        if with_singles:
            figures[name]["plain"] = write(SCENARIOS[name], seeds[0], ("plain", 0)).rate
            figures[name]["best_single"] = best_single(SCENARIOS[name], seeds[0])
    return figures


def compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Print the scenarios whose rates changed: percent, its standard error over the seeds, slowest part in percent."""
    for name in after:
        pairs = list(zip(before[name]["rates"], after[name]["rates"], strict=False))
        changes = [100 * (new / old - 1) for old, new in pairs]
        if any(changes):
            error = statistics.stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else math.nan
            slowest = 100 * (after[name]["slowest"] / before[name]["slowest"] - 1)
            print(f"{name:32} {statistics.fmean(changes):+7.2f} % +- {error:.2f}   slowest part {slowest:+7.2f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--singles", action="store_true", help="also measure single drafters at fixed depths")
    parser.add_argument("--novel", type=Path, action="append", default=[], help="a .npy file of tokens to replay")
    parser.add_argument("names", nargs="*", default=list(SCENARIOS))
    options = parser.parse_args()
    NOVELS.extend(np.load(file) for file in options.novel)
    figures = measure(options.names or list(SCENARIOS), range(options.seeds), options.singles)
    options.output.write_text(json.dumps(figures, indent=1))
    if options.against:
        compare(json.loads(options.against.read_text()), figures)


if __name__ == "__main__":
    main()
