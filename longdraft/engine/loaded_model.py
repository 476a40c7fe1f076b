"""The inputs of every request: a loaded model and the choice of a drafter. Both are frozen.

    loading.py     reads a model and its drafting parts from files  ->  LoadedModel
    engine.py      LoadedModel + DrafterChoice                      ->  Engine, the public API
    generation.py  LoadedModel + DrafterChoice + prompt + settings  ->  Generation, one request
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from longdraft import drafters, parallel
from longdraft.cache.prefix import PrefixTree
from longdraft.checkpoint import fingerprint, hub
from longdraft.checkpoint.defaults import Defaults
from longdraft.checkpoint.tensor_source import TensorSource
from longdraft.drafters.auto.shared import SharedStatistics
from longdraft.drafters.corpus import Corpora
from longdraft.drafters.options import DrafterOptions
from longdraft.errors import ModelError, UsageError, check
from longdraft.journal.config_hash import config_sha256
from longdraft.journal.format import UNNAMED
from longdraft.kernels.chain_plan import Heads
from longdraft.model.transformer import Transformer
from longdraft.parts.auxiliary import DRAFT_FOLDER, Target, TrainedParts, load_draft_model, optional_part
from longdraft.parts.block import BlockHead
from longdraft.parts.draft_copy import SAME, load_copy
from longdraft.parts.eagle import Eagle
from longdraft.parts.glide import Glide
from longdraft.request.context import Prompt
from longdraft.request.sampling_params import BREAKERS, SamplingParams
from longdraft.request.structured import Structure
from longdraft.sampling import grammar
from longdraft.sampling.grammar import GrammarCompiler, GrammarRules
from longdraft.sampling.sampler import MarkedTokens
from longdraft.sampling.thought import Markers, ThoughtRules
from longdraft.speculation.drafter import Drafter
from longdraft.text.harmony import ANSWER_HEADER, Harmony
from longdraft.text.thinking import TAG_TOKENS, AnswerFormat, closed_thinking, find_format
from longdraft.text.thought_rules import check_thought_rules, needs_marks, thought_markers, thought_rules, with_closing
from longdraft.text.tokenizer import Tokenizer
from longdraft.version import __version__

log = logging.getLogger(__name__)
_warned: WeakSet[Tokenizer] = WeakSet()  # of prompts that begin with their first token


@dataclass(frozen=True)
class DrafterChoice:
    """A drafter by name, with its parsed options."""

    name: str
    options: DrafterOptions

    @classmethod
    def parse(cls, name: str, options: Mapping[str, Any] | None) -> DrafterChoice:
        """UsageError for an unknown drafter or option, and for a value that is out of range."""
        return cls(name, drafters.parse_options(name, options or {}))

    @property
    def needs(self) -> str:
        """The part that this drafter cannot work without: "heads", "glide", "eagle", "block", "draft" or ""."""
        return drafters.DRAFTERS[self.name].needs

    @property
    def draft_name(self) -> str:
        """The smaller model that the options name; "" if they name none."""
        return self.options.draft_model

    def build(self, resources: drafters.Resources) -> Drafter:
        """The drafter of one request, with the part that it needs."""
        return drafters.new_drafter(self.name, self.options, resources)

    def with_draft_name(self, name: str) -> DrafterChoice:
        """This choice, with `name` as its draft model if it has that option and does not set it."""
        options: Any = self.options
        if hasattr(options, "model") and not options.model:
            return DrafterChoice(self.name, replace(options, model=name))
        return self


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A target model with everything that drafts for it. Of requests it holds the prefix tree only.

    name               as the user gave it: a bundled name, a folder or a hub id
    files              the weights on disk, for their fingerprint
    target             the model that chooses every token
    defaults           the model's own sampling defaults
    hub_options        how names of further models are resolved
    corpora            texts of the drafter `suffix`, indexed when a request needs them
    knowledge          what the drafter `auto` measured about its candidates, by its options; all requests share it
    heads_name         the folder or hub id that the user named for heads of any kind or glide
    heads, glide, eagle, block  trained parts, if found
    draft, draft_name  a smaller draft model, and the name it was loaded by; "" for the one in the model's folder
    draft_copy         a quantised copy of the target for self-drafting chains, and the option it was made for
    quantized_cache    folder of cached quantised weights; None: nothing is cached
    ranks              the processes that share the model
    prefixes           keys and values of former texts, for texts that begin alike; None: none are kept
    """

    name: str
    files: TensorSource
    target: Transformer
    tokenizer: Tokenizer
    defaults: Defaults
    hub_options: hub.Hub
    corpora: Corpora
    knowledge: dict[DrafterOptions, SharedStatistics]
    heads_name: str | None = None
    heads: Heads | None = None
    glide: Glide | None = None
    eagle: Eagle | None = None
    block: BlockHead | None = None
    draft: Transformer | None = None
    draft_name: str = ""
    draft_copy: Transformer | None = None
    draft_weights: str = SAME
    quantized_cache: Path | None = None
    ranks: parallel.SingleProcess = field(default_factory=parallel.SingleProcess)
    prefixes: PrefixTree | None = None

    @classmethod
    def load_parts(cls, name: str, files: TensorSource, target: Transformer, tokenizer: Tokenizer,
                   choice: DrafterChoice, *, heads_name: str | None, hub_options: hub.Hub, defaults: Defaults,
                   ranks: parallel.SingleProcess | None = None, quantized_cache: Path | None = None) -> LoadedModel:
        """A target that is loaded already, with the parts that `choice` drafts with.

        ModelError or UsageError if a part that was asked for by name cannot be used; other parts are left out then.
        """
        parts = TrainedParts()
        if choice.name in drafters.WITH_HEADS and choice.options.may_use_head:
            owner = Target(target, partial(fingerprint.weights_sha256, files), tokenizer.vocabulary_sha256,
                           tokenizer.encode if tokenizer.vocabulary() else None, choice.options.head_weights)
            parts = (owner.find(files.folder, choice.needs) if heads_name is None
                     else owner.load(hub.resolve(heads_name, hub_options)))
            if heads_name is not None:
                drafters.check_loaded_heads(choice.name, heads_name, parts)
        corpora = Corpora(partial(tokenizer.encode, add_special_tokens=False), target.config.vocab_size)
        loaded = cls(name, files, target, tokenizer, defaults, hub_options, corpora, {}, heads_name, *parts,
                     quantized_cache=quantized_cache, ranks=ranks or parallel.SingleProcess())
        loaded = loaded.with_draft_for(choice)
        if loaded.lacks(choice):
            cure = "--drafter-option model=NAME" if choice.needs == "draft" else "--heads"
            raise ModelError(f"drafter {choice.name!r} needs {drafters.NEEDED[choice.needs]} and {files.folder} has "
                             f"none; give {cure}, train with `longdraft train {choice.needs}`, or use --drafter "
                             "magicdec")
        return loaded

    def lacks(self, choice: DrafterChoice) -> bool:
        """Whether a part that the drafter cannot work without is missing."""
        is_other = choice.draft_name not in ("", self.draft_name)
        return is_other or bool(choice.needs and getattr(self, choice.needs) is None)

    def with_draft_for(self, choice: DrafterChoice) -> LoadedModel:
        """This model with the draft model and the quantised copy that `choice` drafts with, loaded now if they are not
        loaded yet. ModelError for a draft model that does not exist."""
        loaded, name = self, choice.draft_name or self.draft_name
        is_other = name != self.draft_name
        if choice.name in drafters.WITH_DRAFT and (self.draft is None or is_other):
            loaded = replace(self, draft=self._load_draft(name, choice.needs), draft_name=name)
        weights = choice.options.copy_weights
        if weights not in (SAME, self.draft_weights):
            is_other = True
            loaded = replace(loaded, draft_weights=weights,
                             draft_copy=load_copy(self.files, self.target, weights, self.quantized_cache))
        if is_other:  # its costs and its acceptance differ
            loaded = replace(loaded, knowledge={})
        return loaded

    def _load_draft(self, name: str, required: str) -> Transformer | None:
        """The draft model that `name` names, else the one in the model's own folder; None if there is none."""
        if name:
            return load_draft_model(hub.resolve(name, self.hub_options), name, self.target, self.tokenizer)
        folder = self.files.folder / DRAFT_FOLDER
        if not (folder / "config.json").is_file():
            return None
        return optional_part(
            "draft", lambda: load_draft_model(folder, str(folder), self.target, self.tokenizer), required)

    def target_for(self, length: int, choice: DrafterChoice) -> Transformer:
        """The target for a text of `length` tokens, prompt included, with the taps that the drafter reads."""
        target = self.target.for_length(length)
        head = self.block or self.eagle
        is_read = choice.name in drafters.WITH_STATES and choice.options.may_use_head
        return target.with_taps(head.taps) if head and is_read else target

    def draft_for(self, length: int, choice: DrafterChoice) -> Transformer | None:
        """The draft model for a text of `length` tokens, of which it may read a window only."""
        window = choice.options.draft_window or length
        return self.draft and self.draft.for_length(min(length, window, self.draft.config.max_positions))

    def draft_copy_for(self, length: int, choice: DrafterChoice) -> Transformer | None:
        """The quantised copy that drafts a text of `length` tokens; None if the drafter uses none."""
        copy = self.draft_copy if choice.options.copy_weights != SAME else None
        return copy and copy.for_length(length)

    def knowledge_for(self, choice: DrafterChoice) -> SharedStatistics:
        """What the requests with these options of `auto` share. Others have other candidates, or other costs."""
        known = self.knowledge.get(choice.options)
        return known or self.knowledge.setdefault(choice.options, SharedStatistics(self.target.weights_in_tokens))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ids are checked and returned. UsageError if it is empty or of another type."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _row_of_ids(prompt)
        if not ids:
            raise UsageError("the prompt is empty; give at least one token of text")
        if isinstance(prompt, str) and len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.begin_id:
            _warn_of_two_begins(self.tokenizer)
        vocabulary = self.target.config.vocab_size
        bad = next((i for i in ids if not 0 <= i < vocabulary), None)
        token = "" if bad is None else self.tokenizer.letters(bad)
        check(bad is None, "a prompt token id", bad, f"0 to {vocabulary - 1}",
              f"the model has no row for the token {token!r}, so leave that text out" if token else "")
        return ids

    def settings(self, params: SamplingParams | None) -> SamplingParams:
        """The settings of a request: those given, or the model's defaults. UsageError for another type."""
        if params is None:
            return self.defaults.params({})
        check(isinstance(params, SamplingParams), "params", type(params).__name__, "SamplingParams",
              "engine.params(max_new_tokens=...) makes them from names")
        return params

    def check_request(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The prompt's token ids. UsageError if the model cannot serve a request with these settings."""
        ids = self.encode(prompt)
        limit = self.target.config.max_positions
        total = len(ids) + params.max_new_tokens
        if total > limit:
            raise UsageError(f"prompt ({len(ids)} tokens) + max_new_tokens ({params.max_new_tokens}) is {total}; "
                             f"allowed: {limit} (the model's context limit); shorten the prompt or write fewer tokens")
        self.check_settings(params)
        self.grammar_rules(params, ids)
        return ids

    def check_settings(self, params: SamplingParams) -> None:
        """UsageError if the model cannot serve these settings: for token ids and breakers, not yet for grammars."""
        vocabulary = self.target.config.vocab_size
        bad = next((i for i in params.stop_token_ids if i >= vocabulary), None)
        check(bad is None, "stop_token_ids", bad, f"0 to {vocabulary - 1}")
        bad = next((i for i, _ in params.logit_bias if i >= vocabulary), None)
        check(bad is None, "logit_bias", bad, f"token ids, 0 to {vocabulary - 1}")
        check(not params.reasoning_effort, "reasoning_effort", params.reasoning_effort, "chats only",
              "thinking_budget limits the thought of any text")
        if params.thought_rule and self.answer_format is None:
            raise needs_marks(params.thought_rule)
        if self.answer_format is not None:
            check_thought_rules(self.answer_format, self._markers, params)
        if params.dry_multiplier:
            unknown = next((text for text in params.dry_sequence_breakers
                            if text not in BREAKERS and not self.tokenizer.tokens_with(text)), None)
            check(unknown is None, "dry_sequence_breakers", unknown, "texts that are part of a token of this model")

    def marked_tokens(self, params: SamplingParams) -> MarkedTokens:
        """The tokens that DRY and XTC treat by their text."""
        breakers, protected = set[int](), set[int]()
        inside = params.inside_thought
        if params.dry_multiplier or inside.dry_multiplier:
            breakers.update(*map(self.tokenizer.tokens_with, params.dry_sequence_breakers))
        if params.has_xtc or inside.has_xtc:
            protected = {*self.tokenizer.tokens_with("\n"), *self.target.config.eos_token_ids, *params.stop_token_ids}
        rows = range(self.target.config.vocab_size)  # the tokenizer may have a few ids more
        return MarkedTokens(frozenset(filter(rows.__contains__, breakers)),
                            frozenset(filter(rows.__contains__, protected)))

    def thought_rules(self, params: SamplingParams, prompt: Sequence[int]) -> ThoughtRules | None:
        """The rules of a request's thought; None for a model that marks none. UsageError if it cannot follow them."""
        if self.answer_format is None:
            return None
        return thought_rules(self.answer_format, self._markers, params, prompt)

    def completed(self, params: SamplingParams, prompt: Sequence[int]) -> SamplingParams:
        """The settings with what follows from the model and the prompt: the tokens that close a thought, and where a
        structure begins in an answer with channels, whose header the prompt does not have. UsageError as
        `with_closing`."""
        form = self.answer_format
        if (isinstance(form, Harmony) and params.structured_outputs and params.structured_outputs[0] != "tools"
                and not params.structured_after and form.begins_message(prompt)):
            params = replace(params, structured_after=ANSWER_HEADER)
        return self.with_closing(params)

    def with_closing(self, params: SamplingParams) -> SamplingParams:
        """The settings with the tokens that close a thought, where a rule may need them. UsageError for a message that
        cannot be used."""
        is_needed = params.steers_thoughts or params.thinking_close_at is not None
        form = self.answer_format
        return with_closing(form, params) if is_needed and form is not None else params

    @cached_property
    def answer_format(self) -> AnswerFormat | None:
        """How the model's answers show their thinking; None: they show none."""
        return find_format(self.tokenizer)

    @cached_property
    def _markers(self) -> Markers:
        assert self.answer_format is not None
        return thought_markers(self.answer_format)

    def grammar_rules(self, params: SamplingParams, prompt: Sequence[int] = ()) -> GrammarRules | None:
        """The grammar of a request. UsageError, in one line, if it or the model cannot be used.

        If the prompt ends with an opened <think>, as some chat templates do, the grammar begins after </think>.
        """
        if not params.structured_outputs:
            return None
        config = self.target.config
        if not config.eos_token_ids:
            raise UsageError("structured_outputs needs a model with an end-of-text token, which this one has not",
                             "structured_outputs")
        grammar.version()  # raises if llguidance is not installed
        return self._grammars.rules(*self._grammar_key(params, prompt))

    def knows_grammar(self, params: SamplingParams, prompt: Sequence[int]) -> bool:
        """Whether `grammar_rules` answers at once."""
        return not params.structured_outputs or self._grammars.is_known(*self._grammar_key(params, prompt))

    def grammar_warnings(self, params: SamplingParams, prompt: Sequence[int]) -> tuple[str, ...]:
        """What a grammar that is known leaves out of the schemas of functions."""
        if not params.structured_outputs or not self.knows_grammar(params, prompt):
            return ()
        return self._grammars.rules(*self._grammar_key(params, prompt)).warnings

    @property
    def _grammars(self) -> GrammarCompiler:
        config = self.target.config
        return self.tokenizer.grammars(config.vocab_size, tuple(config.eos_token_ids))

    def _grammar_key(self, params: SamplingParams, prompt: Sequence[int]) -> tuple[Structure, str]:
        """The grammar, and the text after which it begins."""
        kind, text = params.structured_outputs
        if params.steers_thoughts and params.structured_after == ANSWER_HEADER:
            return (kind, text), grammar.HEADER_ONLY
        if params.steers_thoughts and not params.structured_after and self.answer_format is not None:
            # The sampler finds the end of the thought. The grammar of tools has its own beginning.
            return (kind, text), "" if kind == "tools" else grammar.GAP
        return (kind, text), params.structured_after or closed_thinking(self.tokenizer.decode(prompt[-TAG_TOKENS:]))

    @property
    def arithmetic(self) -> dict[str, str]:
        """The inputs of the last bits of logits: kernels, device, dtype, versions and the number of ranks.

        The machine is named where it is not x86-64: the C library's logarithms differ, and so do PyTorch's sums.
        """
        kernels = self.target.kernels
        size = parallel.shard_of(kernels).size
        degree = {"tensor_parallel": str(size)} if size > 1 else {}  # ranks add up in an order of their own
        if kernels.device.type == "cuda":
            degree |= {"gpu": torch.cuda.get_device_name(kernels.device),
                       "triton_version": importlib.metadata.version("triton")}
        if platform.machine() != UNNAMED["machine"]:
            degree["machine"] = platform.machine()
        return {"kernels": kernels.name, "device": str(kernels.device),
                "dtype": str(kernels.dtype).removeprefix("torch."), "longdraft_version": __version__,
                "torch_version": str(torch.__version__), **degree}

    @property
    def identity(self) -> dict[str, str]:
        """The inputs of a text besides its prompt and settings: hashes of all inputs, and the arithmetic.

        ModelError if the weights on disk have changed since they were loaded.
        """
        return {"weights": fingerprint.weights_sha256(self.files), "tokenizer": self.tokenizer.sha256,
                "config": config_sha256(self.target.whole), "quantize": self.target.weights.quantize,
                **self.arithmetic}

    @property
    def fingerprint(self) -> str:
        """`identity` as a short hash. Models with equal fingerprints write equal texts."""
        return "fp_" + hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]


def _warn_of_two_begins(tokenizer: Tokenizer) -> None:
    """Log a warning, once for all prompts of a tokenizer."""
    if tokenizer not in _warned:
        _warned.add(tokenizer)
        log.warning("the prompt begins with %r, which the tokenizer adds to every prompt, so the model reads it twice; "
                    "leave it out", tokenizer.letters(tokenizer.begin_id or 0))


def _row_of_ids(prompt: object) -> list[int]:
    """The token ids of a list, a tuple or an array [T] of whole numbers. UsageError for everything else."""
    try:
        ids = np.asarray(prompt)
    except (TypeError, ValueError, RuntimeError):  # ragged lists; tensors of a device or with gradients
        ids = np.empty((0, 0))
    if ids.shape != (0,) and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise UsageError(f"the prompt is a {type(prompt).__name__}; allowed: a text, or one row of token ids (whole "
                         "numbers)", "prompt")
    return [int(token) for token in ids.tolist()]
