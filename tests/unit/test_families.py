"""Every family against `transformers`, on random checkpoints made here; and the signature test on each of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import longdraft
from helpers.checkpoints import load, load_glide, make_glide, make_heads
from helpers.eagle import load_eagle, make_eagle
from helpers.equality import DRAFTERS, drafters_by_extent, prompt_of
from helpers.families import FAMILIES, logits_of, make_family, theirs_of
from helpers.generation import by_name, generate
from longdraft import kernels
from longdraft.checkpoint import config_file, sizing
from longdraft.errors import ModelError
from longdraft.parts import heads
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation.step import Tally


class Made:
    """A family's folder, their model and ours (float32)."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.folder = name, folder
        self.theirs = make_family(folder, name)
        make_heads(folder / "heads", self.theirs)
        self.ours = load(folder)
        self.has_glide = self.ours.config.rope.dims == self.ours.config.head_dim
        if self.has_glide:
            make_glide(folder / "glide", folder)
            make_eagle(folder / "eagle")


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("family"), request.param)


def test_logits_agree_over_prefill_and_decode_at_far_positions(made):
    tokens = prompt_of(900)
    ours = logits_of(made.ours, tokens, 600)
    torch.testing.assert_close(ours, theirs_of(made.theirs, tokens), atol=1e-4, rtol=1e-4)


def test_bfloat16_agrees_within_its_rounding(made, tmp_path):
    tokens = prompt_of(120)
    exact = theirs_of(make_family(tmp_path, made.name, initializer_range=0.1), tokens)
    rounded = theirs_of(make_family(tmp_path, made.name, torch.bfloat16, initializer_range=0.1), tokens)
    ours = logits_of(load(tmp_path, "bfloat16"), tokens, 100)
    assert (ours - exact).abs().mean() <= 1.2 * (rounded - exact).abs().mean()


