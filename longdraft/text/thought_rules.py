"""The rules of a thought (longdraft/sampling/thought.py) for one model and one request: markers, and what closes it.

    form = thinking.find_format(tokenizer)
    markers = thought_markers(form)                              # once for a model
    params = with_closing(form, params)                          # the tokens that close a thought, once for a text
    rules = thought_rules(form, markers, params, prompt)

The tokens that close a thought are a message, the closing marker as the model's own token, and what the chat template
writes between that marker and an answer. They are part of the settings from then on, and so of a journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from longdraft.errors import LongdraftError, UsageError, check
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.thought import AFTER, BEFORE, INSIDE, NEVER, Markers, Thought, ThoughtRules
from longdraft.text.chat_template import THINKING_SWITCHES, ChatTemplate
from longdraft.text.harmony import ANSWER_HEADER, Harmony
from longdraft.text.thinking import AnswerFormat, ThinkingTags, find_format
from longdraft.text.tokenizer import Tokenizer

MAX_MESSAGE_TOKENS = 256
WAIT = "Wait"
# Qwen's own sentence, from the report on Qwen3. The models were not trained for it, and follow it mostly.
_QWEN_MESSAGE = ("\n\nConsidering the limited time by the user, I have to give the solution based on the thinking "
                 "directly now.\n")
_QWEN_TOKENS = ("<|im_start|>", "<|quad_start|>")  # that only Qwen's tokenizers have together
_THOUGHT, _ANSWER = "Zebra stripes 27", "Quagga spots 31"  # of a conversation that shows how a template writes both


def thought_markers(form: AnswerFormat) -> Markers:
    """The markers of a model's thoughts."""
    assert isinstance(form, ThinkingTags | Harmony)
    tokenizer, marks = form.tokenizer, form.marks
    if isinstance(form, Harmony):
        _, channel, message, end = marks.values()
        opening, closing, reopens = f"{channel}analysis{message}", end, True
    else:
        opening, closing, reopens = form.opening, form.closing, _closing_id(form) is not None

    @cache
    def text_of(token: int) -> str:
        return marks.get(token) or tokenizer.text_of(token)

    return Markers(opening, closing, reopens, text_of, tokenizer.bytes_of, cache(partial(_completing, form)),
                   cache(partial(_continuing, form)))


def _closing_id(form: ThinkingTags) -> int | None:
    """The closing tag as a token; None if the model writes it in several."""
    special = next((token for token, mark in form.marks.items() if mark == form.closing), None)
    return form.tokenizer.token_id(form.closing) if special is None else special


def _completing(form: ThinkingTags | Harmony, marker: str, matched: int) -> tuple[int, ...]:
    """The tokens that complete a marker of which the text has the first `matched` characters."""
    marks = {mark: token for token, mark in form.marks.items()}
    if marker[-1] in marks:  # a special token adds nothing else
        return (marks[marker[-1]],) if matched == len(marker) - 1 else ()
    whole = form.tokenizer.token_id(marker)
    if whole is not None and not matched:
        return (whole,)
    return tuple(token for token, text in enumerate(form.tokenizer.texts) if marker in marker[:matched] + text)


def _continuing(form: ThinkingTags | Harmony, marker: str, matched: int) -> tuple[int, ...]:
    """The tokens that are the next part of a marker of which the text has the first `matched` characters."""
    marks, rest = {mark: token for token, mark in form.marks.items()}, marker[matched:]
    if rest[0] in marks:
        return (marks[rest[0]],)
    whole = form.tokenizer.token_id(marker)
    if whole is not None and not matched:
        return (whole,)
    return tuple(token for token, text in enumerate(form.tokenizer.texts) if text and rest.startswith(text))


def with_closing(form: AnswerFormat, params: SamplingParams) -> SamplingParams:
    """The settings with the tokens that close a thought, unless they have them. UsageError for a message that cannot
    be used."""
    if params.thinking_close:
        return params
    return replace(params, thinking_close=closing_tokens(form, params))


