"""A thought under rules: every drafter, step, batch and resume point writes the text of an obvious loop."""

from __future__ import annotations

import codecs
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoints import load
from helpers.equality import LIARS, drafters_by_extent, factory_of, liar, prompt_of
from helpers.generation import TreeDrafter, by_name, generate
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.request.context import Context
from longdraft.request.loops import LoopGuard
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree, chain, from_paths, root_only
from longdraft.sampling import thinking_sampler
from longdraft.sampling.sampler import MarkedTokens, Sampler
from longdraft.sampling.thinking_sampler import ThinkingSampler
from longdraft.sampling.thought import AFTER, NEVER, Markers, Thought, ThoughtRules
from longdraft.speculation.step import Tally

OPEN, CLOSE, WAIT, END = 300, 301, 302, 1
OPENING, CLOSING = "\ud800", "\udc00"
NEW = 60
F = (60, 61, CLOSE, 62, 62)
ALPHABET = {token: bytes([token - 2]) for token in range(2, 258)}


def bytes_of(token: int) -> bytes:
    return ALPHABET.get(token, b"")


def text_of(token: int) -> str:
    return {OPEN: OPENING, CLOSE: CLOSING, WAIT: "Wait"}.get(token) or bytes_of(token).decode("utf-8", "replace")


def completing(marker: str, matched: int) -> tuple[int, ...]:
    return {OPENING: (OPEN,), CLOSING: (CLOSE,)}[marker] if not matched else ()


def rules_of(**rules) -> ThoughtRules:
    markers = Markers(OPENING, CLOSING, True, text_of, bytes_of, completing, completing)
    return ThoughtRules(markers, **(dict(forced=F, bans_ends=True) | rules))


@pytest.mark.parametrize("closes_loops", [False, True])
def test_a_thought_that_is_cut_is_that_of_the_shorter_text(closes_loops):
    draw = random.Random(7)
    rules = rules_of(begun=(), budget=9, closes_loops=closes_loops)
    thought, new = Thought(rules), list[int]()
    for _ in range(300):
        for _ in range(draw.randrange(12)):
            given = rules.given_token(thought.state)
            new.append(draw.choice([OPEN, CLOSE, WAIT, 60, 200, 230, 130]) if given is None else given)
            thought.push(new[-1])
        del new[max(0, len(new) - draw.choice([0, 1, 3, 9, 300])) :]
        thought, obvious = thought.cut_to(len(new)), Thought(rules)
        for token in new[thought.num :]:
            thought.push(token)
        for token in new:
            obvious.push(token)
        assert (thought.state, thought.num, thought.quiet_for) == (obvious.state, obvious.num, obvious.quiet_for)


# The obvious definition


