"""`longdraft train ...`. Heavy imports wait inside the commands, so that --help is quick.

    longdraft train heads --data books.parquet --output my-heads

The options of a command are the fields of its settings (longdraft/train/settings.py), with what is said of them there.
"""

from __future__ import annotations

import inspect
import json
import shlex
import sys
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longdraft.errors import UsageError
from longdraft.train.presets import PRESETS
from longdraft.train.settings import DraftSettings, GlideSettings, HeadSettings, LmSettings, Settings

if TYPE_CHECKING:
    from longdraft.train.job import Result

app = typer.Typer(no_args_is_help=True, help="Train what drafts: heads, a glide layer, a small model.")


@app.callback()
def _group() -> None:
    """Train what drafts: heads, a glide layer, a small model; and the models themselves."""


# What says how to run, not what to train.
_RUN: dict[str, Any] = {
    "output": Annotated[Path, typer.Option(
        help="Folder for what is trained; new or empty, unless --resume. Ends with its weights, config.json and "
             "metrics.jsonl.")],
    "resume": Annotated[bool, typer.Option(
        "--resume", help="Go on with the unfinished training in --output; its settings are kept and need "
                         "not be given again.")],
    "quiet": Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")],
}
_PRESET = Annotated[str, typer.Option(
    help=f"The paper's recipe for one of its models, where options do not say otherwise: {', '.join(PRESETS)}.")]


def _command(kind: type[Settings], text: str, presets: bool = False) -> None:
    """Add the command that trains one kind."""
    def command(called: typer.Context, **given: Any) -> None:
        _run(kind, called, given)

    hints = typing.get_type_hints(kind)
    run = [_parameter(name, hint, inspect.Parameter.empty if name == "output" else False)
           for name, hint in _RUN.items()]
    preset = [_parameter("preset", _PRESET, "")] if presets else []
    settings = [_parameter(field.name, _option(field, hints[field.name]), _default(field)) for field in fields(kind)]
    # Typer reads the parameters from here.
    command.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
        inspect.Parameter("called", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *run, *preset, *settings])
    command.__annotations__ = {"called": typer.Context} | {p.name: p.annotation for p in [*run, *preset, *settings]}
    command.__doc__ = text
    app.command(kind.KIND)(typing.cast(Callable[..., None], command))


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(field: Field[Any], hint: Any) -> Any:
    hint = list[str] | None if hint == tuple[str, ...] else hint
    return Annotated[hint, typer.Option(help=field.metadata["help"])]


def _default(field: Field[Any]) -> Any:
    return None if field.default in (MISSING, ()) else field.default


def _run(kind: type[Settings], called: typer.Context, given: dict[str, Any]) -> None:
    from longdraft.train import job
    from longdraft.train.progress import Progress

    output, is_resumed = given.pop("output"), given.pop("resume")
    progress = Progress(sys.stderr, given.pop("quiet"))
    preset = given.pop("preset", "")
    explicit = {name: _setting(name, value) for name, value in given.items()
                if (source := called.get_parameter_source(name)) and source.name != "DEFAULT"}
    if is_resumed:
        if preset:
            raise UsageError(f"--preset {preset} is given with --resume, which goes on with the run's own settings; "
                             "leave it out")
        result = job.resume(kind.KIND, output, explicit, progress)
    else:
        result = job.train(kind(**(_preset(preset) | {"data": ()} | explicit)), output, progress)
    _report(result)


def _preset(name: str) -> dict[str, Any]:
    if name and name not in PRESETS:
        raise UsageError(f"preset is {name!r}; allowed: {', '.join(PRESETS)}")
    return dict(PRESETS[name]) if name else {}


def _setting(name: str, value: Any) -> Any:
    """An option's value as the settings hold it; paths absolute, so that a resume finds them anywhere."""
    from longdraft.model.hub import from_anywhere
    from longdraft.train.data import is_hub_data

    if name in ("data", "validation"):
        return tuple(item if is_hub_data(item) else str(Path(item).absolute()) for item in value or ())
    return from_anywhere(value) if name in ("model", "tokenizer", "start", "distill_from") else value


def _report(result: Result) -> None:
    if not result.leads:
        raise typer.Exit(128 + result.signal if result.signal is not None else 0)
    if result.signal is not None:
        again = shlex.join(["longdraft", "train", result.kind, "--resume", "--output", str(result.output)])
        typer.echo(f"stopped and saved after step {result.step}; go on with: {again}", err=True)
        raise typer.Exit(128 + result.signal)
    typer.echo("part   loss    top-1   top-3")
    for index, part in enumerate(result.validation, 1):
        scores = f"{part['loss']:<6.3f}  {part['top1']:<6.1%}  {part['top3']:.1%}"
        typer.echo(f"{_part(result.kind, index, part):<5}  {scores}")
    for measured in result.probe:
        typer.echo(f"T = {measured['temperature']:g}, {measured['context']:,.0f} tokens of context: "
                   f"{measured['mean_accepted_length']:.2f} tokens for each forward, {measured['to_plain']:.2f} times "
                   "plain decoding")
    typer.echo(json.dumps({
        "kind": result.kind, "output": str(result.output), "steps": result.step, "tokens": result.tokens,
        "seconds": result.seconds, "validation": result.validation, "probe": result.probe,
    }))


def _part(kind: str, index: int, part: dict[str, float]) -> str:
    """Which token a head speaks of; how far behind glide's keys are."""
    return f"t+{1 + index}" if kind == "heads" else f"lag {part['lag']:.0f}" if "lag" in part else "t+1"


_STOPS = "Ctrl-C finishes the step, saves, and says how to go on. The last line on stdout is JSON."

_command(HeadSettings, f"""Train heads on a frozen model, for --drafter tokenswift or medusa.

Head j learns the token 1 + j places on from a row of the model's last layer; the loss is the sum of
the heads' mean cross-entropies. {_STOPS}""", presets=True)
_command(GlideSettings, f"""Train a one-layer drafter on a frozen model's cache, for --drafter glide.

Its own attention sees a short window; beside it, it reads the model's last keys and values. {_STOPS}""")
_command(DraftSettings, f"""Train a small model with a model's tokenizer, for --drafter draft-model or triforce.

It learns from the text and from what the model says of it. {_STOPS}""")
_command(LmSettings, f"""Train a small Llama, as the bundled models were; ends with a Hugging Face model folder.

{_STOPS}""")
