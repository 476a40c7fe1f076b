"""Families with norms on both sides, GELU, soft caps or several rotations (Gemma 2 and 3, GLM-4, Ministral 3): what
they have besides test_every_family.py."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from helpers.checkpoints import VOCAB, load, write_tokenizer
from helpers.equality import prompt_of
from helpers.families import CPU_FAMILIES, logits_of, make_family
from helpers.gguf_files import convert
from longdraft import kernels
from longdraft.checkpoint.config_file import parse_config, read_config
from longdraft.errors import ModelError
from longdraft.journal.config_hash import config_sha256
from longdraft.kernels import KV


@pytest.mark.parametrize("name", CPU_FAMILIES)
@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_a_gguf_file_is_the_same_model(tmp_path, name, kind):
    """Norms of Gemma contain the 1 that Hugging Face's leave out."""
    dtype = torch.float32 if kind == "F32" else torch.bfloat16
    more = {"query_pre_attn_scalar": 16} if name == "gemma2" else {}
    model = make_family(tmp_path / "folder", name, dtype, **more)
    convert(tmp_path / "folder", model, tmp_path / "model.gguf", kind)
    ours, theirs = (read_config(tmp_path / path) for path in ("model.gguf", "folder"))
    assert (ours.norm_offset, theirs.norm_offset) == (0.0, 1.0 if name.startswith("gemma") else 0.0)
    assert ours.windowed == theirs.windowed and ours.score_cap == theirs.score_cap
    assert ours.query_growth == theirs.query_growth
    found = [logits_of(load(tmp_path / path, theirs.dtype), prompt_of(40), 40) for path in ("model.gguf", "folder")]
    assert torch.equal(*found)


def test_the_text_part_of_gemma_3_with_image_input_is_read(tmp_path):
    torch.manual_seed(1)
    text = dict(vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16, sliding_window=24, initializer_range=0.2, query_pre_attn_scalar=16)
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28,
                  patch_size=14)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=5)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    tokens = prompt_of(60)
    tokens = [7 if token == 5 else token for token in tokens]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits_of(load(tmp_path), tokens, 50), expected, atol=1e-4, rtol=1e-4)


BASE = dict(vocab_size=320, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
            intermediate_size=64)


def test_both_spellings_of_a_configuration_are_read():
    old = parse_config(BASE | dict(model_type="gemma3_text", num_hidden_layers=12, rope_theta=1e6, sliding_window=512,
                                   rope_local_base_freq=10000, rope_scaling=dict(rope_type="linear", factor=8.0),
                                   sliding_window_pattern=6, hidden_activation="gelu_pytorch_tanh"))
    new = parse_config(BASE | dict(
        model_type="gemma3_text", num_hidden_layers=12, sliding_window=512, rope_parameters={
            "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1e6),
            "sliding_attention": dict(rope_type="default", rope_theta=1e4)},
        layer_types=[("sliding", "full")[(i + 1) % 6 == 0] + "_attention" for i in range(12)]))
    assert [layer.attention.window for layer in old.layers] == ([512] * 5 + [0]) * 2
    assert [layer.attention.ropes[0] for layer in old.layers] == ([1] * 5 + [0]) * 2
    for one, other in zip(old.ropes, new.ropes, strict=True):
        assert (one.kind, one.theta, one.settings.get("factor")) == (other.kind, other.theta,
                                                                    other.settings.get("factor"))
    assert old.windowed == new.windowed
    assert old.max_positions == new.max_positions == 131072  # which is the length after the scaling
    alternating = parse_config(BASE | dict(model_type="gemma2", num_hidden_layers=4))
    assert [layer.attention.window for layer in alternating.layers[:4]] == [4096, 0] * 2


