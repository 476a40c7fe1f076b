"""The drafter `glide` (after LongSpec): a chain from one trained layer that reads the target's own KV cache.

longdraft/parts/glide.py holds the layer, longdraft/cache/window.py its keys and values of the latest text and of
drafts. The rows of a draft that became text stay there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from longdraft.cache.full import FullCache
from longdraft.cache.window import RowWindow
from longdraft.drafters.layer_drafter import ChainDrafter, rotations_after
from longdraft.drafters.options import ChainOptions
from longdraft.kernels.chain_plan import ChainPlan, DraftStores, Ranked, TrainedLayers
from longdraft.model.transformer import Transformer
from longdraft.parts.glide import Glide, GlideRows
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import common_prefix
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import atomic

GLIDE = "glide"  # the source of the guesses in the statistics
_READ_CHUNK = 8  # rows of text read in one forward: the largest lag between a row and the target's keys in training
_CATCH_UP = 64  # rows read when more were missed; the window refills while writing, at the same acceptance


@dataclass(frozen=True)
class GlideOptions(ChainOptions):
    """Options of `glide`: those of a chain."""

    chain: int = 4


class GlideDraftModel:
    """Reads the text and drafts with a glide layer. Implements `DraftModel` (longdraft/drafters/chain.py)."""

    def __init__(self, glide: Glide, model: Transformer, cache: FullCache, longest: int) -> None:
        self._glide, self._model, self._cache = glide, model, cache
        config = model.config
        self.rows = RowWindow(model.kernels, 1, config.num_kv_heads, config.head_dim, glide.window, longest)
        self._drafts: list[int] = []  # tokens of the drafts in `rows`
        self._hidden: list[Tensor] = []  # [1, hidden] of the text's last token and of each draft

    @property
    def vocabulary(self) -> int:
        return self._glide.vocabulary

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    @atomic
    def next_logits(self, context: Context, path: Sequence[int]) -> Tensor | None:
        """Logits [1, V] after `path`: the root, which is the text's last token, then drafted tokens."""
        self._read_text(context)
        wanted = path[1:]
        common = min(common_prefix(wanted, self._drafts), len(self._hidden) - 1)
        self._forget_drafts(common)
        for token in wanted[common:]:
            row = self._forward([token], self.rows.end + self.rows.num_drafts, self._cache.length)
            self.rows.add_drafts(row.k[None], row.v[None])
            self._drafts.append(token)
            self._hidden.append(row.hidden)
        return self._glide.logits(self._hidden[-1])

    def plan(self, context: Context, path: Sequence[int], length: int) -> ChainPlan | None:
        """See `DraftModel`. Only after the text itself."""
        if len(path) != 1 or not self._cache.length:
            return None
        self._read_text(context)
        self._forget_drafts(0)
        layers = TrainedLayers(self._glide, self._model.kernels, self._hidden[0],
                               (self._cache.stores[-1], self._cache.length))
        return ChainPlan(layers, path, length, DraftStores(self.rows.stores, self.rows.length),
                         rotations_after(self._model.rotations, self.rows.end, length))

    def has_drafted(self, context: Context, path: Sequence[int], drafted: Sequence[Ranked]) -> None:
        """Rows of tokens that the chain's end has cut off are dropped."""
        self._drafts = [tokens[0] for tokens, _ in drafted[:-1]]  # the last token has no row yet
        self.rows.num_drafts = len(self._drafts)

    def _forget_drafts(self, kept: int) -> None:
        """Keep the first `kept` drafts and drop the others."""
        self.rows.num_drafts = kept
        del self._drafts[kept:], self._hidden[kept + 1 :]

    def _read_text(self, context: Context) -> None:
        """Read the new tokens of the text: drafts among them are kept, the others are read in few forwards."""
        rows, length = self.rows, len(context)
        if rows.end == length:
            return
        if length - rows.end > _CATCH_UP:
            rows.restart(length - _CATCH_UP)
            self._drafts = []
        text = context.slice(rows.end, length).tolist()
        kept = common_prefix(text[:-1], self._drafts)
        rows.keep(kept)
        self._drafts = []
        for start in range(kept, len(text), _READ_CHUNK):
            # Each row of the chunk sees the target's keys that a draft at the place of the first row would see.
            row = self._forward(text[start : start + _READ_CHUNK], rows.end, min(self._cache.length, rows.end))
            rows.add_text(row.k[None], row.v[None])
            self._hidden = [row.hidden[-1:]]

    def _forward(self, tokens: list[int], position: int, num_keys: int) -> GlideRows:
        rows = self.rows
        return self._glide.forward(tokens, position, self._model, rows.stores[0], rows.length, self._cache.stores[-1],
                                   num_keys)


class GlideDrafter(ChainDrafter):
    def __init__(self, options: GlideOptions, glide: Glide, model: Transformer, cache: FullCache, sampler: Sampler,
                 params: SamplingParams) -> None:
        super().__init__(GlideDraftModel(glide, model, cache, options.chain), GLIDE, options, sampler, params)
