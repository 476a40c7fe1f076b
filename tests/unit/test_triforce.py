"""A head as the first level of `triforce`: it drafts after tokens whose states the second level has computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import longdraft
from helpers import block as block_heads
from helpers import eagle as eagle_heads
from helpers.checkpoints import load
from helpers.equality import SETTINGS, prompt_of
from helpers.generation import by_name, generate
from longdraft import drafters
from longdraft.cache.taps import TapLog, TappedRows
from longdraft.drafters.auto import costs
from longdraft.drafters.auto.costs import Costs, DraftCosts, ForwardCosts
from longdraft.drafters.auto.drafter import AutoOptions
from longdraft.drafters.eagle import EagleDraftModel, ParallelEagleModel
from longdraft.drafters.layer_drafter import SlotModel
from longdraft.drafters.triforce import Reader, new_reader, tapped_drafts
from longdraft.errors import UsageError
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.parts.block import BlockHead
from longdraft.parts.eagle import Eagle
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Verified
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Tally

IDS, DRAFTED = prompt_of(30), 7  # the last tokens of IDS are drafted
GUESSES = 3
EAGLES = {"eagle": {}, "p-eagle": dict(mask=300, layers=2), "eagle, window": dict(window=40)}
BLOCKS = {"dflash": {}, "dflash2": dict(kind="dflash2"), "dspark": dict(kind="dspark"),
          "every row guesses, rows see the ones before": dict(first_guesses=True, causal=True)}
WARM = dict(temperature=0.8, min_p=0.05)


@pytest.fixture(scope="module")
def model(tiny) -> Transformer:
    return load(tiny["gqa"])


@pytest.fixture(params=[*EAGLES, *BLOCKS])
def head(request, tmp_path, model) -> Eagle | BlockHead:
    if request.param in BLOCKS:
        return block_heads.make_block(tmp_path, model, **BLOCKS[request.param])
    eagle_heads.write_eagle(tmp_path, eagle_heads.Shape(**EAGLES[request.param]))
    return eagle_heads.load_eagle(tmp_path, model)


class Reading:
    """A head with a text of which the target has read all but the last token, and the states of drafted tokens."""

    def __init__(self, model: Transformer, head: Eagle | BlockHead, ids: Sequence[int], **settings: object) -> None:
        params = SamplingParams(**(dict(temperature=0.0, seed=5) | settings))
        tapped = model.with_taps(head.taps)
        self.cache, self.context, self.head = tapped.new_cache(), Context(list(ids)), head
        tapped.forward(chain_rows(list(ids[:-1]), 0), self.cache)
        self.cache.commit(range(len(ids) - 1))
        self.states = tapped_drafts(head, model)
        self.sampler = Sampler(params)
        self.reader: Reader = new_reader(head, self.cache, self.sampler, self.states, DRAFTED + GUESSES)

    def guesses(self, path: Sequence[int]) -> list[Tensor]:
        """What the head guesses after drafted tokens: logits of the first token, or of all slots tokens and scores."""
        path = [self.context.last, *path]
        if isinstance(self.reader, EagleDraftModel) and not self.head.config.is_parallel:
            return [run_alone(self.reader.next_logits(self.context, path))]
        slots: SlotModel = self.reader
        if isinstance(self.reader, EagleDraftModel):
            slots = ParallelEagleModel(self.reader, self.head, self.sampler, GUESSES)
        found = run_alone(slots.slots(self.context, path, GUESSES))
        assert len(found) == GUESSES
        return [torch.tensor(part) for slot in found for part in (slot.tokens, slot.scores) for part in [list(part)]]


@pytest.mark.parametrize("settings", [{}, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("steps", [(7,), (1, 3, 3), (2, 1, 4)])
def test_after_drafted_tokens_a_head_guesses_what_it_guesses_after_a_text_that_has_them(model, head, steps, settings):
    """The states come in the steps of level 2; the head guesses before each."""
    known = len(IDS) - DRAFTED
    states = block_heads.states_of(model, IDS, head.taps)
    drafting = Reading(model, head, IDS[:known], **settings)
    end = known
    for count in steps:
        drafting.guesses(IDS[known:end])  # they leave nothing behind
        drafting.states._runs.append(TappedRows(end - 1, states[:, end - 1 : end - 1 + count]))
        end += count
        found = drafting.guesses(IDS[known:end])
        wanted = Reading(model, head, IDS[:end], **settings).guesses([])
        for own, other in zip(found, wanted, strict=True):
            finite = torch.isfinite(other)
            torch.testing.assert_close(own[finite], other[finite], atol=2e-3, rtol=1e-3)
        again = drafting.guesses(IDS[known:end])
        assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True)), "drafts are forgotten"


def test_states_and_no_others_are_read(model, head):
    """States of other tokens give other guesses: the test above would find them."""
    known, states = len(IDS) - DRAFTED, block_heads.states_of(model, IDS, head.taps)
    own, other = (Reading(model, head, IDS[:known]) for _ in range(2))
    for reading, shift in ((own, 0), (other, 1)):
        reading.states._runs.append(TappedRows(known - 1, states[:, known - 1 - shift : known + 3 - shift]))
    pairs = zip(own.guesses(IDS[known : known + 4]), other.guesses(IDS[known : known + 4]), strict=True)
    assert any(not torch.allclose(a.float(), b.float(), atol=2e-2) for a, b in pairs)


@pytest.mark.parametrize("settings", ["greedy, penalty", "all of it"])
def test_the_text_is_that_of_plain_decoding(model, head, settings):
    params = SamplingParams(max_new_tokens=30, seed=4, **SETTINGS[settings])
    part = {"block": head} if isinstance(head, BlockHead) else {"eagle": head}
    factory = by_name("triforce", first="head", budget=48, stride=10, chain=5, guesses=3, **part)
    factory.taps = head.taps
    plain = generate(model, prompt_of(90), params, by_name("plain"))
    assert generate(model, prompt_of(90), params, factory, tally=Tally()) == plain


@pytest.mark.parametrize("lie", ["noise", "NaN", "states of other tokens"])
def test_a_head_that_lies_changes_nothing(model, head, monkeypatch, lie):
    params = SamplingParams(max_new_tokens=20, seed=4, temperature=1.0, min_p=0.1)
    plain = generate(model, prompt_of(90), params, by_name("plain"))
    part = {"block": head} if isinstance(head, BlockHead) else {"eagle": head}
    if lie == "states of other tokens":
        take = TapLog.take
        monkeypatch.setattr(TapLog, "take", lambda log: [
            TappedRows(run.start, run.states.roll(1, 1)) for run in take(log)])
    else:
        made = torch.Generator().manual_seed(1)
        tell = {"noise": lambda x: torch.randn(x.shape, generator=made), "NaN": lambda x: x * torch.nan}[lie]
        guesses, fuse = BlockHead._guesses, Eagle.fuse
        monkeypatch.setattr(BlockHead, "_guesses", lambda self, rows, target: guesses(
            self, [tell(x).to(x.dtype) for x in rows], target))
        monkeypatch.setattr(Eagle, "fuse", lambda self, states: tell(fuse(self, states)).to(states.dtype))
    factory = by_name("triforce", first="head", budget=48, stride=10, chain=5, guesses=3, **part)
    factory.taps = head.taps
    assert generate(model, prompt_of(90), params, factory) == plain


def test_the_longest_chain_with_the_most_guesses_is_drafted(model, head):
    params = SamplingParams(max_new_tokens=70, seed=4, temperature=0.0)
    part = {"block": head} if isinstance(head, BlockHead) else {"eagle": head}
    factory = by_name("triforce", first="head", chain=64, guesses=16, **part)
    factory.taps = head.taps
    assert generate(model, prompt_of(40), params, factory) == generate(model, prompt_of(40), params, by_name("plain"))


class World:
    """A text that its target reads a few tokens at a time, and drafters beside it."""

    def __init__(self, model: Transformer, head: Eagle | BlockHead) -> None:
        self.model, self.context, params = model.with_taps(head.taps), Context(IDS[:1]), SamplingParams(temperature=0.0)
        self.cache, self._end = self.model.new_cache(), 0
        part = {"block": head} if isinstance(head, BlockHead) else {"eagle": head}
        self.resources = drafters.Resources(self.model, self.cache, Sampler(params), params, draft_copy=model, **part)

    def read(self, count: int) -> Verified:
        start, self._end = self._end, self._end + count
        result = self.model.forward(chain_rows(IDS[start : self._end], start), self.cache)
        self.cache.commit(range(count))
        self.context.extend(IDS[start + 1 : self._end + 1])
        return Verified(result, range(count))


def test_in_auto_the_drafters_of_a_head_share_its_rows_of_the_text(model, head, monkeypatch):
    """A draft of one of them changes no draft of the other."""
    monkeypatch.setattr(drafters, "SMALL_BYTES", -1)
    name = "block" if isinstance(head, BlockHead) else "eagle"
    both, alone = World(model, head), World(model, head)
    resources = drafters._with_shared_cache(both.resources, "auto")
    candidates = drafters._candidates(AutoOptions(), resources)
    own = drafters._candidates(AutoOptions(), alone.resources._replace(draft_copy=None))
    assert "triforce" in candidates and "triforce" not in own
    for turn, count in enumerate((9, 2, 1, 3, 4, 2, 1)):
        verified = both.read(count)
        alone.read(count)
        for each in (candidates["triforce"], candidates[name]):
            each.begin(both.context, verified)
        own[name].begin(alone.context, None)
        if turn % 3 != 2:
            drafted = run_alone(candidates["triforce"].propose(both.context, 6))
            assert len(drafted) == 7
        if turn % 2 == 0:
            found, wanted = (run_alone(each.propose(world.context, 5))
                             for each, world in ((candidates[name], both), (own[name], alone)))
            assert found.tokens == wanted.tokens and len(found) > 1


def test_auto_tries_it_over_a_copy_that_is_not_small(tiny, monkeypatch):
    def write(drafter: str) -> dict[str, object]:
        options = {"draft_weights": "int8"} if drafter == "auto" else {}
        engine = longdraft.load(str(tiny["mha"]), drafter=drafter, drafter_options=options)
        params = SamplingParams(max_new_tokens=60, seed=2, ignore_eos=True)
        return [event.stats for event in engine.generate(prompt_of(40), params)][-1]

    assert "triforce" not in write("auto")["tokens_by_choice"]
    monkeypatch.setattr(drafters, "SMALL_BYTES", -1)
    stats = write("auto")
    assert "triforce" in stats["tokens_by_choice"]
    assert stats["sha256_tokens"] == write("plain")["sha256_tokens"]


def test_an_engine_with_other_options_of_auto_has_candidates_of_its_own(tiny, monkeypatch):
    monkeypatch.setattr(drafters, "SMALL_BYTES", -1)
    forward = ForwardCosts(1e-4, (1e-2,) * len(costs.ROWS), 1e5, 0.0)  # drafts always pay, those of `triforce` most
    monkeypatch.setattr(costs, "load_or_measure", lambda identity, names, agree, measured: Costs(
        forward, {name: DraftCosts(0.0, 1e-6 if name == "triforce" else 1.0, 1.0, 4) for name in names}))
    engine = longdraft.load(str(tiny["mha"]), drafter="auto", drafter_options={"draft_weights": "int8"})
    params = SamplingParams(max_new_tokens=60, seed=2, ignore_eos=True)
    first, second, plain = ([event.stats for event in each.generate(prompt_of(40), params)][-1] for each in (
        engine, engine.with_drafter("auto", {"draft_weights": "same"}), engine.with_drafter("plain")))
    assert first["tokens_by_choice"]["triforce"] > 0 and "triforce" not in second["tokens_by_choice"]
    assert first["sha256_tokens"] == second["sha256_tokens"] == plain["sha256_tokens"]


@pytest.fixture(scope="module")
def novelist_stats():
    """Statistics of a text of `novelist`, which has an EAGLE head and a small model."""
    def stats(drafter: str, **options: object) -> dict[str, dict[str, dict[str, int]]]:
        engine = longdraft.load("novelist", drafter=drafter, drafter_options=options)
        params = SamplingParams(max_new_tokens=60, seed=3, min_p=0.1, ignore_eos=True)
        return [event.stats for event in engine.generate("It was a dark evening, and", params)][-1]
    return stats


@pytest.mark.parametrize("options, source", [
    ({}, "eagle"), (dict(first="model"), "draft"), (dict(model="novelist"), "draft"), (dict(first="ngrams"), "ngram")])
def test_level_1_is_a_head_before_a_small_model_before_ngrams(novelist_stats, options, source):
    stats = novelist_stats("triforce", **options)
    assert stats["sha256_tokens"] == novelist_stats("plain")["sha256_tokens"]
    assert set(stats["by_source"]) <= {source, "retrieval"}
    if source != "ngram":
        assert stats["by_source"][source]["accepted"] > 0


def test_a_head_spares_forwards_of_level_2(novelist_stats):
    """Each forward adds one token of its own; the others are guesses of level 1."""
    forwards = {first: novelist_stats("triforce", first=first)["by_source"]["retrieval"]["drafted"]
                for first in ("head", "model", "ngrams")}
    assert forwards["head"] < 0.85 * forwards["model"] < forwards["ngrams"]


@pytest.mark.parametrize("options, message", [
    (dict(first="heads"), "first is 'heads'; allowed: auto, head, model, ngrams"),
    (dict(first="head", model="m"), "first is 'head'; allowed: auto or model with `model`"),
    (dict(least=1), "least is 1.0; allowed: 0 to below 1"),
    (dict(draft_weights="int3"), "draft_weights is 'int3'"),
])
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        drafters.parse_options("triforce", options)


def test_a_head_that_is_not_there_is_refused_and_ngrams_replace_a_small_model(chatty):
    def write(first: str) -> dict[str, object]:
        engine = longdraft.load(str(chatty), drafter="triforce", drafter_options={"first": first})
        params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
        return [event.stats for event in engine.generate([1, 2, 3] * 9, params)][-1]

    with pytest.raises(UsageError, match=r"first is 'head'; allowed: auto, .*; the model has no .* --heads names one"):
        write("head")
    assert write("model")["by_source"] == write("ngrams")["by_source"] == write("auto")["by_source"]


@pytest.mark.parametrize("options, part, message", [
    (dict(model="itself"), "eagle", "with these options uses no heads; leave --heads out, or give the option"),
    (dict(first="ngrams"), "eagle", "with these options uses no heads"),
    ({}, "heads", "which is no EAGLE or block head"),
])
def test_heads_that_it_would_not_use_are_refused(tiny, options, part, message):
    with pytest.raises(UsageError, match=message):
        longdraft.load(str(tiny["mha"]), drafter="triforce", drafter_options=options, heads=str(tiny["mha"] / part))