def closing_tokens(form: AnswerFormat, params: SamplingParams) -> tuple[int, ...]:
    """Message, closing marker, and what the chat template writes behind it. Where a grammar begins there, it has the
    rest of gpt-oss's headers, which name the final channel or a function."""
    assert isinstance(form, ThinkingTags | Harmony)
    tokenizer, message = form.tokenizer, params.thinking_message if params.thinking_budget else ""
    if isinstance(form, Harmony):
        message_ids = _following(tokenizer, message)
        start, channel, text, end = form.marks
        closed = (*message_ids, end)
        if params.structured_outputs[:1] == ("tools",):
            require_rules_for_tools(form, params)
        elif not (params.steers_thoughts and params.structured_after == ANSWER_HEADER):
            closed += (start, *tokenizer.encode("assistant", add_special_tokens=False), channel,
                       *tokenizer.encode("final", add_special_tokens=False), text)
    else:
        letters = {mark: tokenizer.letters(token) for token, mark in form.marks.items()}
        closing = letters.get(form.closing, form.closing)
        before, after = _around_closing(tokenizer.chat_template, closing)
        if not message and params.thinking_budget and None not in map(tokenizer.token_id, _QWEN_TOKENS):
            message = _QWEN_MESSAGE
        if not message:
            message = before or "\n"
        elif not message[-1].isspace():
            message += before
        message_ids = _following(tokenizer, message)
        token = _closing_id(form)
        if token is None:
            closed = tuple(_following(tokenizer, message + closing + after))
        else:  # the token itself, never its text in pieces
            closed = (*message_ids, token, *_following(tokenizer, after))
    check(len(message_ids) <= MAX_MESSAGE_TOKENS, "thinking_message", f"{len(message_ids)} tokens",
          f"at most {MAX_MESSAGE_TOKENS} tokens")
    thought = Thought(ThoughtRules(thought_markers(form), begun=()))
    phases = [thought.push(token).phase for token in closed]
    if phases[-1] != AFTER or AFTER in phases[: max(0, len(message_ids) - 1)]:
        raise UsageError("thinking_message holds a marker of the model's thoughts; leave it out", "thinking_message")
    return closed


def require_rules_for_tools(form: AnswerFormat, params: SamplingParams) -> None:
    """UsageError where a thought cannot be closed on request: gpt-oss writes a header behind it, which the grammar of
    calls has only where rules were set from the beginning."""
    if isinstance(form, Harmony) and params.structured_outputs[:1] == ("tools",) and not params.steers_thoughts:
        raise UsageError("a thought of this model cannot be closed on request beside tools, unless the request has a "
                         "rule for it from the beginning; set thinking_budget, to max_tokens if it shall be free",
                         "thinking_close_at")


def _around_closing(template: ChatTemplate | None, closing: str) -> tuple[str, str]:
    """The white space that a template writes before and behind the closing marker."""
    usual = "\n", "\n\n"
    if template is None:
        return usual
    messages = [{"role": "user", "content": "Hello"},
                {"role": "assistant", "reasoning_content": _THOUGHT, "content": _ANSWER}]
    off: dict[str, Any] = {name: False for name in THINKING_SWITCHES if name in template.options}
    for conversation, options in ((messages, {}), (messages[:1], off)):
        try:
            text = template.render(conversation, options, add_generation_prompt=conversation is not messages)
        except LongdraftError:  # the template refuses these messages
            continue
        text = text.partition(_THOUGHT)[2].partition(_ANSWER)[0] if conversation is messages else text
        before, tag, after = text.rpartition(closing)
        if tag and not after.strip():
            return before if not before.strip() and conversation is messages else "\n", after
    return usual


