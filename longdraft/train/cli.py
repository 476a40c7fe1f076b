"""`longdraft train ...`. Heavy imports wait inside the commands, so that --help is quick.

    longdraft train heads --data books.parquet --output my-heads
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from longdraft.train.job import Result

app = typer.Typer(no_args_is_help=True, help="Train what drafts: heads on a frozen model.")

# Options that say how to run, not what to train.
_RUN = ("output", "resume", "quiet")


@app.callback()
def _group() -> None:
    """Train what drafts: heads on a frozen model."""


@app.command("heads")
def heads_command(
    context: typer.Context,
    output: Annotated[Path, typer.Option(
        help="Folder for the heads; new or empty, unless --resume. Ends with config.json, model.safetensors, "
             "metrics.jsonl.")],
    data: Annotated[list[str] | None, typer.Option(
        help="Text to train on; repeatable. .parquet, .jsonl (one object a line) or .txt.")] = None,
    validation: Annotated[list[str] | None, typer.Option(
        help="Text to validate on; repeatable. Default: a part of the data, see --holdout.")] = None,
    model: Annotated[str, typer.Option(
        help="Frozen base model: a bundled name, a folder or a hub id.")] = "novelist",
    text_column: Annotated[str, typer.Option(help="Column (parquet) or key (jsonl) of the text.")] = "text",
    holdout: Annotated[float, typer.Option(
        help="Part of the documents held out where no --validation is given, above 0, at most 0.5.")] = 0.05,
    heads: Annotated[int, typer.Option(help="Number of chained heads, 1 to 16.")] = 3,
    init: Annotated[str, typer.Option(
        help="identity: heads begin as the model's own next-token guess; paper: norms 1, random "
             "maps.")] = "identity",
    sequence_length: Annotated[int, typer.Option(help="Length of a training sequence, tokens.")] = 2048,
    steps: Annotated[int, typer.Option(help="Optimizer steps at most.")] = 200,
    max_seconds: Annotated[float | None, typer.Option(
        help="Wall clock budget, seconds; the schedule follows whichever of this and --steps ends first. "
             "Default: none.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in one forward.")] = 4,
    gradient_accumulation: Annotated[int, typer.Option(help="Forwards in one step.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Peak of AdamW's learning rate, at most 1.")] = 1e-2,
    warmup_steps: Annotated[int, typer.Option(
        help="Steps of linear warm-up; a cosine falls to zero at the end.")] = 50,
    weight_decay: Annotated[float, typer.Option(help="AdamW's weight decay, of the linear maps only.")] = 0.1,
    max_grad_norm: Annotated[float, typer.Option(help="Longer gradients are cut to this; 0: never.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Orders the data (and draws the paper's random maps).")] = 42,
    dtype: Annotated[str, typer.Option(
        help="Arithmetic of the frozen model: auto (the checkpoint's), float32, bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: all.")] = 0,
    eval_every: Annotated[int, typer.Option(help="Steps between validations; 0: only at the end.")] = 100,
    eval_tokens: Annotated[int, typer.Option(
        help="Validation tokens at most, spread evenly over the validation text; 0: all.")] = 262144,
    checkpoint_every: Annotated[int, typer.Option(
        help="Steps between checkpoints; 0: only when interrupted, and at the end.")] = 100,
    resume: Annotated[bool, typer.Option(
        "--resume", help="Go on with the unfinished training in --output; its settings are kept and need "
                         "not be given again.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Train TokenSwift's chained heads on a frozen model, for `generate --drafter tokenswift --heads OUTPUT`.

    Head j learns the token 1 + j places on from a row of the model's last layer; the loss is the sum of
    the heads' mean cross-entropies. Ctrl-C finishes the step, saves, and says how to go on. The last line
    on stdout is JSON.
    """
    from longdraft.train.job import resume_heads, train_heads
    from longdraft.train.progress import Progress
    from longdraft.train.settings import HeadSettings

    asked = {name: _setting(name, value) for name, value in context.params.items() if name not in _RUN}
    progress = Progress(sys.stderr, quiet)
    if resume:
        given = {name: value for name, value in asked.items()
                 if (source := context.get_parameter_source(name)) and source.name != "DEFAULT"}
        result = resume_heads(output, given, progress)
    else:
        result = train_heads(HeadSettings(**asked), output, progress)
    _report(result)


def _setting(name: str, value: Any) -> Any:
    """An option's value as the settings hold it; paths absolute, so that a resume finds them anywhere."""
    from longdraft.model.library import bundled

    if name in ("data", "validation"):
        return tuple(str(Path(item).absolute()) for item in value or ())
    if name == "model" and value not in bundled() and Path(value).is_dir():
        return str(Path(value).absolute())
    return value


def _report(result: Result) -> None:
    if result.signal is not None:
        again = shlex.join(["longdraft", "train", "heads", "--resume", "--output", str(result.output)])
        typer.echo(f"stopped and saved after step {result.step}; go on with: {again}", err=True)
        raise typer.Exit(128 + result.signal)
    typer.echo("head  predicts  loss    top-1   top-3")
    for index, part in enumerate(result.validation, 1):
        scores = f"{part['loss']:<6.3f}  {part['top1']:<6.1%}  {part['top3']:.1%}"
        typer.echo(f"{index:<4}  t+{1 + index:<6}  {scores}")
    typer.echo(json.dumps({
        "kind": "tokenswift-heads", "output": str(result.output), "steps": result.step,
        "tokens": result.tokens, "seconds": result.seconds, "validation": result.validation,
    }))
