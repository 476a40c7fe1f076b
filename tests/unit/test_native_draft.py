"""A chain that the compiled module drafts in one call has the tokens of the step-by-step chain, bit for bit."""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import load, make_checkpoint
from helpers.equality import SETTINGS, params_of, prompt_of
from helpers.families import CPU_FAMILIES, GEMMA4, MIXTURES, make_family
from longdraft import kernels
from longdraft.drafters import draft_vocabulary
from longdraft.drafters.chain import Chain, SelfDraftModel
from longdraft.drafters.confidence import Confidence
from longdraft.drafters.draft_vocabulary import DraftVocabulary
from longdraft.drafters.self_draft import MagicDecOptions, new_partial_cache
from longdraft.drafters.streaming_model import StreamingDraftModel
from longdraft.kernels import AttentionRows
from longdraft.kernels.launched import finished, read_together
from longdraft.model.transformer import chain_rows
from longdraft.request.context import Context
from longdraft.request.tree import Trie
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone


def drafts(model, params, prompt, *, budget, natively, width=2, vocabulary=None, least=0.0):
    """The trees of several steps of a chain over a partial cache, and the rows that the last one left there."""
    cache = model.new_cache()
    context = Context(prompt)
    sampler = Sampler(params, [1])
    options = MagicDecOptions(budget=budget, sinks=4, refresh=8, width=width)
    partial = new_partial_cache(options, model, cache)
    draft_model = SelfDraftModel(model, partial, vocabulary=vocabulary and DraftVocabulary(model, vocabulary))
    if not natively:
        draft_model.plan = lambda *given: None
    chain = Chain(draft_model, sampler, width, "self", 0.5, Confidence(least))
    trees, rows = [], None
    for _ in range(4):
        new = context.slice(cache.length, len(context) - 1).tolist()
        forward = model.forward(chain_rows(new, cache.length), cache)
        cache.commit(range(len(new)))
        partial.update(AttentionRows.all(forward.attention_output))
        trie = Trie(context.last)
        node, path = run_alone(chain.draft(trie, context, [context.last], 5))
        tree = trie.tree()
        trees.append((tree.tokens, tree.parents, node, path))
        further = run_alone(chain._replace(confidence=None).draft(Trie(path[-1]), context, path, 2))  # after the first
        trees[-1] += further
        rows = [tensor for store in partial._base.stores
                for tensor in store.read(torch.arange(partial.length).expand(store.shape[0], -1))]
        rows += [part.clone() for state in (partial._states.current if partial._states else ()) for part in state]
        partial.drop_drafts()
        text = path[1:4] or [2, 3, 4]
        chain.confidence.learn(text)
        context.extend(text)
    return trees, rows


