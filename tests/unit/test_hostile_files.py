"""Files that lie: whatever a model folder holds, loading ends soon, in little memory, with one clear line or a model.

The tricks are listed one by one; hypothesis then damages files in ways that nobody listed.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import longdraft
from helpers.checkpoints import VOCAB, make_checkpoint
from helpers.damaged_files import (
    GATE,
    INDEX,
    NORM,
    WEIGHTS,
    cut,
    join,
    linked,
    overlapping,
    poisoned,
    replaced,
    split,
    twice,
    with_config,
    with_config_text,
    with_entry,
    with_header,
    with_index,
    with_shard,
    with_tensors,
)
from helpers.families import EVERY_FAMILY, family_config
from helpers.gguf_files import convert, write_gguf
from helpers.processes import Fork, run_code
from longdraft.__main__ import run
from longdraft.checkpoint import sizing
from longdraft.checkpoint.config_file import parse_config, read_config
from longdraft.checkpoint.tensor_files import TORCH_WEIGHTS
from longdraft.engine.run_statistics import peak_memory_bytes
from longdraft.errors import ModelError

FUZZ = settings(max_examples=150, deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    make_checkpoint(folder)
    return folder


@pytest.fixture
def folder(sound, tmp_path) -> Path:
    """A sound model folder, to be damaged."""
    shutil.copytree(sound, tmp_path / "model")
    return tmp_path / "model"


def refused(folder: Path, message: str = "") -> None:
    """One clear line, soon, in little memory."""
    began, before = time.monotonic(), peak_memory_bytes() or 0
    with pytest.raises(ModelError, match=message) as caught:
        longdraft.load(str(folder), drafter="plain")
    line = str(caught.value)
    assert len(line) < 2000 and "\n" not in line.strip() and "Traceback" not in line
    assert time.monotonic() - began < 5
    assert (peak_memory_bytes() or 0) - before < 1 << 30


DAMAGES = {
    # The header of a weights file
    "cut in the header": (cut(0.0001), "is not a readable safetensors file"),
    "cut in the data": (cut(0.7), "is not a readable safetensors file: .*damaged or incomplete"),
    "empty": (lambda folder: (folder / WEIGHTS).write_bytes(b""), "is not a readable safetensors file"),
    "a header of exabytes": (with_header(b"{}", 1 << 62), "its header has 4,611,686,018,427,387,904 bytes"),
    "a header of a gigabyte": (with_header(b"{}", 1 << 30), "its header has 1,073,741,824 bytes; allowed"),
    "a header longer than its file": (with_header(b"{}", 1 << 20), "is not a readable safetensors file"),
    "a header shorter than it is": (with_header(b'{"a": 1}', 3), "is not a readable safetensors file"),
    "a header that is no JSON": (with_header(b"\xff" * 64), "is not a readable safetensors file"),
    "a header that is a list": (with_header(b"[]"), "is not a readable safetensors file"),
    "a nested header": (with_header(b'{"a":' * 100_000), "is not a readable safetensors file"),
    "a huge number": (with_header(b'{"a":{"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,0]}}'),
                      "is not a readable safetensors file"),
    "an unknown type": (with_entry(dtype="F33"), "is not a readable safetensors file"),
    "offsets past the end": (with_entry(data_offsets=[0, 1 << 40]), "is not a readable safetensors file"),
    "offsets backwards": (with_entry(data_offsets=[8, 4]), "is not a readable safetensors file"),
    "negative offsets": (with_entry(data_offsets=[-4, 8]), "is not a readable safetensors file"),
    "overlapping tensors": (overlapping, "is not a readable safetensors file"),
    "a shape that overflows": (with_entry(shape=[1 << 62, 1 << 62]), "is not a readable safetensors file"),
    "a shape of other bytes": (with_entry(shape=[80, 47]), "is not a readable safetensors file"),
    # What the tensors are
    "NaN": (poisoned(float("nan")), f"{GATE} has 2 values that are NaN or infinite"),
    "infinity": (poisoned(float("inf")), f"{GATE} has 2 values that are NaN or infinite"),
    "integers": (with_tensors(lambda t: t.update({GATE: t[GATE].to(torch.int32)})),
        f"{GATE} has dtype I32; allowed: F32"),
    "eight bits": (with_tensors(lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn)})),
        "has dtype F8_E4M3; allowed"),
    "missing, unexpected and misshapen": (
        with_tensors(lambda t: t.update(x=torch.ones(1), **{NORM: torch.ones(3)}) or t.pop(GATE)),
        f"missing {GATE}; unexpected x; {NORM} has shape .3., not .48."),
    "one tensor twice": (twice, "is in .*a.safetensors and in .*b.safetensors"),
    # The index of shards
    "a shard above": (with_shard("../model.safetensors"), "allowed: names of .safetensors files"),
    "an absolute shard": (with_shard("/etc/passwd"), "allowed: names of .safetensors files"),
    "a shard that is the folder": (with_shard(".."), "allowed: names of .safetensors files"),
    "a shard without a name": (with_shard(""), "allowed: names of .safetensors files"),
    "a shard of another kind": (with_shard("config.json"), "allowed: names of .safetensors files"),
    "a shard with a NUL": (with_shard("a\0.safetensors"), "is missing"),
    "a shard that is not there": (with_shard("model-9.safetensors"), "model-9.safetensors is missing"),
    "a shard with a long name": (with_shard("a" * 5000 + ".safetensors"),
        "is not a valid file name: File name too long"),
    "an index without shards": (with_index({"weight_map": {}}),
        "must have a weight_map from tensor names to file names"),
    "an index of numbers": (with_index({"weight_map": {"a": 1}}),
        "must have a weight_map from tensor names to file names"),
    "an index that is a list": (with_index([]), "holds a list; it must hold an object"),
    "a nested index": (with_index('{"a":' * 100_000), "is not valid JSON"),
    # What stands where a file should
    "a folder": (replaced(WEIGHTS, Path.mkdir), "is not a file"),
    "a pipe": (replaced(WEIGHTS, os.mkfifo), "is not a file"),
    "a device": (linked("/dev/zero"), "is not a file"),
    "a link to itself": (linked(WEIGHTS), "is missing"),
    "a link to nothing": (linked("nowhere"), "is missing"),
    "a link to what is no model": (linked("/etc/passwd"), "is not a readable safetensors file"),
    "a config that is a folder": (replaced("config.json", Path.mkdir), "config.json is not a file"),
    "a config that is a pipe": (replaced("config.json", os.mkfifo), "config.json is not a file"),
    "a config that never ends": (linked("/dev/zero", "config.json"), "config.json is not a file"),
    "a tokenizer that is a pipe": (replaced("tokenizer.json", os.mkfifo), "tokenizer.json is missing"),
    # config.json
    "10**12 layers": (with_config(num_hidden_layers=10**12),
        "num_hidden_layers is 1000000000000; allowed: a whole number, 0 to 16,384"),
    "a vocabulary of 10**15": (with_config(vocab_size=10**15),
        "vocab_size is 1000000000000000; allowed: a whole number, 0 to 67,108,864"),
    "a width of 10**30": (with_config(hidden_size=10**30), "hidden_size is 1000000000000000000000000000000; allowed"),
    "10**12 heads": (with_config(num_attention_heads=10**12, num_key_value_heads=10**12), "config.json"),
    "no heads": (with_config(num_attention_heads=0), "sizes must be positive"),
    "infinite layers": (with_config_text('{"model_type": "llama", "num_attention_heads": 4, "hidden_size": 1e999}'),
                        "hidden_size is inf; allowed: a whole number"),
    "a nested config": (with_config_text("[" * 100_000), "is not valid JSON"),
    "a number of a million digits": (with_config_text('{"vocab_size": ' + "9" * 1_000_000 + "}"), "is not valid JSON"),
    "an empty config": (with_config_text(""), "is not valid JSON"),
    "a config of 33 MB": (with_config_text(" " * (33 << 20)), "config.json has 34,603,008 bytes; allowed"),
    "a config of other bytes": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"), "not valid JSON"),
    # The tokenizer
    "another vocabulary": (with_config(vocab_size=VOCAB - 100), "whose tokenizer and model belong together"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "is not a valid tokenizer"),
    "a nested tokenizer": (lambda folder: (folder / "tokenizer.json").write_text('{"a":' * 100_000),
                           "is not a valid tokenizer"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_folder_gets_one_clear_line(folder, what):
    damage, message = DAMAGES[what]
    damage(folder)
    refused(folder, message)


ABSURD: list[object] = [
    0, 1, -1, 2**31, 10**9, 10**30, 10**400, 1e30, 1e308, float("inf"), float("-inf"), float("nan"), 0.5, -0.5, 1e-300,
    True, "12", "", [], [10**9], {}, {"factor": 1e300}, None]


def with_member(config: object, path: tuple[object, ...], value: object) -> object:
    """A copy of a configuration in which the member at `path` has another value."""
    if not path:
        return value
    copy = list(config) if isinstance(config, list) else dict(config)  # type: ignore[call-overload]
    copy[path[0]] = with_member(copy[path[0]], path[1:], value)
    return copy


def members(config: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """The paths to every member of a configuration, of objects and lists inside it too."""
    items = config.items() if isinstance(config, dict) else enumerate(config[:2]) if isinstance(config, list) else ()
    return [each for name, value in items for each in ((*path, name), *members(value, (*path, name)))]


def problem_of(config: dict[str, object]) -> str:
    """What the parser says against a configuration; nothing where it accepts it."""
    try:
        sizing.model_sizes(parse_config(config))
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", [
    name if name in ("llama", "gpt_oss", "qwen3_next", "gemma4") else pytest.param(name, marks=pytest.mark.full)
    for name in EVERY_FAMILY])
def test_an_absurd_value_of_every_key_of_a_family_is_read_or_refused_at_once(family):
    """Layers of 10**9, a window of 1e30: nothing is built from a number before its range is checked."""
    config, count = family_config(family).to_dict(), 0
    others = {"sliding_window", "use_sliding_window", "head_dim", "rope_theta", "rope_scaling", "max_window_layers",
              "num_experts", "num_local_experts", "sliding_window_pattern", "partial_rotary_factor",
              "full_attention_interval", "no_rope_layer_interval"} - config.keys()
    for path in [*members(config), *((name,) for name in others)]:
        for value in ABSURD:
            line = problem_of(with_member(config | dict.fromkeys(others), path, value))
            assert "\n" not in line and len(line) < 1000
            count += 1
    print(f"{family}: {count:,} configurations")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n"


@pytest.mark.parametrize("name", [WEIGHTS, INDEX, TORCH_WEIGHTS, "model.gguf", "config.json", "tokenizer.json",
                                  "tokenizer.model", "generation_config.json", "tokenizer_config.json"])
def test_a_git_lfs_pointer_in_place_of_a_file_is_named_with_its_cure(folder, name):
    if name in (TORCH_WEIGHTS, "model.gguf"):
        (folder / WEIGHTS).unlink()
    if name == "tokenizer.model":
        (folder / "tokenizer.json").unlink()
    (folder / name).write_bytes(POINTER)
    refused(folder, f"{name} is a Git LFS pointer, not the file itself; run `git lfs pull`")


def test_a_folder_without_a_supported_model_is_refused_before_its_tokenizer_is_looked_for(tmp_path):
    refused(tmp_path, "has no config.json; give a model's folder in Hugging Face's format, or a GGUF file")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    refused(tmp_path, "model_type is 'gpt2'; supported: llama")


def test_a_folder_of_a_lora_adapter_names_its_base_model_and_the_cure(folder, tmp_path):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base", "peft_type": "LORA"}')
    longdraft.load(str(folder), drafter="plain")  # beside weights it is ignored
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    refused(folder, "has a LoRA adapter for owner/base, not a model; merge the two")
    (folder / "config.json").unlink()
    refused(folder, "has a LoRA adapter for owner/base, not a model; merge the two")
    write_gguf(tmp_path / "a.gguf", {"general.architecture": "llama", "general.type": "adapter"}, {})
    with pytest.raises(ModelError, match="it is a LoRA adapter, not a model; merge it"):
        read_config(tmp_path / "a.gguf")


@pytest.mark.parametrize("what", ["cut in the data", "NaN", "a nested config", "another vocabulary"])
def test_the_command_line_prints_that_line_alone(folder, capfd, what):
    damage, _ = DAMAGES[what]
    damage(folder)
    assert run(["generate", "It", "--model", str(folder), "--max-new-tokens", "2"]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.startswith("longdraft: ") and captured.err.count("\n") == 1


def test_a_link_out_of_the_folder_is_followed_as_the_hubs_cache_needs(folder, tmp_path):
    (folder / WEIGHTS).rename(tmp_path / "blob")
    (folder / WEIGHTS).symlink_to("../blob")
    longdraft.load(str(folder), drafter="plain")


def test_large_weights_are_no_infinite_ones(folder):
    """The sum that looks for NaN overflows, the values do not."""
    with_tensors(lambda tensors: tensors.update({GATE: torch.full_like(tensors[GATE], 3e38)}))(folder)
    longdraft.load(str(folder), drafter="plain")


def test_tensors_that_lie_unaligned_are_read(folder, sound):
    header, data = split(folder / WEIGHTS)
    text = json.dumps(header).encode()
    for padding in range(4):
        join(folder / WEIGHTS, text + b" " * padding, data)
        texts = [[event.tokens for event in longdraft.load(str(where), drafter="plain", dtype="float32").generate(
            "It was", longdraft.SamplingParams(max_new_tokens=8, temperature=0.0))] for where in (folder, sound)]
        assert texts[0] == texts[1]


@pytest.mark.full
def test_a_file_that_is_cut_while_it_is_loaded_gets_one_clear_line(folder, sound, tmp_path):
    """In a process of its own: the system ends one that reads a page which its file has lost."""
    other = shutil.copytree(folder, tmp_path / "other")
    torch.save(load_file(sound / WEIGHTS), other / TORCH_WEIGHTS)
    (other / WEIGHTS).unlink()
    convert(sound, LlamaForCausalLM.from_pretrained(sound), tmp_path / "model.gguf")
    cut = {folder: folder / WEIGHTS, other: other / TORCH_WEIGHTS, tmp_path / "model.gguf": tmp_path / "model.gguf"}
    process = Fork(tmp_path / "process", run_code, f"""
