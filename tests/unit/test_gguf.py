"""Models in GGUF: the numbers of every type, the configuration, tensors, tokenizer, template and sampling defaults."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import longdraft
from helpers.checkpoints import load, make_checkpoint
from helpers.equality import prompt_of
from helpers.families import CPU_FAMILIES, FAMILIES, GEMMA4, HYBRIDS, MIXTURES, family_config, make_family
from helpers.gguf_files import (
    TYPE_IDS,
    architecture_of,
    convert,
    metadata,
    noise,
    permuted,
    stored,
    write_gguf,
)
from longdraft.__main__ import run
from longdraft.checkpoint import config_file, defaults, hub
from longdraft.checkpoint.gguf.blocks import dequantise, mxfp4_parts
from longdraft.checkpoint.gguf.container import open_gguf
from longdraft.checkpoint.gguf.tensors import stored_rows
from longdraft.checkpoint.gguf.types import TYPES
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import ModelError, UsageError
from longdraft.kernels.formats import mxfp4
from longdraft.model import config as model_config
from longdraft.model.transformer import chain_rows
from longdraft.parts import draft_copy
from longdraft.request.sampling_params import SamplingParams
from longdraft.text.tokenizer import Tokenizer
from longdraft.train import frozen_model, job
from longdraft.train.settings import BlockSettings, EagleSettings, GlideSettings, HeadSettings

HIDDEN = 64  # two blocks of 32

# SHA-256 of `gguf.dequantize` (gguf 0.19.0) of the bytes in `blocks_of`.
VALUES = {
    "Q4_0": "4c1b871e1fd2e035cb5f41a05fb1359b8a1dd5ce69664d91bc1517c9a0ac5903",
    "Q4_1": "201660b4cd7cb2b63be21641e50dcb479fd0f17d4e2c376aae455861f3c7f950",
    "Q5_0": "f0f48fbf91e5361fc44bfe565d48fd5cfc6c968e7560a0f94ff0d17ac5bf2691",
    "Q5_1": "3b1038aa73c93929fe187352198209388926b645abef4717c503dded45b57c81",
    "Q8_0": "3866ba95b79ced697c1b286288bf014939bbee40f13219aa2a037f4a765c75f7",
    "Q3_K": "7681a36dd99680eb92315693fc37cd0c9ec44ee823fe88ea9ae58a89f3557e0e",
    "Q4_K": "1b3095cc93cfa3e7f8482614926e44c1757335e3bd3f5eef5436ec250b513f20",
    "Q5_K": "536a659796ea03dc674a9f4674981c430fc7ba8dcd6a65152cad69140b079cad",
    "Q6_K": "faae2d64e3d5c29206e2355c38ddd01e7d69e99fe23068febaa62c10a90f2f41",
    "IQ4_NL": "00fc1d4bc285f1578cfea31058032ff8e9facf14322446feefaa0ae11b1e6d50",
    "IQ4_XS": "b0a687e4f1b7024f684a7dc619330bbdbf49bec84a88f001972506248995ebe3",
    "MXFP4": "7eff432c2126c54ffce1b47a780724393381e4b05368b99ff6a476931d92f8a5",
}
SCALES = {"Q6_K": [208], "Q3_K": [108], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "MXFP4": []}


def blocks_of(name: str) -> torch.Tensor:
    """Twelve blocks of any bytes, with float16 scales below 2: [3, 4 blocks]."""
    kind = TYPES[TYPE_IDS[name]]
    blocks = torch.frombuffer(bytearray(noise(12 * kind.nbytes, name)), dtype=torch.uint8).view(12, -1)
    for at in SCALES.get(name, [0]):
        blocks[:, at + 1] &= 0xBF
    if name == "MXFP4":
        blocks[:, 0] = torch.tensor([0, 1, 2, 120, 127, 128, 130, 200, 240, 250, 253, 254])
    return blocks.view(3, -1)


@pytest.mark.parametrize("name", VALUES)
def test_the_values_of_quantised_blocks_are_those_of_llama_cpp(name):
    kind = TYPES[TYPE_IDS[name]]
    out = torch.empty(3, 4 * kind.block)
    dequantise(blocks_of(name), kind, out)
    assert hashlib.sha256(out.numpy().tobytes()).hexdigest() == VALUES[name]
    rounded = torch.empty(3, 4 * kind.block, dtype=torch.bfloat16)
    dequantise(blocks_of(name), kind, rounded)
    assert torch.equal(rounded, out.bfloat16())


def test_an_mxfp4_scale_that_is_no_number_gives_no_number():
    blocks = blocks_of("MXFP4")
    blocks[1, 0] = 255
    out = torch.empty(3, 128)
    dequantise(blocks, TYPES[39], out)
    assert out[1, :32].isnan().all() and not out[0].isnan().any()


def test_a_weight_of_mxfp4_blocks_has_their_numbers():
    blocks, out = blocks_of("MXFP4"), torch.empty(3, 128)
    dequantise(blocks, TYPES[39], out)
    weight = mxfp4_parts(blocks.view(3, 4, 17))
    assert torch.equal(mxfp4.dequantise(weight), out) and not weight.is_normal
    blocks.view(12, 17)[:, 0].clamp_(2, 252)
    assert mxfp4_parts(blocks.view(3, 4, 17)).is_normal


def test_rows_are_put_back_into_the_order_of_hugging_face():
    rows = torch.arange(48.0)[:, None].expand(48, 2)
    order = stored_rows(48, 4)
    assert order is not None and torch.equal(permuted(rows, 4)[order], rows)
    assert stored_rows(50, 4) is None


def meaning(config: model_config.ModelConfig) -> object:
    """The configuration without the ends of texts, and with one spelling for rotations."""
    silent = {("beta_fast", 32.0), ("beta_slow", 1.0)}  # which are what they are without a word
    settings = {name: number for name, number in config.rope.settings.items()
                if name != "partial_rotary_factor" and (name, number) not in silent}
    rotated = tuple(not layer.attention or layer.attention.rotates for layer in config.layers)
    inner = 0 if config.experts else config.intermediate_size  # not used then
    hybrid = config.hybrid and replace(config.hybrid, is_converted=False)
    return replace(config, eos_token_ids=(), hybrid=hybrid, norm_offset=0.0, rotated=rotated, intermediate_size=inner,
                   rope=replace(config.rope, settings=settings))


CONVERTED = [name for name, (_, own) in FAMILIES.items() if not {"use_sliding_window", "rope_parameters"} & set(own)
             and name not in ("smollm3", "exaone4", "seed_oss")]  # the last two are read from safetensors only


@pytest.mark.parametrize("name", [*CONVERTED, "smollm3", *MIXTURES, *HYBRIDS])
@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_a_converted_model_is_the_same_model(tmp_path, name, kind):
    """Equal configuration, equal tensors, and so the same logits to the bit."""
    dtype = torch.float32 if kind == "F32" else torch.bfloat16
    more = {"smollm3": {"no_rope_layers": None, "num_hidden_layers": 5}, "gpt_oss": {"swiglu_limit": 7.0}}
    model = make_family(tmp_path / "folder", name, dtype, **more.get(name, {}))
    convert(tmp_path / "folder", model, tmp_path / "model.gguf", kind)
    ours, theirs = (config_file.read_config(tmp_path / path) for path in ("model.gguf", "folder"))
    assert meaning(ours) == meaning(theirs)
    assert ours.eos_token_ids == (1,)  # by its text, </s>
    tokens = prompt_of(40)
    results = []
    for path in (tmp_path / "model.gguf", tmp_path / "folder"):
        loaded = load(path, ours.dtype)
        results.append(loaded.logits(loaded.forward(chain_rows(tokens, 0), loaded.new_cache()).hidden))
    assert torch.equal(*results)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    """A model whose rows are whole blocks of 32 numbers."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, make_checkpoint(folder, hidden_size=HIDDEN, intermediate_size=96, num_key_value_heads=2)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_a_quantised_model_is_the_model_of_its_dequantised_weights(tmp_path, llama, kind):
    folder, model = llama
    convert(folder, model, tmp_path / "model.gguf", kind)
    files = TensorFiles(tmp_path / "model.gguf")
    loaded = load(tmp_path / "model.gguf")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = files.read(name)
            assert found.shape == parameter.shape
            assert (found - parameter).abs().max() <= 0.3
            parameter.copy_(found)
    tokens = prompt_of(40)
    ours = loaded.logits(loaded.forward(chain_rows(tokens, 0), loaded.new_cache()).hidden)
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    model.load_state_dict(type(model).from_pretrained(folder).state_dict())


