"""What a set of kernels owes the model: a handful of operations, each *row-invariant*.

Row i of every result depends on row i's inputs (and, in attention, on the rows of its own path) and on
nothing else: not on the number of rows, their order, the shape of the tree, how a prompt was cut into
chunks, or where in a cache a row lies. That is the whole of the promise that speculative text equals
plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

FLOAT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Linear(Protocol):
    """A weight in the layout its kernels want."""

    out_features: int

    @property
    def nbytes(self) -> int: ...


class LayerWeights(NamedTuple):
    """A decoder layer: q, k, v stacked to one weight, gate and up likewise; norms [hidden] in the model's dtype.

    window   positions a row's attention sees, itself included (sliding window attention); 0: all
    q_norm   of queries before their rotation, and k_norm of keys: [D] for each head by itself, [H D] and [Hkv D] for
             all of a row as one vector; None: there is none
    rotates  whether queries and keys are rotated by their position
    """

    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int = 0
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    rotates: bool = True


class Geometry(NamedTuple):
    """What a decoder's layers must know beside their weights.

    post_norm     attention and MLP read the rows as they are; what they give is normalised, then added
    rounds_once      norms round after their weight only, not before it too
    query_factor     on queries, with their rotation
    residual_factor  on what attention and MLP give, before it is added
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    post_norm: bool = False
    rounds_once: bool = False
    query_factor: float = 1.0
    residual_factor: float = 1.0


class KVStore(Protocol):
    """Keys and values of one layer, position by position, in the layout its kernels want."""

    def reserve(self, length: int) -> None:
        """Make room for `length` positions. Grows by blocks; what is held is not copied, save for a first block that
        begins small."""

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Put rows k, v [T, Hkv, D] at positions start, start + 1, ..."""

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows at positions [Hkv, N] (each KV head its own): k, v [Hkv, N, D]."""

    def write_heads(self, start: int, k: Tensor, v: Tensor) -> None:
        """Put rows k, v [Hkv, N, D], as `read` gives them, at positions start, start + 1, ..."""

    def weights(self, queries: Tensor, length: int) -> Tensor:
        """How much each KV head's keys in [0, length) weigh for queries [Q, H, D]: float32 [Hkv, length].

        Softmax of q.k / sqrt(D) over the positions for each query and query head, summed over both.
        """

    @property
    def nbytes(self) -> int: ...


class KV(NamedTuple):
    """What attention reads: `length` committed positions of a store, then T provisional rows.

    rest  [T, H, D + 1] float32: what keys that are not in the store would give each row, as an output and its
          log-sum-exp, merged into its attention as one more key; None where nothing is left out
    """

    store: KVStore
    length: int
    k: Tensor  # [T, Hkv, D]
    v: Tensor  # [T, Hkv, D]
    remainder: Tensor | None = None


class LayersKV(NamedTuple):
    """The same for all L layers of a model: k, v [L, T, Hkv, D], each layer's rows contiguous.

    rest  [L, H, D + 1, D + 1] float32: `KV.rest` as a function of each row's query before its rotation,
          rest[:D] times the query plus rest[D] (longdraft/cache/remainder.py)
    is_prompt  the rows are a chunk of a prompt, a chain that is cut in the same chunks in every run: kernels may use
          what is faster for many rows and not row-invariant, and tell only of the last rows' attention
    """

    stores: Sequence[KVStore]
    length: int
    k: Tensor
    v: Tensor
    remainder: Tensor | None = None
    is_prompt: bool = False

    def layer(self, index: int) -> KV:
        """One layer's. Its `rest` is still the function of the query."""
        return KV(self.stores[index], self.length, self.k[index], self.v[index],
                  None if self.remainder is None else self.remainder[index])


