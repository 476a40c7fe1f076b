"""A thought under rules: where a reasoning model's thinking begins and ends, and when it has to end.

    before ── the opening marker ──> inside ── the closing marker, chosen by the model ──> after
                                       │
                                       └─ a rule is due ──> closing ── its last token is written ──> after

The state is a small tuple, a function of the prompt and the tokens since. A draft tree therefore has an exact state at
each node, and nothing is rolled back: a child's state is `advance(its parent's, its token)`.

While the thought closes, the tokens are given: a message, the closing marker, and what the chat template writes behind
it (`ThoughtRules.forced`). A closing is put off while a character of several tokens, or a marker, is unfinished.

longdraft/sampling/thinking_sampler.py applies the rules; longdraft/text/thought_rules.py makes them for a request.
"""

from __future__ import annotations

import codecs
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from longdraft.request.loops import LoopGuard

BEFORE, INSIDE, CLOSING, AFTER = range(4)
NEVER = sys.maxsize  # of a count of tokens: no rule depends on it
SOFT_BIAS = 8.0  # logits that a soft close adds to the closing marker where the budget is spent
_REMEMBERED = 256  # last tokens that can be taken back
_LONGEST_CHARACTER = 4  # bytes, and therefore tokens
_SENTENCE_ENDS = tuple(".!?\n。！？…")


