"""The decoder of all families: one class, the cache an argument, prefill, decode, verify and draft one call.

A forward serves one text or several: each has rows of its own over a cache of its own, and the weights are read once
for the rows of all. No row depends on the others, so who travels together is nobody's business but the clock's.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.cache.full import FullCache, KVCache
from longdraft.kernels import AttentionOutput, Geometry, Kernels, LayerWeights, Linear
from longdraft.model.config import ModelConfig
from longdraft.model.rope import RopeTable, max_unscaled_length
from longdraft.tree import Tree

log = logging.getLogger(__name__)


class Rows(NamedTuple):
    """One text's rows of a forward: token, absolute position, and the row each one follows (-1: the cache)."""

    tokens: Sequence[int]
    positions: Sequence[int]
    parents: Sequence[int]


def tree_rows(tree: Tree, root_position: int) -> Rows:
    return Rows(tree.tokens, [root_position + depth for depth in tree.depths], tree.parents)


def chain_rows(tokens: Sequence[int], start: int) -> Rows:
    return Rows(tokens, range(start, start + len(tokens)), range(-1, len(tokens) - 1))


class ModelWeights(NamedTuple):
    embedding: Linear
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear
    quantize: str = "none"  # or "int8": the tables and all that rows are multiplied with; norms and biases never


class ForwardRequest(NamedTuple):
    """What a text asks for: a forward of rows over its cache, and logits of the last `num_logits` of them.

    is_prompt  see `LayersKV`
    """

    model: Transformer
    rows: Rows
    cache: KVCache
    num_logits: int = 0
    is_prompt: bool = False


class Forward:
    """What a forward leaves of one text's rows: a part of what it leaves of all, cut out where it is wanted.

    hidden    [T, hidden] before the final norm
    attended  what all layers' attention did for the rows
    logits    [num_logits, V] float32 of the last rows
    """

    def __init__(self, hidden: Tensor, attention_output: AttentionOutput, rows: slice | None, logits: Tensor) -> None:
        """rows: this text's; None: all."""
        self.logits = logits
        self._hidden, self._attention_output, self._rows = hidden, attention_output, rows

    @cached_property
    def hidden(self) -> Tensor:
        return self._hidden if self._rows is None else self._hidden[self._rows]

    @cached_property
    def attention_output(self) -> AttentionOutput:
        return self._attention_output if self._rows is None else self._attention_output.cut(self._rows)


