"""The interface of a set of kernels: the operations of a transformer, each *row-invariant*.

Row i of every result depends on row i's inputs only and, in attention, on the rows of its own path. It does not depend
on the number of rows, their order, the shape of the tree, how a prompt is cut into chunks, or where in a cache a row is
stored. The promise that speculative text equals plain text rests on this property.

Axes in shapes: R rows, T rows of one text, H query heads, Hkv KV heads, D head dimension, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput, AttentionRows
from longdraft.kernels.delta import DeltaRows, DeltaState, DeltaWeights
from longdraft.kernels.formats.groups import GroupedWeight
from longdraft.kernels.formats.int4 import Int4Weight
from longdraft.kernels.formats.mxfp4 import Mxfp4Weight
from longdraft.kernels.weights import Experts, Geometry, LayerWeights, Linear, QuantisedWeight, Routing

STORE_BLOCK = 4096  # positions of a block of a store; stores share whole blocks
REPORTED_ROWS = 128  # last rows of a chunk of a prompt whose attention is reported
DEVICE_CHUNK = 2048  # rows of a prompt that a device reads at a time; its texts depend on it
DEVICE_PIECE = 16384  # positions before such a chunk that one attention reads
FLOAT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVStore(Protocol):
    """Keys and values of one layer, by position, in the layout of its kernels."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of KV heads Hkv, and their dimension D."""

    def reserve(self, length: int) -> None:
        """Make room for `length` positions.

        The CPU kernels and the reference add blocks and copy nothing, except when a small first block grows. The CUDA
        kernels move the whole store.
        """

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Write rows k, v [T, Hkv, D] to positions start, start + 1, ..."""

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Read the rows at positions [Hkv, N], which may differ between KV heads: k, v [Hkv, N, D]."""

    def write_heads(self, start: int, k: Tensor, v: Tensor) -> None:
        """Write rows k, v [Hkv, N, D], the shape that `read` returns, to positions start, start + 1, ..."""

    def weights(self, queries: Tensor, length: int) -> Tensor:
        """The attention weights of the positions [0, length) for queries [Q, H, D]: float32 [Hkv, length].

        For each query and query head, softmax of q.k / sqrt(D) over the positions; summed over queries and query heads
        of the KV head.
        """

    def append(self, source: KVStore, first: int, count: int) -> None:
        """Add the positions [first, first + count) of another store of these kernels after the blocks of this one.

        Only for a store that holds whole blocks or nothing; `first` is a multiple of STORE_BLOCK. The CPU kernels and
        the reference share whole blocks and copy the rest. A store that writes to a shared block copies it first, so
        neither store sees what the other one writes. The CUDA kernels copy all rows on the device.
        """

    def bytes_of(self, count: int) -> int:
        """Bytes of a store to which `count` positions were appended."""

    @property
    def nbytes(self) -> int: ...


Positions = Tensor | range  # of rows (`Kernels.copy`)
RemainderMaps = Tensor | Sequence[Tensor] | None  # of all layers (`LayersKV.remainder`)


class KV(NamedTuple):
    """The keys and values that attention reads: `length` committed positions of a store, then T uncommitted rows.

    remainder  [T, H, D + 1] float32: each row's attention to keys that are not in the store, as an output and its
               log-sum-exp. It is merged into the row's attention like one more key. None: no keys are left out
    """

    store: KVStore
    length: int
    k: Tensor  # [T, Hkv, D]
    v: Tensor  # [T, Hkv, D]
    remainder: Tensor | None = None


class Taps(NamedTuple):
    """The rows that enter some layers, before the layers' norms, for drafters that read them (EAGLE-3).

    layers  numbers of those layers, without repetition; L stands for the rows that leave the last layer
    rows    [len(layers), T, hidden], filled by a forward
    """

    layers: tuple[int, ...]
    rows: Tensor


class LayersKV(NamedTuple):
    """`KV` for all L layers of a model that have attention: k, v [L, T, Hkv, D], contiguous within each layer.

    Where the layers' stores differ in Hkv and D, the axes have the largest numbers, and a layer uses their beginning.

    remainder  [L, H, D + 1, D + 1] float32: an affine map M for each layer and head, whose value M[:D] . query + M[D]
               is the row of `KV.remainder`, for the row's query before its rotation (longdraft/cache/remainder.py);
               where layers differ, a sequence of maps [H, D + 1, D + 1]
    is_prompt  the rows are a chunk of a prompt. Every run cuts a prompt into the same chunks, so kernels may use faster
               operations that are not row-invariant, and may report the attention of the last REPORTED_ROWS rows only
    taps       filled with the rows that enter these layers; None: with none
    deltas     the rows in each delta layer, whose inputs and states `Decoder.forward` fills
    """

    stores: Sequence[KVStore]
    length: int
    k: Tensor
    v: Tensor
    remainder: RemainderMaps = None
    is_prompt: bool = False
    taps: Taps | None = None
    deltas: Sequence[DeltaRows] = ()

    def tap(self, layer: int, x: Tensor) -> None:
        """Copy the text's rows x [T, hidden], which enter `layer`, if the layer is tapped."""
        if self.taps and layer in self.taps.layers:
            self.taps.rows[self.taps.layers.index(layer)].copy_(x)

    def layer(self, index: int) -> KV:
        """The KV of one layer. Its `remainder` is still the map [H, D + 1, D + 1]."""
        heads, dim = self.stores[index].shape
        k, v = (part[index, :, :heads, :dim] for part in (self.k, self.v))
        return KV(self.stores[index], self.length, k, v, None if self.remainder is None else self.remainder[index])


