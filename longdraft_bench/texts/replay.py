"""Drafters that need no model, measured on a text that is already written; `longdraft bench replay`.

    longdraft generate "It was" --max-new-tokens 20000 --tokens-out novel.npy
    longdraft bench replay novel.npy --penalty-window 1024 --output replay.json
    longdraft bench replay journal/                        # prompt and penalty are read from the journal

With keyed sampling the text does not depend on the drafter. A replay therefore gives exactly the steps, draft tokens
and acceptance of a real run, and the drafter's time on the host without the model's.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longdraft import drafters
from longdraft.checkpoint import config_file, hub
from longdraft.drafters.corpus import Corpora
from longdraft.drafters.ngram import NgramDrafter
from longdraft.drafters.suffix import SuffixDrafter
from longdraft.drafters.suffix_index import TokenArray
from longdraft.errors import UsageError, check
from longdraft.journal.format import read_journal
from longdraft.report.table import Table
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation.drafter import Accepted, Drafter
from longdraft.speculation.routine import run_alone
from longdraft.text.tokenizer import Tokenizer
from longdraft_bench.systems import System

REPLAYABLE = ("ngram", "suffix")
DEFAULT_SETTINGS = (
    "ngram", "ngram,seen=1,continuations=20", "suffix", "suffix,min_probability=0.5", "suffix,min_probability=0.1",
    "suffix,min_probability=0.03,budget=64", "suffix,contexts=1", "suffix,min_match=3")
_UNLIMITED_DEPTH = 1 << 20


@dataclass(frozen=True)
class ReplayFigures:
    """The work of a drafter while a text was written.

    mean_accepted_length  tokens written per forward of the model
    drafted_per_step      draft tokens that a forward verifies
    acceptance_rate       accepted draft tokens / draft tokens
    host_us               microseconds of propose and observe per step: mean, median, slowest
    memory_bytes          of the drafter at the end
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


def replay(text: Sequence[int] | TokenArray, drafter: str, options: Mapping[str, Any] | None = None, *,
           prefill: int = 1024, penalty_window: int = 0, corpora: Corpora | None = None,
           max_depth: int = _UNLIMITED_DEPTH) -> ReplayFigures:
    """Write `text` again after its first `prefill` tokens, drafted by `drafter` ("ngram" or "suffix").

    penalty_window  tokens of the window of the repetition penalty that the text was written with; 0: no penalty

    Raises UsageError for other drafters, unknown options and a prefill that is not shorter than the text.
    """
    check(1 <= prefill < len(text), "prefill", prefill, f"1 to {len(text) - 1} (the text's tokens but one)")
    ids = np.ascontiguousarray(text, np.int32)
    parsed = drafters.parse_options(drafter, options or {})
    params = SamplingParams(repetition_penalty=1.2 if penalty_window else 1.0, penalty_window=penalty_window or 1)
    build = partial(_build, drafter, parsed, params, corpora)
    used = build()
    run = _replay_steps(ids, prefill, used, max_depth)
    memory = used.nbytes if isinstance(used, SuffixDrafter) else _python_bytes(build, ids, prefill, max_depth)
    steps, tokens = len(run.seconds), len(ids) - prefill
    return ReplayFigures(
        drafter, asdict(parsed), tokens, steps, tokens / steps, run.drafted / steps,
        run.accepted / max(1, run.drafted), 1e6 * statistics.fmean(run.seconds), 1e6 * statistics.median(run.seconds),
        1e6 * max(run.seconds), memory)


def _build(name: str, options: Any, params: SamplingParams, corpora: Corpora | None) -> Drafter:
    if name == "ngram":
        return NgramDrafter(options, params)
    if name != "suffix":
        raise UsageError(f"drafter {name!r} cannot be replayed without a model; allowed: ngram or suffix")
    if options.corpus and corpora is None:
        raise UsageError("a corpus needs a tokenizer to read it; give --model")
    return SuffixDrafter(options, params, corpora.index(options.corpus, options.max_match)
                         if corpora and options.corpus else None)


class _Run(NamedTuple):
    seconds: list[float]  # of each step
    drafted: int
    accepted: int