def test_a_quantised_file_is_computed_with_its_own_numbers_and_a_line_says_so(tmp_path, llama, caplog):
    for kind in ("BF16", "Q8_0"):
        convert(*llama, tmp_path / f"{kind}.gguf", kind)
    loaded = [longdraft.load(str(tmp_path / "BF16.gguf")), longdraft.load(str(tmp_path / "Q8_0.gguf"), quantize="file"),
              longdraft.load(str(tmp_path / "Q8_0.gguf"), quantize="none")]
    assert not caplog.text
    loaded.append(longdraft.load(str(tmp_path / "Q8_0.gguf")))
    assert [engine.model.weights.quantize for engine in loaded] == ["none", "file", "none", "file"]
    assert caplog.text.count("\n") == 1 and "computed with the file's own quantised numbers" in caplog.text
    longdraft.load(str(tmp_path / "BF16.gguf"), quantize="file")
    assert "--quantize file changes nothing" in caplog.text


def test_a_journal_of_expanded_numbers_resumes_with_them(tmp_path, llama):
    """`--quantize none` was the default, and journals of then name it."""
    convert(*llama, tmp_path / "model.gguf", "Q4_0")
    expanded = longdraft.load(str(tmp_path / "model.gguf"), drafter="plain", quantize="none")
    with expanded.generate(prompt_of(30), SamplingParams(max_new_tokens=20, seed=3), journal=tmp_path / "text") as text:
        while len(text.tokens) < 8:
            next(text)
    resumed = longdraft.resume(tmp_path / "text")
    tokens = [token for event in resumed for token in event.tokens]
    whole = expanded.generate(prompt_of(30), SamplingParams(max_new_tokens=20, seed=3))
    assert tokens == [token for event in whole for token in event.tokens] and resumed.stats()["quantize"] == "none"


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_drafters_write_the_plain_text_of_a_quantised_file(tmp_path, llama, quantize):
    folder, model = llama
    convert(folder, model, tmp_path / "model.gguf", "Q4_0")
    params = SamplingParams(max_new_tokens=40, seed=3)
    texts = []
    for drafter in ("plain", "magicdec", "auto"):
        engine = longdraft.load(str(tmp_path / "model.gguf"), drafter=drafter, quantize=quantize)
        texts.append([event.tokens for event in engine.generate(prompt_of(60), params)])
    flat = [[token for tokens in text for token in tokens] for text in texts]
    assert flat[0] == flat[1] == flat[2] and len(flat[0]) == 40


