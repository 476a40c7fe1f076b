"""The program of each rank in tests/unit/test_parallel.py.

Rank 0 prints one line of JSON: for every drafter and sampling setting the hash of the text.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import torch

import longdraft
from helpers.checkpoints import load
from longdraft import parallel
from longdraft.drafters.auto import calibration
from longdraft.model.transformer import chain_rows
from longdraft.request.sampling_params import SamplingParams

SAMPLINGS = {
    "warm": dict(temperature=1.0, min_p=0.02, repetition_penalty=1.2, penalty_window=30),
    "greedy": dict(temperature=0.0),
    "filters": dict(temperature=0.8, top_k=40, top_p=0.95),
}
SMALL = dict(budget=40, sinks=4, remainder="true")
# Who writes with which model and samplings. phi3: fused weights, heads rotated by half, a head that is not the
# embedding; qwen2: biases; block, one-pass: heads that guess several places in one pass.
PLANS: dict[str, list[tuple[str, str, dict[str, object], tuple[str, ...]]]] = {
    "few drafters": [
        ("llama", "plain", {}, ("warm",)),
        ("llama", "tokenswift", SMALL | dict(recent=8, room=8, chain=4), ("warm",)),
        ("llama", "auto", {}, ("warm",))],
    "every drafter": [
        ("llama", "plain", {}, ("warm", "greedy", "filters")),
        ("llama", "tokenswift", SMALL | dict(recent=8, room=8, chain=4), ("warm", "greedy", "filters")),
        ("llama", "magicdec", SMALL | dict(refresh=8), ("warm",)),
        ("llama", "triforce", dict(budget=64, chain=5), ("warm",)),
        ("llama", "draft-model", dict(model="small"), ("warm",)),
        *(("llama", name, {}, ("warm",)) for name in ("ngram", "suffix", "medusa", "glide", "eagle", "auto")),
        *((model, name, options, ("warm",)) for model in ("phi3", "qwen2")
          for name, options in (("plain", {}), ("magicdec", SMALL | dict(refresh=8))))],
    "blocks": [(model, name, {}, ("warm", "greedy")) for model, names in (
        ("block", ("plain", "block", "auto")), ("one-pass", ("plain", "eagle"))) for name in names],
    "hybrids": [
        ("qwen3_5", "plain", {}, ("warm", "greedy")),
        ("qwen3_5", "tokenswift", SMALL | dict(recent=8, room=8, chain=4), ("warm", "greedy")),
        ("qwen3_5", "draft-model", dict(model="small-hybrid"), ("warm",)),
        ("qwen3_5.gguf", "plain", {}, ("warm",)),
        ("qwen3_5.gguf", "magicdec", SMALL | dict(refresh=8), ("warm",)),
        *(("qwen3_5", name, {}, ("warm",)) for name in ("suffix", "glide", "eagle", "auto"))],
    "experts": [(model, name, options, ("warm",)) for model in ("qwen3_next", "qwen3_5_moe", "qwen3_moe", "mixtral",
                                                                      "gpt_oss")
                for name, options in (("plain", {}), ("magicdec", SMALL | dict(refresh=8)))],
}


def main(folder: Path, journals: Path, plan: str) -> None:
    """folder: of the models; journals: an empty folder; plan: a key of PLANS."""
    found: dict[str, dict[str, object]] = {}
    sums_are_in_the_order_of_ranks()
    size = int(os.environ["WORLD_SIZE"])
    calibration._MAX_REPEATS = calibration._MIN_REPEATS = 1  # four ranks on few processors are slow
    os.chdir(folder)
    for model, name, options, samplings in PLANS[plan]:
        engine = longdraft.load(model, drafter=name, drafter_options=options, threads=1, tensor_parallel=size)
        if name == "plain":
            logits_are_those_of_one_process(engine, Path(model))
        if engine.is_follower:
            engine.follow()
            continue
        for sampling in samplings:
            found.setdefault(f"{model} {sampling}", {})[name] = write(engine, SAMPLINGS[sampling])
        if name == "tokenswift":
            found[f"{model} warm"]["resumed"] = resumed(engine, journals / model)
            found[f"{model} warm"]["batch"] = batched(engine)
            found[f"{model} warm"]["scored"] = scored(engine)
            found[f"{model} warm"]["again"] = again(engine)
            found[f"{model} continued"] = continued(engine)
        engine.close()
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(found))


def logits_are_those_of_one_process(engine: longdraft.Engine, folder: Path) -> None:
    """Up to the rounding of sums over ranks."""
    tokens, found = list(range(2, 42)), []
    for model in (engine.model, load(folder)):
        cache = model.new_cache()
        prompt = model.forward(chain_rows(tokens[:30], 0), cache, 30).logits
        cache.commit(range(30))
        found.append(torch.cat([prompt, model.forward(chain_rows(tokens[30:], 30), cache, 10).logits]))
    torch.testing.assert_close(*found, atol=2e-3, rtol=1e-3)


def sums_are_in_the_order_of_ranks() -> None:
    """Sums over ranks are added in the order of ranks, bit for bit, for short and long tensors."""
    group = parallel.join(int(os.environ["WORLD_SIZE"]), "cpu")
    parts = [torch.randn(270, 1001, generator=torch.Generator().manual_seed(rank)) for rank in range(group.size)]
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    assert torch.equal(group.sum(parts[group.rank]), expected), "many numbers"
    assert torch.equal(group.sum(parts[group.rank][:3]), expected[:3]), "few numbers"
    assert torch.equal(group.concatenate(parts[group.rank][:3]), torch.cat([part[:3] for part in parts], 1))


PROMPT = "It was the best of times, it was the worst of times, " * 3


def params(settings: dict[str, object]) -> SamplingParams:
    return SamplingParams(max_new_tokens=16, seed=5, on_loop="off", ignore_eos=True, **settings)


def write(engine: longdraft.Engine, settings: dict[str, object]) -> list[object]:
    *_, last = engine.generate(PROMPT, params(settings))
    return [last.stats["sha256_tokens"], last.stats["draft_tokens"], last.stats["exactness"]]


def again(engine: longdraft.Engine) -> list[object]:
    """The text after a prompt that all ranks have read before."""
    *_, last = engine.generate(PROMPT, params(SAMPLINGS["warm"]))
    return [last.stats["sha256_tokens"], last.stats["cached_tokens"], last.stats["exactness"]]


def continued(engine: longdraft.Engine) -> dict[str, list[object]]:
    """A prompt that goes on with a text that was stopped: with its rows, and without any rows of other texts."""
    with engine.generate(PROMPT, params(SAMPLINGS["warm"])) as text:
        while len(text.tokens) < 5:
            next(text)
    prompt, found = [*text.prompt, *text.tokens.tolist(), *range(60, 80)], {}
    for name, salt, figure in (("reused", "", "cached_tokens"), ("computed", None, "draft_tokens")):
        *_, last = engine.generate(prompt, params(SAMPLINGS["warm"]), cache_salt=salt)
        found[name] = [last.stats["sha256_tokens"], last.stats[figure], last.stats["exactness"]]
    return found


def resumed(engine: longdraft.Engine, journal: Path) -> list[object]:
    """A text that is interrupted before its first token and in the middle, and then resumed."""
    engine.generate(PROMPT, params(SAMPLINGS["warm"]), journal=journal).close()
    for events in (3, 1000):
        with engine.resume(journal) as generation:
            for event, _ in zip(generation, range(events), strict=False):
                last = event
    return [last.stats["sha256_tokens"], last.stats["resumed_tokens"], last.stats["exactness"]]


def scored(engine: longdraft.Engine) -> list[object]:
    """A prompt whose tokens have log-probabilities, and before that one that is only read."""
    settings = params(SAMPLINGS["warm"])
    only, = engine.generate(PROMPT, replace(settings, max_new_tokens=0), prompt_logprobs=1)
    first, *_, last = engine.generate(PROMPT, settings, prompt_logprobs=1)
    assert first.prompt_logprobs == only.prompt_logprobs and not only.tokens
    assert [each.token for each in first.prompt_logprobs] == engine.encode(PROMPT)
    return [last.stats["sha256_tokens"], last.stats["draft_tokens"], last.stats["exactness"]]


def batched(engine: longdraft.Engine) -> list[object]:
    """A batch that is left in the middle of its text, then one that runs to the end."""
    for events in (3, 1000):
        seen = 0
        with engine.batch() as batch:
            batch.add(PROMPT, params(SAMPLINGS["warm"]))
            while batch and seen < events:
                told = batch.step()
                seen += len(told)
                last = told[-1][1] if told else None
    return [last.stats["sha256_tokens"], last.stats["draft_tokens"], last.stats["exactness"]]
