"""Drafts on the device: guesses ranked without their logits on the host, and a whole chain without a wait.

    DraftRanking   ranks one row of logits as `Sampler.ranked` does; the host reads a few ids
    DraftChain     drafts L tokens with a model: embed | layers | head | edit, rank | next token, L times

A chain is one CUDA graph of four tokens and one of a single token, which are replayed as often as it takes. What
changes from token to token (place, length, rotation) is in device memory. The host uploads one small state before, and
reads all guesses and leads in one copy afterwards.

Chains of several texts are one graph in `shared_chain`.

The guesses are those that the filters leave. (The host fills up with tokens that they remove, where they leave fewer
guesses than it wants.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.chain_plan import ChainEnd, DraftStores, DraftWeights, Ranked
from longdraft.kernels.cuda import jit_choice, jit_drafting
from longdraft.kernels.cuda.chain_forward import ChainDecoder
from longdraft.kernels.cuda.choice import MAX_CHAIN, LogitsSource, TokenChooser
from longdraft.kernels.cuda.forward_buffers import EMBED_BLOCK
from longdraft.kernels.cuda.graph_cache import new_owner
from longdraft.kernels.cuda.kv_store import cuda_stores
from longdraft.kernels.cuda.launch import RecentlyUsed, ceil_div, chained, on_device, padded_size, require
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.support import BLOCK, SupportSearch
from longdraft.kernels.launched import Launched, LaunchedWork

UNROLLED = 4  # tokens of the larger graph
MAX_WIDTH = 16  # guesses that are ranked for a token
MAX_CHAINS = 4  # of one request: the models and caches with which it drafts in turn


class DraftRanking:
    """Ranks the guesses of one request from one row of logits at a time.

    vocabulary  number of logits
    width       guesses at most
    """

    def __init__(self, chooser: TokenChooser, vocabulary: int, width: int, device: torch.device) -> None:
        require(1 <= width <= MAX_WIDTH, f"1 to {MAX_WIDTH} guesses", width)
        rules, self._device = chooser.rules, device
        self._chooser, self._vocabulary, self._num_wanted = chooser, vocabulary, width
        self._width = max(2, width)  # two show the lead
        self._blocks = ceil_div(vocabulary, BLOCK)
        self.state = torch.zeros(6, dtype=torch.int64, device=device)
        self.outcome = new_outcome(1, device)[:, 0]
        self._window = rules.window if rules.penalty != 1 else 0
        self._within: float | None = None
        self._settings = torch.zeros(6, dtype=torch.float64, device=device)
        self._support = SupportSearch.of_text(rules.filters, 1, vocabulary, self._settings)
        self._root = torch.zeros(1, 1, dtype=torch.int32, device=device)  # tokens, path and depths of a single node
        self._bests = torch.empty(1, self._blocks, device=device)
        self._best_ids = torch.empty(1, self._blocks, dtype=torch.int32, device=device)
        self._scores = torch.empty(1, self._blocks, self._width, dtype=torch.float64, device=device)
        self._ids = torch.empty(1, self._blocks, self._width, dtype=torch.int32, device=device)
        self._buffers = torch.empty(1, 0, dtype=torch.int32, device=device), torch.empty(1, 0, device=device)

    def begin(self, within: float, position: int, required: int, places: int = MAX_CHAIN) -> None:
        """Set the place of the first guess: `position` tokens are before it, and `required` must follow before the end.

        within  largest gap between a guess's score and the best one's
        places  of the chain
        """
        rules = self._chooser.rules
        if within != self._within:
            self._within = within
            self._settings.copy_(torch.tensor([rules.temperature, *rules.filters.settings, within],
                                              dtype=torch.float64))
        self.state.copy_(torch.tensor([position, self._chooser.seed, required, 0, places, self._num_wanted]),
                         non_blocking=True)
        window = min(self._window, len(self._chooser.text))
        if self._buffers[0].shape[1] != window:
            self._buffers = (torch.empty(1, window, dtype=torch.int32, device=self._device),
                             torch.empty(1, window, device=self._device))

    def rank(self, logits: Tensor, has_bans: bool, ahead: int = 0) -> None:
        """Rank the guesses of logits [1, V], which are overwritten; the result goes to `outcome`.

        ahead  unknown tokens between the text and the guesses
        """
        chooser, rules, blocks = self._chooser, self._chooser.rules, self._blocks
        root = self._root[0]
        chooser.edit(logits, root, self._root, root, self.state, self._buffers[0].shape[1],
                     has_bans, self._buffers)
        if ahead:
            self.state[0] += ahead  # the noise is that of the guess's own position
        jit_choice.block_maxima_kernel[(1, blocks)](logits, self._bests, self._best_ids, self._vocabulary, blocks,
                                                    BLOCK=BLOCK, **chained(self._device))
        if rules.temperature > 0:
            self._support.find(logits, self._bests)
        rank_rows(logits, self._bests, self.state, self._settings, self._support.limits, self._scores, self._ids,
                  self.outcome, 0, HAS_NOISE=rules.temperature > 0, **self._support.flags)

    def go_on(self, ahead: int) -> None:
        """Go on to the next place, after a token that is not known. ahead: as given to `rank` before."""
        go_on(self.state[None], ahead)

    def read(self, count: int) -> LaunchedWork[list[Ranked]]:
        """The guesses of the first `count` places, once they have arrived."""
        launched = Launched(self.outcome[:count])
        yield launched
        return ranked_places(launched.read())


def go_on(states: Tensor, ahead: int) -> None:
    """Go on to the next place, after a token that is not known.

    states  int64 [T, 6]: of `jit_drafting`
    ahead   unknown tokens between the texts and the guesses, which were ranked as if the texts had them
    """
    length, required, place = states[:, 0], states[:, 2], states[:, 3]
    length -= ahead
    required -= 1
    place += 1


def new_outcome(rows: int, device: torch.device) -> Tensor:
    """The guesses of the longest chains of some rows, and of a place after them: int64 [places, R, 18]."""
    return torch.zeros(MAX_CHAIN + 1, rows, 2 + MAX_WIDTH, dtype=torch.int64, device=device)


def ranked_places(outcome: Tensor) -> list[Ranked]:
    """The guesses of some places, from their rows [N, 18] on the host."""
    leads = outcome[:, 1].contiguous().view(torch.float64).tolist()
    return [Ranked(row[2 : 2 + row[0]], lead) for row, lead in zip(outcome.tolist(), leads, strict=True)]


def rank_rows(logits: Tensor, bests: Tensor, state: Tensor, settings: Tensor, limits: Sequence[Tensor], scores: Tensor,
              ids: Tensor, outcome: Tensor, stride: int, **flags: bool) -> None:
    """Rank the guesses of rows of edited logits [R, V], one for each text; see `jit_drafting`.

    bests   [R, blocks]: the largest logit of each block
    scores, ids  [R, blocks, most guesses], overwritten
    limits  of the support (`SupportSearch`); flags: of the filters, and HAS_NOISE
    """
    (rows, vocabulary), (_, blocks, width) = logits.shape, scores.shape
    jit_drafting.best_in_blocks_kernel[(blocks, rows)](
        logits, bests, state, settings, *limits, scores, ids, vocabulary, blocks, BLOCK=BLOCK,
        BLOCKS=padded_size(blocks), WIDTH=width, STRIDE=stride, **flags, **chained(logits.device))
    jit_drafting.rank_kernel[(rows,)](bests, scores, ids, state, settings, outcome, blocks, BLOCKS=padded_size(blocks),
                                      CANDIDATES=padded_size(blocks * width), WIDTH=width, STRIDE=stride,
                                      **chained(logits.device))


class _ChainShape(NamedTuple):
    """What the graphs of a chain depend on."""

    weights: DraftWeights
    eps: float
    rounds_once: bool


class DraftChain:
    """Chains of one request with one model over one cache.

    decoder  of the model that drafts
    shape    see `_ChainShape`
    """

    def __init__(self, decoder: ChainDecoder, shape: _ChainShape, stores: DraftStores, chooser: TokenChooser,
                 width: int) -> None:
        head, device = shape.weights.head, decoder.ops.device
        assert isinstance(head, CudaLinear)
        self._decoder, self._weights = decoder, shape.weights
        self._stores, self._chooser = cuda_stores(stores.stores), chooser
        self._forward = decoder.chain_forward(self._stores, stores.remainder)
        self._ranking = DraftRanking(chooser, head.out_features, width, device)
        self._rotations = new_rotations(1, self._forward.cos.shape[1], device)
        self._source = LogitsSource(decoder.ops.graphs, decoder.ops.tile, shape.weights.norm, shape.eps,
                                    shape.rounds_once, head, shape.weights.logits_divisor, shape.weights.logits_cap)
        self._normed = torch.empty_like(self._forward.x)
        self._sums = torch.empty(head.num_sums(1), device=device)
        self._logits = torch.empty(1, head.out_features, device=device)
        self._key = new_owner()
        decoder.ops.graphs.own(self, self._key)

    def launch(self, stores: DraftStores, rotations: tuple[Tensor, Tensor], path: Sequence[int], required: int,
               within: float) -> Tensor:
        """Launch what drafts a token for each row of `rotations`. Returns the outcome [N, 18] (`ranked_places`).

        path       drafted tokens after the text, which the chain continues
        required   tokens that must be written after `path` before the text may end
        rotations  cos, sin [N, S D / 2] float32, N <= 64
        """
        count = len(rotations[0])
        require(count <= MAX_CHAIN, f"chains of at most {MAX_CHAIN} tokens", count)
        self._chooser.place(path)
        graphs, text = self._decoder.ops.graphs, self._chooser.text
        has_bans, staged = required > 0, self._forward.inputs([stores], [count])

        def begin() -> None:
            self._ranking.begin(within, self._chooser.length + len(path), required, count)
            self._rotations[:count, 0].copy_(torch.stack(rotations, 1))
            self._forward.upload(staged)

        with on_device(self._logits.device):
            graphs.run_in_turn([(("chain", self._key, size, has_bans, self._chooser.place_serial),
                                 partial(self._places, size, text, has_bans)) for size in in_graphs(count)], begin)
        return self._ranking.outcome[:count]

    def _places(self, count: int, text: Tensor, has_bans: bool) -> None:
        for _ in range(count):
            self._place(text, has_bans)

    def _place(self, text: Tensor, has_bans: bool) -> None:
        """One token: from the text's last token to the next."""
        forward, ranking = self._forward, self._ranking
        forward.embed(self._weights, lambda table, factor, x: embed_place(
            text, ranking.state, table, factor, self._rotations, x, forward.cos, forward.sin))
        forward.run(self._stores)
        self._source.launch(forward.x, self._normed, self._sums, self._logits)
        ranking.rank(self._logits, has_bans)
        end_place(text, ranking.state, forward.where, ranking.outcome)


