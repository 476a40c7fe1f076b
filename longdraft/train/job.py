"""One training from files to files: check, load, train, validate, write, measure.

    result = train(HeadSettings(model="novelist", data=("books.parquet",)), Path("heads"))

While it runs the output folder holds longdraft-training.json, from the first checkpoint on checkpoint.safetensors, and
metrics.jsonl; at the end what was trained and metrics.jsonl.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longdraft.errors import OutputError, UsageError
from longdraft.model.checkpoint import dump_json
from longdraft.train import checkpoint as checkpoints
from longdraft.train import data, lm, self_generated
from longdraft.train.data import Sequences, Tokens
from longdraft.train.loop import Loop, Outcome, Position, make_optimizer
from longdraft.train.probe import probe
from longdraft.train.progress import Metrics, Progress
from longdraft.train.registry import KINDS, MODELS, Ground
from longdraft.train.settings import GlideSettings, HeadSettings, Settings, from_dict, resumed
from longdraft.train.team import Team

METRICS = "metrics.jsonl"
SETTINGS = "longdraft-training.json"  # of a training that has no checkpoint yet


class Result(NamedTuple):
    """`validation` and `probe` are empty where a signal stopped the training.

    leads  whether this process is the one of several that tells of it, and has the probe
    """

    kind: str
    output: Path
    step: int
    tokens: int
    seconds: float
    validation: list[dict[str, float]]
    probe: list[dict[str, float]]
    signal: int | None
    leads: bool


def _begun(output: Path) -> tuple[dict[str, Any], checkpoints.Checkpoint | None]:
    """Kind and settings of the training in `output`, and how far it came; no checkpoint: not to its first."""
    if (output / checkpoints.FILE).is_file():
        saved = checkpoints.load(output / checkpoints.FILE)
        return saved.state, saved
    try:
        return dict(json.loads((output / SETTINGS).read_text(encoding="utf-8"))), None
    except (OSError, ValueError) as error:
        raise UsageError(f"{str(output)!r} holds no checkpoint to resume; leave --resume out to start there") from error


def prepare_output(output: Path, settings: Settings) -> None:
    """UsageError unless `output` is a folder in which files can be written, and new, empty or left by a training that
    did not come to its first checkpoint. From then on it says whose it is."""
    if (output / checkpoints.FILE).exists():
        raise UsageError(f"{str(output)!r} holds an unfinished training; go on with --resume, "
                         "or give another --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()) and not (output / SETTINGS).exists():
            raise UsageError(f"{str(output)!r} is not empty; give another --output")
        for name in lm.TOKENIZER_FILES:  # of other settings, perhaps
            (output / name).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {str(output)!r}: {error.strerror or error}; "
                         "give another --output") from error
    _check_writable(output)
    try:
        dump_json(output / SETTINGS, {"kind": settings.KIND, "settings": settings.as_dict()})
    except OSError as error:
        raise OutputError(f"cannot write {output / SETTINGS}: {error.strerror or error}; make room") from error


def _check_writable(output: Path) -> None:
    probe_file = output / ".longdraft-probe"
    try:
        probe_file.write_bytes(b"")
        probe_file.unlink()
    except OSError as error:
        raise UsageError(f"cannot write to {str(output)!r}: {error.strerror or error}; "
                         "give another --output") from error


def train(settings: Settings, output: Path, progress: Progress | None = None) -> Result:
    """Train into a new folder. Everything a user can get wrong is checked before the first step."""
    data.check_files(settings.local_files())
    settings = KINDS[settings.KIND].settle(settings)
    team = Team(settings.device)
    if team.leads:
        prepare_output(output, settings)
    team.wait()
    return _train(settings, output, None, progress, team)


def resume(kind: str, output: Path, given: Mapping[str, Any], progress: Progress | None = None) -> Result:
    """Go on with the training in `output`; `given` are settings the user repeats or changes."""
    state, saved = _begun(output)
    if state.get("kind") != kind:
        raise UsageError(f"{str(output)!r} holds a training of {state.get('kind')!r}, not of {kind!r}; go on "
                         f"with `longdraft train {state.get('kind')} --resume`")
    settings = resumed(from_dict(KINDS[kind].settings, state["settings"]), given)
    data.check_files(settings.local_files())
    team = Team(settings.device)
    if team.leads:  # one file, one process
        _check_writable(output)
    return _train(settings, output, saved, progress, team)


def _train(settings: Settings, output: Path, saved: checkpoints.Checkpoint | None, progress: Progress | None,
           team: Team) -> Result:
    _use_threads(settings.threads)
    with progress if progress and team.leads else Progress(sys.stderr, quiet=True) as shown:
        shown.say(f"reading {', '.join(data.names(settings.data))}")
        ground = KINDS[settings.KIND].prepare(settings, output, team)
        sequences, validation = load_data(settings, ground, output, team, shown)
        trainee = ground.trainee(sequences.packed[:1], validation)
        optimizer = make_optimizer(trainee, settings)
        identity = {"kind": settings.KIND, "settings": settings.as_dict(), "data_sha256": sequences.fingerprint(),
                    "base_sha256": ground.fingerprint, "processes": team.size}
        position = Position() if saved is None else _restore(saved, identity, trainee.module, optimizer)
        shown.say(f"{sequences.packed.size:,} tokens for training, {validation.size:,} for validation; "
                  f"{sum(p.numel() for p in trainee.module.parameters()):,} parameters; step {position.step} "
                  f"of {settings.steps}")

        def save(at: Position) -> None:
            if team.leads:
                checkpoints.save(output / checkpoints.FILE, trainee.module, optimizer,
                                 identity | {"step": at.step, "elapsed_s": at.seconds})
                (output / SETTINGS).unlink(missing_ok=True)
            team.wait()

        path = output / METRICS if team.leads else None
        with Metrics(path, position.step, settings.tensorboard) as metrics:
            loop = Loop(trainee, optimizer, sequences, settings, save, metrics, shown, team)
            outcome = loop.run(position)
            if outcome.signal is not None:
                return _result(output, settings, team, outcome, [], [])
            save(outcome.position)  # the last validation can be long; a kill in it loses nothing
            parts = trainee.validate()
            metrics.write({"step": outcome.position.step, "validation": parts, "is_final": True})
        probed: list[dict[str, float]] = []
        if team.leads:
            result = _result(output, settings, team, outcome, parts, probed)
            trainee.export(output, ground.about() | {"training": _record(settings, result, outcome, validation)})
            (output / checkpoints.FILE).unlink()
            self_generated.remove(output)
            drafting = ground.drafting(output)
            if settings.probe_tokens and drafting:
                shown.say("measuring it on held-out prompts")
                probed = probe(drafting, validation, settings.probe_tokens)
        team.wait()  # who leaves early is taken for one that failed, by whoever started the others
    return _result(output, settings, team, outcome, parts, probed)


def _use_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
        os.environ["RAYON_NUM_THREADS"] = str(threads)  # the tokenizer's; read once, at its first use


def load_data(settings: Settings, ground: Ground, output: Path, team: Team,
              progress: Progress) -> tuple[Sequences, Tokens]:
    """Packed training sequences in their order, and those of the validation."""
    def read(files: tuple[str, ...]) -> list[Tokens]:
        texts = data.read_documents(files, settings.text_column)
        return list(data.tokenise(texts, ground.tokenizer, ground.end_id))

    split = data.Split(read(settings.data), read(settings.validation))
    if not settings.validation and split.training:
        split = data.hold_out(split.training, settings.holdout, settings.seed)
    length, seed = settings.sequence_length, settings.seed
    training = data.pack(split.training, length, seed, "training")
    validation = data.pack(split.validation, length, seed, "validation")
    if isinstance(settings, HeadSettings | GlideSettings) and settings.own_tokens:
        def write() -> list[Tokens]:
            return self_generated.write(settings, ground.fingerprint, split.training, output, progress)

        training = data.pack([*split.training, *_first_alone(team, write)], length, seed, "training")
    return Sequences(training, seed), data.spread(validation, settings.eval_tokens)


def _first_alone(team: Team, work: Callable[[], list[Tokens]]) -> list[Tokens]:
    """The leader does it, the others find what it left."""
    found = work() if team.leads else []
    team.wait()
    return found if team.leads else work()


def _restore(saved: checkpoints.Checkpoint, identity: Mapping[str, Any], module: torch.nn.Module,
             optimizer: torch.optim.Optimizer) -> Position:
    for name, what in (("data_sha256", "data"), ("base_sha256", "base model")):
        if saved.state[name] != identity[name]:
            raise UsageError(f"the {what} is not what the checkpoint was trained on (sha256 "
                             f"{identity[name][:12]}, was {saved.state[name][:12]}); restore it, or start "
                             "again in another --output")
    if saved.state["processes"] != identity["processes"]:
        raise UsageError(f"the training to resume had {saved.state['processes']} processes, there are "
                         f"{identity['processes']}; start as many, or start again in another --output")
    checkpoints.restore(saved, module, optimizer)
    return Position(int(saved.state["step"]), float(saved.state["elapsed_s"]))


def _result(output: Path, settings: Settings, team: Team, outcome: Outcome, parts: list[dict[str, float]],
            probed: list[dict[str, float]]) -> Result:
    step = outcome.position.step
    tokens = step * settings.sequences_per_step * settings.sequence_length * team.size
    return Result(settings.KIND, output, step, tokens, outcome.position.seconds, parts, probed, outcome.signal,
                  team.leads)


def _record(settings: Settings, result: Result, outcome: Outcome, validation: Tokens) -> dict[str, Any]:
    """Provenance: what was asked for, what was done, on which versions; no paths of this machine."""
    named = {name: data.model_name(value) for name, value in settings.as_dict().items()
             if name in MODELS and value}
    files = {"data": data.names(settings.data), "validation": data.names(settings.validation)}
    return settings.as_dict() | named | files | {
        "steps_done": result.step, "tokens_seen": result.tokens, "seconds": result.seconds,
        "final_training_losses": outcome.last_losses, "validation_tokens": int(validation.size),
        "validation_metrics": result.validation, "versions": data.versions(),
    }


