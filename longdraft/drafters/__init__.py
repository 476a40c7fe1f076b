"""The drafters by name. A drafter guesses the next tokens; it changes the speed of a generation, never its text.

**Where a token is drafted.** `Step.run` (longdraft/speculation/step.py) calls `propose` of the request's drafter. It
returns a tree of guesses, which one forward of the target verifies. Each drafter is a class with `begin`, `propose` and
`observe` (the protocol `Drafter` in longdraft/speculation/drafter.py), in a module with its options:

    auto          auto/           the fastest of the drafters below, chosen by measurements while writing
    plain         plain.py        no drafts: one token for each forward
    ngram         ngram.py        what followed the last token earlier, from a table of the text's n-grams
    suffix        suffix.py       what followed the longest suffix of the text earlier, here or in a corpus
    tokenswift    self_draft.py   the target on a partial cache, then trained heads and n-grams
    magicdec      self_draft.py   the target on a partial cache, then suffix matches
    medusa        medusa.py       trained heads on the last verified row
    draft-model   draft_model.py  a smaller model
    glide         glide.py        one trained layer that reads the target's cache
    eagle         eagle.py        trained layers that read the target's own states: a chain, or a tree from one pass
    block         block.py        trained layers that guess a block of tokens in one pass
    triforce      triforce.py     a head or a small model, for the target on a partial cache, for the target

CONTRIBUTING.md has the steps to add one. Several drafters use

    options.py            the base class of options, and reading them from text
    chain.py              chains of forwards
    confidence.py         where a chain ends
    template.py           trees of guesses of heads, in fixed places
    marginal_tree.py      trees of the likeliest guesses that are made in one pass
    matches.py            what `ngram` (ngram_table.py) and `suffix` (suffix_index.py, corpus.py) have in common
    layer_drafter.py      what `glide`, `eagle` and `block` have in common
    streaming_model.py    a smaller model that reads a window of the text
    draft_vocabulary.py   the likely tokens of a text, to which a chain's guesses are limited
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from longdraft import kernels
from longdraft.cache.full import FullCache
from longdraft.cache.partial import PartialCache
from longdraft.drafters import options as drafter_options
from longdraft.drafters.auto import calibration, costs
from longdraft.drafters.auto.drafter import AutoDrafter, AutoOptions
from longdraft.drafters.auto.shared import Guesser, SharedStatistics
from longdraft.drafters.block import BlockDrafter, BlockModel, BlockOptions
from longdraft.drafters.chain import SMALL_BYTES
from longdraft.drafters.corpus import Corpora
from longdraft.drafters.draft_model import DraftModelDrafter, DraftModelOptions
from longdraft.drafters.draft_vocabulary import VocabularySize, vocabulary_size
from longdraft.drafters.eagle import EagleDrafter, EagleDraftModel, EagleOptions, ParallelEagleDrafter
from longdraft.drafters.glide import GlideDrafter, GlideOptions
from longdraft.drafters.medusa import MedusaDrafter, MedusaOptions
from longdraft.drafters.ngram import NgramDrafter, NgramOptions
from longdraft.drafters.options import DrafterOptions
from longdraft.drafters.plain import PlainDrafter, PlainOptions
from longdraft.drafters.self_draft import MagicDecOptions, SelfDrafter, TokenSwiftOptions, new_partial_cache
from longdraft.drafters.suffix import SuffixDrafter, SuffixOptions
from longdraft.drafters.triforce import Reader, TriForceDrafter, TriForceOptions, new_reader, tapped_drafts
from longdraft.errors import UsageError
from longdraft.kernels.chain_plan import Heads
from longdraft.model.transformer import Transformer
from longdraft.parts.block import BlockHead
from longdraft.parts.eagle import Eagle
from longdraft.parts.glide import Glide
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.cost_clock import CostClock
from longdraft.speculation.drafter import Drafter
from longdraft.system import processor
from longdraft.version import __version__

AUTO = "auto"
_LONGEST = 18  # drafted tokens that a head reads in `auto`


class Resources(NamedTuple):
    """The parts of an engine that a drafter of one request may use.

    model, cache        the target, and its KV cache of this text
    sampler, params     the request's sampler and settings
    heads, glide, eagle, block  trained parts for the target, if any
    corpora             the engine's corpora
    draft               a smaller model with the target's tokenizer, if any
    partial             a partial cache that several drafters of this request share; None: a drafter makes its own
    reader              what `eagle` or `block` drafts with, shared likewise with `triforce`
    clock               the time that this request takes; None: the wall clock, if no other request runs
    draft_copy          a quantised copy of the target for self-drafting chains; None: they draft with the target
    knowledge           what the engine's requests share about the candidates of `auto`
    """

    model: Transformer
    cache: FullCache
    sampler: Sampler
    params: SamplingParams
    heads: Heads | None = None
    glide: Glide | None = None
    corpora: Corpora | None = None
    draft: Transformer | None = None
    partial: PartialCache | None = None
    reader: Reader | None = None
    clock: CostClock | None = None
    knowledge: SharedStatistics | None = None
    draft_copy: Transformer | None = None
    eagle: Eagle | None = None
    block: BlockHead | None = None

    @property
    def reads_states(self) -> Eagle | BlockHead | None:
        """The part that reads states of the target; a model has one at most."""
        return self.block or self.eagle

    @property
    def drafting(self) -> Transformer:
        """The model that self-drafting chains draft with."""
        return self.draft_copy or self.model

    @property
    def levels(self) -> bool:
        """Whether a head can draft for a copy that drafts for the target, and may gain: not for a copy so small that
        drafting a chain in one call gains more."""
        copy = self.draft_copy
        return self.reads_states is not None and copy is not None and copy.weights_bytes > SMALL_BYTES


class DrafterSpec(NamedTuple):
    """An entry of `DRAFTERS`.

    options  the dataclass of its options
    build    makes the drafter of one request from options and resources
    needs    the part of `Resources` without which it cannot draft
    may_use  other parts that it uses where they are there
    in_auto  options with which `auto` tries it, if the part that it needs is there; None: `auto` does not try it
    in_auto_with  another property of `Resources` without which `auto` does not try it; "": there is none
    prior    share of right guesses that `auto` expects before it has drafted
    guesses_with  its model, for drafters whose guesses are right equally often; "": no other drafter has it
    """

    options: type[DrafterOptions]
    build: Callable[[Any, Resources], Drafter]
    needs: Literal["", "heads", "glide", "eagle", "block", "draft"] = ""
    may_use: tuple[str, ...] = ()
    in_auto: Mapping[str, Any] | None = None
    prior: float = 0.6
    guesses_with: str = ""
    in_auto_with: str = ""

    def uses(self, *parts: str) -> bool:
        """Whether it uses one of these parts."""
        return bool({self.needs, *self.may_use} & {*parts})


def _build_auto(options: AutoOptions, resources: Resources) -> Drafter:
    if resources.draft is not None and resources.draft.config.max_positions < options.draft_window:
        resources = resources._replace(draft=None)
    resources = _with_shared_cache(resources, options.draft_vocabulary)
    candidates = _candidates(options, resources)
    identity = {**_costs_identity(resources), "head": options.head_weights,
                "vocabulary": vocabulary_size(options.draft_vocabulary, resources.drafting),
                "rows": repr(MagicDecOptions().partial_budget(resources.drafting))}
    shared = resources.knowledge or SharedStatistics()
    clock = resources.clock or CostClock(always=True)

    def random_text_candidates(cache: FullCache, sampler: Sampler, clock: CostClock) -> dict[str, Drafter]:
        of_text = resources._replace(cache=cache, sampler=sampler, clock=clock)
        return _candidates(options, _with_shared_cache(of_text, options.draft_vocabulary))

    def calibrate() -> None:
        measured = costs.load_or_measure(
            identity, list(candidates), clock.agree,
            lambda: calibration.measure(resources.model, resources.sampler, clock.agree, random_text_candidates))
        shared.begin(measured, {name: Guesser(DRAFTERS[name].guesses_with or name, DRAFTERS[name].prior)
                                for name in candidates})

    def forget() -> None:
        costs.forget(identity)

    return AutoDrafter(candidates, calibrate, forget, shared, clock, resources.partial, resources.sampler)


def _with_shared_cache(resources: Resources, vocabulary: VocabularySize) -> Resources:
    """Candidates that draft with the target share one partial cache, and those of a head its rows of the text, so that
    these are up to date whichever drafts next. vocabulary: the option `draft_vocabulary`"""
    model, cache, head = resources.model, resources.cache, resources.reads_states
    if head is None or not resources.levels:
        return resources._replace(partial=new_partial_cache(MagicDecOptions(), resources.drafting, cache))
    states = tapped_drafts(head, model)  # for `triforce`
    return resources._replace(partial=new_partial_cache(MagicDecOptions(), resources.drafting, cache, states),
                              reader=new_reader(head, cache, resources.sampler, states, _LONGEST, vocabulary))


def _candidates(options: AutoOptions, resources: Resources) -> dict[str, Drafter]:
    """The drafters that `auto` tries, by name: all for which the parts are there."""
    candidates = {}
    for name, spec in DRAFTERS.items():
        wanted = filter(None, (spec.needs, spec.in_auto_with))
        if spec.in_auto is not None and all(getattr(resources, part) for part in wanted):
            given: Any = spec.options(**spec.in_auto)
            if hasattr(given, "draft_vocabulary"):
                given = replace(given, draft_vocabulary=options.draft_vocabulary)
            candidates[name] = spec.build(given, resources)
    return candidates


def _costs_identity(resources: Resources) -> dict[str, Any]:
    """The properties on which the costs of the candidates depend."""
    model, draft, copy = resources.model, resources.draft, resources.draft_copy
    return {
        "machine": processor.name(), "threads": kernels.threads(model.kernels), "version": __version__,
        "kernels": model.kernels.name, "device": str(model.kernels.device), "dtype": str(model.kernels.dtype),
        "model": repr(model.config), "quantize": model.weights.quantize,
        "copy": copy and copy.weights.quantize, "draft": draft and repr(draft.config),
        "heads": resources.heads and len(resources.heads), "glide": resources.glide is not None,
        "eagle": resources.eagle and repr(resources.eagle.config),
        "block": resources.block and repr(resources.block.config),
    }


def _build_plain(options: PlainOptions, resources: Resources) -> Drafter:
    return PlainDrafter()


def _build_ngram(options: NgramOptions, resources: Resources) -> Drafter:
    return NgramDrafter(options, resources.params)


def _build_suffix(options: SuffixOptions, resources: Resources) -> Drafter:
    corpus = None
    if options.corpus:
        assert resources.corpora, "a corpus without a tokenizer to read it"
        corpus = resources.corpora.index(options.corpus, options.max_match)
    return SuffixDrafter(options, resources.params, corpus)


def _build_self_draft(options: TokenSwiftOptions | MagicDecOptions, resources: Resources) -> Drafter:
    model, cache, sampler, params, heads, *_ = resources
    return SelfDrafter(options, model, cache, sampler, params, heads, resources.partial,
                       resources.draft_copy, resources.clock)


def _build_medusa(options: MedusaOptions, resources: Resources) -> Drafter:
    assert resources.heads is not None
    return MedusaDrafter(options, resources.sampler, resources.heads)


def _build_draft_model(options: DraftModelOptions, resources: Resources) -> Drafter:
    assert resources.draft is not None
    return DraftModelDrafter(options, resources.draft, resources.model, resources.sampler, resources.clock)


def _build_glide(options: GlideOptions, resources: Resources) -> Drafter:
    assert resources.glide is not None
    model, cache, sampler, params, *_ = resources
    return GlideDrafter(options, resources.glide, model, cache, sampler, params)


def _build_eagle(options: EagleOptions, resources: Resources) -> Drafter:
    assert resources.eagle is not None
    kind: type[EagleDrafter | ParallelEagleDrafter]
    kind = ParallelEagleDrafter if resources.eagle.config.is_parallel else EagleDrafter
    reader = resources.reader if isinstance(resources.reader, EagleDraftModel) else None
    return kind(options, resources.eagle, resources.cache, resources.sampler, resources.params, reader)


def _build_block(options: BlockOptions, resources: Resources) -> Drafter:
    assert resources.block is not None
    reader = resources.reader if isinstance(resources.reader, BlockModel) else None
    return BlockDrafter(options, resources.block, resources.cache, resources.sampler, resources.params, reader)


def _build_triforce(options: TriForceOptions, resources: Resources) -> Drafter:
    model, cache, sampler, params, *_ = resources
    return TriForceDrafter(options, model, cache, sampler, params, resources.draft, resources.clock,
                           resources.reads_states, resources.draft_copy, resources.partial, resources.reader)


READS_STATES = ("eagle", "block")  # parts that read states of the target; a model has one of them
_TRAINED = ("heads", "glide", *READS_STATES)  # what --heads may name

DRAFTERS: dict[str, DrafterSpec] = {
    AUTO: DrafterSpec(AutoOptions, _build_auto, may_use=(*_TRAINED, "draft")),
    "plain": DrafterSpec(PlainOptions, _build_plain, in_auto={}, prior=0.0),
    "ngram": DrafterSpec(NgramOptions, _build_ngram),
    "suffix": DrafterSpec(SuffixOptions, _build_suffix, in_auto={"min_probability": 0.1}, prior=0.2),
    "tokenswift": DrafterSpec(TokenSwiftOptions, _build_self_draft, needs="heads",
                              in_auto={"chain": 16, "margin": 0.25}, prior=0.92, guesses_with="target"),
    "medusa": DrafterSpec(MedusaOptions, _build_medusa, needs="heads", in_auto={}, prior=0.45),
    "magicdec": DrafterSpec(MagicDecOptions, _build_self_draft, in_auto={"chain": 16, "margin": 0.25}, prior=0.92,
                            guesses_with="target"),
    "draft-model": DrafterSpec(DraftModelOptions, _build_draft_model, needs="draft", in_auto={}, prior=0.5),
    "glide": DrafterSpec(GlideOptions, _build_glide, needs="glide", in_auto={}),
    "eagle": DrafterSpec(EagleOptions, _build_eagle, needs="eagle", in_auto={}, prior=0.7),
    "block": DrafterSpec(BlockOptions, _build_block, needs="block", in_auto={}, prior=0.6),
    "triforce": DrafterSpec(TriForceOptions, _build_triforce, may_use=(*READS_STATES, "draft"), prior=0.92,
                            guesses_with="target",
                            in_auto={"first": "head", "chain": _LONGEST - TriForceOptions.guesses, "floor": 0},
                            in_auto_with="levels"),
}

WITH_STATES = tuple(name for name, spec in DRAFTERS.items() if spec.uses(*READS_STATES))
WITH_HEADS = tuple(name for name, spec in DRAFTERS.items() if spec.uses(*_TRAINED))
WITH_DRAFT = tuple(name for name, spec in DRAFTERS.items() if spec.uses("draft"))

_NAMES = {"heads": "Medusa", "glide": "glide", "eagle": "EAGLE", "block": "block"}
NEEDED = {"heads": "trained heads", "glide": "a trained glide layer", "eagle": "an EAGLE head",
          "block": "a block head", "draft": "a smaller model"}
"""What a drafter needs, in words, by the names of `DrafterSpec.needs`."""


def new_drafter(name: str, options: DrafterOptions, resources: Resources) -> Drafter:
    """A drafter for one request, with the part that it needs."""
    return DRAFTERS[name].build(options, resources)


def check_loaded_heads(name: str, heads: str, parts: object) -> None:
    """Raise UsageError where a drafter may use heads, but none of those that were loaded. parts: with the fields of
    `Resources` that trained parts have"""
    used = [part for part in _TRAINED if part in DRAFTERS[name].may_use]
    if used and all(getattr(parts, part) is None for part in used):
        raise UsageError(f"--heads is {heads}, which is no {' or '.join(map(_NAMES.__getitem__, used))} head; drafter "
                         f"{name!r} uses only these")


def check_heads(name: str, options: DrafterOptions, heads: str | None) -> None:
    """Raise UsageError where heads are given to a drafter that uses none."""
    if heads is None:
        return
    if name not in WITH_HEADS:
        raise UsageError(f"drafter {name!r} uses no heads; leave --heads out, or use --drafter tokenswift")
    if not options.may_use_head:
        raise UsageError(f"drafter {name!r} with these options uses no heads; leave --heads out, or give the option "
                         "first=head without a model")


def parse_options(name: str, given: Mapping[str, Any]) -> Any:
    """The options of a drafter from KEY -> value. A value may be text, as on the command line.

    Raises UsageError for an unknown drafter or key (listing the known ones), and for a value of the wrong type or out
    of range.
    """
    if name not in DRAFTERS:
        raise UsageError(f"unknown drafter {name!r}; known: {', '.join(DRAFTERS)}")
    return drafter_options.parse_fields(name, DRAFTERS[name].options, given)