class AttentionOutput(NamedTuple):
    """What attention did for some rows: queries and outputs [T, H, D], log-sum-exp of the scores [T, H].

    Of several layers: [L, T, H, D] and [L, T, H]. `content` are the queries (normalised, where the model does that) as
    they were before their rotation (`Kernels.attention`, which rotates nothing, gives them as they are).
    """

    queries: Tensor
    output: Tensor
    lse: Tensor  # float32
    content: Tensor

    def rows(self, rows: Sequence[int]) -> AttentionOutput:
        """Some rows of several layers."""
        return self._each(list(rows))

    def cut(self, rows: slice) -> AttentionOutput:
        """Rows of several layers that follow one another, as views."""
        return self._each(rows)

    def last(self, count: int) -> AttentionOutput:
        """The last rows of several layers."""
        return self._each(slice(-count, None))

    def _each(self, rows: list[int] | slice) -> AttentionOutput:
        return AttentionOutput(self.queries[:, rows], self.output[:, rows], self.lse[:, rows], self.content[:, rows])


class Decoder(Protocol):
    """The layers of a model, ready to run."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, texts: Sequence[LayersKV],
                parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        """Rows x [R, hidden] through all layers: the new rows, and what each layer's attention did for them.

        The rows of one text stand behind those of another, and each text's attention reads its own stores; everything
        else reads the weights once for all rows.

        texts       what each text's rows read, in the order of the rows. Their k and v are slices [L, T, Hkv, D] of one
                    tensor [L, R, Hkv, D] each, one slice behind the other: filled here
        cos, sin    [R, D / 2] float32
        parents     [R] as for `attention`, counted from the first row of the row's text
        """


class Kernels(Protocol):
    """The operations of a transformer. Activations are [R, ...] in `dtype`; sums are float32."""

    name: str
    is_row_invariant: bool  # whether the promise above holds to the bit on this device and dtype
    device: torch.device
    dtype: torch.dtype
    is_device: bool  # of their own memory: caches are reserved whole, tokens chosen there, prompts read in fixed chunks

    def pack(self, weight: Tensor, bias: Tensor | None = None, *, is_int8: bool = False) -> Linear:
        """Take a weight [N, K] (and bias [N]) into the kernels' layout; with `is_int8` quantised (kernels/int8.py)."""

    def embed(self, table: Linear, tokens: Sequence[int]) -> Tensor:
        """Rows [R, hidden] of an embedding table packed as a weight [V, hidden]; of int8: scaled, then rounded."""

    def linear(self, x: Tensor, weight: Linear, *, keep_float: bool = False) -> Tensor:
        """x [R, K] times weight [N, K]: [R, N], rounded to dtype, or float32 with `keep_float`.

        An int8 weight is multiplied as the whole numbers it holds, and the float32 sums by its scales.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_once: bool = False) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight, for each row [R, K]; rounded before the weight (but for `rounds_once`)
        and after it."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, for rows [R, 2 I] with the gate in the first half: [R, I]."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [R, H, D] by cos, sin [R, D / 2] (float32), halves paired (the Hugging Face layout)."""

    def new_store(self, num_kv_heads: int, head_dim: int) -> KVStore: ...

    def new_decoder(self, layers: Sequence[LayerWeights], geometry: Geometry) -> Decoder: ...

    def keep(self, kv: LayersKV, rows: Sequence[int]) -> None:
        """Put these provisional rows, in this order, at positions kv.length, kv.length + 1, ... of every layer."""

    def scatter_rows(self, kv: LayersKV, rows: Tensor, targets: Tensor) -> None:
        """The same of rows [N] and positions [N] that only the device knows; of a negative position: nothing."""

    def cache_bytes(self, head_dim: int) -> int:
        """Bytes of a head's key, or its value, in a store."""

    def free_bytes(self) -> int | None:
        """Memory of the device that is not in use; None where the system's memory is used."""

    def copy(self, sources: Sequence[KVStore], targets: Sequence[KVStore], positions: Tensor, start: int) -> None:
        """Rows at positions [L, Hkv, N] (int64) of each source to positions start, start + 1, ... of its target."""

    def remainder(self, stores: Sequence[KVStore], length: int, whole: AttentionOutput) -> Tensor:
        """What keys that are not among these stores' positions gave the T rows of `whole`, of several layers.

        The rows are the last T of the stores' `length` positions, in order. "Full minus part", each beyond the
        positions up to its own: an output and its log-sum-exp (-inf where there is nothing), [L, T, H, D + 1] float32.
        """

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        """Each row of q [T, H, D] over the committed positions and its own path, of these the last `window`
        where that is not 0.

        parents [T] int32 on the CPU: the provisional row before each row, -1 where that is the committed part.
        """
