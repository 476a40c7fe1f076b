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

A small part of the loss keeps the logits as large as the model's, which the distributions do not show: a repetition
penalty divides the logits themselves. The layers begin as the model's last ones. With a rank, the head has DSpark's
Markov head, which is trained with the text's own tokens before each slot.
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
from longdraft.parts.block_config import BlockConfig
from longdraft.parts.block_files import block_shapes, canonical_names
from longdraft.parts.head_config import OWN_KEY
from longdraft.parts.head_tensors import draft_ids
from longdraft.train.data import as_ids
from longdraft.train.data_files import Tokens
from longdraft.train.frozen_model import FrozenModel
from longdraft.train.glide import rotate, training_positions
from longdraft.train.layers import read_part
from longdraft.train.losses import Scores
from longdraft.train.settings import BlockSettings
from longdraft.train.state_heads import (
    SPECULATORS_FORMAT,
    StateHeadModule,
    commonest,
    layer_sizes,
    plain_layer,
    tapped_layers,
    write_head,
)

_BLOCKS_TOGETHER = 8  # neighbouring blocks whose attention is computed together
_SMOOTHING = 0.5  # a, of D-PACE
_CROSS_ENTROPY = 0.3  # share of it in the loss
_LOOSER = 0.25  # min-p of the head's distribution in the loss, as a share of the model's
_SHIFT = 0.02  # share of the squared difference of the logits' size, which a repetition penalty needs to be right
_OTHER_STATES = 0.1  # part of random weights in the first map of the states
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


