"""The files of a snapshot: blocks and their index, reading them, and the thread that writes them.

longdraft/journal/snapshot.py describes them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from longdraft.cache.prefix import Ids
from longdraft.journal.snapshot_folder import FOLDER, INDEX, files_of
from longdraft.kernels import KVStore
from longdraft.kernels.delta import DeltaState
from longdraft.kernels.interface import STORE_BLOCK
from longdraft.system.files import write_synced, write_whole

log = logging.getLogger(__name__)
_FORMAT = "longdraft-kv-1"
_DISK_FLOOR = 1 << 30  # bytes that remain free on the disk
_MAX_INDEX = 1 << 24  # bytes


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
    found: dict[int, Block] = {}
    try:
        with (folder / INDEX).open("rb") as file:
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
        found[block.block] = block
    return found


class BlockTensors(NamedTuple):
    """The content of a block's file.

    k, v    of each layer [KV heads, rows, head dim]
    states  of the delta layers, KEPT_BEFORE rows before the block's end; empty: the text kept none there
    """

    k: Sequence[Tensor]
    v: Sequence[Tensor]
    states: list[DeltaState]


def read_block(folder: Path, found: Block, shapes: Sequence[tuple[int, int]], dtype: torch.dtype,
               states: Sequence[DeltaState]) -> BlockTensors | None:
    """A block of these layers; None if its file is not the one that the index names.

    shapes  KV heads and their dimension, of each layer
    states  some of the model, which say what shape and dtype they have
    """
    try:
        data = _path(folder, found.block).read_bytes()
        if len(data) != found.nbytes or hashlib.blake2b(data, digest_size=32).hexdigest() != found.blake2b:
            return None
        tensors = load(data)
        k, v = (_by_layer(tensors[name], shapes, found.rows) for name in "kv")
        kept = _states_of(tensors, states)
    except (OSError, SafetensorError, KeyError, ValueError, MemoryError):
        return None
    return BlockTensors(k, v, kept) if k[0].dtype == v[0].dtype == dtype else None


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
