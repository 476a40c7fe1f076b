"""Mean accepted length with trained parts, by the length of the text; `longdraft bench acceptance`.

    longdraft bench acceptance paper=DIR ours=DIR glide=DIR --text a.txt --text b.txt --output heads.json
    longdraft bench acceptance --model novelist --text a.txt --repetition-penalty 1.2 --output parts.json

The drafters write some tokens after the first N tokens of each text, for each N of `contexts`, at T = 0 and at T = 1
with min-p 0.1, without a penalty or with one within 1,024 tokens. Chained heads draft as in the paper: one token of the
model itself on its partial cache, one of each head, no n-grams (tree 1,1,...). Independent heads draft the same without
the model's token; glide, EAGLE heads, block heads and small models draft with their defaults, the first three also
without suffixes of the text ("alone"). The mean accepted length depends on weights and prompts only, not on the load of
the machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longdraft.checkpoint.config_file import read_json
from longdraft.engine.engine import Engine
from longdraft.engine.loading import load
from longdraft.errors import check
from longdraft.parts.block_config import is_block
from longdraft.parts.medusa import is_medusa
from longdraft.report.table import Table
from longdraft.report.turns import Record

SAMPLING: tuple[dict[str, float], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "min_p": 0.1})


def _chained(num_heads: int) -> dict[str, Any]:
    """Options of `tokenswift` that draft with chained heads as in the paper."""
    return {"tree": ",".join(["1"] * (num_heads + 1)), "chain": 1, "width": 1, "continuations": 0}


class TrainedDrafter(NamedTuple):
    """A drafter with its options, the folder of its weights (None: the model's own), and the losses at the end of its
    training (of each head, if it has several)."""

    drafter: str
    options: Mapping[str, Any] = {}
    heads: str | None = None
    losses: Sequence[Mapping[str, float]] = ()


def own_parts(engine: Engine) -> dict[str, TrainedDrafter]:
    """The trained parts in the folder of a model."""
    parts = {name: TrainedDrafter(name) for name, has_part in (
        ("eagle", engine.eagle), ("glide", engine.loaded.glide), ("block", engine.loaded.block)) if has_part}
    if engine.heads:
        parts["heads"] = TrainedDrafter("tokenswift", _chained(len(engine.heads)))
    return parts


def with_alone(parts: Mapping[str, TrainedDrafter]) -> dict[str, TrainedDrafter]:
    """The same, and what drafts beside suffixes of the text also without these."""
    every: dict[str, TrainedDrafter] = {}
    for name, part in parts.items():
        every[name] = part
        if part.drafter in ("eagle", "glide", "block"):
            every[f"{name} alone"] = part._replace(options={**part.options, "suffix": False})
    return every


def trained_in(folder: Path) -> TrainedDrafter:
    """What `longdraft train` wrote into a folder."""
    config = read_json(folder / "config.json")
    if config.get("speculators_model_type") == "eagle3":
        return TrainedDrafter("eagle", {}, str(folder), config["longdraft"]["training"]["validation_metrics"])
    if is_block(folder):
        return TrainedDrafter("block", {}, str(folder), config["longdraft"]["training"]["validation_metrics"])
    if "architectures" in config:  # a whole model
        training = json.loads((folder / "training.json").read_text(encoding="utf-8"))["training"]
        return TrainedDrafter("draft-model", {"model": str(folder)}, None, training["validation_metrics"])
    losses = config["training"]["validation_metrics"]
    if config.get("kind") == "glide":
        return TrainedDrafter("glide", {}, str(folder), losses)
    if is_medusa(config):
        return TrainedDrafter("medusa", {"tree": ",".join(["1"] * len(losses))}, str(folder), losses)
    return TrainedDrafter("tokenswift", _chained(len(losses)), str(folder), losses)


def accepted(engine: Engine, prompts: Sequence[Sequence[int]], sampling: Mapping[str, float], new_tokens: int) -> float:
    """New tokens / forwards, over all prompts."""
    written = steps = 0
    for prompt in prompts:
        params = engine.params(max_new_tokens=new_tokens, seed=7, ignore_eos=True, on_loop="off", **sampling)
        with engine.generate(list(prompt), params) as text:
            for _ in text:
                pass
            stats = text.stats()
        written += stats["new_tokens"]
        steps += stats["steps"]
    return written / steps


def measure_drafter(model: str, trained: TrainedDrafter, texts: Sequence[Path], contexts: Sequence[int],
                    new_tokens: int, penalty: float) -> Record:
    """The record of one drafter: its mean accepted length by temperature and context.

    penalty  the repetition penalty, within 1,024 tokens; 1: none
    """
    engine = load(model, drafter=trained.drafter, drafter_options=dict(trained.options), heads=trained.heads)
    encoded = [engine.encode(path.read_text(encoding="utf-8")) for path in texts]
    shortest = min(map(len, encoded))
    check(max(contexts) <= shortest, "--contexts", max(contexts), f"up to {shortest}, the tokens of the shortest text")
    lengths = {f"T={sampling['temperature']:g}": [
        accepted(engine, [ids[:context] for ids in encoded], {**sampling, "repetition_penalty": penalty}, new_tokens)
        for context in contexts] for sampling in SAMPLING}
    options = {key: value for key, value in trained.options.items() if key != "model"}  # a path of this machine
    return {"drafter": trained.drafter, "options": options, "losses": list(trained.losses), "contexts": list(contexts),
            "mean_accepted_length": lengths}


def table(records: Mapping[str, Record]) -> Table:
    columns = ["drafter", "loss", "top-1, %", "top-3, %",
               *(f"accepted, T={sampling['temperature']:g}" for sampling in SAMPLING)]
    return Table("Trained drafters", columns, [_row(name, record) for name, record in records.items()])


def _row(name: str, record: Record) -> list[str]:
    def joined(values: Sequence[float], form: str) -> str:
        return " / ".join(format(value, form) for value in values)

    losses = record["losses"]
    return [name, joined([each["loss"] for each in losses], ".2f"),
            joined([100 * each["top1"] for each in losses], ".1f"),
            joined([100 * each["top3"] for each in losses], ".1f"),
            *(joined(values, ".2f") for values in record["mean_accepted_length"].values())]