@pytest.mark.parametrize("changes, message", [
    (dict(hidden_activation="relu"), "hidden_activation is 'relu'; supported: gelu_pytorch_tanh"),
    (dict(attn_logit_softcapping=-1), "attn_logit_softcapping is -1.0 .* allowed: null, or a positive"),
    (dict(layer_types=["full_attention"]), "layer_types in config.json must be a list of 2"),
    (dict(use_bidirectional_attention=True), "embedding model"),
    (dict(model_type="ministral3", rope_parameters={"llama_4_scaling_beta": -1}), "llama_4_scaling_beta is -1.0"),
    (dict(model_type="gemma3_text", rope_parameters={"full_attention": {}, "sliding_attention": {
        "rope_type": "yarn", "factor": 2.0}}), "rope type of layers with a window is 'yarn'"),
])
def test_what_is_not_supported_is_named(changes, message):
    config = BASE | dict(model_type="gemma2", num_hidden_layers=2)
    assert parse_config(config).score_cap == 50
    with pytest.raises(ModelError, match=message):
        parse_config(config | changes)


@pytest.mark.parametrize("name", kernels.available())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gelu_and_soft_caps_are_those_of_pytorch_at_every_width(name, dtype):
    ops = kernels.choose("cpu", dtype, name)
    torch.manual_seed(3)
    for width in (1, 15, 16, 33):
        gate_up = (torch.randn(5, 2 * width) * 4).to(ops.dtype)
        gate, up = gate_up.float().chunk(2, 1)
        expected = torch.nn.functional.gelu(gate, approximate="tanh").to(ops.dtype).float() * up
        found = ops.geglu(gate_up)
        torch.testing.assert_close(found.float(), expected, atol=1e-6, rtol=1e-6 if dtype == "float32" else 1e-2)
        assert torch.equal(torch.cat([ops.geglu(row[None]) for row in gate_up]), found)
        logits = torch.randn(5, width) * 40
        capped = ops.soft_cap(logits, 30.0)
        torch.testing.assert_close(capped, (logits / 30).tanh() * 30, atol=1e-5, rtol=1e-5)
        assert torch.equal(torch.cat([ops.soft_cap(row[None], 30.0) for row in logits]), capped)
    assert ops.soft_cap(torch.full((1, 3), torch.nan), 30.0).isnan().all()
    assert ops.soft_cap(torch.tensor([[1e30, -1e30]]), 30.0).tolist() == [[30.0, -30.0]]


@pytest.mark.parametrize("name", kernels.available())
def test_scores_are_capped_before_the_softmax(name):
    """In attention, in the weights that select rows, and in the remainder."""
    ops = kernels.choose("cpu", "float32", name)
    torch.manual_seed(4)
    length, heads, dim, cap = 300, 2, 16, 3.0
    store, k, v = ops.new_store(heads, dim, cap), torch.randn(length, heads, dim) * 3, torch.randn(length, heads, dim)
    store.write(0, k, v)
    q = torch.randn(1, heads, dim) * 3
    scores = torch.einsum("thd,nhd->thn", q, k) / dim**0.5
    weights = ((scores / cap).tanh() * cap).softmax(-1)[0]
    found = ops.attention(q, KV(store, length - 1, k[-1:], v[-1:]), torch.tensor([-1], dtype=torch.int32))
    torch.testing.assert_close(found.output[0], torch.einsum("hn,nhd->hd", weights, v), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(store.weights(q, length), weights, atol=1e-6, rtol=1e-4)
    part = ops.new_store(heads, dim, cap)
    part.write(0, k[100:], v[100:])
    whole = type(found)(*(tensor[None] for tensor in found))
    left = ops.remainder([part], length - 100, whole)[0, 0]  # [H, D + 1]
    expected = torch.einsum("hn,nhd->hd", weights[:, :100] / weights[:, :100].sum(1, keepdim=True), v[:100])
    torch.testing.assert_close(left[:, :-1], expected, atol=1e-3, rtol=1e-3)


def test_the_hash_of_other_families_is_the_former_one():
    """Journals name their model by it."""
    llama = parse_config(BASE | dict(model_type="llama", num_hidden_layers=2))
    assert config_sha256(llama) == "4370aa8025306709c9123474ec4884c17c80a0aa969f207df8b4e251849281d8"
    hybrid = parse_config(dict(model_type="qwen3_5_text", vocab_size=320, hidden_size=48, intermediate_size=64,
                               num_hidden_layers=4, num_attention_heads=4))
    assert config_sha256(hybrid) == "dc5dd8b0f86d83386b0b480a975030b56751d618c972d5888013f35d00a9baec"
