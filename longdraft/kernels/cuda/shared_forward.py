"""Rows of several texts in one forward: each weight is read once for all of them.

    rows      [ text 0: R rows | text 1: R rows | ... ]      R: the bucket of the largest tree
    products  all rows        attention, new keys and values  each text with its own store

The addresses of the stores are uploaded with the other inputs. So a graph belongs to a number of texts and of rows, not
to certain texts, and a text that begins or ends captures nothing. Every row is computed by the arithmetic of a text
alone, whose result does not depend on what other rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from longdraft.kernels.cuda.forward_buffers import DecoderOfLayers, Embedding, ForwardBuffers
from longdraft.kernels.cuda.graph_cache import BUCKETS, GraphCache
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores
from longdraft.kernels.cuda.launch import RecentlyUsed, padded_size, require
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.interface import AttentionOutput, LayersKV, TokenRows
from longdraft.kernels.switches import is_on

SHARES_FORWARDS = is_on("SHARES_FORWARDS")  # False: texts run one after another
_MAX_ROWS = BUCKETS[-1]
_MAX_BUFFERS = 8  # numbers of texts and rows


class SharedForwards:
    """Forwards of a decoder for several texts."""

    def __init__(self, graphs: GraphCache) -> None:
        self._buffers: RecentlyUsed[object, ForwardBuffers] = RecentlyUsed(_MAX_BUFFERS, graphs.drop)
        self._spare: CudaStore | None = None  # that padding texts write to

    def can_run(self, texts: Sequence[LayersKV]) -> bool:
        """Whether these texts, none of which reads a prompt, can share a forward."""
        taps = {kv.taps.layers if kv.taps else () for kv in texts}
        has_remainder = any(kv.remainder is not None for kv in texts)
        rows = _bucket(max(kv.k.shape[1] for kv in texts))
        return SHARES_FORWARDS and len(taps) == 1 and not has_remainder and 2 * rows <= _MAX_ROWS

    def run(self, decoder: DecoderOfLayers, rows: TokenRows, texts: Sequence[LayersKV],
            parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        """See `TokenDecoder.forward_tokens`. More texts than fit into a forward take several."""
        at_once = _MAX_ROWS // _bucket(max(kv.k.shape[1] for kv in texts))
        ends = [0, *accumulate(kv.k.shape[1] for kv in texts)]
        results = []
        for first in range(0, len(texts), at_once):
            some = texts[first : first + at_once]
            own = slice(ends[first], ends[first + len(some)])
            results.append(self._run(decoder, rows.cut(own), some, parents[own]))
        if len(results) == 1:
            return results[0]
        hidden, outputs = zip(*results, strict=True)
        return torch.cat(hidden), AttentionOutput(*(torch.cat(part, 1) for part in zip(*outputs, strict=True)))

    def _run(self, decoder: DecoderOfLayers, rows: TokenRows, texts: Sequence[LayersKV],
             parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        counts, stores = [kv.k.shape[1] for kv in texts], [cuda_stores(kv.stores) for kv in texts]
        for store in (store for each in stores for store in each):
            store.reserve_drafts(_MAX_ROWS)
        buffers = self._buffers_for(decoder, rows, texts, counts, stores)
        self._load(buffers, rows, texts, counts, stores, parents)
        decoder.ops.graphs.run(buffers, partial(decoder.run_layers, buffers, stores[0]))
        size = buffers.text_rows
        places = [slice(text * size, text * size + count) for text, count in enumerate(counts)]
        for given, made in (([kv.k for kv in texts], buffers.k), ([kv.v for kv in texts], buffers.v)):
            torch.cat([made[:, place] for place in places], 1, out=_joined(given))
        for kv, place in zip(texts, places, strict=True):
            if kv.taps:
                kv.taps.rows.copy_(buffers.tapped[:, place])
        attended = (torch.cat([part[:, place] for place in places], 1)
                    for part in (buffers.q, buffers.output, buffers.lse, buffers.content))
        return torch.cat([buffers.x[place] for place in places]), AttentionOutput(*attended)

    def _buffers_for(self, decoder: DecoderOfLayers, rows: TokenRows, texts: Sequence[LayersKV], counts: Sequence[int],
                     stores: Sequence[Sequence[CudaStore]]) -> ForwardBuffers:
        assert isinstance(rows.table, CudaLinear)
        embedding, taps = Embedding(rows.table, rows.factor), texts[0].taps.layers if texts[0].taps else ()
        size, num = _bucket(max(counts)), padded_size(len(texts), 2)
        room = padded_size(max(store.room for each in stores for store in each))
        key = num, size, room, taps, id(rows.table), stores[0][0].element
        return self._buffers.get(key, lambda: ForwardBuffers(decoder, num * size, stores[0], False, taps,
                                                             embedding, num, room))

    def _load(self, buffers: ForwardBuffers, rows: TokenRows, texts: Sequence[LayersKV], counts: Sequence[int],
              stores: Sequence[Sequence[CudaStore]], parents: Tensor) -> None:
        """Upload the inputs. Padding texts have no committed rows, and write to a store of their own."""
        staged, size, start = np.zeros(len(buffers.staged), dtype=np.int32), buffers.text_rows, 0
        where, *turns, all_parents, tokens, table = (staged[part] for part in buffers.parts)
        places = where.view(np.int64).reshape(buffers.texts, 2)
        entries = table.view(np.int64).reshape(buffers.texts, -1, 5)
        cos, sin = (part.view(np.float32).reshape(buffers.rows, -1) for part in turns)
        spare = self._spare_store(stores[0][0])
        places[:], entries[:], all_parents[:] = (0, spare.room), spare.addresses, -1
        for text, (kv, count, own) in enumerate(zip(texts, counts, stores, strict=True)):
            target, source = slice(text * size, text * size + count), slice(start, start + count)
            places[text] = kv.length, min(store.room for store in own)
            entries[text] = [store.addresses for store in own]
            all_parents[target], tokens[target] = parents[source].numpy(), rows.tokens[source]
            cos[target], sin[target] = rows.cos[source].numpy(), rows.sin[source].numpy()
            start += count
        buffers.staged.copy_(torch.from_numpy(staged), non_blocking=True)

    def _spare_store(self, like: CudaStore) -> CudaStore:
        if self._spare is None or self._spare.element != like.element:
            self._spare = CudaStore(like.k.device, like.dtype, like.element, like.heads, like.dim)
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


def _bucket(rows: int) -> int:
    return next((size for size in BUCKETS if size >= rows), rows)
