"""Drafters that need no model, measured on a text that is written already: how much would they have guessed?

    longdraft generate "It was" --max-new-tokens 20000 --tokens-out novel.npy
    longdraft bench replay novel.npy --penalty-window 1024 --output replay.json
    longdraft bench replay journal/                        # prompt and penalty are the journal's

Where sampling is keyed the text is what it is, whoever drafts: replaying it gives exactly the steps, guesses and
acceptance of a real run, and the host's time without the model's.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longdraft import drafters, journal
from longdraft.bench.experiment import System
from longdraft.core import Context, SamplingParams
from longdraft.drafters.corpus import Corpora
from longdraft.drafters.ngram import NgramDrafter
from longdraft.drafters.suffix import SuffixDrafter
from longdraft.errors import UsageError, check
from longdraft.model.routine import run_alone
from longdraft.speculation.drafter import Accepted, Drafter
from longdraft.tree import Tree

Tokens = NDArray[np.int32]
DEFAULT = ("ngram", "ngram,seen=1,continuations=20", "suffix", "suffix,min_probability=0.5",
           "suffix,min_probability=0.1", "suffix,min_probability=0.03,budget=64", "suffix,contexts=1",
           "suffix,min_match=3")


@dataclass(frozen=True)
class Replayed:
    """What a drafter would have done while a text was written.

    mean_accepted_length  tokens written with each forward of the model
    drafted_per_step      guesses that each forward would have verified
    acceptance_rate       of the guesses
    host_us               microseconds of propose and observe in a step: mean, median, the slowest
    memory_bytes          that the drafter held at the end
    """

    drafter: str
    options: Mapping[str, Any]
    tokens: int
    steps: int
    mean_accepted_length: float
    drafted_per_step: float
    acceptance_rate: float
    host_us: float
    host_us_median: float
    host_us_slowest: float
    memory_bytes: int


def replay(text: Sequence[int] | Tokens, drafter: str, options: Mapping[str, Any] | None = None, *, prefill: int = 1024,
           penalty_window: int = 0, corpora: Corpora | None = None, max_depth: int = 1 << 20) -> Replayed:
    """Write `text` behind its first `prefill` tokens again, with `drafter` ("ngram" or "suffix") guessing.

    penalty_window  of the repetition penalty that the text was written with; 0: none
    """
    check(1 <= prefill < len(text), "prefill", prefill, f"1 to {len(text) - 1} (the text's tokens but one)")
    ids = np.ascontiguousarray(text, np.int32)
    parsed = drafters.parse_options(drafter, options or {})
    params = SamplingParams(repetition_penalty=1.2 if penalty_window else 1.0, penalty_window=penalty_window or 1)
    guesser = _build(drafter, parsed, params, corpora)
    steps = _Steps(ids, prefill, guesser)
    steps.run(max_depth)
    memory = guesser.nbytes if isinstance(guesser, SuffixDrafter) else _python_bytes(
        lambda: _Steps(ids, prefill, _build(drafter, parsed, params, corpora)), max_depth)
    seconds = steps.seconds
    return Replayed(
        drafter, asdict(parsed), len(ids) - prefill, len(seconds), (len(ids) - prefill) / len(seconds),
        steps.drafted / len(seconds), steps.accepted / max(1, steps.drafted), 1e6 * statistics.fmean(seconds),
        1e6 * statistics.median(seconds), 1e6 * max(seconds), memory)


def _build(name: str, options: Any, params: SamplingParams, corpora: Corpora | None) -> Drafter:
    if name == "ngram":
        return NgramDrafter(options, params)
    if name != "suffix":
        raise UsageError(f"drafter {name!r} cannot be replayed without a model; allowed: ngram or suffix")
    if options.corpus and corpora is None:
        raise UsageError("a corpus needs a tokenizer to be read with; give --model")
    return SuffixDrafter(options, params, corpora.index(options.corpus, options.max_match)
                         if corpora and options.corpus else None)


class _Steps:
    """The loop of a generation, with the text itself for the target."""

    def __init__(self, text: Tokens, prefill: int, drafter: Drafter) -> None:
        self._text, self._drafter = text, drafter
        self._context = Context(text[:prefill])
        self._drafter.begin(self._context, None)
        self.seconds: list[float] = []
        self.drafted = self.accepted = 0

    def run(self, max_depth: int) -> None:
        context, drafter, length = self._context, self._drafter, len(self._text)
        while len(context) < length:
            start = time.perf_counter()
            tree = run_alone(drafter.propose(context, min(max_depth, length - len(context) - 1)))
            drafting = time.perf_counter() - start
            rows = self._walk(tree)
            here = len(context)
            tokens = tuple(self._text[here : here + len(rows)].tolist())
            context.extend(tokens)
            # No replayed drafter looks at what the target computed.
            accepted = Accepted(tokens, tuple(rows), tuple(tree.sources[node] for node in rows[1:]), None)  # type: ignore[arg-type]
            start = time.perf_counter()
            drafter.observe(context, accepted)
            self.seconds.append(drafting + time.perf_counter() - start)
            self.drafted += len(tree) - 1
            self.accepted += len(rows) - 1

    def _walk(self, tree: Tree) -> list[int]:
        """Nodes from the root down along the text."""
        rows = [0]
        for token in self._text[len(self._context) :]:
            child = tree.children.get((rows[-1], int(token)))
            if child is None:
                break
            rows.append(child)
        return rows


def _python_bytes(build: Any, max_depth: int) -> int:
    """Memory of a drafter that lives in Python's own, from a run that is not timed."""
    tracemalloc.start()
    try:
        steps = build()
        steps.run(max_depth)
        steps.seconds.clear()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def parse(settings: Iterable[str]) -> list[System]:
    """ "suffix,depth=4", ... -> the drafters; UsageError for one that needs a model."""
    parsed = [System.named(setting) for setting in settings]
    for system in parsed:
        check(system.drafter in ("ngram", "suffix"), "drafter", system.drafter,
              "ngram or suffix with options, such as suffix,depth=4")
    return parsed


