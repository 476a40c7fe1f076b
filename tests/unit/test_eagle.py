"""EAGLE heads: what they compute, how their files are read, and what they draft."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import longdraft
from helpers import speculators_golden
from helpers.checkpoints import HIDDEN, VOCAB, load, make_checkpoint
from helpers.eagle import Shape, SlowEagle, load_eagle, make_eagle, write_eagle
from helpers.equality import params_of, prompt_of
from helpers.generation import by_name, generate
from longdraft import drafters, kernels
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.drafters.chain import Chain
from longdraft.drafters.eagle import EagleDraftModel
from longdraft.errors import LongdraftError, ModelError, UsageError
from longdraft.kernels.chain_plan import Ranked
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.parts import eagle, eagle_config, eagle_files
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Tally

SHAPES = {
    "plain": {},
    "normalised residual": dict(norm_before_residual=True),
    "3.1, one norm": dict(norm_before_residual=True, norm_before_fc=True, norm_output=True),
    "3.1, a norm for each layer": dict(fc_norm=True, norm_output=True),
    "qwen3 layer, rows of its own width": dict(head_norms=True, dim=16, hidden=32, has_own_embedding=True),
    "two layers, whole vocabulary": dict(layers=2, draft_vocab=VOCAB),
    "window": dict(window=6),
    "last state": dict(uses_taps=False),
    "EAGLE-1": dict(version=1, draft_vocab=VOCAB),
}
IDS = prompt_of(24)
DRAFTS = [5, 9, 11]


def read(model: Transformer, head: eagle.Eagle, ids: list[int], window: int = 0, sinks: int = 0,
         chunks: tuple[int, ...] = ()) -> tuple[EagleDraftModel, Context]:
    """A draft model whose target has read a text, a chunk at a time; the head catches up after each."""
    cache, context = model.with_taps(head.taps).new_cache(), Context(ids[:1])
    draft_model = EagleDraftModel(head, cache, window or head.config.window or 2048, sinks, 8)
    start = 0
    for end in (*chunks, len(ids) - 1):
        model.with_taps(head.taps).forward(chain_rows(ids[start:end], start), cache)
        cache.commit(range(end - start))
        context.extend(ids[start + 1 : end + 1])
        run_alone(draft_model.next_logits(context, [ids[end]]))
        start = end
    return draft_model, context


@pytest.fixture(scope="module")
def target(tiny) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny["gqa"])


@pytest.fixture(scope="module")
def states(target) -> torch.Tensor:
    """What enters both layers and what leaves the last one, before the final norm: [3, T, hidden]."""
    found = []
    hook = target.model.norm.register_forward_pre_hook(lambda module, given: found.append(given[0][0]))
    with torch.no_grad():
        first = target(torch.tensor([IDS]), output_hidden_states=True).hidden_states[:2]
    hook.remove()
    return torch.stack([*(layer[0] for layer in first), found[0]])


@pytest.mark.parametrize("name", [kernels.available()[0], "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_head_computes_what_it_was_trained_to_compute(tiny, tmp_path, target, states, shape, name):
    """The guesses after the text and after forced drafts, compared with plain PyTorch."""
    made, model = Shape(**SHAPES[shape]), load(tiny["gqa"], name=name)
    write_eagle(tmp_path, made, "eagle1" if made.version == 1 else "speculators")
    slow, head = SlowEagle(made, target), load_eagle(tmp_path, model)
    draft_model, context = read(model, head, IDS, chunks=(1, 5, 20))
    for count in range(len(DRAFTS) + 1):
        found = run_alone(draft_model.next_logits(context, [IDS[-1], *DRAFTS[:count]]))[0]
        wanted = slow.logits(states, IDS, DRAFTS[:count])
        torch.testing.assert_close(found[made.ids], wanted, atol=2e-4 * float(wanted.abs().max()), rtol=1e-3)
        assert (found == -torch.inf).sum() == VOCAB - made.draft_vocab


def chains(model: Transformer, head: eagle.Eagle, name: str, is_compiled: bool) -> list[list[Ranked]]:
    """The guesses of the chains of several steps, some of whose tokens become text."""
    tapped, context, found = model.with_taps(head.taps), Context(IDS), []
    cache = tapped.new_cache()
    draft_model = EagleDraftModel(head, cache, head.config.window or 12, 2, 5)
    chain = Chain(draft_model, Sampler(params_of(name), [1]), 2, "eagle", 0.5)
    for kept in (2, 0, 4, 1):
        rows = context.slice(cache.length, len(context) - 1).tolist()
        tapped.forward(chain_rows(rows, cache.length), cache)
        cache.commit(range(len(rows)))
        way = chain.in_one_call if is_compiled else chain.step_by_step
        found.append(run_alone(way(context, [context.last], 5)))
        context.extend([*(ranked.tokens[0] for ranked in found[-1][:kept]), 7])
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_chain_in_one_call_has_the_guesses_of_single_steps(tiny, tmp_path, shape, dtype):
    made, model = Shape(**SHAPES[shape]), load(tiny["gqa"], dtype)
    write_eagle(tmp_path, made, "eagle1" if made.version == 1 else "speculators")
    head = load_eagle(tmp_path, model)
    for name in ("greedy", "paper"):
        compiled = chains(model, head, name, is_compiled=True)
        assert [len(places) for places in compiled] == [5] * 4 and compiled == chains(model, head, name, False)


def test_a_chain_in_one_call_reads_the_new_rows_of_the_text_as_well(tiny, monkeypatch):
    model = load(tiny["mha"], "bfloat16")
    head = load_eagle(tiny["mha"] / "eagle", model)
    read_by_steps, forward = [], head.forward
    monkeypatch.setattr(head, "forward", lambda *given: read_by_steps.append(1) or forward(*given))
    chains(model, head, "paper", is_compiled=True)
    assert len(read_by_steps) == 2, "the prompt: its sinks, and the rows after them"


@pytest.mark.parametrize("shape", speculators_golden.SHAPES)
def test_the_slow_head_computes_what_the_module_of_speculators_computes(shape):
    """Logits of version 0.9.0, after texts, and after forced drafts (training-time test) or of masks (P-EAGLE)."""
    wanted = torch.tensor(json.loads(speculators_golden.FILE.read_text())[shape])
    states, tokens = speculators_golden.inputs()
    slow = SlowEagle(Shape(**speculators_golden.SHAPES[shape]), None)
    for place, row in enumerate(speculators_golden.ROWS):
        known = states[:, : row + 1], tokens[: row + 2]
        found = (slow.slots(*known, speculators_golden.PASSES) if slow.shape.mask is not None else torch.stack([
            slow.logits(*known, tokens[row + 2 : row + 2 + s]) for s in range(speculators_golden.PASSES)]))
        torch.testing.assert_close(found, wanted[:, place], atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["bare", "modelopt"])
@pytest.mark.parametrize("shape", ["plain", "3.1, a norm for each layer", "two layers, whole vocabulary"])
def test_the_layouts_of_one_head_give_the_same_guesses(tiny, tmp_path, layout, shape):
    made, model = Shape(**SHAPES[shape]), load(tiny["gqa"])
    logits = []
    for each in ("speculators", layout):
        write_eagle(tmp_path / each, made, each)
        assert eagle_config.is_eagle(tmp_path / each)
        draft_model, context = read(model, load_eagle(tmp_path / each, model), IDS)
        logits.append(run_alone(draft_model.next_logits(context, [IDS[-1], *DRAFTS])))
    assert torch.equal(*logits)


def test_after_a_gap_in_the_states_a_head_drafts_nothing_until_the_last_one_is_known(tiny):
    """Forwards copy no states while `auto` has no use for them."""
    model = load(tiny["mha"])
    head = load_eagle(tiny["mha"] / "eagle", model)
    draft_model, context = read(model, head, IDS[:9])
    assert run_alone(draft_model.next_logits(context, [context.last])) is not None
    context.extend(IDS[9:15])
    assert run_alone(draft_model.next_logits(context, [context.last])) is None
    tapped, cache = model.with_taps(head.taps), model.with_taps(head.taps).new_cache()
    tapped.forward(chain_rows(IDS[:-1], 0), cache)
    cache.commit(range(len(IDS) - 1))
    draft_model._taps._runs.append(cache.taps.take()[0].cut(14, len(IDS) - 1))
    context.extend(IDS[15:])
    found = run_alone(draft_model.next_logits(context, [context.last, *DRAFTS]))
    assert found is not None and torch.isfinite(found).any()
    assert draft_model.rows.first == 14, "the head sees the rows after the gap"


@pytest.mark.parametrize("window, sinks", [(2048, 4), (7, 0), (7, 3)])
def test_rejected_drafts_leave_nothing_behind(tiny, window, sinks):
    """After each step the guesses are those of a head that has read the text at once, without any draft."""
    model = load(tiny["mha"])
    head = load_eagle(tiny["mha"] / "eagle", model)
    draft_model, context = read(model, head, IDS[:9], window, sinks)
    for end, path in ((12, [3, 4]), (13, []), (17, [IDS[12], IDS[13], 7]), (24, [IDS[16]])):
        run_alone(draft_model.next_logits(context, [context.last, *path]))
        start = len(context) - 1
        tapped = model.with_taps(head.taps)
        cache = tapped.new_cache()
        tapped.forward(chain_rows(IDS[: end - 1], 0), cache)
        cache.commit(range(end - 1))
        new = cache.taps.take()[0].cut(start, end - 1)
        draft_model._taps._runs.append(new)
        context.extend(IDS[start + 1 : end])
        whole, same = read(model, head, IDS[:end], window, sinks)
        for drafts in ([], [5, 6]):
            found, wanted = (run_alone(each.next_logits(of, [of.last, *drafts]))
                             for each, of in ((draft_model, context), (whole, same)))
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_sinks_and_window_keep_far_texts_near(tiny):
    """After a long text the head sees what it would see at the beginning of a short one."""
    model = load(tiny["mha"])
    head = load_eagle(tiny["mha"] / "eagle", model)
    ids = prompt_of(400)
    draft_model, context = read(model, head, ids, 16, 2)
    assert draft_model.rows.num_text == 18 and draft_model.rows.end == 399
    assert (draft_model.rows.first, draft_model.rows.num_sinks) == (383, 2)
    logits = run_alone(draft_model.next_logits(context, [ids[-1]]))
    assert logits[:, head._weights.ids].isfinite().all()


# Files.


@pytest.mark.parametrize("ids, num_layers, wanted", [
    (None, 32, [(2, 16, 29)]), (None, 8, [(2, 4, 5)]), ([1, 11, 21], 24, [(2, 12, 22), (1, 11, 21)]),
    ([2, 16, 29], 32, [(2, 16, 29), (3, 17, 30)]), ([24, 30, 36], 36, [(24, 30, 36)]), ([24, 30, 37], 36, [])])
def test_the_numbers_of_the_tapped_layers_have_two_meanings(tmp_path, ids, num_layers, wanted):
    write_eagle(tmp_path, Shape(), eagle_aux_hidden_state_layer_ids=ids)
    config = eagle_config.read_eagle_config(tmp_path, TensorFiles(tmp_path))
    assert eagle_config.layer_readings(config, num_layers) == wanted


def test_a_probe_finds_the_meaning_under_which_the_head_predicts_the_model(tmp_path):
    """The head copies the last of its states to the model's output matrix. The text repeats one token, so the model
    chooses one token at all places, and only what leaves the last layer predicts it."""
    theirs = make_checkpoint(tmp_path / "model", num_hidden_layers=5, tie_word_embeddings=False)
    model, shape = load(tmp_path / "model"), Shape(draft_vocab=VOCAB)
    for name in shape.tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            shape.tensors[name].zero_()
    shape.tensors["lm_head.weight"] = theirs.lm_head.weight.detach().clone()
    shape.tensors["norm.weight"] = theirs.model.norm.weight.detach()
    shape.tensors["fc.weight"] = torch.cat([torch.zeros(HIDDEN, 2 * HIDDEN), torch.eye(HIDDEN)], 1)
    for numbers, likeliest in (([2, 3, 4], (2, 3, 4)), ([1, 2, 4], (2, 3, 5))):
        write_eagle(tmp_path / "head", shape, eagle_aux_hidden_state_layer_ids=numbers, longdraft=None)
        meanings = [eagle_files.load_eagle(tmp_path / "head", model, lambda *given: None, encode).layers
                    for encode in (None, lambda text: [7] * 200)]
        assert meanings == [likeliest, tuple(number + 1 for number in numbers)]


@pytest.mark.parametrize("is_normed", [True, False])
def test_a_probe_finds_whether_a_head_of_specforge_feeds_back_normalised_rows(tmp_path, is_normed):
    """SpecForge writes `norm_output` for heads of both kinds. The head copies the last state to the output, with signs:
    its own norm flips some, so a second norm flips them back. The model has the same signs, or none."""
    signs = torch.ones(HIDDEN)
    signs[::3] = -1
    theirs = make_checkpoint(tmp_path / "model", tie_word_embeddings=False)
    theirs.model.norm.weight.data = torch.ones(HIDDEN) if is_normed else signs
    theirs.save_pretrained(tmp_path / "model")
    model, shape = load(tmp_path / "model"), Shape(draft_vocab=VOCAB, norm_output=True)
    for name in shape.tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            shape.tensors[name].zero_()
    shape.tensors |= {"lm_head.weight": theirs.lm_head.weight.detach().clone(), "norm.weight": signs,
                      "fc.weight": torch.cat([torch.zeros(HIDDEN, 2 * HIDDEN), torch.eye(HIDDEN)], 1)}
    for layout in ("bare", "speculators"):
        write_eagle(tmp_path / layout, shape, layout, longdraft=None)
    heads = [eagle_files.load_eagle(tmp_path / layout, model, lambda *given: None, lambda text: [7] * 200)
             for layout in ("bare", "speculators")]
    assert [head.config.norm_output for head in heads] == [is_normed, True]  # speculators means what it says


@pytest.mark.parametrize("change, message", [
    (dict(target_hidden_size=64), "the head reads rows of 64 numbers, the model's have 48"),
    (dict(eagle_aux_hidden_state_layer_ids=[0, 1, 9]), r"reads layers \[0, 1, 9\], which a model of 2 layers"),
    (dict(eagle_aux_hidden_state_layer_ids=["x"]), r"eagle_aux_hidden_state_layer_ids is \['x'\]; allowed: layer num"),
    (dict(draft_vocab_size=100), r"d2t and t2d do not name the same 100 tokens|lm_head.weight has shape"),
    (dict(norm_output="yes"), "norm_output is 'yes' in config.json; allowed: true or false"),
    (dict(fc_norm=True), "missing fc_norm.0.weight; missing fc_norm.1.weight; missing fc_norm.2.weight"),
    (dict(attention_bias=True), "attention_bias is true in config.json; longdraft's EAGLE layers have no biases"),
    (dict(transformer_layer_config=None), "config.json has no transformer_layer_config"),
    (dict(speculators_model_type="xpress"), "'xpress', which longdraft does not load yet; it lacks its refiner"),
    (dict(longdraft={"hidden_size": 9}), "trained for hidden_size 9, but the model has 48"),
])
def test_a_head_that_does_not_fit_is_refused_with_the_reason(tiny, tmp_path, change, message):
    write_eagle(tmp_path, Shape(), **change)
    with pytest.raises(ModelError, match=message) as caught:
        longdraft.load(str(tiny["mha"]), drafter="eagle", heads=str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name, tensor, message", [
    ("d2t", torch.arange(200) * 2, "d2t and t2d do not name the same 200 tokens below 320"),
    ("d2t", torch.zeros(200), "d2t has dtype torch.float32; allowed: whole numbers"),
    ("d2t", None, ""),
    ("t2d", None, ""),
    ("t2d", torch.ones(VOCAB, dtype=torch.bool), "do not name the same 200 tokens"),
    ("layers.0.hidden_norm.weight", None, "missing layers.0.hidden_norm.weight"),
    ("layers.0.self_attn.q_proj.bias", torch.zeros(48), "unexpected layers.0.self_attn.q_proj.bias"),
    ("norm.weight", torch.full((HIDDEN,), torch.nan), "norm.weight has 48 values that are NaN or infinite"),
])
def test_damaged_tensors_are_refused_and_one_map_of_the_vocabulary_is_enough(tiny, tmp_path, name, tensor, message):
    write_eagle(tmp_path, Shape())
    tensors = {key: value for key, value in load_file(tmp_path / "model.safetensors").items() if key != name}
    save_file(tensors | ({} if tensor is None else {name: tensor}), tmp_path / "model.safetensors")
    model = load(tiny["mha"])
    if not message:
        assert torch.equal(load_eagle(tmp_path, model)._weights.ids, Shape().ids)
        return
    with pytest.raises(ModelError, match=message):
        load_eagle(tmp_path, model)


def test_a_head_without_an_output_head_has_the_rows_of_a_tied_target(tmp_path):
    for name, is_tied in (("tied", True), ("untied", False)):
        make_checkpoint(tmp_path / name, tie_word_embeddings=is_tied)
    model, shape = load(tmp_path / "tied"), Shape()
    table = model.kernels.embed(model.weights.embedding, shape.ids.tolist())
    found = []
    for name, tensors in (("with", {"lm_head.weight": table.contiguous()}), ("without", {})):
        write_eagle(tmp_path / name, shape)
        rest = {key: value for key, value in shape.tensors.items() if key != "lm_head.weight"}
        save_file(rest | tensors, tmp_path / name / "model.safetensors")
        draft_model, context = read(model, load_eagle(tmp_path / name, model), IDS)
        found.append(run_alone(draft_model.next_logits(context, [context.last])))
    assert torch.equal(*found) and (found[0] > -torch.inf).sum() == shape.draft_vocab
    with pytest.raises(ModelError, match=r"has no lm_head.weight. longdraft takes the model's rows for .* 200 tokens"):
        load_eagle(tmp_path / "without", load(tmp_path / "untied"))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_layers_guess_nearly_the_same(tiny, tmp_path, quantize):
    write_eagle(tmp_path, Shape())
    model, logits = load(tiny["mha"]), []
    for asked in ("same", quantize):
        head = eagle_files.load_eagle(tmp_path, model, lambda *given: None, asked=asked)
        draft_model, context = read(model, head, IDS)
        logits.append(run_alone(draft_model.next_logits(context, [context.last])).clamp_min(-1e3))
    guessed = logits[0] > -1e3
    difference = (logits[0] - logits[1])[guessed].abs().mean()
    assert 0 < difference < {"int8": 0.1, "int4": 0.5}[quantize] * logits[0][guessed].std()


@pytest.mark.parametrize("name", ["eagle", "block"])
def test_formats_that_heads_do_not_have_are_refused(name):
    with pytest.raises(UsageError, match="draft_weights is 'file'; allowed: auto, same, int8, int4"):
        drafters.parse_options(name, {"draft_weights": "file"})


def test_a_head_in_a_bin_file_is_the_same_head(tiny, tmp_path):
    for name in ("safe", "bin"):
        write_eagle(tmp_path / name, Shape(), "bare")
    torch.save(load_file(tmp_path / "bin" / "model.safetensors"), tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "model.safetensors").unlink()
    model = load(tiny["mha"])
    ours, theirs = (TensorFiles(tmp_path / name).fingerprint() for name in ("bin", "safe"))
    assert ours == theirs
    assert load_eagle(tmp_path / "bin", model).config == load_eagle(tmp_path / "safe", model).config


def test_a_head_given_as_a_model_is_refused_with_the_right_options(tmp_path):
    write_eagle(tmp_path, Shape())
    with pytest.raises(ModelError, match="give the model that it was trained for as --model, and --heads"):
        longdraft.load(str(tmp_path))


# Texts.


@pytest.mark.parametrize("lie", ["random weights", "other ids", "other layers", "NaN states"])
def test_a_head_that_lies_changes_nothing(tiny, tmp_path, monkeypatch, lie):
    model, shape = load(tiny["mha"]), Shape()
    if lie == "random weights":
        shape.tensors["lm_head.weight"] = torch.randn_like(shape.tensors["lm_head.weight"]) * 9
    elif lie == "other ids":
        del shape.tensors["t2d"]
        shape.tensors["d2t"] = torch.zeros(200, dtype=torch.int64)
    write_eagle(tmp_path, shape)
    head = load_eagle(tmp_path, model)
    if lie == "other layers":
        head = head.reading((2, 0, 1), norm_before_residual=True)
    if lie == "NaN states":
        monkeypatch.setattr(type(head), "fuse", lambda self, states: torch.full((states.shape[1], HIDDEN), torch.nan))
    params = SamplingParams(max_new_tokens=30, seed=5, min_p=0.05)
    prompt = prompt_of(40)
    tally = Tally()
    written = generate(model, prompt, params, by_name("eagle", eagle=head, suffix="false"),
                       tally=tally)
    assert written == generate(model, prompt, params, by_name("plain"))
    assert (tally.drafted.total() == 0) == (lie == "NaN states")


def test_eagle_without_a_head_is_refused(tmp_path):
    make_checkpoint(tmp_path / "tiny")
    with pytest.raises(LongdraftError, match=r"drafter 'eagle' needs an EAGLE head and .* has none; give --heads"):
        longdraft.load(str(tmp_path / "tiny"), drafter="eagle")


def test_a_broken_head_in_the_models_folder_is_left_out_by_auto(tmp_path, caplog):
    make_checkpoint(tmp_path / "tiny")
    make_eagle(tmp_path / "tiny" / "eagle")
    (tmp_path / "tiny" / "eagle" / "config.json").write_text(json.dumps({"speculators_model_type": "xpress"}))
    assert longdraft.load(str(tmp_path / "tiny")).eagle is None
    assert "drafting without eagle" in caplog.text and "refiner" in caplog.text
