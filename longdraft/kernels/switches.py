"""Parts of the CUDA path that can be turned off without an edit, where one fails on a device.

LONGDRAFT_CUDA_OFF has their names, separated by spaces or commas, or `all`. Each has a slower twin with the same bits.
"""

from __future__ import annotations

import os

from longdraft.errors import UsageError

VARIABLE = "LONGDRAFT_CUDA_OFF"
SWITCHES = {
    "FUSES_GATE": "the product of gate and up, and the activation after it, are one launch",
    "DECIDES_SUMS": "the device decides top-k, top-p and eta",
    "DRAFTS_LAYERS": "trained layers, heads and small draft models draft in graphs",
    "SHARES_FORWARDS": "several texts run in one forward",
    "SHARES_CHOICES": "the tokens of several texts are chosen in one graph",
    "SHARES_CHAINS": "chains of drafts, and heads, of several texts run in one graph",
    "GROUPS_INT4": "experts of 4 bits are multiplied together, without a wait of the host",
    "FITS_REMAINDERS": "the upkeep of a partial cache is a graph of five launches",
    "WRITES_AHEAD": "plain decoding computes several tokens before the host reads them",
}


def is_on(name: str) -> bool:
    """Whether a part is on. UsageError if the variable has an unknown name."""
    off = os.environ.get(VARIABLE, "").replace(",", " ").split()
    if unknown := [each for each in off if each != "all" and each not in SWITCHES]:
        raise UsageError(f"{VARIABLE} has {' '.join(unknown)!r}; allowed: all, {', '.join(SWITCHES)}")
    return name not in off and "all" not in off
