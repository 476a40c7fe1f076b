"""The compiled CPU kernels: `csrc/`, built as the module `_cpu`.

The classes here check the dtype, shape, bounds and alignment of every argument. The C++ code relies on these checks.
Each variant (AMX, AVX-512 with BF16, AVX2 with FMA, portable) is row-invariant to the bit. Between variants, and
compared with the reference, results agree within the rounding error of floating-point arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.cpu import delta as cpu_delta
from longdraft.kernels.cpu.decoder import CpuDecoder
from longdraft.kernels.cpu.store import (
    CpuLinear,
    CpuStore,
    WholeAttention,
    address,
    are_layers,
    native_stores,
    refuse,
    remainder_address,
    require,
    require_length,
    require_tensor,
    strided,
)
from longdraft.kernels.delta import DeltaRows, DeltaState, DeltaWeights
from longdraft.kernels.formats import int4, int8, mxfp4
from longdraft.kernels.formats.groups import COMMON_GROUPS, BlockRows, GroupedWeight
from longdraft.kernels.formats.mxfp4 import Mxfp4Weight
from longdraft.kernels.interface import KV, Decoder, KVStore, LayersKV, Positions
from longdraft.kernels.weights import Experts, Geometry, LayerWeights, Linear, QuantisedWeight, Routing

with suppress(ImportError):  # the reference is used instead; native.py has the reason
    from longdraft.kernels.cpu import _cpu


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

    def pack(self, weight: Tensor | QuantisedWeight, bias: Tensor | None = None, *,
             quantize: str = "none") -> CpuLinear:
        rows, columns = (weight if isinstance(weight, Tensor) else weight.values).shape
        bias = self._bias(bias, rows)
        if isinstance(weight, Tensor) and quantize == "int4":
            weight = self.quantise_int4(weight)
        if isinstance(weight, int4.Int4Weight):
            values, scale, zero, order = _contiguous(weight)
            return CpuLinear(self.native.pack_groups(self._is_bf16, 4, False, rows, columns, address(values),
                                                     address(scale), address(zero), 0, 0, address(bias),
                                                     address(order)))
        if isinstance(weight, GroupedWeight):
            values, scale, least, bits, common = _checked(weight)
            return CpuLinear(self.native.pack_groups(self._is_bf16, bits, weight.has_halves, rows, columns,
                                                     address(values), address(scale), 0, address(least),
                                                     address(common), address(bias), 0))
        if isinstance(weight, Tensor) and quantize == "none":
            packed, factor = weight.to(self.dtype).contiguous(), None
        else:
            packed, factor = int8.quantise(weight) if isinstance(weight, Tensor) else weight
            fits = packed.dtype == torch.int8 and factor.shape == (rows,) and factor.dtype == torch.float32
            require(fits, f"int8 values and float32 scales [{rows}]", (packed.dtype, factor.dtype, factor.shape))
            packed, factor = packed.contiguous(), factor.contiguous()
        return CpuLinear(self.native.pack(self._is_bf16, rows, columns, address(packed), address(factor),
                                          address(bias)))

    def pack_blocks(self, weight: BlockRows, bias: Tensor | None = None) -> tuple[CpuLinear, int | None]:
        """`pack` of the numbers of quantised blocks, straight from where they are.

        Returns the weight and the address of a row with a scale that is NaN or infinite; None: there is no such row.
        """
        addresses, types, rows = weight.addresses.contiguous(), weight.types.contiguous(), len(weight.types)
        require(addresses.shape == (rows,) and (addresses.dtype, types.dtype) == (torch.int64, torch.uint8),
                "int64 addresses and uint8 types of as many rows", (addresses.shape, addresses.dtype, types.dtype))
        bias, damaged = self._bias(bias, rows), torch.empty(1, dtype=torch.int64)
        packed = CpuLinear(self.native.pack_blocks(self._is_bf16, rows, weight.columns, address(addresses),
                                                   address(types), address(bias), address(damaged)))
        return packed, None if damaged < 0 else int(addresses[damaged])

    def pack_mxfp4(self, weight: Mxfp4Weight, bias: Tensor | None = None) -> CpuLinear:
        """Convert a weight in MXFP4, whose numbers are normal, to a layout of as many bits.

        Products have the bits of those with `pack(mxfp4.dequantise(weight))`.
        """
        codes, exponents = (part.contiguous() for part in weight)
        rows, columns = len(codes), 2 * codes.shape[1]
        fits = exponents.shape == (rows, columns // mxfp4.GROUP) and columns % mxfp4.GROUP == 0
        require(fits and codes.dtype == exponents.dtype == torch.uint8 and weight.is_normal,
                "uint8 codes and exponents of groups of 32 normal numbers", (codes.shape, exponents.shape))
        bias = self._bias(bias, rows)
        return CpuLinear(self.native.pack_mxfp4(self._is_bf16, rows, columns, address(codes), address(exponents),
                                                address(bias)))

    def _bias(self, bias: Tensor | None, rows: int) -> Tensor | None:
        """A bias [N] as the compiled module reads it: rounded to `dtype`, float32."""
        if bias is not None:
            bias = bias.to(self.dtype).float().contiguous()
            require(bias.shape == (rows,), f"a bias [{rows}]", bias.shape)
        return bias

    def new_linear(self, quantize: str, rows: int, columns: int, has_bias: bool, has_order: bool = False) -> CpuLinear:
        """A packed int8 or int4 weight whose `memory` the caller fills. An order must have each input once."""
        bits = {"int8": 8, "int4": 4}[quantize]
        return CpuLinear(self.native.new_linear(self._is_bf16, bits, rows, columns, has_bias, has_order))

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
        if table.native.is_bf16 != self._is_bf16:
            refuse(f"a table packed as {self.dtype}", table.native)
        require(len(tokens) > 0, "one or more tokens", tokens)
        out = torch.empty(len(tokens), table.native.k, dtype=self.dtype)
        self.native.embed(table.native, tokens, out.data_ptr())  # raises ValueError for ids that the table lacks
        return out

    def linear(self, x: Tensor, weight: Linear, *, keep_float: bool = False) -> Tensor:
        assert isinstance(weight, CpuLinear)
        if weight.native.is_bf16 != self._is_bf16:
            refuse(f"a weight packed as {self.dtype}", weight.native)
        x, rows = self._input(x, weight.native.k), x.shape[0]
        out = torch.empty(rows, weight.out_features, dtype=torch.float32 if keep_float else self.dtype)
        self.native.linear(weight.native, x.data_ptr(), rows, out.data_ptr(), keep_float)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_once: bool = False) -> Tensor:
        rows, width = x.shape
        x, out = self._input(x, width), torch.empty(rows, width, dtype=self.dtype)
        if weight.shape != (width,):
            refuse(f"a norm [{width}]", weight.shape)
        if weight.dtype == torch.float32 and self._is_bf16:
            require(rounds_once and weight.is_contiguous(), "a norm that rounds once for a float32 weight", rounds_once)
            self.native.rms_norm_float(True, x.data_ptr(), weight.data_ptr(), rows, width, eps, out.data_ptr())
            return out
        weight = self._aligned(weight)
        self.native.rms_norm(self._is_bf16, x.data_ptr(), weight.data_ptr(), rows, width, eps, rounds_once,
                             out.data_ptr())
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return self._gated(self.native.swiglu, gate_up)

    def geglu(self, gate_up: Tensor) -> Tensor:
        return self._gated(self.native.geglu, gate_up)

    def _gated(self, operation: Callable[[bool, int, int, int, int], None], gate_up: Tensor) -> Tensor:
        gate_up = self._input(gate_up, gate_up.shape[1])
        width = gate_up.shape[1] // 2
        require(gate_up.shape[1] == 2 * width, "an even width", gate_up.shape)
        out = torch.empty(len(gate_up), width, dtype=self.dtype)
        operation(self._is_bf16, gate_up.data_ptr(), len(gate_up), width, out.data_ptr())
        return out

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        def operation(is_bf16: bool, x: int, rows: int, width: int, out: int) -> None:
            self.native.clamped_swiglu(is_bf16, x, rows, width, alpha, limit, out)

        return self._gated(operation, gate_up)

    def route(self, logits: Tensor, experts: Experts) -> Routing:
        rows, count = logits.shape
        logits = self._input(logits, count)
        shape = (rows, experts.chosen)
        chosen, weights = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
        if experts.scales is not None:
            require_tensor("scales of experts", experts.scales, (count,), torch.float32)
        self.native.route(self._is_bf16, logits.data_ptr(), rows, count, experts.chosen, experts.normalises,
                          experts.rounds, address(experts.scales), chosen.data_ptr(), weights.data_ptr())
        return Routing(chosen.long(), weights)

    def sigmoid(self, x: Tensor) -> Tensor:
        require(x.dtype == torch.float32, "float32", x.dtype)
        out = x.clone(memory_format=torch.contiguous_format)
        self.native.sigmoid(out.data_ptr(), out.numel())
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        require(x.dtype == torch.float32 and cap > 0, "float32 and a positive cap", (x.dtype, cap))
        out = x.clone(memory_format=torch.contiguous_format)
        self.native.soft_cap(out.data_ptr(), out.numel(), cap)
        return out

    def gate(self, x: Tensor, gates: Tensor) -> Tensor:
        x = self._input(x, gates.shape[1])
        fits = gates.shape == x.shape and gates.dtype == self.dtype and gates.stride(1) == 1
        require(fits, f"gates {tuple(x.shape)} of {self.dtype}", (gates.shape, gates.dtype, gates.stride()))
        out = torch.empty_like(x)
        self.native.gate(self._is_bf16, x.data_ptr(), gates.data_ptr(), gates.stride(0), len(x), x.shape[1],
                         out.data_ptr())
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

    def new_store(self, num_kv_heads: int, head_dim: int, score_cap: float = 0.0) -> KVStore:
        return CpuStore(self.native, self.dtype, num_kv_heads, head_dim, score_cap)

    def new_state(self, weights: DeltaWeights) -> DeltaState:
        return cpu_delta.new_state(weights, self.dtype)

    def delta_rule(self, weights: DeltaWeights, texts: Sequence[DeltaRows], z: Tensor | None,
                   parents: Tensor) -> Tensor | None:
        return cpu_delta.delta_rule(self.native, self.dtype, weights, texts, z, parents)

    def new_decoder(self, layers: Sequence[LayerWeights], geometry: Geometry) -> Decoder:
        return CpuDecoder(self.native, self.dtype, layers, geometry)

    def keep(self, kv: LayersKV, rows: Sequence[int]) -> None:
        num_layers, num_rows, heads, dim = kv.k.shape
        for x in (kv.k, kv.v):
            if x.shape != kv.k.shape or x.dtype != self.dtype or not are_layers(x, kv.k.stride(0)):
                refuse(f"{self.dtype} [L, T, Hkv, D]", (x.shape, x.dtype))
        stores = native_stores(self.dtype, kv.stores, num_layers)
        if max([store.heads for store in stores]) > heads or max([store.dim for store in stores]) > dim:
            refuse(f"stores of {heads} heads of {dim} at most", kv.stores)
        require(kv.length >= 0, "positions of 0 or more", kv.length)
        if len(rows):
            self.native.keep(stores, kv.length, rows, num_rows, (kv.k.stride(0), heads * dim, dim), kv.k.data_ptr(),
                             kv.v.data_ptr())

    def scatter_rows(self, kv: LayersKV, rows: Tensor, targets: Tensor) -> None:
        self.keep(kv, rows[targets >= 0].tolist())

    def cache_bytes(self, head_dim: int) -> int:
        return head_dim * self.dtype.itemsize

    def free_bytes(self) -> int | None:
        return None

    def copy(self, sources: Sequence[KVStore], targets: Sequence[KVStore], positions: Positions, start: int) -> None:
        if isinstance(positions, range):
            positions = torch.tensor(positions).expand(len(sources), sources[0].shape[0], -1)
        num_layers, heads, count = positions.shape
        positions = positions.to(torch.int64).contiguous()
        source, target = (native_stores(self.dtype, stores, num_layers) for stores in (sources, targets))
        shapes = {(store.heads, store.dim) for store in (*source, *target)}
        require(start >= 0 and len(shapes) == 1 and (heads,) == (*shapes,)[0][:1], "stores of one shape", start)
        self.native.copy(source, target, positions.data_ptr(), count, start)

    def remainder(self, stores: Sequence[KVStore], length: int, whole: AttentionOutput) -> Tensor:
        rows = WholeAttention.of(self.dtype, stores, length, whole)
        remainder = torch.empty(len(stores), rows.rows, rows.heads, whole.queries.shape[3] + 1)
        self.native.remainder(*rows.arguments(length), remainder.data_ptr())
        return remainder

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
                              remainder_address(kv.remainder, (rows, heads, dim + 1)), out.data_ptr(), lse.data_ptr())
        return AttentionOutput(q, out, lse, q)

    def _input(self, x: Tensor, width: int) -> Tensor:
        """Check x [R, width], and convert it as `_aligned` does."""
        if x.ndim != 2 or x.shape[1] != width:
            refuse(f"[R, {width}]", x.shape)
        return self._aligned(x)

    def _aligned(self, x: Tensor) -> Tensor:
        """x in `dtype`, contiguous, and aligned to words of 4 bytes."""
        if x.dtype != self.dtype or not x.is_contiguous():
            x = x.to(self.dtype).contiguous()
        return x if x.data_ptr() % 4 == 0 else x.clone()


def _checked(weight: GroupedWeight) -> GroupedWeight:
    """The weight as the compiled module reads it. ValueError if its parts do not fit together."""
    rows, columns = weight.values.shape
    groups = (rows, columns // int4.GROUP)
    require(columns % int4.GROUP == 0 and tuple(weight.scale.shape) in (groups, (*groups, 2)),
            f"scales {groups}, or two for each group", weight.scale.shape)
    parts = (weight.scale,) if weight.least is None else (weight.scale, weight.least)
    dtype, common = torch.float16, weight.common
    if common is not None:
        dtype, shape = torch.int8, (rows, columns // int4.GROUP // COMMON_GROUPS, len(parts))
        require(common.shape == shape and common.dtype == torch.float16 and columns % (int4.GROUP * COMMON_GROUPS) == 0,
                f"float16 common scales {shape}", (common.shape, common.dtype))
        common = common.contiguous()
    require(weight.values.dtype == torch.uint8 and all(part.dtype == dtype for part in parts)
            and parts[-1].shape[:2] == groups, f"uint8 values, scales and least values of {dtype}", weight.scale.dtype)
    least = None if weight.least is None else weight.least.contiguous()
    return GroupedWeight(weight.values.contiguous(), weight.scale.contiguous(), least, weight.bits, common)


def _contiguous(weight: int4.Int4Weight) -> int4.Int4Weight:
    """The weight as the compiled module reads it. ValueError if its parts do not fit together."""
    rows, columns = weight.values.shape
    groups = (rows, -(-columns // int4.GROUP))
    require(weight.scale.shape == weight.zero.shape == groups, f"scales and zero points {groups}", weight.scale.shape)
    require((weight.values.dtype, weight.scale.dtype, weight.zero.dtype) == (torch.uint8, torch.float16, torch.uint8),
            "uint8 values, float16 scales and uint8 zero points", weight.scale.dtype)
    order = weight.order
    if order is not None:
        order = order.to(torch.int32).contiguous()
        require(torch.equal(order.long().sort().values, torch.arange(columns)), "an order with each input once", order)
    return int4.Int4Weight(weight.values.contiguous(), weight.scale.contiguous(), weight.zero.contiguous(), order)