import os
from longdraft.__main__ import run
from longdraft.checkpoint.tensor_files import TensorFiles
read = TensorFiles.read
for model, path in {[(str(model), str(path)) for model, path in cut.items()]}:
    seen = []

    def cutting(self, *given):  # with the third tensor
        seen.append(given)
        if len(seen) == 3:
            os.truncate(path, 4096)
        return read(self, *given)

    TensorFiles.read = cutting
    assert run(["generate", "It", "--model", model, "--max-new-tokens", "2", "--drafter", "plain"]) == 2
""")
    assert process.wait() == 0, process.stderr
    lines = process.stderr.splitlines()
    assert process.stdout == "" and len(lines) == len(cut)
    for line, path in zip(lines, cut.values(), strict=True):
        assert line.startswith(f"longdraft: {path} was cut to 4,096 bytes while it was loaded")


def outcome(folder: Path) -> str:
    """What loading says; nothing where it goes well. Anything but our own errors is a failure."""
    try:
        longdraft.load(str(folder), drafter="plain")
    except longdraft.LongdraftError as error:
        return str(error)
    return ""


def loads_or_says_why(folder: Path) -> None:
    line = outcome(folder)
    assert "\n" not in line.strip() and len(line) < 5000


@FUZZ
@given(st.data())
def test_weights_with_random_bytes_never_crash(sound, tmp_path, data):
    """Bytes of the header, or of its length, changed, cut out or put in."""
    shutil.copytree(sound, tmp_path / "fuzz", dirs_exist_ok=True)
    content = bytearray((sound / WEIGHTS).read_bytes())
    length, = struct.unpack("<Q", content[:8])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 7 + length))
        new = data.draw(st.binary(max_size=4))
        content[at : at + data.draw(st.integers(0, 4))] = new
    (tmp_path / "fuzz" / WEIGHTS).write_bytes(content)
    loads_or_says_why(tmp_path / "fuzz")


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8), st.just([]), st.just({}),
    st.lists(st.integers(-2, 2**40), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2))


@FUZZ
@given(data=st.data())
def test_headers_that_lie_never_crash(sound, tmp_path, data):
    shutil.copytree(sound, tmp_path / "fuzz", dirs_exist_ok=True)
    header, content = split(sound / WEIGHTS)
    entry = header[data.draw(st.sampled_from(sorted(header)))]
    keys = ["dtype", "shape", "data_offsets", "other"]
    entry[data.draw(st.sampled_from(keys))] = data.draw(VALUES | st.sampled_from(["F16", "BF16", "I64", "F4", "BOOL"]))
    join(tmp_path / "fuzz" / WEIGHTS, header, content)
    loads_or_says_why(tmp_path / "fuzz")


@FUZZ
@given(data=st.data())
def test_configs_with_other_values_never_crash(sound, tmp_path, data):
    shutil.copytree(sound, tmp_path / "fuzz", dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((sound / name).read_text())
        for _ in range(data.draw(st.integers(0, 2))):
            content[data.draw(st.sampled_from(sorted(content)))] = data.draw(VALUES)
        (tmp_path / "fuzz" / name).write_text(json.dumps(content))
    loads_or_says_why(tmp_path / "fuzz")


ROPE = {"factor": 8.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "attention_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}


@FUZZ
@given(kind=st.sampled_from(["linear", "dynamic", "llama3", "yarn", "longrope"]), key=st.sampled_from(sorted(ROPE)),
       value=VALUES | st.sampled_from([0, 1, -1, 4.0, 10**400, [10**400] * 6, [0.0] * 6, [[]] * 6]))
def test_rotations_of_other_numbers_never_crash(sound, tmp_path, kind, key, value):
    shutil.copytree(sound, tmp_path / "fuzz", dirs_exist_ok=True)
    with_config(rope_parameters=ROPE | {"rope_type": kind, key: value})(tmp_path / "fuzz")
    loads_or_says_why(tmp_path / "fuzz")


@FUZZ
@given(data=st.data())
def test_indexes_with_other_names_never_crash(sound, tmp_path, data):
    shutil.copytree(sound, tmp_path / "fuzz", dirs_exist_ok=True)
    names = st.text(max_size=12) | st.sampled_from([WEIGHTS, "../" + WEIGHTS, "./" + WEIGHTS, ".", "x/.safetensors"])
    (tmp_path / "fuzz" / INDEX).write_text(json.dumps(
        {"weight_map": data.draw(st.dictionaries(st.text(max_size=3), names | VALUES, max_size=3) | VALUES)}))
    loads_or_says_why(tmp_path / "fuzz")


@FUZZ
@given(data=st.data())
def test_tokenizers_with_random_bytes_never_crash(sound, tmp_path, data):
    shutil.copytree(sound, tmp_path / "fuzz", dirs_exist_ok=True)
    content = bytearray((sound / "tokenizer.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 20))] = data.draw(st.binary(max_size=4))
    (tmp_path / "fuzz" / "tokenizer.json").write_bytes(content)
    loads_or_says_why(tmp_path / "fuzz")
