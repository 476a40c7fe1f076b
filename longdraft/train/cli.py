"""`longdraft train ...`. Heavy imports are inside the commands, so that --help is fast.

    longdraft train heads --data books.parquet --output my-heads

The options of a command are the fields of its settings (longdraft/train/settings.py).
"""

from __future__ import annotations

import inspect
import json
import shlex
import sys
import typing
from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longdraft.errors import UsageError, check
from longdraft.request.settings import Setting, settings_of
from longdraft.train.presets import PRESETS
from longdraft.train.settings import (
    BlockSettings,
    DraftSettings,
    EagleSettings,
    GlideSettings,
    HeadSettings,
    LmSettings,
    TrainingSettings,
    is_hub_data,
)

if TYPE_CHECKING:
    from longdraft.train.job import Result

app = typer.Typer(no_args_is_help=True, help="Train drafters: heads of several kinds, a glide layer or a small model.")


@app.callback()
def _group() -> None:
    """Train drafters (heads, a glide layer, an EAGLE or block head, a small model) and small language models."""


# Options of the run, which are not settings of the training: annotation and default by name.
_RUN: dict[str, tuple[Any, Any]] = {
    "output": (Annotated[Path, typer.Option(
        help="Output folder, new or empty unless --resume is given. At the end it has the weights, config.json and "
             "metrics.jsonl.")], inspect.Parameter.empty),
    "resume": (Annotated[bool, typer.Option(
        "--resume", help="Continue the unfinished training in --output, with its settings.")], False),
    "quiet": (Annotated[bool, typer.Option("--quiet", help="Print no progress on stderr.")], False),
}


def _command(kind: type[TrainingSettings], text: str) -> None:
    """Add the command for one kind of training."""
    def command(called: typer.Context, **given: Any) -> None:
        _run(kind, called, given)

    options = dict(_RUN)
    if recipes := PRESETS.get(kind.KIND):
        options["preset"] = Annotated[str, typer.Option(
            help="A published recipe, see above; other options override it.")], ""
        text += f" Recipes of --preset: {', '.join(recipes)}."
    for name, each in settings_of(kind).items():
        default = None if each.default in (MISSING, ()) else each.default
        hint = list[str] if typing.get_args(each.type) else each.type
        option = typer.Option(each.flag, help=each.option_help)
        options[name] = Annotated[hint | None if default is None else hint, option], default
    # Typer reads the parameters from these attributes.
    command.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
        inspect.Parameter("called", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
          for name, (annotation, default) in options.items())])
    command.__annotations__ = {"called": typer.Context} | {name: option[0] for name, option in options.items()}
    command.__doc__ = text
    app.command(kind.KIND)(typing.cast(Callable[..., None], command))


def _run(kind: type[TrainingSettings], called: typer.Context, given: dict[str, Any]) -> None:
    from longdraft.train import job
    from longdraft.train.progress import TrainingProgress

    output = given.pop("output")
    is_resumed = given.pop("resume")
    progress = TrainingProgress(sys.stderr, given.pop("quiet"))
    preset = given.pop("preset", "")
    settings = settings_of(kind)
    explicit = {name: _setting(settings[name], value) for name, value in given.items()
                if (source := called.get_parameter_source(name)) and source.name != "DEFAULT"}
    if is_resumed:
        if preset:
            raise UsageError(f"--preset {preset} is given with --resume, which uses the settings of the checkpoint; "
                             "leave it out")
        result = job.resume(kind.KIND, output, explicit, progress)
    else:
        recipes = PRESETS.get(kind.KIND, {})
        check(preset in ("", *recipes), "preset", preset, ", ".join(recipes))
        result = job.train(kind(**({"data": ()} | recipes.get(preset, {}) | explicit)), output, progress)
    _report(result)


def _setting(each: Setting, value: Any) -> Any:
    """The setting that an option's value means, with absolute paths, so that --resume works in any folder."""
    from longdraft.checkpoint.hub import from_anywhere

    if each.is_negated:
        return not value
    if each.name in ("data", "validation"):
        return tuple(item if is_hub_data(item) else str(Path(item).absolute()) for item in value or ())
    return from_anywhere(value) if each.name in ("model", "tokenizer", "start", "distill_from") else value


def _report(result: Result) -> None:
    if not result.is_main:
        raise typer.Exit(128 + result.signal if result.signal is not None else 0)
    if result.signal is not None:
        again = shlex.join(["longdraft", "train", result.kind, "--resume", "--output", str(result.output)])
        typer.echo(f"stopped and saved after step {result.step}; continue with: {again}", err=True)
        raise typer.Exit(128 + result.signal)
    typer.echo("part   loss    top-1   top-3")
    for index, part in enumerate(result.validation, 1):
        scores = f"{part['loss']:<6.3f}  {part['top1']:<6.1%}  {part['top3']:.1%}"
        typer.echo(f"{_part(result.kind, index, part):<5}  {scores}")
    for measured in result.probe:
        typer.echo(f"T = {measured['temperature']:g}, {measured['context']:,.0f} tokens of context: "
                   f"mean accepted length {measured['mean_accepted_length']:.2f}, "
                   f"{measured['to_plain']:.2f}x plain decoding")
    typer.echo(json.dumps({
        "kind": result.kind, "output": str(result.output), "steps": result.step, "tokens": result.tokens,
        "seconds": result.seconds, "validation": result.validation, "probe": result.probe,
    }))


def _part(kind: str, index: int, part: dict[str, float]) -> str:
    """The token that a head predicts, the lag of glide's keys, or the number of the draft of EAGLE or a block."""
    if "draft" in part:
        return f"t+{part['draft']:.0f}"
    return f"t+{1 + index}" if kind == "heads" else f"lag {part['lag']:.0f}" if "lag" in part else "t+1"


_STOPS = "Ctrl-C finishes the step, saves a checkpoint and prints how to resume. The last line on stdout is JSON."

_command(HeadSettings, f"""Train heads on a frozen model, for --drafter tokenswift or medusa.

Head j predicts the token 1 + j positions ahead from a row of the model's last layer. The loss is the sum of
the heads' mean cross-entropies. {_STOPS}""")
_command(GlideSettings, f"""Train a one-layer drafter on a frozen model's cache, for --drafter glide.

It combines self-attention over a short window with cross-attention to the model's last keys and values. {_STOPS}""")
_command(EagleSettings, f"""Train an EAGLE-3 head on a frozen model's states, for --drafter eagle.

It reads three layers of the model and drafts a chain by training-time test. The output has the format of
speculators, which vLLM serves too. {_STOPS}""")
_command(BlockSettings, f"""Train a block head on a frozen model's states, for --drafter block.

One pass of its layers guesses a block of tokens. The output has the format of speculators. {_STOPS}""")
_command(DraftSettings, f"""Train a small model with a model's tokenizer, for --drafter draft-model or triforce.

It learns from the text and from the model's distribution. {_STOPS}""")
_command(LmSettings, f"""Train a small Llama, like the bundled models, or a small hybrid.

The output is a Hugging Face model folder. {_STOPS}""")
