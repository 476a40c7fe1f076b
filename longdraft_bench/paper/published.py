"""TokenSwift's drafting as its published code does it, for the benchmarks only: `version = "published"` of a system.

    root ── t1 ─┬─ a ── ...        one forward on the partial cache, then the heads: a full tree of ranks (1,3,3,3)
         │      └─ b ── ...
         ├─ t1 ── g1 ── g2 ── g3   each n-gram is a chain of its own, which repeats the first guess
         └─ t1 ── h1 ── h2 ── h3

It differs from our `tokenswift` (longdraft/drafters/self_draft.py) in what the comparison of paper and code found:

    tree        the n-grams' chains are not merged with the tree, so that paths share prefixes in several copies
    n-grams     an n-gram is counted when it has left the penalty window, with and without a penalty; equal counts
                displace each other in the ranking (`PublishedTable`)
    cache       rows are ranked by raw products q.k, summed over the query heads of a KV head, with one query; new rows
                overwrite the lowest ones; when all but the sinks are overwritten, the next verification ranks the rows
                of the text before it again; none is protected for being recent (`PublishedCache`)
    query       of a new ranking: the last node of the last draft tree, accepted or not

With `cache = "full"` and Medusa's independent heads this is Medusa*, as far as the paper tells: its cost for each step
is that of the paper's ablation "Full".
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longdraft import drafters
from longdraft.cache.full import FullCache
from longdraft.cache.partial import CacheMode, PartialBudget, PartialCache
from longdraft.cache.row_selection import Selection
from longdraft.drafters.chain import SelfDraftModel
from longdraft.drafters.matches import DelayedTokens
from longdraft.drafters.medusa import HEADS
from longdraft.drafters.ngram import NGRAM
from longdraft.drafters.options import DrafterOptions, parse_fields
from longdraft.drafters.self_draft import SELF, TokenSwiftOptions
from longdraft.engine.loaded_model import DrafterChoice
from longdraft.errors import UsageError, check
from longdraft.kernels import AttentionRows, Kernels, KVStore
from longdraft.model.transformer import Transformer
from longdraft.request.context import Context
from longdraft.request.tree import Tree
from longdraft.speculation.drafter import Accepted, Drafter, Verified
from longdraft.speculation.routine import Routine

DRAFTER = "tokenswift"  # the only drafter that has a published version
_ORDER = 4  # tokens of an n-gram
_KEYS_READ = 4096  # positions whose keys are read together; bounds the memory


@dataclass(frozen=True)
class PublishedOptions(DrafterOptions):
    """Options of TokenSwift's published drafting.

    tree           guesses after each node, depth by depth; at most one depth more than there are heads
    continuations  n-grams after each first guess (k of the paper)
    budget         rows of the partial cache for each layer and KV head
    sinks          first positions of the text, always held
    cache          dynamic | static | full: the paper's table 5
    """

    tree: tuple[int, ...] = (1, 3, 3, 3)
    continuations: int = 20
    budget: int = 4096
    sinks: int = 16
    cache: CacheMode = "dynamic"

    def __post_init__(self) -> None:
        TokenSwiftOptions(tree=self.tree, cache=self.cache)  # checks both
        check(self.continuations >= 0, "continuations", self.continuations, "0 or more")
        check(self.sinks >= 0, "sinks", self.sinks, "0 or more")
        check(self.budget > self.sinks + 1, "budget", self.budget, f"more than sinks + 1 ({self.sinks + 1})")

    def partial_rows(self, model: Transformer) -> int:
        return self.budget


class PublishedChoice(DrafterChoice):
    """The choice of the published drafting, in the place of `tokenswift`."""

    @classmethod
    def parse(cls, name: str, options: Mapping[str, Any] | None) -> PublishedChoice:
        check(name == DRAFTER, "drafter", name, f"{DRAFTER}, with version published")
        return cls(name, parse_fields(name, PublishedOptions, options or {}))

    def build(self, resources: drafters.Resources) -> Drafter:
        assert isinstance(self.options, PublishedOptions)
        return PublishedDrafter(self.options, resources)


class PublishedTable:
    """The n-grams of a text in the ranking of the published code.

    Its entries are sorted by their counts, those seen last first, and compare equal if their counts are equal. So an
    n-gram that is counted again removes the *oldest* entry of its old count, which may be another n-gram. That one is
    lost, and the old entry of the first stays: insert A, B, B, and the list is B, B.
    """

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_ORDER)
        self._counts: defaultdict[int, defaultdict[tuple[int, ...], int]] = defaultdict(lambda: defaultdict(int))
        # first token -> count -> entries, the oldest first
        self._ranked: defaultdict[int, defaultdict[int, deque[tuple[int, ...]]]] = defaultdict(
            lambda: defaultdict(deque))

    def extend(self, tokens: Iterable[int]) -> None:
        """Read the next tokens of the text."""
        for token in tokens:
            self._recent.append(token)
            if len(self._recent) == _ORDER:
                first, *rest = self._recent
                continuation, ranked = tuple(rest), self._ranked[first]
                count = self._counts[first][continuation]
                if count:
                    ranked[count].popleft()
                    if not ranked[count]:
                        del ranked[count]
                ranked[count + 1].append(continuation)
                self._counts[first][continuation] = count + 1

    def continuations(self, token: int, num: int) -> list[tuple[int, ...]]:
        """The first `num` entries after `token`; they may contain an n-gram twice."""
        found: list[tuple[int, ...]] = []
        if token not in self._ranked:
            return found
        ranked = self._ranked[token]
        for count in sorted(ranked, reverse=True):
            found += list(reversed(ranked[count]))[: num - len(found)]
            if len(found) == num:
                break
        return found


def raw_products(budget: int, sinks: int) -> Selection:
    """Rank positions by q.k of the last query, without scale and softmax, summed over the query heads of a KV head.

    Returns the sinks, then the positions of the highest sums, *highest first*.
    """
    def select(layer: int, store: KVStore, length: int, queries: Tensor) -> Tensor:
        grouped = queries[-1].float().reshape(store.shape[0], -1, queries.shape[-1])
        scores = _summed_products(store, length, grouped.sum(1))
        first = torch.arange(min(sinks, length), device=scores.device).expand(len(scores), -1)
        best = scores[:, sinks:].topk(min(budget, length) - first.shape[1], dim=-1).indices + sinks
        return torch.cat([first, best], -1)
    return select


def _summed_products(store: KVStore, length: int, query: Tensor) -> Tensor:
    """query [Hkv, D], summed over the query heads of each KV head, times the keys at [0, length): [Hkv, length]."""
    parts = []
    for start in range(0, length, _KEYS_READ):
        at = torch.arange(start, min(start + _KEYS_READ, length), device=query.device)
        keys, _ = store.read(at.expand(len(query), -1))
        parts.append(torch.einsum("hd,hnd->hn", query, keys.to(query.device).float()))
    return torch.cat(parts, -1)


class PublishedCache(PartialCache):
    """The partial cache of the published code: always `budget` rows, once the text is that long.

        [ sinks | ranked rows, highest first ..... | new rows, the latest first ]
                                                   <- grows until only the sinks are left; then rows are ranked again
    """

    def __init__(self, full: FullCache, kernels: Kernels, options: PublishedOptions) -> None:
        if any(full.windows):
            raise UsageError("the published TokenSwift has no sliding windows, and this model's layers have; use "
                             "another version of the system")
        super().__init__(full, kernels, PartialBudget(options.budget, options.sinks, 1, 1), options.cache, False,
                         raw_products(options.budget, options.sinks))
        self._num_since = 0  # tokens since rows were ranked

    def _append_or_select(self, attention: AttentionRows | None) -> None:
        is_first, is_due = not self.num_selections, self._num_since > self._size.budget - self._size.sinks
        if attention is not None and (is_first or is_due):
            if is_first:  # the prompt is ranked; later, the verification's own tokens follow the ranked rows
                self._num_seen = self._full.length
            self._select(attention.last(1), self._num_seen)
            self._num_since = 0
        new = range(self._num_seen, self._full.length)
        self._num_since += len(new)
        self._num_seen = self._full.length
        free = self._size.budget - self._rows.length
        if len(new[:free]):
            self._copy(new[:free])
        if len(new[free:]):
            self._overwrite(torch.tensor(new[free:]))

    def _overwrite(self, positions: Tensor) -> None:
        """Put new rows in the place of the lowest ones; the row of the n-th new token is the n-th from the end."""
        budget, sinks = self._size.budget, self._size.sinks
        start = max(sinks, budget - self._num_since)
        if self._num_since > budget - sinks:  # they no longer fit after those of earlier steps
            positions = torch.arange(self._full.length - (budget - sinks), self._full.length)
        chosen = positions.flip(0).expand(len(self._rows.stores), self._rows.shapes[0][0], -1)
        self._kernels.copy(self._full.stores, self._rows.stores, chosen, start)


class PublishedDrafter:
    """TokenSwift's drafter as published. See the top of this file."""

    def __init__(self, options: PublishedOptions, resources: drafters.Resources) -> None:
        model, heads = resources.model, resources.heads
        num_heads = len(heads) if heads else 0
        if len(options.tree) > num_heads + 1:
            raise UsageError(f"tree {list(options.tree)} is {len(options.tree)} deep; allowed: at most "
                             f"{num_heads + 1} with {num_heads} heads")
        self._options, self._sampler, self._heads = options, resources.sampler, heads
        self.partial = PublishedCache(resources.cache, model.kernels, options)
        self._draft_model = SelfDraftModel(model, self.partial, resources.clock)
        self._table = PublishedTable()
        self._tokens = DelayedTokens(resources.params.penalty_window, resources.params)

    @property
    def nbytes(self) -> int:
        return self.partial.nbytes

    def begin(self, context: Context, verified: Verified | None) -> None:
        self.partial.update(verified.attention if verified else None)
        self._read(context)

    def observe(self, context: Context, accepted: Accepted) -> None:
        verified = accepted.verified
        assert verified is not None
        self.partial.update(AttentionRows(verified.result.attention_output, [accepted.drafted]))
        self._read(context)

    def _read(self, context: Context) -> None:
        if self._options.continuations:
            self._table.extend(self._tokens.take(context).tolist())

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        result = yield from self._draft_model.forward(context, [context.last])
        self.partial.drop_drafts()
        template, logits = self._options.tree[:max_depth], result.logits
        if self._heads and len(template) > 1:
            logits = torch.cat([logits, self._heads.logits(result.hidden)])
        guesses = [self._sampler.ranked(logits[ahead], context, (), width, ahead).tokens
                   for ahead, width in enumerate(template)]
        return self._tree(context.last, guesses)

    def _tree(self, root: int, guesses: list[list[int]]) -> Tree:
        """All combinations of the guesses, and after them the chains of n-grams, which are as deep."""
        tokens, parents, sources = [root], [-1], [""]

        def add(parent: int, token: int, source: str) -> int:
            tokens.append(token)
            parents.append(parent)
            sources.append(source)
            return len(tokens) - 1

        level = [0]
        for ahead, found in enumerate(guesses):
            level = [add(parent, token, HEADS if ahead else SELF) for parent in level for token in found]
        for first in guesses[0] if guesses and self._options.continuations else ():
            for continuation in self._table.continuations(first, self._options.continuations):
                node = 0
                for token in (first, *continuation)[: len(guesses)]:
                    node = add(node, token, NGRAM)
        return Tree(tuple(tokens), tuple(parents), tuple(sources))


def new_choice(drafter: str, version: str, options: Mapping[str, Any]) -> DrafterChoice:
    """The choice of a drafter in our version or in the published one. Raises UsageError."""
    return (PublishedChoice if version == "published" else DrafterChoice).parse(drafter, options)

