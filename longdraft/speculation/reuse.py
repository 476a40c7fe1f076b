"""The rows that a text takes from the prefix tree before its prefill, and those that it adds to the tree.

On the CPU a row of the cache has the same bits whichever rows are computed with it, so a beginning of any length can be
taken over. On a device, rows of whole prompt chunks are computed by other operations than all other rows
(longdraft/speculation/prefill.py), and a text may take and give only those: the chunk [2048 k, 2048 k + 2048) of a
prompt of P tokens is whole if it ends at or before P - 1.

The last rows of the prefill are computed in any case, because drafters begin with what the target computes for them.
Of models with delta layers, a text takes rows up to a position where another text kept its states. On a device these
are ends of whole chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from longdraft.cache.full import FullCache
from longdraft.cache.prefix import Ids, Lease, Match, PrefixTree, Reading
from longdraft.cache.states import KEPT_BEFORE
from longdraft.kernels.interface import DEVICE_CHUNK, REPORTED_ROWS, STORE_BLOCK
from longdraft.model.transformer import Transformer
from longdraft.parallel import SingleProcess
from longdraft.request.context import Context
from longdraft.speculation.routine import Routine

PREFILL_CHUNK = 512  # prompt tokens in one forward on the CPU; the text does not depend on it
DRAFTER_ROWS = REPORTED_ROWS  # last rows of the prefill, which drafters are given
_LEAST_GAIN = 256  # rows that are worth waiting for
_MAX_IDLE = 4  # rounds of a batch without progress of the text that is waited for


class Waiting:
    """Yielded by a text of a batch that waits for another text to read their common beginning."""


WAITING = Waiting()


def shareable_rows(is_device: bool, prompt_length: int, num_rows: int) -> int:
    """How many of the first `num_rows` rows of a text another text may have or get. See the top of this file."""
    return min(num_rows, prompt_length - 1) // DEVICE_CHUNK * DEVICE_CHUNK if is_device else num_rows


class PrefixReuse:
    """The use of the tree by one text. `cached_tokens` counts the rows that it took over.

    tree  None: the text takes and gives nothing
    salt  texts with different salts share nothing; None: as without a tree
    """

    def __init__(self, tree: PrefixTree | None, salt: str | None, model: Transformer, cache: FullCache,
                 context: Context) -> None:
        self._tree = None if salt is None else tree
        self._cache = cache
        self._context = context
        self._is_device = model.kernels.is_device
        if self._tree and cache.states:
            rows = context.prompt_length if self._is_device else len(context)
            cache.states.keep(rows - 1, DEVICE_CHUNK if self._is_device else None)
        self._group = (salt, model.rotation_key)
        self._leases: list[Lease] = []
        self._reading: Reading | None = None
        self.is_in_batch = False
        self.cached_tokens = self._restored_tokens = 0
        self._prefix: dict[str, int | None] | None = None  # for the statistics

    def figures(self) -> dict[str, Any]:
        """For the statistics."""
        return {"cached_tokens": self.cached_tokens, "restored_tokens": self._restored_tokens, "prefix": self._prefix}

    def restore(self, read: Callable[[int], Routine[int]]) -> Routine[None]:
        """Fill the empty cache from a snapshot.

        read  takes the number of rows that the tree has, and returns that of the rows it put into the cache
        """
        self._restored_tokens = yield from read(self._available())

    def begin(self, ranks: SingleProcess) -> Iterator[Waiting]:
        """Fill the cache, if nothing was written to it, with the rows that the tree has. Waits for texts of the same
        batch that read them now. All ranks of a run take the same number of rows.
        """
        tree, ids = self._tree, self._context.slice(0, len(self._context) - 1)
        computed = KEPT_BEFORE if self._cache.states and not self._is_device else DRAFTER_ROWS  # the last rows
        limit = max(0, len(ids) - computed) if self._cache.can_adopt else 0
        if tree and self.is_in_batch and limit:
            yield from self._wait(tree, limit)
        match = self._match(tree, ids, limit) if tree else None
        if tree:
            known = tree.match(self._group, ids, len(ids)).length
            self._prefix = {"matched": known, "parted_at": known if known < len(ids) else None}
        with ranks.synchronized(self._context):
            match = self._agreed(match, ranks)
        if tree and match:
            self.cached_tokens = match.length
            for stores, count in match.parts:
                self._cache.adopt(stores, count)
            if self._cache.states and self.cached_tokens:
                self._cache.states.adopt(match.states)
            self._leases.append(match.lease)
            self._reading = tree.begin_reading(self._group, ids)

    def _available(self) -> int:
        """Rows that the tree has of the text's beginning."""
        if self._tree is None:
            return 0
        return self._match(self._tree, self._context.slice(0, len(self._context) - 1), len(self._context)).length

    def _match(self, tree: PrefixTree, ids: Ids, limit: int) -> Match:
        match = tree.match(self._group, ids, limit)
        return match.cut_to_state() if self._cache.states else match

    def _agreed(self, match: Match | None, ranks: SingleProcess) -> Match | None:
        """As much of the beginning as every rank has and can take. Their trees may differ."""
        agreed = -1
        while (least := ranks.smallest(match.length if match else 0)) != agreed:
            agreed = least
            if match:
                match = match.cut(self._shareable(least))
                match = match.cut_to_state() if self._cache.states else match
        return match

    def _wait(self, tree: PrefixTree, limit: int) -> Iterator[Waiting]:
        ids = self._context.slice(0, limit)
        idle, done = 0, -1
        chunk = DEVICE_CHUNK if self._is_device else None
        least = self._match(tree, ids, limit).length + _LEAST_GAIN
        by_state = self._cache.states is not None
        while idle < _MAX_IDLE and (
                ahead := tree.reading_ahead(self._group, ids, least, by_state=by_state, chunk=chunk)):
            idle, done = (idle + 1 if ahead.done == done else 0), ahead.done
            yield WAITING

    def record_progress(self, *, is_done: bool) -> None:
        """A chunk of the prefill was computed. Gives its rows to the tree when a block of the cache is full."""
        if self._tree is None or self._reading is None:
            return
        reading, length = self._reading, self._cache.length
        if is_done or length // STORE_BLOCK > reading.done // STORE_BLOCK:
            self.publish(length if is_done else length // STORE_BLOCK * STORE_BLOCK)
            reading.published = length
        reading.done = length
        if is_done:
            self.end_reading()

    def publish(self, length: int | None = None) -> None:
        """Give the first `length` rows to the tree; default: all that are committed."""
        if self._tree is None or not self._cache.length:
            return
        states = self._cache.states if length is None and not self._is_device else None
        length = self._shareable(self._cache.length if length is None else length)
        with suppress(MemoryError):  # the tree goes without them
            if states:
                states.keep_now()
            self._leases.append(self._tree.publish(self._group, self._context.slice(0, length), self._cache))
            for lease in self._leases[:-1]:
                lease.release()
            del self._leases[:-1]

    def _shareable(self, num_rows: int) -> int:
        return shareable_rows(self._is_device, self._context.prompt_length, num_rows)

    def end_reading(self) -> None:
        """The prompt is read, or will not be read to its end."""
        if self._tree is not None and self._reading is not None:
            self._tree.end_reading(self._reading)
            self._reading = None

    def close(self) -> None:
        """The text has ended: give its rows to the tree, and release the pieces that it used. Can be called again."""
        self.end_reading()
        self.publish()
        for lease in self._leases:
            lease.release()
        self._leases, self._tree = [], None
