"""`auto`: what it measures of costs and acceptance, and what it decides."""

from __future__ import annotations

import random

import pytest

import longdraft
from helpers.checkpoints import make_checkpoint
from longdraft.core import Context, SamplingParams
from longdraft.drafters.auto import AutoDrafter
from longdraft.drafters.cost_model import (
    AcceptanceByDepth,
    Candidate,
    ForwardCost,
    LinearCost,
    NodeAcceptance,
    SharedStatistics,
)
from longdraft.model.routine import atomic, run_alone
from longdraft.speculation.drafter import Accepted
from longdraft.tree import Tree, chain, from_paths, root_only


def test_a_linear_cost_is_fitted_to_scattered_measurements():
    line, numbers = LinearCost(0.5), random.Random(1)
    for _ in range(200):
        x = numbers.randint(1, 12)
        line.add(x, 2 + 3 * x + numbers.gauss(0, 0.5))
    assert line.at(5) == pytest.approx(17, rel=0.05) and line.at(12) == pytest.approx(38, rel=0.05)
    assert line.slope == pytest.approx(3, rel=0.1)


def test_a_linear_cost_keeps_its_slope_while_x_does_not_vary_and_cuts_an_outlier():
    line = LinearCost(0.5)
    for _ in range(60):
        line.add(4, 8.0)
    assert line.at(8) == pytest.approx(12) and line.at(0) == pytest.approx(4)
    line.add(4, 1000.0)
    assert line.at(4) < 9


def test_the_cost_of_a_verification_grows_with_the_context():
    verify = ForwardCost(weights=1000)
    for rows in (1, 4, 8, 1, 4, 8):
        verify.add([(rows, 1000)], 2.0 * (1 + 0.02 * rows))
    assert verify.at(4, 9000) == pytest.approx(5 * verify.at(4, 1000), rel=1e-3)
    assert verify.per_row(1000) == pytest.approx(0.04, rel=0.3)


def test_a_forward_has_a_constant_cost_for_each_request():
    """A tenth of a millisecond for each request: much for a short cache, little for a long one."""
    cost = ForwardCost(weights=1000)
    for _ in range(40):
        cost.add([(1, 1000)] * 4, 1e-6 * 5000 + 4e-4)
    assert cost.at(1, 0, 4) == pytest.approx(1e-6 * 250 + 1e-4, rel=0.2)
    assert cost.at(1, 100_000, 4) == pytest.approx(0.1, rel=0.2)


def test_depths_that_were_not_tried_are_expected_to_do_as_well_as_the_last_one():
    depths = AcceptanceByDepth(4)
    for accepted in (0, 1, 2, 3) * 30:
        depths.add(2, accepted)
    first, second, third, fourth = depths.reached()
    assert first == pytest.approx(0.75, abs=0.05) and second == pytest.approx(0.5, abs=0.05)
    assert third == pytest.approx(second * second / first) and fourth == pytest.approx(third * second / first)


def test_a_new_request_starts_with_the_acceptance_of_the_earlier_ones():
    others = AcceptanceByDepth(4)
    for _ in range(50):
        others.add(4, 3)
    own = others.of_a_request()
    assert own.reached() == pytest.approx(others.reached(), abs=0.1)
    for _ in range(80):
        own.add(4, 0)
    assert own.reached()[0] < 0.1 < 0.9 < others.reached()[0]


def test_acceptance_is_counted_by_source_depth_and_rank():
    acceptance = NodeAcceptance()
    tree = from_paths(1, [(2, 4), (3,)], "self")
    for step in range(300):
        acceptance.add(tree, [0, 1, 2] if step % 2 else [0, 3] if step % 10 == 0 else [0])
    reach = acceptance.reach(tree)
    assert reach[0] == 1 and reach[1] == reach[2] / (reach[2] / reach[1])
    assert reach[1] == pytest.approx(0.5, abs=0.1) and reach[2] == pytest.approx(reach[1], abs=0.05)
    assert reach[3] == pytest.approx(0.1, abs=0.06)


def test_a_tree_keeps_the_wanted_nodes_below_wanted_ones():
    tree = from_paths(1, [(2, 4), (3, 5)], "self")
    kept = tree.kept([True, False, True, True, True])
    assert kept == from_paths(1, [(3, 5)], "self")
    assert tree.kept([True] * 5) is tree


