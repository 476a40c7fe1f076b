"""Snapshots: keys and values of a text beside its journal, so that `resume` reads a file instead of the whole text.

    text.journal            the truth: prompt, settings and tokens (longdraft/journal/format.py)
    kv/00000.safetensors    `k` and `v` [layers, KV heads, rows, head dim] of the first 4,096 positions
    kv/00001.safetensors    of the next ones; the last block of a text that was ended in between may have fewer rows
    kv/index                a line for each block that is complete: JSON with its rows, its chain and its hash

The *chain* of a block is a hash of the model (`new_key`) and of all token ids up to the block's end. A block is used if
its file has the hash in the index, and its chain is that of the text being resumed. Reading ends at the first block of
which this is not so, and the rest of the text is computed as without a snapshot. The last 16 rows of a snapshot are
computed again and compared bit for bit; if one differs, the whole snapshot is discarded. So a damaged, missing or
foreign block costs time and never changes the text.

With delta layers a block also has `history` and `matrix`, the states 16 rows before its end
(longdraft/cache/states.py). The rows after them are the ones that are computed again. Only full blocks are written,
since only they have states.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from longdraft.cache.full import FullCache
from longdraft.cache.states import KEPT_BEFORE
from longdraft.errors import check
from longdraft.journal.snapshot_files import (
    Block,
    BlockJob,
    BlockTensors,
    SnapshotWriter,
    chains,
    new_key,
    read_block,
    read_index,
)
from longdraft.journal.snapshot_folder import FOLDER, SnapshotOptions, remove_snapshot
from longdraft.kernels.interface import STORE_BLOCK
from longdraft.model.transformer import ForwardRequest, Transformer, chain_rows
from longdraft.parallel import shard_of
from longdraft.request.context import Context
from longdraft.speculation.reuse import DRAFTER_ROWS
from longdraft.speculation.routine import Routine

log = logging.getLogger(__name__)
_CHECKED_ROWS = KEPT_BEFORE  # last rows of a snapshot that are computed again
_LEAST_ROWS = 512  # of a last block: fewer are computed again as quickly
_LEAST_SECONDS = 10.0  # of a text before `auto` writes anything: most requests are shorter


class Snapshot:
    """The snapshot of one text that is being written: `restore` it, then `offer` its cache after each step."""

    def __init__(self, folder: Path, options: SnapshotOptions, identity: Mapping[str, str], model: Transformer,
                 cache: FullCache, context: Context) -> None:
        """See `open`.

        folder    of the journal
        identity  what the text depends on besides its prompt and settings (`LoadedModel.identity`)
        model     the target, for this text's length
        """
        self._folder, self._options = folder, options
        self._key = new_key(identity, model.rotation_key)
        self._model, self._cache, self._context = model, cache, context
        self._writer: SnapshotWriter | None = None
        self._num_offered = 0  # whole blocks that are on the disk or on their way, once there is a writer
        self._began = time.monotonic()
        if cache.states:
            cache.states.keep(len(context) - 1)

    @classmethod
    def open(cls, folder: Path, options: SnapshotOptions | None, identity: Callable[[], Mapping[str, str]],
             model: Transformer, cache: FullCache, context: Context) -> Snapshot | None:
        """The snapshot of a text, if it has one. UsageError if it should have one and cannot.

        identity  called only where there is a snapshot, because it hashes the weights
        """
        options = options or SnapshotOptions()
        can = not model.kernels.is_device and shard_of(model.kernels).size == 1
        check(can or options.mode != "always", "snapshot", options.mode,
              "auto or never on CUDA and with several ranks")
        if not can or options.mode == "never":
            return None
        return cls(folder, options, identity(), model, cache, context)

    def restore(self, available: int) -> Routine[int]:
        """Fill the empty cache with rows of the snapshot, of which the last are computed again. Returns their number.

        available  rows that the prefix tree has; the snapshot is not read if these are most of the text
        """
        cache, filled, rows, tail = self._cache, 0, 0, None
        limit, states = len(self._context) - 1 - DRAFTER_ROWS, None
        if 2 * available >= limit:
            return 0
        for k, v, kept in self._blocks(limit):
            count = min(k[0].shape[1], limit - filled)
            k, v = ([layer[:, :count] for layer in part] for part in (k, v))
            cache.fill(filled, k, v)
            filled += count
            if not cache.states or (kept and count == STORE_BLOCK):
                rows, tail, states = filled, [*k, *v], kept
        if tail is None or tail[0].shape[1] < _CHECKED_ROWS:
            return 0
        start = rows - _CHECKED_ROWS
        cache.skip(start)
        if cache.states and states:
            cache.states.adopt({start: states})
        tokens = self._context.slice(start, rows).tolist()
        yield ForwardRequest(self._model, chain_rows(tokens, start), cache, is_prompt=True)
        k, v = cache.provisional
        is_equal = all(torch.equal(_bits(new.transpose(0, 1).to(old.dtype)), _bits(old[:, -_CHECKED_ROWS:]))
                       for new, old in zip([*k, *v], tail, strict=True))
        if is_equal:
            cache.commit(range(_CHECKED_ROWS))
            return rows
        log.warning("the snapshot %s has other rows than this machine computes; the text is read again",
                    self._folder / FOLDER)
        cache.clear()
        with suppress(OSError):
            remove_snapshot(self._folder)
        return 0

    def _blocks(self, limit: int) -> Iterator[BlockTensors]:
        """The blocks that belong to this text, from the first one on."""
        index, folder = read_index(self._folder / FOLDER), self._folder / FOLDER
        done, states = 0, self._cache.states.current if self._cache.states else ()
        for number, found in enumerate(self._known(index)):
            parts = None
            if done < limit:
                parts = read_block(folder, found, self._cache.shapes, self._cache.store_dtype, states)
            if parts is None:
                break
            done = number * STORE_BLOCK + found.rows
            yield parts

    def _known(self, index: dict[int, Block]) -> list[Block]:
        """The blocks of the index whose chain is this text's, from the first one on."""
        ids, found = self._context.slice(0, len(self._context)), []
        for number, (rows, chain) in enumerate(chains(self._key, ids)):
            block = index.get(number)
            if block is not None and 0 < block.rows < rows:  # its chain ends earlier than this text's
                part = ids[: number * STORE_BLOCK + block.rows]
                rows, chain = list(chains(self._key, part))[-1]
            if block is None or (block.rows, block.chain) != (rows, chain):
                break
            found.append(block)
            if block.rows < STORE_BLOCK:
                break
        return found

    def offer(self) -> None:
        """Write the blocks of the cache that became full."""
        full = self._cache.length // STORE_BLOCK
        if full > self._num_offered and self._is_worth_it():
            self._offer(full * STORE_BLOCK)

    def _is_worth_it(self) -> bool:
        """Whether it took some time to compute the text so far."""
        return self._options.mode == "always" or time.monotonic() - self._began >= _LEAST_SECONDS

    def _offer(self, length: int) -> None:
        if self._writer is None:
            known = [block for block in self._known(read_index(self._folder / FOLDER)) if block.rows == STORE_BLOCK]
            self._num_offered = len(known)
            self._writer = SnapshotWriter(self._folder, self._options.max_bytes, known)
        for number, (rows, chain) in enumerate(chains(self._key, self._context.slice(0, length))):
            if number >= self._num_offered:
                first, kept = number * STORE_BLOCK, self._cache.states.kept if self._cache.states else {}
                self._writer.put(BlockJob(number, rows, chain, self._cache.copy_block(first, rows),
                                          kept.get(first + rows - KEPT_BEFORE, ())))
        self._num_offered = length // STORE_BLOCK

    def close(self, *, keeps: bool) -> None:
        """The text ends here. keeps: it can be resumed, so the rows of its last block are written too."""
        if keeps and self._is_worth_it():
            with suppress(MemoryError):
                if self._cache.length % STORE_BLOCK >= _LEAST_ROWS and not self._cache.states:
                    self._offer(self._cache.length)
                else:
                    self.offer()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if not keeps:
            with suppress(OSError):
                remove_snapshot(self._folder)


def _bits(x: Tensor) -> Tensor:
    """The bits of floats, as integers."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])
