"""Sampling settings: how each token is chosen and when the text stops. longdraft/sampling/process.py has their order.

    params = SamplingParams(max_new_tokens=1000, min_p=0.1, dry_multiplier=0.8, dry_allowed_length=4, seed=7)

A new setting is one field of `SamplingParams` and its arithmetic in longdraft/sampling/.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longdraft.errors import UsageError, check
from longdraft.request.settings import Range, SettingScope, in_python_types, is_whole, names_of, setting, settings_of
from longdraft.request.structured import SPELLINGS, check_structure, structured_outputs

MAX_SEED = 2**64 - 1
LONGEST_REPEAT = 50  # tokens: DRY penalises longer repeats like this one; the largest dry_allowed_length
MAX_PHRASES, MAX_PHRASE = 1000, 200  # banned phrases, characters of each
BREAKERS = ("\n", ":", '"', "*")  # the usual sequence breakers of DRY

# llama.cpp's names of samplers, in its own order, where temperature comes last; longdraft's usual order has it first.
_LAST_ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
_FIRST_ORDER = ("penalties", "dry", "temperature", *_LAST_ORDER[2:-1])
# The settings of each of them; one that a list of samplers leaves out must be off.
_OF_SAMPLER = {
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"), "dry": ("dry_multiplier",),
    "top_n_sigma": ("top_n_sigma",), "top_k": ("top_k",), "typ_p": ("typical_p",), "top_p": ("top_p",),
    "min_p": ("min_p",), "xtc": ("xtc_probability",)}

# Settings that a thought may have of its own. Windows and lengths are common to the whole text.
IN_THINKING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold",
               "repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # ascending
MAX_MESSAGE = 4096  # characters of a message that closes a thought

# Scopes: OpenAI's own parameters are at the top level of a body; a few rare settings under `longdraft` only.
_OPENAI = SettingScope.OPTION | SettingScope.BODY
_RARE = SettingScope.OPTION | SettingScope.EXTENSION
_MODEL = SettingScope.MODEL
_MODEL_OR_REQUEST = SettingScope.MODEL | SettingScope.ANY_REQUEST

_ANY_COUNT = Range(1)
_OFF_AT_0 = "0 turns it off"
_OPENAI_PENALTY = Range(-2, 2, cure=_OFF_AT_0)
_PROBABILITY = Range(0, 1, cure=_OFF_AT_0)


def _check_texts(name: str, texts: Any) -> None:
    check(isinstance(texts, tuple), name, texts, "a list of non-empty texts")
    for text in texts:
        check(isinstance(text, str) and bool(text), name, text, "non-empty texts")


def _check_phrases(name: str, phrases: Any) -> None:
    _check_texts(name, phrases)
    too_long = next((text for text in phrases if len(text) > MAX_PHRASE), None)
    check(len(phrases) <= MAX_PHRASES and too_long is None, name, too_long or f"a list of {len(phrases)}",
          f"{MAX_PHRASES} texts of {MAX_PHRASE} characters")


def _check_ids(name: str, ids: Any) -> None:
    check(isinstance(ids, tuple) and all(is_whole(token) and token >= 0 for token in ids), name, ids,
          "a list of token ids, 0 or more")


def _check_bias(name: str, pairs: Any) -> None:
    is_pairs = isinstance(pairs, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
    check(is_pairs, name, pairs, "pairs of a token id and a number")
    for token, bias in pairs:
        check(is_whole(token) and token >= 0, name, token, "token ids, 0 or more")
        is_number = isinstance(bias, numbers.Real) and not isinstance(bias, bool)
        check(is_number and -100 <= bias <= 100, name, bias, "-100 to 100")
    check(len({token for token, _ in pairs}) == len(pairs), name, pairs, "each token id once")


def _check_mark(name: str, text: Any, *, has_structure: bool = True) -> None:
    is_short = isinstance(text, str) and len(text) <= MAX_PHRASE
    check(is_short and (has_structure or not text), name, text,
          f"a text of at most {MAX_PHRASE} characters, with structured_outputs")


def _check_thinking(name: str, pairs: Any) -> None:
    is_pairs = isinstance(pairs, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
    check(is_pairs, name, pairs, "pairs of a setting and its value")
    unknown = next((key for key, _ in pairs if key not in IN_THINKING), None)
    check(unknown is None, name, unknown, ", ".join(IN_THINKING), "set others for the whole text")


def _to_thinking(name: str, value: Any) -> Any:
    """Settings and their values. On the command line and in journals they are pairs."""
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else tuple(map(tuple, value))


def _to_texts(name: str, value: Any) -> tuple[str, ...]:
    """A single text is a list of one."""
    if isinstance(value, Mapping):
        raise TypeError("a list of texts is needed")
    return (value,) if isinstance(value, str) else tuple(value)


def _to_texts_or_json(name: str, value: Any) -> tuple[str, ...]:
    """A text that begins with [ is a list in JSON, as SillyTavern sends it."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UsageError(f"{name} is {value!r}; allowed: texts, or a JSON list of them", name) from error
    return _to_texts(name, value)


def _to_pairs(name: str, value: Any) -> Any:
    """Pairs of a mapping. In JSON its keys, token ids, are texts."""
    if isinstance(value, Mapping):
        return tuple(sorted((int(token) if isinstance(token, str) else token, bias) for token, bias in value.items()))
    return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in value)


