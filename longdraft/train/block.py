"""Training of block heads (longdraft/parts/block.py): one pass guesses a block of tokens after any token of a text.

    text     0 1 2 3 4 5 6 7 8 9       keys and values of every row, from the model's states
    block        a m m                 rows at 2, 3, 4 that see the text's rows before 2 in the window, and each other;
                                       they guess 3, 4, 5
    block              a m m           another one of the same pass

Each sequence has many blocks, which begin at random tokens. Rows of a block see those before them. The loss of a slot
is the total variation between the head's distribution and the model's, which bounds how often keyed noise chooses
another token, and a part of cross-entropy, which has a gradient where the two do not overlap. A slot weighs as much as
the tokens that depend on it:

    w_k = sum over i >= k of (q_1 ... q_i),  q = (1 - a) (1 - total variation) + a        (D-PACE)

With a rank, the head has DSpark's Markov head, which is trained with the text's own tokens before each slot. The output
matrix is a frozen copy of the model's rows for the commonest tokens. The result has the format of `speculators`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from longdraft.checkpoint.tensor_files import TensorFiles, dump_json
from longdraft.model.config import ModelConfig
from longdraft.model.rope import frequencies
from longdraft.parts.block_config import BlockConfig
from longdraft.parts.block_files import block_shapes, canonical_names
from longdraft.parts.eagle import OWN_KEY
from longdraft.train.data_files import Tokens
from longdraft.train.eagle import SPECULATORS_FORMAT, commonest, layer_sizes, plain_layer, tapped_layers, write_head
from longdraft.train.frozen_model import FrozenModel, LayerModule, Scores, as_ids, read_part
from longdraft.train.glide import offset_positions, rotate
from longdraft.train.settings import BlockSettings

_BLOCKS_TOGETHER = 32  # neighbouring blocks whose attention is computed together
_SMOOTHING = 0.5  # a, of D-PACE
_CROSS_ENTROPY = 0.1  # share of it in the loss
_PAIR = "markov_head.markov_w"


def head_config(settings: BlockSettings, target: ModelConfig) -> BlockConfig:
    """A head with layers of the target's sizes. RoPE is the plain kind: distances stay within the window."""
    layer = plain_layer(target, settings.layers)
    taps = tapped_layers(target.num_layers)
    mask = target.eos_token_ids[0] if target.eos_token_ids else target.vocab_size - 1
    return BlockConfig(
        kind="dspark" if settings.rank else "dflash", layer=layer, target_width=target.hidden_size, layers=taps,
        other_layers=taps, block_size=settings.block, mask_token=mask, windows=(settings.window,) * settings.layers,
        causal=(True,) * settings.layers, says_causal=True, first_guesses=True, adjacent=False,
        draft_vocab_size=min(settings.draft_vocab or target.vocab_size, target.vocab_size), rank=settings.rank)


