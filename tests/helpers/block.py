"""Block heads for tiny models: random ones as files, and what they compute, in plain PyTorch without caches."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from helpers import gguf_files
from helpers.checkpoints import HIDDEN, VOCAB
from longdraft.model.transformer import Transformer
from longdraft.parts import block, block_files
from longdraft.parts.head_config import OWN_KEY

LAYERS = (0, 1, 2)  # of a model with two layers: what enters both, and what leaves the last one
MASK = 3


@dataclass
class Shape:
    """A head's sizes and flags."""

    kind: str = "dflash"
    target: int = HIDDEN
    taps: tuple[int, ...] = LAYERS
    hidden: int = HIDDEN
    heads: int = 4
    kv_heads: int = 2
    dim: int = 12
    inner: int = 64
    layers: int = 2
    block: int = 6
    vocab: int = VOCAB
    draft_vocab: int = VOCAB
    windows: tuple[int, ...] = ()
    causal: bool | None = None
    first_guesses: bool = False
    adjacent: bool = False
    head_norms: bool = True
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float = 0.0
    rank: int = 8
    taps_of_conv: int = 2
    group: int = 8
    theta: float = 10000.0
    eps: float = 1e-6
    has_own_ends: bool = False  # embedding and output head
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(19)
        h, t = self.hidden, self.tensors

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns) * 2 * columns**-0.5

        def norm(size: int) -> Tensor:
            return 1 + 0.2 * torch.randn(size)

        t |= {"fc.weight": matrix(h, len(self.taps) * self.target), "hidden_norm.weight": norm(h),
              "norm.weight": norm(h)}
        for i in range(self.layers):
            part = f"layers.{i}."
            for name, rows in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
                t[f"{part}self_attn.{name}_proj.weight"] = matrix(rows * self.dim, h)
            t[f"{part}self_attn.o_proj.weight"] = matrix(h, self.heads * self.dim)
            t |= {f"{part}mlp.{name}_proj.weight": matrix(self.inner, h) for name in ("gate", "up")}
            t[f"{part}mlp.down_proj.weight"] = matrix(h, self.inner)
            t |= {f"{part}{name}_layernorm.weight": norm(h) for name in ("input", "post_attention")}
            if self.head_norms:
                t |= {f"{part}self_attn.{name}_norm.weight": norm(self.dim) for name in "qk"}
            for name in ("attention", "mlp") if self.kind == "dflash2" else ():
                t[f"{part}{name}_conv.base_kernel"] = torch.randn(2, self.taps_of_conv, h) * 0.7
                t[f"{part}{name}_conv.kernel_projection.weight"] = matrix(2 * self.taps_of_conv * h // self.group, h)
        if self.kind == "dspark":
            t |= {"markov_head.markov_w1": torch.randn(self.vocab, self.rank),
                  "markov_head.markov_w2": torch.randn(self.draft_vocab, self.rank),
                  "confidence_head.proj.weight": matrix(1, h + self.rank), "confidence_head.proj.bias": torch.ones(1)}
        if self.kind == "dflash2":
            t |= {f"candidate_selector.{name}_codebook": torch.randn(self.vocab, self.rank)
                  for name in ("predecessor", "successor")}
            t["candidate_selector.hidden_projection.weight"] = matrix(self.rank, h)
        if self.has_own_ends:
            t["embed_tokens.weight"] = torch.randn(self.vocab, h)
        if self.has_own_ends or self.draft_vocab != self.vocab:
            t["lm_head.weight"] = matrix(self.draft_vocab, h)
        if self.draft_vocab != self.vocab:
            ids = torch.randperm(self.vocab)[: self.draft_vocab].sort().values
            t["d2t"] = ids - torch.arange(self.draft_vocab)
            t["t2d"] = torch.zeros(self.vocab, dtype=torch.bool).index_fill(0, ids, True)

    @property
    def ids(self) -> Tensor:
        """The target's id of each token that the head guesses."""
        return torch.arange(self.draft_vocab) + self.tensors.get("d2t", 0)

    @property
    def of_layers(self) -> tuple[int, ...]:
        """The window of each layer; 0: none."""
        return self.windows or (0,) * self.layers

    @property
    def is_causal(self) -> list[bool]:
        """Whether each layer is causal inside the block."""
        return [window > 0 if self.causal is None else self.causal for window in self.of_layers]

    def sizes(self) -> dict[str, object]:
        sizes: dict[str, object] = {
            "model_type": "qwen3", "hidden_size": self.hidden, "intermediate_size": self.inner,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.dim,
            "num_hidden_layers": self.layers, "vocab_size": self.vocab, "rms_norm_eps": self.eps,
            "max_position_embeddings": 2048, "rope_theta": self.theta}
        if self.windows:
            sizes |= {"layer_types": ["sliding_attention" if window else "full_attention" for window in self.windows],
                      "sliding_window": max(self.windows)}
        return sizes


def write_block(folder: Path, shape: Shape, layout: str = "bare", **changes: object) -> None:
    """A head's folder: `bare`, or `speculators`. changes: of config.json"""
    own = {OWN_KEY: {"hidden_size": shape.target, "vocab_size": shape.vocab}, "target_hidden_size": shape.target,
           "draft_vocab_size": shape.draft_vocab, "sample_from_anchor": shape.first_guesses}
    flags: dict[str, object] = {"mask_token_id": MASK, "input_embedding_scale": shape.embedding_scale,
                                "output_multiplier": shape.logits_scale}
    if shape.logits_cap:
        flags["final_logit_softcapping"] = shape.logits_cap
    if shape.causal is not None:
        flags["causal"] = shape.causal
    if shape.kind == "dflash2":
        flags |= {"conv_kernel_size": shape.taps_of_conv, "conv_group_size": shape.group, "selector_rank": shape.rank}
    if shape.kind == "dspark":
        own["markov_rank"] = shape.rank
    if layout == "speculators":
        config = own | flags | {"speculators_model_type": shape.kind, "transformer_layer_config": shape.sizes(),
                                "block_size": shape.block, "aux_hidden_state_layer_ids": list(shape.taps)}
    else:
        ids = [tap - 1 for tap in shape.taps]
        config = shape.sizes() | own | {"architectures": ["DFlashDraftModel"], "block_size": shape.block,
                                        "is_neox_style": not shape.adjacent,
                                        "dflash_config": flags | {"target_layer_ids": ids}}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in shape.tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))


