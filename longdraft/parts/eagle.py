"""EAGLE heads (EAGLE-3, arXiv 2503.01840; EAGLE-1 and -2, 2401.15077, 2406.16858): layers that draft from the target's
own states.

Row i has the target's states of position i and the token of position i + 1, and predicts the token of position i + 2:

    y = fc(states of three layers)       in the text; after it, the row that the head computed one token before
    x = [RMSNorm(embedding of the token) | RMSNorm(y)]            twice the layer's width: queries, keys and values
    a = y + attention(x) + MLP(...)      then plain layers, if there are more; a is the next row's y
    logits = head(RMSNorm(a))            over the head's own vocabulary, whose j-th token is `ids[j]`

P-EAGLE (arXiv 2602.01469) guesses several places in one pass. After the text come rows of masks, which see the text and
the masks before them; they do not depend on what is guessed:

    positions   i - 1   i     |   i + 1   i + 2      y of a mask = fc(a trained row, in place of the target's states)
    tokens      t_i     t_i+1 |   mask    mask       the last row of the text and the masks guess t_i+2, t_i+3, t_i+4

EAGLE-1 has y = the target's last row after its final norm, x = fc([embedding | y]), a = x + ... and the target's head.
Native multi-token prediction (longdraft/parts/native_heads.py) is similar.
longdraft/parts/eagle_config.py has the dialects. Rows are rotated at i; only differences of positions matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.kernels import KV, Decoder, Geometry, KVStore, LayersKV, LayerWeights, Linear
from longdraft.kernels.chain_plan import DraftWeights, Feedback, ModelLayers
from longdraft.kernels.cpu.vocabulary import PartOfVocabulary
from longdraft.kernels.interface import LayerOperations
from longdraft.kernels.layer import RunsLayers, layer_forward
from longdraft.model.rope import RopeTable
from longdraft.model.transformer import Transformer
from longdraft.parallel import local_kernels
from longdraft.parts.eagle_config import FC, MASK_HIDDEN, EagleConfig
from longdraft.parts.head_tensors import layer_shapes


class EagleWeights(NamedTuple):
    """The packed weights. None: the dialect, or this head, does not have the part.

    embedding  the head's own table; None: the target's
    fc         of the tapped rows, or of embedding and row (EAGLE-1)
    fc_norms   before fc: one for all tapped rows together, or one for each
    norms      of the token's embedding and of the row y
    ids        [draft vocabulary] int64: the target's id of each token; None: the same ids
    mask       [taps, 1, target's hidden]: what stands for the target's states in rows of masks (P-EAGLE)
    """

    embedding: Linear | None
    fc: Linear | None
    fc_norms: tuple[Tensor, ...]
    norms: tuple[Tensor, ...]
    layers: tuple[LayerWeights, ...]
    norm: Tensor | None
    head: Linear | None
    ids: Tensor | None
    mask: Tensor | None = None


class EagleRows(NamedTuple):
    """Output [T, hidden] of the layers for T rows, and their keys and values [L, T, Hkv, D]."""

    hidden: Tensor
    k: Tensor
    v: Tensor


class Eagle:
    """A head of one target model. It holds no state of any text.

    layers  the target's layers that it reads, as for `Taps`; the same one may stand twice
    """

    def __init__(self, config: EagleConfig, weights: EagleWeights, target: Transformer,
                 layers: Sequence[int]) -> None:
        self.config, self.layers = config, tuple(layers)
        self.taps = tuple(sorted(set(layers)))  # for `Transformer.with_taps`
        self.kernels = local_kernels(target.kernels)  # every rank has the head whole
        self._weights, self._target = weights, target
        layer = config.layer
        self._geometry = Geometry(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.rms_norm_eps,
                                  rounds_once=layer.rounds_once)
        self._rope = RopeTable(layer, 1, self.kernels.device)
        self._part = None if weights.ids is None else PartOfVocabulary(weights.ids, target.config.vocab_size)

    def reading(self, layers: Sequence[int], **flags: Any) -> Eagle:
        """This head with another meaning of its config.json. Weights are shared."""
        return Eagle(replace(self.config, **flags), self._weights, self._target, layers)

    def fuse(self, states: Tensor) -> Tensor:
        """The rows y [T, hidden] of the target's states [taps, T, target's hidden] of T positions."""
        if not self.config.uses_taps:
            return self._target.normed(states[-1])
        return self._fused([states[self.taps.index(layer)] for layer in self.layers])

    def masks(self, count: int) -> tuple[Tensor, list[int]]:
        """The rows y [count, hidden] of masks, and the tokens with them, for a head that guesses in one pass."""
        assert self.config.mask_token is not None
        return self._mask_row.repeat(count, 1), [self.config.mask_token] * count

    @cached_property
    def _mask_row(self) -> Tensor:
        assert self._weights.mask is not None
        return self._fused(list(self._weights.mask))

    def _fused(self, rows: list[Tensor]) -> Tensor:
        """rows: [T, target's hidden] of each tapped layer, in the order of `layers`"""
        config, weights = self.config, self._weights
        if config.fc_norm:
            rows = [self._norm(row, weight) for row, weight in zip(rows, weights.fc_norms, strict=True)]
        joined = torch.cat(rows, 1)
        if config.norm_before_fc:
            joined = self._norm(joined, weights.fc_norms[0])
        assert weights.fc is not None
        return self.kernels.linear(joined, weights.fc)

    def forward(self, y: Tensor, tokens: Sequence[int], positions: Sequence[int], stores: Sequence[KVStore],
                length: int, parents: Tensor) -> EagleRows:
        """Run rows y [T, hidden] with the tokens after them.

        stores   keys and values of each layer, of which the first `length` rows are visible
        parents  [T] as for `Kernels.attention`
        """
        own = self._weights.embedding
        e = self._target.embed(tokens) if own is None else self.kernels.embed(own, tokens)
        return self._run(y, e, self.rotations(positions), stores, length, parents)

    @cached_property
    def _decoder(self) -> Decoder:
        return self.kernels.new_decoder(self._weights.layers, self._geometry)

    @cached_property
    def model_layers(self) -> ModelLayers:
        """See `longdraft.kernels.chain_plan.DraftLayers`."""
        weights, config, target = self._weights, self.config, self._target
        table, factor = self.embedding
        is_third, (of_embedding, of_row) = config.version == 3, weights.norms or (None, None)
        feedback = Feedback(None if is_third else weights.fc, of_embedding, of_row, is_third,
                            bool(config.norm_before_residual), config.norm_output is not False)
        head = target.weights.head if weights.head is None else weights.head
        divisor, cap = (target.config.logits_divisor, target.config.logits_cap) if weights.head is None else (1.0, 0.0)
        return ModelLayers(self._decoder, DraftWeights(
            table, weights.norm, head, divisor, target.part if weights.head is None else self._part, factor, cap,
            feedback=feedback))

    def next_row(self, ops: LayerOperations, row: Tensor, embedded: Tensor, rotations: tuple[Tensor, Tensor],
                 stores: Sequence[KVStore]) -> Tensor:
        """See `longdraft.kernels.chain_plan.DraftLayers`."""
        return _output(ops, *self._inputs(self.fed_back(row), embedded), rotations)

    def read_rows(self, ops: LayerOperations, states: Tensor, embedded: Tensor, rotations: tuple[Tensor, Tensor],
                  stores: Sequence[KVStore]) -> Tensor:
        """See `longdraft.kernels.chain_plan.ReadsUnreadRows`."""
        return _output(ops, *self._inputs(self.fuse(states), embedded), rotations)

    @property
    def decoder_layers(self) -> tuple[Sequence[LayerWeights], Geometry]:
        """See `longdraft.kernels.chain_plan.DraftLayers`."""
        return self._weights.layers, self._geometry

    @property
    def width(self) -> int:
        """Width of a row of the layers' output."""
        return self.config.layer.hidden_size

    @property
    def embedding(self) -> tuple[Linear, float]:
        """The table of token embeddings, and the factor that multiplies these."""
        own = self._weights.embedding
        return (self._target.weights.embedding, self._target.embedding_factor) if own is None else (own, 1.0)

    @property
    def vocabulary(self) -> int:
        """Number of logits: those of the target."""
        return self._target.config.vocab_size

    @property
    def shares_kernels(self) -> bool:
        """Whether the target is not divided among ranks."""
        return self._target.kernels is self.kernels

    def _run(self, y: Tensor, e: Tensor, rotations: tuple[Tensor, Tensor], stores: Sequence[KVStore], length: int,
             parents: Tensor) -> EagleRows:
        """`forward`, from the tokens' embeddings."""
        kernels, weights = self.kernels, self._weights
        x, source = self._inputs(y, e)
        shape = (len(weights.layers), len(y), self._geometry.num_kv_heads, self._geometry.head_dim)
        k, v = (torch.empty(shape, dtype=kernels.dtype, device=kernels.device) for _ in range(2))
        if not kernels.is_device:  # all layers in one call
            x = x if source is None else torch.cat([x, source], 1)
            hidden, _ = self._decoder.forward(x, *rotations, [LayersKV(stores, length, k, v)], parents)
            return EagleRows(hidden, k, v)
        for index, layer in enumerate(weights.layers):
            kv = KV(stores[index], length, k[index], v[index])
            x, _ = layer_forward(kernels, x, layer, self._geometry, *rotations, [kv], parents,
                                 None if index else source)
        return EagleRows(x, k, v)

    def _inputs(self, y: Tensor, e: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual of the first layer, and the input of its queries, keys and values; None: after its norm."""
        weights, kernels = self._weights, self.kernels
        if self.config.version == 1:
            assert weights.fc is not None
            if weights.norms:  # native multi-token prediction
                e, y = (self._norm(part, norm) for part, norm in zip((e, y), weights.norms, strict=True))
            x = kernels.linear(torch.cat([e, y], 1), weights.fc)
            return x, None if weights.norms else x
        m = self._norm(y, weights.norms[1])
        return (m if self.config.norm_before_residual else y), torch.cat([self._norm(e, weights.norms[0]), m], 1)

    def fed_back(self, hidden: Tensor) -> Tensor:
        """The next row's y, from the layers' output."""
        return hidden if self.config.norm_output is False else self._normed(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] float32 over the target's vocabulary, of the layers' output [R, hidden]; -inf for tokens that
        the head does not have."""
        logits, part = self.guesses(hidden)
        return logits if part is None else part.whole(logits)

    def guesses(self, hidden: Tensor) -> tuple[Tensor, PartOfVocabulary | None]:
        """Logits [R, N] float32 of the layers' output [R, hidden], and the tokens that they are of; None: all of the
        target's."""
        weights, normed = self._weights, self._normed(hidden)
        logits = (self._target.head(normed) if weights.head is None
                  else self.kernels.linear(normed, weights.head, keep_float=True))
        return logits, self._part

    def rotations(self, positions: Sequence[int], on_host: bool = False) -> tuple[Tensor, Tensor]:
        """cos and sin [R, D / 2] float32 of positions."""
        return (self._rope.on_host if on_host else self._rope).at(positions)

    def _normed(self, hidden: Tensor) -> Tensor:
        return hidden if self._weights.norm is None else self._norm(hidden, self._weights.norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, weight, self._geometry.eps, rounds_once=self._geometry.rounds_once)


def eagle_shapes(config: EagleConfig, present: set[str], vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Shape of every floating-point tensor of a head, by our names. present: names in the file, of parts that may be
    missing; vocabulary: size of the target's."""
    layer = config.layer
    hidden, width = layer.hidden_size, config.num_taps * config.target_width
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(layer.num_layers):
        part = f"layers.{index}."
        shapes |= layer_shapes(layer, index, 2 * hidden if config.version == 3 and index == 0 else hidden)
        if config.version == 3 or index:
            shapes[f"{part}input_layernorm.weight"] = (hidden,)
    optional: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocabulary, hidden)}
    if config.version == 1:
        shapes[FC] = (hidden, 2 * hidden)
        optional["fc.bias"] = (hidden,)
    else:
        shapes |= {"layers.0.hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
        optional["lm_head.weight"] = (config.draft_vocab_size, hidden)
        if config.uses_taps:
            shapes[FC] = (hidden, width)
        if config.norm_before_fc:
            shapes["input_norm.weight"] = (width,)
        if config.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (config.target_width,) for i in range(config.num_taps)}
        if config.is_parallel:
            shapes[MASK_HIDDEN] = (1, 1, width)
    return shapes | {name: shape for name, shape in optional.items() if name in present}


def _output(ops: LayerOperations, x: Tensor, source: Tensor | None, rotations: tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(ops, RunsLayers), "operations that were given `Eagle.decoder_layers`"
    return ops.layers_forward(x, source, rotations)
