"""A quantised copy of the target's own weights. It drafts, and the unquantised target verifies, so no text changes.

A draft token reads all weights of the model that drafts. With int4 layers and an int8 head that is a third of a
bfloat16 target's bytes, with int8 half of them, and hardly a guess differs. The copy drafts on a partial cache of the
target's own KV rows (longdraft/drafters).

A target that was expanded from a quantised file has a better copy: the numbers of the file. It takes what the file
takes, and differs from the target only by its activations of 8 bits.
"""

from __future__ import annotations

import logging
from pathlib import Path

from longdraft.checkpoint.checkpoint import load_draft_copy
from longdraft.checkpoint.quantized_cache import open_packed
from longdraft.checkpoint.sizing import USABLE, Sizes, quantized_bytes
from longdraft.checkpoint.tensor_source import TensorSource
from longdraft.errors import UsageError, check
from longdraft.kernels import Kernels, is_compiled
from longdraft.kernels.weights import FILE
from longdraft.model.config import ModelConfig
from longdraft.model.transformer import Transformer
from longdraft.parallel import shard_of
from longdraft.system.machine import available_memory

log = logging.getLogger(__name__)
AUTO_WEIGHTS, SAME = "auto", "same"
CHOICES = (AUTO_WEIGHTS, SAME, FILE, "int8", "int4")
# `auto` makes a copy in int4 of models whose weights are as large as the cache of this many tokens. Below, drafts cost
# less beside a verification, and a copy that agrees less often is slower: int8 then (notebook/2026-11.md).
_MIN_WEIGHTS_IN_TOKENS = 16_384
_OWN_SHARE = 0.45  # of an expanded target's weights: a file of up to six bits. Of a larger one an int4 copy reads half
_SMALLER = 0.75  # of a quantised file's weights: what a copy may take
_MIN_BYTES = 4 << 20  # weights that stay in the processor's caches: no copy
_SHARE_OF_DEVICE = 0.25  # of a device's free memory that `auto` spends on a copy: caches are reserved there in full


def check_draft_weights(value: str) -> None:
    """UsageError unless `value` is a choice of weights that draft."""
    check(value in CHOICES, "draft_weights", value, ", ".join(CHOICES),
          "int3 drafts more slowly than int4: it reads a fifth less, and its guesses are wrong twice as often"
          if value == "int3" else "")


def check_head_weights(value: str) -> None:
    """UsageError unless `value` is a choice of weights for the layers of a head."""
    choices = [choice for choice in CHOICES if choice != FILE]
    check(value in choices, "draft_weights", value, ", ".join(choices))


def auto_format(weights_bytes: int, weights_in_tokens: float) -> str:
    """The format in which `auto` copies such weights on a CPU: "int4", "int8", or "same" for no copy."""
    if weights_in_tokens >= _MIN_WEIGHTS_IN_TOKENS:
        return "int4"
    return "int8" if weights_bytes >= _MIN_BYTES else SAME


def head_format(asked: str, nbytes: int, kernels: Kernels) -> str:
    """The format of the layers of a head that drafts, for `pack`. asked: one of CHOICES, where `auto` is int4 for
    layers of 4 MiB or more on the compiled CPU kernels, and so is `file`, which says nothing of heads"""
    if asked in (AUTO_WEIGHTS, FILE):
        return "int4" if is_compiled(kernels) and nbytes >= _MIN_BYTES else "none"
    return "none" if asked == SAME else asked


def copy_size(config: ModelConfig, sizes: Sizes) -> tuple[str, int]:
    """The format and the bytes of the copy that `auto` makes of a model of these sizes on a CPU; "same", 0: none."""
    quantize = auto_format(sizes.read_bytes, sizes.read_bytes / sizes.cache_bytes_per_token)
    return quantize, 0 if quantize == SAME else quantized_bytes(config, quantize, is_draft_copy=True)


