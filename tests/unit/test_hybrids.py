"""Hybrids: models with delta layers (Qwen3-Next, Qwen3.5): what they have besides test_every_family.py."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import longdraft
from helpers.checkpoints import load, make_heads
from helpers.equality import DRAFTERS, prompt_of
from helpers.extents import extent
from helpers.families import logits_of, make_family, make_hybrid
from helpers.family_checks import check_one_call
from helpers.generation import by_name, generate
from helpers.gguf_files import convert, stored
from longdraft import kernels
from longdraft.checkpoint import sizing
from longdraft.checkpoint.config_file import parse_config, read_config
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import LongdraftError, ModelError
from longdraft.kernels.delta import DeltaRows, DeltaShape, DeltaWeights
from longdraft.model.transformer import chain_rows
from longdraft.request.sampling_params import SamplingParams

LOADED = ["auto", "suffix", "magicdec"]  # drafters of the tests with the whole engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 with heads. Its attention has gates, and a quarter of a head rotates."""
    folder = tmp_path_factory.mktemp("hybrid")
    make_heads(folder / "heads", make_family(folder, "qwen3_5"))
    return folder


@pytest.mark.parametrize("name", kernels.available()[:-1])
@pytest.mark.parametrize("dtype, quantize", [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int4")])
def test_one_call_computes_what_single_operations_compute(folder, name, dtype, quantize):
    check_one_call(load(folder, dtype, name, quantize=quantize))


@pytest.mark.parametrize("name", kernels.available()[:-1])
@pytest.mark.parametrize("shape", [DeltaShape(1, 3, 32, 48, 2), DeltaShape(2, 2, 16, 64, 4)])
def test_the_compiled_rule_is_that_of_the_definition(name, shape):
    """With zeros as well: rows of zeros have no direction."""
    torch.manual_seed(2)
    weights = DeltaWeights(shape, torch.randn(shape.width, shape.channels), -torch.rand(shape.value_heads) * 3,
                           torch.randn(shape.value_heads), torch.randn(shape.value_dim), 1e-6)
    parents = torch.tensor([-1, 0, 1, 0, -1, 4, 3], dtype=torch.int32)
    mixed, z = torch.randn(7, shape.channels), torch.randn(7, shape.values)
    mixed[1] = 0
    gates, found = torch.randn(7, 2 * shape.value_heads) * 4, []
    for ops in (kernels.choose("cpu", "float32", kind) for kind in (name, "reference")):
        text = DeltaRows(ops.new_state(weights), ops.new_state(weights), mixed, gates)
        ops.delta_rule(weights, [text], None, parents)  # a state that is not zero
        text = text._replace(before=text.after, after=ops.new_state(weights))
        found.append((ops.delta_rule(weights, [text], z, parents), text.after))
    (ours, state), (theirs, expected) = found
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    blocks = state.matrix.permute(0, 2, 1, 3).reshape(expected.matrix.shape)
    torch.testing.assert_close(blocks, expected.matrix, atol=1e-4, rtol=1e-4)
    assert torch.equal(state.history, expected.history)


@pytest.mark.parametrize("settings", [dict(temperature=1.0, min_p=0.1, repetition_penalty=1.2), dict(temperature=0.0)])
@pytest.mark.parametrize("target", extent(["llama", "qwen3_5"], ["qwen3_5"]))
def test_a_smaller_hybrid_drafts(tmp_path, target, settings):
    """On all of the text and on windows that move, for a hybrid and for a model without states."""
    make_family(tmp_path / "target", target)
    make_hybrid(tmp_path / "draft")
    model, draft = load(tmp_path / "target", "bfloat16"), load(tmp_path / "draft", "bfloat16")
    params = SamplingParams(max_new_tokens=40, seed=11, **settings)
    plain = generate(model, prompt_of(60), params, by_name("plain"))
    for name, options in DRAFTERS.values():
        if options.get("model"):
            factory = by_name(name, None, draft, None, None, **options)
            assert generate(model, prompt_of(60), params, factory) == plain, (name, options)


def test_a_text_that_was_cut_has_the_states_of_its_rows(tmp_path):
    """Cut after whole commits and in the middle of them, many rows and a few rows after what was settled."""
    make_hybrid(tmp_path)
    model, tokens = load(tmp_path, "bfloat16"), prompt_of(400)
    cache, pick = model.new_cache(), random.Random(3)
    cache.states.hold(30)
    model.forward(chain_rows(tokens[:30], 0), cache)
    cache.commit(range(30))
    settled = 30
    for _ in range(60):
        count = pick.randrange(1, 12)
        model.forward(chain_rows(tokens[cache.length : cache.length + count], cache.length), cache)
        cache.commit(range(pick.randrange(1, count + 1)))
        settled = max(settled, cache.length - pick.randrange(5, 40))
        cache.states.settle(settled)
        if pick.random() < 0.3:
            cache.truncate(pick.randrange(settled, cache.length + 1))
    fresh = model.new_cache()
    model.forward(chain_rows(tokens[: cache.length], 0), fresh)
    fresh.commit(range(cache.length))
    assert settled > 150 and cache.states.length == cache.length
    for ours, theirs in zip(cache.states.current, fresh.states.current, strict=True):
        assert torch.equal(ours.matrix, theirs.matrix) and torch.equal(ours.history, theirs.history)


@pytest.mark.parametrize("drafter", extent(LOADED, ["magicdec"]))
def test_texts_without_banned_phrases_are_the_plain_ones(tmp_path, drafter):
    make_hybrid(tmp_path)
    engine, settings = longdraft.load(str(tmp_path), drafter="plain"), dict(max_new_tokens=40, seed=3, ignore_eos=True)
    text = "".join(event.text for event in engine.generate(prompt_of(60), SamplingParams(**settings)))
    letters = {letter for letter in text[2:20] if letter.isprintable()}
    params = SamplingParams(**settings, banned_strings=tuple(sorted({text[4:6], text[11:13], *letters})))
    plain, other = (each.generate(prompt_of(60), params) for each in (engine, engine.with_drafter(drafter)))
    assert "".join(event.text for event in plain) == "".join(event.text for event in other)
    assert plain.stats()["rewinds"] > 2 and plain.tokens.tolist() == other.tokens.tolist()


def test_a_four_bit_copy_drafts_with_the_states_of_the_text(folder):
    params = SamplingParams(max_new_tokens=30, seed=3, ignore_eos=True)
    plain = longdraft.load(str(folder), drafter="plain").generate(prompt_of(60), params)
    engine = longdraft.load(str(folder), drafter="magicdec", quantized_cache="none",
                            drafter_options={"draft_weights": "int4", "suffix": "false"})
    drafted = engine.generate(prompt_of(60), params)
    ids = [[token for event in text for token in event.tokens] for text in (plain, drafted)]
    assert ids[0] == ids[1]
    assert drafted.stats()["accepted_tokens"] > 0


def test_the_text_part_of_a_wrapped_model_is_read_without_its_native_drafts(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    wrapped = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    wrapped |= {"model.visual.blocks.0.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    save_file(wrapped, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": config,
                                                      "tie_word_embeddings": True}))
    assert torch.equal(logits_of(load(tmp_path), prompt_of(20), 20), logits_of(load(folder), prompt_of(20), 20))
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert torch.equal(logits_of(load(tmp_path), prompt_of(20), 20), logits_of(load(folder), prompt_of(20), 20))


def test_experts_of_a_layer_may_be_one_tensor(tmp_path):
    """As in the files of Qwen3.5 on the hub."""
    make_family(tmp_path, "qwen3_5_moe")
    tensors, expected = load_file(tmp_path / "model.safetensors"), logits_of(load(tmp_path), prompt_of(20), 20)
    for layer in (f"model.layers.{index}.mlp.experts." for index in range(4)):
        gate, up, down = (torch.stack([tensors.pop(f"{layer}{expert}.{part}_proj.weight") for expert in range(6)])
                          for part in ("gate", "up", "down"))
        tensors |= {f"{layer}gate_up_proj": torch.cat([gate, up], 1), f"{layer}down_proj": down}
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(logits_of(load(tmp_path), prompt_of(20), 20), expected)


def test_sizes_count_delta_layers_and_states(folder, tmp_path):
    make_family(tmp_path, "qwen3_next")
    for path in (folder, tmp_path):
        config, tensors = read_config(path), load_file(path / "model.safetensors")
        sizes = sizing.model_sizes(config, "float32")
        assert sizes.parameters == sum(tensor.numel() for tensor in tensors.values())
        model = load(path)
        assert sizes.cache_bytes_per_token == model.cache_bytes_per_token == 2 * 2 * 16 * 4  # one layer of four
        heads_of = config.hybrid.shape
        assert sizes.state_bytes == 3 * 4 * heads_of.value_heads * heads_of.key_dim * heads_of.value_dim
    doubled = sizes.ms_per_token(0, 1e9) * 1e6
    assert doubled == pytest.approx(sizes.read_bytes + 2 * sizes.state_bytes)


BASE = dict(model_type="qwen3_5_text", vocab_size=320, hidden_size=48, intermediate_size=64, num_hidden_layers=4,
            num_attention_heads=4)


@pytest.mark.parametrize("changes, message", [
    (dict(linear_value_head_dim=24), "linear_value_head_dim 24 and .*supported: multiples of 16"),
    (dict(linear_num_value_heads=24), "value heads that are a multiple of the key heads"),
    (dict(linear_conv_kernel_dim=1), "a convolution of 2 or more"),
    (dict(layer_types=["linear_attention"] * 4), "names layers of one kind only"),
    (dict(layer_types=["mamba"] * 4), "must be a list of 4 values"),
])
def test_sizes_of_delta_layers_are_checked(changes, message):
    assert parse_config(BASE).hybrid is not None
    with pytest.raises(ModelError, match=message):
        parse_config(BASE | changes)


def test_what_delta_layers_cannot_do_is_refused_in_one_line(folder):
    with pytest.raises(LongdraftError, match="dynamic or static for models with delta layers") as caught:
        longdraft.load(str(folder), drafter="tokenswift", heads=str(folder / "heads"),
                       drafter_options={"cache": "full"}).generate("It", SamplingParams(max_new_tokens=4))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_quantised_hybrid_is_the_hybrid_of_its_dequantised_weights(tmp_path, kind):
    """Heads of Qwen3.5 are stored in another order; of the output projection these are columns."""
    sizes = dict(hidden_size=64, linear_value_head_dim=32, linear_key_head_dim=32, num_attention_heads=4)
    make_family(tmp_path / "folder", "qwen3_5", torch.float32, **sizes)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    convert(tmp_path / "folder", model, tmp_path / "model.gguf", kind)
    files = TensorFiles(tmp_path / "model.gguf")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                found = files.read(name)
                assert (found - parameter).abs().max() <= 0.3
                parameter.copy_(found)
    model.save_pretrained(tmp_path / "folder")
    found = [loaded.logits(loaded.forward(chain_rows(prompt_of(40), 0), loaded.new_cache()).hidden)
             for loaded in (load(tmp_path / path) for path in ("model.gguf", "folder"))]
    assert torch.equal(*found)
    for name in (name for name in files.names() if (kind == "Q4_0" and "in_proj_" in name) or "out_proj" in name):
        packed = files.exact([name], "int4")
        if packed is not None:  # in four bits the numbers are the file's too
            groups = (packed.values.float().view(*packed.scale.shape, 32) - packed.zero[..., None].float())
            assert torch.equal((groups * packed.scale[..., None].float()).flatten(1), files.read(name))


def test_native_draft_layers_and_fused_experts_of_hybrids(tmp_path):
    """The former are not read; the latter are the same as gate and up apart."""
    model = make_family(tmp_path / "folder", "qwen3_5_moe")
    fused = {f"blk.{layer}.ffn_gate_up_exps.weight": stored(tensor, "F32") for layer, tensor in (
        (name.split(".")[2], tensor) for name, tensor in model.state_dict().items() if "experts.gate_up_proj" in name)}
    extra = {"blk.4.nextn.eh_proj.weight": stored(torch.ones(2, 2), "F32")}
    arch = "qwen35moe"
    more = {f"{arch}.block_count": 5, f"{arch}.nextn_predict_layers": 1}
    convert(tmp_path / "folder", model, tmp_path / "model.gguf", values=more, tensors=fused | extra,
            without=("ffn_gate_exps", "ffn_up_exps"))
    found = [loaded.logits(loaded.forward(chain_rows(prompt_of(20), 0), loaded.new_cache()).hidden)
             for loaded in (load(tmp_path / path) for path in ("model.gguf", "folder"))]
    assert torch.equal(*found)
