"""The slice `decide`: each switch, what parts of a step cost, drafters of chosen agreement, windows of a long text."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longdraft import drafters, kernels
from longdraft.kernels.cuda import experts, linear, ranker, remainder, shared_forward
from longdraft.kernels.cuda.forward_buffers import ForwardBuffers
from longdraft.kernels.cuda.kernels import CudaKernels
from longdraft.kernels.cuda.kv_store import cuda_stores
from longdraft.kernels.cuda.layers import CudaLayers
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.model import shared_choice
from longdraft.model.transformer import Transformer
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree
from longdraft.sampling import device
from longdraft.sampling.sampler import Sampler
from longdraft.speculation import ahead
from longdraft.speculation.ahead import PlainAhead
from longdraft.speculation.drafter import Accepted, Drafter, Verified
from longdraft.speculation.routine import Routine, run_together
from longdraft.speculation.step import Step, Tally, Timings
from longdraft_bench.cuda import speed
from longdraft_bench.cuda.families import cache_of
from longdraft_bench.cuda.models import Bench, switched, synchronise
from longdraft_bench.cuda.plan import CudaPlan, Oracle
from longdraft_bench.cuda.switches import LAWS
from longdraft_bench.cuda.texts import WARM_STEPS, Text, begin_after
from longdraft_bench.models.random_weights import random_eagle, random_model

_CONTEXT = 40  # tokens before texts with a switch on and off
_MAGICDEC = {"chain": 2, "budget": 24, "sinks": 2, "refresh": 4, "suffix": False}
_VERIFIED = 16  # rows of the verification that is compared with one row


class _Switched(NamedTuple):
    """Texts that the code behind a switch writes.

    module  that has the switch
    model   of the plan's `switched`
    """

    module: ModuleType
    model: str = "dense"
    drafter: str = "plain"
    texts: int = 1
    law: str = "min-p"
    quantize: str = "none"
    is_ahead: bool = False


SWITCHED = {
    "FUSES_GATE": _Switched(linear), "DECIDES_SUMS": _Switched(device, law="top-p"),
    "WRITES_AHEAD": _Switched(ahead, is_ahead=True), "DRAFTS_LAYERS": _Switched(ranker, drafter="eagle"),
    "SHARES_FORWARDS": _Switched(shared_forward, texts=2), "SHARES_CHOICES": _Switched(shared_choice, texts=2),
    "SHARES_CHAINS": _Switched(ranker, drafter="magicdec", texts=2),
    "FITS_REMAINDERS": _Switched(remainder, drafter="magicdec"),
    "GROUPS_INT4": _Switched(experts, "mixture", quantize="int4")}


def switch(plan: CudaPlan, bench: Bench, name: str) -> dict[str, Any]:
    """Whether texts of a small model of random weights are equal with the switch on and off."""
    case, texts = SWITCHED[name], []
    made = bench.kernels()
    for is_on in (True, False):
        with switched(case.module, name, is_on), switched(ahead, "LONG_TEXT", 1):
            model = random_model(plan.decide.switched[case.model], made, quantize=case.quantize)
            steps = [_step(model, case, _CONTEXT - 3 * text) for text in range(case.texts)]
            for _ in range(plan.decide.rounds):
                run_together([step.run(16) for step in steps])
            texts.append([step.context.slice(_CONTEXT + 1 - 3 * text, len(step.context)).tolist()
                          for text, step in enumerate(steps)])
    pairs = [*zip(*texts, strict=True)]
    return {"is_equal": all(on[: len(off)] == off[: len(on)] for on, off in pairs),
            "tokens": [min(map(len, pair)) for pair in pairs]}


def _step(model: Transformer, case: _Switched, context: int) -> Step:
    params = SamplingParams(max_new_tokens=200_000, seed=7, ignore_eos=True, **LAWS[case.law])
    head = random_eagle(model) if case.drafter == "eagle" else None
    cache = cache_of(model.with_taps(head.taps) if head else model, context)
    text = Context([5 + position % 7 for position in range(context + 1)])
    sampler = Sampler(params, kernels=model.kernels)
    options = {"chain": 2, "suffix": False} if head else _MAGICDEC if case.drafter == "magicdec" else {}
    drafter = drafters.new_drafter(case.drafter, drafters.parse_options(case.drafter, options),
                                   drafters.Resources(model, cache, sampler, params, eagle=head))
    drafter.begin(text, None)
    return Step(model, cache, drafter, sampler, text, Timings(), Tally(),
                ahead=PlainAhead(model, cache, sampler) if case.is_ahead else None)


def compile_ahead(plan: CudaPlan, bench: Bench) -> dict[str, Any]:
    """Compile the kernels of later parts in processes beside each other: each measures one layer of a shape once."""
    began, context = time.monotonic(), multiprocessing.get_context("spawn")
    jobs = [(shape, quantize) for shape in plan.shapes for quantize in ("none", "int4")]
    workers = [context.Process(target=_compile, args=(plan, *job), daemon=True) for job in jobs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(1.0, bench.seconds_left() - 5))
    return {"seconds": time.monotonic() - began, "exit_codes": {" ".join(job): worker.exitcode for job, worker
                                                                in zip(jobs, workers, strict=True)}}


def _compile(plan: CudaPlan, shape: str, quantize: str) -> None:
    made = kernels.choose(plan.device, plan.dtype, plan.kernels_names[0])
    model = random_model(plan.shapes[shape] | {"num_hidden_layers": 1}, made, quantize=quantize)
    speed.plain_ms(model, plan.contexts[0], 1)
    for drafter in ("eagle", "magicdec", "plain"):
        step = _step(model, _Switched(linear, drafter=drafter, is_ahead=drafter == "plain"), plan.contexts[0])
        with switched(ahead, "LONG_TEXT", 1):
            run_together([step.run(64)])
    for rows in plan.rows:
        speed.verifies(model, plan.contexts[0], rows)()


def omissions(plan: CudaPlan, bench: Bench, shape: str, context: int) -> dict[str, Any]:
    """Milliseconds of the layers of one row and of a verification, as they are and without one kind of kernel each.

    Their results are wrong: what a step without a kernel gains is what the kernel costs, with the idle time around it.
    """
    model = bench.model(shape)

    def measure(rows: int) -> dict[str, Any]:
        return {"layers_ms": without(rows, {}), **{
            f"without {label}": without(rows, replaced) for label, replaced in _OMITTED.items()}}

    def without(rows: int, replaced: dict[str, object]) -> float:
        assert isinstance(model.kernels, CudaKernels)
        layers = CudaLayers(model.kernels, model.weights.layers, model.geometry)
        with ExitStack() as stack:
            for name, method in replaced.items():
                stack.enter_context(switched(CudaLayers, name, method))
            return layers_ms(layers, model, context, rows, plan.repeats)

    return bench.each((f"{rows} rows", partial(measure, rows))
                      for rows in ((1, _VERIFIED) if plan.device == "cuda" else (1,)))


def _nothing(layers: CudaLayers, buffers: ForwardBuffers, *given: Any) -> None: ...


def _no_norm(layers: CudaLayers, buffers: ForwardBuffers, x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """What the next part reads, as it was."""
    return buffers.x, buffers.normed


def _no_product(layers: CudaLayers, buffers: ForwardBuffers, source: Tensor, gate_up: CudaLinear) -> Tensor:
    """What the product after gate and up reads, as it was."""
    width = gate_up.out_features // 2
    return buffers.inner.view(-1)[: buffers.rows * width].view(buffers.rows, width)


# Methods of the layers by what they launch, and what takes their place
_OMITTED: dict[str, dict[str, object]] = {
    "rotation": {"_finish_qkv": _nothing}, "attention": {"_attention": _nothing}, "norms": {"_add_and_norm": _no_norm},
    "gate and up": {"_gated": _no_product}, "small kernels": {"_finish_qkv": _nothing, "_add_and_norm": _no_norm}}


def layers_ms(layers: CudaLayers, model: Transformer, context: int, rows: int, repeats: int) -> float:
    """Milliseconds of all layers of a model in one graph, for a chain of rows after `context` ones."""
    stores = cuda_stores(cache_of(model, context).stores)
    for store in stores:
        store.reserve_drafts(128)
    buffers = ForwardBuffers(layers, rows, stores, False)
    buffers.where.copy_(torch.tensor([context, min(store.room for store in stores)]))
    buffers.parents.copy_(torch.arange(-1, rows - 1))
    return speed.graph_us(model.kernels.device, [lambda: layers.run(buffers, stores)], repeats) / 1e3


class OracleDrafter:
    """Drafts as another drafter does, at its cost. Its guesses are then replaced: in each place of the chain by the
    true token with a given probability, otherwise by another one."""

    def __init__(self, drafter: Drafter, truth: Sequence[int], start: int, agreement: float, vocabulary: int) -> None:
        """truth: the tokens from position `start` on; beyond them every guess is wrong."""
        self._drafter, self._truth, self._start = drafter, truth, start
        self._agreement, self._vocabulary = agreement, vocabulary
        self._draws = np.random.default_rng(11)

    def begin(self, context: Context, verified: Verified | None) -> None:
        self._drafter.begin(context, verified)

    def observe(self, context: Context, accepted: Accepted) -> None:
        self._drafter.observe(context, accepted)

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        tree = yield from self._drafter.propose(context, max_depth)
        truth = self._truth[len(context) - self._start :]
        tokens, last = list(tree.tokens), 0  # the deepest node of the chain so far
        for node in range(1, len(tree)):
            depth = tree.depths[node] - 1
            is_first = tree.parents[node] == last
            is_right = is_first and depth < len(truth) and self._draws.random() < self._agreement
            true = truth[depth] if depth < len(truth) else -1
            tokens[node] = true if is_right else (true + 1) % self._vocabulary
            last = node if is_first else last
        return replace(tree, tokens=tuple(tokens))


def oracles(plan: CudaPlan, bench: Bench, shape: str, context: int) -> dict[str, Any]:
    """Plain decoding and each oracle after the same text: milliseconds of a token, of a drafted token and of the rest
    of a step, whether the texts are equal, and the speed that these and the oracle's agreement predict."""
    plain = begin_after(plan, bench, shape, context, "plain", [])
    plain_ms = _measured(plain, plan.decide.tokens + plan.decide.further)["ms_a_token"]
    bench.keep({"plain_ms": plain_ms})

    def measure(oracle: Oracle) -> dict[str, Any]:
        text = _begin_oracle(plan, bench, shape, context, oracle, plain.new)
        found = _measured(text, plan.decide.tokens)
        drafted = found["drafted_a_step"]
        expected = sum(oracle.agreement**depth for depth in range(round(drafted) + 1))
        step_ms = found["rest_of_step_ms"] + drafted * found["draft_ms"]
        return found | {"in_plain_speed": plain_ms / found["ms_a_token"], "tokens_expected": expected,
                        "in_plain_speed_expected": plain_ms * expected / step_ms,
                        "is_equal": _begin_alike(text.new, plain.new)}

    return {"plain_ms": plain_ms} | bench.each((name, partial(measure, oracle))
                                               for name, oracle in plan.decide.oracles.items())


