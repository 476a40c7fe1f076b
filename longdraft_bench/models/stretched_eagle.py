"""An EAGLE-3 head with the cost of a large one and the guesses of a small one, for a stretched model.

As stretched.py does with the model: the small head's numbers are the first ones of each large tensor, random numbers
fill what nothing reads, and zeros what would be added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from longdraft.kernels import LayerWeights, Linear
from longdraft.model.transformer import Transformer
from longdraft.parts.eagle import Eagle, EagleWeights
from longdraft.parts.eagle_config import EagleConfig
from longdraft_bench.models.stretched import Correspondence, Stretch

_VOCABULARY = 32_000  # of the published heads of Llama-3.1-8B
_NEVER = -3e5  # bias of a guess that the small head does not have


def stretched_eagle(small: EagleConfig, weights: Mapping[str, Tensor], target: Transformer, num_layers: int) -> Eagle:
    """A head for `target`.

    small       configuration of the small head, which guesses among all tokens
    weights     its tensors by our names (`eagle_shapes`), float32, on the target's device
    target      a model that was stretched from the small head's target
    num_layers  of the small target
    """
    kernels, config = target.kernels, target.config
    if small.version != 3 or not small.uses_taps or small.layer.num_layers != 1 or "embed_tokens.weight" in weights:
        raise ValueError("only EAGLE-3 heads of one layer without a table of their own can be stretched")
    own_width, width = small.layer.hidden_size, config.hidden_size
    layer = replace(config, num_layers=1, rms_norm_eps=small.layer.rms_norm_eps * own_width / width,
                    rope=replace(small.layer.rope, dims=config.rope.dims))
    held = Correspondence(replace(small.layer, num_layers=num_layers), config)
    entries = {own: large for large, own in held.layers.items()} | {num_layers: config.num_layers}
    tapped = tuple(entries[number] for number in small.tapped_ids)
    count = min(_VOCABULARY, config.vocab_size)
    head_config = replace(small, layer=layer, target_width=config.hidden_size, tapped_ids=tapped,
                          draft_vocab_size=count)
    parts = Stretch(small.layer, layer, dict(weights))
    named = dict(parts.eagle_layer())

    def pack(tensor: Tensor, bias: Tensor | None = None) -> Linear:
        return kernels.pack(tensor.to(kernels.dtype), bias)

    def norm(name: str) -> Tensor:
        return parts.norm(weights[f"{name}.weight"]).to(kernels.dtype)

    fc = torch.zeros(width, len(tapped) * width, device=weights["fc.weight"].device)
    for tap in range(len(tapped)):
        own = weights["fc.weight"][:, tap * own_width : (tap + 1) * own_width]
        fc[:own_width, tap * width : tap * width + own_width] = own
    table = weights["lm_head.weight"]
    head = torch.zeros(count, width, device=table.device)
    head[: len(table), :own_width] = table
    bias = torch.zeros(count, device=table.device)
    bias[len(table) :] = _NEVER
    mlp_norm = norm("layers.0.post_attention_layernorm")
    made = LayerWeights(mlp_norm, pack(torch.cat([named[f"{each}_proj"] for each in "qkv"])),
                        pack(named["o_proj"]), mlp_norm, pack(torch.cat([named["gate_proj"], named["up_proj"]])),
                        pack(named["down_proj"]))
    fc_norms = [norm(f"fc_norm.{tap}") for tap in range(len(tapped))] if small.fc_norm else []
    ids = None if count == config.vocab_size else torch.arange(count, device=kernels.device)
    large = EagleWeights(None, pack(fc), tuple(fc_norms), (norm("layers.0.input_layernorm"),
                                                           norm("layers.0.hidden_norm")),
                         (made,), norm("norm"), pack(head, bias), ids)
    return Eagle(head_config, large, target, tapped)
