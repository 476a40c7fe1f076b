"""Damages to a model folder: functions that change its weights, index or configuration."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

from safetensors.torch import load_file, save_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM, GATE = "model.norm.weight", "model.layers.0.mlp.gate_proj.weight"


def split(path: Path) -> tuple[dict[str, dict[str, object]], bytes]:
    data = path.read_bytes()
    length, = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(path: Path, header: object, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def with_entry(**changes: object):
    """Damage: one tensor's entry in the header says something else."""

    def damage(folder: Path) -> None:
        header, data = split(folder / WEIGHTS)
        header[GATE] |= changes
        join(folder / WEIGHTS, header, data)

    return damage


def overlapping(folder: Path) -> None:
    header, data = split(folder / WEIGHTS)
    up = GATE.replace("gate", "up")
    header[up]["data_offsets"] = header[GATE]["data_offsets"]
    join(folder / WEIGHTS, header, data)


def with_header(text: bytes, length: int | None = None):
    return lambda folder: join(folder / WEIGHTS, text, b"", length)


def with_tensors(change):
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return damage


def poisoned(value: float):
    return with_tensors(lambda tensors: tensors[GATE].view(-1)[77:79].fill_(value))


def cut(share: float):
    def damage(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[: int(len(data) * share)])

    return damage


def twice(folder: Path) -> None:
    names = ["a.safetensors", "b.safetensors"]
    for name in names:
        shutil.copy(folder / WEIGHTS, folder / name)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": names[0], "y": names[1]}}))


def with_index(value: object):
    text = value if isinstance(value, str) else json.dumps(value)
    return lambda folder: (folder / INDEX).write_text(text)


def with_shard(name: str):
    return with_index({"weight_map": {NORM: name}})


def linked(target: str, name: str = WEIGHTS):
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return damage


def replaced(name: str, how):
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        how(folder / name)

    return damage


def with_config(**changes: object):
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return damage


def with_config_text(text: str):
    return lambda folder: (folder / "config.json").write_text(text)
