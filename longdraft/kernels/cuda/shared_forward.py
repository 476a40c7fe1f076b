"""Rows of several texts in one forward: each weight is read once for all of them.

    rows      [ text 0: R rows | text 1: R rows | ... ]      R: the bucket of the largest tree
    products  all rows        attention, new keys and values  each text with its own store

The addresses of the stores are uploaded with the other inputs. So a graph belongs to a number of texts and of rows, not
to certain texts, and a text that begins or ends captures nothing. Every row is computed by the arithmetic of a text
alone, whose result does not depend on what other rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.cuda.delta import stacked
from longdraft.kernels.cuda.forward_buffers import EmbeddedRows, ForwardBuffers
from longdraft.kernels.cuda.graph_cache import BUCKETS, bucket_of
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores
from longdraft.kernels.cuda.launch import padded_size, require
from longdraft.kernels.interface import LayersKV, TokenRows
from longdraft.kernels.switches import is_on

SHARES_FORWARDS = is_on("SHARES_FORWARDS")  # False: texts run one after another
MAX_ROWS = BUCKETS[-1]
MAX_SHARED = 8  # numbers of texts and rows whose buffers are kept
Rows = TypeVar("Rows", TokenRows, EmbeddedRows, TokenRows | EmbeddedRows)


class TextResults(NamedTuple):
    """What a forward computed for one text or several, of which each has `size` rows.

    hidden    [R, hidden]
    attended  of L layers
    k, v      [L, R, Hkv, D]
    tapped    [taps, R, hidden]
    deltas    inputs of delta layers: see `ForwardBuffers`
    """

    size: int
    hidden: Tensor
    attended: AttentionOutput
    k: Tensor
    v: Tensor
    tapped: Tensor
    deltas: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, buffers: ForwardBuffers) -> TextResults:
        """The results in these buffers."""
        return cls(buffers.text_rows, buffers.x, buffers.attention_output, buffers.k, buffers.v, buffers.tapped,
                   (buffers.mixed, buffers.gates))

    def places(self, texts: Sequence[LayersKV]) -> list[slice]:
        """The rows of each text."""
        return [slice(text * self.size, text * self.size + kv.k.shape[1]) for text, kv in enumerate(texts)]

    def hand_out(self, texts: Sequence[LayersKV]) -> tuple[Tensor, AttentionOutput]:
        """Copies of the texts' rows, one after another. Fills k, v, taps and deltas of the texts."""
        places = self.places(texts)
        for given, made in (([kv.k for kv in texts], self.k), ([kv.v for kv in texts], self.v)):
            torch.cat([made[:, place] for place in places], 1, out=_joined(given))
        for kv, place in zip(texts, places, strict=True):
            if kv.taps:
                kv.taps.rows.copy_(self.tapped[:, place])
            if kv.deltas:
                inputs = [each.mixed for each in kv.deltas], [each.gates for each in kv.deltas]
                for parts, made in zip(inputs, self.deltas, strict=True):
                    rows = stacked(parts)
                    assert rows is not None, "rows of layers of one shape"
                    rows.copy_(made[:, place])
        attended = (torch.cat([part[:, place] for place in places], 1) for part in self.attended)
        return torch.cat([self.hidden[place] for place in places]), AttentionOutput(*attended)


def can_share(texts: Sequence[LayersKV]) -> bool:
    """Whether these texts, none of which reads a prompt, can share a forward."""
    taps = {kv.taps.layers if kv.taps else () for kv in texts}
    return SHARES_FORWARDS and len(taps) == 1 and 2 * rows_of_each(texts) <= MAX_ROWS


def rows_of_each(texts: Sequence[LayersKV]) -> int:
    """The number of rows that each of these texts gets."""
    return bucket_of(max(kv.k.shape[1] for kv in texts))


def in_groups(run: Callable[[Rows, Sequence[LayersKV], Tensor], tuple[Tensor, AttentionOutput]], rows: Rows,
              texts: Sequence[LayersKV], parents: Tensor, at_once: int = 0) -> tuple[Tensor, AttentionOutput]:
    """Run texts together, at_once at a time; 0: as many as fit into a forward. See `Decoder.forward`."""
    at_once = at_once or MAX_ROWS // rows_of_each(texts)
    ends = [0, *accumulate(kv.k.shape[1] for kv in texts)]
    results = []
    for first in range(0, len(texts), at_once):
        some = texts[first : first + at_once]
        own = slice(ends[first], ends[first + len(some)])
        results.append(run(rows.cut(own), some, parents[own]))
    if len(results) == 1:
        return results[0]
    attended = (_with_all_rows(output, len(hidden)) for hidden, output in results)
    outputs = (torch.cat(part, 1) for part in zip(*attended, strict=True))
    return torch.cat([hidden for hidden, _ in results]), AttentionOutput(*outputs)


def _with_all_rows(output: AttentionOutput, rows: int) -> AttentionOutput:
    """The attention of a chunk of `rows` rows, NaN for those that `prefill` does not report."""
    if not (missing := rows - output.lse.shape[1]):
        return output
    nan = (torch.full((len(part), missing, *part.shape[2:]), torch.nan, dtype=part.dtype, device=part.device)
           for part in output)
    return AttentionOutput(*(torch.cat(parts, 1) for parts in zip(nan, output, strict=True)))


def stores_of(texts: Sequence[LayersKV]) -> list[list[CudaStore]]:
    """Each text's stores, with slots for the rows of a forward."""
    stores = [cuda_stores(kv.stores) for kv in texts]
    for store in (store for each in stores for store in each):
        store.reserve_drafts(MAX_ROWS)
    return stores


def shared_sizes(texts: Sequence[LayersKV], stores: Sequence[Sequence[CudaStore]]) -> tuple[int, int, int]:
    """What a graph for these texts has: rows of a text, texts, and positions that their stores have at most."""
    room = max(store.room for each in stores for store in each)
    return rows_of_each(texts), padded_size(len(texts), 2), padded_size(room)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The tensor whose consecutive rows (axis 1) are these parts: a forward allocates those of all texts at once."""
    first, start = parts[0], parts[0].data_ptr()
    for part in parts:
        require(part.stride() == first.stride() and part.data_ptr() == start, "rows of one tensor", part.stride())
        start += part.shape[1] * part.stride(1) * part.element_size()
    rows = sum(part.shape[1] for part in parts)
    return first.as_strided((first.shape[0], rows, *first.shape[2:]), first.stride())

