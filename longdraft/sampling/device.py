"""The sampler of a CUDA device: it chooses the same tokens from the same logits, without copying those to the host.

It supports `logit_bias`, the repetition penalty, temperature, top-k, top-p, min-p and eta. The host decides the other
settings, for which the logits are copied to it. The walk along the tree runs on the device too, so the cache can commit
its rows before the host has read which they are. Drafters' guesses are ranked there as well, one row at a time or in a
whole chain. Of log-probabilities, the host reads those that it reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from longdraft.kernels import Decoder, Kernels, KVStore
from longdraft.kernels.launched import Launched, LaunchedWork, Shareable
from longdraft.kernels.native_draft import ChainEnd, DraftStores, DraftWeights, Ranked
from longdraft.kernels.switches import is_on
from longdraft.request.context import Context
from longdraft.request.events import TokenLogprob
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree
from longdraft.sampling import process

if TYPE_CHECKING:
    from longdraft.kernels.cuda.chain_rows import TextDraft
    from longdraft.kernels.cuda.choice import ChosenTokens, LogitsSource
    from longdraft.kernels.cuda.drafting import DraftChain, DraftRanking
    from longdraft.kernels.cuda.head_places import DraftHeads, HeadPlaces, TextHeads
    from longdraft.kernels.cuda.layer_chain import DraftLayers, LayerChain
    from longdraft.kernels.cuda.shared_choice import TextTree
    from longdraft.kernels.cuda.shared_layers import TextLayers

MAX_GUESSES = 16  # that the device ranks at a place
DECIDES_SUMS = is_on("DECIDES_SUMS")  # False: top-k, top-p and eta are decided on the host
DRAFTS_LAYERS = is_on("DRAFTS_LAYERS")  # False: trained layers, heads and small draft models are run from the host
SHARES_CHAINS = is_on("SHARES_CHAINS")  # False: each text's chain is drafted by its own graphs
Behind = tuple["LogitsSource", Tensor]
Place = Callable[[Tensor, Tensor], None]  # FullCache.place: commit rows [N] at positions [N], both on the device


class DeviceSampler:
    """`choose` of :class:`longdraft.sampling.sampler.Sampler`, and `walk`, on a device."""

    @staticmethod
    def supports(params: SamplingParams, kernels: Kernels) -> bool:
        """Whether the kernels' device can decide these settings."""
        restricts = params.banned_strings or params.structured_outputs
        others = replace(params, top_k=0, top_p=1.0, eta_cutoff=0.0, min_tokens_to_keep=1) if DECIDES_SUMS else params
        return kernels.is_device and not (restricts or params.has_path_penalties or others.needs_sums)

    def __init__(self, params: SamplingParams, banned: Sequence[int], kernels: Kernels) -> None:
        from longdraft.kernels.cuda.choice import ChoiceRules, TokenChooser  # needs Triton
        from longdraft.kernels.cuda.drafting import MAX_CHAINS
        from longdraft.kernels.cuda.launch import RecentlyUsed
        from longdraft.kernels.cuda.support import FilterRules
        from longdraft.kernels.cuda.text_rows import can_share

        least, eta = (math.log(value) if value > 0 else None for value in (params.min_p, params.eta_cutoff))
        filters = FilterRules(process.filter_temperature(params), params.top_k, params.top_p, least, eta,
                              params.min_tokens_to_keep)
        rules = ChoiceRules(params.temperature, filters, params.repetition_penalty, params.penalty_window,
                            params.seed or 0, tuple(banned), params.logit_bias)
        self._params, self._kernels, self.device = params, kernels, kernels.device
        self._chooser, self._can_share = TokenChooser(rules, kernels.device), can_share(rules)
        self._rankings: dict[tuple[int, int], DraftRanking] = {}  # by vocabulary and number of guesses
        self._chains: RecentlyUsed[object, DraftChain] = RecentlyUsed(MAX_CHAINS)
        self._layer_chain: tuple[object, LayerChain] | None = None
        self._heads: tuple[object, HeadPlaces] | None = None

    def choose(self, logits: Tensor, tree: Tree, context: Context) -> list[int]:
        """The token after each node; NO_TOKEN (-1) where a row's logits are not finite."""
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

    def tree_choice(self, tree: Tree, context: Context) -> TreeChoice | None:
        """A choice that can be made together with those of other texts; None for a penalty whose window
        is too long."""
        return TreeChoice(self, tree, context) if self._can_share else None

    def tree_of_text(self, tree: Tree, context: Context, stores: Sequence[KVStore]) -> TextTree:
        """As `launch`, for `SharedChoices`. stores: of the text's cache, where it keeps the path's rows."""
        from longdraft.kernels.cuda.kv_store import cuda_stores
        from longdraft.kernels.cuda.shared_choice import TextTree
        from longdraft.kernels.cuda.text_rows import MAX_FRESH

        chooser = self._chooser
        if len(context) - chooser.length > MAX_FRESH:
            self._update(context)
        return TextTree(chooser, context.slice(chooser.length, len(context)), tree.tokens, tree.parents,
                        len(context) - 1, self._left(context), cuda_stores(stores))

    def log_probabilities(self, logits: Tensor, tokens: Sequence[int], chosen: Sequence[int], context: Context,
                          num: int) -> list[TokenLogprob]:
        """Of the tokens chosen after a path, and of the `num` likeliest ones beside each.

        logits  [R, V] of the path's rows, which are kept
        tokens  of the path, the text's last one first
        """
        from longdraft.kernels.cuda.logprobs import ranked_masses

        self._update(context)
        place = len(context) - 1, self._left(context)
        found = ranked_masses(self._chooser, logits.clone(), tokens, chosen, *place, max(num, 1))
        scores = found.logits.astype(np.float64) / (self._params.temperature or 1.0)
        entries = []
        for row, total in enumerate(found.total):
            is_token = found.tokens[row] < logits.shape[1]  # the filters may leave fewer than `num`
            own = process.log_probabilities_of(scores[row, 1] - scores[row, is_token], int(total)).tolist()
            ids = found.tokens[row, is_token].tolist()
            best = sorted(zip(ids[1:], own[1:], strict=True), key=lambda pair: (-pair[1], pair[0]))
            entries.append(TokenLogprob(ids[0], own[0], tuple(best[:num])))
        return entries

    def ranked(self, logits: Tensor, context: Context, path: Sequence[int], num: int, ahead: int,
               within: float) -> LaunchedWork[Ranked]:
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
        return (yield from ranking.read(1))[0]

    def ranking(self, context: Context, width: int, within: float) -> DeviceRanking:
        """How the guesses of a chain are ranked on the device."""
        return DeviceRanking(self, width, within, self._left(context), context)

    @property
    def shares_chains(self) -> bool:
        """Whether chains are drafted together with those of other texts."""
        return SHARES_CHAINS and self._can_share

    def draft_chain(self, decoder: Decoder, weights: DraftWeights, stores: DraftStores,
                    ranking: DeviceRanking, rotations: tuple[Tensor, Tensor], path: Sequence[int],
                    end: ChainEnd) -> LaunchedWork[list[Ranked] | None]:
        """See `longdraft.kernels.native_draft.draft_chain`. None for layers that no graph holds, for weights that are
        divided among ranks, and for states that the chain would write to before it has ended.

        rotations  in the host's memory
        """
        from longdraft.kernels.cuda.decoder import CudaDecoder
        from longdraft.kernels.cuda.drafting import launch_chain, ranked_places, until_end
        from longdraft.kernels.cuda.layerwise import CudaLayerwiseDecoder
        from longdraft.kernels.cuda.shared_chain import TextChain

        if not isinstance(decoder, CudaDecoder | CudaLayerwiseDecoder) or not decoder.drafts_chains:
            return None
        if any(last is first for first, _, last in stores.states):
            return None  # a capture runs the chain twice
        for store in stores.stores:
            store.reserve(stores.length + len(rotations[0]) + 1)

        def alone() -> Tensor:
            self._update(ranking.context)
            return launch_chain(decoder, weights, stores, self._chooser, self._chains, ranking.width, rotations, path,
                                ranking.required - len(path), ranking.within)

        if self.shares_chains:
            part = TextChain(self._draft_of_text(ranking, path, len(rotations[0]), rotations), decoder, stores)
            work: Launched = Shareable(decoder.shared_chains(weights, stores.remainder is not None), part, alone)
        else:
            work = Launched(alone())
        yield work
        return until_end(ranked_places(work.read()), end)

    def _draft_of_text(self, ranking: DeviceRanking, path: Sequence[int], places: int,
                       rotations: tuple[Tensor, ...]) -> TextDraft:
        from longdraft.kernels.cuda.chain_rows import TextDraft

        fresh = ranking.context.slice(self._chooser.length, len(ranking.context))
        return TextDraft(self._chooser, fresh, path, places, ranking.width, ranking.required - len(path),
                         ranking.within, rotations)

    def draft_layers(self, layers: DraftLayers, kernels: Kernels, stores: Sequence[KVStore], length: int, row: Tensor,
                     vocabulary: int, rotations: tuple[Tensor, Tensor], ranking: DeviceRanking, end: ChainEnd,
                     read: tuple[KVStore, int] | None = None) -> LaunchedWork[list[Ranked] | None]:
        """A chain after the text from trained layers; see `LayerChain.launch`. None for weights that are divided.

        rotations  in the host's memory
        read       another store that they read, and its visible rows
        """
        from longdraft.kernels.cuda.drafting import ranked_places, until_end
        from longdraft.kernels.cuda.kv_store import cuda_stores
        from longdraft.kernels.cuda.operations import CudaOperations
        from longdraft.kernels.cuda.shared_layers import SharedLayers, TextLayers

        if not DRAFTS_LAYERS or not isinstance(kernels, CudaOperations):
            return None
        others, num_read = ([], 0) if read is None else (cuda_stores(read[:1]), read[1])
        held = [*cuda_stores(stores), *others]
        draft = self._draft_of_text(ranking, (), len(rotations[0]) + 1, rotations)
        part = TextLayers(draft, layers, kernels, vocabulary, held, read is not None, row, length, num_read)
        if self.shares_chains:
            layers.shared = layers.shared or SharedLayers()
            work: Launched = Shareable(layers.shared, part, partial(self._launched_layers, part, ranking))
        else:
            work = Launched(self._launched_layers(part, ranking))
        yield work
        return until_end(ranked_places(work.read()), end)

    def _launched_layers(self, part: TextLayers, ranking: DeviceRanking) -> Tensor:
        """Launch a text's chain by its own graphs. Returns its outcome."""
        from longdraft.kernels.cuda.layer_chain import LayerChain

        self._update(ranking.context)
        layers, draft = part.layers, part.draft
        key = (id(layers), ranking.width, *(store.serial for store in part.stores))
        if self._layer_chain is None or self._layer_chain[0] != key:
            chain = LayerChain(layers, part.ops, part.stores, part.has_read, self._chooser, part.vocabulary,
                               ranking.width, part.row)
            self._layer_chain = key, chain
        cos, sin = draft.rotations
        return self._layer_chain[1].launch(part.row, part.length, part.num_read, (cos, sin), draft.required,
                                           draft.within)

    def rank_heads(self, heads: DraftHeads, hidden: Tensor, first: Tensor | None, path: Sequence[int],
                   ranking: DeviceRanking, vocabulary: int, num: int) -> LaunchedWork[list[list[int]] | None]:
        """The guesses of heads at `num` places, best first. None for weights that are divided.

        hidden, first  see `TextHeads`
        """
        from longdraft.kernels.cuda.drafting import ranked_places
        from longdraft.kernels.cuda.head_places import SharedHeads, TextHeads
        from longdraft.kernels.cuda.operations import CudaOperations

        kernels = self._kernels
        if not DRAFTS_LAYERS or not isinstance(kernels, CudaOperations):
            return None
        part = TextHeads(self._draft_of_text(ranking, path, num, ()), heads, kernels.graphs, vocabulary, hidden, first)
        if self.shares_chains:
            group = heads.shared.setdefault(first is None, SharedHeads())
            work: Launched = Shareable(group, part, partial(self._launched_heads, part, ranking))
        else:
            work = Launched(self._launched_heads(part, ranking))
        yield work
        return [place.tokens for place in ranked_places(work.read())]

    def _launched_heads(self, part: TextHeads, ranking: DeviceRanking) -> Tensor:
        """Launch the heads of one text by its own graph. Returns its outcome."""
        from longdraft.kernels.cuda.head_places import HeadPlaces

        self._update(ranking.context)
        heads, draft, key = part.heads, part.draft, (id(part.heads), ranking.width)
        if self._heads is None or self._heads[0] != key:
            self._heads = key, HeadPlaces(heads, part.graphs, self._chooser, part.vocabulary, ranking.width, part.row)
        return self._heads[1].launch(part.row, part.first, draft.places, draft.path, draft.required)

    def _update(self, context: Context) -> None:
        start = self._chooser.length
        if start < len(context):
            self._chooser.extend(context.slice(start, len(context)), start)

    def _left(self, context: Context) -> int:
        """Tokens to write before the text may end."""
        return max(0, self._params.min_new_tokens - context.num_new)


class DeviceRanking(NamedTuple):
    """How the guesses of a chain are ranked.

    sampler   of the request
    width     guesses at each place at most
    within    largest gap between a guess's score and the best one's
    required  tokens that must still be written before the text may end
    context   the text
    """

    sampler: DeviceSampler
    width: int
    within: float
    required: int
    context: Context


class TreeChoice(NamedTuple):
    """A choice after each node of a tree, and the walk along it, for a forward of several texts.

    sampler  of the request
    tree     whose root is the last token of `context`
    """

    sampler: DeviceSampler
    tree: Tree
    context: Context

    def of_text(self, stores: Sequence[KVStore]) -> TextTree:
        """See `DeviceSampler.tree_of_text`."""
        return self.sampler.tree_of_text(self.tree, self.context, stores)
