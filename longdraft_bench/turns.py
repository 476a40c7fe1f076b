"""The runner of texts: several drafting systems write one text in turns, so that a slow moment of the machine affects
all of them.

Experiments (`paper`, `ablation`, `run`), `bench length` and `bench samplers` use it. `longdraft_bench/timing.py` is the
runner of calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from longdraft import kernels
from longdraft.engine import run_statistics
from longdraft.engine.engine import Engine
from longdraft.engine.generation import Generation
from longdraft.model.transformer import Transformer
from longdraft.report.turns import MeasuredText, Record, StepCounts, pack_tokens
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.text.stream import stop_ids
from longdraft_bench.paper import rules
from longdraft_bench.results import Results, require_one_text
from longdraft_bench.systems import Engines, System, systems_named

SAMPLERS = {"independent": rules.IndependentSampler, "per-path": rules.PathSampler}  # "keyed" is the engine's own


def start(engine: Engine, system: System, prompt: Sequence[int], params: SamplingParams,
          written: Sequence[int] | NDArray[np.int32] = ()) -> Generation:
    """A generation by a system that continues after the new tokens `written`."""
    choice = system.choice(len(prompt))
    drafting = Engine(engine.loaded.with_draft_for(choice), choice)
    generation = Generation(drafting.loaded, drafting.choice, list(prompt), params, written=written,
                            sampler=_sampler(engine.model, system.rule, params))
    if len(written):
        next(generation)  # the first event returns `written` without any work
    return generation


def _sampler(model: Transformer, rule: str, params: SamplingParams) -> Sampler | None:
    """The sampler of a verification rule, which chooses on the host; None for the engine's own."""
    if rule == "keyed":
        return None
    return SAMPLERS[rule](params, stop_ids(params, model.config.eos_token_ids), model.kernels.name != kernels.REFERENCE)


def write_turn(generation: Generation, end: int) -> Record:
    """Write until the text has `end` new tokens; the last step may write a few more. The prompt is not timed."""
    counts, before, began = StepCounts(), generation.stats(), time.perf_counter()
    ended = began
    while len(generation.tokens) < end and (event := next(generation, None)) is not None:
        counts.add(event)
        # Computing the statistics of the last event is not decoding.
        ended = ended + event.seconds if event.finish_reason else time.perf_counter()
    after = generation.stats()
    seconds = ended - began - (after["prefill_seconds"] - before["prefill_seconds"])
    old = before.get("tokens_by_choice", {})  # of drafter `auto`: tokens by the drafter it chose
    return {"until": after["new_tokens"], "tokens": after["new_tokens"] - before["new_tokens"], "seconds": seconds,
            **counts.record(), "tokens_by_choice": {
                name: count - old.get(name, 0) for name, count in after.get("tokens_by_choice", {}).items()}}


def write_in_turns(engines: Engines, systems: Mapping[str, System], prompt: Sequence[int], params: SamplingParams,
                   ends: Sequence[int], text: MeasuredText, emit: Callable[[Record], None], *,
                   holds_all: bool = True, prepare: Callable[[Generation], None] | None = None) -> None:
    """Write a text with each system up to each of `ends`, in rounds of turns. The first system is the reference.

    text  its description, and the turns that an earlier process wrote; complete rounds are not measured again
    emit  is called with the record of each turn and of each finished system, and must add it to `text`
    holds_all  the caches of all systems are held together; else one at a time, and each turn reads its text again. A
               turn's seconds never include reading
    prepare    is called with each new generation before its first step

    Raises UsageError if two systems write different texts.
    """
    rounds = min((len(text.turns.get(name, [])) for name in systems), default=0)
    if rounds == len(ends) and all(name in text.stats for name in systems):
        return
    written = {name: text.tokens(name)[: text.turns[name][rounds - 1]["until"]] if rounds else () for name in systems}
    generations: dict[str, Generation] = {}
    stats: dict[str, Record] = {}
    key = text.about["text"]
    reference = next(iter(systems))
    for turn, end in enumerate(ends[rounds:], rounds):
        for name, system in systems.items():
            is_new = name not in generations
            if is_new:
                generations[name] = start(engines.of(system), system, prompt, params, written[name])
                if prepare:
                    prepare(generations[name])
            generation = generations[name]
            record = write_turn(generation, end) | {
                "kind": "turn", "text": key, "system": name, "turn": turn, "end": end,
                "is_resumed": is_new and turn > 0,
                "sha256_tokens": run_statistics.sha256_tokens(generation.tokens[:end])}
            if name == reference or systems[name].has_own_text:
                record["ids"] = pack_tokens(generation.tokens[record["until"] - record["tokens"] :])
            emit(record)
            stats[name] = generation.stats()
            if not holds_all:
                written[name] = generation.tokens.copy()
                generations.pop(name).close()
                del generation
        require_one_text(text)
    for name, record in stats.items():
        emit({"kind": "stats", "text": key, "system": name, "stats": record})
    for generation in generations.values():
        generation.close()


def write_text(engine: Engine, settings: Sequence[str], prompt: Sequence[int], params: SamplingParams, turn: int,
               on_round: Callable[[MeasuredText], None] | None = None,
               prepare: Callable[[Generation], None] | None = None) -> MeasuredText:
    """One text by the drafters that `settings` name, in turns of `turn` new tokens; the first one is the reference.

    on_round  is called with the text so far after each round of turns
    prepare   is called with each new generation before its first step

    Raises UsageError if prompt and new tokens exceed the model's context, or if two drafters write different texts.
    """
    systems = systems_named(settings)
    engine.check_request(list(prompt), params)
    results = Results()
    results.add({"kind": "text", "text": "", "reference": settings[0],
                 "systems": {name: {"own_text": False} for name in systems}})
    text = results.texts[""]
    last = list(systems)[-1]

    def emit(record: Record) -> None:
        results.add(record)
        if on_round and record["system"] == last:
            on_round(text)

    ends = [*range(turn, params.max_new_tokens, turn), params.max_new_tokens]
    write_in_turns(Engines(engine), systems, prompt, params, ends, text, emit, prepare=prepare)
    return text
