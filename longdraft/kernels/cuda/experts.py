"""Mixtures of experts on the device: launches the kernels of `jit_experts`, without a wait for the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.cuda import jit_experts
from longdraft.kernels.cuda.launch import ceil_div, chained, on_device, padded_size, require, triton_dtype
from longdraft.kernels.cuda.linear import CLAMPED, GELU, SILU, SUM_BLOCK, Activation, CudaLinear
from longdraft.kernels.experts import Routing
from longdraft.kernels.weights import Experts, Linear

_PAIRS = 64  # that are grouped at a time
_COLUMNS, _BLOCK = 64, 64  # output features of a program, and inputs that it multiplies at a time


def route(logits: Tensor, experts: Experts) -> Routing:
    """See `Kernels.route`; logits [R, E] are contiguous."""
    rows, num = logits.shape
    chosen = torch.empty(rows, experts.chosen, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, experts.chosen, device=logits.device)
    scales = experts.scales
    with on_device(logits.device):
        jit_experts.route_kernel[(rows,)](
            logits, weights if scales is None else scales, chosen, weights, NUM=num, PADDED=padded_size(num),
            CHOSEN=experts.chosen, PADDED_CHOSEN=padded_size(experts.chosen), NORMALISES=experts.normalises,
            HAS_SCALES=scales is not None, ROUNDS=experts.rounds, num_warps=1, **chained(logits.device))
    return Routing(chosen, weights)


class _Stack(NamedTuple):
    """One weight of every expert. table: see `grouped_kernel`; first: the first expert's, of whose form all are."""

    table: Tensor
    first: CudaLinear

    @classmethod
    def of(cls, weights: list[Linear]) -> _Stack | None:
        """None for weights that `grouped_kernel` does not read: those of 4 bits, or of unlike forms."""
        linears = [weight for weight in weights if type(weight) is CudaLinear]
        if len(linears) < len(weights) or len({(each.weight.shape, each.scale is None, each.bias is None)
                                               for each in linears}) > 1:
            return None
        rows = [[0 if part is None else part.data_ptr() for part in (each.weight, each.scale, each.bias)]
                for each in linears]
        return cls(torch.tensor(rows, dtype=torch.int64, device=linears[0].weight.device), linears[0])


class _Stacks(NamedTuple):
    """Both weights of the experts, which are held, because their addresses are."""

    experts: Experts
    gate_up: _Stack
    down: _Stack


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

    def run(self, stacks: _Stacks, x: Tensor, routing: Routing, shared: tuple[Tensor, Tensor] | None) -> Tensor:
        """The mixture's outputs for rows x [R, hidden].

        shared  the shared expert's outputs [R, hidden] float32, and their weights [R, 1]
        """
        experts, device, num = stacks.experts, x.device, len(stacks.experts.mlps)
        rows, chosen = routing.experts.shape
        pairs, width = rows * chosen, experts.mlps[0].down.out_features
        require(rows == len(x), f"{len(x)} rows of choices", rows)
        most_tiles = min(pairs, num + pairs // self._tile)
        members = torch.empty(most_tiles * self._tile, dtype=torch.int32, device=device)
        tile_experts = torch.empty(most_tiles, dtype=torch.int32, device=device)
        first_tile, counts = (torch.empty(num, dtype=torch.int32, device=device) for _ in range(2))
        num_tiles = torch.empty(1, dtype=torch.int32, device=device)
        tiles = members, tile_experts, first_tile, counts, num_tiles
        inner = torch.empty(pairs, stacks.gate_up.first.out_features // 2, dtype=x.dtype, device=device)
        given = torch.empty(pairs, width, device=device)
        out = torch.empty_like(x)
        of_shared, weight = shared or (given, given)
        activation = Activation(CLAMPED, *experts.clamp) if experts.clamp else GELU if experts.has_gelu else SILU
        with on_device(device):
            jit_experts.group_kernel[(1,)](routing.experts, *tiles, pairs, NUM=num, PADDED=padded_size(num),
                                           ROWS=self._tile, BLOCK=_PAIRS, num_warps=8, **chained(device))
            self._multiply(stacks.gate_up, x, tiles, chosen, inner, activation)
            self._multiply(stacks.down, inner, tiles, 1, given, None)
            jit_experts.combine_kernel[(rows, ceil_div(width, SUM_BLOCK))](
                given, routing.experts, routing.weights, of_shared, weight, out, WIDTH=width, CHOSEN=chosen,
                PADDED_CHOSEN=padded_size(chosen), BLOCK=SUM_BLOCK, HAS_SHARED=shared is not None, **chained(device))
        return out

    def _multiply(self, stack: _Stack, x: Tensor, tiles: tuple[Tensor, ...], chosen: int, out: Tensor,
                  activation: Activation | None) -> None:
        """The products of all tiles: out [pairs, W]."""
        (table, first), (kind, *numbers) = stack, activation or SILU
        jit_experts.grouped_kernel[(len(tiles[1]), ceil_div(out.shape[1], _COLUMNS))](
            x, table, *tiles, out, *numbers, WIDTH=out.shape[1], INNER=first.in_features, CHOSEN=chosen,
            ROWS=self._tile, COLUMNS=_COLUMNS, BLOCK=_BLOCK if x.itemsize == 2 else _BLOCK // 2,
            ELEMENT=triton_dtype(first.weight), HAS_SCALE=first.scale is not None, HAS_BIAS=first.bias is not None,
            HAS_GATE=activation is not None, ACTIVATION=kind, num_warps=4, num_stages=3, **chained(x.device))
