"""The memory of a forward of all layers: inputs, outputs, and intermediate results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.cuda import jit_rows
from longdraft.kernels.cuda.attention import AttentionPlan, AttentionWorkspace
from longdraft.kernels.cuda.delta import Paths, PlacedStates, addresses
from longdraft.kernels.cuda.jit_delta import ENTRY
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores
from longdraft.kernels.cuda.launch import ALIGNED, ceil_div, chained, on_device, require, staged_parts
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.delta import DeltaState
from longdraft.kernels.interface import LayersKV, RemainderMaps, TokenRows
from longdraft.kernels.weights import Geometry, LayerWeights

EMBED_BLOCK = 1024  # columns of an embedding that a program reads
_ADDRESSES = 5  # of a store: `CudaStore.addresses`
Array = TypeVar("Array", Tensor, NDArray[Any])


class EmbeddedRows(NamedTuple):
    """Rows x [R, hidden] and their rotations cos, sin [R, S D / 2], on the device. x may have more columns: see
    `Decoder.forward`."""

    x: Tensor
    cos: Tensor
    sin: Tensor

    def cut(self, rows: slice) -> EmbeddedRows:
        """Some of the rows."""
        return EmbeddedRows(*(part[rows] for part in self))


class Embedding(NamedTuple):
    """See `TokenRows`."""

    table: CudaLinear
    factor: float

    def of_tokens(self, tokens: Tensor, x: Tensor) -> None:
        """Write the embeddings x [R, hidden] of tokens [R], int32 on the device."""
        (table, factor), (rows, hidden) = self, x.shape
        with on_device(x.device):
            jit_rows.embed_rows_kernel[(rows, ceil_div(hidden, EMBED_BLOCK))](
                tokens, table.weight, x if table.scale is None else table.scale, x, factor, HIDDEN=hidden,
                BLOCK=EMBED_BLOCK, HAS_SCALE=table.scale is not None, HAS_FACTOR=factor != 1, **table.options(),
                **chained(x.device))


class TextPlaces(NamedTuple):
    """Where a text's rows are, and go.

    where      rows of its stores that are visible, and the slot of its drafted row 0
    remainder  see `LayersKV`; its memory must be kept while the forward runs
    states     before the rows, after them, and of a chain those that its next rows fill, each of all delta layers
    """

    where: tuple[int, int]
    stores: Sequence[CudaStore]
    remainder: RemainderMaps
    states: Sequence[Sequence[DeltaState]]

    @classmethod
    def of(cls, kv: LayersKV) -> TextPlaces:
        stores = cuda_stores(kv.stores)
        return cls((kv.length, min(store.room for store in stores)), stores, kv.remainder,
                   ([rows.before for rows in kv.deltas], [rows.after for rows in kv.deltas]))


class Staged(NamedTuple, Generic[Array]):
    """What is uploaded together, in the memory of the host or of the device.

    where     int64 [texts, 2]: `TextPlaces.where`
    cos, sin  float32 [R, S D / 2]
    parents   int32 [R], in the text's rows
    tokens    int32 [R]
    targets   int64 [R]: where the given rows go, of several texts that are embedded
    stores    int64 [L, texts, 5]: the stores of several texts
    maps      int64 [L, texts], and one more of an odd number of texts: where the maps of each text's remainder are; 0:
              it has none
    counts    int64 [texts]: of rows that change states; a padding text has none
    ends      int64 [texts]: of a chain, the position after its last row
    states    int64 [delta layers, texts, ENTRY]: see `jit_delta`
    """

    where: Array
    cos: Array
    sin: Array
    parents: Array
    tokens: Array
    targets: Array
    stores: Array
    maps: Array
    counts: Array
    ends: Array
    states: Array


_DTYPES: Staged[Any] = Staged("int64", "float32", "float32", "int32", "int32", *["int64"] * 6)


class DeviceLayers:
    """What the memory of a forward depends on, of its layers. `CudaLayers` runs them."""

    def __init__(self, ops: CudaOperations, layers: Sequence[LayerWeights], geometry: Geometry) -> None:
        self.ops, self.layers, self.geometry = ops, tuple(layers), geometry

    @property
    def hidden(self) -> int:
        return len(self.layers[0].attention_norm)

    @property
    def attending(self) -> list[LayerWeights]:
        """The layers that have keys and values."""
        return [layer for layer in self.layers if layer.delta is None and layer.source is None]

    @property
    def width_given(self) -> int:
        """Inputs of the layers besides their rows (`ExtraInput`), of all layers together."""
        own = [layer.extra.out for layer in self.layers if layer.extra]
        return sum(out.in_features for out in own if isinstance(out, CudaLinear))

    def plan(self, layer: LayerWeights) -> AttentionPlan:
        kv_heads, dim, _ = layer.heads_in(self.geometry)
        return self.ops.attention_plan(self.geometry.num_heads, kv_heads, dim)


class ForwardBuffers:
    """The memory of one bucket of rows over one cache, or of several texts. It holds no reference to a cache itself,
    which is freed when its request ends.

    x_in, given  [R, hidden], and columns that are given besides; None: there are none
    attended     of each layer with keys and values; `attention_output` of all, see `AttentionOutput` where they differ
    k, v         [L, R, Hkv, D]
    mixed, gates [delta layers, R, C] and [delta layers, R, 2 Hv]: see `DeltaRows`
    """

    def __init__(self, of: DeviceLayers, rows: int, stores: Sequence[CudaStore], has_remainder: bool,
                 taps: tuple[int, ...] = (), embedding: Embedding | None = None, texts: int = 1,
                 room: int | None = None, width_given: int = 0) -> None:
        """embedding: of the tokens that `load` gets; None: it gets embedded rows. texts: that share the rows, as many
        each, and `room`: positions that each one's stores have at most; None: those of `stores`. width_given: columns
        of the embedded rows that are given besides."""
        ops, layers, geometry, attending = of.ops, of.layers, of.geometry, of.attending
        device, heads = ops.device, geometry.num_heads
        sizes = [layer.heads_in(geometry) for layer in attending]
        kv_heads, dim = max(each.num_kv for each in sizes), max(each.dim for each in sizes)

        def zeros(*shape: int, dtype: torch.dtype = ops.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num, half = len(attending), geometry.num_ropes * (dim // 2)
        self.rows, self.text_rows, self.texts = rows, rows // texts, texts
        self.room = min(store.room for store in stores) if room is None else room
        self.embedding, self.taps, self.has_remainder = embedding, taps, has_remainder
        deltas = [layer.delta for layer in layers if layer.delta is not None]
        kinds = {each.shape for each in deltas}
        require(len(kinds) <= 1, "delta layers of one shape", kinds)
        self.deltas, is_shared, has_states = deltas, texts > 1, len(deltas) > 0
        shapes: Staged[Any] = Staged(
            (texts, 2), (rows, half), (rows, half), (rows,), (rows,),
            ((rows if is_shared and embedding is None else 0),), (num * is_shared, texts, _ADDRESSES),
            (num * has_remainder, texts + texts % 2), (texts * has_states,), (texts * has_states,),
            (len(deltas), texts, ENTRY.value))
        parts = staged_parts(*(math.prod(shape) * np.dtype(dtype).itemsize // 4
                               for shape, dtype in zip(shapes, _DTYPES, strict=True)))
        self._layout = [(shape, np.dtype(dtype), 4 * part.start if 0 not in shape else 0)
                        for shape, dtype, part in zip(shapes, _DTYPES, parts, strict=True)]
        self.staged = zeros(parts[-1].stop + -parts[-1].stop % ALIGNED, dtype=torch.int32)
        inputs: Staged[Tensor] = Staged(*(self.staged[part].view(getattr(torch, dtype)).view(shape)
                                          for part, dtype, shape in zip(parts, _DTYPES, shapes, strict=True)))
        self.inputs = inputs
        self.where, (self.cos, self.sin, self.parents, self.tokens) = inputs.where.view(-1), inputs[1:5]
        self.table = inputs.stores if is_shared else None
        self.x_in, self.x, self.normed = (zeros(rows, of.hidden) for _ in range(3))
        self.given = zeros(rows, width_given) if width_given else None
        self.k, self.v = (zeros(num, rows, kv_heads, dim) for _ in range(2))
        self._whole = zeros(3, num, rows, heads, dim)  # queries, outputs and content of attention
        q, output, content = self._whole
        self.attention_output = AttentionOutput(q, output, zeros(num, rows, heads, dtype=torch.float32), content)
        self._narrow: list[tuple[Tensor, Tensor]] = []  # layers whose heads are smaller: which, and as `_whole`
        attended = [self._whole[:, layer] for layer in range(num)]
        for size in sorted({each.dim for each in sizes} - {dim}):
            which = [layer for layer, each in enumerate(sizes) if each.dim == size]
            own = zeros(3, len(which), rows, heads, size)
            self._narrow.append((torch.tensor(which, device=device), own))
            for place, layer in enumerate(which):
                attended[layer] = own[:, place]
        self.attended = [AttentionOutput(made[0], made[1], lse, made[2])
                         for made, lse in zip(attended, self.attention_output.lse, strict=True)]
        dense = [layer.gate_up.out_features // 2 for layer in layers if layer.gate_up is not None]
        self.inner = zeros(rows, max(dense, default=0))
        linears = [each for layer in layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down, layer.gates,
                                                         *(layer.extra[:2] if layer.extra else ()))]
        self.sums = zeros(max(each.num_sums(rows) for each in linears if isinstance(each, CudaLinear)),
                          dtype=torch.float32)
        self.work: dict[AttentionPlan, AttentionWorkspace] = {}
        for plan in dict.fromkeys(of.plan(layer) for layer in layers if layer.delta is None):
            self.work[plan] = AttentionWorkspace(plan, rows, self.room, device, texts, next(iter(self.work.values()),
                                                                                            None))
        self._remainders = zeros(rows * heads * (dim + 1) * has_remainder, dtype=torch.float32)
        self.tapped = zeros(len(taps), rows, of.hidden)
        shape = deltas[0].shape if deltas else None
        self.mixed = zeros(len(deltas), rows, shape.channels if shape else 0)
        self.gates = zeros(len(deltas), rows, 2 * shape.value_heads if shape else 0, dtype=torch.float32)
        self.states = PlacedStates(inputs.states, inputs.counts, inputs.counts)

    @property
    def sizes(self) -> list[int]:
        """Rows of each text."""
        return [self.text_rows] * self.texts

    @property
    def trees(self) -> AttentionWorkspace:
        """What has the paths of the rows."""
        return next(iter(self.work.values()))

    @property
    def paths(self) -> Paths:
        return Paths(self.trees.path, self.trees.depths, self.text_rows)

    def tap(self, layer: int) -> Tensor:
        """Where the rows that enter a tapped layer are kept."""
        return self.tapped[self.taps.index(layer)]

    def row_remainder(self, heads: int, dim: int) -> Tensor:
        """[R, H, D + 1], of the layer that runs."""
        size = self.rows * heads * (dim + 1)
        return self._remainders[:size].view(self.rows, heads, dim + 1)

    def join_attention(self) -> None:
        """Copy the attention of layers with smaller heads to the beginning of the rows of `attention_output`."""
        for which, own in self._narrow:
            self._whole[..., : own.shape[-1]].index_copy_(1, which, own)

    def load(self, rows: TokenRows | EmbeddedRows, texts: Sequence[LayersKV], parents: Tensor,
             spares: Sequence[CudaStore] = ()) -> None:
        """Upload the inputs of a forward. Padding rows follow the committed part; their results are not read.

        spares  the stores of padding texts; none: there is one text
        """
        staged, inputs = self.staged_of([TextPlaces.of(kv) for kv in texts], spares)
        start = 0
        for text, count in enumerate(kv.k.shape[1] for kv in texts):
            target = slice(text * self.text_rows, text * self.text_rows + count)
            source = slice(start, start + count)
            inputs.parents[target] = parents[source].numpy()
            if self.deltas:
                inputs.counts[text] = count
            if isinstance(rows, TokenRows):
                inputs.tokens[target] = rows.tokens[source]
                for turn, given in zip((inputs.cos, inputs.sin), (rows.cos, rows.sin), strict=True):
                    turn[target] = given[source].numpy()
            elif self.texts > 1:
                inputs.targets[source] = range(target.start, target.stop)
            start += count
        self.upload(staged)
        if isinstance(rows, EmbeddedRows):
            hidden = self.x_in.shape[1]
            wanted = [(self.x_in, rows.x[:, :hidden]), (self.cos, rows.cos), (self.sin, rows.sin)]
            wanted += [] if self.given is None else [(self.given, rows.x[:, hidden:])]
            for held, part in wanted:
                if self.texts == 1:
                    held[:start].copy_(part)
                else:
                    held.index_copy_(0, self.inputs.targets[:start], part)

    def staged_of(self, texts: Sequence[TextPlaces], spares: Sequence[CudaStore]
                  ) -> tuple[Tensor, Staged[NDArray[Any]]]:
        """What is uploaded for these texts, and its parts, of which those that belong to rows are still missing.

        Padding texts write their rows to the stores `spares`, and have the states of the first text, which they do not
        change.
        """
        staged = np.zeros(len(self.staged), dtype=np.int32)
        inputs: Staged[NDArray[Any]] = Staged(*(np.ndarray(shape, dtype, staged, at)
                                                for shape, dtype, at in self._layout))
        inputs.where[:] = (0, spares[0].room) if spares else texts[0].where
        inputs.parents[:] = -1
        if self.table is not None:
            inputs.stores[:] = np.array([spare.addresses for spare in spares])[:, None]
        for text in range(self.texts):
            places = texts[text] if text < len(texts) else texts[0]
            if self.deltas:
                inputs.states[:, text] = addresses(self.deltas, *places.states)
            if text >= len(texts):
                continue
            inputs.where[text] = places.where
            if self.table is not None:
                inputs.stores[:, text] = [store.addresses for store in places.stores]
            if self.has_remainder and places.remainder is not None:
                inputs.maps[:, text] = _addresses_of(places.remainder)
        return torch.from_numpy(staged), inputs

    def upload(self, staged: Tensor) -> None:
        """Copy what `staged_of` made."""
        self.staged.copy_(staged, non_blocking=True)


def _addresses_of(remainder: Tensor | Sequence[Tensor]) -> Sequence[int]:
    """Where the maps of each layer are."""
    if isinstance(remainder, Tensor):
        require(remainder.is_contiguous() and remainder.dtype == torch.float32, "float32 maps", remainder.dtype)
        first, step = remainder.data_ptr(), 4 * remainder.stride(0)
        return range(first, first + step * len(remainder), step)
    require(all(part.is_contiguous() and part.dtype == torch.float32 for part in remainder), "float32 maps",
            len(remainder))
    return [part.data_ptr() for part in remainder]
