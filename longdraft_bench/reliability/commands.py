"""`longdraft bench soak` and `longdraft bench server`: long tests of reliability, and a server under load and attack.

    longdraft bench soak kills --count 100
    longdraft bench server load --clients 128 --seconds 180

Each command of `soak` ends with exit status 1 after any failure. They need longdraft[bench]; `soak fuzz`
needs a checkout with longdraft[dev].
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longdraft.errors import check
from longdraft_bench.options import OutputOption, ThreadsOption

if TYPE_CHECKING:
    from longdraft.report.turns import Record

soak = typer.Typer(no_args_is_help=True, help="Kills, damaged inputs, long texts, an hour of hostile clients.")
server = typer.Typer(no_args_is_help=True, help="A server under load, with faulty clients, and under attack.")


@soak.callback()
@server.callback()
def _group() -> None:
    """... whose packages are checked here."""
    from longdraft.report import require_packages

    require_packages("this command", ("httpx", "psutil"))


_Seed = Annotated[int, typer.Option(help="Of the random choices.")]


def _finish(name: str, figures: Record, failures: Sequence[str], output: Path | None) -> None:
    """Write the figures, print the first failures, and end with exit status 1 if there are any."""
    from longdraft_bench.document import document

    for failure in failures[:100]:
        print(failure, file=sys.stderr)
    with document(name, output, **figures):
        pass
    raise typer.Exit(1 if failures else 0)


@soak.command()
def kills(count: Annotated[int, typer.Option(help="Processes to kill.")] = 100,
          tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 1500,
          seed: _Seed = 1,
          command_line: Annotated[bool, typer.Option(
              "--command-line", help="Kill `longdraft generate` and `resume`, which load the model too.")] = False,
          output: OutputOption = None) -> None:
    """Kill -9 at random moments of generations and repeated resumes; each text must equal the uncut one."""
    from longdraft_bench.reliability import kills

    figures = kills.run(count, tokens, seed, command_line=command_line)
    _finish("soak kills", figures, [] if kills.is_good(figures) else ["a text differs or was lost"], output)


@soak.command()
def fuzz(count: Annotated[int, typer.Option(help="Inputs.")] = 200_000,
         first: Annotated[int, typer.Option(help="Number of the first input; each depends on its number only.")] = 0,
         chunk: Annotated[int, typer.Option(help="Inputs per process.")] = 2000,
         kinds: Annotated[str, typer.Option(help="Kinds of inputs, separated by spaces; default: all.")] = "",
         output: OutputOption = None) -> None:
    """Damaged and hostile inputs of every type: each succeeds or raises a LongdraftError, in little time and memory."""
    from longdraft_bench.reliability import fuzzing
    from longdraft_bench.reliability.fuzzing_inputs import KINDS

    for kind in kinds.split():
        check(kind in KINDS, "--kinds", kind, ", ".join(KINDS))
    figures, failures = fuzzing.run(first, count, chunk, kinds.split())
    _finish("soak fuzz", figures, failures, output)


@soak.command("server")
def soak_server(seconds: Annotated[float, typer.Option(help="Length of the run.")] = 3600, seed: _Seed = 1,
                output: OutputOption = None) -> None:
    """Honest and hostile clients of one server: equal texts, flat memory, no open file left, /health in time."""
    from longdraft_bench.reliability import soak_server

    figures, failures = soak_server.run(seconds, seed)
    _finish("soak server", figures, failures, output)


@soak.command("long")
def long_text(tokens: Annotated[int, typer.Option(help="Tokens of the text.")] = 100_000,
              drafter: Annotated[str, typer.Option(help="The drafter.")] = "auto",
              every: Annotated[int, typer.Option(help="Tokens between two samples.")] = 2000,
              threads: ThreadsOption = None, output: OutputOption = None) -> None:
    """One journalled text of the bundled model: resident memory beside the caches, time per step beside a line."""
    from longdraft_bench.reliability import long_text

    figures = long_text.run(tokens, drafter, every, threads)
    grows = figures["bytes_per_token_beyond_the_caches"] >= long_text.MOST_BYTES_PER_TOKEN
    _finish("soak long", figures, ["memory grows beyond the caches"] if grows else [], output)


def _measure(name: str, measure: Callable[[], Record], output: Path | None) -> None:
    """Measure, print a table, and write the figures."""
    from longdraft.report.table import Table
    from longdraft_bench.document import document

    with document(f"serving {name}", output) as filled:
        figures = measure()
        filled |= figures
        Table(f"serving {name}", ["", "value"], [[key, str(value)] for key, value in figures.items()]).show()


@server.command()
def load(clients: Annotated[int, typer.Option(help="Clients.")] = 128,
         seconds: Annotated[int, typer.Option(help="Length of the run.")] = 180,
         tokens: Annotated[int, typer.Option(help="Tokens of a text, at most.")] = 200,
         output: OutputOption = None) -> None:
    """Many clients for minutes, a third of which disconnect: equal texts, refusals, memory."""
    from longdraft_bench.reliability import serving

    _measure("load", lambda: serving.under_load(clients, seconds, tokens), output)


@server.command()
def latency(tokens: Annotated[int, typer.Option(help="Tokens of the text.")] = 1000,
            repeats: Annotated[int, typer.Option(help="Rounds.")] = 5, output: OutputOption = None) -> None:
    """Time to the first token, and tokens per second beside the command line, in turns."""
    from longdraft_bench.reliability import serving

    _measure("latency", lambda: serving.latency(tokens, repeats), output)


@server.command()
def malformed(count: Annotated[int, typer.Option(help="Requests.")] = 10_000, seed: _Seed = 1,
              output: OutputOption = None) -> None:
    """Damaged bodies: no answer may have a status of 500 or more."""
    from longdraft_bench.reliability import serving

    _measure("malformed", lambda: serving.malformed(count, seed), output)


@server.command()
def recovery(kills: Annotated[int, typer.Option(help="Kills of the server.")] = 5,
             tokens: Annotated[int, typer.Option(help="Tokens of the text.")] = 3000, seed: _Seed = 1,
             output: OutputOption = None) -> None:
    """Kill the server at random moments, restart it, and resume the text."""
    from longdraft_bench.reliability import serving

    _measure("recovery", lambda: serving.recovery(kills, tokens, seed), output)


@server.command()
def slow(readers: Annotated[int, typer.Option(help="Slow readers.")] = 64,
         tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 1000,
         seconds: Annotated[int, typer.Option(help="Seconds for which they read slowly.")] = 60,
         output: OutputOption = None) -> None:
    """Readers that take a few bytes per second: what they cost the server and a fast client."""
    from longdraft_bench.reliability import serving

    _measure("slow", lambda: serving.slow_readers(readers, tokens, seconds), output)


@server.command("attacks")
def attack(names: Annotated[list[str] | None, typer.Argument(
               help="stops, prompts, idle, items, grammars, phrases, letters, chunks, exports; default: all.")] = None,
           seconds: Annotated[float, typer.Option(help="Length of each attack.")] = 10,
           output: OutputOption = None) -> None:
    """Attack a server, and measure what is left for other clients."""
    from longdraft_bench.document import document
    from longdraft_bench.reliability import attacks

    for name in names or ():
        check(name in attacks.ATTACKS, "attack", name, ", ".join(attacks.ATTACKS))
    with document("attacks", output) as filled:
        filled |= attacks.measure_all(names or list(attacks.ATTACKS), seconds)
        attacks.table(filled).show()
