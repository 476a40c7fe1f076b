"""The statistics of a run, under the names that `--stats` and the last event carry."""

from __future__ import annotations

import hashlib
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from longdraft import kernels
from longdraft.engine.loaded_model import DrafterChoice, LoadedModel
from longdraft.model.transformer import Transformer
from longdraft.parts.draft_copy import SAME
from longdraft.request.events import Finish
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation.abilities import HasSummary, memory_of
from longdraft.speculation.plain_speed import PlainSpeed
from longdraft.speculation.reuse import PrefixReuse
from longdraft.speculation.step import Step, Tally, Timings
from longdraft.text.stream import TextStream
from longdraft.version import __version__


def sha256_tokens(tokens: Sequence[int] | NDArray[np.int32]) -> str:
    """Hash of the token ids as little-endian int32: equal texts, equal hash."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()


def distinct(tokens: NDArray[np.int32], n: int) -> float:
    """Distinct n-grams over n-grams, over the whole of `tokens`; 0 where there are none."""
    if len(tokens) < n:
        return 0.0
    grams = sliding_window_view(tokens, n)
    return len(np.unique(grams, axis=0)) / len(grams)


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def of_machine(model: Transformer) -> dict[str, Any]:
    """The arithmetic of the target, and the memory that this process took."""
    return {
        "kernels": model.kernels.name,
        "device": str(model.kernels.device),
        "dtype": str(model.kernels.dtype).removeprefix("torch."),
        "quantize": model.weights.quantize,
        "threads": kernels.threads(model.kernels),
        "peak_memory_bytes": peak_memory_bytes(),
        "longdraft_version": __version__,
        "torch_version": str(torch.__version__),
    }


def of_tokens(tokens: NDArray[np.int32]) -> dict[str, Any]:
    return {"sha256_tokens": sha256_tokens(tokens)} | {f"distinct_{n}": distinct(tokens, n) for n in range(1, 5)}


def of_steps(num_tokens: int, accepted: Counter[str], decode_seconds: float, tally: Tally,
             timings: Timings) -> dict[str, Any]:
    """Counts and times of decoding.

    num_tokens  new tokens, those that the target itself added included
    accepted    drafted tokens that are part of the text, by drafter
    """
    parts = asdict(timings)
    return {
        "decode_seconds": decode_seconds,
        "tokens_per_second": num_tokens / decode_seconds if decode_seconds else 0.0,
        "steps": tally.steps,
        "draft_tokens": tally.drafted.total(),
        "accepted_tokens": accepted.total(),
        "mean_accepted_length": num_tokens / tally.steps if tally.steps else 0.0,
        "by_source": {source: {"drafted": tally.drafted[source], "accepted": accepted[source]}
                      for source in sorted(tally.drafted)},
        "timings": parts | {"other": max(0.0, decode_seconds - sum(parts.values()))},
    }


@dataclass
class RunStatistics:
    """What a text counts beside its steps (`Tally`, `Timings`), and all statistics of it.

    draft_copy   the quantised copy of the target that drafts; None: the target drafts itself
    num_resumed  tokens of earlier runs
    is_pure      whether those runs had this one's arithmetic
    accepted     drafted tokens that are part of the text, by drafter
    """

    model: LoadedModel
    choice: DrafterChoice
    params: SamplingParams
    draft_copy: Transformer | None
    num_resumed: int
    is_pure: bool
    accepted: Counter[str] = field(default_factory=Counter)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    plain_speed: PlainSpeed = field(init=False)

    def __post_init__(self) -> None:
        self.plain_speed = PlainSpeed(self.model.target.weights_in_tokens)

    def figures(self, step: Step, stream: TextStream, reuse: PrefixReuse, finish_reason: Finish | None,
                num_rewinds: int) -> dict[str, Any]:
        """The statistics so far."""
        context, drafter, target, copy = step.context, step.drafter, step.model, self.draft_copy
        num_written = stream.num_tokens - self.num_resumed
        return {
            "prompt_tokens": context.prompt_length,
            "sha256_prompt": sha256_tokens(context.slice(0, context.prompt_length)),
            "new_tokens": stream.num_tokens,
            "resumed_tokens": self.num_resumed,
            **reuse.figures(),
            "finish_reason": finish_reason,
            "seed": self.params.seed,
            "prefill_seconds": self.prefill_seconds,
            **of_steps(num_written, self.accepted, self.decode_seconds, step.tally, step.timings),
            **self.plain_speed.figures(),
            **of_tokens(context.slice(context.prompt_length, context.prompt_length + stream.num_tokens)),
            "recent_distinct_4": stream.distinct,
            "loop": stream.loop and stream.loop._asdict(),
            "thinking": stream.thinking(),
            "rewinds": num_rewinds,
            "exactness": "bit-exact" if target.kernels.is_row_invariant and self.is_pure else "distribution",
            **of_machine(target),
            "cache_bytes": step.cache.nbytes,
            "drafter_memory_bytes": memory_of(drafter),
            "draft_weights": copy.weights.quantize if copy else SAME,
            "draft_weights_bytes": copy.weights_bytes if copy else 0,
            "model": self.model.name,
            "drafter": self.choice.name,
            "drafter_options": asdict(self.choice.options),
            **(drafter.summary(num_written) if isinstance(drafter, HasSummary) else {}),
            "sampling": asdict(self.params),
        }
