"""Equality: speculative text equals plain text, bit for bit, with every drafter and with drafters that lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.checkpoints import load, load_glide
from helpers.eagle import load_eagle
from helpers.equality import DRAFTERS, EASY, LIARS, NEW, SETTINGS, liar, params_of, prompt_of, settings_for
from helpers.generation import by_name, generate
from longdraft import kernels
from longdraft.checkpoint import checkpoint, config_file
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.drafters.auto import costs
from longdraft.drafters.auto.costs import Costs, DraftCosts, ForwardCosts
from longdraft.model.transformer import Transformer
from longdraft.parts import heads
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation.step import Tally

MODELS = {
    "mha": ("mha", "float32", None),
    "gqa": ("gqa", "bfloat16", None),
    "gqa, reference": ("gqa", "float32", "reference"),
}


# The settings that a drafter is run with: three, of which two change from drafter to drafter, or each of them.
extents = pytest.mark.parametrize("extent", ["three settings", pytest.param("every setting", marks=pytest.mark.full)])


def settings_of(extent: str, model: Transformer, drafter: str) -> list[str]:
    """On the slow reference kernels three settings are enough in both extents: the sampler does not depend on them."""
    return settings_for(drafter) if extent == "three settings" or model.kernels.name == "reference" else list(SETTINGS)


@pytest.fixture(scope="module", params=[name if "reference" not in name else pytest.param(name, marks=pytest.mark.full)
                                        for name in MODELS])
def model(request: pytest.FixtureRequest, tiny: dict[str, Path]) -> Transformer:
    """Multi-head and grouped-query attention and both dtypes on the fastest kernels, and the reference kernels."""
    name, dtype, kernels = MODELS[request.param]
    return load(tiny[name], dtype, kernels)


@pytest.fixture(scope="module")
def plain(model: Transformer) -> dict[str, list[int]]:
    """The tokens of plain decoding for each of the sampling settings."""
    return {name: generate(model, prompt_of(90), params_of(name), by_name("plain"), banned=[1]) for name in SETTINGS}


@pytest.fixture(scope="module")
def drafts(model: Transformer, tiny: dict[str, Path]) -> dict[str, Transformer]:
    """Draft models on the target's kernels: another model, which is mostly wrong, and the target itself."""
    other = tiny["mha" if model.config.num_kv_heads == 1 else "gqa"]
    another = checkpoint.load_transformer(TensorFiles(other), config_file.read_config(other), model.kernels)
    return {"another": another, "itself": model}


@extents
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_writes_the_plain_text(model, plain, tiny, drafts, drafter, extent):
    name, options = DRAFTERS[drafter]
    folder = tiny["mha" if model.config.num_kv_heads == 4 else "gqa"]
    trained = heads.load_heads(folder / "heads", model)
    draft = drafts.get(options.get("model"))
    glide, eagle = load_glide(folder / "glide", model), load_eagle(folder / "eagle", model)
    factory = by_name(name, trained, draft, glide, eagle, **options)
    accepted = {}
    for settings in settings_of(extent, model, drafter):
        tally = Tally()
        written = generate(model, prompt_of(90), params_of(settings), factory, banned=[1], tally=tally)
        assert written == plain[settings], settings
        accepted[settings] = tally.accepted.total()
    assert accepted[EASY] > 0 or name == "auto", "plain would be compared with plain"


@pytest.fixture
def free_drafts(monkeypatch):
    """`auto` believes that drafts cost nothing, so it drafts."""
    def believed(identity, names, agree, measured):
        return Costs(ForwardCosts.by_size(1e6), {name: DraftCosts(0.0, 0.0, 1.0, 4) for name in names})

    monkeypatch.setattr(costs, "load_or_measure", believed)


@pytest.mark.usefixtures("free_drafts")
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "tokenswift", "auto"])
def test_drafts_are_accepted_so_equality_does_not_compare_plain_with_plain(model, plain, tiny, drafter):
    folder = tiny["mha" if model.config.num_kv_heads == 4 else "gqa"]
    options = {"ngram": {"seen": 1}, "suffix": {"min_match": 1, "min_probability": 0},
               "tokenswift": {"delay": 0, "seen": 1}}.get(drafter, {})
    tally = Tally()
    factory = by_name(drafter, heads.load_heads(folder / "heads", model), **options)
    params = SamplingParams(max_new_tokens=150, temperature=0.0)
    written = generate(model, prompt_of(90), params, factory, tally=tally)
    assert written == generate(model, prompt_of(90), params, by_name("plain"))
    accepted = tally.accepted.total()
    assert accepted > 0 and tally.steps == 150 - accepted
    if drafter == "auto":
        assert {"ngram", "suffix", "self"} & set(tally.accepted)


@pytest.mark.parametrize("name", kernels.available()[:-1])
def test_the_number_of_threads_changes_nothing(tiny, name):
    """The prompt is long enough for the kernels' thread pool to be used."""
    model = load(tiny["mha"], "bfloat16", name)
    factory = by_name("tokenswift", heads.load_heads(tiny["mha"] / "heads", model), delay=0)
    texts = set()
    for threads in (1, 2, 3):
        kernels.set_threads(threads)
        texts.add(tuple(generate(model, prompt_of(3000), params_of("paper"), factory)))
    kernels.set_threads(1)
    assert len(texts) == 1


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("drafter", ["plain", "tokenswift"])
def test_the_chunk_size_of_prefill_changes_nothing(model, plain, tiny, drafter, chunk):
    folder = tiny["mha" if model.config.num_kv_heads == 4 else "gqa"]
    factory = by_name(drafter, heads.load_heads(folder / "heads", model))
    written = generate(model, prompt_of(90), params_of("paper"), factory, chunk=chunk, banned=[1])
    assert written == plain["paper"]


@pytest.mark.parametrize("written", [1, 13, 47])
def test_a_text_cut_anywhere_continues_as_the_uncut_text(model, plain, written):
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
        factory = by_name(drafter, heads.load_heads(tiny["gqa"] / "heads", model), delay=0)
        assert generate(model, prompt_of(90), params_of("paper"), factory) == expected
    drafter = liar("half true", expected, 90)
    assert generate(model, prompt_of(90), params_of("paper"), lambda given: drafter) == expected


# Drafters that lie.


@extents
@pytest.mark.parametrize("kind", LIARS)
def test_a_lying_drafter_changes_nothing(model, plain, kind, extent):
    prompt = prompt_of(90)
    tokens = NEW // 2 if kind == "huge" else NEW  # 150 drafted tokens in each step, of which few are true
    for settings in settings_of(extent, model, kind):
        drafter, params = liar(kind, plain[settings], len(prompt)), replace(params_of(settings), max_new_tokens=tokens)
        text = generate(model, prompt, params, lambda given, drafter=drafter: drafter, banned=[1])
        assert text == plain[settings][:tokens], settings


@pytest.mark.parametrize("name", [None, pytest.param("reference", marks=pytest.mark.full)])
def test_a_text_that_crosses_a_cache_block_is_the_same_text(tiny, name):
    """Prefix, draft path and padding lie across the edge of a block of cache storage."""
    model = load(tiny["gqa"], name=name)
    from longdraft.kernels.reference_store import SPLIT

    params = SamplingParams(max_new_tokens=12, seed=5, temperature=1.0, min_p=0.05)
    prompt = prompt_of(SPLIT - 6)
    truth = generate(model, prompt, params, by_name("plain"))
    for kind in ("perfect", "half true") if name is None else ("half true",):
        drafter = liar(kind, truth, len(prompt))
        assert generate(model, prompt, params, lambda given, drafter=drafter: drafter) == truth
