"""The command `longdraft bench cuda`. Heavy imports wait inside it.

    longdraft bench cuda --output cuda.json
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from longdraft.errors import UsageError, check


def cuda(
    output: Annotated[Path, typer.Option(help="The JSON document; one that is there is completed.")],
    limit: Annotated[float, typer.Option(help="Seconds that all may take.")] = 460,
    interpret: Annotated[bool, typer.Option(
        "--interpret", help="The smallest sizes on the CPU, in Triton's interpreter: a test of the command.")] = False,
) -> None:
    """Measure what a CUDA device reaches: kernels, equality, steps beside the memory's floor, a peer, a whole run.

    Every part is written as soon as it is done; run again, and what is missing is done.
    """
    import torch

    check(10 <= limit <= 86400, "--limit", limit, "10 to 86400 seconds")
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    elif not torch.cuda.is_available():
        raise UsageError("PyTorch sees no CUDA device; run this on a machine that has one, or give --interpret, which "
                         "tests the command itself")
    from longdraft.bench.cuda import INTERPRETED, ON_DEVICE, Report, run

    plan = INTERPRETED if interpret else ON_DEVICE
    run(plan, Report.open(output, plan, limit))
