"""What `auto` observes of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Observation:
    """The work and the time of a step with a draft, or of several steps of plain decoding that were timed together.

    tokens           that were written
    rows             of each forward
    forward_seconds  of the forwards, with the sampler and the commit
    between_seconds  between the steps and before the first one: events, text
    steps            number of steps
    tokens_before    tokens of the step before, where the steps are of plain decoding
    drafted          depth of the draft
    draft_seconds    of the draft
    is_typical       the drafter did nothing else: it did not have to catch up with the text
    """

    tokens: int
    rows: int
    forward_seconds: float
    between_seconds: float
    steps: int = 1
    tokens_before: int = 0
    drafted: int = 0
    draft_seconds: float = 0.0
    is_typical: bool = True