def _to_temperature_last(name: str, value: Any) -> Any:
    """`samplers`, llama.cpp's list, says it by its order."""
    return _has_temperature_last(value) if name == "samplers" else value


@dataclass(frozen=True)
class SamplingParams:
    """How to choose each token and when to stop. The constructor raises UsageError for an invalid value. It turns lists
    into tuples, and numbers of NumPy into Python's.

    docs/sampling.md has the range and the meaning of each setting, and the order in which they act.
    """

    max_new_tokens: int = setting(1024, "Maximum number of new tokens; 0 only reads the prompt.", Range(0),
                                  scopes=_OPENAI, aliases=("max_tokens", "max_completion_tokens"))
    min_new_tokens: int = setting(0, "Minimum number of new tokens before the text may end.", Range(0),
                                  aliases=("min_tokens",))
    seed: int | None = setting(None, "Seed of the noise; the same seed gives the same text.",
                               Range(0, MAX_SEED, words="0 to 2**64-1"), scopes=_OPENAI, shown="random, see --stats")
    temperature: float = setting(1.0, "Sampling temperature; 0 takes the likeliest token.", Range(
        1e-3, others=(0,), words="0, or 0.001 and more", cure="0 is greedy"), scopes=_OPENAI | _MODEL)
    top_k: int = setting(0, "Keep the K likeliest tokens; 0: all.", Range(0, cure="0 keeps every token"),
                         scopes=_MODEL_OR_REQUEST)
    top_p: float = setting(1.0, "Keep the likeliest tokens with this total probability.",
                           Range(0, 1, above=True, cure="1 keeps every token"), scopes=_OPENAI | _MODEL)
    min_p: float = setting(0.0, "Keep tokens with at least this fraction of the highest probability.",
                           Range(0, 1, below=True, cure="0 keeps every token"), scopes=_MODEL_OR_REQUEST)
    eta_cutoff: float = setting(0.0, "Entropy-dependent probability cutoff; 0: off.",  # Hewitt et al. 2022
                                Range(0, 1, below=True, cure=_OFF_AT_0), scopes=_RARE | _MODEL)
    min_tokens_to_keep: int = setting(  # TokenSwift's code: 20
        1, "Smallest number of tokens that --min-p and --eta-cutoff keep.", _ANY_COUNT, scopes=_RARE)
    repetition_penalty: float = setting(1.0, "Penalty on tokens in the penalty window; 1: off.",
                                        Range(1e-3, 1e3, cure="1 turns it off"), scopes=_MODEL_OR_REQUEST)
    penalty_window: int = setting(
        1024, "Number of latest tokens that are penalised.",
        Range(1, cure="to turn the penalty off set repetition_penalty to 1"), scopes=_MODEL_OR_REQUEST,
        aliases=("repeat_last_n", "repetition_context_size", "penalty_length", "penalty_range",
                 "repetition_penalty_range", "rep_pen_range"))
    presence_penalty: float = setting(
        0.0, "Subtracted from the logits of new tokens in the penalty window, -2 to 2.", _OPENAI_PENALTY,
        scopes=_OPENAI)
    frequency_penalty: float = setting(
        0.0, "The same, times the number of their occurrences there, -2 to 2.", _OPENAI_PENALTY, scopes=_OPENAI)
    dry_multiplier: float = setting(
        0.0, "DRY: penalty on tokens that would lengthen a repeated passage; 0: off, usual 0.8.",
        Range(0, 100, cure=_OFF_AT_0))
    dry_base: float = setting(1.75, "DRY: the penalty grows by this factor with each repeated token.",
                              Range(1, 10, cure="to turn DRY off set dry_multiplier to 0"))
    dry_allowed_length: int = setting(
        2, "DRY: repeated tokens from which the penalty begins: 2 for chats, 4 for long prose.",
        Range(1, LONGEST_REPEAT, cure="to turn DRY off set dry_multiplier to 0"))
    dry_penalty_last_n: int = setting(0, "DRY: latest tokens in which repeats are searched; 0: the whole text.",
                                      Range(-1, words="1 or more; 0 or -1 for the whole text"), aliases=("dry_range",))
    dry_sequence_breakers: tuple[str, ...] = setting(
        BREAKERS, "DRY: text that ends a repeated passage. Repeatable.", option="dry-sequence-breaker",
        shown="line break, colon, quote and asterisk", check=_check_texts, convert=_to_texts_or_json,
        has_json_lists=True)
    no_repeat_ngram_size: int = setting(0, "No passage of this many tokens may occur twice; 0: off.",
                                        Range(0, LONGEST_REPEAT + 1, cure=_OFF_AT_0), scopes=_MODEL_OR_REQUEST)
    typical_p: float = setting(
        1.0, "Keep the tokens whose surprise is closest to the entropy, with this total probability; 1: off.",
        Range(0, 1, above=True, cure="1 turns it off"), aliases=("typical", "typ_p"), scopes=_MODEL_OR_REQUEST)
    top_n_sigma: float = setting(0.0, "Keep logits within this many standard deviations of the highest; 0: off.",
                                 Range(0, others=(-1,), cure="0 or -1 turns it off"), aliases=("nsigma", "top_nsigma"))
    xtc_probability: float = setting(0.0, "XTC: how often the top choices are excluded, 0 to 1; 0: off.", _PROBABILITY)
    xtc_threshold: float = setting(0.1, "XTC: probability from which a token is a top choice; above 0.5: off.",
                                   Range(0, 1, cure="above 0.5 turns it off"))
    temperature_last: bool = setting(False, "Apply the temperature after the filters, as llama.cpp does.",
                                     aliases=("temp_last", "samplers"), convert=_to_temperature_last)
    dynatemp_range: float = setting(
        0.0, "Temperature plus or minus this, by the entropy; needs --temperature-last; 0: off.",
        Range(0, 100, cure=_OFF_AT_0))
    dynatemp_exponent: float = setting(1.0, "Exponent of the entropy in dynamic temperature.",
                                       Range(0, 100, above=True))
    banned_strings: tuple[str, ...] = setting(
        (), "Phrase that the text must not contain, in any letter case, or a UTF-8 file with one on each line. "
        "Repeatable.", option="ban", aliases=("banned_phrases",), limits=(MAX_PHRASES, MAX_PHRASE),
        check=_check_phrases, convert=_to_texts_or_json, has_json_lists=True)
    structured_outputs: tuple[str, ...] = setting(
        (), "What the text must match: a JSON schema, a regular expression or a grammar.", aliases=SPELLINGS,
        scopes=SettingScope.BODY | SettingScope.EXTENSION, shown="any text", check=check_structure,
        convert=structured_outputs)
    structured_after: str = setting(
        "", "Text after which --json-schema, --regex or --grammar begins, such as </think>.", check=_check_mark,
        shown="the end of thinking that the prompt opens", limits=(1, MAX_PHRASE))
    stop: tuple[str, ...] = setting((), "Text that ends the generation. Repeatable.", aliases=("stop_strings",),
                                    scopes=_OPENAI | _MODEL, check=_check_texts, convert=_to_texts)
    stop_token_ids: tuple[int, ...] = setting((), "Token id that ends the generation. Repeatable.", check=_check_ids,
                                              option="stop-token-id", convert=lambda name, ids: tuple(ids))
    logit_bias: tuple[tuple[int, float], ...] = setting(
        (), "ID=VALUE: add VALUE, -100 to 100, to a token's logit. Repeatable.", scopes=_OPENAI, check=_check_bias,
        convert=_to_pairs)
    ignore_eos: bool = setting(False, "Continue after the model's end-of-text token.")
    on_loop: str = setting(
        "warn", "If the text repeats itself: warn, stop (finish reason 'loop'), answer (as stop, but a loop in a "
        "thought closes the thought) or off.", ("warn", "stop", "answer", "off"), scopes=_RARE)
    reasoning_effort: str | None = setting(
        None, "How much a model thinks before it answers a chat: none to max. The chat template's own setting where it "
        "has one, else a share of --max-new-tokens as --thinking-budget.", EFFORTS, scopes=_OPENAI,
        shown="the template's")
    thinking_budget: int = setting(
        -1, "Tokens after which a thought is closed, and the answer begins; 0: no thought; -1: off.",
        Range(-1, cure="-1 turns it off"),
        aliases=("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens", "reasoning_budget",
                 "max_thinking_tokens"))
    thinking_reserve: int = setting(
        0, "Tokens of --max-new-tokens that are kept for the answer: a thought is closed in time; 0: off.",
        Range(0, cure=_OFF_AT_0))
    min_thinking_tokens: int = setting(0, "Tokens of a thought before which the model cannot close it.", Range(0))
    thinking_message: str = setting(
        "", "Text that is written before a thought is closed.", aliases=("reasoning_budget_message",),
        limits=(1, MAX_MESSAGE), shown="the family's own, else a line break",
        check=lambda name, text: check(isinstance(text, str) and len(text) <= MAX_MESSAGE, name, text,
                                       f"a text of at most {MAX_MESSAGE:,} characters"))
    thinking_wait: int = setting(
        0, "A thought goes on with 'Wait' where the model would close it, until it has this many.", Range(0, 1000))
    thinking_soft: float = setting(
        0.0, "Share of --thinking-budget from which the end of a thought becomes likelier after each sentence; 0: off, "
        "usual 0.7.", Range(0, 1, below=True, cure=_OFF_AT_0))
    thinking_close_at: int | None = setting(
        None, "Number of new tokens after which a thought is closed, such as the place of an earlier 'answer now'.",
        Range(0), shown="off")
    stop_in_thinking: bool = setting(True, "Stop texts end a text in its thought, too.")
    banned_in_thinking: bool = setting(True, "Banned phrases are banned in a thought, too.")
    thinking: tuple[tuple[str, float], ...] = setting(
        (), "KEY=VALUE: a sampling setting for the thought only, such as temperature=0.6. Repeatable.",
        check=_check_thinking, convert=_to_thinking, shown="as the answer's")
    thinking_close: tuple[int, ...] = ()
    """The tokens that close a thought under these settings, once they are known (longdraft/text/thought_rules.py)."""
    from_model: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Names of the settings above that come from the model's own defaults; informational."""

    def __post_init__(self) -> None:
        for name, each in settings_of(type(self)).items():
            object.__setattr__(self, name, in_python_types(getattr(self, name)))
            each.require(getattr(self, name))
        check(self.min_new_tokens <= self.max_new_tokens, "min_new_tokens", self.min_new_tokens,
              f"at most max_new_tokens ({self.max_new_tokens})")
        check(self.dynatemp_range == 0 or self.temperature_last, "dynatemp_range", self.dynatemp_range,
              "0 without temperature_last", "dynamic temperature depends on what the filters leave")
        check(not 0 <= self.thinking_budget < self.min_thinking_tokens, "min_thinking_tokens", self.min_thinking_tokens,
              f"at most thinking_budget ({self.thinking_budget})")
        check(not self.thinking_soft or self.thinking_budget > 0, "thinking_soft", self.thinking_soft,
              "0 without thinking_budget", "it is a share of the budget")
        if self.thinking:
            _ = self.inside_thought
        _check_mark("structured_after", self.structured_after, has_structure=bool(self.structured_outputs))
        for name, allowed, reason in _OFF_WITH_STRUCTURE if self.structured_outputs else ():
            check(not getattr(self, name), name, getattr(self, name), f"{allowed} with structured_outputs", reason)

    @classmethod
    def from_names(cls, settings: Mapping[str, Any]) -> SamplingParams:
        """From a mapping with the names of longdraft, Hugging Face, OpenAI or llama.cpp. None means not given.

        `do_sample=False` sets temperature 0; `stop` may be one string. `samplers`, llama.cpp's list, sets
        `temperature_last`. UsageError for unknown or contradictory names, and for values of a wrong kind.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        if (samples := given.pop("do_sample", None)) is not None:
            given["temperature"] = given.get("temperature", 1.0) if samples else 0.0
        names = names_of(cls)
        chosen: dict[str, Any] = {}
        for name, value in given.items():
            if name not in names:
                raise UsageError(f"unknown sampling setting {name!r}; known: {', '.join(sorted(settings_of(cls)))}",
                                 name)
            target, convert = names[name].name, names[name].convert
            try:
                value = convert(name, value) if convert else value
            except (TypeError, ValueError) as error:  # such as a number in place of a list
                shown = repr(value)[:80]
                raise UsageError(f"{name} is {shown}, which is of the wrong kind: {error}", target) from error
            if value is None:
                continue
            if target in chosen and chosen[target] != value:
                raise UsageError(f"{name!r} contradicts another spelling of {target!r}; give one of them", name)
            chosen[target] = value
        params = cls(**chosen)
        if "samplers" in given:
            _check_left_out(params, given["samplers"])
        return params

    def with_seed(self, seed: int) -> SamplingParams:
        return replace(self, seed=seed)

    @property
    def inside_thought(self) -> SamplingParams:
        """The settings inside a thought."""
        own: dict[str, Any] = dict(self.thinking)
        return replace(self, thinking=(), **own) if own else self

    @property
    def steers_thoughts(self) -> bool:
        """Whether a rule for thoughts is set, beside the place of a closing on request."""
        return self.on_loop == "answer" or bool(self.thought_rule)

    @property
    def has_thought_rules(self) -> bool:
        """Whether tokens inside a thought may be chosen, or banned, by other rules than elsewhere."""
        frees = bool(self.banned_strings) and not self.banned_in_thinking
        return self.steers_thoughts or self.thinking_close_at is not None or frees

    @property
    def thought_rule(self) -> str:
        """The first setting that only a model with marked thoughts can follow; "": none is set."""
        return next((name for name in _THOUGHT_RULES if getattr(self, name) != getattr(_NO_RULES, name)), "")

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


_NO_RULES = SamplingParams()
_THOUGHT_RULES = ("thinking_budget", "thinking_reserve", "min_thinking_tokens", "thinking_wait", "thinking_soft",
                  "thinking")
_OFF_WITH_STRUCTURE = (
    ("ignore_eos", "false", "the grammar ends the text"), ("min_new_tokens", "0", "the grammar ends the text"),
    ("no_repeat_ngram_size", "off", "it could ban what the grammar demands"),
    ("banned_strings", "off", "it could ban what the grammar demands"))
# Every name of a setting, longdraft's and other tools' -> longdraft's.
ALIASES = {name: each.name for name, each in names_of(SamplingParams).items()}
SamplingParams.__doc__ = "\n".join([SamplingParams.__doc__ or "", *(
    f"    {name:22} {each.help}" for name, each in settings_of(SamplingParams).items())])