class Obvious:
    """The next token after a whole text, by what the rules say and nothing else."""

    def __init__(self, rules: ThoughtRules, params: SamplingParams, banned: tuple[int, ...]) -> None:
        self.rules, self.params, self.banned = rules, params, banned

    def state(self, new: list[int]) -> tuple[str, int, int, list[int], bool]:
        """Phase, tokens inside, waits, given tokens that are still to come, and whether a closing was given."""
        rules = self.rules
        tokens = [*(rules.begun or ()), *new]
        phase, inside, waits, was_given = "inside" if rules.begun is not None else "before", 0, 0, False
        own: list[int] = []  # of the thought that is open
        guard, is_looping = LoopGuard(), False
        at = 0
        while True:
            num = at - len(rules.begun or ())
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            for token in own:
                decoder.decode(bytes_of(token))
            is_cut = bool(decoder.getstate()[0])
            over = max(inside - rules.budget, num - rules.reserve_at, num - rules.close_at)
            is_due = (over >= 0 and (not is_cut or over >= 3)) or (rules.closes_loops and is_looping and not is_cut)
            if phase == "inside" and is_due:
                given = list(rules.forced)
                written = tokens[at : at + len(given)]
                if written != given[: len(written)]:
                    assert num < 0, "only a prompt may go on otherwise"
                elif at + len(given) > len(tokens):
                    return "closing", inside, waits, given[len(written) :], False
                else:
                    at += len(given)
                    phase, own, was_given, is_looping, guard = "after", [], True, False, LoopGuard()
                    continue
            if at == len(tokens):
                return phase, inside, waits, [], was_given
            token = tokens[at]
            at += 1
            if phase == "inside":
                if token == CLOSE:
                    phase, own, guard, is_looping = "after", [], LoopGuard(), False
                else:
                    inside, waits = inside + 1, waits + (token == rules.wait_token)
                    own.append(token)
                    guard.push(token)
                    is_looping = guard.is_looping
            elif token == OPEN:
                phase, was_given = "inside", False

    def token(self, row: np.ndarray, prompt: list[int], new: list[int]) -> int:
        rules, params, banned = self.rules, self.params, self.banned
        phase, inside, waits, given, was_given = self.state(new)
        if given:
            return given[0]
        row = row.copy()
        if phase == "inside":
            last = [*prompt, *new][-1]
            if inside >= rules.soft_from and text_of(last).rstrip(" ").endswith((".", "!", "?", "\n")):
                row[CLOSE] += 8 * (inside - rules.soft_from) / (rules.budget - rules.soft_from)
            row[[CLOSE] if inside < rules.minimum else []] = -np.inf
            if rules.bans_ends:
                params = replace(params.inside_thought, min_new_tokens=params.max_new_tokens)
        elif was_given:
            row[[OPEN, CLOSE]] = -np.inf
        import torch

        marked = MarkedTokens(frozenset({7, 30, 41}), frozenset({1, 9}))
        sampler, context = Sampler(params, banned, is_fast=False, marked=marked), Context(prompt)
        context.extend(new)
        chosen, = sampler.choose(torch.from_numpy(row)[None], root_only(context.last), context)
        return rules.wait_token if phase == "inside" and chosen == CLOSE and waits < rules.max_waits else chosen


def obvious(model: Transformer, prompt: list[int], params: SamplingParams, rules: ThoughtRules,
            banned: tuple[int, ...] = (END,)) -> list[int]:
    law, new = Obvious(rules, params, banned), list[int]()
    cache = model.new_cache()
    model.forward(chain_rows(prompt[:-1], 0), cache)
    cache.commit(range(len(prompt) - 1))
    while len(new) < params.max_new_tokens:
        text = [*prompt, *new]
        logits = model.forward(chain_rows(text[-1:], len(text) - 1), cache, 1).logits
        cache.commit([0])
        new.append(law.token(logits[-1].float().numpy(), prompt, new))
    return new


LOVES_CLOSE = dict(logit_bias=((CLOSE, 4.0), (OPEN, 3.0)))
CASES = {  # rules, settings, and whether the prompt opens the thought
    "budget": (dict(budget=9), dict(temperature=0.0), True),
    "budget 0": (dict(budget=0), dict(temperature=1.0, min_p=0.02), True),
    "budget 1, opened by the model": (dict(budget=1), dict(temperature=1.0, logit_bias=((OPEN, 12.0),)), False),
    "reserve": (dict(reserve_at=33), dict(temperature=1.0, top_p=0.9, repetition_penalty=1.2, penalty_window=12), True),
    "minimum": (dict(minimum=15, budget=30), dict(temperature=1.0, min_p=0.05) | LOVES_CLOSE, True),
    "waits": (dict(wait_token=WAIT, max_waits=3, minimum=4), dict(temperature=0.8, dry_multiplier=1.0,
              dry_allowed_length=1, logit_bias=((CLOSE, 12.0), (OPEN, 3.0))), True),
    "soft": (dict(soft_from=5, budget=40), dict(
        temperature=1.0, logit_bias=((48, 6.0), (12, 6.0), (CLOSE, 1.0))), True),
    "on request": (dict(close_at=20, bans_ends=False), dict(temperature=1.0, min_p=0.02), True),
    "own sampling": (dict(budget=25), dict(temperature=0.0, thinking=(("temperature", 1.2), ("dry_multiplier", 0.8),
                     ("xtc_probability", 0.5), ("xtc_threshold", 0.02))), True),
    "all of it": (dict(budget=30, soft_from=20, minimum=6, wait_token=WAIT, max_waits=2, reserve_at=34),
                  dict(temperature=0.9, min_p=0.01, repetition_penalty=1.1, thinking=(("temperature", 0.6),
                       ("top_k", 40))) | LOVES_CLOSE, False),
    "characters of several bytes": (dict(budget=7), dict(temperature=1.0, logit_bias=tuple(
        (byte + 2, 8.0) for byte in (0xC3, 0xE2, 0x82, 0xF0, 0x9F, 0xA9))), True),
}


