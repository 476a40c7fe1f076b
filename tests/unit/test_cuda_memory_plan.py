"""The plan of a device's memory: its bytes beside those that are allocated. Needs no device."""

from __future__ import annotations

import gc
import logging
import re
import weakref

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

import longdraft
from helpers.checkpoints import make_checkpoint
from helpers.cuda_kernels import DEVICE, HAS_CUDA
from helpers.gguf_files import convert
from longdraft.checkpoint import memory_plan, sizing
from longdraft.checkpoint.memory_plan import plan, weights_of
from longdraft.checkpoint.sizing import LARGEST_TREE, USABLE, kept_sizes, quantized_bytes
from longdraft.kernels.cuda import prefill
from longdraft.kernels.cuda.kernels import CudaKernels
from longdraft.model.transformer import chain_rows
from longdraft.request.sampling_params import SamplingParams

pytestmark = pytest.mark.full
NAME, LIMIT = "triton-16", 1 << 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
                    vocab_size=640, max_position_embeddings=LIMIT, tie_word_embeddings=False)
    return folder


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, rows in (("DEVICE_CHUNK", 16), ("DEVICE_PIECE", 64)):  # of prompts, so that little memory is enough
        monkeypatch.setattr(sizing, name, rows)


def held_bytes() -> int:
    """Of all tensors' memory."""
    gc.collect()
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in gc.get_objects()
                if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout == torch.strided}
    return sum(storages.values())


def engine_of(folder, quantize="none", name=NAME, **options):
    return longdraft.load(str(folder), device=DEVICE, dtype="float32", kernels_name=name, quantize=quantize,
                          quantized_cache="none", **{"drafter": "plain"} | options)


def have_free(monkeypatch, count: int) -> None:
    monkeypatch.setattr(CudaKernels, "free_bytes", lambda self: count)


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_the_bytes_of_the_weights_are_those_that_a_load_allocates(folder, quantize):
    before = held_bytes()
    engine = engine_of(folder, quantize)
    planned = weights_of(engine.model.config, engine.model.kernels, quantize)
    assert planned == pytest.approx(held_bytes() - before, rel=0.02)


@pytest.mark.parametrize("kinds", [{}, {"attn_v": "Q8_0", "ffn_down": "Q4_0", "token_embd": "Q8_0"}])
def test_the_bytes_of_a_files_own_numbers_are_those_that_a_load_allocates(folder, tmp_path, monkeypatch, kinds):
    """Also before the load, from the file's types."""
    network, path = transformers.AutoModelForCausalLM.from_pretrained(folder), tmp_path / "model.gguf"
    convert(folder, network, path, "Q4_1", kinds=kinds)
    del network
    before = held_bytes()
    engine = engine_of(path, "file")
    held = held_bytes() - before
    have_free(monkeypatch, 1 << 30)
    found = plan(engine.model)
    assert found and found.weights_bytes == pytest.approx(held, rel=0.03)
    kept = kept_sizes(path, engine.model.config, is_on_device=True)
    assert kept and kept.weights_bytes == pytest.approx(held, rel=0.03)


def test_the_bytes_of_a_draft_copy_are_those_that_a_load_allocates(folder):
    before = held_bytes()
    alone = engine_of(folder)
    weights = held_bytes() - before
    del alone
    engine = engine_of(folder, drafter="magicdec", drafter_options={"draft_weights": "int4"})
    copied = quantized_bytes(engine.model.config, "int4", is_draft_copy=True, is_on_device=True)
    assert copied == pytest.approx(held_bytes() - before - weights, rel=0.02)