_GGUF_PARTS = {
    "hidden_norm": "enc.output_norm", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd",
    "candidate_selector.predecessor_codebook": "selector_predecessor", "markov_head.markov_w1": "markov_w1",
    "candidate_selector.successor_codebook": "selector_successor", "markov_head.markov_w2": "markov_w2",
    "candidate_selector.hidden_projection": "selector_hidden", "confidence_head.proj": "conf_proj"}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj", "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj"}


def write_block_gguf(file: Path, shape: Shape, **changes: object) -> None:
    """A head as llama.cpp's converter names it. changes: of the metadata; None leaves a key out"""
    values: dict[str, object] = {
        "general.architecture": "dflash", "dflash.block_count": shape.layers, "dflash.embedding_length": shape.hidden,
        "dflash.feed_forward_length": shape.inner, "dflash.context_length": 2048, "dflash.block_size": shape.block,
        "dflash.attention.head_count": shape.heads, "dflash.attention.head_count_kv": shape.kv_heads,
        "dflash.attention.key_length": shape.dim, "dflash.attention.value_length": shape.dim,
        "dflash.attention.layer_norm_rms_epsilon": shape.eps, "dflash.rope.freq_base": shape.theta,
        "dflash.target_layers": list(shape.taps), "tokenizer.ggml.mask_token_id": MASK,
        "dflash.sample_from_anchor": shape.first_guesses, "dflash.attention.causal": bool(shape.causal)}
    if shape.windows:
        values |= {"dflash.attention.sliding_window": max(shape.windows),
                   "dflash.attention.sliding_window_pattern": [window > 0 for window in shape.windows]}
    if shape.kind == "dflash2":
        values |= {"dflash.conv_kernel_size": shape.taps_of_conv, "dflash.conv_group_size": shape.group,
                   "dflash.selector_rank": shape.rank}
    stored = {}
    for name, tensor in shape.tensors.items():
        if name == "t2d":
            continue  # the converter leaves it out
        if name == "d2t":
            stored[name] = gguf_files.TYPE_IDS["I64"], tensor.shape, tensor.long().numpy().tobytes()
            continue
        stem, _, suffix = name.rpartition(".")
        stem, suffix = (stem, suffix) if suffix in ("weight", "bias") else (name, "weight")
        if stem.startswith("layers."):
            _, layer, part = stem.split(".", 2)
            stem = f"blk.{layer}.{_GGUF_LAYER[part]}"
        stored[f"{_GGUF_PARTS.get(stem, stem)}.{suffix}"] = (
            gguf_files.TYPE_IDS["F32"], tensor.shape, tensor.float().contiguous().numpy().tobytes())
    gguf_files.write_gguf(file, {key: value for key, value in (values | changes).items() if value is not None}, stored)


