"""config.json in the spellings that are in use: the logits are those of transformers 5, or the file is refused.

The reference is `transformers` itself, on a small model's folder whose config.json is changed in one place. A file that
both read must give equal logits. One that either refuses is no failure: only a silent difference is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from helpers.checkpoints import load, make_checkpoint
from helpers.equality import prompt_of
from helpers.extents import extent
from helpers.families import EVERY_FAMILY, logits_of, make_family
from longdraft.checkpoint.tensor_files import WEIGHTS
from longdraft.errors import ModelError

TOKENS = prompt_of(60)
Config = dict[str, Any]


def theirs_of(folder: Path) -> torch.Tensor | None:
    """What transformers computes; None: it refuses the folder, or fills up what is missing at random."""
    try:
        model, about = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
        if about["missing_keys"] or about["mismatched_keys"] or about["unexpected_keys"]:
            return None
        with torch.no_grad():
            return model.eval()(torch.tensor([TOKENS])).logits[0].float()
    except Exception:  # of any kind
        return None


def ours_of(folder: Path) -> torch.Tensor | None:
    try:
        return logits_of(load(folder), TOKENS, 40)
    except ModelError:
        return None


def without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


def keys(config: Config) -> Iterator[tuple[str, Config]]:
    """Each key left out, or null."""
    for name in config.keys() - {"architectures", "transformers_version", "model_type", "initializer_range",
                                 "use_cache", "attention_dropout"}:
        yield f"no {name}", without(config, name)
        yield f"{name} is null", config | {name: None}


def spellings(config: Config) -> Iterator[tuple[str, Config]]:
    """Two names of one setting: each alone, and both with different values."""
    for first, second in getattr(CONFIG_MAPPING[config["model_type"]], "attribute_map", {}).items():
        value = config.get(second, config.get(first))
        for name, other in ((first, second), (second, first)) if isinstance(value, int) else ():
            yield f"{name} alone", without(config, first, second) | {name: value}
            yield f"{name} beside {other}", without(config, first, second) | {name: value, other: value + 1}
            yield f"{name} after {other}", without(config, first, second) | {other: value + 1, name: value}


def rotations(config: Config) -> Iterator[tuple[str, Config]]:
    """The spellings of rotary position embeddings before and since transformers 5, and both."""
    rope, bare = config.get("rope_parameters") or {}, without(config, "rope_parameters")
    linear = {"rope_type": "linear", "factor": 3.0}
    yield "both scalings", config | {"rope_scaling": linear}
    yield "both scalings and a theta", config | {"rope_scaling": linear, "rope_theta": 5e4}
    yield "no settings", config | {"rope_parameters": {}}
    if "rope_theta" not in rope:
        for name in rope:
            yield f"no {name}", config | {"rope_parameters": without(rope, name)}
        return
    theta, scaling = rope["rope_theta"], without(rope, "rope_theta", "partial_rotary_factor")
    part = {name: rope[name] for name in ("partial_rotary_factor",) if name in rope}
    earlier = {("type" if name == "rope_type" else name): value for name, value in scaling.items()}
    yield "earlier", bare | {"rope_theta": theta, "rope_scaling": scaling} | part
    yield "earlier, type", bare | {"rope_theta": theta, "rope_scaling": earlier} | part
    yield "earlier, none", bare | {"rope_theta": theta} | part
    yield "earlier, null", bare | {"rope_theta": theta, "rope_scaling": None} | part
    yield "two thetas", config | {"rope_theta": theta * 7}
    yield "a theta inside the scaling", bare | {"rope_scaling": rope}
    yield "a theta inside and outside", bare | {"rope_scaling": rope, "rope_theta": theta * 5}
    yield "a theta outside", config | {"rope_parameters": scaling | part, "rope_theta": theta * 2}
    yield "no theta", config | {"rope_parameters": scaling | part}
    yield "two types", config | {"rope_parameters": rope | {"type": "linear", "factor": rope.get("factor", 2.0)}}


def layers(config: Config) -> Iterator[tuple[str, Config]]:
    """Which layers have a window, in all spellings."""
    count = config["num_hidden_layers"]
    listed = {"layer_types": ["sliding_attention"] * count, "sliding_window": 16}
    yield "a pattern", config | {"sliding_window_pattern": 2}
    yield "a pattern alone", without(config, "layer_types") | {"sliding_window_pattern": 2, "sliding_window": 16}
    yield "switched on", config | {"use_sliding_window": True, "sliding_window": 16}
    yield "switched off", config | {"use_sliding_window": False, "sliding_window": 16}
    yield "listed", config | listed
    yield "listed and switched on", config | listed | {"use_sliding_window": True}
    yield "from a layer on", without(config, "layer_types") | {
        "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}


def others(config: Config) -> Iterator[tuple[str, Config]]:
    """Settings that some families read and others ignore."""
    for name, value in {
            "attention_bias": not config.get("attention_bias"), "mlp_bias": not config.get("mlp_bias"),
            "tie_word_embeddings": not config.get("tie_word_embeddings"), "rms_norm_eps": 0.1, "layer_norm_eps": 0.1,
            "logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0,
            "attention_multiplier": 0.2, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 7, "norm_topk_prob": not config.get("norm_topk_prob"), "swiglu_limit": 0.5,
            "partial_rotary_factor": 0.5, "original_max_position_embeddings": 32, "rope_local_base_freq": 500.0,
            "use_bidirectional_attention": True, "torch_dtype": "float16", "dtype": "float16"}.items():
        yield f"{name} is {value}", config | {name: value}
    for key in ("hidden_act", "hidden_activation"):
        for value in ("relu", "silu", "gelu_pytorch_tanh"):
            yield f"{key} is {value}", config | {key: value}


KINDS: list[Callable[[Config], Iterator[tuple[str, Config]]]] = [keys, spellings, rotations, layers, others]
# What transformers reads in ways of its own, and longdraft does not follow.
UNLIKE: dict[str, set[str]] = {
    "phi3, longrope, part": {"original_max_position_embeddings is 32"},  # factors go by the length of the whole text
    "olmo3": {"a pattern alone"},  # its files have no sliding_window_pattern
}


def compare(folder: Path, name: str, kinds: list[Callable[[Config], Iterator[tuple[str, Config]]]]) -> None:
    make_family(folder, name)
    config = json.loads((folder / "config.json").read_text())
    outcomes, differing = {"equal": 0, "refused": 0}, []
    for what, changed in (change for kind in kinds for change in kind(config)):
        (folder / "config.json").write_text(json.dumps(changed))
        ours = ours_of(folder)
        theirs = None if ours is None else theirs_of(folder)
        outcomes["equal" if theirs is not None else "refused"] += 1
        if ours is not None and theirs is not None and not (ours - theirs).abs().max() < 1e-3:
            differing.append(what)
    print(f"{name}: {outcomes}")
    assert set(differing) <= UNLIKE.get(name, set())


@pytest.mark.parametrize("name", extent(["llama", "mixtral", "gpt_oss"], ["llama"]))
def test_a_setting_in_another_spelling_is_the_one_of_transformers(tmp_path, name):
    compare(tmp_path, name, [spellings, rotations])


@pytest.mark.full
@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_every_change_of_a_config_is_read_as_by_transformers_or_refused(tmp_path, name):
    compare(tmp_path, name, KINDS)


@pytest.mark.parametrize("same, shape, expected", [
    (True, (), "tied"), (False, (), "own"), (False, (321, 48), None), (False, (320, 24), None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_beside_a_tied_embedding_is_used_where_it_differs(tmp_path, same, shape, expected, dtype):
    make_checkpoint(tmp_path, dtype=dtype)
    tensors = load_file(tmp_path / WEIGHTS)
    table = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = table.clone() if same else torch.randn(shape or table.shape).to(dtype)
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    if expected is None:
        with pytest.raises(ModelError, match=r"lm_head\.weight has shape"):
            load(tmp_path)
        return
    ours, theirs = load(tmp_path), theirs_of(tmp_path)
    assert ours.config.is_tied == (expected == "tied") and theirs is not None
    torch.testing.assert_close(logits_of(ours, TOKENS, 40), theirs, atol=1e-3, rtol=1e-3)
