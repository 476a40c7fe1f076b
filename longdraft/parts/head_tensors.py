"""Reading of what heads of several kinds have: sizes, decoder layers, and maps of a vocabulary of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import ModelError
from longdraft.kernels import Kernels, LayerWeights, Linear
from longdraft.model.config import ModelConfig
from longdraft.model.transformer import Transformer
from longdraft.parts.block_config import BlockConfig
from longdraft.parts.eagle_config import EagleConfig

MAPS = ("d2t", "t2d")
CURE = "use a head that was trained for this model"


def check_sizes(folder: Path, config: EagleConfig | BlockConfig, names: Mapping[str, str],
                target: Transformer) -> None:
    """Raise ModelError for a head of a target with other rows or another vocabulary. names: of its tensors, by ours"""
    whole, layer = target.whole, config.layer
    if config.target_width != whole.hidden_size:
        raise ModelError(f"{folder}: the head reads rows of {config.target_width} numbers, the model's have "
                         f"{whole.hidden_size}; {CURE}")
    if layer.vocab_size != whole.vocab_size or config.draft_vocab_size > whole.vocab_size:
        raise ModelError(f"{folder}: the head was trained for a vocabulary of {layer.vocab_size} (guesses "
                         f"{config.draft_vocab_size}), but the model's has {whole.vocab_size}; {CURE}")
    if layer.hidden_size != whole.hidden_size and "embed_tokens.weight" not in names:
        raise ModelError(f"{folder}: the head's rows have {layer.hidden_size} numbers and the model's embeddings "
                         f"{whole.hidden_size}; a head with rows of its own size needs embed_tokens")


def layer_shapes(layer: ModelConfig, index: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a layer but its first norm. columns: of the input of queries, keys and values"""
    hidden, inner, part = layer.hidden_size, layer.intermediate_size, f"layers.{index}."
    q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        f"{part}self_attn.q_proj.weight": (q, columns), f"{part}self_attn.k_proj.weight": (kv, columns),
        f"{part}self_attn.v_proj.weight": (kv, columns), f"{part}self_attn.o_proj.weight": (hidden, q),
        f"{part}mlp.gate_proj.weight": (inner, hidden), f"{part}mlp.up_proj.weight": (inner, hidden),
        f"{part}mlp.down_proj.weight": (hidden, inner), f"{part}post_attention_layernorm.weight": (hidden,)}
    if layer.head_norms != "none":
        shapes |= {f"{part}self_attn.{name}.weight": (layer.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


class HeadTensors(NamedTuple):
    """The tensors of a head.

    names     our names -> those of the file
    quantize  format of the matrices of layers
    adjacent  size of heads whose adjacent dimensions RoPE turns, of layers without fused tensors: they are put in the
              order of the kernels, which turn i with i + D / 2. 0: they are in that order
    """

    files: TensorFiles
    names: Mapping[str, str]
    kernels: Kernels
    quantize: str = "none"
    adjacent: int = 0

    def pack(self, *parts: str, quantize: str = "none") -> Linear:
        """Matrices, one below another, with the bias of a matrix that stands alone."""
        weight = self.files.stack([self.names[f"{part}.weight"] for part in parts], self.kernels.dtype)
        if self.adjacent:
            start = 0
            for part in parts:
                stop = start + self.files.shape(self.names[f"{part}.weight"])[0]
                if part.endswith(("q_proj", "k_proj")):
                    heads = weight[start:stop].view(-1, self.adjacent, weight.shape[1])
                    weight[start:stop] = self._in_order(heads).flatten(0, 1)
                start = stop
        bias = self.names.get(f"{parts[0]}.bias")
        return self.kernels.pack(weight, None if bias is None else self.files.read(bias), quantize=quantize)

    def norm(self, part: str) -> Tensor:
        """The weight of a norm."""
        weight = self.tensor(part).to(self.kernels.dtype)
        return self._in_order(weight[None])[0] if self.adjacent and part.endswith(("q_norm", "k_norm")) else weight

    def tensor(self, part: str) -> Tensor:
        """A tensor on the device of the kernels, in the dtype of the file."""
        return self.files.read(self.names[f"{part}.weight"]).to(self.kernels.device, copy=True)

    @staticmethod
    def _in_order(x: Tensor) -> Tensor:
        """The second axis in the order 0, 2, 4, ..., then 1, 3, 5, ..."""
        return torch.cat([x[:, part::2] for part in (0, 1)], 1)

    def layer(self, index: int, has_head_norms: bool) -> LayerWeights:
        """A decoder layer. Its first norm may be missing."""
        part = f"layers.{index}"
        mlp_norm = self.norm(f"{part}.post_attention_layernorm")
        first = f"{part}.input_layernorm"
        q_norm, k_norm = ((self.norm(f"{part}.self_attn.{name}") for name in ("q_norm", "k_norm"))
                          if has_head_norms else (None, None))
        qkv, out, gate_up, down = (self.pack(*(f"{part}.{name}_proj" for name in group), quantize=self.quantize)
                                   for group in (("self_attn.q", "self_attn.k", "self_attn.v"), ("self_attn.o",),
                                                 ("mlp.gate", "mlp.up"), ("mlp.down",)))
        return LayerWeights(self.norm(first) if f"{first}.weight" in self.names else mlp_norm,  # then it is not used
                            qkv, out, mlp_norm, gate_up, down, 0, q_norm, k_norm)


def draft_ids(files: TensorFiles, names: Mapping[str, str], count: int, vocabulary: int) -> Tensor | None:
    """The target's id of each token of the head, checked; None: the same ids. `d2t` has differences, not ids."""
    if not names.keys() & set(MAPS):
        if count != vocabulary:
            raise ModelError(f"{files.folder} guesses {count} of {vocabulary} tokens, but has neither d2t nor t2d to "
                             "say which ones; get the file again")
        return None
    chosen = files.integers(names["t2d"]).bool().flatten().nonzero()[:, 0] if "t2d" in names else None
    if "d2t" not in names:
        assert chosen is not None
        ids = chosen
    else:
        differences = files.integers(names["d2t"]).flatten()
        ids = torch.arange(len(differences)) + differences
    is_sound = len(ids) == count and bool((ids.diff() > 0).all()) and 0 <= int(ids[0]) <= int(ids[-1]) < vocabulary
    if not is_sound or (chosen is not None and not torch.equal(ids, chosen)):
        raise ModelError(f"{files.folder}: d2t and t2d do not name the same {count} tokens below {vocabulary}, in "
                         "ascending order; the file is damaged, or d2t has ids where differences are expected")
    return None if count == vocabulary else ids
