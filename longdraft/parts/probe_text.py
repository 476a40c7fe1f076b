"""The short text by which heads are probed (eagle_probe.py, block_probe.py), as the target reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from longdraft.model.transformer import Transformer, chain_rows

_LONGEST = 256  # tokens of the text that are read
_TEXT = (
    "The rain had stopped before dawn, and the road to the village shone between the hedges. Nobody had expected the "
    "old man to come back. He carried a small bag, a stick, and a letter that he had not opened. At the bridge he "
    "waited for a while and looked at the water, which was brown and fast after the storm. A boy with two dogs came "
    "down the hill and asked him whether he was lost. No, said the old man, I was born in the third house behind the "
    "church, and I only want to know who lives there now. The boy thought about it. My aunt does, he said at last, but "
    "she does not like visitors in the morning. Then I will wait until the afternoon, said the old man, and he sat "
    "down on the wall, put the letter on his knees, and began to tell the boy how the bridge had been built.")


class ReadsLayers(Protocol):
    """A head. taps: the target's layers that it reads, as for `Taps`"""

    taps: tuple[int, ...]


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
    def for_heads(heads: Sequence[ReadsLayers], target: Transformer, encode: Callable[[str], list[int]]) -> ReadText:
        """The text with the rows that these heads read. encode: the target's tokenizer"""
        return ReadText.of(target, encode(_TEXT)[:_LONGEST], {layer for head in heads for layer in head.taps})

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