def test_an_expanded_target_drafts_with_the_numbers_of_its_file(tmp_path, monkeypatch, llama):
    """Also by default, and most of their guesses are right. A target that has these numbers makes no copy of them."""
    monkeypatch.setattr(draft_copy, "_MIN_BYTES", 1)
    convert(*llama, tmp_path / "model.gguf", "Q4_0")

    def text_of(drafter, quantize, **options):
        engine = longdraft.load(str(tmp_path / "model.gguf"), drafter=drafter, quantize=quantize,
                                drafter_options=options)
        return list(engine.generate(prompt_of(60), SamplingParams(max_new_tokens=40, seed=3)))[-1].stats

    plain = text_of("plain", "none")
    for options in ({}, {"draft_weights": "file"}):
        drafted = text_of("magicdec", "none", budget=400, **options)
        assert drafted["draft_weights"] == "file" and drafted["mean_accepted_length"] > 3
        assert drafted["sha256_tokens"] == plain["sha256_tokens"]
    assert text_of("magicdec", "file", draft_weights="file")["draft_weights"] == "same"
    convert(*llama, tmp_path / "model.gguf", "BF16")
    with pytest.raises(UsageError, match="draft_weights is 'file', which copies the numbers of a quantised file"):
        text_of("magicdec", "none", draft_weights="file")


@pytest.mark.parametrize("kind, quantize, chosen", [
    ("Q4_1", "file", "same"), ("Q8_0", "file", "int4"), ("Q4_1", "none", "file"), ("BF16", "none", "int4")])
