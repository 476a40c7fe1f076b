"""The tokens that top-k, top-p, min-p and eta leave of rows of logits, on the device: launches `jit_support`.

A search is nine launches and a sum one. Top-p takes eleven, top-k and top-p 20, eta two.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.cuda import jit_support
from longdraft.kernels.cuda.launch import ceil_div, chained, padded_size

BLOCK = 1024  # elements of one program: tokens of the vocabulary or of a penalty window
_LEVELS = 8  # of a search
_CANDIDATES = 17  # of a level
_UNREACHED = jit_support.UNREACHED.value


class FilterRules(NamedTuple):
    """The sampling parameters that remove tokens. See `longdraft.request.sampling_params.SamplingParams`.

    temperature  of the scores that the filters see
    top_k        0: off
    top_p        1: off
    log_min_p    None: off
    log_eta      logarithm of eta_cutoff; None: off
    at_least     tokens that min-p and eta leave
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    log_min_p: float | None = None
    log_eta: float | None = None
    at_least: int = 1

    @property
    def settings(self) -> list[float]:
        """The parameters that the kernels read after the temperature."""
        least, eta = (-math.inf if each is None else each for each in (self.log_min_p, self.log_eta))
        return [least, self.temperature, eta, self.top_p]

    @property
    def kinds(self) -> FilterKinds:
        has_least = self.log_min_p is not None or self.log_eta is not None
        return FilterKinds(self.top_k > 0, self.top_p < 1, self.log_min_p is not None, self.log_eta is not None,
                           has_least and self.at_least > 1)

    @property
    def goals(self) -> tuple[int, int]:
        """Of the searches by the number of tokens: for top-k, and for tokens that are left at least."""
        kinds = self.kinds
        return self.top_k if kinds.top_k else _UNREACHED, self.at_least if kinds.at_least else 0


class FilterKinds(NamedTuple):
    """Which filters some rows have, and whether min-p and eta leave more than one token at least."""

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    eta: bool = False
    at_least: bool = False

    @property
    def flags(self) -> dict[str, bool]:
        """The switches that select a compiled kernel."""
        return dict(HAS_CUT=self.top_k or self.top_p, HAS_MIN_P=self.min_p, HAS_ETA=self.eta, HAS_FLOOR=self.at_least)


class SupportSearch:
    """The support of R rows [R, V], and the memory in which it is found.

    kinds     of filters that are launched
    settings  float64 [R, 6], on the device; see jit_support
    goals     int64 [R] each; see `FilterRules.goals`
    """

    def __init__(self, kinds: FilterKinds, vocabulary: int, settings: Tensor, goals: tuple[Tensor, Tensor]) -> None:
        device, rows, blocks = settings.device, len(goals[0]), ceil_div(vocabulary, BLOCK)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._kinds, self._rows, self._settings = kinds, rows, settings
        self._most, self._fewest = goals
        self._sizes = dict(vocabulary=vocabulary, num_blocks=blocks)
        self._forms = dict(BLOCK=BLOCK, BLOCKS=padded_size(blocks))
        self.flags = kinds.flags
        self.cuts, self.floors, self._top_k, self._goals = (zeros(rows) for _ in range(4))
        self.leasts = zeros(rows, dtype=torch.float64)
        searches = self.flags["HAS_CUT"] or self.flags["HAS_FLOOR"]
        self._keys = zeros(_LEVELS, rows)
        self._sums = zeros(2, rows, _CANDIDATES, blocks) if searches else zeros(2, 1)
        self.sums = zeros(rows, 2, blocks)

    @property
    def limits(self) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments of the kernels that read the support."""
        return self.cuts, self.floors, self.leasts

    def find(self, logits: Tensor, bests: Tensor) -> None:
        """Launch what finds the support of logits [R, V], with the largest logit of each block in `bests`."""
        kinds, blocks = self._kinds, self._sizes["num_blocks"]
        if kinds.at_least:
            self._search(logits, bests, self._fewest, None, False, self.floors)
        if kinds.top_k:
            self._search(logits, bests, self._most, None, False, self._top_k if kinds.top_p else self.cuts)
        if kinds.top_p:
            within = self._top_k if kinds.top_k else None
            self._sum(logits, bests, within, False)
            jit_support.top_p_goal_kernel[(self._rows,)](self.sums, self._settings, self._goals, blocks,
                                                         BLOCKS=self._forms["BLOCKS"], **chained(logits.device))
            self._search(logits, bests, self._goals, within, True, self.cuts)
        if kinds.eta:
            self._sum(logits, bests, self.cuts if self.flags["HAS_CUT"] else None, True)
            jit_support.eta_kernel[(self._rows,)](bests, self.sums, self._settings, self.leasts, blocks,
                                                  BLOCKS=self._forms["BLOCKS"], **chained(logits.device))

    def _search(self, logits: Tensor, bests: Tensor, goals: Tensor, within: Tensor | None, by_mass: bool,
                found: Tensor) -> None:
        """Write the cut after which the goals are reached to `found`.

        within  of the tokens up to these cuts; None: of all
        """
        forms = dict(BY_MASS=by_mass, HAS_CUT=within is not None, **self._forms)
        given = (logits, bests, self._settings, goals, goals if within is None else within, self._keys)
        for level in reversed(range(_LEVELS)):
            own, before = self._sums[level % 2], self._sums[1 - level % 2]
            jit_support.search_level_kernel[(self._rows, self._sizes["num_blocks"])](
                *given, before, own, **self._sizes, LEVEL=level, **forms, **chained(logits.device))
        jit_support.end_search_kernel[(self._rows,)](*given, self._sums[0], found, **self._sizes, **forms,
                                                     **chained(logits.device))

    def _sum(self, logits: Tensor, bests: Tensor, cuts: Tensor | None, has_least: bool) -> None:
        """Sums over the tokens up to `cuts`. has_least: without those that min-p removes."""
        flags = dict(HAS_CUT=cuts is not None, HAS_MIN_P=has_least and self.flags["HAS_MIN_P"], HAS_ETA=False,
                     HAS_FLOOR=has_least and self.flags["HAS_FLOOR"])
        limits = self.floors if cuts is None else cuts, self.floors, self.leasts
        self._launch(jit_support.support_sums_kernel, logits, bests, limits, self.sums, flags, DIVISOR=2)

    def sum(self, logits: Tensor, bests: Tensor) -> Tensor:
        """The masses of the support [R] int64, by the final temperature; after `find`."""
        self._launch(jit_support.support_sums_kernel, logits, bests, self.limits, self.sums, self.flags, DIVISOR=0)
        return self.sums[:, 0].sum(1)

    def orders(self, logits: Tensor, bests: Tensor) -> Tensor:
        """The order of each token of the support [R, V] int64; NO_CUT for all other tokens; after `find`."""
        orders = torch.empty(logits.shape, dtype=torch.int64, device=logits.device)
        self._launch(jit_support.support_orders_kernel, logits, bests, self.limits, orders, self.flags)
        return orders

    def _launch(self, kernel: Any, logits: Tensor, bests: Tensor, limits: tuple[Tensor, ...], out: Tensor,
                flags: dict[str, bool], **constants: int) -> None:
        kernel[(self._rows, self._sizes["num_blocks"])](
            logits, bests, self._settings, *limits, out, **self._sizes, **flags, **constants, **self._forms,
            **chained(logits.device))
