"""Training text that the model writes itself: a drafter has to predict the model's own text.

Writing can take hours, so the texts are saved every minute. The file's name is a hash of the model, the prompts and the
settings: a training that is resumed or repeated uses the same texts and writes only the missing ones.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from longdraft.checkpoint.config_file import read_config
from longdraft.checkpoint.hub import resolve
from longdraft.engine.loading import load
from longdraft.errors import ModelError
from longdraft.request.sampling_params import SamplingParams
from longdraft.train.checkpoint import write_tensors
from longdraft.train.data_files import Tokens
from longdraft.train.progress import TrainingProgress
from longdraft.train.settings import FrozenTargetSettings

_TENSOR = "texts"  # [texts, tokens of the longest] int32
_PADDING = -1  # after the end of a shorter text
_OLD_FILE = "own.npy"  # of an earlier version
_SAVE_EVERY_S = 60.0
_TOGETHER = 16  # texts that are written in shared forwards
_PROMPT_LENGTH = 256  # tokens of a document before each text
_SAMPLING: dict[str, Any] = {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.2, "penalty_window": 1024}


def write(settings: FrozenTargetSettings, fingerprint: str, documents: list[Tokens],
          output: Path, progress: TrainingProgress) -> list[Tokens]:
    """About `own_tokens` new tokens, in texts of the sequences' length that each begin with a part of a document.

    fingerprint  sha256 of the model's weights
    """
    if (output / _OLD_FILE).exists():
        return list(np.load(output / _OLD_FILE))
    length = min(settings.sequence_length, read_config(resolve(settings.model)).max_positions)
    prompt = max(1, min(_PROMPT_LENGTH, length // 2))
    new = length - prompt
    prompts = _prompts(documents, prompt, -(-settings.own_tokens // new), settings.seed)
    path = output / f"own-{_identity(settings, fingerprint, documents)}.safetensors"
    written = _saved(path)[: len(prompts)]
    saved_at = time.monotonic()
    for text in _texts(settings, prompts, len(written), new):
        written.append(text)
        is_last = len(written) == len(prompts)
        if is_last or time.monotonic() - saved_at >= _SAVE_EVERY_S:
            _save(path, written)
            saved_at = time.monotonic()
        progress.step(len(written) / len(prompts), f"the model writes: {len(written) * new:,} tokens")
    shortest = min(len(text) for text in written)
    return [text[:shortest] for text in written]


def _texts(settings: FrozenTargetSettings, prompts: list[list[int]], first: int, new: int) -> Iterator[Tokens]:
    """The prompts from `first` on, each with `new` tokens after it, in their order."""
    if first == len(prompts):
        return
    engine = load(settings.model, drafter="auto", cache_ram=0)
    params = [SamplingParams(max_new_tokens=new, ignore_eos=True, seed=settings.seed + index, **_SAMPLING)
              for index in range(first, len(prompts))]
    texts = [list(ids) for ids in prompts[first:]]
    ended: set[int] = set()
    next_one = 0
    for index, event in engine.generate_many(prompts[first:], params, batch_size=_TOGETHER):
        if event.error is not None:
            raise event.error
        texts[index] += event.tokens
        if event.finish_reason is not None:
            ended.add(index)
        while next_one in ended:
            yield np.array(texts[next_one], dtype=np.int32)
            next_one += 1


def remove(output: Path) -> None:
    """Remove the saved texts at the end of the training."""
    for path in (*output.glob("own-*.safetensors*"), output / _OLD_FILE):
        path.unlink(missing_ok=True)


def _prompts(documents: list[Tokens], length: int, count: int, seed: int) -> list[list[int]]:
    draw = np.random.default_rng([seed, 4])
    prompts: list[list[int]] = []
    for _ in range(count):
        document = documents[int(draw.integers(len(documents)))]
        start = int(draw.integers(max(1, len(document) - length)))
        prompts.append(document[start : start + length].tolist())
    return prompts


def _identity(settings: FrozenTargetSettings, fingerprint: str, documents: list[Tokens]) -> str:
    """A hash of everything that the texts depend on, except their number."""
    digest = hashlib.sha256(f"{fingerprint} {settings.sequence_length} {settings.seed}".encode())
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(document).data)
    return digest.hexdigest()[:16]


def _save(path: Path, texts: list[Tokens]) -> None:
    rows = np.full((len(texts), max(len(text) for text in texts)), _PADDING, dtype=np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    write_tensors(path, {_TENSOR: torch.from_numpy(rows)}, {})


def _saved(path: Path) -> list[Tokens]:
    if not path.exists():
        return []
    try:
        rows: Tokens = load_file(path)[_TENSOR].numpy()
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelError(f"{path} is not readable ({error}); remove it to write the texts again") from error
    return [row[row != _PADDING] for row in rows]
