"""The sampler of a text whose thought is under rules (longdraft/sampling/thought.py).

Each node of a draft tree has a state. Most trees lie within one phase, and no rule touches them: a plain sampler with
that phase's settings chooses for the whole tree, compiled or on a device. For other trees the samplers of the phases
choose side by side, and each node takes the choice of its own phase, or the token that a rule imposes.

    before, after   the request's settings, and its grammar after the thought
    inside          the settings of `thinking`; ends of the text are banned
    inside, early   the closing marker is banned, too
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from longdraft.kernels import Kernels
from longdraft.kernels.chain_plan import Ranked, Ranker
from longdraft.kernels.launched import LaunchedWork
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree, chain
from longdraft.sampling.grammar import GrammarRules, Mask
from longdraft.sampling.process import Support
from longdraft.sampling.sampler import NO_MARKS, MarkedTokens, Sampler
from longdraft.sampling.thought import AFTER, BEFORE, CLOSING, INSIDE, Thought, ThoughtRules, ThoughtState, is_free

GIVEN = "thinking"  # the source of given tokens in the statistics


class _States(NamedTuple):
    """The states of a tree's nodes. `length`: of the text"""

    tree: Tree
    length: int
    states: list[ThoughtState]


class _Edits(NamedTuple):
    """Amounts to add to logits: rows [N], ids [N], amounts [N] float32."""

    rows: list[int]
    ids: list[int]
    amounts: list[float]


