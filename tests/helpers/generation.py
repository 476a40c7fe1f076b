"""A generation assembled from its parts, so that a test can replace the drafter, the chunk size or the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from helpers.block import LAYERS, block_of
from longdraft import drafters
from longdraft.model.transformer import Forward, ForwardRequest, Transformer, chain_rows
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree
from longdraft.sampling.sampler import MarkedTokens, Sampler
from longdraft.sampling.thinking_sampler import ThinkingSampler
from longdraft.sampling.thought import ThoughtRules
from longdraft.speculation.drafter import Accepted, Drafter, Verified
from longdraft.speculation.routine import atomic, run_alone
from longdraft.speculation.step import Step, Tally, Timings

Factory = Callable[[drafters.Resources], Drafter]


def by_name(name: str, heads: object = None, draft: Transformer | None = None, glide: object = None,
            eagle: Any = None, block: Any = None, **options: object) -> Factory:
    parsed = drafters.parse_options(name, options)

    def factory(given: drafters.Resources) -> Drafter:
        made = block_of(given.model) if name == "block" and block is None else block
        return drafters.DRAFTERS[name].build(
            parsed, given._replace(heads=heads, draft=draft, glide=glide, eagle=eagle, block=made))

    taps = (block.taps if block else LAYERS) if name == "block" else eagle.taps if eagle else ()
    factory.taps = taps if name in drafters.WITH_STATES else ()  # of the target, for the drafter
    return factory


def generate(model: Transformer, prompt: Sequence[int], params: SamplingParams, factory: Factory, *,
             chunk: int = 512, banned: Sequence[int] = (), tally: Tally | None = None,
             thought: ThoughtRules | None = None) -> list[int]:
    """Return exactly params.max_new_tokens new tokens (the engine handles stops). Fill `tally` if given.

    thought  rules of the text's thought; its given tokens are drafted then
    """
    model = model.with_taps(getattr(factory, "taps", ()))
    cache = model.new_cache()
    marked = MarkedTokens(frozenset({7, 30, 41}), frozenset({1, 9}))
    sampler = (Sampler(params, banned, marked=marked) if thought is None
               else ThinkingSampler(params, banned, marked=marked, thought=thought))
    drafter = factory(drafters.Resources(model, cache, sampler, params, None))
    context = Context(prompt)
    verified = None
    for start in range(0, len(prompt) - 1, chunk):
        rows = list(prompt[start : min(start + chunk, len(prompt) - 1)])
        result = model.forward(chain_rows(rows, start), cache)
        cache.commit(range(len(rows)))
        verified = Verified(result, [-1])
    drafter.begin(context, verified)
    step = Step(model, cache, drafter, sampler, context, Timings(), Tally() if tally is None else tally,
                drafts_forced=thought is not None)
    while context.num_new < params.max_new_tokens:
        run_alone(step.run(params.max_new_tokens - context.num_new))
    return context.slice(len(prompt), len(context)).tolist()


class TableModel:
    """A model without attention, whose logits are a function of the path of tokens."""

    def __init__(self, logits_of: Callable[[tuple[int, ...]], Sequence[float]]) -> None:
        self._logits_of = logits_of
        self._text: list[int] = []

    def forward_batch(self, asks: Sequence[ForwardRequest]) -> list[Forward]:
        (ask,) = asks
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(ask.rows.tokens, ask.rows.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        logits = torch.tensor([list(self._logits_of(path)) for path in paths])
        return [Forward(logits, (), slice(None), logits)]


class NoCache:
    length = 0

    def append(self, layer: int, k: object, v: object) -> None:
        raise AssertionError

    def commit(self, rows: Sequence[int]) -> None:
        pass


class TreeDrafter:
    """A stateless drafter: one function from the context to a tree."""

    def __init__(self, propose: Callable[[Context], Tree]) -> None:
        self._propose = propose

    def begin(self, context: Context, verified: Verified | None) -> None:
        pass

    @atomic
    def propose(self, context: Context, max_depth: int) -> Tree:
        return self._propose(context)

    def observe(self, context: Context, accepted: Accepted) -> None:
        pass
