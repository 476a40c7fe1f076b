"""Checks of every family with an architecture of its own (tests/helpers/family_checks.py): families times checks.

The dense families are in test_families.py. What one family has besides is in the test with its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

import longdraft
from helpers.checkpoints import load, make_glide, make_heads
from helpers.eagle import make_eagle
from helpers.equality import LIARS, drafters_by_extent, prompt_of
from helpers.extents import extent
from helpers.families import CPU_FAMILIES, GEMMA4, HYBRIDS, MIXTURES, UNIFIED, make_family
from helpers.family_checks import (
    check_against_transformers,
    check_batch_and_resumed_text,
    check_drafters,
    check_drafts_are_accepted,
    check_liar,
    check_quantised_texts,
    check_rows,
)
from longdraft import kernels
from longdraft.checkpoint import sizing
from longdraft.checkpoint.config_file import read_config


@pytest.mark.parametrize("name", [*CPU_FAMILIES, *GEMMA4, *UNIFIED, *MIXTURES, *HYBRIDS])
def test_the_models_are_those_of_transformers(tmp_path, name):
    if name in HYBRIDS:  # rounding adds up in their states
        check_against_transformers(tmp_path, name, tolerance=5e-4, spread=0.05)
    else:
        check_against_transformers(tmp_path, name)


class Family(NamedTuple):
    """How a family is checked.

    tokens      of each text
    lied_about  dtype of the texts of drafters that lie
    has_glide   a glide layer drafts, too
    draft       family of the smaller model that drafts; "": the model itself
    batched     drafters of batches and of resumed texts
    """

    tokens: int = 20
    lied_about: str = "bfloat16"
    has_glide: bool = True
    draft: str = ""
    batched: tuple[str, ...] = ("auto", "suffix", "magicdec")


CHECKED = {
    **dict.fromkeys(CPU_FAMILIES, Family()),
    **dict.fromkeys(GEMMA4, Family(has_glide=False, batched=("auto", "magicdec"))),
    "glm4": Family(has_glide=False),
    "gpt_oss": Family(14, "float32", batched=("magicdec",)),
    "qwen3_moe": Family(14, "float32", batched=("magicdec",)),
    "qwen3_5": Family(24, draft="llama", batched=(
        "auto", "ngram", "suffix", "tokenswift", "medusa", "magicdec", "glide", "eagle", "triforce")),
}


class Made(NamedTuple):
    """A model folder with trained parts, and beside it `draft`, the folder of a smaller model if one drafts."""

    folder: Path
    family: Family


@pytest.fixture(scope="module", params=CHECKED)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    root, family = tmp_path_factory.mktemp("family"), CHECKED[request.param]
    folder = root / "model"
    make_heads(folder / "heads", make_family(folder, request.param))
    make_eagle(folder / "eagle")
    if family.has_glide:
        make_glide(folder / "glide", folder)
    if family.draft:
        make_family(root / "draft", family.draft)
    return Made(folder, family)


@pytest.mark.parametrize("name, dtype", extent(
    [(name, dtype) for name in kernels.available() for dtype in ("float32", "bfloat16")],
    [(kernels.available()[0], "float32"), (kernels.available()[0], "bfloat16"), ("reference", "float32")]))
def test_rows_have_the_same_bits_one_by_one_together_and_in_a_tree(made, name, dtype):
    check_rows(made.folder, name, dtype)


@drafters_by_extent
@pytest.mark.parametrize("dtype, settings", [("float32", dict(temperature=1.0, min_p=0.1, repetition_penalty=1.2)),
                                             ("bfloat16", dict(temperature=0.0))])
def test_drafters_write_the_plain_text(made, dtype, settings, drafters):
    draft = load(made.folder.parent / "draft", dtype) if made.family.draft else None
    check_drafters(made.folder, drafters, dtype, settings, made.family.tokens, draft)


@pytest.mark.parametrize("kind", extent(LIARS, ["half true", "colliding with the penalty"]))
def test_lying_drafters_do_not_change_the_text(made, kind):
    check_liar(made.folder, kind, made.family.lied_about, made.family.tokens)


def test_drafts_of_the_whole_cache_and_of_a_small_one_are_accepted(made):
    """Windows, soft caps, sinks, states and several rotations hold in drafts, too: in the chain of one call, and in the
    remainder."""
    check_drafts_are_accepted(made.folder)


@pytest.mark.parametrize("made", extent(CHECKED, ["glm4", "gpt_oss", "qwen3_moe"]), indirect=True, scope="module")
def test_texts_of_a_batch_and_resumed_texts_are_the_plain_ones(made, tmp_path):
    for drafter in made.family.batched:
        check_batch_and_resumed_text(made.folder, drafter, tmp_path / drafter)


def test_quantised_models_have_one_text_for_all_drafters(made):
    check_quantised_texts(made.folder)


@pytest.mark.parametrize("name", extent([*CPU_FAMILIES, *GEMMA4, *MIXTURES, *HYBRIDS], ["gpt_oss", "qwen3_5"]))
def test_a_model_of_transformers_in_memory_is_the_same_model(tmp_path, name):
    theirs = make_family(tmp_path, name)
    writer = longdraft.from_transformers(AutoModelForCausalLM.from_pretrained(tmp_path), drafter="plain")
    ids = torch.tensor([prompt_of(40)])
    greedy = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(writer.generate(ids, **greedy), theirs.generate(ids, **greedy))
    scalars = sum(tensor.numel() for name, tensor in theirs.named_buffers() if name.endswith("layer_scalar"))
    parameters = sum(tensor.numel() for tensor in theirs.parameters()) + scalars
    assert sizing.model_sizes(read_config(tmp_path)).parameters == parameters
