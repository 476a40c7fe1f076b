"""The target's tokens at the nodes of trees, and the walks along them, on the device: penalties, noise, choice, walk.

    rows      [ tree of text 0 | tree of text 1 | ... | padding ]
    uploaded  one block: a settings entry and the stores' addresses of each text, trees, tokens that are new
    read      one block: the walks of all texts

A text by itself is the smallest case. What differs between texts is in device memory (`text_rows`), so a graph belongs
to numbers of texts and rows. The host is not asked in between: the rows of the accepted paths can be kept, and the next
forward prepared, before the paths are on the host.
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

from longdraft.kernels.cuda import jit_activations, jit_attention, jit_choice, jit_rows
from longdraft.kernels.cuda.device_text import DeviceText
from longdraft.kernels.cuda.graph_cache import BUCKETS, GraphCache, bucket_of
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
from longdraft.kernels.cuda.linear import SUM_BLOCK, CudaLinear, add_partial_sums
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
_MAX_BUFFERS = 10  # numbers of texts and rows: the logits of 128 rows take up to 130 MB


class LogitsSource(NamedTuple):
    """From the last layer's output to logits: the final norm and the head.

    graphs   of the head's kernels
    tile     rows that a product computes at a time
    divisor  of the logits; cap: their soft cap, 0 for none
    """

    graphs: GraphCache
    tile: int
    norm: Tensor
    eps: float
    rounds_once: bool
    head: CudaLinear
    divisor: float
    cap: float = 0.0

    def launch(self, hidden: Tensor, normed: Tensor, sums: Tensor, logits: Tensor) -> None:
        """Write the logits [R, V] of hidden [R, hidden]."""
        rows, width = hidden.shape
        jit_rows.rms_norm_kernel[(rows,)](hidden, self.norm, normed, self.eps, WIDTH=width, PADDED=padded_size(width),
                                          ROUNDS_ONCE=self.rounds_once, num_warps=8 if width > 512 else 1,
                                          **chained(hidden.device))
        add_partial_sums(self.head.partial_sums(normed, self.tile, sums), logits)
        if self.divisor != 1:
            logits.div_(self.divisor)
        if self.cap:
            jit_activations.squash_kernel[(ceil_div(logits.numel(), SUM_BLOCK),)](
                logits, logits, logits.numel(), self.cap, BLOCK=SUM_BLOCK, HAS_CAP=True, **UNFUSED)


class TextTree(NamedTuple):
    """A text's part of a choice.

    fresh     the request's tokens that `text` does not hold yet, at most `MAX_FRESH`
    tokens, parents  of the tree's nodes, parents before their children
    cached    committed rows of the cache: the position of the root's row
    required  tokens that must still be written before the text may end
    stores    of the text's cache, all of one shape, where the rows of the path are kept; none: the caller keeps them
    """

    text: DeviceText
    fresh: NDArray[np.int32]
    tokens: Sequence[int]
    parents: Sequence[int]
    cached: int
    required: int
    stores: Sequence[CudaStore] = ()


class Chosen(NamedTuple):
    """The choices for the trees of a graph, on the device. Valid until the next choice of the same `TextChoices`.

    choices  [R] int32: the token that follows each node, -1 where its logits are not finite
    path     [R] int32: in the rows of each text the rows that the target accepts, from the root down; then the root's
    targets  [R] int64: the positions of those rows in the text's cache; -1: the row is not kept
    outcome  int32 [T + 2 B]: the length of each path; its rows; the choices at them
    shape    T and B, which may be more than the texts and their rows
    firsts   the row of each tree's root
    """

    choices: Tensor
    path: Tensor
    targets: Tensor
    outcome: Tensor
    shape: tuple[int, int]
    firsts: Sequence[int]

    def walks(self, outcome: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Of each text the nodes of its path, and the choices at them, from `outcome` on the host."""
        walks, (texts, rows) = [], self.shape
        for text, first in enumerate(self.firsts):
            own = slice(texts + first, texts + first + outcome[text])
            walks.append(([row - first for row in outcome[own]],
                          list(outcome[own.start + rows : own.stop + rows])))
        return walks

    def read(self) -> list[tuple[list[int], list[int]]]:
        """As `walks`. Waits for the device."""
        return self.walks(_read(self.outcome))


class _Shape(NamedTuple):
    """What the memory of a choice depends on: numbers of rows, of texts, of layers with stores, of tokens of a window,
    and of logits; the head that computes these, or None."""

    rows: int
    texts: int
    layers: int
    window: int
    vocabulary: int
    head: int | None


