"""Plans of draft chains: what a drafter wants to be drafted, and what can draft it in one call.

A chain is drafted step by step, by definition: the draft model's logits, the best guess, the next logits
(longdraft/drafters/chain.py). Between two tokens that returns to Python, which takes longer than the arithmetic of a
small model. So a drafter describes its chain as a `ChainPlan`, and a `Ranker` runs the whole of it:

    kernels/cpu/chain.py     the compiled module, in one call; several texts at the same time, each on one thread
    kernels/cuda/ranker.py   a device, in CUDA graphs; several texts in one

A ranker says itself which plans it can run. The guesses are those of the single steps, bit for bit, so a drafter does
not know how its chain was drafted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels.cpu.vocabulary import PartOfVocabulary
from longdraft.kernels.delta import DeltaState
from longdraft.kernels.interface import Decoder, Kernels, KVStore, LayerOperations, RemainderMaps, Taps
from longdraft.kernels.launched import LaunchedWork
from longdraft.kernels.layer_inputs import LayerInputs
from longdraft.kernels.weights import Geometry, LayerWeights, Linear


class Feedback(NamedTuple):
    """How the input of trained layers is made from the row before and a token's embedding (longdraft/parts/eagle.py).

    joined        of [embedding | row]: the layers' input; None: there is none
    of_embedding, of_row  norms; None: none
    reads_both    the first layer's queries, keys and values are of [embedding | row]
    keeps_normed  the residual is the row after its norm
    feeds_normed  the row before is taken after the last norm
    """

    joined: Linear | None
    of_embedding: Tensor | None
    of_row: Tensor | None
    reads_both: bool
    keeps_normed: bool
    feeds_normed: bool


class DraftWeights(NamedTuple):
    """The parts of a draft model besides its layers. The norm [hidden] is the one before the head; None: there is none.

    embedding_factor  multiplies the embeddings
    logits_cap        soft cap of the logits; 0: none
    part              the tokens of the head's rows; None: the whole vocabulary
    inputs            of the layers, besides the embedding; None: they have none
    feedback          how the layers' input is made from their output one token before; None: it is the embedding
    """

    embedding: Linear
    norm: Tensor | None
    head: Linear
    logits_divisor: float
    part: PartOfVocabulary | None = None
    embedding_factor: float = 1.0
    logits_cap: float = 0.0
    inputs: LayerInputs | None = None
    feedback: Feedback | None = None


@dataclass(frozen=True, eq=False)
class ModelLayers:
    """A whole model that drafts: the target itself, a copy of it, or a smaller model."""

    decoder: Decoder
    weights: DraftWeights


class Move(NamedTuple):
    """A row of stores that goes from one slot to another. is_turned: its key is rotated on the way."""

    source: int
    target: int
    is_turned: bool = False


MOST_UNREAD = 64  # rows of a text that are read in one call, or graph, with the first token after them


class DraftLayers(Protocol):
    """Trained layers that draft (`Eagle`, `Glide`), without the text that they have read."""

    @property
    def embedding(self) -> tuple[Linear, float]:
        """The table of token embeddings, and the factor that multiplies these."""

    @property
    def vocabulary(self) -> int:
        """Number of logits."""

    @property
    def decoder_layers(self) -> tuple[Sequence[LayerWeights], Geometry] | None:
        """What `RunsLayers` may run; None: not layers of a decoder alone."""

    @property
    def model_layers(self) -> ModelLayers | None:
        """The same with all that is around these layers; None: not layers of a decoder alone."""

    def next_row(self, ops: LayerOperations, row: Tensor, embedded: Tensor, rotations: tuple[Tensor, Tensor],
                 stores: Sequence[KVStore]) -> Tensor:
        """The layers' output [T, hidden] for a drafted token of each text, from the row before it and its embedding.

        ops        in which the attention knows the places of the tokens, whatever `KV.length` says. Keys and values are
                   written there, except to a store that is only read
        rotations  cos, sin [T, D / 2] of their positions
        stores     of one text
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [T, V] float32 of the layers' output [T, hidden]."""


@runtime_checkable
class ReadsUnreadRows(DraftLayers, Protocol):
    """Layers whose rows of the text have states."""

    def fuse(self, states: Tensor) -> Tensor:
        """What stands for the row before each of R rows of the text, [R, hidden], made from states [K, R, W]."""

    def read_rows(self, ops: LayerOperations, states: Tensor, embedded: Tensor, rotations: tuple[Tensor, Tensor],
                  stores: Sequence[KVStore]) -> Tensor:
        """The layers' output [R, hidden] for rows of the text, of each text as many, as `next_row`.

        states  [K, R, W], see `UnreadRows`
        """


class UnreadRows(NamedTuple):
    """The last rows of a text, which the layers read before they draft. Their keys and values go to the last ones of
    the visible slots.

    tokens     [T], at most `MOST_UNREAD`
    states     [K, T, W], what the layers read besides
    rotations  cos, sin [T, D / 2] float32 in the host's memory
    moves      of rows of the stores, which a device makes before; no target is another one's source
    turn       cos, sin [1, D / 2] float32 in the host's memory, by which moves turn keys; None: there are no moves
    """

    tokens: Sequence[int]
    states: Tensor
    rotations: tuple[Tensor, Tensor]
    moves: Sequence[Move] = ()
    turn: tuple[Tensor, Tensor] | None = None


