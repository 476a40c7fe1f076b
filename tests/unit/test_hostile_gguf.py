"""GGUF files that lie: reading one ends soon, in little memory, with one clear line or a model."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import longdraft
from helpers.checkpoints import make_checkpoint
from helpers.gguf_files import convert, header, text, value, write_gguf
from longdraft.__main__ import run
from longdraft.checkpoint.config_file import read_config
from longdraft.checkpoint.gguf.container import GgufFile, open_gguf
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.engine.run_statistics import peak_memory_bytes
from longdraft.errors import ModelError
from longdraft.text.tokenizer import Tokenizer

LLAMA = {"general.architecture": "llama"}
FUZZ = settings(max_examples=150, deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.function_scoped_fixture])


def tensor(kind: int = 0, shape: tuple[int, ...] = (4, 8), count: int = 128, offset: int = 0) -> bytes:
    return text("a.weight") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset) + b"\0" * count


def pair(key: bytes, kind: int, content: bytes) -> bytes:
    return struct.pack("<4sI2Q", b"GGUF", 3, 0, 1) + text(key) + struct.pack("<I", kind) + content + b"\0" * 64


def one_tensor(data: bytes, count: int = 1) -> bytes:
    return struct.pack("<4sI2Q", b"GGUF", 3, count, 0) + data + b"\0" * 256


U64, FULL = struct.Struct("<Q").pack, 1 << 62
DAMAGES = {
    "empty": (b"", "is not a GGUF file: it has 0 bytes"),
    "another magic": (header(LLAMA, {}, magic=b"GGML") + b"\0" * 99, "it begins with b'GGML', not with b'GGUF'"),
    "the first version": (header(LLAMA, {}, version=1) + b"\0" * 99, "its version is 1; allowed: 2 or 3"),
    "big-endian": (header(LLAMA, {}, version=3 << 24) + b"\0" * 99, "its numbers are big-endian"),
    "2**60 pairs": (header({}, {}, counts=(0, 1 << 60)) + b"\0" * 99, "it claims 1,152,921,504,606,846,976 pairs"),
    "2**60 tensors": (header({}, {}, counts=(1 << 60, 0)) + b"\0" * 99, "1,152,921,504,606,846,976 tensors in"),
    "a pair that is missing": (header(LLAMA, {}, counts=(0, 4)) + b"\0" * 99, "the key '' occurs twice"),
    "a key of exabytes": (struct.pack("<4sI3Q", b"GGUF", 3, 0, 1, 1 << 62) + b"\0" * 99, "a key has 4,611,686,018"),
    "a text of exabytes": (pair(b"k", 8, U64((1 << 64) - 1)), "k has 18,446,744,073,709,551,615 bytes"),
    "a list of exabytes": (pair(b"k", 9, struct.pack("<IQ", 10, 1 << 60)), "k reaches beyond the end of the file"),
    "a list of 2**62 texts": (pair(b"k", 9, struct.pack("<IQ", 8, FULL)), "k claims 4,611,686,018,427,387,904 texts"),
    "a text in a list that lies": (pair(b"k", 9, struct.pack("<IQQ", 8, 2, 1 << 40)),
                                   "a text of k reaches beyond the end"),
    "a list of lists": (pair(b"k", 9, struct.pack("<IQ", 9, 1)), "k is an array of type 9; allowed: numbers"),
    "an unknown type of value": (pair(b"k", 77, b""), "k has the unknown type 77"),
    "a truth value of 2": (pair(b"k", 7, b"\2"), "k is a truth value of 2"),
    "a key twice": (struct.pack("<4sI2Q", b"GGUF", 3, 0, 2) + (text("k") + value(1)) * 2, "the key 'k' occurs twice"),
    "an alignment of 3": (header({"general.alignment": 3}, {}), "general.alignment is 3; allowed: a power of two"),
    "an alignment of 2**31": (header({"general.alignment": 1 << 31}, {}), "general.alignment is 2147483648"),
    "no dimensions": (one_tensor(tensor(shape=())), "a.weight has 0 dimensions; allowed: 1 to 4"),
    "99 dimensions": (one_tensor(tensor(shape=(1,) * 99)), "a.weight has 99 dimensions"),
    "a size of 0": (one_tensor(tensor(shape=(4, 0))), r"a.weight has the shape \[4, 0\]; allowed: sizes of 1 or more"),
    "a shape that overflows": (one_tensor(tensor(shape=(1 << 32, 1 << 32))), "less than 2\\*\\*63 numbers"),
    "an unknown type": (one_tensor(tensor(kind=999)), "a.weight has type 999; supported: F32, F16, BF16, Q8_0"),
    "a type of two bits": (one_tensor(tensor(kind=10, shape=(256,))), "a.weight has type Q2_K; supported"),
    "half a block": (one_tensor(tensor(kind=8, shape=(48, 2))), "rows of 48, which is no multiple of the 32 numbers"),
    "an offset past the end": (one_tensor(tensor(offset=1 << 40)), "begins at 1,099,511,627,776, but the tensors"),
    "more than the file has": (one_tensor(tensor(shape=(4, 1 << 30))), "a.weight ends at byte 17,179,869"),
    "a tensor twice": (one_tensor(tensor(count=0) * 2, 2), "'a.weight' occurs twice"),
    "a gap": (one_tensor(tensor(count=0) + text("b") + struct.pack("<IQIQ", 1, 4, 0, 160), 2), "b begins at 160, but"),
    "a long name": (one_tensor(text("x" * 65) + b"\0" * 99), "a tensor's name has 65 bytes; allowed: 64"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_header_gets_one_clear_line(tmp_path, what):
    content, message = DAMAGES[what]
    (tmp_path / "model.gguf").write_bytes(content)
    began, before = time.monotonic(), peak_memory_bytes() or 0
    with pytest.raises(ModelError, match=message) as caught:
        GgufFile(tmp_path / "model.gguf")
    assert len(str(caught.value)) < 2000 and "\n" not in str(caught.value)
    assert time.monotonic() - began < 5 and (peak_memory_bytes() or 0) - before < 1 << 28


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("sound")
    model = make_checkpoint(folder, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    convert(folder, model, folder / "model.gguf", "Q8_0")
    return (folder / "model.gguf").read_bytes()


def read_all(path: Path) -> None:
    """Everything that loading reads."""
    config, files = read_config(path), TensorFiles(path)
    Tokenizer(path)
    assert config.num_layers < 1 << 32
    for name in files.names():
        if files.shape(name):
            files.read(name)


@FUZZ
@given(st.data())
def test_a_file_with_changed_bytes_is_read_or_refused_in_one_line(tmp_path, sound, data):
    changed = bytearray(sound)
    end = sound.index(b"blk.0.ffn_down") + 200
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end) | st.integers(0, 400))
        new = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, b"\0" * 8, U64(1 << 40)]))
        changed[at : at + len(new)] = new
    if data.draw(st.booleans()):
        changed = changed[: data.draw(st.integers(0, len(changed)))]
    path = tmp_path / "model.gguf"
    path.write_bytes(changed)
    began, refused = time.monotonic(), ""
    try:
        read_all(path)
    except ModelError as error:
        refused = str(error)
    assert "\n" not in refused and len(refused) < 4000
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("quantize, what", [("auto", "scales"), ("none", "32 values")])
def test_a_scale_that_is_no_number_names_the_tensor(tmp_path, sound, quantize, what):
    path = tmp_path / "model.gguf"
    path.write_bytes(sound)
    entry = GgufFile(path).tensors["blk.0.ffn_up.weight"]
    damaged = bytearray(sound)
    damaged[entry.start : entry.start + 2] = b"\x00\x7e"
    path.write_bytes(damaged)
    with pytest.raises(ModelError, match=rf"layers\.0\.mlp\.up_proj\.weight has {what} that are NaN or infinite"):
        longdraft.load(str(path), drafter="plain", quantize=quantize)


def test_the_command_line_prints_one_line(tmp_path, sound, capfd):
    path = tmp_path / "model.gguf"
    path.write_bytes(sound[:3000])
    assert run(["generate", "It", "--model", str(path), "--max-new-tokens", "2"]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.startswith("longdraft: ") and captured.err.count("\n") == 1


@pytest.mark.parametrize("values, message", [
    ({"split.count": 3}, "must be named NAME-00001-of-0000N.gguf"),
    ({"split.count": "x"}, "must be named NAME-00001-of-0000N.gguf"),
])
def test_a_split_file_that_lies_is_refused(tmp_path, values, message):
    write_gguf(tmp_path / "model.gguf", LLAMA | values, {})
    with pytest.raises(ModelError, match=message):
        open_gguf(tmp_path / "model.gguf")
