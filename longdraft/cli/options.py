"""The options that commands share. Those of settings are made from the tables where the settings are declared.

A command takes a whole group of settings as one dictionary:

    @with_option_groups
    def write(prompt: str, *, loading: Annotated[OptionValues, engine_options()],
              sampling: Annotated[OptionValues, sampling_options()]) -> int: ...
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from longdraft.engine.settings import LOADING
from longdraft.errors import UsageError
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.settings import Setting, SettingScope, parse_pairs, settings_of
from longdraft.system.console import leave_remarks_out
from longdraft.system.files import named_folder, read_text

SAMPLING, RUNNING, FILES = "Sampling and stopping", "Model, drafter and machine", "Input and output"
_MAX_NAME = 200  # characters of a file's name; a phrase may have as many

OptionValues = dict[str, Any]


def option(text: str, panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


def folder_option(text: str, panel: str, **settings: Any) -> Any:
    return option(text, panel, parser=named_folder, metavar="PATH", **settings)


def _quieten(is_quiet: bool) -> bool:
    if is_quiet:
        leave_remarks_out()
    return is_quiet


ChatOption = Annotated[list[str] | None, option("KEY=VALUE for the chat template, such as enable_thinking=false. "
                                                "Repeatable.", FILES, "--chat-option")]
Output = Annotated[Path | None, option("Write the text to this file; '-' is stdout.", FILES, "--output",
                                       show_default="stdout",
                                       callback=lambda path: None if path == Path("-") else path)]
TokensOut = Annotated[Path | None, option("Write the new token ids to this .npy file (int32).", FILES, "--tokens-out")]
Stats = Annotated[Path | None, option("Write statistics to this JSON file.", FILES, "--stats")]
Quiet = Annotated[bool, option("Print no progress, summary or remarks on stderr.", FILES, "--quiet",
                               callback=_quieten)]

# The three ways to give `structured_outputs`.
_STRUCTURES = (
    Setting("json_schema", str, None, shown="any text",
            help="The text is JSON that matches this JSON schema: a file, or the schema itself, an object (extra: "
                 "structured)."),
    Setting("regex", str, None, shown="any text",
            help="The text matches this regular expression as a whole (extra: structured)."),
    Setting("grammar", Path, None, shown="any text",
            help="The text matches this grammar, a file in Lark's or llama.cpp's notation (extra: structured)."),
)


@dataclass(frozen=True)
class OptionGroup:
    """The options of several settings.

    parameters  of the command, one for each option
    convert     from the options that were given, by parameter, to the command's dictionary
    """

    parameters: tuple[inspect.Parameter, ...]
    convert: Callable[[OptionValues], OptionValues]


def _parameter_name(each: Setting) -> str:
    return each.flag.removeprefix("--").replace("-", "_")


def _parameter(each: Setting, panel: str, default: Any) -> inspect.Parameter:
    """The parameter of an option. default: None where the setting's own applies later, and is only shown."""
    name = _parameter_name(each)
    shown: Any = True
    if default is None:
        shown = False if each.type is bool else each.shown or (True if each.default is None else each.shown_default)
    declared = option(each.option_help, each.panel or panel, each.flag, show_default=shown,
                      envvar=f"LONGDRAFT_{name.upper()}" if each.has_env else None)
    # Lists and mappings are options that may be repeated; token ids are whole numbers, all other items are texts.
    items = get_args(each.type)
    kind = list[int] if items[:1] == (int,) else list[str] if items else each.type if each.unit == 1 else float
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default,
                             annotation=Annotated[kind if default is not None else kind | None, declared])


def _changed(table: Iterable[Setting], changes: Mapping[str, Mapping[str, Any]]) -> list[Setting]:
    settings = [replace(each, **changes.get(each.name, {})) for each in table]
    assert changes.keys() <= {each.name for each in settings}, f"unknown settings in {list(changes)}"
    return settings


def engine_options(table: Iterable[Setting] = LOADING, panel: str = RUNNING, **changes: Mapping[str, Any]
                   ) -> OptionGroup:
    """The options of settings of longdraft/engine/settings.py, by their names in Python.

    changes  name -> fields of `Setting` that are others for this command
    """
    settings = _changed(table, changes)

    def convert(given: OptionValues) -> OptionValues:
        return {each.name: parse_pairs(each.flag, given[_parameter_name(each)] or ()) if get_origin(each.type) is dict
                else given[_parameter_name(each)] for each in settings}

    return OptionGroup(tuple(_parameter(each, panel, each.option_default) for each in settings), convert)


