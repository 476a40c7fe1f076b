"""EAGLE heads for tiny models: random ones as files, and what they compute, in plain PyTorch and step by step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from helpers.checkpoints import HIDDEN, VOCAB
from longdraft.model.transformer import Transformer
from longdraft.parts import eagle, eagle_files
from longdraft.parts.head_config import OWN_KEY

LAYERS = (0, 1, 2)  # of a model with two layers: what enters both, and what leaves the last one


@dataclass
class Shape:
    """A head's sizes and flags, with the names of speculators' config.json. `target` is the width of its rows."""

    version: int = 3
    target: int = HIDDEN
    taps: tuple[int, ...] = LAYERS
    hidden: int = HIDDEN
    heads: int = 4
    kv_heads: int = 2
    dim: int = 12
    inner: int = 64
    layers: int = 1
    vocab: int = VOCAB
    draft_vocab: int = 200
    window: int = 0
    head_norms: bool = False
    theta: float = 10000.0
    eps: float = 1e-5
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    uses_taps: bool = True
    has_own_embedding: bool = False
    mask: int | None = None  # token of the rows that guess in one pass (P-EAGLE)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(13)
        width, h = len(self.taps) * self.target, self.hidden
        q, kv = self.heads * self.dim, self.kv_heads * self.dim

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns) * 2 * columns**-0.5

        def norm(size: int) -> Tensor:
            return 1 + 0.2 * torch.randn(size)

        t = self.tensors
        if self.version == 1:
            t["fc.weight"], t["fc.bias"] = matrix(h, 2 * h), torch.randn(h)
        elif self.uses_taps:
            t["fc.weight"] = matrix(h, width)
        for i in range(self.layers):
            part, columns = f"layers.{i}.", 2 * h if i == 0 and self.version == 3 else h
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                t[f"{part}self_attn.{name}_proj.weight"] = matrix(rows, columns)
            t[f"{part}self_attn.o_proj.weight"] = matrix(h, q)
            t |= {f"{part}mlp.{name}_proj.weight": matrix(self.inner, h) for name in ("gate", "up")}
            t[f"{part}mlp.down_proj.weight"] = matrix(h, self.inner)
            t[f"{part}post_attention_layernorm.weight"] = norm(h)
            if self.version == 3 or i:
                t[f"{part}input_layernorm.weight"] = norm(h)
            if self.head_norms:
                t |= {f"{part}self_attn.{name}_norm.weight": norm(self.dim) for name in "qk"}
        if self.version == 3:
            t["layers.0.hidden_norm.weight"], t["norm.weight"] = norm(h), norm(h)
            t["lm_head.weight"] = matrix(self.draft_vocab, h)
        if self.norm_before_fc:
            t["input_norm.weight"] = norm(width)
        if self.fc_norm:
            t |= {f"fc_norm.{i}.weight": norm(self.target) for i in range(len(self.taps))}
        if self.has_own_embedding:
            t["embed_tokens.weight"] = torch.randn(self.vocab, h)
        if self.draft_vocab != self.vocab:
            ids = torch.randperm(self.vocab)[: self.draft_vocab].sort().values
            t["d2t"] = ids - torch.arange(self.draft_vocab)
            t["t2d"] = torch.zeros(self.vocab, dtype=torch.bool).index_fill(0, ids, True)
        if self.mask is not None:
            t["mask_hidden"] = torch.randn(1, 1, width)

    @property
    def ids(self) -> Tensor:
        """The target's id of each token that the head guesses."""
        return torch.arange(self.draft_vocab) + self.tensors.get("d2t", 0)

    def layer_config(self) -> dict[str, object]:
        sizes = {"model_type": "qwen3" if self.head_norms else "llama", "hidden_size": self.hidden,
                 "intermediate_size": self.inner, "num_attention_heads": self.heads,
                 "num_key_value_heads": self.kv_heads, "head_dim": self.dim, "num_hidden_layers": self.layers,
                 "vocab_size": self.vocab, "rms_norm_eps": self.eps, "max_position_embeddings": 2048}
        if self.window:
            sizes |= {"layer_types": ["sliding_attention"] * self.layers, "sliding_window": self.window}
        return sizes


