"""Gemma 4, whose layers have heads of two sizes, with and without experts: what it has besides test_every_family.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

import longdraft
from helpers.checkpoints import VOCAB, load, write_tokenizer
from helpers.equality import prompt_of
from helpers.families import GEMMA4, logits_of, make_family
from helpers.family_checks import check_one_call
from helpers.gguf_files import convert, stored
from longdraft import kernels
from longdraft.checkpoint import sizing
from longdraft.checkpoint.config_file import parse_config, read_config
from longdraft.errors import ModelError
from longdraft.kernels import KV
from longdraft.kernels.cpu import native
from longdraft.model.transformer import chain_rows
from longdraft.request.sampling_params import SamplingParams
from longdraft.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=GEMMA4)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    make_family(folder, request.param)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", ["none", "int4"])
@pytest.mark.parametrize("name", native.variants())
def test_one_compiled_call_computes_what_single_operations_do(folder, name, dtype, quantize):
    check_one_call(load(folder, dtype, name, quantize=quantize))


def test_one_compiled_call_reads_prompts_longer_than_the_window_in_chunks(folder):
    check_one_call(load(folder, "bfloat16"), prompt=700)


def test_the_cache_holds_each_layers_own_heads(folder):
    """A layer with a window has 2 KV heads of 16, a layer without one 1 (or 2) of 32. Layers that read the rows of
    another layer hold none."""
    model, tokens = load(folder), prompt_of(30)
    wide = (1, 32) if model.config.gemma4.values_are_keys else (2, 32)
    last = (2, 16) if model.config.gemma4.num_sharing else wide
    assert model.config.kv_shapes == ((2, 16), wide, last)
    per_token = 4 * 2 * sum(heads * dim for heads, dim in model.config.kv_shapes)
    assert model.cache_bytes_per_token == sizing.model_sizes(model.config, "float32").cache_bytes_per_token == per_token
    cache = model.new_cache()
    model.forward(chain_rows(tokens, 0), cache)
    cache.commit([*range(20), 25])
    assert [store.shape for store in cache.stores] == list(model.config.kv_shapes)
    again = model.new_cache()
    model.forward(chain_rows(tokens, 0), again)
    again.commit(range(30))
    for ours, whole in zip(cache.stores, again.stores, strict=True):
        heads, _ = ours.shape
        kept = torch.tensor([*range(20), 25]).expand(heads, -1)
        for found, expected in zip(ours.read(torch.arange(21).expand(heads, -1)), whole.read(kept), strict=True):
            assert torch.equal(found, expected)


def test_a_snapshot_holds_the_rows_of_both_sizes(folder, tmp_path):
    engine = longdraft.load(str(folder), drafter="plain", cache_ram=0)
    params = SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True)
    prompt = prompt_of(700)
    whole = [token for event in engine.generate(prompt, params) for token in event.tokens]
    with engine.generate(prompt, params, journal=tmp_path / "j", snapshot="always") as text:
        while len(text.tokens) < 6:
            next(text)
    with engine.resume(tmp_path / "j") as resumed:
        assert [token for event in resumed for token in event.tokens] == whole
        assert resumed.stats()["restored_tokens"] > 500


def as_gguf(name: str, folder: Path, path: Path, kind: str = "F32", **values: object) -> None:
    dtype = torch.float32 if kind == "F32" else torch.bfloat16
    model = make_family(folder, name, dtype)
    turning = torch.cat([torch.ones(4), torch.full((12,), 1e30)])  # a quarter of the pairs of 32 dimensions
    convert(folder, model, path, kind, values, {"rope_freqs.weight": stored(turning, "F32")})


@pytest.mark.parametrize("name", GEMMA4)
@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_a_gguf_file_is_the_same_model(tmp_path, name, kind):
    as_gguf(name, tmp_path / "folder", tmp_path / "model.gguf", kind)
    ours, theirs = (read_config(tmp_path / path) for path in ("model.gguf", "folder"))
    assert replace(ours, eos_token_ids=theirs.eos_token_ids) == theirs
    found = [logits_of(load(tmp_path / path, theirs.dtype), prompt_of(40), 40) for path in ("model.gguf", "folder")]
    assert torch.equal(*found)


@pytest.mark.parametrize("values, message", [
    ({"gemma4.attention.shared_kv_layers": 2}, "num_kv_shared_layers is 2"),
    ({"gemma4.feed_forward_length": [64, 128, 64]}, r"feed_forward_length is \[64, 128, 64\]; supported"),
    ({"gemma4.attention.head_count_kv": [2, 1, 2]}, r"head_count_kv is \[2, 1, 2\]; allowed: one number"),
    ({"gemma4.attention.value_length": 16}, "different lengths"),
    ({"gemma4.rope.dimension_count": 16}, "dimension_count is 16; supported: 32"),
    ({"gemma4.attention.sliding_window_pattern": [True] * 3}, "must give some layers a window"),
])
def test_gguf_files_that_are_not_supported_are_refused(tmp_path, values, message):
    as_gguf("gemma4", tmp_path, tmp_path / "model.gguf", **values)
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path / "model.gguf")


def test_the_tokenizer_of_a_gguf_file_merges_over_whole_texts_and_adds_no_bos(tmp_path):
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abc", "▁a", "▁ab", "c▁",
              "<turn|>"]
    kinds = [3, 3, 3, 2, *[6] * 256, *[1] * 7, 3]
    as_gguf("gemma4", tmp_path, tmp_path / "model.gguf", **{
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": pieces + [f"[{i}]" for i in range(320 - len(pieces))],
        "tokenizer.ggml.token_type": np.array(kinds + [1] * (320 - len(pieces))), "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.merges": ["c ▁", "▁ a", "▁a b"]})
    tokenizer = Tokenizer(tmp_path / "model.gguf")
    for text, tokens in (("c ab", ["c▁", "a", "b"]), (" ab", ["▁ab"]), ("aé", ["a", "<0xC3>", "<0xA9>"]),
                         ("a<turn|>", ["a", "<turn|>"])):
        ids = tokenizer.encode(text)
        assert ids == [pieces.index(token) for token in tokens]
        assert tokenizer.decode(ids[:3]) == text.removesuffix("<turn|>")
    assert pieces.index("<turn|>") in read_config(tmp_path / "model.gguf").eos_token_ids


def test_the_text_part_of_a_model_with_image_input_is_read(tmp_path):
    torch.manual_seed(1)
    text = dict(GEMMA4["gemma4, experts"][1], vocab_size=VOCAB, hidden_size=48, intermediate_size=64,
                num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
                max_position_embeddings=2048)
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                  num_key_value_heads=2, head_dim=16, patch_size=4, position_embedding_size=64)
    model = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=vision, image_token_id=5,
                                                        audio_token_id=6, video_token_id=8)).eval()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    tokens = [7 if token in (5, 6, 8) else token for token in prompt_of(60)]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits_of(load(tmp_path), tokens, 50), expected, atol=1e-4, rtol=1e-4)


BASE = dict(model_type="gemma4_text", vocab_size=320, hidden_size=64, intermediate_size=64, num_attention_heads=8,
            num_key_value_heads=4, head_dim=16, global_head_dim=32, num_hidden_layers=6, hidden_size_per_layer_input=0)


def test_both_spellings_of_heads_are_read():
    own = dict(num_global_key_value_heads=2, attention_k_eq_v=True)
    assert parse_config(BASE | own).kv_shapes == ((4, 16),) * 5 + ((2, 32),)
    assert parse_config(BASE | own | dict(attention_k_eq_v=False)).kv_shapes[-1] == (4, 32)
    later = {name: value for name, value in BASE.items() if name != "global_head_dim"} | dict(
        attention_k_eq_v=True, per_layer_config={"5": dict(head_dim=32, num_key_value_heads=2)})
    assert parse_config(later) == parse_config(BASE | own)
    all_windowed = parse_config(BASE | own | dict(layer_types=["sliding_attention"] * 6))
    assert all_windowed.windowed == (True,) * 5 + (False,)  # the last layer never has a window, as in `transformers`
    assert [parse_config(later).layers[layer].attention.ropes for layer in (5, 0)] == [(0, 0), (1, 1)]


@pytest.mark.parametrize("changes, message", [
    (dict(hidden_size_per_layer_input=256, vocab_size_per_layer_input=319), "as many tokens as vocab_size"),
    (dict(num_kv_shared_layers=2), "num_kv_shared_layers is 2 .* before these layers one of each of their kinds"),
    (dict(num_kv_shared_layers=6), "num_kv_shared_layers is 6"),
    (dict(sliding_window=None), "must give layers a window"),
    (dict(layer_types=["full_attention"] * 6), "must give layers a window"),
    (dict(global_head_dim=33), "8 heads, 4 KV heads, and dimension 33; allowed"),
    (dict(per_layer_config={"0": dict(head_dim=32)}), "per_layer_config .* must be the same"),
    (dict(use_bidirectional_attention="all"), "embedding model"),
    (dict(enable_moe_block=True, num_experts=2, top_k_experts=3, moe_intermediate_size=8), "3 of 2 experts"),
    (dict(rope_parameters={"full_attention": dict(rope_type="proportional", partial_rotary_factor=0),
                           "sliding_attention": {}}), "partial_rotary_factor is 0 .* allowed: above 0"),
])
def test_what_is_not_supported_is_named(changes, message):
    assert parse_config(BASE).gemma4
    with pytest.raises(ModelError, match=message):
        parse_config(BASE | changes)


@pytest.mark.parametrize("name", kernels.available())
def test_heads_of_512_attend_as_in_pytorch(name):
    ops = kernels.choose("cpu", "float32", name)
    torch.manual_seed(4)
    store, k, v = ops.new_store(1, 512), torch.randn(300, 1, 512), torch.randn(300, 1, 512)
    store.write(0, k, v)
    q = torch.randn(1, 4, 512)
    found = ops.attention(q, KV(store, 299, k[-1:], v[-1:]), torch.tensor([-1], dtype=torch.int32))
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
    torch.testing.assert_close(found.output[0], expected[:, 0], atol=1e-5, rtol=1e-4)


def test_sizes_of_the_published_shapes(tmp_path):
    """31B, 26B-A4B and one like E2B: parameters in all and for a token."""
    types = [("sliding", "full")[(i + 1) % 6 == 0] + "_attention" for i in range(60)]
    text = dict(vocab_size=262144, hidden_size=5376, intermediate_size=21504, num_hidden_layers=60,
                num_attention_heads=32, num_key_value_heads=16, num_global_key_value_heads=4, head_dim=256,
                global_head_dim=512, attention_k_eq_v=True, layer_types=types, sliding_window=1024,
                hidden_size_per_layer_input=0, final_logit_softcapping=30.0, use_bidirectional_attention="vision",
                max_position_embeddings=262144, model_type="gemma4_text")
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="gemma4", text_config=text, dtype="bfloat16")))
    config = read_config(tmp_path)
    assert 30e9 < sizing.model_sizes(config).parameters < 32e9
    assert sizing.model_sizes(config).cache_bytes_per_token == 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)
    small = dict(text, hidden_size=2816, intermediate_size=2112, num_hidden_layers=30, layer_types=types[:30],
                 num_attention_heads=16, num_key_value_heads=8, num_global_key_value_heads=2, enable_moe_block=True,
                 num_experts=128, top_k_experts=8, moe_intermediate_size=704)
    sizes = sizing.model_sizes(parse_config(small))
    assert 25e9 < sizes.parameters < 27e9 and 3.5e9 < sizes.read_bytes / 2 < 4.5e9
    tiny = dict(text, hidden_size=1536, intermediate_size=6144, num_hidden_layers=35, num_attention_heads=8,
                num_key_value_heads=1, num_global_key_value_heads=None, attention_k_eq_v=False,
                hidden_size_per_layer_input=256, num_kv_shared_layers=20, use_double_wide_mlp=True,
                layer_types=[("sliding", "full")[(i + 1) % 5 == 0] + "_attention" for i in range(35)])
    config = parse_config(tiny)
    sizes = sizing.model_sizes(config)
    assert 4.5e9 < sizes.parameters < 4.8e9 and 2.1e9 < sizes.read_bytes / 2 < 2.5e9
    assert len(config.kv_shapes) == 15
    assert [config.layers[layer].attention.source for layer in (14, 15, 19)] == [None, 13, 14]
