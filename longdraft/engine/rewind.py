"""The cut of a text before a banned phrase (longdraft/text/banned_phrases.py): the text, its cache, its drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from longdraft.request.events import TokenLogprob
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.abilities import Inherits
from longdraft.speculation.drafter import Accepted, Drafter
from longdraft.speculation.step import Step
from longdraft.text.banned_phrases import ChosenToken, PhraseFilter

SettledTokens = tuple[tuple[int, ...], tuple[str, ...], tuple[TokenLogprob, ...]]  # tokens, sources, log-probabilities


def settle(phrases: PhraseFilter | None, accepted: Accepted, step: Step,
           new_drafter: Callable[[Sampler], Drafter]) -> tuple[SettledTokens, Step]:
    """The tokens that belong to the text for good after a step, and the parts of the next step.

    Where a phrase is complete, the text and the cache are cut before it.
    """
    sources = (*accepted.sources, "")
    if phrases is None:
        return (accepted.tokens, sources, accepted.logprobs), step
    free = step.sampler.free_tokens(step.context, len(accepted.tokens))
    chosen = [ChosenToken(*each) for each in zip_longest(accepted.tokens, sources, accepted.logprobs, free)]
    settled, num_new = phrases.push(chosen)
    if step.cache.states:
        step.cache.states.settle(step.context.prompt_length - 1 + phrases.earliest_cut)
    columns = (tuple(each.token for each in settled), tuple(each.source for each in settled),
               tuple(each.logprob for each in settled if each.logprob))
    return columns, step if num_new is None else _rewound(step, num_new, phrases.banned_tokens, new_drafter)


def _rewound(step: Step, num_new: int, banned: Sequence[int],
             new_drafter: Callable[[Sampler], Drafter]) -> Step:
    """The parts of a step, with the text cut after its first `num_new` new tokens. `banned` cannot be chosen next.

    The drafter remembers the text that it has seen, so it is made anew. Tokens that were computed ahead are dropped.
    """
    context = step.context
    num_retracted = context.num_new - num_new
    context.truncate(context.prompt_length + num_new)
    step.cache.truncate(len(context) - 1)  # the last token's row is computed by the next step
    step.sampler.truncate(context)
    step.sampler.ban(len(context), banned)
    if step.ahead:
        step.ahead.forget()
    drafter = new_drafter(step.sampler)
    if isinstance(drafter, Inherits):
        drafter.inherit(step.drafter, num_retracted)
    drafter.begin(context, None)
    return step._replace(drafter=drafter)
