"""The signature test: speculative text equals plain text, bit for bit, whoever drafts and whatever they say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from conftest import VOCAB, load, load_glide
from helpers import TreeDrafter, by_name, generate

from longdraft import kernels
from longdraft.core import Context, SamplingParams
from longdraft.drafters import cost_model
from longdraft.model import checkpoint, heads
from longdraft.model import config as model_config
from longdraft.model.transformer import Transformer
from longdraft.speculation.step import Tally
from longdraft.tree import Tree, chain, from_paths, root_only

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
}
DRAFTERS = {
    "auto": ("auto", {}),
    "ngram": ("ngram", dict(delay=0, seen=1)),
    "ngram, delayed": ("ngram", dict(continuations=20)),
    "suffix": ("suffix", {}),
    "suffix, delayed": ("suffix", dict(delay=20, min_probability=0, min_match=1)),
    "suffix, small index": ("suffix", dict(delay=0, capacity=24, budget=40, min_probability=0, min_match=1)),
    "tokenswift, the paper's": ("tokenswift", dict(chain=1, tree="1,3,3,3", continuations=20, seen=1)),
    "tokenswift": ("tokenswift", {}),
    "tokenswift, small cache": ("tokenswift", dict(chain=2, tree="2,2", budget=40, sinks=4, recent=8, room=8, delay=0)),
    "tokenswift, static cache": ("tokenswift", dict(cache="static", budget=40, sinks=4, recent=8, room=8)),
    "tokenswift, no remainder": ("tokenswift", dict(remainder="false", budget=40, sinks=4, recent=8, room=8)),
    "tokenswift, full cache": ("tokenswift", dict(cache="full", tree="2,2,2")),
    "tokenswift, everything grafted": ("tokenswift", dict(suffix="true", width=3, margin=9, budget=40, sinks=4,
                                                          recent=8, room=8, continuations=3, seen=1, delay=0)),
    "glide": ("glide", {}),
    "glide, long and wide": ("glide", dict(chain=20, width=3, margin=9, suffix="false")),
    "medusa": ("medusa", dict(tree="3,2,1")),
    "medusa, choices": ("medusa", dict(tree="0 1 2 0.0 0.1 1.0 0.0.0")),
    "magicdec, streaming": ("magicdec", dict(budget=24, sinks=4, refresh=5, width=2)),
    "magicdec, snapkv": ("magicdec", dict(selection="snapkv", budget=40, sinks=0, refresh=7, remainder="false",
                                          suffix="false")),
    "draft-model, itself": ("draft-model", dict(model="itself", cache="full")),
    "draft-model, window": ("draft-model", dict(model="another", budget=40, sinks=3, refresh=9, width=2)),
    "triforce": ("triforce", dict(model="another", budget=48, stride=10, window=30, sinks=2, refresh=8)),
    "triforce, n-grams": ("triforce", dict(budget=48, stride=4, floor=0.9, guesses=3)),
}


def prompt_of(length: int, seed: int = 3) -> list[int]:
    """Token ids with repetitions, so that n-grams have something to find."""
    pick = random.Random(seed)
    phrase = [pick.randrange(2, 258) for _ in range(12)]
    ids: list[int] = []
    while len(ids) < length:
        ids += phrase if pick.random() < 0.6 else [pick.randrange(2, 258) for _ in range(7)]
    return ids[:length]


def params_of(name: str) -> SamplingParams:
    return SamplingParams(max_new_tokens=NEW, seed=11, **SETTINGS[name])


MODELS = {
    "mha": ("mha", "float32", None),
    "gqa": ("gqa", "bfloat16", None),
    "gqa, reference": ("gqa", "float32", "reference"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tiny: dict[str, Path]) -> Transformer:
    """Both kinds of attention and both dtypes on the fastest kernels, and the reference."""
    name, dtype, kernels = MODELS[request.param]
    return load(tiny[name], dtype, kernels)


@pytest.fixture(scope="module")
def plain(model: Transformer) -> dict[str, list[int]]:
    """What plain decoding writes, for every setting."""
    return {name: generate(model, prompt_of(90), params_of(name), by_name("plain"), banned=[1]) for name in SETTINGS}


@pytest.fixture(scope="module")
def drafts(model: Transformer, tiny: dict[str, Path]) -> dict[str, Transformer]:
    """Models to draft with, on the target's kernels: another one, which is mostly wrong, and the target itself."""
    other = tiny["mha" if model.config.num_kv_heads == 1 else "gqa"]
    another = checkpoint.load(checkpoint.TensorFiles(other), model_config.read(other), model.kernels)
    return {"another": another, "itself": model}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_writes_the_plain_text(model, plain, tiny, drafts, drafter, settings):
    name, options = DRAFTERS[drafter]
    folder = tiny["mha" if model.config.num_kv_heads == 4 else "gqa"]
    trained = heads.load(folder / "heads", model)
    draft = drafts.get(options.get("model"))
    factory = by_name(name, trained, draft, load_glide(folder / "glide", model), **options)
    assert generate(model, prompt_of(90), params_of(settings), factory, banned=[1]) == plain[settings]


