"""Texts of the golden record (tests/golden_record.py): of every family, and of the bundled models.

A row of the record is one model, one set of kernels, one dtype and one sampling law. It holds the hash of the text, and
for each drafter the numbers of steps, of drafted and of accepted tokens. That all drafters write that text is checked
here: a drafter that writes another has the entry `other text` in place of its numbers. `auto` decides by the clock, so
only its text counts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

import longdraft
from helpers.checkpoints import load, load_glide, make_glide, make_heads
from helpers.eagle import load_eagle, make_eagle
from helpers.equality import DRAFTERS, prompt_of
from helpers.families import CPU_FAMILIES, FAMILIES, GEMMA4, HYBRIDS, MIXTURES, UNIFIED, make_family
from helpers.generation import Factory, by_name, generate
from longdraft.engine.run_statistics import sha256_tokens
from longdraft.model.transformer import Transformer
from longdraft.parts import heads
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation.step import Tally

EVERY_FAMILY = [*FAMILIES, *MIXTURES, *HYBRIDS, *CPU_FAMILIES, *GEMMA4, *UNIFIED]
AS_GGUF = [name for name in EVERY_FAMILY if name not in ("exaone4", "seed_oss", *UNIFIED)]  # the helper converts these
DTYPES = ("float32", "bfloat16")
# One entry of helpers.equality.DRAFTERS for each kind, with caches that are smaller than the prompt.
KINDS = {"ngram": "ngram", "suffix": "suffix, small index", "tokenswift": "tokenswift, small cache", "medusa": "medusa",
         "magicdec": "magicdec, streaming", "draft-model": "draft-model, itself", "glide": "glide",
         "eagle": "eagle, window", "triforce": "triforce, n-grams", "auto": "auto"}
WITHOUT_GLIDE = ("glm4", *GEMMA4, *UNIFIED)  # glide refuses adjacent dimensions and heads of two sizes
WITHOUT_EAGLE = ("phi3, longrope, part",)  # its rows have another width than those of the helper's head
PARAMS = SamplingParams(max_new_tokens=24, seed=11, temperature=1.0, min_p=0.1, repetition_penalty=1.2,
                        penalty_window=16)

Row = dict[str, str]  # "text" -> hash, drafter -> "steps drafted accepted"


def short(digest: str) -> str:
    return digest[:16]


def text_hash(tokens: list[int]) -> str:
    return short(sha256_tokens(tokens))


def drafters_of(turn: int, is_whole: bool) -> list[str]:
    """All kinds of drafters; or a third of them, so that any three turns in sequence meet them all."""
    return [kind for index, kind in enumerate(KINDS) if is_whole or (index + turn) % 3 == 0]


def make_parts(folder: Path, family: str) -> None:
    """A model of a family, with the trained parts that its drafters need."""
    make_heads(folder / "heads", make_family(folder, family))
    if family not in WITHOUT_GLIDE:
        make_glide(folder / "glide", folder)
    if family not in WITHOUT_EAGLE:
        make_eagle(folder / "eagle")


def factory_of(kind: str, model: Transformer, folder: Path) -> Factory:
    name, options = DRAFTERS[KINDS[kind]]
    trained = heads.load_heads(folder / "heads", model) if kind in ("tokenswift", "medusa") else None
    return by_name(name, trained, model if kind == "draft-model" else None,
                   load_glide(folder / "glide", model) if kind == "glide" else None,
                   load_eagle(folder / "eagle", model) if kind == "eagle" else None, **options)


def counts(hash_of_text: str, plain: str, kind: str, *numbers: int) -> str:
    if hash_of_text != plain:
        return "other text"
    return "same text" if kind == "auto" else " ".join(map(str, numbers))


def family_row(folder: Path, kernels_name: str, dtype: str, kinds: list[str]) -> Row:
    """The row of a model folder that `make_parts` wrote."""
    model, prompt = load(folder, dtype, kernels_name), prompt_of(60)
    row = {"text": text_hash(generate(model, prompt, PARAMS, by_name("plain"), banned=[1]))}
    for kind in kinds:
        if kind in ("glide", "eagle") and not (folder / kind).exists():
            continue
        tally = Tally()
        text = generate(model, prompt, PARAMS, factory_of(kind, model, folder), banned=[1], tally=tally)
        row[kind] = counts(text_hash(text), row["text"], kind, tally.steps, tally.drafted.total(),
                           tally.accepted.total())
    return row


# The bundled models, whose parts are trained

BUNDLED = {"novelist": DTYPES, "novelist-gqa": ("bfloat16",)}
PROMPT = "The king looked at the old woman, and said: I have seen this house before. The old woman looked at the king,"
BATCH = (PROMPT, "It was a dark night, and", "Once upon a time there was a prince who could not sleep")
LAWS: dict[str, dict[str, object]] = {
    "greedy": dict(temperature=0.0),
    "min-p": dict(min_p=0.1, repetition_penalty=1.2, penalty_window=64),
    "top-k, top-p": dict(temperature=0.8, top_k=40, top_p=0.9),
    "DRY, XTC": dict(temperature=0.9, temperature_last=True, dry_multiplier=0.8, dry_allowed_length=2,
                     xtc_probability=0.5, xtc_threshold=0.05),
    "other filters": dict(eta_cutoff=2e-4, typical_p=0.95, top_n_sigma=2.5, no_repeat_ngram_size=4,
                          presence_penalty=0.1, frequency_penalty=0.2),
    "banned strings": dict(min_p=0.05, banned_strings=("the king", " and")),
    "structured": dict(temperature=0.8, min_p=0.02,
                       structured_outputs=("regex", r"[A-Z][a-z]{2,9}( [a-z]{2,9}){4,9}[.]")),
}


def bundled_params(law: str, seed: int = 7) -> SamplingParams:
    return SamplingParams(**(dict(max_new_tokens=40, seed=seed) | LAWS[law]))


def bundled_laws() -> list[str]:
    return [law for law in LAWS if law != "structured" or importlib.util.find_spec("llguidance")]


def bundled_engine(name: str, kernels_name: str, dtype: str) -> longdraft.Engine:
    return longdraft.load(name, drafter="auto", device="cpu", dtype=dtype, kernels_name=kernels_name)


def _drafting(engine: longdraft.Engine, kinds: list[str]) -> Iterator[tuple[str, longdraft.Engine]]:
    """`plain` and these drafters with their usual options; n-grams draft from the first token on."""
    for kind in ("plain", *kinds):
        yield kind, engine.with_drafter(kind, {"delay": "0"} if kind in ("ngram", "suffix") else {})


def bundled_row(engine: longdraft.Engine, law: str, kinds: list[str]) -> Row:
    row: Row = {}
    for kind, drafting in _drafting(engine, kinds):
        stats = list(drafting.generate(PROMPT, bundled_params(law)))[-1].stats
        row[kind] = counts(stats["sha256_tokens"], row.setdefault("text", stats["sha256_tokens"]), kind,
                           stats["steps"], stats["draft_tokens"], stats["accepted_tokens"])
    return row | {"text": short(row["text"])}


def batch_row(engine: longdraft.Engine, kinds: list[str]) -> Row:
    """Several texts side by side. The hash is that of the texts which `plain` writes one after another."""
    params = [bundled_params(law, seed) for seed, law in enumerate(("min-p", "greedy", "DRY, XTC"))]
    row: Row = {}
    alone = engine.with_drafter("plain")
    row["text"] = text_hash([token for prompt, each in zip(BATCH, params, strict=True)
                             for event in alone.generate(prompt, each) for token in event.tokens])
    for kind, drafting in _drafting(engine, kinds):
        texts: list[list[int]] = [[] for _ in BATCH]
        totals = np.zeros(3, int)
        for text, event in drafting.generate_many(BATCH, params, batch_size=len(BATCH)):
            texts[text] += event.tokens
            if event.stats:
                totals += [event.stats[name] for name in ("steps", "draft_tokens", "accepted_tokens")]
        row[kind] = counts(text_hash([*chain.from_iterable(texts)]), row["text"], kind, *totals.tolist())
    return row
