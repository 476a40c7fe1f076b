"""Write a model with the shape of a known one and random weights, to measure time and memory.

    longdraft bench model random --like qwen2.5-1.5b OUT
    longdraft bench model random --like qwen2.5-1.5b --layers 2 DRAFT      # its first layers: a draft model
    longdraft generate "It was" --model OUT

It is written shard by shard, so that memory holds one shard only. The tokenizer is the bundled model's, with invented
words for the rest of the vocabulary. `heads` holds untrained TokenSwift heads. Its texts and the acceptance of drafts
are meaningless.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from longdraft.checkpoint import config_file, hub
from longdraft.checkpoint.tensor_files import INDEX, dump_json
from longdraft.checkpoint.tensor_names import expected_shapes
from longdraft.checkpoint.tensor_source import HEADS_PREFIX
from longdraft.parts.heads import HEADS_KIND

HEADS = 3
SHARD_BYTES = 1 << 29
SPREAD = 0.02  # standard deviation of the weights, as models are initialised


def write_random_model(shape: dict[str, Any], folder: Path, seed: int) -> None:
    """Write a model of this shape to a new folder, with heads in its folder `heads`."""
    folder.mkdir(parents=True)
    write_tokenizer(folder, shape["vocab_size"])
    dump_json(folder / "config.json", shape)
    shards = split(expected_shapes(config_file.parse_config(shape)))
    generator = torch.Generator().manual_seed(seed)
    where: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({tensor: weight(tensors[tensor], generator) for tensor in tensors}, folder / file, {"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        print(f"{file}: {len(tensors)} tensors")
    dump_json(folder / INDEX, {"metadata": {}, "weight_map": where})
    write_heads(folder / "heads", shape)


def split(shapes: dict[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    """Split tensors into shards of at most SHARD_BYTES. A larger tensor gets a shard of its own."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = SHARD_BYTES
    for name, shape in shapes.items():
        nbytes = 2 * torch.Size(shape).numel()
        if nbytes > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = shape
        room -= nbytes
    return shards


def weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)  # norms
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, SPREAD, generator=generator)


def write_heads(folder: Path, shape: dict[str, Any]) -> None:
    """Heads whose output equals their input."""
    folder.mkdir()
    hidden = shape["hidden_size"]
    tensors = {}
    for head in range(HEADS):
        tensors[f"{HEADS_PREFIX}{head}.linear.weight"] = torch.zeros(hidden, hidden, dtype=torch.bfloat16)
        for norm in ("input_layernorm", "post_layernorm"):
            tensors[f"{HEADS_PREFIX}{head}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    dump_json(folder / "config.json", {"kind": HEADS_KIND, "hidden_size": hidden, "vocab_size": shape["vocab_size"]})


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    tokenizer = json.loads((hub.BUNDLED_DIR / hub.DEFAULT_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    known |= {f"Ġword{i}": i for i in range(len(known), vocabulary)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
