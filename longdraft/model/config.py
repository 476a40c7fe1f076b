"""The configuration of a decoder: a frozen `ModelConfig`, which has every value that the decoder needs.

`longdraft/checkpoint/config_file.py` makes it from the files of a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from longdraft.model.experts_config import ExpertsConfig
from longdraft.model.families import HeadNorms
from longdraft.model.gemma4 import Gemma4Config
from longdraft.model.hybrid import HybridConfig
from longdraft.model.rope_config import RopeConfig


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of one of the families. `families.Family` explains the flags."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    trained_positions: int  # max_position_embeddings
    max_positions: int  # context limit: the largest length for which the rope type is defined
    rope: RopeConfig
    is_tied: bool  # the output head is the embedding table
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norms: HeadNorms
    post_norm: bool
    is_fused: bool
    window: int  # positions that layers with a sliding window see; 0: no layer has one
    windowed: tuple[bool, ...]  # whether a layer has the window; empty: all from `window_from` on
    window_from: int
    rotated: tuple[bool, ...]  # whether a layer uses RoPE; empty: all except every `skip_rope_every`-th
    skip_rope_every: int  # 0: no layer is skipped
    embedding_factor: float
    residual_factor: float
    query_factor: float
    logits_divisor: float
    eos_token_ids: tuple[int, ...]
    dtype: str  # in which the checkpoint runs by default: "float32" or "bfloat16"
    experts: ExpertsConfig | None = None  # in place of every layer's MLP
    hybrid: HybridConfig | None = None  # layers with a state in place of attention; the others have gates
    norm_names: tuple[str, ...] = ()  # of a layer with norms before and after attention and MLP, in the order of use
    float_norms: bool = False  # weights of norms stay float32, and norms round once
    norm_offset: float = 0.0  # is added to the weights of norms in the file
    has_gelu: bool = False  # GELU by its tanh formula in the MLP, not SiLU
    rounds_embedding_factor: bool = False  # to the dtype in which the model runs
    score_cap: float = 0.0  # soft cap of attention scores; 0: none
    logits_cap: float = 0.0  # soft cap of logits; 0: none
    window_rope: RopeConfig | None = None  # of layers with a window, if it differs from `rope`
    has_fused_mlp: bool = False  # the file has one tensor for gate and up alone
    is_interleaved: bool = False  # RoPE turns adjacent dimensions
    has_sinks: bool = False  # each head has a score that joins the softmax without a value
    # (b, n): queries at position p are multiplied by 1 + b ln(1 + floor(p / n))
    query_growth: tuple[float, int] | None = None
    gemma4: Gemma4Config | None = None  # what layers of Gemma 4 have besides
    rounds_twice: bool = False  # norms round before and after their weight although they follow attention and MLP

    def is_delta(self, layer: int) -> bool:
        """Whether a layer has a state in place of attention, and no rows in a KV cache."""
        return self.hybrid is not None and self.hybrid.is_delta[layer]

    def heads_of(self, layer: int) -> tuple[int, int]:
        """KV heads of a layer, and the dimension of its heads."""
        if self.gemma4 and not self.window_of(layer):
            return self.gemma4.kv_heads, self.gemma4.head_dim
        return self.num_kv_heads, self.head_dim

    def source_of(self, layer: int) -> int | None:
        """The layer whose keys and values this one reads, the last of its kind that has some; None: it has its own."""
        first = self.num_layers - (self.gemma4.num_sharing if self.gemma4 else 0)
        if layer < first:
            return None
        return max((own for own in range(first) if bool(self.window_of(own)) == bool(self.window_of(layer))), default=0)

    @property
    def kv_layers(self) -> list[int]:
        """The layers with keys and values of their own."""
        return [layer for layer in range(self.num_layers)
                if not self.is_delta(layer) and self.source_of(layer) is None]

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """KV heads and their dimension, of each layer with keys and values of its own."""
        return tuple(self.heads_of(layer) for layer in self.kv_layers)

    @property
    def rounds_once(self) -> bool:
        """Whether norms round only after their weight."""
        return (self.post_norm and not self.rounds_twice) or self.float_norms

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotations of a forward. One of queries that grow comes after them."""
        return (self.rope,) if self.window_rope is None else (self.rope, self.window_rope)

    @property
    def num_ropes(self) -> int:
        """Number of rotations of a forward."""
        return len(self.ropes) + (self.query_growth is not None)

    def ropes_of(self, layer: int) -> tuple[int, int]:
        """Which rotation of a forward turns a layer's queries, and which its keys."""
        of_keys = int(self.window_rope is not None and self.window_of(layer) > 0)
        return of_keys if self.query_growth is None else len(self.ropes), of_keys

    def window_of(self, layer: int) -> int:
        """Number of positions that a layer's attention sees; 0: all."""
        is_windowed = self.windowed[layer] if self.windowed else layer >= self.window_from
        return self.window if is_windowed else 0

    def rotates(self, layer: int) -> bool:
        """Whether a layer uses RoPE."""
        if self.rotated:
            return self.rotated[layer]
        return not self.skip_rope_every or (layer + 1) % self.skip_rope_every != 0
