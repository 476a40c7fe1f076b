"""Which candidate of `auto` wrote how many tokens of a text, for the statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

TOKENS_PER_PART = 1024  # new tokens over which `choices` are counted


class TokenReport:
    """Counts the tokens of one text.

    turns    tokens written with each candidate
    choices  the same for each part of TOKENS_PER_PART new tokens
    num_new  new tokens of the text so far, resumed ones included
    """

    def __init__(self, candidates: Iterable[str]) -> None:
        self.turns: Counter[str] = Counter(dict.fromkeys(candidates, 0))
        self.choices: list[Counter[str]] = []
        self.num_new = 0
        self._last_writer = ""

    def add(self, name: str, written: int) -> bool:
        """A candidate wrote so many tokens. Returns whether a new part began."""
        self._last_writer = name
        self.num_new += written
        self.turns[name] += written
        num_parts = 1 + self.num_new // TOKENS_PER_PART
        begins_part = len(self.choices) < num_parts
        self.choices += [Counter[str]() for _ in range(num_parts - len(self.choices))]
        self.choices[-1][name] += written
        return begins_part

    def retract(self, count: int) -> None:
        """The last tokens were taken back."""
        self.turns[self._last_writer] -= count
        if self.choices:
            self.choices[-1][self._last_writer] -= count

    def summary(self, num_tokens: int) -> dict[str, Any]:
        """Figures over the first `num_tokens` tokens."""
        beyond = self.turns.total() - num_tokens  # tokens of the last step beyond the end of the text
        turns = self.turns.copy()
        choices = [counts.copy() for counts in self.choices]
        if beyond:
            turns[self._last_writer] -= beyond
            choices[-1][self._last_writer] -= beyond
        return {
            "tokens_by_choice": dict(turns),
            "choices_per_tokens": TOKENS_PER_PART,
            "choices": [dict(counts) for counts in choices],
        }