class ThinkingSampler(Sampler):
    """Chooses tokens of one request under the rules of its thought.

    thought  the rules; the other arguments are those of `Sampler`
    rules    the grammar of what comes after the thought; see `GrammarRules.compile`
    """

    def __init__(self, params: SamplingParams, banned: Iterable[int] = (), is_fast: bool = True,
                 kernels: Kernels | None = None, marked: MarkedTokens = NO_MARKS,
                 rules: GrammarRules | None = None, *, thought: ThoughtRules) -> None:
        super().__init__(params, banned, is_fast, kernels, marked, rules)
        closing = thought.markers.completing(thought.markers.closing, 0) if thought.bans_ends else ()
        self._ends = frozenset(self._settings[1]) - set(closing)  # that are banned inside
        self.on_device = None  # `for_tree` decides whether a device can choose
        self.thought = thought
        self._text = Thought(thought)
        # Whether the grammar begins where the thought ends; otherwise it covers the whole text.
        self._is_gated = self._grammar is not None and thought.bans_ends
        if self._grammar and self._is_gated and self._text.state.phase != AFTER:
            self._grammar.wait()
        self._plain: dict[str, Sampler] = {}
        self._known: _States | None = None
        self._quiet: tuple[Tree, int, str | None] | None = None  # of `_quiet_mode`: tree, length of the text, result
        self._plain_tokens: dict[int, set[int]] = {phase: set() for phase in (BEFORE, INSIDE, CLOSING, AFTER)}

    def truncate(self, context: Context) -> None:
        super().truncate(context)
        for sampler in self._plain.values():
            sampler.truncate(context)
        self._text = self._text.cut_to(context.num_new)
        self._known = self._quiet = None

    def ban(self, position: int, tokens: Sequence[int]) -> None:
        super().ban(position, tokens)
        for sampler in self._plain.values():
            sampler.ban(position, tokens)

    def is_whole(self, context: Context) -> bool:
        """Whether the text ends with a whole character, and not with the beginning of a marker."""
        self._follow(context)
        return self._text.state.is_whole

    def quiet_for(self, context: Context) -> int:
        """Tokens until a rule of counts, or a loop, can be due: it falls on the root of a tree then."""
        self._follow(context)
        return self._text.quiet_for

    def free_tokens(self, context: Context, count: int) -> list[bool]:
        new = context.slice(len(context) - count, len(context)).tolist()
        assert self._text.num + count == context.num_new, "the tokens of the latest step"
        free = []
        for token in new:
            before = self._text.state
            free.append(is_free(before, self._push(token), self.params.banned_in_thinking))
        return free

    def for_tree(self, tree: Tree, context: Context) -> Sampler:
        """A plain sampler, if the whole tree lies within one phase and no rule changes a choice in it."""
        mode = self._quiet_mode(tree, context)
        return self if mode is None or (self._grammar and mode == _OUTSIDE) else self._plain_sampler(mode)

    def _quiet_mode(self, tree: Tree, context: Context) -> str | None:
        """The mode of all nodes; None if they differ, or if a rule may change a choice. Most trees take no look at
        their nodes: they have tokens only that no rule is about."""
        known = self._quiet
        if known and known[0] is tree and known[1] == len(context):
            return known[2]
        self._follow(context)
        rules, root = self.thought, self._text.state
        mode: str | None = _mode(rules, root)
        depth = max(tree.depths)
        is_plain = not root.matched and not root.written and root.phase != CLOSING and not (
            root.phase == BEFORE and rules.opens_first)
        if root.phase == INSIDE:
            is_plain = is_plain and rules.max_waits <= root.waits and root.inside + depth < rules.soft_from and (
                rules.quiet_for(root, self._text.num) > depth)
        if not is_plain or not self._plain_tokens[root.phase].issuperset(tree.tokens[1:]):
            is_plain = is_plain and all(self._is_plain(root.phase, token) for token in tree.tokens[1:])
        self._quiet = tree, len(context), mode if is_plain else None
        return self._quiet[2]

    def _is_plain(self, phase: int, token: int) -> bool:
        """Whether a token leaves a state of the phase as it is, but for counts, and no rule is about it."""
        if token not in self._plain_tokens[phase]:
            is_end = phase == INSIDE and token in self._ends
            moved, matched, _ = self.thought.markers.move(phase, 0, b"", token)
            if is_end or (moved, matched) != (phase, 0):
                return False
            self._plain_tokens[phase].add(token)
        return True

    def choose(self, logits: torch.Tensor, tree: Tree, context: Context, every: bool = True) -> list[int]:
        rules, states = self.thought, self._states(tree, context)
        modes = [_mode(rules, state) for state in states]
        chosen, imposed = [0] * len(tree), set()
        with _edited(logits, self._edits(tree.tokens, states)):
            for mode in set(modes):
                choices = self._chooser(mode)(logits, tree, context)
                chosen = [new if mode == own else old for old, new, own in zip(chosen, choices, modes, strict=True)]
        for node, state in enumerate(states):
            given = rules.given_token(state)
            is_banned = self._bans[0] == len(context) + tree.depths[node] and rules.wait_token in self._bans[1]
            if given is None and not is_banned and rules.waits_on(state, chosen[node]):
                given = rules.wait_token
            if given is not None:
                chosen[node] = given
                imposed.add(node)
        self.imposed = frozenset(imposed)
        return chosen

    def rank_later(self, logits: torch.Tensor, context: Context, path: Sequence[int], num: int, ahead: int = 0,
                   within: float = float("inf")) -> LaunchedWork[Ranked]:
        state = self._state_after(context, path)
        given = self.thought.given_token(state) if not ahead else None
        if given is not None:
            return Ranked([given], float("inf"))
        mode = _mode(self.thought, state)
        if mode == _OUTSIDE:
            return (yield from super().rank_later(logits, context, path, num, ahead, within))
        return (yield from self._plain_sampler(mode).rank_later(logits, context, path, num, ahead, within))

    def ranker(self, context: Context, vocabulary: int, width: int, within: float = float("inf")) -> Ranker | None:
        """Ranks as the phase of the text's end does. Guesses beyond the thought may be wrong, which costs time only."""
        self._follow(context)
        state = self._text.state
        if state.phase == CLOSING:
            return None
        mode = _mode(self.thought, state)
        if mode == _OUTSIDE and self._grammar:
            return None
        return self._plain_sampler(mode).ranker(context, vocabulary, width, within)

    def log_probabilities(self, logits: torch.Tensor, context: Context,
                          paths: Sequence[Sequence[int]]) -> list[Support]:
        supports = []
        for row, path in zip(logits, paths, strict=True):
            state, last = self._state_after(context, path), path[-1] if path else context.last
            mode = _mode(self.thought, state)
            with _edited(row[None], self._edits([last], [state])):
                supports += (super().log_probabilities(row[None], context, [path]) if mode == _OUTSIDE else
                             self._plain_sampler(mode).log_probabilities(row[None], context, [path]))
        return supports

    def pruned(self, tree: Tree, context: Context) -> Tree:
        """See `Sampler`. Guesses that the rules forbid are removed as well."""
        mode = self._quiet_mode(tree, context)
        if mode is None:
            tree = tree.kept(self._allowed(tree, context))
            mode = _mode(self.thought, self._text.state)
        return super().pruned(tree, context) if mode == _OUTSIDE else self._plain_sampler(mode).pruned(tree, context)

    def extended(self, tree: Tree, context: Context, max_depth: int) -> Tree:
        """The tree with the tokens that close the thought, and those that the grammar forces after it."""
        if self._quiet_mode(tree, context) is not None:
            return super().extended(tree, context, max_depth) if self._text.state.phase == AFTER else tree
        states, forced = self._states(tree, context), self.thought.forced
        tree = tree.extended(lambda leaf: forced[states[leaf].written :] if states[leaf].phase == CLOSING else (),
                             max_depth, GIVEN)
        return super().extended(tree, context, max_depth) if self._text.state.phase == AFTER else tree

    def _allowed(self, tree: Tree, context: Context) -> list[bool]:
        """For each node, whether its parent's state allows its token."""
        states, rules = self._states(tree, context), self.thought
        allowed = [True]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            state, given = states[parent], rules.given_token(states[parent])
            is_end = state.phase == INSIDE and rules.bans_ends and token in self._ends
            allowed.append(token == given if given is not None else not is_end and token not in rules.banned(state))
        return allowed

    def _masks(self, tree: Tree, context: Context) -> list[Mask | None] | None:
        """The grammar's masks. A text that begins with no thought has to match from its first token on."""
        if self._grammar is None:
            return None
        states, grammar, markers = self._states(tree, context), self._grammar, self.thought.markers
        if states[0].phase == AFTER or not self._is_gated:
            return grammar.masks(tree, context)
        masks: list[Mask | None] = [np.ones(grammar.vocabulary, dtype=bool) for _ in states]
        for node, state in enumerate(states):
            parent = states[tree.parents[node]] if node else state
            is_first = state.phase == BEFORE and not state.matched  # it is the root then
            if is_first or (state.phase == AFTER and parent.phase in (INSIDE, CLOSING)):
                nodes = _descendants(tree, node, [each.phase == AFTER for each in states])
                for old, mask in zip(nodes, grammar.walk(_part(tree, nodes)), strict=True):
                    masks[old] = mask
            own = masks[node]
            if state.phase == BEFORE and own is not None:
                own &= is_first
                own[list(markers.continuing(markers.opening, state.matched))] = True
        return masks

    def _mask(self, context: Context, path: Sequence[int]) -> Mask | None:
        assert self._grammar is not None
        self._follow(context)
        if self._text.state.phase == AFTER or not self._is_gated:
            return self._grammar.mask(context, path)
        masks = self._masks(chain(context.last, path, ""), context)
        return masks[-1] if masks else None

    def _follow(self, context: Context) -> None:
        """Follow the tokens that the text has gained."""
        for token in context.slice(context.prompt_length + self._text.num, len(context)).tolist():
            self._push(token)

    def _push(self, token: int) -> ThoughtState:
        before, after = self._text.state.phase, self._text.push(token)
        if self._is_gated and after.phase == AFTER and self._grammar and not self._grammar.has_begun:
            self._grammar.begin(self._text.num - (before == BEFORE))
        return after

    def _states(self, tree: Tree, context: Context) -> list[ThoughtState]:
        """The state after each node."""
        known = self._known
        if known and known.tree is tree and known.length == len(context):
            return known.states
        self._follow(context)
        advance, num = self.thought.advance, context.num_new
        states = [self._text.state]
        for token, parent, depth in zip(tree.tokens[1:], tree.parents[1:], tree.depths[1:], strict=True):
            states.append(advance(states[parent], token, num + depth))
        self._known = _States(tree, len(context), states)
        return states

    def _state_after(self, context: Context, path: Sequence[int]) -> ThoughtState:
        self._follow(context)
        state, num = self._text.state, context.num_new
        for depth, token in enumerate(path, 1):
            state = self.thought.advance(state, token, num + depth)
        return state

    def _edits(self, tokens: Sequence[int], states: Sequence[ThoughtState]) -> _Edits:
        """The edits of the rows after these tokens: banned markers, and the bias of a soft close."""
        edits, rules = _Edits([], [], []), self.thought
        for row, (token, state) in enumerate(zip(tokens, states, strict=True)):
            amounts = dict.fromkeys(rules.banned(state), -np.inf)
            if bias := rules.bias(state, token):
                markers = rules.markers
                amounts = {each: amounts.get(each, bias) for each in markers.completing(markers.closing, state.matched)}
            for each, amount in amounts.items():
                edits.rows.append(row)
                edits.ids.append(each)
                edits.amounts.append(amount)
        return edits

    def _chooser(self, mode: str) -> Callable[[torch.Tensor, Tree, Context], list[int]]:
        return super().choose if mode == _OUTSIDE else self._plain_sampler(mode).choose

    def _plain_sampler(self, mode: str) -> Sampler:
        """The sampler of a phase, without rules and without the grammar."""
        if mode not in self._plain:
            params, banned, is_fast, kernels, marked = self._settings
            params = params.inside_thought if mode != _OUTSIDE else params
            params = replace(params, structured_outputs=(), structured_after="")
            if mode != _OUTSIDE:  # bans hold until `min_new_tokens`
                markers = self.thought.markers
                params = replace(params, min_new_tokens=params.max_new_tokens)
                banned = tuple(self._ends) if self.thought.bans_ends else ()
                banned += markers.completing(markers.closing, 0) if mode == _EARLY else ()
            sampler = self._plain[mode] = Sampler(params, banned, is_fast, kernels, marked)
            sampler.ban(*self._bans)
        return self._plain[mode]


