"""Verification: follow the drafted tree as long as the target chooses the drafted tokens.

The target's token is chosen once for each *node* that the text reaches. It is never chosen once for each path: taking
the best of several independent tries for a shared prefix is what biases the published TokenSwift rule. The accepted
tokens are therefore exactly those that plain decoding chooses, whatever the tree.
"""

from __future__ import annotations

from longdraft.cache.full import FullCache
from longdraft.model.transformer import Forward
from longdraft.request.context import Context
from longdraft.request.tree import Tree
from longdraft.sampling.sampler import Sampler


def verify(sampler: Sampler, result: Forward, tree: Tree, context: Context,
           cache: FullCache) -> tuple[list[int], list[int]]:
    """The accepted nodes, and the token that the target chooses after each of them.

    result  the forward of all nodes

    A device sampler finds the path on the device, and the cache keeps its rows there before the path is on the host. It
    may have done so with the forward, for several texts (`Forward.walk`).
    """
    if result.walk is not None:
        return result.walk
    if sampler.on_device:
        given = None if result.source is None else (result.source, result.hidden)
        return sampler.on_device.walk(given or result.logits, tree, context, cache.place)
    choices = sampler.choose(result.logits, tree, context, every=False)
    path = tree.along(choices)
    return path, [choices[node] for node in path]
