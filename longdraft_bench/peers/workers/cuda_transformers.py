"""A decoding step of transformers on a CUDA device, with a static cache and torch.compile; for `longdraft bench cuda`.

    python cuda_transformers.py '{"model_type": "llama", ...}' 4096

The arguments are the entries of a config.json and the context in tokens. The model has random weights. Prints one line
of JSON: {"context": 4096, "step_ms": 9.5}, the median over 20 steps.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

_WARM_UP_STEPS, _STEPS = 4, 20


def main(shape: dict[str, Any], context: int) -> None:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), attn_implementation="sdpa").eval()
    cache = StaticCache(config=model.config, max_cache_len=context + 256)
    _step(model, torch.tensor([[5]], device="cuda"), cache, context - 1)  # allocates the cache, outside of any graph
    forward: Any = torch.compile(model.forward, mode="reduce-overhead", fullgraph=False)
    token = torch.tensor([[5]], device="cuda")
    seconds = []
    for position in range(context, context + _WARM_UP_STEPS + _STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        _step(forward, token, cache, position)
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"context": context, "step_ms": statistics.median(seconds[_WARM_UP_STEPS:]) * 1e3}))


def _step(forward: Any, token: torch.Tensor, cache: StaticCache, position: int) -> int:
    """The greedy token after `token`, which stands at `position`."""
    where = torch.tensor([position], device="cuda")
    with torch.inference_mode():
        logits = forward(token, past_key_values=cache, cache_position=where, position_ids=where[None]).logits
    return int(logits[:, -1].argmax(-1).item())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