def _begin_oracle(plan: CudaPlan, bench: Bench, shape: str, context: int, oracle: Oracle, truth: Sequence[int]) -> Text:
    """A text of the oracle after `context` tokens, which `truth` follows."""
    def wrap(drafter: Drafter) -> Drafter:
        return OracleDrafter(drafter, truth, context + 1, oracle.agreement, bench.stretched(shape).config.vocab_size)

    return begin_after(plan, bench, shape, context, (oracle.drafter, oracle.options), [], wrap)


def _measured(text: Text, count: int) -> dict[str, float]:
    """Of `count` tokens after the first steps, which capture graphs: milliseconds of a token, of a drafted token and of
    the rest of a step; tokens and drafted tokens of a step."""
    for _ in range(WARM_STEPS):
        text.write(1)
    before, tally = replace(text.step.timings), text.step.tally
    steps, drafted = tally.steps, sum(tally.drafted.values())
    done = text.write(count)
    synchronise(text.step.model.kernels.device)
    steps, drafted, now = tally.steps - steps, sum(tally.drafted.values()) - drafted, text.step.timings
    seconds, tokens, draft = sum(spent for spent, _ in done), sum(new for _, new in done), now.draft - before.draft
    return {"ms_a_token": seconds * 1e3 / tokens, "tokens_a_step": tokens / steps, "drafted_a_step": drafted / steps,
            "draft_ms": draft * 1e3 / max(1, drafted), "rest_of_step_ms": (seconds - draft) * 1e3 / steps}


