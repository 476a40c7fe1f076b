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
        self.turns[name] += written
        num_parts = len(self.choices)
        while written:
            part, place = divmod(self.num_new, TOKENS_PER_PART)
            inside = min(written, TOKENS_PER_PART - place)
            self.choices += [Counter[str]() for _ in range(part + 1 - len(self.choices))]
            self.choices[part][name] += inside
            self.num_new += inside
            written -= inside
        return len(self.choices) > num_parts

    def retract(self, count: int) -> None:
        """The last tokens were taken back."""
        self.num_new -= count
        self._take_last(count, self.turns, self.choices)

    def summary(self, num_tokens: int) -> dict[str, Any]:
        """Figures over the first `num_tokens` tokens."""
        turns, choices = self.turns.copy(), [counts.copy() for counts in self.choices]
        # Tokens of the last step may be beyond the end of the text.
        self._take_last(turns.total() - num_tokens, turns, choices)
        return {
            "tokens_by_choice": dict(turns),
            "choices_per_tokens": TOKENS_PER_PART,
            "choices": [dict(counts) for counts in choices],
        }

    def _take_last(self, count: int, turns: Counter[str], choices: list[Counter[str]]) -> None:
        """Leave the last tokens out, and the parts that are empty then."""
        while count > 0 and choices:
            inside = min(count, choices[-1].total())
            for counts in (turns, choices[-1]):
                counts[self._last_writer] -= inside
            count -= inside
            if not choices[-1].total():
                choices.pop()
