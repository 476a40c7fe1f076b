"""Finding a model's heads: in its checkpoint, in its folder, or by name; and the hash of the weights they name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import longdraft
from helpers.checkpoints import load, make_checkpoint, make_heads, released, write_medusa
from longdraft.checkpoint import fingerprint
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import ModelError
from longdraft.parts import glide, heads
from longdraft.parts.heads import ChainedHeads
from longdraft.parts.medusa import MedusaHeads
from longdraft.request.sampling_params import SamplingParams


def write(engine: longdraft.Engine) -> dict[str, object]:
    prompt = engine.encode("It was a dark and stormy night. " * 4)
    return [event.stats for event in engine.generate(prompt, SamplingParams(max_new_tokens=40, seed=1))][-1]


def test_a_checkpoint_of_a_model_with_heads_loads_both(tiny, tmp_path):
    folder = released(tmp_path / "released", tiny["mha"])
    # Some released checkpoints also have Medusa's keys in config.json.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"medusa_num_heads": 3, "medusa_num_layers": 1}))
    engine = longdraft.load(str(folder))
    assert isinstance(engine.heads, ChainedHeads) and len(engine.heads) == 3
    stats = write(engine)
    assert {"tokenswift", "medusa"} <= stats["tokens_by_choice"].keys()
    assert stats["sha256_tokens"] == write(longdraft.load(str(tiny["mha"]), drafter="plain"))["sha256_tokens"]


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("kind", ["medusa", "chained", "whole model", "beside a model"])
def test_heads_of_every_kind_load_without_a_named_drafter(tiny, tmp_path, kind, num_heads):
    bare = tmp_path / "bare"
    base = make_checkpoint(bare, num_key_value_heads=4, seed=4)
    where = tmp_path / "heads"
    if kind == "medusa":
        write_medusa(where, num_heads=num_heads, num_blocks=1)
    elif kind == "chained":
        make_heads(where, base, num_heads, base_sha256=TensorFiles(bare).fingerprint())
    else:
        shutil.copytree(bare, tmp_path / "with")
        make_heads(tmp_path / "with" / "heads", base, num_heads)
        where = released(where, tmp_path / "with") if kind == "whole model" else tmp_path / "with"
    engine = longdraft.load(str(bare), heads=str(where))
    assert isinstance(engine.heads, MedusaHeads if kind == "medusa" else ChainedHeads)
    assert len(engine.heads) == num_heads
    stats = write(engine)
    assert {"tokenswift", "medusa"} <= stats["tokens_by_choice"].keys()
    assert stats["sha256_tokens"] == write(longdraft.load(str(bare), drafter="plain"))["sha256_tokens"]


def test_heads_can_be_given_by_the_name_of_a_bundled_model():
    engine = longdraft.load("novelist", heads="novelist")
    assert isinstance(engine.heads, ChainedHeads) and len(engine.heads) == 3


def test_a_folder_without_heads_raises_an_error_with_the_expected_files(tiny, tmp_path):
    make_checkpoint(tmp_path)
    with pytest.raises(ModelError, match=r"has no heads; give a folder with TokenSwift's .* or Medusa's"):
        longdraft.load(str(tiny["mha"]), heads=str(tmp_path))


def test_heads_of_a_whole_model_of_another_size_are_refused(tiny, tmp_path):
    base = make_checkpoint(tmp_path / "wide", hidden_size=64)
    make_heads(tmp_path / "wide" / "heads", base)
    with pytest.raises(ModelError, match="hidden_size 64, but the model has 48"):
        longdraft.load(str(tiny["mha"]), heads=str(released(tmp_path / "released", tmp_path / "wide")))


@pytest.mark.parametrize("kind", ["medusa", "chained"])
def test_heads_given_as_a_model_raise_an_error_with_their_use(tiny, tmp_path, kind):
    if kind == "medusa":
        write_medusa(tmp_path)
    else:
        shutil.copytree(tiny["mha"] / "heads", tmp_path, dirs_exist_ok=True)
    base = "lmsys/vicuna" if kind == "medusa" else "tiny"
    with pytest.raises(ModelError, match=f"has heads, not a model; give --model {base} --heads"):
        longdraft.load(str(tmp_path))


def test_damaged_heads_in_a_model_folder_are_skipped(tiny, tmp_path, caplog):
    folder = released(tmp_path / "released", tiny["mha"])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.medusa_layers.0.linear.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    assert longdraft.load(str(folder)).heads is None
    assert "drafting without heads" in caplog.text and "NaN" in caplog.text
    with pytest.raises(ModelError, match="NaN"):
        longdraft.load(str(folder), drafter="tokenswift")


@pytest.mark.parametrize("drafter", ["glide", "draft-model"])
def test_an_unusable_part_is_skipped_unless_the_drafter_needs_it(tmp_path, caplog, drafter):
    """An unusable part also does not affect drafters that use another part."""
    base = make_checkpoint(tmp_path / "model")
    make_heads(tmp_path / "model" / "heads", base)
    part = {"glide": "glide", "draft-model": "draft"}[drafter]
    (tmp_path / "model" / part).mkdir()
    kind = {"kind": glide.GLIDE_KIND} if part == "glide" else {}
    (tmp_path / "model" / part / "config.json").write_text(json.dumps(kind))
    engine = longdraft.load(str(tmp_path / "model"))
    assert engine.heads is not None and getattr(engine, part) is None
    assert f"drafting without {part}: " in caplog.text
    assert longdraft.load(str(tmp_path / "model"), drafter="tokenswift").heads is not None
    with pytest.raises(ModelError):
        longdraft.load(str(tmp_path / "model"), drafter=drafter)


# Hashes of the weights.


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """The hashes that were computed. Models of any size and files of any age are cached."""
    monkeypatch.setattr(fingerprint, "_MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(fingerprint, "_TICK_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    computed: list[str] = []
    real = TensorFiles.fingerprint

    def fingerprint_of(files: TensorFiles) -> str:
        computed.append(real(files))
        return computed[-1]

    monkeypatch.setattr(TensorFiles, "fingerprint", fingerprint_of)
    return computed


def test_weights_are_hashed_once(tmp_path, counted):
    make_checkpoint(tmp_path / "model")
    first = fingerprint.weights_sha256(TensorFiles(tmp_path / "model"))
    assert fingerprint.weights_sha256(TensorFiles(tmp_path / "model")) == first == counted[0] and len(counted) == 1


def test_changed_weights_are_hashed_again_regardless_of_their_modification_time(tmp_path, counted):
    make_checkpoint(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    before = fingerprint.weights_sha256(TensorFiles(tmp_path / "model"))
    about = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert path.stat().st_mtime_ns == about.st_mtime_ns and path.stat().st_size == about.st_size
    assert fingerprint.weights_sha256(TensorFiles(tmp_path / "model")) != before


def test_the_hash_of_recently_written_files_is_not_cached(tmp_path, counted, monkeypatch):
    monkeypatch.setattr(fingerprint, "_TICK_S", 60.0)
    make_checkpoint(tmp_path / "model")
    fingerprint.weights_sha256(TensorFiles(tmp_path / "model"))
    fingerprint.weights_sha256(TensorFiles(tmp_path / "model"))
    assert len(counted) == 2


@pytest.mark.parametrize("damage", ["garbage", "folder"])
def test_an_unusable_hash_cache_is_ignored(tmp_path, counted, damage):
    make_checkpoint(tmp_path / "model")
    first = fingerprint.weights_sha256(TensorFiles(tmp_path / "model"))
    kept, = fingerprint.cache_dir().iterdir()
    kept.unlink()
    kept.write_text("[1]") if damage == "garbage" else kept.mkdir()
    assert fingerprint.weights_sha256(TensorFiles(tmp_path / "model")) == first and len(counted) == 2


def test_a_user_without_a_home_folder_has_no_hash_cache(tmp_path, counted, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    make_checkpoint(tmp_path / "model")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    files = TensorFiles(tmp_path / "model")
    assert fingerprint.weights_sha256(files) == fingerprint.weights_sha256(files) == counted[0]
    assert len(counted) == 1, "once in a process nevertheless"


def test_weights_are_hashed_only_for_heads_that_name_their_weights(tiny, tmp_path, counted):
    longdraft.load(str(tiny["mha"]))  # its heads name no weights
    assert not counted
    shutil.copytree(tiny["mha"], tmp_path / "model")
    config = json.loads((tmp_path / "model/heads/config.json").read_text())
    (tmp_path / "model/heads/config.json").write_text(json.dumps(config | {"base_sha256": "0" * 64}))
    assert longdraft.load(str(tmp_path / "model")).heads is None and len(counted) == 1


def test_heads_in_the_heads_folder_of_a_model_are_found(tiny):
    assert heads.find_heads(tiny["mha"]) == tiny["mha"] / "heads" == heads.find_heads(tiny["mha"] / "heads")
    assert len(heads.load_heads(tiny["mha"], load(tiny["mha"]))) == 3
