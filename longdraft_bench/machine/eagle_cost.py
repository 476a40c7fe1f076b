"""The cost of an EAGLE head's draft step beside a plain step of its model; `longdraft bench eagle-cost`.

    longdraft bench eagle-cost --model stretched --contexts 1024,8192 --output eagle-cost.json

The head has random weights: a step costs the same whatever it guesses. After the first N tokens of a text of random
tokens, for each N of `--contexts`, plain steps and drafts are timed in turns. A draft is what the drafter does in a
step: it reads the row of a new token and drafts a chain. Reported are medians: a plain step, a token of a draft, and
their ratio in each pair.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from longdraft.drafters.chain import Chain
from longdraft.drafters.eagle import EAGLE, EagleDraftModel
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.parts.eagle import Eagle
from longdraft.report.table import Table
from longdraft.report.turns import Record
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Trie
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone
from longdraft_bench.models.random_weights import random_eagle
from longdraft_bench.timing import in_rounds, median_ratio, seconds_of

_CHUNK = 512  # tokens of the prompt in a forward
_WINDOW = 2048  # rows of the text that the head sees, as `longdraft train eagle` trains it


def measure(model: Transformer, contexts: Sequence[int], vocabulary: int, quantize: str, chain: int, pairs: int
            ) -> list[Record]:
    """A record for each context.

    vocabulary  tokens among which the head guesses, at most
    quantize    format of the head's layer
    """
    head = random_eagle(model, vocabulary, quantize)
    return [_measure_after(model.with_taps(head.taps), head, length, chain, pairs) for length in contexts]


def _measure_after(tapped: Transformer, head: Eagle, length: int, chain: int, pairs: int) -> Record:
    """Times after a text of `length` random tokens."""
    ids = torch.randint(0, 1000, (length + 1,), generator=torch.Generator().manual_seed(1)).tolist()
    cache = tapped.new_cache()
    context = Context(ids[:1])
    draft_model = EagleDraftModel(head, cache, _WINDOW, 0, chain)
    for start in range(0, length, _CHUNK):
        end = min(start + _CHUNK, length)
        tapped.forward(chain_rows(ids[start:end], start), cache)
        cache.commit(range(end - start))
        context.extend(ids[start + 1 : end + 1])
    run_alone(draft_model.next_logits(context, ids[-1:]))
    chains = Chain(draft_model, Sampler(SamplingParams(temperature=0.0), []), 1, EAGLE)

    def plain() -> object:
        return tapped.forward(chain_rows([context.last], len(context) - 1), cache, 1)

    def drafted() -> float:
        """Seconds of each token of a draft after one more token of the text."""
        plain()
        cache.commit([0])
        context.extend([2 + len(context) % 900])
        return seconds_of(lambda: run_alone(chains.draft(Trie(context.last), context, [context.last], chain))) / chain

    return beside_plain(length, lambda: seconds_of(plain), drafted, pairs)


def beside_plain(length: int, plain: Callable[[], float], drafted: Callable[[], float], pairs: int) -> Record:
    """The record of a context: seconds of plain steps and of drafts, which are measured in turns."""
    samples = in_rounds({"plain": plain, "draft": drafted}, pairs)
    ratios = [draft / whole for draft, whole in zip(samples["draft"], samples["plain"], strict=True)]
    return {"context": length, "plain_ms": 1e3 * statistics.median(samples["plain"]),
            "draft_ms": 1e3 * statistics.median(samples["draft"]),
            "draft_to_plain": median_ratio(samples["draft"], samples["plain"]),
            "lowest": min(ratios), "highest": max(ratios)}


def table(records: Sequence[Record], title: str = "A draft step of an EAGLE head beside a plain step") -> Table:
    return Table.of_records(title, (
        ("context", "context", ","), ("plain, ms", "plain_ms", ".2f"), ("draft, ms", "draft_ms", ".2f"),
        ("draft to plain", "draft_to_plain", ".3f"), ("low", "lowest", ".3f"), ("high", "highest", ".3f")), records)