class Recorded(NamedTuple):
    """A text that is written already: its tokens, how many of them are the prompt, and the penalty's window."""

    tokens: Tokens
    prefill: int
    penalty_window: int


def recorded(path: Path, prefill: int, penalty_window: int) -> Recorded:
    """A text from a journal's folder, which knows its prompt and penalty, or from a .npy file, which does not."""
    if not path.is_dir():
        return Recorded(read(path), prefill, penalty_window)
    found = journal.read(path)
    params = found.header.params
    window = params.penalty_window if params.repetition_penalty != 1 else 0
    prompt = np.array(found.header.prompt, dtype=np.int32)
    check(len(found.tokens) > 0, str(path), 0, "a journal with new tokens")
    return Recorded(np.concatenate([prompt, found.tokens]), len(prompt), window)


def read(file: Path) -> Tokens:
    """Token ids from a .npy file. UsageError for anything else."""
    try:
        ids = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{file} is not a .npy file of token ids as --tokens-out writes them") from error
    check(ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer) and len(ids) > 1, str(file),
          f"{ids.dtype} of shape {list(ids.shape)}", "two token ids or more in one row")
    return np.ascontiguousarray(ids, np.int32)


def table(results: Iterable[tuple[str, Replayed]]) -> str:
    lines = ["| drafter | tokens per forward | guesses per forward | accepted | host us: mean, median, slowest | MB |",
             "|---|---|---|---|---|---|"]
    for setting, r in results:
        lines.append(f"| {setting} | {r.mean_accepted_length:.3f} | {r.drafted_per_step:.2f} | "
                     f"{100 * r.acceptance_rate:.1f} % | {r.host_us:.0f}, {r.host_us_median:.0f}, "
                     f"{r.host_us_slowest:.0f} | {r.memory_bytes / 1e6:.1f} |")
    return "\n".join(lines)


def run(files: Sequence[Path], settings: Sequence[str], prefill: int, penalty_window: int,
        model: str) -> dict[str, list[dict[str, Any]]]:
    """Replay each file with each setting; prints a table for each file, gives all figures by the file's label."""
    systems = parse(settings)
    corpora = _corpora(model) if any("corpus=" in setting for setting in settings) else None
    figures: dict[str, list[dict[str, Any]]] = {}
    for file, label in labels(files).items():
        text, prompt, window = recorded(file, prefill, penalty_window)
        results = [(setting, replay(text, system.drafter, system.options, prefill=prompt, penalty_window=window,
                                    corpora=corpora)) for setting, system in zip(settings, systems, strict=True)]
        figures[label] = [{"setting": setting, **asdict(result)} for setting, result in results]
        print(f"{label}: {len(text)} tokens, {prompt} of them the prompt, penalty window {window}\n")
        print(table(results), end="\n\n", flush=True)
    return figures


def labels(files: Sequence[Path]) -> dict[Path, str]:
    """Each file's name, with as much of its path as tells it from the others."""
    found: dict[Path, str] = {}
    for count in range(1, 1 + max((len(file.parts) for file in files), default=0)):
        found = {file: str(Path(*file.parts[-count:])) for file in files}
        if len(set(found.values())) == len(found):
            break
    return found


def _corpora(model: str) -> Corpora:
    from functools import partial

    from longdraft.model import config, hub
    from longdraft.model.tokenizer import Tokenizer

    folder = hub.resolve(model)
    return Corpora(partial(Tokenizer(folder).encode, add_special_tokens=False), config.read_config(folder).vocab_size)
