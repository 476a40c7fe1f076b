"""Prefill: the forwards over the prompt (and over what an earlier run wrote) before the first step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from longdraft.kernels.interface import DEVICE_CHUNK
from longdraft.model.transformer import ForwardRequest, chain_rows
from longdraft.parallel import SingleProcess
from longdraft.speculation.abilities import ReadsPrompt
from longdraft.speculation.drafter import Verified
from longdraft.speculation.reuse import DRAFTER_ROWS, PREFILL_CHUNK, PrefixReuse
from longdraft.speculation.routine import Routine
from longdraft.speculation.step import Step

PREFILL_SHARED = 64  # as PREFILL_CHUNK, but in a batch, where the other requests' steps wait for each forward
RESUMED_CHUNK = 128  # on a device, resumed tokens in one forward


def prefill(step: Step, ranks: SingleProcess, is_shared: Callable[[], bool],
            on_prefill: Callable[[int, int], None] | None, reuse: PrefixReuse,
            score: Callable[[Tensor, list[int]], None] | None = None) -> Routine[None]:
    """Compute the cache rows of all of the context but its last token, which is the root of the first tree.

    The cache may hold the first of these rows already.

    is_shared   whether other requests share the forwards at this moment
    on_prefill  called with (tokens done, tokens in all) after each forward
    reuse       gives the rows to the prefix tree
    score       called with the last layer's output [R, hidden] of each forward, and the tokens that follow its rows
    """
    cache, context = step.cache, step.context
    last = len(context) - 1
    verified: Verified | None = None
    while cache.length < last:
        start = cache.length
        end, is_prompt = _chunk(step, start, last, is_shared())
        tokens = context.slice(start, end).tolist()
        with ranks.synchronized(context):
            result = yield ForwardRequest(step.model, chain_rows(tokens, start), cache, is_prompt=is_prompt)
        cache.commit(range(len(tokens)))
        if score:
            score(result.hidden, context.slice(start + 1, end + 1).tolist())
        reuse.record_progress(is_done=cache.length == last)
        verified = Verified(result, range(-min(DRAFTER_ROWS, len(tokens)), 0))
        if on_prefill:
            on_prefill(end, last)
    reuse.end_reading()
    if isinstance(step.drafter, ReadsPrompt):
        yield from step.drafter.read_prompt(context)
    step.drafter.begin(context, verified)


def _chunk(step: Step, start: int, last: int, is_shared: bool) -> tuple[int, bool]:
    """Where the chunk that begins at `start` ends, and whether it is computed as part of a prompt.

    On a device all chunks of a prompt have one size, so that a prompt is always computed alike. Resumed tokens were
    computed by steps in the first run, and are computed as rows of verification again.
    """
    if not step.model.kernels.is_device:
        return min(start + (PREFILL_SHARED if is_shared else PREFILL_CHUNK), last), True
    prompt = min(step.context.prompt_length - 1, last)
    if start < prompt:
        return min(start + DEVICE_CHUNK, prompt), True
    return min(start + RESUMED_CHUNK, last), False
