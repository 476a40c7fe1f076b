"""The tensors of a GGUF file under the names of Hugging Face checkpoints, with the interface of a safetensors file.

Quantised tensors become floating-point numbers when they are viewed. Rows of queries and keys that are stored for
rotations of adjacent dimensions are put back into the order of Hugging Face: whole rows move, so no number changes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.checkpoint.gguf import gemma
from longdraft.checkpoint.gguf.blocks import dequantise, grouped, mxfp4_parts, q4_0_parts
from longdraft.checkpoint.gguf.container import Gguf, GgufFile
from longdraft.checkpoint.gguf.metadata import BLOCK_HEAD, architecture
from longdraft.checkpoint.gguf.types import TYPES, Array, TensorEntry
from longdraft.checkpoint.memory import forget_pages, mapped_numbers, temporary
from longdraft.checkpoint.tensor_file import CPU, Entry, StoredTensors
from longdraft.kernels.formats.groups import BlockRows
from longdraft.kernels.formats.int4 import GROUP, Int4Weight
from longdraft.kernels.formats.mxfp4 import Mxfp4Weight
from longdraft.kernels.weights import FILE, QuantisedWeight
from longdraft.model.families import FAMILIES, ExpertsFormat
from longdraft.model.hybrid import DRAFT_LAYERS

_LAYER = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)")
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")  # of older files, one by one
_BLOCK = re.compile(r"(?:blk|model\.layers)\.(\d+)\.(.+)")
_BARE = re.compile(r"blk\.(\d+)\.(.+)")
_OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight", "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
            "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
            "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight"}
_INSIDE = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_HYBRID = {
    "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DELTA = re.compile(r"blk\.(\d+)\.(ssm_a|ssm_dt\.bias)")  # whose names in Hugging Face have no suffix
_DELTA_NAMES = {"ssm_a": "decay", "ssm_dt.bias": "dt_bias"}
_GEMMA = {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
          "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA4 = _GEMMA | {"ffn_gate_inp": "router.proj", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                    "post_ffw_norm_1": "post_feedforward_layernorm_1",
                    "post_ffw_norm_2": "post_feedforward_layernorm_2", "inp_gate": "per_layer_input_gate",
                    "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"}
_OLMO = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_DIFFERENT = {
    "qwen3_next": _HYBRID, "qwen3_5_text": _HYBRID, "qwen3_5_moe_text": _HYBRID,
    "olmo2": _OLMO, "olmo3": _OLMO,
    "gpt_oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    "glm4": {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
             "ffn_up": "mlp.gate_up_proj"},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": _GEMMA4,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "qwen3_moe": {"ffn_gate_inp": "mlp.gate"},
    "mixtral": {"ffn_gate_inp": "block_sparse_moe.gate"},
}
_DRAFT_PARTS = {  # of layers for native drafts, besides what every layer has
    "nextn.eh_proj": "fc", "nextn.enorm": "pre_fc_norm_embedding", "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}
_BLOCK_HEAD = {
    "attn_conv_base": "attention_conv.base_kernel", "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_base": "mlp_conv.base_kernel", "ffn_conv_proj": "mlp_conv.kernel_projection",
}
_BLOCK_HEAD_PARTS = {
    "enc.output_norm": "hidden_norm", "selector_predecessor": "candidate_selector.predecessor_codebook",
    "selector_successor": "candidate_selector.successor_codebook",
    "selector_hidden": "candidate_selector.hidden_projection", "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2", "conf_proj": "confidence_head.proj",
}
_TYPE_NUMBERS = {kind.name: number for number, kind in TYPES.items()}
_NOT_WEIGHTS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}  # see metadata.py


class GgufTensors(StoredTensors):
    """The tensors of one file of a model."""

    def __init__(self, model: Gguf, file: GgufFile) -> None:
        self.path = file.path
        self.stat = file.stat
        self._map = file.map
        name, kind = architecture(model)
        self._heads = {part: _heads(model, name, key) for part, key in (("q", "head_count"), ("k", "head_count_kv"))
                       } if kind.is_permuted else {}
        different = _BLOCK_HEAD if name == BLOCK_HEAD else _DIFFERENT.get(kind.model_type, {})
        experts = FAMILIES[kind.model_type].experts
        self._deltas = DeltaOrder.of(model, name) if kind.is_tiled else None
        first_draft = _first_draft(model, name)
        self._stored: dict[str, TensorEntry] = {}
        for theirs, entry in file.tensors.items():
            is_draft = first_draft and (match := _BLOCK.match(theirs)) and int(match[1]) >= first_draft
            if theirs in _NOT_WEIGHTS or (is_draft and different is not _HYBRID):
                continue
            if experts and (match := _EXPERTS.fullmatch(theirs)) and len(entry.shape) == 2 + (match[3] == "weight"):
                self._stored |= _one_by_one(match, entry, experts)
            elif experts and (match := _EXPERT.fullmatch(theirs)):
                self._stored[_expert_name(match[1], match[2], int(match[3]), experts, "weight")] = entry
            elif different is _GEMMA4 and (match := _BARE.fullmatch(theirs)) and match[2] in gemma.NAMES:
                self._stored[f"model.layers.{match[1]}.{gemma.NAMES[match[2]]}"] = entry
            elif different is _HYBRID and (match := _DELTA.fullmatch(theirs)):
                self._stored[f"model.layers.{match[1]}.linear_attn.{_DELTA_NAMES[match[2]]}"] = entry
            else:
                ours = _translated(theirs, different)
                self._stored[ours] = entry._replace(shape=_shape_of(ours, entry.shape))
        if first_draft:
            self._stored = {_draft_name(ours, first_draft): entry for ours, entry in self._stored.items()}
        self.entries = {ours: Entry(entry.type.name, entry.shape, entry.start, entry.stop)
                        for ours, entry in self._stored.items()}

    @property
    def has_own_numbers(self) -> bool:
        return any(entry.type.dtype is None and entry.type.name != "MXFP4" for entry in self._stored.values())

    def float_dtype(self, name: str) -> torch.dtype | None:
        dtype = self._stored[name].type.dtype or torch.float32
        return dtype if dtype.is_floating_point else None

    def view(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        entry = self._stored[name]
        order = self._order(name)
        _, stored = self.stored(name)
        if entry.type.dtype is not None:
            numbers = stored.view(entry.type.dtype).view(entry.shape)
            columns = self._deltas.columns(name) if self._deltas else None
            numbers = numbers if columns is None else numbers[:, columns]
            return numbers if order is None else numbers[order]
        rows = stored.view(-1, entry.shape[-1] // entry.type.block * entry.type.nbytes)
        rows = rows if order is None else rows[order]
        out = temporary((len(rows), entry.shape[-1]), dtype or torch.float32)
        dequantise(rows, entry.type, out)
        columns = self._deltas.columns(name) if self._deltas else None
        return out.view(entry.shape) if columns is None else out[:, columns].view(entry.shape)

    def exact(self, name: str, quantize: str, device: torch.device = CPU) -> QuantisedWeight | None:
        """The numbers of a quantised matrix: of any type with `file` but MXFP4 (see `mxfp4`), of Q4_0 with `int4`."""
        entry = self._stored[name]
        if not self._keeps(name, quantize):
            return None
        columns = self._deltas.columns(name) if self._deltas else None
        if columns is not None and self._deltas and self._deltas.value_dim % GROUP:
            return None  # groups of other heads share their scale then
        order = self._order(name)
        _, stored = self.stored(name)
        rows = stored.view(entry.shape[0], -1)
        rows = (rows if order is None else rows[order]).to(device)
        if entry.type.name != "Q4_0":
            weight = grouped(rows, entry.type)
            return weight if columns is None else weight.columns(columns)
        values, scale = q4_0_parts(rows)
        if columns is not None:
            values, scale = values[:, columns], scale[:, columns[::GROUP] // GROUP]
        return Int4Weight(values, scale, torch.full(scale.shape, 8, dtype=torch.uint8, device=device))

    def blocks(self, name: str, quantize: str) -> BlockRows | None:
        """The rows of a matrix that `exact` keeps, where they are; None for others, and where columns move."""
        entry = self._stored[name]
        if not self._keeps(name, quantize) or len(entry.shape) != 2 or (self._deltas and
                                                                        self._deltas.columns(name) is not None):
            return None
        _, stored = self.stored(name)
        count = entry.shape[0]
        order = self._order(name)
        rows = torch.arange(count) if order is None else order
        types = torch.full((count,), _TYPE_NUMBERS[entry.type.name], dtype=torch.uint8)
        return BlockRows(stored.data_ptr() + rows * (len(stored) // count), types, entry.shape[1], (stored,))

    def _keeps(self, name: str, quantize: str) -> bool:
        kind = self._stored[name].type
        is_kept = quantize == FILE or (kind.name == "Q4_0" and quantize == "int4")
        return is_kept and kind.dtype is None and kind.name != "MXFP4"

    def mxfp4(self, name: str) -> Mxfp4Weight | None:
        """A matrix in MXFP4, in the order of its file; None for other types."""
        entry = self._stored[name]
        if entry.type.name != "MXFP4" or len(entry.shape) != 2 or self._order(name) is not None:
            return None
        return mxfp4_parts(self.stored(name)[1].view(*entry.shape[:1], -1, entry.type.nbytes))

    def stored(self, name: str) -> tuple[str, Tensor]:
        """The name of a tensor's type, and its bytes, uint8, in the order of the file."""
        entry = self.entries[name]
        return entry.dtype, mapped_numbers(self._map, entry.start, entry.stop, torch.uint8, self.path, alignment=4)

    def forget(self, name: str) -> None:
        forget_pages(self._map, self.entries[name].start, self.entries[name].stop)

    def _order(self, name: str) -> Tensor | None:
        """The stored rows of a permuted tensor in the order of Hugging Face; None: they are in that order."""
        if self._deltas:
            return self._deltas.rows(name)
        match = re.search(r"self_attn\.([qk])_proj\.", name)
        if not self._heads or not match:
            return None
        return stored_rows(self.entries[name].shape[0], self._heads[match[1]])


