"""Long reliability tests: kill -9 at random moments, hundreds of thousands of damaged inputs, 100,000 tokens.

    python benchmarks/soak.py kills --count 100                  # processes that share one loaded model
    python benchmarks/soak.py kills --count 20 --command-line    # `longdraft generate` and `resume` themselves
    python benchmarks/soak.py fuzz --count 200000
    python benchmarks/soak.py long --tokens 100000
    python benchmarks/soak.py server --seconds 3600              # honest and hostile clients of one server

Each ends with one JSON line, and with exit status 1 after any failure. Figures: docs/reliability.md.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

import longdraft
from longdraft import kernels
from longdraft.engine.run_statistics import sha256_tokens
from longdraft.journal import FILE, read_journal

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
DRAFTERS = ("plain", "suffix", "tokenswift", "auto")
PROMPT = "It was the best of times"


def params(tokens: int, seed: int) -> longdraft.SamplingParams:
    return longdraft.SamplingParams(max_new_tokens=tokens, seed=seed, min_p=0.1, repetition_penalty=1.2, on_loop="off")


def end(figures: dict[str, Any], is_good: bool) -> None:
    print(json.dumps(figures))
    raise typer.Exit(0 if is_good else 1)


class Killer:
    """Processes that write texts and are killed. They are forked after the models are loaded."""

    def __init__(self, tokens: int, rng: random.Random) -> None:
        kernels.set_threads(1)  # threads do not survive a fork
        self._engines = {name: longdraft.load("novelist", drafter=name) for name in DRAFTERS}
        self._tokens, self._chance = tokens, rng
        self._shown = mmap.mmap(-1, 8)  # shared with the child: the number of tokens it has shown

    def uncut(self, seed: int) -> tuple[str, float]:
        """The hash of the text, and the seconds to write it."""
        began = time.monotonic()
        *_, last = self._engines["suffix"].generate(PROMPT, params(self._tokens, seed))
        return last.stats["sha256_tokens"], time.monotonic() - began

    def start(self, journal: Path, seed: int) -> int:
        """Start a child that begins or resumes the text. Returns its process id."""
        self._shown[:] = bytes(8)
        engine = self._engines[self._chance.choice(DRAFTERS)]
        if child := os.fork():
            return child
        try:
            is_new = not (journal / FILE).exists()
            generation = (engine.generate(PROMPT, params(self._tokens, seed), journal=journal) if is_new
                          else engine.resume(journal))
            shown = 0
            for event in generation:
                shown += len(event.tokens)
                self._shown[:] = shown.to_bytes(8, "little")
            os._exit(0)
        finally:
            os._exit(99)

    def is_lost(self, journal: Path) -> bool:
        """Whether the child had shown more tokens than the journal holds."""
        shown = int.from_bytes(self._shown[:], "little")
        return shown > (len(read_journal(journal).tokens) if (journal / FILE).exists() else 0)


class CommandLine(Killer):
    """The same with `longdraft generate` and `resume`, so that loading can be killed too."""

    def start(self, journal: Path, seed: int) -> int:
        self._shown[:] = bytes(8)
        settings = params(self._tokens, seed)
        drafting = ["--drafter", self._chance.choice(DRAFTERS), "--threads", "1", "--output", os.devnull]
        arguments = ["resume", str(journal)] if (journal / FILE).exists() else [
            "generate", PROMPT, "--max-new-tokens", str(self._tokens), "--seed", str(seed), "--min-p",
            str(settings.min_p), "--repetition-penalty", str(settings.repetition_penalty), "--on-loop", "off",
            "--journal", str(journal)]
        return subprocess.Popen([sys.executable, "-m", "longdraft", *arguments, *drafting],
                                stderr=subprocess.DEVNULL).pid


@app.command()
def kills(count: Annotated[int, typer.Option(help="Processes to kill.")] = 100,
          tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 1500,
          seed: int = 1,
          command_line: Annotated[bool, typer.Option("--command-line")] = False) -> None:
    """Kill -9 at random moments of generations and repeated resumes; each text must equal the uncut one."""
    rng = random.Random(seed)
    killer = (CommandLine if command_line else Killer)(tokens, rng)
    done = texts = equal = lost = failed = finished = 0
    most = 0
    while done < count:
        texts += 1
        expected, seconds = killer.uncut(texts)
        if command_line:
            seconds += 4
        with tempfile.TemporaryDirectory() as folder:
            journal, here = Path(folder) / "journal", 0
            while True:
                child = killer.start(journal, texts)
                is_last = done >= count
                status = wait(child, None if is_last else rng.uniform(0, 0.7 * seconds))
                lost += killer.is_lost(journal)
                if status is None:
                    done, here = done + 1, here + 1
                    continue
                failed += status != 0
                break
            found = read_journal(journal)
            finished += found.finish == "length"
            equal += sha256_tokens(found.tokens) == expected
            most = max(most, here)
    figures = {"kills": done, "texts": texts, "equal": equal, "finished": finished, "most_kills_of_a_text": most,
               "tokens_shown_but_not_in_the_journal": lost, "failed": failed, "tokens": tokens,
               "command_line": command_line}
    end(figures, equal == texts == finished and not lost and not failed)


def wait(child: int, seconds: float | None) -> int | None:
    """The exit status of a child, or None if it was killed after `seconds` seconds."""
    deadline = time.monotonic() + (3600 if seconds is None else seconds)
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@app.command()
def fuzz(count: Annotated[int, typer.Option(help="Inputs.")] = 200_000,
         first: Annotated[int, typer.Option(help="Number of the first input; each depends on its number only.")] = 0,
         chunk: Annotated[int, typer.Option(help="Inputs per process.")] = 2000,
         kinds: Annotated[str, typer.Option(help="Kinds of inputs, separated by spaces; default: all.")] = "") -> None:
    """Damaged and hostile inputs of every type: each succeeds or raises a LongdraftError, in little time and memory."""
    import fuzzing

    if unknown := set(kinds.split()) - set(fuzzing.KINDS):
        raise typer.BadParameter(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(fuzzing.KINDS)}")
    figures, failures = fuzzing.run(first, count, chunk, kinds.split())
    for failure in failures:
        print(failure, file=sys.stderr)
    end(figures, not failures)


@app.command("server")
def server_run(seconds: Annotated[float, typer.Option(help="Length of the run.")] = 3600, seed: int = 1,
               output: Annotated[Path | None, typer.Option(help="Figures as JSON.")] = None) -> None:
    """Honest and hostile clients of one server: equal texts, flat memory, no open file left, /health in time."""
    import soak_server

    figures, failures = soak_server.run(seconds, seed)
    for failure in failures[:100]:
        print(failure, file=sys.stderr)
    if output:
        output.write_text(json.dumps(figures, indent=2) + "\n")
    end(figures, not failures)


@app.command("long")
def long_run(tokens: Annotated[int, typer.Option(help="Tokens of the text.")] = 100_000,
             drafter: str = "auto", every: Annotated[int, typer.Option(help="Tokens between two samples.")] = 2000,
             threads: int | None = None, output: Annotated[Path | None, typer.Option(help="Figures as JSON.")] = None,
             ) -> None:
    """One journalled text of the bundled model: resident memory beside the caches, time per step beside a line."""
    engine = longdraft.load("novelist", drafter=drafter, threads=threads)
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        generation = engine.generate(PROMPT, params(tokens, 7), journal=Path(folder) / "journal")
        times, began = [], time.perf_counter()
        for event in generation:
            now = time.perf_counter()
            times.append(now - began)
            length = len(generation.tokens)
            if length >= every * (len(rows) + 1) or event.finish_reason:
                rows.append({"tokens": length, "resident_bytes": resident_bytes(), "steps": len(times),
                             "seconds_per_step": statistics.median(times), "cache_bytes": generation.cache_bytes,
                             "drafter_bytes": generation.drafter_bytes})
                times = []
            began = time.perf_counter()
    figures = {"tokens": tokens, "drafter": drafter, **growth(rows),
               "finish_reason": event.finish_reason, "sha256_tokens": event.stats["sha256_tokens"],
               "tokens_per_second": event.stats["tokens_per_second"]}
    if output:
        output.write_text(json.dumps(figures | {"rows": rows}, indent=2) + "\n")
    end(figures, figures["bytes_per_token_beyond_the_caches"] < 200)


def growth(rows: list[dict[str, float]]) -> dict[str, float]:
    """Bytes per token of the second half, and the distance of median step times from a line over the length."""
    import numpy as np

    half = rows[len(rows) // 2 :]
    tokens = half[-1]["tokens"] - half[0]["tokens"]
    resident = half[-1]["resident_bytes"] - half[0]["resident_bytes"]
    caches = sum(half[-1][name] - half[0][name] for name in ("cache_bytes", "drafter_bytes"))
    x, seconds = np.array([row["tokens"] for row in rows[1:]]), np.array([row["seconds_per_step"] for row in rows[1:]])
    each, at_zero = np.polyfit(x, seconds, 1, w=1 / seconds)  # minimises relative errors
    apart = np.abs(seconds - (at_zero + each * x)) / (at_zero + each * x)
    return {"resident_bytes_per_token": resident / tokens,
            "bytes_per_token_beyond_the_caches": (resident - caches) / tokens,
            "microseconds_per_step": float(1e6 * at_zero), "and_for_each_1000_tokens": float(1e9 * each),
            "mean_distance_from_the_line": float(apart.mean()), "largest_distance": float(apart.max())}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    app()
