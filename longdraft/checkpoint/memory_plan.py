"""What fits into a device's memory: weights, a draft copy, and the longest text, whose cache is reserved whole.

    cuda: 15.0 GiB of weights, 5.0 GiB of a copy that drafts, 2.9 GiB free: texts of at most 20,358 tokens, of 131,072
    that the model allows. More tokens fit with LONGDRAFT_KERNELS=triton-16-k8v4 (52,640), ...

A tenth of the free memory is left for buffers of forwards and for graphs (`sizing.USABLE`), and at least what a chunk
of a prompt takes (`sizing.prompt_bytes`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import NamedTuple

from longdraft.cache.full import FullCache
from longdraft.checkpoint.sizing import LARGEST_TREE, USABLE, model_sizes, prompt_bytes, quantized_bytes
from longdraft.errors import translate_memory_errors
from longdraft.kernels import VARIABLE, Kernels, available
from longdraft.kernels.cuda.cache_format import CacheFormat
from longdraft.kernels.weights import FILE
from longdraft.model.config import ModelConfig
from longdraft.model.transformer import Transformer

log = logging.getLogger(__name__)


class Cure(NamedTuple):
    """A setting with which longer texts fit, and how many tokens then fit."""

    setting: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.setting} ({self.tokens:,})"


class MemoryPlan(NamedTuple):
    """The memory of a device after a model was loaded.

    weights_bytes  of the model; draft_bytes: of the copy that drafts
    free_bytes     that nothing has
    token_bytes    of the cache, for each token
    prompt_bytes   that a chunk of a prompt takes at most beside the cache
    limit          tokens that the model allows
    cures          most tokens first; none where the whole limit fits
    """

    device: str
    weights_bytes: int
    draft_bytes: int
    free_bytes: int
    token_bytes: int
    prompt_bytes: int
    limit: int
    cures: tuple[Cure, ...] = ()

    @property
    def tokens(self) -> int:
        """Of the longest text that fits, prompt and new ones together."""
        rows = _fitting_rows(self.free_bytes, self.token_bytes, self.prompt_bytes)
        return max(0, min(self.limit, rows - LARGEST_TREE))

    def __str__(self) -> str:
        copy = f", {_gib(self.draft_bytes)} of a copy that drafts" if self.draft_bytes else ""
        more = f". More tokens fit with {', '.join(map(str, self.cures))}" if self.cures else ""
        return (f"{self.device}: {_gib(self.weights_bytes)} of weights{copy}, {_gib(self.free_bytes)} free: texts of "
                f"at most {self.tokens:,} tokens, of {self.limit:,} that the model allows{more}")


def _fitting_rows(free_bytes: int, token_bytes: int, prompt: int) -> int:
    """Rows of the largest cache that fits; those of the largest tree are among them."""
    return min(int(free_bytes * USABLE), free_bytes - prompt) // token_bytes


def _prompt_of(model: Transformer) -> int:
    return prompt_bytes(model.config, model.kernels.dtype.itemsize, unpacks=model.weights.quantize != "none")


def plan(model: Transformer, draft_bytes: int = 0) -> MemoryPlan | None:
    """The plan of a model that is loaded; None where the kernels do not know their memory."""
    free, kernels = model.kernels.free_bytes(), model.kernels
    if free is None:
        return None
    quantize = model.weights.quantize
    weights = model.weights.nbytes if quantize in (FILE, "int4") else weights_of(model.config, kernels, quantize)
    now = MemoryPlan(str(kernels.device), weights, draft_bytes, free, model.cache_bytes_per_token, _prompt_of(model),
                     model.config.max_positions)
    if now.tokens == now.limit:
        return now
    cures = {Cure(setting, each.tokens) for setting, each in _alternatives(now, model) if each.tokens > now.tokens}
    return now._replace(cures=tuple(sorted(cures, key=lambda cure: -cure.tokens)))


def _alternatives(now: MemoryPlan, model: Transformer) -> Iterator[tuple[str, MemoryPlan]]:
    """Settings, and what the plan would be with them."""
    kernels, config = model.kernels, model.config
    smaller = _smaller_caches(model)

    def with_caches(plan: MemoryPlan) -> list[tuple[str, MemoryPlan]]:
        found = [(f"{VARIABLE}={name}", plan._replace(token_bytes=count)) for name, count in smaller.items()]
        fitting = [place for place, (_, each) in enumerate(found) if each.tokens == plan.limit]
        return found[: fitting[0] + 1] if fitting else found

    yield from with_caches(now)
    if now.draft_bytes:
        yield ("--drafter-option draft_weights=same",
               now._replace(free_bytes=now.free_bytes + now.draft_bytes, draft_bytes=0))
    if model.weights.quantize != "none":
        return
    for quantize in ("int8", "int4"):
        saved = now.weights_bytes - weights_of(config, kernels, quantize)
        saved += now.draft_bytes if quantize == "int4" else 0  # an int4 model drafts with its own weights
        fewer = now._replace(free_bytes=now.free_bytes + saved,
                             prompt_bytes=prompt_bytes(config, kernels.dtype.itemsize, unpacks=True))
        yield f"--quantize {quantize}", fewer
        if fewer.tokens < now.limit:
            for setting, both in with_caches(fewer)[-1:]:
                yield f"--quantize {quantize} and {setting}", both


def _smaller_caches(model: Transformer) -> dict[str, int]:
    """The names of the same kernels with a smaller cache, and its bytes for each token, the largest first."""
    kernels, names = model.kernels, available("cuda")
    exact = functools.reduce(str.removesuffix, (each.value for each in CacheFormat), kernels.name)
    found = {f"{exact}{each.value}": sum(heads * each.row_bytes(dim, kernels.dtype)
                                         for heads, dim in model.config.kv_shapes) for each in CacheFormat}
    return {name: count for name, count in found.items() if name in names and count < model.cache_bytes_per_token}


def reserve_cache(model: Transformer, cache: FullCache, length: int) -> None:
    """Reserve the whole cache of a text of `length` tokens. MemoryError, naming what would fit, if there is no room."""
    free, wanted = model.kernels.free_bytes(), length + LARGEST_TREE
    fits = free is None or _fitting_rows(free, model.cache_bytes_per_token, _prompt_of(model)) >= wanted
    if not fits and (now := plan(model)):
        raise MemoryError(f"the cache of {length} tokens takes {_gib(wanted * now.token_bytes)}, and "
                          f"{_gib(now.free_bytes)} of {now.device} are free; {now.tokens} tokens would fit, prompt and "
                          f"new ones together; {' or '.join(['write fewer', *map(str, now.cures)])}")
    with translate_memory_errors():
        cache.reserve(wanted)


def weights_of(config: ModelConfig, kernels: Kernels, quantize: str) -> int:
    """Bytes of a model's weights on a device."""
    if quantize in ("int8", "int4"):
        return quantized_bytes(config, quantize, is_on_device=True)
    return model_sizes(config).parameters * kernels.dtype.itemsize


def report(model: Transformer, draft: Transformer | None) -> None:
    """Log the plan, as a warning where the model allows longer texts than fit."""
    copied = 0
    if draft is not None and draft.weights.quantize == FILE:
        copied = draft.weights.nbytes - draft.weights.embedding.nbytes  # which is the model's
    elif draft is not None:
        copied = quantized_bytes(model.config, draft.weights.quantize, is_draft_copy=True, is_on_device=True)
    if found := plan(model, copied):
        log.log(logging.WARNING if found.tokens < found.limit else logging.INFO, "%s", found)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
