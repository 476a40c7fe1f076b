"""`pytorch_model.bin`: the tensors of `torch.load`, read without running anything."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import longdraft
from helpers.checkpoints import load, make_checkpoint
from helpers.equality import prompt_of
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.checkpoint.torch_file import TorchFile
from longdraft.errors import ModelError
from longdraft.model.transformer import chain_rows

NAME = "pytorch_model.bin"


def saved(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def test_every_kind_of_tensor_is_that_of_torch_load(tmp_path):
    base = torch.arange(60.0).view(5, 12)
    tensors = {"float": base, "transposed": base.T, "rows": base[1:4, 2:6], "bfloat16": base.bfloat16(),
               "half": base.half(), "double": base.double(), "long": base.long(), "byte": base.byte(),
               "bool": base > 3, "scalar": torch.tensor(7.0), "empty": torch.empty(0, 3),
               "parameter": torch.nn.Parameter(base * 2), "again": base}
    file = TorchFile(saved(tmp_path / NAME, OrderedDict(tensors)))
    assert file.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = file.view(name)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor.detach())
        assert (file.float_dtype(name) is not None) == (tensor.dtype in (torch.float32, torch.bfloat16, torch.float16))
    assert file.view("float").data_ptr() == file.view("again").data_ptr()  # one storage, mapped once


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path, Path]:
    """One model as safetensors, as `.bin` and as shards of `.bin`."""
    safe, whole, sharded = (tmp_path_factory.mktemp(name) for name in ("safe", "whole", "sharded"))
    model = make_checkpoint(safe)
    for folder in (whole, sharded):
        for name in ("config.json", "tokenizer.json"):
            (folder / name).write_bytes((safe / name).read_bytes())
    state = model.state_dict()  # with lm_head.weight, the embedding's second name
    saved(whole / NAME, state)
    names = sorted(state)
    parts = {"pytorch_model-00001-of-00002.bin": names[:5], "pytorch_model-00002-of-00002.bin": names[5:]}
    for part, own in parts.items():
        saved(sharded / part, OrderedDict((name, state[name]) for name in own))
    index = {"weight_map": {name: part for part, own in parts.items() for name in own}}
    (sharded / f"{NAME}.index.json").write_text(json.dumps(index))
    return safe, whole, sharded


def test_a_bin_file_and_its_shards_are_the_model_of_the_safetensors(folders):
    tokens = prompt_of(40)
    results = []
    for folder in folders:
        model = load(folder)
        results.append(model.logits(model.forward(chain_rows(tokens, 0), model.new_cache()).hidden))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert TensorFiles(folders[1]).fingerprint() == TensorFiles(folders[2]).fingerprint()


def test_safetensors_come_first(folders, tmp_path):
    for path in folders[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / NAME).write_bytes(b"no archive")
    longdraft.load(str(tmp_path), drafter="plain")


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("ran"),)


def rewritten(path: Path, change: Callable[[str, bytes], tuple[str, bytes]], how: int = zipfile.ZIP_STORED) -> None:
    """The archive with other entries."""
    with zipfile.ZipFile(path) as source:
        entries = [change(info.filename, source.read(info)) for info in source.infolist()]
    with zipfile.ZipFile(path, "w", how) as target:
        for name, data in entries:
            target.writestr(name, data)


def with_pickle(content: bytes) -> Callable[[Path], None]:
    return lambda path: rewritten(path, lambda name, data: (name, content if name.endswith("data.pkl") else data))


def repeated(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("pytorch_model/data.pkl", b"x")


def big_endian(path: Path) -> None:
    rewritten(path, lambda name, data: (name, b"big" if name.endswith("byteorder") else data))


def short(path: Path) -> None:
    rewritten(path, lambda name, data: (name, data[:-4] if name.endswith("data/0") else data))


STORAGE = "((X\x07\0\0\0storageq\0ctorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x08tQ".encode("latin1")


def tensor_of(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> bytes:
    """A pickle of one tensor in a storage of eight numbers."""
    numbers = [b"(" + b"".join(b"J" + n.to_bytes(4, "little", signed=True) for n in part) + b"t"
               for part in (shape, strides)]
    return (b"\x80\x02}X\x01\0\0\0a" b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE + b"J"
            + offset.to_bytes(4, "little", signed=True) + b"".join(numbers) + b"\x89}tRs.")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no archive": (lambda path: path.write_bytes(b"\x80\x02}."), "is not a PyTorch file of the ZIP format"),
    "the old format": (lambda path: torch.save({}, path, _use_new_zipfile_serialization=False), "of the ZIP format"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-30]), "its directory is missing"),
    "compressed": (lambda path: rewritten(path, lambda *entry: entry, zipfile.ZIP_DEFLATED), "is compressed, which"),
    "an entry twice": (repeated, "occurs twice"),
    "big-endian": (big_endian, "its numbers are not little-endian"),
    "too few numbers": (short, "the storage of a has 28 bytes, not 32"),
    "code": (with_pickle(pickle.dumps(Evil(), 2)), "names 'pathlib.Path.touch'|names '.*', which tensors do not need"),
    "a builtin": (with_pickle(b"\x80\x02cbuiltins\neval\n(X\x01\0\0\x001tR."), "names 'builtins.eval', which tensors"),
    "an instance": (with_pickle(b"\x80\x02(ios\nsystem\n."), "instruction INST, which tensors do not need"),
    "another protocol": (with_pickle(pickle.dumps({}, 4)), "has protocol 4; allowed: 2"),
    "a list": (with_pickle(b"\x80\x02]."), "it holds a list, not tensors by name"),
    "a number": (with_pickle(b"\x80\x02}X\x01\0\0\0aK\1s."), "'a' is no tensor"),
    "no end": (with_pickle(b"\x80\x02}"), "is not a readable PyTorch file"),
    "an empty stack": (with_pickle(b"\x80\x02R."), "is not a readable PyTorch file"),
    "a memo that lies": (with_pickle(b"\x80\x02h\7."), "its pickle is damaged"),
    "beyond the storage": (with_pickle(tensor_of((2, 5), (5, 1))), "a reaches beyond its storage"),
    "an offset beyond it": (with_pickle(tensor_of((1,), (1,), 8)), "a reaches beyond its storage"),
    "a negative stride": (with_pickle(tensor_of((2,), (-1,))), "a tensor in its pickle is damaged"),
    "one number a billion times": (with_pickle(tensor_of((1 << 30,), (0,))), "a has more numbers than its storage"),
    "lengths that differ": (with_pickle(tensor_of((2, 2), (1,))), "a tensor in its pickle is damaged"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_file_that_lies_gets_one_clear_line(tmp_path, what, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path / NAME, {"a": torch.arange(8.0)})
    damage, message = DAMAGES[what]
    damage(path)
    with pytest.raises(ModelError, match=message) as caught:
        TorchFile(path)
    assert "\n" not in str(caught.value) and not (tmp_path / "ran").exists()


@settings(max_examples=150, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_file_with_changed_bytes_is_read_or_refused_in_one_line(tmp_path, data):
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(8.0), "b": torch.ones(2, 3).T}, buffer)
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        new = data.draw(st.binary(min_size=1, max_size=8) | st.just(b"\xff" * 8))
        content[at : at + len(new)] = new
    (tmp_path / NAME).write_bytes(content)
    refused = ""
    try:
        file = TorchFile(tmp_path / NAME)
        for name in file.entries:
            file.view(name).float().sum()
    except ModelError as error:
        refused = str(error)
    assert "\n" not in refused


@pytest.mark.parametrize("shard", ["../pytorch_model.bin", "/etc/passwd", "model.safetensors", ""])
def test_an_index_lists_plain_names_only(folders, tmp_path, shard):
    (tmp_path / f"{NAME}.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelError, match=r"allowed: names of \.bin files in its folder"):
        TensorFiles(tmp_path)
