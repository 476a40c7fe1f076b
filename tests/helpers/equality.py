"""The prompts, sampling settings and drafters of the equality tests, and the drafters that lie."""

from __future__ import annotations

import random
from itertools import cycle, islice
from pathlib import Path

import pytest

from helpers.checkpoints import VOCAB, load_glide
from helpers.eagle import load_eagle
from helpers.generation import Factory, TreeDrafter, by_name
from longdraft.model.transformer import Transformer
from longdraft.parts import heads
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree, chain, from_paths, root_only

NEW = 48
SETTINGS = {
    "greedy": dict(temperature=0.0),
    "greedy, penalty": dict(temperature=0.0, repetition_penalty=1.3, penalty_window=9),
    "paper": dict(temperature=1.0, min_p=0.1, repetition_penalty=1.2, penalty_window=1024),
    "short window": dict(temperature=1.0, min_p=0.05, repetition_penalty=1.4, penalty_window=5),
    "top-p": dict(temperature=1.0, top_p=0.9),
    "top-k": dict(temperature=1.0, top_k=40),
    "eta": dict(temperature=1.0, eta_cutoff=2e-4),
    "all of it": dict(temperature=0.7, top_k=60, top_p=0.95, min_p=0.02, eta_cutoff=1e-4, min_new_tokens=20,
                      repetition_penalty=1.1, penalty_window=30),
    "repeats": dict(temperature=0.0, dry_multiplier=1.0, dry_base=1.3, dry_allowed_length=1, dry_penalty_last_n=60,
                    repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.2, penalty_window=12,
                    no_repeat_ngram_size=4),
    "top choices": dict(temperature=0.9, temperature_last=True, dynatemp_range=0.4, xtc_probability=0.5,
                        xtc_threshold=0.02, typical_p=0.95, top_n_sigma=2.5, dry_multiplier=0.8, dry_allowed_length=1),
    "few tokens": dict(temperature=1.0, logit_bias=tuple((token, 100.0) for token in range(60, 66))),
}
EASY = "few tokens"  # with this setting every drafter guesses many tokens of a random model, with the others few
DRAFTERS = {
    "auto": ("auto", {}),
    "ngram": ("ngram", dict(delay=0, seen=1)),
    "ngram, delayed": ("ngram", dict(continuations=20)),
    "suffix": ("suffix", {}),
    "suffix, delayed": ("suffix", dict(delay=20, min_probability=0, min_match=1)),
    "suffix, small index": ("suffix", dict(delay=0, capacity=24, budget=40, min_probability=0, min_match=1)),
    "tokenswift, the paper's": ("tokenswift", dict(chain=1, tree="1,3,3,3", continuations=20, seen=1)),
    "tokenswift": ("tokenswift", {}),
    "tokenswift, small cache": ("tokenswift", dict(chain=4, tree="2,2", least=0.8, budget=40, sinks=4, recent=8, room=8,
                                                   delay=0)),
    "tokenswift, static cache": ("tokenswift", dict(cache="static", budget=40, sinks=4, recent=8, room=8)),
    "tokenswift, no remainder": ("tokenswift", dict(remainder="false", budget=40, sinks=4, recent=8, room=8)),
    "tokenswift, full cache": ("tokenswift", dict(cache="full", tree="2,2,2")),
    "tokenswift, everything grafted": ("tokenswift", dict(suffix="true", width=3, margin=9, budget=40, sinks=4,
                                                          recent=8, room=8, continuations=3, seen=1, delay=0)),
    "glide": ("glide", {}),
    "glide, long and wide": ("glide", dict(chain=12, width=3, margin=9, suffix="false")),
    "eagle": ("eagle", {}),
    "eagle, window": ("eagle", dict(window=9, sinks=2, chain=7, width=3, margin=9, suffix="false")),
    "block": ("block", dict(nodes=12, window=9, sinks=2)),
    "medusa": ("medusa", dict(tree="3,2,1")),
    "medusa, likeliest": ("medusa", dict(tree="best-9")),
    "medusa, choices": ("medusa", dict(tree="0 1 2 0.0 0.1 1.0 0.0.0")),
    "magicdec, streaming": ("magicdec", dict(budget=24, sinks=4, refresh=5, width=2, least=0.6)),
    "magicdec, snapkv": ("magicdec", dict(selection="snapkv", budget=40, sinks=0, refresh=7, remainder="false",
                                          suffix="false")),
    "draft-model, itself": ("draft-model", dict(model="itself", cache="full")),
    "draft-model, window": ("draft-model", dict(model="another", budget=40, sinks=3, refresh=9, width=2)),
    "triforce": ("triforce", dict(model="another", budget=48, stride=10, window=30, sinks=2, refresh=8)),
    "triforce, n-grams": ("triforce", dict(first="ngrams", budget=48, stride=4, floor=0.9, guesses=3)),
    "triforce, head": ("triforce", dict(first="head", budget=48, stride=10, chain=7, guesses=3)),
}
# The ways in which drafters read keys and values of the text, with a drafter that does: of the core's checks of each
# family. Drafters that read none (n-grams, suffixes, heads) are right on every cache.
READING = {
    "the full cache": "tokenswift, full cache",
    "a partial cache and its remainder": "magicdec, streaming",
    "a partial cache alone": "magicdec, snapkv",
    "a window of its own": "draft-model, window",
    "the target's cache in a layer of its own": "glide",
}
# In the core, one drafter for each way of reading.
drafters_by_extent = pytest.mark.parametrize("drafters", [
    pytest.param(list(READING.values()), id="each way of reading"),
    pytest.param(list(DRAFTERS), id="every drafter", marks=pytest.mark.full)])
