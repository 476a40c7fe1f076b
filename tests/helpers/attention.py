"""Random rows and trees for the kernels' tests, and attention computed by its formula."""

from __future__ import annotations

import math
import random

import torch


def random_rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def obvious_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One query [H, D] over keys and values [n, Hkv, D] in double precision."""
    group = q.shape[0] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    weights = torch.einsum("hd,nhd->hn", q.double(), k).div(math.sqrt(q.shape[1])).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, v).float()


def random_parents(rows: int, seed: int) -> torch.Tensor:
    pick = random.Random(seed)
    return parents_of([pick.randrange(-1, row) for row in range(rows)])


def parents_of(parents: list[int]) -> torch.Tensor:
    return torch.tensor(parents, dtype=torch.int32)


def path_of(parents: list[int], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]
