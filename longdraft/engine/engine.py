"""The Python API: an engine is a loaded model with the choice of a drafter.

    engine = longdraft.load("novelist", drafter="tokenswift")
    for event in engine.generate("It was", longdraft.SamplingParams(max_new_tokens=1000, seed=7)):
        print(event.text, end="")

Where to read on, top down:

    loading.py           `load`: from files to an engine
    generation.py        one request: prefill, then steps until the text ends
    speculation/step.py  one step: a drafter proposes tokens, the target chooses, matching tokens are accepted
    drafters/            the drafters; drafters/__init__.py lists them and is where a new one is registered
    sampling/sampler.py  the one place where a token is chosen
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from longdraft import drafters, parallel
from longdraft.checkpoint.defaults import Defaults
from longdraft.engine import batching
from longdraft.engine.generation import Generation
from longdraft.engine.loaded_model import DrafterChoice, LoadedModel
from longdraft.engine.provenance import provenance
from longdraft.errors import JournalError, LongdraftError, NumericalError, UsageError
from longdraft.kernels.chain_plan import Heads
from longdraft.model.transformer import Transformer
from longdraft.parts.block import BlockHead
from longdraft.parts.eagle import Eagle
from longdraft.parts.glide import Glide
from longdraft.request.context import Prompt
from longdraft.request.events import Event
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.settings import Range
from longdraft.text.chat_template import Message
from longdraft.text.effort import Effort, find_effort
from longdraft.text.tokenizer import Tokenizer


class Engine:
    """A loaded model and the drafter that it is used with. Of texts it holds the prefix tree only (`cache_ram` of
    `load`), which changes their time."""

    def __init__(self, loaded: LoadedModel, choice: DrafterChoice) -> None:
        """Loads nothing. UsageError if the drafter needs a part that `loaded` does not have."""
        if loaded.lacks(choice):
            needed = drafters.NEEDED[choice.needs or "draft"]
            raise UsageError(f"drafter {choice.name!r} needs {needed}, which the model was loaded without; choose this "
                             "drafter when you load it", "drafter")
        self.loaded = loaded
        self.choice = choice.with_draft_name(loaded.draft_name)

    @property
    def name(self) -> str:
        """The model as `load` was given it."""
        return self.loaded.name

    @property
    def model(self) -> Transformer:
        """The target model."""
        return self.loaded.target

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    @property
    def defaults(self) -> Defaults:
        """The model's own sampling defaults."""
        return self.loaded.defaults

    @property
    def drafter(self) -> str:
        """The drafter's name."""
        return self.choice.name

    @property
    def options(self) -> Any:
        """The drafter's options."""
        return self.choice.options

    @property
    def heads(self) -> Heads | None:
        return self.loaded.heads

    @property
    def glide(self) -> Glide | None:
        return self.loaded.glide

    @property
    def eagle(self) -> Eagle | None:
        return self.loaded.eagle

    @property
    def block(self) -> BlockHead | None:
        return self.loaded.block

    @property
    def draft(self) -> Transformer | None:
        """The smaller draft model."""
        return self.loaded.draft

    @property
    def is_follower(self) -> bool:
        """Whether this process is a rank other than the first, which calls `follow` and nothing else."""
        return self.loaded.ranks.is_follower

    @property
    def provenance(self) -> dict[str, Any]:
        """The loaded files: names and hashes of the model's parts, and the bytes that decoding reads."""
        return provenance(self.loaded)

    @property
    def identity(self) -> dict[str, str]:
        """The inputs of a text besides its prompt and settings: weights, tokenizer, configuration, arithmetic."""
        return self.loaded.identity

    @property
    def fingerprint(self) -> str:
        """`identity` as a short hash. Engines with equal fingerprints write equal texts."""
        return self.loaded.fingerprint

    def drafter_bytes(self, tokens: int) -> int:
        """Bytes of the caches that drafting a text of `tokens` tokens takes, beside the text's own."""
        options, draft = self.choice.options, self.draft
        partial_rows = options.partial_rows(self.loaded.draft_copy or self.model)
        num_bytes = min(partial_rows, tokens) * self.model.cache_bytes_per_token
        if draft is None or self.drafter not in drafters.WITH_DRAFT:
            return num_bytes
        rows = options.draft_window or draft.config.max_positions
        return num_bytes + min(rows, tokens) * draft.cache_bytes_per_token

    def chat(self, messages: str | Sequence[Message], variables: Mapping[str, Any] | None = None, /,
             **options: Any) -> list[int]:
        """Token ids of messages in the model's chat template. A string is one message of the user.

        The template writes its own special tokens, so none are added. `variables` and `options` are variables of
        the template. `options` may also have `add_generation_prompt` and `continue_final_message`.
        """
        return self.tokenizer.encode(self.tokenizer.chat(messages, variables, **options), add_special_tokens=False)

    def effort(self, params: SamplingParams, variables: Mapping[str, Any] | None = None, *,
               turns_on: bool = False, is_required: bool = True) -> Effort:
        """What `reasoning_effort` and a `thinking_budget` of 0 mean for a chat with this model: variables of the chat
        template, and settings.

            effort = engine.effort(params, {"enable_thinking": True})
            generation = engine.generate(engine.chat(messages, effort.variables), effort.applied(params))

        variables    of the chat template; they win over the effort
        turns_on     turn thinking on where the template can, without an effort
        is_required  UsageError for an effort with a model that marks no thinking, and whose template has no effort
        """
        return find_effort(self.tokenizer.chat_template, self.loaded.answer_format, params.reasoning_effort,
                           params.thinking_budget, variables or {}, turns_on=turns_on,
                           is_required=is_required)

    @cached_property
    def is_tuned_for_chat(self) -> bool:
        """Whether the model ends its answers as its chat template does. The base models of some families have a
        template, too, but end texts with another token."""
        template, ends = self.tokenizer.chat_template, self.model.config.eos_token_ids
        # Most templates need no rendering, which takes a child process.
        if template is None or not template.mentions(tuple(map(self.tokenizer.letters, ends))):
            return False
        turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
        try:
            ids = self.chat(turns, add_generation_prompt=False)
        except LongdraftError:  # the template refuses these messages
            return False
        return not set(ends).isdisjoint(ids[1:])  # the first may be a BOS with the same id

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ids are checked and returned. UsageError if it is empty or of another type."""
        return self.loaded.encode(prompt)

    def check_request(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The prompt's token ids. UsageError if the model cannot serve a request with these settings."""
        return self.loaded.check_request(prompt, params)

    def with_drafter(self, name: str, options: Mapping[str, Any] | None = None) -> Engine:
        """An engine with another drafter on the same weights.

        Heads of all kinds and glide are those of this engine. A draft model that the options name is loaded; if they
        name none, it is this engine's. UsageError for options, and where the model was loaded without a part that the
        drafter needs; ModelError for a draft model that does not exist.
        """
        choice = DrafterChoice.parse(name, options)
        return Engine(self.loaded.with_draft_for(choice), choice)

    def params(self, **given: Any) -> SamplingParams:
        """Sampling settings: those given here, then the model's own defaults, then the built-in ones.

        Names are longdraft's, Hugging Face's or OpenAI's. None means not given.
        """
        return self.defaults.params(given)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, *, journal: str | Path | None = None,
                 fsync: str | float = 1.0, on_prefill: Callable[[int, int], None] | None = None,
                 logprobs: int | None = None, prompt_logprobs: int | None = None,
                 cache_salt: str | None = "", snapshot: str = "auto", snapshot_max: float = 8.0) -> Generation:
        """Write a text. Iterate over the result for its events; close it to stop early.

        params      used as they are; default: the model's defaults. See also `Engine.params`
        journal     a folder without a journal. Every token is written there before it is returned, and `resume`
                    continues the text after any interruption
        fsync       how soon the journal survives a power cut: always | never | seconds
        on_prefill  called with (tokens done, tokens in all) while the prompt is read
        logprobs    report the log-probability of each token, and of that many likeliest tokens beside it
        prompt_logprobs  the same of the prompt's tokens, as the model has them: without penalty, temperature, filter.
                    The text then takes no rows from the prefix tree
        cache_salt  the text shares rows of the prefix tree (`cache_ram` of `load`) with texts of the same salt only;
                    None: it neither takes rows from the tree nor gives any
        snapshot    auto | never | always: keep keys and values beside the journal, so that `resume` reads a file
                    instead of the text. auto: on the CPU, once the text has taken 10 seconds. Blocks of 4,096 tokens
                    are written when they are full, and the last one by `close`
        snapshot_max  GiB of the snapshot at most

        Raises UsageError, and JournalError if the folder holds a journal. Iterating raises OutputError if the journal
        cannot be written, MemoryError and NumericalError.
        """
        return Generation.start(self.loaded, self.choice, prompt, params, journal=journal, fsync=fsync,
                                on_prefill=on_prefill, logprobs=logprobs, prompt_logprobs=prompt_logprobs,
                                cache_salt=cache_salt, snapshot=snapshot, snapshot_max=snapshot_max)

    def generate_many(self, prompts: Iterable[Prompt],
                      params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                      batch_size: int = 8) -> Iterator[tuple[int, Event]]:
        """Write many texts, `batch_size` at a time. Yields (index of the prompt, event) as events come.

        Each text is bit for bit what `generate` writes; the weights are read once for all. Prompts may come from an
        endless iterator: each is taken when there is room for it. See `batch` for more control.

        params  for all prompts, or one for each; default: the model's defaults

        A text that fails has `error` on its last event; all other texts continue.

        Raises UsageError for `batch_size`, and for a single text instead of several.
        """
        if isinstance(prompts, str):
            raise UsageError("prompts is a single text; allowed: several prompts, such as a list of texts", "prompts")
        Range(1, 4096, words="1 to 4096 texts").require("batch_size", batch_size)
        return batching.generate_many(self.loaded, self.choice, iter(prompts), params, batch_size)

    def batch(self) -> batching.Batch:
        """An empty batch: texts written together, which join and leave between rounds (`add`, `step`, `remove`)."""
        return batching.Batch(self.loaded, self.choice)

    def resume(self, journal: str | Path, *, fsync: str | float = 1.0, allow_different_kernels: bool = False,
               on_prefill: Callable[[int, int], None] | None = None, cache_salt: str | None = "",
               snapshot: str = "auto", snapshot_max: float = 8.0) -> Generation:
        """Resume a journal's text: tokens and text are those that an uninterrupted run gives.

        The first event holds everything that was written before. A finished journal gives that event only.

        allow_different_kernels  accept other kernels, device, dtype or versions than the journal's. The text is then
                                 not bit for bit the uninterrupted one, and its statistics say so

        `cache_salt`, `snapshot` and `snapshot_max` are those of `generate`.

        Raises JournalError if there is no journal, another process writes it, or it was begun with another model,
        tokenizer, settings or kernels.
        """
        return Generation.resume(self.loaded, self.choice, journal, fsync=fsync,
                                 allow_different_kernels=allow_different_kernels, on_prefill=on_prefill,
                                 cache_salt=cache_salt, snapshot=snapshot, snapshot_max=snapshot_max)

    def close(self) -> None:
        """On the first of several ranks: the other ranks return from `follow`."""
        self.loaded.ranks.shut_down()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def follow(self) -> None:
        """On ranks other than the first: work on the first rank's texts until it closes its engine or ends."""
        ranks = self.loaded.ranks
        if not (isinstance(ranks, parallel.RankGroup) and ranks.is_follower):
            raise UsageError("follow() is for the ranks of a run other than the first; this engine is not one of them")
        while (request := ranks.next_request()) is not None:
            generation = Generation(self.loaded, self.choice, request.prompt.tolist(), request.params,
                                    written=request.written, prompt_logprobs=request.prompt_logprobs)
            # The first rank reports these errors. A text that it stops gives its rows to the prefix tree of each rank.
            with suppress(parallel.RequestStopped, NumericalError, JournalError), generation:
                for _ in generation:
                    pass
