"""longdraft itself, for `longdraft bench peers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from longdraft import kernels
from longdraft.cache.full import FullCache
from longdraft.drafters.auto.calibration import random_cache
from longdraft.drafters.plain import PlainDrafter
from longdraft.engine.loading import load
from longdraft.model.transformer import chain_rows
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Step, Tally, Timings
from longdraft.version import __version__
from longdraft_bench.machine.roofline import ModelCopies

_PREFILL_ROWS = 512  # rows of a forward while a prompt is read


class StepEngine:
    def __init__(self, folder: str, threads: int, longest: int, quantize: str = "none") -> None:
        kernels.set_threads(threads)
        torch.set_num_threads(1)  # as generation does: PyTorch's threads would compete with those of the kernels
        models = ModelCopies(folder, kernels.choose("cpu", "bfloat16"), quantize)
        self._model = models.model
        self.version = f"{__version__} ({models.kernels.name}{_suffix(quantize)})"
        self._begin(self._model.new_cache(), [])

    def prefill(self, tokens: Sequence[int]) -> None:
        cache = self._model.new_cache()
        for start in range(0, len(tokens), _PREFILL_ROWS):
            chunk = tokens[start : start + _PREFILL_ROWS]
            self._model.forward(chain_rows(chunk, start), cache)
            cache.commit(range(len(chunk)))
        self._begin(cache, tokens)

    def fill(self, length: int, limit_s: float) -> tuple[str, int]:
        self._begin(random_cache(self._model, length), [5] * length)
        return "random", length

    def step(self, token: int) -> int:
        if len(self._context) == self._cache.length:  # the first step after a prompt
            self._context.extend([token])
        return run_alone(self._step.run(1)).tokens[0]

    def _begin(self, cache: FullCache, tokens: Sequence[int]) -> None:
        self._cache, self._context = cache, Context(tokens)
        sampler = Sampler(SamplingParams(temperature=0))
        self._step = Step(self._model, cache, PlainDrafter(), sampler, self._context, Timings(), Tally())


class TextEngine:
    """longdraft's own generation with any drafter."""

    def __init__(self, folder: str, threads: int, longest: int, draft: str | None = None,
                 quantize: str = "none") -> None:
        self._engine = load(folder, threads=threads, dtype="bfloat16", cache_ram=0, quantize=quantize)
        self._draft = draft
        self.version = f"{__version__} ({self._engine.model.kernels.name}{_suffix(quantize)})"

    def write(self, prompt: Sequence[int], count: int, drafter: str = "plain") -> Iterator[int]:
        options = {"model": self._draft} if drafter == "draft-model" else {}
        params = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True, on_loop="off")
        text = self._engine.with_drafter(drafter, options).generate(prompt, params)
        written = 0
        for _ in text:
            yield from (int(token) for token in text.tokens[written:])
            written = len(text.tokens)


def _suffix(quantize: str) -> str:
    return "" if quantize == "none" else f", {quantize}"
