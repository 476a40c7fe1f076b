"""Rows of texts on the device, whose logits are edited and filtered by the settings of each text.

The settings are in a table of entries (`jit_choice`), so the launches belong to numbers of rows and texts. What only
some texts need (`TextNeeds`) is launched for all rows, and leaves those of other texts as they are. A text by itself is
the smallest case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels.cuda import jit_choice, jit_support
from longdraft.kernels.cuda.device_text import ChoiceRules, DeviceText
from longdraft.kernels.cuda.launch import ceil_div, chained, padded_size
from longdraft.kernels.cuda.support import BLOCK, FilterKinds, FilterRules, SupportSearch

ENTRY = jit_choice.ENTRY.value
MAX_FRESH = 16  # tokens of a text that are uploaded with its entry; more of them (a prompt) are copied by themselves
_MAX_WINDOW = 16384  # tokens of a penalty's window, which are held for each row
_MIN_P = FilterKinds(min_p=True)


def can_share(rules: ChoiceRules) -> bool:
    """Whether tokens are chosen and guessed by these rules together with those of other texts."""
    return rules.penalty == 1 or rules.window <= _MAX_WINDOW


def entry_of(text: DeviceText, required: int, length: int, num_fresh: int) -> NDArray[np.int64]:
    """The entry of a text without what differs between trees and chains, 4 to 6 and 18; see `jit_choice`.

    required   tokens that must still be written before the text may end
    length     tokens of the text, of which the last `num_fresh` are uploaded with the entry
    """
    rules = text.rules
    is_greedy = rules.temperature == 0
    filters = FilterRules(1.0) if is_greedy else rules.filters
    window = 0 if rules.penalty == 1 else min(rules.window, len(text.tokens))
    entry = empty_entry()
    entry[:4] = text.tokens.data_ptr(), length, text.seed, required
    entry[[7, 9, 10, 11, 12]] = window, text.banned.data_ptr(), len(rules.banned), num_fresh, is_greedy
    entry.view(np.float64)[[8, 13]] = rules.penalty, 1.0 if is_greedy else rules.temperature
    entry.view(np.float64)[14:18] = filters.settings
    entry[19:21] = filters.goals
    entry[21:24] = text.biased.data_ptr(), text.bias_values.data_ptr(), len(rules.bias)
    return entry


def empty_entry() -> NDArray[np.int64]:
    """The entry of a padding text, which has no tokens and no filters."""
    entry = np.zeros(ENTRY, dtype=np.int64)
    entry.view(np.float64)[13:18] = 1.0, *FilterRules(1.0).settings
    entry[19:21] = FilterRules(1.0).goals
    return entry


def longest_window(texts: Sequence[DeviceText]) -> int:
    """Tokens with which the penalties' windows of these texts are laid out; 0: none has a penalty."""
    windows = [min(text.rules.window, len(text.tokens)) for text in texts if text.rules.penalty != 1]
    return padded_size(max(windows), BLOCK) if windows else 0


class TextNeeds(NamedTuple):
    """What only some texts need. Launches depend on it, so it belongs to the keys of graphs.

    bans       the size of a block with the banned tokens of each text; 0: all texts may end
    biased     blocks with the tokens that `logit_bias` of each text names; 0: none has it
    has_noise  whether a text has a temperature above 0
    filters    that one text or another has; min-p is always among them
    """

    bans: int
    biased: int
    has_noise: bool
    filters: FilterKinds

    @property
    def searches(self) -> bool:
        """Whether a support is searched for. Min-p by itself needs no search."""
        return self.filters != _MIN_P

    @classmethod
    def of(cls, texts: Sequence[tuple[DeviceText, int]]) -> TextNeeds:
        """For texts, and tokens that must be written before each may end."""
        banned = max((len(text.rules.banned) for text, required in texts if required > 0), default=0)
        biased = max(len(text.rules.bias) for text, _ in texts)
        kinds = [text.rules.filters.kinds for text, _ in texts if text.rules.temperature > 0]
        filters = FilterKinds(*map(any, zip(_MIN_P, *kinds, strict=True)))
        return cls(padded_size(banned) if banned else 0, ceil_div(biased, BLOCK), bool(kinds), filters)


