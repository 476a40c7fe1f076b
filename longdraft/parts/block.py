"""Block heads (DFlash; DSpark, arXiv 2607.05147; JetSpec, arXiv 2606.18394): one pass guesses a block of tokens.

The text has no forward in the head. Each of its rows gives keys and values to every layer, from the target's states:

    c = RMSNorm(fc(states of several layers))        k = RoPE(RMSNorm(K c)), v = V c          no norm of a layer before

A block is the text's last token, whose state does not exist yet, and masks, embedded by the target's table:

    positions   p - 2   p - 1 |   p     p + 1   p + 2      block rows see the text's rows in the window, and rows of
    rows        text    text  | token   mask    mask       the block: all of them, or those before them
    guesses                            of p + 1 of p + 2   or, where the first row guesses: of p + 1, p + 2, p + 3

The layers run as those of a model do, in one call: rows that see those before them are a chain of draft rows, and
`LayerWeights.is_causal` says that they see all. Layers with different windows see different numbers of rows, so each
run of layers with one window is a decoder.

The guesses of a block do not depend on each other. DSpark adds to the logits of a slot a term for the token before it,
and DFlash2 scores pairs of neighbouring candidates. Filters see the sum, as in training: min-p on the first part alone
would remove what the term raises. So the candidates of a slot are ranked after the best one of the slot before. DFlash2
also mixes neighbouring rows by convolutions. longdraft/parts/block_config.py has the kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels import Decoder, Geometry, Kernels, KVStore, LayersKV, LayerWeights, Linear
from longdraft.kernels.chain_plan import PlaceRows
from longdraft.kernels.cpu.vocabulary import PartOfVocabulary
from longdraft.kernels.interface import parents_tensor
from longdraft.model.rope import RopeTable
from longdraft.model.transformer import Transformer
from longdraft.parallel import local_kernels
from longdraft.parts.block_config import BlockConfig

_SELECTED = 16  # best tokens of a slot among which DFlash2's selector chooses


class PairTerms(NamedTuple):
    """Scores of a token after another one: <before[a] * gate, after[b]>.

    before  [V, rank] of the target's ids
    after   [Vd, rank] of the head's ids, or [V, rank] of the target's, packed
    gate    of the slot's row: its projection [rank]; None: ones
    trust   [1, hidden + rank] and bias: of the slot's row and before[a], how sure the slot is; None: it does not say
    """

    before: Tensor
    after: Linear
    gate: Linear | None = None
    trust: Linear | None = None


class PairScorer(NamedTuple):
    """Implements `PairScores` for the terms of a head. ids: the target's id of each of its tokens; None: the same."""

    kernels: Kernels
    terms: PairTerms
    ids: Tensor | None
    part: PartOfVocabulary | None

    def after(self, rows: PlaceRows, before: Tensor) -> Tensor:
        """A head that selects (DFlash2) has logits of its best tokens alone."""
        terms, logits, part = self.terms, rows.logits, self.part
        gated = self._gated(rows, before[:, None])
        if terms.gate is None:
            added = self.kernels.linear(gated[:, 0].to(self.kernels.dtype), terms.after, keep_float=True)
            return logits + (added if part is None or added.shape[1] == logits.shape[1] else added[:, part.ids])
        best = logits.topk(min(_SELECTED, logits.shape[1])).indices
        chosen = logits.gather(1, best) + (gated @ self._after(best if part is None else part.ids[best]).mT)[:, 0]
        return torch.full_like(logits, -torch.inf).scatter(1, best, chosen)

    def table(self, rows: PlaceRows, before: Tensor, tokens: Tensor) -> Tensor:
        return self._gated(rows, before) @ self._after(tokens).mT

    def trust(self, rows: PlaceRows, before: Tensor) -> Tensor:
        if self.terms.trust is None:
            return torch.ones(len(before), device=before.device)
        joined = torch.cat([rows.normed, self.terms.before[before].to(rows.normed.dtype)], 1)
        return self.kernels.linear(joined, self.terms.trust, keep_float=True)[:, 0].sigmoid()

    def _gated(self, rows: PlaceRows, before: Tensor) -> Tensor:
        """[R, A, rank] float32 of tokens [R, A]."""
        chosen = self.terms.before[before].float()
        return chosen if rows.gates is None else chosen * rows.gates[:, None]

    def _after(self, tokens: Tensor) -> Tensor:
        """[R, B, rank] float32 of tokens [R, B]."""
        ids, after = self.ids, self.terms.after
        if ids is not None and len(ids) == after.out_features:  # a table of the head's own tokens
            tokens = torch.searchsorted(ids, tokens).clamp_(max=len(ids) - 1)
        return self.kernels.embed(after, tokens.flatten()).float().view(*tokens.shape, -1)


class BlockWeights(NamedTuple):
    """The packed weights. None: the head does not have the part.

    embedding  the head's own table; None: the target's
    kv         [L 2 Hkv D, hidden]: the projections of all layers to keys and values
    head       its own output head; None: the target's
    ids        [draft vocabulary] int64: the target's id of each token; None: the same ids
    """

    embedding: Linear | None
    fc: Linear
    hidden_norm: Tensor
    kv: Linear
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear | None
    ids: Tensor | None
    pairs: PairTerms | None = None


class SlotRows(NamedTuple):
    """The rows [S, hidden] that guess the S slots, after the last norm, and their logits [S, N] of the tokens `part`;
    None: of the target's vocabulary.

    gates  [S, rank] float32, by which pair terms are multiplied; None: they have none
    """

    normed: Tensor
    logits: Tensor
    part: PartOfVocabulary | None
    gates: Tensor | None = None

    @property
    def places(self) -> PlaceRows:
        return PlaceRows(self.logits, self.normed, self.gates)

    def whole(self) -> Tensor:
        """Logits [S, V] of the target's vocabulary; -inf for tokens that the head does not have."""
        return self.logits if self.part is None else self.part.whole(self.logits)