@pytest.mark.parametrize("family", ["mha", "gqa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("budget", [24, 4000], ids=["with a remainder", "whole"])
def test_native_chains_equal_step_by_step_chains(tiny, family, dtype, budget):
    model = load(tiny[family], dtype)
    for name in SETTINGS:
        step_by_step, native = (drafts(model, params_of(name), prompt_of(60), budget=budget, natively=way)
                                for way in (False, True))
        assert native[0] == step_by_step[0], name
        assert all(torch.equal(*pair) for pair in zip(native[1], step_by_step[1], strict=True)), name


@pytest.mark.parametrize("dtype, budget", [("float32", 24), ("bfloat16", 4000)])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", *MIXTURES, *GEMMA4])
def test_chains_of_hybrids_mixtures_and_gemma_4_are_the_same_natively(tmp_path, monkeypatch, family, dtype, budget):
    """Their rows, and the states after them. Each native chain is one call."""
    make_family(tmp_path, family)
    model = load(tmp_path, dtype)
    step_by_step = drafts(model, params_of("paper"), prompt_of(60), budget=budget, natively=False)
    monkeypatch.setattr(Chain, "step_by_step", None)
    native = drafts(model, params_of("paper"), prompt_of(60), budget=budget, natively=True)
    assert native[0] == step_by_step[0]
    assert all(torch.equal(*pair) for pair in zip(native[1], step_by_step[1], strict=True))


@pytest.mark.parametrize("family", ["qwen3_5", "gpt_oss", "gemma4, inputs"])
@pytest.mark.parametrize("threads", [1, 3])
def test_chains_of_several_texts_at_the_same_time_have_the_guesses_of_each_alone(tmp_path, family, threads):
    make_family(tmp_path, family)
    model = load(tmp_path, "bfloat16")

    def begun(seed):
        """A text whose prompt is read, with a partial cache."""
        cache, context = model.new_cache(), Context(prompt_of(40 + 9 * seed, seed))
        partial = new_partial_cache(MagicDecOptions(budget=24, sinks=4), model, cache)
        forward = model.forward(chain_rows(context.slice(0, len(context) - 1).tolist(), 0), cache)
        cache.commit(range(len(context) - 1))
        partial.update(AttentionRows.all(forward.attention_output))
        return SelfDraftModel(model, partial), context, Sampler(params_of("paper"), [1])

    def routine(draft_model, context, sampler, length):
        return Chain(draft_model, sampler, 2, "self", 0.5).in_one_call(context, [context.last], length)

    lengths = (5, 2, 7, 1)
    alone = [finished(routine(*begun(seed), length)) for seed, length in enumerate(lengths)]
    kernels.set_threads(threads)
    try:
        routines = [routine(*begun(seed), length) for seed, length in enumerate(lengths)]
        read_together([next(each) for each in routines])
        assert [finished(each) for each in routines] == alone
        assert [len(places) for places in alone] == list(lengths)
    finally:
        kernels.set_threads(1)


def test_a_drafted_row_that_is_not_finite_spoils_no_later_chain(tmp_path):
    """Such a row stays behind the text's rows in the stores of the partial cache."""
    table = make_checkpoint(tmp_path, tie_word_embeddings=False).model.embed_tokens.weight.data
    model, context, damaged = load(tmp_path), Context(prompt_of(60)), 300
    table[damaged] = torch.nan
    model.weights = model.weights._replace(embedding=model.kernels.pack(table))
    cache = model.new_cache()
    model.forward(chain_rows(context.slice(0, 59).tolist(), 0), cache)
    cache.commit(range(59))
    partial = new_partial_cache(MagicDecOptions(budget=24, sinks=4), model, cache)
    chain = Chain(SelfDraftModel(model, partial), Sampler(params_of("greedy"), [1]), 2, "self", 0.5)

    def guesses(path, length):
        return finished(chain.in_one_call(context, path, length))

    sound = guesses([context.last], 5)
    partial.drop_drafts()
    guesses([context.last], 2)
    assert not guesses([context.last, 7, damaged], 1)[0].tokens
    partial.drop_drafts()
    assert guesses([context.last], 5) == sound


@pytest.mark.parametrize("width", [1, 3])
def test_chains_end_at_the_same_token_natively(tiny, width):
    model = load(tiny["gqa"])
    lengths = set()
    for name in SETTINGS:
        step_by_step, native = (drafts(model, params_of(name), prompt_of(60), budget=24, natively=way, width=width,
                                       least=0.7) for way in (False, True))
        assert native[0] == step_by_step[0], name
        lengths |= {len(path) for _, _, _, path, *_ in native[0]}
    assert len(lengths) > 2, "some chains ended early"


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chains_of_a_draft_vocabulary_are_the_same_natively(tiny, monkeypatch, quantize, dtype):
    monkeypatch.setattr(draft_vocabulary, "_RENEW_AFTER", (2, 2))  # the vocabulary changes between two steps
    model = load(tiny["gqa"], dtype, quantize=quantize)
    for name in SETTINGS:
        step_by_step, native = (drafts(model, params_of(name), prompt_of(60), budget=24, natively=way, width=3,
                                       vocabulary=64) for way in (False, True))
        assert native[0] == step_by_step[0], name


def test_settings_that_need_python_are_drafted_step_by_step(tiny):
    model = load(tiny["mha"])
    draft_model = SelfDraftModel(model, None)
    context = Context(prompt_of(20))
    samplers = {name: Sampler(params_of(name), [1]) for name in SETTINGS}
    supported = {name: sampler.ranker(context, model.config.vocab_size, 1, 0.0) is not None
                 for name, sampler in samplers.items()}
    assert supported["paper"] and supported["top-k"] and not supported["all of it"]
    chain = Chain(draft_model, samplers["all of it"], 1, "self", 0.0)
    assert run_alone(chain.in_one_call(context, [context.last], 3)) is None


@pytest.mark.parametrize("family", CPU_FAMILIES)
def test_chains_of_models_with_soft_caps_and_two_rotations_are_equal_too(tmp_path, family):
    make_family(tmp_path, family)
    for dtype in ("float32", "bfloat16"):
        model = load(tmp_path, dtype)
        step_by_step, native = (drafts(model, params_of("paper"), prompt_of(60), budget=24, natively=way)
                                for way in (False, True))
        assert native[0] == step_by_step[0]
        assert all(torch.equal(*pair) for pair in zip(native[1], step_by_step[1], strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_small_model_with_a_cache_of_its_own_drafts_natively_what_it_drafts_step_by_step(tiny, dtype):
    """Through accepted and rejected drafts, after drafted tokens, and where its window moves."""
    model = load(tiny["gqa"], dtype)
    for name in ("paper", "top-k"):
        both = [(Chain(StreamingDraftModel(model, model.config.vocab_size, 40, 4, 10), Sampler(params_of(name), [1]), 2,
                       "draft"), Context(prompt_of(20))) for _ in range(2)]
        num_native = 0
        for step in range(8):
            drafted = []
            for way, (chain, context) in enumerate(both):
                path = [context.last, *([3, 8] if step % 3 == 1 else [])]
                ranked = finished(chain.in_one_call(context, path, 4)) if way else None
                num_native += ranked is not None
                drafted.append(ranked or run_alone(chain.step_by_step(context, path, 4)))
                context.extend([drafted[0][0].tokens[0], 9, 7] if step % 2 else [each.tokens[0] for each in drafted[0]])
            assert drafted[0] == drafted[1], (name, step)
        assert 4 <= num_native < 8, "where the window moves, it goes step by step"
