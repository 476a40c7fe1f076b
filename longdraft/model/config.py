"""The configuration of a decoder: a frozen `ModelConfig`, which has every value that the decoder needs.

`longdraft/checkpoint/config_file.py` makes it from the files of a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from longdraft.model.experts_config import ExpertsConfig
from longdraft.model.families import HeadNorms
from longdraft.model.gemma4 import Gemma4Config
from longdraft.model.hybrid import HybridConfig
from longdraft.model.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from longdraft.model.rope_config import RopeConfig


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of one of the families. `families.Family` explains the flags.

    The fields are what the files of a model say; journals hash them (longdraft/journal/config_hash.py). What a layer is
    follows from them: `layers` is the one place that asks which family a model is of.
    """

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
    # Of a layer with norms before and after attention and MLP, in the order of use.
    norm_names: tuple[str, str, str, str] | tuple[()] = ()
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

    def layer(self, index: int) -> LayerSpec:
        """What one of the layers is. `layers` has all."""
        is_delta = self.hybrid is not None and self.hybrid.is_delta[index]
        own = self.gemma4
        source = self._source_of(index)
        has_mlp = self.experts is None or self.experts.is_beside
        is_double = own is not None and own.is_double and source is not None
        norms = self.norm_names or ("input_layernorm", "", "post_attention_layernorm", "")
        if self.post_norm:
            norms = ("post_attention_layernorm", "", "post_feedforward_layernorm", "")
        return LayerSpec(
            attention=None if is_delta else self._attention(index, source),
            delta=self.hybrid if is_delta else None,
            mlp=MlpSpec(self.intermediate_size * (2 if is_double else 1), self.mlp_bias,
                        self.is_fused or self.has_fused_mlp) if has_mlp else None,
            experts=self.experts,
            norms=norms,
            has_scalar=own is not None,
            input_width=own.input_width if own else 0,
        )

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer is."""
        return tuple(self.layer(index) for index in range(self.num_layers))

    def _attention(self, index: int, source: int | None) -> AttentionSpec:
        window = self._window_of(index)
        wide = None if window else self.gemma4  # whose heads have another size in layers without a window
        rope = int(self.window_rope is not None and window > 0)
        is_skipped = self.skip_rope_every != 0 and (index + 1) % self.skip_rope_every == 0
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=wide.kv_heads if wide else self.num_kv_heads,
            head_dim=wide.head_dim if wide else self.head_dim,
            query_factor=math.sqrt(wide.head_dim) if wide else self.query_factor,
            window=window,
            rotates=self.rotated[index] if self.rotated else not is_skipped,
            ropes=(rope if self.query_growth is None else len(self.ropes), rope),
            source=source,
            head_norms=self.head_norms,
            normalises_values=self.gemma4 is not None,
            values_are_keys=wide is not None and wide.values_are_keys,
            is_gated=self.hybrid is not None,
            has_sinks=self.has_sinks,
            is_fused=self.is_fused,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
        )

    def _window_of(self, index: int) -> int:
        is_windowed = self.windowed[index] if self.windowed else index >= self.window_from
        return self.window if is_windowed else 0

    def _source_of(self, index: int) -> int | None:
        """The last layer of the same kind that has keys and values; None: the layer has its own."""
        first = self.num_layers - (self.gemma4.num_sharing if self.gemma4 else 0)
        if index < first:
            return None
        has_window = self._window_of(index) > 0
        return max((own for own in range(first) if (self._window_of(own) > 0) == has_window), default=0)

    @property
    def kv_layers(self) -> list[int]:
        """The layers with keys and values of their own."""
        return [index for index, layer in enumerate(self.layers) if layer.attention and layer.attention.source is None]

    @property
    def kv_attention(self) -> list[AttentionSpec]:
        """The attention of these layers."""
        return [attention for layer in self.layers if (attention := layer.attention) and attention.source is None]

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """KV heads and their dimension, of each layer with keys and values of its own."""
        return tuple((attention.num_kv_heads, attention.head_dim) for attention in self.kv_attention)

    @property
    def has_two_head_sizes(self) -> bool:
        """Whether layers with and without a window have heads of different sizes."""
        return self.gemma4 is not None

    @property
    def input_table(self) -> tuple[int, int] | None:
        """Tokens, and the width for all layers, of the table of inputs that layers have of their own; None: none."""
        if self.gemma4 is None or not self.gemma4.input_width:
            return None
        return self.gemma4.input_tokens, self.gemma4.input_width * self.num_layers

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