def test_on_a_device_auto_copies_no_target_that_is_in_few_bits_already(tmp_path, monkeypatch, kind, quantize, chosen):
    network = make_checkpoint(tmp_path, hidden_size=256, intermediate_size=512, vocab_size=640)
    convert(tmp_path, network, tmp_path / "model.gguf", kind)
    target = load(tmp_path / "model.gguf", quantize=quantize)
    monkeypatch.setattr(draft_copy, "_MIN_WEIGHTS_IN_TOKENS", 1)
    monkeypatch.setattr(target.kernels, "is_device", True, raising=False)
    assert draft_copy.resolve("auto", target, TensorFiles(tmp_path / "model.gguf")) == chosen


@pytest.mark.parametrize("rope, found", [
    (dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
          original_max_position_embeddings=8192), "llama3"),
    (dict(rope_type="llama3", factor=8.0, low_freq_factor=2.0, high_freq_factor=3.0,
          original_max_position_embeddings=8192), "longrope"),  # another rule: the numbers as they are
])
def test_frequencies_that_the_file_divides_give_the_same_rotations(tmp_path, rope, found):
    model = make_checkpoint(tmp_path, max_position_embeddings=32768, head_dim=32, hidden_size=64,
                            rope_parameters=rope | {"rope_theta": 500000.0})
    plain = 500000.0 ** (-torch.arange(0, 32, 2).float() / 32)
    factors = plain / model.model.rotary_emb.inv_freq
    factors = torch.where((factors - 8).abs() < 1e-4, 8.0, factors)  # as converters write it
    convert(tmp_path, model, tmp_path / "model.gguf", tensors={"rope_freqs.weight": stored(factors, "F32")})
    config = config_file.read_config(tmp_path / "model.gguf")
    assert config.rope.kind == found
    ours, theirs = load(tmp_path / "model.gguf"), load(tmp_path)
    places = [0, 5, 900, 20000]
    for one, other in zip(ours.rotations(places), theirs.rotations(places), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3 if found == "longrope" else 0, rtol=0)


@pytest.mark.parametrize("rope", [
    dict(rope_type="linear", factor=4.0),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024, beta_fast=16.0, beta_slow=2.0),
])
def test_stretched_rope_is_read(tmp_path, rope):
    model = make_checkpoint(tmp_path, rope_parameters=rope | {"rope_theta": 10000.0})
    values = {"llama.rope.scaling.type": rope["rope_type"], "llama.rope.scaling.factor": 4.0}
    if rope["rope_type"] == "yarn":
        values |= {"llama.rope.scaling.original_context_length": 1024, "llama.rope.scaling.yarn_beta_fast": 16.0,
                   "llama.rope.scaling.yarn_beta_slow": 2.0}
    convert(tmp_path, model, tmp_path / "model.gguf", values=values)
    ours, theirs = (config_file.read_config(tmp_path / name) for name in ("model.gguf", "."))
    assert ours.max_positions == theirs.max_positions
    for one, other in zip(load(tmp_path / "model.gguf").rotations([700]), load(tmp_path).rotations([700]), strict=True):
        assert torch.equal(one, other)


def test_longrope_factors_are_read(tmp_path):
    name = "phi3, longrope, part"
    model = make_family(tmp_path, name)
    settings = FAMILIES[name][1]["rope_parameters"]
    convert(tmp_path, model, tmp_path / "model.gguf", tensors={
        f"rope_factors_{length}.weight": stored(torch.tensor(settings[f"{length}_factor"]), "F32")
        for length in ("long", "short")}, values={"phi3.rope.dimension_count": 6,
                                                  "phi3.rope.scaling.original_context_length": 1024})
    for length in (500, 1500):
        ours, theirs = (load(tmp_path / part).for_length(length) for part in ("model.gguf", "."))
        for one, other in zip(ours.rotations([7, 499]), theirs.rotations([7, 499]), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_a_split_file_is_one_model(tmp_path, llama):
    folder, model = llama
    convert(folder, model, tmp_path / "whole.gguf")
    whole = open_gguf(tmp_path / "whole.gguf")
    entries, data = list(whole.tensors.items()), whole.files[0].map
    values = {key: whole.array(key) if isinstance(content, tuple) else content for key, content in whole.values.items()}
    for number, part in enumerate((entries[:3], entries[3:9], entries[9:])):
        tensors = {name: (0, entry.shape, data[entry.start : entry.stop]) for name, entry in part}
        split = {"split.no": number, "split.count": 3, "split.tensors.count": len(entries)}
        write_gguf(tmp_path / f"part-0000{number + 1}-of-00003.gguf", (values if not number else {}) | split, tensors)
    for number in (1, 2):  # any part stands for the whole
        files = TensorFiles(tmp_path / f"part-0000{number}-of-00003.gguf")
        assert files.names() == TensorFiles(tmp_path / "whole.gguf").names()
        assert files.fingerprint() == TensorFiles(tmp_path / "whole.gguf").fingerprint()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "part-00001-of-00003.gguf").rename(tmp_path / "elsewhere" / "part-00001-of-00003.gguf")
    with pytest.raises(ModelError, match=r"part-00002-of-00003\.gguf is missing; put all 3 parts"):
        TensorFiles(tmp_path / "elsewhere" / "part-00001-of-00003.gguf")


