"""The events of a generation: what each step adds to the text, and how the text ends."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Finish = Literal["length", "eos", "stop", "loop", "cancelled"]


class TokenLogprob(NamedTuple):
    """A token, its log-probability among the tokens that sampling could choose (of a prompt: among all), and the
    likeliest of these. The first token of a prompt has no log-probability."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """The result of one step of a generation.

    tokens         the new token ids
    text           the new complete characters
    finish_reason  why the text ended; set on the last event only
    stats          the statistics of the run; set on the last event only
    error          in a batch: the error that ended this text; set on the last event only, which has no finish
                   reason then (a text that is generated alone raises it instead)
    pieces         the part of `text` that each token added
    sources        name of each token's drafter; "" for tokens that the target added, and for those of an earlier run
    drafted        number of draft tokens verified in this step
    depth          depth of the draft tree, tokens
    logprobs       log-probabilities for each token, if requested
    seconds        wall-clock time of the step; in a batch it includes the work on other texts
    prompt_logprobs  log-probabilities for each token of the prompt, if requested; set on the first event only
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: Finish | None = None
    stats: dict[str, Any] | None = None
    error: Exception | None = None
    pieces: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    drafted: int = 0
    depth: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    seconds: float = 0.0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def num_accepted(self) -> int:
        """Number of draft tokens that were accepted into the text."""
        return sum(source != "" for source in self.sources)
