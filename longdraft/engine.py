"""Load a model once, generate texts from it: the Python API and what every door stands on.

    engine = longdraft.load("novelist", drafter="tokenswift")
    for event in engine.generate("It was", longdraft.SamplingParams(max_new_tokens=1000, seed=7)):
        print(event.text, end="")
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from longdraft import drafters, kernels, statistics
from longdraft.core import Context, Event, Finish, SamplingParams
from longdraft.drafters.auto import AutoDrafter
from longdraft.drafters.corpus import Corpora
from longdraft.errors import ModelError, UsageError, check
from longdraft.model import checkpoint, defaults, fingerprint, library
from longdraft.model import config as model_config
from longdraft.model.chat_template import Message
from longdraft.model.defaults import Defaults
from longdraft.model.heads import require_model
from longdraft.model.tokenizer import StopText, Tokenizer, require_same_vocabulary
from longdraft.model.trained import Target, Trained
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Drafter, Verified, memory_of
from longdraft.speculation.step import Step, Tally, Timings
from longdraft.version import __version__

log = logging.getLogger(__name__)
PREFILL_CHUNK = 512  # prompt tokens in one forward; any number gives the same text
_QUERY_ROWS = 128  # last prompt rows that drafters are told of

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]


def load(model: str = library.DEFAULT, *, drafter: str = drafters.AUTO,
         drafter_options: Mapping[str, Any] | None = None, heads: str | None = None, device: str = "auto",
         dtype: str = "auto", quantize: str = "none", threads: int | None = None, revision: str | None = None,
         token: str | None = None, cache_dir: str | Path | None = None, offline: bool = False,
         on_load: Callable[[int, int], None] | None = None) -> Engine:
    """An engine for a bundled name, a model folder or a hub id.

    drafter          auto | plain | ngram | suffix | tokenswift | medusa | magicdec | draft-model | glide | triforce
    drafter_options  see the drafter's options, values as texts or as what they are
    heads            folder or hub id of trained heads or glide; default: those found in or beside the model
    device           auto | cpu | cuda
    dtype            auto (the checkpoint's) | float32 | bfloat16
    quantize         none | int8: weights as int8 in half of bfloat16's memory; another model, whose plain text is
                     then the text of every drafter. Holds for a draft model too, not for heads
    threads          threads for arithmetic on the CPU; default: PyTorch's choice
    revision         branch, tag or commit of a hub id (or as owner/model@revision)
    token            for private and gated repositories; default: HF_TOKEN, or where the hub's client was logged in
    cache_dir        where files from the hub are kept; default: HF_HOME's
    offline          use what was fetched before, ask nobody; default: HF_HUB_OFFLINE
    on_load          called with (bytes read, bytes in all) while the weights are read

    Raises ModelError for files that are missing, corrupt or unsupported, UsageError for settings.
    """
    check(device in ("auto", "cpu", "cuda"), "device", device, "auto, cpu or cuda")
    check(dtype in ("auto", "float32", "bfloat16"), "dtype", dtype, "auto, float32 or bfloat16")
    check(quantize in checkpoint.QUANTIZE, "quantize", quantize, " or ".join(checkpoint.QUANTIZE))
    check(threads is None or 1 <= threads <= 1024, "threads", threads, "1 to 1024")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is 'cuda', but PyTorch sees no CUDA device; use cpu or auto")
    if threads:
        kernels.set_threads(threads)
    drafters.check_name(drafter)
    hub = library.Hub(revision, token, cache_dir, offline)
    folder = library.resolve(model, hub)
    require_model(folder)
    config = model_config.read(folder)
    chosen = kernels.choose("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"),
                            config.dtype if dtype == "auto" else dtype)
    options = drafters.parse_options(drafter, drafter_options or {})
    tokenizer = Tokenizer(folder)
    _require_fit(tokenizer, config, folder)
    files = checkpoint.TensorFiles(folder, on_read=on_load)
    transformer = checkpoint.load(files, config, chosen, quantize)
    sampling = defaults.read(folder)
    if sampling.ignored:
        log.warning("%s of %s: going on without %s", defaults.FILE, model, "; ".join(sampling.ignored))
    log.info("%s: %s kernels, %s on %s, weights quantised: %s, drafter %s", model, chosen.name, chosen.dtype,
             chosen.device, quantize, drafter)
    return Engine(model, files, transformer, tokenizer, drafter, options, heads, replace(hub, revision=None),
                  sampling)


class Engine:
    """A loaded model and how it drafts. Holds no state of any text."""

    def __init__(self, name: str, files: checkpoint.TensorFiles, model: Transformer, tokenizer: Tokenizer,
                 drafter: str, options: Any, heads_name: str | None, hub: library.Hub,
                 sampling: Defaults) -> None:
        self.name = name
        self.defaults = sampling
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.options = options
        self._files = files
        self._heads_name = heads_name
        self._hub = hub
        if heads_name is not None and drafter not in drafters.WITH_HEADS:
            raise UsageError(f"drafter {drafter!r} uses no heads; leave --heads out, or use --drafter tokenswift")
        self.heads, self.glide = self._load_trained()
        self.corpora = Corpora(partial(tokenizer.encode, add_special_tokens=False), model.config.vocab_size)
        self.draft = self._load_draft(drafters.draft_model_of(options))
        if (needed := drafters.KINDS[drafter].needs) and getattr(self, needed) is None:
            raise ModelError(f"drafter {drafter!r} needs trained {needed} and {files.folder} has none; give --heads, "
                             f"train with `longdraft train {needed}`, or use --drafter magicdec")

    def _load_trained(self) -> Trained:
        """Heads and glide: those asked for, else those in the model's own files or beside them, if any."""
        if self.drafter not in drafters.WITH_HEADS:
            return Trained()
        target = Target(self.model, partial(fingerprint.of, self._files), self.tokenizer.vocabulary_sha256)
        if self._heads_name is not None:
            return target.load(library.resolve(self._heads_name, self._hub))
        try:
            return target.beside(self._files.folder)
        except ModelError as error:
            if self.drafter != drafters.AUTO:
                raise
            log.warning("going on without heads: %s", error)
            return Trained()

    def _load_draft(self, name: str) -> Transformer | None:
        """The smaller model that drafts, on the same kernels; it must speak of the same tokens."""
        if not name:
            return None
        folder = library.resolve(name, self._hub)
        config = model_config.read(folder)
        require_same_vocabulary(self.tokenizer, Tokenizer(folder), name)
        _require_fit(self.tokenizer, config, folder)
        return checkpoint.load(checkpoint.TensorFiles(folder), config, self.model.kernels,
                               self.model.weights.quantize)

    def chat(self, messages: str | Sequence[Message], **options: Any) -> list[int]:
        """Token ids of messages (a text: one of the user's) in the model's chat template.

        The template writes its own special tokens, so none are added. `options` are variables of the template.
        """
        return self.tokenizer.encode(self.tokenizer.chat(messages, **options), add_special_tokens=False)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt (ids are checked and taken as they are). UsageError if it is empty."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
        if not ids:
            raise UsageError("the prompt is empty; give at least one token of text")
        vocabulary = self.model.config.vocab_size
        bad = next((i for i in ids if not 0 <= i < vocabulary), None)
        check(bad is None, "a prompt token id", bad, f"0 to {vocabulary - 1}")
        return ids

    def params(self, **given: Any) -> SamplingParams:
        """Sampling settings: what is given here over the model's own defaults over the built-in ones.

        Names of ours, Hugging Face's or OpenAI's; None is as good as left out.
        """
        return self.defaults.params(given)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, *,
                 on_prefill: Callable[[int, int], None] | None = None) -> Generation:
        """Write a text. Iterate over the result for its events; close it to stop early.

        params      taken as they are; without any, the model's defaults apply. See also Engine.params
        on_prefill  called with (tokens done, tokens in all) while the prompt is read
        """
        params = params or self.params()
        ids = self.encode(prompt)
        limit = self.model.config.max_positions
        if len(ids) + params.max_new_tokens > limit:
            raise UsageError(f"prompt ({len(ids)} tokens) + max_new_tokens ({params.max_new_tokens}) is "
                             f"{len(ids) + params.max_new_tokens}; allowed: {limit} (the model's context limit); "
                             "shorten the prompt or write fewer tokens")
        bad = next((i for i in params.stop_token_ids if i >= self.model.config.vocab_size), None)
        check(bad is None, "stop_token_ids", bad, f"0 to {self.model.config.vocab_size - 1}")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return Generation(self, ids, params.with_seed(seed), on_prefill)


