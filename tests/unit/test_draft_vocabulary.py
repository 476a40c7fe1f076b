"""A draft vocabulary limits what chains guess. Its logits and the texts are those of the whole vocabulary."""

from __future__ import annotations

import pytest
import torch

import longdraft
from helpers.checkpoints import VOCAB, load
from helpers.equality import SETTINGS, params_of, prompt_of
from longdraft.drafters import draft_vocabulary
from longdraft.drafters.draft_vocabulary import (
    ALL,
    AUTO_VOCABULARY,
    DraftVocabulary,
    check_draft_vocabulary,
    vocabulary_size,
)
from longdraft.drafters.self_draft import MagicDecOptions
from longdraft.errors import UsageError
from longdraft.kernels.cpu.vocabulary import PartOfVocabulary, rows_of_head
from longdraft.model.transformer import Forward, chain_rows
from longdraft.parts import draft_copy
from longdraft.request.context import Context
from longdraft.speculation.drafter import Verified


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_a_part_are_those_of_the_whole_head(tiny, quantize, dtype):
    model = load(tiny["gqa"], dtype, quantize=quantize)
    ids = torch.tensor([0, 3, 4, 63, 64, 65, 127, 128, 200, VOCAB - 1])
    part = PartOfVocabulary(ids, model.config.vocab_size)
    limited = model.with_part_of_vocabulary(part, rows_of_head(model.kernels, model.weights.head, part))
    whole, some = (m.forward(chain_rows(prompt_of(9), 0), m.new_cache(), 9).logits for m in (model, limited))
    assert torch.equal(some[:, ids], whole[:, ids])
    assert (some.isneginf().sum(1) == VOCAB - len(ids)).all()


def test_it_holds_the_tokens_of_the_text_then_the_lowest_ids(tiny):
    vocabulary = DraftVocabulary(load(tiny["gqa"]), 64)
    model = vocabulary.model(Context([300, 301, 301, 5]))
    assert model.part.ids.tolist() == [*range(62), 300, 301]
    crowded = DraftVocabulary(load(tiny["gqa"]), 64)
    ids = crowded.model(Context([*range(100, 200), *range(150, 200), 7, 7])).part.ids.tolist()
    assert ids == [7, *range(100, 113), *range(150, 200)]


def test_the_tokens_with_the_highest_mean_logits_of_verified_rows_come_before_low_ids_and_after_the_text(tiny):
    vocabulary = DraftVocabulary(load(tiny["gqa"]), 64)
    for likely in ({310: 9.0, 311: 9.0, 308: 8.0}, {309: 9.0, 311: 9.0}):
        logits = torch.zeros(3, VOCAB)
        logits[1, [*likely]] = torch.tensor([*likely.values()])
        logits[2, 312] = 99.0  # the text does not follow this row
        vocabulary.learn(Verified(Forward(logits, None, None, logits), [0, 1]))
    assert vocabulary.model(Context([300, 5])).part.ids.tolist() == [*range(59), 300, 308, 309, 310, 311]


def test_the_logits_of_a_prompts_last_rows_are_computed_for_it(tiny, monkeypatch):
    monkeypatch.setattr(draft_vocabulary, "_PROMPT_ROWS", 3)
    model, prompt = load(tiny["gqa"]), prompt_of(20)
    read = model.forward(chain_rows(prompt, 0), model.new_cache(), 0)
    vocabulary = DraftVocabulary(model, 64)
    vocabulary.learn(Verified(read, range(-5, 0)))
    fit = model.logits(read.hidden[-3:]).mean(0) - 4.0 * torch.arange(VOCAB) / VOCAB
    own = set(vocabulary.model(Context(prompt)).part.ids.tolist())
    assert set(prompt) < own
    others = [token for token in fit.argsort(descending=True).tolist() if token not in prompt]
    assert own - {*prompt} == {*others[: 64 - len(set(prompt))]}


def test_it_is_renewed_after_as_many_tokens_as_the_text_had_between_32_and_256(tiny):
    for length, wait in ((2, 32), (100, 100), (900, 256)):
        vocabulary, context = DraftVocabulary(load(tiny["gqa"]), 64), Context([1] * length)
        first = vocabulary.model(context)
        context.extend([300] * (wait - 1))
        assert vocabulary.model(context) is first
        context.extend([300])
        assert vocabulary.model(context) is not first