def new_rotations(rows: int, half: int, device: torch.device) -> Tensor:
    """cos and sin of the longest chains, and of a place after them: [places, R, 2, D / 2] float32."""
    return torch.zeros(MAX_CHAIN + 1, rows, 2, half, device=device)


def embed_place(text: Tensor, state: Tensor, table: CudaLinear, factor: float, rotations: Tensor, x: Tensor,
                cos: Tensor, sin: Tensor, stride: int = 0) -> None:
    """Write the embeddings x [R, hidden] of the texts' last tokens, and the rotations of their places in the chains."""
    hidden, (rows, half), scale = table.in_features, cos.shape, table.scale
    jit_drafting.begin_place_kernel[(ceil_div(hidden, EMBED_BLOCK), rows)](
        text, state, table.weight, cos if scale is None else scale, rotations, x, cos, sin, factor, HIDDEN=hidden,
        HALF=half, PADDED=padded_size(half), BLOCK=EMBED_BLOCK, STRIDE=stride, HAS_SCALE=scale is not None,
        HAS_FACTOR=factor != 1, **chained(x.device))


def end_place(text: Tensor, state: Tensor, where: Tensor, outcome: Tensor, stride: int = 0) -> None:
    """Append the best guesses to the texts, and go on to the next place. where: [2 R]."""
    jit_drafting.end_place_kernel[(where.numel() // 2,)](text, state, where, outcome, STRIDE=stride, num_warps=1,
                                                         **chained(where.device))


def in_graphs(count: int) -> list[int]:
    """The tokens of each graph that is replayed for `count` tokens."""
    return [UNROLLED] * (count // UNROLLED) + [1] * (count % UNROLLED)


def until_end(places: list[Ranked], end: ChainEnd) -> list[Ranked]:
    """The places up to the first without a guess, and as far as `end` lets a chain go."""
    kept: list[Ranked] = []
    reached = 1.0
    for place in places:
        if reached < end.least:
            break
        kept.append(place)
        if not place.tokens:
            break
        reached *= end.rate(place.lead)
    return kept


def launch_chain(decoder: ChainDecoder, weights: DraftWeights, stores: DraftStores, chooser: TokenChooser,
                 held: RecentlyUsed[object, DraftChain], width: int, rotations: tuple[Tensor, Tensor],
                 path: Sequence[int], required: int, within: float) -> Tensor:
    """As `DraftChain.launch`, by the chain that belongs to these weights and stores.

    held  the request's chains, by what they depend on
    """
    serials = tuple(store.serial for store in cuda_stores(stores.stores))
    key = (id(decoder), id(weights.head), serials, decoder.chain_key(stores.remainder), width)

    def make() -> DraftChain:
        shape = _ChainShape(weights, decoder.geometry.eps, decoder.geometry.rounds_once)
        return DraftChain(decoder, shape, stores, chooser, width)

    return held.get(key, make).launch(stores, rotations, path, required, within)
