"""`CudaKernels`: the interface of a set of kernels, implemented in Triton.

The names are triton-16, triton-32 and triton-64. The number is how many rows a program multiplies at a time, whether
the forward has that many or not: 16 costs least for up to 16 rows, 64 for a tree of many. A suffix names the format of
the cache (`cache_format`). Each set is row-invariant; between sets, logits differ in their last bits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.cuda.attention import Splits
from longdraft.kernels.cuda.cache_format import CacheFormat
from longdraft.kernels.cuda.choices import LogitsSource
from longdraft.kernels.cuda.decoder import CudaDecoder
from longdraft.kernels.cuda.few_bits import CudaFewBits, CudaStacked
from longdraft.kernels.cuda.kv_store import CudaStore, copy_rows, cuda_stores, scatter_rows
from longdraft.kernels.cuda.launch import require
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.cuda.remainder import CudaRemainder, PartialAttentions, new_fit
from longdraft.kernels.cuda.row_invariance import delta_is_row_invariant, is_row_invariant
from longdraft.kernels.delta import DeltaState, DeltaWeights
from longdraft.kernels.formats.int8 import Quantised
from longdraft.kernels.formats.mxfp4 import Mxfp4Weight
from longdraft.kernels.interface import FLOAT_DTYPES, Decoder, FitRules, KVStore, LayersKV, PartOfWeight, Positions
from longdraft.kernels.reference import remainder_of
from longdraft.kernels.weights import Geometry, LayerWeights, Linear, QuantisedWeight

log = logging.getLogger(__name__)
_TILES = (16, 32, 64)
_NAMED = {f"triton-{tile}{format.value}": (tile, format) for format in CacheFormat for tile in _TILES}
NAMES = tuple(_NAMED)


class CudaKernels(CudaOperations):
    """See :class:`longdraft.kernels.interface.Kernels` for shapes and meaning."""

    is_device = True

    def __init__(self, device: str, dtype: str, name: str = NAMES[0], splits: Splits | None = None) -> None:
        """`splits` replaces the default cut of positions: tests use short splits. ValueError for an unknown name."""
        require(name in NAMES, f"a name of {', '.join(NAMES)}", name)
        tile, self.format = _NAMED[name]
        super().__init__(device, FLOAT_DTYPES[dtype], tile, splits)
        self.name = name
        self.is_row_invariant = True
        self._partial_attentions = PartialAttentions(self)

    def pack(self, weight: Tensor | QuantisedWeight, bias: Tensor | None = None, *,
             quantize: str = "none") -> CudaLinear:
        if not isinstance(weight, Tensor | Quantised) or (isinstance(weight, Tensor) and quantize == "int4"):
            return CudaFewBits(weight, bias, self.device, self.dtype)
        return CudaLinear(weight, bias, self.device, self.dtype, is_int8=quantize == "int8")

    def pack_parts(self, parts: Sequence[PartOfWeight], bias: Tensor | None = None) -> CudaLinear:
        """See `longdraft.kernels.interface.PacksParts`."""
        if len(parts) == 1:
            return self.pack(parts[0], bias)
        return CudaStacked([CudaFewBits(part, None, self.device, self.dtype) for part in parts], bias)

    def pack_mxfp4(self, weight: Mxfp4Weight, bias: Tensor | None = None) -> CudaLinear:
        """See `longdraft.kernels.interface.PacksMxfp4`."""
        require(weight.is_normal, "exponents of normal numbers", weight.exponents)
        return CudaFewBits(weight, bias, self.device, self.dtype)

    def embed(self, table: Linear, tokens: Sequence[int] | Tensor) -> Tensor:
        assert isinstance(table, CudaLinear)
        if isinstance(tokens, Tensor):
            return table.rows(tokens)
        require(len(tokens) > 0 and min(tokens) >= 0 and max(tokens) < table.out_features,
                f"token ids below {table.out_features}", tokens)
        ids = torch.tensor(tokens).to(self.device, non_blocking=True)  # `device=` would wait for the device
        return table.rows(ids)

    def new_store(self, num_kv_heads: int, head_dim: int, score_cap: float = 0.0) -> KVStore:
        return CudaStore(self.device, self.dtype, self.format, num_kv_heads, head_dim, score_cap)

    def new_state(self, weights: DeltaWeights) -> DeltaState:
        return self.deltas.new_state(weights)

    def new_decoder(self, layers: Sequence[LayerWeights], geometry: Geometry) -> Decoder:
        """Also sets `is_row_invariant` to False where the device fails the test of a layer of each kind."""
        self._check(layers, geometry)
        return CudaDecoder(self, layers, geometry)

    def _check(self, layers: Sequence[LayerWeights], geometry: Geometry) -> None:
        if self.device.type != "cuda" or not self.is_row_invariant:
            return
        kinds: dict[object, LayerWeights] = {}  # with attention
        for layer in layers:
            if layer.delta is None and layer.source is None:
                kind = layer.heads_in(geometry), layer.window > 0, layer.experts is None
                kinds.setdefault(kind, layer._replace(extra=None, is_causal=True, attention_conv=None, mlp_conv=None))
        deltas = [layer.delta for layer in layers if layer.delta is not None]
        self.is_row_invariant = all(
            is_row_invariant(self, CudaDecoder(self, [layer], geometry), layer, geometry) for layer in kinds.values()
        ) and (not deltas or delta_is_row_invariant(self, deltas[0]))
        if not self.is_row_invariant:
            log.warning("on this device, rows of a tree differ from plain decoding in their last bits: texts keep "
                        "their distribution, but are not bit-identical to those of plain decoding")

    def logits_source(self, norm: Tensor, eps: float, rounds_once: bool, head: Linear, divisor: float,
                      cap: float = 0.0) -> LogitsSource | None:
        """What computes logits in one graph with the choice of tokens; None for a head of other kernels."""
        if not isinstance(head, CudaLinear):
            return None
        return LogitsSource(self.graphs, self.tile, norm, eps, rounds_once, head, divisor, cap)

    def keep(self, kv: LayersKV, rows: Sequence[int]) -> None:
        if len(rows):
            require(min(rows) >= 0 and max(rows) < kv.k.shape[1], f"rows below {kv.k.shape[1]}", rows)
            index = torch.tensor(rows).to(self.device, non_blocking=True)
            for store in cuda_stores(kv.stores):
                store.reserve(kv.length + len(rows))
            self.scatter_rows(kv, index, torch.arange(kv.length, kv.length + len(rows), device=self.device))

    def scatter_rows(self, kv: LayersKV, rows: Tensor, targets: Tensor) -> None:
        stores = cuda_stores(kv.stores)
        if len({store.shape for store in stores}) == 1:
            scatter_rows(kv.k, kv.v, stores, rows, targets)
            return
        for index, store in enumerate(stores):
            own = kv.layer(index)
            scatter_rows(own.k[None], own.v[None], [store], rows, targets)

    def cache_bytes(self, head_dim: int) -> int:
        return self.format.row_bytes(head_dim, self.dtype)

    def free_bytes(self) -> int | None:
        if self.device.type != "cuda":
            return None
        free: int = torch.cuda.mem_get_info(self.device)[0]
        index = self.device.index or 0
        # What PyTorch holds for graphs (pools of their own) can be used by those graphs only.
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        held = [segment for segment in segments if segment["device"] == index
                and segment.get("segment_pool_id", (0, 0)) == (0, 0)]
        unused: int = sum(segment["total_size"] - segment["allocated_size"] for segment in held)
        return free + unused

    def copy(self, sources: Sequence[KVStore], targets: Sequence[KVStore], positions: Positions, start: int) -> None:
        copy_rows(cuda_stores(sources), cuda_stores(targets), positions, start)

    def remainder(self, stores: Sequence[KVStore], length: int, whole: AttentionOutput) -> Tensor:
        # The rows' keys and values are in the stores: a chain whose slots begin at length - T.
        output, lse = self._partial_attentions.run(cuda_stores(stores), whole, length)
        return remainder_of(whole, output, lse)

    def new_fit(self, stores: Sequence[KVStore], num_heads: int, rules: FitRules) -> CudaRemainder | None:
        return new_fit(self, stores, num_heads, rules)
