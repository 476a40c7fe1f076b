"""The compiled CPU kernels: `csrc/`, built as the module `_cpu`.

The compiled module checks the dtype, shape and bounds of activations. Parts of weights are checked here.
Each variant (AMX, AVX-512 with BF16 or VNNI, AVX2 with and without AVX-VNNI, portable; for ARM NEON with BF16, NEON,
armv8) is row-invariant to the bit. Between variants, and compared with the reference, results agree within the
rounding error of floating-point arithmetic.
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
from longdraft.kernels.cpu.remainder import CompiledRemainder
from longdraft.kernels.cpu.store import CpuLinear, CpuStore, evenly_strided, native_stores, refuse, require
from longdraft.kernels.delta import DeltaRows, DeltaState, DeltaWeights
from longdraft.kernels.formats import int4, int8, mxfp4
from longdraft.kernels.formats.groups import COMMON_GROUPS, BlockRows, GroupedWeight
from longdraft.kernels.formats.mxfp4 import Mxfp4Weight
from longdraft.kernels.interface import KV, Decoder, FitRules, KVStore, LayersKV, Positions
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
        rows = len(weight if isinstance(weight, Tensor) else weight.values)
        bias = self._bias(bias, rows)
        if isinstance(weight, Tensor) and quantize == "int4":
            weight = self.quantise_int4(weight)
        if isinstance(weight, int4.Int4Weight):
            values, scale, zero, order = _contiguous(weight)
            return CpuLinear(self.native.pack_groups(bf16=self._is_bf16, bits=4, halves=False, values=values,
                                                     scales=scale, zeros=zero, bias=bias, order=order))
        if isinstance(weight, GroupedWeight):
            values, scale, least, bits, common = _checked(weight)
            return CpuLinear(self.native.pack_groups(bf16=self._is_bf16, bits=bits, halves=weight.has_halves,
                                                     values=values, scales=scale, least=least, common=common,
                                                     bias=bias))
        if isinstance(weight, Tensor) and quantize == "none":
            packed, factor = weight.to(self.dtype).contiguous(), None
        else:
            packed, factor = int8.quantise(weight) if isinstance(weight, Tensor) else weight
            fits = packed.dtype == torch.int8 and factor.shape == (rows,) and factor.dtype == torch.float32
            require(fits, f"int8 values and float32 scales [{rows}]", (packed.dtype, factor.dtype, factor.shape))
            packed, factor = packed.contiguous(), factor.contiguous()
        return CpuLinear(self.native.pack(self._is_bf16, packed, factor, bias))

    def pack_blocks(self, weight: BlockRows, bias: Tensor | None = None) -> tuple[CpuLinear, int | None]:
        """`pack` of the numbers of quantised blocks, straight from where they are.

        Returns the weight and the address of a row with a scale that is NaN or infinite; None: there is no such row.
        """
        addresses, types, rows = weight.addresses.contiguous(), weight.types.contiguous(), len(weight.types)
        require(addresses.shape == (rows,) and (addresses.dtype, types.dtype) == (torch.int64, torch.uint8),
                "int64 addresses and uint8 types of as many rows", (addresses.shape, addresses.dtype, types.dtype))
        bias, damaged = self._bias(bias, rows), torch.empty(1, dtype=torch.int64)
        packed = CpuLinear(self.native.pack_blocks(self._is_bf16, weight.columns, addresses, types, bias, damaged))
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
        return CpuLinear(self.native.pack_mxfp4(self._is_bf16, codes, exponents, bias))

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
        self.native.quantise_int4(weight, values, scale, zero)
        return int4.Int4Weight(values, scale, zero)

    def embed(self, table: Linear, tokens: Sequence[int] | Tensor) -> Tensor:
        assert isinstance(table, CpuLinear)
        tokens = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        if table.native.is_bf16 != self._is_bf16:
            refuse(f"a table packed as {self.dtype}", table.native)
        require(len(tokens) > 0, "one or more tokens", tokens)
        out = torch.empty(len(tokens), table.native.k, dtype=self.dtype)
        self.native.embed(table.native, tokens, out)  # raises ValueError for ids that the table lacks
        return out

    def linear(self, x: Tensor, weight: Linear, *, keep_float: bool = False) -> Tensor:
        assert isinstance(weight, CpuLinear)
        if weight.native.is_bf16 != self._is_bf16:
            refuse(f"a weight packed as {self.dtype}", weight.native)
        out = torch.empty(len(x), weight.out_features, dtype=torch.float32 if keep_float else self.dtype)
        self.native.linear(weight.native, self._aligned(x), out, keep_float)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_once: bool = False) -> Tensor:
        out = torch.empty(x.shape, dtype=self.dtype)
        weight = weight.contiguous() if weight.dtype == torch.float32 else self._aligned(weight)
        self.native.rms_norm(self._aligned(x), weight, eps, rounds_once, out)
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return self._gated(self.native.swiglu, gate_up)

    def geglu(self, gate_up: Tensor) -> Tensor:
        return self._gated(self.native.geglu, gate_up)

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        return self._gated(lambda x, out: self.native.clamped_swiglu(x, alpha, limit, out), gate_up)

    def _gated(self, operation: Callable[[Tensor, Tensor], None], gate_up: Tensor) -> Tensor:
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=self.dtype)
        operation(self._aligned(gate_up), out)
        return out

    def route(self, logits: Tensor, experts: Experts) -> Routing:
        shape = len(logits), experts.chosen
        chosen, weights = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
        self.native.route(self._aligned(logits), experts.chosen, experts.normalises, experts.rounds, experts.scales,
                          chosen, weights)
        return Routing(chosen.long(), weights)

    def sigmoid(self, x: Tensor) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        self.native.sigmoid(out)
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        require(cap > 0, "a positive cap", cap)
        out = x.clone(memory_format=torch.contiguous_format)
        self.native.soft_cap(out, cap)
        return out

    def gate(self, x: Tensor, gates: Tensor) -> Tensor:
        x = self._aligned(x)
        out = torch.empty_like(x)
        self.native.gate(x, gates, out)
        return out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.to(self.dtype)
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty(x.shape, dtype=self.dtype)
        self.native.rope(x, cos.float().contiguous(), sin.float().contiguous(), out)
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
        self.native.keep(native_stores(self.dtype, kv.stores, len(kv.k)), kv.length, rows, kv.k, kv.v)

    def scatter_rows(self, kv: LayersKV, rows: Tensor, targets: Tensor) -> None:
        self.keep(kv, rows[targets >= 0].tolist())

    def cache_bytes(self, head_dim: int) -> int:
        return 2 * head_dim * self.dtype.itemsize

    def free_bytes(self) -> int | None:
        return None

    def copy(self, sources: Sequence[KVStore], targets: Sequence[KVStore], positions: Positions, start: int) -> None:
        if isinstance(positions, range):
            positions = torch.tensor(positions).expand(len(sources), sources[0].shape[0], -1)
        source, target = (native_stores(self.dtype, stores, len(positions)) for stores in (sources, targets))
        self.native.copy(source, target, positions.to(torch.int64).contiguous(), start)

    def remainder(self, stores: Sequence[KVStore], length: int, whole: AttentionOutput) -> Tensor:
        q, output, lse, _ = evenly_strided(whole)
        num_layers, rows, heads, dim = q.shape
        remainder = torch.empty(num_layers, rows, heads, dim + 1)
        self.native.remainder(native_stores(self.dtype, stores, num_layers), length, q, output, lse, remainder)
        return remainder

    def new_fit(self, stores: Sequence[KVStore], num_heads: int, rules: FitRules) -> CompiledRemainder:
        return CompiledRemainder(stores, num_heads, rules)

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        store, length = kv.store, kv.length
        assert isinstance(store, CpuStore)
        q = q.to(self.dtype).contiguous()
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        self.native.attention(store.native, length, q, store.as_rows(kv.k), store.as_rows(kv.v), parents,
                              1 / math.sqrt(q.shape[2]), window, kv.remainder, out, lse)
        return AttentionOutput(q, out, lse, q)

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
