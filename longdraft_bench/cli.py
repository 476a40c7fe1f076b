"""The commands of `longdraft bench`. Heavy imports wait inside them, so that --help answers quickly.

    longdraft bench kernels --output kernels.json
    longdraft bench roofline --plot roofline.svg
"""

from __future__ import annotations

import typer

from longdraft_bench.cuda import commands as cuda
from longdraft_bench.machine import commands as machine
from longdraft_bench.models import commands as models
from longdraft_bench.paper import commands as paper
from longdraft_bench.peers import commands as peers
from longdraft_bench.reliability import commands as reliability
from longdraft_bench.scale import commands as scale
from longdraft_bench.texts import commands as texts

app = typer.Typer(no_args_is_help=True, help="Measure kernels, decoding and other engines on this machine.")


@app.callback()
def _group() -> None:
    """Measure kernels, decoding and other engines on this machine."""


_PANELS = {
    "This machine": (machine.machine, machine.kernels, machine.roofline, machine.forwards, machine.eagle_cost,
                     machine.block_cost, machine.memory, cuda.cuda, cuda.cuda_tilings),
    "Texts": (texts.real, texts.length, texts.batch, texts.batch_turns, texts.replay, texts.acceptance,
              texts.perplexity, texts.cache_formats, texts.context, texts.samplers, texts.sampler_cost,
              texts.structure, texts.reuse),
    "Other engines": (peers.peers, peers.peers_perplexity),
    "Experiments": (paper.paper, paper.ablation, paper.run, paper.report, paper.extrapolate),
    "Documents of a checkout": (paper.tables, paper.headline, paper.losses),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)
for _name, _app in (("model", models.app), ("scale", scale.app), ("server", reliability.server),
                    ("soak", reliability.soak)):
    app.add_typer(_app, name=_name, rich_help_panel="Groups of commands")
