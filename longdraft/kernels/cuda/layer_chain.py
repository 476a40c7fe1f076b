"""Chains of drafts from trained layers (longdraft/parts/eagle.py and glide.py), wholly on the device.

    first token   [new rows of the text: embed | layers] | logits of the text's last row | edit, rank
    each further  best guess after the text | embed | layers | logits | edit, rank

Three CUDA graphs, of the first token, of one and of four further ones, are replayed as often as it takes. Each token
reads the layers once for all texts. Rows of the text that are new since the last chain are read in the first graph. So
the host waits for nothing in between. Decoder layers have the kernels of `layers.CudaLayers`; glide's layer runs
operation by operation, as from the host. Places are read from the device's memory, and so are the addresses of the
stores of several texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.chain_plan import DraftLayers, ReadsUnreadRows, UnreadRows
from longdraft.kernels.cuda.attention import AttentionWorkspace
from longdraft.kernels.cuda.chain_rows import ChainRows, Chains, RowsShape, TextDraft, in_graphs
from longdraft.kernels.cuda.forward_buffers import Embedding, ForwardBuffers
from longdraft.kernels.cuda.graph_cache import GraphCache
from longdraft.kernels.cuda.kv_store import CudaStore, RowsOfTexts, cuda_stores, move_rows
from longdraft.kernels.cuda.launch import padded_size, staged_parts
from longdraft.kernels.cuda.layers import CudaLayers
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.cuda.text_rows import TextNeeds
from longdraft.kernels.interface import KV

_FEWEST_ROWS = 8  # of a text that a graph reads: products compute 16 rows at a time anyway


class RowPlaces(NamedTuple):
    """Where R rows of each of T texts are, on the device.

    where   int64 [2 T]: rows of a text that are visible, and the slot of its next row, the one after them
    read    as `where`, for a store that is only read: the row's own key is the last of the visible ones
    slots   int64 [T R], of any stride: of each row; negative: it is not written
    tables  int64 [L, T, 5]: the stores of the texts (`CudaStore.addresses`); None: there is one text
    rooms   slots that one of them has at most, for each of L stores; of one text they are not needed
    """

    where: Tensor
    read: Tensor
    slots: Tensor
    tables: Tensor | None = None
    rooms: Sequence[int] = ()


class _PlacedOperations(CudaOperations):
    """Operations whose attention is that of rows of each text, at `places`. Each row's parent is the one before it.

    layers  whose decoder layers have fused kernels, if they have any (`RunsLayers`)
    stores  of one text; the last one is only read if `has_read`
    """

    def __init__(self, ops: CudaOperations, layers: DraftLayers, places: RowPlaces, stores: Sequence[CudaStore],
                 has_read: bool) -> None:
        self.__dict__.update(ops.__dict__)
        self._num_texts, rows, device = len(places.where) // 2, len(places.slots), ops.device
        self._places, self._serials = places, [store.serial for store in stores]
        self._read = len(stores) - 1 if has_read else None
        self._of_text = rows // self._num_texts
        self._rows = torch.arange(rows, device=device)
        self._texts = torch.arange(rows, dtype=torch.int32, device=device) // self._of_text
        self._parents = torch.arange(rows, dtype=torch.int32, device=device) % self._of_text - 1
        self._work: dict[int, AttentionWorkspace] = {}  # by the store's index
        self._stores = stores
        self.buffers: ForwardBuffers | None = None
        if own := layers.decoder_layers:
            self._layers = CudaLayers(ops, *own)
            buffers = self.buffers = ForwardBuffers(self._layers, rows, stores, False, texts=self._num_texts,
                                                    room=min(places.rooms) if places.rooms else None)
            buffers.parents, buffers.where = self._parents, places.where
            buffers.table = places.tables

    def layers_forward(self, x: Tensor, source: Tensor | None, rotations: tuple[Tensor, Tensor]) -> Tensor:
        """See `RunsLayers`. A row without a slot is written after the others of its text."""
        buffers = self.buffers
        assert buffers is not None
        buffers.x_in, (buffers.cos, buffers.sin) = x, rotations
        self._layers.run(buffers, self._stores, source)
        return buffers.x

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        (store,), places, (rows, heads, dim) = cuda_stores([kv.store]), self._places, q.shape
        index = self._serials.index(store.serial)
        room = places.rooms[index] if places.rooms else store.capacity
        texts = None if places.tables is None else RowsOfTexts(places.tables[index], self._texts)
        where, slots = (places.read, None) if index == self._read else (places.where, places.slots)
        if index not in self._work:
            plan = self.attention_plan(heads, store.heads, dim)
            self._work[index] = AttentionWorkspace(plan, rows, room, self.device, self._num_texts)
        return self._attended(self._work[index], q, kv, where, room, window, self._rows, slots, texts)


class LayerRows:
    """The rows of texts that layers compute: of a chain one of each text, from which they go on."""

    def __init__(self, part: TextLayers, places: RowPlaces) -> None:
        """part: of any text."""
        stores, ops, row, (table, _) = part.stores, part.ops, part.row, part.layers.embedding
        assert isinstance(table, CudaLinear)
        rows, dim, width, device = len(places.slots), stores[0].dim, table.in_features, ops.device
        self.stores, self.ops = stores, _PlacedOperations(ops, part.layers, places, stores, part.has_read)
        buffers = self.ops.buffers
        self.row = torch.zeros(rows, row.shape[1], dtype=row.dtype, device=device) if buffers is None else buffers.x
        self.embedded = torch.zeros(rows, width, dtype=ops.dtype, device=device)
        self.cos, self.sin = (torch.zeros(rows, dim // 2, device=device) for _ in range(2))

    def go_on(self, layers: DraftLayers) -> None:
        """Compute the next rows, from `embedded`, `cos` and `sin`."""
        self.row.copy_(layers.next_row(self.ops, self.row, self.embedded, (self.cos, self.sin), self.stores))


class NewRows(NamedTuple):
    """The size of a graph that reads rows of each text, and then ranks the first token after it.

    rows   of each text
    moves  of rows of each text's stores, before
    """

    rows: int
    moves: int

    @classmethod
    def of(cls, parts: Sequence[TextLayers]) -> NewRows | None:
        """Of a graph for these texts; None: all their rows are read."""
        unread = [part.unread for part in parts if part.unread is not None]
        if not unread:
            return None
        return cls(padded_size(max(len(each.tokens) for each in unread), _FEWEST_ROWS),
                   padded_size(max(len(each.moves) for each in unread)))


class TextLayers(NamedTuple):
    """A text's part of a launch.

    vocabulary  number of logits
    stores      of each layer; the last one is only read if `has_read`
    row         [1, hidden], the layers' output for the text's last token; with `unread`, it is written there
    length      rows of the stores that are visible; the drafts' rows are written after them
    num_read    rows that are visible of the store that is only read
    unread      the last of the visible rows, which are read before; None: all are read
    """

    draft: TextDraft
    layers: DraftLayers
    ops: CudaOperations
    vocabulary: int
    stores: Sequence[CudaStore]
    has_read: bool
    row: Tensor
    length: int
    num_read: int
    unread: UnreadRows | None = None

    @property
    def graphs(self) -> GraphCache:
        return self.ops.graphs


class _Shape(NamedTuple):
    """What the memory of some chains depends on, besides that of their rows: of several texts the slots that each store
    has at most, of a text by itself the serials of its stores."""

    rows: RowsShape
    stores: tuple[int, ...]


class _Reader:
    """The memory of rows of T texts that are read before their chains."""

    def __init__(self, size: NewRows, given: Sequence[TextLayers], places: RowPlaces) -> None:
        """given: some texts' parts; places: of the chains."""
        part, states = given[0], next(each.unread.states for each in given if each.unread is not None)
        texts, device, half = len(places.where) // 2, part.ops.device, part.stores[0].dim // 2
        rows = texts * size.rows
        self._size, self._texts = size, texts
        self._parts = staged_parts(4 * texts, 4 * texts, 2 * rows, 6 * texts * size.moves, 2 * texts, rows, rows * half,
                                   rows * half, texts * 2 * half)
        self._staged = torch.zeros(self._parts[-1].stop, dtype=torch.int32, device=device)
        parts = [self._staged[each] for each in self._parts]
        where, read, slots, moves, self._last = (each.view(torch.int64) for each in parts[:5])
        self._tokens, (cos, sin, turns) = parts[5], (each.view(torch.float32) for each in parts[6:])
        self._moves, self._turns = moves.view(texts, size.moves, 3), turns.view(texts, 2, half)
        self._tables = None if places.tables is None else places.tables[: len(part.stores) - part.has_read]
        self._rows = LayerRows(part, places._replace(where=where, read=read, slots=slots))
        self._rows.cos, self._rows.sin = cos.view(rows, half), sin.view(rows, half)
        self._states = torch.zeros(states.shape[0], rows, states.shape[2], dtype=states.dtype, device=device)
        self._held = torch.zeros(texts + rows, part.row.shape[1], dtype=part.row.dtype, device=device)

    def inputs(self, parts: Sequence[TextLayers]) -> Iterator[Tensor]:
        """What `load` uploads, and what it uploads again after a capture, which has moved the rows. A text that has
        read all its rows goes on from the given one."""
        staged = np.zeros(len(self._staged), dtype=np.int32)
        given = [staged[each] for each in self._parts]
        where, read, slots, moves, last = (each.view(np.int64) for each in given[:5])
        tokens, (cos, sin, turns) = given[5], (each.view(np.float32) for each in given[6:])
        moves, slots[:] = moves.reshape(self._texts, -1, 3), -1
        moves[:], last[:] = -1, range(self._texts)
        for text, part in enumerate(parts):
            if (unread := part.unread) is None:
                where[2 * text + 1] = part.length  # rows that are not read go after the visible ones
                continue
            count, first = len(unread.tokens), text * self._size.rows
            before, own = part.length - count, slice(first, first + count)
            where[2 * text : 2 * text + 2], read[2 * text : 2 * text + 2] = before, part.num_read - 1
            slots[own], tokens[own] = range(before, part.length), unread.tokens
            last[text] = self._texts + own.stop - 1
            if unread.moves:
                moves[text, : len(unread.moves)] = unread.moves
            for turn, all_turns in zip(unread.rotations, (cos, sin), strict=True):
                all_turns.reshape(len(slots), -1)[own] = turn.numpy()
            for place, turn in enumerate(unread.turn or ()):
                turns.reshape(self._texts, 2, -1)[text, place] = turn[0].numpy()
        yield torch.from_numpy(staged)
        staged = staged.copy()
        staged[self._parts[3]] = -1
        yield torch.from_numpy(staged)

    def load(self, inputs: Iterator[Tensor], parts: Sequence[TextLayers]) -> None:
        """Set what the graph reads: a copy, and one for each text."""
        self._staged.copy_(next(inputs), non_blocking=True)
        for text, part in enumerate(parts):
            if part.unread is None:
                self._held[text : text + 1].copy_(part.row)
            else:
                first, count = text * self._size.rows, len(part.unread.tokens)
                self._states[:, first : first + count].copy_(part.unread.states)

    def run(self, layers: DraftLayers, row: Tensor) -> None:
        """Read the rows, and write the last ones to `row`."""
        rows, (table, factor) = self._rows, layers.embedding
        assert isinstance(table, CudaLinear) and isinstance(layers, ReadsUnreadRows)
        own = rows.stores if self._tables is None else rows.stores[: len(self._tables)]
        move_rows(own, self._moves, self._turns, self._tables)
        Embedding(table, factor).of_tokens(self._tokens, rows.embedded)
        self._held[self._texts :].copy_(layers.read_rows(rows.ops, self._states, rows.embedded, (rows.cos, rows.sin),
                                                         rows.stores))
        torch.index_select(self._held, 0, self._last, out=row)

    def hand_out(self, parts: Sequence[TextLayers]) -> None:
        """Write the last rows to those of the parts."""
        for text, part in enumerate(parts):
            if part.unread is not None:
                last = self._texts + text * self._size.rows + len(part.unread.tokens) - 1
                part.row.copy_(self._held[last : last + 1])


