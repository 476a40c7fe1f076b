"""How much a model thinks before it answers a chat: `reasoning_effort`, and a `thinking_budget` of 0.

A chat template that has a setting of its own gets it: the effort, or the switch that turns thinking off. For others the
effort is a budget, a share of the new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from longdraft.errors import LongdraftError, UsageError
from longdraft.request.sampling_params import EFFORTS, SamplingParams
from longdraft.text.chat_template import THINKING_SWITCHES, ChatTemplate
from longdraft.text.harmony import Harmony
from longdraft.text.thinking import AnswerFormat
from longdraft.text.thought_rules import needs_marks

_VARIABLE = "reasoning_effort"
_SHARES = {"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 1.0, "max": 1.0}  # of the new tokens
_HARMONY = ("low", "medium", "high")  # the template writes any word; the models know these


class Effort(NamedTuple):
    """What an effort means for a model.

    variables  of the chat template, those of the request included
    share      the budget of a thought, as a share of the new tokens; None: there is none
    """

    variables: dict[str, Any]
    share: float | None = None

    def applied(self, params: SamplingParams) -> SamplingParams:
        """The settings of the text: with a budget, unless they have one, and without the effort."""
        params = replace(params, reasoning_effort=None) if params.reasoning_effort else params
        if self.share is None or params.thinking_budget >= 0:
            return params
        return replace(params, thinking_budget=max(params.min_thinking_tokens, int(self.share * params.max_new_tokens)))


def find_effort(template: ChatTemplate | None, form: AnswerFormat | None, effort: str | None, budget: int,
                variables: Mapping[str, Any], *, turns_on: bool = False, is_required: bool = True) -> Effort:
    """UsageError if the template accepts no effort near this one. Variables of the request win over the effort.

    effort  as `reasoning_effort`
    budget  as `thinking_budget`
    turns_on  turn thinking on where the template can, without an effort
    is_required  UsageError if the model knows no effort
    """
    known = template.options if template else []
    chosen = dict(variables)
    switch = next((name for name in THINKING_SWITCHES if name in known), None)
    if switch is not None and (effort or budget == 0 or turns_on):
        chosen.setdefault(switch, effort != "none" and budget != 0)
    if not effort or _VARIABLE in chosen or (effort == "none" and switch is not None):
        return Effort(chosen)
    if template is not None and _VARIABLE in known:
        return Effort(chosen | {_VARIABLE: _accepted(template, effort, chosen, isinstance(form, Harmony))})
    if form is None and is_required:
        raise needs_marks(_VARIABLE)
    return Effort(chosen, _SHARES.get(effort, 0.0) if form is not None else None)


def _accepted(template: ChatTemplate, effort: str, variables: Mapping[str, Any], is_harmony: bool) -> str:
    """The effort, or the nearest lower, then the nearest higher one, with which the template can be rendered."""
    place = EFFORTS.index(effort)
    for level in (*EFFORTS[place::-1], *EFFORTS[place + 1 :]):
        if is_harmony and level not in _HARMONY:
            continue
        try:
            template.render([{"role": "user", "content": "Hello"}], {**variables, _VARIABLE: level})
        except LongdraftError:
            continue
        return level
    raise UsageError(f"reasoning_effort is {effort!r}, and the chat template accepts none of {', '.join(EFFORTS)}; "
                     "leave it out", _VARIABLE)