class ChoiceBuffers:
    """The memory of choices of one shape.

    source  of the logits; None: they are given
    """

    def __init__(self, source: LogitsSource | None, shape: _Shape, device: torch.device) -> None:
        rows, vocabulary = shape.rows, shape.vocabulary

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device)

        num, int32 = ceil_div(vocabulary, BLOCK), torch.int32
        self.shape, self.source = shape, source
        self._parts = staged_parts(2 * ENTRY * shape.texts, 2 * 5 * shape.layers * shape.texts, rows, rows, rows,
                                   MAX_FRESH * shape.texts)
        self._staged = torch.zeros(self._parts[-1].stop, dtype=int32, device=device)
        entries, table, tokens, self._parents, texts, self._fresh = (self._staged[part] for part in self._parts)
        self.table = table.view(torch.int64).view(shape.layers, shape.texts, 5)
        self.text_rows = TextRows(tokens, torch.zeros(rows, rows, dtype=int32, device=device),
                                  empty(rows, dtype=int32), texts, entries.view(torch.int64),
                                  empty(rows, shape.window, dtype=int32), empty(rows, shape.window))
        self.support = TextSupport(self.text_rows, vocabulary)
        self.bests, self._ids = empty(rows, num), empty(rows, num, dtype=int32)
        self._scores = empty(rows, num, dtype=torch.float64)
        self.choices, self.walked = (empty(rows, dtype=int32) for _ in range(2))
        self.targets = empty(rows, dtype=torch.int64)
        self.outcome = empty(shape.texts + 2 * rows, dtype=int32)
        if source is not None:
            self.given = empty(rows, source.head.in_features, dtype=source.head.dtype).zero_()
            self._normed, self._sums = torch.empty_like(self.given), empty(source.head.num_sums(rows))
            self._logits = empty(rows, vocabulary)

    def load(self, trees: Sequence[TextTree], firsts: Sequence[int]) -> None:
        """One copy to the device. A padding row is of text 0 and in no tree; a padding text has no rows."""
        staged = np.zeros(len(self._staged), dtype=np.int32)
        settings, stores, tokens, parents, texts, new = (staged[part] for part in self._parts)
        entries, fresh = settings.view(np.int64).reshape(-1, ENTRY), new.reshape(self.shape.texts, -1)
        table, parents[:] = stores.view(np.int64).reshape(self.table.shape), -1
        for text, (tree, first) in enumerate(zip(trees, firsts, strict=True)):
            own, num_fresh = slice(first, first + len(tree.tokens)), len(tree.fresh)
            tokens[own], texts[own] = tree.tokens, text
            parents[own] = [parent if parent < 0 else parent + first for parent in tree.parents]
            fresh[text, :num_fresh] = tree.fresh
            entries[text] = entry_of(tree.text, tree.required, tree.text.length + num_fresh, num_fresh)
            entries[text, 4:7] = tree.cached, first, len(tree.tokens)
            if self.shape.layers:
                table[:, text] = [store.addresses for store in tree.stores]
        self._staged.copy_(torch.from_numpy(staged), non_blocking=True)

    def run(self, needs: TextNeeds) -> None:
        """As `choose`, from the rows in `given`."""
        assert self.source is not None
        self.source.launch(self.given, self._normed, self._sums, self._logits)
        self.choose(self._logits, needs)

    def choose(self, logits: Tensor, needs: TextNeeds) -> None:
        """Launches that do not depend on the buffers' contents, as a graph requires. Overwrites logits [R, V]."""
        of, (rows, vocabulary), device = self.text_rows, logits.shape, logits.device
        num, numbers = ceil_div(vocabulary, BLOCK), of.entries.view(torch.float64)
        self.prepare(logits, needs)
        scores: Tensor = self.bests
        if needs.has_noise:
            scores = self._scores
            if needs.searches:
                self.support.read_filters()
            limits, flags = self.support.find(logits, self.bests, needs)
            jit_choice.best_in_blocks_kernel[(rows, num)](
                logits, self.bests, of.depths, of.entries, numbers, of.texts, *limits, scores, self._ids, vocabulary,
                num, 0, BLOCK=BLOCK, BLOCKS=padded_size(num), WIDTH=1, HAS_NOISE=True, **flags, **chained(device))
        jit_choice.choose_tokens_kernel[(rows,)](self.bests, scores, self._ids, self.choices, num,
                                                 BLOCKS=padded_size(num), **chained(device))
        jit_choice.walk_trees_kernel[(self.shape.texts,)](
            self.choices, of.tokens, self._parents, of.entries, self.walked, self.targets, self.outcome, rows,
            BLOCK=padded_size(rows), num_warps=1, **chained(device))

    def prepare(self, logits: Tensor, needs: TextNeeds) -> None:
        """Append new tokens to the texts, edit the logits of the trees, and find the largest one of each block."""
        of, (rows, vocabulary) = self.text_rows, logits.shape
        num = ceil_div(vocabulary, BLOCK)
        append_tokens(of.entries, self._fresh)
        jit_attention.tree_paths_kernel[(rows,)](self._parents, of.path, of.depths, rows, num_warps=1, **UNFUSED)
        of.edit(logits, needs)
        jit_choice.block_maxima_kernel[(rows, num)](logits, self.bests, self._ids, vocabulary, num, BLOCK=BLOCK,
                                                    **chained(logits.device))