def write_eagle(folder: Path, shape: Shape, layout: str = "speculators", **changes: object) -> None:
    """A head's folder: `speculators`, `bare` (SpecForge), `modelopt` (names with a prefix), or `eagle1`."""
    config: dict[str, object] = {"eagle_aux_hidden_state_layer_ids": list(shape.taps),
                                 "target_hidden_size": shape.target,
                                 OWN_KEY: {"hidden_size": shape.target, "vocab_size": shape.vocab}}
    flags: dict[str, object] = {name: getattr(shape, name) for name in (
        "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    flags["use_aux_hidden_state"] = shape.uses_taps
    tensors = dict(shape.tensors)
    if shape.mask is not None:
        config["mask_token_id" if layout == "speculators" else "ptd_token_id"] = shape.mask
    if layout == "speculators":
        kind = "eagle3" if shape.mask is None else "peagle"
        config |= flags | {"speculators_model_type": kind, "draft_vocab_size": shape.draft_vocab,
                           "transformer_layer_config": shape.layer_config() | {
                               "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta}}}
    elif layout == "eagle1":
        config = shape.layer_config() | {"rope_theta": shape.theta}
    else:
        ids = config.pop("eagle_aux_hidden_state_layer_ids")
        config |= shape.layer_config() | {"rope_theta": shape.theta, "draft_vocab_size": shape.draft_vocab,
                                          "eagle_config": flags | {"eagle_aux_hidden_state_layer_ids": ids}}
        first, prefix = ("midlayer.", "") if layout == "bare" else ("layers.0.", "model.")
        tensors = {prefix + name.replace("layers.0.", first): tensor for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))


def make_eagle(folder: Path, **flags: object) -> Shape:
    shape = Shape(**flags)
    write_eagle(folder, shape)
    return shape


def load_eagle(folder: Path, model: Transformer) -> eagle.Eagle:
    return eagle_files.load_eagle(folder, model, lambda where, config: None)


class SlowEagle:
    """What a head computes, from the words of its description: row by row, with lists instead of caches."""

    def __init__(self, shape: Shape, target: LlamaForCausalLM) -> None:
        self.shape, self.t, self.target = shape, shape.tensors, target
        own = self.t.get("embed_tokens.weight")
        self.table = target.model.embed_tokens.weight if own is None else own

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.shape.eps).sqrt() * weight

    def first_y(self, states: Sequence[Tensor]) -> Tensor:
        """y of the target's states at one position: of three layers, or after the final norm."""
        if self.shape.version == 1 or not self.shape.uses_taps:
            return self.norm(states[-1], self.target.model.norm.weight)
        parts = [self.norm(part, self.t[f"fc_norm.{i}.weight"]) if self.shape.fc_norm else part
                 for i, part in enumerate(states)]
        joined = torch.cat(parts)
        if self.shape.norm_before_fc:
            joined = self.norm(joined, self.t["input_norm.weight"])
        return self.t["fc.weight"] @ joined

    @torch.no_grad()
    def logits(self, states: Tensor, tokens: Sequence[int], drafts: Sequence[int]) -> Tensor:
        """Logits [draft vocabulary] after `tokens` and `drafts`.

        states  [3, T, hidden] of the target at the positions of tokens[:-1]
        """
        held: list[list[tuple[int, Tensor, Tensor]]] = [[] for _ in range(self.shape.layers)]
        count = len(tokens) - 1
        for i in range(count):
            out = self.row(self.first_y(states[:, i]), tokens[i + 1], i, i, held)
        for place, token in enumerate(drafts):
            y = self.final(out) if self.shape.norm_output else out
            out = self.row(y, token, count + place, count - 1, held)
        head = self.t.get("lm_head.weight")
        return (self.target.lm_head.weight if head is None else head) @ self.final(out)

    @torch.no_grad()
    def slots(self, states: Tensor, tokens: Sequence[int], count: int) -> Tensor:
        """Logits [count, draft vocabulary] of the places after `tokens`, of a head that guesses in one pass: all rows
        of the text and the masks after them at once, with a dense mask."""
        shape, t, known = self.shape, self.t, len(tokens) - 1
        y = torch.stack([self.first_y(states[:, i]) for i in range(known)]
                        + [self.first_y(t["mask_hidden"].view(len(shape.taps), -1))] * (count - 1))
        e = self.table[[*tokens[1:], *[shape.mask] * (count - 1)]]
        m = self.norm(y, t["layers.0.hidden_norm.weight"])
        source = torch.cat([self.norm(e, t["layers.0.input_layernorm.weight"]), m], 1)
        x = m if shape.norm_before_residual else y
        sees = torch.ones(len(y), len(y), dtype=torch.bool).tril()
        for row in range(len(y) if shape.window else 0):
            sees[row, : max(0, min(row, known - 1) - shape.window + 1)] = False
        for i in range(shape.layers):
            part = f"layers.{i}."
            if i:
                source = self.norm(x, t[f"{part}input_layernorm.weight"])
            q, k, v = ((source @ t[f"{part}self_attn.{name}_proj.weight"].T).view(len(x), -1, shape.dim)
                       for name in "qkv")
            if shape.head_norms:
                q = self.norm(q, t[f"{part}self_attn.q_norm.weight"])
                k = self.norm(k, t[f"{part}self_attn.k_norm.weight"])
            q, k = (torch.stack([self.turned(row, position) for position, row in enumerate(rows)]) for rows in (q, k))
            k, v = (rows.repeat_interleave(shape.heads // shape.kv_heads, 1) for rows in (k, v))
            scores = torch.einsum("ihd,jhd->hij", q, k) / shape.dim**0.5
            weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
            attended = torch.einsum("hij,jhd->ihd", weights, v).flatten(1)
            x = x + attended @ t[f"{part}self_attn.o_proj.weight"].T
            n = self.norm(x, t[f"{part}post_attention_layernorm.weight"])
            inner = functional.silu(n @ t[f"{part}mlp.gate_proj.weight"].T) * (n @ t[f"{part}mlp.up_proj.weight"].T)
            x = x + inner @ t[f"{part}mlp.down_proj.weight"].T
        return self.final(x[known - 1 :]) @ t["lm_head.weight"].T

    def final(self, x: Tensor) -> Tensor:
        return x if self.shape.version == 1 else self.norm(x, self.t["norm.weight"])

    def row(self, y: Tensor, token: int, position: int, last_text: int,
            held: list[list[tuple[int, Tensor, Tensor]]]) -> Tensor:
        shape, t, e = self.shape, self.t, self.table[token]
        if shape.version == 1:
            x = source = t["fc.weight"] @ torch.cat([e, y]) + t["fc.bias"]
        else:
            m = self.norm(y, t["layers.0.hidden_norm.weight"])
            source = torch.cat([self.norm(e, t["layers.0.input_layernorm.weight"]), m])
            x = m if shape.norm_before_residual else y
        for i in range(shape.layers):
            part = f"layers.{i}."
            if i:
                source = self.norm(x, t[f"{part}input_layernorm.weight"])
            q, k, v = ((t[f"{part}self_attn.{name}_proj.weight"] @ source).view(-1, shape.dim) for name in "qkv")
            if shape.head_norms:
                q = self.norm(q, t[f"{part}self_attn.q_norm.weight"])
                k = self.norm(k, t[f"{part}self_attn.k_norm.weight"])
            held[i].append((position, self.turned(k, position), v))
            oldest = last_text - shape.window if shape.window else -1
            seen = [(k, v) for at, k, v in held[i] if at > oldest]
            keys, values = (torch.stack(each).repeat_interleave(shape.heads // shape.kv_heads, 1)
                            for each in zip(*seen, strict=True))
            weights = torch.einsum("hd,nhd->hn", self.turned(q, position), keys) / shape.dim**0.5
            attended = torch.einsum("hn,nhd->hd", weights.softmax(-1), values).flatten()
            x = x + t[f"{part}self_attn.o_proj.weight"] @ attended
            n = self.norm(x, t[f"{part}post_attention_layernorm.weight"])
            inner = functional.silu(t[f"{part}mlp.gate_proj.weight"] @ n) * (t[f"{part}mlp.up_proj.weight"] @ n)
            x = x + t[f"{part}mlp.down_proj.weight"] @ inner
        return x

    def turned(self, x: Tensor, position: int) -> Tensor:
        half = self.shape.dim // 2
        angle = position * self.shape.theta ** (-torch.arange(half) / half)
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 1)
