"""Sampling settings: how each token is chosen and when the text stops. longdraft/sampling/process.py has their order.

    params = SamplingParams(max_new_tokens=1000, min_p=0.1, dry_multiplier=0.8, dry_allowed_length=4, seed=7)
"""

from __future__ import annotations

import json
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from longdraft.errors import UsageError, check
from longdraft.request.structured import NAMES as STRUCTURE_NAMES
from longdraft.request.structured import check_structure, structured_outputs

MAX_SEED = 2**64 - 1
LONGEST_REPEAT = 50  # tokens: DRY penalises longer repeats like this one; the largest dry_allowed_length
MAX_PHRASES, MAX_PHRASE = 1000, 200  # banned phrases, characters of each
BREAKERS = ("\n", ":", '"', "*")  # the usual sequence breakers of DRY

# Names that other tools use; SamplingParams.from_names translates them.
ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_strings": "stop",
    "repeat_last_n": "penalty_window",
    "repetition_context_size": "penalty_window",
    "penalty_length": "penalty_window",
    "penalty_range": "penalty_window",
    "repetition_penalty_range": "penalty_window",
    "rep_pen_range": "penalty_window",
    "dry_range": "dry_penalty_last_n",
    "typical": "typical_p",
    "typ_p": "typical_p",
    "nsigma": "top_n_sigma",
    "top_nsigma": "top_n_sigma",
    "temp_last": "temperature_last",
    "banned_phrases": "banned_strings",
    **dict.fromkeys(STRUCTURE_NAMES, "structured_outputs"),
}
# llama.cpp's names of samplers, in its own order, where temperature comes last; longdraft's usual order has it first.
_LAST_ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
_FIRST_ORDER = ("penalties", "dry", "temperature", *_LAST_ORDER[2:-1])
# The settings of each of them; one that a list of samplers leaves out must be off.
_OF_SAMPLER = {
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"), "dry": ("dry_multiplier",),
    "top_n_sigma": ("top_n_sigma",), "top_k": ("top_k",), "typ_p": ("typical_p",), "top_p": ("top_p",),
    "min_p": ("min_p",), "xtc": ("xtc_probability",)}

_Allowed = tuple[Callable[[Any], bool], str, str]  # whether a number is allowed, the range in words, the cure
_WHOLE: dict[str, _Allowed] = {
    "max_new_tokens": (lambda x: x >= 1, "1 or more", ""),
    "min_new_tokens": (lambda x: x >= 0, "0 or more", ""),
    "top_k": (lambda x: x >= 0, "0 or more", "0 keeps every token"),
    "min_tokens_to_keep": (lambda x: x >= 1, "1 or more", ""),
    "penalty_window": (lambda x: x >= 1, "1 or more", "to turn the penalty off set repetition_penalty to 1"),
    "dry_allowed_length": (lambda x: 1 <= x <= LONGEST_REPEAT, f"1 to {LONGEST_REPEAT}",
                           "to turn DRY off set dry_multiplier to 0"),
    "dry_penalty_last_n": (lambda x: x >= -1, "1 or more; 0 or -1 for the whole text", ""),
    "no_repeat_ngram_size": (lambda x: 0 <= x <= LONGEST_REPEAT + 1, f"0 to {LONGEST_REPEAT + 1}", "0 turns it off"),
}
_NUMBERS: dict[str, _Allowed] = {
    "temperature": (lambda x: x == 0 or x >= 1e-3, "0, or 0.001 and more", "0 is greedy"),
    "top_p": (lambda x: 0 < x <= 1, "above 0, at most 1", "1 keeps every token"),
    "min_p": (lambda x: 0 <= x < 1, "0 to below 1", "0 keeps every token"),
    "eta_cutoff": (lambda x: 0 <= x < 1, "0 to below 1", "0 turns it off"),
    "repetition_penalty": (lambda x: 1e-3 <= x <= 1e3, "0.001 to 1000", "1 turns it off"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "-2 to 2", "0 turns it off"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "-2 to 2", "0 turns it off"),
    "dry_multiplier": (lambda x: 0 <= x <= 100, "0 to 100", "0 turns it off"),
    "dry_base": (lambda x: 1 <= x <= 10, "1 to 10", "to turn DRY off set dry_multiplier to 0"),
    "typical_p": (lambda x: 0 < x <= 1, "above 0, at most 1", "1 turns it off"),
    "top_n_sigma": (lambda x: x >= 0 or x == -1, "0 or more", "0 or -1 turns it off"),
    "xtc_probability": (lambda x: 0 <= x <= 1, "0 to 1", "0 turns it off"),
    "xtc_threshold": (lambda x: 0 <= x <= 1, "0 to 1", "above 0.5 turns it off"),
    "dynatemp_range": (lambda x: 0 <= x <= 100, "0 to 100", "0 turns it off"),
    "dynatemp_exponent": (lambda x: 0 < x <= 100, "above 0, at most 100", ""),
}


