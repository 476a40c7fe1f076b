"""Rotations of every rope type against `transformers`; those that depend on the length are chosen once for a text."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import longdraft
from helpers.checkpoints import VOCAB, load, make_checkpoint, write_tokenizer
from helpers.equality import DRAFTERS, prompt_of
from helpers.generation import by_name, generate
from longdraft.checkpoint import config_file
from longdraft.checkpoint.tensor_files import dump_json
from longdraft.errors import ModelError, UsageError
from longdraft.model.rope import _CHUNK_SIZE, _MAX_CHUNKS, RopeTable, frequencies
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.request.sampling_params import SamplingParams

TRAINED = 128
SIZES = dict(vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1)
FACTORS = dict(short_factor=[1.0, 1.02, 1.1, 1.3, 1.7, 2.1], long_factor=[1.1, 1.5, 2.0, 4.0, 9.0, 16.0])
ROPES: dict[str, dict[str, object]] = {
    "linear": dict(rope_type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=4.0),
    "yarn": dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64),
    "yarn, mscale": dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64, mscale=1.2,
                         mscale_all_dim=0.8),
    "yarn, not truncated": dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64, truncate=False,
                                beta_fast=24.0, beta_slow=2.0),
    "llama3": dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64),
    "longrope": dict(rope_type="longrope", original_max_position_embeddings=64, **FACTORS),
    "longrope, own factors": dict(rope_type="longrope", original_max_position_embeddings=64, factor=32.0,
                                  attention_factor=1.3, **FACTORS),
}


@pytest.mark.parametrize("length", [1, TRAINED, 3 * TRAINED, 50_000])
@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_are_those_of_transformers(rope, length):
    theirs = LlamaConfig(**SIZES, max_position_embeddings=TRAINED, rope_parameters=ROPES[rope] | {"rope_theta": 5e5})
    ours = config_file.parse_config(theirs.to_dict())
    expected, factor = ROPE_INIT_FUNCTIONS[ours.rope.kind](theirs, torch.device("cpu"), seq_len=length)
    got, ours_factor = frequencies(ours.rope, ours.trained_positions, length)
    torch.testing.assert_close(got, expected, atol=0, rtol=2e-6)
    assert ours_factor == pytest.approx(factor)


def made(folder: Path, config: object) -> torch.nn.Module:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def dynamic(folder: Path) -> torch.nn.Module:
    return made(folder, LlamaConfig(**SIZES, max_position_embeddings=TRAINED, rope_parameters=dict(
        rope_type="dynamic", factor=4.0, rope_theta=10000.0)))


def longrope(folder: Path) -> torch.nn.Module:
    return made(folder, Phi3Config(**SIZES, pad_token_id=None, max_position_embeddings=512, rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, **FACTORS), original_max_position_embeddings=TRAINED))


BY_LENGTH = pytest.mark.parametrize("make", [dynamic, longrope])


def ours_of(model: Transformer, tokens: list[int]) -> torch.Tensor:
    return model.logits(model.forward(chain_rows(tokens, 0), model.new_cache()).hidden)


@BY_LENGTH
@pytest.mark.parametrize("length", [TRAINED // 2, TRAINED, 3 * TRAINED])
def test_logits_of_a_text_read_at_once_are_those_of_transformers(tmp_path, make, length):
    """Shorter than the trained length, at its edge, and far beyond."""
    theirs, tokens = make(tmp_path), prompt_of(length)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    got = ours_of(load(tmp_path).for_length(length), tokens)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


@BY_LENGTH
def test_the_length_asked_for_chooses_the_rotations_of_all_positions(tmp_path, make):
    make(tmp_path)
    model, tokens = load(tmp_path), prompt_of(40)
    assert model.for_length(TRAINED) is model
    longer = model.for_length(TRAINED + 1)
    assert not torch.allclose(ours_of(longer, tokens), ours_of(model, tokens), atol=1e-3)
    assert longer.weights is model.weights


@BY_LENGTH
@pytest.mark.parametrize("drafter", ["suffix", "magicdec, streaming", "triforce, n-grams", "draft-model, itself"])
def test_a_text_across_the_trained_length_is_the_plain_one(tmp_path, make, drafter):
    make(tmp_path)
    params = SamplingParams(max_new_tokens=100, temperature=1.0, min_p=0.1, seed=4, repetition_penalty=1.1)
    model, prompt = load(tmp_path).for_length(160), prompt_of(60)
    plain = generate(model, prompt, params, by_name("plain"))
    name, options = DRAFTERS[drafter]
    factory = by_name(name, None, model if "model" in options else None, **options)
    assert generate(model, prompt, params, factory) == plain


@BY_LENGTH
def test_the_public_door_asks_for_the_whole_length(tmp_path, make):
    """A text written in two runs, the second from what the first wrote, is the text of one."""
    make(tmp_path)
    prompt, params = prompt_of(60), dict(temperature=0.0, ignore_eos=True)
    texts = {}
    for drafter in ("plain", "suffix"):
        engine = longdraft.load(str(tmp_path), drafter=drafter)
        events = engine.generate(prompt, SamplingParams(max_new_tokens=100, **params))
        texts[drafter] = [token for event in events for token in event.tokens]
    long = load(tmp_path).for_length(160)
    by_hand = generate(long, prompt, SamplingParams(max_new_tokens=100, temperature=0.0), by_name("plain"))
    assert texts["plain"] == texts["suffix"] == by_hand
    rest = engine.generate(prompt + by_hand[:50], SamplingParams(max_new_tokens=50, **params))
    assert [token for event in rest for token in event.tokens] == by_hand[50:]


@pytest.mark.parametrize("rope, reach", [
    (dict(rope_type="default"), 128), (ROPES["linear"], 512), (ROPES["dynamic"], 512), (ROPES["yarn"], 512),
    (ROPES["yarn"] | {"factor": 1.5}, 128), (ROPES["llama3"], 128), (ROPES["longrope"], 128)])
def test_a_model_reaches_as_far_as_its_rope_has_a_meaning(rope, reach):
    changes = dict(model_type="llama", max_position_embeddings=128, rope_parameters=rope)
    config = config_file.parse_config(SIZES | changes)
    assert (config.trained_positions, config.max_positions) == (128, reach)


def test_beyond_the_trained_length_there_is_one_warning_and_beyond_the_rope_an_error(tmp_path, caplog):
    make_checkpoint(tmp_path, max_position_embeddings=32, rope_parameters=ROPES["linear"] | {"rope_theta": 10000.0})
    engine = longdraft.load(str(tmp_path), drafter="plain")

    def write(new: int) -> None:
        list(engine.generate(prompt_of(8), SamplingParams(max_new_tokens=new, seed=1)))

    with caplog.at_level(logging.WARNING, "longdraft"):
        write(24)
        assert not caplog.records
        write(25)
        write(30)
    assert [record.getMessage() for record in caplog.records] == [
        "the text may reach 33 tokens, the model was trained on 32 (max_position_embeddings); rope "
        "type 'linear' extends it to 128, but quality may suffer"]
    with pytest.raises(UsageError, match="allowed: 128"):
        write(121)


@pytest.mark.parametrize("changes, message", [
    (dict(rope_type="longrope", short_factor=[1.0]), "needs 'long_factor'"),
    (dict(rope_type="longrope", short_factor=[1.0], long_factor=[1.0]), "a list of 6 numbers"),
    (dict(rope_type="longrope", short_factor="many", long_factor=[1.0] * 6), "short_factor .* a list of 6 numbers"),
    (dict(rope_type="dynamic"), "needs 'factor'"),
    (dict(rope_type="proportional"), "'proportional'; supported: default, linear, dynamic, yarn, llama3, longrope"),
])
def test_ropes_that_make_no_sense_are_named(changes, message):
    with pytest.raises(ModelError, match=message):
        config_file.parse_config(SIZES | dict(model_type="llama", rope_parameters=changes))


@pytest.mark.parametrize("rope", [
    dict(rope_type="longrope", short_factor=[0.0] * 6, long_factor=[1.0] * 6),
    dict(rope_type="longrope", short_factor=[1.0] * 6, long_factor=[float("nan")] * 6,
         original_max_position_embeddings=64),
    dict(rope_type="dynamic", factor=float("nan")),
])
def test_factors_that_give_no_angles_are_one_clear_error(tmp_path, rope):
    dynamic(tmp_path)
    config = config_file.read_json(tmp_path / "config.json")
    dump_json(tmp_path / "config.json", config | {"rope_parameters": rope})
    with pytest.raises(ModelError, match=r"gives no finite angles|wrong type|factor is nan; allowed"):
        load(tmp_path)


def test_the_first_names_of_longrope_are_understood():
    for name in ("su", "yarn"):
        config = config_file.parse_config(SIZES | dict(model_type="phi3", rope_scaling={"type": name, **FACTORS}))
        assert config.rope.kind == "longrope" and len(config.rope.long_factors) == 6


def test_rotations_depend_on_the_position_alone_and_few_are_kept(tiny):
    """Whatever was asked for before, together or alone; and a table does not grow with the text."""
    config = config_file.read_config(tiny["mha"])
    table = RopeTable(config, 1, torch.device("cpu"))
    size = _CHUNK_SIZE
    asked = [[0], [5, size - 1, size, size + 1], [50 * size, 3], list(range(size - 2, 2 * size + 3)),
             *[[number * size + 7] for number in range(40)], [7, 20 * size + 7]]
    for positions in asked:
        cos, sin = table.at(positions)
        for row, position in enumerate(positions[:4]):
            alone = RopeTable(config, 1, torch.device("cpu")).at([position])
            assert torch.equal(cos[row], alone[0][0]) and torch.equal(sin[row], alone[1][0])
        assert len(table._chunks) <= _MAX_CHUNKS
