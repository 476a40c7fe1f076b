"""Which positions a partial cache holds: pure functions from weights to indices."""

from __future__ import annotations

import torch
from torch import Tensor


def positions(weights: Tensor, budget: int, sinks: int, recent: int) -> Tensor:
    """Positions [Hkv, min(budget, n)] to hold of n, ascending, from weights [Hkv, n].

    The first `sinks`, the last `recent`, and between them the heaviest of each KV head. If n fits the
    budget, all.

        [ sinks | ............ the heaviest (budget - sinks - recent) ............ | recent ]
    """
    num_kv_heads, length = weights.shape
    if length <= budget:
        return torch.arange(length, device=weights.device).expand(num_kv_heads, -1)
    heavy = budget - sinks - recent
    assert heavy >= 0
    middle = weights[:, sinks : length - recent]
    chosen = middle.topk(heavy, dim=-1).indices + sinks
    ends = torch.cat([torch.arange(sinks), torch.arange(length - recent, length)]).to(weights.device)
    return torch.cat([chosen, ends.expand(num_kv_heads, -1)], -1).sort(-1).values
