"""Verification: follow the tree while the target agrees.

The target's token is chosen once for each *node* (never once for each path: taking the best of several
independent tries for a shared prefix is what biases the published TokenSwift rule). The tokens on the
walk are therefore exactly those that plain decoding would have chosen, whatever the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longdraft.cache.full import KVCache
from longdraft.core import Context
from longdraft.sampling.sampler import Sampler
from longdraft.tree import Tree


def walk(tree: Tree, choices: Sequence[int]) -> list[int]:
    """Nodes from the root down along the target's own `choices` [nodes]; the root is always there."""
    path = [0]
    while (child := tree.children.get((path[-1], choices[path[-1]]))) is not None:
        path.append(child)
    return path


def decide(sampler: Sampler, logits: Tensor, tree: Tree, context: Context,
           cache: KVCache) -> tuple[list[int], list[int]]:
    """Nodes of the walk, and the target's choice behind each of them, from logits [nodes, V] (not to be read again).

    On a device that can, the walk is done there, and the cache keeps its rows before the host knows which.
    """
    if sampler.on_device:
        return sampler.on_device.walk(logits, tree, context, cache.place)
    choices = sampler.choose(logits, tree, context)
    path = walk(tree, choices)
    return path, [choices[node] for node in path]