class ThoughtState(NamedTuple):
    """What the rules remember of a text.

    phase    BEFORE, INSIDE, CLOSING or AFTER
    matched  characters of the next marker that the text ends with
    pending  the first bytes of the text's last character, whose others are still to come
    inside   tokens inside so far, of all thoughts of the text, without markers and given tokens
    waits    how many of them are the token of `thinking_wait`
    written  given tokens so far; 0: none
    cause    why the latest thought closed, or is closing: model, budget, reserve, loop or request; "": none has
    """

    phase: int = BEFORE
    matched: int = 0
    pending: bytes = b""
    inside: int = 0
    waits: int = 0
    written: int = 0
    cause: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the text ends neither within a character nor within a marker."""
        return not self.matched and not self.pending


class _Move(NamedTuple):
    phase: int
    matched: int
    pending: bytes


@dataclass(frozen=True, eq=False)
class Markers:
    """The markers of a model's thoughts, as text in which each special token is one character of its own.

    opening, closing  the markers
    reopens     whether the opening marker counts anywhere, as one that is a token does; otherwise at the beginning of
                the answer only
    text_of     token -> the text that it adds
    bytes_of    token -> its bytes, where the text has U+FFFD; None: unknown
    completing  (marker, its characters so far) -> the tokens that complete it
    continuing  (marker, its characters so far) -> the tokens that are its next part
    """

    opening: str
    closing: str
    reopens: bool
    text_of: Callable[[int], str]
    bytes_of: Callable[[int], Sequence[int] | None]
    completing: Callable[[str, int], tuple[int, ...]]
    continuing: Callable[[str, int], tuple[int, ...]]
    _moves: dict[tuple[int, int, bytes, int], _Move] = field(default_factory=dict, repr=False)

    def move(self, phase: int, matched: int, pending: bytes, token: int) -> _Move:
        """Phase, `matched` and `pending` after one more token. CLOSING has more state, in `ThoughtRules`."""
        key = phase, matched, pending, token
        move = self._moves.get(key)
        if move is None:
            move = self._moves[key] = self._moved(*key)
        return move

    def _moved(self, phase: int, matched: int, pending: bytes, token: int) -> _Move:
        text = self.text_of(token)
        for letter in text:
            phase, matched = self._after_letter(phase, matched, letter)
        return _Move(phase, matched, self._pending(pending, token, text) if phase == INSIDE else b"")

    def _after_letter(self, phase: int, matched: int, letter: str) -> tuple[int, int]:
        if phase == INSIDE:
            matched = _matched(self.closing, matched, letter)
            return (AFTER, 0) if matched == len(self.closing) else (INSIDE, matched)
        if self.reopens:
            matched = _matched(self.opening, matched, letter)
        elif phase == AFTER:
            return AFTER, 0
        elif self.opening[matched] == letter:
            matched += 1
        else:  # white space may come first
            return (BEFORE, 0) if not matched and letter.isspace() else (AFTER, 0)
        return (INSIDE, 0) if matched == len(self.opening) else (phase, matched)

    def _pending(self, pending: bytes, token: int, text: str) -> bytes:
        if "\ufffd" not in text:
            return b"" if text else pending
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(pending + bytes(self.bytes_of(token) or ()))
        return decoder.getstate()[0]

    def ends_sentence(self, token: int) -> bool:
        """Whether a sentence or a line may end with this token."""
        text = self.text_of(token)
        return text.rstrip(" ").endswith(_SENTENCE_ENDS)


def _matched(marker: str, matched: int, letter: str) -> int:
    """The length of the longest beginning of a marker that a text ends with, after one more letter."""
    text = marker[:matched] + letter
    return next(count for count in range(min(len(text), len(marker)), -1, -1) if text.endswith(marker[:count]))


@dataclass(frozen=True, eq=False)
class ThoughtRules:
    """The rules of one request. A rule that is not set is never due.

    begun       tokens of the prompt behind the opening marker of its last thought, which may be closed among them;
                None: it has no opening marker
    forced      the tokens that close a thought: message, closing marker, and what the template writes behind it
    budget      tokens inside from which the thought closes
    reserve_at, close_at   new tokens of the text from which it closes: for the reserve, and on request
    minimum     tokens inside before which the closing marker is banned
    soft_from   tokens inside from which the closing marker becomes likelier; needs a budget
    wait_token, max_waits  this token is chosen in place of a closing marker of one token, that many times
    bans_ends   ends of the text are banned inside
    closes_loops  a loop inside closes the thought
    opens_first   a thought is at the beginning of the text, or there is none
    """

    markers: Markers
    begun: tuple[int, ...] | None = None
    forced: tuple[int, ...] = ()
    budget: int = NEVER
    reserve_at: int = NEVER
    close_at: int = NEVER
    minimum: int = 0
    soft_from: int = NEVER
    wait_token: int = -1
    max_waits: int = 0
    bans_ends: bool = False
    closes_loops: bool = False
    opens_first: bool = False

    @cached_property
    def _slack(self) -> int:
        """Tokens by which a closing can be put off."""
        return _LONGEST_CHARACTER + len(self.markers.closing) - 2

    @property
    def first(self) -> ThoughtState:
        """The state before `begun`."""
        return ThoughtState(BEFORE if self.begun is None else INSIDE)

    def advance(self, state: ThoughtState, token: int, num: int) -> ThoughtState:
        """The state after one more token. num: the number of new tokens with it; less than 1 in the prompt"""
        if state.phase == CLOSING:
            if token == self.forced[state.written]:
                written = state.written + 1
                phase = AFTER if written == len(self.forced) else CLOSING
                return ThoughtState(phase, 0, b"", state.inside, state.waits, written, state.cause)
            # A draft that the rules reject, or a prompt that was written without them.
            state = ThoughtState(INSIDE, 0, b"", state.inside + state.written, state.waits)
        phase, matched, pending = self.markers.move(state.phase, state.matched, state.pending, token)
        inside, waits = state.inside, state.waits
        if state.phase == INSIDE:
            if phase != INSIDE:
                return ThoughtState(phase, matched, b"", inside, waits, 0, "model")
            inside += 1
            waits += token == self.wait_token
        elif phase != INSIDE:
            phase = AFTER if self.opens_first and not matched else phase
            if phase == state.phase and matched == state.matched:
                return state
            return ThoughtState(phase, matched, b"", inside, waits, state.written, state.cause)
        return self.closed_if_due(ThoughtState(INSIDE, matched, pending, inside, waits), num)

    def closed_if_due(self, state: ThoughtState, num: int) -> ThoughtState:
        """A state inside, or the beginning of the closing where a rule of counts is due."""
        over = max(state.inside - self.budget, num - self.reserve_at, num - self.close_at)
        if over < 0 or (not state.is_whole and over < self._slack):
            return state
        cause = "budget" if state.inside >= self.budget else "reserve" if num >= self.reserve_at else "request"
        return closing(state, cause)

    def given_token(self, state: ThoughtState) -> int | None:
        """The token that has to follow; None: the model chooses it."""
        return self.forced[state.written] if state.phase == CLOSING else None

    def banned(self, state: ThoughtState) -> tuple[int, ...]:
        """Tokens that cannot follow, besides ends of the text: the closing marker of a thought that is too short, and
        both markers behind a closing that the rules made."""
        markers = self.markers
        if state.phase == INSIDE and state.inside < self.minimum:
            return markers.completing(markers.closing, state.matched)
        if state.phase == AFTER and state.written:
            return (*markers.completing(markers.closing, 0),
                    *markers.completing(markers.opening, state.matched if markers.reopens else 0))
        return ()

    def bias(self, state: ThoughtState, last: int) -> float:
        """What the soft close adds to the logits of tokens that complete the closing marker, after the token `last`."""
        if state.phase != INSIDE or state.inside < self.soft_from or not self.markers.ends_sentence(last):
            return 0.0
        return SOFT_BIAS * (state.inside - self.soft_from) / (self.budget - self.soft_from)

    def waits_on(self, state: ThoughtState, token: int) -> bool:
        """Whether `wait_token` is chosen in place of this one."""
        return (state.phase == INSIDE and state.waits < self.max_waits
                and token in self.markers.completing(self.markers.closing, state.matched))

    def quiet_for(self, state: ThoughtState, num: int) -> int:
        """Tokens, at least 1, for which no count can make a rule due if the phase stays the same."""
        if state.phase != INSIDE:
            return NEVER
        gaps = [self.budget - state.inside, self.reserve_at - num, self.close_at - num]
        if state.inside < self.minimum:
            gaps.append(self.minimum - state.inside)
        return max(1, min(gaps))


def closing(state: ThoughtState, cause: str) -> ThoughtState:
    """The beginning of the closing of a thought."""
    return ThoughtState(CLOSING, 0, b"", state.inside, state.waits, 0, cause)


class Thought:
    """The state of one text, which follows its tokens one by one, and detects loops inside the thought."""

    def __init__(self, rules: ThoughtRules) -> None:
        begun = rules.begun or ()
        self.rules = rules
        self.state = rules.first
        self.num = -len(begun)  # new tokens so far
        self._guard = LoopGuard() if rules.closes_loops else None
        self._states = deque[ThoughtState](maxlen=_REMEMBERED)  # before the last tokens
        if self.state.phase == INSIDE:
            self.state = rules.closed_if_due(self.state, self.num)
        for token in begun:
            self.push(token)
        self._start = self.state

    def figures(self) -> dict[str, Any]:
        """What the new tokens are of thoughts: under the names of the statistics."""
        state, start = self.state, self._start
        is_new = state.phase != AFTER or start.phase != AFTER or state.inside > start.inside
        has_opened = is_new and (state.phase in (INSIDE, CLOSING) or state.cause != "")
        written = start.written if start.phase == CLOSING else 0
        return {"opened": has_opened, "tokens": state.inside - start.inside,
                "closed_by": state.cause if has_opened and state.phase == AFTER else None,
                "forced": state.written - written if has_opened else 0, "waits": state.waits - start.waits}

    def push(self, token: int) -> ThoughtState:
        """One more token; returns the state after it."""
        before, self.num = self.state, self.num + 1
        self._states.append(before)
        self.state = state = self.rules.advance(before, token, self.num)
        if self._guard is not None and before.phase == INSIDE:
            if state.phase == AFTER:
                self._guard = LoopGuard()
            elif state.phase == INSIDE:
                self._guard.push(token)
                if self._guard.is_looping and state.is_whole:
                    self.state = closing(state, "loop")
        return self.state

    def cut_to(self, num: int) -> Thought:
        """The thought of the text's first `num` new tokens; of none of them where that is not remembered, as after a
        long cut, or where it looks for loops."""
        taken = [self._states.pop() for _ in range(min(self.num - num, len(self._states)))]
        if len(taken) < self.num - num or (self._guard and any(state.phase == INSIDE for state in taken)):
            return Thought(self.rules)
        if taken:
            self.state, self.num = taken[-1], num
        return self

    def replace_rules(self, rules: ThoughtRules) -> None:
        """Go on with rules that differ in what is due from now on, such as `close_at`."""
        self.rules = rules
        if self.state.phase == INSIDE:
            self.state = rules.closed_if_due(self.state, self.num)

    @property
    def quiet_for(self) -> int:
        """Tokens, at least 1, for which no rule is due if the phase stays the same."""
        quiet = self.rules.quiet_for(self.state, self.num)
        return min(quiet, self._guard.quiet_for) if self._guard is not None and self.state.phase == INSIDE else quiet


def is_free(before: ThoughtState, after: ThoughtState, applies_inside: bool) -> bool:
    """Whether no banned phrase contains a token between two states: a given one, and any one inside unless they apply
    there."""
    return before.phase == CLOSING or (not applies_inside and INSIDE in (before.phase, after.phase))
