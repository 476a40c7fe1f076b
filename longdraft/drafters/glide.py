"""The drafter `glide` (after LongSpec): a chain from one trained layer that reads the target's own KV cache.

longdraft/model/glide.py holds the layer. Its keys and values of the latest text are in a ring buffer:

    slots   [ rows of text: position p in slot (p - start) mod window ][ rows of drafts ... ]

A new row of text takes the slot of the row that leaves the window. The rows of a draft that became text move there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longdraft.cache.full import FullCache
from longdraft.core import Context, SamplingParams
from longdraft.drafters.chain import Chain
from longdraft.drafters.options import DrafterOptions, check_chain
from longdraft.drafters.suffix import SuffixMatcher, SuffixOptions
from longdraft.model.glide import Glide, GlideRows
from longdraft.model.routine import Routine, atomic
from longdraft.model.transformer import Transformer
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.tree import Tree, Trie

GLIDE = "glide"  # the source of the guesses in the statistics
_READ_CHUNK = 8  # rows of text read in one forward: the largest lag between a row and the target's keys in training
_CATCH_UP = 64  # rows read when more were missed; the window refills while writing, at the same acceptance


@dataclass(frozen=True)
class GlideOptions(DrafterOptions):
    """Options of `glide`.

    chain   tokens drafted, one after the other
    width   guesses at each place of the chain at most; the chain continues with the best one
    margin  largest gap between a further guess's score and the best one's, in nats (1: exp(1) times less likely)
    suffix  add what followed the longest suffix of the text earlier, behind the root
    """

    chain: int = 4
    width: int = 2
    margin: float = 0.5
    suffix: bool = True

    def __post_init__(self) -> None:
        check_chain(self.chain, self.width, self.margin)


class Ring:
    """Keys and values of the last `window` rows of text and of the drafts behind them, as drawn above."""

    def __init__(self, model: Transformer, window: int, num_drafts: int) -> None:
        config = model.config
        self._window = window
        self.store = model.kernels.new_store(config.num_kv_heads, config.head_dim)
        self.store.reserve(window + num_drafts + 1)
        self._kv_heads = config.num_kv_heads
        self._start = 0
        self.end = 0  # position behind the last row of text
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
        """Drop all rows; the next row of text is at `position`."""
        self._start = self.end = position
        self.num_drafts = 0

    def add_draft(self, k: Tensor, v: Tensor) -> None:
        """One row k, v [1, Hkv, D] behind the last."""
        self.store.write(self.length, k, v)
        self.num_drafts += 1

    def keep(self, count: int) -> None:
        """The first `count` drafts became text; drop the other drafts."""
        self.num_drafts = 0
        if count:
            slots = torch.arange(self.num_text, self.num_text + count).expand(self._kv_heads, -1)
            k, v = self.store.read(slots)
            self.add_text(k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())

    def add_text(self, k: Tensor, v: Tensor) -> None:
        """Append rows k, v [T, Hkv, D] of text. Only without drafts."""
        done = 0
        while done < len(k):
            slot = (self.end - self._start) % self._window
            count = min(len(k) - done, self._window - slot)
            self.store.write(slot, k[done : done + count], v[done : done + count])
            self.end += count
            done += count


class GlideDraftModel:
    """Reads the text and drafts with a glide layer. Implements `DraftModel` (longdraft/drafters/chain.py)."""

    def __init__(self, glide: Glide, model: Transformer, cache: FullCache, longest: int) -> None:
        self._glide, self._model, self._cache = glide, model, cache
        self.ring = Ring(model, glide.window, longest)
        self._drafts: list[int] = []  # tokens of the ring's drafts
        self._hidden: list[Tensor] = []  # [1, hidden] of the text's last token and of each draft

    @atomic
    def next_logits(self, context: Context, path: Sequence[int]) -> Tensor | None:
        """Logits [1, V] behind `path`: the root, which is the text's last token, then drafted tokens."""
        self._read_text(context)
        wanted = path[1:]
        common = _common_prefix(wanted, self._drafts)
        self.ring.num_drafts = common
        del self._drafts[common:], self._hidden[common + 1 :]
        for token in wanted[common:]:
            row = self._forward([token], self.ring.end + self.ring.num_drafts, self._cache.length)
            self.ring.add_draft(row.k, row.v)
            self._drafts.append(token)
            self._hidden.append(row.hidden)
        return self._glide.logits(self._hidden[-1])

    def _read_text(self, context: Context) -> None:
        """Read the new tokens of the text: drafts among them are kept, the others are read in few forwards."""
        ring, length = self.ring, len(context)
        if ring.end == length:
            return
        if length - ring.end > _CATCH_UP:
            ring.restart(length - _CATCH_UP)
            self._drafts = []
        text = context.slice(ring.end, length).tolist()
        kept = _common_prefix(text[:-1], self._drafts)
        ring.keep(kept)
        self._drafts = []
        for start in range(kept, len(text), _READ_CHUNK):
            # Each row of the chunk sees the target's keys that a draft at the place of the first row would see.
            row = self._forward(text[start : start + _READ_CHUNK], ring.end, min(self._cache.length, ring.end))
            ring.add_text(row.k, row.v)
            self._hidden = [row.hidden[-1:]]

    def _forward(self, tokens: list[int], position: int, num_keys: int) -> GlideRows:
        ring = self.ring
        return self._glide.forward(tokens, position, self._model, ring.store, ring.length, self._cache.stores[-1],
                                   num_keys)


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


class GlideDrafter:
    def __init__(self, options: GlideOptions, glide: Glide, model: Transformer, cache: FullCache, sampler: Sampler,
                 params: SamplingParams) -> None:
        self._length = options.chain
        self._draft_model = GlideDraftModel(glide, model, cache, options.chain)
        self._chain = Chain(self._draft_model, sampler, options.width, GLIDE, options.margin)
        self._suffix = SuffixMatcher(SuffixOptions(), params) if options.suffix else None

    @property
    def nbytes(self) -> int:
        return self._draft_model.ring.nbytes + (self._suffix.nbytes if self._suffix else 0)

    def begin(self, context: Context, verified: Verified | None) -> None:
        if self._suffix:
            self._suffix.update(context)

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        trie = Trie(context.last)
        yield from self._chain.draft(trie, context, [context.last], min(self._length, max_depth))
        if self._suffix:
            self._suffix.add_matches(trie, 0, context, (), max_depth)
        return trie.tree()

    def observe(self, context: Context, accepted: Accepted) -> None:
        self.begin(context, None)