@pytest.fixture(scope="module")
def model(tiny: dict[str, Path]) -> Transformer:
    return load(tiny["gqa"], "float32")


@pytest.fixture(scope="module")
def another(tiny: dict[str, Path]) -> Transformer:
    return load(tiny["mha"], "float32")


def case_of(name: str) -> tuple[list[int], SamplingParams, ThoughtRules]:
    rules, settings, is_open = CASES[name]
    prompt = prompt_of(60) + [OPEN] * is_open
    params = SamplingParams(max_new_tokens=NEW, seed=11, **settings)
    return prompt, params, rules_of(begun=() if is_open else None, **rules)


@pytest.fixture(scope="module")
def expected(model) -> dict[str, list[int]]:
    return {name: obvious(model, *case_of(name)) for name in CASES}


def write(model, name: str, factory, **about) -> list[int]:
    prompt, params, rules = case_of(name)
    return generate(model, prompt, params, factory, banned=[END], thought=rules, **about)


def test_the_cases_do_what_they_say(expected):
    """So that no case compares texts which no rule has touched."""
    texts = {name: Obvious(case_of(name)[2], case_of(name)[1], (END,)).state(text) for name, text in expected.items()}
    assert {name: text[:2] for name, text in texts.items() if name in ("budget", "budget 0")} == {
        "budget": ("after", 9), "budget 0": ("after", 0)}
    assert expected["budget 0"][: len(F)] == list(F) and expected["budget"][9 : 9 + len(F)] == list(F)
    assert expected["on request"][20 : 20 + len(F)] == list(F)
    assert 33 <= expected["reserve"].index(CLOSE) - F.index(CLOSE) <= 36  # a character is finished first
    assert CLOSE in expected["minimum"][15:] and CLOSE not in expected["minimum"][:15]
    assert expected["waits"].count(WAIT) >= 3 and texts["waits"][0] == "after"
    assert 7 < texts["characters of several bytes"][1] <= 10
    assert texts["soft"][1] < 40 and texts["budget 1, opened by the model"][0] in ("after", "closing")
    for name in CASES:
        if case_of(name)[2].bans_ends:
            assert END not in expected[name][: expected[name].index(CLOSE)] or OPEN in expected[name]


@pytest.mark.parametrize("name", CASES)
def test_plain_decoding_writes_the_obvious_text(model, expected, name):
    assert write(model, name, by_name("plain")) == expected[name]


@drafters_by_extent
@pytest.mark.parametrize("name", CASES)
def test_every_drafter_writes_the_obvious_text(model, another, tiny, expected, drafters, name):
    for drafter in drafters:
        assert write(model, name, factory_of(drafter, model, another, tiny["gqa"])) == expected[name], drafter


# The core has every third of them, so that it meets each case and each lie.
@pytest.mark.parametrize("name, kind", [
    pytest.param(name, kind, marks=[pytest.mark.full] if (place + turn) % 3 else [])
    for place, name in enumerate(CASES)
    for turn, kind in enumerate((*LIARS, "markers", "the closing, and halves of it"))])