class DeltaOrder(NamedTuple):
    """Where the tensors of delta layers have the rows of value heads, if head i belongs to key head i % key_heads.

    Hugging Face has the value heads of one key head next to one another.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @staticmethod
    def of(model: Gguf, name: str) -> DeltaOrder | None:
        """From the metadata; None where both orders are one, or where the sizes make no sense, which is refused."""
        sizes = [model.values.get(f"{name}.ssm.{key}") for key in ("group_count", "time_step_rank", "state_size",
                                                                   "inner_size")]
        keys, values, key_dim, inner = (size if isinstance(size, int) and size > 0 else 0 for size in sizes)
        if not keys or keys == values or values % keys or not inner or inner % values:
            return None
        return DeltaOrder(keys, values, key_dim, inner // values)

    def _heads(self, dim: int) -> Tensor:
        """The stored rows of value heads of `dim` rows, in the order of Hugging Face."""
        heads = torch.arange(self.value_heads).view(-1, self.key_heads).T.flatten()
        return (heads[:, None] * dim + torch.arange(dim)).flatten()

    def rows(self, name: str) -> Tensor | None:
        """The stored rows of a tensor in the order of Hugging Face; None: they are in that order."""
        part = name.rpartition("linear_attn.")[2].removesuffix(".weight") if "linear_attn." in name else ""
        if part in ("in_proj_qkv", "conv1d"):
            keys = 2 * self.key_heads * self.key_dim
            return torch.cat([torch.arange(keys), keys + self._heads(self.value_dim)])
        dims = {"in_proj_z": self.value_dim, "in_proj_b": 1, "in_proj_a": 1, "dt_bias": 1, "decay": 1}
        return self._heads(dims[part]) if part in dims else None

    def columns(self, name: str) -> Tensor | None:
        return self._heads(self.value_dim) if name.endswith("linear_attn.out_proj.weight") else None


def _draft_name(name: str, first: int) -> str:
    """The name of a tensor as Hugging Face's files have it: layers for native drafts are counted apart. first: the
    number of the first one here."""
    match = _BLOCK.match(name)
    if not match or int(match[1]) < first:
        return name
    layer = f"layers.{int(match[1]) - first}."
    part = match[2]
    stem = part.removesuffix(".weight")
    if stem in _DRAFT_PARTS:  # one of each for all such layers
        part = f"{_DRAFT_PARTS[stem]}.weight"
        layer = "" if layer == "layers.0." else layer
    return f"{DRAFT_LAYERS}{layer}{part}"


def _first_draft(model: Gguf, name: str) -> int:
    """The first layer for native drafts, which are the last ones; 0: there are none."""
    layers, drafts = (model.values.get(f"{name}.{key}") for key in ("block_count", "nextn_predict_layers"))
    return layers - drafts if isinstance(layers, int) and isinstance(drafts, int) and 0 < drafts < layers else 0


def _shape_of(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that Hugging Face's tensor has: GGUF leaves out axes of length 1."""
    if name.endswith("linear_attn.conv1d.weight") and len(shape) == 2:
        return shape[0], 1, shape[1]
    if name.endswith("mlp.shared_expert_gate.weight") and len(shape) == 1:
        return 1, shape[0]
    return shape


