"""Heads that guess several places in one pass (P-EAGLE): what they compute, their files, and what they draft."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

import longdraft
from helpers.block import states_of
from helpers.checkpoints import VOCAB, load
from helpers.eagle import LAYERS, Shape, SlowEagle, load_eagle, write_eagle
from helpers.equality import prompt_of
from helpers.extents import extent
from helpers.generation import by_name, generate
from longdraft import drafters, kernels
from longdraft.cache.window import RowWindow
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.drafters.eagle import EagleOptions, ParallelEagleDrafter
from longdraft.drafters.marginal_tree import MarginalTrees, Slot
from longdraft.errors import ModelError
from longdraft.kernels.launched import finished
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.parts import eagle, eagle_config
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Tally

MASK = 300  # no token of IDS
SHAPES = {
    "as published: layers and embeddings of its own": dict(layers=4, has_own_embedding=True),
    "whole vocabulary, qwen3 layers, rows of its own width": dict(layers=2, draft_vocab=VOCAB, head_norms=True, dim=16,
                                                                  hidden=32, has_own_embedding=True),
    "one norm before fc": dict(norm_before_fc=True, norm_before_residual=True),
    "a norm for each layer": dict(fc_norm=True),
    "window": dict(window=6),
}
WARM = dict(temperature=1.0, min_p=0.05, repetition_penalty=1.2, penalty_window=20)
IDS, COUNT = prompt_of(24), 5


def drafter_after(model: Transformer, head: eagle.Eagle, ids: Sequence[int], chunks: Sequence[int] = (),
                  params: SamplingParams | None = None, **options: object) -> tuple[ParallelEagleDrafter, Context]:
    """A drafter whose target has read a text, a chunk at a time; the head guesses after each but the last."""
    tapped = model.with_taps(head.taps)
    cache, context = tapped.new_cache(), Context(list(ids[:1]))
    params = params or SamplingParams(temperature=0.0)
    given = EagleOptions(**(dict(chain=COUNT, suffix=False) | options))
    drafter = ParallelEagleDrafter(given, head, cache, Sampler(params), params)
    start = 0
    for end in (*chunks, len(ids) - 1):
        if start:
            assert run_alone(drafter._draft_model.slots(context, [context.last], COUNT))
        tapped.forward(chain_rows(list(ids[start:end]), start), cache)
        cache.commit(range(end - start))
        context.extend(list(ids[start + 1 : end + 1]))
        start = end
    return drafter, context


def guesses(drafter: ParallelEagleDrafter, context: Context, count: int = COUNT) -> Tensor:
    rows = drafter._draft_model._rows.slot_rows(context, [context.last], count)
    assert rows is not None and len(rows) == count
    return drafter._draft_model._head.logits(rows)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-4 * float(wanted.abs().max()), rtol=1e-3)


@pytest.fixture(scope="module")
def target(tiny) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny["gqa"])


@pytest.mark.parametrize("name", [kernels.available()[0], "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_head_guesses_what_a_dense_mask_over_the_text_and_the_masks_gives(tiny, tmp_path, target, shape, name):
    """In the pass that reads the text's latest rows, and in one of masks alone."""
    made, model = Shape(mask=MASK, **SHAPES[shape]), load(tiny["gqa"], name=name)
    write_eagle(tmp_path, made)
    slow, head = SlowEagle(made, target), load_eagle(tmp_path, model)
    states = states_of(model, IDS, LAYERS)[:, :-1]
    wanted = slow.slots(states, IDS, COUNT)
    torch.testing.assert_close(wanted[0], slow.logits(states, IDS, []), atol=1e-4, rtol=1e-4)
    for chunks in ((), (1, 5, 20)):
        drafter, context = drafter_after(model, head, IDS, chunks)
        for count in (COUNT, COUNT, 2):
            found = guesses(drafter, context, count)
            assert_close(found[:, made.ids], wanted[:count])
            assert (found == -torch.inf).sum() == count * (VOCAB - made.draft_vocab)
    assert drafter._draft_model._rows.rows.num_text == (made.window or len(IDS) - 1)


@pytest.mark.parametrize("mutant", ["mask_hidden ignored", "another mask token", "positions do not rise",
                                    "masks do not see each other", "masks stay in the cache", "one slot later"])
