"""The fast CPU kernels: `csrc/`, compiled into `_cpu`, behind the interface.

Everything that crosses over is checked here (dtype, shape, bounds, alignment); the C++ below trusts it.
The variants (AVX-512 with BF16, AVX2 with FMA, portable) are each row-invariant to the bit; between them,
and to the reference, results agree within float rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels.interface import KV, Attended, Geometry, KVStore, LayerWeights, Linear

try:
    from longdraft.kernels import _cpu
except ImportError as error:  # built without a compiler, or for another Python
    WHY_MISSING = str(error)
else:
    WHY_MISSING = ""


def variants() -> list[str]:
    """What this processor can run, the fastest first; empty where the extension is missing."""
    return [] if WHY_MISSING else _cpu.variants()


def set_threads(count: int) -> None:
    if not WHY_MISSING:
        _cpu.set_threads(count)


class CpuStore:
    """Keys and values of one layer in the kernels' layout."""

    def __init__(self, native: _cpu.Kernels, dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> None:
        self._native = native
        self._dtype = dtype
        self._heads, self._dim = num_kv_heads, head_dim
        self.native = _cpu.Store(dtype == torch.bfloat16, num_kv_heads, head_dim)

    def reserve(self, length: int) -> None:
        self.native.reserve(length)

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        self._write(start, len(k), self.rows(k, 0), self.rows(v, 0))

    def write_heads(self, start: int, k: Tensor, v: Tensor) -> None:
        self._write(start, k.shape[1], self.rows(k, 1), self.rows(v, 1))

    def _write(self, start: int, count: int, k: Tensor, v: Tensor) -> None:
        _require(start >= 0 and len(k) == len(v) == count, "as many values as keys", (start, k.shape, v.shape))
        self._native.write(self.native, start, 0, count, *_strided(k), *_strided(v), count)

    def keep(self, start: int, k: Tensor, v: Tensor, rows: Tensor) -> None:
        k, v = self.rows(k, 0), self.rows(v, 0)
        _require(start >= 0 and len(k) == len(v), "as many values as keys", (start, k.shape, v.shape))
        _require(rows.dtype == torch.int64 and rows.is_contiguous(), "rows as int64", rows.dtype)
        count = len(rows)
        if count:
            self._native.write(self.native, start, rows.data_ptr(), count, *_strided(k), *_strided(v), len(k))

    def rows(self, x: Tensor, row_axis: int) -> Tensor:
        """x as [T, Hkv, D] (a view where that is possible) in the store's dtype."""
        x = (x.transpose(0, 1) if row_axis else x).to(self._dtype)
        _require(x.shape[1:] == (self._heads, self._dim), f"[T, {self._heads}, {self._dim}]", x.shape)
        return x if x.stride(-1) == 1 else x.contiguous()

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.to(torch.int64).contiguous()
        fits = positions.ndim == 2 and len(positions) == self._heads
        _require(fits, f"[{self._heads}, N] positions", positions.shape)
        if positions.numel():
            low, high = positions.aminmax()
            _require(low >= 0 and high < self.native.capacity, "positions that are held", (low, high))
        k = torch.empty(*positions.shape, self._dim, dtype=self._dtype)
        v = torch.empty_like(k)
        self._native.read(self.native, positions.data_ptr(), positions.shape[1], k.data_ptr(), v.data_ptr())
        return k, v

    def weights(self, queries: Tensor, length: int) -> Tensor:
        queries = queries.to(self._dtype).contiguous()
        num, heads, dim = queries.shape
        _require(dim == self._dim and heads % self._heads == 0, "queries [Q, H, D] of the store's heads", queries.shape)
        _require(0 < length <= self.native.capacity, "positions that are held", length)
        out = torch.empty(self._heads, length)
        scale = 1 / math.sqrt(dim)
        self._native.weights(self.native, length, queries.data_ptr(), num, heads, scale, out.data_ptr())
        return out

    @property
    def nbytes(self) -> int:
        return self.native.nbytes


class CpuLinear:
    """A weight in tiles of 64 rows."""

    def __init__(self, native: _cpu.Linear) -> None:
        self.native = native
        self.out_features = native.n

    @property
    def nbytes(self) -> int:
        return self.native.nbytes


class CpuKernels:
    """See :class:`longdraft.kernels.interface.Kernels` for shapes and meaning."""

    is_row_invariant = True

    def __init__(self, variant: str, dtype: str) -> None:
        self.name = variant
        self.device = torch.device("cpu")
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self._is_bf16 = self.dtype == torch.bfloat16
        self._native = _cpu.Kernels.get(variant)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> CpuLinear:
        weight = weight.to(self.dtype).contiguous()
        rows, columns = weight.shape
        if bias is not None:
            bias = bias.to(self.dtype).float().contiguous()
            _require(bias.shape == (rows,), f"a bias [{rows}]", bias.shape)
        address = 0 if bias is None else bias.data_ptr()
        return CpuLinear(self._native.pack(self._is_bf16, rows, columns, weight.data_ptr(), address))

    def embed(self, table: Linear, tokens: Sequence[int]) -> Tensor:
        assert isinstance(table, CpuLinear)
        _require(table.native.is_bf16 == self._is_bf16 and len(tokens) > 0, "a table of our dtype, and tokens", tokens)
        ids = torch.tensor(tokens, dtype=torch.int64)
        low, high = ids.aminmax()
        _require(low >= 0 and high < table.out_features, f"token ids below {table.out_features}", (low, high))
        out = torch.empty(len(ids), table.native.k, dtype=self.dtype)
        self._native.embed(table.native, ids.data_ptr(), len(ids), out.data_ptr())
        return out

    def linear(self, x: Tensor, weight: Linear, *, keep_float: bool = False) -> Tensor:
        assert isinstance(weight, CpuLinear)
        _require(weight.native.is_bf16 == self._is_bf16, f"a weight packed as {self.dtype}", weight.native.is_bf16)
        x = self._input(x, weight.native.k)
        out = torch.empty(len(x), weight.out_features, dtype=torch.float32 if keep_float else self.dtype)
        self._native.linear(weight.native, x.data_ptr(), len(x), out.data_ptr(), keep_float)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = self._input(x, x.shape[1]), self._input(weight[None], x.shape[1])
        out = torch.empty_like(x)
        self._native.rms_norm(self._is_bf16, x.data_ptr(), weight.data_ptr(), len(x), x.shape[1], eps, out.data_ptr())
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate_up = self._input(gate_up, gate_up.shape[1])
        width = gate_up.shape[1] // 2
        _require(gate_up.shape[1] == 2 * width, "an even width", gate_up.shape)
        out = torch.empty(len(gate_up), width, dtype=self.dtype)
        self._native.swiglu(self._is_bf16, gate_up.data_ptr(), len(gate_up), width, out.data_ptr())
        return out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, dim = x.shape
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        _require(cos.shape == sin.shape == (rows, dim // 2) and dim % 2 == 0, "cos, sin [R, D / 2]", cos.shape)
        x = x.to(self.dtype)
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty(rows, heads, dim, dtype=self.dtype)
        self._native.rope(self._is_bf16, *_strided(x), cos.data_ptr(), sin.data_ptr(), rows, heads, dim, out.data_ptr())
        return out

    def new_store(self, num_kv_heads: int, head_dim: int) -> KVStore:
        return CpuStore(self._native, self.dtype, num_kv_heads, head_dim)

    def decoder_layer(self, x: Tensor, layer: LayerWeights, geometry: Geometry, cos: Tensor, sin: Tensor, kv: KV,
                      parents: Tensor) -> tuple[Tensor, Attended]:
        heads, kv_heads, dim, eps, window = geometry
        rows, hidden = x.shape
        store, qkv, out, gate_up, down = kv.store, layer.qkv, layer.out, layer.gate_up, layer.down
        assert isinstance(store, CpuStore) and isinstance(qkv, CpuLinear) and isinstance(out, CpuLinear)
        assert isinstance(gate_up, CpuLinear) and isinstance(down, CpuLinear)
        self._check_layer(hidden, layer, geometry, store)
        x = self._input(x, hidden)
        for name, tensor, shape, dtype in (
            ("keys", kv.k, (rows, kv_heads, dim), self.dtype), ("values", kv.v, (rows, kv_heads, dim), self.dtype),
            ("cos", cos, (rows, dim // 2), torch.float32), ("sin", sin, (rows, dim // 2), torch.float32),
        ):
            fits = tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
            _require(fits, f"{name} {shape}", tensor.shape)
        self._check_tail(store, kv.length, rows, parents)
        rest = _rest(kv.rest, heads, dim)
        q, attended = (torch.empty(rows, heads, dim, dtype=self.dtype) for _ in range(2))
        lse = torch.empty(rows, heads)
        result = torch.empty_like(x)
        self._native.decoder_layer(
            layer.attention_norm.data_ptr(), qkv.native, out.native, layer.mlp_norm.data_ptr(), gate_up.native,
            down.native, eps, heads, kv_heads, dim, window, store.native, kv.length, rows, x.data_ptr(), cos.data_ptr(),
            sin.data_ptr(), parents.data_ptr(), rest, q.data_ptr(), kv.k.data_ptr(), kv.v.data_ptr(),
            attended.data_ptr(), lse.data_ptr(), result.data_ptr())
        return result, Attended(q, attended, lse)

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> Attended:
        store, length = kv.store, kv.length
        assert isinstance(store, CpuStore)
        rows, heads, dim = q.shape
        q = q.to(self.dtype).contiguous()
        k, v = store.rows(kv.k, 0), store.rows(kv.v, 0)
        _require(len(k) == len(v) == rows, f"{rows} keys and values", (k.shape, v.shape))
        _require(heads % k.shape[1] == 0 and dim == k.shape[2], "query heads in groups of KV heads", q.shape)
        self._check_tail(store, length, rows, parents)
        _require(window >= 0, "a window of 0 or more positions", window)
        out, lse = torch.empty_like(q), torch.empty(rows, heads)
        self._native.attention(store.native, length, rows, heads, q.data_ptr(), *_strided(k), *_strided(v),
                               parents.data_ptr(), 1 / math.sqrt(dim), window, _rest(kv.rest, heads, dim), out.data_ptr(),
                               lse.data_ptr())
        return Attended(q, out, lse)

    def _check_layer(self, hidden: int, layer: LayerWeights, geometry: Geometry, store: CpuStore) -> None:
        """Weights that fit one another, the rows and the store."""
        heads, kv_heads, dim, _, window = geometry
        inner = layer.gate_up.out_features // 2
        weights = [w.native for w in (layer.qkv, layer.out, layer.gate_up, layer.down) if isinstance(w, CpuLinear)]
        shapes = [(w.n, w.k) for w in weights]
        wanted = [((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim), (2 * inner, hidden), (hidden, inner)]
        _require(shapes == wanted, f"weights {wanted}", shapes)
        is_ours = all(w.is_bf16 == self._is_bf16 for w in weights) and store.native.is_bf16 == self._is_bf16
        _require(is_ours, f"weights and cache of {self.dtype}", "others")
        for norm in (layer.attention_norm, layer.mlp_norm):
            fits = norm.shape == (hidden,) and norm.dtype == self.dtype and norm.is_contiguous()
            _require(fits, f"norms [{hidden}] of {self.dtype}", (norm.shape, norm.dtype))
        held = (store.native.heads, store.native.dim)
        _require(held == (kv_heads, dim) and heads % kv_heads == 0, f"a store of {(kv_heads, dim)}", held)
        _require(window >= 0, "a window of 0 or more positions", window)

    def _check_tail(self, store: CpuStore, length: int, rows: int, parents: Tensor) -> None:
        fits = parents.shape == (rows,) and parents.dtype == torch.int32 and parents.is_contiguous() and rows > 0
        _require(fits, f"{rows} parents (one or more) as int32", parents.shape)
        _require(0 <= length <= store.native.capacity, "positions that are held", length)

    def _input(self, x: Tensor, width: int) -> Tensor:
        """x [R, width] in our dtype, contiguous and aligned to words."""
        _require(x.ndim == 2 and x.shape[1] == width, f"[R, {width}]", x.shape)
        x = x.to(self.dtype).contiguous()
        return x if x.data_ptr() % 4 == 0 else x.clone()


def _rest(rest: Tensor | None, heads: int, dim: int) -> int:
    if rest is None:
        return 0
    fits = rest.shape == (heads, dim + 1) and rest.dtype == torch.float32 and rest.is_contiguous()
    _require(fits, f"a rest [{heads}, {dim + 1}] of float32", rest.shape)
    return rest.data_ptr()


def _strided(x: Tensor) -> tuple[int, int, int]:
    return x.data_ptr(), x.stride(0), x.stride(1)


def _require(condition: bool | Tensor, wanted: str, got: object) -> None:
    if not condition:
        raise ValueError(f"CPU kernels want {wanted}, got {got}")
