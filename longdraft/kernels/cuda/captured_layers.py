"""Layers that run operation by operation, in one CUDA graph for each number of rows.

The operations are those that the host would launch (longdraft/kernels/layer.py). Attention reads the places of the rows
and their trees from the device's memory, so the graph serves every step. What operations allocate belongs to the graph.

The layers see the rows of several texts as those of one: only attention and delta layers know the texts, each of which
has as many rows. They read the addresses of the texts' stores and states, so the graph serves all texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.cuda import jit_attention
from longdraft.kernels.cuda.attention import AttentionPlan, AttentionWorkspace
from longdraft.kernels.cuda.delta import Paths, PlacedStates, addresses, stacked
from longdraft.kernels.cuda.forward_buffers import EmbeddedRows
from longdraft.kernels.cuda.jit_delta import ENTRY
from longdraft.kernels.cuda.kv_store import CudaStore, RowsOfTexts, cuda_stores
from longdraft.kernels.cuda.launch import UNFUSED, require, staged_parts
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.cuda.shared_forward import TextResults
from longdraft.kernels.delta import DeltaRows, DeltaState, DeltaWeights
from longdraft.kernels.interface import KV, LayersKV, RemainderMaps, Taps
from longdraft.kernels.layer import LayerwiseDecoder
from longdraft.kernels.weights import Geometry, LayerWeights

_ADDRESSES = 5  # of a store: `CudaStore.addresses`


class _Texts(NamedTuple):
    """Texts of as many rows each, on the device.

    num      of texts
    room     positions that each one's stores have at most
    where    int64 [2 num]: of each text, the committed positions, and the slot of drafted row 0
    parents  int32 [R]
    slots    int64 [R]: of each row, in its text's stores; negative: the row is not written
    stores   int64 [L, num, 5]: the stores of all layers with attention; None: of one text, they are known
    maps     int64 [L, num or more]: where the maps of each text's remainder are
    states   of all delta layers, in order
    """

    num: int
    room: int
    where: Tensor
    parents: Tensor
    slots: Tensor
    stores: Tensor | None
    maps: Tensor
    states: PlacedStates


class _TreeOperations(CudaOperations):
    """Operations whose attention is that of trees on the device, one of each text."""

    def __init__(self, ops: CudaOperations, texts: _Texts) -> None:
        self.__dict__.update(ops.__dict__)
        self._texts, rows = texts, len(texts.parents)
        own = rows // texts.num
        path, depths = (torch.zeros(*size, dtype=torch.int32, device=ops.device) for size in ((rows, own), (rows,)))
        self._paths = Paths(path, depths, own)
        self._num_deltas = self._num_maps = 0  # delta layers that have run, and layers with a remainder
        self._layers: dict[int, int] = {}  # by identity of the stores that attention gets
        self._rows = torch.arange(rows, device=ops.device)
        self._text_of_rows = (self._rows // own).int()
        self._work: dict[AttentionPlan, AttentionWorkspace] = {}
        self._has_tree: set[AttentionPlan] = set()

    @property
    def num_texts(self) -> int:
        return self._texts.num

    def begin(self, stores: Sequence[CudaStore]) -> None:
        """A forward begins, whose first attention of each shape computes the trees' paths."""
        self._has_tree.clear()
        self._num_deltas = self._num_maps = 0
        self._layers = {id(store): layer for layer, store in enumerate(stores)}

    def delta_rule(self, weights: DeltaWeights, texts: Sequence[DeltaRows], z: Tensor | None,
                   parents: Tensor) -> Tensor | None:
        (rows,), states = texts, self._texts.states
        assert z is not None
        if not self._num_deltas:
            path, depths, stride = self._paths
            jit_attention.tree_paths_kernel[(len(path),)](self._texts.parents, path, depths, stride, num_warps=1,
                                                          **UNFUSED)
        placed = states._replace(table=states.table[self._num_deltas])
        self._num_deltas += 1
        return self.deltas.run_placed(weights, rows.mixed, rows.gates, z, self._paths, placed)

    def row_remainders(self, content: Tensor, maps: Tensor) -> Tensor:
        table = self._texts.maps[self._num_maps]
        self._num_maps += 1
        return self._mapped(content, maps, table, self._paths.stride)

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        (store,), texts, (rows, heads, dim) = cuda_stores([kv.store]), self._texts, q.shape
        plan, shared = self.attention_plan(heads, store.heads, dim), None
        if texts.stores is not None:
            shared = RowsOfTexts(texts.stores[self._layers[id(store)]], self._text_of_rows)
        if plan not in self._work:
            self._work[plan] = AttentionWorkspace(plan, rows, texts.room, self.device, texts.num)
        work = self._work[plan]
        if plan not in self._has_tree:
            self._has_tree.add(plan)
            work.set_tree(texts.parents)
        return self._attended(work, q, kv, texts.where, texts.room, window, self._rows, texts.slots, shared)


