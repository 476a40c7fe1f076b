"""`longdraft bench scale`: known models, several GPUs and fleets of machines, computed; ranks on cores, measured.

    longdraft bench scale sizes --bandwidth 25 --memory 64
    longdraft bench scale fleet --spot-hours 1
"""

from __future__ import annotations

from typing import Annotated

import typer

from longdraft.errors import check
from longdraft_bench.options import OutputOption

app = typer.Typer(no_args_is_help=True, help="Several GPUs and machines: computed, simulated, or measured on cores.")


@app.command()
def sizes(
    bandwidth: Annotated[float, typer.Option(help="Read bandwidth, GB/s.")] = 25.0,
    memory: Annotated[float, typer.Option(help="Memory, GB.")] = 32.0,
) -> None:
    """Print the memory that known models need, and the floor of their time per token."""
    from longdraft_bench.scale import sizes

    print(sizes.table(bandwidth, memory).markdown())


@app.command()
def step(
    memory: Annotated[float, typer.Option(help="Memory of a GPU, GB.")] = 80,
    bandwidth: Annotated[float, typer.Option(help="Read bandwidth of a GPU, TB/s.")] = 3.35,
    tflops: Annotated[float, typer.Option(help="bfloat16 TFLOP/s of a GPU; half of it is assumed.")] = 989,
    link: Annotated[float, typer.Option(help="GB/s of a link in each direction; the default is NVLink 4.")] = 450,
    latency: Annotated[float, typer.Option(help="Microseconds of a message to all GPUs.")] = 15,
) -> None:
    """Print the time of a step of a model on several GPUs, computed from bytes, operations and links."""
    from longdraft_bench.scale import scaling

    machine = scaling.Machine(memory * 1e9, bandwidth * 1e12, tflops * 1e12, link * 1e9, latency * 1e-6)
    print(scaling.table(machine).markdown())


@app.command()
def fleet(
    model: Annotated[str, typer.Option(help="Name of a known model.")] = "llama-3.1-70b",
    gpus: Annotated[int, typer.Option(help="GPUs of a machine.")] = 8,
    machines: Annotated[int, typer.Option(help="Machines.")] = 16,
    texts: Annotated[int, typer.Option(help="Texts to write.")] = 2000,
    tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 100_000,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 2000,
    accepted: Annotated[float, typer.Option(help="Tokens per forward; 1 is plain decoding.")] = 1.0,
    spot_hours: Annotated[float, typer.Option(help="Mean hours until a machine is lost.")] = 2.0,
    replace: Annotated[float, typer.Option(help="Minutes until a lost machine is replaced.")] = 5.0,
    load: Annotated[float, typer.Option(help="Minutes to load the model.")] = 2.0,
    price: Annotated[float, typer.Option(help="Dollars per machine hour.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of the simulated losses.")] = 1,
    output: OutputOption = None,
) -> None:
    """Simulate a fleet of spot machines that writes long texts, with journals and without."""
    from longdraft_bench.document import document
    from longdraft_bench.models.shapes import SHAPES
    from longdraft_bench.scale import fleet as fleets
    from longdraft_bench.scale.scaling import H100

    check(model in SHAPES, "--model", model, ", ".join(SHAPES))
    given = fleets.Fleet(model, gpus, H100, machines, texts, tokens, prompt, accepted, spot_hours * 3600, replace * 60,
                         load * 60, price)
    about = {"model": model, "gpus": gpus, "machines": machines, "texts": texts, "tokens": tokens, "prompt": prompt,
             "accepted": accepted, "spot_hours": spot_hours, "replace": replace, "load": load, "price": price,
             "seed": seed}
    with document("fleet", output, settings=about) as filled:
        figures = fleets.compare(given, seed)
        filled |= figures
        fleets.table(given, figures).show()


@app.command()
def ranks(
    model: Annotated[str, typer.Argument(help="Bundled name, model folder or hub id.")],
    tokens: Annotated[int, typer.Option(help="Tokens of a text.")] = 40,
    rounds: Annotated[int, typer.Option(help="Rounds of turns.")] = 5,
    output: OutputOption = None,
) -> None:
    """Measure tensor parallelism on this machine's cores. Start it with torchrun."""
    from longdraft_bench.document import document
    from longdraft_bench.scale import tensor_parallel

    figures = tensor_parallel.measure(model, tokens, rounds)
    if figures is not None:
        with document("tensor parallel", output, model=model, tokens=tokens, rounds=rounds) as filled:
            filled |= figures
