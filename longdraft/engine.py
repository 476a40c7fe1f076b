"""Load a model once, generate texts from it: the Python API and what every door stands on.

    engine = longdraft.load("novelist", drafter="tokenswift")
    for event in engine.generate("It was", longdraft.SamplingParams(max_new_tokens=1000, seed=7)):
        print(event.text, end="")
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longdraft import batching, drafters, kernels, parallel, run_statistics
from longdraft.core import Event, Prompt, SamplingParams
from longdraft.drafters.corpus import Corpora
from longdraft.drafters.cost_model import SharedStatistics
from longdraft.errors import JournalError, ModelError, NumericalError, UsageError, check
from longdraft.generation import Generation
from longdraft.journal import Header, Journal, Run, differences, parse_fsync
from longdraft.journal import read as read_journal
from longdraft.model import checkpoint, defaults, fingerprint, hub, sizing
from longdraft.model import config as model_config
from longdraft.model.auxiliary import Target, Trained
from longdraft.model.chat_template import Message
from longdraft.model.defaults import Defaults
from longdraft.model.heads import require_model
from longdraft.model.tokenizer import Tokenizer, require_same_vocabulary
from longdraft.model.transformer import Transformer
from longdraft.version import __version__

log = logging.getLogger(__name__)
_DRAFT = "draft"  # folder of a smaller model within a model's own


def load(model: str = hub.DEFAULT_MODEL, *, drafter: str = drafters.AUTO,
         drafter_options: Mapping[str, Any] | None = None, heads: str | None = None, device: str = "auto",
         dtype: str = "auto", quantize: str = "none", threads: int | None = None, revision: str | None = None,
         token: str | None = None, cache_dir: str | Path | None = None, offline: bool = False,
         kernels_name: str | None = None, tensor_parallel: int = 1,
         on_load: Callable[[int, int], None] | None = None) -> Engine:
    """An engine for a bundled name, a model folder or a hub id.

    drafter          auto | plain | ngram | suffix | tokenswift | medusa | magicdec | draft-model | glide | triforce
    drafter_options  see the drafter's options, values as texts or as what they are
    heads            folder or hub id of trained heads or glide; default: those found in or beside the model
    device           auto | cpu | cuda
    dtype            auto (the checkpoint's) | float32 | bfloat16 | float16 (on CUDA)
    quantize         none | int8: weights as int8 in half of bfloat16's memory; another model, whose plain text is
                     then the text of every drafter. Holds for a draft model too, not for heads
    threads          threads for arithmetic on the CPU; default: PyTorch's choice
    revision         branch, tag or commit of a hub id (or as owner/model@revision)
    token            for private and gated repositories; default: HF_TOKEN, or where the hub's client was logged in
    cache_dir        where files from the hub are kept; default: HF_HOME's
    offline          use what was fetched before, ask nobody; default: HF_HUB_OFFLINE
    kernels_name     certain kernels, as LONGDRAFT_KERNELS names them; default: its, else the fastest
    tensor_parallel  ranks that share the model, started by torchrun, all with the same arguments; on those behind the
                     first call `follow`
    on_load          called with (bytes read, bytes in all) while the weights are read

    Raises ModelError for files that are missing, corrupt or unsupported, UsageError for settings.
    """
    check(device in ("auto", "cpu", "cuda"), "device", device, "auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is 'cuda', but PyTorch sees no CUDA device; use cpu or auto")
    device = "cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu")
    dtypes = ("auto", "float32", "bfloat16", *(("float16",) if device == "cuda" else ()))
    check(dtype in dtypes, "dtype", dtype, f"{', '.join(dtypes[:-1])} or {dtypes[-1]}",
          "float16 is for CUDA devices" if dtype == "float16" else "")
    check(quantize in checkpoint.QUANTIZE, "quantize", quantize, " or ".join(checkpoint.QUANTIZE))
    check(threads is None or 1 <= threads <= 1024, "threads", threads, "1 to 1024")
    check(1 <= tensor_parallel <= 1024, "tensor_parallel", tensor_parallel, "1 to 1024")
    group = parallel.join(tensor_parallel, device) if tensor_parallel > 1 else None
    if threads is None and group:
        threads = group.cores  # torchrun asks for one
    if threads:
        kernels.set_threads(threads)
    options = drafters.parse_options(drafter, drafter_options or {})
    drafters.check_heads(drafter, heads)
    hub_options = hub.Hub(revision, token, cache_dir, offline)
    folder = hub.resolve(model, hub_options)
    require_model(folder)
    config = model_config.read_config(folder)
    chosen = kernels.choose(device, config.dtype if dtype == "auto" else dtype, kernels_name)
    sizing.require_room(config, chosen, quantize, tensor_parallel)
    if group:
        chosen = parallel.ParallelKernels(chosen, group)
    tokenizer = Tokenizer(folder)
    _require_fit(tokenizer, config, folder)
    files = checkpoint.TensorFiles(folder, on_read=on_load)
    transformer = checkpoint.load_transformer(files, config, chosen, quantize)
    sampling = defaults.read_defaults(folder)
    if sampling.ignored:
        log.warning("%s of %s: going on without %s", defaults.FILE, model, "; ".join(sampling.ignored))
    log.info("%s: %s kernels, %s on %s, weights quantised: %s, drafter %s", model, chosen.name, chosen.dtype,
             chosen.device, quantize, drafter)
    engine = Engine(model, files, transformer, tokenizer, drafter, options, heads, replace(hub_options, revision=None),
                    sampling, parallel.RankGroup(group) if group else None)
    if group:
        group.require_same({**engine.identity, "drafter": drafter, "drafter options": str(options)})
    return engine


class Engine:
    """A loaded model and how it drafts. Holds no state of any text."""

    def __init__(self, name: str, files: checkpoint.TensorFiles, model: Transformer, tokenizer: Tokenizer,
                 drafter: str, options: Any, heads_name: str | None, hub_options: hub.Hub,
                 sampling: Defaults, team: parallel.RankGroup | None = None) -> None:
        self.name = name
        self.defaults = sampling
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.options = options
        self.team: parallel.SingleProcess = team or parallel.SingleProcess()
        self._files = files
        self._heads_name = heads_name
        self._hub = hub_options
        self.heads, self.glide = self._load_trained()
        self.corpora = Corpora(partial(tokenizer.encode, add_special_tokens=False), model.config.vocab_size)
        self._draft_name = options.draft_model  # empty: the one in the model's own folder, if any
        self.draft = self._load_draft(self._draft_name)
        self.shared_statistics = SharedStatistics(model.weights_in_tokens)
        self._require_trained()

    def _require_trained(self) -> None:
        if (needed := drafters.DRAFTERS[self.drafter].needs) and getattr(self, needed) is None:
            what, cure = ("a smaller model", "--drafter-option model=NAME") if needed == "draft" else (
                f"trained {needed}", "--heads")
            raise ModelError(f"drafter {self.drafter!r} needs {what} and {self._files.folder} has none; give {cure}, "
                             f"train with `longdraft train {needed}`, or use --drafter magicdec")

    def _load_trained(self) -> Trained:
        """Heads and glide: those asked for, else those in the model's own files or beside them, if any."""
        if self.drafter not in drafters.WITH_HEADS:
            return Trained()
        target = Target(self.model, partial(fingerprint.weights_sha256, self._files), self.tokenizer.vocabulary_sha256)
        if self._heads_name is not None:
            return target.load(hub.resolve(self._heads_name, self._hub))
        try:
            return target.beside(self._files.folder)
        except ModelError as error:
            if self.drafter != drafters.AUTO:
                raise
            log.warning("going on without heads: %s", error)
            return Trained()

    def _load_draft(self, name: str) -> Transformer | None:
        """The smaller model that drafts, on the same kernels: the one named, else the one in the model's own folder, if
        any. It must speak of the same tokens."""
        folder = hub.resolve(name, self._hub) if name else self._files.folder / _DRAFT
        if self.drafter not in drafters.WITH_DRAFT or not (name or (folder / "config.json").is_file()):
            return None
        config = model_config.read_config(folder)
        require_same_vocabulary(self.tokenizer, Tokenizer(folder), name or str(folder))
        _require_fit(self.tokenizer, config, folder)
        return checkpoint.load_transformer(checkpoint.TensorFiles(folder), config, parallel.local(self.model.kernels),
                               self.model.weights.quantize)

    @property
    def provenance(self) -> dict[str, Any]:
        """What was loaded: the model's name, hashes of its weights and tokenizer, what decoding it reads."""
        folder = self._files.folder
        files = {part: folder / part / checkpoint.WEIGHTS for part in ("heads", "glide", "draft")}
        trained = {f"{part}_sha256": hashlib.sha256(file.read_bytes()).hexdigest() for part, file in files.items()
                   if not self._heads_name and file.exists()}
        return {"model": hub.lasting_name(self.name, folder), "weights_sha256": fingerprint.weights_sha256(self._files),
                "tokenizer_sha256": self.tokenizer.sha256, "heads": self._heads_name, **trained,
                "quantize": self.model.weights.quantize,
                "weights_bytes": sum(weight.nbytes for weight in self.model.linears),
                "cache_bytes_per_token": self.model.cache_bytes_per_token}

    def drafter_bytes(self, tokens: int) -> int:
        """Of the caches that drafting a text of so many tokens takes, beside the text's own."""
        found: int = min(self.options.partial_rows, tokens) * self.model.cache_bytes_per_token
        if self.draft is None or self.drafter not in drafters.WITH_DRAFT:
            return found
        rows: int = self.options.draft_window or self.draft.config.max_positions
        return found + min(rows, tokens) * self.draft.cache_bytes_per_token

    def chat(self, messages: str | Sequence[Message], /, **options: Any) -> list[int]:
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

    def with_drafter(self, name: str, options: Mapping[str, Any] | None = None, *, may_load: bool = True) -> Engine:
        """This engine with another drafter, on the same weights; heads are those that this one has found, and a smaller
        model that is not named is this one's. may_load: a smaller model may be read for it.

        UsageError for options, or where it needs what was not loaded and may not be; ModelError where there is none.
        """
        other, ours = copy.copy(self), self._draft_name
        other.drafter, other.options = name, drafters.parse_options(name, options or {})
        if ours and hasattr(other.options, "model"):
            other.options = replace(other.options, model=other.options.model or ours)
        wanted = other.options.draft_model
        if may_load:
            is_another = wanted not in ("", ours)
            if self.draft is None or is_another:
                other.draft = other._load_draft(wanted)
            if is_another:
                other._draft_name, other.shared_statistics = wanted, SharedStatistics(self.model.weights_in_tokens)
            other._require_trained()
            return other
        needs = drafters.DRAFTERS[name].needs
        if (needs and getattr(self, needs) is None) or wanted not in ("", ours):
            raise UsageError(f"drafter {name!r} needs {needs or 'a smaller model'}, which this engine was loaded "
                             "without", "drafter")
        return other

    def keep(self, generation: Generation, journal: str | Path) -> None:
        """A journal of what a generation without one has written so far, for `resume` to go on with."""
        header = self._header(generation.prompt, generation.params)
        with Journal.create(Path(journal), header, self._run(0, header)) as writer:
            if len(generation.tokens):
                writer.append(generation.tokens.tolist(), 0, generation.decode_seconds)

    def params(self, **given: Any) -> SamplingParams:
        """Sampling settings: what is given here over the model's own defaults over the built-in ones.

        Names of ours, Hugging Face's or OpenAI's; None is as good as left out.
        """
        return self.defaults.params(given)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, *, journal: str | Path | None = None,
                 fsync: str | float = 1.0, on_prefill: Callable[[int, int], None] | None = None,
                 logprobs: int | None = None) -> Generation:
        """Write a text. Iterate over the result for its events; close it to stop early.

        params      taken as they are; without any, the model's defaults apply. See also Engine.params
        journal     a folder that has none yet: every token is written there before it is given, and `resume` goes
                    on after any end
        fsync       how soon the journal survives a power cut too: always | never | seconds
        on_prefill  called with (tokens done, tokens in all) while the prompt is read
        logprobs    events tell the log-probability of each token, and of so many of the likeliest beside it

        Raises UsageError; JournalError where the folder holds a journal; on the way OutputError where the journal
        cannot be written, MemoryError, NumericalError.
        """
        params = params or self.params()
        seed = secrets.randbits(63) if params.seed is None else params.seed
        ids, params = self.checked(prompt, params), params.with_seed(seed)
        interval = parse_fsync(fsync)
        check(logprobs is None or 0 <= logprobs <= self.model.config.vocab_size, "logprobs", logprobs,
              f"0 to {self.model.config.vocab_size}")
        generation = Generation(self, ids, params, on_prefill, logprobs=logprobs)
        if journal is not None:  # now that nothing else can refuse the text: a journal must not be left for none
            header = self._header(ids, params)
            generation.write_to(Journal.create(Path(journal), header, self._run(0, header), interval))
        return generation

    def generate_many(self, prompts: Iterable[Prompt],
                      params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                      batch_size: int = 8) -> Iterator[tuple[int, Event]]:
        """Write many texts, `batch_size` of them side by side: (place among the prompts, event), as they come.

        Each text is, to the bit, what `generate` gives for its prompt; the weights are read once for all (see
        `batch`, for more control). Prompts may come from an endless iterator: each is taken when there is room.

        params   for all, or for each prompt; without any, the model's defaults

        A text that fails has `error` on its last event, and the others go on. UsageError for `batch_size`.
        """
        check(1 <= batch_size <= 4096, "batch_size", batch_size, "1 to 4096 texts")
        return batching.generate_many(self, iter(prompts), params, batch_size)

    def batch(self) -> batching.Batch:
        """An empty batch: texts written side by side, which join and leave between its rounds (`add`, `step`,
        `remove`)."""
        return batching.Batch(self)

    def resume(self, journal: str | Path, *, fsync: str | float = 1.0, allow_different_kernels: bool = False,
               on_prefill: Callable[[int, int], None] | None = None) -> Generation:
        """Go on with a journal's text, to the tokens and the text that the uncut run would have given.

        The first event holds all that was written before. A finished journal gives that event and nothing more.

        allow_different_kernels  go on with other kernels, device, dtype or versions than the journal's: the text is
                                 no longer bit for bit the uncut one, and its statistics say so

        Raises JournalError where there is no journal, another process writes it, or model, tokenizer, settings or
        kernels are others than the ones it was begun with.
        """
        folder, interval = Path(journal), parse_fsync(fsync)
        found = read_journal(folder)
        writer = None
        if found.finish is None:
            writer, found = Journal.open(folder, interval)
        try:
            params = found.header.params
            now = self._header(self.checked(found.header.prompt, params), params)
            text, arithmetic = differences(found.header, now)
            if text:
                raise JournalError(f"the journal {folder} belongs to something else: {'; '.join(text)}; give "
                                   "--model what it was begun with")
            if arithmetic and writer and not allow_different_kernels:
                raise JournalError(f"the journal {folder} was begun with other kernels: {'; '.join(arithmetic)}; with "
                                   "--allow-different-kernels the text goes on, but is not the uncut one to the bit")
            if len(found.tokens) and int(found.tokens.max()) >= self.model.config.vocab_size:
                raise JournalError(f"the journal {folder} holds a token id {int(found.tokens.max())}; allowed: 0 to "
                                   f"{self.model.config.vocab_size - 1}")
            runs = found.runs
            if writer:
                runs = [*runs, self._run(len(found.tokens), now)]
            is_pure = all(run.arithmetic == found.header.arithmetic for run in runs)
            generation = Generation(self, found.header.prompt, params, on_prefill, found.tokens, is_pure)
            if writer:
                writer.begin(runs[-1])
                generation.write_to(writer)
            return generation
        except BaseException:
            if writer:
                writer.close()
            raise

    def close(self) -> None:
        """On the first of several ranks: the others return from `follow`."""
        self.team.dismiss()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def follow(self) -> None:
        """On ranks behind the first: write along with it, until it closes its engine or ends."""
        assert isinstance(self.team, parallel.RankGroup) and self.team.follows
        while (request := self.team.listen()) is not None:
            generation = Generation(self, request.prompt.tolist(), request.params, written=request.written)
            with suppress(parallel.Stopped, NumericalError, JournalError):  # the first rank says so
                for _ in generation:
                    pass

    def checked(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The prompt's ids. UsageError where model and settings cannot work with them."""
        ids = self.encode(prompt)
        limit = self.model.config.max_positions
        if len(ids) + params.max_new_tokens > limit:
            raise UsageError(f"prompt ({len(ids)} tokens) + max_new_tokens ({params.max_new_tokens}) is "
                             f"{len(ids) + params.max_new_tokens}; allowed: {limit} (the model's context limit); "
                             "shorten the prompt or write fewer tokens")
        bad = next((i for i in params.stop_token_ids if i >= self.model.config.vocab_size), None)
        check(bad is None, "stop_token_ids", bad, f"0 to {self.model.config.vocab_size - 1}")
        bad = next((i for i, _ in params.logit_bias if i >= self.model.config.vocab_size), None)
        check(bad is None, "logit_bias", bad, f"token ids, 0 to {self.model.config.vocab_size - 1}")
        return ids

    @cached_property
    def identity(self) -> dict[str, str]:
        """What a text depends on beside its prompt and settings: weights, tokenizer, configuration, arithmetic."""
        header = self._header([0], SamplingParams(seed=0))
        return {"weights": header.weights, "tokenizer": header.tokenizer, "config": header.config,
                "quantize": header.quantize, **header.arithmetic}

    @property
    def fingerprint(self) -> str:
        """`identity` in a word: engines with the same one write the same texts."""
        return "fp_" + hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]

    def _header(self, prompt: Sequence[int], params: SamplingParams) -> Header:
        """What a text of this engine depends on."""
        model, arithmetic = self.model, self.model.kernels
        return Header(
            model=hub.lasting_name(self.name, self._files.folder),
            weights=fingerprint.weights_sha256(self._files),
            tokenizer=self.tokenizer.sha256,
            config=hashlib.sha256(json.dumps(asdict(model.whole), sort_keys=True).encode()).hexdigest(),
            prompt_sha256=run_statistics.sha256_tokens(np.array(prompt, dtype=np.int32)),
            prompt=list(prompt),
            sampling=json.loads(json.dumps(asdict(params))),
            eos_token_ids=list(model.config.eos_token_ids),
            quantize=model.weights.quantize,
            arithmetic={"kernels": arithmetic.name, "device": str(arithmetic.device),
                        "dtype": str(arithmetic.dtype).removeprefix("torch."), "longdraft_version": __version__,
                        "torch_version": str(torch.__version__), **self._degree()},
            exactness="bit-exact" if arithmetic.is_row_invariant else "distribution",
            drafter=self.drafter,
            drafter_options=json.loads(json.dumps(asdict(self.options))),
            heads=self._heads_name,
        )

    def _degree(self) -> dict[str, str]:
        """Ranks add their parts up in another order than one process does."""
        size = parallel.part_of(self.model.kernels).size
        return {"tensor_parallel": str(size)} if size > 1 else {}

    def _run(self, token: int, header: Header) -> Run:
        began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Run(began, token, header.arithmetic, self.drafter, kernels.threads(self.model.kernels))


