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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels import Kernels, KVStore
from longdraft.kernels.chain_plan import PairScores, PlaceRows, Ranked, Ranker, ScoredPlace
from longdraft.kernels.launched import LaunchedWork
from longdraft.kernels.switches import is_on
from longdraft.request.context import Context
from longdraft.request.events import TokenLogprob
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree
from longdraft.sampling import process

if TYPE_CHECKING:
    from longdraft.kernels.cuda.chain_rows import TextDraft
    from longdraft.kernels.cuda.choices import Chosen, LogitsSource, TextTree

MAX_GUESSES = 16  # that the device ranks for a token
DECIDES_SUMS = is_on("DECIDES_SUMS")  # False: top-k, top-p and eta are decided on the host
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
        from longdraft.kernels.cuda.choices import TextChoices  # needs Triton
        from longdraft.kernels.cuda.device_text import ChoiceRules, DeviceText
        from longdraft.kernels.cuda.ranker import RequestDrafts
        from longdraft.kernels.cuda.support import FilterRules

        least, eta = (math.log(value) if value > 0 else None for value in (params.min_p, params.eta_cutoff))
        filters = FilterRules(process.filter_temperature(params), params.top_k, params.top_p, least, eta,
                              params.min_tokens_to_keep)
        rules = ChoiceRules(params.temperature, filters, params.repetition_penalty, params.penalty_window,
                            params.seed or 0, tuple(banned), params.logit_bias)
        self._params = params
        self.device = kernels.device
        self._held, self._choices = DeviceText(rules, kernels.device), TextChoices()
        self._drafts = RequestDrafts(self._held, kernels)

    def choose(self, logits: Tensor, tree: Tree, context: Context) -> list[int]:
        """The token after each node; NO_TOKEN (-1) where a row's logits are not finite."""
        choices: list[int] = self.launch(None, logits.clone(), tree, context).choices.tolist()
        return choices

    def walk(self, given: Tensor | Behind, tree: Tree, context: Context, place: Place) -> tuple[list[int], list[int]]:
        """Nodes from the root down along the target's choices, and those choices.

        given  logits [R, V], which are kept; or what computes them, and the last layer's outputs [R, hidden]

        Calls `place` with the rows before it waits for the device.
        """
        source, rows = (None, given.clone()) if isinstance(given, Tensor) else given
        chosen = self.launch(source, rows, tree, context)
        place(chosen.path, chosen.targets)
        return chosen.read()[0]

    def launch(self, source: LogitsSource | None, given: Tensor, tree: Tree, context: Context) -> Chosen:
        """As `walk`, without waiting for the choices. given: logits, which are overwritten, or the last layer's outputs
        for `source`."""
        return self._choices.launch(source, given, [self.tree_of_text(tree, context, ())])

    def tree_choice(self, tree: Tree, context: Context) -> TreeChoice | None:
        """A choice that can be made together with those of other texts; None for a penalty whose window
        is too long."""
        return TreeChoice(self, tree, context) if self._drafts.can_share else None

    def tree_of_text(self, tree: Tree, context: Context, stores: Sequence[KVStore]) -> TextTree:
        """The tree with what its choice needs. stores: of the text's cache, where it keeps the path's rows; none: the
        caller keeps them."""
        return self._path_of_text(tree.tokens, tree.parents, context, stores)

    def _path_of_text(self, tokens: Sequence[int], parents: Sequence[int], context: Context,
                      stores: Sequence[KVStore] = ()) -> TextTree:
        from longdraft.kernels.cuda.choices import TextTree
        from longdraft.kernels.cuda.kv_store import cuda_stores
        from longdraft.kernels.cuda.text_rows import MAX_FRESH

        held = self._held
        if len(context) - held.length > MAX_FRESH:
            self._drafts.update(context)
        return TextTree(held, context.slice(held.length, len(context)), tokens, parents, len(context) - 1,
                        self._left(context), cuda_stores(stores))

    def log_probabilities(self, logits: Tensor, tokens: Sequence[int], chosen: Sequence[int], context: Context,
                          num: int) -> list[TokenLogprob]:
        """The log-probabilities of the tokens chosen after a path, and of the `num` likeliest ones beside each.

        logits  [R, V] of the path's rows, which are kept
        tokens  of the path, the text's last one first
        """
        from longdraft.kernels.cuda.logprobs import ranked_masses

        path = self._path_of_text(tokens, range(-1, len(tokens) - 1), context)
        ranked = ranked_masses(self._choices, path, logits.clone(), chosen, max(num, 1))
        scores = ranked.logits.astype(np.float64) / (self._params.temperature or 1.0)
        entries = []
        for row, total in enumerate(ranked.total):
            is_token = ranked.tokens[row] < logits.shape[1]  # the filters may leave fewer than `num`
            own = process.log_probabilities_of(scores[row, 1] - scores[row, is_token], int(total)).tolist()
            ids = ranked.tokens[row, is_token].tolist()
            best = sorted(zip(ids[1:], own[1:], strict=True), key=lambda pair: (-pair[1], pair[0]))
            entries.append(TokenLogprob(ids[0], own[0], tuple(best[:num])))
        return entries

    def ranked(self, logits: Tensor, context: Context, path: Sequence[int], num: int, ahead: int,
               within: float) -> LaunchedWork[Ranked]:
        """As `Sampler.ranked`, for at most `MAX_GUESSES`, without guesses that the filters remove."""
        from longdraft.kernels.cuda.chain_rows import ranked_places

        draft = self._draft(context, path, 1, num, ahead, within)
        return ranked_places((yield from self._drafts.ranked(draft, logits[None].float(), ahead)))[0]

    def shortlists(self, logits: Tensor, context: Context, num: int, ahead: int) -> LaunchedWork[list[ScoredPlace]]:
        """As `Sampler.shortlists`, for at most `MAX_GUESSES`, without guesses that the filters remove: the tokens and
        scores of each place."""
        from longdraft.kernels.cuda.chain_rows import scored_places

        draft = self._draft(context, (), len(logits), num, ahead, math.inf)
        return scored_places((yield from self._drafts.ranked(draft, logits.float(), ahead)))

    def paired_shortlists(self, places: PlaceRows, pairs: PairScores, context: Context, before: int, num: int,
                          ahead: int) -> LaunchedWork[list[tuple[ScoredPlace, NDArray[np.float64], float]]]:
        """As `Sampler.paired_shortlists`, for at most `MAX_GUESSES`, without guesses that the filters remove."""
        from longdraft.kernels.cuda.head_places import scored_pairs

        draft = self._draft(context, (), len(places.logits), num, ahead, math.inf)
        return scored_pairs((yield from self._drafts.paired(draft, places, pairs, before, ahead)))

    def _draft(self, context: Context, path: Sequence[int], places: int, num: int, ahead: int, within: float
               ) -> TextDraft:
        from longdraft.kernels.cuda.chain_rows import TextDraft

        held = self._held
        return TextDraft(held, held.length, context.slice(held.length, len(context)), path, places, num,
                         self._left(context) - len(path) - ahead, within, ())

    def ranker(self, context: Context, width: int, within: float) -> Ranker:
        """What ranks the guesses of chains, and of heads, on the device."""
        from longdraft.kernels.cuda.ranker import DeviceRanker

        return DeviceRanker(self._drafts, context, width, within, self._left(context))

    def _left(self, context: Context) -> int:
        """Tokens to write before the text may end."""
        return max(0, self._params.min_new_tokens - context.num_new)


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
