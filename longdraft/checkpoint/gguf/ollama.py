"""From the keys and names of Ollama's own converter to those of llama.cpp, before anything else reads a header.

Some files of Ollama's library have other keys, lack some, or hold the parts for images and sound beside the text
model. What differs is what Ollama itself translates for llama.cpp (its folder llama/compat). A file of llama.cpp's
converter has nothing to translate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from longdraft.checkpoint.gguf.types import Array, TensorEntry

_ALIEN = ("v.", "mm.", "a.", "model.vision_tower.")  # tensors of the parts for images and sound
_KEYS = {
    "gemma3": {"rope.global.freq_base": "rope.freq_base", "rope.local.freq_base": "rope.freq_base_swa"},
    "mistral3": {"rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
                 "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
                 "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
                 "rope.scaling_beta": "attention.temperature_scale"},
}
_HYBRID = [(r"\.ssm_dt$", ".ssm_dt.bias")]
_NAMES = {
    "gemma4": [(r"\.ffn_gate_inp\.per_expert_scale$", ".ffn_down_exps.scale")],
    "gpt-oss": [(r"\.attn_out\.", ".attn_output."), (r"\.attn_sinks$", ".attn_sinks.weight"),
                (r"\.ffn_norm\.", ".post_attention_norm.")],
    "qwen35": _HYBRID, "qwen35moe": _HYBRID, "qwen3next": _HYBRID,
}
_GEMMA3 = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
_LONG = 131_072  # tokens: a Gemma 3 with this context has a rope that is stretched eight times
_LLAMA3_END = 128_009, "<|eot_id|>"  # the token that tells Llama 3
_VOCABULARY = ("tokens", "scores", "token_type")

Values = dict[str, Any]
Tensors = dict[str, TensorEntry]


def translate(values: Values, tables: Sequence[Tensors], array: Callable[[str], list[Any]]) -> None:
    """Change the metadata, and the tensors of each part of a file, in place.

    array  gives the values of an array of the metadata
    """
    tensors = {name: entry for table in tables for name, entry in table.items()}
    if values.get("general.architecture") == "gptoss" and "blk.0.ffn_gate_exps.weight" in tensors:
        _gpt_oss(values, tensors)
    if values.get("general.architecture") == "olmo3":
        _rename_architecture(values, "olmo3", "olmo2")
    name = values.get("general.architecture")
    if not isinstance(name, str):
        return
    for theirs, ours in _KEYS.get(name, {}).items():
        if (key := f"{name}.{theirs}") in values:
            values.setdefault(f"{name}.{ours}", values[key])
    if name == "gemma3":
        _gemma3(values, tensors)
    for table in tables:
        _rename(table, name)
    if name == "gemma4" and values.get("tokenizer.ggml.model") == "llama":
        values["tokenizer.ggml.model"] = "gemma4"
    if name in _NAMES and _NAMES[name] is _HYBRID:
        _join_head_counts(values, f"{name}.attention.head_count_kv", array)
    if values.get("tokenizer.ggml.pre") in (None, "", "default"):
        _name_pre_tokenizer(values, name, array)


def _rename(table: Tensors, name: str) -> None:
    """Leave out what is no part of the text model, and name the rest as llama.cpp does."""
    aliens = (*_ALIEN, "mtp.") if name in ("qwen35", "qwen35moe") else _ALIEN
    entries = {theirs: entry for theirs, entry in table.items() if not theirs.startswith(aliens)}
    table.clear()
    for theirs, entry in entries.items():
        ours = theirs
        for pattern, new in _NAMES.get(name, ()):
            ours = re.sub(pattern, new, ours)
        table[theirs if ours in entries else ours] = entry  # both names in one file: one is refused as unexpected


def _rename_architecture(values: Values, theirs: str, ours: str) -> None:
    values |= {ours + key.removeprefix(theirs): value for key, value in values.items() if key.startswith(f"{theirs}.")}
    values["general.architecture"] = ours


def _gpt_oss(values: Values, tensors: Tensors) -> None:
    _rename_architecture(values, "gptoss", "gpt-oss")
    values["tokenizer.ggml.pre"] = "gpt-4o"
    values.setdefault("gpt-oss.rope.scaling.type", "yarn")
    if len(shape := tensors["blk.0.ffn_gate_exps.weight"].shape) == 3:
        values.setdefault("gpt-oss.expert_feed_forward_length", shape[1])


def _gemma3(values: Values, tensors: Tensors) -> None:
    """What Ollama's files leave out, and a vocabulary that names more tokens than the model has."""
    is_theirs = any(tensor.startswith(_ALIEN) for tensor in tensors) or any(
        f"gemma3.{key}" in values for key in _KEYS["gemma3"]) or "gemma3.attention.layer_norm_rms_epsilon" not in values
    if not is_theirs:
        return
    for key, value in _GEMMA3.items():
        values.setdefault(f"gemma3.{key}", value)
    length = values.get("gemma3.context_length")
    has_scaling = any(key.startswith("gemma3.rope.scaling.") for key in values)
    if isinstance(length, int) and length >= _LONG and not has_scaling:
        values |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    rows = tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0
    for key in _VOCABULARY:
        stored = values.get(f"tokenizer.ggml.{key}")
        if isinstance(stored, Array) and stored.size > rows > 0:
            values[f"tokenizer.ggml.{key}"] = stored._replace(size=rows)


def _join_head_counts(values: Values, key: str, array: Callable[[str], list[Any]]) -> None:
    """One number of KV heads instead of one for each layer, with zeros for layers without attention."""
    if isinstance(values.get(key), Array) and len(counts := set(array(key)) - {0}) == 1:
        values[key] = counts.pop()


def _name_pre_tokenizer(values: Values, name: str, array: Callable[[str], list[Any]]) -> None:
    if name == "mistral3":
        values["tokenizer.ggml.pre"] = "tekken"
    elif name == "llama" and isinstance(tokens := values.get("tokenizer.ggml.tokens"), Array):
        position, text = _LLAMA3_END
        if tokens.size > position and array("tokenizer.ggml.tokens")[position] == text:
            values["tokenizer.ggml.pre"] = "llama-bpe"