@pytest.mark.parametrize("name", kernels.available()[:-1])
def test_every_kernel_agrees_with_the_reference_and_with_itself(made, name):
    """With itself to the bit: rows read together or one by one, in both dtypes."""
    tokens = prompt_of(60)
    reference = logits_of(load(made.folder, name="reference"), tokens, 50)
    for dtype in ("float32", "bfloat16"):
        model = load(made.folder, dtype, name)
        together = logits_of(model, tokens, 60)
        assert torch.equal(logits_of(model, tokens, 1), together)
        if dtype == "float32":
            torch.testing.assert_close(together, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_reads_rows_together_as_one_by_one(made, dtype):
    model, tokens = load(made.folder, dtype, "reference"), prompt_of(30)
    assert torch.equal(logits_of(model, tokens, 30), logits_of(model, tokens, 1))


@pytest.mark.full
def test_greedy_texts_are_those_of_transformers(made):
    prompt = prompt_of(90)
    params = SamplingParams(max_new_tokens=100, temperature=0.0)
    theirs = made.theirs.generate(torch.tensor([prompt]), max_new_tokens=100, do_sample=False, eos_token_id=None,
                                  pad_token_id=0)[0, 90:].tolist()
    factory = by_name("tokenswift", heads.load_heads(made.folder / "heads", made.ours))
    assert generate(made.ours, prompt, params, factory) == theirs


SETTINGS = {
    "greedy": dict(temperature=0.0),
    "sampled": dict(temperature=1.0, min_p=0.1, repetition_penalty=1.2, penalty_window=64),
}


@drafters_by_extent
@pytest.mark.parametrize("dtype, settings", [("float32", "sampled"), ("bfloat16", "greedy")])
def test_drafters_write_the_plain_text(made, dtype, settings, drafters):
    """On sliding windows, layers without rope and all the rest."""
    model = made.ours if dtype == "float32" else load(made.folder, dtype)
    trained = heads.load_heads(made.folder / "heads", model)
    params = SamplingParams(max_new_tokens=32, seed=11, **SETTINGS[settings])
    plain = generate(model, prompt_of(90), params, by_name("plain"), banned=[1])
    layer = load_glide(made.folder / "glide", model) if made.has_glide else None
    eagle = load_eagle(made.folder / "eagle", model) if made.has_glide else None
    for name, options in map(DRAFTERS.__getitem__, drafters):
        needs_layer = name in ("glide", "eagle") or options.get("first") == "head"
        if needs_layer and layer is None:
            continue
        factory = by_name(name, trained, model if "model" in options else None, layer, eagle, **options)
        tally = Tally()
        assert generate(model, prompt_of(90), params, factory, banned=[1], tally=tally) == plain, (name, options)
        if options.get("model") == "itself":  # else this might be the equality of plain with plain
            assert tally.accepted.total() > 16


@pytest.mark.full
@pytest.mark.parametrize("name", kernels.available()[1:])
@pytest.mark.parametrize("family", ["mistral, windows", "olmo2", "granite"])  # windows, norms after, multipliers
def test_trees_write_the_plain_text_on_the_other_kernels_too(tmp_path, family, name):
    """The fastest ones write it above."""
    make_heads(tmp_path / "heads", make_family(tmp_path, family))
    params = SamplingParams(max_new_tokens=24, seed=11, **SETTINGS["sampled"])
    for dtype in ("float32", "bfloat16"):
        model = load(tmp_path, dtype, name)
        trained = heads.load_heads(tmp_path / "heads", model)
        plain = generate(model, prompt_of(60), params, by_name("plain"), banned=[1])
        for drafter in ("tokenswift, small cache", "medusa, choices", "magicdec, snapkv"):
            kind, options = DRAFTERS[drafter]
            assert generate(model, prompt_of(60), params, by_name(kind, trained, **options), banned=[1]) == plain


def test_saved_again_a_model_gives_the_same_bits(made, tmp_path):
    again = AutoModelForCausalLM.from_pretrained(made.folder)
    again.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    tokens = prompt_of(40)
    assert torch.equal(logits_of(load(tmp_path), tokens, 30), logits_of(made.ours, tokens, 30))


def test_a_folder_is_served_through_the_public_door(made):
    engine = longdraft.load(str(made.folder), drafter="suffix")
    params = SamplingParams(max_new_tokens=8, seed=3, ignore_eos=True)
    assert sum(len(event.tokens) for event in engine.generate(prompt_of(20), params)) == 8


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_float16_files_are_served_in_bfloat16(tmp_path, name):
    make_family(tmp_path, "llama", getattr(torch, name))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == name
    assert config_file.read_config(tmp_path).dtype == "bfloat16"


BASE = dict(model_type="llama", vocab_size=320, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=4)


@pytest.mark.parametrize("changes, message", [
    (dict(model_type="cohere2"),
     "'cohere2'; supported: llama, .*gemma3_text.*; longdraft lacks what it needs: LayerNorm"),
    (dict(model_type="deepseek_v3"), "longdraft lacks what it needs: latent attention"),
    (dict(model_type="unheard-of"), r"model_type is 'unheard-of'; supported: [\w, ]*$"),
    (dict(model_type="qwen2_moe"), r"model_type is 'qwen2_moe'; supported: [\w, ]*$"),  # experts are not what it lacks
    (dict(quantization_config={"quant_method": "gptq"}), r"quantised \('gptq', None bits\); supported: awq and gptq"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; supported: 1"),
    (dict(model_type="phi3", partial_rotary_factor=0.75), "rotates an even number"),
    (dict(model_type="mistral", sliding_window=0), "sliding_window is 0 in config.json; allowed: null"),
    (dict(model_type="qwen2", use_sliding_window=True, layer_types=["full_attention"]), "layer_types .* list of 3"),
    (dict(model_type="smollm3", no_rope_layers=[1, 2, 0]), "no_rope_layers .* list of 3"),
    (dict(model_type="smollm3", use_sliding_window=True, sliding_window=8), "has no 'layer_types'"),
    (dict(model_type="granite", logits_scaling=0), "logits_scaling is 0"),
])
def test_what_is_not_supported_is_named(changes, message):
    with pytest.raises(ModelError, match=message):
        config_file.parse_config(BASE | changes)


@pytest.mark.parametrize("kind", config_file.SUPPORTED)
def test_a_silent_config_is_read_as_transformers_reads_it(kind):
    """What a file leaves out has the family's default."""
    sizes = dict(vocab_size=320, hidden_size=2048, intermediate_size=64, num_hidden_layers=4, num_attention_heads=64)
    theirs, ours = CONFIG_MAPPING[kind](**sizes), config_file.parse_config(sizes | {"model_type": kind})
    if kind.startswith("gemma4"):
        layers = [theirs.per_layer_config[index] for index in range(4)]
        assert ours.kv_shapes == tuple((layer.num_key_value_heads, layer.head_dim) for layer in layers)
        theirs.allow_global_per_layer_attribute_access = True
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 32)
    assert ours.is_tied == theirs.tie_word_embeddings
    assert ours.trained_positions == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    kinds = theirs.rope_parameters if "full_attention" in theirs.rope_parameters else {"": theirs.rope_parameters}
    assert {rope.theta for rope in ours.ropes} == {kind["rope_theta"] for kind in kinds.values()}
    assert ours.window == (getattr(theirs, "sliding_window", None) or 0)
    rotated = [bool(flag) for flag in getattr(theirs, "no_rope_layers", [1] * 4)]
    if kind == "exaone4":  # whose code rotates layers with a window only
        rotated = [layer == "sliding_attention" for layer in theirs.layer_types]
    assert [not layer.attention or layer.attention.rotates for layer in ours.layers[:4]] == rotated


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8),
    st.lists(st.integers(0, 1) | st.sampled_from(["full_attention", "sliding_attention"]), max_size=4))


