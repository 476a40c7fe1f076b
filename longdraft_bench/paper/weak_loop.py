"""The plain decoding that TokenSwift's published speed-ups divide by, for the benchmarks only: `version = "weak"`.

One token for each forward, with PyTorch's operations and nothing of ours:

    keys and values   repeated for every query head, in each layer of each step
    attention         one scaled_dot_product_attention with an additive mask that is made anew, which rules out the
                      flash kernel; no split over the positions
    launches          one for each operation; no graph, nothing fused

So its time grows with the text 5 to 65 times faster than the memory of the paper's GPU demands (docs/benchmarks.md).
Sums are rounded as PyTorch's are: its text may differ from ours after some thousand tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from longdraft.checkpoint.checkpoint import load_transformer
from longdraft.engine.engine import Engine
from longdraft.errors import UsageError
from longdraft.kernels import KV, AttentionOutput, KVStore, Linear
from longdraft.kernels.reference import ReferenceKernels, ReferenceLinear
from longdraft.kernels.weights import QuantisedWeight


class WeakStore:
    """Keys and values [Hkv, capacity, D] of a layer in the model's dtype. See `KVStore`."""

    def __init__(self, num_kv_heads: int, head_dim: int, kernels: WeakKernels) -> None:
        self.k = torch.empty(num_kv_heads, 0, head_dim, dtype=kernels.dtype, device=kernels.device)
        self.v = self.k.clone()

    @property
    def shape(self) -> tuple[int, int]:
        return self.k.shape[0], self.k.shape[2]

    def reserve(self, length: int) -> None:
        missing = length - self.k.shape[1]
        if missing > 0:
            room = max(missing, self.k.shape[1], 1024)
            self.k, self.v = (functional.pad(part, (0, 0, 0, room)) for part in (self.k, self.v))

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        self.write_heads(start, k.transpose(0, 1), v.transpose(0, 1))

    def write_heads(self, start: int, k: Tensor, v: Tensor) -> None:
        self.reserve(start + k.shape[1])
        self.k[:, start : start + k.shape[1]] = k
        self.v[:, start : start + k.shape[1]] = v

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        heads = torch.arange(len(self.k), device=self.k.device)[:, None]
        return self.k[heads, positions], self.v[heads, positions]

    def weights(self, queries: Tensor, length: int) -> Tensor:
        raise NotImplementedError("the weak loop drafts nothing")

    def append(self, source: KVStore, first: int, count: int) -> None:
        raise NotImplementedError("the weak loop shares no prefixes")

    def bytes_of(self, count: int) -> int:
        return 2 * self.k[:, :1].nbytes * count

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


class WeakKernels(ReferenceKernels):
    """Plain PyTorch for plain decoding. See :class:`longdraft.kernels.interface.Kernels`."""

    name = "weak"

    def __init__(self, device: str, dtype: str) -> None:
        super().__init__(device, dtype)
        self.is_row_invariant = False

    def pack(self, weight: Tensor | QuantisedWeight, bias: Tensor | None = None, *,
             quantize: str = "none") -> ReferenceLinear:
        if not isinstance(weight, Tensor) or quantize != "none":
            raise UsageError("the weak loop has no quantised weights; measure a model as it is")
        return ReferenceLinear(self._copied(weight), None if bias is None else self._copied(bias), None)

    def _copied(self, x: Tensor) -> Tensor:
        return x.to(self.device, self.dtype, copy=True).contiguous()

    def embed(self, table: Linear, tokens: Sequence[int] | Tensor) -> Tensor:
        assert isinstance(table, ReferenceLinear)
        return table.weight[torch.as_tensor(tokens, device=self.device)]

    def linear(self, x: Tensor, weight: Linear, *, keep_float: bool = False) -> Tensor:
        assert isinstance(weight, ReferenceLinear)
        out = functional.linear(x.to(self.dtype), weight.weight, weight.bias)
        return out.float() if keep_float else out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_once: bool = False) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        return (weight * normed).to(self.dtype) if rounds_once else weight * normed.to(self.dtype)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up

    def new_store(self, num_kv_heads: int, head_dim: int, score_cap: float = 0.0) -> KVStore:
        assert not score_cap, "the weak loop has no soft caps"
        return WeakStore(num_kv_heads, head_dim, self)

    def cache_bytes(self, head_dim: int) -> int:
        return 2 * head_dim * self.dtype.itemsize

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        """Rows of a chain only, as in a prompt and in plain decoding."""
        count, length = len(q), kv.length
        assert parents.tolist() == list(range(-1, count - 1)), "the weak loop has no trees"
        store = kv.store
        assert isinstance(store, WeakStore)
        store.write(length, kv.k, kv.v)
        repeats = q.shape[1] // len(store.k)
        keys, values = (part[:, : length + count].repeat_interleave(repeats, 0)[None] for part in (store.k, store.v))
        row, column = (torch.arange(n, device=self.device) for n in (count, length + count))
        hidden = column[None] > length + row[:, None]
        if window:
            hidden |= column[None] <= length + row[:, None] - window
        mask = torch.ones(count, length + count, dtype=self.dtype, device=self.device).masked_fill(hidden, -torch.inf)
        out = functional.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, mask[None, None])
        return AttentionOutput(q, out[0].transpose(0, 1), torch.zeros(q.shape[:2], device=self.device), q)


def weak_engine(engine: Engine) -> Engine:
    """An engine with the same weights, loaded a second time for these kernels."""
    loaded, target = engine.loaded, engine.model
    kernels = WeakKernels(str(target.kernels.device), str(target.kernels.dtype).removeprefix("torch."))
    return Engine(replace(loaded, target=load_transformer(loaded.files, target.config, kernels), prefixes=None),
                  engine.choice)
