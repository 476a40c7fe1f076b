"""Groups of options that several commands share: how the model is loaded, and how tokens are chosen.

A command takes a whole group as one dictionary:

    @with_option_groups
    def write(prompt: str, *, loading: Loading, sampling: Sampling) -> int: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from longdraft.cli import options
from longdraft.cli.options import SAMPLING, option, parse_pairs
from longdraft.errors import UsageError
from longdraft.request.sampling_params import SamplingParams
from longdraft.system.files import read_text

_MAX_NAME = 200  # characters of a file's name; a phrase may have as many

# Name of the setting -> type, help. The option's name follows from it, its default is the dataclass's.
_SAMPLERS: dict[str, tuple[Any, str]] = {
    "presence_penalty": (float, "Subtracted from the logits of new tokens in the penalty window, -2 to 2."),
    "frequency_penalty": (float, "The same, times the number of their occurrences there, -2 to 2."),
    "dry_multiplier": (float, "DRY: penalty on tokens that would lengthen a repeated passage; 0: off, usual 0.8."),
    "dry_base": (float, "DRY: the penalty grows by this factor with each repeated token."),
    "dry_allowed_length": (int, "DRY: repeated tokens from which the penalty begins: 2 for chats, 4 for long prose."),
    "dry_penalty_last_n": (int, "DRY: latest tokens in which repeats are searched; 0: the whole text."),
    "dry_sequence_breaker": (list[str], "DRY: text that ends a repeated passage. Repeatable."),
    "no_repeat_ngram_size": (int, "No passage of this many tokens may occur twice; 0: off."),
    "typical_p": (float, "Keep the tokens whose surprise is closest to the entropy, with this total probability; "
                         "1: off."),
    "top_n_sigma": (float, "Keep logits within this many standard deviations of the highest; 0: off."),
    "xtc_probability": (float, "XTC: how often the top choices are excluded, 0 to 1; 0: off."),
    "xtc_threshold": (float, "XTC: probability from which a token is a top choice; above 0.5: off."),
    "temperature_last": (bool, "Apply the temperature after the filters, as llama.cpp does."),
    "dynatemp_range": (float, "Temperature plus or minus this, by the entropy; needs --temperature-last; 0: off."),
    "dynatemp_exponent": (float, "Exponent of the entropy in dynamic temperature."),
    "ban": (list[str], "Phrase that the text must not contain, in any letter case, or a UTF-8 file with one on each "
                       "line. Repeatable."),
    "json_schema": (str, "The text is JSON that matches this JSON schema: a file, or the schema itself, an object "
                         "(extra: structured)."),
    "regex": (str, "The text matches this regular expression as a whole (extra: structured)."),
    "grammar": (Path, "The text matches this grammar, a file in Lark's or llama.cpp's notation (extra: structured)."),
    "structured_after": (str, "Text after which --json-schema, --regex or --grammar begins, such as </think>."),
}
_SHOWN = {"dry_sequence_breaker": "line break, colon, quote and asterisk", "typical_p": "the model's, else 1",
          "no_repeat_ngram_size": "the model's, else 0", "ban": "none", "json_schema": "any text",
          "regex": "any text", "grammar": "any text", "structured_after": "the end of thinking that the prompt opens"}


def _annotation(name: str) -> Any:
    kind, text = _SAMPLERS[name]
    shown = _SHOWN.get(name) or f"{getattr(SamplingParams, name):g}"
    flag = f"--{name.replace('_', '-')}"
    return Annotated[kind | None, option(text, SAMPLING, flag, show_default=shown if kind is not bool else False)]


@dataclass(frozen=True)
class _Group:
    """options: name -> annotation, default. convert: from the options' values by name to the command's dictionary."""

    options: dict[str, tuple[Any, Any]]
    convert: Callable[[dict[str, Any]], dict[str, Any]]


def _loading(given: dict[str, Any]) -> dict[str, Any]:
    pairs = given.pop("drafter_option")
    return {**given, "drafter_options": parse_pairs("--drafter-option", pairs or ())}


def _sampling(given: dict[str, Any]) -> dict[str, Any]:
    chosen = {name: value for name, value in given.items() if value is not None}
    if breakers := chosen.pop("dry_sequence_breaker", None):
        chosen["dry_sequence_breakers"] = tuple(breakers)
    if bans := chosen.pop("ban", None):
        chosen["banned_strings"] = tuple(phrase for text in bans for phrase in _phrases(text))
    structures = [name for name in ("json_schema", "regex", "grammar") if name in chosen]
    if len(structures) > 1:
        raise UsageError(f"--{' and --'.join(structures)} are given; give one of them".replace("_", "-"))
    for name in structures:
        text = str(chosen.pop(name))
        is_file = name == "grammar" or (name == "json_schema" and not text.lstrip().startswith("{"))
        chosen["structured_outputs"] = name.removesuffix("_schema"), read_text(
            text, f"--{name.replace('_', '-')}") if is_file else text
    return chosen


def _phrases(text: str) -> list[str]:
    """The phrases of one `--ban`: the lines of the file of that name, if there is one, else the text."""
    is_name = len(text) <= _MAX_NAME and "\0" not in text
    if not is_name or not Path(text).is_file():
        return [text]
    return [line for line in read_text(text, "--ban").splitlines() if line.strip()]


Loading = Annotated[dict[str, Any], _Group({
    "model": (options.ModelName, "novelist"),
    "file": (options.FileName, None),
    "tokenizer": (options.TokenizerName, None),
    "revision": (options.Revision, None),
    "cache_dir": (options.CacheDir, None),
    "offline": (options.Offline, False),
    "drafter": (options.DrafterName, "auto"),
    "drafter_option": (options.DrafterOption, None),
    "heads": (options.HeadsSource, None),
    "device": (options.Device, "auto"),
    "dtype": (options.Dtype, "auto"),
    "quantize": (options.Quantize, "none"),
    "quantized_cache": (options.QuantizedCache, None),
    "threads": (options.Threads, None),
}, _loading)]
"""Arguments of `longdraft.load`."""

Sampling = Annotated[dict[str, Any], _Group({
    "temperature": (options.Temperature, None),
    "top_k": (options.TopK, None),
    "top_p": (options.TopP, None),
    "min_p": (options.MinP, None),
    "eta_cutoff": (options.EtaCutoff, None),
    "min_tokens_to_keep": (options.MinTokensToKeep, None),
    "repetition_penalty": (options.RepetitionPenalty, None),
    "penalty_window": (options.PenaltyWindowLength, None),
    **{name: (_annotation(name), None) for name in _SAMPLERS},
}, _sampling)]
"""The settings of `SamplingParams` that were given. Raises UsageError for options that exclude one another."""


def with_option_groups(command: Callable[..., int]) -> Callable[..., int]:
    """The command with the options of its groups in their places. An option of its own replaces the group's."""
    signature = inspect.signature(command, eval_str=True)
    own = {name for name, each in signature.parameters.items() if _group_of(each) is None}
    groups = {name: group for name, each in signature.parameters.items() if (group := _group_of(each))}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += [parameter] if name in own else [
            inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for each, (annotation, default) in groups[name].options.items() if each not in own]

    @functools.wraps(command)
    def wrapped(**given: Any) -> int:
        taken = {name: group.convert({each: given[each] for each in group.options if each not in own})
                 for name, group in groups.items()}
        return command(**{name: given[name] for name in own}, **taken)

    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


def _group_of(parameter: inspect.Parameter) -> _Group | None:
    return next((each for each in getattr(parameter.annotation, "__metadata__", ()) if isinstance(each, _Group)), None)
