"""Parts that draft for a target model: trained heads, a glide layer, an EAGLE or block head, a smaller draft model.

Each part is either named by the user or found in the folder of the target model (`heads/`, `glide/`, `eagle/`
or `block/`, `draft/`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from longdraft.checkpoint import checkpoint, config_file
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import ModelError, UsageError
from longdraft.kernels.chain_plan import Heads
from longdraft.model.transformer import Transformer
from longdraft.parallel import local_kernels
from longdraft.parts import block_config, eagle_config, glide, heads
from longdraft.parts.block import BlockHead
from longdraft.parts.block_files import load_block
from longdraft.parts.draft_copy import SAME
from longdraft.parts.eagle import Eagle
from longdraft.parts.eagle_files import load_eagle
from longdraft.parts.glide import Glide
from longdraft.parts.native_heads import is_speculators_head, load_native_head, load_speculators_head
from longdraft.text.tokenizer import Tokenizer, require_ids_in_vocabulary, require_same_vocabulary

log = logging.getLogger(__name__)
DRAFT_FOLDER = "draft"  # subfolder of a model's folder that holds a smaller draft model
T = TypeVar("T")


class TrainedParts(NamedTuple):
    """Parts trained for one target model. None: the part does not exist, or the drafter does not use it."""

    heads: Heads | None = None
    glide: Glide | None = None
    eagle: Eagle | None = None
    block: BlockHead | None = None


class Target(NamedTuple):
    """The model that parts are loaded for. The hashes are functions, because computing them reads all weights.

    fingerprint  SHA-256 of the target's weights
    vocabulary   SHA-256 of its tokenizer's vocabulary; "" if it has no tokenizer
    encode       the tokenizer; None: there is none
    weights      format of the layers of an EAGLE or block head (draft_copy.CHOICES)
    """

    model: Transformer
    fingerprint: Callable[[], str]
    vocabulary: Callable[[], str]
    encode: Callable[[str], list[int]] | None = None
    weights: str = SAME

    def load(self, folder: Path) -> TrainedParts:
        """The part in a folder that the user named. ModelError if it is none, or belongs to another model."""
        if glide.is_glide(folder):
            return TrainedParts(glide=self._glide(folder))
        if block_config.is_block(folder):
            return TrainedParts(block=self._block(folder))
        if eagle_config.is_eagle(folder):
            return TrainedParts(eagle=self._eagle(folder))
        return TrainedParts(heads=heads.load_heads(folder, *self[:3]))

    def find(self, folder: Path, required: str) -> TrainedParts:
        """The parts in the model's own folder. An unusable part is left out, unless it is the `required` one.

        required  "heads", "glide", "eagle", "block" or "": the part that the drafter cannot work without. Of an EAGLE
                  head and a block head, which read states of the target, it gets one: the required one, else the block
        """
        def found_heads() -> Heads | None:
            own = heads.find_heads(folder)
            return heads.load_heads(own, *self[:3]) if own else None

        def found_glide() -> Glide | None:
            return self._glide(folder / "glide") if glide.is_glide(folder / "glide") else None

        def found_eagle() -> Eagle | None:
            own = eagle_config.is_eagle(folder / "eagle")
            return self._eagle(folder / "eagle") if own else load_native_head(folder, self.model)

        def found_block() -> BlockHead | None:
            return self._block(folder / "block") if block_config.is_block(folder / "block") else None

        block = None if required == "eagle" else optional_part("block", found_block, required)
        eagle = None if block or required == "block" else optional_part("eagle", found_eagle, required)
        return TrainedParts(optional_part("heads", found_heads, required),
                            optional_part("glide", found_glide, required), eagle, block)

    def _glide(self, folder: Path) -> Glide:
        return glide.load_glide(folder, self.model, self._check)

    def _eagle(self, folder: Path) -> Eagle:
        if is_speculators_head(folder):
            return load_speculators_head(folder, self.model)
        return load_eagle(folder, self.model, self._check, self.encode, self.weights)

    def _block(self, folder: Path) -> BlockHead:
        return load_block(folder, self.model, self._check, self.encode, self.weights)

    def _check(self, folder: Path, config: dict[str, Any]) -> None:
        heads.check_target(folder, config, *self[:3])


def optional_part(name: str, load: Callable[[], T], required: str) -> T | None:
    """The loaded part, or None and one warning if it cannot be used. Errors pass if the part is the required one."""
    try:
        return load()
    except (ModelError, UsageError) as error:
        if name == required:
            raise
        log.warning("drafting without %s: %s", name, error)
        return None


def load_draft_model(folder: Path, name: str, target: Transformer, tokenizer: Tokenizer) -> Transformer:
    """The smaller model in `folder`, on the kernels of the target.

    name       what the user calls it, for error messages
    tokenizer  the target's; the draft model must have the same vocabulary

    ModelError if the files are missing, corrupt or unsupported; UsageError if the vocabularies differ.
    """
    if not tokenizer.vocabulary():
        raise UsageError(f"draft model {name!r} must have the target's vocabulary, and the target has no tokenizer to "
                         "compare; use longdraft.from_transformers(model, tokenizer)")
    config = config_file.read_config(folder)
    require_same_vocabulary(tokenizer, Tokenizer(folder), name)
    require_ids_in_vocabulary(tokenizer.vocabulary(), config.vocab_size, folder)
    return checkpoint.load_transformer(TensorFiles(folder), config, local_kernels(target.kernels),
                                       target.weights.quantize)
