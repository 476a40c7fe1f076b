"""The functions and the thinking of one model's chats, for the server, batches and the command `chat` alike.

    model = ModelTools(tokenizer, answer_format)
    prompt = model.prompt(messages, tools, variables)        # a text
    params = model.applied(params, tools, ids)               # with the grammar of calls
    reader = model.answers(tools).reader(ids, seed=7)        # of the answer

`tools` is None for a chat without functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tools import ToolRequest
from longdraft.text.thinking import TAG_TOKENS, AnswerFormat, closed_thinking
from longdraft.text.tokenizer import Tokenizer
from longdraft.text.tools.forms import GENERIC, ToolForm, find_form, template_messages
from longdraft.text.tools.grammar import ToolGrammar
from longdraft.text.tools.reader import ToolAnswers

_OF_CALLS = ("tool_calls", "tool_call_id", "function_call")  # members of messages


@dataclass(frozen=True)
class ModelTools:
    """How a model lists functions, calls them and thinks.

    thinking   how its answers show their thinking; None: they show none
    form_name  of its calls; auto: as its chat template shows
    is_always  a grammar is on whenever an answer may have calls; otherwise where a call is required, or a function has
               `strict`
    """

    tokenizer: Tokenizer
    thinking: AnswerFormat | None
    form_name: str = "auto"
    is_always: bool = True

    @cached_property
    def form(self) -> ToolForm:
        """How the model writes calls. UsageError if its chat template does not show it."""
        return find_form(self.tokenizer.chat_template, self.form_name)

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: ToolRequest | None,
               variables: Mapping[str, Any] | None = None, **options: Any) -> str:
        """The prompt of a conversation, as the chat template writes it.

        variables, options  as `Tokenizer.chat` has them

        Raises UsageError for messages that cannot be used.
        """
        if tools or any(message.get(name) for message in messages for name in _OF_CALLS):
            messages = template_messages(self.form, messages, tools)
        return self.tokenizer.chat(messages, variables, tools=tools.definitions if tools else None, **options)

    def applied(self, params: SamplingParams, tools: ToolRequest | None, prompt: Sequence[int]) -> SamplingParams:
        """The settings of an answer to a prompt, which may open the thought: with the grammar of calls."""
        if tools is None or (self._is_free(tools) and not params.structured_outputs):
            return params
        is_opened = bool(closed_thinking(self.tokenizer.decode(prompt[-TAG_TOKENS:])))
        structure = ToolGrammar(self.form, self.tokenizer, self.thinking).structure(
            tools, params.structured_outputs, is_behind=is_opened or params.steers_thoughts)
        return replace(params, structured_outputs=structure)

    def answers(self, tools: ToolRequest | None, *, shows_thinking: bool = True, sends_thinking: bool = True
                ) -> ToolAnswers:
        """Readers of answers.

        shows_thinking  apart from the text, as it always is beside calls
        sends_thinking  otherwise it is left out where it is apart
        """
        return ToolAnswers(self.form if tools else GENERIC, self.tokenizer,
                           self.thinking if shows_thinking or tools else None, tools,
                           tools is not None and self._is_free(tools), sends_thinking)

    def _is_free(self, tools: ToolRequest) -> bool:
        """Whether the model may write anything in the place of calls."""
        return not (self.is_always or tools.is_required or any(tool.is_strict for tool in tools.callable))