def _replay_steps(text: TokenArray, prefill: int, drafter: Drafter, max_depth: int) -> _Run:
    """The loop of a generation, with the text itself in place of the target model."""
    context, seconds, drafted, accepted = Context(text[:prefill]), [], 0, 0
    drafter.begin(context, None)
    while len(context) < len(text):
        start = time.perf_counter()
        tree = run_alone(drafter.propose(context, min(max_depth, len(text) - len(context) - 1)))
        drafting = time.perf_counter() - start
        rows = [0]  # nodes of the tree that follow the text, from the root down
        for token in text[len(context) :]:
            child = tree.children.get((rows[-1], int(token)))
            if child is None:
                break
            rows.append(child)
        tokens = tuple(text[len(context) : len(context) + len(rows)].tolist())
        context.extend(tokens)
        # These drafters do not use the target's hidden states.
        step = Accepted(tokens, tuple(rows), tuple(tree.sources[node] for node in rows[1:]), None)
        start = time.perf_counter()
        drafter.observe(context, step)
        seconds.append(drafting + time.perf_counter() - start)
        drafted += len(tree) - 1
        accepted += len(rows) - 1
    return _Run(seconds, drafted, accepted)


def _python_bytes(build: Callable[[], Drafter], text: TokenArray, prefill: int, max_depth: int) -> int:
    """Python memory of a drafter at the end of a second run, which is not timed."""
    tracemalloc.start()
    try:
        drafter = build()
        _replay_steps(text, prefill, drafter, max_depth)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def parse_settings(settings: Iterable[str]) -> list[System]:
    """ "suffix,depth=4", ... -> the drafters. Raises UsageError for a drafter that needs a model."""
    parsed = [System.named(setting) for setting in settings]
    for system in parsed:
        check(system.drafter in REPLAYABLE, "drafter", system.drafter,
              "ngram or suffix with options, such as suffix,depth=4")
    return parsed


class WrittenText(NamedTuple):
    """The tokens of a text, how many of them are the prompt, and the window of its repetition penalty (0: none)."""

    tokens: TokenArray
    prefill: int
    penalty_window: int


def read_written_text(path: Path, prefill: int, penalty_window: int) -> WrittenText:
    """Read a text from the folder of a journal, or from a .npy file that holds neither prompt length nor penalty."""
    if not path.is_dir():
        return WrittenText(read_tokens(path), prefill, penalty_window)
    written = read_journal(path)
    params = written.header.params
    window = params.penalty_window if params.repetition_penalty != 1 else 0
    prompt = np.array(written.header.prompt, dtype=np.int32)
    check(len(written.tokens) > 0, str(path), 0, "a journal with new tokens")
    return WrittenText(np.concatenate([prompt, written.tokens]), len(prompt), window)


def read_tokens(file: Path) -> TokenArray:
    """Token ids from a .npy file: int32 [tokens]. Raises UsageError for anything else."""
    try:
        ids = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{file} is not a .npy file of token ids as --tokens-out writes them") from error
    check(ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer) and len(ids) > 1, str(file),
          f"{ids.dtype} of shape {list(ids.shape)}", "two token ids or more in one row")
    return np.ascontiguousarray(ids, np.int32)


def replay_files(files: Sequence[Path], settings: Sequence[str], prefill: int, penalty_window: int,
                 model: str) -> dict[str, list[dict[str, Any]]]:
    """Replay each file with each setting. Prints a table per file; returns the figures by the label of the file."""
    systems = parse_settings(settings)
    corpora = None
    if any("corpus=" in setting for setting in settings):
        folder = hub.resolve(model)
        encode = partial(Tokenizer(folder).encode, add_special_tokens=False)
        corpora = Corpora(encode, config_file.read_config(folder).vocab_size)
    figures: dict[str, list[dict[str, Any]]] = {}
    for file, label in labels(files).items():
        text, prompt, window = read_written_text(file, prefill, penalty_window)
        figures[label] = [
            {"setting": setting, **asdict(replay(text, system.drafter, system.options, prefill=prompt,
                                                 penalty_window=window, corpora=corpora))}
            for setting, system in zip(settings, systems, strict=True)]
        title = f"{label}: {len(text)} tokens, {prompt} of them the prompt, penalty window {window}"
        Table.of_records(title, (
            ("drafter", "setting", ""), ("tokens per forward", "mean_accepted_length", ".3f"),
            ("draft tokens per forward", "drafted_per_step", ".2f"), ("accepted", "acceptance_rate", ".1%"),
            ("host us, mean", "host_us", ".0f"), ("median", "host_us_median", ".0f"),
            ("slowest", "host_us_slowest", ".0f"), ("bytes", "memory_bytes", ",")), figures[label]).show()
    return figures


def labels(files: Sequence[Path]) -> dict[Path, str]:
    """The shortest endings of the paths that are all different."""
    by_file: dict[Path, str] = {}
    for count in range(1, 1 + max((len(file.parts) for file in files), default=0)):
        by_file = {file: str(Path(*file.parts[-count:])) for file in files}
        if len(set(by_file.values())) == len(by_file):
            break
    return by_file
