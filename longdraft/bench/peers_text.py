"""Other engines' own ways to write a text, beside ours: plain, by prompt lookup, with a smaller model.

The same weights in 16 bits, prompt, threads and number of tokens; greedy and without a penalty, which is what all of
them can do (`CANNOT` says what they cannot). Each runs in a process of its own, and their runs alternate. Of a peer's
settings the fastest in a trial is taken. What drafting changes is told beside the engine's own plain decoding too.

    seconds of a text = first token (prompt read, one token written) + the others; each is measured by itself
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from longdraft.bench.grid import Table
from longdraft.bench.measure import Timing
from longdraft.bench.peers import KINDS, Failed, Kind, Plan, Worker, opened, portable
from longdraft.bench.results import Record

_SETTLE_S = 0.3
_TRIAL = 0.25  # of the new tokens, in the trial of settings
_GENAI = Kind("openvino_genai", ("openvino_genai", "openvino_tokenizers", "optimum.intel", "transformers"),
              "pip install openvino-genai openvino-tokenizers optimum-intel transformers")


class DecodingMode(NamedTuple):
    """How an engine writes: the settings to try, and why it cannot, where it cannot."""

    name: str
    tries: Sequence[Mapping[str, Any]] = ({},)
    needs_draft: bool = False
    cannot: str = ""


_LOOKUPS = [{"lookup": count} for count in (3, 5, 10)]
WAYS: dict[str, tuple[Kind, Sequence[DecodingMode]]] = {
    "longdraft": (KINDS["longdraft"]["longdraft"], (
        DecodingMode("plain"), DecodingMode("suffix", ({"drafter": "suffix"},)), DecodingMode("auto", ({"drafter": "auto"},)),
        DecodingMode("draft model", ({"drafter": "draft-model"},), needs_draft=True))),
    "transformers": (KINDS["transformers"]["transformers"], (
        DecodingMode("plain"), DecodingMode("prompt lookup", _LOOKUPS), DecodingMode("assisted", ({"assisted": True},), needs_draft=True))),
    "llama.cpp": (KINDS["llama.cpp"]["llama.cpp"]._replace(options={}), (
        DecodingMode("plain"), DecodingMode("prompt lookup", _LOOKUPS),
        DecodingMode("draft model", cannot="llama-cpp-python offers no draft model; llama.cpp's own programs do"))),
    "openvino": (_GENAI, (
        DecodingMode("plain"), DecodingMode("prompt lookup", _LOOKUPS),
        DecodingMode("speculative", [{"assisted": count} for count in (3, 5)], needs_draft=True))),
}
CANNOT = Table("What cannot be compared", ("", "transformers", "llama.cpp", "OpenVINO GenAI"), (
    ("repetition penalty within a window, exact inside a draft", "no window", "yes, plain", "no window"),
    ("min-p while speculating", "yes", "yes", "yes"),
    ("the same text with speculation, bit for bit", "not promised", "not promised", "not promised"),
    ("going on in the middle of a text after a crash", "no", "state of a slot", "no"),
    ("100,000 tokens of context on this machine", "yes, hours", "yes, hours", "not established"),
), "From their documentation, as of 2026-11. The first and the third are why this comparison is greedy, without a "
   "penalty.")


def measure(plan: Plan, report: dict[str, Any], prompt: Sequence[int], count: int, draft: Path | None,
            doing: Callable[[str], Any]) -> None:
    """Fill the report's `texts`: a record for each engine and way, with an `error` where there is no figure."""
    report |= {"new_tokens": count, "prompt_tokens": len(prompt), "draft_model": draft.name if draft else None}
    with ExitStack() as stack:
        systems = list(_open_all(plan, draft, stack, doing))
        report["texts"] = [record for record, _ in systems]
        for record, worker in systems:
            if worker:
                with doing(f"trying {record['engine']}, {record['system']}"):
                    _try_settings(record, worker, plan, prompt, count)
        for turn in range(plan.repeats):
            for record, worker in systems:
                if worker and "error" not in record:
                    with doing(f"round {turn + 1} of {plan.repeats}: {record['engine']}, {record['system']}"):
                        _round(record, worker, plan, prompt, count)
    _conclude(report["texts"], count)


def _open_all(plan: Plan, draft: Path | None, stack: ExitStack, doing: Callable[[str], Any]) -> Any:
    """(record, its worker or None) for every engine that is asked for and each of its ways."""
    import tempfile

    place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    folders = {name: place / name for name, folder in (("model", plan.folder), ("draft", draft)) if folder}
    for name, folder in (("model", plan.folder), ("draft", draft)):
        if folder:
            folders[name].mkdir()
            portable(folder, folders[name])
    for engine in dict.fromkeys(kind.worker for kind in plan.kinds.values()):
        name = {"llama_cpp": "llama.cpp"}.get(engine, engine)
        kind, ways = WAYS[name]
        for way in ways:
            record: Record = {"engine": name, "system": way.name, "tries": []}
            if way.cannot or (way.needs_draft and not draft):
                yield record | {"error": way.cannot or "needs a smaller model: give --draft-model"}, None
                continue
            with doing(f"loading {name}, {way.name}"):
                worker = stack.enter_context(Worker(kind, plan.python, "writer"))
                record |= opened(worker, plan, folders["model"],
                                 draft=str(folders["draft"]) if way.needs_draft else None)
            yield record | {"_tries": list(way.tries)}, worker if "error" not in record else None


