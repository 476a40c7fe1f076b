"""kill -9 at random moments of generations and repeated resumes; `longdraft bench soak kills`.

    longdraft bench soak kills --count 100                  # processes that share one loaded model
    longdraft bench soak kills --count 20 --command-line    # `longdraft generate` and `resume` themselves

Each text must equal the uncut one. Figures: docs/reliability.md.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from longdraft import kernels
from longdraft.engine.loading import load
from longdraft.engine.run_statistics import sha256_tokens
from longdraft.journal.format import FILE, read_journal
from longdraft.report.turns import Record
from longdraft.request.sampling_params import SamplingParams

DRAFTERS = ("plain", "suffix", "tokenswift", "auto")
PROMPT = "It was the best of times"
_LOADING_S = 4  # of a command, beyond the seconds of its text
_PATIENCE_S = 3600  # for a process that is not killed


def params(tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, min_p=0.1, repetition_penalty=1.2, on_loop="off")


def run(count: int, tokens: int, seed: int, *, command_line: bool) -> Record:
    """The figures of `count` kills of texts of `tokens` tokens."""
    rng = random.Random(seed)
    killer = (CommandLine if command_line else Killer)(tokens, rng)
    kills = texts = equal = lost = failed = finished = most = 0
    while kills < count:
        texts += 1
        expected, seconds = killer.uncut(texts)
        if command_line:
            seconds += _LOADING_S
        with tempfile.TemporaryDirectory() as folder:
            journal = Path(folder) / "journal"
            kills_of_text = 0
            while True:
                child = killer.start(journal, texts)
                status = wait(child, None if kills >= count else rng.uniform(0, 0.7 * seconds))
                lost += killer.is_lost(journal)
                if status is not None:
                    failed += status != 0
                    break
                kills += 1
                kills_of_text += 1
            content = read_journal(journal)
            finished += content.finish == "length"
            equal += sha256_tokens(content.tokens) == expected
            most = max(most, kills_of_text)
    return {"kills": kills, "texts": texts, "equal": equal, "finished": finished, "most_kills_of_a_text": most,
            "tokens_shown_but_not_in_the_journal": lost, "failed": failed, "tokens": tokens,
            "command_line": command_line}


def is_good(figures: Record) -> bool:
    return bool(figures["equal"] == figures["texts"] == figures["finished"]
                and not figures["tokens_shown_but_not_in_the_journal"] and not figures["failed"])


class Killer:
    """Processes that write texts and are killed. They are forked after the models are loaded."""

    def __init__(self, tokens: int, rng: random.Random) -> None:
        kernels.set_threads(1)  # threads do not survive a fork
        self._engines = {name: load("novelist", drafter=name) for name in DRAFTERS}
        self._tokens = tokens
        self._chance = rng
        self._shown = mmap.mmap(-1, 8)  # shared with the child: the number of tokens it has shown

    def uncut(self, seed: int) -> tuple[str, float]:
        """The hash of the text, and the seconds to write it."""
        began = time.monotonic()
        *_, last = self._engines["suffix"].generate(PROMPT, params(self._tokens, seed))
        assert last.stats is not None
        return str(last.stats["sha256_tokens"]), time.monotonic() - began

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


def wait(child: int, seconds: float | None) -> int | None:
    """The exit status of a child, or None if it was killed after `seconds` seconds."""
    deadline = time.monotonic() + (_PATIENCE_S if seconds is None else seconds)
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
