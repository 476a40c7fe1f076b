"""The weights of decoder layers, in the layout of their kernels, and what layers have besides.

Axes in shapes: R rows, H query heads, Hkv KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from longdraft.kernels.delta import DeltaWeights
from longdraft.kernels.formats.groups import GroupedWeight
from longdraft.kernels.formats.int4 import Int4Weight
from longdraft.kernels.formats.int8 import Quantised

QuantisedWeight = Int4Weight | Quantised | GroupedWeight  # a weight whose whole numbers are known
FILE = "file"  # the format of quantised weights in which each keeps its numbers


class Linear(Protocol):
    """A weight [out_features, K] in the layout of its kernels."""

    out_features: int

    @property
    def nbytes(self) -> int: ...


class Mlp(NamedTuple):
    """An expert's weights: gate and up stacked [2 I, hidden], and down [hidden, I]."""

    gate_up: Linear
    down: Linear


class Experts(NamedTuple):
    """A mixture of experts in place of a layer's MLP (longdraft/kernels/experts.py).

    router      [E, hidden]
    mlps        the E experts
    chosen      number of experts for each row
    normalises  the weights of a row's experts are divided by their sum
    rounds      these weights are rounded to the model's dtype
    clamp       (alpha, limit) of `Kernels.clamped_swiglu` in place of SwiGLU; None: SwiGLU
    has_gelu    gates of experts have GELU instead of SiLU
    scales      [E] float32, by which the weights of a row's experts are multiplied at the end; None: by nothing
    shared      an expert that every row has besides, times sigmoid(shared_gate x) [1, hidden]; None: there is none
    complete    adds up the sums of all ranks, where each has a share of every expert's width; None: there are none
    """

    router: Linear
    mlps: tuple[Mlp, ...]
    chosen: int
    normalises: bool
    rounds: bool
    clamp: tuple[float, float] | None = None
    shared: Mlp | None = None
    shared_gate: Linear | None = None
    has_gelu: bool = False
    scales: Tensor | None = None
    complete: Callable[[Tensor], Tensor] | None = None


class Routing(NamedTuple):
    """The experts of some rows, best first, and their weights."""

    experts: Tensor  # int64 [R, k]
    weights: Tensor  # float32 [R, k]


class LayerHeads(NamedTuple):
    """Heads of a layer that differ from `Geometry`: number of KV heads, dimension D, and factor of the queries."""

    num_kv: int
    dim: int
    query_factor: float


class BesideNorms(NamedTuple):
    """Norms [hidden] of a layer with experts beside its MLP: of the MLP's outputs, of the experts' inputs, of the
    router's inputs, and of the experts' outputs."""

    mlp_post: Tensor
    experts: Tensor
    router: Tensor
    experts_post: Tensor


class ExtraInput(NamedTuple):
    """An input [R, P] of a layer besides its rows x: they get  norm(out (gelu(gate x) * input))  at the layer's end.

    gate [P, hidden], out [hidden, P], norm [hidden]
    """

    gate: Linear
    out: Linear
    norm: Tensor


class Convolution(NamedTuple):
    """Convolutions over a text's rows before and after a sublayer (DFlash2). Kernels depend on the sublayer's input.

    base        [2, taps, hidden] float32
    projection  [2 * taps * groups, hidden], to numbers that are added to the base of each row; taps are rows before
    """

    base: Tensor
    projection: Linear


class LayerWeights(NamedTuple):
    """The weights of a decoder layer. Norms are [hidden] in the model's dtype, or in float32 with `rounds_once`.

    qkv      the weights of queries, keys and values, stacked: [(H + 2 Hkv) D, hidden]; those of the gate after them
             with `is_gated`: [(2 H + 2 Hkv) D, hidden]; of a delta layer q, k, v, z: [C + Hv Dv, hidden]
    gate_up  the weights of gate and up, stacked; None, as `down`, if the layer has experts instead
    window   positions that a row's attention sees, itself included (sliding window attention); 0: all
    ropes    which of the forward's rotations turns the queries, and which the keys
    attention_post_norm, mlp_post_norm  norms of the outputs of attention and MLP, besides those of their inputs; None:
             there are none
    sinks    [H] float32: scores of a key whose value is 0, which every row of a head sees; None: there is none
    q_norm   norm of the queries before their rotation; k_norm that of the keys. [D]: each head is normalised by itself;
             [H D] and [Hkv D]: all heads of a row as one vector; None: no norm
    rotates  whether queries and keys are rotated by their position
    v_norm   norm of each head's values [D], as q_norm
    heads    of this layer; None: those of the geometry
    scalar   multiplies the rows that leave the layer
    experts  the mixture in place of the MLP; None: there is none
    extra    what the layer does with an input of its own; None: it has none
    source   the layer, among those with keys and values, whose keys and values this layer reads: qkv has queries only;
             None: it has its own
    beside   norms of a mixture beside the MLP, whose outputs are added before `mlp_post_norm`
    is_gated the attention's output is multiplied by sigmoid(gate)
    is_causal       whether a row sees its own path; else it sees all rows of its text in the forward, which are a chain
    attention_conv  convolutions around the attention; mlp_conv around the MLP; None: there are none
    delta    a state in place of attention and KV rows (delta.py); with it `gates`: b and a [2 Hv, hidden]
    """

    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear | None
    down: Linear | None
    window: int = 0
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    rotates: bool = True
    experts: Experts | None = None
    is_gated: bool = False
    delta: DeltaWeights | None = None
    gates: Linear | None = None
    ropes: tuple[int, int] = (0, 0)
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    sinks: Tensor | None = None
    v_norm: Tensor | None = None
    heads: LayerHeads | None = None
    scalar: float = 1.0
    beside: BesideNorms | None = None
    extra: ExtraInput | None = None
    source: int | None = None
    is_causal: bool = True
    attention_conv: Convolution | None = None
    mlp_conv: Convolution | None = None

    @property
    def linears(self) -> list[Linear]:
        """Every matrix that each row is multiplied with. Those of chosen experts are not among them."""
        linears = [self.qkv, self.out, self.gate_up, self.down, self.gates, *(self.extra[:2] if self.extra else ()),
                   *(conv.projection for conv in (self.attention_conv, self.mlp_conv) if conv)]
        if self.experts is not None:
            linears += [self.experts.router, *(self.experts.shared or ()), self.experts.shared_gate]
        return [linear for linear in linears if linear is not None]

    def heads_in(self, geometry: Geometry) -> LayerHeads:
        """The heads of this layer."""
        return self.heads or LayerHeads(geometry.num_kv_heads, geometry.head_dim, geometry.query_factor)


class Geometry(NamedTuple):
    """The properties of a decoder's layers that are not in their weights.

    eps              of the RMS norms
    post_norm        norms are applied to the outputs of attention and MLP, not to their inputs
    rounds_once      norms round only after their weight, not before it too
    query_factor     multiplies the queries, with their rotation
    residual_factor  multiplies the outputs of attention and MLP before they are added to the rows
    has_gelu         the MLP has GELU (`geglu`) instead of SiLU (`swiglu`)
    num_ropes        number of rotations of a forward, of which each layer uses some (`LayerWeights.ropes`)
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    post_norm: bool = False
    rounds_once: bool = False
    query_factor: float = 1.0
    residual_factor: float = 1.0
    has_gelu: bool = False
    num_ropes: int = 1
