"""The reference kernels: plain PyTorch, one row at a time, so that row invariance holds by construction.

Every library call computes one row. The shapes and values of its operands depend on the model and on the row's
*logical* position only, so other rows in the same forward cannot change its bits.

With bfloat16, weights, activations between operations and cache rows are rounded to bfloat16, and the arithmetic
between roundings is float32. Weights and cache rows are stored as float32, which takes twice the memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longdraft.kernels import delta, experts
from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.delta import DeltaRows, DeltaState, DeltaWeights
from longdraft.kernels.formats import groups, int4, int8
from longdraft.kernels.formats.groups import GroupedWeight
from longdraft.kernels.interface import FLOAT_DTYPES, KV, Decoder, FitRules, KVStore, LayersKV, Positions
from longdraft.kernels.layer import LayerwiseDecoder
from longdraft.kernels.reference_store import SPLIT, ReferenceStore
from longdraft.kernels.weights import Experts, Geometry, LayerWeights, Linear, QuantisedWeight, Routing

STEP = 256  # the last split is computed up to the next multiple of this many positions, with the excess masked
NEGLIGIBLE_SHARE = 1e-3  # a share of attention that rounding errors may produce


@contextmanager
def _one_thread() -> Iterator[None]:
    """With more threads, PyTorch would cut the sums of a row into as many parts as there are threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ReferenceLinear:
    """A weight [N, K] as float32. With a scale [N] float32, row n of the weight is scale[n] * weight[n].

    grouped  the integers that products are made of, if the weight has groups
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: Tensor | None,
                 grouped: int4.Int4Weight | GroupedWeight | None = None) -> None:
        self.grouped = grouped
        self.weight = weight
        self.bias = bias
        self.scale = scale
        self.out_features = weight.shape[0]

    def product(self, row: Tensor) -> Tensor:
        """The product of a row [1, K] with the weight: sums, then scale, then bias: [1, N] float32."""
        if isinstance(self.grouped, GroupedWeight):
            sums = groups.linear(row, self.grouped)
        elif self.grouped is not None:
            sums = int4.linear(row, self.grouped)
        elif self.scale is not None:
            sums = functional.linear(row, self.weight) * self.scale
        else:
            return functional.linear(row, self.weight, self.bias)
        return sums if self.bias is None else sums + self.bias

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class ReferenceKernels:
    """See :class:`longdraft.kernels.interface.Kernels` for shapes and meaning."""

    name = "reference"
    is_device = False

    def __init__(self, device: str, dtype: str) -> None:
        self.device = torch.device(device)
        self.is_row_invariant = self.device.type == "cpu"  # not tested on other devices, so not claimed
        self.dtype = FLOAT_DTYPES[dtype]

    def pack(self, weight: Tensor | QuantisedWeight, bias: Tensor | None = None, *,
             quantize: str = "none") -> ReferenceLinear:
        bias = None if bias is None else self._rounded(bias)
        if isinstance(weight, Tensor) and quantize != "none":
            weight = (int4 if quantize == "int4" else int8).quantise(weight.to(self.device))
        if isinstance(weight, int4.Int4Weight):
            packed = weight.to(self.device)
            return ReferenceLinear(int4.dequantise(packed), bias, None, packed)
        if isinstance(weight, GroupedWeight):
            return ReferenceLinear(groups.dequantise(weight), bias, None, weight)
        if isinstance(weight, int8.Quantised):
            values, scale = (part.to(self.device) for part in weight)
            return ReferenceLinear(values.float(), bias, scale)
        return ReferenceLinear(self._rounded(weight), bias, None)

    def _rounded(self, x: Tensor) -> Tensor:
        """A copy in `dtype`'s precision: a weight may be a view of a mapped file, and would change with the file."""
        return x.to(self.device, self.dtype, copy=True).float().contiguous()

    def embed(self, table: Linear, tokens: Sequence[int] | Tensor) -> Tensor:
        assert isinstance(table, ReferenceLinear)
        ids = torch.as_tensor(tokens, device=self.device)
        rows = table.weight[ids]
        return (rows if table.scale is None else rows * table.scale[ids, None]).to(self.dtype)

    def linear(self, x: Tensor, weight: Linear, *, keep_float: bool = False) -> Tensor:
        assert isinstance(weight, ReferenceLinear)
        x = x.float()
        with _one_thread():
            rows = [weight.product(x[i : i + 1].clone()) for i in range(len(x))]
        out = torch.cat(rows)
        return out if keep_float else out.to(self.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_once: bool = False) -> Tensor:
        x = x.float()
        rows = []
        for i in range(len(x)):
            row = x[i].clone()
            rows.append(row * torch.rsqrt(row.square().mean() + eps))
        normed = torch.stack(rows)
        if rounds_once:
            return (weight * normed).to(self.dtype)
        # Transformers rounds before it multiplies by the weight in most models, and so do we.
        return weight * normed.to(self.dtype)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        half = gate_up.shape[1] // 2
        gate = [functional.silu(gate_up[i, :half].float().clone()) for i in range(len(gate_up))]
        return torch.stack(gate).to(self.dtype) * gate_up[:, half:]

    def gate(self, x: Tensor, gates: Tensor) -> Tensor:
        rows = [row.float() * own.float().clone().sigmoid() for row, own in zip(x, gates, strict=True)]
        return torch.stack(rows).to(self.dtype)

    def geglu(self, gate_up: Tensor) -> Tensor:
        half = gate_up.shape[1] // 2
        gate = [functional.gelu(gate_up[i, :half].float().clone(), approximate="tanh") for i in range(len(gate_up))]
        return torch.stack(gate).to(self.dtype) * gate_up[:, half:]

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        rows = []
        for row in gate_up.float().unbind():
            gate, up = (half.clone() for half in row.chunk(2))
            gate = gate.clamp(max=limit)
            rows.append((up.clamp(-limit, limit) + 1) * (gate * (gate * alpha).sigmoid()))
        return torch.stack(rows).to(self.dtype)

    def route(self, logits: Tensor, weights: Experts) -> Routing:
        return experts.route(logits, weights)

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.stack([row.clone().sigmoid() for row in x.unbind()])

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return torch.stack([(row / cap).tanh() * cap for row in x.clone().unbind()]) if len(x) else x

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        first, second = x[..., :half].float(), x[..., half:].float()
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(self.dtype)

    def new_store(self, num_kv_heads: int, head_dim: int, score_cap: float = 0.0) -> KVStore:
        return ReferenceStore(num_kv_heads, head_dim, self.device, score_cap)

    def new_state(self, weights: DeltaWeights) -> DeltaState:
        heads = weights.shape.value_heads
        dims = (weights.shape.key_dim, weights.shape.value_dim)
        history = torch.zeros(weights.shape.width - 1, weights.shape.channels, dtype=self.dtype, device=self.device)
        return DeltaState(history, torch.zeros(heads, *dims, device=self.device))

    def delta_rule(self, weights: DeltaWeights, texts: Sequence[DeltaRows], z: Tensor | None,
                   parents: Tensor) -> Tensor | None:
        counts = [len(rows.mixed) for rows in texts]
        parts: Sequence[Tensor | None] = [None] * len(texts) if z is None else torch.split(z, counts)
        with _one_thread():
            outputs = [delta.delta_rule(weights, rows, part, own.tolist())
                       for rows, part, own in zip(texts, parts, torch.split(parents, counts), strict=True)]
        return None if z is None else torch.cat([part for part in outputs if part is not None])

    def new_decoder(self, layers: Sequence[LayerWeights], geometry: Geometry) -> Decoder:
        return LayerwiseDecoder(self, layers, geometry)

    def keep(self, kv: LayersKV, rows: Sequence[int]) -> None:
        for index, store in enumerate(kv.stores):
            _, _, k, v, _ = kv.layer(index)
            store.write(kv.length, k[list(rows)], v[list(rows)])

    def scatter_rows(self, kv: LayersKV, rows: Tensor, targets: Tensor) -> None:
        is_kept = targets >= 0
        self.keep(kv, rows[is_kept].tolist())

    def cache_bytes(self, head_dim: int) -> int:
        return 2 * head_dim * torch.float32.itemsize  # stores hold float32 for every dtype

    def free_bytes(self) -> int | None:
        return None

    def new_fit(self, stores: Sequence[KVStore], num_heads: int, rules: FitRules) -> None:
        return None

    def copy(self, sources: Sequence[KVStore], targets: Sequence[KVStore], positions: Positions, start: int) -> None:
        if isinstance(positions, range):
            positions = torch.tensor(positions).expand(len(sources), sources[0].shape[0], -1)
        for source, target, chosen in zip(sources, targets, positions.to(self.device), strict=True):
            target.write_heads(start, *source.read(chosen))

    def remainder(self, stores: Sequence[KVStore], length: int, whole: AttentionOutput) -> Tensor:
        rows = whole.queries.shape[1]
        last = torch.arange(length - rows, length, device=self.device)
        chain = torch.arange(-1, rows - 1, dtype=torch.int32)
        parts = []
        for index, store in enumerate(stores):
            assert isinstance(store, ReferenceStore)
            k, v = (x.transpose(0, 1) for x in store.read(last.expand(store.num_kv_heads, -1)))
            parts.append(self.attention(whole.queries[index], KV(store, length - rows, k, v), chain))
        output, lse = torch.stack([part.output for part in parts]), torch.stack([part.lse for part in parts])
        return remainder_of(whole, output, lse)

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        """Row after row. A row's path is written after the committed positions, where plain decoding would write it, so
        that the row reads one range of positions:

            [ committed: 0 .. length ) [ path: 0 .. depth ] [ masked, up to a multiple of STEP )
        """
        store, length, k, v, remainder = kv
        assert isinstance(store, ReferenceStore)
        depths: list[int] = []
        written: list[int] = []  # the rows that are at positions length, length + 1, ... now
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)
        before: list[int] = parents.tolist()
        for row, parent in enumerate(before):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            path = [row]
            node = parent
            # Ancestors of a row that is already where its path needs it are there too.
            while node >= 0 and not (depths[node] < len(written) and written[depths[node]] == node):
                path.append(node)
                node = before[node]
            first = 0 if node < 0 else depths[node] + 1
            path.reverse()
            store.write(length + first, k[path], v[path])
            written[first:] = path
            with _one_thread():
                out[row], lse[row] = _attend(q[row].float(), store, length + depths[row] + 1,
                                             None if remainder is None else remainder[row], window)
        return AttentionOutput(q, out, lse, q)