class BlockModule(StateHeadModule):
    """The head."""

    def __init__(self, base: FrozenModel, config: BlockConfig, ids: Tensor, seed: int) -> None:
        super().__init__(base, block_shapes(config, {}, config.layer.vocab_size), config.layer, ids, seed)
        self.config = config
        self._begin_as_last_layers()
        self.to(base.device)

    @torch.no_grad()
    def _begin_as_last_layers(self) -> None:
        """Begin with weights of the model's last layers, where the names and shapes are the same, whose keys and values
        are those of the state that leaves the model; and with a Markov head that adds nothing."""
        weights, config = self._base.body.state_dict(), self.config
        skipped, width = self._base.config.num_layers - config.layer.num_layers, config.target_width
        for name, parameter in self.weights.items():
            kind, _, rest = name.partition("/")
            index, _, rest = rest.partition("/")
            own = weights.get(f"layers.{int(index) + skipped}.{rest.replace('/', '.')}") if kind == "layers" else None
            if own is not None and own.shape == parameter.shape:
                parameter.copy_(own + (self._base.config.norm_offset if own.ndim == 1 else 0))
        first = weights.get(f"layers.{skipped}.input_layernorm.weight")
        if first is not None and first.shape == self._weight("hidden_norm").shape:
            self._weight("hidden_norm").copy_(first + self._base.config.norm_offset)
            self._weight("fc").mul_(_OTHER_STATES)[:, -width:] += torch.eye(width)
        if config.rank:
            self._weight(f"{_PAIR}2").zero_()

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

    def _attention(self, q: Tensor, own: tuple[Tensor, Tensor], text: tuple[Tensor, Tensor],
                   starts: Tensor) -> Tensor:
        """Rows q [B, H, N * rows, D] of all blocks over the text's keys and values in their windows, and over `own`,
        those of their blocks."""
        outputs, step = [], _BLOCKS_TOGETHER * self.config.block_size
        for first in range(0, q.shape[2], step):
            run = slice(first, first + step)
            outputs.append(self._attend(q[:, :, run], tuple(part[:, :, run] for part in own), text,
                                        starts[first // self.config.block_size :][:_BLOCKS_TOGETHER]))
        return torch.cat(outputs, 2)

    def _attend(self, q: Tensor, own: tuple[Tensor, ...], text: tuple[Tensor, Tensor], starts: Tensor) -> Tensor:
        """Rows [B, H, N * rows, D] of some neighbouring blocks over the text's rows that any of them sees."""
        window, count = self.config.windows[0], q.shape[2]
        first, last = max(0, int(starts[0]) - window), int(starts[-1])
        keys, values = (torch.cat([part[:, :, first:last], mine], 2) for part, mine in zip(text, own, strict=True))
        index = torch.arange(first, last, device=q.device)
        of_text = (index < starts[:, None]) & (index >= starts[:, None] - window)  # [N, S]
        row = torch.arange(count, device=q.device)
        block, later = row // self.config.block_size, row[None] > row[:, None]
        of_blocks = (block[:, None] == block) & ~later
        seen = torch.cat([of_text[block], of_blocks], 1)
        return functional.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=keys.shape[1] != q.shape[1])

    def logits_after(self, rows: Tensor, before: Tensor) -> Tensor:
        """`logits` of rows [R, hidden], after the tokens `before` [R]."""
        logits = self.logits(rows)
        if self.config.rank:
            pairs = functional.embedding(before, self._weight(f"{_PAIR}1"))
            logits = torch.addmm(logits, pairs, self._weight(f"{_PAIR}2").T)
        return logits


class _Comparison(torch.autograd.Function):
    """Logits `said` [R, D] beside the model's, `taught` [T, D], whose row of each is given by `row_of` [R].

    Returns of each row the total variation of the distributions as sampling with `min_p` leaves them, the head's with a
    looser filter; the cross-entropy of the whole ones; and by how much the logarithm of the sum of exponentials of
    `said` is higher. It goes over [R, D] half as often as separate operations do.
    """

    @staticmethod
    def forward(ctx: Any, said: Tensor, taught: Tensor, row_of: Tensor, min_p: float) -> tuple[Tensor, Tensor, Tensor]:
        log_p, log_t = said.log_softmax(-1), taught.log_softmax(-1)
        shift = (said[:, 0] - log_p[:, 0]) - (taught[:, 0] - log_t[:, 0])[row_of]
        t = log_t.exp_()
        of_model, t = _filtered(t, min_p)[row_of], t[row_of]
        entropy = -torch.einsum("rd,rd->r", t, log_p)
        p = log_p.exp_()
        of_head = _filtered(p, min_p * _LOOSER)
        is_more = of_head > of_model
        distance = of_model.neg_().add_(of_head).clamp_(min=0).sum(-1)
        share = torch.einsum("rd,rd->r", of_head, is_more.to(p.dtype))
        ctx.save_for_backward(p, t, of_head, is_more, share)
        return distance, entropy, shift

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        p, t, of_head, is_more, share = ctx.saved_tensors
        of_distance, of_entropy, of_shift = (each[:, None] for each in upstream)
        below = -of_distance * share[:, None]
        gradient = torch.where(is_more, below + of_distance, below).mul_(of_head)
        gradient.addcmul_(p, of_entropy + of_shift).addcmul_(t, -of_entropy)
        return gradient, None, None, None


def _filtered(p: Tensor, min_p: float) -> Tensor:
    """Probabilities [R, D] of the tokens that have at least `min_p` of the likeliest one's."""
    kept = torch.where(p >= min_p * p.amax(-1, keepdim=True), p, 0)
    return kept.div_(kept.sum(-1, keepdim=True))


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
        positions = training_positions(settings, base, first, ids)
        states, last_rows = self._states(ids, positions)
        starts = self._starts(ids.shape[1], first).to(base.device)
        output = module(ids, positions, states, starts)
        rows = output.detach().requires_grad_()
        count, slots = len(ids) * len(starts), settings.block
        totals = torch.zeros(slots, device=base.device)
        offsets = torch.arange(slots, device=base.device)
        for text in range(len(ids)):
            for run in self._block_chunks(len(starts)):
                before = starts[run, None] + offsets  # [N, slots]: of the rows before each guess
                span = slice(int(before[0, 0]), int(before[-1, -1]) + 1)
                with torch.no_grad():
                    taught = base.logits(last_rows[text, span])
                    taught = taught if len(module.ids) == taught.shape[1] else taught[:, module.ids]
                said = module.logits_after(rows[text, run].flatten(0, 1), ids[text, before.flatten()])
                row_of = (before - span.start).flatten()
                compared = _Comparison.apply(said, taught, row_of, settings.min_p)  # type: ignore[no-untyped-call]
                distance, entropy, shift = (part.view(-1, slots) for part in compared)
                parts = distance + _CROSS_ENTROPY * entropy + _SHIFT * shift.square()
                loss = (self._weights(distance) * parts).sum() / count
                (loss * scale).backward()
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
        index_of = module.index_of()
        for number, sequence in enumerate(self.validation):
            ids = as_ids(sequence[None], self.base.device)
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            starts = self._starts(ids.shape[1], number).to(ids.device)
            rows = module(ids, positions, self._states(ids, positions)[0], starts)[0]
            for slot in range(slots):
                wanted, before = index_of[ids[0, starts + slot + 1]], ids[0, starts + slot]
                known = wanted >= 0
                scores.add(slot, module.logits_after(rows[known, slot], before[known]), wanted[known])
        return [{"draft": float(slot + 1)} | part for slot, part in enumerate(scores.metrics())]

    def start_from(self, folder: Path) -> None:
        """Layers, rank and tapped layers must be the same; block, window and vocabulary may be others. The Markov head
        keeps its rows of tokens that both vocabularies have."""
        files, module = TensorFiles(folder), self.module
        names, last = canonical_names(files), f"{_PAIR}2.weight"
        read_part(files, [each for each in module.stored() if each.name != last], names)
        if last in names:
            rows = files.read(names[last]).float()
            ids = draft_ids(files, names, len(rows), self.base.config.vocab_size)
            ids = torch.arange(len(rows)) if ids is None else ids
            own = module.ids.cpu()
            places = torch.searchsorted(ids, own).clamp(max=len(ids) - 1)
            common = ids[places] == own
            with torch.no_grad():
                module.weights[last.replace(".", "/")][common] = rows[places[common]].to(self.base.device)

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