def test_drafts_that_lie_change_nothing(model, expected, name, kind):
    prompt, truth = case_of(name)[0], expected[name]
    pick = random.Random(kind)

    def markers(context: Context) -> Tree:
        start = len(context) - len(prompt)
        paths = [[*truth[start : start + pick.randrange(4)], *pick.choices([OPEN, CLOSE, WAIT, END, 60, 62], k=5)]
                 for _ in range(5)]
        return from_paths(context.last, paths, "liar")

    def halves(context: Context) -> Tree:
        start = len(context) - len(prompt)
        paths = [[*truth[start : start + pick.randrange(6)], *F[: pick.randrange(1, 6)], *truth[start : start + 2]]
                 for _ in range(4)]
        return from_paths(context.last, [*paths, F, truth[start : start + 20]], "liar")

    drafter = {"markers": TreeDrafter(markers), "the closing, and halves of it": TreeDrafter(halves)}.get(kind)
    drafter = drafter or liar(kind, truth, len(prompt))
    assert write(model, name, lambda given: drafter) == truth


@pytest.mark.parametrize("name", CASES)
def test_steps_need_not_be_cut_where_a_count_is_due(model, expected, name, monkeypatch):
    monkeypatch.setattr(ThinkingSampler, "quiet_for", lambda self, context: NEVER)
    prompt, truth = case_of(name)[0], expected[name]
    drafter = TreeDrafter(lambda context: chain(context.last, truth[len(context) - len(prompt) :][:30], "truth"))
    assert write(model, name, lambda given: drafter) == truth


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][2]])
def test_a_continuation_of_the_thought_is_the_longer_text(model, expected, name):
    prompt, params, rules = case_of(name)
    for cut in range(1, 45, 4):
        begun = expected[name][:cut]
        if rules.close_at < NEVER and cut > rules.close_at:
            continue
        state = Obvious(rules, params, (END,)).state(begun)
        if state[0] not in ("inside", "closing"):
            break
        shorter = replace(params, max_new_tokens=NEW - cut)
        moved = replace(rules, begun=tuple(begun), reserve_at=rules.reserve_at - cut, close_at=rules.close_at - cut)
        written = generate(model, prompt + begun, shorter, by_name("suffix"), banned=[END], thought=moved)
        assert written == expected[name][cut:], cut


def test_the_closing_is_drafted_as_a_chain(model, expected):
    tally = Tally()
    assert write(model, "budget", lambda given: TreeDrafter(lambda context: root_only(context.last)),
                 tally=tally) == expected["budget"]
    assert tally.accepted[thinking_sampler.GIVEN] == len(F) and tally.steps == NEW - len(F)


def test_trees_within_one_phase_are_chosen_for_by_a_plain_sampler(model, expected, monkeypatch):
    mixed, choose = [], ThinkingSampler.choose
    monkeypatch.setattr(ThinkingSampler, "choose", lambda self, logits, tree, context, every: (
        mixed.append(len(context)), choose(self, logits, tree, context))[1])
    prompt = case_of("own sampling")[0]
    assert write(model, "own sampling", by_name("plain")) == expected["own sampling"]
    assert mixed[0] == len(prompt) + expected["own sampling"].index(CLOSE) - F.index(CLOSE)


def test_a_loop_inside_closes_the_thought_with_every_drafter(model):
    prompt = [*prompt_of(20), OPEN]
    params = SamplingParams(max_new_tokens=560, seed=1, temperature=0.0, logit_bias=((50, 100.0),))
    rules = rules_of(begun=(), closes_loops=True)
    plain = generate(model, prompt, params, by_name("plain"), banned=[END], thought=rules)
    thought = Thought(rules)
    for token in plain:
        thought.push(token)
    assert (thought.state.cause, thought.state.phase, plain.count(CLOSE)) == ("loop", AFTER, 1)
    for name in ("suffix", "ngram"):
        assert generate(model, prompt, params, by_name(name), banned=[END], thought=rules) == plain
    at = plain.index(CLOSE) - 2
    for cut in (3, at - 1, at, at + 1):
        shorter, moved = replace(params, max_new_tokens=560 - cut), replace(rules, begun=tuple(plain[:cut]))
        assert generate(model, prompt + plain[:cut], shorter, by_name("suffix"), banned=[END],
                        thought=moved) == plain[cut:], cut