def load_block(folder: Path, model: Transformer) -> block.BlockHead:
    return block_files.load_block(folder, model, lambda where, config: None)


def make_block(folder: Path, model: Transformer, **flags: object) -> block.BlockHead:
    write_block(folder, Shape(**flags))
    return load_block(folder, model)


def block_of(model: Transformer) -> block.BlockHead:
    """A random head for any model of two layers or more."""
    size, vocabulary = model.whole.hidden_size, model.whole.vocab_size
    shape = Shape(target=size, hidden=size, vocab=vocabulary, draft_vocab=vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        write_block(Path(folder), shape, draft_vocab_size=vocabulary)
        return load_block(Path(folder), model)


class SlowBlock:
    """What a head computes, from the words of its description: the whole text at once, with a dense mask."""

    def __init__(self, shape: Shape, table: Tensor, head: Tensor) -> None:
        """table [V, hidden] and head [V, hidden] of the target"""
        self.shape, self.t = shape, shape.tensors
        self.table = self.t.get("embed_tokens.weight", table)
        self.head = self.t.get("lm_head.weight", head)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.shape.eps).sqrt() * self.t[f"{name}.weight"]

    def rows(self, states: Tensor, last: int) -> Tensor:
        """The rows [S, hidden] that guess, after the last norm, after a text whose states are [taps, T, hidden] and
        whose last token, at position T, is `last`."""
        shape, count = self.shape, states.shape[1]
        c = self.norm(torch.cat(list(states), 1) @ self.t["fc.weight"].T, "hidden_norm")
        x = self.table[[last] + [MASK] * (shape.block - 1)] * shape.embedding_scale
        for i in range(shape.layers):
            x = self.layer(x, c, i, count)
        normed = self.norm(x, "norm")
        return normed if shape.first_guesses else normed[1:]

    def layer(self, x: Tensor, c: Tensor, i: int, count: int) -> Tensor:
        shape, part, rows = self.shape, f"layers.{i}.", self.shape.block
        source, after = self.conv(self.norm(x, f"{part}input_layernorm"), f"{part}attention_conv")

        def heads(rows: Tensor, name: str, start: int) -> Tensor:
            made = (rows @ self.t[f"{part}self_attn.{name}_proj.weight"].T).view(len(rows), -1, shape.dim)
            if name == "v":
                return made
            if shape.head_norms:
                made = self.norm(made, f"{part}self_attn.{name}_norm")
            return torch.stack([self.turned(each, start + place) for place, each in enumerate(made)])

        q = heads(source, "q", count)
        k, v = (torch.cat([heads(c, name, 0), heads(source, name, count)]) for name in "kv")
        k, v = (each.repeat_interleave(shape.heads // shape.kv_heads, 1) for each in (k, v))
        sees = torch.ones(rows, count + rows, dtype=torch.bool)
        for row in range(rows):
            for key in range(count + rows):
                is_text, window = key < count, shape.of_layers[i]
                sees[row, key] = key >= count - window or not window if is_text else (
                    key <= count + row or not shape.is_causal[i])
        scores = torch.einsum("ihd,jhd->hij", q, k) / shape.dim**0.5
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        attended = torch.einsum("hij,jhd->ihd", weights, v).flatten(1) @ self.t[f"{part}self_attn.o_proj.weight"].T
        x = x + self.convolved(attended, after)
        source, after = self.conv(self.norm(x, f"{part}post_attention_layernorm"), f"{part}mlp_conv")
        inner = functional.silu(source @ self.t[f"{part}mlp.gate_proj.weight"].T) * (
            source @ self.t[f"{part}mlp.up_proj.weight"].T)
        return x + self.convolved(inner @ self.t[f"{part}mlp.down_proj.weight"].T, after)

    def conv(self, x: Tensor, part: str) -> tuple[Tensor, Tensor | None]:
        """Rows after the convolution before a sublayer, and the kernels of the one after it."""
        if self.shape.kind != "dflash2":
            return x, None
        moving = (x @ self.t[f"{part}.kernel_projection.weight"].T).view(len(x), 2, self.shape.taps_of_conv, -1)
        kernels = self.t[f"{part}.base_kernel"] + moving.repeat_interleave(self.shape.group, -1)
        return self.convolved(x, kernels[:, 0]), kernels[:, 1]

    @staticmethod
    def convolved(x: Tensor, kernels: Tensor | None) -> Tensor:
        if kernels is None:
            return x
        return torch.stack([sum(kernels[i, back] * x[i - back] for back in range(kernels.shape[1]) if back <= i)
                            for i in range(len(x))])

    def logits(self, rows: Tensor) -> Tensor:
        """Logits [S, draft vocabulary] without pair terms."""
        logits = rows @ self.head.T * self.shape.logits_scale
        cap = self.shape.logits_cap
        return cap * (logits / cap).tanh() if cap else logits

    def pair_term(self, row: Tensor, before: int) -> Tensor:
        """What is added to the logits of a slot after this token [draft vocabulary]."""
        if self.shape.kind == "dspark":
            return self.t["markov_head.markov_w2"] @ self.t["markov_head.markov_w1"][before]
        if self.shape.kind == "dflash2":
            gate = self.t["candidate_selector.hidden_projection.weight"] @ row
            return (self.t["candidate_selector.predecessor_codebook"][before] * gate) @ (
                self.t["candidate_selector.successor_codebook"][self.shape.ids].T)
        return torch.zeros(self.shape.draft_vocab)

    def trust(self, row: Tensor, before: int) -> float:
        """The head's own estimate for a slot."""
        if self.shape.kind != "dspark":
            return 1.0
        joined, part = torch.cat([row, self.t["markov_head.markov_w1"][before]]), "confidence_head.proj"
        return float((self.t[f"{part}.weight"][0] @ joined + self.t[f"{part}.bias"][0]).sigmoid())

    def turned(self, x: Tensor, position: int) -> Tensor:
        """x [H, D] rotated."""
        half = self.shape.dim // 2
        angle = position * self.shape.theta ** (-torch.arange(half) / half)
        a, b = (x[:, 0::2], x[:, 1::2]) if self.shape.adjacent else (x[:, :half], x[:, half:])
        parts = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return torch.stack(parts, 2).flatten(1) if self.shape.adjacent else torch.cat(parts, 1)


def states_of(model: Transformer, ids: Sequence[int], layers: Sequence[int]) -> Tensor:
    """The rows [taps, T, hidden] that enter these layers, of a text's tokens."""
    from longdraft.parts.probe_text import ReadText

    return ReadText.of(model, list(ids), set(layers)).states_of(layers)
