"""The meaning of what an EAGLE head's config.json leaves open: a short text decides.

Public files use the same numbers and flags with different meanings (longdraft/parts/eagle_config.py). A head that is
read wrongly loads, and its guesses are rejected. So the target and the head read a short text, and the reading under
which the head predicts the target's choices best is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longdraft.model.transformer import Transformer
from longdraft.parts.eagle import Eagle
from longdraft.parts.probe_text import ReadText

log = logging.getLogger(__name__)


def likeliest(head: Eagle, readings: Sequence[Sequence[int]], target: Transformer,
              encode: Callable[[str], list[int]] | None) -> Eagle:
    """The reading of config.json under which the head predicts the target best; one of `readings`, the layers that it
    may mean. encode: the target's tokenizer; None: the first reading is taken."""
    config = head.config
    norms = (config.norm_before_residual,) if config.norm_before_residual is not None else (True, False)
    heads = [head.reading(layers, norm_before_residual=bool(norm)) for layers in readings for norm in norms]
    if encode is None or (len(heads) == 1 and config.norm_output is not None):
        return heads[0]
    text = ReadText.for_heads(heads, target, encode)
    taken = _best(heads, [_score(each, text) for each in heads], "first guesses")
    if config.norm_output is None:  # it matters from the second guess on
        heads = [taken.reading(taken.layers, norm_output=norm) for norm in (True, False)]
        taken = _best(heads, [_second_score(each, text) for each in heads], "second guesses")
    return taken


def _best(heads: Sequence[Eagle], scores: Sequence[float], of: str) -> Eagle:
    best = max(range(len(heads)), key=lambda index: scores[index] - 0.02 * index)  # among equal ones the first
    taken = heads[best]
    if len(heads) > 1:
        log.info("the head's config.json has %d meanings; log-likelihoods of the model's tokens in %s: %s; taken: "
                 "layers %s, norm_before_residual %s, norm_output %s", len(heads), of,
                 ", ".join(f"{score:.2f}" for score in scores), list(taken.layers), taken.config.norm_before_residual,
                 taken.config.norm_output)
    return taken


def _score(head: Eagle, text: ReadText) -> float:
    """Mean log-likelihood of the target's choices in the head's first guesses."""
    return _agreement(head, text, _forward(head, text, None), 1)


def _second_score(head: Eagle, text: ReadText) -> float:
    """The same in its second guesses: after each row of the text stands one row of the head's own."""
    own = _forward(head, text, None)[:-1]
    return _agreement(head, text, _forward(head, text, head.fed_back(own))[-len(own):], 2)


def _forward(head: Eagle, text: ReadText, own: Tensor | None) -> Tensor:
    """The layers' output for the rows of the text, and for rows `own` that follow one of them each."""
    count = len(text.ids) - 1
    y = head.fuse(text.states_of(head.taps))[:-1]
    tokens, positions = list(text.ids[1:]), list(range(count))
    parents = torch.arange(-1, count - 1, dtype=torch.int32)
    if own is not None:
        y = torch.cat([y, own])
        tokens, positions = tokens + text.ids[2:], positions + list(range(1, count))
        parents = torch.cat([parents, torch.arange(count - 1, dtype=torch.int32)])
    layer = head.config.layer
    stores = [head.kernels.new_store(layer.num_kv_heads, layer.head_dim) for _ in range(layer.num_layers)]
    return head.forward(y, tokens, positions, stores, 0, parents).hidden


def _agreement(head: Eagle, text: ReadText, hidden: Tensor, first: int) -> float:
    """hidden: of rows that guess what follows the tokens `first`, `first` + 1, ..."""
    said = head.logits(hidden).log_softmax(-1).gather(1, text.choices[first : first + len(hidden), None])[:, 0]
    return float(said[said.isfinite()].mean()) if said.isfinite().any() else -torch.inf
