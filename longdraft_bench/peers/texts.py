"""Whole texts by other engines' own generation, beside longdraft: plain, by prompt lookup, with a smaller model.

All engines get the same weights, in 16 bits or as a GGUF file has them, prompt, threads and number of tokens. Decoding
is greedy and without a penalty, which all of them support (`NOT_COMPARED` lists the rest). Each engine and mode runs in
its own process, and their runs alternate. Of an engine's settings the fastest in a trial is used. Speeds are also
compared with the engine's own plain decoding.

    seconds of a text = first token (prompt read, one token written) + all other tokens; each part is timed by itself
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from longdraft.report.table import Table
from longdraft.report.turns import Record
from longdraft_bench.peers.process import PEERS, SETTLE_S, PeerError, PeerProcess, PeerProgram, portable_model
from longdraft_bench.peers.steps import PeersPlan, open_or_error
from longdraft_bench.timing import Timing

_WARM_UP_TOKENS = 64  # of the prompt
_TRIAL_SHARE = 0.25  # of the new tokens, in the trial of an engine's settings
_OPENVINO_GENAI = PeerProgram(
    "openvino_genai", ("openvino_genai", "openvino_tokenizers", "optimum.intel", "transformers"),
    "pip install openvino-genai openvino-tokenizers optimum-intel transformers")


class DecodingMode(NamedTuple):
    """How an engine writes a text.

    settings     the settings to try
    needs_draft  whether it needs a smaller model
    unsupported  why the engine does not support the mode; empty: it does
    """

    name: str
    settings: Sequence[Mapping[str, Any]] = ({},)
    needs_draft: bool = False
    unsupported: str = ""


_LOOKUPS = [{"lookup": count} for count in (3, 5, 10)]
_PLAIN, _PROMPT_LOOKUP = DecodingMode("plain"), DecodingMode("prompt lookup", _LOOKUPS)
MODES: dict[str, tuple[PeerProgram, Sequence[DecodingMode]]] = {
    "longdraft": (PEERS["longdraft"]["longdraft"], (
        _PLAIN, DecodingMode("suffix", ({"drafter": "suffix"},)), DecodingMode("auto", ({"drafter": "auto"},)),
        DecodingMode("draft model", ({"drafter": "draft-model"},), needs_draft=True))),
    "transformers": (PEERS["transformers"]["transformers"], (
        _PLAIN, _PROMPT_LOOKUP, DecodingMode("assisted", ({"assisted": True},), needs_draft=True))),
    "llama.cpp": (PEERS["llama.cpp"]["llama.cpp"]._replace(options={}), (
        _PLAIN, _PROMPT_LOOKUP,
        DecodingMode("draft model", unsupported="llama-cpp-python has no draft model; llama.cpp's own programs do"))),
    "openvino": (_OPENVINO_GENAI, (
        _PLAIN, _PROMPT_LOOKUP,
        DecodingMode("speculative", [{"assisted": count} for count in (3, 5)], needs_draft=True))),
}
MODE_NAMES = tuple(dict.fromkeys(mode.name for _, modes in MODES.values() for mode in modes))
NOT_COMPARED = Table("What cannot be compared", ("", "transformers", "llama.cpp", "OpenVINO GenAI"), (
    ("repetition penalty within a window, exact inside a draft", "no window", "yes, plain", "no window"),
    ("min-p while speculating", "yes", "yes", "yes"),
    ("the same text with speculation, bit for bit", "not promised", "not promised", "not promised"),
    ("continuing in the middle of a text after a crash", "no", "state of a slot", "no"),
    ("100,000 tokens of context on this machine", "yes, hours", "yes, hours", "not established"),
), "From their documentation, as of 2026-11. Because of the first and the third row this comparison is greedy, without "
   "a penalty.")


class OpenMode(NamedTuple):
    """An engine and mode: its record, the settings to try, and its process if it is ready."""

    record: Record
    settings: Sequence[Mapping[str, Any]]
    process: PeerProcess | None


def write_texts(plan: PeersPlan, filled: Record, prompt: Sequence[int], count: int, draft: Path | None,
                status: Callable[[str], Any]) -> None:
    """Fill the document's `texts`: a record for each engine and mode, with an `error` if it has no figures."""
    filled |= {"new_tokens": count, "prompt_tokens": len(prompt), "draft_model": draft.name if draft else None}
    with ExitStack() as stack:
        modes = list(_open_modes(plan, draft, stack, status))
        filled["texts"] = [mode.record for mode in modes]
        for record, settings, process in modes:
            if process:
                with status(f"trying {record['engine']}, {record['system']}"):
                    _try_settings(record, settings, process, plan, prompt, count)
        for turn in range(plan.repeats):
            for record, _, process in modes:
                if process and "error" not in record:
                    with status(f"round {turn + 1} of {plan.repeats}: {record['engine']}, {record['system']}"):
                        _write_round(record, process, plan, prompt, count)
    _summarise(filled["texts"], count)


