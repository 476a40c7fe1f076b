"""A test on the device at hand: does a row of a tree get the same bits as in plain decoding?

The kernels are row-invariant by construction, as long as the compiler and the device execute them as written. Forwards
of one layer check that. Where the check fails, the engine reports the exactness "distribution".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.cuda.delta import Paths, PlacedStates, addresses
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.delta import DeltaState, DeltaWeights
from longdraft.kernels.interface import Decoder, Kernels, LayersKV
from longdraft.kernels.weights import Geometry, LayerWeights

_PREFIX_LENGTHS = (1000, 9000)  # positions; after 8,192 the splits of attention are longer
_TREE_ROWS = 16
_CHAIN_LENGTH = 9
_STAGES = ("the product of queries, keys and values, or the rotation", "attention",
           "the products after attention, or a norm")


class _Rows(NamedTuple):
    """What a forward computed for some rows, in the order of the layer; the axis of rows is the first."""

    projected: tuple[Tensor, ...]
    attended: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]

    def stage_that_differs(self, rows: list[int], other: _Rows) -> str | None:
        """The first stage in which `rows` of these differ from all rows of `other`."""
        for stage, ours, theirs in zip(_STAGES, self, other, strict=True):
            if any(not torch.equal(a[rows], b) for a, b in zip(ours, theirs, strict=True)):
                return stage
        return None


def is_row_invariant(kernels: Kernels, decoder: Decoder, layer: LayerWeights, geometry: Geometry) -> bool:
    """Whether rows of a tree equal the rows computed one at a time, to the bit, in a decoder of this layer."""
    if layer.heads is not None:
        geometry = geometry._replace(num_kv_heads=layer.heads.num_kv, head_dim=layer.heads.dim)
    return not any(first_difference(kernels, decoder, geometry, len(layer.attention_norm), length, _TREE_ROWS,
                                    _CHAIN_LENGTH, has_remainder)
                   for length in _PREFIX_LENGTHS for has_remainder in (False, True))


def delta_is_row_invariant(ops: CudaOperations, weights: DeltaWeights) -> bool:
    """Whether the delta rule of a step gives the rows of a tree the bits of rows that follow one another."""
    shape, depth = weights.shape, _CHAIN_LENGTH
    generator = torch.Generator(ops.device).manual_seed(0)

    def random(width: int) -> Tensor:
        return torch.randn(_TREE_ROWS, width, generator=generator, device=ops.device)

    mixed, z, gates = random(shape.channels).to(ops.dtype), random(shape.values).to(ops.dtype), random(
        2 * shape.value_heads)

    def run(rows: list[int], parents: list[int], before: DeltaState) -> tuple[Tensor, DeltaState]:
        after, count = ops.deltas.new_state(weights), len(rows)
        numbers = torch.tensor([count, *addresses([weights], [before], [after])[0]], device=ops.device)
        placed = PlacedStates(numbers[1:].clone()[None], numbers[:1], numbers[:1])
        paths = Paths.of_tree(torch.tensor(parents, dtype=torch.int32), ops.device)
        return ops.deltas.run_placed(weights, mixed[rows], gates[rows], z[rows], paths, placed), after

    parents = _tree(_TREE_ROWS, depth)
    _, state = run(list(range(_TREE_ROWS)), list(range(-1, _TREE_ROWS - 1)), ops.deltas.new_state(weights))
    tree, last = run(list(range(_TREE_ROWS)), parents, state)
    behind = {-1: state}
    for row, parent in enumerate(parents):
        out, behind[row] = run([row], [-1], behind[parent])
        if not torch.equal(out[0], tree[row]):
            return False
    return all(torch.equal(*pair) for pair in zip(last, behind[_TREE_ROWS - 1], strict=True))


def _tree(rows: int, depth: int) -> list[int]:
    """Parents of a chain of `depth` rows, and of side branches after its rows."""
    return [*range(-1, depth - 1), *((row - depth) % depth for row in range(depth, rows))]


def first_difference(kernels: Kernels, decoder: Decoder, geometry: Geometry, hidden: int, length: int, rows: int,
                     depth: int, has_remainder: bool = False) -> str | None:
    """The first operation of a layer whose result for a row of a tree differs from plain decoding; None: no row does.

    decoder  one layer of hidden size `hidden`, made by `kernels`
    length   committed positions before the tree
    rows     rows of the tree: a chain of `depth` rows, and side branches after its rows

    Every row of the tree is compared with plain decoding after its own path. Then the first 1, 2, 4, ... rows alone
    are compared with the same rows of the tree, because other numbers of rows run as other launches.
    """
    kv_heads, dim = geometry.num_kv_heads, geometry.head_dim
    generator = torch.Generator(kernels.device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=kernels.device).to(kernels.dtype)

    store = kernels.new_store(kv_heads, dim)
    store.reserve(length + rows)
    store.write(0, random(length, kv_heads, dim), random(length, kv_heads, dim))
    x, angles = random(rows, hidden), random(rows, geometry.num_ropes * dim // 2).float()
    size = (1, geometry.num_heads, dim + 1, dim + 1)
    remainder = random(*size).float() / 3 if has_remainder else None
    parents = _tree(rows, depth)

    def run(chosen: list[int], start: int, parents: list[int]) -> tuple[_Rows, LayersKV]:
        shape = (1, len(chosen), kv_heads, dim)
        k, v = (torch.empty(shape, dtype=kernels.dtype, device=kernels.device) for _ in range(2))
        kv = LayersKV([store], start, k, v, remainder)
        out, attended = decoder.forward(x[chosen], angles[chosen].cos(), angles[chosen].sin(), [kv],
                                        torch.tensor(parents, dtype=torch.int32))
        return _Rows((k[0], v[0], attended.queries[0], attended.content[0]), (attended.output[0], attended.lse[0]),
                     (out,)), kv

    tree, kv = run(list(range(rows)), length, parents)
    count = 1
    while count < rows:
        if found := tree.stage_that_differs(list(range(count)), run(list(range(count)), length, parents[:count])[0]):
            return f"{found}: {count} rows of {rows}"
        count *= 2
    for place in range(depth + 1):
        branches = [row for row in range(depth, rows) if parents[row] == place - 1]
        for row in [place, *branches] if place < depth else branches:
            if found := tree.stage_that_differs([row], run([row], length + place, [-1])[0]):
                return f"{found}: row {row} of {rows}"
        if place < depth:
            kernels.keep(kv._replace(length=length + place), [place])
    return None
