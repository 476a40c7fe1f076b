"""Chains that end by themselves: a chain stops where its next token would hardly be accepted.

Agreement with the target depends on the *lead* of a guess (longdraft/kernels/chain_plan.py): how far its score is
ahead of the next token's. Of the guesses of an int4 copy with a lead below 0.1, 0.57 are right; above 0.5, 0.95 and
more (notebook/2026-11.md). So a chain whose guesses all lead clearly continues, and one with two close decisions ends.

    P(next token is accepted)  =  rate(lead of the 1st) * ... * rate(lead of the last)  *  mean rate
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from longdraft.kernels.chain_plan import ChainEnd
from longdraft.request.tree import common_prefix
from longdraft.speculation.decayed_rate import DecayedRate

_EDGES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
_EXPECTED = (0.6, 0.8, 0.92, 0.94, 0.96, 0.97, 0.99)  # rates before the first outcome
_WEIGHT = 8.0  # outcomes that an expected rate counts as, once
_MEAN_EXPECTED = 0.9
_DECAY = 0.995  # leads differ less from text to text than acceptance: about the last 200 outcomes count


def _expecting(rate: float) -> DecayedRate:
    """A rate whose prior decays like outcomes."""
    decayed = DecayedRate(_DECAY)
    decayed.add(_WEIGHT * rate, _WEIGHT)
    return decayed


class Confidence:
    """How likely the tokens of one drafter's chains become the text of one request, and where its chains end.

    least        a chain ends where its next token is accepted with less than this probability; 0: it never does
    num_drafted  tokens of the latest chain
    """

    def __init__(self, least: float = 0.0) -> None:
        self.least = least
        self.num_drafted = 0
        self._rates = [_expecting(rate) for rate in _EXPECTED]  # by lead
        self._mean = _expecting(_MEAN_EXPECTED)
        self._chain: Sequence[int] = ()
        self._leads: Sequence[float] = ()

    def end(self) -> ChainEnd:
        least = min(1.0, self.least / self._mean.mean)  # a chain has one token at least
        return ChainEnd(_EDGES, tuple(rate.mean for rate in self._rates), least)

    def expect(self, chain: Sequence[int], leads: Sequence[float]) -> None:
        """A chain was drafted, with these leads."""
        self._chain = tuple(chain)
        self._leads = tuple(leads)
        self.num_drafted = len(chain)

    def learn(self, tokens: Sequence[int]) -> None:
        """The text continued with these tokens."""
        right = common_prefix(self._chain, tokens)
        for index in range(min(right + 1, len(self._chain), len(tokens))):
            self._rates[bisect_right(_EDGES, self._leads[index])].add(index < right)
            self._mean.add(index < right)
        self._chain = self._leads = ()


@runtime_checkable
class EndsChains(Protocol):
    """A drafter whose chains end by themselves."""

    @property
    def confidence(self) -> Confidence: ...


def confidence_of(drafter: object) -> Confidence | None:
    """None if the drafter drafts no chains."""
    return drafter.confidence if isinstance(drafter, EndsChains) else None
