"""The memory of a forward of all layers: inputs, outputs, and intermediate results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels.cuda import jit_rows
from longdraft.kernels.cuda.attention import AttentionPlan, AttentionWorkspace
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores
from longdraft.kernels.cuda.launch import ALIGNED, ceil_div, chained, on_device, require, staged_parts
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.interface import LayersKV, RemainderMaps, TokenRows
from longdraft.kernels.weights import Geometry, LayerWeights


class DecoderOfLayers(Protocol):
    """What runs the layers over the buffers: `CudaDecoder`."""

    ops: CudaOperations
    layers: tuple[LayerWeights, ...]
    geometry: Geometry
    hidden: int
    plan: AttentionPlan

    def run_layers(self, buffers: ForwardBuffers, stores: Sequence[CudaStore]) -> None:
        """All layers over the buffers."""


def weights_of(layer: LayerWeights) -> list[CudaLinear]:
    """qkv, out, gate_up and down."""
    weights = [w for w in (layer.qkv, layer.out, layer.gate_up, layer.down) if isinstance(w, CudaLinear)]
    require(len(weights) == 4, "weights that these kernels packed", [type(w).__name__ for w in layer[:6]])
    return weights


EMBED_BLOCK = 1024  # columns of an embedding that a program reads


class EmbeddedRows(NamedTuple):
    """Rows x [R, hidden] and their rotations cos, sin [R, D / 2], on the device."""

    x: Tensor
    cos: Tensor
    sin: Tensor

    def cut(self, rows: slice) -> EmbeddedRows:
        """Some of the rows."""
        return EmbeddedRows(*(part[rows] for part in self))


def maps_of_all(remainder: RemainderMaps) -> Tensor | None:
    """The maps of layers that do not differ, as one tensor."""
    assert remainder is None or isinstance(remainder, Tensor)
    return remainder


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


class ForwardBuffers:
    """The memory of one bucket of rows over one cache: inputs, outputs, and intermediate results.

    It holds no reference to the cache itself, which is freed when its request ends.
    """

    def __init__(self, decoder: DecoderOfLayers, rows: int, stores: Sequence[CudaStore], has_remainder: bool,
                 taps: tuple[int, ...] = (), embedding: Embedding | None = None, texts: int = 1,
                 room: int | None = None, remainder: Tensor | None = None) -> None:
        """embedding: of the tokens that `load` gets; None: it gets embedded rows. texts: that share the rows, as many
        each, and `room`: positions that each one's stores have at most; None: those of `stores`. remainder: that of one
        text (`LayersKV.remainder`), whose memory the layers read; several texts have addresses."""
        heads, kv_heads, dim = decoder.geometry[:3]
        layers, device, model_dtype = decoder.layers, decoder.ops.device, decoder.ops.dtype

        def zeros(*shape: int, dtype: torch.dtype = model_dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num = len(layers)
        self.rows, self.text_rows, self.texts = rows, rows // texts, texts
        self.x_in, self.x, self.normed = (zeros(rows, decoder.hidden) for _ in range(3))
        self.embedding = embedding
        has_table = texts > 1
        self.parts = staged_parts(4 * texts, rows * (dim // 2), rows * (dim // 2), rows, rows,
                                  2 * 5 * num * texts * has_table, 2 * texts * has_table)
        self.staged = zeros(self.parts[-1].stop + -self.parts[-1].stop % ALIGNED, dtype=torch.int32)
        where, cos, sin, self.parents, self.tokens, table, maps = (self.staged[part] for part in self.parts)
        self.table = table.view(torch.int64).view(num, texts, 5) if has_table else None  # stores of several texts
        self.maps = maps.view(torch.int64) if has_table else None  # addresses of their remainders; 0: a text has none
        self.where = where.view(torch.int64)  # committed positions; slot of drafted row 0
        self.cos, self.sin = (part.view(torch.float32).view(rows, dim // 2) for part in (cos, sin))
        self.k, self.v = (zeros(num, rows, kv_heads, dim) for _ in range(2))
        self.q, self.content, self.output = (zeros(num, rows, heads, dim) for _ in range(3))
        self.lse = zeros(num, rows, heads, dtype=torch.float32)
        self.inner = zeros(rows, max(layer.gate_up.out_features for layer in layers if layer.gate_up) // 2)
        weights = [weight for layer in layers for weight in weights_of(layer)]
        self.sums = zeros(max(weight.num_sums(rows) for weight in weights), dtype=torch.float32)
        self.room = min(store.room for store in stores) if room is None else room
        self.work = AttentionWorkspace(decoder.plan, rows, self.room, device, texts)
        require(remainder is None or remainder.is_contiguous(), "a contiguous remainder", "another")
        self.remainder = remainder
        self.row_remainder = zeros(rows, heads, dim + 1, dtype=torch.float32) if has_remainder else None
        self.taps = taps
        self.tapped = zeros(len(taps), rows, decoder.hidden)

    def tap(self, layer: int) -> Tensor:
        """Where the rows that enter a tapped layer are kept."""
        return self.tapped[self.taps.index(layer)]

    def load(self, rows: TokenRows | EmbeddedRows, texts: Sequence[LayersKV], parents: Tensor,
             spare: CudaStore | None = None) -> None:
        """Upload the inputs of a forward. Padding rows follow the committed part; their results are not read.

        spare  of padding texts; None: there is one text
        """
        staged, start = np.zeros(len(self.staged), dtype=np.int32), 0
        where, *turns, all_parents, tokens, _, _ = (staged[part] for part in self.parts)
        rotations = [part.view(np.float32).reshape(self.rows, -1) for part in turns]
        stores = [cuda_stores(kv.stores) for kv in texts]
        places = [(kv.length, min(store.room for store in own)) for kv, own in zip(texts, stores, strict=True)]
        if spare is None:
            where.view(np.int64)[:] = places[0]
        else:
            self.place_texts(staged, places, stores, [kv.remainder for kv in texts], spare)
        all_parents[:] = -1
        for text, count in enumerate(kv.k.shape[1] for kv in texts):
            target = slice(text * self.text_rows, text * self.text_rows + count)
            source = slice(start, start + count)
            all_parents[target] = parents[source].numpy()
            if isinstance(rows, TokenRows):
                tokens[target] = rows.tokens[source]
                for turn, given in zip(rotations, (rows.cos, rows.sin), strict=True):
                    turn[target] = given[source].numpy()
            start += count
        self.staged.copy_(torch.from_numpy(staged), non_blocking=True)
        if isinstance(rows, EmbeddedRows):
            for held, given in ((self.x_in, rows.x), (self.cos, rows.cos), (self.sin, rows.sin)):
                held[:start].copy_(given)

    def place_texts(self, staged: NDArray[np.int32], places: Sequence[tuple[int, int]],
                    stores: Sequence[Sequence[CudaStore]], maps: Sequence[RemainderMaps], spare: CudaStore) -> None:
        """Set what differs between several texts in the numbers that are uploaded.

        places  of each text: its committed positions, and the slot of its first drafted row
        maps    `LayersKV.remainder` of each text; their memory must be kept while the forward runs
        spare   padding texts, which have no committed rows, write to it
        """
        where, table, addresses = (staged[self.parts[part]].view(np.int64) for part in (0, 5, 6))
        where, entries = where.reshape(self.texts, 2), table.reshape(-1, self.texts, 5)
        where[:], entries[:] = (0, spare.room), spare.addresses
        where[: len(places)] = places
        for text, (own, remainder) in enumerate(zip(stores, maps, strict=True)):
            entries[:, text] = [store.addresses for store in own]
            if remainder is not None:
                assert isinstance(remainder, Tensor)  # the layers of these kernels do not differ
                require(remainder.is_contiguous() and remainder.dtype == torch.float32, "float32 maps",
                        remainder.dtype)
                addresses[text] = remainder.data_ptr()