def _require_fit(tokenizer: Tokenizer, config: model_config.ModelConfig, folder: Path) -> None:
    if tokenizer.size > config.vocab_size:
        raise ModelError(f"the tokenizer in {folder} has ids up to {tokenizer.size - 1}, the model a "
                         f"vocabulary of {config.vocab_size}; they do not belong together")


def load_for(header: Header, *, model: str | None = None, drafter: str | None = None,
             drafter_options: Mapping[str, Any] | None = None, heads: str | None = None, threads: int | None = None,
             token: str | None = None, cache_dir: str | Path | None = None, offline: bool = False,
             on_load: Callable[[int, int], None] | None = None) -> Engine:
    """An engine like the one that a journal was begun with, on the same kernels where this machine has them.

    model                             where the model lies now, if not where it did
    drafter, drafter_options, heads   default: the journal's; the text does not depend on them
    """
    is_same = drafter in (None, header.drafter)
    if is_same:
        drafter_options, heads = drafter_options or header.drafter_options, heads or header.heads
    device = header.arithmetic.get("device", "auto").partition(":")[0]
    asked = header.arithmetic.get("kernels", "")
    is_asked = kernels.VARIABLE not in os.environ and asked in kernels.available(device)
    return load(model or header.model, drafter=drafter or header.drafter, drafter_options=drafter_options, heads=heads,
                device=device, dtype=header.arithmetic.get("dtype", "auto"), quantize=header.quantize, threads=threads,
                token=token, cache_dir=cache_dir, offline=offline, kernels_name=asked if is_asked else None,
                tensor_parallel=int(header.arithmetic.get("tensor_parallel", "1")), on_load=on_load)


def resume(journal: str | Path, *, fsync: str | float = 1.0, allow_different_kernels: bool = False,
           on_prefill: Callable[[int, int], None] | None = None, **options: Any) -> Generation:
    """Load what a journal was begun with and go on: `Engine.resume`, with the `options` of `load_for`."""
    engine = load_for(read_journal(Path(journal)).header, **options)
    return engine.resume(journal, fsync=fsync, allow_different_kernels=allow_different_kernels, on_prefill=on_prefill)