@pytest.fixture
def nobody_waits(monkeypatch):
    """`auto` tries all drafters at once, whatever that costs."""
    monkeypatch.setattr(cost_model, "_EARLY", 1e9)


@pytest.mark.usefixtures("nobody_waits")
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "tokenswift", "auto"])
def test_drafts_are_accepted_so_the_equality_is_not_that_of_plain_with_plain(model, plain, tiny, drafter):
    folder = tiny["mha" if model.config.num_kv_heads == 4 else "gqa"]
    options = {"ngram": {"seen": 1}, "suffix": {"min_match": 1, "min_probability": 0},
               "tokenswift": {"delay": 0, "seen": 1}}.get(drafter, {})
    tally = Tally()
    factory = by_name(drafter, heads.load(folder / "heads", model), **options)
    params = SamplingParams(max_new_tokens=150, temperature=0.0)
    written = generate(model, prompt_of(90), params, factory, tally=tally)
    assert written == generate(model, prompt_of(90), params, by_name("plain"))
    accepted = tally.accepted.total()
    assert accepted > 0 and tally.steps == 150 - accepted
    if drafter == "auto":
        assert {"ngram", "suffix", "self"} & set(tally.accepted)


@pytest.mark.parametrize("name", kernels.available()[:-1])
def test_threads_change_nothing(tiny, name):
    """Through our own pool, on a model large enough for it to be used."""
    model = load(tiny["mha"], "bfloat16", name)
    factory = by_name("tokenswift", heads.load(tiny["mha"] / "heads", model), delay=0)
    texts = set()
    for threads in (1, 2, 3):
        kernels.set_threads(threads)
        texts.add(tuple(generate(model, prompt_of(3000), params_of("paper"), factory)))
    kernels.set_threads(1)
    assert len(texts) == 1


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("drafter", ["plain", "tokenswift"])
def test_the_way_a_prompt_is_cut_changes_nothing(model, plain, tiny, drafter, chunk):
    folder = tiny["mha" if model.config.num_kv_heads == 4 else "gqa"]
    factory = by_name(drafter, heads.load(folder / "heads", model))
    written = generate(model, prompt_of(90), params_of("paper"), factory, chunk=chunk, banned=[1])
    assert written == plain["paper"]


@pytest.mark.parametrize("written", [1, 13, 47])
def test_a_text_cut_anywhere_goes_on_as_if_it_had_not_been(model, plain, written):
    """Resuming is generating from prompt + tokens so far: the noise is keyed by position."""
    so_far = plain["short window"][:written]
    params = SamplingParams(max_new_tokens=NEW - written, seed=11, **SETTINGS["short window"])
    rest = generate(model, prompt_of(90) + so_far, params, by_name("plain"), banned=[1])
    assert rest == plain["short window"][written:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", kernels.available())
def test_every_kernel_keeps_the_promise(tiny, name, dtype):
    model = load(tiny["gqa"], dtype, name)
    expected = generate(model, prompt_of(90), params_of("paper"), by_name("plain"))
    for drafter in ("ngram", "suffix", "tokenswift"):
        factory = by_name(drafter, heads.load(tiny["gqa"] / "heads", model), delay=0)
        assert generate(model, prompt_of(90), params_of("paper"), factory) == expected
    drafter = liar("half true", expected, 90)
    assert generate(model, prompt_of(90), params_of("paper"), lambda given: drafter) == expected


# Drafters that lie.


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
        """The true continuation four times over, siblings alike, and a false end on the last."""
        paths = [true_tokens(context, count) for count in (3, 4, 2)] + [[*true_tokens(context, 1), 5]]
        tokens, parents = [context.last], [-1]
        for path in paths:
            for depth, token in enumerate(path):
                parents.append(len(tokens) - 1 if depth else 0)
                tokens.append(token)
        return Tree(tuple(tokens), tuple(parents), ("",) + ("liar",) * (len(tokens) - 1))

    def colliding(context: Context) -> Tree:
        """Tokens that stand in the penalty window, repeated, so that the window changes along each path."""
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


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["random", "perfect", "half true", "empty", "huge", "duplicated branches",
                                  "colliding with the penalty"])
def test_a_lying_drafter_changes_nothing(model, plain, kind, settings):
    prompt = prompt_of(90)
    drafter = liar(kind, plain[settings], len(prompt))
    assert generate(model, prompt, params_of(settings), lambda given: drafter, banned=[1]) == plain[settings]


@pytest.mark.parametrize("name", [None, "reference"])
def test_a_text_across_blocks_of_the_cache_is_the_same_text(tiny, name):
    """Prefix, path and padding straddle the edge of a block of storage."""
    model = load(tiny["gqa"], name=name)
    from longdraft.kernels.reference import SPLIT

    params = SamplingParams(max_new_tokens=16, seed=5, temperature=1.0, min_p=0.05)
    prompt = prompt_of(SPLIT - 6)
    truth = generate(model, prompt, params, by_name("plain"))
    for kind in ("perfect", "half true"):
        drafter = liar(kind, truth, len(prompt))
        assert generate(model, prompt, params, lambda given, drafter=drafter: drafter) == truth
