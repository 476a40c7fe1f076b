"""Verification: follow the drafted tree as long as the target chooses the drafted tokens.

The target's token is chosen once for each *node*. It is never chosen once for each path: taking the best of several
independent tries for a shared prefix is what biases the published TokenSwift rule. The accepted tokens are therefore
exactly those that plain decoding chooses, whatever the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longdraft.cache.full import KVCache
from longdraft.core import Context
from longdraft.sampling.sampler import Sampler
from longdraft.tree import Tree


def accepted_path(tree: Tree, choices: Sequence[int]) -> list[int]:
    """Nodes from the root down along the target's own `choices` [nodes]; the root is always accepted."""
    path = [0]
    while (child := tree.children.get((path[-1], choices[path[-1]]))) is not None:
        path.append(child)
    return path


def verify(sampler: Sampler, logits: Tensor, tree: Tree, context: Context,
           cache: KVCache) -> tuple[list[int], list[int]]:
    """The accepted nodes, and the token that the target chooses behind each of them.

    logits  [nodes, V] float32; a device sampler overwrites them

    A device sampler finds the path on the device, and the cache keeps its rows there before the host knows the path.
    """
    if sampler.on_device:
        return sampler.on_device.walk(logits, tree, context, cache.place)
    choices = sampler.choose(logits, tree, context)
    path = accepted_path(tree, choices)
    return path, [choices[node] for node in path]
