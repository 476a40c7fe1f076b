"""The thought of a text (longdraft/sampling/thought.py): what follows its rules, and its close on request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from longdraft import kernels, parallel
from longdraft.engine.loaded_model import LoadedModel
from longdraft.errors import UsageError
from longdraft.model.transformer import Transformer
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.sampling.thinking_sampler import ThinkingSampler
from longdraft.sampling.thought import INSIDE, Thought, ThoughtRules, is_free
from longdraft.text.banned_phrases import PhraseFilter
from longdraft.text.stream import stop_ids
from longdraft.text.thought_rules import require_rules_for_tools
from longdraft.text.tokenizer import Tokenizer


def new_sampler(model: LoadedModel, target: Transformer, params: SamplingParams, prompt: Sequence[int],
                rules: ThoughtRules | None) -> Sampler:
    """The sampler of a request. rules: of its thought; None: the model marks none"""
    settings = (params, stop_ids(params, target.config.eos_token_ids), target.kernels.name != kernels.REFERENCE,
                target.kernels, model.marked_tokens(params), model.grammar_rules(params, prompt))
    if rules and params.has_thought_rules:
        return ThinkingSampler(*settings, thought=rules)
    return Sampler(*settings)


def new_phrase_filter(tokenizer: Tokenizer, params: SamplingParams, context: Context, ends: Iterable[int],
                      rules: ThoughtRules | None) -> PhraseFilter | None:
    """The filter of a text, which may have tokens of earlier runs; None without banned phrases.

    ends   tokens that end the text
    rules  of its thought; None: the model marks none
    """
    if not params.banned_strings:
        return None
    prompt, written = (context.slice(start, stop).tolist() for start, stop in (
        (0, context.prompt_length), (context.prompt_length, len(context))))
    thought = Thought(rules) if rules and params.has_thought_rules else None
    free = [thought is not None and is_free(thought.state, thought.push(token), params.banned_in_thinking)
            for token in written]
    return PhraseFilter(tokenizer, params, prompt, zip(written, free, strict=True), ends)


def require_closable(model: LoadedModel, params: SamplingParams) -> None:
    """UsageError if a request's thought cannot be closed while it is being written."""
    if parallel.shard_of(model.target.kernels).size > 1:
        raise UsageError("a thought cannot be closed on request where several processes share the model; set "
                         "thinking_budget")
    if (form := model.answer_format) is not None:
        require_rules_for_tools(form, params)


def closed_here(model: LoadedModel, params: SamplingParams, rules: ThoughtRules, context: Context
                ) -> SamplingParams | None:
    """The settings that close the thought of a text from its next token on; None if the text is in no open thought."""
    if rules.close_at <= context.num_new:
        return None
    thought = Thought(rules)  # the tokens that are held, too, which the text's stream has not seen
    for token in context.slice(context.prompt_length, len(context)).tolist():
        thought.push(token)
    if thought.state.phase != INSIDE:
        return None
    return model.with_closing(replace(params, thinking_close_at=context.num_new))
