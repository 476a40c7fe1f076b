"""The models on this machine: bundled ones, the hub's cache, and the folders of Ollama and LM Studio.

Only small files and headers are read. A folder that cannot be read is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from longdraft.checkpoint import config_file, hub, sizing
from longdraft.checkpoint.checkpoint import require_tensors
from longdraft.checkpoint.config_file import read_json
from longdraft.checkpoint.gguf.container import MAGIC, open_gguf
from longdraft.checkpoint.tensor_files import INDEX, WEIGHTS, TensorFiles, has_weights
from longdraft.errors import ModelError

_MODEL_LAYER = "application/vnd.ollama.image.model"
_MAX_FOUND = 1000  # models of each place


class Found(NamedTuple):
    """A model on this machine.

    model       what `--model` takes
    place       bundled, hub, ollama with Ollama's name of the model, or lmstudio
    format      safetensors, bin, or gguf with its most frequent type
    parameters  None: they are not known
    nbytes      bytes of its weights on the disk
    context     the longest text; None: it is not known
    problem     why it does not run; "": it does, as far as its header says
    """

    model: str
    place: str
    format: str
    parameters: int | None
    nbytes: int
    context: int | None
    problem: str


def models_here(hub_cache: Path | None) -> list[Found]:
    """All of them, by place. hub_cache: the hub's cache; None: that of HF_HOME."""
    found = [describe(name, hub.BUNDLED_DIR / name, "bundled") for name in hub.bundled_models()]
    for models in (_of_hub(hub_cache), _of_ollama(), _of_lmstudio()):
        found += [describe(*model) for model in islice(models, _MAX_FOUND)]
    return found


def describe(name: str, path: Path, place: str) -> Found:
    """The description of a model in the header of a folder or a GGUF file."""
    form, nbytes, parameters, context, problem = "", 0, None, None, ""
    try:
        form, nbytes = _format(path), _nbytes(path)
        parsed = config_file.read_config(path)
        context, parameters = parsed.max_positions, sizing.model_sizes(parsed).parameters
        require_tensors(TensorFiles(path), parsed)
    except ModelError as error:
        problem = str(error).replace(f"{path}: ", "")
    except OSError as error:
        problem = error.strerror or str(error)
    return Found(name, place, form, parameters, nbytes, context, problem)


def _format(path: Path) -> str:
    if not path.is_file():
        return "safetensors" if (path / WEIGHTS).exists() or (path / INDEX).exists() else "bin"
    types = [entry.type.name for entry in open_gguf(path).tensors.values() if len(entry.shape) > 1]
    return f"gguf {max(set(types), key=types.count)}" if types else "gguf"


def _nbytes(path: Path) -> int:
    if path.is_file():
        return sum(file.stat.st_size for file in open_gguf(path).files)
    patterns = ("*.safetensors",) if (path / WEIGHTS).exists() or (path / INDEX).exists() else ("pytorch_model*.bin",)
    return sum(file.stat().st_size for pattern in patterns for file in path.glob(pattern))


def _of_hub(cache: Path | None) -> Iterator[tuple[str, Path, str]]:
    """Snapshots that have weights, and their GGUF files, with the names that `--model` takes offline."""
    if cache is None:
        from huggingface_hub import constants

        cache = Path(constants.HF_HUB_CACHE)
    for folder in _subfolders(cache):
        parts = folder.name.split("--")
        if parts[0] != "models" or len(parts) != 3:
            continue
        current = folder / "refs" / "main"
        commit = current.read_text().strip() if current.is_file() else ""
        for snapshot in _subfolders(folder / "snapshots"):
            name = "/".join(parts[1:]) + ("" if snapshot.name == commit else f"@{snapshot.name}")
            if (snapshot / "config.json").is_file() and has_weights(snapshot):
                yield name, snapshot, "hub"
            for file in _gguf_files(snapshot):
                yield f"{name}:{file.relative_to(snapshot)}", file, "hub"


def _of_ollama() -> Iterator[tuple[str, Path, str]]:
    """The files that manifests name as a model, as paths, because Ollama's names are not hub ids."""
    root = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")
    seen = set()
    for manifest in sorted(path for path in root.glob("manifests/*/*/*/*") if path.is_file()):
        try:
            layers = read_json(manifest).get("layers")
        except ModelError:
            continue
        for layer in layers if isinstance(layers, list) else []:
            digest = layer.get("digest") if isinstance(layer, dict) else None
            if isinstance(digest, str) and layer.get("mediaType") == _MODEL_LAYER and digest.count(":") == 1:
                blob = root / "blobs" / Path(digest.replace(":", "-")).name
                if _is_gguf(blob) and blob not in seen:
                    seen.add(blob)
                    yield str(blob), blob, f"ollama {manifest.parent.name}:{manifest.name}"


def _of_lmstudio() -> Iterator[tuple[str, Path, str]]:
    """Its home is one of two, or the one that a file names; its settings may name another folder of models."""
    homes = [Path.home() / ".lmstudio", Path.home() / ".cache" / "lm-studio"]
    with suppress(OSError, ValueError):
        homes.append(Path((Path.home() / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()))
    roots = [home / "models" for home in homes]
    for home in homes:
        with suppress(ModelError):
            named = read_json(home / "settings.json").get("downloadsFolder")
            roots += [Path(named)] if isinstance(named, str) and Path(named).is_absolute() else []
    seen = set()
    for file in (file for root in roots if root.is_dir() for file in _gguf_files(root)):
        if file not in seen:
            seen.add(file)
            yield str(file), file, "lmstudio"


def _gguf_files(root: Path) -> list[Path]:
    """GGUF files of models below a folder; of split ones the first part."""
    return [path for path in sorted(root.glob("**/*.gguf")) if hub.is_first_part(path.name) and _is_gguf(path)]


def _is_gguf(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []
