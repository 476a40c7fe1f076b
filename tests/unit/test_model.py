"""The transformer against `transformers`, on random checkpoints; loading is strict both ways."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from helpers.checkpoints import load, make_checkpoint
from longdraft.checkpoint import config_file, hub
from longdraft.errors import ModelError
from longdraft.journal import config_hash
from longdraft.journal.config_hash import config_sha256
from longdraft.model.config import ModelConfig
from longdraft.model.transformer import chain_rows

ROPES = {
    "default": dict(rope_type="default", rope_theta=10000.0),
    "far": dict(rope_type="default", rope_theta=500000.0),
    "linear": dict(rope_type="linear", factor=4.0, rope_theta=10000.0),
    "llama3": dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64, rope_theta=10000.0),
    "yarn": dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=128, rope_theta=10000.0),
    "yarn, own factor": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=10000.0,
                             attention_factor=0.8, beta_fast=16.0, beta_slow=2.0),
}


def logits_of(folder, tokens: list[int], dtype: str = "float32") -> torch.Tensor:
    model = load(folder, dtype)
    return model.logits(model.forward(chain_rows(tokens, 0), model.new_cache()).hidden)


def theirs(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def tokens_of(count: int) -> list[int]:
    return torch.randint(2, 300, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("is_tied", [True, False])
def test_logits_agree_with_transformers(tmp_path, rope, kv_heads, is_tied):
    base = make_checkpoint(tmp_path, num_key_value_heads=kv_heads, tie_word_embeddings=is_tied,
                           rope_parameters=ROPES[rope])
    tokens = tokens_of(200)
    torch.testing.assert_close(logits_of(tmp_path, tokens), theirs(base, tokens), atol=1e-4, rtol=1e-4)


def test_biases_and_an_own_head_dim(tmp_path):
    base = make_checkpoint(tmp_path, attention_bias=True, mlp_bias=True, head_dim=20)
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    base.save_pretrained(tmp_path)
    tokens = tokens_of(60)
    torch.testing.assert_close(logits_of(tmp_path, tokens), theirs(base, tokens), atol=1e-4, rtol=1e-4)


def test_bfloat16_agrees_within_its_rounding(tmp_path):
    base = make_checkpoint(tmp_path, dtype=torch.bfloat16, initializer_range=0.1)
    tokens = tokens_of(60)
    exact = theirs(LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), tokens)
    ours, bf16 = logits_of(tmp_path, tokens, "bfloat16"), theirs(base, tokens)
    assert (ours - exact).abs().mean() <= 1.2 * (bf16 - exact).abs().mean()


def test_the_older_spelling_of_rope_is_understood(tmp_path):
    make_checkpoint(tmp_path, rope_parameters=ROPES["llama3"])
    before = config_file.read_config(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    scaling = data.pop("rope_parameters")
    data["rope_theta"] = scaling.pop("rope_theta")
    data["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(data))
    after = config_file.read_config(tmp_path)
    assert (after.rope.kind, after.rope.theta) == (before.rope.kind, before.rope.theta)


def test_shards_load_like_one_file(tmp_path):
    base = make_checkpoint(tmp_path, shard="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    tokens = tokens_of(30)
    torch.testing.assert_close(logits_of(tmp_path, tokens), theirs(base, tokens), atol=1e-4, rtol=1e-4)


def edit(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing model.layers.1.mlp.up_proj.weight"),
    (lambda t: t.update(extra=torch.zeros(1)), "unexpected extra"),
    (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight has shape \[3\], not \[48\]"),
])
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    make_checkpoint(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("change, message", [
    (dict(model_type="mamba"), "model_type is 'mamba'; supported: llama"),
    (dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
    (dict(rope_parameters={"rope_type": "axial"}), "rope type is 'axial'; supported: default, linear, dynamic"),
    (dict(rope_parameters={"rope_type": "longrope"}), "needs 'short_factor'"),
    (dict(rope_parameters={"rope_type": "linear"}), "needs 'factor'"),
    (dict(num_key_value_heads=3), "a multiple of"),
    (dict(hidden_size="wide"), "hidden_size is 'wide'; allowed: a whole number, 1 to 16,777,216"),
    (dict(vocab_size=None), "wrong type"),
])
def test_a_config_that_is_not_supported_says_what_is(tmp_path, change, message):
    make_checkpoint(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | change))
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("damage", [
    lambda folder: (folder / "model.safetensors").unlink(),
    lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 100),
    lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000]),
    lambda folder: (folder / "config.json").write_text("{"),
    lambda folder: (folder / "config.json").write_text("[]"),
    lambda folder: (folder / "config.json").unlink(),
    lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}'),
])
def test_missing_and_corrupt_files_are_one_clear_error(tmp_path, damage):
    make_checkpoint(tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_the_hash_of_a_configuration_does_not_depend_on_the_names_of_our_fields():
    """Journals record it: a renamed field must not make the existing journals unusable."""
    config = config_file.read_config(hub.resolve("novelist"))
    assert config_sha256(config) == "025e2c3b02a1deb0ed1e63f95ea3711b87362308a9e12c3202daad7314ef5a85"


def test_every_field_of_a_configuration_has_a_place_in_its_hash():
    """A new field belongs to LATER, with the value that older models have: their hashes then stay as they are."""
    assert {field.name for field in fields(ModelConfig)} == {*config_hash.FIRST, *config_hash.LATER}