def stored_rows(count: int, heads: int) -> Tensor | None:
    """For each of `count` rows of q or k in the order of Hugging Face, the row at which llama.cpp stores it.

    Hugging Face rotates the dimensions i and i + D / 2 of a head together, llama.cpp 2 i and 2 i + 1. None for counts
    that are no whole heads, which the comparison of shapes refuses.
    """
    if not heads or count % heads or count // heads % 2:
        return None
    dim = count // heads
    inside = torch.arange(dim)
    head = 2 * (inside % (dim // 2)) + inside // (dim // 2)
    return (torch.arange(heads)[:, None] * dim + head).flatten()


def _one_by_one(match: re.Match[str], entry: TensorEntry, form: ExpertsFormat) -> dict[str, TensorEntry]:
    """The matrices of a tensor [experts, N, K], or the biases of one [experts, N]. Of a tensor of gate and up, the
    first N / 2 rows of each are gate."""
    layer, part, kind = match.groups()
    parts = part.split("_")
    count = entry.shape[0] * len(parts)
    size = (entry.stop - entry.start) // count
    shape = (entry.shape[1] // len(parts), *entry.shape[2:])
    return {_expert_name(layer, parts[i % len(parts)], i // len(parts), form, kind): TensorEntry(
        entry.type, shape, entry.start + i * size, entry.start + (i + 1) * size) for i in range(count)}


def _expert_name(layer: str, part: str, index: int, form: ExpertsFormat, kind: str) -> str:
    name = form.names[("gate", "up", "down").index(part)]
    prefix = f"{form.prefix}." if form.prefix else ""
    return f"model.layers.{layer}.{prefix}experts.{index}.{name}.{kind}"


def _heads(model: Gguf, name: str, key: str) -> int:
    """The number of heads of a layer; 0 where the metadata has none. Layers that differ are refused elsewhere."""
    full = f"{name}.attention.{key}"
    full = full if full in model.values else f"{name}.attention.head_count"
    value = model.values.get(full)
    if isinstance(value, Array):
        value = next(iter(model.array(full)), None)
    return value if isinstance(value, int) else 0


def _translated(name: str, different: dict[str, str]) -> str:
    """The Hugging Face name of a tensor; its own where there is none, which is refused as unexpected."""
    if match := _LAYER.fullmatch(name):
        layer, part, suffix = match.groups()
        if part == "attn_sinks":
            return f"model.layers.{layer}.self_attn.sinks"
        known = _INSIDE | different
        return f"model.layers.{layer}.{known[part]}.{suffix}" if part in known else name
    part, _, suffix = name.rpartition(".")
    if different is _BLOCK_HEAD and part in _BLOCK_HEAD_PARTS:
        return f"{_BLOCK_HEAD_PARTS[part]}.{suffix}"
    return _OUTSIDE.get(name, name)