def _following(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that follows another one: some tokenizers put a blank before the first."""
    if not text:
        return []
    first, both = (tokenizer.encode(each, add_special_tokens=False) for each in ("a", "a" + text))
    return both[len(first) :] if both[: len(first)] == first else tokenizer.encode(text, add_special_tokens=False)


def needs_marks(setting: str) -> UsageError:
    """The error of a setting of thoughts with a model that does not mark them."""
    return UsageError(f"{setting} needs a model that marks its thinking, which this one does not; leave it out, or "
                      "give a chat template with the marks by --chat-template", setting)


def check_thought_rules(form: AnswerFormat, markers: Markers, params: SamplingParams) -> None:
    """UsageError for rules that the model cannot follow, whatever the prompt is."""
    if params.thinking_wait:
        is_possible = (len(_following(_tokenizer_of(form), WAIT)) == 1
                       and len(markers.completing(markers.closing, 0)) == 1)
        check(is_possible, "thinking_wait", params.thinking_wait, "0 for this model",
              f"its tokenizer has no token {WAIT!r}, or writes the end of a thought in several tokens")
    if isinstance(form, Harmony) and params.thinking_budget == 0:
        raise UsageError("thinking_budget is 0; allowed: 1 or more for this model, whose thinking cannot be turned "
                         "off; reasoning_effort low makes it short", "thinking_budget")


def _tokenizer_of(form: AnswerFormat) -> Tokenizer:
    assert isinstance(form, ThinkingTags | Harmony)
    return form.tokenizer


def thought_rules(form: AnswerFormat, markers: Markers, params: SamplingParams, prompt: Sequence[int]) -> ThoughtRules:
    """The rules of a request, whose settings have the tokens that close a thought if they can be needed.

    UsageError for rules that the model cannot follow: see `check_thought_rules`.
    """
    check_thought_rules(form, markers, params)
    begun = _begun(form, markers, prompt)
    budget = NEVER if params.thinking_budget < 0 else params.thinking_budget
    last = params.max_new_tokens - len(params.thinking_close) - params.thinking_reserve
    return ThoughtRules(
        markers, begun, params.thinking_close, budget,
        reserve_at=last if params.thinking_reserve else NEVER,
        close_at=NEVER if params.thinking_close_at is None else params.thinking_close_at,
        minimum=params.min_thinking_tokens,
        soft_from=int(params.thinking_soft * budget) if params.thinking_soft else NEVER,
        wait_token=_following(_tokenizer_of(form), WAIT)[0] if params.thinking_wait else -1,
        max_waits=params.thinking_wait, bans_ends=params.steers_thoughts,
        closes_loops=params.on_loop == "answer",
        opens_first=params.steers_thoughts and bool(params.structured_outputs))


def new_thought(tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int]) -> Thought | None:
    """What follows the thought of a text that a journal holds; None where that changes nothing in the text."""
    is_needed = params.steers_thoughts or params.thinking_close_at is not None or not params.stop_in_thinking
    form = find_format(tokenizer) if is_needed else None
    return Thought(thought_rules(form, thought_markers(form), params, prompt)) if form else None


def _begun(form: AnswerFormat, markers: Markers, prompt: Sequence[int]) -> tuple[int, ...] | None:
    """The tokens behind the last opening marker of a prompt; None without one. The thought may be closed among them.

    Only the last message counts, that is, what comes after the last special token that is no part of a marker; of
    gpt-oss, the messages of the assistant at the end. A marker in an earlier message, such as a question about it,
    opens nothing.
    """
    assert isinstance(form, ThinkingTags | Harmony)
    if markers.reopens and not any(token in prompt for token in markers.continuing(markers.opening, 0)):
        return None
    tokenizer, start = form.tokenizer, 0
    begin = next(iter(form.marks)) if isinstance(form, Harmony) else -1
    own = tokenizer.encode("assistant", add_special_tokens=False)
    for index in range(len(prompt) - 1, -1, -1):
        token = prompt[index]
        is_other = token not in form.marks and tokenizer.is_silent(token) and tokenizer.letters(token) != ""
        if is_other or (token == begin and list(prompt[index + 1 : index + 1 + len(own)]) != own):
            start = index + 1
            break
    anywhere = replace(markers, reopens=True, _moves={})
    phase, matched, pending, opened = BEFORE, 0, b"", None
    for index in range(start, len(prompt)):
        before = phase
        phase, matched, pending = anywhere.move(phase, matched, pending, prompt[index])
        opened = index + 1 if phase == INSIDE != before else opened
    return None if opened is None else tuple(prompt[opened:])