def _require_fit(tokenizer: Tokenizer, config: model_config.ModelConfig, folder: Path) -> None:
    if tokenizer.size > config.vocab_size:
        raise ModelError(f"the tokenizer in {folder} has ids up to {tokenizer.size - 1}, the model a "
                         f"vocabulary of {config.vocab_size}; they do not belong together")


class Generation(Iterator[Event]):
    """One text being written: an iterator of events that can be closed and asked for its statistics."""

    def __init__(self, engine: Engine, prompt: list[int], params: SamplingParams,
                 on_prefill: Callable[[int, int], None] | None) -> None:
        self._engine = engine
        self._params = params
        self._on_prefill = on_prefill
        self.finish_reason: Finish | None = None
        length = len(prompt) + params.max_new_tokens
        model = engine.model.for_length(length)
        draft = engine.draft and engine.draft.for_length(min(length, engine.draft.config.max_positions))
        self._eos = set() if params.ignore_eos else set(model.config.eos_token_ids)
        self._stop_ids = self._eos | set(params.stop_token_ids)
        cache = model.new_cache()
        sampler = Sampler(params, self._stop_ids, is_fast=model.kernels.name != kernels.REFERENCE)
        resources = drafters.Resources(model, cache, sampler, params, engine.heads, engine.glide, engine.corpora,
                                       draft)
        drafter: Drafter = drafters.KINDS[engine.drafter].build(engine.options, resources)
        self._step = Step(model, cache, drafter, sampler, Context(prompt), Timings(), Tally())
        self._accepted = 0
        self._num_new = 0
        self._text = engine.tokenizer.stream()
        self._stops = StopText(params.stop)
        self._prefill_seconds = 0.0
        self._decode_seconds = 0.0
        self._events = self._run()

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        """Stop the work. What was given so far stands."""
        self._events.close()
        if self.finish_reason is None:
            self.finish_reason = "cancelled"

    @property
    def held_text(self) -> str:
        """Text of the last tokens that was held back: the possible beginning of a stop text, or of a character."""
        return self._rest()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The new token ids so far."""
        start = self._step.context.prompt_length
        return self._step.context.slice(start, start + self._num_new)

    def _run(self) -> Generator[Event, None, None]:
        start = time.perf_counter()
        with kernels.alone(self._engine.model.kernels):
            self._prefill()
        self._prefill_seconds = time.perf_counter() - start
        while self.finish_reason is None:
            start = time.perf_counter()
            with kernels.alone(self._engine.model.kernels):
                accepted = self._step.run(self._params.max_new_tokens - self._num_new)
            tokens, text = self._emit(accepted.tokens)
            self._accepted += min(len(tokens), len(accepted.sources))
            self._decode_seconds += time.perf_counter() - start
            reason = self.finish_reason
            yield Event(tokens, text, reason, self.stats() if reason else None)

    def _prefill(self) -> None:
        """All of the prompt but its last token, which is the first root."""
        step = self._step
        last = len(step.context) - 1
        verified: Verified | None = None
        for start in range(0, last, PREFILL_CHUNK):
            chunk = step.context.slice(start, min(start + PREFILL_CHUNK, last)).tolist()
            result = step.model.forward(chain_rows(chunk, start), step.cache)
            step.cache.commit(range(len(chunk)))
            verified = Verified(result, range(max(0, len(chunk) - _QUERY_ROWS), len(chunk)))
            if self._on_prefill:
                self._on_prefill(start + len(chunk), last)
        step.drafter.begin(step.context, verified)

    def _emit(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], str]:
        """Tokens and text of a step up to where the text ends; sets `finish_reason` there."""
        shown: list[str] = []
        for count, token in enumerate(tokens, 1):
            self._num_new += 1
            if token in self._stop_ids:
                self.finish_reason = "eos" if token in self._eos else "stop"
            else:
                text, stopped = self._text.push(token), False
                if self._num_new >= self._params.min_new_tokens:
                    text, stopped = self._stops.push(text)
                shown.append(text)
                if stopped:
                    self.finish_reason = "stop"
                    return tuple(tokens[:count]), "".join(shown)
            if self.finish_reason is None and self._num_new == self._params.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                shown.append(self._rest())
                return tuple(tokens[:count]), "".join(shown)
        return tuple(tokens), "".join(shown)

    def _rest(self) -> str:
        """The text that was held back, up to a stop text in it."""
        text, stopped = self._text.flush(), False
        if self._num_new >= self._params.min_new_tokens:
            text, stopped = self._stops.push(text)
        if stopped:
            self.finish_reason = "stop"
        return text + self._stops.flush()

    def stats(self) -> dict[str, Any]:
        """The statistics so far, under the names of the `--stats` file."""
        engine, step, model = self._engine, self._step, self._engine.model
        sampling = asdict(self._params)
        return {
            "prompt_tokens": step.context.prompt_length,
            "sha256_prompt": statistics.sha256_tokens(step.context.slice(0, step.context.prompt_length)),
            "new_tokens": self._num_new,
            "finish_reason": self.finish_reason,
            "seed": self._params.seed,
            "prefill_seconds": self._prefill_seconds,
            **statistics.of_steps(self._num_new, self._accepted, self._decode_seconds, step.tally, step.timings),
            **statistics.of_tokens(self.tokens),
            "exactness": "bit-exact" if model.kernels.is_row_invariant else "distribution",
            "kernels": model.kernels.name,
            "device": str(model.kernels.device),
            "dtype": str(model.kernels.dtype).removeprefix("torch."),
            "quantize": model.weights.quantize,
            "threads": kernels.threads(model.kernels),
            "peak_memory_bytes": statistics.peak_memory_bytes(),
            "drafter_memory_bytes": memory_of(step.drafter),
            "model": engine.name,
            "drafter": engine.drafter,
            "drafter_options": asdict(engine.options),
            **(step.drafter.summary() if isinstance(step.drafter, AutoDrafter) else {}),
            "sampling": sampling,
            "longdraft_version": __version__,
            "torch_version": str(torch.__version__),
        }
