"""Glide's drafter: a chain from a one-layer drafter that reads the target's own cache (longdraft/model/glide.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longdraft.cache.full import FullCache
from longdraft.core import Context, SamplingParams
from longdraft.drafters.chain import Chain
from longdraft.drafters.suffix import SuffixOptions, SuffixText
from longdraft.errors import check
from longdraft.model.glide import Glide, Row
from longdraft.model.routine import Routine, atomic
from longdraft.model.transformer import Transformer
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.tree import Tree, Trie

GLIDE = "glide"
_CHUNK = 8  # rows of text read at once: as far as keys may lag behind in training
_CATCH_UP = 64  # rows read when it has missed more: the window fills again while writing, and guesses as well


@dataclass(frozen=True)
class GlideOptions:
    """Options of `glide`.

    chain   tokens drafted, one behind the other
    width   guesses at each place of the chain at most; it follows the best
    margin  how much less likely than the best the others may look, as a logarithm: 1 is exp(1) times
    suffix  graft in what followed the longest suffix of the text before, behind the root
    """

    chain: int = 4
    width: int = 2
    margin: float = 0.5
    suffix: bool = True

    def __post_init__(self) -> None:
        check(1 <= self.chain <= 64, "chain", self.chain, "1 to 64")
        check(1 <= self.width <= 16, "width", self.width, "1 to 16")
        check(self.margin >= 0, "margin", self.margin, "0 or more")


class Ring:
    """Rows of the text, `window` of them at most, and behind them the rows of drafts.

    slots   [ rows of text: position p in slot (p - start) mod window ][ drafts ... ]

    A row of text takes the slot of the one that has left the window. A draft that became text is moved there.
    """

    def __init__(self, model: Transformer, window: int, num_drafts: int) -> None:
        config = model.config
        self._window = window
        self.store = model.kernels.new_store(config.num_kv_heads, config.head_dim)
        self.store.reserve(window + num_drafts + 1)
        self._kv_heads = config.num_kv_heads
        self._start = 0
        self.end = 0  # the position behind the last row of text
        self.num_drafts = 0

    @property
    def nbytes(self) -> int:
        return self.store.nbytes

    @property
    def num_text(self) -> int:
        return min(self.end - self._start, self._window)

    @property
    def length(self) -> int:
        return self.num_text + self.num_drafts

    def restart(self, position: int) -> None:
        """Hold nothing; text goes on at `position`."""
        self._start = self.end = position
        self.num_drafts = 0

    def add_draft(self, k: Tensor, v: Tensor) -> None:
        """One row k, v [1, Hkv, D] behind the last."""
        self.store.write(self.length, k, v)
        self.num_drafts += 1

    def keep(self, count: int) -> None:
        """The first `count` drafts became text, the others never existed."""
        self.num_drafts = 0
        if count:
            slots = torch.arange(self.num_text, self.num_text + count).expand(self._kv_heads, -1)
            k, v = self.store.read(slots)
            self.add_text(k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())

    def add_text(self, k: Tensor, v: Tensor) -> None:
        """Rows k, v [T, Hkv, D] of text; there are no drafts."""
        done = 0
        while done < len(k):
            slot = (self.end - self._start) % self._window
            count = min(len(k) - done, self._window - slot)
            self.store.write(slot, k[done : done + count], v[done : done + count])
            self.end += count
            done += count


class GlideReader:
    """Reads text and drafts with a glide layer, for chains."""

    def __init__(self, glide: Glide, model: Transformer, cache: FullCache, longest: int) -> None:
        self._glide, self._model, self._cache = glide, model, cache
        self.ring = Ring(model, glide.window, longest)
        self._drafts: list[int] = []  # tokens of the ring's drafts
        self._rows: list[Tensor] = []  # hidden rows [1, hidden] of the text's last token and of the drafts

    @atomic
    def read(self, context: Context, path: Sequence[int]) -> Tensor | None:
        """Logits [1, V] behind `path`: the root, which is the text's last token, then drafted ones."""
        self._follow(context)
        wanted = path[1:]
        common = _common(wanted, self._drafts)
        self.ring.num_drafts = common
        del self._drafts[common:], self._rows[common + 1 :]
        for token in wanted[common:]:
            row = self._forward([token], self.ring.end + self.ring.num_drafts, self._cache.length)
            self.ring.add_draft(row.k, row.v)
            self._drafts.append(token)
            self._rows.append(row.hidden)
        return self._glide.logits(self._rows[-1])

    def _follow(self, context: Context) -> None:
        """Read what has become text since: drafts among it are kept, the rest is read in few forwards."""
        ring, length = self.ring, len(context)
        if ring.end == length:
            return
        if length - ring.end > _CATCH_UP:
            ring.restart(length - _CATCH_UP)
            self._drafts = []
        text = context.slice(ring.end, length).tolist()
        kept = _common(text[:-1], self._drafts)
        ring.keep(kept)
        self._drafts = []
        for start in range(kept, len(text), _CHUNK):
            # Rows of text see no more than a draft at the first one's place would.
            row = self._forward(text[start : start + _CHUNK], ring.end, min(self._cache.length, ring.end))
            ring.add_text(row.k, row.v)
            self._rows = [row.hidden[-1:]]

    def _forward(self, tokens: list[int], position: int, num_keys: int) -> Row:
        ring = self.ring
        return self._glide.forward(tokens, position, self._model, ring.store, ring.length, self._cache.stores[-1],
                                   num_keys)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


class GlideDrafter:
    def __init__(self, options: GlideOptions, glide: Glide, model: Transformer, cache: FullCache, sampler: Sampler,
                 params: SamplingParams) -> None:
        self._length = options.chain
        self._reader = GlideReader(glide, model, cache, options.chain)
        self._chain = Chain(self._reader, sampler, options.width, GLIDE, options.margin)
        self._text = SuffixText(SuffixOptions(), params) if options.suffix else None

    @property
    def nbytes(self) -> int:
        return self._reader.ring.nbytes + (self._text.nbytes if self._text else 0)

    def begin(self, context: Context, verified: Verified | None) -> None:
        if self._text:
            self._text.follow(context)

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        trie = Trie(context.last)
        yield from self._chain.grow(trie, context, [context.last], min(self._length, max_depth))
        if self._text:
            self._text.graft(trie, 0, context, (), max_depth)
        return trie.tree()

    def observe(self, context: Context, accepted: Accepted) -> None:
        self.begin(context, None)
