"""Passages of the text itself, of any length: a tree of what followed the longest suffix of the text earlier.

    ... it was the best of times ...... it was the ─┬─ best ── of ── times     followed the longest match, `it was the`
                                                    └─ end                     followed a shorter match, `the`

The method is SuffixDecoding's (arXiv 2411.04975); csrc/suffix.h defines what the index counts. The index may lag some
tokens after the text; what is matched is always the end of the text. A corpus of earlier texts can be searched too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longdraft.drafters.matches import DelayedTokens, MatchDrafter
from longdraft.drafters.options import DrafterOptions
from longdraft.drafters.suffix_index import MAX_CONTEXTS, Guesses, Index, TokenArray, new_index
from longdraft.errors import check
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Trie

SUFFIX, CORPUS = "suffix", "corpus"  # sources of the guesses in the statistics


@dataclass(frozen=True)
class SuffixOptions(DrafterOptions):
    """Options of `suffix`.

    budget           guesses in a tree at most
    depth            tokens guessed ahead at most
    min_match        tokens of the shortest match that is used
    max_match        tokens of the longest match that is searched
    seen             number of times a match must have occurred earlier; otherwise a shorter match is used
    contexts         number of matches, the longest and then shorter ones, that estimate the next token together
    min_probability  estimated probability of a guess with all guesses before it, below which it is not made
    capacity         tokens indexed at most: of a longer text the last ones, at least half as many
    delay            last tokens of the text that are not yet indexed; -1: the penalty window if there is a repetition
                     penalty, as for `ngram` (what followed them is being penalised, but 0 was measured to be better)
    corpus           earlier texts to search as well: a UTF-8 text, a .npy file of token ids, or a folder of those
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
              "an existing UTF-8 text, .npy file of token ids, or folder of those")


class SuffixMatcher:
    """The suffix index of one text, and the index of a corpus, if any. Implements `Matcher`."""

    def __init__(self, options: SuffixOptions, params: SamplingParams, corpus: Index | None = None) -> None:
        self._options = options
        self._index = new_index(options.capacity, options.max_match)
        self._corpus = corpus
        self._tokens = DelayedTokens(options.delay, params)

    @property
    def nbytes(self) -> int:
        """Memory of the text's index; the engine's requests share the corpus."""
        return self._index.nbytes

    def update(self, context: Context) -> None:
        """Index the tokens that the text has gained."""
        self._index.extend(self._tokens.take(context))

    def add_matches(self, trie: Trie, node: int, context: Context, path: Sequence[int], max_depth: int) -> None:
        """See `Matcher`. What followed the longest suffixes."""
        tail = context.slice(len(context) - self._options.max_match, len(context))
        if path:
            tail = np.concatenate([tail, np.array(path, np.int32)])
        own = self._guess(self._index, tail, max_depth)
        if self._corpus is None:
            nodes: list[int] = []
            for token, parent in zip(own[0], own[1], strict=True):
                nodes.append(trie.add(node if parent < 0 else nodes[parent], token, SUFFIX))
        else:
            self._add_likeliest(trie, node, own, self._guess(self._corpus, tail, max_depth))

    def _guess(self, index: Index, tail: TokenArray, max_depth: int) -> Guesses:
        o = self._options
        return index.guess(tail, o.budget, min(o.depth, max_depth), o.min_match, o.seen, o.contexts, o.min_probability)

    def _add_likeliest(self, trie: Trie, node: int, own: Guesses, corpus: Guesses) -> None:
        """The most probable guesses of both, within the budget. A parent is at least as probable as its children."""
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


class SuffixDrafter(MatchDrafter[SuffixMatcher]):
    def __init__(self, options: SuffixOptions, params: SamplingParams, corpus: Index | None = None) -> None:
        super().__init__(SuffixMatcher(options, params, corpus))
