"""The command line. Heavy imports are inside the commands, so that `longdraft --help` is fast."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated

import typer

from longdraft.cli import batch, book, chat, doctor, generate, journal, serve
from longdraft.train.cli import app as train
from longdraft.version import __version__

app = typer.Typer(name="longdraft", no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False,
                  help="Write ultra-long texts by speculative decoding, with exactly the text of plain decoding.")
app.command("generate")(generate.generate)
app.command("resume")(journal.resume)
app.command("inspect")(journal.inspect)
app.command("batch", cls=batch.Command)(batch.batch)
app.command("book")(book.book)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("models")(doctor.models)
app.command("doctor")(doctor.doctor)
app.add_typer(train, name="train", help="Train drafters for a model.")
for command in entry_points(group="longdraft.commands"):  # `bench` is one: the product imports nothing of it
    app.add_typer(command.load(), name=command.name)


def _version(asked: bool) -> None:
    if asked:
        print(f"longdraft {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                                help="Show the version and exit.")] = False) -> None:
    """Options before the command."""
