"""The prefix tree: keys and values of former texts, for texts that begin with the same tokens.

A row of the KV cache is a function of the tokens up to its own (and of the model, which one tree belongs to), so a text
takes over the rows of any text with the same beginning and computes the rest. The tree is one object for an engine:

    root ── "It was the best of times ..." ──┬── "... it was the worst of times"     each piece: the tokens of one
                    4,096 tokens              └── "... we had everything before us"   block, and its rows in all layers

A piece has the rows of one block of the KV stores (`STORE_BLOCK` positions), or of the beginning of one at the end of a
text. Whole blocks are shared with the texts by reference, the rest is copied (`KVStore.append`). With delta layers it
also has the states that the texts kept, and a text continues at one of their positions (`states.py`). Pieces are found
by their token ids, never by a hash alone. Pieces of one parent may begin with the same tokens; the rows of a piece that
was taken only in part serve as well.

Evicted are pieces without children and without a lease, the least recently used first, until the bytes of all pieces
are within the limit. A lease marks pieces whose blocks a running text uses: evicting them would free no memory.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longdraft.cache.full import FullCache
from longdraft.cache.states import kept_positions, states_bytes
from longdraft.kernels import KVStore
from longdraft.kernels.delta import DeltaState
from longdraft.kernels.interface import STORE_BLOCK

Ids = NDArray[np.int32]


@dataclass(eq=False)
class _Piece:
    """The rows of up to STORE_BLOCK tokens after the tokens of `parent`. A root has none of its own."""

    ids: Ids
    stores: Sequence[KVStore]
    nbytes: int
    parent: _Piece | None
    states: dict[int, list[DeltaState]] = field(default_factory=dict)  # of delta layers, by position in the text
    used: int = 0  # time of the last use, in uses of the tree
    leases: int = 0
    children: list[_Piece] = field(default_factory=list)  # in the order of their token ids

    @cached_property
    def key(self) -> bytes:
        """Bytes that are ordered as the token ids are."""
        return _key(self.ids)

    def nearest(self, ids: Ids) -> tuple[_Piece | None, int]:
        """The child that shares most tokens with the beginning of `ids`, and their number.

        In the order of their keys, that child is a neighbour of the index where `ids` would be.
        """
        index = self._index_of(_key(ids))
        best, most = None, 0
        for child in self.children[max(0, index - 1) : index + 1]:
            if (count := common_prefix(child.ids, ids)) > most:
                best, most = child, count
        return best, most

    def add(self, child: _Piece) -> None:
        self.children.insert(self._index_of(child.key), child)

    def _index_of(self, key: bytes) -> int:
        return bisect_left(self.children, key, key=lambda child: child.key)

    def path(self) -> Iterator[_Piece]:
        """This piece and those before it, without the root."""
        piece = self
        while piece.parent is not None:
            yield piece
            piece = piece.parent


def _key(ids: Ids) -> bytes:
    return ids.astype(">i4").tobytes()


def common_prefix(a: Ids, b: Ids) -> int:
    """Number of equal tokens at the beginning."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    return int(differs.argmax()) if differs.any() else count


def _kept(cache: FullCache, start: int, count: int) -> dict[int, list[DeltaState]]:
    """The states that a text kept after `count` rows from `start` on."""
    kept = cache.states.kept if cache.states else {}
    return {position: states for position, states in kept.items() if start < position <= start + count}


class Lease:
    """Keeps the pieces of a text from eviction until `release`, or until it is no longer referenced."""

    def __init__(self, piece: _Piece | None, lock: threading.RLock) -> None:
        self._piece = piece
        self._lock = lock
        self._count(1)

    def release(self) -> None:
        self._count(-1)
        self._piece = None

    def _count(self, change: int) -> None:
        with self._lock:
            for piece in self._piece.path() if self._piece else ():
                piece.leases += change

    def __del__(self) -> None:
        self.release()


class Match(NamedTuple):
    """The beginning of a text that the tree has.

    length  tokens whose rows it has
    parts   stores with the rows of one block each, and how many of these rows belong to the text
    lease   on the pieces
    states  of delta layers that were kept up to `length`, by position
    """

    length: int
    parts: tuple[tuple[Sequence[KVStore], int], ...]
    lease: Lease
    states: Mapping[int, list[DeltaState]]

    def cut(self, length: int) -> Match:
        """The first `length` tokens of it."""
        parts, left = [], length
        for stores, count in self.parts:
            if left > 0:
                parts.append((stores, min(count, left)))
                left -= count
        states = {position: kept for position, kept in self.states.items() if position <= length}
        return Match(length, tuple(parts), self.lease, states)

    def cut_to_state(self) -> Match:
        """Up to the last position whose states are known; nothing without such a position."""
        return self.cut(max((position for position in self.states if position <= self.length), default=0))


@dataclass(eq=False)
class Reading:
    """A text whose prompt is being read now: `done` of its rows are computed, `published` were offered to the tree."""

    group: Hashable
    ids: Ids
    published: int = 0
    done: int = 0