class TextChoices:
    """Chooses tokens, and keeps the memory of the latest numbers of rows and texts."""

    def __init__(self) -> None:
        self._buffers: RecentlyUsed[_Shape, ChoiceBuffers] = RecentlyUsed(_MAX_BUFFERS)

    def launch(self, source: LogitsSource | None, given: Tensor, trees: Sequence[TextTree]) -> Chosen:
        """Begin the choices of texts whose trees fit into one graph.

        source  the logits' source, for given [R, hidden], the last layer's output for the rows of all trees, one text
                after another; None: given are the logits [R, V] float32, which are overwritten
        """
        return self._launch(source, given, trees)[0]

    def _launch(self, source: LogitsSource | None, given: Tensor,
                trees: Sequence[TextTree]) -> tuple[Chosen, ChoiceBuffers]:
        rows, needs = len(given), TextNeeds.of([(tree.text, tree.required) for tree in trees])
        buffers, firsts = self.loaded(source, given, trees)
        with on_device(given.device):
            if source is None:
                buffers.choose(given, needs)
            else:
                buffers.given[:rows].copy_(given)
                if buffers.shape.rows in BUCKETS:
                    source.graphs.run(buffers, partial(buffers.run, needs), needs)
                else:
                    buffers.run(needs)
        shape = buffers.shape.texts, buffers.shape.rows
        return Chosen(buffers.choices[:rows], buffers.walked[:rows], buffers.targets[:rows], buffers.outcome, shape,
                      firsts), buffers

    def loaded(self, source: LogitsSource | None, given: Tensor,
               trees: Sequence[TextTree]) -> tuple[ChoiceBuffers, list[int]]:
        """Buffers with these trees, and the row of each tree's root. See `launch`."""
        counts = [len(tree.tokens) for tree in trees]
        require(len(given) == sum(counts) and (source is not None or given.is_contiguous()), f"{sum(counts)} rows",
                given.shape)
        for tree in trees:
            tree.text.make_room(len(tree.fresh))
        firsts = [0, *accumulate(counts[:-1])]
        buffers = self._buffers_for(source, given, trees)
        buffers.load(trees, firsts)
        for tree in trees:
            tree.text.has_appended(len(tree.fresh))
        return buffers, firsts

    def _buffers_for(self, source: LogitsSource | None, given: Tensor, trees: Sequence[TextTree]) -> ChoiceBuffers:
        rows, vocabulary, head = given.shape[0], given.shape[1], None
        if source is not None:
            rows = bucket_of(rows)
            vocabulary, head = source.head.out_features, id(source.head)
        shape = _Shape(rows, padded_size(len(trees), 1), len(trees[0].stores),
                       longest_window([tree.text for tree in trees]), vocabulary, head)
        return self._buffers.get(shape, lambda: ChoiceBuffers(source, shape, given.device))

    def run(self, source: LogitsSource, hidden: Tensor, k: Tensor, v: Tensor,
            trees: Sequence[TextTree]) -> list[tuple[list[int], list[int]]]:
        """Of each text the nodes of the path that the target accepts, and its choices at them, whose rows are kept.

        hidden  see `launch`
        k, v    [L, R, Hkv, D] of these rows

        A choice of -1 means that the logits are not finite. Waits for the device, once. A forward of more rows than fit
        into a graph takes several graphs.
        """
        require(len(hidden) == k.shape[1], "a row for each node", k.shape)
        parts, start = _parts(trees), 0
        made = []
        for part in parts:
            own = slice(start, start + sum(len(tree.tokens) for tree in part))
            chosen, buffers = self._launch(source, hidden[own], part)
            with on_device(hidden.device):
                texts = RowsOfTexts(buffers.table, buffers.text_rows.texts[: own.stop - start])
                scatter_rows(k[:, own], v[:, own], part[0].stores, chosen.path, chosen.targets, texts)
            # The next part may have the same memory.
            made.append(chosen if len(parts) == 1 else chosen._replace(outcome=chosen.outcome.clone()))
            start = own.stop
        read = _read(made[0].outcome if len(parts) == 1 else torch.cat([chosen.outcome for chosen in made]))
        walks, start = list[tuple[list[int], list[int]]](), 0
        for chosen in made:
            walks += chosen.walks(read[start : start + len(chosen.outcome)])
            start += len(chosen.outcome)
        return walks


def _read(outcome: Tensor) -> list[int]:
    """Waits for the device."""
    read: list[int] = outcome.tolist()
    return read


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
