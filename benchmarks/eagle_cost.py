"""The cost of an EAGLE head's draft step beside a plain step of its model.

    python benchmarks/eagle_cost.py --model stretched --contexts 1024,8192 --output eagle-cost.json

The head has random weights and the shape that `longdraft train eagle` gives it for this model: a step costs the same
whatever it guesses. After the first N tokens of a text of random tokens, for each N of `--contexts`, plain steps and
chains of `--chain` drafts are timed in turns. Reported are medians: a plain step, a draft step, and their ratio in each
pair.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import longdraft
from longdraft.checkpoint.config_file import read_config
from longdraft.checkpoint.hub import resolve
from longdraft.checkpoint.tensor_files import dump_json
from longdraft.drafters.eagle import EagleDraftModel
from longdraft.model.config import ModelConfig
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.parts.eagle import Eagle, eagle_shapes
from longdraft.request.context import Context
from longdraft.speculation.routine import run_alone
from longdraft.train.eagle import head_config, speculators_config
from longdraft.train.settings import EagleSettings

CHUNK = 512  # tokens of the prompt in a forward


def write_random_head(folder: Path, model: ModelConfig, vocabulary: int) -> None:
    """A head in the format of speculators."""
    config = head_config(EagleSettings(data=("none",), draft_vocab=vocabulary), model)
    shapes = eagle_shapes(config, {"lm_head.weight"}, model.vocab_size)
    tensors = {name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * shape[1] ** -0.5
               for name, shape in shapes.items()}
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    if config.draft_vocab_size < model.vocab_size:
        tensors["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    dump_json(folder / "config.json", speculators_config(config, {"name_or_path": None, "architectures": []},
                                                         torch.bfloat16, 5))


def measure(model: Transformer, head: Eagle, length: int, chain: int, pairs: int) -> dict[str, Any]:
    """Times after a text of `length` random tokens."""
    tapped = model.with_taps(head.taps)
    ids = torch.randint(0, 1000, (length + 1,), generator=torch.Generator().manual_seed(1)).tolist()
    cache, context = tapped.new_cache(), Context(ids[:1])
    draft_model = EagleDraftModel(head, cache, head.config.window, 0, chain)
    for start in range(0, length, CHUNK):
        end = min(start + CHUNK, length)
        tapped.forward(chain_rows(ids[start:end], start), cache)
        cache.commit(range(end - start))
        context.extend(ids[start + 1 : end + 1])
    run_alone(draft_model.next_logits(context, ids[-1:]))
    plain, drafted = [], []
    for turn in range(pairs):
        began = time.perf_counter()
        tapped.forward(chain_rows(ids[-1:], length), cache, 1)
        plain.append(time.perf_counter() - began)
        path = [ids[-1], *(2 + (turn + place) % 900 for place in range(chain))]
        began = time.perf_counter()
        for place in range(chain):
            run_alone(draft_model.next_logits(context, path[: place + 2]))
        drafted.append((time.perf_counter() - began) / chain)
    ratios = [mine / whole for mine, whole in zip(drafted, plain, strict=True)]
    return {"context": length, "plain_ms": 1e3 * statistics.median(plain),
            "draft_ms": 1e3 * statistics.median(drafted), "draft_to_plain": statistics.median(ratios),
            "extremes": [min(ratios), max(ratios)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="novelist")
    parser.add_argument("--contexts", default="1024,8192", help="tokens of the text before the drafts")
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--chain", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_random_head(Path(folder), read_config(resolve(given.model)), given.draft_vocab)
        engine = longdraft.load(given.model, drafter="eagle", heads=folder, threads=given.threads)
        head = engine.eagle
        assert head is not None
        found = [measure(engine.model, head, int(length), given.chain, given.pairs)
                 for length in given.contexts.split(",")]
    about = {"model": given.model, "draft_vocabulary": head.config.draft_vocab_size, "window": head.config.window,
             "chain": given.chain, "pairs": given.pairs, "kernels": engine.model.kernels.name, "rows": found}
    given.output.write_text(json.dumps(about, indent=1) + "\n")
    for row in found:
        print(f"{row['context']:,} tokens: plain {row['plain_ms']:.2f} ms, draft {row['draft_ms']:.2f} ms, "
              f"ratio {row['draft_to_plain']:.3f} ({row['extremes'][0]:.3f} to {row['extremes'][1]:.3f})")


if __name__ == "__main__":
    main()
