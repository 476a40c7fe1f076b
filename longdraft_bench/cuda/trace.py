"""What steps do on the device by PyTorch's profiler: launches, copies and waits, and the time of each kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Step
from longdraft_bench.cuda.models import Bench, synchronise
from longdraft_bench.cuda.plan import CudaPlan
from longdraft_bench.cuda.speed import WARM_STEPS, plain_step, plain_steps
from longdraft_bench.cuda.texts import begin_after

_LISTED = 25  # kernels of a trace
_MOST_TOKENS = 16  # of a drafted step
_WARM_TOKENS = 30  # written before a drafted step is traced


def trace(plan: CudaPlan, bench: Bench, shape: str, context: int) -> dict[str, Any]:
    """Plain steps."""
    step, count = plain_step(bench.model(shape), context), min(plain_steps(plan), 3)
    for _ in range(min(count, WARM_STEPS)):
        run_alone(step.run(1))
    return {"context": context} | _traced(plan, bench, lambda: run_alone(step.run(1)), count)


def trace_drafts(plan: CudaPlan, bench: Bench, shape: str, context: int) -> dict[str, Any]:
    """A step of each drafter: its draft and its verification."""
    truth: list[int] = []

    def measure(label: str) -> dict[str, Any]:
        text = begin_after(plan, bench, shape, context, label, truth)
        text.write(min(_WARM_TOKENS, plan.tokens))
        truth.extend(text.new[len(truth) :])
        return _traced(plan, bench, partial(_run_step, text.step), 1)

    return {"context": context, "drafters": bench.each((label, partial(measure, label)) for label in plan.drafters)}


def _run_step(step: Step) -> None:
    run_alone(step.run(_MOST_TOKENS))


def _traced(plan: CudaPlan, bench: Bench, work: Callable[[], object], count: int) -> dict[str, Any]:
    """The figures of one call of `work`, from `count` calls."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if plan.device == "cuda" else [])]
    with profile(activities=activities) as found:
        for _ in range(count):
            work()
        synchronise(bench.kernels().device)
    by_name: dict[str, list[float]] = {}
    calls: dict[str, int] = {}
    for event in found.events() or ():
        if str(event.device_type).endswith("CUDA"):
            by_name.setdefault(event.name, []).append(float(event.device_time))
        elif event.name.startswith(("cuda", "cu")):
            calls[event.name] = calls.get(event.name, 0) + 1
    slowest = sorted(by_name, key=lambda name: -sum(by_name[name]))
    return {"calls_a_step": {name: number / count for name, number in sorted(calls.items())},
            "kernels_a_step": sum(len(times) for times in by_name.values()) / count,
            "us_a_step": sum(sum(times) for times in by_name.values()) / count,
            "kernels": [{"name": name[:120], "a_step": len(by_name[name]) / count,
                         "us_a_step": sum(by_name[name]) / count} for name in slowest[:_LISTED]]}