def test_the_fingerprint_is_over_the_stored_bytes(tmp_path, llama):
    folder, model = llama
    for kind in ("Q8_0", "Q4_0"):
        convert(folder, model, tmp_path / f"{kind}.gguf", kind)
    prints = {TensorFiles(tmp_path / name).fingerprint() for name in ("Q8_0.gguf", "Q4_0.gguf")}
    assert len(prints) == 2 and TensorFiles(tmp_path / "Q8_0.gguf").fingerprint() in prints


def test_the_chat_template_and_the_ends_of_texts_are_those_of_the_file(tmp_path, llama):
    folder, model = llama
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    values = {"tokenizer.chat_template": template, "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
              "tokenizer.ggml.eot_token_id": 7}
    convert(folder, model, tmp_path / "model.gguf", values=values)
    assert Tokenizer(tmp_path / "model.gguf").chat("Hello") == "<s>[user] Hello</s>"
    assert config_file.read_config(tmp_path / "model.gguf").eos_token_ids == (1, 7)
    values |= {"tokenizer.ggml.eot_token_id": 320}
    convert(folder, model, tmp_path / "model.gguf", values=values)
    with pytest.raises(ModelError, match="eot_token_id is 320; allowed: 0 to 257"):
        config_file.read_config(tmp_path / "model.gguf")


def test_sampling_defaults_are_those_of_the_file(tmp_path):
    values = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95,
              "general.sampling.penalty_repeat": 1.1, "general.sampling.penalty_last_n": 64,
              "general.sampling.mirostat": 2}
    write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama"} | values, {})
    found = defaults.read_defaults(tmp_path / "model.gguf")
    assert found.settings == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1,
                              "penalty_window": 64}
    assert found.ignored == ("mirostat 2 (not supported)",)


def test_a_folder_with_one_gguf_file_is_that_model_and_of_several_one_is_chosen(tmp_path, llama, capfd):
    folder, model = llama
    home = tmp_path / "models"
    home.mkdir()
    convert(folder, model, home / "one.gguf")
    (home / "mmproj-one.gguf").write_bytes(b"")
    (home / "config.json").write_text("{}")  # many folders of GGUF files have one
    assert hub.resolve(str(home)) == home / "one.gguf"
    assert run(["generate", "It", "--model", str(home), "--max-new-tokens", "3", "--seed", "1"]) == 0
    first = capfd.readouterr().out
    convert(folder, model, home / "two.gguf", "Q8_0")
    with pytest.raises(ModelError, match=r"has 2 GGUF files; choose one with --file: one.gguf, two.gguf"):
        hub.resolve(str(home))
    arguments = ["--max-new-tokens", "3", "--seed", "1"]
    assert run(["generate", "It", "--model", str(home), "--file", "one.gguf", *arguments]) == 0
    assert capfd.readouterr().out == first
    with pytest.raises(UsageError, match="neither a folder nor a hub id"):
        hub.with_file("novelist", "one.gguf")
    assert hub.with_file("owner/name", "a.gguf") == "owner/name:a.gguf"
    assert run(["generate", "It", "--model", str(home), "--file", "none.gguf", *arguments]) == 2