def test_a_head_that_guesses_wrongly_is_found(tiny, tmp_path, target, monkeypatch, mutant):
    """By the comparison above."""
    made, model = Shape(mask=MASK, layers=2), load(tiny["gqa"])
    write_eagle(tmp_path, made)
    head, forward = load_eagle(tmp_path, model), eagle.Eagle.forward

    def mutated(self, y, tokens, positions, stores, length, parents):
        text = sum(token != MASK for token in tokens)
        if mutant == "positions do not rise":
            positions = [min(position, len(IDS) - 2) for position in positions]
        elif mutant == "masks do not see each other":
            parents = torch.tensor([*range(-1, text - 1), *[text - 1] * (len(tokens) - text)], dtype=torch.int32)
        return forward(self, y, tokens, positions, stores, length, parents)

    monkeypatch.setattr(eagle.Eagle, "forward", mutated)
    if mutant == "mask_hidden ignored":
        head._weights = head._weights._replace(mask=torch.zeros_like(head._weights.mask))
    elif mutant == "another mask token":
        head = head.reading(head.layers, mask_token=MASK + 1)
    elif mutant == "masks stay in the cache":
        held: dict[int, int] = {}  # rows after the text of each window; they are never fewer
        monkeypatch.setattr(RowWindow, "num_drafts", property(
            lambda self: held.get(id(self), 0),
            lambda self, value: held.update({id(self): max(value, held.get(id(self), 0))})), raising=False)
    drafter, context = drafter_after(model, head, IDS, (20,))
    found = guesses(drafter, context)[:, made.ids]
    wanted = SlowEagle(made, target).slots(states_of(model, IDS, LAYERS)[:, :-1], IDS, COUNT)
    if mutant == "one slot later":
        found, wanted = found[1:], wanted[:-1]
    with pytest.raises(AssertionError):
        assert_close(found, wanted)


def test_the_tree_is_that_of_the_slow_head_with_the_noise_of_each_position(tiny, tmp_path, target):
    made, model = Shape(mask=MASK, layers=2), load(tiny["gqa"])
    write_eagle(tmp_path, made)
    params = SamplingParams(seed=5, temperature=0.7)
    drafter, context = drafter_after(model, load_eagle(tmp_path, model), IDS, params=params, width=2)
    states = states_of(model, IDS, LAYERS)[:, :-1]
    for depth in (9, 2, 1):
        logits = torch.full((min(depth, COUNT), VOCAB), -torch.inf)
        logits[:, made.ids] = SlowEagle(made, target).slots(states, IDS, len(logits))
        slots = [Slot(*each) for each in finished(Sampler(params).shortlists(logits, context, 16))]
        wanted = MarginalTrees("eagle").grow(IDS[-1], slots, 2 * COUNT)
        tree = run_alone(drafter.propose(context, depth))
        assert (tree.tokens, tree.parents) == (wanted.tokens, wanted.parents)
        assert len(tree) == 2 * COUNT + 1 and max(tree.depths) <= depth


def test_after_a_gap_in_the_states_a_head_drafts_nothing_until_the_last_one_is_known(tiny, tmp_path):
    model = load(tiny["mha"])
    write_eagle(tmp_path, Shape(mask=MASK))
    head = load_eagle(tmp_path, model)
    drafter, context = drafter_after(model, head, IDS[:9])
    assert run_alone(drafter._draft_model.slots(context, [context.last], 4))
    context.extend(IDS[9:15])
    assert not run_alone(drafter._draft_model.slots(context, [context.last], 4))
    assert len(run_alone(drafter.propose(context, 4))) == 1


# Files.