@pytest.mark.parametrize("draft_seconds, expected", [(0.1, range(5, 17)), (1.5, range(2, 5)), (30.0, range(1, 2))])
def test_the_best_depth_follows_from_what_drafts_cost(draft_seconds, expected):
    candidate, verify, numbers = Candidate(16), ForwardCost(1), random.Random(3)
    for step in range(400):
        depth = 1 + step % 16
        accepted = next((d for d in range(depth) if numbers.random() > 0.7), depth)
        verify.add([(1 + depth, 99)], 5.0)
        candidate.add(depth, chain(1, range(2, 2 + depth), "self"), accepted, draft_seconds * depth)
    assert candidate.rate(verify, 99).depth in expected


class Clock:
    """A clock of a request alone that shows `now`."""

    batch_size = 1.0

    def __init__(self, now: list[float]) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now[0]


class Paced:
    """A drafter whose steps take a known time and write a known number of tokens."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds, self.observed = clock, seconds, 0

    def begin(self, context, verified):
        pass

    @atomic
    def propose(self, context, max_depth):
        self.clock[0] += self.seconds
        return root_only(context.last)

    def observe(self, context, accepted):
        self.observed = len(context)


def test_auto_drafts_with_the_fastest_and_notices_when_that_changes():
    clock = [0.0]
    paces = {name: Paced(clock, seconds) for name, seconds in (("plain", 1.0), ("slow", 3.0), ("fast", 0.5))}
    drafter = AutoDrafter(paces, clock=Clock(clock))
    context = Context([1])
    drafter.begin(context, None)

    def write(steps: int) -> None:
        for _ in range(steps):
            run_alone(drafter.propose(context, 9))
            context.extend([1])
            drafter.observe(context, Accepted((1,), (0,), (), None))
            assert paces[drafter.active].observed == len(context), "the next drafter has seen the whole text"

    write(10_000)
    assert drafter.turns["fast"] > 0.95 * 10_000
    assert clock[0] < 1.03 * 10_000 * 0.5, "probing costs little more than its budget"
    paces["fast"].seconds = 2.0  # drafting no longer pays
    before, began = drafter.turns["plain"], clock[0]
    write(5_000)
    assert drafter.turns["plain"] - before > 0.95 * 5_000
    assert clock[0] - began < 1.04 * 5_000
    assert sum(sum(counts.values()) for counts in drafter.choices) == 15_000


def test_tokens_behind_the_end_are_not_counted():
    clock = [0.0]
    drafter, context = AutoDrafter({"plain": Paced(clock, 1.0)}, clock=Clock(clock)), Context([1])
    drafter.begin(context, None)
    run_alone(drafter.propose(context, 9))
    context.extend([1, 1, 1])
    drafter.observe(context, Accepted((1, 1, 1), (0,), (), None))
    summary = drafter.summary(1)
    assert summary["tokens_by_choice"] == {"plain": 1} == summary["choices"][0]
    assert drafter.summary(3)["tokens_by_choice"] == {"plain": 3}


def test_a_request_starts_with_what_the_earlier_ones_have_measured():
    clock, shared = [0.0], SharedStatistics()
    paces = {name: Paced(clock, seconds) for name, seconds in (("plain", 1.0), ("fast", 0.5), ("slow", 9.0))}
    for number in range(20):
        drafter, context, began = AutoDrafter(paces, shared, Clock(clock)), Context([1]), clock[0]
        drafter.begin(context, None)
        for _ in range(50):
            run_alone(drafter.propose(context, 9))
            context.extend([1])
            drafter.observe(context, Accepted((1,), (0,), (), None))
        assert number == 0 or (drafter.turns["fast"] >= 45 and clock[0] - began < 62 * 0.5)


def test_of_concurrent_requests_one_makes_the_first_probe():
    clock, shared = [0.0], SharedStatistics()
    paces = {name: Paced(clock, seconds) for name, seconds in (("plain", 1.0), ("slow", 1.9), ("fast", 0.5))}
    texts = [(AutoDrafter(paces, shared, Clock(clock)), Context([1])) for _ in range(8)]
    for drafter, context in texts:
        drafter.begin(context, None)
    for _ in range(200):
        for drafter, context in texts:
            run_alone(drafter.propose(context, 9))
            context.extend([1])
            drafter.observe(context, Accepted((1,), (0,), (), None))
    turns = [drafter.turns for drafter, _ in texts]
    assert sum(each["slow"] for each in turns) < 24, "a first probe, and now and then another one"
    assert all(each["fast"] > 170 for each in turns)


def test_a_first_probe_that_was_cut_short_is_made_by_another_request():
    shared = SharedStatistics()
    fast, plain = shared.candidate("fast", 0), shared.candidate("plain", 0)
    assert shared.claim_first_probe("fast") and not shared.claim_first_probe("fast"), "one request probes it"
    for _ in range(1000):  # that request was stopped: it measured nothing
        plain.add(0, root_only(1), 0, 1.0)
    assert shared.claim_first_probe("fast")
    fast.add(0, root_only(1), 0, 1.0)
    assert not shared.claim_first_probe("fast"), "there are measurements now"


def test_a_candidate_that_was_slow_at_first_is_not_locked_out():
    """Two hopeless steps end a first probe; a later probe must measure what came after them."""
    clock = [0.0]

    class Waking(Paced):
        @atomic
        def propose(self, context, max_depth):
            self.clock[0] += 40.0 if self.proposals < 3 else 0.3
            self.proposals += 1
            return root_only(context.last)

    waking = Waking(clock, 0.0)
    waking.proposals = 0
    drafter, context = AutoDrafter({"plain": Paced(clock, 1.0), "waking": waking}, clock=Clock(clock)), Context([1])
    drafter.begin(context, None)
    for _ in range(8000):
        run_alone(drafter.propose(context, 9))
        context.extend([1])
        drafter.observe(context, Accepted((1,), (0,), (), None))
    assert drafter.turns["waking"] > 4000


@pytest.mark.parametrize("seconds, is_soon", [(9.0, False), (0.9, True)])
def test_first_probes_follow_each_other_while_they_gain_and_wait_where_they_lose(seconds, is_soon):
    clock = [0.0]
    paces = {name: Paced(clock, pace) for name, pace in (("plain", 1.0), ("one", seconds), ("other", seconds))}
    drafter, context = AutoDrafter(paces, clock=Clock(clock)), Context([1])
    drafter.begin(context, None)
    for _ in range(60):
        run_alone(drafter.propose(context, 9))
        context.extend([1])
        drafter.observe(context, Accepted((1,), (0,), (), None))
    assert drafter.turns["one"] > 0 and bool(drafter.turns["other"]) == is_soon
    assert clock[0] < 60 * 1.0 + 5 * seconds, "a first probe at most"


def test_the_requests_of_an_engine_share_their_measurements(tiny, tmp_path):
    engine = longdraft.load(str(tiny["gqa"]), drafter="auto")
    steps = []
    for _ in range(2):
        for _ in engine.generate("abcabc" * 9, SamplingParams(max_new_tokens=40, seed=1)):
            pass
        steps.append(engine.loaded.shared_statistics.candidate("plain", 0).steps)
    assert 0 < steps[0] <= steps[1]
    shared = engine.loaded.shared_statistics
    assert engine.with_drafter("auto").loaded.shared_statistics is shared
    make_checkpoint(tmp_path, num_hidden_layers=1)
    other = engine.with_drafter("draft-model", {"model": str(tmp_path)})
    assert other.loaded.shared_statistics is not shared, "another draft model has other costs and acceptance"


class Chained(Paced):
    """Drafts a chain that costs `seconds` for each token."""

    @atomic
    def propose(self, context, max_depth):
        self.depth = min(max_depth, 10)
        self.clock[0] += self.seconds * self.depth
        return chain(context.last, [2] * self.depth, "self")


def test_auto_drafts_as_deep_as_pays_and_removes_guesses_not_worth_their_row():
    clock, numbers = [0.0], random.Random(5)
    chained = Chained(clock, 1.0)
    drafter = AutoDrafter({"plain": Paced(clock, 0.0), "chain": chained}, SharedStatistics(1e6), Clock(clock))
    context = Context([2])
    drafter.begin(context, None)
    rows: list[int] = []
    for _ in range(3000):
        tree = run_alone(drafter.propose(context, 99))
        clock[0] += 10.0 + 0.05 * len(tree)
        right = next((d for d in range(max(tree.depths)) if numbers.random() > 0.6), max(tree.depths))
        path = tuple(range(right + 1))
        context.extend([2] * len(path))
        drafter.observe(context, Accepted((2,) * len(path), path, ("self",) * right, None))
        rows.append(len(tree))
    assert drafter.turns["chain"] > 0.95 * sum(drafter.turns.values())
    assert 3 <= sum(rows[-500:]) / 500 <= 6, "1 + .6 + .36 + ... over 10 + depth is best at three or four"
    assert isinstance(tree, Tree) and drafter.nbytes == 0


# With other requests.


def test_the_parts_of_a_forward_add_up_to_it_and_a_row_costs_what_it_adds():
    cost, numbers = ForwardCost(weights=1000), random.Random(4)

    def seconds(parts: list[tuple[int, int]]) -> float:
        return 1e-3 * (1000 + sum(context for _, context in parts)) + 1e-5 * sum(
            rows * (1000 + context) for rows, context in parts)

    for _ in range(300):
        parts = [(numbers.randint(1, 12), numbers.randint(1, 5000)) for _ in range(numbers.randint(1, 16))]
        cost.add(parts, seconds(parts))
    parts = [(1, 200), (8, 4000), (3, 100)]
    shares = [cost.at(rows, context, len(parts)) for rows, context in parts]
    assert sum(shares) == pytest.approx(seconds(parts), rel=0.05)
    assert cost.per_row(4000) == pytest.approx(0.05, rel=0.1), "with other requests or without"
    assert cost.at(8, 4000, 3) - cost.at(7, 4000, 3) == pytest.approx(cost.per_row(4000))
    assert cost.share(1) == 1 and cost.share(16) == pytest.approx(1 / 16 + 0.01, rel=0.2)


class Crowd(Clock):
    """A request among others that do the same: its part of each forward, for drafts over few keys and verifications."""

    def __init__(self, per_row: float) -> None:
        super().__init__([0.0])
        self.per_row = per_row

    def forward(self, rows: int, context: int) -> None:
        self.now[0] += 1000 / self.batch_size + context + self.per_row * rows * (1000 + context)


def written_among(texts: list[float], per_row: float) -> tuple[list[float], list[float]]:
    """For each number of texts: the share of tokens that were drafted, and the mean rows of a verification."""
    crowd, numbers, context = Crowd(per_row), random.Random(5), Context([2] * 1000)

    class Drafting(Chained):
        @atomic
        def propose(self, context, max_depth):
            depth = min(max_depth, 10)
            for _ in range(depth):
                crowd.forward(1, 100)
            return chain(context.last, [2] * depth, "self")

    candidates = {"plain": Paced([0.0], 0.0), "chain": Drafting([0.0], 0.0)}
    drafter = AutoDrafter(candidates, SharedStatistics(1000), crowd)
    drafter.begin(context, None)
    shares, sizes = [], []
    for number in texts:
        crowd.batch_size = number
        rows, turns = 0, []
        for _ in range(600):
            tree = run_alone(drafter.propose(context, 99))
            rows += len(tree)
            crowd.forward(len(tree), 1000)
            right = next((d for d in range(max(tree.depths)) if numbers.random() > 0.7), max(tree.depths))
            path = tuple(range(right + 1))
            turns.append(drafter.active == "chain")
            context.extend([2] * len(path))
            drafter.observe(context, Accepted((2,) * len(path), path, ("self",) * right, None))
        shares.append(sum(turns[100:]) / 500)
        sizes.append(rows / 600)
    return shares, sizes


def test_the_cost_of_a_forward_of_many_short_requests_does_not_diverge():
    """Milliseconds as measured with the bundled model: most of such a forward is the constant cost of each request."""
    cost, numbers = ForwardCost(weights=1920), random.Random(6)

    def seconds(parts: list[tuple[int, int]]) -> float:
        return (0.53 + sum(0.05 + 0.02 * rows + 0.00028 * context for rows, context in parts)) / 1e3

    for _ in range(30_000):
        parts = [(numbers.randint(1, 8), numbers.randint(64, 400)) for _ in range(8)]
        cost.add(parts, seconds(parts) * numbers.uniform(0.9, 1.1))
    whole = seconds([(1, 200)] * 8)
    assert 8 * cost.at(1, 200, 8) == pytest.approx(whole, rel=0.1)
    assert cost.at(8, 200, 8) < 4 * cost.at(1, 200, 8), "rows are cheap beside the weights and the text"


def test_drafting_begins_to_pay_when_other_requests_share_the_weights_and_stops_when_they_leave():
    """Alone a draft reads 1,100 and a verification 2,000; among sixteen, 160 and 1,060."""
    shares, _ = written_among([1, 16, 1], per_row=1e-4)
    assert shares[0] < 0.3 and shares[1] > 0.9 and shares[2] < 0.3


def test_trees_are_smaller_where_the_rows_of_all_requests_keep_the_processor_busy():
    """By arithmetic a chain of three is best (four rows) where rows are free, and one of two where they are not."""
    _, free = written_among([16, 16], per_row=1e-4)
    _, busy = written_among([16, 16], per_row=0.08)
    assert busy[1] < 0.8 * free[1]