def test_it_is_renewed_where_the_text_has_tokens_that_it_lacks(tiny, monkeypatch):
    monkeypatch.setattr(draft_vocabulary, "_RENEW_AFTER", (4, 4))
    vocabulary, context = DraftVocabulary(load(tiny["gqa"]), 64), Context([1, 2])
    first = vocabulary.model(context)
    context.extend([3] * 8)
    assert vocabulary.model(context) is first, "it has all tokens of the text"
    context.extend([300])
    assert 300 in vocabulary.model(context).part.ids
    second = vocabulary.model(context)
    context.extend([301])
    assert vocabulary.model(context) is second, "too early"


@pytest.mark.full
@pytest.mark.parametrize("drafter", ["magicdec", "tokenswift"])
@pytest.mark.parametrize("weights", ["int4", "same"])
def test_the_text_is_that_of_plain_decoding(tiny, monkeypatch, drafter, weights):
    monkeypatch.setattr(draft_vocabulary, "_RENEW_AFTER", (8, 8))
    plain = longdraft.load(str(tiny["gqa"]), drafter="plain")
    engine = longdraft.load(str(tiny["gqa"]), drafter=drafter,
                            drafter_options={"draft_weights": weights, "draft_vocabulary": 64})
    for name in SETTINGS:
        texts = [list(made.generate(prompt_of(90), params_of(name)))[-1].stats for made in (plain, engine)]
        assert texts[0]["sha256_tokens"] == texts[1]["sha256_tokens"], name
    assert texts[1]["accepted_tokens"] > 0, "drafts were accepted"


def test_a_batch_shares_the_whole_vocabulary(tiny):
    plain = longdraft.load(str(tiny["mha"]), drafter="plain")
    engine = plain.with_drafter("magicdec", {"draft_vocabulary": 64})
    params, prompts = params_of("paper"), [prompt_of(30), prompt_of(40, 5)]
    alone = [list(plain.generate(prompt, params))[-1].stats["sha256_tokens"] for prompt in prompts]
    together = {place: event.stats["sha256_tokens"]
                for place, event in engine.generate_many(prompts, params, batch_size=2) if event.stats}
    assert [together[place] for place in range(2)] == alone


def test_its_memory_is_counted(tiny):
    plain = longdraft.load(str(tiny["gqa"]), drafter="plain")
    held = {}
    for size in (ALL, 64):
        engine = plain.with_drafter("magicdec", {"draft_vocabulary": size})
        held[size] = list(engine.generate(prompt_of(30), params_of("paper")))[-1].stats["drafter_memory_bytes"]
    assert held[64] - held[ALL] >= 64 * 48 * 4 + VOCAB * 12


def test_auto_limits_large_vocabularies_whose_head_is_a_large_share(tiny, monkeypatch):
    model = load(tiny["gqa"])
    assert vocabulary_size(AUTO_VOCABULARY, model) is None, "a small vocabulary"
    monkeypatch.setattr(draft_vocabulary, "_AUTO_MIN_VOCABULARY", 100)
    monkeypatch.setattr(draft_vocabulary, "_AUTO_SIZE", 80)
    monkeypatch.setattr(draft_copy, "_MIN_WEIGHTS_IN_TOKENS", 1)
    monkeypatch.setattr(draft_vocabulary, "_AUTO_MIN_SAVED", 0.05)
    assert vocabulary_size(AUTO_VOCABULARY, model) == 80
    monkeypatch.setattr(draft_vocabulary, "_AUTO_MIN_SAVED", 0.9)
    assert vocabulary_size(AUTO_VOCABULARY, model) is None, "the layers are what a draft token reads"
    assert vocabulary_size(ALL, model) is None and vocabulary_size(VOCAB, model) is None


@pytest.mark.parametrize("value", [0, -5, 63, "many", True])
def test_values_that_no_model_can_have_are_one_clear_line(value):
    with pytest.raises(UsageError, match=f"draft_vocabulary is .*{value}.*; allowed: auto, all, or 64 to the model's"):
        check_draft_vocabulary(value)
    with pytest.raises(UsageError, match="draft_vocabulary is"):
        MagicDecOptions(draft_vocabulary=value)


def test_a_size_beyond_the_vocabulary_and_kernels_without_it_are_one_clear_line(tiny):
    with pytest.raises(UsageError, match=f"draft_vocabulary is {VOCAB + 1}; allowed: auto, all, or 64 to {VOCAB}"):
        vocabulary_size(VOCAB + 1, load(tiny["gqa"]))
    with pytest.raises(UsageError, match="needs the compiled CPU kernels"):
        vocabulary_size(64, load(tiny["gqa"], name="reference"))
