"""Is a row of a tree, to the bit, what plain decoding computes? Asked of the device at hand, once for each model.

It follows from how the kernels are written, as long as the compiler and the device keep to it. Three forwards of one
layer see whether they do; where they do not, the engine reports exactness "distribution".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longdraft.kernels.interface import LayersKV

if TYPE_CHECKING:
    from longdraft.kernels.cuda.decoder import CudaDecoder

_LENGTH = 1000  # rows of the prefix: the end of a split lies among the tree's positions behind them
_ROWS = 70
_DEPTH = 30


def is_row_invariant(decoder: CudaDecoder, length: int = _LENGTH, rows: int = _ROWS, depth: int = _DEPTH) -> bool:
    """Whether rows of a tree behind `length` positions equal those computed alone, also behind a committed path.

    The tree of `rows` is a chain of `depth` and twigs on it.
    """
    kernels = decoder.kernels
    _, kv_heads, dim, *_ = decoder.geometry
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kernels.device, kernels.dtype)

    stores = [kernels.new_store(kv_heads, dim) for _ in decoder.layers]
    for store in stores:
        store.reserve(length + rows)
        store.write(0, random(length, kv_heads, dim), random(length, kv_heads, dim))
    x, angles = random(rows, decoder.hidden), random(rows, dim // 2).float()
    parents = torch.tensor([*range(-1, depth - 1), *(row % depth for row in range(depth, rows))], dtype=torch.int32)

    def run(chosen: list[int], at: int, parents: Tensor) -> tuple[Tensor, LayersKV]:
        shape = (len(stores), len(chosen), kv_heads, dim)
        k, v = (torch.empty(shape, dtype=kernels.dtype, device=kernels.device) for _ in range(2))
        kv = LayersKV(stores, at, k, v)
        return decoder.forward(x[chosen], angles[chosen].cos(), angles[chosen].sin(), [kv], parents)[0], kv

    alone = torch.tensor([-1], dtype=torch.int32)
    tree, kv = run(list(range(rows)), length, parents)
    first, _ = run([0], length, alone)
    kernels.keep(kv, range(depth - 1))
    last, _ = run([depth - 1], length + depth - 1, alone)
    return torch.equal(tree[:1], first) and torch.equal(tree[depth - 1 : depth], last)
