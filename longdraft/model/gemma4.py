"""The parts of Gemma 4's layers that Gemma 3 lacks.

    every layer       values are normalised without a weight; scores are not divided by sqrt(D); the layer's rows are
                      multiplied by a number at its end
    without a window  heads of another size, and values that may be the keys, before norm and rotation
    in E2B and E4B    layers have an input of their own (longdraft/kernels/layer_inputs.py), and the last ones read
                      the keys and values of earlier ones
    with experts      they stand beside the MLP:  x + N(N1(mlp(N0 x)) + N3(experts(N2 x)))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longdraft.errors import ModelError


@dataclass(frozen=True)
class Gemma4Config:
    """Heads of the layers without a window.

    values_are_keys  such layers have no projection of values
    num_sharing      last layers that read the keys and values of earlier ones
    is_double        the MLPs of these layers are twice as wide
    input_width      of the input that each layer has of its own; 0: there is none
    input_tokens     number of tokens in its table
    """

    kv_heads: int
    head_dim: int
    values_are_keys: bool
    num_sharing: int = 0
    is_double: bool = False
    input_width: int = 0
    input_tokens: int = 0


def parse_gemma4(config: Mapping[str, Any], windowed: tuple[bool, ...]) -> Gemma4Config:
    """From the values of a config.json. ModelError for sizes that do not fit, and for what is not supported.

    windowed  whether a layer has a window, for each layer
    """
    if not any(windowed):
        raise ModelError("layer_types and sliding_window in config.json must give layers a window")
    shares = bool(config.get("attention_k_eq_v"))
    kv_heads = (config.get("num_global_key_value_heads") if shares else None) or config["num_key_value_heads"]
    head_dim = config.get("global_head_dim") or 512
    if isinstance(layers := config.get("per_layer_config"), dict):  # the spelling of transformers 5
        full = [index for index, has_window in enumerate(windowed) if not has_window]
        own = [layers.get(str(index)) or {} for index in full]
        if set(layers) - {str(index) for index in full} or any(each != own[0] for each in own):
            raise ModelError("per_layer_config in config.json must be the same for all layers with full_attention, and "
                             "have no others")
        kv_heads = own[0].get("num_key_value_heads") or config["num_key_value_heads"]
        head_dim = own[0].get("head_dim") or config["head_dim"]
    kv_heads = int(kv_heads)
    head_dim = int(head_dim)
    heads = int(config["num_attention_heads"])
    if min(kv_heads, head_dim) < 1 or heads % kv_heads or head_dim % 2:
        raise ModelError(f"config.json: layers with full_attention have {heads} heads, {kv_heads} KV heads, and "
                         f"dimension {head_dim}; allowed: heads that are a multiple of the KV heads, an even dimension")
    count = int(config.get("num_kv_shared_layers") or 0)
    width = int(config.get("hidden_size_per_layer_input") or 0)
    tokens = int(config.get("vocab_size_per_layer_input") or config["vocab_size"]) if width else 0
    if not 0 <= count < len(windowed) or (count and set(windowed[-count:]) - set(windowed[:-count])):
        raise ModelError(f"num_kv_shared_layers is {count} in config.json; allowed: 0 or more, and before these layers "
                         "one of each of their kinds in layer_types")
    if width < 0 or (width and tokens < int(config["vocab_size"])):
        raise ModelError(f"config.json: hidden_size_per_layer_input is {width}, vocab_size_per_layer_input {tokens}; "
                         "allowed: 0 or more, and as many tokens as vocab_size")
    return Gemma4Config(kv_heads, head_dim, shares, count, bool(count and config.get("use_double_wide_mlp")), width,
                        tokens)