def test_a_journal_of_a_gguf_file_is_resumed(tmp_path, llama):
    folder, model = llama
    convert(folder, model, tmp_path / "model.gguf", "Q8_0")
    params = SamplingParams(max_new_tokens=30, seed=2, ignore_eos=True)
    engine = longdraft.load(str(tmp_path / "model.gguf"), drafter="plain")
    whole = [token for event in engine.generate(prompt_of(9), params) for token in event.tokens]
    generation = engine.generate(prompt_of(9), params, journal=tmp_path / "journal")
    for _ in zip(range(8), generation, strict=False):
        pass
    generation.close()
    resumed = longdraft.resume(tmp_path / "journal")
    for _ in resumed:
        pass
    assert resumed.tokens.tolist() == whole


@pytest.mark.parametrize("values, message", [
    ({"general.architecture": "gemma3n"}, "general.architecture is 'gemma3n'; supported: llama"),
    ({"general.architecture": "gptoss"}, "in an early layout of Ollama"),
    ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
    ({"llama.expert_count": 8, "llama.expert_shared_count": 1}, "mixture-of-experts layers"),
    ({"llama.block_count": 0}, "llama.block_count is 0; allowed: a whole number of 1 or more"),
    ({"llama.attention.head_count_kv": [4, 2]}, "must have 2 equal values, one for each layer"),
    ({"llama.attention.head_count_kv": [2, 2, 2]}, "must have 2 equal values, one for each layer"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "is nan; allowed: a finite number"),
    ({"llama.rope.scaling.type": "twisted"}, "rope.scaling.type is 'twisted'; supported: none, linear, yarn"),
    ({"llama.rope.dimension_count": 8}, "partial_rotary_factor is"),
    ({"llama.embedding_length": 65}, "does not match its metadata"),
    ({"llama.block_count": 3}, "missing model.layers.2"),
])
def test_metadata_that_cannot_be_used_is_one_clear_line(tmp_path, llama, values, message):
    folder, model = llama
    convert(folder, model, tmp_path / "model.gguf", values=values)
    with pytest.raises(ModelError, match=message) as caught:
        longdraft.load(str(tmp_path / "model.gguf"), drafter="plain")
    assert "\n" not in str(caught.value)


# Each form of the metadata that llama.cpp reads

LAYERS_OF = {"llama": 3, "granite": 3, "olmo2": 3, "qwen3": 3, "phi3": 3, "mixtral": 3, "gemma2": 3, "gemma3": 3,
             "ministral3": 3, "gpt_oss": 3, "gemma4": 3, "qwen3_5": 4}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512}
# family -> pairs of metadata, the second of which is another form of the first; None: the key is left out
FORMS: dict[str, list[tuple[dict[str, object], dict[str, object]]]] = {
    "llama": [
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "linear"}, more) for more in (
            {"rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0},
            {"rope.scale_linear": 4.0, "rope.scaling.type": "linear"},
            {"rope.scaling.factor": 4.0, "rope.scale_linear": 7.0})
    ] + [({}, more) for more in (
        {"rope.scaling.factor": 0.0}, {"rope.scaling.factor": 1.0}, {"rope.scale_linear": 0.0},
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope.scaling.type": "none"},
        {"rope.dimension_count": 12}, {"attention.key_length": 12, "attention.value_length": 12},
        {"rope.freq_base": None}, {"expert_count": 0, "expert_used_count": 0}, {"attention.causal": True},
        {"vocab_size": 320}, {"rope.scaling.finetuned": True}, {"rope.scaling.original_context_length": 2048})
    ] + [(YARN, YARN | more) for more in (
        {"rope.scaling.yarn_ext_factor": 1.0}, {"rope.scaling.attn_factor": 1.0},
        {"rope.scaling.yarn_attn_factor": 1.0}, {"rope.scaling.yarn_log_multiplier": 0.0},
        {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0})
    ] + [(YARN, YARN | more) for more in ({"rope.scaling.yarn_ext_factor": -1.0},
                                          {"rope.scaling.yarn_log_multiplier": 1.0})],
    "granite": [
        ({"residual_scale": 1.0, "embedding_scale": 1.0}, {"residual_scale": 0.0, "embedding_scale": 0.0}),
        ({"residual_scale": 1.0, "embedding_scale": 1.0}, {"residual_scale": None, "embedding_scale": None}),
        *(({"attention.key_length": 16, "attention.value_length": 16, "attention.scale": 0.25},
           {"attention.scale": none}) for none in (None, 0.0))],
    "olmo2": [({}, {"attention.sliding_window": 0})],
    "gemma2": [({}, {"attention.sliding_window_pattern": 2}),
               ({"attention.sliding_window_pattern": None}, {"attention.sliding_window_pattern": 2}),
               ({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
                {"attn_logit_softcapping": None, "final_logit_softcapping": None})],
    "gemma3": [({"attention.sliding_window_pattern": 6}, {"attention.sliding_window_pattern": None}),
               ({"rope.freq_base_swa": 10000.0}, {"rope.freq_base_swa": None})],
    "gpt_oss": [({"attention.sliding_window_pattern": 2}, {"attention.sliding_window_pattern": None})],
    "gemma4": [({}, each) for each in ({"expert_count": 0}, {"attention.shared_kv_layers": None},
                                       {"attention.temperature_scale": 0.3}, {"rope.scaling.factor": 1.0},
                                       {"embedding_length_per_layer_input": None})],
    "phi3": [({}, {"attention.sliding_window": 0}), ({}, {"attention.sliding_window": 4096})],
}
ARRAYS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")  # a number, or one for each layer
CASES = [(family, *pair) for family, pairs in FORMS.items() for pair in pairs]
CASES += [(family, {}, {key: [...] * count}) for family, count in LAYERS_OF.items() for key in ARRAYS
          if not (family == "gemma4" and "kv" in key)]