class TextPlaces(NamedTuple):
    """Where a text's rows are.

    states  before the rows, after them, and of a chain those that its next rows fill, each of all delta layers
    """

    stores: Sequence[CudaStore]
    remainder: RemainderMaps
    states: Sequence[Sequence[DeltaState]]


class _Inputs(NamedTuple):
    """What a forward uploads beside its rows, as views of one block: see `_Texts`, and

    targets  int64 [R]: where the given rows go; of a chain, the position after its last row
    """

    parents: NDArray[np.int32]
    where: NDArray[np.int64]
    counts: NDArray[np.int64]
    slots: NDArray[np.int64]
    targets: NDArray[np.int64]
    states: NDArray[np.int64]
    stores: NDArray[np.int64]
    maps: NDArray[np.int64]


class CapturedLayers:
    """The memory of one bucket of rows, over one text's stores or for several texts. It holds no reference to stores.

    rows, texts  of the forward, and how many texts share them
    where        see `_Texts`
    tapped       [taps, rows, hidden]: the rows that entered the tapped layers
    """

    def __init__(self, ops: CudaOperations, layers: Sequence[LayerWeights], geometry: Geometry,
                 rows: int, like: EmbeddedRows, text: LayersKV, texts: int = 1, room: int | None = None,
                 is_chain: bool = False) -> None:
        """like, text: a forward's rows, of any number, and one of its texts. room: positions that the texts' stores
        have at most; None: those of this text's. is_chain: a row's slot is that of drafted row 0."""
        stores, k, (x, cos, _) = cuda_stores(text.stores), text.k, like
        taps = text.taps.layers if text.taps else ()
        self.rows, self.texts, self._taps = rows, texts, taps
        self._room = room = _room_of(stores) if room is None else room
        self._x, self._cos, self._sin = (torch.zeros(rows, part.shape[1], dtype=part.dtype, device=ops.device)
                                         for part in (x, cos, cos))
        self._k, self._v = (torch.zeros(len(k), rows, *k.shape[2:], dtype=k.dtype, device=ops.device)
                            for _ in range(2))
        self.tapped = torch.zeros(len(taps), rows, len(layers[0].attention_norm), dtype=x.dtype, device=ops.device)
        self._deltas = [layer.delta for layer in layers if layer.delta is not None]
        num_stores = len(stores) if texts > 1 else 0
        num_maps = 0 if text.remainder is None else len(stores)
        entries = len(self._deltas) * texts * ENTRY.value, num_stores * texts * _ADDRESSES, num_maps * _even(texts)
        self._parts = staged_parts(rows, 4 * texts, 2 * texts, 2 * rows, 2 * rows, *(2 * each for each in entries))
        self._staged = torch.zeros(self._parts[-1].stop, dtype=torch.int32, device=ops.device)
        tree, *numbers = (self._staged[part] for part in self._parts)
        self.where, self._counts, slots, self._targets, states, table, maps = (
            part.view(torch.int64) for part in numbers)
        self._states = states.view(len(self._deltas), texts, ENTRY.value)
        placed = PlacedStates(self._states, self._counts, self._counts)
        slots = self.where.view(-1, 2)[:, 1] if is_chain else slots
        addresses_of = table.view(num_stores, texts, _ADDRESSES) if num_stores else None
        self._ops = _TreeOperations(ops, _Texts(texts, room, self.where, tree, slots, addresses_of,
                                                maps.view(num_maps, _even(texts)), placed))
        # The operations know the maps.
        self._unread_maps = [torch.zeros(1, device=ops.device)] * num_maps if num_maps else None
        shape = self._deltas[0].shape if self._deltas else None
        self._mixed, self._gates = (
            torch.zeros(len(self._deltas), rows, width, dtype=dtype, device=ops.device) for width, dtype in
            ((shape.channels if shape else 0, ops.dtype), (2 * shape.value_heads if shape else 0, torch.float32)))
        self._decoder = LayerwiseDecoder(self._ops, layers, geometry)
        self._result: tuple[Tensor, AttentionOutput] | None = None

    def load(self, rows: EmbeddedRows, texts: Sequence[LayersKV], parents: Tensor) -> None:
        """Copy the inputs. Padding rows follow the committed positions; their results are not read.

        A padding text reads the stores and states of the first one, and writes nothing.
        """
        staged, inputs = self._new_inputs()
        size, start = self.rows // self.texts, 0
        inputs.where.reshape(-1, 2)[:], inputs.counts[:] = (0, _room_of(cuda_stores(texts[0].stores))), 0
        for text, kv in enumerate(texts):
            count, first, room = kv.k.shape[1], text * size, _room_of(cuda_stores(kv.stores))
            inputs.where[2 * text : 2 * text + 2], inputs.counts[text] = (kv.length, room), count
            inputs.parents[first : first + count] = parents[start : start + count].numpy()
            inputs.slots[first : first + size] = range(room, room + size)
            inputs.targets[start : start + count] = range(first, first + count)
            start += count
        places = [TextPlaces(cuda_stores(kv.stores), kv.remainder, ([rows.before for rows in kv.deltas],
                                                                    [rows.after for rows in kv.deltas]))
                  for kv in texts]
        self._load_addresses(inputs, places, places[0])
        self.upload(staged)
        for held, given in ((self._x, rows.x), (self._cos, rows.cos), (self._sin, rows.sin)):
            if self.texts == 1:
                held[:start].copy_(given)
            else:
                held.index_copy_(0, self._targets[:start], given)

    def _new_inputs(self) -> tuple[Tensor, _Inputs]:
        """What is uploaded, in the host's memory, and its parts."""
        staged = np.full(len(self._staged), -1, dtype=np.int32)
        parts: Any = (staged[part].view(np.int64) for part in self._parts[1:])
        return torch.from_numpy(staged), _Inputs(staged[self._parts[0]], *parts)

    def upload(self, staged: Tensor) -> None:
        """Copy what `_new_inputs` made."""
        self._staged.copy_(staged, non_blocking=True)

    def _load_addresses(self, inputs: _Inputs, texts: Sequence[TextPlaces], padding: TextPlaces) -> None:
        padded = [*texts, *[padding] * (self.texts - len(texts))]
        if self._deltas:
            entries = inputs.states.reshape(len(self._deltas), self.texts, ENTRY.value)
            for text, places in enumerate(padded):
                entries[:, text] = addresses(self._deltas, *places.states)
        if self.texts > 1:
            table = inputs.stores.reshape(-1, self.texts, _ADDRESSES)
            for text, places in enumerate(padded):
                table[:, text] = [store.addresses for store in places.stores]
        if self._unread_maps:
            where = inputs.maps.reshape(-1, _even(self.texts))
            for text, places in enumerate(padded):
                where[:, text] = _addresses_of(places.remainder)

    def run(self, stores: Sequence[CudaStore]) -> None:
        """All layers. The launches do not depend on the buffers' contents, as a graph requires."""
        self._ops.begin(stores)
        taps = Taps(self._taps, self.tapped) if self._taps else None
        unread = DeltaState(self._staged, self._staged)  # the operations know the states
        deltas = [DeltaRows(unread, unread, *parts) for parts in zip(self._mixed, self._gates, strict=True)]
        kv = LayersKV(stores, self._room, self._k, self._v, self._unread_maps, taps=taps, deltas=deltas)
        parents = torch.full((self.rows,), -1, dtype=torch.int32)  # the operations know the trees
        self._result = self._decoder.forward(self._x, self._cos, self._sin, [kv], parents)

    def results(self, texts: Sequence[LayersKV]) -> tuple[Tensor, AttentionOutput]:
        """Copies of what the rows of these texts got, whose k, v, taps and deltas are filled."""
        assert self._result is not None
        hidden, attended = self._result
        made = TextResults(self.rows // self.texts, hidden, attended, self._k, self._v, self.tapped)
        for kv, place in zip(texts, made.places(texts), strict=True):
            if kv.deltas:
                inputs = [each.mixed for each in kv.deltas], [each.gates for each in kv.deltas]
                for parts, found in zip(inputs, (self._mixed, self._gates), strict=True):
                    given = stacked(parts)
                    assert given is not None, "rows of layers of one shape"
                    given.copy_(found[:, place])
        return made.hand_out(texts)


def _room_of(stores: Sequence[CudaStore]) -> int:
    """Positions that all of a text's stores have, and the slot of drafted row 0."""
    return min(store.room for store in stores)


def _even(count: int) -> int:
    """So that rows of so many addresses are aligned to 16 bytes: see `launch.ALIGNED`."""
    return count + count % 2


def _addresses_of(remainder: RemainderMaps) -> Sequence[int]:
    """Where the maps of each layer are. Their memory must be kept while the forward runs."""
    assert remainder is not None, "texts with remainders"
    each = remainder.unbind() if isinstance(remainder, Tensor) else remainder
    require(all(part.is_contiguous() and part.dtype == torch.float32 for part in each), "float32 maps", len(each))
    return [part.data_ptr() for part in each]
