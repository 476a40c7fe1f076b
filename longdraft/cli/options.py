"""The options that commands share, and what they turn into."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longdraft.errors import UsageError

if TYPE_CHECKING:
    from longdraft.core import SamplingParams

SAMPLING, RUNNING, FILES = "Sampling and stopping", "Model, drafter and machine", "Input and output"


def option(text: str, panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


def _of_model(text: str, built_in: str, name: str) -> Any:
    """A sampling setting: left out, the model's generation_config.json says it, else the built-in value holds."""
    return option(text, SAMPLING, name, show_default=f"the model's, else {built_in}")


Model = Annotated[str, option("Bundled name, folder, owner/model or owner/model@revision.", RUNNING, "--model")]
Revision = Annotated[str | None, option("Branch, tag or commit of a hub id; default: main.", RUNNING, "--revision")]
CacheDir = Annotated[Path | None, option("Where files from the hub are kept; default: HF_HOME's.", RUNNING,
                                         "--cache-dir")]
Offline = Annotated[bool, option("Use what was fetched from the hub before.", RUNNING, "--offline")]
Drafter = Annotated[str, option("auto, plain, ngram, suffix, tokenswift, medusa, magicdec, draft-model, glide, "
                                "triforce.", RUNNING, "--drafter")]
DrafterOption = Annotated[list[str] | None, option("KEY=VALUE for the drafter (docs/drafters.md); repeatable.", RUNNING,
                                                   "--drafter-option")]
Heads = Annotated[str | None, option("Folder or hub id of heads or a glide layer; default: the model's.", RUNNING,
                                     "--heads")]
Device = Annotated[str, option("auto, cpu or cuda.", RUNNING, "--device")]
Dtype = Annotated[str, option("auto (the file's; float16: bfloat16), float32, bfloat16; on CUDA float16.", RUNNING,
                              "--dtype")]
Quantize = Annotated[str, option("none, or int8: weights in half the memory; another model, other texts.", RUNNING,
                                 "--quantize")]
Threads = Annotated[int | None, option("CPU threads; default: PyTorch's choice.", RUNNING, "--threads")]
TensorParallel = Annotated[int, option("Ranks that share the model: torchrun --nproc-per-node N -m longdraft.",
                                       RUNNING, "--tensor-parallel")]
ChatOption = Annotated[list[str] | None, option("KEY=VALUE for the chat template, such as enable_thinking=false; "
                                                "repeatable.", FILES, "--chat-option")]
Seed = Annotated[int | None, option("0 to 2**64-1; default: drawn, and reported in --stats.", SAMPLING, "--seed")]
Temperature = Annotated[float | None, _of_model("0 takes the likeliest token.", "1", "--temperature")]
TopK = Annotated[int | None, _of_model("Keep the K likeliest tokens; 0: all.", "0", "--top-k")]
TopP = Annotated[float | None, _of_model("Keep the likeliest tokens up to this probability.", "1", "--top-p")]
MinP = Annotated[float | None, _of_model("Keep tokens at least this fraction as likely as the likeliest.", "0",
                                         "--min-p")]
EtaCutoff = Annotated[float | None, _of_model("Entropy-dependent cutoff; 0: off.", "0", "--eta-cutoff")]
MinTokensToKeep = Annotated[int, option("min-p and eta keep at least this many.", SAMPLING, "--min-tokens-to-keep")]
RepetitionPenalty = Annotated[float | None, _of_model("Penalty on tokens of the window; 1: off.", "1",
                                                      "--repetition-penalty")]
PenaltyWindow = Annotated[int, option("Last tokens penalised.", SAMPLING, "--penalty-window")]
OnLoop = Annotated[str, option("A text that repeats itself: warn, stop (finish reason 'loop') or off.", SAMPLING,
                               "--on-loop")]
Fsync = Annotated[str, option("How soon the journal survives a power cut too: always, never, or seconds.", FILES,
                              "--fsync")]
Stop = Annotated[list[str] | None, option("Text that ends the generation; repeatable.", SAMPLING, "--stop")]
StopTokenId = Annotated[list[int] | None, option("Token id that ends it; repeatable.", SAMPLING, "--stop-token-id")]


LogitBias = Annotated[list[str] | None, option("ID=VALUE added to a token's logit, -100 to 100; repeatable.", SAMPLING,
                                               "--logit-bias")]


def parse_bias(pairs: Iterable[str]) -> dict[int, float] | None:
    """Token id -> what is added to its logit; None where nothing is asked for."""
    found = {}
    for token, value in parse_pairs("--logit-bias", pairs).items():
        try:
            found[int(token)] = float(value)
        except ValueError as error:
            raise UsageError(f"--logit-bias is '{token}={value}'; allowed: a token id and a number, such as 42=-5") \
                from error
    return found or None


def parse_pairs(name: str, pairs: Iterable[str]) -> dict[str, str]:
    """KEY=VALUE texts of the option `name` to a mapping; UsageError for other shapes and for a key given twice."""
    parsed: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"{name} is {pair!r}; allowed: KEY=VALUE, such as budget=256")
        if key in parsed:
            raise UsageError(f"{name} {key} is given twice; give it once")
        parsed[key] = value
    return parsed


def chat_options(pairs: Iterable[str]) -> dict[str, Any]:
    """Variables for the chat template; a value that reads as JSON is what it says (`false`, 3), another a text."""
    from longdraft.model.chat_template import parse_option

    return {key: parse_option(value) for key, value in parse_pairs("--chat-option", pairs).items()}


def require_one_process(tensor_parallel: int = 1) -> None:
    """UsageError where torchrun started several that would all do the same work."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and tensor_parallel == 1:
        raise UsageError(f"torchrun started {ranks} processes; with --tensor-parallel {ranks} they share one model")


def is_follower() -> bool:
    """Whether this process only works along with the first of several ranks: it reads and writes no files of texts."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get("RANK", "0") != "0"


def tell_defaults(params: SamplingParams, *, quiet: bool) -> None:
    """One line on stderr where settings came from the model's own file."""
    from longdraft.model.defaults import describe_defaults

    if params.from_model and not quiet:
        print(f"longdraft: sampling defaults of the model: {describe_defaults(params)}", file=sys.stderr)