def remainder_of(whole: AttentionOutput, output: Tensor, lse: Tensor) -> Tensor:
    """`Kernels.remainder`, from the attention to the partial cache: output [L, T, H, D] and lse [L, T, H]."""
    share = (lse - whole.lse).exp()[..., None]  # of the full attention, for the partial cache
    left = 1 - share
    is_negligible = left < NEGLIGIBLE_SHARE
    output = ((whole.output.float() - share * output.float()) / left).masked_fill(is_negligible, 0.0)
    lse = (whole.lse[..., None] + left.clamp_min(NEGLIGIBLE_SHARE).log()).masked_fill(is_negligible, -math.inf)
    return torch.cat([output, lse], -1)


class _Softmax(NamedTuple):
    """An unnormalised softmax over some positions, for g query heads of each KV head."""

    max_score: Tensor  # [Hkv, g, 1]
    weight_sum: Tensor  # [Hkv, g, 1]
    value_sum: Tensor  # [Hkv, g, D]: the weighted sum of the values

    def merge(self, other: _Softmax) -> _Softmax:
        """The softmax over the positions of both (Milakov and Gimelshein 2018)."""
        top = torch.maximum(self.max_score, other.max_score)
        old, new = (self.max_score - top).exp(), (other.max_score - top).exp()
        return _Softmax(top, self.weight_sum * old + other.weight_sum * new,
                        self.value_sum * old + other.value_sum * new)