class PrefixTree:
    """Rows of former texts, by their tokens. Any thread may call its methods.

    A *group* is what rows depend on besides the tokens and the model: texts of different groups share nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of all pieces together; 0: nothing is kept."""
        self.max_bytes = max_bytes
        self._roots: dict[Hashable, _Piece] = {}
        self._pieces: set[_Piece] = set()
        self._readings: set[Reading] = set()
        self._lock = threading.RLock()
        self._time = 0
        self.nbytes = 0

    def limit(self, max_bytes: int) -> None:
        """Set the largest number of bytes, and evict what is beyond it."""
        with self._lock:
            self.max_bytes = max_bytes
            self._evict(self.nbytes - max_bytes)
            self._roots = {group: root for group, root in self._roots.items() if root.children}

    @property
    def idle_bytes(self) -> int:
        """Bytes of the pieces that no running text has a lease on."""
        with self._lock:
            return sum(piece.nbytes for piece in self._pieces if not piece.leases)

    def make_room(self, num_bytes: int) -> None:
        """Evict pieces until those without a lease have at most `num_bytes`."""
        with self._lock:
            self._evict(self.idle_bytes - max(0, num_bytes))

    def match(self, group: Hashable, ids: Ids, limit: int) -> Match:
        """The longest beginning of `ids` that the tree has rows of, at most `limit` tokens."""
        with self._lock:
            self._time += 1
            parts: list[tuple[Sequence[KVStore], int]] = []
            states: dict[int, list[DeltaState]] = {}
            length, piece = 0, self._roots.get(group)
            last = piece
            while piece is not None and length < limit and length % STORE_BLOCK == 0:
                piece, common = piece.nearest(ids[length : length + STORE_BLOCK])
                if piece is not None:
                    piece.used, last = self._time, piece
                    parts.append((piece.stores, min(common, limit - length)))
                    length += parts[-1][1]
                    states |= piece.states
            return Match(length, tuple(parts), Lease(last, self._lock), states)

    def publish(self, group: Hashable, ids: Ids, cache: FullCache) -> Lease:
        """Take over rows of a text whose tokens are `ids`: the first len(ids) rows of its cache.

        What does not fit is left out. The lease is on the pieces that the tree has of the text.
        """
        with self._lock:
            self._time += 1
            piece = self._roots.setdefault(group, _Piece(ids[:0], (), 0, None))
            lease = Lease(piece, self._lock)
            for start in range(0, len(ids), STORE_BLOCK):
                part = ids[start : start + STORE_BLOCK]
                held, common = piece.nearest(part)
                if held is None or common < len(part):
                    held = self._add(piece, part, cache, start, held if held and common == len(held.ids) else None)
                if held is None:
                    break
                self._add_states(held, _kept(cache, start, len(part)))
                piece, held.used = held, self._time
                lease, before = Lease(piece, self._lock), lease
                before.release()
            self._roots = {name: root for name, root in self._roots.items() if root.children}
            return lease

    def _add(self, parent: _Piece, ids: Ids, cache: FullCache, start: int, shorter: _Piece | None) -> _Piece | None:
        """A piece with the rows from `start` on, which replaces one with fewer of them; None if there is no room."""
        states = (shorter.states if shorter else {}) | _kept(cache, start, len(ids))
        num_bytes = cache.block_bytes(len(ids)) + sum(map(states_bytes, states.values()))
        kept = Lease(shorter, self._lock)
        most = self.max_bytes + (shorter.nbytes if shorter else 0)
        self._evict(self.nbytes + num_bytes - most)
        kept.release()
        if self.nbytes + num_bytes > most:
            return None
        if shorter is not None:
            self._drop(shorter)
        piece = _Piece(ids.copy(), cache.copy_block(start, len(ids)), num_bytes, parent, states)
        parent.add(piece)
        self._pieces.add(piece)
        self.nbytes += num_bytes
        return piece

    def _add_states(self, piece: _Piece, states: Mapping[int, list[DeltaState]]) -> None:
        """Take over states that the piece does not have, as far as there is room."""
        own = Lease(piece, self._lock)
        for position in states.keys() - piece.states.keys():
            size = states_bytes(states[position])
            self._evict(self.nbytes + size - self.max_bytes)
            if self.nbytes + size <= self.max_bytes:
                piece.states[position] = states[position]
                piece.nbytes += size
                self.nbytes += size
        own.release()

    def _evict(self, num_bytes: int) -> None:
        """Drop at least so many bytes, if there are as many without a lease."""
        while num_bytes > 0:
            leaves = [piece for piece in self._pieces if not piece.children and not piece.leases]
            if not leaves:
                return
            oldest = min(leaves, key=lambda piece: piece.used)
            num_bytes -= oldest.nbytes
            self._drop(oldest)

    def _drop(self, piece: _Piece) -> None:
        assert piece.parent is not None and not piece.children
        piece.parent.children.remove(piece)
        self._pieces.discard(piece)
        self.nbytes -= piece.nbytes

    def begin_reading(self, group: Hashable, ids: Ids) -> Reading:
        """Announce that a text's prompt is read now, so that texts with the same beginning can wait for its rows."""
        reading = Reading(group, ids)
        with self._lock:
            self._readings.add(reading)
        return reading

    def end_reading(self, reading: Reading) -> None:
        with self._lock:
            self._readings.discard(reading)

    def reading_ahead(self, group: Hashable, ids: Ids, least: int, *, by_state: bool,
                      chunk: int | None) -> Reading | None:
        """A prompt being read that will soon have `least` or more rows of a text's beginning; None if there is none.

        by_state  only rows up to a position where that text keeps its states count; chunk: see `kept_positions`
        """
        with self._lock:
            for reading in tuple(self._readings):
                common = common_prefix(reading.ids, ids) if reading.group == group else 0
                if by_state:
                    common = max(kept_positions(0, common, len(reading.ids), chunk), default=0)
                if common >= least and reading.published < common:
                    return reading
        return None