def test_the_layouts_of_one_head_give_the_same_guesses(tiny, tmp_path):
    """speculators', and that of Amazon's heads and of NeMo: `ptd_token_id`, and a row of fewer axes."""
    made, model, found = Shape(mask=MASK, layers=2), load(tiny["gqa"]), []
    for layout in ("speculators", "bare", "modelopt"):
        write_eagle(tmp_path / layout, made, layout)
        if layout == "modelopt":
            tensors = load_file(tmp_path / layout / "model.safetensors")
            tensors["model.mask_hidden"] = tensors["model.mask_hidden"][0]
            save_file(tensors, tmp_path / layout / "model.safetensors")
        assert eagle_config.is_eagle(tmp_path / layout)
        head = load_eagle(tmp_path / layout, model)
        assert head.config.is_parallel and head.config.mask_token == MASK
        found.append(guesses(*drafter_after(model, head, IDS)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_what_a_file_of_speculators_leaves_out_has_the_meaning_of_that_kind(tmp_path):
    """Of `peagle` the residual is not normalised unless the file says so; nothing is fed back, so `norm_output` has no
    meaning. Earlier versions name the token otherwise."""
    write_eagle(tmp_path, Shape(mask=MASK), mask_token_id=None, ptd_token_id=MASK, norm_output=True)
    written = json.loads((tmp_path / "config.json").read_text())
    del written["norm_before_residual"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = eagle_config.read_eagle_config(tmp_path, TensorFiles(tmp_path))
    assert (config.norm_before_residual, config.norm_output, config.mask_token) == (False, False, MASK)


@pytest.mark.parametrize("change, message", [
    (dict(mask_token_id=None), "mask_token_id is None in config.json; allowed: 0 to 319, the id of the token for"),
    (dict(mask_token_id=320), "mask_token_id is 320 in config.json; allowed: 0 to 319"),
    (dict(mask_token_id=None, ptd_token_id="x"), "ptd_token_id is 'x' in config.json; allowed: 0 to 319"),
    (dict(use_aux_hidden_state=False), "guesses in one pass .P-EAGLE., but does not read several layers of the model"),
    (dict(speculators_model_type="eagle3"), "unexpected mask_hidden"),
    (dict(eagle_aux_hidden_state_layer_ids=[0, 1]), r"mask_hidden has shape \[1, 1, 144\], not \[1, 1, 96\]"),
])
def test_a_head_that_does_not_fit_is_refused_with_the_reason(tiny, tmp_path, change, message):
    write_eagle(tmp_path, Shape(mask=MASK), **change)
    with pytest.raises(ModelError, match=message) as caught:
        longdraft.load(str(tiny["mha"]), drafter="eagle", heads=str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


def test_a_head_without_its_row_for_masks_is_refused(tiny, tmp_path):
    made = Shape(mask=MASK)
    del made.tensors["mask_hidden"]
    write_eagle(tmp_path, made)
    with pytest.raises(ModelError, match="missing mask_hidden"):
        load_eagle(tmp_path, load(tiny["mha"]))


# Texts.


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("settings", extent([dict(temperature=0.0), WARM], [WARM]))
def test_the_text_is_that_of_plain_decoding(tiny, tmp_path, shape, settings):
    model, tally = load(tiny["gqa"]), Tally()
    write_eagle(tmp_path, Shape(mask=MASK, **SHAPES[shape]))
    params = SamplingParams(max_new_tokens=25, seed=5, **settings)
    written = generate(model, prompt_of(40), params, tally=tally, factory=by_name(
        "eagle", eagle=load_eagle(tmp_path, model), chain=4, width=3, window=9, sinks=2))
    assert written == generate(model, prompt_of(40), params, by_name("plain"))
    assert tally.drafted["eagle"] > 0


@pytest.mark.parametrize("lie", ["random weights", "other ids", "NaN masks"])
def test_a_head_that_lies_changes_nothing(tiny, tmp_path, lie):
    model, made = load(tiny["mha"]), Shape(mask=MASK)
    if lie == "random weights":
        made.tensors["lm_head.weight"] = torch.randn_like(made.tensors["lm_head.weight"]) * 9
    elif lie == "other ids":
        del made.tensors["t2d"]
        made.tensors["d2t"] = torch.zeros(200, dtype=torch.int64)
    write_eagle(tmp_path, made)
    head = load_eagle(tmp_path, model)
    if lie == "NaN masks":
        head._weights = head._weights._replace(mask=head._weights.mask * torch.nan)
    params, tally = SamplingParams(max_new_tokens=30, seed=5, min_p=0.05), Tally()
    written = generate(model, prompt_of(40), params, by_name("eagle", eagle=head, suffix="false"), tally=tally)
    assert written == generate(model, prompt_of(40), params, by_name("plain"))
    assert tally.drafted["eagle"] > 0, "the text's last row guesses where the masks do not"


def test_auto_measures_the_costs_of_each_kind_of_head(tiny, tmp_path):
    model, costs = load(tiny["gqa"]), []
    for mask in (None, MASK):
        write_eagle(tmp_path, Shape(mask=mask))
        given = drafters.Resources(model, model.new_cache(), Sampler(SamplingParams(seed=1)), SamplingParams(seed=1),
                                   eagle=load_eagle(tmp_path, model))
        costs.append(drafters._costs_identity(given))
    assert costs[0] != costs[1]
