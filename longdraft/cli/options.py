"""The options that commands share, and their conversion."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longdraft.errors import UsageError

if TYPE_CHECKING:
    from longdraft.request.sampling_params import SamplingParams

SAMPLING, RUNNING, FILES = "Sampling and stopping", "Model, drafter and machine", "Input and output"


def option(text: str, panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


def _of_model(text: str, built_in: str, name: str) -> Any:
    """A sampling setting. Its default is that of the model's generation_config.json, else `built_in`."""
    return option(text, SAMPLING, name, show_default=f"the model's, else {built_in}")


ModelName = Annotated[str, option("Bundled name, folder, GGUF file, or hub id (owner/model or owner/model@revision).",
                                  RUNNING, "--model")]
FileName = Annotated[str | None, option("GGUF file to take from the folder or the hub id.", RUNNING, "--file",
                                        show_default="the only one")]
TokenizerName = Annotated[str | None, option("Folder, GGUF file or hub id of another tokenizer and chat template.",
                                             RUNNING, "--tokenizer", show_default="the model's")]
Revision = Annotated[str | None, option("Branch, tag or commit of a hub id.", RUNNING, "--revision",
                                        show_default="main")]
CacheDir = Annotated[Path | None, option("Cache folder for files from the hub.", RUNNING, "--cache-dir",
                                         show_default="that of HF_HOME")]
Offline = Annotated[bool, option("Use files from the hub's cache only.", RUNNING, "--offline")]
DrafterName = Annotated[str, option("auto, plain, ngram, suffix, tokenswift, medusa, magicdec, draft-model, glide, "
                                    "eagle or triforce.", RUNNING, "--drafter")]
DrafterOption = Annotated[list[str] | None, option("KEY=VALUE for the drafter (see docs/drafters.md). Repeatable.",
                                                   RUNNING, "--drafter-option")]
HeadsSource = Annotated[str | None, option("Folder or hub id of trained heads, an EAGLE head or a glide layer.",
                                           RUNNING, "--heads", show_default="the model's")]
Device = Annotated[str, option("auto (a GPU if there is one), cpu or cuda.", RUNNING, "--device")]
Dtype = Annotated[str, option("auto (the checkpoint's; float16 becomes bfloat16 on the CPU), float32, bfloat16, or on "
                              "CUDA float16.", RUNNING, "--dtype")]
Quantize = Annotated[str, option("none, int8 or int4: weights in half or a third of the memory; file: keep the numbers "
                                 "of a quantised file. The text differs from the unquantised model's.",
                                 RUNNING, "--quantize")]
QuantizedCache = Annotated[str | None, option("Folder that keeps quantised weights for the next start, or none.",
                                              RUNNING, "--quantized-cache", envvar="LONGDRAFT_QUANTIZED_CACHE",
                                              show_default="the user's cache folder")]
CacheRam = Annotated[int | None, option("MiB for the prefix tree: keys and values of earlier texts, for texts that "
                                        "begin alike; 0: off.", RUNNING, "--cache-ram",
                                        show_default="a quarter of the free memory, at most 8192; 0 on CUDA")]
Threads = Annotated[int | None, option("CPU threads.", RUNNING, "--threads", show_default="PyTorch's choice")]
TensorParallel = Annotated[int, option("Number of ranks that share the model. Start them with `torchrun "
                                       "--nproc-per-node N -m longdraft ...`.", RUNNING, "--tensor-parallel")]
ChatOption = Annotated[list[str] | None, option("KEY=VALUE for the chat template, such as enable_thinking=false. "
                                                "Repeatable.", FILES, "--chat-option")]
Output = Annotated[Path | None, option("Write the text to this file.", FILES, "--output", show_default="stdout")]
TokensOut = Annotated[Path | None, option("Write the new token ids to this .npy file (int32).", FILES, "--tokens-out")]
Stats = Annotated[Path | None, option("Write statistics to this JSON file.", FILES, "--stats")]
Quiet = Annotated[bool, option("Print no progress, summary or remarks on stderr.", FILES, "--quiet")]
Seed = Annotated[int | None, option("0 to 2**64-1.", SAMPLING, "--seed", show_default="random, see --stats")]
Temperature = Annotated[float | None, _of_model("Sampling temperature; 0 takes the likeliest token.", "1",
                                                "--temperature")]
