"""Block heads: what they compute, how their files are read, and what they draft."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import longdraft
from helpers import resuming
from helpers.block import (
    LAYERS,
    MASK,
    Shape,
    SlowBlock,
    load_block,
    make_block,
    states_of,
    write_block,
    write_block_gguf,
)
from helpers.checkpoints import HIDDEN, VOCAB, load, make_checkpoint
from helpers.equality import prompt_of
from helpers.extents import extent
from helpers.generation import by_name, generate
from longdraft import kernels
from longdraft.cache.taps import TappedRows
from longdraft.drafters import block as drafting
from longdraft.drafters.draft_vocabulary import DraftVocabulary
from longdraft.drafters.marginal_tree import MarginalTrees, Slot
from longdraft.errors import LongdraftError, ModelError
from longdraft.kernels import noise
from longdraft.kernels.launched import finished
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.parts import block, block_config, block_files
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Tally

WARM = dict(temperature=1.0, min_p=0.05, repetition_penalty=1.2, penalty_window=20)
SHAPES = {
    "DFlash": {},
    "causal, as JetSpec": dict(causal=True),
    "first row guesses": dict(first_guesses=True),
    "sliding windows": dict(windows=(7, 7), causal=False),
    "a window and none": dict(windows=(5, 0), layers=2),
    "adjacent dimensions": dict(adjacent=True),
    "Llama's layers, rows of its own width": dict(head_norms=False, hidden=32, dim=16, has_own_ends=True),
    "factors and a cap": dict(embedding_scale=3.0, logits_scale=0.5, logits_cap=2.0),
    "draft vocabulary": dict(draft_vocab=200),
    "DSpark": dict(kind="dspark", first_guesses=True, draft_vocab=200),
    "DFlash2": dict(kind="dflash2"),
    "DFlash2, draft vocabulary": dict(kind="dflash2", draft_vocab=200),
}
IDS = prompt_of(24)


def read(model: Transformer, head: block.BlockHead, ids: list[int], window: int = 0, sinks: int = 0,
         chunks: tuple[int, ...] = (), params: SamplingParams | None = None) -> tuple[drafting.BlockDrafter, Context]:
    """A drafter whose target has read a text, a chunk at a time; the head catches up after each."""
    tapped = model.with_taps(head.taps)
    cache, context = tapped.new_cache(), Context(ids[:1])
    params = params or SamplingParams(temperature=0.0)
    options = drafting.BlockOptions(window=window, sinks=sinks, suffix=False)
    drafter = drafting.BlockDrafter(options, head, cache, Sampler(params), params)
    start = 0
    for end in (*chunks, len(ids) - 1):
        tapped.forward(chain_rows(ids[start:end], start), cache)
        cache.commit(range(end - start))
        context.extend(ids[start + 1 : end + 1])
        drafter.rows.read(context)
        start = end
    return drafter, context


def slots_of(drafter: drafting.BlockDrafter, context: Context) -> block.SlotRows:
    head = drafter._draft_model._head
    assert drafter.rows.read(context)
    return head.block(context.last, len(context) - 1, head.config.block_size, drafter.rows.stores)


@pytest.fixture(scope="module")
def target(tiny) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny["gqa"])


def slow_of(shape: Shape, target: LlamaForCausalLM) -> SlowBlock:
    return SlowBlock(shape, target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-4 * float(wanted.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("name", [kernels.available()[0], "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_head_computes_what_it_was_trained_to_compute(tiny, tmp_path, target, shape, name):
    """Rows and logits of all slots, pair terms and trust, compared with plain PyTorch that reads the whole text."""
    made, model = Shape(**SHAPES[shape]), load(tiny["gqa"], name=name)
    write_block(tmp_path, made)
    slow, head = slow_of(made, target), load_block(tmp_path, model)
    drafter, context = read(model, head, IDS, chunks=(1, 5, 20))
    found = slots_of(drafter, context)
    wanted = slow.rows(states_of(model, IDS, head.layers)[:, :-1], IDS[-1])
    assert_close(found.normed, wanted)
    has = made.ids != MASK
    assert_close(found.whole()[:, made.ids[has]], slow.logits(wanted)[:, has])
    assert (found.whole() == -torch.inf).sum(1).tolist() == [VOCAB - int(has.sum())] * len(wanted)

    tokens = [made.ids[has][place : place + 4].tolist() for place in range(len(wanted))]
    before, best = [IDS[-1]], IDS[-1]
    for slot in range(len(wanted)):
        places = torch.searchsorted(made.ids, torch.tensor(tokens[slot]))
        terms = torch.stack([slow.pair_term(wanted[slot], token)[places] for token in before])
        if pairs := head.pairs(found.part):
            own = found.places.of(slot)
            table = pairs.table(own, torch.tensor([before]), torch.tensor([tokens[slot]]))
            assert_close(table[0].float(), terms)
            trust = float(pairs.trust(own, torch.tensor([best])))
            assert trust == pytest.approx(slow.trust(wanted[slot], best), abs=1e-3)
        before, best = tokens[slot], tokens[slot][0]


@pytest.mark.parametrize("shape", ["DFlash", "draft vocabulary", "a window and none"])
def test_the_layouts_of_one_head_give_the_same_guesses(tiny, tmp_path, shape):
    made, model, rows = Shape(**SHAPES[shape]), load(tiny["gqa"]), []
    for layout in ("bare", "speculators"):
        write_block(tmp_path / layout, made, layout, **({"is_causal": None} if made.causal is None else {}))
        drafter, context = read(model, load_block(tmp_path / layout, model), IDS)
        rows.append(slots_of(drafter, context).logits)
    assert torch.equal(*rows)


@pytest.mark.parametrize("shape", ["DFlash", "a window and none", "first row guesses", "draft vocabulary", "DSpark",
                                   "DFlash2"])
def test_a_head_in_gguf_is_the_same_head(tiny, tmp_path, shape):
    flags = SHAPES[shape] | dict(causal=SHAPES[shape].get("causal", False))
    made, model, rows = Shape(**flags), load(tiny["gqa"]), []
    write_block(tmp_path, made)
    write_block_gguf(tmp_path / "head.gguf", made)
    for place in (tmp_path, tmp_path / "head.gguf"):
        assert block_config.is_block(place)
        drafter, context = read(model, load_block(place, model), IDS)
        rows.append(slots_of(drafter, context).logits)
    assert torch.equal(*rows)


@pytest.mark.parametrize("changes, message", [
    ({"dflash.target_layers": None}, "target_layer_ids is None"),
    ({"tokenizer.ggml.mask_token_id": None}, "mask_token_id is None"),
    ({"dflash.block_size": None}, "dflash.block_size is missing; get the file again"),
    ({"dflash.attention.value_length": 5}, "keys and values have different lengths"),
])
def test_a_gguf_head_without_what_it_needs_is_refused(tiny, tmp_path, changes, message):
    write_block_gguf(tmp_path / "head.gguf", Shape(), **changes)
    with pytest.raises(ModelError, match=message):
        load_block(tmp_path / "head.gguf", load(tiny["mha"]))


def test_a_gguf_head_given_as_a_model_is_refused_with_the_right_options(tmp_path):
    write_block_gguf(tmp_path / "head.gguf", Shape())
    with pytest.raises(ModelError, match="has a drafter, not a model; give the model that it was trained for"):
        longdraft.load(str(tmp_path / "head.gguf"))


@pytest.mark.parametrize("dtype, name", [("bfloat16", kernels.available()[0]), ("float32", "reference")])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_blocks_of_several_texts_have_the_bits_of_each_alone(tiny, tmp_path, shape, dtype, name):
    """They go through the layers together: texts of unlike lengths, blocks of unlike sizes."""
    made, model = Shape(**SHAPES[shape]), load(tiny["gqa"], dtype, name)
    write_block(tmp_path, made, **({"is_causal": None} if made.causal is None else {}))
    head, blocks, held = load_block(tmp_path, model), [], []
    for text, num_rows in ((IDS[:9], 5), (IDS, 4), (IDS[3:20], 3)):
        drafter, context = read(model, head, text, window=8, sinks=2)
        held.append(drafter)
        blocks.append(block.DraftBlock(context.last, len(context) - 1, num_rows, drafter.rows.stores))
    for found, part in zip(head.launch(blocks), blocks, strict=True):
        (alone,) = head.launch([part])
        assert torch.equal(found.logits, alone.logits) and torch.equal(found.normed, alone.normed)
        assert found.gates is alone.gates is None or torch.equal(found.gates, alone.gates)


@pytest.mark.parametrize("window, sinks", [(2048, 4), (7, 0), (7, 3)])
def test_after_any_steps_the_guesses_are_those_of_a_head_that_has_read_the_text_at_once(tiny, tmp_path, window, sinks):
    model = load(tiny["mha"])
    head = make_block(tmp_path, model)
    drafter, context = read(model, head, IDS, window, sinks, chunks=(3, 4, 9, 17))
    fresh, _ = read(model, head, IDS, window, sinks)
    assert_close(slots_of(drafter, context).logits[:, :MASK], slots_of(fresh, context).logits[:, :MASK])


def test_a_head_sees_the_first_rows_directly_before_its_window(tiny, tmp_path, target):
    """As if the text were the first rows and the window alone."""
    made, model = Shape(), load(tiny["gqa"])
    write_block(tmp_path, made)
    head = load_block(tmp_path, model)
    drafter, context = read(model, head, IDS, window=8, sinks=3)
    states = states_of(model, IDS, head.layers)[:, :-1]
    wanted = slow_of(made, target).rows(torch.cat([states[:, :3], states[:, -8:]], 1), IDS[-1])
    assert_close(slots_of(drafter, context).normed, wanted)


def test_after_a_gap_in_the_states_a_head_drafts_nothing_until_the_last_one_is_known(tiny, tmp_path):
    """Forwards copy no states while `auto` has no use for them, and rows of a reused prefix have none."""
    model = load(tiny["mha"])
    head = make_block(tmp_path, model)
    drafter, context = read(model, head, IDS[:9])
    assert run_alone(drafter._draft_model.slots(context, [context.last], 4))
    context.extend(IDS[9:15])
    assert not run_alone(drafter._draft_model.slots(context, [context.last], 4))
    assert len(run_alone(drafter.propose(context, 4))) == 1
    states = states_of(model, IDS, head.taps)
    drafter.rows._taps._runs.append(TappedRows(14, states[:, 14:-1]))
    context.extend(IDS[15:])
    assert run_alone(drafter._draft_model.slots(context, [context.last], 4))
    assert drafter.rows._first.first == 14, "the head sees the rows after the gap"


# What a mutant computes is found by the comparison above.

@pytest.mark.parametrize("mutant", ["other layers", "a norm on the text", "the last token among the text's rows",
                                    "window off by the block", "both ways inside", "guesses one place later"])
def test_a_head_that_is_fed_wrongly_is_found(tiny, tmp_path, target, mutant):
    made, model = Shape(windows=(9, 9), causal=True), load(tiny["gqa"])
    write_block(tmp_path, made)
    head = load_block(tmp_path, model)
    if mutant == "other layers":
        head = head.reading((1, 2, 2))
    elif mutant == "a norm on the text":
        weights = head._weights
        norm = weights.hidden_norm * weights.layers[0].attention_norm
        head._weights = weights._replace(hidden_norm=norm)
    elif mutant == "window off by the block":
        head = head.reading(head.layers, windows=(9 - made.block,) * 2)
    elif mutant == "both ways inside":
        head = head.reading(head.layers, causal=(False, False))
    elif mutant == "guesses one place later":
        head = head.reading(head.layers, first_guesses=True)
    ids = [*IDS, IDS[-1]] if mutant == "the last token among the text's rows" else IDS
    drafter, context = read(model, head, ids)
    wanted = slow_of(made, target).rows(states_of(model, IDS, LAYERS)[:, :-1], IDS[-1])
    with pytest.raises(AssertionError):
        assert_close(slots_of(drafter, context).normed[: len(wanted)], wanted)


def test_candidates_are_ranked_with_the_noise_of_their_positions(tiny, tmp_path):
    model = load(tiny["gqa"])
    head = make_block(tmp_path, model)
    drafter, context = read(model, head, IDS, params=SamplingParams(seed=5, temperature=0.8))
    logits = slots_of(drafter, context).logits.double().numpy()
    for ahead, slot in enumerate(run_alone(drafter._draft_model.slots(context, [context.last], 9))):
        total = logits[ahead] / 0.8 + noise.gumbel(5, len(context) + ahead, np.arange(VOCAB))
        assert slot.tokens == np.argsort(-total)[: len(slot.tokens)].tolist()
        assert slot.scores == pytest.approx(np.sort(-total)[: len(slot.tokens)] * -1)


@pytest.mark.parametrize("shape", ["DFlash", "DSpark", "DFlash2", "causal, as JetSpec"])
def test_the_tree_is_that_of_the_slow_head(tiny, tmp_path, target, shape):
    """From its logits and pair terms. A limit of the depth shortens the block: rows that see later ones then guess
    otherwise."""
    made, model = Shape(**SHAPES[shape]), load(tiny["gqa"])
    write_block(tmp_path, made)
    head, params = load_block(tmp_path, model), SamplingParams(seed=5, temperature=0.7)
    drafter, context = read(model, head, IDS, params=params)
    states = states_of(model, IDS, head.layers)[:, :-1]
    for depth, rows in ((9, made.block), (2, made.block if all(made.is_causal) else 4), (1, 4)):
        made.block = rows
        slots = slow_slots(slow_of(made, target), states, context, params)
        wanted = MarginalTrees("block").grow(IDS[-1], slots[:depth], 8)
        tree = run_alone(drafter.propose(context, depth))
        assert (tree.tokens, tree.parents) == (wanted.tokens, wanted.parents)
        assert tree.rates[1:] == pytest.approx(wanted.rates[1:], abs=1e-3)


def slow_slots(slow: SlowBlock, states: torch.Tensor, context: Context, params: SamplingParams) -> list[Slot]:
    """The slots of a block after a text with these states: each after the best candidate of the one before."""
    made, rows = slow.shape, slow.rows(states, context.last)
    slots, before, best = [], [context.last], context.last
    for place, (row, base) in enumerate(zip(rows, slow.logits(rows), strict=True)):
        base = base.masked_fill(made.ids == MASK, -torch.inf)
        if made.kind == "dflash2":  # selects among the 16 best
            base = base.masked_fill(base < base.topk(16).values[-1], -torch.inf)
        logits = torch.full((1, VOCAB), -torch.inf)
        logits[:, made.ids] = base + slow.pair_term(row, best)
        (shortlist,) = finished(Sampler(params).shortlists(logits, context, 16, ahead=place))
        places = torch.searchsorted(made.ids, torch.tensor(shortlist.tokens))
        pairs = torch.stack([slow.pair_term(row, token)[places] for token in before]).double().numpy()
        slots.append(Slot(shortlist.tokens, shortlist.scores,
                          None if made.kind == "dflash" else (pairs - pairs[0]) / params.temperature,
                          slow.trust(row, best)))
        before, best = shortlist.tokens, shortlist.tokens[0]
    return slots


# Files.

@pytest.mark.parametrize("change, message", [
    (dict(target_hidden_size=64), "the head reads rows of 64 numbers, the model's have 48"),
    (dict(dflash_config={"mask_token_id": 3}), "target_layer_ids is None in config.json; allowed: numbers of the"),
    (dict(dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 9]}), "fc.weight has shape|layers .* not have"),
    (dict(dflash_config={"mask_token_id": 3, "target_layer_ids": [1, 0]}), r"target_layer_ids is \[1, 0\]"),
    (dict(dflash_config={"target_layer_ids": [0]}), "mask_token_id is None in config.json; allowed: 0 to 319"),
    (dict(dflash_config={"mask_token_id": 320, "target_layer_ids": [0]}), "mask_token_id is 320"),
    (dict(block_size=1), "block_size is 1 in config.json; allowed: 2 to 64"),
    (dict(block_size="x"), "block_size is 'x' in config.json; allowed: 1 or more"),
    (dict(vocab_size=99, dflash_config={"mask_token_id": 3, "target_layer_ids": [-1, 0, 1]}), "a vocabulary of 99"),
    (dict(is_causal="no"), "is_causal is 'no' in config.json; allowed: true or false"),
    (dict(layer_types=["linear"]), r"layer_types is \['linear'\] in config.json; allowed: 2 times full_attention or"),
    (dict(layer_types=["sliding_attention"] * 2), "sliding_window is None in config.json; allowed: 1 or more rows"),
    (dict(attention_bias=True), "attention_bias is true in config.json; longdraft's block heads have no biases"),
    (dict(dflash_config={"mask_token_id": 3, "target_layer_ids": [-1], "output_multiplier": "x"}), "tiplier is 'x' in"),
    (dict(longdraft={"hidden_size": 9}), "trained for hidden_size 9, but the model has 48"),
    (dict(markov_rank=8), "missing markov_head.markov_w1"),
    (dict(markov_rank=8, markov_head_type="rnn"), "markov_head_type is 'rnn' in config.json; supported: vanilla"),
])
def test_a_head_that_does_not_fit_is_refused_with_the_reason(tiny, tmp_path, change, message):
    write_block(tmp_path, Shape(), **change)
    with pytest.raises(ModelError, match=message) as caught:
        longdraft.load(str(tiny["mha"]), drafter="block", heads=str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name, tensor, message", [
    ("hidden_norm.weight", None, "missing hidden_norm.weight"),
    ("fc.weight", torch.zeros(HIDDEN, HIDDEN), r"fc.weight has shape \[48, 48\], not \[48, 144\]"),
    ("layers.0.self_attn.sinks", torch.zeros(4), "unexpected layers.0.self_attn.sinks"),
    ("norm.weight", torch.full((HIDDEN,), torch.nan), "norm.weight has 48 values that are NaN or infinite"),
    ("d2t", torch.arange(VOCAB), "d2t and t2d do not name the same 320 tokens"),
])
def test_damaged_tensors_are_refused(tiny, tmp_path, name, tensor, message):
    write_block(tmp_path, Shape())
    tensors = {key: value for key, value in load_file(tmp_path / "model.safetensors").items() if key != name}
    save_file(tensors | ({} if tensor is None else {name: tensor}), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_block(tmp_path, load(tiny["mha"]))


def copying_head(**flags: object) -> Shape:
    """A head whose layers do nothing: the guess of a row depends on its token alone."""
    shape = Shape(has_own_ends=True, **flags)
    for name in shape.tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            shape.tensors[name].zero_()
    return shape


def test_a_probe_finds_whether_the_first_row_guesses(tiny, tmp_path):
    """A head of speculators' kind dspark may have either layout. Of a text of one token, the first row's guess is
    right, and those of masks are not."""
    model = load(tiny["mha"])
    wanted = model.forward(chain_rows([7] * 9, 0), model.new_cache(), 9).logits.argmax(-1)
    assert len(set(wanted[2:].tolist())) == 1
    shape = copying_head(kind="dspark", first_guesses=True)
    right = int(wanted[-1])
    for token, guess in ((7, right), (MASK, right - 1)):
        row = torch.randn(HIDDEN)
        shape.tensors["embed_tokens.weight"][token] = row
        shape.tensors["lm_head.weight"][guess] = row * 9
    shape.tensors["norm.weight"] = torch.ones(HIDDEN)
    write_block(tmp_path, shape, "speculators", sample_from_anchor=None, longdraft=None)
    found = block_files.load_block(tmp_path, model, lambda *given: None, lambda text: [7] * 200)
    assert found.first_guesses


def test_a_head_that_predicts_nothing_gets_a_warning(tiny, tmp_path, caplog):
    write_block(tmp_path, Shape(), longdraft=None)
    block_files.load_block(tmp_path, load(tiny["mha"]), lambda *given: None, lambda text: prompt_of(200))
    assert "first guesses of the block head is the model's token" in caplog.text


def test_readings_that_the_file_leaves_open_are_tried_and_its_own_words_kept(tiny, tmp_path):
    from longdraft.parts.block_probe import _readings

    model = load(tiny["mha"])
    head = make_block(tmp_path / "silent", model)
    assert [(each.layers, each.config.causal) for each in _readings(head, 2)] == [
        ((0, 1, 2), (False, False)), ((0, 1, 2), (True, True))]
    head = make_block(tmp_path / "says", model, causal=True, taps=(1, 2))
    assert [(each.layers, each.config.causal) for each in _readings(head, 2)] == [
        ((1, 2), (True, True)), ((0, 1), (True, True))]


# Texts.

@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("settings", extent([dict(temperature=0.0), WARM], [WARM]))
def test_the_text_is_that_of_plain_decoding(tiny, tmp_path, shape, settings):
    model = load(tiny["gqa"])
    head = make_block(tmp_path, model, **SHAPES[shape])
    params, tally = SamplingParams(max_new_tokens=25, seed=5, **settings), Tally()
    written = generate(model, prompt_of(40), params, by_name("block", block=head, nodes=12, window=9), tally=tally)
    assert written == generate(model, prompt_of(40), params, by_name("plain"))
    assert tally.drafted["block"] > 0


@pytest.mark.parametrize("options", [dict(draft_vocabulary=100), dict(rows=3, nodes=2), dict(sinks=0, window=5)])
def test_a_smaller_draft_is_right_too(tiny, tmp_path, options):
    model = load(tiny["mha"])
    head = make_block(tmp_path, model)
    params, tally = SamplingParams(max_new_tokens=30, seed=5, min_p=0.05), Tally()
    written = generate(model, prompt_of(40), params, by_name("block", block=head, **options), tally=tally)
    assert written == generate(model, prompt_of(40), params, by_name("plain")) and tally.drafted["block"] > 0


def test_a_draft_vocabulary_gives_the_same_logits_of_its_tokens(tiny, tmp_path):
    model = load(tiny["mha"])
    head = make_block(tmp_path, model)
    drafter, context = read(model, head, IDS)
    all_logits = slots_of(drafter, context).logits
    limited = DraftVocabulary(model, 100).model(context)
    part = block.DraftBlock(context.last, len(context) - 1, head.config.block_size, drafter.rows.stores, limited)
    some = head.launch([part])[0].whole()
    assert (some > -torch.inf).sum() == 99 * len(some), "the mask is one of them"
    assert torch.equal(some[some > -torch.inf], all_logits[some > -torch.inf])


@pytest.mark.parametrize("shape", ["DFlash", "DFlash2, draft vocabulary"])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_layers_guess_nearly_the_same(tiny, tmp_path, shape, quantize):
    write_block(tmp_path, Shape(**SHAPES[shape]))
    model, logits = load(tiny["mha"]), []
    for asked in ("same", quantize):
        head = block_files.load_block(tmp_path, model, lambda *given: None, asked=asked)
        drafter, context = read(model, head, IDS)
        logits.append(slots_of(drafter, context).logits.clamp_min(-1e3))
    assert 0 < (logits[0] - logits[1]).abs().mean() < {"int8": 0.1, "int4": 0.5}[quantize] * logits[0].std()


@pytest.mark.parametrize("lie", ["other layers", "NaN states", "NaN logits", "the mask token"])
def test_a_head_that_lies_changes_nothing(tiny, tmp_path, monkeypatch, lie):
    model = load(tiny["mha"])
    head = make_block(tmp_path, model)
    if lie == "other layers":
        head = head.reading((2, 0, 1))
    elif lie == "NaN states":
        own = block.BlockHead.context
        monkeypatch.setattr(block.BlockHead, "context", lambda *given: tuple(x * torch.nan for x in own(*given)))
    else:
        row = torch.full((VOCAB,), torch.nan) if lie == "NaN logits" else torch.eye(VOCAB)[MASK] * 99
        monkeypatch.setattr(block.BlockHead, "_guesses", lambda self, rows, target: [
            block.SlotRows(x, row.repeat(len(x), 1), None) for x in rows])
    params, tally = SamplingParams(max_new_tokens=30, seed=5, min_p=0.05), Tally()
    written = generate(model, prompt_of(40), params, by_name("block", block=head, suffix="false"), tally=tally)
    assert written == generate(model, prompt_of(40), params, by_name("plain"))
    assert (tally.drafted.total() == 0) == lie.startswith("NaN")


def test_in_a_batch_the_blocks_of_all_texts_are_one_forward(tmp_path, monkeypatch):
    make_checkpoint(tmp_path)
    write_block(tmp_path / "block", Shape())
    batch = longdraft.load(str(tmp_path), drafter="block").batch()
    for seed in range(3):
        batch.add(prompt_of(30, seed), SamplingParams(max_new_tokens=30, seed=seed, ignore_eos=True))
    batch.step()
    seen, launch = [], block.BlockHead.launch
    monkeypatch.setattr(block.BlockHead, "launch", lambda self, parts: seen.append(len(parts)) or launch(self, parts))
    for _ in range(4):
        batch.step()
    assert seen == [3] * 4


def test_block_without_a_head_is_refused(tmp_path):
    make_checkpoint(tmp_path)
    with pytest.raises(LongdraftError, match=r"drafter 'block' needs a block head and .* has none; give --heads"):
        longdraft.load(str(tmp_path), drafter="block")


def test_a_block_head_where_an_eagle_head_belongs_is_refused_with_its_place(tmp_path):
    make_checkpoint(tmp_path)
    write_block(tmp_path / "eagle", Shape())
    with pytest.raises(ModelError, match="has a block head, not an EAGLE head; give it by --heads with"):
        longdraft.load(str(tmp_path), drafter="eagle")


def test_a_structured_text_is_that_of_plain_decoding(tiny, tmp_path):
    pytest.importorskip("llguidance")
    write_block(tmp_path, Shape(kind="dspark", first_guesses=True))
    params = SamplingParams(max_new_tokens=60, seed=3, temperature=0.8, min_p=0.02,
                            structured_outputs=("regex", "[a-z]{3,9}( [a-z]{3,9}){4,8}[.]"))
    texts = []
    for name, part in (("block", str(tmp_path)), ("plain", None)):
        engine = longdraft.load(str(tiny["gqa"]), drafter=name, heads=part)
        texts.append(resuming.written(engine.generate("It", params)))
    assert texts[0][1] == texts[1][1] and texts[0][2]["draft_tokens"] > 0
