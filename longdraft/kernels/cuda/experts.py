"""Mixtures of experts on the device: launches the kernels of `jit_experts`, without a wait for the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.cuda import jit_experts
from longdraft.kernels.cuda.few_bits import CudaFewBits
from longdraft.kernels.cuda.launch import ceil_div, chained, on_device, padded_size, require, triton_dtype
from longdraft.kernels.cuda.linear import CLAMPED, GELU, SILU, SUM_BLOCK, Activation, CudaLinear, PartialSums
from longdraft.kernels.switches import is_on
from longdraft.kernels.weights import Experts, Linear, Routing

GROUPS_INT4 = is_on("GROUPS_INT4")  # False: experts of 4 bits are multiplied one after another, with a wait of the host
_PAIRS = 64  # that are grouped at a time
_COLUMNS, _BLOCK = 64, 64  # output features of a program, and inputs that it multiplies at a time
_FEW_COLUMNS = 128  # of a program that adds the parts of all experts of a row: with more, its registers do not suffice


def route(logits: PartialSums, experts: Experts, like: Tensor) -> Routing:
    """See `Kernels.route`; the logits [R, E] are rounded to the dtype of `like`."""
    _, rows, num = logits.sums.shape
    chosen = torch.empty(rows, experts.chosen, dtype=torch.int64, device=like.device)
    weights = torch.empty(rows, experts.chosen, device=like.device)
    scales = experts.scales
    with on_device(like.device):
        jit_experts.route_kernel[(rows,)](
            *logits.arguments(), like, weights if scales is None else scales, chosen, weights, rows, NUM=num,
            PADDED=padded_size(num), CHOSEN=experts.chosen, PADDED_CHOSEN=padded_size(experts.chosen),
            NORMALISES=experts.normalises, HAS_SCALES=scales is not None, ROUNDS=experts.rounds, **logits.options(),
            num_warps=1, **chained(like.device))
    return Routing(chosen, weights)


class _Stack(NamedTuple):
    """One weight of every expert. table: see `jit_experts`; first: the first expert's, of whose form all are."""

    table: Tensor
    first: CudaLinear

    @classmethod
    def of(cls, weights: list[Linear]) -> _Stack | None:
        """None for weights of unlike forms, which no kernel reads together."""
        kinds = (CudaLinear, CudaFewBits) if GROUPS_INT4 else (CudaLinear,)
        linears = [weight for weight in weights if isinstance(weight, CudaLinear) and type(weight) in kinds]
        forms = {(type(each), each.out_features, each.in_features, each.scale is None, each.bias is None,
                  *each.options().values()) for each in linears}
        if len(linears) < len(weights) or len(forms) > 1 or any(each.is_ordered for each in linears
                                                                if isinstance(each, CudaFewBits)):
            return None
        rows = [[0 if part is None else part.data_ptr() for part in each.parts] for each in linears]
        return cls(torch.tensor(rows, dtype=torch.int64, device=linears[0].parts[0].device), linears[0])


class _Stacks(NamedTuple):
    """Both weights of the experts, which are held, because their addresses are."""

    experts: Experts
    gate_up: _Stack
    down: _Stack


class _Tiles(NamedTuple):
    """Pairs in tiles, see `jit_experts`. rows: of a tile."""

    rows: int
    members: Tensor
    experts: Tensor
    first_tile: Tensor
    counts: Tensor
    num_tiles: Tensor


