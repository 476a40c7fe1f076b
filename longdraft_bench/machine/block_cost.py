"""The cost of a draft of a block head beside a plain step of its model; `longdraft bench block-cost`.

    longdraft bench block-cost --model stretched --contexts 1024,8192 --layers 5 --rows 8 --output block-cost.json

The head has random weights of the target's sizes: a draft costs the same whatever it guesses. After the first N tokens
of a text of random tokens, for each N of `--contexts`, plain steps and drafts are timed in turns. A draft reads the
states of three new rows, runs the block, ranks the candidates and grows a tree. Reported are medians: a plain step, a
draft, and their ratio in each pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.drafters.block import BlockDrafter, BlockOptions
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.parts.block import BlockHead
from longdraft.report.table import Table
from longdraft.report.turns import Record
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone
from longdraft_bench.machine import eagle_cost
from longdraft_bench.machine.eagle_cost import beside_plain
from longdraft_bench.models.random_weights import BlockShape, random_block
from longdraft_bench.timing import seconds_of

_CHUNK = 512  # tokens of the prompt in a forward
_NEW = 3  # rows of text between two drafts


def measure(model: Transformer, contexts: Sequence[int], shape: BlockShape, pairs: int) -> list[Record]:
    """A record for each context."""
    head = random_block(model, shape)
    return [_measure_after(model.with_taps(head.taps), head, length, pairs) for length in contexts]


def _measure_after(tapped: Transformer, head: BlockHead, length: int, pairs: int) -> Record:
    """Times after a text of `length` random tokens."""
    ids = torch.randint(0, 1000, (length + 1,), generator=torch.Generator().manual_seed(1)).tolist()
    cache, context = tapped.new_cache(), Context(ids[:1])
    params = SamplingParams(seed=1, temperature=1.0, min_p=0.1)
    drafter = BlockDrafter(BlockOptions(suffix=False), head, cache, Sampler(params, kernels=tapped.kernels), params)

    def write(tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        rows = context.slice(len(context) - 1, len(context)).tolist() + list(tokens[:-1])
        tapped.forward(chain_rows(rows, len(context) - 1), cache)
        cache.commit(range(len(rows)))
        context.extend(tokens)

    for start in range(1, length + 1, _CHUNK):
        write(ids[start : min(start + _CHUNK, length + 1)])

    def drafted() -> float:
        """Seconds of one draft."""
        write([5, 6, 7][:_NEW])
        return seconds_of(lambda: run_alone(drafter.propose(context, head.most_slots)))

    def plain() -> object:
        return tapped.forward(chain_rows([context.last], len(context) - 1), cache, 1)

    drafted()
    return beside_plain(length, lambda: seconds_of(plain), drafted, pairs)


def table(records: Sequence[Record]) -> Table:
    return eagle_cost.table(records, "A draft of a block head beside a plain step")