CASES += [("qwen3", {}, {key: [...] * 4, "block_count": 4, "nextn_predict_layers": 1}) for key in ARRAYS]


def header_of(name: str, changes: dict[str, object], path: Path) -> config_file.ModelConfig:
    """The configuration of a file with the metadata of a family, changed, and no tensor but the embedding."""
    config = family_config(name, **({"layer_types": None} if name in ("gemma2", "gpt_oss") else {}))
    arch = architecture_of(config)
    if arch == "gemma4":
        config.allow_global_per_layer_attribute_access = True
    values = metadata(config, arch)
    for key, new in changes.items():
        old = values.pop(f"{arch}.{key}", None)
        if isinstance(new, list) and ... in new:
            new = [old] * len(new) if not isinstance(old, list) else old
        if new is not None:
            values[f"{arch}.{key}"] = new
    table = stored(torch.zeros(320, config.hidden_size), "F32")
    write_gguf(path, values, {"token_embd.weight": table, "blk.1.attn_v.weight": stored(torch.zeros(4, 4), "F32")})
    return config_file.read_config(path)


@pytest.mark.parametrize("name, changes, others", CASES, ids=str)
def test_each_form_of_the_metadata_is_the_same_configuration(tmp_path, name, changes, others):
    """Numbers, arrays with one for each layer, names of the first files, and values that mean none."""
    plain, other = (header_of(name, each, tmp_path / "a.gguf") for each in (changes, changes | others))
    assert meaning(plain) == meaning(other)


def test_the_converters_factor_of_attention_is_the_whole_factor(tmp_path):
    factors = {"rope.scaling.yarn_attn_factor": 0.5, "rope.scaling.attn_factor": 0.5}
    assert header_of("llama", YARN | factors, tmp_path / "a.gguf").rope.settings["attention_factor"] == 0.25


def test_arrays_with_the_number_of_heads_leave_the_order_of_rows(tmp_path, llama):
    folder, model = llama
    convert(folder, model, tmp_path / "one.gguf")
    convert(folder, model, tmp_path / "each.gguf", values={
        "llama.attention.head_count": [4, 4], "llama.attention.head_count_kv": [2, 2]})
    one, each = (TensorFiles(tmp_path / name) for name in ("one.gguf", "each.gguf"))
    assert all(torch.equal(one.read(name), each.read(name)) for name in one.names())