@settings(deadline=None)
@given(kind=st.sampled_from(config_file.SUPPORTED), changes=st.dictionaries(st.sampled_from([
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "no_rope_layers",
    "no_rope_layer_interval", "partial_rotary_factor", "embedding_multiplier", "residual_multiplier",
    "attention_multiplier", "logits_scaling", "original_max_position_embeddings", "rope_theta", "head_dim",
    "num_key_value_heads", "attention_bias", "quantization_config"]), VALUES, max_size=4))
def test_configs_of_any_values_are_read_or_refused_in_one_line(kind, changes):
    refused = ""
    try:
        config = config_file.parse_config(BASE | {"model_type": kind} | changes)
    except ModelError as error:
        refused = str(error)
    else:
        assert len(config.layers) == 3
        assert all(layer.delta or (layer.attention.window >= 0 and layer.attention.rotates in (True, False))
                   for layer in config.layers)
    assert "\n" not in refused


def shape(kind: str, *sizes: int, **more: object) -> dict[str, object]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads")
    return dict(zip(names, sizes, strict=True)) | {"model_type": kind, "torch_dtype": "bfloat16"} | more


@pytest.mark.parametrize("settings, parameters", [  # as published
    (shape("qwen2", 151936, 1536, 8960, 28, 12, 2, tie_word_embeddings=True), 1_543_714_304),
    (shape("qwen2", 152064, 3584, 18944, 28, 28, 4), 7_615_616_512),
    (shape("qwen3", 151936, 4096, 12288, 36, 32, 8, head_dim=128), 8_190_735_360),
    (shape("mistral", 32768, 4096, 14336, 32, 32, 8, sliding_window=None), 7_248_023_552),
    (shape("phi3", 32064, 3072, 8192, 32, 32, 32), 3_821_079_552),
    (shape("phi3", 200064, 3072, 8192, 32, 24, 8, tie_word_embeddings=True, partial_rotary_factor=0.75),
     3_836_021_760),
    (shape("smollm3", 128256, 2048, 11008, 36, 16, 4), 3_075_098_624),
    (shape("olmo2", 100352, 4096, 11008, 32, 32, 32), 7_298_617_344),
])
def test_parameters_of_known_models(settings, parameters):
    assert sizing.model_sizes(config_file.parse_config(settings)).parameters == parameters
