"""The compiled CPU kernels: `csrc/`, built as the module `_cpu`.

The classes here check the dtype, shape, bounds and alignment of every argument. The C++ code relies on these checks.
Each variant (AMX, AVX-512 with BF16, AVX2 with FMA, portable) is row-invariant to the bit. Between variants, and
compared with the reference, results agree within the rounding error of floating-point arithmetic.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from longdraft.kernels import int4, int8
from longdraft.kernels.cpu_store import CpuStore, address, require, require_length, require_tensor, strided
from longdraft.kernels.interface import (
    KV,
    AttentionOutput,
    Decoder,
    Geometry,
    KVStore,
    LayersKV,
    LayerWeights,
    Linear,
)
from longdraft.kernels.layer import LayerwiseDecoder

with suppress(ImportError):  # the reference is used instead; native.py has the reason
    from longdraft.kernels import _cpu


class CpuLinear:
    """A weight packed in tiles of 64 rows. `csrc/layout.h` describes the layout."""

    def __init__(self, native: _cpu.Linear) -> None:
        self.native = native
        self.out_features = native.n

    @property
    def nbytes(self) -> int:
        return self.native.nbytes

    def memory(self) -> list[memoryview]:
        """The bytes of the tiles, the scale and the bias, in place; empty for what the weight has not."""
        found = []
        for start, size in self.native.memory:
            array = (ctypes.c_ubyte * size).from_address(start) if size else (ctypes.c_ubyte * 0)()
            array.owner = self.native  # type: ignore[attr-defined]  # lives as long as the view
            found.append(memoryview(array).cast("B"))
        return found


class CpuKernels:
    """See :class:`longdraft.kernels.interface.Kernels` for shapes and meaning."""

    is_row_invariant = True
    is_device = False

    def __init__(self, variant: str, dtype: str) -> None:
        self.name = variant
        self.device = torch.device("cpu")
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self._is_bf16 = self.dtype == torch.bfloat16
        self.native = _cpu.Kernels.get(variant)

    def pack(self, weight: Tensor | int4.Int4Weight, bias: Tensor | None = None, *,
             quantize: str = "none") -> CpuLinear:
        rows, columns = (weight if isinstance(weight, Tensor) else weight.values).shape
        if bias is not None:
            bias = bias.to(self.dtype).float().contiguous()
            require(bias.shape == (rows,), f"a bias [{rows}]", bias.shape)
        if not isinstance(weight, Tensor) or quantize == "int4":
            values, scale, zero = _contiguous(self.quantise_int4(weight) if isinstance(weight, Tensor) else weight)
            return CpuLinear(self.native.pack_int4(self._is_bf16, rows, columns, address(values), address(scale),
                                                   address(zero), address(bias)))
        packed, factor = int8.quantise(weight) if quantize == "int8" else (weight.to(self.dtype).contiguous(), None)
        return CpuLinear(self.native.pack(self._is_bf16, rows, columns, address(packed), address(factor),
                                          address(bias)))

    def new_linear(self, quantize: str, rows: int, columns: int, has_bias: bool) -> CpuLinear:
        """A packed int8 or int4 weight whose `memory` the caller fills."""
        bits = {"int8": 8, "int4": 4}[quantize]
        return CpuLinear(self.native.new_linear(self._is_bf16, bits, rows, columns, has_bias))

    def quantise_int4(self, weight: Tensor) -> int4.Int4Weight:
        """`int4.quantise`, compiled: the same numbers."""
        rows, columns = weight.shape
        weight = (weight if weight.dtype == torch.bfloat16 else weight.float()).contiguous()
        groups = -(-columns // int4.GROUP)
        values = torch.empty(rows, columns, dtype=torch.uint8)
        scale, zero = torch.empty(rows, groups, dtype=torch.float16), torch.empty(rows, groups, dtype=torch.uint8)
        self.native.quantise_int4(weight.dtype == torch.bfloat16, weight.data_ptr(), rows, columns, values.data_ptr(),
                              scale.data_ptr(), zero.data_ptr())
        return int4.Int4Weight(values, scale, zero)

    def embed(self, table: Linear, tokens: Sequence[int]) -> Tensor:
        assert isinstance(table, CpuLinear)
        require(table.native.is_bf16 == self._is_bf16, f"a table packed as {self.dtype}", table.native)
        require(len(tokens) > 0, "one or more tokens", tokens)
        out = torch.empty(len(tokens), table.native.k, dtype=self.dtype)
        self.native.embed(table.native, tokens, out.data_ptr())  # raises ValueError for ids that the table lacks
        return out

    def linear(self, x: Tensor, weight: Linear, *, keep_float: bool = False) -> Tensor:
        assert isinstance(weight, CpuLinear)
        require(weight.native.is_bf16 == self._is_bf16, f"a weight packed as {self.dtype}", weight.native)
        x = self._input(x, weight.native.k)
        out = torch.empty(len(x), weight.out_features, dtype=torch.float32 if keep_float else self.dtype)
        self.native.linear(weight.native, x.data_ptr(), len(x), out.data_ptr(), keep_float)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_once: bool = False) -> Tensor:
        rows, width = x.shape
        x, weight = self._input(x, width), self._aligned(weight)
        require(weight.shape == (width,), f"a norm [{width}]", weight.shape)
        out = torch.empty_like(x)
        self.native.rms_norm(self._is_bf16, x.data_ptr(), weight.data_ptr(), rows, width, eps, rounds_once,
                             out.data_ptr())
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate_up = self._input(gate_up, gate_up.shape[1])
        width = gate_up.shape[1] // 2
        require(gate_up.shape[1] == 2 * width, "an even width", gate_up.shape)
        out = torch.empty(len(gate_up), width, dtype=self.dtype)
        self.native.swiglu(self._is_bf16, gate_up.data_ptr(), len(gate_up), width, out.data_ptr())
        return out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, dim = x.shape
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        require(cos.shape == sin.shape == (rows, dim // 2) and dim % 2 == 0, "cos, sin [R, D / 2]", cos.shape)
        x = x.to(self.dtype)
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty(rows, heads, dim, dtype=self.dtype)
        self.native.rope(self._is_bf16, *strided(x), cos.data_ptr(), sin.data_ptr(), rows, heads, dim, out.data_ptr())
        return out

    def new_store(self, num_kv_heads: int, head_dim: int) -> KVStore:
        return CpuStore(self.native, self.dtype, num_kv_heads, head_dim)

    def new_decoder(self, layers: Sequence[LayerWeights], geometry: Geometry) -> Decoder:
        if any(layer.experts for layer in layers):
            return LayerwiseDecoder(self, layers, geometry)
        return CpuDecoder(self, layers, geometry)

    def keep(self, kv: LayersKV, rows: Sequence[int]) -> None:
        num_layers, num_rows, heads, dim = kv.k.shape
        for x in (kv.k, kv.v):
            fits = x.shape == kv.k.shape and x.dtype == self.dtype and _are_layers(x, kv.k.stride(0))
            require(fits, f"{self.dtype} [L, T, Hkv, D]", (x.shape, x.dtype))
        stores = self.native_stores(kv.stores, num_layers, heads, dim)
        require(kv.length >= 0, "positions of 0 or more", kv.length)
        if len(rows):
            self.native.keep(stores, kv.length, rows, num_rows, kv.k.stride(0), kv.k.data_ptr(), kv.v.data_ptr())

    def scatter_rows(self, kv: LayersKV, rows: Tensor, targets: Tensor) -> None:
        self.keep(kv, rows[targets >= 0].tolist())

    def cache_bytes(self, head_dim: int) -> int:
        return head_dim * self.dtype.itemsize

    def free_bytes(self) -> int | None:
        return None

    def copy(self, sources: Sequence[KVStore], targets: Sequence[KVStore], positions: Tensor, start: int) -> None:
        num_layers, heads, count = positions.shape
        positions = positions.to(torch.int64).contiguous()
        source, target = (self.native_stores(stores, num_layers, heads) for stores in (sources, targets))
        require(start >= 0 and len({store.dim for store in (*source, *target)}) == 1, "stores of one shape", start)
        self.native.copy(source, target, positions.data_ptr(), count, start)

    def remainder(self, stores: Sequence[KVStore], length: int, whole: AttentionOutput) -> Tensor:
        num_layers, rows, heads, dim = whole.queries.shape
        q, output, lse = (part.contiguous() for part in (whole.queries, whole.output, whole.lse))
        require(q.dtype == output.dtype == self.dtype and lse.dtype == torch.float32, f"rows of {self.dtype}", q.dtype)
        native = self.native_stores(stores, num_layers, None, dim)
        fits = all(heads % store.heads == 0 and 0 < rows <= length <= store.capacity for store in native)
        require(fits, "query heads in groups of KV heads, and rows within the stores' positions", (heads, length))
        remainder = torch.empty(num_layers, rows, heads, dim + 1)
        self.native.remainder(native, length, rows, heads, q.data_ptr(), output.data_ptr(), lse.data_ptr(),
                              remainder.data_ptr())
        return remainder

    def native_stores(self, stores: Sequence[KVStore], num_layers: int, heads: int | None,
                      dim: int | None = None) -> list[_cpu.Store]:
        """The compiled module's stores of all layers, checked. None stands for any number of heads, or any dim."""
        native = [store.native for store in stores if isinstance(store, CpuStore)]
        fits = len(native) == num_layers and all(
            store.is_bf16 == self._is_bf16 and heads in (None, store.heads) and dim in (None, store.dim)
            for store in native)
        require(fits, f"{num_layers} stores of {self.dtype}, {heads} heads of {dim}", len(native))
        return native

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        store, length = kv.store, kv.length
        assert isinstance(store, CpuStore)
        rows, heads, dim = q.shape
        q = q.to(self.dtype).contiguous()
        k, v = store.as_rows(kv.k), store.as_rows(kv.v)
        require(len(k) == len(v) == rows > 0, f"{rows} (one or more) keys and values", (k.shape, v.shape))
        require(heads % k.shape[1] == 0 and dim == k.shape[2], "query heads in groups of KV heads", q.shape)
        require_tensor("parents", parents, (rows,), torch.int32)
        require_length(length, [store.native])
        require(window >= 0, "a window of 0 or more positions", window)
        out, lse = torch.empty_like(q), torch.empty(rows, heads)
        self.native.attention(store.native, length, rows, heads, q.data_ptr(), *strided(k), *strided(v),
                              parents.data_ptr(), 1 / math.sqrt(dim), window,
                              _remainder_address(kv.remainder, (rows, heads, dim + 1)), out.data_ptr(), lse.data_ptr())
        return AttentionOutput(q, out, lse, q)

    def _input(self, x: Tensor, width: int) -> Tensor:
        """Check x [R, width], and convert it as `_aligned` does."""
        require(x.ndim == 2 and x.shape[1] == width, f"[R, {width}]", x.shape)
        return self._aligned(x)

    def _aligned(self, x: Tensor) -> Tensor:
        """x in `dtype`, contiguous, and aligned to words of 4 bytes."""
        x = x.to(self.dtype).contiguous()
        return x if x.data_ptr() % 4 == 0 else x.clone()


