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

import hashlib
import json
import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from longdraft.cache.full import FullCache
from longdraft.cache.prefix import Ids
from longdraft.cache.states import KEPT_BEFORE
from longdraft.errors import check
from longdraft.journal.snapshot_folder import FOLDER, INDEX, SnapshotOptions, files_of, remove_snapshot
from longdraft.kernels import KVStore
from longdraft.kernels.delta import DeltaState
from longdraft.kernels.interface import STORE_BLOCK
from longdraft.model.transformer import ForwardRequest, Transformer, chain_rows
from longdraft.parallel import shard_of
from longdraft.request.context import Context
from longdraft.speculation.reuse import DRAFTER_ROWS
from longdraft.speculation.routine import Routine
from longdraft.system.files import open_regular, write_synced, write_whole

log = logging.getLogger(__name__)
_FORMAT = "longdraft-kv-1"
_CHECKED_ROWS = KEPT_BEFORE  # last rows of a snapshot that are computed again
_LEAST_ROWS = 512  # of a last block: fewer are computed again as quickly
_LEAST_SECONDS = 10.0  # of a text before `auto` writes anything: most requests are shorter
_DISK_FLOOR = 1 << 30  # bytes that remain free on the disk
_MAX_INDEX = 1 << 24  # bytes


class Snapshot:
    """The snapshot of one text that is being written: `restore` it, then `offer` its cache after each step."""

    def __init__(self, folder: Path, options: SnapshotOptions, identity: Mapping[str, str], model: Transformer,
                 cache: FullCache, context: Context) -> None:
        """See `open`.

        folder    of the journal
        identity  what the text depends on besides its prompt and settings (`LoadedModel.identity`)
        model     the target, for this text's length
        """
        self._folder = folder
        self._options = options
        self._key = new_key(identity, model.rotation_key)
        self._model = model
        self._cache = cache
        self._context = context
        self._writer: SnapshotWriter | None = None
        self._num_offered = 0  # whole blocks that are on the disk or on their way, once there is a writer
        self._began = time.monotonic()
        if cache.states:
            cache.states.keep(len(context) - 1)

    @classmethod
    def open(cls, folder: Path, options: SnapshotOptions, identity: Callable[[], Mapping[str, str]],
             model: Transformer, cache: FullCache, context: Context) -> Snapshot | None:
        """The snapshot of a text, if it has one. UsageError if it should have one and cannot.

        identity  called only where there is a snapshot, because it hashes the weights
        """
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
        cache = self._cache
        limit = len(self._context) - 1 - DRAFTER_ROWS
        filled = 0
        rows, tail, states = 0, None, None  # up to the last position where all that a text needs is known
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
        cache = self._cache
        states = cache.states.current if cache.states else ()
        dtype = cache.stores[0].read(torch.zeros(cache.shapes[0][0], 0, dtype=torch.int64))[0].dtype
        for block in self._known():
            if block.block * STORE_BLOCK >= limit:
                return
            tensors = read_block(self._folder / FOLDER, block, cache.shapes, dtype, states)
            if tensors is None:
                return
            yield tensors

    def _known(self) -> list[Block]:
        """The blocks of the index whose chain is this text's, from the first one on."""
        index = read_index(self._folder / FOLDER)
        ids = self._context.slice(0, len(self._context))
        known: list[Block] = []
        for number, (rows, chain) in enumerate(chains(self._key, ids)):
            block = index.get(number)
            if block is not None and 0 < block.rows < rows:  # its chain ends earlier than this text's
                part = ids[: number * STORE_BLOCK + block.rows]
                rows, chain = list(chains(self._key, part))[-1]
            if block is None or (block.rows, block.chain) != (rows, chain):
                break
            known.append(block)
            if block.rows < STORE_BLOCK:
                break
        return known

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
            known = [block for block in self._known() if block.rows == STORE_BLOCK]
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


class Block(NamedTuple):
    """A line of the index: the block's number, its rows, its chain, and size and BLAKE2b-256 of its file."""

    block: int
    rows: int
    chain: str
    nbytes: int
    blake2b: str


def new_key(identity: Mapping[str, str], rotation_key: object) -> str:
    """A hash of everything that rows of the cache depend on besides the tokens."""
    text = json.dumps([_FORMAT, sorted(identity.items()), repr(rotation_key)])
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def chains(key: str, ids: Ids) -> Iterator[tuple[int, str]]:
    """For each block of a text: its rows, and its chain."""
    digest = hashlib.blake2b(key.encode(), digest_size=32)
    for start in range(0, len(ids), STORE_BLOCK):
        part = ids[start : start + STORE_BLOCK]
        digest.update(part.astype("<i4").tobytes())
        yield len(part), digest.hexdigest()


def _path(folder: Path, block: int) -> Path:
    return folder / f"{block:05}.safetensors"


