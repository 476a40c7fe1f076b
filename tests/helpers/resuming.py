"""Texts that are written, cut and resumed by tests."""

from __future__ import annotations

from pathlib import Path

import longdraft
from helpers.checkpoints import make_checkpoint

SETTINGS = dict(max_new_tokens=60, seed=3, temperature=1.0, repetition_penalty=1.1, penalty_window=40)


def model_folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path / "tiny", num_key_value_heads=2)
    return path / "tiny"


def suffix_engine(folder: Path) -> longdraft.Engine:
    return longdraft.load(str(folder), drafter="suffix")


def written(generation: longdraft.Generation) -> tuple[str, list[int], dict]:
    """Run a generation to its end; return its text, tokens and statistics."""
    text, tokens, event = "", [], None
    for event in generation:
        text += event.text
        tokens += event.tokens
    return text, tokens, event.stats


def written_together(engine, prompts: list[list[int]], params: list[longdraft.SamplingParams]) -> list[list[int]]:
    """The tokens of texts that are written in one batch."""
    texts: list[list[int]] = [[] for _ in prompts]
    for place, event in engine.generate_many(prompts, params, batch_size=len(prompts)):
        texts[place] += event.tokens
    return texts


def cut(engine, journal: Path, after: int, **changes) -> list[int]:
    """Close a generation after this many events; return its tokens."""
    generation = engine.generate("It was", longdraft.SamplingParams(**SETTINGS | changes), journal=journal)
    given: list[int] = []
    for _ in range(after):
        given += next(generation).tokens
    generation.close()
    return given
