"""Plain data types of the whole package: sampling parameters, the text so far, and the events of a generation.

    params = SamplingParams(max_new_tokens=1000, min_p=0.1, seed=7)
"""

from __future__ import annotations

import numbers
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longdraft.errors import UsageError, check

Finish = Literal["length", "eos", "stop", "loop", "cancelled"]
MAX_SEED = 2**64 - 1
Prompt = str | Sequence[int] | NDArray[np.integer[Any]]  # a text, or its token ids

_HALF_PAIR = re.compile("[\ud800-\udfff]")


def lone_surrogate(text: str) -> int | None:
    """The index of the first lone surrogate, or None. JSON escapes can contain one, and Python represents bytes that
    are not UTF-8 by them (PEP 383), but valid text has none."""
    found = _HALF_PAIR.search(text)
    return found and found.start()


# Names that other tools use; SamplingParams.from_names translates them.
ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_strings": "stop",
    "repeat_last_n": "penalty_window",
    "repetition_context_size": "penalty_window",
    "penalty_length": "penalty_window",
}


@dataclass(frozen=True)
class SamplingParams:
    """How to choose each token and when to stop. The constructor raises UsageError for an invalid value.

    max_new_tokens      the largest number of tokens to generate, >= 1
    min_new_tokens      end-of-text and stop ids have probability 0 before this many tokens
    seed                0 .. 2**64-1; None: a random seed, which is reported
    temperature         0: greedy decoding, the most likely token; else 0.001 or more
    top_k               keep the k most likely tokens; 0: all
    top_p               keep the smallest set of tokens with at least this total probability, (0, 1]
    min_p               keep tokens with at least this fraction of the highest probability, [0, 1)
    eta_cutoff          entropy-dependent threshold (Hewitt et al. 2022), [0, 1); 0: off
    min_tokens_to_keep  min_p and eta_cutoff keep at least this many tokens (TokenSwift's code: 20)
    repetition_penalty  0.001 to 1000; tokens of the penalty window: positive logits / it, negative * it; 1: off
    penalty_window      number of last tokens that are penalised, prompt included, >= 1
    stop                strings that end the generation; they are not part of the text
    stop_token_ids      token ids that end the generation, in addition to the model's end-of-text ids
    logit_bias          pairs (token id, -100 to 100 to add to its logit), applied before everything else
    ignore_eos          the model's end-of-text ids do not end the generation
    on_loop             for a text that repeats itself: warn | stop (finish reason "loop") | off; see longdraft/loops.py
    from_model          names of the settings above that come from the model's own defaults; informational
    """

    max_new_tokens: int = 1024
    min_new_tokens: int = 0
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    eta_cutoff: float = 0.0
    min_tokens_to_keep: int = 1
    repetition_penalty: float = 1.0
    penalty_window: int = 1024
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    on_loop: str = "warn"
    from_model: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens", "top_k", "min_tokens_to_keep", "penalty_window"):
            check(_is_int(getattr(self, name)), name, getattr(self, name), "a whole number")
        for name in ("temperature", "top_p", "min_p", "eta_cutoff", "repetition_penalty"):
            value = getattr(self, name)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            is_finite = is_number and abs(value) <= sys.float_info.max  # false for integers too large for a float
            check(is_finite, name, value, "a finite number")
        check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more")
        check(self.min_new_tokens >= 0, "min_new_tokens", self.min_new_tokens, "0 or more")
        check(self.min_new_tokens <= self.max_new_tokens, "min_new_tokens", self.min_new_tokens,
              f"at most max_new_tokens ({self.max_new_tokens})")
        check(self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED), "seed", self.seed,
              "0 to 2**64-1")
        check(self.temperature == 0 or self.temperature >= 1e-3, "temperature", self.temperature,
              "0, or 0.001 and more", "0 is greedy")
        check(self.top_k >= 0, "top_k", self.top_k, "0 or more", "0 keeps every token")
        check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, at most 1", "1 keeps every token")
        check(0 <= self.min_p < 1, "min_p", self.min_p, "0 to below 1", "0 keeps every token")
        check(0 <= self.eta_cutoff < 1, "eta_cutoff", self.eta_cutoff, "0 to below 1", "0 turns it off")
        check(self.min_tokens_to_keep >= 1, "min_tokens_to_keep", self.min_tokens_to_keep, "1 or more")
        check(1e-3 <= self.repetition_penalty <= 1e3, "repetition_penalty", self.repetition_penalty, "0.001 to 1000",
              "1 turns it off")
        check(self.penalty_window >= 1, "penalty_window", self.penalty_window, "1 or more",
              "to turn the penalty off set repetition_penalty to 1")
        stop: object = self.stop
        check(isinstance(stop, tuple) and all(isinstance(s, str) and s for s in stop), "stop", stop,
              "a tuple of non-empty texts")
        ids: object = self.stop_token_ids
        check(isinstance(ids, tuple) and all(_is_int(i) and i >= 0 for i in ids), "stop_token_ids", ids,
              "a tuple of token ids, 0 or more")
        _check_bias(self.logit_bias)
        check(self.on_loop in ("warn", "stop", "off"), "on_loop", self.on_loop, "warn, stop or off")

    @classmethod
    def from_names(cls, settings: Mapping[str, Any]) -> SamplingParams:
        """From a mapping with the names of longdraft, Hugging Face or OpenAI.

        `do_sample=False` sets temperature 0; `stop` may be one string. UsageError for unknown or contradictory names.
        """
        known = {entry.name for entry in fields(cls) if entry.compare}
        chosen: dict[str, Any] = {}
        for name, value in settings.items():
            target = ALIASES.get(name, name)
            if name == "do_sample":
                target, value = "temperature", settings.get("temperature", 1.0) if value else 0.0
            if value is None and target != "seed":
                continue  # not set
            if target not in known:
                raise UsageError(f"unknown sampling setting {name!r}; known: {', '.join(sorted(known))}", name)
            if target in chosen and chosen[target] != value and name != "temperature":
                raise UsageError(f"{name!r} contradicts another spelling of {target!r}; give one of them", name)
            if target == "temperature" and settings.get("do_sample") is False:
                value = 0.0
            if target == "stop":
                value = (value,) if isinstance(value, str) else tuple(value)
            if target == "stop_token_ids":
                value = tuple(value)
            if target == "logit_bias" and isinstance(value, Mapping):
                value = tuple(sorted(value.items()))
            chosen[target] = value
        return cls(**chosen)

    def with_seed(self, seed: int) -> SamplingParams:
        return replace(self, seed=seed)