TopK = Annotated[int | None, _of_model("Keep the K likeliest tokens; 0: all.", "0", "--top-k")]
TopP = Annotated[float | None, _of_model("Keep the likeliest tokens with this total probability.", "1", "--top-p")]
MinP = Annotated[float | None, _of_model("Keep tokens with at least this fraction of the highest probability.", "0",
                                         "--min-p")]
EtaCutoff = Annotated[float | None, _of_model("Entropy-dependent probability cutoff; 0: off.", "0", "--eta-cutoff")]
MinTokensToKeep = Annotated[int | None, option("Smallest number of tokens that --min-p and --eta-cutoff keep.",
                                               SAMPLING, "--min-tokens-to-keep", show_default="1")]
RepetitionPenalty = Annotated[float | None, _of_model("Penalty on tokens in the penalty window; 1: off.", "1",
                                                      "--repetition-penalty")]
PenaltyWindowLength = Annotated[int | None, option("Number of latest tokens that are penalised.", SAMPLING,
                                                   "--penalty-window", show_default="1024")]
OnLoop = Annotated[str, option("If the text repeats itself: warn, stop (finish reason 'loop') or off.", SAMPLING,
                               "--on-loop")]
Fsync = Annotated[str, option("When the journal is synced to the disk, to survive a power cut: always, never, or an "
                              "interval in seconds.", FILES, "--fsync")]
SnapshotMode = Annotated[str, option("Keep keys and values beside the journal, so that resuming reads a file, not the "
                                     "text: auto (on the CPU, after 10 seconds), never or always.", FILES,
                                     "--snapshot")]
SnapshotMax = Annotated[float, option("Largest size of a text's snapshot in GiB.", FILES, "--snapshot-max")]
Stop = Annotated[list[str] | None, option("Text that ends the generation. Repeatable.", SAMPLING, "--stop")]
StopTokenId = Annotated[list[int] | None, option("Token id that ends the generation. Repeatable.", SAMPLING,
                                                 "--stop-token-id")]
IgnoreEos = Annotated[bool, option("Continue after the model's end-of-text token.", SAMPLING, "--ignore-eos")]
LogitBiasPairs = Annotated[list[str] | None, option("ID=VALUE: add VALUE, -100 to 100, to a token's logit. Repeatable.",
                                                    SAMPLING, "--logit-bias")]


def parse_bias(pairs: Iterable[str]) -> dict[int, float] | None:
    """Token id -> bias of its logit; None if there are none."""
    found = {}
    for token, value in parse_pairs("--logit-bias", pairs, "ID=VALUE, such as 42=-5").items():
        try:
            found[int(token)] = float(value)
        except ValueError as error:
            raise UsageError(f"--logit-bias is '{token}={value}'; allowed: a token id and a number, such as 42=-5") \
                from error
    return found or None


def parse_pairs(name: str, pairs: Iterable[str], shape: str = "KEY=VALUE, such as budget=256") -> dict[str, str]:
    """A mapping of the option's KEY=VALUE texts. Raises UsageError for other shapes and repeated keys."""
    parsed: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"{name} is {pair!r}; allowed: {shape}")
        if key in parsed:
            raise UsageError(f"{name} {key} is given twice; give it once")
        parsed[key] = value
    return parsed


def chat_options(pairs: Iterable[str]) -> dict[str, Any]:
    """Variables for the chat template. Values are JSON (`false`, 3) if they can be parsed, else text."""
    from longdraft.text.chat_template import parse_option

    given = parse_pairs("--chat-option", pairs, "KEY=VALUE, such as enable_thinking=false")
    return {key: parse_option(value) for key, value in given.items()}


def require_one_process(tensor_parallel: int = 1) -> None:
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
