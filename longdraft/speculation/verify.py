"""Verification: follow the tree while the target agrees.

The target's token is chosen once for each *node* (never once for each path: taking the best of several
independent tries for a shared prefix is what biases the published TokenSwift rule). The tokens on the
walk are therefore exactly those that plain decoding would have chosen, whatever the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from longdraft.tree import Tree


def walk(tree: Tree, choices: Sequence[int]) -> list[int]:
    """Nodes from the root down along the target's own `choices` [nodes]; the root is always there."""
    path = [0]
    while (child := tree.children.get((path[-1], choices[path[-1]]))) is not None:
        path.append(child)
    return path
