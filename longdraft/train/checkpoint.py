"""Checkpoints of a training: one safetensors file with the JSON state in its header, replaced by one rename.

It is one file because two cannot be replaced atomically: a kill at any moment leaves the last whole checkpoint.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from longdraft.errors import ModelError, OutputError
from longdraft.system.files import replacing

CHECKPOINT_FILE = "checkpoint.safetensors"
CHECKPOINT_FORMAT = 1
_PARAMETER, _OPTIMIZER = "parameter.", "optimizer."


class Checkpoint(NamedTuple):
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save(path: Path, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Any]) -> None:
    """Write parameters, optimizer moments and the JSON `state` in one atomic step."""
    tensors = {_PARAMETER + name: p.detach().cpu() for name, p in module.named_parameters()}
    for first, optimizer in _numbered(optimizers):
        for index, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"{_OPTIMIZER}{first + index}.{name}": value.detach().cpu() for name, value in moments.items()}
    header = {"longdraft": json.dumps({"format": CHECKPOINT_FORMAT, **state})}
    write_tensors(path, tensors, header)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Replace a safetensors file in one atomic step. Raises OutputError if the system refuses, such as on a full
    disk."""
    try:
        with replacing(path) as partial:
            partial.touch()
            mode = stat.S_IMODE(partial.stat().st_mode)
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, dict(header))
            partial.chmod(mode)  # save_file creates a file that only its owner can read
        for left in path.parent.glob(".tmp??????"):  # save_file's own, of a process that was killed
            left.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}; the last checkpoint is "
                          "kept: free disk space, then continue with --resume") from error


def load(path: Path) -> Checkpoint:
    """Raises ModelError if the file is not a checkpoint of this format."""
    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads((file.metadata() or {})["longdraft"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ModelError(f"{path} is not a readable checkpoint ({error}); "
                         "start again in another --output") from error
    if state.get("format") != CHECKPOINT_FORMAT:
        raise ModelError(f"{path} has checkpoint format {state.get('format')!r}, this version reads "
                         f"{CHECKPOINT_FORMAT}")
    return Checkpoint(tensors, state)


def restore(checkpoint: Checkpoint, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Copy a checkpoint's parameters and moments into the module and the optimizers."""
    parameters = dict(module.named_parameters())
    stored = {name.removeprefix(_PARAMETER): tensor for name, tensor in checkpoint.tensors.items()
              if name.startswith(_PARAMETER)}
    if stored.keys() != parameters.keys():
        raise ModelError(f"the checkpoint holds {sorted(stored)}, expected {sorted(parameters)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(stored[name])
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        if name.startswith(_OPTIMIZER):
            index, key = name.removeprefix(_OPTIMIZER).split(".", 1)
            moments.setdefault(int(index), {})[key] = tensor
    for first, optimizer in _numbered(optimizers):
        own = {index - first: moments[index] for index in range(first, first + _parameters(optimizer))
               if index in moments}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": own})


def _numbered(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[int, torch.optim.Optimizer]]:
    """Each with the number of its first parameter: those of all are numbered in one row."""
    first = 0
    for optimizer in optimizers:
        yield first, optimizer
        first += _parameters(optimizer)


def _parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
