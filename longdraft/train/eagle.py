"""Training of EAGLE-3 heads (arXiv 2503.01840) by training-time test: several passes over one sequence.

A pass s > 0 stands for the s-th draft of a step: row i has the head's own output of the pass before instead of the
target's states, and the token s positions later.

    pass 0   row i: y = fc(states of position i)      token i + 1       keys: rows 0 .. i of pass 0
    pass s   row i: y = output of row i in pass s - 1, token i + 1 + s  keys: the same, and row i of the passes 1 .. s

The loss compares each row with the target's distribution after its token. The target's states are computed on the fly:
stored, they would take 24 KB for each token of an 8B model. The head sees a window of rows, and positions are offset as
in the training of glide, so that it drafts after long texts as after short ones.

A new head is fitted before the training: it begins as the linear map of least squares from the states of position i
and token i + 1 to the target's last row of position i + 1, h = A s + B e, which a pass over some of the text gives in
closed form. fc is A. Each row attends to itself, and the product of output and values is B, as far as its rank allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longdraft.checkpoint.tensor_files import TensorFiles, dump_json
from longdraft.errors import ModelError
from longdraft.model.config import ModelConfig
from longdraft.parts.eagle import eagle_shapes
from longdraft.parts.eagle_config import EagleConfig, canonical_names, read_eagle_config
from longdraft.parts.head_config import OWN_KEY
from longdraft.train.data import as_ids
from longdraft.train.data_files import Tokens
from longdraft.train.frozen_model import FrozenModel
from longdraft.train.glide import rotate, training_positions
from longdraft.train.layers import read_part
from longdraft.train.least_squares import LinearMap, NormalEquations
from longdraft.train.losses import IGNORED, Scores, mixed_loss
from longdraft.train.processes import DistributedProcesses
from longdraft.train.settings import EagleSettings
from longdraft.train.state_heads import (
    SPECULATORS_FORMAT,
    StateHeadModule,
    commonest,
    layer_sizes,
    plain_layer,
    tapped_layers,
    write_head,
)

_FITTED_TOKENS = 2**17  # from which the first weights are computed, at most
_OWN_SCORE = 16.0  # of a row's attention to itself at first; those to others have a spread of 16 / sqrt(head_dim)
_ATTENTION_ROWS = 256  # rows whose scores are computed at a time: half of them all, and a part that stays in the cache


def head_config(settings: EagleSettings, target: ModelConfig) -> EagleConfig:
    """A head with one layer of the target's sizes."""
    layer = plain_layer(target, 1)
    count = settings.draft_vocab or target.vocab_size
    return EagleConfig(
        version=3, layer=layer, target_width=target.hidden_size, tapped_ids=tapped_layers(target.num_layers),
        uses_taps=True, draft_vocab_size=min(count, target.vocab_size), norm_before_residual=True,
        norm_before_fc=False, fc_norm=True, norm_output=True, window=settings.window)


