"""Batches of several texts, one batch for each drafter, that write the same texts in turns.

    python benchmarks/batch_in_turns.py --prompt-file novel.txt --context 1024 --texts 8 --drafters "plain auto" \\
        --output batch.json

`longdraft bench batch` compares texts side by side with the same texts one after another. Here the drafters take turns
instead, from the first token on, and no text waits for another one of its batch. Ratios are those of the seconds for
each token to the first drafter's, over 256 tokens of each text. The drafters must write the same texts. A control is in
`--drafters "plain plain auto"`: the ratio of plain decoding to itself. `--repeats` measures as many times, each time
with a new engine, which knows nothing of the texts yet, and prints the lowest, the median and the highest ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from longdraft.engine.batching import Batch
from longdraft.engine.engine import Engine
from longdraft.engine.generation import Generation
from longdraft.engine.loading import load
from longdraft.errors import UsageError, check
from longdraft.report.turns import Record
from longdraft.request.sampling_params import SamplingParams
from longdraft.system import machine
from longdraft.system.files import read_prompt
from longdraft_bench.document import document
from longdraft_bench.options import settings
from longdraft_bench.systems import System, systems_named

PART = 256  # tokens of each text for which a ratio is given


class Texts:
    """The texts of one drafter, whose prompts are read."""

    def __init__(self, engine: Engine, system: System, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        self.batch: Batch = engine.with_drafter(system.drafter, system.options).batch()
        self.texts: list[Generation] = []
        self.seconds: list[float] = []  # for each token, of each turn
        for place, prompt in enumerate(prompts):
            params = SamplingParams(max_new_tokens=2 * tokens, seed=place, min_p=0.1, repetition_penalty=1.2,
                                    ignore_eos=True, on_loop="off")
            number = self.batch.add(list(prompt), params)
            self.texts.append(self.batch[number])
            while not len(self.texts[-1].tokens):
                self.step([number])

    def step(self, only: Sequence[int] | None = None) -> int:
        """One round; returns the number of tokens that it wrote."""
        events = self.batch.step(only)
        if error := next((event.error for _, event in events if event.error), None):
            raise error
        return sum(len(event.tokens) for _, event in events)

    def write(self, tokens: int) -> None:
        """A turn of so many tokens of all texts together, and of what the last round writes beyond them."""
        written, began = 0, time.perf_counter()
        while written < tokens:
            written += self.step()
        self.seconds.append((time.perf_counter() - began) / written)

    def record(self, first: Texts, turn: int) -> Record:
        """The ratios to `first`, and the tokens by the drafter that `auto` chose."""
        each = PART // turn
        parts = range(0, len(self.seconds) - each + 1, each)
        chosen: Counter[str] = Counter()
        for text in self.texts:
            chosen.update(text.stats().get("tokens_by_choice", {}))
        return {"seconds_for_each_token": self.seconds, "tokens_by_choice": dict(chosen), "to_first": [
            sum(first.seconds[start : start + each]) / sum(self.seconds[start : start + each]) for start in parts]}


def measure(engine: Engine, drafters: Sequence[str], prompts: Sequence[Sequence[int]], tokens: int, turn: int
            ) -> Record:
    """`tokens` tokens of each text. UsageError if two drafters write different texts."""
    groups = {name: Texts(engine, system, prompts, tokens) for name, system in systems_named(drafters).items()}
    for number in range(tokens // turn):
        order = list(groups.values())
        for group in order if number % 2 else reversed(order):
            group.write(len(prompts) * turn)
    first = groups[drafters[0]]
    for drafter, group in groups.items():
        for mine, theirs in zip(group.texts, first.texts, strict=True):
            if any(a != b for a, b in zip(mine.tokens.tolist(), theirs.tokens.tolist(), strict=False)):
                raise UsageError(f"{drafter} wrote another text than {drafters[0]}")
    return {drafter: group.record(first, turn) for drafter, group in groups.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="novelist")
    parser.add_argument("--prompt-file", required=True)
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--drafters", default="plain auto")
    parser.add_argument("--tokens", type=int, default=1024, help="of each text")
    parser.add_argument("--turn", type=int, default=64, help="tokens of each text in a turn; divides 256")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    check(given.repeats > 0, "--repeats", given.repeats, "1 or more")
    check(given.turn > 0 and PART % given.turn == 0, "--turn", given.turn, f"a number that divides {PART}")
    engine = load(given.model, drafter="auto")
    ids = engine.encode(read_prompt(None, given.prompt_file))
    distance = (len(ids) - given.context) // given.texts
    check(distance > 0, "--prompt-file", f"{len(ids)} tokens", "a longer file, or fewer --texts or less --context")
    prompts = [ids[place * distance : place * distance + given.context] for place in range(given.texts)]
    chosen = settings("--drafters", given.drafters)
    about = {"machine": machine.description(engine.model.kernels) | engine.provenance, "context": given.context,
             "texts": given.texts, "turn": given.turn}
    runs = []
    for place in range(given.repeats):
        engine = load(given.model, drafter="auto") if place else engine
        runs.append(measure(engine, chosen, prompts, given.tokens, given.turn))
    with document("batch in turns", given.output, is_printed=False, **about, runs=runs):
        for drafter in runs[0]:
            parts = zip(*(run[drafter]["to_first"] for run in runs), strict=True)
            print(f"{drafter:<40}", *(f"{min(of):.2f} {statistics.median(of):.2f} {max(of):.2f} |" for of in parts))


if __name__ == "__main__":
    main()