@pytest.mark.parametrize("changes, message", [
    ({"attention.causal": False}, "attention.causal is false: this is an embedding model"),
    (YARN | {"rope.scaling.yarn_ext_factor": 0.0}, "yarn_ext_factor is 0.0; supported: 1"),
    (YARN | {"rope.scaling.factor": -1.0, "rope.scaling.attn_factor": 2.0}, "factor is -1.0; allowed: above 0"),
    ({"attention.head_count_kv": [2, 2]}, "must have 3 equal values, one for each layer"),
    ({"expert_count": 4, "expert_used_count": 2, "expert_group_count": 2}, "expert_group_count is 2; supported: 1"),
])
def test_a_form_that_means_something_else_is_refused(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        header_of("llama", changes, tmp_path / "a.gguf")


GGUF_FAMILIES = [name if name in ("mixtral", "gemma4") else pytest.param(name, marks=pytest.mark.full)
                 for name in (*CONVERTED, "smollm3", *MIXTURES, *HYBRIDS, *CPU_FAMILIES, *GEMMA4)]


def problem_of(name: str, changes: dict[str, object], path: Path) -> str:
    """What the reader says against a header; nothing where it accepts it."""
    try:
        header_of(name, changes, path)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_an_absurd_value_of_every_key_of_the_metadata_is_read_or_refused_at_once(tmp_path, name):
    config = family_config(name)
    arch, count = architecture_of(config), 0
    others = {"nextn_predict_layers", "rope.scaling.factor", "rope.scaling.type", "rope.scaling.attn_factor",
              "rope.scaling.original_context_length", "rope.dimension_count", "attention.sliding_window",
              "attention.sliding_window_pattern", "attention.key_length", "rope.freq_base_swa", "logit_scale"}
    if arch == "gemma4":
        config.allow_global_per_layer_attribute_access = True
    known = {key.removeprefix(f"{arch}.") for key in metadata(config, arch) if key.startswith(f"{arch}.")}
    for key in sorted(known | others):
        for value in (0, 1, 10**9, 2**32 - 1, -1.0, 0.0, 1e-30, 1e30, math.inf, math.nan, "yarn", "", True, [], [0] * 3,
                      [2**32 - 1] * 3, [1e30] * 3, ["x"] * 3, [1], None):
            line = problem_of(name, {key: value}, tmp_path / "a.gguf")
            assert "\n" not in line and len(line) < 2000
            count += 1
    print(f"{name}: {count} headers")


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_training_has_the_floating_point_numbers_of_a_file(tmp_path, llama, kind):
    """The states and logits that `transformers` computes from the file are ours."""
    pytest.importorskip("gguf", reason="transformers reads GGUF files with the package gguf")
    folder, model = llama
    convert(folder, model, tmp_path / "model.gguf", kind, {"llama.vocab_size": model.config.vocab_size})
    frozen = frozen_model.load_frozen_model(tmp_path / "model.gguf", "float32", torch.device("cpu"))
    ours, ids = load(tmp_path / "model.gguf"), prompt_of(40)
    hidden = frozen.outputs(torch.tensor([ids])).hidden[0]
    wanted = ours.forward(chain_rows(ids, 0), ours.new_cache()).hidden
    torch.testing.assert_close(hidden, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(frozen.logits(frozen.normed(hidden)), ours.logits(wanted), atol=1e-4, rtol=1e-4)
    assert frozen.fingerprint == TensorFiles(tmp_path / "model.gguf").fingerprint()
    assert frozen.architectures == ("LlamaForCausalLM",)


TRAINED = {"eagle": EagleSettings, "glide": GlideSettings, "tokenswift": HeadSettings, "block": BlockSettings}


@pytest.mark.full
@pytest.mark.parametrize("drafter", TRAINED)
def test_a_part_that_was_trained_for_a_file_drafts_for_it(tmp_path, llama, drafter):
    pytest.importorskip("gguf", reason="transformers reads GGUF files with the package gguf")
    folder, model = llama
    file = tmp_path / "model.gguf"
    convert(folder, model, file, "Q8_0", {"llama.vocab_size": model.config.vocab_size})
    (tmp_path / "text.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 200)
    job.train(TRAINED[drafter](
        model=str(file), data=(str(tmp_path / "text.txt"),), sequence_length=64, steps=2, batch_size=1, warmup_steps=1,
        eval_every=0, checkpoint_every=0, probe_tokens=0, device="cpu", threads=1), tmp_path / "part")
    hashes = set()
    for name, part in ((drafter, str(tmp_path / "part")), ("plain", None)):
        engine = longdraft.load(str(file), drafter=name, heads=part)
        params = SamplingParams(max_new_tokens=20, seed=3, ignore_eos=True)
        hashes.add([event.stats for event in engine.generate(prompt_of(20), params)][-1]["sha256_tokens"])
    assert len(hashes) == 1
