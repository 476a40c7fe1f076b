"""Models with image input around a supported family: their text part is read, the rest left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

import longdraft
from helpers.checkpoints import VOCAB, load, write_tokenizer
from helpers.equality import prompt_of
from longdraft.checkpoint.config_file import parse_config, read_config
from longdraft.errors import ModelError
from longdraft.model.transformer import chain_rows
from longdraft.request.sampling_params import SamplingParams


def make_wrapped(folder: Path, *, is_tied: bool = False, kind: str = "mistral") -> Mistral3ForConditionalGeneration:
    torch.manual_seed(1)
    text = dict(model_type=kind, vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
                initializer_range=0.2, sliding_window=None)
    vision = dict(model_type="pixtral", hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                  num_attention_heads=2, image_size=32, patch_size=16)
    config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=is_tied)
    model = Mistral3ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def theirs_of(model: Mistral3ForConditionalGeneration, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("kind, is_tied", [("mistral", False), ("mistral", True), ("ministral3", False)])
@pytest.mark.parametrize("shard", [None, "20KB"])
def test_the_text_part_is_that_of_transformers(tmp_path, kind, is_tied, shard):
    model = make_wrapped(tmp_path, is_tied=is_tied, kind=kind)
    if shard:
        (tmp_path / "model.safetensors").unlink()
        model.save_pretrained(tmp_path, max_shard_size=shard)  # some shards have image input only
    tokens = prompt_of(60)
    ours = load(tmp_path)
    assert ours.config.is_tied == is_tied
    found = ours.logits(ours.forward(chain_rows(tokens, 0), ours.new_cache()).hidden)
    torch.testing.assert_close(found, theirs_of(model, tokens), atol=1e-4, rtol=1e-4)


def test_both_layouts_are_one_model(tmp_path):
    make_wrapped(tmp_path)
    older = load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = {name: name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_", "lm_")
             for name in tensors}
    save_file({f"model.{new}" if new.startswith("vision") else new: tensors[name] for name, new in names.items()},
              tmp_path / "model.safetensors")
    newer, tokens = load(tmp_path), prompt_of(40)
    results = [model.logits(model.forward(chain_rows(tokens, 0), model.new_cache()).hidden) for model in (older, newer)]
    assert torch.equal(*results)


def test_drafters_write_the_plain_text_and_transformers_models_are_wrapped_too(tmp_path):
    model = make_wrapped(tmp_path)
    params = SamplingParams(max_new_tokens=30, seed=3)
    texts = []
    for drafter in ("plain", "magicdec", "auto"):
        engine = longdraft.load(str(tmp_path), drafter=drafter)
        texts.append([token for event in engine.generate(prompt_of(60), params) for token in event.tokens])
    assert texts[0] == texts[1] == texts[2]
    ids = torch.tensor([prompt_of(20)])
    greedy = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    writer = longdraft.from_transformers(model, drafter="plain")
    assert torch.equal(writer.generate(ids, **greedy), model.generate(ids, **greedy))


def test_a_wrapped_family_that_is_not_supported_is_refused_by_name(tmp_path):
    make_wrapped(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "mistral4"
    with pytest.raises(ModelError, match="model_type is 'mistral4'; supported: llama"):
        parse_config(config)
    assert read_config(tmp_path).head_dim == 16
