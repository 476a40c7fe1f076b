"""The choices of several texts in one graph: logits, penalties, noise, choice and walk of all their rows.

    rows      [ tree of text 0 | tree of text 1 | ... | padding ]
    uploaded  one block: a settings entry and the stores' addresses of each text, trees, tokens that are new
    read      one block: the walks of all texts

What differs between texts is in device memory (`text_rows`), so a graph belongs to numbers of texts and rows.
The rows of the accepted paths are kept by one launch, before the paths are on the host. The host waits once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels.cuda import jit_attention, jit_choice, jit_shared_choice
from longdraft.kernels.cuda.choice import LogitsSource, TokenChooser
from longdraft.kernels.cuda.graph_cache import BUCKETS, new_owner
from longdraft.kernels.cuda.kv_store import CudaStore, RowsOfTexts, scatter_rows
from longdraft.kernels.cuda.launch import (
    UNFUSED,
    RecentlyUsed,
    ceil_div,
    chained,
    on_device,
    padded_size,
    require,
    staged_parts,
)
from longdraft.kernels.cuda.support import BLOCK
from longdraft.kernels.cuda.text_rows import (
    ENTRY,
    MAX_FRESH,
    TextNeeds,
    TextRows,
    TextSupport,
    append_tokens,
    entry_of,
    longest_window,
)

_MAX_ROWS, _MAX_TEXTS = BUCKETS[-1], 64
_MAX_BUFFERS = 4  # numbers of texts and rows: the logits of 128 rows take up to 130 MB


class TextTree(NamedTuple):
    """A text's part of a choice. See `TokenChooser.choose` for `tokens` to `required`.

    chooser  of the request
    fresh    the request's tokens that the chooser does not hold yet
    stores   of the text's cache, all of one shape
    """

    chooser: TokenChooser
    fresh: NDArray[np.int32]
    tokens: Sequence[int]
    parents: Sequence[int]
    cached: int
    required: int
    stores: Sequence[CudaStore]


class _Shape(NamedTuple):
    """What the memory of a choice depends on: numbers of rows, texts, layers with stores, and tokens of a window."""

    rows: int
    texts: int
    layers: int
    window: int


class _Buffers:
    """The memory of choices of one shape."""

    def __init__(self, source: LogitsSource, shape: _Shape, device: torch.device) -> None:
        rows, vocabulary = shape.rows, source.head.out_features

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device)

        num, int32 = ceil_div(vocabulary, BLOCK), torch.int32
        self.shape, self.serial = shape, new_owner()
        self.parts = staged_parts(2 * ENTRY * shape.texts, 2 * 5 * shape.layers * shape.texts, rows, rows, rows,
                                  MAX_FRESH * shape.texts)
        self.staged = torch.zeros(self.parts[-1].stop, dtype=int32, device=device)
        entries, table, tokens, self.parents, texts, self.fresh = (self.staged[part] for part in self.parts)
        self.table = table.view(torch.int64)
        self.text_rows = TextRows(tokens, torch.zeros(rows, rows, dtype=int32, device=device),
                                  empty(rows, dtype=int32), texts, entries.view(torch.int64),
                                  empty(rows, shape.window, dtype=int32), empty(rows, shape.window))
        self.support = TextSupport(self.text_rows, vocabulary)
        self.bests, self.ids = empty(rows, num), empty(rows, num, dtype=int32)
        self.scores = empty(rows, num, dtype=torch.float64)
        self.choices, self.walked = (empty(rows, dtype=int32) for _ in range(2))
        self.targets = empty(rows, dtype=torch.int64)
        self.outcome = empty(shape.texts + 2 * rows, dtype=int32)
        self.given = empty(rows, source.head.in_features, dtype=source.head.dtype).zero_()
        self.normed, self.sums = torch.empty_like(self.given), empty(source.head.num_sums(rows))
        self.logits = empty(rows, vocabulary)

    def load(self, trees: Sequence[TextTree], firsts: Sequence[int]) -> None:
        """One copy to the device. A padding row is of text 0 and in no tree; a padding text has no rows."""
        staged = np.zeros(len(self.staged), dtype=np.int32)
        settings, stores, tokens, parents, texts, new = (staged[part] for part in self.parts)
        entries, fresh = settings.view(np.int64).reshape(-1, ENTRY), new.reshape(self.shape.texts, -1)
        table, parents[:] = stores.view(np.int64).reshape(self.shape.texts, -1, 5), -1
        for text, (tree, first) in enumerate(zip(trees, firsts, strict=True)):
            own = slice(first, first + len(tree.tokens))
            tokens[own], texts[own] = tree.tokens, text
            parents[own] = [parent if parent < 0 else parent + first for parent in tree.parents]
            fresh[text, : len(tree.fresh)] = tree.fresh
            entries[text] = _entry(tree, first)
            table[text] = [store.addresses for store in tree.stores]
        self.staged.copy_(torch.from_numpy(staged), non_blocking=True)

    def walks(self, outcome: Sequence[int], trees: Sequence[TextTree],
              firsts: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Of each text the nodes of its path, and the choices at them, from what the device has written."""
        found, texts, rows = [], self.shape.texts, self.shape.rows
        for text, first in enumerate(firsts):
            own = slice(texts + first, texts + first + outcome[text])
            chosen = slice(own.start + rows, own.stop + rows)
            found.append(([row - first for row in outcome[own]], list(outcome[chosen])))
        return found


def _entry(tree: TextTree, first: int) -> NDArray[np.int64]:
    """The entry of a text; see `jit_shared_choice`. first: of its rows."""
    entry = entry_of(tree.chooser, tree.required, tree.chooser.length + len(tree.fresh), len(tree.fresh))
    entry[4:7] = tree.cached, first, len(tree.tokens)
    return entry