def _ask(worker: Worker, plan: Plan, prompt: Sequence[int], count: int, settings: Mapping[str, Any]) -> Record:
    return worker.ask(plan.limit_s, do="write", prompt=list(prompt), count=count, settings=dict(settings))


def _try_settings(record: Record, worker: Worker, plan: Plan, prompt: Sequence[int], count: int) -> None:
    """Warm up with each of the settings, and keep the fastest."""
    trial = max(2, round(_TRIAL * count))
    try:
        for settings in record.pop("_tries"):
            _ask(worker, plan, prompt, 2, settings)
            record["tries"].append({"settings": settings, "seconds": _ask(worker, plan, prompt, trial,
                                                                          settings)["seconds"]})
    except Failed as error:
        record["error"] = str(error)
        return
    record["settings"] = min(record["tries"], key=lambda each: each["seconds"])["settings"]
    record |= {"first_s": [], "seconds": []}


def _round(record: Record, worker: Worker, plan: Plan, prompt: Sequence[int], count: int) -> None:
    time.sleep(_SETTLE_S)
    try:
        first = _ask(worker, plan, prompt, 1, record["settings"])
        whole = _ask(worker, plan, prompt, count, record["settings"])
    except Failed as error:
        record["error"] = str(error)
        return
    record["first_s"].append(first["seconds"])
    record["seconds"].append(whole["seconds"])
    record |= {"tokens": whole["tokens"], "peak_memory_bytes": whole["peak_memory_bytes"]}


def _conclude(records: Sequence[Record], count: int) -> None:
    """Times for each token, ratios round by round, and whether it is the same text."""
    plain = {record["engine"]: record for record in records if record["system"] == "plain" and "error" not in record}
    ours = plain.get("longdraft")
    for record in records:
        record.pop("_tries", None)
        if "error" in record:
            continue
        record |= Timing.of(_paces(record, count)).in_ms()
        record["first_token_s"] = median(record["first_s"])
        for name, other in (("to_own_plain", plain.get(record["engine"])), ("to_longdraft_plain", ours)):
            if other:
                ratios = [b / a for a, b in zip(_paces(record, count), _paces(other, count))]
                record[name] = {"median": median(ratios), "low": min(ratios), "high": max(ratios)}
        for name, other in (("as_own_plain", plain.get(record["engine"])), ("as_longdraft", ours)):
            if other:
                equal = [a == b for a, b in zip(record["tokens"], other["tokens"])]
                record[name] = [*equal, False].index(False)


def _paces(record: Record, count: int) -> list[float]:
    """Seconds for each token but the first, of every round."""
    return [max(1e-9, whole - first) / (count - 1) for first, whole in zip(record["first_s"], record["seconds"])]


def tables(report: Mapping[str, Any]) -> list[Table]:
    """What `bench peers` measured of texts."""
    if not report.get("texts"):
        return []
    columns = ("engine, drafting", "ms/token", "to its own plain", "to our plain", "first token, s", "peak memory, MB",
               "tokens as its plain", "tokens as ours", "settings")
    rows = [_row(record) for record in report["texts"]]
    note = (f"{report['prompt_tokens']:,} tokens of prompt, {report['new_tokens']:,} new ones, greedy; medians of "
            f"{report['repeats']} alternating rounds, in brackets the lowest and the highest. Peak memory is of the "
            "process, its Python included. Tokens as: equal ones from the start.")
    return [Table("Texts by other engines", columns, rows, note), CANNOT]


def _row(record: Record) -> list[str]:
    name = f"{record['engine']}, {record['system']}"
    if "error" in record:
        return [name, "–", record["error"], *[""] * 6]

    def ratio(key: str) -> str:
        found = record.get(key)
        return f"{found['median']:.2f} ({found['low']:.2f}-{found['high']:.2f})" if found else ""

    settings = ", ".join(f"{key} {value}" for key, value in record["settings"].items())
    return [name, f"{record['ms']:.2f} ({record['ms_low']:.2f}-{record['ms_high']:.2f})", ratio("to_own_plain"),
            ratio("to_longdraft_plain"), f"{record['first_token_s']:.2f}", f"{record['peak_memory_bytes'] / 1e6:,.0f}",
            str(record.get("as_own_plain", "")), str(record.get("as_longdraft", "")), settings]