def _check_bias(pairs: object) -> None:
    is_pairs = isinstance(pairs, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
    check(is_pairs, "logit_bias", pairs, "pairs of a token id and a number")
    assert isinstance(pairs, tuple)
    for token, bias in pairs:
        check(_is_int(token) and token >= 0, "logit_bias", token, "token ids, 0 or more")
        is_number = isinstance(bias, numbers.Real) and not isinstance(bias, bool)
        check(is_number and -100 <= bias <= 100, "logit_bias", bias, "-100 to 100")
    check(len({token for token, _ in pairs}) == len(pairs), "logit_bias", pairs, "each token id once")


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


class Context:
    """The text so far as token ids (int32): the prompt, then the new tokens. Append-only, amortised O(1)."""

    def __init__(self, prompt: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        self.prompt_length = len(prompt)
        self._ids: NDArray[np.int32] = np.zeros(max(1024, 2 * len(prompt)), dtype=np.int32)
        self._ids[: len(prompt)] = prompt
        self._length = len(prompt)

    def __len__(self) -> int:
        return self._length

    @property
    def last(self) -> int:
        """The last token: the root of the next tree. Its cache row does not exist yet."""
        return int(self._ids[self._length - 1])

    @property
    def num_new(self) -> int:
        return self._length - self.prompt_length

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if self._length == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._ids[self._length] = token
            self._length += 1

    def slice(self, start: int, stop: int) -> NDArray[np.int32]:
        """A read-only view of positions [start, stop), clipped to the text."""
        view = self._ids[max(0, start) : max(0, min(stop, self._length))]
        view.flags.writeable = False
        return view


class TokenLogprob(NamedTuple):
    """A chosen token, its log-probability among the tokens that sampling could choose, and the likeliest of these."""

    token: int
    logprob: float
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

    @property
    def num_accepted(self) -> int:
        """Number of draft tokens that were accepted into the text."""
        return sum(source != "" for source in self.sources)
