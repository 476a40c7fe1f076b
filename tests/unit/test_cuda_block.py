"""Heads that guess several places in one pass, on the device. Each layer of a block head is a graph, whose rows see
each other; P-EAGLE runs operation by operation.

Without a device in Triton's interpreter (see helpers.cuda_kernels).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

from helpers import eagle
from helpers.block import Shape, load_block, write_block
from helpers.checkpoints import make_checkpoint
from helpers.cuda_kernels import DEVICE
from helpers.equality import prompt_of
from helpers.extents import extent
from helpers.generation import by_name, generate
from helpers.recorded_graphs import watched
from longdraft import kernels
from longdraft.checkpoint import config_file
from longdraft.checkpoint.checkpoint import load_transformer
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.drafters.block import BlockDrafter, BlockOptions, ContextRows
from longdraft.drafters.eagle import EagleDraftModel
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.parts.block import DraftBlock
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.step import Tally

SIZES = dict(target=32, hidden=32, heads=2, kv_heads=1, dim=16, inner=48, taps=(0, 1), block=5)
KINDS = {
    "DFlash": {},
    "causal, as JetSpec": dict(causal=True),
    "a window and none": dict(windows=(5, 0)),
    "DSpark": dict(kind="dspark", first_guesses=True, draft_vocab=200),
    "DFlash2": dict(kind="dflash2"),
}
IDS = prompt_of(15)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=2,
                    num_key_value_heads=1)
    return folder


def load(folder: Path, name: str) -> Transformer:
    chosen = kernels.choose("cpu" if name == "reference" else DEVICE, "float32", name)
    return load_transformer(TensorFiles(folder), config_file.read_config(folder), chosen, "none")


def drafts(folder: Path, head: Path, name: str) -> list[torch.Tensor]:
    """The logits of all slots after 9, 12 and 15 tokens of the text."""
    model = load(folder, name)
    block = load_block(head, model)
    tapped = model.with_taps(block.taps)
    cache, context = tapped.new_cache(), Context(IDS[:1])
    params = SamplingParams(temperature=0.0)
    drafter = BlockDrafter(BlockOptions(suffix=False, window=8, sinks=2), block, cache, Sampler(params), params)
    logits, start = [], 0
    for end in (8, 11, 14):
        tapped.forward(chain_rows(IDS[start:end], start), cache)
        cache.commit(range(end - start))
        context.extend(IDS[start + 1 : end + 1])
        assert drafter.rows.read(context)
        rows = block.block(context.last, end, block.config.block_size, drafter.rows.stores)
        logits.append(rows.whole().cpu())
        start = end
    return logits


@pytest.mark.parametrize("kind", extent(KINDS, ["DFlash"]))
def test_the_guesses_are_those_of_the_reference(folder, tmp_path, kind):
    write_block(tmp_path, Shape(**SIZES | KINDS[kind]))
    for found, wanted in zip(drafts(folder, tmp_path, "triton-16"), drafts(folder, tmp_path, "reference"), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-4 * float(wanted[wanted.isfinite()].abs().max()), rtol=1e-3)


@pytest.mark.parametrize("kind", extent(KINDS, ["DFlash"]))
def test_the_blocks_of_several_texts_are_one_graph_with_the_guesses_of_each_alone(folder, tmp_path, monkeypatch, kind):
    """Of texts of unlike lengths."""
    write_block(tmp_path, Shape(**SIZES | KINDS[kind]))
    model = load(folder, "triton-16")
    head = load_block(tmp_path, model)
    tapped, blocks, held = model.with_taps(head.taps), [], []
    for end in (8, 14, 5):
        cache, context = tapped.new_cache(), Context(IDS[: end + 1])
        rows = ContextRows(head, cache, 8, 2)
        tapped.forward(chain_rows(IDS[:end], 0), cache)
        cache.commit(range(end))
        assert rows.read(context)
        held.append(rows)
        blocks.append(DraftBlock(context.last, end, head.config.block_size, rows.stores))
    alone = [head.launch([block])[0].logits for block in blocks]
    ran = watched(monkeypatch, model.kernels.graphs)
    for found, wanted in zip(head.launch(blocks), alone, strict=True):
        assert torch.equal(found.logits, wanted)
    assert [graph.owner.texts for graph in ran] == [4] * len(head._runs), "padded to four texts"


@pytest.mark.full
def test_a_text_drafted_by_blocks_is_the_plain_text(folder, tmp_path):
    model, tally = load(folder, "triton-16"), Tally()
    write_block(tmp_path, Shape(**SIZES))
    params = SamplingParams(max_new_tokens=12, seed=11, min_p=0.05)
    written = generate(model, IDS, params, by_name("block", block=load_block(tmp_path, model), suffix="false"),
                       tally=tally)
    assert written == generate(model, IDS, params, by_name("plain")) and tally.drafted["block"] > 0


@pytest.mark.full
def test_a_head_of_p_eagle_guesses_what_it_guesses_with_the_reference(folder, tmp_path):
    sizes = {name: size for name, size in SIZES.items() if name != "block"}
    eagle.write_eagle(tmp_path, eagle.Shape(mask=300, layers=2, **sizes))
    found = []
    for name in ("triton-16", "reference"):
        model = load(folder, name)
        head = eagle.load_eagle(tmp_path, model)
        tapped = model.with_taps(head.taps)
        cache, context, start = tapped.new_cache(), Context(IDS[:1]), 0
        reader = EagleDraftModel(head, cache, 8, 2, 4)
        for end in (8, 11, 14):
            tapped.forward(chain_rows(IDS[start:end], start), cache)
            cache.commit(range(end - start))
            context.extend(IDS[start + 1 : end + 1])
            found.append(head.guesses(reader.slot_rows(context, [context.last], 4))[0].cpu())
            start = end
    for own, wanted in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(own, wanted, atol=2e-4 * float(wanted.abs().max()), rtol=1e-3)
