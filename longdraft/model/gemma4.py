"""What layers of Gemma 4 have that those of Gemma 3 have not.

    every layer       values are normalised without a weight; scores are not divided by sqrt(D); the layer's rows are
                      multiplied by a number at its end
    without a window  heads of another size, and values that may be the keys, before norm and rotation
    with experts      they stand beside the MLP:  x + N(N1(mlp(N0 x)) + N3(experts(N2 x)))
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longdraft.errors import ModelError
from longdraft.kernels.weights import LayerHeads

SCALAR = "layer_scalar"
ROUTER_SCALE, EXPERT_SCALES = "router.scale", "router.per_expert_scale"
# Norms of a layer with experts beside its MLP: behind the MLP, before the experts, and behind them.
BESIDE = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
_LATER_KEYS = ("hidden_size_per_layer_input", "num_kv_shared_layers")


@dataclass(frozen=True)
class Gemma4Config:
    """Heads of the layers without a window.

    values_are_keys  such layers have no projection of values
    """

    kv_heads: int
    head_dim: int
    values_are_keys: bool

    @property
    def heads(self) -> LayerHeads:
        return LayerHeads(self.kv_heads, self.head_dim, math.sqrt(self.head_dim))


def parse_gemma4(config: Mapping[str, Any], windowed: tuple[bool, ...]) -> Gemma4Config:
    """From the values of a config.json. ModelError for sizes that do not fit, and for what is not supported.

    windowed  whether a layer has a window, for each layer
    """
    for key in _LATER_KEYS:
        if config.get(key):
            raise ModelError(f"{key} is {config[key]} in config.json; supported: 0, so models of Gemma 4 with an "
                             "embedding for each layer (E2B, E4B) are not; take 26B-A4B or 31B, or a Gemma 3")
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
    kv_heads, head_dim, heads = int(kv_heads), int(head_dim), int(config["num_attention_heads"])
    if min(kv_heads, head_dim) < 1 or heads % kv_heads or head_dim % 2:
        raise ModelError(f"config.json: layers with full_attention have {heads} heads, {kv_heads} KV heads, and "
                         f"dimension {head_dim}; allowed: heads that are a multiple of the KV heads, an even dimension")
    return Gemma4Config(kv_heads, head_dim, shares)
