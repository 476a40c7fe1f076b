"""From the metadata of a block head in GGUF (architecture `dflash`) to the config.json that it amounts to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longdraft.checkpoint.gguf.container import Gguf, open_gguf
from longdraft.checkpoint.gguf.metadata import BLOCK_HEAD
from longdraft.checkpoint.gguf.reader import Reader

_KINDS = ("full_attention", "sliding_attention")


def is_block_head(file: Path) -> bool:
    """Whether a GGUF file has a block head. Raises ModelError for a file that is no GGUF file."""
    return open_gguf(file).values.get("general.architecture") == BLOCK_HEAD


def block_head_config(file: Path, vocabulary: int) -> dict[str, Any]:
    """The config.json in DFlash's own layout. vocabulary: of the target, for files that do not say theirs. Raises
    ModelError for metadata that is missing or wrong."""
    model = open_gguf(file)
    read, values, tensors = Reader(model, BLOCK_HEAD), model.values, model.tensors
    heads = read.whole("attention.head_count")
    hidden = read.whole("embedding_length")
    head_dim = read.whole("attention.key_length", hidden // heads or 1)
    if read.whole("attention.value_length", head_dim) != head_dim:
        model.fail("keys and values have different lengths, which is not supported")
    size = len(model.array("tokenizer.ggml.tokens")) if "tokenizer.ggml.tokens" in values else vocabulary
    config: dict[str, Any] = {
        "architectures": [], "hidden_size": hidden, "intermediate_size": read.whole("feed_forward_length"),
        "num_hidden_layers": read.layers, "num_attention_heads": heads,
        "num_key_value_heads": read.whole("attention.head_count_kv", heads), "head_dim": head_dim,
        "max_position_embeddings": read.whole("context_length"), "vocab_size": size,
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": read.number("rope.freq_base", 10000.0), "block_size": read.whole("block_size"),
        "mask_token_id": values.get("tokenizer.ggml.mask_token_id", values.get(f"{BLOCK_HEAD}.mask_token_id")),
        "target_layer_ids": _target_layers(model),
        "target_hidden_size": _target_width(model),
    }
    if "output.weight" in tensors:
        config["draft_vocab_size"] = tensors["output.weight"].shape[0]
    if read.has("attention.sliding_window") and read.number("attention.sliding_window"):
        flags = [True] * read.layers
        if read.has("attention.sliding_window_pattern"):
            pattern = read.flags_or_period("attention.sliding_window_pattern")
            flags = pattern if isinstance(pattern, list) else [bool((layer + 1) % pattern)
                                                               for layer in range(read.layers)]
        config |= {"sliding_window": read.whole("attention.sliding_window"),
                   "layer_types": [_KINDS[bool(flag)] for flag in flags]}
    for theirs, ours in (("attention.causal", "is_causal"), ("sample_from_anchor", "sample_from_anchor")):
        if read.has(theirs):
            config[ours] = values[f"{BLOCK_HEAD}.{theirs}"]
    for theirs, ours in (("logit_scale", "output_multiplier"), ("final_logit_softcapping", "final_logit_softcapping")):
        if read.has(theirs):
            config[ours] = read.number(theirs)
    if "selector_predecessor.weight" in tensors or read.has("selector_rank"):
        config |= {key: read.whole(key, default) for key, default in (
            ("conv_kernel_size", 2), ("conv_group_size", 16), ("selector_rank", 256))}
    if "markov_w1.weight" in tensors:
        config["markov_rank"] = tensors["markov_w1.weight"].shape[1]
    return config


def _target_layers(model: Gguf) -> list[int] | None:
    """The layers whose output is read. The file numbers what enters a layer."""
    key = f"{BLOCK_HEAD}.target_layers"
    if key not in model.values:
        return None
    layers = model.array(key)
    if not all(type(layer) is int for layer in layers):
        model.fail(f"{key} is {str(layers)[:200]}; allowed: whole numbers")
    return [layer - 1 for layer in layers]


def _target_width(model: Gguf) -> int:
    """The width of the target's rows."""
    layers = _target_layers(model) or [0]
    entry = model.tensors.get("fc.weight")
    if entry is None or len(entry.shape) != 2:
        model.fail("it has no matrix fc.weight; get the file again")
    return entry.shape[1] // len(layers)
