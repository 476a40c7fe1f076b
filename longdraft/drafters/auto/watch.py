"""Drafts of candidates that read the text alone, compared with the text that another candidate writes.

Such a draft needs no forward, so its outcome is known without a probe. The first ones come at once, so that a text that
repeats itself from its beginning is found out; later ones as often as they take a small part of the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import cycle
from typing import NamedTuple

from longdraft.drafters.auto.settings import AUTO_SETTINGS
from longdraft.request.context import Context
from longdraft.request.tree import Tree
from longdraft.speculation.drafter import Accepted, Drafter
from longdraft.speculation.routine import run_alone


class Watched(NamedTuple):
    """A draft after the first `length` tokens of the text that was not verified."""

    name: str
    tree: Tree
    length: int


class Watch:
    """Watches `readers` in turns: name -> candidate that reads the text alone.

    learn  is given the outcome of a draft: the candidate's name, the tree, and the tokens that followed
    clock  in seconds
    """

    def __init__(self, readers: Mapping[str, Drafter], learn: Callable[[str, Tree, list[int]], None],
                 clock: Callable[[], float]) -> None:
        self._readers = dict(readers)
        self._turns = cycle(self._readers)
        self._learn = learn
        self._clock = clock
        self._drafts = deque[Watched]()
        self._num_first = AUTO_SETTINGS.first_steps * len(self._readers)  # drafts to come that do not wait
        self._usual = 0.0  # seconds of a draft
        self._next = 0.0  # when a later draft is due, by the clock

    def look(self, context: Context, accepted: Accepted, active: str) -> None:
        """After a step: take the outcomes that are known by now, and watch a candidate other than `active`."""
        while self._drafts:
            name, tree, length = self._drafts[0]
            tokens = context.slice(length, min(length + AUTO_SETTINGS.max_depth, len(context))).tolist()
            if len(tokens) < max(tree.depths) and len(tree.follow(tokens)) > len(tokens):
                break  # all tokens so far are right, and more were guessed
            self._drafts.popleft()
            self._learn(name, tree, tokens)
        if self._readers.keys() <= {active}:  # `add` gets its drafts
            return
        began = self._clock()
        if began < self._next and not self._num_first:
            return
        name = next(each for each in self._turns if each != active)
        reader = self._readers[name]
        reader.observe(context, accepted)
        self._drafts.append(Watched(name, run_alone(reader.propose(context, AUTO_SETTINGS.max_depth)), len(context)))
        self._num_first -= self._num_first > 0
        now = self._clock()
        spent = now - began
        self._usual = min(spent, 2 * self._usual) if self._usual else spent  # an interruption counts little
        self._next = now + self._usual / AUTO_SETTINGS.watch_share

    def add(self, name: str, tree: Tree, length: int) -> None:
        """The active candidate drafted this after the first `length` tokens of the text."""
        if name in self._readers and len(tree) > 1:
            self._drafts.append(Watched(name, tree, length))