LIARS = ["random", "perfect", "half true", "empty", "huge", "duplicated branches", "colliding with the penalty"]


def settings_for(drafter: str) -> list[str]:
    """The settings of a drafter in the core: two, of which all drafters together have each several times, and EASY."""
    first = 2 * [*DRAFTERS, *LIARS].index(drafter)
    return [*islice(cycle(name for name in SETTINGS if name != EASY), first, first + 2), EASY]


def prompt_of(length: int, seed: int = 3) -> list[int]:
    """Token ids with repetitions, so that n-gram drafters find matches."""
    pick = random.Random(seed)
    phrase = [pick.randrange(2, 258) for _ in range(12)]
    ids: list[int] = []
    while len(ids) < length:
        ids += phrase if pick.random() < 0.6 else [pick.randrange(2, 258) for _ in range(7)]
    return ids[:length]


def params_of(name: str) -> SamplingParams:
    return SamplingParams(max_new_tokens=NEW, seed=11, **SETTINGS[name])


def batch_params(seed: int = 1, **changes) -> SamplingParams:
    """Ten tokens for a request of a batch."""
    return SamplingParams(**(dict(max_new_tokens=10, seed=seed, ignore_eos=True) | changes))


def factory_of(drafter: str, model: Transformer, another: Transformer, folder: Path) -> Factory:
    """The factory of one of DRAFTERS, with the trained parts in the model's folder and `another` as a draft model."""
    name, options = DRAFTERS[drafter]
    draft = {"another": another, "itself": model}.get(options.get("model"))
    return by_name(name, heads.load_heads(folder / "heads", model), draft, load_glide(folder / "glide", model),
                   load_eagle(folder / "eagle", model), **options)


def liar(kind: str, truth: list[int], prompt_length: int) -> TreeDrafter:
    pick = random.Random(kind)

    def true_tokens(context: Context, count: int) -> list[int]:
        start = len(context) - prompt_length
        return truth[start : start + count]

    def random_tree(context: Context, nodes: int) -> Tree:
        parents = [-1] + [pick.randrange(node) for node in range(1, nodes)]
        tokens = [context.last] + [pick.randrange(VOCAB) for _ in range(nodes - 1)]
        return Tree(tuple(tokens), tuple(parents), ("",) + ("liar",) * (nodes - 1))

    def half_true(context: Context) -> Tree:
        told = [token if pick.random() < 0.7 else pick.randrange(VOCAB) for token in true_tokens(context, 6)]
        return from_paths(context.last, [told, [pick.randrange(VOCAB)] * 3], "liar")

    def duplicated(context: Context) -> Tree:
        """The true continuation on four branches with equal siblings; the last branch ends with a false token."""
        paths = [true_tokens(context, count) for count in (3, 4, 2)] + [[*true_tokens(context, 1), 5]]
        tokens, parents = [context.last], [-1]
        for path in paths:
            for depth, token in enumerate(path):
                parents.append(len(tokens) - 1 if depth else 0)
                tokens.append(token)
        return Tree(tuple(tokens), tuple(parents), ("",) + ("liar",) * (len(tokens) - 1))

    def colliding(context: Context) -> Tree:
        """Repeated tokens of the penalty window, so that the window changes along each path."""
        recent = context.slice(len(context) - 6, len(context)).tolist()
        ends = [[recent[n % len(recent)], recent[0], recent[0], recent[-1]] for n in range(5)]
        paths = [true_tokens(context, n) + end for n, end in enumerate(ends)]
        return from_paths(context.last, [*paths, [context.last] * 12, true_tokens(context, 12)], "liar")

    return TreeDrafter({
        "random": lambda context: random_tree(context, 20),
        "perfect": lambda context: chain(context.last, true_tokens(context, 9), "liar"),
        "half true": half_true,
        "empty": lambda context: root_only(context.last),
        "huge": lambda context: random_tree(context, 150),
        "duplicated branches": duplicated,
        "colliding with the penalty": colliding,
    }[kind])
