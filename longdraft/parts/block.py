"""Block heads (DFlash; DSpark, arXiv 2607.05147; JetSpec, arXiv 2606.18394): one pass guesses a block of tokens.

The text has no forward in the head. Each of its rows gives keys and values to every layer, from the target's states:

    c = RMSNorm(fc(states of several layers))        k = RoPE(RMSNorm(K c)), v = V c          no norm of a layer before

A block is the text's last token, whose state does not exist yet, and masks, embedded by the target's table:

    positions   p - 2   p - 1 |   p     p + 1   p + 2      block rows see the text's rows in the window, and rows of
    rows        text    text  | token   mask    mask       the block: all of them, or those before them
    guesses                            of p + 1 of p + 2   or, where the first row guesses: of p + 1, p + 2, p + 3

Attention among the block's rows joins that to the text's rows as the remainder of `KV`: each row's attention to the
other rows of the block, as an output and its log-sum-exp. So no kernel has to know about blocks.

The guesses of a block do not depend on each other. DSpark adds to the logits of a slot a term for the token before it,
and DFlash2 scores pairs of neighbouring candidates (`pairs`); DFlash2 also mixes neighbouring rows by convolutions.
longdraft/parts/block_config.py has the kinds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels import KV, Kernels, KVStore, LayerWeights, Linear
from longdraft.model.rope import RopeTable
from longdraft.model.transformer import Transformer
from longdraft.parallel import local_kernels
from longdraft.parts.block_config import BlockConfig


class Convolution(NamedTuple):
    """DFlash2's convolutions before and after a sublayer.

    base        [2, taps, hidden] float32
    projection  to 2 * taps * groups numbers that are added to the base of each row
    """

    base: Tensor
    projection: Linear


class BlockLayer(NamedTuple):
    """A layer, its projection to keys and values alone, and its convolutions around attention and MLP."""

    weights: LayerWeights
    kv: Linear
    attention_conv: Convolution | None = None
    mlp_conv: Convolution | None = None


class PairTerms(NamedTuple):
    """Scores of a token after another one: <before[a] * gate, after[b]>.

    before  [V, rank] of the target's ids
    after   [Vd, rank] of the head's ids, or [V, rank] of the target's
    gate    of the slot's row: its projection [rank]; None: ones
    trust   [1, hidden + rank] and bias: of the slot's row and before[a], how sure the slot is; None: it does not say
    """

    before: Tensor
    after: Tensor
    gate: Linear | None = None
    trust: Linear | None = None


class BlockWeights(NamedTuple):
    """The packed weights. None: the head does not have the part.

    embedding  the head's own table; None: the target's
    head       its own output head; None: the target's
    ids        [draft vocabulary] int64: the target's id of each token; None: the same ids
    """

    embedding: Linear | None
    fc: Linear
    hidden_norm: Tensor
    layers: tuple[BlockLayer, ...]
    norm: Tensor
    head: Linear | None
    ids: Tensor | None
    pairs: PairTerms | None = None


class SlotRows(NamedTuple):
    """The rows [S, hidden] that guess the S slots, after the last norm, and their logits [S, V] over the target's
    vocabulary; -inf for tokens that the head does not have."""

    normed: Tensor
    logits: Tensor


class Candidates(NamedTuple):
    """Of one slot: the scores [K before, K] of its candidates after those of the slot before, and the trust in it."""

    pairs: NDArray[np.float64] | None
    trust: float


class BlockHead:
    """A head of one target model. It holds no state of any text.

    layers  the target's layers that it reads, as for `Taps`
    """

    def __init__(self, config: BlockConfig, weights: BlockWeights, target: Transformer,
                 layers: Sequence[int]) -> None:
        self.config, self.layers = config, tuple(layers)
        self.taps = tuple(sorted(set(layers)))  # for `Transformer.with_taps`
        self.kernels = local_kernels(target.kernels)  # every rank has the head whole
        self._weights, self._target = weights, target
        self._rope = RopeTable(config.layer, 1, self.kernels.device)

    def reading(self, layers: Sequence[int], **flags: object) -> BlockHead:
        """This head with another meaning of its config.json. Weights are shared."""
        return BlockHead(replace(self.config, **flags), self._weights, self._target, layers)  # type: ignore[arg-type]

    @property
    def first_guesses(self) -> bool:
        """Whether the first row of a block guesses the next token."""
        return bool(self.config.first_guesses)

    @property
    def most_slots(self) -> int:
        """Tokens that a block guesses."""
        return self.config.block_size - (not self.first_guesses)

    @property
    def target(self) -> Transformer | None:
        """The model whose output head gives the logits; None: the head has its own."""
        return self._target if self._weights.head is None else None

    def context(self, states: Tensor, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values [L, T, Hkv, D] of rows of the text.

        states  [taps, T, target's hidden] of the target at these positions
        """
        layer, weights = self.config.layer, self._weights
        joined = torch.cat([states[self.taps.index(each)] for each in self.layers], 1)
        c = self._norm(self.kernels.linear(joined, weights.fc), weights.hidden_norm)
        cos, sin = self.rotations(positions)
        keys, values = [], []
        for each in weights.layers:
            kv = self.kernels.linear(c, each.kv).view(len(c), 2 * layer.num_kv_heads, layer.head_dim)
            k, v = kv[:, : layer.num_kv_heads], kv[:, layer.num_kv_heads :]
            keys.append(self.kernels.rope(self._head_norm(k, each.weights.k_norm), cos, sin))
            values.append(v)
        return torch.stack(keys), torch.stack(values)

    def block(self, last: int, position: int, num_rows: int, stores: Sequence[tuple[KVStore, int]],
              limited: Transformer | None = None) -> SlotRows:
        """Guess with a block of `num_rows` rows, the first of which is the token `last` at `position`.

        stores   keys and values of the text for each layer, and how many of their rows are visible
        limited  the target with a part of its vocabulary, for a head without an output head of its own
        """
        config, weights, kernels = self.config, self._weights, self.kernels
        tokens = [last] + [config.mask_token] * (num_rows - 1)
        x = (self._target.embed(tokens) if weights.embedding is None else kernels.embed(weights.embedding, tokens))
        if config.embedding_scale != 1:
            x = x * config.embedding_scale
        cos, sin = self.rotations(range(position, position + num_rows))
        for layer, (store, length), is_causal in zip(weights.layers, stores, config.causal, strict=True):
            x = self._layer(x, layer, cos, sin, store, length, is_causal)
        normed = self._norm(x if self.first_guesses else x[1:], weights.norm)
        return SlotRows(normed, self._logits(normed, limited or self._target))

    def _layer(self, x: Tensor, layer: BlockLayer, cos: Tensor, sin: Tensor, store: KVStore, length: int,
               is_causal: bool) -> Tensor:
        kernels, sizes, weights = self.kernels, self.config.layer, layer.weights
        heads, kv_heads = sizes.num_heads, sizes.num_kv_heads
        source, kernel = _mixed(kernels, self._norm(x, weights.attention_norm), layer.attention_conv)
        qkv = kernels.linear(source, weights.qkv).view(len(x), heads + 2 * kv_heads, sizes.head_dim)
        q = kernels.rope(self._head_norm(qkv[:, :heads], weights.q_norm), cos, sin)
        k = kernels.rope(self._head_norm(qkv[:, heads : heads + kv_heads], weights.k_norm), cos, sin)
        v = qkv[:, heads + kv_heads :].contiguous()
        kv = KV(store, length, k, v, attention_to_others(q, k, v, is_causal))
        alone = torch.full((len(x),), -1, dtype=torch.int32)  # the kernel shows each row the text and itself
        attended = kernels.attention(q, kv, alone).output.flatten(1)
        x = x + _mixed_after(kernels.linear(attended, weights.out), kernel)
        source, kernel = _mixed(kernels, self._norm(x, weights.mlp_norm), layer.mlp_conv)
        assert weights.gate_up is not None and weights.down is not None
        inner = kernels.swiglu(kernels.linear(source, weights.gate_up))
        return x + _mixed_after(kernels.linear(inner, weights.down), kernel)

    def _logits(self, normed: Tensor, target: Transformer) -> Tensor:
        config, weights = self.config, self._weights
        if weights.head is None:
            logits = target.kernels.linear(normed, target.weights.head, keep_float=True)
        else:
            logits = self.kernels.linear(normed, weights.head, keep_float=True)
        if config.logits_scale != 1:
            logits = logits * config.logits_scale
        if config.logits_cap:
            logits = self.kernels.soft_cap(logits, config.logits_cap)
        if weights.head is None and target.part is not None:
            logits = target.part.whole(logits)
        if weights.ids is not None:
            spread = logits.new_full((len(logits), target.config.vocab_size), -torch.inf)
            spread[:, weights.ids] = logits
            logits = spread
        logits[:, config.mask_token] = -torch.inf  # never a token of a text
        return logits

    def candidates(self, rows: SlotRows, last: int, tokens: Sequence[Sequence[int]]) -> list[Candidates]:
        """What the head says about pairs of candidates and about each slot, from the candidates of all slots, best
        first. last: the token before the first slot"""
        terms = self._weights.pairs
        if terms is None:
            return [Candidates(None, 1.0)] * len(tokens)
        gates = None if terms.gate is None else self.kernels.linear(rows.normed, terms.gate).float()
        found, before = list[Candidates](), [last]
        for slot, after in enumerate(tokens):
            if not before or not len(after):
                break
            of_before = terms.before[torch.tensor(before, device=terms.before.device)].float()
            gated = of_before if gates is None else of_before * gates[slot]
            table = gated @ terms.after[self._places(after, len(terms.after))].float().T
            trust = 1.0
            if terms.trust is not None:
                joined = torch.cat([rows.normed[slot : slot + 1], of_before[:1].to(rows.normed.dtype)], 1)
                trust = float(self.kernels.linear(joined, terms.trust, keep_float=True).sigmoid())
            found.append(Candidates(table.double().cpu().numpy(), trust))
            before = list(after)
        return found

    def _places(self, tokens: Sequence[int], size: int) -> Tensor:
        """Places of tokens that the head has, in a table of `size` tokens: the head's or the target's."""
        wanted, ids = torch.tensor(tokens, device=self.kernels.device), self._weights.ids
        return torch.searchsorted(ids, wanted) if ids is not None and len(ids) == size else wanted

    def rotations(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """cos and sin [R, D / 2] float32 of positions."""
        return self._rope.at(positions)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, weight, self.config.layer.rms_norm_eps)

    def _head_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Heads [T, H, D], each normalised by itself, contiguous."""
        if weight is None:
            return x.contiguous()
        return self._norm(x.reshape(-1, x.shape[2]), weight).view(x.shape)


def attention_to_others(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Each row's attention to the other rows of its block, to those before it if `is_causal`: [T, H, D + 1] float32, an
    output and its log-sum-exp, as in `KV.remainder`. q [T, H, D]; k, v [T, Hkv, D]"""
    count, heads, dim = q.shape
    keys, values = (part.float().repeat_interleave(heads // part.shape[1], 1) for part in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.float(), keys) / math.sqrt(dim)
    hidden = torch.eye(count, dtype=torch.bool, device=q.device)
    if is_causal:
        hidden = torch.ones_like(hidden).triu()
    scores = scores.masked_fill(hidden, -torch.inf)
    total = scores.logsumexp(-1)  # [H, T]; -inf: there are no others
    weights = (scores - total.clamp_min(-1e30)[..., None]).exp()
    output = torch.einsum("hij,jhd->ihd", weights, values)
    return torch.cat([output, total.T[..., None]], -1).contiguous()


def _mixed(kernels: Kernels, x: Tensor, conv: Convolution | None) -> tuple[Tensor, Tensor | None]:
    """Rows after the convolution before a sublayer, and the kernel [T, taps, hidden] of the one after it."""
    if conv is None:
        return x, None
    _, taps, width = conv.base.shape
    moving = kernels.linear(x, conv.projection, keep_float=True).view(len(x), 2, taps, -1)
    kernel = conv.base + moving.repeat_interleave(width // moving.shape[3], 3)
    return _convolved(x, kernel[:, 0]), kernel[:, 1]


def _mixed_after(x: Tensor, kernel: Tensor | None) -> Tensor:
    return x if kernel is None else _convolved(x, kernel)


def _convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """sum over t of kernel[i, t] * x[i - t] for rows x [T, hidden]; zeros are before the block."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for tap in range(kernel.shape[1]):
        total[tap:] += kernel[tap:, tap] * x[: len(x) - tap].float()
    return total.to(x.dtype)
