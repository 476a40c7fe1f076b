"""What the trainings of EAGLE and block heads have in common: layers over the target's states, and files.

A head has layers of the target's sizes, and an output head of its own: a frozen copy of the target's rows for the
commonest tokens of the training text. The files have the `speculators` format, which vLLM serves too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from longdraft.checkpoint.tensor_files import WEIGHTS
from longdraft.model.config import ModelConfig
from longdraft.model.rope import frequencies
from longdraft.model.rope_config import RopeConfig
from longdraft.train.checkpoint import write_tensors
from longdraft.train.data_files import Tokens
from longdraft.train.frozen_model import FrozenModel
from longdraft.train.layers import LayerModule

SPECULATORS_FORMAT = "0.9.0"  # version of speculators whose format is written


def plain_layer(target: ModelConfig, num_layers: int) -> ModelConfig:
    """Llama's layers of the target's sizes. RoPE is the plain kind: distances stay within the head's window."""
    rope = RopeConfig("default", target.rope.theta, {}, target.head_dim)
    return replace(target, num_layers=num_layers, rope=rope, is_tied=False, qkv_bias=False, out_bias=False,
                   mlp_bias=False, head_norms="none", post_norm=False, is_fused=False, window=0, windowed=(),
                   rotated=(), skip_rope_every=0, embedding_factor=1.0, residual_factor=1.0, query_factor=1.0,
                   logits_divisor=1.0, norm_names=(), float_norms=False, norm_offset=0.0, has_gelu=False,
                   rounds_embedding_factor=False, score_cap=0.0, logits_cap=0.0, window_rope=None,
                   has_fused_mlp=False, is_interleaved=False, query_growth=None, gemma4=None)


def tapped_layers(num_layers: int) -> tuple[int, ...]:
    """EAGLE's default, rows that enter a low, a middle and a high layer; nearer to the ends in small models."""
    low, high = (2, num_layers - 3) if num_layers >= 8 else (1 if num_layers > 2 else 0, num_layers)
    return tuple(sorted({low, num_layers // 2, high}))


def commonest(tokens: Tokens, count: int, vocabulary: int) -> Tensor:
    """The `count` commonest token ids [count], ascending; of equally common ones the smaller ids."""
    often = np.argsort(-np.bincount(tokens.ravel(), minlength=vocabulary), kind="stable")[:count]
    return torch.from_numpy(np.sort(often))


class StateHeadModule(LayerModule):
    """A head with layers of the sizes and the RoPE of `layer`.

    ids   tokens of its vocabulary, of the target's
    head  [ids, hidden], their rows of the target's output head
    """

    def __init__(self, base: FrozenModel, shapes: Mapping[str, Sequence[int]], layer: ModelConfig, ids: Tensor,
                 seed: int) -> None:
        super().__init__(base, shapes, seed)
        self.ids = ids.to(base.device)
        self.head = base.head_weight[self.ids].detach()
        inverse, _ = frequencies(layer.rope, layer.trained_positions, 1)
        self._inverse = inverse.to(base.device)

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, L, D] of positions [B, L]."""
        angles = positions[..., None].float() * self._inverse
        cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
        return cos, sin

    def logits(self, rows: Tensor) -> Tensor:
        """Logits [R, draft vocabulary] float32 of normalised rows [R, hidden]."""
        logits = functional.linear(rows.to(self.head.dtype), self.head).float()
        divisor = self._base.config.logits_divisor
        return logits if divisor == 1 else logits / divisor

    def index_of(self) -> Tensor:
        """The index in the head's vocabulary of each token of the target's; -1: the head does not have it."""
        device = self._base.device
        found = torch.full((self._base.config.vocab_size,), -1, device=device)
        found[self.ids] = torch.arange(len(self.ids), device=device)
        return found


def write_head(folder: Path, tensors: dict[str, Tensor], head: Tensor, ids: Tensor, base: FrozenModel) -> None:
    """Write the tensors of a head in the format of speculators, with the output head [D, hidden] of its vocabulary, the
    target's tokens `ids` [D]."""
    ids, vocabulary = ids.cpu(), base.config.vocab_size
    tensors["lm_head.weight"] = (head.float() / base.config.logits_divisor).to("cpu", base.saved_dtype)
    if len(ids) < vocabulary:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})


def layer_sizes(layer: ModelConfig, dtype: torch.dtype, window: int) -> dict[str, Any]:
    """The entry `transformer_layer_config` of the format of speculators."""
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size, "num_hidden_layers": layer.num_layers,
        "num_attention_heads": layer.num_heads, "num_key_value_heads": layer.num_kv_heads, "head_dim": layer.head_dim,
        "vocab_size": layer.vocab_size, "rms_norm_eps": layer.rms_norm_eps, "hidden_act": "silu",
        "max_position_embeddings": layer.trained_positions, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "dtype": str(dtype).removeprefix("torch."),
        "rope_parameters": {"rope_type": "default", "rope_theta": layer.rope.theta},
        "layer_types": ["sliding_attention"] * layer.num_layers, "sliding_window": window}
