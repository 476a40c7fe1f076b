"""Texts of an engine whose model has a head in its folder: an EAGLE head, one of P-EAGLE, or a block head."""

from __future__ import annotations

import pytest

import longdraft
from helpers import block, eagle, resuming
from helpers.checkpoints import make_checkpoint
from helpers.equality import prompt_of
from longdraft.request.sampling_params import SamplingParams

KINDS = {
    "EAGLE-3": ("eagle", eagle.Shape()),
    "P-EAGLE": ("eagle", eagle.Shape(mask=300, layers=2, has_own_embedding=True)),
    "block": ("block", block.Shape()),
}


@pytest.fixture(scope="module", params=KINDS)
def folder_and_drafter(request, tmp_path_factory):
    """A model with a head of each kind, and the drafter that uses it."""
    made, (drafter, shape) = tmp_path_factory.mktemp("model"), KINDS[request.param]
    make_checkpoint(made)
    (block.write_block if drafter == "block" else eagle.write_eagle)(made / drafter, shape)
    return str(made), drafter


def test_a_head_in_the_models_folder_is_found_and_drafts(folder_and_drafter):
    folder, drafter = folder_and_drafter
    params, hashes = SamplingParams(max_new_tokens=60, seed=2, ignore_eos=True), set()
    for name in (drafter, "plain", "auto"):
        engine = longdraft.load(folder, drafter=name)
        stats = [event.stats for event in engine.generate("The same story. " * 8, params)][-1]
        hashes.add(stats["sha256_tokens"])
        if name == drafter:
            assert stats["by_source"][drafter]["drafted"] > 0
            assert [part for part in ("eagle", "block") if getattr(engine, part)] == [drafter]
    assert len(hashes) == 1


def test_texts_of_a_batch_and_texts_that_begin_alike_are_the_plain_texts(folder_and_drafter):
    """The second round reuses the prompt's keys and values, whose states are not known."""
    folder, drafter = folder_and_drafter
    prompts = [prompt_of(200), [*prompt_of(200), 5], prompt_of(30, seed=9)]
    params = [SamplingParams(max_new_tokens=20, seed=seed, temperature=seed / 2, ignore_eos=True) for seed in range(3)]
    texts = []
    for name in (drafter, "plain"):
        engine = longdraft.load(folder, drafter=name)
        texts += [resuming.written_together(engine, prompts, params) for _ in range(2)]
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_a_text_resumed_after_any_step_equals_the_uncut_text(folder_and_drafter, tmp_path):
    """The head keeps nothing: the states come from the forwards that read the text again."""
    folder, drafter = folder_and_drafter
    engine = longdraft.load(folder, drafter=drafter)
    wanted = resuming.written(engine.with_drafter("plain").generate("It was", SamplingParams(**resuming.SETTINGS)))
    for after in (1, 6):
        resuming.cut(engine, tmp_path / str(after), after)
        rest = resuming.written(engine.resume(tmp_path / str(after)))
        assert rest[1] == wanted[1] and rest[2]["by_source"][drafter]["drafted"] > 0
