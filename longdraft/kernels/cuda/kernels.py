"""The CUDA kernels behind the interface: Triton programs, and the library's products for prompts.

Names: triton-64, triton-32, triton-16, by how many rows a program multiplies whether they are there or not (16 is
lighter for one row, 64 for a tree of many); with -fp8 behind it the cache holds 8-bit numbers. Each is row-invariant;
between them logits differ in the last bits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels.cuda import jit_rows, store
from longdraft.kernels.cuda.attention import Plan, Splits, Workspace, attend
from longdraft.kernels.cuda.decoder import CudaDecoder
from longdraft.kernels.cuda.graphs import Graphs
from longdraft.kernels.cuda.launch import ceil_div, on, padded, require
from longdraft.kernels.cuda.linear import SUM_BLOCK, CudaLinear, summed
from longdraft.kernels.cuda.selfcheck import is_row_invariant
from longdraft.kernels.cuda.store import FP8, CudaStore
from longdraft.kernels.interface import KV, AttentionOutput, Decoder, Geometry, KVStore, LayersKV, LayerWeights, Linear
from longdraft.kernels.reference import remainder_of

log = logging.getLogger(__name__)
TILES = (64, 32, 16)
_SUFFIX = "-fp8"
NAMES = tuple(f"triton-{tile}{suffix}" for suffix in ("", _SUFFIX) for tile in TILES)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CudaKernels:
    """See :class:`longdraft.kernels.interface.Kernels` for shapes and meaning."""

    is_device = True

    def __init__(self, device: str, dtype: str, name: str = NAMES[0], splits: Splits | None = None) -> None:
        """splits: how attention cuts positions; for tests, which have few of them."""
        require(name in NAMES, f"a name of {', '.join(NAMES)}", name)
        self.name = name
        self.device = torch.device(device)
        self.dtype = DTYPES[dtype]
        self.tile = int(name.removesuffix(_SUFFIX).removeprefix("triton-"))
        self.is_row_invariant = True
        self._element = FP8 if name.endswith(_SUFFIX) else self.dtype
        self._splits = splits or Splits()
        self.graphs = Graphs(self.device)

    def plan(self, heads: int, kv_heads: int, dim: int) -> Plan:
        return Plan(heads, kv_heads, dim, self.tile, self._splits, self.dtype == torch.float32)

    def pack(self, weight: Tensor, bias: Tensor | None = None, *, is_int8: bool = False) -> CudaLinear:
        return CudaLinear(weight, bias, self.device, self.dtype, is_int8)

    def embed(self, table: Linear, tokens: Sequence[int]) -> Tensor:
        assert isinstance(table, CudaLinear)
        require(len(tokens) > 0 and min(tokens) >= 0 and max(tokens) < table.out_features,
                f"token ids below {table.out_features}", tokens)
        ids = torch.tensor(tokens, device=self.device)
        rows = table.weight[ids]
        return rows if table.scale is None else (rows.float() * table.scale[ids, None]).to(self.dtype)

    def linear(self, x: Tensor, weight: Linear, *, keep_float: bool = False) -> Tensor:
        assert isinstance(weight, CudaLinear)
        x = self._input(x, weight.in_features)
        out = torch.empty(len(x), weight.out_features, dtype=torch.float32 if keep_float else self.dtype,
                          device=self.device)
        return summed(weight.parts(x, self.tile), out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_once: bool = False) -> Tensor:
        x = self._input(x, len(weight))
        return self.rms_norm_into(x, weight, eps, rounds_once, torch.empty_like(x))

    def rms_norm_into(self, x: Tensor, weight: Tensor, eps: float, rounds_once: bool, out: Tensor) -> Tensor:
        rows, width = x.shape
        with on(self.device):
            jit_rows.rms_norm[(rows,)](x, weight, out, eps, WIDTH=width, PADDED=padded(width),
                                       ROUNDS_ONCE=rounds_once, num_warps=8 if width > 512 else 1)
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate_up = self._input(gate_up, gate_up.shape[1])
        rows, width = len(gate_up), gate_up.shape[1] // 2
        require(gate_up.shape[1] == 2 * width, "an even width", gate_up.shape)
        out = torch.empty(rows, width, dtype=self.dtype, device=self.device)
        with on(self.device):
            jit_rows.swiglu_rows[(rows, ceil_div(width, SUM_BLOCK))](gate_up, out, WIDTH=width, BLOCK=SUM_BLOCK)
        return out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, dim = x.shape
        x, cos, sin = x.to(self.dtype).contiguous(), cos.float().contiguous(), sin.float().contiguous()
        require(cos.shape == sin.shape == (rows, dim // 2), "cos, sin [R, D / 2]", cos.shape)
        out = torch.empty_like(x)
        with on(self.device):
            jit_rows.rope[(rows, heads)](x, cos, sin, out, HEADS=heads, HALF=dim // 2, PADDED=padded(dim // 2),
                                         num_warps=1)
        return out

    def new_store(self, num_kv_heads: int, head_dim: int) -> KVStore:
        return CudaStore(self.device, self.dtype, self._element, num_kv_heads, head_dim)

    def new_decoder(self, layers: Sequence[LayerWeights], geometry: Geometry) -> Decoder:
        if self.device.type == "cuda" and self.is_row_invariant:
            self.is_row_invariant = is_row_invariant(CudaDecoder(self, layers[:1], geometry))
            if not self.is_row_invariant:
                log.warning("on this device rows of a tree differ from plain decoding in their last bits: texts keep "
                            "their distribution, but are not those of plain decoding to the bit")
        return CudaDecoder(self, layers, geometry)

    def own(self, stores: Sequence[KVStore]) -> list[CudaStore]:
        own = [store for store in stores if isinstance(store, CudaStore)]
        require(len(own) == len(stores), "stores of these kernels", [type(s).__name__ for s in stores])
        return own

    def keep(self, kv: LayersKV, rows: Sequence[int]) -> None:
        if len(rows):
            require(min(rows) >= 0 and max(rows) < kv.k.shape[1], f"rows below {kv.k.shape[1]}", rows)
            index = torch.tensor(rows, device=self.device)
            for held in self.own(kv.stores):
                held.reserve(kv.length + len(rows))
            self.scatter_rows(kv, index, torch.arange(kv.length, kv.length + len(rows), device=self.device))

    def scatter_rows(self, kv: LayersKV, rows: Tensor, targets: Tensor) -> None:
        """Provisional rows [N] to positions targets [N], both on the device; a negative target: no row."""
        stores = self.own(kv.stores)
        store.place(kv.k, kv.v, stores, store.table(stores), rows, targets)

    def cache_bytes(self, head_dim: int) -> int:
        scale = 4 if self._element == FP8 else 0
        return head_dim * self._element.itemsize + scale

    def free_bytes(self) -> int | None:
        if self.device.type != "cuda":
            return None
        free: int = torch.cuda.mem_get_info(self.device)[0]
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def copy(self, sources: Sequence[KVStore], targets: Sequence[KVStore], positions: Tensor, start: int) -> None:
        store.copy(self.own(sources), self.own(targets), positions, start)

    def remainder(self, stores: Sequence[KVStore], length: int, whole: AttentionOutput) -> Tensor:
        """The rows are in the stores: their slots, from length - T on, are the chain's."""
        layers, rows, heads, dim = whole.queries.shape
        own = self.own(stores)
        plan = self.plan(heads, own[0].heads, dim)
        work = Workspace(plan, rows, length, self.device)
        work.follow(torch.arange(-1, rows - 1, dtype=torch.int32, device=self.device))
        where = torch.full((2,), length - rows, dtype=torch.int64, device=self.device)
        output, lse = torch.empty_like(whole.queries), torch.empty_like(whole.lse)
        queries = whole.queries.contiguous()
        for layer in range(layers):
            attend(plan, work, queries[layer], own[layer], where, length, 0, None, output[layer], lse[layer])
        return remainder_of(whole, output, lse)

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        (held,) = self.own([kv.store])
        rows, heads, dim = q.shape
        q = q.to(self.dtype).contiguous()
        require(heads % held.heads == 0 and dim == held.dim, "query heads in groups of KV heads", q.shape)
        require(len(kv.k) == len(kv.v) == len(parents) == rows, f"{rows} keys, values and parents", len(parents))
        held.reserve_drafts(rows)
        require(0 <= kv.length <= held.room, "positions that are held", kv.length)
        index = torch.arange(rows, device=self.device)
        store.place(kv.k[None], kv.v[None], [held], store.table([held]), index, index + held.room)
        plan = self.plan(heads, held.heads, dim)
        work = Workspace(plan, rows, kv.length, self.device)
        work.follow(parents.to(self.device, torch.int32))
        where = torch.tensor([kv.length, held.room], device=self.device)
        out, lse = torch.empty_like(q), torch.empty(rows, heads, device=self.device)
        remainder = None if kv.remainder is None else kv.remainder.contiguous()
        attend(plan, work, q, held, where, kv.length, window, remainder, out, lse)
        return AttentionOutput(q, out, lse, q)

    def _input(self, x: Tensor, width: int) -> Tensor:
        """x [R, width] in our dtype, contiguous, on addresses that wide reads like."""
        require(x.ndim == 2 and x.shape[1] == width, f"[R, {width}]", x.shape)
        x = x.to(self.dtype).contiguous()
        return x if x.data_ptr() % 16 == 0 else x.clone()
