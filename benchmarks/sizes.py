"""The table of docs/models.md: memory that known models need, and the floor of their time per token.

    python benchmarks/sizes.py --bandwidth 25 --memory 32

`longdraft doctor --model ID` prints the same for any model, with this machine's measured bandwidth and memory.
"""

from __future__ import annotations

import argparse

from longdraft.checkpoint import config_file, sizing
from longdraft.report.table import Table
from longdraft_bench.shapes import SHAPES

CONTEXTS = (4096, 100_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", type=float, default=25.0, help="read bandwidth in GB/s; default: 25")
    parser.add_argument("--memory", type=float, default=32.0, help="memory in GB; default: 32")
    given = parser.parse_args()
    rows = []
    for name, shape in SHAPES.items():
        sizes = sizing.model_sizes(config_file.parse_config(shape))
        fits = sizes.max_context(int(given.memory * 1e9))
        rows.append([
            name, f"{sizes.parameters / 1e9:.2f} B", f"{sizes.weights_bytes / 1e9:.1f} GB",
            f"{1024 * sizes.cache_bytes_per_token / 1e6:.0f} MB", f"{fits:,}" if fits else "-",
            *(f"{sizes.ms_per_token(context, given.bandwidth * 1e9):,.0f}" if context <= sizes.context_limit
              else "-" for context in CONTEXTS)])
    columns = ["model", "parameters", "weights", "cache for 1,024 tokens", f"context in {given.memory:g} GB",
               *(f"ms at {context:,}" for context in CONTEXTS)]
    print(Table("Known models", columns, rows).markdown())


if __name__ == "__main__":
    main()