def _open_modes(plan: PeersPlan, draft: Path | None, stack: ExitStack,
                status: Callable[[str], Any]) -> Iterator[OpenMode]:
    """Start each requested engine once per mode."""
    linked = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    models: dict[str, Path] = {}
    for name, folder in (("model", plan.folder), ("draft", draft)):
        if folder:
            models[name] = portable_model(folder, linked / name)
    for worker in dict.fromkeys(program.worker for program in plan.programs.values()):
        engine = {"llama_cpp": "llama.cpp"}.get(worker, worker)
        program, modes = MODES[engine]
        more = {"quantize": plan.quantize} if engine == "longdraft" else {}
        for mode in (mode for mode in modes if not plan.modes or mode.name in plan.modes):
            record: Record = {"engine": engine, "system": mode.name, "tries": []}
            if mode.unsupported or (mode.needs_draft and not draft):
                error = mode.unsupported or "needs a smaller model: give --draft-model"
                yield OpenMode(record | {"error": error}, (), None)
                continue
            with status(f"loading {engine}, {mode.name}"):
                process = stack.enter_context(PeerProcess(program, plan.python, "texts"))
                record |= open_or_error(process, plan, models["model"], **more,
                                        draft=str(models["draft"]) if mode.needs_draft else None)
            yield OpenMode(record, mode.settings, process if "error" not in record else None)


def _write(process: PeerProcess, plan: PeersPlan, prompt: Sequence[int], count: int,
           settings: Mapping[str, Any]) -> Record:
    return process.ask(plan.limit_s, do="write", prompt=list(prompt), count=count, settings=dict(settings))


def _try_settings(record: Record, settings: Sequence[Mapping[str, Any]], process: PeerProcess, plan: PeersPlan,
                  prompt: Sequence[int], count: int) -> None:
    """Warm up with each of the settings, after a part of the prompt, and keep the fastest."""
    trial = max(2, round(_TRIAL_SHARE * count))
    try:
        for each in settings:
            _write(process, plan, prompt[:_WARM_UP_TOKENS], 2, each)
            if len(settings) == 1:
                record["settings"] = each
                break
            seconds = _write(process, plan, prompt, trial, each)["seconds"]
            record["tries"].append({"settings": each, "seconds": seconds})
    except PeerError as error:
        record["error"] = str(error)
        return
    if record["tries"]:
        record["settings"] = min(record["tries"], key=lambda each: each["seconds"])["settings"]
    record |= {"first_s": [], "seconds": []}


def _write_round(record: Record, process: PeerProcess, plan: PeersPlan, prompt: Sequence[int], count: int) -> None:
    time.sleep(SETTLE_S)
    try:
        whole = _write(process, plan, prompt, count, record["settings"])
        first_s = whole.get("first_s")
        if first_s is None:  # the engine gives its tokens all at once
            first_s = _write(process, plan, prompt, 1, record["settings"])["seconds"]
    except PeerError as error:
        record["error"] = str(error)
        return
    record["first_s"].append(first_s)
    record["seconds"].append(whole["seconds"])
    record |= {"tokens": whole["tokens"], "peak_memory_bytes": whole["peak_memory_bytes"]}


def _summarise(records: Sequence[Record], count: int) -> None:
    """Add times per token, ratios of the rounds, and the number of equal tokens from the start."""
    plain = {record["engine"]: record for record in records if record["system"] == "plain" and "error" not in record}
    for record in records:
        if "error" in record:
            continue
        record |= Timing.of(_seconds_per_token(record, count)).in_ms()
        record["first_token_s"] = median(record["first_s"])
        for ratio, agreement, other in (("to_own_plain", "as_own_plain", plain.get(record["engine"])),
                                        ("to_longdraft_plain", "as_longdraft", plain.get("longdraft"))):
            if other:
                ratios = [b / a for a, b in zip(_seconds_per_token(record, count), _seconds_per_token(other, count))]
                record[ratio] = {"median": median(ratios), "low": min(ratios), "high": max(ratios)}
                equal = [a == b for a, b in zip(record["tokens"], other["tokens"])]
                record[agreement] = [*equal, False].index(False)


def _seconds_per_token(record: Record, count: int) -> list[float]:
    """Of every round, without the first token."""
    return [max(1e-9, whole - first) / (count - 1) for first, whole in zip(record["first_s"], record["seconds"])]


def tables(document: Mapping[str, Any]) -> list[Table]:
    """The tables of the texts in a document of `bench peers`."""
    if not document.get("texts"):
        return []
    columns = ("engine, drafting", "ms/token", "to its own plain", "to our plain", "first token, s", "peak memory, MB",
               "tokens as its plain", "tokens as ours", "settings")
    note = (f"{document['prompt_tokens']:,} tokens of prompt, {document['new_tokens']:,} new ones, greedy; medians of "
            f"{document['repeats']} alternating rounds, in brackets the lowest and the highest. Peak memory is that of "
            "the process, including its Python. Tokens as: number of equal tokens from the start.")
    return [Table("Texts by other engines", columns, [_row(record) for record in document["texts"]], note),
            NOT_COMPARED]


def _row(record: Record) -> list[str]:
    name = f"{record['engine']}, {record['system']}"
    if "error" in record:
        return [name, "–", record["error"], *[""] * 6]

    def ratio(key: str) -> str:
        rounds = record.get(key)
        return f"{rounds['median']:.2f} ({rounds['low']:.2f}-{rounds['high']:.2f})" if rounds else ""

    settings = ", ".join(f"{key} {value}" for key, value in record["settings"].items())
    return [name, f"{record['ms']:.2f} ({record['ms_low']:.2f}-{record['ms_high']:.2f})", ratio("to_own_plain"),
            ratio("to_longdraft_plain"), f"{record['first_token_s']:.2f}", f"{record['peak_memory_bytes'] / 1e6:,.0f}",
            str(record.get("as_own_plain", "")), str(record.get("as_longdraft", "")), settings]


def provenance_table(document: Mapping[str, Any]) -> Table:
    about = document["machine"] | {name: document.get(name) for name in ("model", "weights_sha256", "draft_model")}
    rows = [[name, str(value)] for name, value in about.items() if value is not None]
    return Table("Provenance", ["", "value"], rows)