def outweighs_cache(model: Transformer) -> bool:
    """Whether the weights are so large that a draft token should read fewer of them, whatever else it costs."""
    return model.weights_in_tokens >= _MIN_WEIGHTS_IN_TOKENS


def _is_smaller(quantize: str, target: Transformer) -> bool:
    """Whether a copy is so much smaller than a target with the numbers of a quantised file that it can pay."""
    copied = quantized_bytes(target.whole, quantize, is_draft_copy=True, is_on_device=target.kernels.is_device)
    return target.weights.quantize != FILE or copied < _SMALLER * target.weights_bytes


def _has_own_numbers(files: TensorSource) -> bool:
    return any(file.has_own_numbers for file in files.files)


def _was_expanded(target: Transformer, files: TensorSource) -> bool:
    """Whether the target's weights were made from the numbers of much smaller files."""
    is_smaller = files.nbytes < _OWN_SHARE * target.weights_bytes
    return target.weights.quantize != FILE and is_smaller and _has_own_numbers(files)


def resolve(asked: str, target: Transformer, files: TensorSource) -> str:
    """The format of the copy that drafts for `target`: "file", "int8", "int4", or "same" for no copy.

    asked  one of CHOICES; "auto" is, on the compiled CPU kernels, "file" for a target that was expanded from much
           smaller files, else that of `auto_format`; on a device the same for a large model, with int4, where such a
           copy drafted faster than the target's own weights (docs/cuda.md); else, and for a target that is hardly
           larger than the copy, no copy

    UsageError if a format is asked for by name and cannot be had.
    """
    is_divided = shard_of(target.kernels).size > 1
    if asked == AUTO_WEIGHTS:
        if is_divided or target.weights.quantize == "int4":
            return SAME
        if is_compiled(target.kernels):
            if _was_expanded(target, files) and target.weights_bytes >= _MIN_BYTES:
                return FILE
            quantize = auto_format(target.weights_bytes, target.weights_in_tokens)
            return quantize if quantize == SAME or _is_smaller(quantize, target) else SAME
        if not target.kernels.is_device or not outweighs_cache(target):
            return SAME
        if _was_expanded(target, files):
            return FILE
        return "int4" if _is_smaller("int4", target) else SAME
    if asked != SAME and is_divided:
        raise UsageError(f"draft_weights is {asked!r} with weights divided among ranks; allowed there: auto, same")
    if asked == FILE and not _has_own_numbers(files):
        raise UsageError("draft_weights is 'file', which copies the numbers of a quantised file; allowed here: auto, "
                         "same, int8, int4")
    return asked


def load_copy(files: TensorSource, target: Transformer, asked: str, cache: Path | None = None) -> Transformer | None:
    """The copy that `resolve` names; None if there is none, or if `auto` finds no room for it.

    cache  folder of cached quantised weights; None: nothing is cached

    MemoryError if a copy that is asked for by name does not fit in memory.
    """
    quantize = resolve(asked, target, files)
    if quantize in (SAME, target.weights.quantize):
        return None
    size = files.nbytes if quantize == FILE else quantized_bytes(
        target.whole, quantize, is_draft_copy=True, is_on_device=target.kernels.is_device)
    free = target.kernels.free_bytes() or available_memory()
    share = _SHARE_OF_DEVICE if asked == AUTO_WEIGHTS and target.kernels.is_device else USABLE
    if size > free * share:
        message = (f"the {quantize} copy of the weights that drafts takes {size / 2**30:.1f} GiB, and "
                   f"{free / 2**30:.1f} GiB are free{', most of which is left to the cache' * (share < USABLE)}")
        if asked != AUTO_WEIGHTS:
            raise MemoryError(f"{message}; use --drafter-option draft_weights=same")
        log.warning("%s: drafting with the unquantised weights", message)
        return None
    log.info("drafting with a copy of the weights (%s), %.2f GiB", quantize, size / 2**30)
    packed = open_packed(cache, files, target.whole, target.kernels, quantize, "draft")
    with files.second_reading():
        return load_draft_copy(files, target, quantize, packed)
