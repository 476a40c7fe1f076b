"""The options for penalties, DRY, XTC and further filters, which several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from longdraft.cli.options import SAMPLING, option
from longdraft.core import SamplingParams
from longdraft.errors import UsageError
from longdraft.files import read_text

_MAX_NAME = 200  # characters of a file's name; a phrase may have as many

# Name of the setting -> type, help. The option's name follows from it, its default is the dataclass's.
_OPTIONS: dict[str, tuple[Any, str]] = {
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
    "temperature_last": (bool, "Apply the temperature behind the filters, as llama.cpp does."),
    "dynatemp_range": (float, "Temperature plus or minus this, by the entropy; needs --temperature-last; 0: off."),
    "dynatemp_exponent": (float, "Exponent of the entropy in dynamic temperature."),
    "ban": (list[str], "Phrase that the text must not contain, in any letter case, or a UTF-8 file with one on each "
                       "line. Repeatable."),
    "json_schema": (Path, "The text is JSON that matches this JSON schema, a file (extra: structured)."),
    "regex": (str, "The text matches this regular expression as a whole (extra: structured)."),
    "grammar": (Path, "The text matches this grammar, a file in Lark's or llama.cpp's notation (extra: structured)."),
}
_SHOWN = {"dry_sequence_breaker": "line break, colon, quote and asterisk", "typical_p": "the model's, else 1",
          "no_repeat_ngram_size": "the model's, else 0", "ban": "none", "json_schema": "any text",
          "regex": "any text", "grammar": "any text"}


def with_sampler_options(command: Callable[..., int]) -> Callable[..., int]:
    """The command with these options. It is passed those that were given in `samplers`, by setting."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> int:
        chosen = {name: value for name in _OPTIONS if (value := given.pop(name)) is not None}
        if breakers := chosen.pop("dry_sequence_breaker", None):
            chosen["dry_sequence_breakers"] = tuple(breakers)
        if bans := chosen.pop("ban", None):
            chosen["banned_strings"] = tuple(phrase for text in bans for phrase in _phrases(text))
        structures = [name for name in ("json_schema", "regex", "grammar") if name in chosen]
        if len(structures) > 1:
            raise UsageError(f"--{' and --'.join(structures)} are given; give one of them".replace("_", "-"))
        for name in structures:
            text = chosen.pop(name)
            chosen["structured_outputs"] = name.removesuffix("_schema"), text if name == "regex" else read_text(
                str(text), f"--{name.replace('_', '-')}")
        return command(**given, samplers=chosen)

    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "samplers"]
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name))
            for name in _OPTIONS]
    signature = signature.replace(parameters=[*own, *more])
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
    return wrapped


def _phrases(text: str) -> list[str]:
    """The phrases of one `--ban`: the lines of the file of that name, if there is one, else the text."""
    is_name = len(text) <= _MAX_NAME and "\0" not in text
    if not is_name or not Path(text).is_file():
        return [text]
    return [line for line in read_text(text, "--ban").splitlines() if line.strip()]


def _annotation(name: str) -> Any:
    kind, text = _OPTIONS[name]
    shown = _SHOWN.get(name) or f"{getattr(SamplingParams, name):g}"
    flag = f"--{name.replace('_', '-')}"
    return Annotated[kind | None, option(text, SAMPLING, flag, show_default=shown if kind is not bool else False)]
