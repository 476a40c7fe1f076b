"""The meaning of what an EAGLE head's config.json leaves open: a short text decides.

Public files use the same numbers and flags with different meanings (longdraft/parts/eagle_config.py). A head that is
read wrongly loads, and its guesses are rejected. So the target and the head read a short text, and the reading under
which the head predicts the target's choices best is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.model.transformer import Transformer, chain_rows
from longdraft.parts.eagle import Eagle

log = logging.getLogger(__name__)
LONGEST_PROBE = 256  # tokens of the text that are read
PROBE_TEXT = (
    "The rain had stopped before dawn, and the road to the village shone between the hedges. Nobody had expected the "
    "old man to come back. He carried a small bag, a stick, and a letter that he had not opened. At the bridge he "
    "waited for a while and looked at the water, which was brown and fast after the storm. A boy with two dogs came "
    "down the hill and asked him whether he was lost. No, said the old man, I was born in the third house behind the "
    "church, and I only want to know who lives there now. The boy thought about it. My aunt does, he said at last, but "
    "she does not like visitors in the morning. Then I will wait until the afternoon, said the old man, and he sat "
    "down on the wall, put the letter on his knees, and began to tell the boy how the bridge had been built.")


def likeliest(head: Eagle, readings: Sequence[Sequence[int]], target: Transformer,
               encode: Callable[[str], list[int]] | None) -> Eagle:
    """The reading of config.json under which the head predicts the target best; one of `readings`, the layers that it
    may mean. encode: the target's tokenizer; None: the first reading is taken."""
    config = head.config
    norms = (config.norm_before_residual,) if config.norm_before_residual is not None else (True, False)
    heads = [head.reading(layers, norm_before_residual=bool(norm)) for layers in readings for norm in norms]
    if encode is None or (len(heads) == 1 and config.norm_output is not None):
        return heads[0]
    probe = _Probe(ReadText.of(target, encode(PROBE_TEXT)[:LONGEST_PROBE],
                               {layer for each in heads for layer in each.taps}))
    found = _best(heads, [probe.score(each) for each in heads], "first guesses")
    if config.norm_output is None:  # it matters from the second guess on
        heads = [found.reading(found.layers, norm_output=norm) for norm in (True, False)]
        found = _best(heads, [probe.second_score(each) for each in heads], "second guesses")
    return found


def _best(heads: Sequence[Eagle], scores: Sequence[float], of: str) -> Eagle:
    best = max(range(len(heads)), key=lambda index: scores[index] - 0.02 * index)  # among equal ones the first
    taken = heads[best]
    if len(heads) > 1:
        log.info("the head's config.json has %d meanings; log-likelihoods of the model's tokens in %s: %s; taken: "
                 "layers %s, norm_before_residual %s, norm_output %s", len(heads), of,
                 ", ".join(f"{score:.2f}" for score in scores), list(taken.layers), taken.config.norm_before_residual,
                 taken.config.norm_output)
    return taken


class ReadText(NamedTuple):
    """A short text that the target has read.

    ids      its tokens
    layers   of `states`, ascending
    states   [layers, T, target's hidden]
    choices  [T] the target's likeliest token after each
    """

    ids: list[int]
    layers: tuple[int, ...]
    states: Tensor
    choices: Tensor

    @staticmethod
    def of(target: Transformer, ids: list[int], layers: set[int]) -> ReadText:
        """Read a text. layers: whose rows are wanted"""
        tapped = target.with_taps(sorted(layers))
        cache = tapped.new_cache()
        result = tapped.forward(chain_rows(ids, 0), cache, len(ids))
        cache.commit(range(len(ids)))
        assert cache.taps is not None
        return ReadText(ids, tapped.taps, torch.cat([run.states for run in cache.taps.take()], 1),
                        result.logits.argmax(-1))

    def states_of(self, layers: Sequence[int]) -> Tensor:
        """The rows [taps, T, target's hidden] of some layers."""
        return self.states[[self.layers.index(layer) for layer in layers]]


class _Probe(NamedTuple):
    """How well heads predict the target in a text."""

    text: ReadText

    def score(self, head: Eagle) -> float:
        """Mean log-likelihood of the target's choices in the head's first guesses."""
        return self._agreement(head, self._forward(head, None), 1)

    def second_score(self, head: Eagle) -> float:
        """The same in its second guesses: after each row of the text stands one row of the head's own."""
        own = self._forward(head, None)[:-1]
        return self._agreement(head, self._forward(head, head.fed_back(own))[-len(own):], 2)

    def _forward(self, head: Eagle, own: Tensor | None) -> Tensor:
        """The layers' output for the rows of the text, and for rows `own` that follow one of them each."""
        count = len(self.text.ids) - 1
        y = head.fuse(self.text.states_of(head.taps))[:-1]
        tokens, positions = list(self.text.ids[1:]), list(range(count))
        parents = torch.arange(-1, count - 1, dtype=torch.int32)
        if own is not None:
            y = torch.cat([y, own])
            tokens, positions = tokens + self.text.ids[2:], positions + list(range(1, count))
            parents = torch.cat([parents, torch.arange(count - 1, dtype=torch.int32)])
        layer = head.config.layer
        stores = [head.kernels.new_store(layer.num_kv_heads, layer.head_dim) for _ in range(layer.num_layers)]
        return head.forward(y, tokens, positions, stores, 0, parents).hidden

    def _agreement(self, head: Eagle, hidden: Tensor, first: int) -> float:
        """hidden: of rows that guess what follows the tokens `first`, `first` + 1, ..."""
        said = head.logits(hidden).log_softmax(-1).gather(1, self.text.choices[first : first + len(hidden), None])[:, 0]
        return float(said[said.isfinite()].mean()) if said.isfinite().any() else -torch.inf
