"""The slices of a visit: what they measure on a device, and at the smallest size in Triton's interpreter.

    first    copy and product rates, the tests, rows of trees, kernels against the reference, a memory checker
    length   stretched models after 4K to 100K tokens: equal texts, and each drafter's speed
    kernels  each kernel, steps and verifications, prefills, another engine, beside the memory's floor
    families hybrids and mixtures of experts: rows of trees, steps, chains; chains of trained layers for several texts
    whole    100,000 drafted tokens with plain decoding in windows between them; the bundled model's long text
    decide   the ten minutes that decide what is built next, of all that is above the least; see `predictions`

The slices stand alone. The first five run in this order, because no speed is measured on wrong bits; `decide` has its
own rows of trees, and ends where one differs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from longdraft.kernels.switches import SWITCHES
from longdraft_bench.models.shapes import HYBRID_SHAPES, MIXTURE_SHAPES, SHAPES, cut

LIMITS_S = {"first": 330.0, "length": 330.0, "kernels": 360.0, "families": 480.0, "whole": 540.0, "decide": 570.0}
SLICES = tuple(LIMITS_S)
_PATIENCE, _LEAST_PATIENCE = 3.0, 45.0  # a part may take so many times its expected seconds, and at least so many


class Part(NamedTuple):
    """A part of a slice.

    kind     the function of the worker that measures it
    options  its arguments
    seconds  that it is expected to take
    lasts    its figures do not depend on our kernels, and stay valid when these change
    on_bits  it is left out where rows of a tree differ from plain decoding
    """

    name: str
    kind: str
    options: dict[str, Any]
    seconds: float
    lasts: bool = False
    on_bits: bool = False

    @property
    def patience(self) -> float:
        return max(_LEAST_PATIENCE, _PATIENCE * self.seconds)


class Oracle(NamedTuple):
    """A drafter whose guesses are replaced: each is the target's own token with this probability, if those before are.

    drafter, options  whose cost it has; its chains have as many tokens as `options` says
    """

    drafter: str
    options: dict[str, Any]
    agreement: float


class DecidePlan(NamedTuple):
    """Sizes of the slice `decide`.

    switched  models whose texts are compared with each switch on and off: "dense", and "mixture", a hybrid too
    rounds    of these texts
    contexts  of steps and of drafts
    tokens    that each oracle writes
    further   tokens that plain decoding writes after those: an oracle's first steps may need them
    oracles   by name
    windows   places of the long text at which plain decoding and `in_windows` write `drafted` tokens each
    streams   bytes that the skeleton of a persistent kernel streams, and layers, by name
    """

    switched: dict[str, dict[str, Any]]
    rounds: int
    contexts: tuple[int, ...]
    tokens: int
    further: int
    oracles: dict[str, Oracle]
    windows: tuple[int, ...]
    drafted: int
    in_windows: tuple[str, ...]
    streams: dict[str, tuple[int, int]]


class CudaPlan(NamedTuple):
    """What is measured.

    kernels_names  kernels, the default first
    shapes         model name -> its config.json; the first is measured first
    families       the same of hybrids and mixtures of experts
    contexts       of texts and steps, ascending
    prefixes       positions before the trees whose rows are compared
    rows           of verifications
    tokens         written by each drafter after each context
    whole          tokens of the drafted text; its windows have `window` tokens
    drafters       name -> drafter and its options, for the texts
    copied         bytes of the copy
    repeats        of each measurement
    has_peer       measure transformers too
    decide         sizes of the slice `decide`
    """

    device: str
    dtype: str
    kernels_names: tuple[str, ...]
    shapes: dict[str, dict[str, Any]]
    families: dict[str, dict[str, Any]]
    contexts: tuple[int, ...]
    prefixes: tuple[int, ...]
    rows: tuple[int, ...]
    tokens: int
    whole: int
    window: int
    drafters: dict[str, tuple[str, dict[str, Any]]]
    copied: int
    repeats: int
    has_peer: bool
    decide: DecidePlan


_SELF = {"chain": 4, "suffix": False}
_EAGLE = {"width": 1, "suffix": False}
_INT4 = _SELF | {"width": 1, "draft_weights": "int4"}
_DECIDED = DecidePlan(
    {"dense": cut(SHAPES["qwen2.5-0.5b"], 2),
     "mixture": cut(MIXTURE_SHAPES["qwen3-next-80b-a3b"], 4) | {"num_experts": 16, "vocab_size": 8192}},
    6, (4096, 102400), 256, 64,
    {"eagle 0.60": Oracle("eagle", _EAGLE | {"chain": 3}, 0.6),
     "eagle 0.72": Oracle("eagle", _EAGLE | {"chain": 5}, 0.72),
     "eagle 0.80": Oracle("eagle", _EAGLE | {"chain": 6}, 0.8), "self int4 0.87": Oracle("magicdec", _INT4, 0.87),
     "self int4 0.93": Oracle("magicdec", _INT4 | {"chain": 6}, 0.93)},
    (4096, 53248, 102400), 1500, ("eagle 0.72", "eagle 0.80"),
    {"1.5B": (3_087_000_000, 28), "8B": (15_010_000_000, 32), "8B int4": (4_400_000_000, 32)})
ON_DEVICE = CudaPlan(
    "cuda", "bfloat16", ("triton-16", "triton-16-k8v4", "triton-64"),
    {name: SHAPES[name] for name in ("llama-3.1-8b", "qwen2.5-1.5b")},
    # Whole, or as many layers as a device holds and makes in seconds: milliseconds are those of these layers
    {"qwen3.5-2b": HYBRID_SHAPES["qwen3.5-2b"],
     "qwen3-30b-a3b, 12 layers": cut(MIXTURE_SHAPES["qwen3-30b-a3b"], 12),
     "qwen3-next-80b-a3b, 8 layers": cut(MIXTURE_SHAPES["qwen3-next-80b-a3b"], 8)}, (4096, 9000, 32768, 102400),
    (1000, 9000, 102400), (1, 4, 8, 16, 64), 96, 100_000, 500,
    {"plain": ("plain", {}), "liar": ("", {}), "eagle": ("eagle", {"chain": 5, "width": 1, "suffix": False}),
     "eagle, 8 tokens": ("eagle", {"chain": 8, "width": 1, "suffix": False}),
     "self": ("magicdec", _SELF | {"draft_weights": "same"}),
     "self int8": ("magicdec", _SELF | {"draft_weights": "int8"}),
     "self int4": ("magicdec", _SELF | {"draft_weights": "int4"}),
     "self int4, 7 tokens": ("magicdec", _SELF | {"chain": 7, "draft_weights": "int4"}), "suffix": ("suffix", {})},
    1 << 32, 9, True, _DECIDED)
_TINY = SHAPES["qwen2.5-1.5b"] | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                                  "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
_TINY_EXPERTS = _TINY | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_TINY_FAMILIES = {
    "tiny mixture": _TINY_EXPERTS | {"model_type": "qwen3_moe"},
    "tiny hybrid": _TINY_EXPERTS | {
        "model_type": "qwen3_next", "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}}
_DECIDED_TINY = DecidePlan(
    {"dense": _TINY, "mixture": _TINY_FAMILIES["tiny hybrid"]}, 2, (24,), 6, 10,
    {"eagle 0.72": Oracle("eagle", _EAGLE | {"chain": 2}, 0.72),
     "self 0.87": Oracle("magicdec", _SELF | {"width": 1, "chain": 2, "budget": 12, "sinks": 2, "refresh": 4}, 0.87)},
    (16, 20, 24), 5, ("eagle 0.72",), {"tiny": (1 << 16, 2)})
INTERPRETED = CudaPlan(
    "cpu", "float32", ("triton-16",), {"tiny": _TINY}, _TINY_FAMILIES, (24,), (20,), (1, 2), 3, 4, 2,
    {"plain": ("plain", {}), "liar": ("", {}), "eagle": ("eagle", {"chain": 2, "suffix": False})},
    1 << 12, 1, False, _DECIDED_TINY)


# Seconds are those that parts took on an H200; a model's first part compiles its kernels.
_COPY_RATE = Part("copy rate", "copy_rate", {}, 5, lasts=True)
_TESTS, _MEMORY_CHECKER = Part("tests", "tests", {}, 110), Part("memory checker", "memory_checker", {}, 15)


def parts_of(plan: CudaPlan, name: str) -> list[Part]:
    """The parts of a slice, in the order in which they run."""
    return {"first": _first, "length": _length, "kernels": _kernels, "families": _families,
            "whole": _whole, "decide": _decide}[name](plan)


def _first(plan: CudaPlan) -> list[Part]:
    parts = [_COPY_RATE, Part("product rate", "product_rate", {}, 5, lasts=True)]
    for name in plan.kernels_names:
        parts += [Part(f"rows {name} {prefix}", "rows", {"name": name, "prefix": prefix},
                       12 if prefix == plan.prefixes[0] else 3) for prefix in plan.prefixes]
        if plan.device == "cuda" and name == plan.kernels_names[0]:
            parts.append(_TESTS)
    parts += [Part(f"reference {name}", "reference", {"name": name}, 10) for name in plan.kernels_names]
    if plan.device == "cuda":
        parts.append(_MEMORY_CHECKER)
    return parts


def _length(plan: CudaPlan) -> list[Part]:
    """From the longest context down: the cache is filled once for each model and then cut."""
    return [Part(f"texts {shape} {context}", "texts", {"shape": shape, "context": context},
                 40 if context == plan.contexts[-1] else 28)
            for shape in plan.shapes for context in reversed(plan.contexts)]


def _kernels(plan: CudaPlan) -> list[Part]:
    """Whole steps first. A model is made once: all that needs it runs in turn."""
    first, parts = next(iter(plan.shapes)), [_COPY_RATE]
    for shape in plan.shapes:
        near = {"shape": shape, "context": plan.contexts[0]}
        parts += [Part(f"steps {shape} {context}", "steps", {"shape": shape, "context": context},
                       18 if context == plan.contexts[0] else 4) for context in plan.contexts]
        parts += [Part(f"ahead {shape} {context}", "plain_ahead", {"shape": shape, "context": context}, 5)
                  for context in dict.fromkeys((plan.contexts[0], plan.contexts[-1]))]
        parts += [Part(f"trace {shape}", "trace", near, 5),
                  Part(f"side by side {shape} {plan.contexts[0]}", "side_by_side", near, 18),
                  Part(f"filters {shape}", "laws", near, 12),
                  Part(f"small drafts {shape}", "small_drafts", {"shape": shape}, 10),
                  Part(f"upkeep {shape}", "upkeep", {"shape": shape, "context": plan.contexts[-1]}, 8)]
        if shape == first:
            parts += [Part(f"prefill {first} {context}", "prefill", {"shape": first, "context": context}, 20)
                      for context in (plan.contexts[0], plan.contexts[-1])]
    parts += [Part(f"kernels {shape}", "each_kernel", {"shape": shape}, 40) for shape in plan.shapes]
    if plan.has_peer:
        options = {"shape": first, "context": plan.contexts[0]}
        parts.append(Part("transformers", "transformers", options, 60, lasts=True))
    return [*parts, *(Part(f"drafts {shape}", "trace_drafts", {"shape": shape, "context": plan.contexts[0]}, 30)
                      for shape in plan.shapes)]


def _families(plan: CudaPlan) -> list[Part]:
    """Exact rows first. A model is made once. None of these seconds is measured yet."""
    near, parts = plan.contexts[0], [_COPY_RATE]
    for shape in plan.families:
        parts.append(Part(f"rows {shape} {near}", "family_rows", {"shape": shape, "context": near}, 35))
        parts += [Part(f"steps {shape} {context}", "steps", {"shape": shape, "context": context}, 12)
                  for context in dict.fromkeys((near, plan.contexts[-1]))]
        parts.append(Part(f"chains {shape} {near}", "family_chains", {"shape": shape, "context": near}, 20))
    first = next(iter(plan.shapes))
    parts.append(Part(f"layer chains {first}", "layer_chains", {"shape": first, "context": near}, 40))
    return parts


def _whole(plan: CudaPlan) -> list[Part]:
    parts = [Part(f"long text {shape}", "long_text", {"shape": shape}, 180 if place == 0 else 100)
             for place, shape in enumerate(plan.shapes)]
    return [*parts, Part("bundled", "bundled", {}, 60)]


SWITCH = "switch "  # begins the names of parts that compare texts with a switch on and off
ROWS = "rows "  # begins those that compare rows of trees with plain decoding


def _decide(plan: CudaPlan) -> list[Part]:
    """What wrong bits make worthless comes after the rows, and the tests come last: `first` has them in full."""
    parts = [_COPY_RATE, Part("product rate", "product_rate", {}, 4, lasts=True)]
    if plan.device == "cuda":
        parts.append(Part("compile", "compile_ahead", {}, 25))
    parts += [Part(f"{ROWS}{name} {prefix}", "rows", {"name": name, "prefix": prefix}, 5)
              for name in plan.kernels_names[:2] for prefix in plan.prefixes]
    return [*parts, *(part._replace(on_bits=True) for part in _decisive(plan)), *_last(plan)]


def _decisive(plan: CudaPlan) -> list[Part]:
    decide = plan.decide
    first, *others = plan.shapes
    parts = [Part(f"{SWITCH}{name}", "switch", {"name": name}, 3) for name in SWITCHES]
    parts += [Part("boundaries", "boundaries", {}, 5, lasts=True),
              *(Part(f"ring {name}", "ring", {"name": name}, 6, lasts=True) for name in decide.streams)]
    for shape in (first, *others):
        near, far = decide.contexts[0], decide.contexts[-1]
        for context in dict.fromkeys((near, far)):
            options = {"shape": shape, "context": context}
            parts += [Part(f"steps {shape} {context}", "steps", options, 12 if context == near else 5),
                      Part(f"ahead {shape} {context}", "plain_ahead", options, 4)]
            if context == near:
                options = options | {"quantize": "int4"}
                parts.append(Part(f"ahead {shape} int4 {context}", "plain_ahead", options, 8))
        parts.append(Part(f"without {shape} {near}", "omissions", {"shape": shape, "context": near}, 6))
        if shape == first:  # while there is its model
            parts += [Part(f"prefill {first} {far}, {time}", "prefill", {"shape": first, "context": far}, 12)
                      for time in ("first", "again")]
    # Of the longest context first: the cache is filled once and then cut.
    parts += [Part(f"oracles {first} {context}", "oracles", {"shape": first, "context": context},
                   45 if context == decide.contexts[-1] else 25) for context in reversed(decide.contexts)]
    return [*parts, Part(f"windows {first}", "windows", {"shape": first}, 65)]


def _last(plan: CudaPlan) -> list[Part]:
    if plan.device != "cuda":
        return []
    return [_TESTS, _MEMORY_CHECKER]
