"""Hybrids and mixtures of experts, and chains that trained layers draft for several texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from longdraft.cache.full import FullCache
from longdraft.cache.partial import PartialCache
from longdraft.drafters.auto.calibration import random_cache
from longdraft.drafters.chain import Chain
from longdraft.drafters.eagle import EagleDraftModel
from longdraft.drafters.glide import GlideDraftModel
from longdraft.kernels.chain_plan import Ranked
from longdraft.kernels.launched import LaunchedWork
from longdraft.model.transformer import Forward, Rows, Transformer, chain_rows
from longdraft.request.context import Context
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone
from longdraft_bench.cuda.models import Bench, device_ms
from longdraft_bench.cuda.plan import CudaPlan
from longdraft_bench.cuda.speed import SAMPLING
from longdraft_bench.cuda.switches import CHAIN, chains_of_texts, self_drafting, self_drafts
from longdraft_bench.models.random_weights import random_eagle, random_glide

_ROOM = 256  # positions after a context
_WINDOW, _SINKS = 2048, 4  # rows that an EAGLE head sees
Drafts = Callable[[Context], LaunchedWork[list[Ranked] | None]]


def family_rows(plan: CudaPlan, bench: Bench, shape: str, context: int) -> dict[str, Any]:
    """Whether every row of a tree has the bits of plain decoding along its path, in a whole model.

    `differs_in` names the first row that differs, and the first layer with attention whose output does; or None.
    """
    model, (count, depth) = bench.model(shape), (16, 9) if plan.device == "cuda" else (4, 3)
    parents = [*range(-1, depth - 1), *range(count - depth)]  # a chain, and a leaf beside each of its first rows
    paths = [_path(parents, leaf) for leaf in range(depth - 1, count)]
    positions = [context + len(_path(parents, row)) - 1 for row in range(count)]
    tokens = [5 + 3 * row % 29 for row in range(count)]
    tree = model.forward(Rows(tokens, positions, parents), cache_of(model, context), count)
    different: dict[int, str] = {}
    for path in paths:
        cache = cache_of(model, context)
        for place, row in enumerate(path):
            plain = model.forward(chain_rows([tokens[row]], context + place), cache, 1)
            cache.commit([0])
            if not torch.equal(plain.logits[0], tree.logits[row]):
                different.setdefault(row, _difference(tree, row, plain))
        bench.keep({"rows": count, "compared": path, "different": different})
    return {"rows": count, "plain_steps": sum(map(len, paths)), "cases": different,
            "differs_in": next((f"row {row}: {place}" for row, place in sorted(different.items())), None)}


def _path(parents: Sequence[int], row: int) -> list[int]:
    """The rows from the root of a tree down to this one."""
    return [] if row < 0 else [*_path(parents, parents[row]), row]


def _difference(tree: Forward, row: int, plain: Forward) -> str:
    outputs = zip(tree.attention_output.output, plain.attention_output.output, strict=True)
    found = next((layer for layer, (rows, alone) in enumerate(outputs) if not torch.equal(rows[row], alone[0])), None)
    return "after the last attention" if found is None else f"attention {found}"


def cache_of(model: Transformer, context: int) -> FullCache:
    """Random rows, and random states of delta layers. The same each time."""
    cache, generator = random_cache(model, context, _ROOM), torch.Generator(model.kernels.device).manual_seed(8)
    for state in cache.states.current if cache.states else ():
        state.matrix.normal_(0, 0.1, generator=generator)
        state.history.normal_(0, 1, generator=generator)
    return cache


def family_chains(plan: CudaPlan, bench: Bench, shape: str, context: int) -> dict[str, Any]:
    """Milliseconds of the chains that a model drafts with its own weights over a partial cache, and whether the guesses
    are equal: of one text in one graph and token by token, of several texts in one graph and in a graph for each."""
    model = bench.model(shape)

    def of_one() -> dict[str, Any]:
        times, guesses = dict[str, Any](), []
        for name in ("chain", "token by token"):
            text, cache, drafts, sampler = self_drafting(model, context)
            whole = Chain(drafts, sampler, 2, "self", 0.5)
            draft = whole.in_one_call if name == "chain" else whole.step_by_step

            def work(text: Context = text, cache: PartialCache = cache, draft: Any = draft) -> list[list[int]]:
                places = run_alone(draft(text, [text.last], CHAIN))
                cache.drop_drafts()
                return [place.tokens[:1] for place in places]

            times[name] = device_ms(model.kernels.device, work, plan.repeats)
            guesses.append(work())
        return times | {"is_same_chain": guesses[0] == guesses[1]}

    several = ((f"{count} texts", partial(chains_of_texts, plan, model, partial(self_drafts, model), context, count))
               for count in ((2, 8) if plan.device == "cuda" else (2,)))
    return bench.each([("1 text", of_one), *several])


def layer_chains(plan: CudaPlan, bench: Bench, shape: str, context: int) -> dict[str, Any]:
    """Milliseconds of the chains that an EAGLE head and a glide layer draft for several texts, in one graph and in a
    graph for each, and whether their guesses are equal."""
    target = bench.model(shape)

    def measure(make: Callable[[Transformer], Callable[[int], Drafts]], count: int) -> dict[str, Any]:
        drafts = make(target)

        def of_text(context: int) -> Callable[[], LaunchedWork[list[Ranked] | None]]:
            return partial(drafts(context), Context([5 + place % 7 for place in range(context + 1)]))

        return chains_of_texts(plan, target, of_text, context, count) | {"tokens": CHAIN}

    return bench.each((f"{name}, {count} texts", partial(measure, make, count))
                      for name, make in (("eagle", _eagle), ("glide", _glide))
                      for count in ((2, 8) if plan.device == "cuda" else (2,)))


def _eagle(target: Transformer) -> Callable[[int], Drafts]:
    head = random_eagle(target)
    tapped = target.with_taps(head.taps)
    return lambda context: _drafts(target, EagleDraftModel(head, random_cache(tapped, context, _ROOM), _WINDOW, _SINKS,
                                                           CHAIN))


def _glide(target: Transformer) -> Callable[[int], Drafts]:
    layer = random_glide(target)
    return lambda context: _drafts(target, GlideDraftModel(layer, target, random_cache(target, context, _ROOM), CHAIN))


def _drafts(target: Transformer, drafts: EagleDraftModel | GlideDraftModel) -> Drafts:
    chain = Chain(drafts, Sampler(SAMPLING, kernels=target.kernels), 2, "layers", 0.5)
    return lambda text: chain.in_one_call(text, [text.last], CHAIN)
