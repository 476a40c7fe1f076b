"""Texts on the device: equality of all drafters with plain decoding, their speed, and long runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longdraft import drafters
from longdraft.cache.full import FullCache
from longdraft.cache.taps import TapLog
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.parts.eagle import Eagle
from longdraft.request.context import Context
from longdraft.request.tree import Tree
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Drafter, Verified
from longdraft.speculation.routine import atomic, run_alone
from longdraft.speculation.step import Step, Tally, Timings
from longdraft_bench.cuda.models import Bench, synchronise
from longdraft_bench.cuda.plan import CudaPlan
from longdraft_bench.cuda.speed import SAMPLING
from longdraft_bench.cuda.visit import is_fatal

_LAST = 64  # tokens of the prompt that the large model reads; at most half of a shorter one
_BEYOND = 16  # tokens
WARM_STEPS = 4  # first steps of a text, which capture graphs
_RESERVE_S = 20.0  # left at the end of a long text for its last window and the document


class _LyingDrafter:
    """Drafts the true continuation with some tokens changed, and wrong siblings beside it."""

    def __init__(self, truth: Sequence[int], start: int) -> None:
        self._truth, self._start = truth, start

    def begin(self, context: Context, verified: object) -> None: ...

    def observe(self, context: Context, accepted: object) -> None: ...

    @atomic
    def propose(self, context: Context, max_depth: int) -> Tree:
        place = len(context) - self._start
        draft = [token if (place + i) % 5 else (token + 1) % 7
                 for i, token in enumerate(self._truth[place : place + 6])]
        tokens, parents = [context.last, 3, 3], [-1, 0, 1]
        for depth, token in enumerate(draft):
            parents.append(len(tokens) - 1 if depth else 0)
            tokens.append(token)
        return Tree(tuple(tokens), tuple(parents), ("", *["lying"] * (len(tokens) - 1))).pruned(max_depth)


class Text(NamedTuple):
    """A text that is being written after a prompt, whose last token is the root of the first tree."""

    step: Step
    prompt: int

    @property
    def new(self) -> list[int]:
        found: list[int] = self.step.context.slice(self.prompt, len(self.step.context)).tolist()
        return found

    def write(self, count: int, until: Callable[[], bool] = lambda: False) -> list[tuple[float, int]]:
        """Write `count` more tokens, and some beyond, so that the last step is one as all others.

        Returns the seconds and tokens of each step.
        """
        done: list[tuple[float, int]] = []
        end = len(self.step.context) + count
        while (left := end - len(self.step.context)) > 0 and not until():
            began, before = time.perf_counter(), len(self.step.context)
            run_alone(self.step.run(left + _BEYOND))
            done.append((time.perf_counter() - began, len(self.step.context) - before))
        return done


class _Parts(NamedTuple):
    """What a drafter needs besides the model: a quantised copy that drafts, an EAGLE head."""

    copy: Transformer | None = None
    eagle: Eagle | None = None


def _begin(model: Transformer, cache: FullCache, prompt: Sequence[int], last: int, build: Callable[..., Drafter],
           parts: _Parts) -> Text:
    """Read the last tokens of the prompt with the large model, and begin a text after it."""
    start = len(prompt) - 1 - last
    assert cache.length == start
    cache.taps = None
    if parts.eagle:
        cache.taps = TapLog(model.kernels, parts.eagle.taps, model.config.hidden_size)
    result = model.forward(chain_rows(prompt[start:-1], start), cache, is_prompt=True)
    cache.commit(range(last))
    context, sampler = Context(list(prompt)), Sampler(SAMPLING, kernels=model.kernels)
    drafter = build(drafters.Resources(model, cache, sampler, SAMPLING, draft_copy=parts.copy, eagle=parts.eagle))
    drafter.begin(context, Verified(result, [-1]))
    return Text(Step(model, cache, drafter, sampler, context, Timings(), Tally()), len(prompt))


def _builder(name: str, options: dict[str, Any], truth: Sequence[int], start: int) -> Callable[..., Drafter]:
    if not name:
        return lambda resources: _LyingDrafter(truth, start)
    parsed = drafters.parse_options(name, options)
    return lambda resources: drafters.new_drafter(name, parsed, resources)


def _parts(bench: Bench, shape: str, name: str, options: dict[str, Any]) -> _Parts:
    """What the drafter and its options need. UsageError where these kernels lack a format."""
    quantize = options.get("draft_weights", "same")
    return _Parts(None if quantize == "same" else bench.stretched(shape, quantize),
                  bench.eagle(shape) if name == "eagle" else None)


def begin_after(plan: CudaPlan, bench: Bench, shape: str, context: int, drafter: str | tuple[str, dict[str, Any]],
                truth: Sequence[int], wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter) -> Text:
    """A text after `context` tokens.

    drafter  a label of the plan, or a drafter and its options
    truth    the true continuation, which the liar needs
    wrap     is put around the drafter

    UsageError where these kernels lack a format.
    """
    name, options = plan.drafters[drafter] if isinstance(drafter, str) else drafter
    model, last = bench.stretched(shape), min(_LAST, context // 2)
    parts = _parts(bench, shape, name, options)
    prompt = bench.tokens(context + 1)
    build = _builder(name, options, truth, len(prompt))
    return _begin(model, bench.filled(shape, context - last), prompt, last, lambda resources: wrap(build(resources)),
                  parts)


def texts(plan: CudaPlan, bench: Bench, shape: str, context: int) -> dict[str, Any]:
    """Each drafter writes the same tokens after the same text: its speed, and where its text first differs.

    The speed leaves out the first steps. A drafter that fails is reported as failed, and the others run.
    """
    truth: list[int] = []
    found: dict[str, Any] = {}
    for label in plan.drafters:
        try:
            text = begin_after(plan, bench, shape, context, label, truth)
            done = text.write(plan.tokens)
        except Exception as error:  # other drafters must still be measured
            if is_fatal(error):
                raise
            found[label] = {"failed": f"{type(error).__name__}: {error}"[:500]}
            continue
        synchronise(text.step.model.kernels.device)
        new = text.new
        truth = truth or new
        measured = done[WARM_STEPS:] or done
        differs = next((place for place, (a, b) in enumerate(zip(truth, new, strict=False)) if a != b), None)
        found[label] = {
            "ms_a_token": 1e3 * sum(seconds for seconds, _ in measured) / sum(count for _, count in measured),
            "tokens_a_step": len(new) / len(done), "is_equal": differs is None,
            "first_difference": differs, "step_ms": [round(1e3 * seconds, 3) for seconds, _ in done],
            "accepted": dict(text.step.tally.accepted), "draft_s": text.step.timings.draft}
        bench.keep({"context": context, "tokens": plan.tokens, "drafters": found})
    plain = found.get("plain", {}).get("ms_a_token")
    for figures in found.values():
        if plain and "ms_a_token" in figures:
            figures["in_plain_speed"] = plain / figures["ms_a_token"]
    return {"context": context, "tokens": plan.tokens, "drafters": found}


def long_text(plan: CudaPlan, bench: Bench, shape: str) -> dict[str, Any]:
    """A long drafted text, with windows in which plain decoding writes the same places from the same rows.

    A window ends with a comparison of the two. The figures so far are kept in a file after each window.
    """
    model, first = bench.stretched(shape), plan.contexts[0]
    last = min(_LAST, first // 2)
    label = _fastest(plan, bench.folder, shape)
    name, options = plan.drafters[label]
    cache = bench.filled(shape, first - last)
    cache.reserve(first + plan.whole + plan.window + 1)
    text = _begin(model, cache, bench.tokens(first + 1), last, _builder(name, options, [], 0),
                  _parts(bench, shape, name, options))
    windows, decoded, written = [], 0.0, 0
    path = bench.folder / f"long-{shape}.json"

    def is_late() -> bool:
        return bench.seconds_left() < _RESERVE_S

    while written < plan.whole and not is_late():
        plain = _window(text, plan.window)
        done = text.write(plan.window)
        drafted = text.new[written : written + len(plain["tokens"])]
        windows.append({"at": len(text.step.context) - len(drafted), "plain_ms_a_token": plain["ms_a_token"],
                        "is_equal": drafted == plain["tokens"][: len(drafted)]})
        done += text.write(min(plan.whole // 4 - plan.window, plan.whole - written - plan.window), is_late)
        decoded += sum(seconds for seconds, _ in done)
        written = len(text.new)
        found = {"drafter": label, "options": options, "tokens": written, "decode_seconds": decoded,
                 "tokens_per_s": written / decoded, "tokens_a_step": written / text.step.tally.steps,
                 "windows": windows, "seconds_for_all": decoded / written * plan.whole}
        path.write_text(json.dumps(found), encoding="utf-8")
        np.save(bench.folder / f"long-{shape}.npy", np.array(text.new, dtype=np.int32))
    return found


def _window(text: Text, count: int) -> dict[str, Any]:
    """Plain decoding from here for `count` tokens, after which its rows are dropped again."""
    model, cache, _, sampler, context, *_ = text.step
    assert isinstance(cache, FullCache)
    length = cache.length
    plain = Step(model, cache, drafters.new_drafter("plain", drafters.parse_options("plain", {}), drafters.Resources(
        model, cache, sampler, SAMPLING)), Sampler(SAMPLING, kernels=model.kernels),
        Context(context.slice(0, len(context)).tolist()), Timings(), Tally())
    done = Text(plain, len(context)).write(count)
    tokens = plain.context.slice(len(context), len(plain.context)).tolist()
    cache.truncate(length)
    measured = done[WARM_STEPS:] or done
    return {"tokens": tokens, "ms_a_token": 1e3 * sum(seconds for seconds, _ in measured) / len(measured)}


def _fastest(plan: CudaPlan, folder: Path, shape: str) -> str:
    """The drafter that the slice `length` found fastest for this shape; the liar is none."""
    names = [label for label, (name, _) in plan.drafters.items() if name]
    path, best = folder / "length.json", names[-1]
    if not path.is_file():
        return best
    totals: dict[str, list[float]] = {}
    for part, held in json.loads(path.read_text(encoding="utf-8")).get("parts", {}).items():
        if part.startswith(f"texts {shape} ") and held.get("state") == "done":
            for label, figures in held["figures"]["drafters"].items():
                if label in names and figures.get("is_equal"):
                    totals.setdefault(label, []).append(figures["ms_a_token"])
    return min(totals, key=lambda label: sum(totals[label]) / len(totals[label])) if totals else best


def bundled(plan: CudaPlan, bench: Bench) -> dict[str, Any]:
    """Statistics of the bundled model's long text with `auto`. Its journal is resumed by the next visit."""
    from longdraft.engine.loading import load

    journal = bench.folder / "journal"
    engine = load(drafter="auto" if plan.device == "cuda" else "plain", device=plan.device, dtype=plan.dtype,
                  kernels_name=plan.kernels_names[0])
    params = replace(SAMPLING, max_new_tokens=plan.whole)
    text = engine.resume(journal) if journal.exists() else engine.generate("It was", params, journal=journal)
    with text:
        for _ in text:
            if bench.seconds_left() < _RESERVE_S:
                break
        return text.stats()
