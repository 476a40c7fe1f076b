"""What a visit can turn off, measured on and off: plain decoding ahead, filters on the device, texts side by side,
drafts in graphs, the upkeep of partial caches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from longdraft.cache.full import FullCache
from longdraft.cache.partial import PartialCache
from longdraft.cache.remainder import new_fit
from longdraft.cache.row_selection import heaviest_positions
from longdraft.drafters.auto.calibration import random_cache
from longdraft.drafters.chain import Chain, SelfDraftModel
from longdraft.drafters.self_draft import MagicDecOptions, TokenSwiftOptions, new_partial_cache
from longdraft.drafters.streaming_model import StreamingDraftModel
from longdraft.drafters.template import ranked_heads
from longdraft.kernels import AttentionRows
from longdraft.kernels.chain_plan import Ranked
from longdraft.kernels.cuda import ranker, remainder, shared_forward
from longdraft.kernels.interface import RemainderFit
from longdraft.kernels.launched import LaunchedWork, finished, read_together
from longdraft.model import shared_choice
from longdraft.model.transformer import Forward, ForwardRequest, Transformer, tree_rows
from longdraft.parts.heads import ChainedHeads, Head
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Trie, chain
from longdraft.sampling import device
from longdraft.sampling.sampler import Sampler
from longdraft.speculation import ahead
from longdraft.speculation.ahead import PlainAhead
from longdraft.speculation.routine import run_alone, run_together
from longdraft.speculation.step import Step
from longdraft_bench.cuda.models import Bench, device_ms, switched, synchronise
from longdraft_bench.cuda.plan import CudaPlan
from longdraft_bench.cuda.speed import SAMPLING, plain_step, rate_of

_ROOM = 256  # positions after a context
_AHEAD_TOKENS = 64
_SAME = 2  # tokens of a round that are compared: times take different numbers of rounds
CHAIN = 5  # tokens of a chain
_TREE = (3, 2, 1)  # guesses of each head
_STEPS_OF_FIT = 8  # of four rows: the fit is solved once
LAWS: dict[str, dict[str, Any]] = {
    "min-p": dict(min_p=0.1), "top-p": dict(temperature=0.6, top_p=0.9), "eta": dict(eta_cutoff=3e-4),
    "top-k, top-p": dict(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)}


def plain_ahead(plan: CudaPlan, bench: Bench, shape: str, context: int, quantize: str = "none") -> dict[str, Any]:
    """Milliseconds of a token of plain decoding while a text is written, ahead of the host and step by step; those of
    the memory's floor."""
    model, texts = bench.model(shape, quantize), []
    size = model.weights_bytes + context * model.cache_bytes_per_token
    times: dict[str, Any] = {"floor_ms": size / rate_of(plan, bench) * 1e3}
    count = _AHEAD_TOKENS if plan.device == "cuda" else 13
    for is_on in (True, False):
        step = plain_step(model, context)
        assert isinstance(step.cache, FullCache)
        step = step._replace(ahead=PlainAhead(model, step.cache, step.sampler) if is_on else None)
        with switched(ahead, "LONG_TEXT", 1):
            for _ in range(count // 2):  # graphs are captured
                run_alone(step.run(count))
            synchronise(model.kernels.device)
            began = time.perf_counter()
            for _ in range(count):
                run_alone(step.run(2 * count))
            synchronise(model.kernels.device)
        times["ahead" if is_on else "steps"] = (time.perf_counter() - began) / count * 1e3
        texts.append(step.context.slice(context, len(step.context)).tolist())
        bench.keep(times)
    return times | {"is_equal": texts[0] == texts[1]}


def laws(plan: CudaPlan, bench: Bench, shape: str, context: int) -> dict[str, Any]:
    """Milliseconds of a verification, choice included, with the filters on the device and on the host."""
    model = bench.model(shape)
    cache, text = random_cache(model, context, _ROOM), Context([5] * (context + 1))

    def measure(settings: dict[str, Any], rows: int) -> dict[str, Any]:
        params = SamplingParams(max_new_tokens=200_000, seed=7, ignore_eos=True, **settings)
        tree, times, chosen = chain(5, [5] * (rows - 1), "guess"), dict[str, Any](), []
        for is_on in (True, False):
            with switched(device, "DECIDES_SUMS", is_on):
                sampler = Sampler(params, kernels=model.kernels)

            def work(sampler: Sampler = sampler) -> list[int]:
                result = model.forward(tree_rows(tree, context), cache, rows)
                cache.commit([])
                if sampler.on_device and result.source:
                    path, tokens = sampler.on_device.walk((result.source, result.hidden), tree, text,
                                                          lambda rows, places: None)
                    return path + tokens
                return sampler.choose(result.logits, tree, text)

            times["device" if is_on else "host"] = device_ms(model.kernels.device, work, plan.repeats)
            chosen.append(sampler.choose(model.forward(tree_rows(tree, context), cache, rows).logits, tree, text))
            cache.commit([])
        return times | {"is_equal": chosen[0] == chosen[1]}

    cases = LAWS.items() if plan.device == "cuda" else [*LAWS.items()][1:2]
    return bench.each((f"{label}, {rows} rows", partial(measure, settings, rows)) for label, settings in cases
                      for rows in ((1, 16) if plan.device == "cuda" else (1,)))


def side_by_side(plan: CudaPlan, bench: Bench, shape: str, context: int) -> dict[str, Any]:
    """Milliseconds of a forward of several texts, together and one after another; of a round of plain steps, with one
    choice for all and with one for each; and of their chains of self-drafts, in one graph and in a graph for each.
    Whether their bits are equal."""
    model = bench.model(shape)

    def measure(count: int, rows: int) -> dict[str, Any]:
        caches = [random_cache(model, context - text, _ROOM) for text in range(count)]
        tree, times, results = chain(5, [5] * (rows - 1), "guess"), dict[str, Any](), []
        requests = [ForwardRequest(model, tree_rows(tree, cache.length), cache, rows) for cache in caches]

        def work() -> list[Forward]:
            return model.forward_batch(requests)

        for is_on in (True, False):
            with switched(shared_forward, "SHARES_FORWARDS", is_on):
                times["together" if is_on else "in turn"] = device_ms(model.kernels.device, work, plan.repeats)
                results.append([result.logits.clone() for result in work()])
        times["is_equal"] = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        if rows > 1:
            return times
        return times | _rounds(plan, model, context, count) | chains_of_texts(plan, model, partial(self_drafts, model),
                                                                                   context, count)

    return bench.each((f"{count} texts, {rows} rows", partial(measure, count, rows))
                      for count in ((2, 4, 8) if plan.device == "cuda" else (2,))
                      for rows in ((1, 4) if plan.device == "cuda" else (1,)))


def _rounds(plan: CudaPlan, model: Transformer, context: int, count: int) -> dict[str, Any]:
    """Of `count` texts: milliseconds of a round, and whether both ways choose the same tokens."""
    times, texts = dict[str, Any](), []
    laws = {"round": SAMPLING, "round, top-p": replace(SAMPLING, **LAWS["top-p"])}
    for (name, params), is_on in itertools.product(laws.items(), (True, False)):
        steps = [plain_step(model, context - text, params) for text in range(count)]
        with switched(shared_choice, "SHARES_CHOICES", is_on):
            times[name if is_on else f"{name}, choices in turn"] = device_ms(
                model.kernels.device, partial(_run_round, steps), plan.repeats)
        places = [context + 1 - text for text in range(count)]
        texts.append([step.context.slice(place, place + _SAME).tolist()
                      for step, place in zip(steps, places, strict=True)])
    return times | {"is_same_text": texts[::2] == texts[1::2]}


def chains_of_texts(plan: CudaPlan, model: Transformer,
                    drafts_after: Callable[[int], Callable[[], LaunchedWork[list[Ranked] | None]]], context: int,
                    count: int) -> dict[str, Any]:
    """Milliseconds of the chains of `count` texts, whose guesses the host reads at once, and whether one graph and a
    graph for each give the same guesses.

    drafts_after  a new text after so many tokens; what it returns drafts its chain of CHAIN tokens
    """
    times, guesses = dict[str, Any](), []
    for is_on in (True, False):
        texts = [drafts_after(context - text) for text in range(count)]
        with switched(ranker, "SHARES_CHAINS", is_on):
            def work(texts: Sequence[Callable[[], LaunchedWork[list[Ranked] | None]]] = texts) -> list[object]:
                routines = [drafts() for drafts in texts]
                read_together([next(routine) for routine in routines])
                return [finished(routine) for routine in routines]

            times["chains" if is_on else "chains in turn"] = device_ms(model.kernels.device, work, plan.repeats)
            guesses.append(work())
    return times | {"is_same_chain": guesses[0] == guesses[1]}


def self_drafting(model: Transformer, context: int) -> tuple[Context, PartialCache, SelfDraftModel, Sampler]:
    """A text after so many random rows, with what drafts over a partial cache with its remainder."""
    cache, text = random_cache(model, context, _ROOM), Context([5 + place % 7 for place in range(context + 1)])
    result = model.forward(tree_rows(chain(5, [5] * 7, "guess"), context), cache, 8)
    cache.commit([])
    options = MagicDecOptions(budget=min(192, context // 2), sinks=4, refresh=4)
    partial_cache = new_partial_cache(options, model, cache)
    partial_cache.update(AttentionRows.all(result.attention_output))
    return text, partial_cache, SelfDraftModel(model, partial_cache), Sampler(SAMPLING, kernels=model.kernels)


def self_drafts(model: Transformer, context: int) -> Callable[[], LaunchedWork[list[Ranked] | None]]:
    """A text's chain; see `self_drafting`. Rows of drafts are dropped."""
    text, partial_cache, drafts, sampler = self_drafting(model, context)

    def draft() -> LaunchedWork[list[Ranked] | None]:
        places = yield from Chain(drafts, sampler, 2, "self", 0.5).in_one_call(text, [text.last], CHAIN)
        partial_cache.drop_drafts()
        return places

    return draft


def _run_round(steps: Sequence[Step]) -> None:
    """A plain step of each text."""
    run_together([step.run(1) for step in steps])


def small_drafts(plan: CudaPlan, bench: Bench, shape: str) -> dict[str, Any]:
    """Milliseconds of a chain of a model of this shape, and of a tree of its heads, in graphs and from the host."""
    model = bench.model(shape)
    text = Context([5 + place % 7 for place in range(40)])

    def measure(drafts: Callable[[Transformer, Context], Callable[[], Callable[[], list[int]]]]) -> dict[str, Any]:
        draft, times, guesses = drafts(model, text), dict[str, Any](), []
        for is_on in (True, False):
            with switched(ranker, "DRAFTS_LAYERS", is_on):
                work = draft()
                times["graphs" if is_on else "host"] = device_ms(model.kernels.device, work, plan.repeats)
                guesses.append(work())
        return times | {"is_equal": guesses[0] == guesses[1]}

    return bench.each((name, partial(measure, drafts)) for name, drafts in (("chain", _chain), ("heads", _heads)))


def upkeep(plan: CudaPlan, bench: Bench, shape: str, context: int) -> dict[str, Any]:
    """Milliseconds of the upkeep of a partial cache for a step of four rows, in a graph and by PyTorch, with a solution
    every 32 rows, and how far the fits differ; of a selection of heavy hitters, and the floor of reading keys."""
    model, times, maps = bench.model(shape), dict[str, Any](), []
    cache = random_cache(model, context, _ROOM)
    size = TokenSwiftOptions().partial_budget(model)
    stores = random_cache(model, size.budget, _ROOM).stores
    found = model.forward(tree_rows(chain(5, [5] * 3, "guess"), context), cache, 4).attention_output
    found.lse.add_(1.0)  # keys of a random cache have nearly equal shares: something is left out
    rows = AttentionRows.all(found)
    for is_on in (True, False):
        with switched(remainder, "FITS_REMAINDERS", is_on):
            fit = new_fit(model.kernels, stores, found.lse.shape[2])

        def work(fit: RemainderFit = fit) -> None:
            for _ in range(_STEPS_OF_FIT):
                fit.update(stores, size.budget, rows)

        times["graph" if is_on else "pytorch"] = device_ms(model.kernels.device, work, plan.repeats) / _STEPS_OF_FIT
        maps.append(fit.update(stores, size.budget, rows).clone())
        bench.keep(times)
    queries = found.queries[:, [0, 1, 2, 3] * 2]
    keys = [store.bytes_of(context) / 2 for store in cache.stores]

    def select() -> None:
        for layer, store in enumerate(cache.stores):
            heaviest_positions(store.weights(queries[layer], context), size.selected, size.sinks, size.recent)

    times["selection"] = device_ms(model.kernels.device, select, plan.repeats)
    return times | {"selection_floor": sum(keys) / rate_of(plan, bench) * 1e3,
                    "differs_by": (maps[0] - maps[1]).abs().max().item()}


def _chain(model: Transformer, text: Context) -> Callable[[], Callable[[], list[int]]]:
    def new() -> Callable[[], list[int]]:
        sampler = Sampler(SAMPLING, kernels=model.kernels)
        small = StreamingDraftModel(model, model.config.vocab_size, 128, 4, 32)
        whole = Chain(small, sampler, 1, "draft")
        return lambda: run_alone(whole.draft(Trie(text.last), text, [text.last], CHAIN))[1]

    return new


def _heads(model: Transformer, text: Context) -> Callable[[], Callable[[], list[int]]]:
    kernels, hidden = model.kernels, model.config.hidden_size
    pick = torch.Generator(kernels.device).manual_seed(6)
    norm = torch.ones(hidden, dtype=kernels.dtype, device=kernels.device)
    layers = tuple(Head((kernels.pack(torch.randn(hidden, hidden, generator=pick, device=kernels.device) / hidden),),
                        norm, norm) for _ in _TREE)
    heads, row = ChainedHeads(layers, model), torch.randn(1, hidden, generator=pick, device=kernels.device)

    def new() -> Callable[[], list[int]]:
        sampler, given = Sampler(SAMPLING, kernels=kernels), row.to(kernels.dtype)
        return lambda: [places[0] for places in finished(ranked_heads(sampler, heads, given, None, text, (), _TREE))]

    return new