class Decoder(Protocol):
    """The layers of a model, ready to run."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, texts: Sequence[LayersKV],
                parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        """Run rows x [R, hidden] through all layers. Returns the new rows, and the attention of each layer.

        x may have more columns: of layers with inputs besides x (`LayerWeights.extra`) these, else the input of the
        first layer's queries, keys and values, which is x after the layer's norm otherwise (EAGLE).

        x contains the rows of one text after another. Each text's attention reads the text's own stores; the other
        operations read the weights once for all rows.

        cos, sin    [R, S D / 2] float32: those of the S rotations (`Geometry.num_ropes`), one after another
        texts       the KV of each text, in the order of the rows. Their k and v are consecutive slices [L, T, Hkv, D]
                    of one tensor [L, R, Hkv, D] each, and are filled by this call
        parents     [R] as for `Kernels.attention`, relative to the first row of the text

        `LayersKV.taps` are filled too. They copy rows and change none.
        """


@lru_cache(maxsize=256)
def parents_tensor(parents: tuple[int, ...]) -> Tensor:
    """[R] int32 for `Decoder.forward`. It is shared: most forwards have few rows, each of which follows another."""
    return torch.tensor(parents, dtype=torch.int32)


class TokenRows(NamedTuple):
    """The rows of a forward before their embedding.

    table     the embedding table
    factor    that multiplies embeddings
    tokens    [R] token ids
    cos, sin  [R, D / 2] float32, in the host's memory
    """

    table: Linear
    factor: float
    tokens: Sequence[int]
    cos: Tensor
    sin: Tensor

    def cut(self, rows: slice) -> TokenRows:
        """Some of the rows."""
        return self._replace(tokens=self.tokens[rows], cos=self.cos[rows], sin=self.sin[rows])


PartOfWeight = Int4Weight | GroupedWeight


@runtime_checkable
class PacksParts(Protocol):
    """Kernels that multiply weights of unlike kinds together, each with its own numbers."""

    def pack_parts(self, parts: Sequence[PartOfWeight], bias: Tensor | None = None) -> Linear:
        """`Kernels.pack` of weights [N, K] one below another, of as many inputs; bias [all N]."""


@runtime_checkable
class PacksMxfp4(Protocol):
    """Kernels that keep the codes of weights in MXFP4."""

    def pack_mxfp4(self, weight: Mxfp4Weight, bias: Tensor | None = None) -> Linear:
        """A weight [N, K] whose numbers are normal; bias [N]. ValueError for other weights."""


@runtime_checkable
class TokenDecoder(Protocol):
    """A decoder that embeds tokens together with its layers. A device then gets the inputs of a forward in one copy."""

    def forward_tokens(self, rows: TokenRows, texts: Sequence[LayersKV],
                       parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        """As `Decoder.forward`, for rows that are not a chunk of a prompt."""


class FitRules(NamedTuple):
    """The constants of longdraft/cache/remainder.py, where each is described."""

    fit_every: int
    decay_rows: float
    ridge: float
    ridge_rows: float
    least_spread: float
    last_error: float
    log_zero: float


class RemainderFit(Protocol):
    """The fit of one partial cache's remainder. `Remainder` in longdraft/cache/remainder.py defines it; others agree up
    to rounding."""

    def update(self, stores: Sequence[KVStore], length: int, whole: AttentionRows) -> Tensor:
        """Add verified rows. Returns the function [L, H, D + 1, D + 1] for the next drafts; the next call changes it.

        The arguments are those of `Kernels.remainder`.
        """

    @property
    def nbytes(self) -> int: ...


class LayerOperations(Protocol):
    """The operations of a layer. Activations are [R, ...] in the model's dtype; sums are float32."""

    def linear(self, x: Tensor, weight: Linear, *, keep_float: bool = False) -> Tensor:
        """x [R, K] times the transposed weight [N, K]: [R, N], rounded to `dtype`, or float32 with `keep_float`.

        The integers of an int8 weight are multiplied with x, and the float32 sums with the weight's scales.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_once: bool = False) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight for each row of x [R, K] (Zhang and Sennrich 2019).

        The result is rounded to `dtype`, and unless `rounds_once` the normalised row is rounded before `weight` too;
        with it, `weight` may be float32.
        """

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for rows [R, 2 I] with the gate in the first half: [R, I] (Shazeer 2020)."""

    def gate(self, x: Tensor, gates: Tensor) -> Tensor:
        """x * sigmoid(gates) for rows [R, W], whose gates may be columns of a wider tensor."""

    def geglu(self, gate_up: Tensor) -> Tensor:
        """gelu(gate) * up, as `swiglu`, with the tanh formula of GELU."""

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """(up + 1) gate sigmoid(alpha gate), as `swiglu`, with gate at most `limit` and up within -limit and limit."""

    def route(self, logits: Tensor, experts: Experts) -> Routing:
        """The experts that rows with logits [R, E] in `dtype` choose, and their weights. See `experts.route`."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """1 / (1 + exp(-x)) of x, float32."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [R, H, D] by cos, sin [R, D / 2] float32 (Su et al. 2021). Element i is paired with i + D / 2."""

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        """Attention of each row of q [T, H, D] to the committed positions and the row's own path.

        parents  [T] int32 on the CPU: the row before each row on its path; -1: the last committed position
        window   a row sees only the last `window` of these positions; 0: all
        """


