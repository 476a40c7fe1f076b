"""One training from files to files: check, load, train, validate, export, measure.

    result = train(HeadSettings(model="novelist", data=("books.parquet",)), Path("heads"))

During the training, the output folder has metrics.jsonl and longdraft-training.json, which the first checkpoint
(checkpoint.safetensors) replaces. At the end it has metrics.jsonl and the trained weights.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from longdraft.checkpoint.tensor_files import dump_json
from longdraft.engine.engine import Engine
from longdraft.engine.loading import load
from longdraft.errors import LongdraftError, OutputError, UsageError
from longdraft.request.sampling_params import SamplingParams
from longdraft.train import checkpoint as checkpoints
from longdraft.train import data, data_files, lm, self_generated
from longdraft.train.data import Sequences
from longdraft.train.data_files import Tokens
from longdraft.train.loop import Outcome, Position, TrainingLoop, make_optimizers
from longdraft.train.processes import DistributedProcesses
from longdraft.train.progress import MetricsLog, TrainingProgress
from longdraft.train.registry import MODELS, TRAININGS, Drafting, TrainingContext, settle
from longdraft.train.settings import FrozenTargetSettings, TrainingSettings, from_dict, resumed

METRICS = "metrics.jsonl"
PACKED = ("packed-training.npy", "packed-validation.npy")  # while the processes open them
SETTINGS = "longdraft-training.json"  # of a training that has no checkpoint yet
_PROBE_PROMPTS = 3
_LONGEST_PROMPT = 4096  # tokens
_PROBE_SAMPLING: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "min_p": 0.1})


class Result(NamedTuple):
    """The result of a training. `validation` and `probe` are empty if a signal stopped it.

    is_main  whether this is the main process, which reports the result and has the probe's
    """

    kind: str
    output: Path
    step: int
    tokens: int
    seconds: float
    validation: list[dict[str, float]]
    probe: list[dict[str, float]]
    signal: int | None
    is_main: bool


def _unfinished(output: Path) -> tuple[dict[str, Any], checkpoints.Checkpoint | None]:
    """Saved state and last checkpoint of the training in `output`; the checkpoint is None before the first one."""
    if (output / checkpoints.CHECKPOINT_FILE).is_file():
        saved = checkpoints.load(output / checkpoints.CHECKPOINT_FILE)
        return saved.state, saved
    try:
        return dict(json.loads((output / SETTINGS).read_text(encoding="utf-8"))), None
    except (OSError, ValueError) as error:
        is_done = (output / METRICS).exists()
        raise UsageError(f"{str(output)!r} holds a complete training; there is nothing to resume" if is_done else
                         f"{str(output)!r} holds no checkpoint to resume; leave --resume out to start there") from error


def prepare_output(output: Path, settings: TrainingSettings) -> None:
    """Create the folder and write the settings into it.

    Raises UsageError unless it is writable, and new, empty or left by a training that ended before its first
    checkpoint.
    """
    if (output / checkpoints.CHECKPOINT_FILE).exists():
        raise UsageError(f"{str(output)!r} holds an unfinished training; continue it with --resume, "
                         "or give another --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()) and not (output / SETTINGS).exists():
            raise UsageError(f"{str(output)!r} is not empty; give another --output")
        for name in lm.TOKENIZER_FILES:  # may be left by an earlier training
            (output / name).unlink(missing_ok=True)
    except OSError as error:
        raise _not_writable(output, error) from error
    _check_writable(output)
    try:
        dump_json(output / SETTINGS, {"kind": settings.KIND, "settings": settings.as_dict()})
    except OSError as error:
        raise OutputError(f"cannot write {output / SETTINGS}: {error.strerror or error}; free disk space") from error


def _check_writable(output: Path) -> None:
    probe_file = output / ".longdraft-probe"
    try:
        probe_file.write_bytes(b"")
        probe_file.unlink()
    except OSError as error:
        raise _not_writable(output, error) from error


def _not_writable(output: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write to {str(output)!r}: {error.strerror or error}; give another --output")


def train(settings: TrainingSettings, output: Path, progress: TrainingProgress | None = None) -> Result:
    """Train into a new folder. All input is checked before the first step."""
    data_files.check_files(settings.local_files())
    settings = settle(settings)
    processes = DistributedProcesses(settings.device)
    if processes.is_main:
        prepare_output(output, settings)
    processes.wait_for_all()
    return _train(settings, output, None, progress, processes)


def resume(kind: str, output: Path, given: Mapping[str, Any], progress: TrainingProgress | None = None) -> Result:
    """Continue the training in `output`. given: settings that the user repeats or changes."""
    state, saved = _unfinished(output)
    if state.get("kind") != kind:
        raise UsageError(f"{str(output)!r} holds a training of {state.get('kind')!r}, not of {kind!r}; continue it "
                         f"with `longdraft train {state.get('kind')} --resume`")
    settings = resumed(from_dict(TRAININGS[kind].settings, state["settings"]), given)
    data_files.check_files(settings.local_files())
    processes = DistributedProcesses(settings.device)
    if processes.is_main:  # all processes share the file
        _check_writable(output)
    return _train(settings, output, saved, progress, processes)


def _train(settings: TrainingSettings, output: Path, saved: checkpoints.Checkpoint | None,
           progress: TrainingProgress | None, processes: DistributedProcesses) -> Result:
    _use_threads(settings.threads)
    with progress if progress and processes.is_main else TrainingProgress(sys.stderr, quiet=True) as shown:
        shown.say(f"reading {', '.join(data.names(settings.data))}")
        context = TRAININGS[settings.KIND].prepare(settings, output, processes)
        sequences, validation = load_data(settings, context, output, processes, shown)
        task = context.task(sequences.packed, validation, is_new=saved is None)
        optimizers = make_optimizers(task.module, settings)
        identity = {"kind": settings.KIND, "settings": settings.as_dict(), "data_sha256": sequences.fingerprint(),
                    "base_sha256": context.fingerprint, "processes": processes.size}
        position = Position() if saved is None else _restore(saved, identity, task.module, optimizers)
        shown.say(f"{sequences.packed.size:,} tokens for training, {validation.size:,} for validation; "
                  f"{sum(p.numel() for p in task.module.parameters()):,} parameters; step {position.step} "
                  f"of {settings.steps}")

        def save(at: Position) -> None:
            if processes.is_main:
                checkpoints.save(output / checkpoints.CHECKPOINT_FILE, task.module, optimizers,
                                 identity | {"step": at.step, "elapsed_s": at.seconds})
                (output / SETTINGS).unlink(missing_ok=True)
            processes.wait_for_all()

        path = output / METRICS if processes.is_main else None
        with MetricsLog(path, position.step, settings.tensorboard) as metrics:
            loop = TrainingLoop(task, optimizers, sequences, settings, save, metrics, shown, processes)
            outcome = loop.run(position)
            step = outcome.position.step
            tokens = step * settings.sequences_per_step * settings.sequence_length * processes.size
            result = Result(settings.KIND, output, step, tokens, outcome.position.seconds, [], [], outcome.signal,
                            processes.is_main)
            if outcome.signal is not None:
                return result
            save(outcome.position)  # a kill during the last validation, which can be long, loses nothing
            result = result._replace(validation=task.validate())
            metrics.write({"step": step, "validation": result.validation, "is_final": True})
        if processes.is_main:
            task.export(output, context.about() | {"training": _record(settings, result, outcome, validation)})
            (output / checkpoints.CHECKPOINT_FILE).unlink()
            self_generated.remove(output)
            drafting = context.drafting(output)
            if settings.probe_tokens and drafting:
                shown.say("measuring the drafter on held-out prompts")
                result = result._replace(probe=probe(drafting, validation, settings.probe_tokens))
        processes.wait_for_all()  # the launcher treats a process that exits early as failed
    return result


def _use_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
        os.environ["RAYON_NUM_THREADS"] = str(threads)  # of the tokenizer, which reads it at its first use


def load_data(settings: TrainingSettings, context: TrainingContext, output: Path, processes: DistributedProcesses,
              progress: TrainingProgress) -> tuple[Sequences, Tokens]:
    """The packed training sequences in their order, and the validation sequences.

    With several processes the main one reads, tokenises and packs, and all of them map its result from the disk.
    """
    if processes.size == 1:
        training, validation = _packed(settings, context, output, progress)
        return Sequences(training, settings.seed), validation
    paths = [output / name for name in PACKED]
    if processes.is_main:
        for path, part in zip(paths, _packed(settings, context, output, progress), strict=True):
            np.save(path, part)
    processes.wait_for_all()
    mapped: list[Tokens] = [np.load(path, mmap_mode="r") for path in paths]
    processes.wait_for_all()
    if processes.is_main:  # the maps remain
        for path in paths:
            path.unlink()
    return Sequences(mapped[0], settings.seed), mapped[1]


def _packed(settings: TrainingSettings, context: TrainingContext, output: Path,
            progress: TrainingProgress) -> tuple[Tokens, Tokens]:
    def read(files: tuple[str, ...]) -> list[Tokens]:
        documents = data_files.read_documents(files, settings.text_column)
        tokens = data.tokenise(documents, context.tokenizer, context.end_id, context.vocab_size)
        return list(data.limited(tokens, settings.min_tokens, settings.document_tokens, settings.max_documents))

    split = data.Split(read(settings.data), read(settings.validation))
    if not settings.validation and split.training:
        split = data.hold_out(split.training, settings.holdout, settings.seed)
    length, seed = settings.sequence_length, settings.seed
    training = data.pack(split.training, length, seed, "training")
    validation = data.pack(split.validation, length, seed, "validation")
    if isinstance(settings, FrozenTargetSettings) and settings.own_tokens:
        own = self_generated.write(settings, context.fingerprint, split.training, output, progress)
        training = data.pack([*split.training, *own], length, seed, "training")
    return training, data.spread(validation, settings.eval_tokens)


def _restore(saved: checkpoints.Checkpoint, identity: Mapping[str, Any], module: torch.nn.Module,
             optimizers: Sequence[torch.optim.Optimizer]) -> Position:
    for name, what in (("data_sha256", "data"), ("base_sha256", "base model")):
        if saved.state[name] != identity[name]:
            raise UsageError(f"the {what} differs from that of the checkpoint (sha256 {identity[name][:12]}, was "
                             f"{saved.state[name][:12]}); restore it, or start again in another --output")
    if saved.state["processes"] != identity["processes"]:
        raise UsageError(f"the training to resume had {saved.state['processes']} processes, this run has "
                         f"{identity['processes']}; start as many, or start again in another --output")
    checkpoints.restore(saved, module, optimizers)
    return Position(int(saved.state["step"]), float(saved.state["elapsed_s"]))


def _record(settings: TrainingSettings, result: Result, outcome: Outcome, validation: Tokens) -> dict[str, Any]:
    """Provenance: settings, results and versions, without paths of this machine."""
    named = {name: data.model_name(value) for name, value in settings.as_dict().items()
             if name in MODELS and value}
    files = {"data": data.names(settings.data), "validation": data.names(settings.validation)}
    return settings.as_dict() | named | files | {
        "steps_done": result.step, "tokens_seen": result.tokens, "seconds": result.seconds,
        "final_training_losses": outcome.last_losses, "validation_tokens": int(validation.size),
        "validation_metrics": result.validation, "versions": data.versions(),
    }


def probe(drafting: Drafting, prompts: Tokens, tokens: int) -> list[dict[str, float]]:
    """Measure a drafter on held-out prompts: for each temperature, the mean accepted length and the median speed-up
    over plain decoding. Empty if the prompts leave no room in the context.

    prompts  [N, L] int32, of which the first few are used
    tokens   new tokens of each text
    """
    engine = load(drafting.model, drafter=drafting.drafter, drafter_options=drafting.options, heads=drafting.heads)
    plain_engine = engine.with_drafter("plain")
    length = min(prompts.shape[1], _LONGEST_PROMPT, engine.model.config.max_positions - tokens)
    if length < 1:
        return []
    measured = []
    for sampling in _PROBE_SAMPLING:
        written = steps = 0
        ratios = []
        for prompt in prompts[:_PROBE_PROMPTS, :length].tolist():
            params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=1, **sampling)
            plain, _ = _write(plain_engine, prompt, params)
            drafted, stats = _write(engine, prompt, params)
            if plain[1] != drafted[1]:
                raise LongdraftError(f"{drafting.drafter} and plain decoding wrote different texts; that is a bug of "
                                     "longdraft, please report it")
            written += stats["new_tokens"]
            steps += stats["steps"]
            ratios.append(plain[0] / drafted[0])
        measured.append({"temperature": sampling["temperature"], "context": length, "new_tokens": written,
                         "mean_accepted_length": written / steps, "to_plain": statistics.median(ratios)})
    return measured


def _write(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[tuple[float, str], dict[str, Any]]:
    """Seconds of decoding and hash of the tokens; the statistics."""
    began = time.perf_counter()
    text = engine.generate(prompt, params)
    for _ in text:
        pass
    stats = text.stats()
    return (time.perf_counter() - began - stats["prefill_seconds"], stats["sha256_tokens"]), stats
