"""A hybrid as a draft model: its states follow the text, its drafts and what became of them, and no text changes."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import longdraft
from helpers.checkpoints import load, make_checkpoint
from helpers.equality import DRAFTERS, params_of, prompt_of
from helpers.extents import extent
from helpers.families import make_hybrid
from helpers.generation import by_name, generate
from longdraft.model.transformer import Transformer
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation.step import Tally

TARGETS = ["hybrid", "llama"]
WINDOW = dict(budget=40, sinks=3, refresh=9)  # moves often
OPTIONS = {"full": dict(cache="full"), "window": WINDOW}
SETTINGS = dict(max_new_tokens=36, ignore_eos=True, temperature=1.0, min_p=0.05, repetition_penalty=1.2)
PROMPTS = [prompt_of(30), prompt_of(150, 4), prompt_of(71, 5), prompt_of(30)]
NAMES = [name for name, (_, options) in DRAFTERS.items() if options.get("model")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drafts")
    make_hybrid(root / "hybrid")
    make_hybrid(root / "draft", hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
    make_checkpoint(root / "llama", num_key_value_heads=2)
    return root


@pytest.fixture(scope="module", params=TARGETS)
def engine(request: pytest.FixtureRequest, folders: Path) -> longdraft.Engine:
    return longdraft.load(str(folders / request.param), drafter="plain", cache_ram=1 << 26)


@pytest.fixture(scope="module")
def expected(engine: longdraft.Engine) -> list[list[int]]:
    return [tokens_of(engine.generate(prompt, params(seed))) for seed, prompt in enumerate(PROMPTS)]


def params(seed: int, **changes: object) -> SamplingParams:
    return SamplingParams(**(SETTINGS | dict(seed=seed) | changes))


def tokens_of(generation: longdraft.Generation) -> list[int]:
    return [token for event in generation for token in event.tokens]


def drafting(engine: longdraft.Engine, draft: Path, options: str, **more: object) -> longdraft.Engine:
    return engine.with_drafter("draft-model", OPTIONS[options] | dict(model=str(draft)) | more)


@pytest.mark.parametrize("options", extent(OPTIONS, ["full"]))
def test_texts_of_a_batch_are_the_plain_ones(engine, expected, folders, options):
    """Requests begin and end at different times, and one is cancelled."""
    drafted = drafting(engine, folders / "draft", options)
    with drafted.batch() as batch:
        found: dict[object, list[int]] = {}
        places: dict[object, int] = {}
        for place in (0, 1, 2, 3, 0):
            places[batch.add(PROMPTS[place], params(place))] = place
            for _ in range(3):
                for text, event in batch.step():
                    found.setdefault(text, []).extend(event.tokens)
        while batch:
            for text, event in batch.step():
                found.setdefault(text, []).extend(event.tokens)
    assert len(found) == 5
    assert all(found[text] == expected[place] for text, place in places.items())


@pytest.mark.parametrize("options", extent(OPTIONS, ["window"]))
def test_texts_resumed_from_a_journal_are_the_plain_ones(engine, expected, folders, tmp_path, options):
    """Cut again and again, with a hybrid, plain decoding and another window in turn."""
    writers = [drafting(engine, folders / "draft", options), engine, drafting(engine, folders / "draft", "window",
                                                                            chain=7, width=2)]
    for place in (1, 2):
        pick, journal, runs = random.Random(place), tmp_path / str(place), 0
        drafting(engine, folders / "draft", options).generate(PROMPTS[place], params(place), journal=journal).close()
        tokens: list[int] = []
        while len(tokens) < len(expected[place]):
            tokens, runs = [], runs + 1
            with writers[runs % 3].resume(journal) as text:
                for event, _ in zip(text, range(pick.randrange(2, 6)), strict=False):
                    tokens += event.tokens
            assert tokens == expected[place][: len(tokens)]
        assert tokens == expected[place] and runs > 3


def test_a_hybrid_that_drafts_for_itself_is_always_right(folders, tmp_path):
    """Alone, in a batch and resumed, with rejected tokens on further branches: its states are those of the text."""
    plain = longdraft.load(str(folders / "hybrid"), drafter="plain", cache_ram=0)
    drafted = drafting(plain, folders / "hybrid", "full", width=2)
    settings = dict(temperature=0.0, repetition_penalty=1.0)
    with drafted.generate(PROMPTS[0], params(1, **settings), journal=tmp_path / "j") as text:
        next(text), next(text)
    finished = [list(each)[-1].stats for each in (drafted.generate(PROMPTS[1], params(1, **settings)),
                                                  drafted.resume(tmp_path / "j"))]
    finished += [event.stats for _, event in drafted.generate_many(PROMPTS, params(1, **settings)) if event.stats]
    assert len(finished) == 6
    for stats in finished:
        assert stats["mean_accepted_length"] > 4.2, stats  # of 5; the last step of a text is shorter


@pytest.mark.parametrize("options", extent(OPTIONS, ["window"]))
def test_texts_without_banned_phrases_are_the_plain_ones(engine, folders, options):
    """The text goes back, and the draft model with it."""
    text = "".join(event.text for event in engine.generate(PROMPTS[1], params(3)))
    letters = {letter for letter in text[2:20] if letter.isprintable()}
    banning = params(3, banned_strings=tuple(sorted({text[4:6], text[11:13], *letters})))
    plain, other = (each.generate(PROMPTS[1], banning) for each in (engine, drafting(engine, folders / "draft",
                                                                                    options)))
    assert tokens_of(plain) == tokens_of(other) and plain.stats()["rewinds"] > 2


def test_texts_that_begin_alike_are_the_plain_ones(engine, folders):
    """Rows and states of the target come from former texts; the draft model reads all of them."""
    drafted, prompts = drafting(engine, folders / "draft", "full"), [prompt_of(600), [*prompt_of(560), 9, 8, 7]]
    for prompt in (*prompts, *prompts):
        text = drafted.generate(prompt, params(2))
        assert tokens_of(text) == tokens_of(engine.generate(prompt, params(2), cache_salt=None))
    assert text.reuse.cached_tokens >= 400


# Draft models that lie.


def damaged(draft: Transformer, kind: str) -> Transformer:
    """`draft` with logits that are not those of its states."""
    liar, honest, pick = copy.copy(draft), draft.logits, random.Random(kind)

    def negated(hidden: Tensor) -> Tensor:
        return -honest(hidden)

    def noise(hidden: Tensor) -> Tensor:
        return torch.randn(honest(hidden).shape, generator=torch.Generator().manual_seed(pick.randrange(1 << 30)))

    def half_true(hidden: Tensor) -> Tensor:
        return honest(hidden) if pick.random() < 0.7 else noise(hidden)

    def not_numbers(hidden: Tensor) -> Tensor:
        return honest(hidden) * (1.0 if pick.random() < 0.5 else torch.nan)

    def infinite(hidden: Tensor) -> Tensor:
        return honest(hidden) * (1.0 if pick.random() < 0.5 else torch.inf)

    def equal(hidden: Tensor) -> Tensor:
        return torch.zeros_like(honest(hidden))

    liars: dict[str, Callable[[Tensor], Tensor]] = {
        "negated": negated, "noise": noise, "half true": half_true, "not numbers": not_numbers, "infinite": infinite,
        "equal": equal}
    if kind != "states":
        liar.logits = liars[kind]  # type: ignore[method-assign]
        return liar
    new_cache = draft.new_cache

    def forgetful():
        """A cache whose states are scaled after each commit; some are no numbers."""
        cache = new_cache()
        commit = cache.commit

        def scaled(rows) -> None:
            commit(rows)
            for state in cache.states.current:
                state.matrix.mul_(pick.choice([1.0, -8.0, 0.0, 1e30, torch.nan]))

        cache.commit = scaled
        return cache

    liar.new_cache = forgetful  # type: ignore[method-assign]
    return liar


@pytest.mark.parametrize("options", OPTIONS)
def test_after_wrong_drafts_the_states_are_those_of_the_text_again(folders, options):
    """Every sixth guess of the target itself is wrong, and only what follows it in its chain is wrong too: in three
    chains of four the first of one and the third of another, so six of twelve guesses are right."""
    model, calls = load(folders / "hybrid"), itertools.count(1)
    draft = copy.copy(model)
    draft.logits = lambda hidden: model.logits(hidden) * (-1 if next(calls) % 6 == 0 else 1)
    tally, size = Tally(), dict(budget=600, sinks=3, refresh=9) if options == "window" else dict(cache="full")
    factory = by_name("draft-model", None, draft, None, None, chain=4, **size)
    settings = SamplingParams(max_new_tokens=120, temperature=0.0)
    plain = generate(model, PROMPTS[1], settings, by_name("plain"))
    assert generate(model, PROMPTS[1], settings, factory, tally=tally) == plain
    assert tally.accepted.total() >= 0.49 * tally.drafted.total() > 60


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["negated", "noise", "half true", "not numbers", "infinite", "equal", "states"])
def test_a_lying_draft_model_changes_nothing(folders, target, kind):
    """The liar has the target's weights where it can, so that it also tells the truth."""
    model = load(folders / target, "bfloat16")
    draft = damaged(load(folders / "hybrid", "bfloat16"), kind)
    for settings in ("greedy, penalty", "paper", "top choices"):
        plain = generate(model, prompt_of(90), params_of(settings), by_name("plain"), banned=[1])
        tally = Tally()
        for drafter in NAMES:
            name, options = DRAFTERS[drafter]
            factory = by_name(name, None, draft, None, None, **options)
            text = generate(model, prompt_of(90), params_of(settings), factory, banned=[1], tally=tally)
            assert text == plain, (settings, drafter)
        assert tally.drafted.total() > 0
