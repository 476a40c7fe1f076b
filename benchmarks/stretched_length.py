"""`longdraft bench length` on a stretched model after a long prompt that the small model reads.

    python benchmarks/stretched_model.py --like qwen2.5-0.5b stretched
    python benchmarks/stretched_length.py stretched --prompt-file novel.txt --prefill 32768 --max-new-tokens 256 \\
        --drafters "plain auto" --output length.json

A model of 500 million parameters reads 32,768 tokens in ten minutes on two cores, the small model in some seconds.
Both compute the same function (benchmarks/stretched_model.py), so the small model's keys and values are those of the
layers and heads of the large one that hold them. All other layers and heads add nothing; they get random keys and
values, which cost what any cost. The large model reads the last 512 tokens. All drafters must write one text. Of a
hybrid, whose states are not filled, the large model reads the whole prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from longdraft.cache.full import FullCache
from longdraft.engine.engine import Engine
from longdraft.engine.loading import load
from longdraft.errors import check
from longdraft.report.turns import Record
from longdraft.request.sampling_params import SamplingParams
from longdraft.system import machine
from longdraft.system.files import read_prompt
from longdraft_bench import length, turns
from longdraft_bench.document import document
from longdraft_bench.options import settings
from longdraft_bench.stretched import Places, fill, read_by

LAST = 512  # tokens of the prompt that the large model reads
TURN = 64  # tokens


def measure(engine: Engine, small: FullCache, places: Places, chosen: Sequence[str], prompt: Sequence[int],
            params: SamplingParams, bucket: int, output: Path | None) -> Record:
    start = turns.start
    about = {"machine": machine.description(engine.model.kernels) | engine.provenance, "prefill": len(prompt)}

    def start_filled(*given: object, **named: object) -> object:
        generation = start(*given, **named)  # type: ignore[arg-type]
        fill(generation._cache, small, engine.model, places)
        return generation

    if not engine.model.config.hybrid:
        turns.start = start_filled  # type: ignore[assignment]
    found = length.measure_length(engine, chosen, prompt, params, bucket, TURN, lambda found: None)
    with document("length", output, is_printed=False, **about, drafters=found):
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a stretched model")
    parser.add_argument("--source", default="novelist-gqa", help="the small model; default: %(default)s")
    parser.add_argument("--prompt-file", required=True)
    parser.add_argument("--prefill", type=int, default=32768)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--bucket", type=int, help="new tokens that are reported together; default: all")
    parser.add_argument("--drafters", default="plain auto")
    parser.add_argument("--quantize", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    bucket = given.max_new_tokens if given.bucket is None else given.bucket
    check(bucket >= TURN, "--bucket", bucket, f"a turn's tokens ({TURN}) or more")
    engine, source = load(given.model, quantize=given.quantize, cache_ram=0), load(given.source)
    ids = engine.encode(read_prompt(None, given.prompt_file))
    check(1 <= given.prefill <= len(ids), "--prefill", given.prefill, f"1 to {len(ids)}, the tokens of the prompt")
    prompt = ids[: given.prefill]
    params = SamplingParams(max_new_tokens=given.max_new_tokens, min_p=0.1, seed=7, repetition_penalty=1.2,
                            ignore_eos=True)
    places = Places(source.model.config, engine.model.config)
    small = read_by(source.model, prompt[: max(0, len(prompt) - LAST)])
    chosen = settings("--drafters", given.drafters)
    length.table(measure(engine, small, places, chosen, prompt, params, bucket, given.output)).show()


if __name__ == "__main__":
    main()
