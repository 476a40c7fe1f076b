"""The table of docs/training.md: losses of trained drafters, and their mean accepted length.

    python benchmarks/heads.py paper=DIR ours=DIR glide=DIR small=DIR --text a.txt --text b.txt --output heads.json

Losses are those of each head at the end of its training. The drafters then write `--new-tokens` tokens after the first
N tokens of each text, for each N of `--contexts`, at T = 0 and at T = 1 with min-p 0.1. Chained heads draft as in the
paper: one token of the model itself on its partial cache, one of each head, no n-grams (tree 1,1,...). Independent
heads draft the same without the model's token; glide, EAGLE heads and small models draft with their defaults. The mean
accepted length depends on weights and prompt only, not on the load of the machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import longdraft
from longdraft.engine.engine import Engine
from longdraft.parts.medusa import is_medusa
from longdraft.report.table import Table

SAMPLING: tuple[dict[str, float], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "min_p": 0.1})


def drafting(folder: Path) -> tuple[str, dict[str, Any], str | None, list[dict[str, float]]]:
    """Drafter, options, heads, and the losses at the end of the training."""
    config = json.loads((folder / "config.json").read_text())
    if config.get("speculators_model_type") == "eagle3":
        return "eagle", {}, str(folder), config["longdraft"]["training"]["validation_metrics"]
    if "architectures" in config:  # a whole model
        training = json.loads((folder / "training.json").read_text())["training"]
        return "draft-model", {"model": str(folder)}, None, training["validation_metrics"]
    losses = config["training"]["validation_metrics"]
    if config.get("kind") == "glide":
        return "glide", {}, str(folder), losses
    ones = ",".join(["1"] * len(losses))
    if is_medusa(config):
        return "medusa", {"tree": ones}, str(folder), losses
    return "tokenswift", {"tree": f"1,{ones}", "chain": 1, "width": 1, "continuations": 0}, str(folder), losses


def accepted(engine: Engine, prompts: list[list[int]], sampling: dict[str, float], new_tokens: int) -> float:
    """New tokens / forwards, over all prompts."""
    written = steps = 0
    for prompt in prompts:
        params = engine.params(max_new_tokens=new_tokens, seed=7, ignore_eos=True, on_loop="off", **sampling)
        with engine.generate(prompt, params) as text:
            for _ in text:
                pass
            stats = text.stats()
        written, steps = written + stats["new_tokens"], steps + stats["steps"]
    return written / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trained", nargs="+", help="NAME=FOLDER of each trained drafter")
    parser.add_argument("--model", default="novelist", help="the target model; default: novelist")
    parser.add_argument("--text", type=Path, action="append", required=True, help="a text file; repeatable")
    parser.add_argument("--contexts", default="1024,8192,32768", help="tokens of the prompts; default: 1024,8192,32768")
    parser.add_argument("--new-tokens", type=int, default=300, help="tokens to write; default: 300")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file, written after each drafter")
    given = parser.parse_args()
    contexts = [int(part) for part in given.contexts.split(",")]
    found: dict[str, Any] = {}
    for name, _, folder in (each.partition("=") for each in given.trained):
        drafter, options, heads, losses = drafting(Path(folder))
        engine = longdraft.load(given.model, drafter=drafter, drafter_options=options, heads=heads,
                                cache_ram=0)
        texts = [engine.encode(text.read_text()) for text in given.text]
        lengths = {f"T={sampling['temperature']:g}": [
            accepted(engine, [text[:context] for text in texts], sampling, given.new_tokens) for context in contexts]
            for sampling in SAMPLING}
        asked = {key: value for key, value in options.items() if key != "model"}  # a path of this machine
        found[name] = {"drafter": drafter, "options": asked, "losses": losses, "contexts": contexts,
                       "mean_accepted_length": lengths}
        given.output.write_text(json.dumps({
            "model": given.model, "texts": [text.name for text in given.text], "new_tokens": given.new_tokens,
            "trained": found}, indent=1) + "\n")
    columns = ["drafter", "loss", "top-1, %", "top-3, %",
               *(f"accepted, T={sampling['temperature']:g}" for sampling in SAMPLING)]
    print(Table("Trained drafters", columns, [row(name, each) for name, each in found.items()]).markdown())


def row(name: str, each: dict[str, Any]) -> list[str]:
    def joined(values: list[float], form: str) -> str:
        return " / ".join(format(value, form) for value in values)

    return [name, joined([part["loss"] for part in each["losses"]], ".2f"),
             joined([100 * part["top1"] for part in each["losses"]], ".1f"),
             joined([100 * part["top3"] for part in each["losses"]], ".1f"),
             *(joined(values, ".2f") for values in each["mean_accepted_length"].values())]


if __name__ == "__main__":
    main()
