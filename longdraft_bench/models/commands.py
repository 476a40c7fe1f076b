"""`longdraft bench model`: write models to measure with, without a download.

    longdraft bench model random --like smollm2-1.7b --layers 4 OUT
    longdraft bench model stretched --like qwen2.5-1.5b OUT
    longdraft bench model gguf OUT --types "Q8_0 Q4_0" --python peers/bin/python
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longdraft.errors import UsageError, check
from longdraft_bench.options import PythonOption, settings, within

app = typer.Typer(no_args_is_help=True, help="Write models to measure with, without a download.")
_NewFolder = Annotated[Path, typer.Argument(help="A new folder.")]
_Like = Annotated[str, typer.Option(help="The known model whose shape is used.")]


@app.command("random")
def random_model(
    folder: _NewFolder, like: _Like,
    layers: Annotated[int | None, typer.Option(help="Number of layers; default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
) -> None:
    """Write a model of random weights: the costs of the large shape, but no meaningful predictions."""
    from longdraft_bench.models.random_model import write_random_model
    from longdraft_bench.models.shapes import SHAPES

    check(like in SHAPES, "--like", like, ", ".join(SHAPES))
    within("--layers", layers or 1, 1, SHAPES[like]["num_hidden_layers"])
    check(not folder.exists(), "the folder", str(folder), "a new one")
    shape = SHAPES[like]
    write_random_model(shape | {"num_hidden_layers": layers or shape["num_hidden_layers"]}, folder, seed)


@app.command()
def stretched(
    folder: _NewFolder, like: _Like,
    source: Annotated[str, typer.Option(help="The small model: a Llama or a hybrid.")] = "novelist-gqa",
) -> None:
    """Write a model with the costs of a large shape and the predictions of a small model."""
    from longdraft.checkpoint import hub
    from longdraft_bench.models.shapes import HYBRID_SHAPES, SHAPES
    from longdraft_bench.models.stretched_model import stretch

    shapes = SHAPES | HYBRID_SHAPES
    check(like in shapes, "--like", like, ", ".join(shapes))
    check(not folder.exists(), "the folder", str(folder), "a new one")
    try:
        stretch(hub.resolve(source), shapes[like], folder)
    except ValueError as error:
        raise UsageError(str(error)) from error


@app.command()
def gguf(
    folder: Annotated[Path, typer.Argument(help="Folder of a Llama; the files are written beside it.")],
    types: Annotated[str, typer.Option(help="Types of llama.cpp, separated by spaces.")] = "Q8_0 Q4_0 Q4_K_M",
    python: PythonOption = None,
    threads: Annotated[int, typer.Option(help="Threads of llama.cpp.")] = 2,
) -> None:
    """Write a Llama's folder as GGUF files, by llama.cpp's own rules. Needs llama-cpp-python, gguf and safetensors."""
    from longdraft_bench.peers import process

    chosen = settings("--types", types)
    for name in chosen:
        check(name in process.GGUF_TYPES, "--types", name, ", ".join(process.GGUF_TYPES))
    check((folder / "config.json").is_file(), "the folder", str(folder), "one with a config.json")
    process.write_gguf_files(folder.resolve(), chosen, process.interpreter(python), threads)