def sampling_options(owner: type = SamplingParams, *, without: Iterable[str] = (), **changes: Mapping[str, Any]
                     ) -> OptionGroup:
    """The options of sampling settings; the command gets those that were given, as `SamplingParams.from_names` takes
    them.

    owner    the dataclass of the settings
    without  names of settings that the command sets itself
    changes  name -> fields of `Setting` that are others for this command; it gets a changed default if none is given
    """
    table = [each for each in settings_of(owner).values()
             if SettingScope.OPTION in each.scopes and each.name not in without]
    settings = _changed(table, changes)
    defaults = {each.name: each.default for each in settings if "default" in changes.get(each.name, ())}

    def convert(given: OptionValues) -> OptionValues:
        chosen = dict(defaults)
        for each in settings:
            if (value := given[_parameter_name(each)]) in (None, []):
                continue
            if each.name == "banned_strings":
                value = [phrase for text in value for phrase in _phrases(text)]
            parse = {"logit_bias": _parse_bias, "thinking": _parse_thinking}.get(each.name)
            chosen[each.name] = not value if each.is_negated else parse(value) if parse else value
        structures = {each.name: given[each.name] for each in _STRUCTURES if given[each.name] is not None}
        return chosen | _structure(structures)

    parameters = [_parameter(_of_model(each), SAMPLING, None) for each in (*settings, *_STRUCTURES)]
    return OptionGroup(tuple(parameters), convert)


def _of_model(each: Setting) -> Setting:
    """The default of some settings is that of the model's generation_config.json."""
    return replace(each, shown=f"the model's, else {each.shown_default}") if SettingScope.MODEL in each.scopes else each


def _structure(given: OptionValues) -> OptionValues:
    """The setting `structured_outputs` from the options --json-schema, --regex and --grammar."""
    if len(given) > 1:
        raise UsageError(f"--{' and --'.join(given)} are given; give one of them".replace("_", "-"))
    for name, value in given.items():
        text = str(value)
        is_file = name == "grammar" or (name == "json_schema" and not text.lstrip().startswith("{"))
        content = read_text(text, f"--{name.replace('_', '-')}") if is_file else text
        return {"structured_outputs": (name.removesuffix("_schema"), content)}
    return {}


def _phrases(text: str) -> list[str]:
    """The phrases of one `--ban`: the lines of the file of that name, if there is one, else the text."""
    is_name = len(text) <= _MAX_NAME and "\0" not in text
    if not is_name or not Path(text).is_file():
        return [text]
    return [line for line in read_text(text, "--ban").splitlines() if line.strip()]


def _parse_bias(pairs: Iterable[str]) -> dict[int, float]:
    """Token id -> bias of its logit."""
    bias = {}
    for token, value in parse_pairs("--logit-bias", pairs, "ID=VALUE, such as 42=-5").items():
        try:
            bias[int(token)] = float(value)
        except ValueError as error:
            raise UsageError(f"--logit-bias is '{token}={value}'; allowed: a token id and a number, such as 42=-5") \
                from error
    return bias


def _parse_thinking(pairs: Iterable[str]) -> dict[str, float]:
    """Setting of the thought -> value."""
    settings = settings_of(SamplingParams)
    values: dict[str, float] = {}
    for name, value in parse_pairs("--thinking", pairs, "KEY=VALUE, such as temperature=0.6").items():
        try:
            values[name] = int(value) if name in settings and settings[name].type is int else float(value)
        except ValueError as error:
            raise UsageError(f"--thinking is '{name}={value}'; allowed: a setting and a number, such as "
                             "temperature=0.6") from error
    return values


def with_option_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the options of its groups in their places."""
    signature = inspect.signature(command, eval_str=True)
    groups = {name: group for name, each in signature.parameters.items() if (group := _group_of(each))}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += groups[name].parameters if name in groups else [parameter]

    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        grouped = {name: group.convert({each.name: given.pop(each.name) for each in group.parameters})
                   for name, group in groups.items()}
        return command(**given, **grouped)

    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


def _group_of(parameter: inspect.Parameter) -> OptionGroup | None:
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return next((each for each in metadata if isinstance(each, OptionGroup)), None)


def chat_options(pairs: Iterable[str]) -> dict[str, Any]:
    """Variables for the chat template. OptionValues are JSON (`false`, 3) if they can be parsed, else text."""
    from longdraft.text.chat_template import parse_option

    given = parse_pairs("--chat-option", pairs, "KEY=VALUE, such as enable_thinking=false")
    return {key: parse_option(value) for key, value in given.items()}


def require_one_process(tensor_parallel: int) -> None:
    """Raise UsageError if torchrun started several processes without --tensor-parallel."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and tensor_parallel == 1:
        raise UsageError(f"torchrun started {ranks} processes; with --tensor-parallel {ranks} they share one model")


def is_follower() -> bool:
    """Whether this process is a rank other than the first, which alone reads prompts and writes files."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get("RANK", "0") != "0"


def print_model_defaults(params: SamplingParams, *, quiet: bool) -> None:
    """Print one line on stderr if sampling settings come from the model's own file."""
    from longdraft.checkpoint.defaults import describe_defaults

    if params.from_model and not quiet:
        print(f"longdraft: sampling defaults of the model: {describe_defaults(params)}", file=sys.stderr)