class TrainedLayers(NamedTuple):
    """Trained layers after a text. The first token comes from the text's last row.

    kernels  of the layers
    row      [1, hidden], the layers' output for the text's last token; with `unread`, it is written there
    read     another store that they read, and its visible rows; None: they read their own alone
    unread   rows of the text that are read before; None: all are read
    """

    layers: DraftLayers
    kernels: Kernels
    row: Tensor
    read: tuple[KVStore, int] | None = None
    unread: UnreadRows | None = None


class Heads(Protocol):
    """Heads of any kind, which predict the tokens after the next one from a hidden state of the target."""

    def __len__(self) -> int: ...

    @property
    def vocabulary(self) -> int:
        """Number of logits."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [heads * T, V] float32, head by head, for hidden states [T, hidden] before the final norm.

        For a hidden state at position p, head i predicts the token at p + 2 + i.
        """


class TrainedHeads(NamedTuple):
    """Trained heads, which guess all tokens from one row; no guess depends on the one before it.

    row    [1, hidden], the last layer's output of the row in front of the first guess
    first  logits [1, V] of the first guess, if it is not predicted by a head
    """

    heads: Heads
    row: Tensor
    first: Tensor | None = None


class PlaceRows(NamedTuple):
    """What guesses places of a text, or one place of several texts: [R] rows.

    logits  [R, N] float32, of the tokens that the drafter has
    normed  [R, hidden]
    gates   [R, rank] float32; None: there are none
    """

    logits: Tensor
    normed: Tensor
    gates: Tensor | None

    def of(self, place: int) -> PlaceRows:
        """The row of one place."""
        return self.at(slice(place, place + 1))

    def at(self, index: slice | int) -> PlaceRows:
        """The rows of some places, or of one place of each text."""
        logits, normed, gates = self
        return PlaceRows(logits[index], normed[index], None if gates is None else gates[index])


class PairScores(Protocol):
    """What the logits of a place gain by the token before it (longdraft/parts/block.py). Nothing waits for a device.

    part  the tokens of the logits; None: the whole vocabulary
    """

    @property
    def part(self) -> PartOfVocabulary | None: ...

    def after(self, rows: PlaceRows, before: Tensor) -> Tensor:
        """Logits [R, N] after the tokens `before`, int64 [R]."""

    def table(self, rows: PlaceRows, before: Tensor, tokens: Tensor) -> Tensor:
        """What is added to the logits of some tokens [R, B] after each of the tokens before, [R, A]: [R, A, B]."""

    def trust(self, rows: PlaceRows, before: Tensor) -> Tensor:
        """How sure the guesses after the tokens `before`, int64 [R], are, 0 to 1: float32 [R]."""


class DraftStores(NamedTuple):
    """The rows that a chain continues: `length` positions of each layer's store. Drafted rows are written after them.

    remainder  as in `LayersKV`
    states     for each delta layer: the state that the chain continues, and two that its rows write to in turn. The
               chain's first row writes to the first of them
    taps       filled with the rows of the chain, as in `LayersKV`: as many as tokens; None: no layer is tapped
    """

    stores: Sequence[KVStore]
    length: int
    remainder: RemainderMaps = None
    states: Sequence[tuple[DeltaState, DeltaState, DeltaState]] = ()
    taps: Taps | None = None


class ChainPlan(NamedTuple):
    """A chain of drafts after a text.

    layers           what computes the logits
    path             the last token of the text, then drafted tokens, which the chain continues
    num_tokens       to draft, 1 or more
    stores           the rows that the chain continues
    rotations        cos, sin [N, S D / 2] float32 in the host's memory, of the rows that the chain computes: as many as
                     tokens with a model, one less with trained layers, none with heads
    shares_forwards  step by step, the forwards would read the weights together with those of other texts, which is
                     faster than a chain that reads them for one text
    is_smaller       the layers are those of a model that is neither the target nor a copy of it
    """

    layers: ModelLayers | TrainedLayers | TrainedHeads
    path: Sequence[int]
    num_tokens: int
    stores: DraftStores = DraftStores((), 0)
    rotations: tuple[Tensor, ...] = ()
    shares_forwards: bool = False
    is_smaller: bool = False


ScoredPlace = tuple[list[int], NDArray[np.float64]]  # the guesses of a place, and their scores, which fall


class Ranked(NamedTuple):
    """Guesses for one place, best first.

    lead  how far the best guess's score is ahead of the next token's that the filters leave; inf if they leave one.
          The smaller it is, the likelier does the target choose another token than the drafter's best guess
    """

    tokens: list[int]
    lead: float


class ChainEnd(NamedTuple):
    """When a chain ends early: as soon as P(all its tokens become text) is below `least`.

    edges  ascending leads
    rates  len(edges) + 1 probabilities: rates[i] of a token with edges[i - 1] <= lead < edges[i]
    """

    edges: tuple[float, ...]
    rates: tuple[float, ...]
    least: float

    def rate(self, lead: float) -> float:
        """P(a token with this lead is right)."""
        return self.rates[bisect_right(self.edges, lead)]


NEVER = ChainEnd((), (1.0,), 0.0)  # chains of full length


class Ranker(Protocol):
    """Ranks the guesses of one request as `Sampler.ranked` does, where their logits are computed."""

    def draft(self, plan: ChainPlan, end: ChainEnd = NEVER) -> LaunchedWork[list[Ranked] | None]:
        """The guesses for each token of a chain, which follows the best ones, or for fewer tokens if `end` says so.
        The last token has no guesses where logits are not finite. One row was written to the stores for each token; of
        trained layers, for each but the last.

        None: this ranker cannot run the plan, and nothing was written.
        """