class Transformer:
    """The decoder. Holds weights and kernels, no state of any text."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, kernels: Kernels,
                 whole: ModelConfig | None = None) -> None:
        """config: of what this process has of the model; whole: of the model, where that is more."""
        self.config = config
        self.whole = whole or config
        self.weights = weights
        self.kernels = kernels
        geometry = Geometry(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps,
                            config.post_norm, config.post_norm, config.query_factor, config.residual_factor)
        self._decoder = kernels.new_decoder(weights.layers, geometry)
        self._rope = RopeTable(config, 1, kernels.device)
        self._has_warned = False

    def for_length(self, length: int) -> Transformer:
        """The model for a text of this length, the prompt and all that is to be written: itself, or the same weights
        with the rotations for that length, where they depend on one (rope types dynamic and longrope). They are
        chosen once, because a text whose rotations change on the way has no one meaning: rows in the cache keep theirs.
        """
        config = self.config
        if length > config.trained_positions and not self._has_warned:
            self._has_warned = True
            log.warning("a text of %d tokens is longer than the model's max_position_embeddings (%d); rope type %r "
                        "stretches to %d, quality may fall", length, config.trained_positions, config.rope.kind,
                        config.max_positions)
        kept = max_unscaled_length(config.rope, config.trained_positions)
        if kept is None or length <= kept:
            return self
        other = copy.copy(self)
        other._rope = RopeTable(config, length, self.kernels.device)
        return other

    @property
    def weights_in_tokens(self) -> float:
        """Tokens of context whose cache is as large as the weights that a forward reads."""
        return sum(linear.nbytes for linear in self.linears) / self.cache_bytes_per_token

    @property
    def linears(self) -> list[Linear]:
        """Every weight that a row meets, in order."""
        layers = [linear for layer in self.weights.layers
                  for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return [*layers, self.weights.head]

    @property
    def cache_bytes_per_token(self) -> int:
        config = self.config
        heads = 2 * config.num_layers * config.num_kv_heads
        return heads * self.kernels.cache_bytes(config.head_dim)

    def new_cache(self) -> FullCache:
        config = self.config
        windows = [config.window_of(layer) for layer in range(config.num_layers)]
        return FullCache(self.kernels, config.num_layers, config.num_kv_heads, config.head_dim, windows)

    @property
    def identity(self) -> object:
        """Equal of the models that can be asked together: of one's copies for several lengths."""
        return self._decoder

    def forward(self, rows: Rows, cache: KVCache, num_logits: int = 0, is_prompt: bool = False) -> Forward:
        """Run rows over a cache; their keys and values stay provisional until the cache commits them."""
        return self.forward_batch([ForwardRequest(self, rows, cache, num_logits, is_prompt)])[0]

    def forward_batch(self, asks: Sequence[ForwardRequest]) -> list[Forward]:
        """One forward for all that is asked of this model, each text over a cache of its own."""
        kernels, config = self.kernels, self.config
        counts = [len(ask.rows.tokens) for ask in asks]
        ends = list(accumulate(counts))
        shape = (config.num_layers, ends[-1], config.num_kv_heads, config.head_dim)
        k, v = (torch.empty(shape, dtype=kernels.dtype, device=kernels.device) for _ in range(2))
        texts = [ask.cache.append(*parts)._replace(is_prompt=ask.is_prompt) for ask, *parts in
                 zip(asks, _split(k, counts, 1), _split(v, counts, 1), strict=True)]
        hidden, attention_output = self._decoder.forward(
            self.embed([token for ask in asks for token in ask.rows.tokens]), *_rotations(asks), texts,
            torch.tensor([parent for ask in asks for parent in ask.rows.parents], dtype=torch.int32))
        logits = self._last_logits(hidden, [(end, ask.num_logits) for end, ask in zip(ends, asks, strict=True)])
        if len(asks) == 1:
            return [Forward(hidden, attention_output, None, logits[0])]
        return [Forward(hidden, attention_output, slice(end - count, end), part)
                for count, end, part in zip(counts, ends, logits, strict=True)]

    def _last_logits(self, hidden: Tensor, wanted: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
        """Logits of the last rows of each text: (where its rows end, how many)."""
        counts = [count for _, count in wanted]
        if not any(counts):
            return [hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)] * len(wanted)
        if sum(counts) != hidden.shape[0]:
            hidden = torch.cat([hidden[end - count : end] for end, count in wanted])
        return _split(self.logits(hidden), counts, 0)

    def rotations(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """cos, sin [R, D / 2] float32 of positions."""
        return self._rope.at(positions)

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Rows [R, hidden] that the first layer reads."""
        x = self.kernels.embed(self.weights.embedding, tokens)
        return x if self.config.embedding_factor == 1 else x * self.config.embedding_factor

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] float32 of hidden rows [R, hidden] (before the final norm)."""
        return self.head(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden rows [R, hidden] behind the final norm."""
        config = self.config
        return self.kernels.rms_norm(hidden, self.weights.norm, config.rms_norm_eps, rounds_once=config.post_norm)

    def head(self, normed: Tensor) -> Tensor:
        """Logits [R, V] float32 of rows that are already normalised."""
        logits = self.kernels.linear(normed, self.weights.head, keep_float=True)
        return logits if self.config.logits_divisor == 1 else logits.div_(self.config.logits_divisor)


def _split(x: Tensor, counts: Sequence[int], axis: int) -> Sequence[Tensor]:
    """Views of so many rows each."""
    return (x,) if len(counts) == 1 else torch.split(x, list(counts), axis)


def _rotations(asks: Sequence[ForwardRequest]) -> tuple[Tensor, Tensor]:
    """cos, sin [R, D / 2] of all rows, each with those of its own text."""
    if len(asks) == 1:
        return asks[0].model.rotations(asks[0].rows.positions)
    parts = [ask.model.rotations(ask.rows.positions) for ask in asks]
    return torch.cat([cos for cos, _ in parts]), torch.cat([sin for _, sin in parts])