class SharedChoices:
    """Choices of several texts from one model's last hidden rows."""

    def __init__(self, source: LogitsSource) -> None:
        self._source = source
        self._buffers: RecentlyUsed[_Shape, _Buffers] = RecentlyUsed(_MAX_BUFFERS)

    def run(self, hidden: Tensor, k: Tensor, v: Tensor,
            trees: Sequence[TextTree]) -> list[tuple[list[int], list[int]]]:
        """Of each text the nodes of the path that the target accepts, and its choices at them, whose rows are kept.

        hidden  [R, hidden], the last layer's output for the rows of all trees, one text after another
        k, v    [L, R, Hkv, D] of these rows

        A choice of -1 means that the logits are not finite. Waits for the device, once. A forward of more rows than fit
        into a graph takes several graphs.
        """
        require(len(hidden) == k.shape[1] == sum(len(tree.tokens) for tree in trees), "a row for each node", k.shape)
        for tree in trees:
            tree.chooser.make_room(len(tree.fresh))
        parts, start = _parts(trees), 0
        outcomes, held = [], []
        for part in parts:
            stop = start + sum(len(tree.tokens) for tree in part)
            firsts = [0, *accumulate(len(tree.tokens) for tree in part[:-1])]
            buffers = self._launch(hidden[start:stop], k[:, start:stop], v[:, start:stop], part, firsts)
            outcomes.append(buffers.outcome if len(parts) == 1 else buffers.outcome.clone())
            held.append((buffers, part, firsts))
            start = stop
        read = _read(outcomes[0] if len(parts) == 1 else torch.cat(outcomes))
        walks, start = list[tuple[list[int], list[int]]](), 0
        for (buffers, part, firsts), outcome in zip(held, outcomes, strict=True):
            walks += buffers.walks(read[start : start + len(outcome)], part, firsts)
            start += len(outcome)
        return walks

    def _launch(self, hidden: Tensor, k: Tensor, v: Tensor, trees: Sequence[TextTree],
                firsts: Sequence[int]) -> _Buffers:
        """Start the choices of texts that fit into one graph, and keep the rows of their paths."""
        rows, graphs = len(hidden), self._source.graphs
        buffers = self._buffers_for(rows, trees, hidden.device)
        buffers.load(trees, firsts)
        buffers.given[:rows].copy_(hidden)
        needs = TextNeeds.of([(tree.chooser, tree.required) for tree in trees])
        graphs.own(buffers, buffers.serial)
        with on_device(hidden.device):
            graphs.run(("choices", buffers.serial, needs), partial(self._run, buffers, needs))
            stores = trees[0].stores
            texts = RowsOfTexts(buffers.table, buffers.text_rows.texts[:rows])
            scatter_rows(k, v, stores, buffers.walked[:rows], buffers.targets[:rows], texts)
        for tree in trees:
            tree.chooser.has_appended(len(tree.fresh))
        return buffers

    def _buffers_for(self, rows: int, trees: Sequence[TextTree], device: torch.device) -> _Buffers:
        shape = _Shape(next(size for size in BUCKETS if size >= rows), padded_size(len(trees), 2),
                       len(trees[0].stores), longest_window([tree.chooser for tree in trees]))
        return self._buffers.get(shape, lambda: _Buffers(self._source, shape, device))

    def _run(self, buffers: _Buffers, needs: TextNeeds) -> None:
        """Launches that do not depend on the buffers' contents, as a graph requires."""
        logits, of = buffers.logits, buffers.text_rows
        (rows, vocabulary), device = logits.shape, logits.device
        num, numbers = ceil_div(vocabulary, BLOCK), of.entries.view(torch.float64)
        self._source.launch(buffers.given, buffers.normed, buffers.sums, logits)
        append_tokens(of.entries, buffers.fresh)
        jit_attention.tree_paths_kernel[(rows,)](buffers.parents, of.path, of.depths, rows, num_warps=1, **UNFUSED)
        of.edit(logits, needs)
        jit_choice.block_maxima_kernel[(rows, num)](logits, buffers.bests, buffers.ids, vocabulary, num, BLOCK=BLOCK,
                                                    **chained(device))
        limits, flags = buffers.support.find(logits, buffers.bests, needs.filters)
        jit_shared_choice.noisy_maxima_of_texts_kernel[(rows, num)](
            logits, buffers.bests, of.depths, of.entries, numbers, of.texts, *limits, buffers.scores, buffers.ids,
            vocabulary, num, BLOCK=BLOCK, BLOCKS=padded_size(num), **flags, **chained(device))
        jit_choice.choose_tokens_kernel[(rows,)](buffers.bests, buffers.scores, buffers.ids, buffers.choices, num,
                                                 BLOCKS=padded_size(num), **chained(device))
        jit_shared_choice.walk_trees_kernel[(buffers.shape.texts,)](
            buffers.choices, of.tokens, buffers.parents, of.entries, buffers.walked, buffers.targets, buffers.outcome,
            rows, BLOCK=padded_size(rows), num_warps=1, **chained(device))


def _read(outcome: Tensor) -> list[int]:
    """Waits for the device."""
    found: list[int] = outcome.tolist()
    return found


def _parts(trees: Sequence[TextTree]) -> list[list[TextTree]]:
    """The texts of each graph, in order."""
    parts: list[list[TextTree]] = [[]]
    rows = 0
    for tree in trees:
        count = len(tree.tokens)
        require(count <= _MAX_ROWS, f"trees of at most {_MAX_ROWS} rows", count)
        if parts[-1] and (rows + count > _MAX_ROWS or len(parts[-1]) == _MAX_TEXTS):
            parts.append([])
            rows = 0
        parts[-1].append(tree)
        rows += count
    return parts