class HybridOperations(LayerOperations, Protocol):
    """The operations of a layer with attention or a state."""

    def delta_rule(self, weights: DeltaWeights, texts: Sequence[DeltaRows], z: Tensor | None,
                   parents: Tensor) -> Tensor | None:
        """A delta layer's rows [R, Hv Dv] from its inputs; fills `DeltaRows.after`. See longdraft/kernels/delta.py.

        z        [R, Hv Dv]; None: no rows are wanted, and None is returned
        parents  [R] int32, relative to the first row of the text
        """


class Kernels(HybridOperations, Protocol):
    """The operations of a transformer, and what they work on. Activations are [R, ...] in `dtype`; sums are float32.
    ValueError for arguments whose shape, dtype or range does not fit."""

    name: str
    is_row_invariant: bool  # whether results are row-invariant to the bit on this device and dtype
    device: torch.device
    dtype: torch.dtype
    is_device: bool  # has memory of its own: caches are reserved in full, tokens chosen there, prompt chunks are fixed

    def pack(self, weight: Tensor | QuantisedWeight, bias: Tensor | None = None, *, quantize: str = "none") -> Linear:
        """Convert a weight [N, K] and bias [N] to the kernels' layout.

        weight    numbers, or a weight that is quantised already, whose numbers are kept
        quantize  none | int8 | int4: see longdraft/kernels/formats/

        Raises UsageError if these kernels do not have the format.
        """

    def embed(self, table: Linear, tokens: Sequence[int] | Tensor) -> Tensor:
        """Rows [R, hidden] of an embedding table that was packed as a weight [V, hidden].

        tokens  R ids; or int64 [R] on the device, which nothing checks there

        int8 rows are scaled, then rounded.
        """

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) of x, float32, for a positive cap."""

    def new_store(self, num_kv_heads: int, head_dim: int, score_cap: float = 0.0) -> KVStore:
        """An empty store for one layer. Scores of its keys are cap * tanh(score / cap) with a `score_cap`."""

    def new_state(self, weights: DeltaWeights) -> DeltaState:
        """The state of a delta layer before the first row of a text."""

    def new_decoder(self, layers: Sequence[LayerWeights], geometry: Geometry) -> Decoder:
        """A decoder of these layers. ValueError where weights, norms and geometry do not fit together."""

    def keep(self, kv: LayersKV, rows: Sequence[int]) -> None:
        """Commit these rows of `kv`, in this order, to positions kv.length, kv.length + 1, ... of every layer."""

    def scatter_rows(self, kv: LayersKV, rows: Tensor, targets: Tensor) -> None:
        """Commit rows [N] to positions [N], tensors on the device. A negative position skips the row."""

    def cache_bytes(self, head_dim: int) -> int:
        """Bytes in a store of one head's key and value at one position."""

    def free_bytes(self) -> int | None:
        """Free memory of the device; None for the CPU."""

    def copy(self, sources: Sequence[KVStore], targets: Sequence[KVStore], positions: Positions, start: int) -> None:
        """Copy the rows at positions [L, Hkv, N] (int64) of each source to start, start + 1, ... of its target.

        A range has the positions of all layers and heads; a device copies them without an upload.
        """

    def remainder(self, stores: Sequence[KVStore], length: int, whole: AttentionOutput) -> Tensor:
        """Full attention minus the attention to the positions of these stores: [L, T, H, D + 1] float32.

        stores  the partial KV cache of L layers. The T rows are the last of its `length` positions, in order, and a row
                sees the positions up to its own
        whole   the attention of the T rows to the full cache, of L layers

        The result is an output and its log-sum-exp, which is -inf where nothing remains.
        """

    def new_fit(self, stores: Sequence[KVStore], num_heads: int, rules: FitRules) -> RemainderFit | None:
        """The fit of the remainder of a partial cache in these stores of one shape, in one call of the kernels; None
        where they have none for the shape."""