class TextRows(NamedTuple):
    """Rows of texts on the device.

    tokens   [R] of the trees; path: [R, most rows of a tree]; depths and texts: [R]; all int32
    entries  int64 [T * ENTRY]; see `jit_choice`
    found, values  int32 and float32 [R, longest window], which are overwritten
    """

    tokens: Tensor
    path: Tensor
    depths: Tensor
    texts: Tensor
    entries: Tensor
    found: Tensor
    values: Tensor

    def edit(self, logits: Tensor, needs: TextNeeds) -> None:
        """Apply `logit_bias`, penalties and bans to logits [R, V] in place."""
        (rows, vocabulary), window, device = logits.shape, self.found.shape[1], logits.device
        of_texts = self.entries, self.texts
        if needs.biased:
            jit_choice.add_bias_kernel[(rows, needs.biased)](logits, *of_texts, vocabulary, BLOCK=BLOCK,
                                                             **chained(device))
        if window:
            grid = (rows, window // BLOCK)
            jit_choice.read_window_kernel[grid](
                logits, self.tokens, self.path, self.depths, *of_texts, self.found, self.values, window,
                self.path.shape[1], vocabulary, BLOCK=BLOCK, **chained(device))
            jit_choice.penalise_kernel[grid](
                logits, self.entries, self.entries.view(torch.float64), self.texts, self.found, self.values, window,
                vocabulary, BLOCK=BLOCK, **chained(device))
        if needs.bans:
            jit_choice.ban_kernel[(rows,)](logits, self.depths, *of_texts, vocabulary, BLOCK=needs.bans,
                                           **chained(device))


class TextSupport:
    """What the filters leave of rows, and the memory in which it is found.

    rows        see `TextRows`
    vocabulary  number of logits
    """

    def __init__(self, rows: TextRows, vocabulary: int) -> None:
        num, device = len(rows.texts), rows.texts.device
        self._rows, self._vocabulary = rows, vocabulary
        self._settings = torch.zeros(num, jit_support.SETTINGS.value, dtype=torch.float64, device=device)
        most, fewest = (torch.zeros(num, dtype=torch.int64, device=device) for _ in range(2))
        self._goals = most, fewest
        self._searches: dict[FilterKinds, SupportSearch] = {}

    def find(self, logits: Tensor, bests: Tensor, needs: TextNeeds) -> tuple[tuple[Tensor, ...], dict[str, bool]]:
        """Launch what finds the support of edited logits [R, V]. Returns the limits and switches of `jit_support`.

        bests  [R, blocks]: the largest logit of each block

        Texts whose filters are searched for need `read_filters` before.
        """
        if not needs.searches:
            entries = self._rows.entries
            return (entries, entries, entries), needs.filters.flags  # which the kernels do not read
        search = self.search(needs)
        search.find(logits, bests)
        return search.limits, search.flags

    def search(self, needs: TextNeeds) -> SupportSearch:
        """The search for filters of these kinds."""
        if (kinds := needs.filters) not in self._searches:
            self._searches[kinds] = SupportSearch(kinds, self._vocabulary, self._settings, self._goals)
        return self._searches[kinds]

    def read_filters(self) -> None:
        """Launch what copies the settings of all filters from the entries, for searches."""
        entries = self._rows.entries
        jit_choice.read_filters_kernel[(len(self._rows.texts),)](
            entries, entries.view(torch.float64), self._rows.texts, self._settings, *self._goals, num_warps=1,
            **chained(entries.device))


def append_tokens(entries: Tensor, fresh: Tensor) -> None:
    """Write the tokens of fresh int32 [T * MAX_FRESH] to the ends of the texts of entries [T * ENTRY]."""
    jit_choice.append_tokens_kernel[(len(fresh) // MAX_FRESH,)](entries, fresh, BLOCK=MAX_FRESH, num_warps=1,
                                                                **chained(fresh.device))