@dataclass(frozen=True)
class SamplingParams:
    """How to choose each token and when to stop. The constructor raises UsageError for an invalid value.

    max_new_tokens      the largest number of tokens to generate, >= 1
    min_new_tokens      end-of-text and stop ids have probability 0 before this many tokens
    seed                0 .. 2**64-1; None: a random seed, which is reported
    temperature         0: greedy decoding, the most likely token (filters and XTC have no effect); else 0.001 or more
    top_k               keep the k most likely tokens; 0: all
    top_p               keep the smallest set of tokens with at least this total probability, (0, 1]
    min_p               keep tokens with at least this fraction of the highest probability, [0, 1)
    eta_cutoff          entropy-dependent threshold (Hewitt et al. 2022), [0, 1); 0: off
    min_tokens_to_keep  min_p and eta_cutoff keep at least this many tokens (TokenSwift's code: 20)
    repetition_penalty  0.001 to 1000; tokens of the penalty window: positive logits / it, negative * it; 1: off
    penalty_window      number of last tokens that are penalised, prompt included, >= 1
    presence_penalty    -2 to 2: subtracted from the logits of the generated tokens in the penalty window
    frequency_penalty   -2 to 2: the same, times the number of their occurrences there
    dry_multiplier      DRY: a token that would lengthen a repeated passage of l tokens to l + 1 loses
                        dry_multiplier * dry_base ** (l - dry_allowed_length), l >= dry_allowed_length; 0: off
    dry_base            1 to 10
    dry_allowed_length  1 to 50. 2 is usual in chats; 4 is better for long prose, where short phrases recur
    dry_penalty_last_n  number of last tokens in which repeats are searched; 0 or -1: the whole text with the prompt
    dry_sequence_breakers  texts that end a repeated passage: tokens that contain one are not counted or penalised
    no_repeat_ngram_size   n: no n tokens may occur twice, 0 to 51; 0: off
    typical_p           keep the tokens whose surprise is closest to the entropy, up to this total probability; 1: off
    top_n_sigma         keep logits of at least the highest minus this many standard deviations; 0 or -1: off
    xtc_probability     XTC: with this probability at each position, exclude the top choices; 0: off
    xtc_threshold       top choices: tokens of at least this probability, except the least likely of them
    temperature_last    the filters see temperature 1, and temperature is applied after them
    dynatemp_range      temperature -+ this, by the entropy of the tokens that are left; needs temperature_last; 0: off
    dynatemp_exponent   of the normalised entropy
    banned_strings      phrases that the text must not contain, in any letter case; see longdraft/text/banned_phrases.py
    structured_outputs  what the text must match: ("json", schema), ("regex", expression) or ("grammar", Lark or GBNF);
                        see longdraft/request/structured.py for the other forms that `from_names` takes
    structured_after    the text after which it must match, such as "</think>"; what comes before is free. Default: the
                        whole text, or after the thinking that the end of the prompt opens
    stop                strings that end the generation; they are not part of the text
    stop_token_ids      token ids that end the generation, in addition to the model's end-of-text ids
    logit_bias          pairs (token id, -100 to 100 to add to its logit), applied before everything else
    ignore_eos          the model's end-of-text ids do not end the generation
    on_loop             for a text that repeats itself: warn | stop (finish reason "loop") | off; see request/loops.py
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 0
    dry_sequence_breakers: tuple[str, ...] = BREAKERS
    no_repeat_ngram_size: int = 0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    temperature_last: bool = False
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    banned_strings: tuple[str, ...] = ()
    structured_outputs: tuple[str, ...] = ()
    structured_after: str = ""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    on_loop: str = "warn"
    from_model: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in (*_WHOLE, *_NUMBERS):
            value = getattr(self, name)
            if name in _WHOLE:
                check(_is_int(value), name, value, "a whole number")
            else:
                is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
                is_finite = is_number and abs(value) <= sys.float_info.max  # false for integers too large for a float
                check(is_finite, name, value, "a finite number")
        for name, (is_allowed, words, cure) in (_WHOLE | _NUMBERS).items():
            check(is_allowed(getattr(self, name)), name, getattr(self, name), words, cure)
        check(self.min_new_tokens <= self.max_new_tokens, "min_new_tokens", self.min_new_tokens,
              f"at most max_new_tokens ({self.max_new_tokens})")
        check(self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED), "seed", self.seed,
              "0 to 2**64-1")
        check(isinstance(self.temperature_last, bool), "temperature_last", self.temperature_last, "true or false")
        check(self.dynatemp_range == 0 or self.temperature_last, "dynatemp_range", self.dynatemp_range,
              "0 without temperature_last", "dynamic temperature depends on what the filters leave")
        _check_texts("stop", self.stop)
        _check_texts("dry_sequence_breakers", self.dry_sequence_breakers)
        _check_texts("banned_strings", self.banned_strings)
        too_long = next((text for text in self.banned_strings if len(text) > MAX_PHRASE), None)
        check(len(self.banned_strings) <= MAX_PHRASES and too_long is None, "banned_strings",
              too_long or f"a list of {len(self.banned_strings)}", f"{MAX_PHRASES} texts of {MAX_PHRASE} characters")
        check_structure(self.structured_outputs)
        if self.structured_outputs:
            check(not self.ignore_eos, "ignore_eos", True, "false with structured_outputs", "the grammar ends the text")
            check(not self.min_new_tokens, "min_new_tokens", self.min_new_tokens, "0 with structured_outputs",
                  "the grammar ends the text")
            for name in ("no_repeat_ngram_size", "banned_strings"):
                check(not getattr(self, name), name, getattr(self, name), "off with structured_outputs",
                      "it could ban what the grammar demands")
        check(isinstance(self.structured_after, str) and len(self.structured_after) <= MAX_PHRASE
              and bool(self.structured_outputs or not self.structured_after), "structured_after",
              self.structured_after, f"a text of at most {MAX_PHRASE} characters, with structured_outputs")
        ids: object = self.stop_token_ids
        check(isinstance(ids, tuple) and all(_is_int(i) and i >= 0 for i in ids), "stop_token_ids", ids,
              "a tuple of token ids, 0 or more")
        _check_bias(self.logit_bias)
        check(self.on_loop in ("warn", "stop", "off"), "on_loop", self.on_loop, "warn, stop or off")

    @classmethod
    def from_names(cls, settings: Mapping[str, Any]) -> SamplingParams:
        """From a mapping with the names of longdraft, Hugging Face, OpenAI or llama.cpp.

        `do_sample=False` sets temperature 0; `stop` may be one string. `samplers`, llama.cpp's list, sets
        `temperature_last`. UsageError for unknown or contradictory names.
        """
        known = {entry.name for entry in fields(cls) if entry.compare}
        chosen: dict[str, Any] = {}
        for name, value in settings.items():
            target = ALIASES.get(name, name)
            if name == "do_sample":
                target, value = "temperature", settings.get("temperature", 1.0) if value else 0.0
            if value is None and target != "seed":
                continue  # not set
            if name == "samplers":
                target, value = "temperature_last", _has_temperature_last(value)
            if target not in known:
                raise UsageError(f"unknown sampling setting {name!r}; known: {', '.join(sorted(known))}", name)
            if target == "structured_outputs" and (value := structured_outputs(name, value)) is None:
                continue
            if target in chosen and chosen[target] != value and name != "temperature":
                raise UsageError(f"{name!r} contradicts another spelling of {target!r}; give one of them", name)
            if target == "temperature" and settings.get("do_sample") is False:
                value = 0.0
            chosen[target] = _converted(target, value)
        params = cls(**chosen)
        if settings.get("samplers") is not None:
            _check_left_out(params, settings["samplers"])
        return params

    def with_seed(self, seed: int) -> SamplingParams:
        return replace(self, seed=seed)

    @property
    def has_path_penalties(self) -> bool:
        """Whether settings other than the repetition penalty depend on the tokens before a position."""
        return bool(self.presence_penalty or self.frequency_penalty or self.dry_multiplier or self.no_repeat_ngram_size)

    @property
    def needs_sums(self) -> bool:
        """Whether a filter is more than a threshold on the logits, so that a device does not decide it, and the
        compiled sampler decides only top-k and top-p. None is at temperature 0."""
        return self.temperature > 0 and (
            self.top_k > 0 or self.top_p < 1 or self.eta_cutoff > 0 or self.min_tokens_to_keep > 1
            or self.typical_p < 1 or self.top_n_sigma > 0 or self.has_xtc or self.dynatemp_range > 0)

    @property
    def has_xtc(self) -> bool:
        """Whether XTC can exclude a token: at most one token has more than half of the probability."""
        return self.xtc_probability > 0 and self.xtc_threshold <= 0.5


def _converted(name: str, value: Any) -> Any:
    """The value of a setting from JSON or from another tool, as the dataclass takes it."""
    if name in ("dry_sequence_breakers", "banned_strings") and isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)  # as SillyTavern sends it
        except ValueError as error:
            raise UsageError(f"{name} is {value!r}; allowed: texts, or a JSON list of them", name) from error
    if name in ("stop", "dry_sequence_breakers", "banned_strings"):
        return (value,) if isinstance(value, str) else tuple(value)
    if name == "stop_token_ids":
        return tuple(value)
    if name == "logit_bias" and isinstance(value, Mapping):
        return tuple(sorted(value.items()))
    if name == "logit_bias" and isinstance(value, list):
        return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in value)
    return value


def _has_temperature_last(samplers: object) -> bool:
    """Whether a list of llama.cpp's sampler names has temperature last. UsageError for other orders than the two."""
    names = [str(name) for name in samplers] if isinstance(samplers, Sequence) and not isinstance(samplers, str) else []
    names = ["typ_p" if name == "typical_p" else name for name in names]
    for order, is_last in ((_FIRST_ORDER, False), (_LAST_ORDER, True)):
        if "temperature" in names and names == [name for name in order if name in names]:
            return is_last
    raise UsageError(f"samplers is {str(samplers)[:200]!r}; allowed, with or without some of them: "
                     f"{', '.join(_FIRST_ORDER)}; or {', '.join(_LAST_ORDER)}", "samplers")


def _check_left_out(params: SamplingParams, samplers: Sequence[str]) -> None:
    """Refuse a list of samplers that leaves one out whose settings are on."""
    off = SamplingParams()
    for sampler, names in _OF_SAMPLER.items():
        is_listed = sampler in samplers or (sampler == "typ_p" and "typical_p" in samplers)
        name = next((name for name in names if getattr(params, name) != getattr(off, name)), None)
        if name and not is_listed:
            raise UsageError(f"{name} is {getattr(params, name)}, but samplers leaves {sampler} out; add it, or leave "
                             f"{name} out", "samplers")


def _check_texts(name: str, texts: object) -> None:
    check(isinstance(texts, tuple), name, texts, "a tuple of non-empty texts")
    assert isinstance(texts, tuple)
    for text in texts:
        check(isinstance(text, str) and bool(text), name, text, "non-empty texts")


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