_OUTSIDE, _INSIDE, _EARLY = "outside", "inside", "early"


def _mode(rules: ThoughtRules, state: ThoughtState) -> str:
    """Which sampler chooses after this state."""
    if state.phase != INSIDE or not (rules.bans_ends or rules.minimum):
        return _OUTSIDE
    return _EARLY if state.inside < rules.minimum else _INSIDE


def _descendants(tree: Tree, root: int, wanted: Sequence[bool]) -> list[int]:
    """A node, and the wanted nodes below it whose ancestors down from there are wanted too, in their order."""
    nodes = [root]
    inside = {root}
    for node in range(root + 1, len(tree)):
        if wanted[node] and tree.parents[node] in inside:
            inside.add(node)
            nodes.append(node)
    return nodes


def _part(tree: Tree, nodes: Sequence[int]) -> Tree:
    """The tree of some nodes, of which the first is the root."""
    moved = {old: new for new, old in enumerate(nodes)}
    return Tree(tuple(tree.tokens[old] for old in nodes),
                (-1, *(moved[tree.parents[old]] for old in nodes[1:])), ("",) * len(nodes))


@contextmanager
def _edited(logits: torch.Tensor, edits: _Edits) -> Iterator[None]:
    """Logits [R, V] with amounts added in place, and as they were afterwards."""
    if not edits.rows:
        yield
        return
    with torch.inference_mode(logits.is_inference()):
        index = torch.tensor(edits.rows, device=logits.device), torch.tensor(edits.ids, device=logits.device)
        before = logits[index]
        logits[index] = before + torch.tensor(edits.amounts, dtype=torch.float32, device=logits.device)
        try:
            yield
        finally:
            logits[index] = before