class _Buffers:
    """The memory of chains of one shape.

    part   of any text
    rooms  slots that each store of several texts has at most; none: there is one text
    """

    def __init__(self, shape: RowsShape, part: TextLayers, rooms: tuple[int, ...]) -> None:
        texts, device = shape.texts, part.ops.device
        num = len(part.stores) if rooms else 0  # of tables
        self.rows = ChainRows(shape, part.stores[0].dim // 2, device)
        self._parts = staged_parts(4 * texts, 4 * texts, 2 * 5 * num * texts)
        self._staged = torch.zeros(self._parts[-1].stop, dtype=torch.int32, device=device)
        where, read, tables = (self._staged[each].view(torch.int64) for each in self._parts)
        self.where = where
        self._places = RowPlaces(where, read, where.view(-1, 2)[:, 1], tables.view(num, texts, 5) if rooms else None,
                                 rooms)
        self.readers: dict[NewRows, _Reader] = {}  # few, because their sizes are powers of two
        self._spares = [store.empty_like() for store in part.stores[:num]]
        for spare in self._spares:  # of padding texts
            spare.reserve_drafts(1)
        self.layers = LayerRows(self._without_stores(part), self._places)

    def inputs(self, parts: Sequence[TextLayers]) -> tuple[Tensor, Tensor, Callable[[], object]]:
        """What `load` gets."""
        staged = np.zeros(len(self._staged), dtype=np.int32)
        where, read, tables = (staged[each].view(np.int64) for each in self._parts)
        if self._spares:
            tables = tables.reshape(len(self._spares), -1, 5)
            tables[:] = np.array([spare.addresses for spare in self._spares])[:, None]
        for text, part in enumerate(parts):
            where[2 * text : 2 * text + 2] = part.length - 1  # the last row, from which the next one goes on
            read[2 * text : 2 * text + 2] = part.num_read - 1
            if self._spares:
                tables[:, text] = [store.addresses for store in part.stores]
        return torch.from_numpy(staged), self.rows.inputs([part.draft for part in parts]), self._rows_of(parts)

    def _without_stores(self, part: TextLayers) -> TextLayers:
        """The part, whose stores are freed when its text ends. Graphs of several texts read those of the tables."""
        return part._replace(stores=self._spares) if self._spares else part

    def _rows_of(self, parts: Sequence[TextLayers]) -> Callable[[], object]:
        """What loads the rows from which the chains begin, or those that are read before."""
        if (size := NewRows.of(parts)) is None:
            return partial(torch.cat, [part.row for part in parts], out=self.layers.row[: len(parts)])
        if size not in self.readers:
            self.readers[size] = _Reader(size, [self._without_stores(part) for part in parts], self._places)
        reader = self.readers[size]
        return partial(reader.load, reader.inputs(parts), parts)

    def load(self, placed: Tensor, staged: Tensor, load_rows: Callable[[], object], needs: TextNeeds) -> None:
        """Set the state from which the chains begin: some copies, and a launch or two."""
        self._staged.copy_(placed, non_blocking=True)
        self.rows.load(staged, needs)
        load_rows()


class LayerChains(Chains[TextLayers, _Buffers]):
    """Chains with one set of layers."""

    def _buffers_for(self, parts: Sequence[TextLayers]) -> _Buffers:
        first = parts[0]
        rows, rooms = RowsShape.of([part.draft for part in parts], first.vocabulary), tuple[int, ...]()
        if len(parts) > 1:
            rooms = tuple(padded_size(max(store.capacity for store in own))
                          for own in zip(*(part.stores for part in parts), strict=True))
        shape = _Shape(rows, rooms or tuple(store.serial for store in first.stores))
        return self._buffers.get(shape, lambda: _Buffers(rows, first, rooms))

    def _sizes(self, parts: Sequence[TextLayers]) -> list[int | NewRows]:
        return [NewRows.of(parts) or 0, *in_graphs(max(part.draft.places for part in parts) - 1)]

    def _run(self, buffers: _Buffers, first: TextLayers, size: int | NewRows, needs: TextNeeds) -> None:
        """`size` tokens of each text after those that are ranked. These are ranked first if it is 0, and if it is the
        size of new rows, which are read before."""
        layers, rows, own, (table, factor) = first.layers, buffers.rows, buffers.layers, first.layers.embedding
        assert isinstance(table, CudaLinear)
        if isinstance(size, NewRows):
            buffers.readers[size].run(layers, own.row)
            size = 0
        if not size:
            rows.rank(layers.logits(own.row), needs)
        for _ in range(size):
            rows.end(buffers.where)
            rows.embed(table, factor, own.embedded, own.cos, own.sin)
            own.go_on(layers)
            rows.rank(layers.logits(own.row), needs)

    def _end(self, buffers: _Buffers, parts: Sequence[TextLayers]) -> None:
        if size := NewRows.of(parts):
            buffers.readers[size].hand_out(parts)
