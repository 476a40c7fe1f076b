"""The sampler of a CUDA device: it chooses the same tokens from the same logits, without copying those to the host.

It supports temperature, repetition penalty and min-p; the host decides the other settings, for which the logits are
copied to it. The walk along the tree runs on the device too, so the cache can commit its rows before the host has read
which they are. Drafters' guesses are ranked there as well, one row at a time or in a whole chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from longdraft.core import Context, SamplingParams
from longdraft.kernels import Decoder, Kernels, KVStore
from longdraft.kernels.native_draft import ChainEnd, DraftStores, DraftWeights, Ranked
from longdraft.tree import Tree

if TYPE_CHECKING:
    from longdraft.kernels.cuda.choice import ChosenTokens, LogitsSource
    from longdraft.kernels.cuda.drafting import DraftChain, DraftRanking
    from longdraft.kernels.cuda.layer_chain import DraftLayers, LayerChain

MAX_GUESSES = 16  # that the device ranks at a place
DRAFTS_LAYERS = True  # False: trained layers are run from the host
Behind = tuple["LogitsSource", Tensor]
Place = Callable[[Tensor, Tensor], None]  # KVCache.place: commit rows [N] at positions [N], both on the device


class DeviceSampler:
    """`choose` of :class:`longdraft.sampling.sampler.Sampler`, and `walk`, on a device."""

    @staticmethod
    def supports(params: SamplingParams, kernels: Kernels) -> bool:
        """Whether the kernels' device can decide these settings."""
        restricts = params.logit_bias or params.banned_strings or params.structured_outputs
        on_host = restricts or params.has_path_penalties or params.needs_sums
        return kernels.is_device and not on_host and not (params.temperature_last and params.min_p)

    def __init__(self, params: SamplingParams, banned: Sequence[int], kernels: Kernels) -> None:
        from longdraft.kernels.cuda.choice import ChoiceRules, TokenChooser  # needs Triton
        from longdraft.kernels.cuda.drafting import MAX_CHAINS
        from longdraft.kernels.cuda.launch import RecentlyUsed

        least = math.log(params.min_p) if params.min_p > 0 else None
        rules = ChoiceRules(params.temperature, least, params.repetition_penalty, params.penalty_window,
                            params.seed or 0, tuple(banned))
        self._params, self.device = params, kernels.device
        self._chooser = TokenChooser(rules, kernels.device)
        self._rankings: dict[tuple[int, int], DraftRanking] = {}  # by vocabulary and number of guesses
        self._chains: RecentlyUsed[object, DraftChain] = RecentlyUsed(MAX_CHAINS)
        self._layer_chain: tuple[object, LayerChain] | None = None

    def choose(self, logits: Tensor, tree: Tree, context: Context) -> list[int]:
        """The token behind each node; NO_TOKEN (-1) where a row's logits are not finite."""
        found: list[int] = self.launch(logits.clone(), tree, context).choices.tolist()
        return found

    def walk(self, given: Tensor | Behind, tree: Tree, context: Context, place: Place) -> tuple[list[int], list[int]]:
        """Nodes from the root down along the target's choices, and those choices.

        given  logits [R, V], which are kept; or what computes them, and the last layer's outputs [R, hidden]

        Calls `place` with the rows before it waits for the device.
        """
        chosen = self.launch(given.clone() if isinstance(given, Tensor) else given, tree, context)
        place(chosen.path, chosen.targets)
        return chosen.read()

    def launch(self, given: Tensor | Behind, tree: Tree, context: Context) -> ChosenTokens:
        """As `walk`, without waiting for the choices. Overwrites logits."""
        self._update(context)
        place = len(context) - 1, self._left(context)
        if isinstance(given, Tensor):
            return self._chooser.choose(given, tree.tokens, tree.parents, *place)
        return self._chooser.choose_behind(*given, tree.tokens, tree.parents, *place)

    def ranked(self, logits: Tensor, context: Context, path: Sequence[int], num: int, ahead: int,
               within: float) -> Ranked:
        """As `Sampler.ranked`, for at most `MAX_GUESSES`, without guesses that the filters remove."""
        from longdraft.kernels.cuda.drafting import DraftRanking

        self._update(context)
        key = len(logits), num
        ranking = self._rankings.get(key)
        if ranking is None:
            ranking = self._rankings[key] = DraftRanking(self._chooser, *key, self.device)
        self._chooser.place(path)
        required = self._left(context) - len(path) - ahead
        ranking.begin(within, len(context) + len(path), required)
        ranking.rank(logits[None].float().clone(), required > 0, ahead)
        return ranking.read(1)[0]

    def ranking(self, context: Context, width: int, within: float) -> DeviceRanking:
        """How the guesses of a chain are ranked on the device."""
        self._update(context)
        return DeviceRanking(self, width, within, self._left(context))

    def draft_chain(self, decoder: Decoder, weights: DraftWeights, stores: DraftStores,
                    ranking: DeviceRanking, rotations: tuple[Tensor, Tensor], path: Sequence[int],
                    end: ChainEnd) -> list[Ranked] | None:
        """See `longdraft.kernels.native_draft.draft_chain`. None for a model whose weights are divided among ranks."""
        from longdraft.kernels.cuda.decoder import CudaDecoder
        from longdraft.kernels.cuda.drafting import draft_chain

        if not isinstance(decoder, CudaDecoder):
            return None
        return draft_chain(decoder, weights, stores, self._chooser, self._chains, ranking.width,
                           rotations, path, ranking.required - len(path), ranking.within, end)

    def draft_layers(self, layers: DraftLayers, kernels: Kernels, stores: Sequence[KVStore], length: int, row: Tensor,
                     vocabulary: int, rotations: tuple[Tensor, Tensor], ranking: DeviceRanking, end: ChainEnd,
                     read: tuple[KVStore, int] | None = None) -> list[Ranked] | None:
        """A chain behind the text from trained layers; see `LayerChain.draft`. None for weights that are divided.

        read  another store that they read, and its visible rows
        """
        from longdraft.kernels.cuda.kv_store import cuda_stores
        from longdraft.kernels.cuda.layer_chain import LayerChain
        from longdraft.kernels.cuda.operations import CudaOperations

        if not DRAFTS_LAYERS or not isinstance(kernels, CudaOperations):
            return None
        held = cuda_stores(stores)
        other, num_read = (None, 0) if read is None else (cuda_stores(read[:1])[0], read[1])
        key = (id(layers), ranking.width, *(store.serial for store in held), other and other.serial)
        if self._layer_chain is None or self._layer_chain[0] != key:
            chain = LayerChain(layers, kernels, held, other, self._chooser, vocabulary, ranking.width, row)
            self._layer_chain = key, chain
        return self._layer_chain[1].draft(row, length, num_read, rotations, ranking.required, ranking.within, end)

    def _update(self, context: Context) -> None:
        start = self._chooser.length
        if start < len(context):
            self._chooser.extend(context.slice(start, len(context)), start)

    def _left(self, context: Context) -> int:
        """Tokens to write before the text may end."""
        return max(0, self._params.min_new_tokens - context.num_new)


class DeviceRanking(NamedTuple):
    """How the guesses of a chain are ranked.

    sampler   of the request, up to date with the text
    width     guesses at each place at most
    within    largest gap between a guess's score and the best one's
    required  tokens that must still be written before the text may end
    """

    sampler: DeviceSampler
    width: int
    within: float
    required: int
