"""A test on the device at hand: does a row of a tree get the same bits as in plain decoding?

The kernels are row-invariant by construction, as long as the compiler and the device execute them as written. Three
forwards of one layer check that. Where the check fails, the engine reports the exactness "distribution".
"""

from __future__ import annotations

import torch
from torch import Tensor

from longdraft.kernels.interface import Decoder, Geometry, Kernels, LayersKV

_PREFIX_LENGTH = 1000  # positions; a split of attention ends among the tree's positions that follow
_TREE_ROWS = 70
_CHAIN_LENGTH = 30


def is_row_invariant(kernels: Kernels, decoder: Decoder, geometry: Geometry, hidden: int, length: int = _PREFIX_LENGTH,
                     rows: int = _TREE_ROWS, depth: int = _CHAIN_LENGTH) -> bool:
    """Whether rows of a tree equal the rows computed one at a time, to the bit.

    decoder  one layer of hidden size `hidden`, made by `kernels`
    length   committed positions before the tree
    rows     rows of the tree: a chain of `depth` rows, and side branches

    The first row of the tree is compared with plain decoding at its position. The last row of the chain is compared
    with plain decoding after the rows before it were committed.
    """
    kv_heads, dim = geometry.num_kv_heads, geometry.head_dim
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kernels.device, kernels.dtype)

    store = kernels.new_store(kv_heads, dim)
    store.reserve(length + rows)
    store.write(0, random(length, kv_heads, dim), random(length, kv_heads, dim))
    x, angles = random(rows, hidden), random(rows, dim // 2).float()
    parents = torch.tensor([*range(-1, depth - 1), *(row % depth for row in range(depth, rows))], dtype=torch.int32)

    def run(chosen: list[int], start: int, parents: Tensor) -> tuple[Tensor, LayersKV]:
        shape = (1, len(chosen), kv_heads, dim)
        k, v = (torch.empty(shape, dtype=kernels.dtype, device=kernels.device) for _ in range(2))
        kv = LayersKV([store], start, k, v)
        return decoder.forward(x[chosen], angles[chosen].cos(), angles[chosen].sin(), [kv], parents)[0], kv

    no_parent = torch.tensor([-1], dtype=torch.int32)
    tree, kv = run(list(range(rows)), length, parents)
    first, _ = run([0], length, no_parent)
    kernels.keep(kv, range(depth - 1))
    last, _ = run([depth - 1], length + depth - 1, no_parent)
    return torch.equal(tree[:1], first) and torch.equal(tree[depth - 1 : depth], last)
