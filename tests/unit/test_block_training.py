"""Training of block heads: what is trained is what drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.block import load_block
from helpers.checkpoints import VOCAB, load, make_checkpoint
from helpers.equality import prompt_of
from helpers.generation import by_name, generate
from longdraft.cache.full import FullCache
from longdraft.drafters.block import ContextRows
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.parts.block import BlockHead
from longdraft.parts.block_config import is_block
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation.step import Tally
from longdraft.train import block as training
from longdraft.train import frozen_model as frozen
from longdraft.train import job
from longdraft.train.settings import BlockSettings

IDS = prompt_of(24)


def task_of(folder: Path, **changes) -> training.BlockTask:
    """A head none of whose weights is zero."""
    base = frozen.load_frozen_model(folder, "auto", torch.device("cpu"))
    given = dict(data=("none",), window=6, block=4, draft_vocab=200, seed=3, blocks=5, rank=8)
    tokens = np.tile(np.arange(20, 260, dtype=np.int32), 3)
    task = training.block_task(base, BlockSettings(**(given | changes)), tokens, np.empty(0))
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in task.module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return task


def read(model: Transformer, head: BlockHead, ids: list[int]) -> tuple[ContextRows, FullCache]:
    tapped = model.with_taps(head.taps)
    cache = tapped.new_cache()
    tapped.forward(chain_rows(ids[:-1], 0), cache)
    cache.commit(range(len(ids) - 1))
    rows = ContextRows(head, cache, 2048, 0)
    assert rows.read(Context(ids))
    return rows, cache


@pytest.mark.parametrize("name, changes", [("mha", {}), ("gqa", {}), ("gqa", dict(rank=0)), ("gqa", dict(layers=1))])
def test_the_drafter_computes_what_was_trained(tiny, tmp_path, name, changes):
    """Rows of blocks in the middle of a text are those of a head that has read the text up to there."""
    task, target = task_of(tiny[name], **changes), load(tiny[name])
    task.export(tmp_path, {"hidden_size": 48, "vocab_size": VOCAB})
    assert is_block(tmp_path)
    head = load_block(tmp_path, target)
    ids, places = torch.tensor([IDS]), torch.arange(len(IDS))[None]
    starts = torch.tensor([1, 5, 11, 19])
    with torch.no_grad():
        wanted = task.module(ids, places, task._states(ids, places)[0], starts)[0]
    for block, start in zip(wanted, starts.tolist(), strict=True):
        rows, _ = read(target, head, IDS[: start + 1])
        found = head.block(IDS[start], start, 4, rows.stores)
        torch.testing.assert_close(found.normed, block, atol=2e-3, rtol=1e-3)
        tokens = [task.module.ids[4 * slot : 4 * slot + 3].tolist() for slot in range(4)]
        before = torch.tensor([IDS[start], *(each[0] for each in tokens[:-1])])
        with torch.no_grad():
            logits = task.module.logits_after(block, before)
        for slot in range(4):
            own, pairs = found.logits[slot : slot + 1], head.pairs(found.part)
            if pairs:
                own = pairs.after(found.places.of(slot), before[slot : slot + 1])
            said = found._replace(logits=own).whole()[0, tokens[slot]]
            own_places = torch.searchsorted(task.module.ids, torch.tensor(tokens[slot]))
            torch.testing.assert_close(said.float(), logits[slot, own_places], atol=5e-3, rtol=1e-3)


def filtered(law: torch.Tensor, min_p: float) -> torch.Tensor:
    kept = law * (law >= min_p * law.max(-1, keepdim=True).values)
    return kept / kept.sum(-1, keepdim=True)


@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_the_loss_compares_each_slot_with_the_models_distribution(tiny, min_p):
    task = task_of(tiny["mha"], positions=len(IDS), min_p=min_p)
    sequences = np.array([IDS, IDS[::-1]], dtype=np.int32)
    found = task.accumulate(sequences, 1.0, 0)
    ids, places = torch.from_numpy(sequences).long(), torch.arange(len(IDS)).expand(2, -1)
    starts = task._starts(len(IDS), 0)
    states, last = task._states(ids, places)
    rows, total = task.module(ids, places, states, starts), torch.zeros(4)
    for text in range(2):
        for block, start in enumerate(starts.tolist()):
            for slot in range(4):
                place = start + slot
                taught = task.base.logits(last[text, place][None])[0, task.module.ids].softmax(-1)
                said = task.module.logits_after(rows[text, block, slot][None], ids[text, place][None])[0].softmax(-1)
                taught, said = filtered(taught, min_p), filtered(said, min_p / 4)
                total[slot] += 0.5 * (said - taught).abs().sum().detach() / (2 * len(starts))
    torch.testing.assert_close(found, total, atol=1e-4, rtol=1e-3)
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in task.module.parameters())


def test_a_slot_weighs_as_much_as_the_tokens_that_depend_on_it():
    weights = training.BlockTask._weights(torch.tensor([[0.0, 1.0, 0.0]]))
    assert weights.tolist() == [[1 + 0.5 + 0.5, 0.5 + 0.5, 0.5]]


@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_distributions_are_compared_with_the_gradients_of_separate_operations(min_p):
    torch.manual_seed(0)
    taught, row_of = 2 * torch.randn(3, 40), torch.tensor([2, 0, 0, 1])
    factors, logits = torch.rand(3, 4), 2 * torch.randn(4, 40)

    def separate(said: torch.Tensor) -> list[torch.Tensor]:
        law, own = taught[row_of].softmax(-1), said.log_softmax(-1)
        return [0.5 * (filtered(own.exp(), min_p / 4) - filtered(law, min_p)).abs().sum(-1),
                -(law * own).sum(-1), said.logsumexp(-1) - taught[row_of].logsumexp(-1)]

    def gradient(parts: list[torch.Tensor], said: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(sum((part * of).sum() for part, of in zip(parts, factors, strict=True)), said)[0]

    said = logits.requires_grad_()
    wanted, found = separate(said), training._Comparison.apply(said, taught, row_of, min_p)
    torch.testing.assert_close(list(found), wanted)
    torch.testing.assert_close(gradient(found, said), gradient(wanted, said))


def test_a_training_that_starts_from_a_head_keeps_the_markov_rows_of_common_tokens(tiny, tmp_path):
    first = task_of(tiny["mha"])
    first.export(tmp_path, {"hidden_size": 48, "vocab_size": VOCAB})
    base, own = first.base, BlockSettings(data=("none",), window=6, block=6, draft_vocab=100, rank=8)
    again = training.block_task(base, own, np.arange(150, 250, dtype=np.int32), np.empty(0))
    again.start_from(tmp_path)
    earlier = dict(zip(first.module.ids.tolist(), first.module._weight("markov_head.markov_w2"), strict=True))
    common = 0
    for token, row in zip(again.module.ids.tolist(), again.module._weight("markov_head.markov_w2"), strict=True):
        common += token in earlier
        torch.testing.assert_close(row, earlier.get(token, torch.zeros(8)), atol=0.01, rtol=0.01)
    assert 0 < common < len(again.module.ids)


@pytest.mark.parametrize("name", ["mha", "gqa"])
def test_a_new_head_begins_as_the_last_layers_of_the_model(tiny, name):
    base = frozen.load_frozen_model(tiny[name], "auto", torch.device("cpu"))
    settings = BlockSettings(data=("none",), draft_vocab=0, layers=2)
    module = training.block_task(base, settings, np.arange(20, 60, dtype=np.int32), np.empty(0)).module
    weights, first = base.body.state_dict(), base.config.num_layers - 2
    for index in range(2):
        for part in ("self_attn.k_proj", "mlp.down_proj", "post_attention_layernorm"):
            own = module._weight(f"layers.{index}.{part}")
            assert torch.equal(own, weights[f"layers.{first + index}.{part}.weight"].float())


@pytest.mark.parametrize("device, units, wanted", [
    ("cpu", "(avx2)", torch.float32), ("cpu", "(avx512_bf16 avx512f avx2)", torch.bfloat16),
    ("cuda", "(avx2)", torch.bfloat16)])
def test_a_processor_without_bfloat16_computes_in_float32(monkeypatch, device, units, wanted):
    monkeypatch.setattr(frozen.processor, "name", lambda: f"A processor {units}")
    assert frozen._computed(torch.bfloat16, torch.device(device)) is wanted


@pytest.mark.full
def test_a_trained_head_drafts_and_a_training_goes_on_from_it(tmp_path):
    make_checkpoint(tmp_path / "tiny", initializer_range=0.15)
    (tmp_path / "text.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 300)
    settings = dict(data=(str(tmp_path / "text.txt"),), model=str(tmp_path / "tiny"), steps=60, sequence_length=48,
                    warmup_steps=5, batch_size=4, block=4, window=32, blocks=16, rank=8, draft_vocab=0, probe_tokens=8,
                    eval_tokens=480, eval_every=0, threads=1, learning_rate=3e-3)
    first = job.train(BlockSettings(**settings), tmp_path / "head")
    again = job.train(BlockSettings(**settings | dict(start=str(tmp_path / "head"), steps=2)), tmp_path / "again")
    assert again.validation[0]["loss"] < 1.2 * first.validation[0]["loss"]
    model = load(tmp_path / "tiny")
    head, tally = load_block(tmp_path / "head", model), Tally()
    params = SamplingParams(max_new_tokens=40, seed=5, temperature=0.0)
    written = generate(model, prompt_of(40), params, by_name("block", block=head, suffix="false"), tally=tally)
    assert written == generate(model, prompt_of(40), params, by_name("plain")) and tally.drafted["block"] > 0