class GroupedExperts:
    """Mixtures of experts for a few rows. tile: rows that one program multiplies."""

    def __init__(self, tile: int) -> None:
        self._tile = tile
        self._stacks: dict[int, _Stacks | None] = {}  # by identity of the experts

    def stacks_of(self, experts: Experts) -> _Stacks | None:
        """None for experts whose weights are not read together."""
        key = id(experts.mlps)
        if key not in self._stacks:
            gate_up, down = (_Stack.of(list(weights)) for weights in zip(*experts.mlps, strict=True))
            self._stacks[key] = None if gate_up is None or down is None else _Stacks(experts, gate_up, down)
        return self._stacks[key]

    def run(self, stacks: _Stacks, x: Tensor, routed: Tensor) -> Tensor:
        """The mixture's outputs for rows x [R, hidden]. routed: the rows that the router sees"""
        experts, router = stacks.experts, stacks.experts.router
        assert isinstance(router, CudaLinear)
        routing = route(router.partial_sums(routed, self._tile), experts, routed)
        (rows, chosen), width = routing.experts.shape, stacks.down.first.out_features
        require(rows == len(x), f"{len(x)} rows of choices", rows)
        activation = Activation(CLAMPED, *experts.clamp) if experts.clamp else GELU if experts.has_gelu else SILU
        with on_device(x.device):
            tiles = self._tiles(stacks, routing.experts)
            inner = self._gated(stacks.gate_up, x, tiles, routing.experts, activation)
            given = self._products(stacks.down, inner, tiles, 1)
            # A product of one part has its bias already.
            has_bias = isinstance(stacks.down.first, CudaFewBits) and stacks.down.first.bias is not None
            shared_expert = self._shared_expert(x, experts)
            shared, gate = shared_expert or (PartialSums(given, None, None),) * 2
            options = shared.options("SHARED_PARTS", "SHARED") | gate.options("GATE_PARTS", "GATE")
            out = torch.empty_like(x)
            block = SUM_BLOCK if len(given) == 1 else _FEW_COLUMNS
            jit_experts.combine_kernel[(rows, ceil_div(width, block))](
                given, stacks.down.table, routing.experts, routing.weights, *shared.arguments(), *gate.arguments(), out,
                rows, WIDTH=width, CHOSEN=chosen, PADDED_CHOSEN=padded_size(chosen), BLOCK=block, PARTS=len(given),
                HAS_BIAS=has_bias, **options | ({} if shared_expert else {"SHARED_PARTS": 0}), **chained(x.device))
        return out

    def _shared_expert(self, x: Tensor, experts: Experts) -> tuple[PartialSums, PartialSums] | None:
        """The products [R, hidden] and [R, 1] of the shared expert and of its gate; None: there is none."""
        if experts.shared is None or experts.shared_gate is None:
            return None
        (gate_up, down), gate = experts.shared, experts.shared_gate
        assert isinstance(gate_up, CudaLinear) and isinstance(down, CudaLinear) and isinstance(gate, CudaLinear)
        inner = x.new_empty(len(x), down.in_features)
        gate_up.multiply_gated(x, self._tile, inner)
        return down.partial_sums(inner, self._tile), gate.partial_sums(x, self._tile)

    def _tiles(self, stacks: _Stacks, chosen: Tensor) -> _Tiles:
        """The pairs of rows with the experts [R, k] that they chose."""
        num, pairs, device = len(stacks.experts.mlps), chosen.numel(), chosen.device
        tile = min(stack.first.rows_of(self._tile) for stack in stacks[1:])
        most_tiles = min(pairs, num + pairs // tile)
        sizes = most_tiles * tile, most_tiles, num, num, 1
        tiles = _Tiles(tile, *(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))
        jit_experts.group_kernel[(1,)](chosen, *tiles[1:], pairs, NUM=num, PADDED=padded_size(num), ROWS=tile,
                                       BLOCK=_PAIRS, num_warps=8, **chained(device))
        return tiles

    def _gated(self, stack: _Stack, x: Tensor, tiles: _Tiles, chosen: Tensor, activation: Activation) -> Tensor:
        """The activation of each pair: [pairs, W], gate and up being the halves of its product with the weight."""
        pairs, width, (kind, *numbers) = chosen.numel(), stack.first.out_features // 2, activation
        out = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
        if not isinstance(stack.first, CudaFewBits):
            self._multiply(stack, x, tiles, chosen.shape[1], out, activation)
            return out
        parts = self._products(stack, x, tiles, chosen.shape[1])
        jit_experts.gated_pairs_kernel[(pairs, ceil_div(width, SUM_BLOCK))](
            parts, stack.table, chosen, out, pairs, *numbers, WIDTH=width, BLOCK=SUM_BLOCK, ACTIVATION=kind,
            PARTS=len(parts), HAS_BIAS=stack.first.bias is not None, **chained(x.device))
        return out

    def _products(self, stack: _Stack, x: Tensor, tiles: _Tiles, chosen: int) -> Tensor:
        """The parts of each pair's product [P, pairs, N] float32, of x [pairs / chosen, K]."""
        (table, first), pairs = stack, len(x) * chosen
        splits = first.splits if isinstance(first, CudaFewBits) else 1
        parts = torch.empty(splits, pairs, first.out_features, device=x.device)
        if not isinstance(first, CudaFewBits):
            self._multiply(stack, x, tiles, chosen, parts[0], None)
            return parts
        columns, _, stages, _ = first.tiling
        jit_experts.grouped_few_bits_kernel[(len(tiles.experts), ceil_div(first.out_features, columns), splits)](
            x, table, *tiles[1:], parts, pairs, OUT=first.out_features, INNER=first.in_features, BLOCKS=first.blocks,
            CHOSEN=chosen, ROWS=tiles.rows, COLUMNS=columns, SPLITS=splits, STAGES=stages, num_warps=4,
            **first.options(), **chained(x.device))
        return parts

    def _multiply(self, stack: _Stack, x: Tensor, tiles: _Tiles, chosen: int, out: Tensor,
                  activation: Activation | None) -> None:
        """The products of all tiles in one part: out [pairs, W]."""
        (table, first), (kind, *numbers) = stack, activation or SILU
        jit_experts.grouped_kernel[(len(tiles.experts), ceil_div(out.shape[1], _COLUMNS))](
            x, table, *tiles[1:], out, *numbers, WIDTH=out.shape[1], INNER=first.in_features, CHOSEN=chosen,
            ROWS=tiles.rows, COLUMNS=_COLUMNS, BLOCK=_BLOCK if x.itemsize == 2 else _BLOCK // 2,
            ELEMENT=triton_dtype(first.weight), HAS_SCALE=first.scale is not None, HAS_BIAS=first.bias is not None,
            HAS_GATE=activation is not None, ACTIVATION=kind, num_warps=4, num_stages=3, **chained(x.device))