class Peak(TorchDispatchMode):
    """The largest number of bytes that new tensors hold at a time. Triton's interpreter leaves cycles, which are
    collected before each operation that takes much."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(name in str(operation) for name in ("mm", "flash", "stack", "cat", "clone")):
            gc.collect()
        found = operation(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, torch.Tensor) and (place := each.untyped_storage().data_ptr()) not in given:
                if place not in self._live:
                    weakref.finalize(each.untyped_storage(), self._live.pop, place, None)
                self._live[place] = each.untyped_storage().nbytes()
                self.bytes = max(self.bytes, sum(self._live.values()))
        return found


@pytest.mark.skipif(HAS_CUDA, reason="a device's library takes memory of its own")
@pytest.mark.parametrize("quantize, name", [("none", NAME), ("int8", NAME), ("int4", NAME), ("none", f"{NAME}-k8v4")])
def test_a_chunk_of_a_prompt_takes_no_more_than_the_plan_leaves_for_it(folder, monkeypatch, quantize, name):
    """Chunks of 160 rows, whose earlier positions are read in pieces of as many."""
    for module in (sizing, prefill):
        monkeypatch.setattr(module, "DEVICE_PIECE", 160)
    monkeypatch.setattr(sizing, "DEVICE_CHUNK", 160)
    model = engine_of(folder, quantize, name).model
    cache, ids = model.new_cache(), [7 * place % 600 for place in range(320)]
    cache.reserve(320)
    model.forward(chain_rows(ids[:160], 0), cache, is_prompt=True)
    cache.commit(range(160))
    with Peak() as peak:
        model.forward(chain_rows(ids[160:], 160), cache, is_prompt=True)
    bound = sizing.prompt_bytes(model.config, 4, unpacks=quantize != "none")
    assert 0.7 * bound <= peak.bytes <= bound


@pytest.mark.parametrize("name", [NAME, f"{NAME}-kv8", f"{NAME}-k8v4"])
def test_a_text_of_as_many_tokens_as_the_plan_says_fits_and_a_longer_one_does_not(folder, monkeypatch, name):
    engine = engine_of(folder, name=name)
    free = 60_000 * engine.model.cache_bytes_per_token
    have_free(monkeypatch, free)
    tokens = plan(engine.model).tokens
    assert tokens == int(free * USABLE) // engine.model.cache_bytes_per_token - LARGEST_TREE
    before = held_bytes()
    text = engine.generate([5] * 10, SamplingParams(max_new_tokens=tokens - 10))
    assert held_bytes() - before <= free * 0.93, "the rest is for buffers"
    assert text.step.cache.nbytes == pytest.approx(free * USABLE, rel=0.02)  # and slots of drafts
    text.close()
    with pytest.raises(MemoryError, match=rf"{tokens} tokens would fit, .* write fewer or "):
        engine.generate([5] * 10, SamplingParams(max_new_tokens=tokens - 9))


def test_with_each_cure_as_many_tokens_fit_as_the_plan_says(folder, monkeypatch):
    """In a device that holds the model, its copy, and a cache of 7,000 tokens."""
    engine = engine_of(folder, drafter="magicdec", drafter_options={"draft_weights": "int4"})
    per_token = engine.model.cache_bytes_per_token
    copied = quantized_bytes(engine.model.config, "int4", is_draft_copy=True, is_on_device=True)
    weights, free = weights_of(engine.model.config, engine.model.kernels, "none"), 7000 * per_token
    have_free(monkeypatch, free)
    found = plan(engine.model, copied)
    assert f"{found.tokens:,} tokens, of {LIMIT:,}" in str(found) and found.tokens < LIMIT
    cures = {cure.setting: cure.tokens for cure in found.cures}
    assert len(cures) == 7 and list(cures.values()) == sorted(cures.values(), reverse=True)
    for setting, tokens in cures.items():
        assert f"{setting} ({tokens:,})" in str(found) and tokens > found.tokens
        quantize = (re.findall(r"--quantize (\w+)", setting) or ["none"])[0]
        other = engine_of(folder, quantize, name=(re.findall(rf"{NAME}[\w-]*", setting) or [NAME])[0])
        keeps_copy = quantize != "int4" and "draft_weights" not in setting
        left = weights + copied + free - weights_of(other.model.config, other.model.kernels, quantize)
        have_free(monkeypatch, left - copied * keeps_copy)
        assert plan(other.model).tokens == tokens, setting


def test_the_plan_is_logged_at_the_start_and_is_a_warning_where_the_longest_text_does_not_fit(folder, monkeypatch,
                                                                                               caplog):
    caplog.set_level(logging.INFO, memory_plan.log.name)
    for free, level, words in ((1 << 40, logging.INFO, f"at most {LIMIT:,} tokens, of {LIMIT:,} that the model allows"),
                               (1 << 24, logging.WARNING, "More tokens fit with --quantize int4 and")):
        caplog.clear()
        have_free(monkeypatch, free)
        engine_of(folder)
        (record,) = (each for each in caplog.records if each.name == memory_plan.log.name)
        assert record.levelno == level and words in record.getMessage()
        assert ("fit with" in record.getMessage()) == (level == logging.WARNING)


@pytest.mark.skipif(HAS_CUDA, reason="a device says how much memory it has")
def test_there_is_no_plan_where_the_memory_is_not_known(folder, caplog):
    assert plan(engine_of(folder).model) is None
    assert not [each for each in caplog.records if each.name == memory_plan.log.name]
