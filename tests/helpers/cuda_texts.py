"""Texts by the CUDA kernels after one prompt, which is read once for each model. See helpers.cuda_kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import longdraft
from helpers.cuda_kernels import DEVICE, HAS_CUDA
from helpers.equality import prompt_of
from longdraft import drafters, kernels
from longdraft.cache.full import FullCache
from longdraft.checkpoint import checkpoint, config_file
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.kernels.layer import LayerwiseDecoder
from longdraft.model.transformer import Forward, Transformer, chain_rows
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation import prefill as prefilling
from longdraft.speculation import reuse
from longdraft.speculation.drafter import Verified
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Step, Tally, Timings

NAME = "triton-16"
NEW, LENGTH = (60, 70) if HAS_CUDA else (7, 50)  # new tokens; tokens of the prompt, more than a partial cache holds


def load(folder: Path, name: str = NAME, quantize: str = "none") -> Transformer:
    chosen = kernels.choose(DEVICE, "float32", name)
    return checkpoint.load_transformer(TensorFiles(folder), config_file.read_config(folder), chosen, quantize)


@contextmanager
def by_definition(model: Transformer) -> Iterator[None]:
    """Run the model's layers operation by operation on its kernels, as longdraft/kernels/layer.py defines them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_decoder", LayerwiseDecoder(model.kernels, model.weights.layers, model.geometry))
        patch.setattr(model, "_token_decoder", None)
        yield


def agree(found: Sequence[torch.Tensor], definition: Sequence[torch.Tensor]) -> bool:
    """Whether a forward computed what its definition does. A norm adds up its squares in another order there."""
    return len(found) == len(definition) and all(torch.allclose(*map(torch.Tensor.float, pair), atol=5e-5, rtol=5e-5)
                                                 for pair in zip(found, definition, strict=True))


PROMPT = prompt_of(LENGTH)


@functools.cache
def prompt_forward(model: Transformer) -> tuple[FullCache, Forward]:
    """The forward of PROMPT without its last token: the cache and the result."""
    cache = model.new_cache()
    result = model.forward(chain_rows(PROMPT[:-1], 0), cache, is_prompt=True)
    cache.commit(range(len(PROMPT) - 1))
    return cache, result


def copy_of(cache: FullCache, model: Transformer) -> FullCache:
    copied, rows = model.new_cache(), slice(cache.length)
    copied.reserve(cache.length)
    for new, store in zip(copied.stores, cache.stores, strict=True):
        for part in ("k", "v", "k_scale", "v_scale"):
            getattr(new, part)[:, rows] = getattr(store, part)[:, rows]
    copied.length = cache.length
    if cache.states and copied.states:
        for mine, theirs in zip(copied.states.current, cache.states.current, strict=True):
            mine.copy_from(theirs)
        copied.states.length = cache.length
    if cache.taps and copied.taps:
        taps = copied.taps.append(cache.length)
        taps.rows.copy_(cache.taps.take()[0].states)
        copied.taps.commit(taps, range(cache.length), 0)
    return copied


def generate(model: Transformer, params: SamplingParams, factory: object, tally: Tally | None = None) -> list[int]:
    """As helpers.generate after PROMPT, tokens chosen on the device."""
    model = model.with_taps(factory.taps) if getattr(factory, "taps", ()) else model
    cache, result = prompt_forward(model)
    cache, context = copy_of(cache, model), Context(PROMPT)
    sampler = Sampler(params, [1], kernels=model.kernels)
    drafter = factory(drafters.Resources(model, cache, sampler, params, None))
    drafter.begin(context, Verified(result, [len(PROMPT) - 2]))
    step = Step(model, cache, drafter, sampler, context, Timings(), tally or Tally())
    while context.num_new < params.max_new_tokens:
        run_alone(step.run(params.max_new_tokens - context.num_new))
    return context.slice(len(PROMPT), len(context)).tolist()


def use_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have devices read prompts in chunks of 16 tokens."""
    for module in (reuse, prefilling):
        monkeypatch.setattr(module, "DEVICE_CHUNK", 16)
        monkeypatch.setattr(module, "DRAFTER_ROWS", 4)


def text_of_shared_chunks(engine: longdraft.Engine, prompt: list[int], params: SamplingParams) -> str:
    """Check that texts share the rows of whole chunks of a prompt of 44 tokens and have their own bits.

    Returns the hash of the text.
    """
    texts, cached = [], []
    for ids, salt in ((prompt, None), (prompt, ""), (prompt, ""), (prompt[:24], None), (prompt[:24], "")):
        generation = engine.generate(ids, params, cache_salt=salt)
        texts.append(list(generation)[-1].stats["sha256_tokens"])
        cached.append(generation.reuse.cached_tokens)
    assert cached == [0, 0, 32, 0, 16]
    assert texts[0] == texts[1] == texts[2] and texts[3] == texts[4]
    return texts[0]