def _begin_alike(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two texts are equal as far as both go."""
    return a[: len(b)] == b[: len(a)]


def windows(plan: CudaPlan, bench: Bench, shape: str) -> dict[str, Any]:
    """At places of a long text: plain decoding, then oracles from the same rows. Their texts must be equal.

    The milliseconds of a token grow linearly with the text, so the places give the minutes of the whole.
    """
    decide, measured = plan.decide, {}
    for context in reversed(decide.windows):
        plain = begin_after(plan, bench, shape, context, "plain", [])
        window = measured[context] = {"plain": _measured(plain, decide.drafted + decide.further)}
        for name in decide.in_windows:
            text = _begin_oracle(plan, bench, shape, context, decide.oracles[name], plain.new)
            window[name] = _measured(text, decide.drafted) | {"is_equal": _begin_alike(text.new, plain.new)}
            bench.keep({"windows": measured})

    def minutes(name: str) -> float:
        ms = [measured[context][name]["ms_a_token"] for context in decide.windows]
        return float(np.trapezoid(ms, decide.windows) / (decide.windows[-1] - decide.windows[0])) * plan.whole / 6e4

    plain_minutes = minutes("plain")
    return {"windows": measured, "plain_minutes": plain_minutes, "is_equal": all(
        window[name]["is_equal"] for window in measured.values() for name in decide.in_windows),
        **{name: {"minutes": minutes(name), "in_plain_speed": plain_minutes / minutes(name)}
           for name in decide.in_windows}}
