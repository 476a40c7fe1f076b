"""Rows of several texts in one forward: each weight is read once for all of them.

    rows      [ text 0: R rows | text 1: R rows | ... ]      R: the bucket of the largest tree
    products  all rows        attention, new keys and values  each text with its own store

The addresses of the stores are uploaded with the other inputs. So a graph belongs to a number of texts and of rows, not
to certain texts, and a text that begins or ends captures nothing. Every row is computed by the arithmetic of a text
alone, whose result does not depend on what other rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.cuda.forward_buffers import DecoderOfLayers, EmbeddedRows, Embedding, ForwardBuffers
from longdraft.kernels.cuda.graph_cache import BUCKETS, GraphCache
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores
from longdraft.kernels.cuda.launch import RecentlyUsed, padded_size, require
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.prefill import with_all_rows
from longdraft.kernels.interface import LayersKV, TokenRows
from longdraft.kernels.switches import is_on

SHARES_FORWARDS = is_on("SHARES_FORWARDS")  # False: texts run one after another
_MAX_ROWS = BUCKETS[-1]
MAX_SHARED = 8  # numbers of texts and rows whose buffers are kept
Rows = TypeVar("Rows", TokenRows, EmbeddedRows, TokenRows | EmbeddedRows)


class TextResults(NamedTuple):
    """What a forward computed for one text or several, of which each has `size` rows.

    hidden    [R, hidden]
    attended  of L layers
    k, v      [L, R, Hkv, D]
    tapped    [taps, R, hidden]
    """

    size: int
    hidden: Tensor
    attended: AttentionOutput
    k: Tensor
    v: Tensor
    tapped: Tensor

    @classmethod
    def of(cls, buffers: ForwardBuffers) -> TextResults:
        """The results in these buffers."""
        attended = AttentionOutput(buffers.q, buffers.output, buffers.lse, buffers.content)
        return cls(buffers.text_rows, buffers.x, attended, buffers.k, buffers.v, buffers.tapped)

    def places(self, texts: Sequence[LayersKV]) -> list[slice]:
        """The rows of each text."""
        return [slice(text * self.size, text * self.size + kv.k.shape[1]) for text, kv in enumerate(texts)]

    def hand_out(self, texts: Sequence[LayersKV]) -> tuple[Tensor, AttentionOutput]:
        """Copies of the texts' rows, one after another. Fills k, v and taps of the texts."""
        places = self.places(texts)
        for given, made in (([kv.k for kv in texts], self.k), ([kv.v for kv in texts], self.v)):
            torch.cat([made[:, place] for place in places], 1, out=_joined(given))
        for kv, place in zip(texts, places, strict=True):
            if kv.taps:
                kv.taps.rows.copy_(self.tapped[:, place])
        attended = (torch.cat([part[:, place] for place in places], 1) for part in self.attended)
        return torch.cat([self.hidden[place] for place in places]), AttentionOutput(*attended)


def can_share(texts: Sequence[LayersKV]) -> bool:
    """Whether these texts, none of which reads a prompt, can share a forward."""
    taps = {kv.taps.layers if kv.taps else () for kv in texts}
    return SHARES_FORWARDS and len(taps) == 1 and 2 * bucket_of(texts) <= _MAX_ROWS


def bucket_of(texts: Sequence[LayersKV]) -> int:
    """The number of rows that each of these texts gets."""
    most = max(kv.k.shape[1] for kv in texts)
    return next((size for size in BUCKETS if size >= most), most)


def in_groups(run: Callable[[Rows, Sequence[LayersKV], Tensor], tuple[Tensor, AttentionOutput]], rows: Rows,
              texts: Sequence[LayersKV], parents: Tensor, at_once: int = 0) -> tuple[Tensor, AttentionOutput]:
    """Run texts together, at_once at a time; 0: as many as fit into a forward. See `Decoder.forward`."""
    at_once = at_once or _MAX_ROWS // bucket_of(texts)
    ends = [0, *accumulate(kv.k.shape[1] for kv in texts)]
    results = []
    for first in range(0, len(texts), at_once):
        some = texts[first : first + at_once]
        own = slice(ends[first], ends[first + len(some)])
        results.append(run(rows.cut(own), some, parents[own]))
    if len(results) == 1:
        return results[0]
    attended = (with_all_rows(output, len(hidden)) for hidden, output in results)
    outputs = (torch.cat(part, 1) for part in zip(*attended, strict=True))
    return torch.cat([hidden for hidden, _ in results]), AttentionOutput(*outputs)


def stores_of(texts: Sequence[LayersKV]) -> list[list[CudaStore]]:
    """Each text's stores, with slots for the rows of a forward."""
    stores = [cuda_stores(kv.stores) for kv in texts]
    for store in (store for each in stores for store in each):
        store.reserve_drafts(_MAX_ROWS)
    return stores


def shared_sizes(texts: Sequence[LayersKV], stores: Sequence[Sequence[CudaStore]]) -> tuple[int, int, int]:
    """What a graph for these texts has: rows of a text, texts, and positions that their stores have at most."""
    room = max(store.room for each in stores for store in each)
    return bucket_of(texts), padded_size(len(texts), 2), padded_size(room)


class SharedForwards:
    """Forwards of a decoder for several texts."""

    def __init__(self, graphs: GraphCache) -> None:
        self._buffers: RecentlyUsed[object, ForwardBuffers] = RecentlyUsed(MAX_SHARED, graphs.drop)
        self._spare: CudaStore | None = None  # that padding texts write to

    def run(self, decoder: DecoderOfLayers, rows: TokenRows, texts: Sequence[LayersKV],
            parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        """See `TokenDecoder.forward_tokens`. More texts than fit into a forward take several."""
        return in_groups(partial(self._run, decoder), rows, texts, parents)

    def _run(self, decoder: DecoderOfLayers, rows: TokenRows, texts: Sequence[LayersKV],
             parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        stores = stores_of(texts)
        buffers = self._buffers_for(decoder, rows, texts, stores)
        buffers.load(rows, texts, parents, self._spare_store(stores[0][0]))
        decoder.ops.graphs.run(buffers, partial(decoder.run_layers, buffers, stores[0]))
        return TextResults.of(buffers).hand_out(texts)

    def _buffers_for(self, decoder: DecoderOfLayers, rows: TokenRows, texts: Sequence[LayersKV],
                     stores: Sequence[Sequence[CudaStore]]) -> ForwardBuffers:
        assert isinstance(rows.table, CudaLinear)
        embedding, taps = Embedding(rows.table, rows.factor), texts[0].taps.layers if texts[0].taps else ()
        size, num, room = shared_sizes(texts, stores)
        has_remainder = any(kv.remainder is not None for kv in texts)
        key = num, size, room, taps, id(rows.table), stores[0][0].format, has_remainder
        return self._buffers.get(key, lambda: ForwardBuffers(decoder, num * size, stores[0], has_remainder, taps,
                                                             embedding, num, room))

    def _spare_store(self, like: CudaStore) -> CudaStore:
        if self._spare is None or self._spare.format is not like.format:
            self._spare = like.empty_like()
            self._spare.reserve_drafts(_MAX_ROWS)
        return self._spare


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The tensor whose consecutive rows (axis 1) are these parts: a forward allocates those of all texts at once."""
    first, start = parts[0], parts[0].data_ptr()
    for part in parts:
        require(part.stride() == first.stride() and part.data_ptr() == start, "rows of one tensor", part.stride())
        start += part.shape[1] * part.stride(1) * part.element_size()
    rows = sum(part.shape[1] for part in parts)
    return first.as_strided((first.shape[0], rows, *first.shape[2:]), first.stride())

