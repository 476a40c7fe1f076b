"""`longdraft models`: what is on this machine, and whether it runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import make_checkpoint
from helpers.gguf_files import convert, write_gguf
from longdraft.__main__ import run
from longdraft.checkpoint.inventory import models_here

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A machine with a model of each place; and with what is none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    model = make_checkpoint(tmp_path / "source")
    snapshot = tmp_path / "cache" / "models--owner--name" / "snapshots" / COMMIT
    shutil.copytree(tmp_path / "source", snapshot)
    (tmp_path / "cache" / "models--owner--name" / "refs").mkdir()
    (tmp_path / "cache" / "models--owner--name" / "refs" / "main").write_text(COMMIT)
    convert(tmp_path / "source", model, snapshot / "small-BF16.gguf", "BF16")
    (snapshot / "mmproj-small.gguf").write_bytes(b"GGUF")
    pickled = tmp_path / "cache" / "models--owner--old" / "snapshots" / COMMIT
    shutil.copytree(tmp_path / "source", pickled)
    (pickled / "model.safetensors").unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    (tmp_path / "cache" / "datasets--owner--texts").mkdir()

    ollama = tmp_path / ".ollama" / "models"
    manifest = ollama / "manifests" / "registry.ollama.ai" / "library" / "small" / "latest"
    manifest.parent.mkdir(parents=True)
    (ollama / "blobs").mkdir()
    shutil.copy(snapshot / "small-BF16.gguf", ollama / "blobs" / "sha256-abc")
    layers = [{"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:def"},
              {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:abc"},
              {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../etc/passwd"}]
    manifest.write_text(json.dumps({"layers": layers}))
    (manifest.parent / "broken").write_text("{")

    studio = tmp_path / ".lmstudio" / "models" / "owner" / "other"
    studio.mkdir(parents=True)
    write_gguf(studio / "other.gguf", {"general.architecture": "mamba"}, {})
    (studio / "part.gguf").write_bytes(b"not a model")
    return tmp_path


def test_the_models_of_every_place_are_found(home):
    found = {model.model.replace(f"{home}/", ""): model for model in models_here(home / "cache")
             if model.place != "bundled"}
    assert set(found) == {"owner/name", "owner/name:small-BF16.gguf", f"owner/old@{COMMIT}",
                          ".ollama/models/blobs/sha256-abc", ".lmstudio/models/owner/other/other.gguf"}
    assert [found[name].format for name in sorted(found)] == [
        "gguf", "gguf BF16", "safetensors", "gguf BF16", "bin"]
    assert found[".ollama/models/blobs/sha256-abc"].place == "ollama small:latest"
    for name, model in found.items():
        if "other" in name:
            assert "general.architecture is 'mamba'; supported" in model.problem and model.context is None
        else:
            assert model.problem == "" and model.context == 4096 and model.nbytes > 40_000


def test_lm_studio_may_have_another_home_and_another_folder_of_models(home):
    other, folder = home / "elsewhere", home / "big disk" / "owner"
    for where in (other / "models", folder):
        where.mkdir(parents=True)
        shutil.copy(home / ".ollama" / "models" / "blobs" / "sha256-abc", where / f"{where.name}.gguf")
    (home / ".lmstudio-home-pointer").write_text(f"{other}\n")
    (other / "settings.json").write_text(json.dumps({"downloadsFolder": str(folder.parent)}))
    (home / ".lmstudio" / "settings.json").write_text("{")
    found = {Path(model.model).name for model in models_here(home / "cache") if model.place == "lmstudio"}
    assert found == {"other.gguf", "models.gguf", "owner.gguf"}


def test_a_model_whose_tensors_do_not_fit_does_not_run(home):
    path = home / "cache" / "models--owner--name" / "snapshots" / COMMIT / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    found = {model.model: model for model in models_here(home / "cache")}
    assert "missing model.layers.2" in found["owner/name"].problem


@pytest.mark.full
def test_the_command_lists_them_and_doctor_says_why_one_does_not_run(home, capfd):
    assert run(["models", "--cache-dir", str(home / "cache")]) == 0
    lines = capfd.readouterr().out.splitlines()
    ollama = next(line.split() for line in lines if "sha256-abc" in line)
    assert ollama[0] == "~/.ollama/models/blobs/sha256-abc" and ollama[-1] == "yes"
    assert next(line.split()[-1] for line in lines if "other.gguf" in line) == "no"
    assert run(["models", "--json", "--cache-dir", str(home / "cache")]) == 0
    assert {model["runs"] for model in json.loads(capfd.readouterr().out)} == {True, False}
    other = str(home / ".lmstudio" / "models" / "owner" / "other" / "other.gguf")
    assert run(["doctor", "--model", other]) == 2
    assert "general.architecture is 'mamba'; supported" in capfd.readouterr().err
    assert run(["doctor", "--model", str(home / ".ollama" / "models" / "blobs" / "sha256-abc")]) == 0
