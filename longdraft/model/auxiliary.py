"""What was trained to draft for a model, named or found beside it: heads, and a glide layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from longdraft.model import glide, heads
from longdraft.model.glide import Glide
from longdraft.model.heads import Heads
from longdraft.model.transformer import Transformer


class Trained(NamedTuple):
    heads: Heads | None = None
    glide: Glide | None = None


class Target(NamedTuple):
    """The model to draft for. Hashes are asked for only where they decide."""

    model: Transformer
    fingerprint: Callable[[], str]  # of its weights
    vocabulary: Callable[[], str]  # of its tokenizer

    def load(self, folder: Path) -> Trained:
        """What a folder holds; ModelError where that is neither, or was made for another model."""
        if glide.is_glide(folder):
            return Trained(glide=self._glide(folder))
        return Trained(heads=heads.load_heads(folder, *self))

    def beside(self, folder: Path) -> Trained:
        """What lies in or beside the model's own files, as far as there is something."""
        found, layer = heads.find_heads(folder), folder / "glide"
        return Trained(heads.load_heads(found, *self) if found else None,
                       self._glide(layer) if glide.is_glide(layer) else None)

    def _glide(self, folder: Path) -> Glide:
        def check(where: Path, config: dict[str, Any]) -> None:
            heads.check_target(where, config, *self)

        return glide.load_glide(folder, self.model, check)