def read_index(folder: Path) -> dict[int, Block]:
    """The blocks by number, from the complete lines of the index. Of two lines for one block the second counts."""
    blocks: dict[int, Block] = {}
    try:
        with open_regular(folder / INDEX) as file:
            lines = file.read(_MAX_INDEX).split(b"\n")[:-1]  # the last one is not complete
    except OSError:
        return {}
    for line in lines:
        try:
            fields = json.loads(line)
            block = Block(int(fields["block"]), int(fields["rows"]), str(fields["chain"]), int(fields["nbytes"]),
                          str(fields["blake2b"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            break
        blocks[block.block] = block
    return blocks


class BlockTensors(NamedTuple):
    """The content of a block's file.

    k, v    of each layer [KV heads, rows, head dim]
    states  of the delta layers, KEPT_BEFORE rows before the block's end; empty: the text kept none there
    """

    k: Sequence[Tensor]
    v: Sequence[Tensor]
    states: list[DeltaState]


def read_block(folder: Path, block: Block, shapes: Sequence[tuple[int, int]], dtype: torch.dtype,
               states: Sequence[DeltaState]) -> BlockTensors | None:
    """A block of these layers; None if its file is not the one that the index names, or a number in it is not finite.

    shapes  KV heads and their dimension, of each layer
    states  some of the model, which say what shape and dtype they have
    """
    try:
        with open_regular(_path(folder, block.block)) as file:
            if os.fstat(file.fileno()).st_size != block.nbytes:
                return None
            data = file.read(block.nbytes)
        if len(data) != block.nbytes or hashlib.blake2b(data, digest_size=32).hexdigest() != block.blake2b:
            return None
        tensors = load(data)
        k, v = (_by_layer(tensors[name], shapes, block.rows) for name in "kv")
        kept = _states_of(tensors, states)
    except (OSError, SafetensorError, KeyError, ValueError, MemoryError):
        return None
    is_finite = all(bool(part.isfinite().all()) for part in (*k, *v, *(part for state in kept for part in state)))
    return BlockTensors(k, v, kept) if is_finite and k[0].dtype == v[0].dtype == dtype else None


def _by_layer(stored: Tensor, shapes: Sequence[tuple[int, int]], rows: int) -> list[Tensor]:
    """Each layer's rows [KV heads, rows, head dim] from those of all: one tensor with a first axis of layers, or a flat
    one where layers differ. ValueError for rows of other layers."""
    if len(set(shapes)) == 1:
        if stored.shape != (len(shapes), shapes[0][0], rows, shapes[0][1]):
            raise ValueError("rows of another shape")
        return list(stored)
    sizes = [heads * rows * dim for heads, dim in shapes]
    if stored.shape != (sum(sizes),):
        raise ValueError("rows of another shape")
    return [part.view(heads, rows, dim) for part, (heads, dim) in zip(torch.split(stored, sizes), shapes, strict=True)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `_by_layer`."""
    is_uniform = len({part.shape for part in parts}) == 1
    return torch.stack(tuple(parts)) if is_uniform else torch.cat([part.flatten() for part in parts])


def _states_of(tensors: dict[str, Tensor], like: Sequence[DeltaState]) -> list[DeltaState]:
    """The states of a block's tensors. ValueError for those of another model or other kernels."""
    if "matrix" not in tensors:
        return []
    kept = [DeltaState(*parts) for parts in zip(tensors["history"], tensors["matrix"], strict=True)]
    for ours, theirs in zip(kept, like, strict=True):
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(ours, theirs, strict=True)):
            raise ValueError("states of another shape")
    return kept


class BlockJob(NamedTuple):
    """A block to write: the first `rows` positions of `stores`, one for each layer with attention, and `states`."""

    block: int
    rows: int
    chain: str
    stores: Sequence[KVStore]
    states: Sequence[DeltaState] = ()


class SnapshotWriter:
    """Writes blocks in a thread of its own. A failure ends the snapshot, not the text.

    folder   of the journal
    written  blocks that are there already, in order
    """

    def __init__(self, folder: Path, max_bytes: int, written: Sequence[Block]) -> None:
        self._folder, self._max_bytes = folder / FOLDER, max_bytes
        self._written = list(written)
        self._jobs: queue.SimpleQueue[BlockJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="snapshot", daemon=True)
        self._thread.start()

    def put(self, job: BlockJob) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Wait until everything is on the disk."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            self._begin()
            while (job := self._jobs.get()) is not None:
                if not self._write(job):
                    return
        except Exception as error:  # such as a full disk
            reason = error.strerror if isinstance(error, OSError) else error
            log.warning("the snapshot %s cannot be written: %s; resuming will read more of the text again",
                        self._folder, reason or error)

    def _begin(self) -> None:
        """Write an index of the blocks that remain, and remove the files of others."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        kept = {_path(self._folder, block.block) for block in self._written}
        for path in files_of(self._folder):
            if path.name != INDEX and path not in kept:
                path.unlink(missing_ok=True)
        write_whole(self._folder / INDEX, b"".join(_line(block) for block in self._written))

    def _write(self, job: BlockJob) -> bool:
        """Write one block. False if there is no room for it."""
        parts = [store.read(torch.arange(job.rows).expand(store.shape[0], -1)) for store in job.stores]
        tensors = {name: _joined([part[which] for part in parts]) for which, name in enumerate("kv")}
        if job.states:
            tensors |= {"history": torch.stack([state.history for state in job.states]),
                        "matrix": torch.stack([state.matrix for state in job.states])}
        data = save(tensors, {"format": _FORMAT, "chain": job.chain, "first": str(job.block * STORE_BLOCK)})
        held = sum(block.nbytes for block in self._written if block.block != job.block)
        if held + len(data) > self._max_bytes or shutil.disk_usage(self._folder).free < len(data) + _DISK_FLOOR:
            return False
        write_whole(_path(self._folder, job.block), data)
        block = Block(job.block, job.rows, job.chain, len(data), hashlib.blake2b(data, digest_size=32).hexdigest())
        write_synced(self._folder / INDEX, _line(block))
        self._written.append(block)
        return True


def _line(block: Block) -> bytes:
    return json.dumps(block._asdict()).encode() + b"\n"
