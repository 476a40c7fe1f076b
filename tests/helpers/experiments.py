"""A small experiment for tests: its definition, plan and results."""

from __future__ import annotations

from pathlib import Path

from longdraft.__main__ import run
from longdraft_bench.paper import experiment as experiments
from longdraft_bench.paper import run as runner
from longdraft_bench.systems import Engines

GOLDEN = Path(__file__).parents[1] / "product" / "golden"
TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 30
EXPERIMENT = {
    "name": "small", "title": "A small one", "reference": "plain",
    "scales": {"default": {"lengths": [20, 40], "turn": 15, "prefix": 0.5}},
    "base": {"prefill": 400, "sampling": {"min_p": 0.1, "repetition_penalty": 1.2, "penalty_window": 30}},
    "systems": {
        "plain": {"drafter": "plain"}, "magicdec": {"drafter": "magicdec"},
        "paper": {"drafter": "tokenswift", "options": {"chain": 1, "tree": [1, 3, 3, 3], "budget": "prefill/2",
                                                          "recent": 16, "room": 16}},
        "per-path": {"drafter": "tokenswift", "rule": "per-path", "options": {"chain": 1, "tree": [1, 3, 3, 3]}},
        "independent": {"drafter": "tokenswift", "rule": "independent"}},
    "tables": [
        {"id": "1", "title": "By length", "measures": ["alpha", "speedup", "minutes"], "cases": [
            {"name": "MagicDec, prefix {prefill}", "system": "magicdec"},
            {"name": "paper's", "system": "paper", "paper": {"8B": {"alpha": [0.5, 0.6]}}},
            {"name": "published rule", "system": "per-path"}, {"name": "independent", "system": "independent"}]},
        {"id": "2", "title": "At the end", "layout": "final", "measures": ["distinct_1", "tau"], "cases": [
            {"name": "hot", "system": "magicdec", "sampling": {"temperature": 1.3}, "at": 25}]}],
}


def plan_of(data=EXPERIMENT, **changes) -> runner.ExperimentPlan:
    chosen = experiments.parse_experiment(data)
    plan = runner.ExperimentPlan(chosen, chosen.scale("default"), "default", [Path("text.txt")], [7], 1)
    return plan._replace(**changes)


def measured(engine, output=None, **changes):
    return runner.run_experiment(plan_of(**changes), Engines(engine), [engine.encode(TEXT)], output, {})


def bench(capfd, *arguments):
    assert run(["bench", *arguments]) == 0
    return capfd.readouterr().out