class BlockModule(LayerModule):
    """The head. `ids` are the tokens of its vocabulary."""

    def __init__(self, base: FrozenModel, config: BlockConfig, ids: Tensor, seed: int) -> None:
        super().__init__(base, block_shapes(config, {}, config.layer.vocab_size), seed)
        self.config = config
        self.ids = ids.to(base.device)
        self.head = base.head_weight[self.ids].detach()
        inverse, _ = frequencies(config.layer.rope, config.layer.trained_positions, 1)
        self._inverse = inverse.to(base.device)
        if config.rank:
            with torch.no_grad():
                self._weight(f"{_PAIR}2").zero_()
        self.to(base.device)

    def forward(self, ids: Tensor, positions: Tensor, states: Tensor, starts: Tensor) -> Tensor:
        """Normalised rows [B, N, rows, hidden] float32 of blocks that begin at the indices `starts` [N], ascending, of
        each sequence; ids and positions [B, L].

        states  [taps, B, L, target's hidden] float32 of the target
        """
        rows = self.config.block_size
        c = self._norm(self._linear(torch.cat(list(states), -1), "fc").float(), "hidden_norm")
        tokens = torch.full((len(ids), len(starts), rows), self.config.mask_token, device=ids.device)
        tokens[:, :, 0] = ids[:, starts]
        places = positions[:, starts, None] + torch.arange(rows, device=ids.device)
        x, shape = self._base.embed(tokens.flatten(1)), tokens.shape
        of_text, of_blocks = self._rotations(positions), self._rotations(places.flatten(1))
        for index in range(self.config.layer.num_layers):
            part = f"layers.{index}."
            source = self._norm(x, f"{part}input_layernorm")
            q, k = (rotate(self._heads(source, f"{part}self_attn.{name}_proj"), *of_blocks) for name in "qk")
            v = self._heads(source, f"{part}self_attn.v_proj")
            text_k = rotate(self._heads(c, f"{part}self_attn.k_proj"), *of_text)
            text_v = self._heads(c, f"{part}self_attn.v_proj")
            attended = self._attention(q, (k, v), (text_k, text_v), starts)
            x = x + self._merge(attended, f"{part}self_attn.o_proj")
            x = x + self._mlp(x, part)
        return self._norm(x, "norm").view(*shape, -1)

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self._inverse
        cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
        return cos, sin

    def _attention(self, q: Tensor, own: tuple[Tensor, Tensor], text: tuple[Tensor, Tensor],
                   starts: Tensor) -> Tensor:
        """Rows q [B, H, N * rows, D] of all blocks over the text's keys and values in their windows, and over `own`,
        those of their blocks."""
        sizes, rows = self.config.layer, self.config.block_size
        group = sizes.num_heads // sizes.num_kv_heads
        own_k, own_v, text_k, text_v = (part.repeat_interleave(group, 1) for part in (*own, *text))
        q, own_k, own_v = (part.unflatten(2, (-1, rows)) for part in (q * q.shape[-1] ** -0.5, own_k, own_v))
        outputs = []
        for first in range(0, len(starts), _BLOCKS_TOGETHER):
            run = slice(first, first + _BLOCKS_TOGETHER)
            outputs.append(self._attend(q[:, :, run], own_k[:, :, run], own_v[:, :, run], text_k, text_v, starts[run]))
        return torch.cat(outputs, 2).flatten(2, 3)

    def _attend(self, q: Tensor, own_k: Tensor, own_v: Tensor, text_k: Tensor, text_v: Tensor,
                starts: Tensor) -> Tensor:
        """Some neighbouring blocks [B, H, N, rows, D] over the text's rows that any of them sees."""
        window, rows = self.config.windows[0], q.shape[3]
        first, last = max(0, int(starts[0]) - window), int(starts[-1])
        k, v = text_k[:, :, first:last], text_v[:, :, first:last]
        index = torch.arange(first, last, device=q.device)
        hidden = (index >= starts[:, None]) | (index < starts[:, None] - window)  # [N, S]
        of_text = torch.einsum("bhnrd,bhsd->bhnrs", q, k).float().masked_fill(hidden[:, None], -torch.inf)
        later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        of_block = (q @ own_k.transpose(3, 4)).float().masked_fill(later, -torch.inf)
        weights = torch.cat([of_text, of_block], -1).softmax(-1).to(v.dtype)
        count = last - first
        return torch.einsum("bhnrs,bhsd->bhnrd", weights[..., :count], v) + weights[..., count:] @ own_v

    def logits(self, rows: Tensor, before: Tensor) -> Tensor:
        """Logits [R, draft vocabulary] float32 of normalised rows [R, hidden], after the tokens `before` [R]."""
        logits = functional.linear(rows.to(self.head.dtype), self.head).float() / self._base.config.logits_divisor
        if self.config.rank:
            logits = logits + functional.embedding(before, self._weight(f"{_PAIR}1")) @ self._weight(f"{_PAIR}2").T
        return logits


