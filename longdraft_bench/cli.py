"""The commands of `longdraft bench`. Heavy imports wait inside them, so that --help answers quickly.

    longdraft bench kernels --output kernels.json
    longdraft bench roofline --plot roofline.svg
"""

from __future__ import annotations

import typer

from longdraft_bench.paper import commands as experiments_cli
from longdraft_bench.machine import commands as machine_cli
from longdraft_bench.texts import commands as texts_cli

app = typer.Typer(no_args_is_help=True, help="Measure kernels, decoding and other engines on this machine.")


@app.callback()
def _group() -> None:
    """Measure kernels, decoding and other engines on this machine."""


for _command in (machine_cli.machine, machine_cli.kernels, machine_cli.roofline, texts_cli.peers, texts_cli.replay,
                 texts_cli.length, texts_cli.batch, machine_cli.perplexity, machine_cli.context,
                 experiments_cli.paper, experiments_cli.ablation, experiments_cli.run, experiments_cli.report,
                 machine_cli.cuda):
    app.command()(_command)