def _attend(q: Tensor, store: ReferenceStore, length: int, remainder: Tensor | None,
            window: int) -> tuple[Tensor, Tensor]:
    """Attention of one query [H, D] to positions [0, length), or the last `window` of them.

    A softmax over each split; the splits are merged in order, then the remainder [H, D + 1]. Returns the output [H, D]
    and its log-sum-exp [H].
    """
    num_kv_heads, _, head_dim = store.k[0].shape
    num_heads = len(q)
    q = q.view(num_kv_heads, -1, head_dim) / math.sqrt(head_dim)
    merged: _Softmax | None = None
    first = max(0, length - window) if window else 0
    for start in range(first // SPLIT * SPLIT, length, SPLIT):
        inside = min(length - start, SPLIT)
        padded = -(-inside // STEP) * STEP
        block = start // SPLIT
        scores = store.capped(q @ store.k[block][:, :padded].transpose(1, 2))  # [Hkv, g, padded]
        scores[..., inside:] = -math.inf
        scores[..., : max(0, first - start)] = -math.inf
        max_score = scores.amax(-1, keepdim=True)
        weights = (scores - max_score).exp()
        split = _Softmax(max_score, weights.sum(-1, keepdim=True), weights @ store.v[block][:, :padded])
        merged = split if merged is None else merged.merge(split)
    assert merged is not None, "a query sees at least its own position"
    if remainder is not None:  # an output and its log-sum-exp: a softmax with a weight sum of 1
        lse = remainder[:, -1].view_as(merged.max_score)
        merged = merged.merge(_Softmax(lse, torch.ones_like(lse), remainder[:, :-1].view_as(merged.value_sum)))
    output, lse = merged.value_sum / merged.weight_sum, merged.max_score + merged.weight_sum.log()
    return output.reshape(num_heads, head_dim), lse.reshape(num_heads)
