"""Published recipes of trainings, by kind: the values of settings that the user does not give.

TokenSwift (arXiv 2502.18890), table 9 and its scripts: a step has 983,040 tokens, on 4 GPUs with 3 sequences each.
Start as many processes with `torchrun`, or raise --gradient-accumulation. Data: PG-19's training books of 8,192 tokens
and more, the first 8,192 of each. Where the table and the scripts differ, the scripts count.

LongSpec (arXiv 2502.17421), three stages on 8 GPUs, each from the weights of the one before (--start): short sequences
at offset positions, then 32,768 tokens at their own positions, on long documents and on long answers.

TriForce*: the paper's small model of "205M" parameters for LLaMA3.1. The paper does not say how many layers it has;
with embeddings that are not tied, one layer gives 206 million. It gives no learning rate.
"""

from __future__ import annotations

from typing import Any

_TOKENSWIFT: dict[str, Any] = {
    "kind": "tokenswift", "init": "paper", "distill": 0.0, "heads": 3, "sequence_length": 8192, "steps": 200,
    "batch_size": 3, "gradient_accumulation": 10, "learning_rate": 5e-3, "warmup_steps": 50, "weight_decay": 0.1,
    "beta2": 0.999, "max_grad_norm": 1.0, "seed": 42, "dtype": "bfloat16", "schedule": "warmup-cosine",
    "min_tokens": 8192, "document_tokens": 8192,
}
_MODELS: dict[str, dict[str, Any]] = {
    "llama3.1-8b": {"model": "meta-llama/Llama-3.1-8B"},
    "yarn-llama2-7b-128k": {"model": "NousResearch/Yarn-Llama-2-7b-128k"},
    "qwen2.5-1.5b": {"model": "Qwen/Qwen2.5-1.5B"},
    "qwen2.5-7b": {"model": "Qwen/Qwen2.5-7B"},
    "qwen2.5-14b": {"model": "Qwen/Qwen2.5-14B", "learning_rate": 1e-3, "steps": 600, "batch_size": 1},
}
# Medusa's recipe on the same data; its warm-up is a tenth of the steps.
_MEDUSA = {name: value for name, value in _TOKENSWIFT.items() if name != "init"} | {
    "kind": "medusa", "learning_rate": 1e-3, "warmup_steps": 20, "weight_decay": 0.0}

_LONGSPEC: dict[str, Any] = {"distill": 0.0, "beta2": 0.95, "weight_decay": 0.1, "max_grad_norm": 1.0, "window": 512,
                             "max_lag": 4, "schedule": "warmup-cosine", "dtype": "bfloat16"}
_LATER = _LONGSPEC | {"sequence_length": 32768, "positions": 32768, "batch_size": 1, "learning_rate": 5e-6,
                      "warmup_steps": 10, "steps": 100}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "heads": {f"paper-{name}": _TOKENSWIFT | model for name, model in _MODELS.items()} | {
        f"paper-medusa-{name}": _MEDUSA | {"model": model["model"]} for name, model in _MODELS.items()},
    "glide": {
        "longspec-1": _LONGSPEC | {"sequence_length": 1024, "batch_size": 2, "gradient_accumulation": 128,
                                   "learning_rate": 5e-4, "warmup_steps": 290, "steps": 2900},
        "longspec-2": _LATER | {"gradient_accumulation": 8},
        "longspec-3": _LATER | {"gradient_accumulation": 32},
    },
    "lm": {"paper-triforce-205m": {
        "tokenizer": "meta-llama/Llama-3.1-8B", "layers": 1, "hidden_size": 768, "intermediate_size": 3072,
        "num_heads": 12, "context": 2048, "sequence_length": 2048, "rope_theta": 500000.0, "tied": False, "skip": 0.0,
        "dtype": "bfloat16"}},
}
