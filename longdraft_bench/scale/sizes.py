"""Memory that known models need, and the floor of their time per token: the table of docs/models.md.

    longdraft bench scale sizes --bandwidth 25 --memory 32

`longdraft doctor --model ID` prints the same for any model, with this machine's measured bandwidth and memory.
"""

from __future__ import annotations

from longdraft.checkpoint import config_file, sizing
from longdraft.report.table import Table
from longdraft_bench.models.shapes import SHAPES

_CONTEXTS = (4096, 100_000)


def table(bandwidth_gb_per_s: float, memory_gb: float) -> Table:
    rows = []
    for name, shape in SHAPES.items():
        sizes = sizing.model_sizes(config_file.parse_config(shape))
        fits = sizes.max_context(int(memory_gb * 1e9))
        rows.append([
            name, f"{sizes.parameters / 1e9:.2f} B", f"{sizes.weights_bytes / 1e9:.1f} GB",
            f"{1024 * sizes.cache_bytes_per_token / 1e6:.0f} MB", f"{fits:,}" if fits else "-",
            *(f"{sizes.ms_per_token(context, bandwidth_gb_per_s * 1e9):,.0f}" if context <= sizes.context_limit
              else "-" for context in _CONTEXTS)])
    columns = ["model", "parameters", "weights", "cache for 1,024 tokens", f"context in {memory_gb:g} GB",
               *(f"ms at {context:,}" for context in _CONTEXTS)]
    return Table("Known models", columns, rows)
