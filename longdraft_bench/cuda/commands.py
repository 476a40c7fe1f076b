"""`longdraft bench cuda` and `cuda-tilings`: measurements on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longdraft.errors import UsageError, check
from longdraft_bench.options import settings, within


def cuda(
    output: Annotated[Path, typer.Option(help="Folder of the JSON documents, one for each slice. A document that is "
                                              "there is continued.")],
    slices: Annotated[str, typer.Option(
        help="Slices to measure, in order: first, length, kernels, families, whole; or decide, which stands alone.")
    ] = "first",
    previous: Annotated[Path | None, typer.Option(help="Folder of an earlier visit, which is continued in --output.")
                        ] = None,
    limit: Annotated[float | None, typer.Option(
        help="Seconds for each slice. Default: 330, 330, 360, 480, 540 and 570 for the six slices.")] = None,
    parts: Annotated[str, typer.Option(
        help="Beginnings of the names of parts, separated by commas: measure these alone.")] = "",
    prompt_file: Annotated[Path, typer.Option(help="A text that the stretched models continue.")] =
        Path("examples/chapter.txt"),
    force: Annotated[bool, typer.Option("--force", help="Measure speed although rows of trees differ.")] = False,
    interpret: Annotated[bool, typer.Option(
        "--interpret", help="Test the command: the smallest sizes on the CPU, in Triton's interpreter.")] = False,
) -> None:
    """Use a visit to a CUDA device in full: exactness, texts after long prompts, speed, a text of 100,000 tokens.

    Each part is written as soon as it is measured, and may crash or hang without harm to other parts. Run the command
    again to measure what is missing; after a change of the kernels, all of it.
    """
    import torch

    from longdraft_bench.cuda import visit
    from longdraft_bench.cuda.plan import INTERPRETED, LIMITS_S, ON_DEVICE, SLICES, parts_of

    chosen = settings("--slices", slices)
    for name in chosen:
        check(name in SLICES, "--slices", name, ", ".join(SLICES))
    beginnings = tuple(filter(None, map(str.strip, parts.split(","))))
    names = [part.name for name in chosen for part in parts_of(INTERPRETED if interpret else ON_DEVICE, name)]
    for beginning in beginnings:
        check(any(name.startswith(beginning) for name in names), "--parts", beginning, "; ".join(names))
    within("--limit", 10 if limit is None else limit, 10, 86400, "seconds")
    if not interpret and not torch.cuda.is_available():
        raise UsageError("PyTorch finds no CUDA device; run this on a machine that has one, or test the command "
                         "itself with --interpret")
    if not interpret and not prompt_file.is_file():
        raise UsageError(f"--prompt-file {prompt_file} does not exist; name a text file")
    given = visit.Visit(output, previous, "interpret" if interpret else "device", str(prompt_file), force,
                        beginnings)
    given.run(chosen, {name: LIMITS_S[name] if limit is None else limit for name in chosen})


def cuda_tilings() -> None:
    """Time whole layers with other tilings of products, splits of attention, and warps. Needs a CUDA device; about two
    minutes."""
    import torch

    from longdraft_bench.cuda import tilings

    if not torch.cuda.is_available():
        raise UsageError("PyTorch finds no CUDA device; run this on a machine that has one")
    tilings.measure()