@dataclass
class BlockTask:
    """The training task of a head over a frozen model."""

    module: BlockModule
    base: FrozenModel
    settings: BlockSettings
    validation: Tokens

    def _states(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The tapped states [taps, B, L, hidden] and the last rows, normalised [B, L, hidden]."""
        states = self.base.states(ids, positions, (*self.module.config.layers, self.base.config.num_layers))
        return states[:-1], self.base.normed(states[-1])

    def _starts(self, length: int, index: int) -> Tensor:
        """Random indices at which blocks begin, ascending: each block lies in the text."""
        draw, most = np.random.default_rng([self.settings.seed, 6, index]), length - self.settings.block - 1
        count = min(self.settings.blocks, most)
        return torch.from_numpy(np.sort(draw.choice(np.arange(1, most + 1), count, replace=False)))

    def accumulate(self, sequences: Tokens, scale: float, first: int) -> Tensor:
        """The total variation of each slot, averaged over the blocks."""
        settings, module, base = self.settings, self.module, self.base
        ids = as_ids(sequences, base.device)
        most = settings.positions or base.config.trained_positions
        positions = offset_positions(settings.seed, settings.anchors, most, first, *ids.shape).to(base.device)
        states, last_rows = self._states(ids, positions)
        starts = self._starts(ids.shape[1], first).to(base.device)
        output = module(ids, positions, states, starts)
        rows = output.detach().requires_grad_()
        count, slots = len(ids) * len(starts), settings.block
        totals = torch.zeros(slots, device=base.device)
        places = starts[:, None] + torch.arange(slots, device=base.device)  # [N, slots]: of the rows before each guess
        for text in range(len(ids)):
            for run in self._block_chunks(len(starts)):
                before = places[run].flatten()
                with torch.no_grad():
                    taught = base.logits(last_rows[text, before])[:, module.ids].softmax(-1)
                said = module.logits(rows[text, run].flatten(0, 1), ids[text, before])
                log_p = said.log_softmax(-1)
                distance = 0.5 * (log_p.exp() - taught).abs().sum(-1).view(-1, slots)
                entropy = -(taught * log_p).sum(-1).view(-1, slots)
                loss = (self._weights(distance) * (distance + _CROSS_ENTROPY * entropy)).sum() / count
                (loss * scale).backward()  # type: ignore[no-untyped-call]
                totals += distance.detach().sum(0)
        output.backward(rows.grad)
        return totals / count

    def _block_chunks(self, count: int) -> list[slice]:
        """Slices of blocks, few enough for the logits of their rows."""
        step = max(1, next(iter(self.base.row_chunks(count * self.settings.block))).stop // self.settings.block)
        return [slice(start, start + step) for start in range(0, count, step)]

    @staticmethod
    def _weights(distance: Tensor) -> Tensor:
        """The weight of each slot from the total variations [N, slots]."""
        right = (1 - _SMOOTHING) * (1 - distance.detach()) + _SMOOTHING
        return right.cumprod(1).flip(1).cumsum(1).flip(1)

    @torch.no_grad()
    def validate(self) -> list[dict[str, float]]:
        """Of each slot: the text's tokens that the head has."""
        module, slots = self.module, self.settings.block
        scores = Scores(slots)
        index_of = torch.full((self.base.config.vocab_size,), -1, device=self.base.device)
        index_of[module.ids] = torch.arange(len(module.ids), device=self.base.device)
        for number, sequence in enumerate(self.validation):
            ids = as_ids(sequence[None], self.base.device)
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            starts = self._starts(ids.shape[1], number).to(ids.device)
            rows = module(ids, positions, self._states(ids, positions)[0], starts)[0]
            for slot in range(slots):
                wanted, before = index_of[ids[0, starts + slot + 1]], ids[0, starts + slot]
                known = wanted >= 0
                scores.add(slot, module.logits(rows[known, slot], before[known]), wanted[known])
        return [{"draft": float(slot + 1)} | part for slot, part in enumerate(scores.metrics())]

    def start_from(self, folder: Path) -> None:
        """Layers, rank and tapped layers must be the same; block, window and vocabulary may be others."""
        files = TensorFiles(folder)
        stored = [each for each in self.module.stored() if not each.name.startswith(f"{_PAIR}2")]
        read_part(files, stored, canonical_names(files))

    def export(self, folder: Path, record: dict[str, Any]) -> None:
        """Write a folder in the format of speculators. Our own record is an entry of its config.json."""
        config, module, dtype = self.module.config, self.module, self.base.saved_dtype
        tensors = {each.name: each.value(dtype) for each in module.stored()}
        write_head(folder, tensors, module.head, module.ids, self.base)
        sizes = layer_sizes(config.layer, dtype, config.windows[0])
        pair = {"markov_rank": config.rank, "markov_head_type": "vanilla"} if config.rank else {}
        dump_json(folder / "config.json", pair | {
            "architectures": ["DSparkDraftModel" if config.rank else "DFlashDraftModel"],
            "speculators_model_type": config.kind, "speculators_version": SPECULATORS_FORMAT, "dtype": sizes["dtype"],
            "draft_vocab_size": config.draft_vocab_size, "target_hidden_size": config.target_width,
            "aux_hidden_state_layer_ids": list(config.layers), "block_size": config.block_size,
            "mask_token_id": config.mask_token, "sample_from_anchor": True, "is_causal": True,
            "tie_word_embeddings": False, "transformer_layer_config": sizes, OWN_KEY: record})


def block_task(base: FrozenModel, settings: BlockSettings, tokens: Tokens, validation: Tokens) -> BlockTask:
    """tokens: the training text, whose commonest tokens are the head's vocabulary."""
    config = head_config(settings, base.config)
    ids = commonest(tokens, config.draft_vocab_size, base.config.vocab_size)
    return BlockTask(BlockModule(base, config, ids, settings.seed), base, settings, validation)
