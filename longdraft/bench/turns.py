"""A text written by several systems in turns, so that the machine's moods meet all of them alike."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longdraft import run_statistics
from longdraft.bench import rules
from longdraft.bench.experiment import System
from longdraft.bench.results import Record, Text, packed, require_one_text
from longdraft.core import SamplingParams
from longdraft.engine import Engine
from longdraft.generation import Generation
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Accepted

SAMPLERS: dict[str, type[Sampler]] = {"keyed": Sampler, "independent": rules.IndependentSampler,
                                      "per-path": rules.PathSampler}
OWN_TEXT = ("per-path",)  # rules whose text is not plain decoding's
Tokens = NDArray[np.int32]


class Counts:
    """What the steps of a turn did. `lengths`: how many steps wrote so many tokens."""

    def __init__(self) -> None:
        self.depth = self.drafted = self.accepted = 0
        self.lengths: Counter[int] = Counter()
        self.by_source: Counter[str] = Counter()

    def push(self, accepted: Accepted) -> None:
        self.depth += accepted.depth
        self.drafted += accepted.drafted
        self.accepted += len(accepted.sources)
        self.lengths[len(accepted.tokens)] += 1
        self.by_source.update(accepted.sources)

    def record(self) -> Record:
        """steps, drafted and accepted guesses; depth: places guessed ahead, all steps together."""
        return {"steps": self.lengths.total(), "drafted": self.drafted, "depth": self.depth, "accepted": self.accepted,
                "lengths": {str(length): count for length, count in sorted(self.lengths.items())},
                "accepted_by_source": dict(self.by_source)}


def start(engine: Engine, system: System, prompt: Sequence[int], params: SamplingParams,
          written: Tokens | Sequence[int] = ()) -> Generation:
    """A generation as a system writes it, behind tokens that are written already."""
    drafting = engine.with_drafter(system.drafter, system.options_for(len(prompt)))
    text = Generation(drafting, list(prompt), params, written=written, sampler_of=SAMPLERS[system.rule])
    if len(written):
        next(text)  # gives what was written, and does no work
    return text


def write(text: Generation, end: int) -> Record:
    """Go on up to `end` new tokens (a step may write a few more); what that took, the prompt not counted."""
    counts, before, began = Counts(), text.stats(), time.perf_counter()
    ended = began

    def on_step(accepted: Accepted, seconds: float) -> None:
        nonlocal ended
        counts.push(accepted)
        ended = time.perf_counter()  # the last event's statistics, which are made after it, are not decoding

    text.on_step = on_step
    while len(text.tokens) < end and next(text, None) is not None:
        pass
    after = text.stats()
    seconds = ended - began - (after["prefill_seconds"] - before["prefill_seconds"])
    return {"until": after["new_tokens"], "tokens": after["new_tokens"] - before["new_tokens"], "seconds": seconds,
            **counts.record(), "tokens_by_choice": _gained(before, after)}


def _gained(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """Tokens by the drafter that `auto` chose."""
    old = before.get("tokens_by_choice", {})
    return {name: count - old.get(name, 0) for name, count in after.get("tokens_by_choice", {}).items()}


def write_all(engine: Engine, systems: Mapping[str, System], prompt: Sequence[int], params: SamplingParams,
              ends: Sequence[int], done: Text, emit: Callable[[Record], None]) -> None:
    """Write a text with each system up to each of `ends`, in rounds of turns; the first is the reference.

    done  the text's record, and turns of an earlier process: whole rounds of them are not measured again
    emit  is given a record for each turn, and one for each system's end

    UsageError if two systems wrote different texts.
    """
    rounds = min((len(done.turns.get(name, [])) for name in systems), default=0)
    if rounds == len(ends) and all(name in done.stats for name in systems):
        return
    written = {name: done.tokens(name)[: done.turns[name][rounds - 1]["until"]] if rounds else () for name in systems}
    texts = {name: start(engine, system, prompt, params, written[name]) for name, system in systems.items()}
    key, reference = done.about["text"], next(iter(systems))
    for turn, end in enumerate(ends[rounds:], rounds):
        for name, text in texts.items():
            record = write(text, end) | {"kind": "turn", "text": key, "system": name, "turn": turn, "end": end,
                                         "is_resumed": bool(rounds) and turn == rounds,
                                         "sha256_tokens": run_statistics.sha256_tokens(text.tokens[:end])}
            if name == reference or systems[name].rule in OWN_TEXT:
                record["ids"] = packed(text.tokens[record["until"] - record["tokens"] :])
            emit(record)
        require_one_text(done)
    for name, text in texts.items():
        emit({"kind": "stats", "text": key, "system": name, "stats": text.stats()})
        text.close()