class DraftBlock(NamedTuple):
    """A block of rows after a text.

    last, position  the token of the first row, and its place
    num_rows        with the first one
    stores          keys and values of the text for each layer, and how many of their rows are visible
    limited         the target with a part of its vocabulary, for a head without an output head of its own; None: whole
    """

    last: int
    position: int
    num_rows: int
    stores: Sequence[tuple[KVStore, int]]
    limited: Transformer | None = None


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
        self._part = None if weights.ids is None else PartOfVocabulary(weights.ids, target.config.vocab_size)

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
        weights, sizes = self._weights, self.config.layer
        joined = torch.cat([states[self.taps.index(each)] for each in self.layers], 1)
        c = self._norm(self.kernels.linear(joined, weights.fc), weights.hidden_norm)
        both = self.kernels.linear(c, weights.kv).view(len(c), sizes.num_layers, 2, sizes.num_kv_heads, sizes.head_dim)
        k, v = both.permute(2, 1, 0, 3, 4)
        k = torch.stack([self._head_norm(own, layer.k_norm) for own, layer in zip(k, weights.layers, strict=True)])
        heads = k.transpose(0, 1).reshape(len(c), -1, sizes.head_dim)
        turned = self.kernels.rope(heads, *self.rotations(positions))
        return turned.view(len(c), sizes.num_layers, sizes.num_kv_heads, sizes.head_dim).transpose(0, 1), v

    def block(self, last: int, position: int, num_rows: int, stores: Sequence[tuple[KVStore, int]]) -> SlotRows:
        """Guess with one block; see `DraftBlock`."""
        return self.launch([DraftBlock(last, position, num_rows, stores)])[0]

    def launch(self, parts: Sequence[DraftBlock]) -> list[SlotRows]:
        """Guess with the blocks of several texts, in one forward."""
        config, weights, kernels = self.config, self._weights, self.kernels
        tokens = [token for part in parts for token in (part.last, *[config.mask_token] * (part.num_rows - 1))]
        x = (self._target.embed(tokens) if weights.embedding is None else kernels.embed(weights.embedding, tokens))
        if config.embedding_scale != 1:
            x = x * config.embedding_scale
        cos, sin = self.rotations([part.position + row for part in parts for row in range(part.num_rows)])
        parents = parents_tensor(tuple(row - 1 for part in parts for row in range(part.num_rows)))
        ends = [0, *accumulate(part.num_rows for part in parts)]
        for run, decoder in self._runs:
            k, v = (x.new_empty(len(run), len(x), config.layer.num_kv_heads, config.layer.head_dim) for _ in range(2))
            texts = []
            for part, (start, end) in zip(parts, pairwise(ends), strict=True):
                seen = [part.stores[layer] for layer in run]
                texts.append(LayersKV([store for store, _ in seen], seen[0][1], k[:, start:end], v[:, start:end]))
            x, _ = decoder.forward(x, cos, sin, texts, parents)
        guessing = [x[start + (not self.first_guesses) : end] for start, end in pairwise(ends)]
        if weights.head is None and any(part.limited for part in parts):
            return [self._guesses([rows], part.limited or self._target)[0]
                    for rows, part in zip(guessing, parts, strict=True)]
        return self._guesses(guessing, self._target)

    @cached_property
    def _runs(self) -> list[tuple[range, Decoder]]:
        """Neighbouring layers with one window, and their decoder."""
        config, sizes, runs = self.config, self.config.layer, []
        geometry = Geometry(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.rms_norm_eps)
        for _, alike in groupby(range(sizes.num_layers), lambda layer: config.windows[layer]):
            run = list(alike)
            layers = [self._weights.layers[layer]._replace(is_causal=config.causal[layer]) for layer in run]
            runs.append((range(run[0], run[-1] + 1), self.kernels.new_decoder(layers, geometry)))
        return runs

    def _guesses(self, guessing: Sequence[Tensor], target: Transformer) -> list[SlotRows]:
        """The guesses of the rows [S, hidden] of each text that guess."""
        config, weights = self.config, self._weights
        normed = self._norm(torch.cat([*guessing]) if len(guessing) > 1 else guessing[0], weights.norm)
        if weights.head is None:
            logits, part = target.kernels.linear(normed, target.weights.head, keep_float=True), target.part
        else:
            logits, part = self.kernels.linear(normed, weights.head, keep_float=True), self._part
        if config.logits_scale != 1:
            logits = logits * config.logits_scale
        if config.logits_cap:
            logits = self.kernels.soft_cap(logits, config.logits_cap)
        ids = torch.arange(logits.shape[1], device=logits.device) if part is None else part.ids
        logits = logits.masked_fill(ids == config.mask_token, -torch.inf)  # never a token of a text
        gate = None if weights.pairs is None else weights.pairs.gate
        gates = None if gate is None else self.kernels.linear(normed, gate).float()
        ends = [0, *accumulate(len(rows) for rows in guessing)]
        return [SlotRows(normed[start:end], logits[start:end], part, None if gates is None else gates[start:end])
                for start, end in pairwise(ends)]

    def pairs(self, part: PartOfVocabulary | None) -> PairScorer | None:
        """What the logits of a slot, those of the tokens `part`, gain by the token before; None: nothing."""
        terms = self._weights.pairs
        return terms and PairScorer(self.kernels, terms, self._weights.ids, part)

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
