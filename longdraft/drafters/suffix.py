"""Reuse of the text's own passages, of any length: a tree of what followed the longest suffix of the text before.

    ... it was the best of times ...... it was the ┬ best ── of ── times     followed the longest match
                                        (matched)  └ end                     followed the shorter match `the`

The index (csrc/suffix.h says what it counts) follows the text some tokens behind its end; what is matched is always
the real end. A corpus of earlier texts may stand beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longdraft.core import Context, SamplingParams
from longdraft.drafters.suffix_index import MAX_CONTEXTS, Guesses, Index, new_index
from longdraft.errors import check
from longdraft.model.routine import atomic
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.tree import Tree, Trie

SUFFIX, CORPUS = "suffix", "corpus"


@dataclass(frozen=True)
class SuffixOptions:
    """Options of `suffix`.

    budget           guesses in a tree at most
    depth            tokens guessed ahead at most
    min_match        tokens that must match at least
    max_match        tokens that are matched at most
    seen             how often a match must have been followed by something; else a shorter one is used
    contexts         how many matches, the longest and then shorter ones, estimate together what follows
    min_probability  estimated probability of a guess and all before it, below which it is not made
    capacity         tokens indexed at most: of a longer text the last ones, at least half as many
    delay            tokens of the text's end that are not yet indexed; -1: the penalty window while there is a
                     penalty, as for `ngram` (what followed them is being penalised, but measured, 0 is better)
    corpus           earlier texts to reuse as well: a UTF-8 text, a .npy file of token ids, or a folder of those
    """

    budget: int = 16
    depth: int = 16
    min_match: int = 1
    max_match: int = 32
    seen: int = 1
    contexts: int = 2
    min_probability: float = 0.25
    capacity: int = 262_144
    delay: int = 0
    corpus: str = ""

    def __post_init__(self) -> None:
        check(1 <= self.budget <= 1024, "budget", self.budget, "1 to 1024")
        check(1 <= self.depth <= 256, "depth", self.depth, "1 to 256")
        check(1 <= self.max_match <= 256, "max_match", self.max_match, "1 to 256")
        check(1 <= self.min_match <= self.max_match, "min_match", self.min_match, f"1 to max_match ({self.max_match})")
        check(1 <= self.seen < 2**31, "seen", self.seen, "1 or more")
        check(1 <= self.contexts <= MAX_CONTEXTS, "contexts", self.contexts, f"1 to {MAX_CONTEXTS}")
        check(0 <= self.min_probability < 1, "min_probability", self.min_probability, "0 to below 1")
        check(16 <= self.capacity <= 2**28, "capacity", self.capacity, "16 to 268435456")
        check(self.delay >= -1, "delay", self.delay, "0 or more, or -1 for the penalty window")
        check(not self.corpus or Path(self.corpus).exists(), "corpus", self.corpus,
              "a UTF-8 text, a .npy file of token ids, or a folder of those, that is there")


class SuffixText:
    """The index of one text, followed some tokens behind its end, and the corpus beside it."""

    def __init__(self, options: SuffixOptions, params: SamplingParams, corpus: Index | None = None) -> None:
        self._options = options
        self._index = new_index(options.capacity, options.max_match)
        self._corpus = corpus
        self._delay = options.delay
        if options.delay < 0:
            self._delay = params.penalty_window if params.repetition_penalty != 1 else 0
        self._taken = 0

    @property
    def nbytes(self) -> int:
        """Memory that the text's index holds; the corpus is the engine's."""
        return self._index.nbytes

    def follow(self, context: Context) -> None:
        end = max(self._taken, len(context) - self._delay)
        self._index.extend(context.slice(self._taken, end))
        self._taken = end

    def graft(self, trie: Trie, node: int, context: Context, path: Sequence[int], max_depth: int) -> None:
        """Add what may follow the text and `path` (the guesses from the root's child down to `node`) below `node`."""
        tail = context.slice(len(context) - self._options.max_match, len(context))
        if path:
            tail = np.concatenate([tail, np.array(path, np.int32)])
        own = self._guess(self._index, tail, max_depth)
        if self._corpus is None:
            nodes: list[int] = []
            for token, parent in zip(own[0], own[1], strict=True):
                nodes.append(trie.add(node if parent < 0 else nodes[parent], token, SUFFIX))
        else:
            self._merge(trie, node, own, self._guess(self._corpus, tail, max_depth))

    def _guess(self, index: Index, tail: np.typing.NDArray[np.int32], max_depth: int) -> Guesses:
        o = self._options
        return index.guess(tail, o.budget, min(o.depth, max_depth), o.min_match, o.seen, o.contexts, o.min_probability)

    def _merge(self, trie: Trie, node: int, own: Guesses, corpus: Guesses) -> None:
        """The likeliest of both, within the budget. A parent is never less likely than its children."""
        order = sorted((-probability, source, i) for source, guesses in ((0, own), (1, corpus))
                       for i, probability in enumerate(guesses[2]))
        nodes: dict[tuple[int, int], int] = {}
        full = len(trie) + self._options.budget
        for _, source, i in order:
            if len(trie) == full:
                break
            tokens, parents, _ = (own, corpus)[source]
            parent = node if parents[i] < 0 else nodes[source, parents[i]]
            nodes[source, i] = trie.add(parent, tokens[i], (SUFFIX, CORPUS)[source])


class SuffixDrafter:
    def __init__(self, options: SuffixOptions, params: SamplingParams, corpus: Index | None = None) -> None:
        self._text = SuffixText(options, params, corpus)

    @property
    def nbytes(self) -> int:
        return self._text.nbytes

    def begin(self, context: Context, verified: Verified | None) -> None:
        self._text.follow(context)

    @atomic
    def propose(self, context: Context, max_depth: int) -> Tree:
        trie = Trie(context.last)
        self._text.graft(trie, 0, context, (), max_depth)
        return trie.tree()

    def observe(self, context: Context, accepted: Accepted) -> None:
        self._text.follow(context)
