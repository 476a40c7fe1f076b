"""A draft is a tree of tokens with parents. Depths, children and paths are derived from these two here.

Node 0 is the root: the last token of the text. Every other node is a guess of the token that follows
its parent.

    root ── a ── b          tokens  (root, a, b, c)
         └─ c               parents (-1, 0, 1, 0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

_MOST_ADDED = 32  # tokens that `Tree.extended` adds


@dataclass(frozen=True)
class Tree:
    """A draft tree. Its nodes are ordered so that each parent comes before its children.

    tokens   token id of each node; the root's is the last token of the context
    parents  index of each node's parent; -1 for the root, smaller than the node's own index otherwise
    sources  name of the drafter that guessed each node ("" for the root), for statistics only
    rates    the drafter's estimate that each node is the target's token, if its parent is; None: it has none

    Duplicate siblings are allowed. Verification follows the first one; the others only cost time.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    sources: tuple[str, ...]
    rates: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) == len(self.sources) >= 1
        assert len(self.rates) in (0, len(self.tokens))
        assert self.parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(self.parents) if node)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """(node, token) -> the first child of that node with that token."""
        children: dict[tuple[int, int], int] = {}
        for node in range(1, len(self.tokens)):
            children.setdefault((self.parents[node], self.tokens[node]), node)
        return children

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def along(self, choices: Sequence[int]) -> list[int]:
        """The nodes from the root down along the choice [nodes] after each of them."""
        path = [0]
        while (child := self.children.get((path[-1], choices[path[-1]]))) is not None:
            path.append(child)
        return path

    def pruned(self, max_depth: int) -> Tree:
        """The tree without the nodes deeper than `max_depth`."""
        if max(self.depths) <= max_depth:
            return self
        return self.kept([depth <= max_depth for depth in self.depths])

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The nodes that these tokens lead to, from the root on, up to the first token that no guess has."""
        nodes = [0]
        for token in tokens:
            if (child := self.children.get((nodes[-1], token))) is None:
                break
            nodes.append(child)
        return nodes

    def extended(self, following: Callable[[int], Sequence[int]], max_depth: int, source: str) -> Tree:
        """The tree with a chain of tokens after each leaf, as far as `max_depth` and 32 tokens reach. They come last.

        following  leaf -> the tokens after it
        """
        tokens, parents, inner = list(self.tokens), list(self.parents), set(self.parents)
        for leaf in range(len(self)):
            if leaf not in inner:
                room = min(max_depth - self.depths[leaf], _MOST_ADDED + len(self) - len(tokens))
                parent = leaf
                for token in following(leaf)[: max(0, room)]:
                    parents.append(parent)
                    parent = len(tokens)
                    tokens.append(token)
        count = len(tokens) - len(self)
        rates = (*self.rates, *[None] * count) if self.rates else ()
        return Tree(tuple(tokens), tuple(parents), (*self.sources, *[source] * count), rates) if count else self

    def kept(self, wanted: Sequence[bool]) -> Tree:
        """The tree of the root and all wanted nodes whose ancestors are wanted too."""
        if all(wanted[1:]):
            return self
        return Trie.of(self, wanted).tree()


class Trie:
    """Builds a tree without duplicate siblings. A path that is added twice is stored once, with its first source."""

    def __init__(self, root: int) -> None:
        self._tokens = [root]
        self._parents = [-1]
        self._sources = [""]
        self._rates: list[float | None] = [None]
        self._child: dict[tuple[int, int], int] = {}

    @classmethod
    def of(cls, tree: Tree, wanted: Sequence[bool] | None = None) -> Trie:
        """The nodes of a tree, to which more can be added. wanted: False for nodes that are left out with all below
        them"""
        trie, moved = cls(tree.tokens[0]), {0: 0}
        for node in range(1, len(tree)):
            if (wanted is None or wanted[node]) and tree.parents[node] in moved:
                moved[node] = trie.add(moved[tree.parents[node]], tree.tokens[node], tree.sources[node],
                                       tree.rates[node] if tree.rates else None)
        return trie

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, parent: int, token: int, source: str, rate: float | None = None) -> int:
        """The child of `parent` with this token; created if it is missing. rate: as in `Tree`"""
        node = self._child.setdefault((parent, token), len(self._tokens))
        if node == len(self._tokens):
            self._tokens.append(token)
            self._parents.append(parent)
            self._sources.append(source)
            self._rates.append(rate)
        return node

    def graft(self, parent: int, path: Iterable[int], source: str) -> int:
        """Add a chain of tokens below `parent`; returns its last node."""
        for token in path:
            parent = self.add(parent, token, source)
        return parent

    def tree(self) -> Tree:
        rates = () if all(rate is None for rate in self._rates) else tuple(self._rates)
        return Tree(tuple(self._tokens), tuple(self._parents), tuple(self._sources), rates)


def root_only(token: int) -> Tree:
    """The tree of plain decoding, without guesses."""
    return Tree((token,), (-1,), ("",))


def chain(root: int, tokens: Iterable[int], source: str) -> Tree:
    """The tree of a single path: each token follows the one before."""
    return from_paths(root, [tuple(tokens)], source)


def from_paths(root: int, paths: Iterable[Sequence[int]], source: str) -> Tree:
    """The union of several paths that continue the root."""
    trie = Trie(root)
    for path in paths:
        trie.graft(0, path, source)
    return trie.tree()


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)
