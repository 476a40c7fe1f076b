"""The meaning of what a block head's config.json leaves open, or may say wrongly: a short text decides.

A head that is read wrongly loads and guesses badly, without an error. So the target and the head read a short text, and
the reading is taken under which the head predicts the target's choices best. Readings that contradict the file must be
better by a clear margin. A head that predicts nothing under any of them gets a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch

from longdraft.model.transformer import Transformer
from longdraft.parts.block import BlockHead
from longdraft.parts.probe_text import ReadText

log = logging.getLogger(__name__)
_NUM_BLOCKS = 16  # that guess, at different places of the text
_NUM_SLOTS = 3  # of a block that count
_MARGIN = 0.1  # nats by which a reading must be better than one that comes before it


class _Score(NamedTuple):
    """Mean log-likelihood of the target's choices, and the share of first guesses that are right."""

    likelihood: float
    first: float


def likeliest(head: BlockHead, target: Transformer, encode: Callable[[str], list[int]] | None) -> BlockHead:
    """The reading of config.json under which the head predicts the target best. encode: the target's tokenizer; None:
    the first reading is taken"""
    heads = list(_readings(head, target.whole.num_layers))
    if encode is None:
        return heads[0]
    text = ReadText.for_heads(heads, target, encode)
    scores = [_score(each, text) for each in heads]
    best = max(range(len(heads)), key=lambda index: scores[index].likelihood - _MARGIN * (index > 0))
    taken, score = heads[best], scores[best]
    if best:
        log.warning("the block head predicts the model's tokens better if its config.json is read otherwise "
                    "(log-likelihood %.2f, before %.2f): layers %s, causal inside the block: %s, the first row "
                    "guesses: %s", score.likelihood, scores[0].likelihood, list(taken.layers), all(taken.config.causal),
                    taken.first_guesses)
    if score.first == 0:
        log.warning("none of %d first guesses of the block head is the model's token; it may have been trained for "
                    "another model, or for texts of another kind", _NUM_BLOCKS)
    return taken


def _readings(head: BlockHead, num_layers: int) -> Iterator[BlockHead]:
    """The possible meanings, the likeliest first."""
    config = head.config
    layers = [head.layers, config.other_layers]
    layers = [each for each in layers if each and each[0] >= 0 and each[-1] <= num_layers]
    all_causal = [config.causal]
    if not config.says_causal:
        count = len(config.causal)
        all_causal += [each for each in ((False,) * count, (True,) * count) if each != config.causal]
    first = [config.first_guesses] if config.first_guesses is not None else [True, False]
    for of_layers, causal, guesses in product(layers, all_causal, first):
        yield head.reading(of_layers, causal=causal, first_guesses=guesses)


def _score(head: BlockHead, text: ReadText) -> _Score:
    count, layer = len(text.ids), head.config.layer
    stores = [head.kernels.new_store(layer.num_kv_heads, layer.head_dim) for _ in range(layer.num_layers)]
    k, v = head.context(text.states_of(head.taps), range(count))
    for store, keys, values in zip(stores, k, v, strict=True):
        store.reserve(count + head.config.block_size)
        store.write(0, keys, values)
    slots = min(_NUM_SLOTS, head.most_slots)
    likelihoods, first = [], []
    positions = {1 + (count - 2 - slots) * step // _NUM_BLOCKS for step in range(_NUM_BLOCKS)}
    # From the end: attention may write a block's rows to the positions after the rows that it sees.
    for position in sorted(positions, reverse=True):
        rows = head.block(text.ids[position], position, head.config.block_size, [(store, position) for store in stores])
        logits = rows.whole()
        wanted = text.choices[position : position + slots]
        said = logits[:slots].log_softmax(-1).gather(1, wanted[:, None])[:, 0]
        likelihoods.append(said[said.isfinite()])
        first.append(bool(logits[0].argmax() == wanted[0]))
    joined = torch.cat(likelihoods)
    return _Score(float(joined.mean()) if len(joined) else -torch.inf, sum(first) / len(first))
