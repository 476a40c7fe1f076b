"""Text that the model writes itself, to learn from: drafts are of its own text, not of the books it was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from longdraft.core import SamplingParams
from longdraft.engine import load
from longdraft.train.data import Tokens
from longdraft.train.progress import Progress

FILE = "own.npy"
_PROMPT = 256  # tokens of a document before what is written
_SAMPLING: dict[str, Any] = {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.2, "penalty_window": 1024}


def write(model: str, documents: list[Tokens], tokens: int, length: int, seed: int, path: Path,
          progress: Progress) -> list[Tokens]:
    """`tokens` tokens in texts of `length`, each behind the beginning of a document or a part of one.

    They are kept at `path`: a training that goes on learns from the same ones.
    """
    if path.exists():
        texts: Tokens = np.load(path)
        return list(texts)
    engine = load(model, drafter="auto")
    draw = np.random.default_rng([seed, 4])
    prompt = max(1, min(_PROMPT, length // 2))
    new = min(length, engine.model.config.max_positions) - prompt
    written: list[Tokens] = []
    while len(written) * new < tokens:
        document = documents[int(draw.integers(len(documents)))]
        start = int(draw.integers(max(1, len(document) - prompt)))
        ids = document[start : start + prompt].tolist()
        params = SamplingParams(max_new_tokens=new, ignore_eos=True, seed=seed + len(written), **_SAMPLING)
        text = engine.generate(ids, params)
        for _ in text:
            pass
        written.append(np.concatenate([np.array(ids, dtype=np.int32), text.tokens]))
        progress.step(min(1.0, len(written) * new / tokens), f"the model writes: {len(written) * new:,} tokens")
    shortest = min(len(text) for text in written)
    stacked = np.stack([text[:shortest] for text in written])
    partial = path.with_suffix(".partial.npy")
    np.save(partial, stacked)
    partial.replace(path)
    return list(stacked)
