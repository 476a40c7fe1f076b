"""The paper's recipes (TokenSwift, table 9 and its scripts): the same but for the 14B model's.

983,040 tokens a step on 4 GPUs with 3 sequences each; start as many processes with `torchrun`, or raise
--gradient-accumulation.
"""

from __future__ import annotations

from typing import Any

_PAPER: dict[str, Any] = {
    "kind": "tokenswift", "init": "paper", "distill": 0.0, "heads": 3, "sequence_length": 8192, "steps": 200,
    "batch_size": 3, "gradient_accumulation": 10, "learning_rate": 5e-3, "warmup_steps": 50, "weight_decay": 0.1,
    "beta2": 0.999, "max_grad_norm": 1.0, "seed": 42, "dtype": "bfloat16",
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper-llama3.1-8b": _PAPER | {"model": "meta-llama/Llama-3.1-8B"},
    "paper-yarn-llama2-7b-128k": _PAPER | {"model": "NousResearch/Yarn-Llama-2-7b-128k"},
    "paper-qwen2.5-1.5b": _PAPER | {"model": "Qwen/Qwen2.5-1.5B"},
    "paper-qwen2.5-7b": _PAPER | {"model": "Qwen/Qwen2.5-7B"},
    "paper-qwen2.5-14b": _PAPER | {"model": "Qwen/Qwen2.5-14B", "learning_rate": 1e-3, "steps": 600, "batch_size": 1},
}