class EagleModule(StateHeadModule):
    """The head."""

    def __init__(self, base: FrozenModel, config: EagleConfig, ids: Tensor, seed: int) -> None:
        super().__init__(base, eagle_shapes(config, set(), config.layer.vocab_size), config.layer, ids, seed)
        self.config = config
        self._attend_to_own_tokens(seed)
        self.to(base.device)

    @torch.no_grad()
    def _attend_to_own_tokens(self, seed: int) -> None:
        """Begin with queries and keys that are one projection of the token's embedding. A row then attends to itself,
        whose token a guess depends on most, and to rows with the same token; random ones would attend to all alike."""
        layer, part = self.config.layer, "layers.0.self_attn."
        generator = torch.Generator().manual_seed(seed + 1)
        keys = torch.randn(layer.num_kv_heads, layer.head_dim, layer.hidden_size, generator=generator)
        keys *= (_OWN_SCORE * layer.head_dim**-0.5 / layer.hidden_size) ** 0.5
        queries = keys.repeat_interleave(layer.num_heads // layer.num_kv_heads, 0)
        for name, rows in (("q_proj", queries), ("k_proj", keys)):
            weight = self._weight(part + name)
            weight.zero_()[:, : layer.hidden_size] = rows.flatten(0, 1)

    def inputs(self, ids: Tensor, states: Sequence[Tensor]) -> Tensor:
        """What the rows of pass 0 read [B, L - 1, taps * target's hidden + hidden] float32, for ids [B, L] and states
        [B, L, target's hidden] of each tap: the normalised states, and the embedding of the token after them."""
        token = self._norm(self._base.embed(ids[:, 1:]), "layers.0.input_layernorm")
        return torch.cat([self._joined(states)[:, :-1], token], -1)

    def _joined(self, states: Sequence[Tensor]) -> Tensor:
        """The input [B, L, taps * target's hidden] of fc."""
        return torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(states)], -1)

    @torch.no_grad()
    def become(self, fitted: LinearMap) -> None:
        """Set the weights so that a row is this map of `inputs`. Its output keeps the map's size, which is the smaller,
        the less it says of the target's row."""
        layer, part = self.config.layer, "layers.0.self_attn."
        states = self._weight("fc").shape[1]
        of_states, of_token = slice(0, states), slice(states, None)
        scale = fitted.size(of_states)  # of fc's rows, which a norm follows
        self._weight("fc").copy_(fitted.weight[:, of_states] / scale)
        group = layer.num_heads // layer.num_kv_heads
        outputs, values = fitted.factors(of_token, layer.num_kv_heads * layer.head_dim)
        self._weight(f"{part}v_proj").zero_()[:, : layer.hidden_size] = values
        of_heads = outputs.view(-1, layer.num_kv_heads, layer.head_dim).repeat_interleave(group, 1)
        self._weight(f"{part}o_proj").copy_(of_heads.flatten(1) / (group * scale))
        self._weight("norm").copy_(self._base.final_norm * fitted.size(slice(None)))

    def forward(self, ids: Tensor, positions: Tensor, states: Tensor, passes: int) -> list[Tensor]:
        """Normalised rows of each pass: of pass s [B, L - 1 - s, hidden] float32, for ids and positions [B, L].

        states  [taps, B, L, target's hidden] float32 of the target
        """
        y = self._linear(self._joined(list(states)), "fc").float()
        keys: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for s in range(passes):
            count = ids.shape[1] - 1 - s
            y = y[:, :count]
            y = self._norm(self._layer(y, ids[:, 1 + s :], positions[:, :count] + s, keys), "norm")
            outputs.append(y)
        return outputs

    def _layer(self, y: Tensor, ids: Tensor, positions: Tensor, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The layer over the rows of a pass; adds their keys and values to those of the passes before."""
        e = self._base.embed(ids)
        m = self._norm(y, "layers.0.hidden_norm")
        source = torch.cat([self._norm(e, "layers.0.input_layernorm"), m], -1)
        cos, sin = self._rotations(positions)
        q, k, v = (self._heads(source, f"layers.0.self_attn.{name}_proj") for name in "qkv")
        keys.append((rotate(k, cos, sin), v))
        x = m + self._merge(self._attention(rotate(q, cos, sin), keys), "layers.0.self_attn.o_proj")
        return x + self._mlp(x, "layers.0.")

    def _attention(self, q: Tensor, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Rows q [B, H, T, D] of the last pass over the window of pass 0, and over their own rows of the others."""
        count, group = q.shape[2], self.config.layer.num_heads // self.config.layer.num_kv_heads
        whole, *own = [tuple(part[:, :, :count].repeat_interleave(group, 1) for part in pair) for pair in keys]
        q = q * q.shape[-1] ** -0.5
        return torch.cat([self._attend(q, whole, own, slice(first, min(first + _ATTENTION_ROWS, count)))
                          for first in range(0, count, _ATTENTION_ROWS)], 2)

    def _attend(self, q: Tensor, whole: tuple[Tensor, ...], own: list[tuple[Tensor, ...]], run: slice) -> Tensor:
        """The rows `run` of `_attention`, over the keys that any of them sees."""
        first = max(0, run.start - self.config.window + 1)
        k, v = (part[:, :, first : run.stop] for part in whole)
        distance = (torch.arange(run.start, run.stop, device=q.device)[:, None]
                    - torch.arange(first, run.stop, device=q.device))
        hidden = (distance < 0) | (distance >= self.config.window)
        rows = q[:, :, run]
        scores = [(rows @ k.transpose(2, 3)).float().masked_fill(hidden, -torch.inf)]
        scores += [(rows * mine[:, :, run]).sum(-1, keepdim=True).float() for mine, _ in own]
        weights = torch.cat(scores, -1).softmax(-1).to(v.dtype)
        out = weights[..., : k.shape[2]] @ v
        for column, (_, values) in enumerate(own, k.shape[2]):
            out = out + weights[..., column, None] * values[:, :, run]
        return out


@dataclass
class EagleTask:
    """The training task of a head over a frozen model."""

    module: EagleModule
    base: FrozenModel
    settings: EagleSettings
    validation: Tokens

    @torch.no_grad()
    def fit(self, tokens: Tokens, processes: DistributedProcesses) -> None:
        """Set the first weights, by a part of the training text [N, L] that the processes share."""
        own = tokens[: max(1, _FITTED_TOKENS // tokens.shape[1])][processes.rank :: processes.size]
        config, device = self.module.config, self.base.device
        width, hidden = len(config.tapped_ids) * config.target_width, config.layer.hidden_size
        equations = NormalEquations(width + hidden, hidden, device)
        for first in range(0, len(own), self.settings.batch_size):
            ids = as_ids(own[first : first + self.settings.batch_size], device)
            positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
            taps, last = self._states(ids, positions)
            following = functional.rms_norm(last[:, 1:], last.shape[-1:], eps=self.base.config.rms_norm_eps)
            equations.add(self.module.inputs(ids, list(taps)).flatten(0, 1), following.flatten(0, 1))
        self.module.become(equations.solve(processes.sum))

    def _states(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The tapped states [taps, B, L, hidden], and the last rows before their norm [B, L, hidden]."""
        layers = self.module.config.tapped_ids
        states = self.base.states(ids, positions, (*layers, self.base.config.num_layers))
        return states[:-1], states[-1]

    def accumulate(self, sequences: Tokens, scale: float, first: int) -> Tensor:
        """The loss of each pass, averaged over the rows whose token, as the target would choose it, the head has."""
        settings, module = self.settings, self.module
        ids = as_ids(sequences, self.base.device)
        positions = training_positions(settings, self.base, first, ids)
        states, last_rows = self._states(ids, positions)
        last_rows = self.base.normed(last_rows)
        outputs = module(ids, positions, states, settings.passes)
        rows = [output.detach().requires_grad_() for output in outputs]
        losses = torch.zeros(settings.passes, device=self.base.device)
        for text in range(len(ids)):
            for run in self.base.row_chunks(ids.shape[1] - 1):
                with torch.no_grad():
                    logits = self.base.logits(last_rows[text, 1:][run])
                    taught = logits[:, module.ids].softmax(-1)
                    wanted = self._wanted(logits)
                for s in range(settings.passes):  # the row of pass s with the token of position p is p - 1 - s
                    skipped = max(0, s - run.start)
                    own = rows[s][text, run.start + skipped - s : run.stop - s]
                    if len(own):
                        loss = self._loss(module.logits(own), taught[skipped:], wanted[skipped:])
                        loss = loss / rows[s].shape[:2].numel()
                        (loss * scale * settings.decay**s).backward()
                        losses[s] += loss.detach()
        torch.autograd.backward(outputs, [row.grad for row in rows])
        return losses

    def _wanted(self, logits: Tensor) -> Tensor:
        """The target's first choice in the head's vocabulary [R], IGNORED where the head does not have it."""
        chosen = logits.argmax(-1)
        indices = torch.searchsorted(self.module.ids, chosen).clamp(max=len(self.module.ids) - 1)
        return torch.where(self.module.ids[indices] == chosen, indices, IGNORED)

    def _loss(self, logits: Tensor, taught: Tensor, wanted: Tensor) -> Tensor:
        """Summed over the rows that count: cross-entropy to the target's distribution, or the total variation."""
        if self.settings.loss == "tv":
            return (0.5 * (logits.softmax(-1) - taught).abs().sum(-1))[wanted != IGNORED].sum()
        return mixed_loss(logits, wanted, taught, 1.0)

    @torch.no_grad()
    def validate(self) -> list[dict[str, float]]:
        """Of each pass: the text's tokens that the head has."""
        passes = self.settings.passes
        scores = Scores(passes)
        index_of = self.module.index_of()
        for sequence in self.validation:
            ids = as_ids(sequence[None], self.base.device)
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            states, _ = self._states(ids, positions)
            for s, output in enumerate(self.module(ids, positions, states, passes)):
                rows, wanted = output[0, :-1], index_of[ids[0, 2 + s :]]
                for run in self.base.row_chunks(len(rows)):
                    known = wanted[run] >= 0
                    scores.add(s, self.module.logits(rows[run][known]), wanted[run][known])
        return [{"draft": float(s + 1)} | part for s, part in enumerate(scores.metrics())]

    def start_from(self, folder: Path) -> None:
        """The norms and the tapped layers must be the same; window and vocabulary may be others."""
        files = TensorFiles(folder)
        earlier = read_eagle_config(folder, files)
        for name in ("tapped_ids", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "mask_token"):
            before, now = getattr(earlier, name), getattr(self.module.config, name)
            if before != now:
                raise ModelError(f"{folder} has {name} {before}, the head to train {now}; give --start a head that "
                                 "longdraft trained for a model of these sizes")
        read_part(files, self.module.stored(), canonical_names(files))

    def export(self, folder: Path, record: dict[str, Any]) -> None:
        """Write a folder in the format of speculators. Our own record is an entry of its config.json."""
        config, module, dtype = self.module.config, self.module, self.base.saved_dtype
        tensors = {each.name: each.value(dtype) for each in module.stored()}
        write_head(folder, tensors, module.head, module.ids, self.base)
        verifier = {"name_or_path": record.get("base_model"), "architectures": list(self.base.architectures)}
        dump_json(folder / "config.json",
                  speculators_config(config, verifier, dtype, self.settings.passes) | {OWN_KEY: record})


def speculators_config(config: EagleConfig, verifier: dict[str, Any], dtype: torch.dtype,
                       drafts: int) -> dict[str, Any]:
    """The config.json of a head in the format of speculators."""
    sizes = layer_sizes(config.layer, dtype, config.window)
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_FORMAT,
        "dtype": sizes["dtype"], "draft_vocab_size": config.draft_vocab_size, "target_hidden_size": config.target_width,
        "eagle_aux_hidden_state_layer_ids": list(config.tapped_ids), "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual, "fc_norm": config.fc_norm,
        "norm_output": bool(config.norm_output), "embed_requires_grad": False, "tie_word_embeddings": False,
        "transformer_layer_config": sizes,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts, "verifier_accept_k": 1,
                                  "accept_tolerance": 0.0}],
            "verifier": verifier}}


def eagle_task(base: FrozenModel, settings: EagleSettings, tokens: Tokens, validation: Tokens) -> EagleTask:
    """tokens: the training text, whose commonest tokens are the head's vocabulary."""
    config = head_config(settings, base.config)
    ids = commonest(tokens, config.draft_vocab_size, base.config.vocab_size)
    return EagleTask(EagleModule(base, config, ids, settings.seed), base, settings, validation)