class CpuDecoder:
    """See :class:`longdraft.kernels.interface.Decoder`. One call runs all layers. Weights are checked once, here."""

    def __init__(self, kernels: CpuKernels, layers: Sequence[LayerWeights], geometry: Geometry) -> None:
        self._kernels = kernels
        self._layers = tuple(layers)  # keeps the tensors alive that the compiled decoder points to
        self._geometry = geometry
        heads, kv_heads, dim = geometry[:3]
        self._hidden = len(layers[0].attention_norm)
        require(heads % kv_heads == 0 and dim % 2 == 0, "query heads in groups of KV heads, an even dim", geometry)
        self.native = _cpu.Decoder(*geometry)
        for layer in self._layers:
            qkv, out, gate_up, down = self._checked_weights(layer)
            norms_heads = layer.q_norm is not None and layer.q_norm.shape == (dim,)
            self.native.add(layer.attention_norm.data_ptr(), qkv, out, layer.mlp_norm.data_ptr(), gate_up, down,
                             layer.window, address(layer.q_norm), address(layer.k_norm), norms_heads, layer.rotates)

    def _checked_weights(self, layer: LayerWeights) -> list[_cpu.Linear]:
        """qkv, out, gate_up and down. ValueError where they, or the norms, do not fit together."""
        heads, kv_heads, dim = self._geometry[:3]
        assert layer.gate_up is not None
        hidden, inner, dtype = self._hidden, layer.gate_up.out_features // 2, self._kernels.dtype
        weights = [w.native for w in (layer.qkv, layer.out, layer.gate_up, layer.down) if isinstance(w, CpuLinear)]
        shapes = [(w.n, w.k) for w in weights]
        wanted = [((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim), (2 * inner, hidden), (hidden, inner)]
        require(shapes == wanted, f"weights {wanted}", shapes)
        require(all(w.is_bf16 == (dtype == torch.bfloat16) for w in weights), f"weights of {dtype}", "another dtype")
        require_tensor("attention_norm", layer.attention_norm, (hidden,), dtype)
        require_tensor("mlp_norm", layer.mlp_norm, (hidden,), dtype)
        require((layer.q_norm is None) == (layer.k_norm is None), "both a q_norm and a k_norm, or neither", "one")
        if layer.q_norm is not None and layer.k_norm is not None:
            q_units, k_units = (1, 1) if layer.q_norm.shape == (dim,) else (heads, kv_heads)
            require_tensor("q_norm", layer.q_norm, (q_units * dim,), dtype)
            require_tensor("k_norm", layer.k_norm, (k_units * dim,), dtype)
        require(layer.window >= 0, "a window of 0 or more positions", layer.window)
        return weights

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, texts: Sequence[LayersKV],
                parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        heads, kv_heads, dim = self._geometry[:3]
        num_layers, rows, dtype = len(self._layers), x.shape[0], self._kernels.dtype
        require(x.shape == (rows, self._hidden), f"rows [R, {self._hidden}]", x.shape)
        require_tensor("cos", cos, (rows, dim // 2), torch.float32)
        require_tensor("sin", sin, (rows, dim // 2), torch.float32)
        require_tensor("parents", parents, (rows,), torch.int32)
        shape = (num_layers, rows, kv_heads, dim)
        k, v = (_whole_address(parts, shape, dtype) for parts in ([kv.k for kv in texts], [kv.v for kv in texts]))
        stores = [self._kernels.native_stores(kv.stores, num_layers, kv_heads, dim) for kv in texts]
        for kv, native in zip(texts, stores, strict=True):
            require_length(kv.length, native)
        result = x.to(dtype, copy=True).contiguous()
        q, content, output = (torch.empty(num_layers, rows, heads, dim, dtype=dtype) for _ in range(3))
        lse = torch.empty(num_layers, rows, heads)
        self._kernels.native.forward(
            self.native, stores, [kv.length for kv in texts], [kv.k.shape[1] for kv in texts],
            [_remainder_address(kv.remainder, (num_layers, heads, dim + 1, dim + 1)) for kv in texts],
            [self._tap_addresses(kv) for kv in texts],
            result.data_ptr(), cos.data_ptr(), sin.data_ptr(), parents.data_ptr(), q.data_ptr(), content.data_ptr(),
            k, v, output.data_ptr(), lse.data_ptr())
        return result, AttentionOutput(q, output, lse, content)

    def _tap_addresses(self, kv: LayersKV) -> list[int]:
        """For each layer, and for the result: where to copy the rows that enter it, or 0; empty without taps."""
        if not kv.taps:
            return []
        layers, rows = kv.taps
        require(len(set(layers)) == len(layers) and all(0 <= layer <= len(self._layers) for layer in layers),
                 f"different tapped layers, 0 to {len(self._layers)}", layers)
        require_tensor("tapped rows", rows, (len(layers), kv.k.shape[1], self._hidden), self._kernels.dtype)
        where = [0] * (len(self._layers) + 1)
        for place, layer in enumerate(layers):
            where[layer] = rows.data_ptr() + place * rows.stride(0) * rows.itemsize
        return where

    def draft_arguments(self, stores: Sequence[KVStore], length: int, remainder: Tensor | None, cos: Tensor,
                        sin: Tensor) -> tuple[list[_cpu.Store], int]:
        """The compiled stores and the remainder's address for a chain of drafts, checked as `forward` checks them."""
        heads, kv_heads, dim = self._geometry[:3]
        native = self._kernels.native_stores(stores, len(self._layers), kv_heads, dim)
        require_length(length, native)
        require_tensor("cos", cos, (len(cos), dim // 2), torch.float32)
        require_tensor("sin", sin, (len(cos), dim // 2), torch.float32)
        return native, _remainder_address(remainder, (len(native), heads, dim + 1, dim + 1))


def _contiguous(weight: int4.Int4Weight) -> int4.Int4Weight:
    """The weight as the compiled module reads it. ValueError if its parts do not fit together."""
    rows, columns = weight.values.shape
    groups = (rows, -(-columns // int4.GROUP))
    require(weight.scale.shape == weight.zero.shape == groups, f"scales and zero points {groups}", weight.scale.shape)
    require((weight.values.dtype, weight.scale.dtype, weight.zero.dtype) == (torch.uint8, torch.float16, torch.uint8),
            "uint8 values, float16 scales and uint8 zero points", weight.scale.dtype)
    return int4.Int4Weight(*(part.contiguous() for part in weight))


def _are_layers(x: Tensor, layer_stride: int) -> bool:
    """Whether x [L, T, Hkv, D] is contiguous within each layer, with this stride between layers."""
    strides, wanted = x.stride(), (layer_stride, x.shape[2] * x.shape[3], x.shape[3], 1)
    return strides == wanted or all(
        size == 1 or stride == to for size, stride, to in zip(x.shape, strides, wanted, strict=True))


def _whole_address(parts: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The address of the tensor [L, R, Hkv, D] of which `parts` are consecutive slices [L, T, Hkv, D]."""
    num_layers, rows, heads, dim = shape
    width, start = heads * dim, parts[0].data_ptr()
    row, size = 0, width * dtype.itemsize
    for part in parts:
        count = part.shape[1]
        fits = (part.dtype == dtype and count > 0 and part.shape == (num_layers, count, heads, dim)
                and part.data_ptr() == start + row * size and _are_layers(part, rows * width))
        if not fits:
            require(False, f"keys and values {shape} of {dtype}, a slice for each text", (part.shape, part.dtype))
        row += count
    require(row == rows, f"keys and values of {rows} rows", row)
    return start


def _remainder_address(remainder: Tensor | None, shape: tuple[int, ...]) -> int:
    if remainder is not None:
        require_tensor("a remainder", remainder, shape, torch.float32)
    return address(remainder)
