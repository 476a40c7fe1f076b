"""Files of the SentencePiece format, and model folders that have them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

SPACE = "\u2581"
_MERGED = [f"{SPACE}t", "he", f"{SPACE}a", "in", f"{SPACE}the", "re", "on", "er", f"{SPACE}w", "at", "nd",
           f"{SPACE}and", "ing", f"{SPACE}{SPACE}", f"{SPACE}{SPACE}{SPACE}{SPACE}"]
_LETTERS = [SPACE, *"etaoinshrdlucmwg.,'"]
# Runs of spaces have the worst scores and small ids, as in the model of Llama 2.
PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((f"<0x{i:02X}>", 0.0, 6) for i in range(256)),
          (_MERGED[-2], -1e9, 1), (_MERGED[-1], -1e9, 1),
          *((text, -float(i), 1) for i, text in enumerate([*_MERGED[:-2], *_LETTERS])), ("<end>", 0.0, 4)]


def field(number: int, content: bytes | int | float) -> bytes:
    if isinstance(content, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", content)
    kind = 0 if isinstance(content, int) else 2
    key = varint(number << 3 | kind)
    return key + (varint(content) if isinstance(content, int) else varint(len(content)) + content)


def varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def model_file(pieces: Any = PIECES, trainer: dict[int, Any] | None = None,
               normalizer: dict[int, Any] | None = None) -> bytes:
    """A file of the format, with a model of byte-pair encoding and byte fallback."""
    parts = [field(1, field(1, text.encode()) + field(2, score) + field(3, kind)) for text, score, kind in pieces]
    for number, fields in ((2, {3: 2, 35: 1} | (trainer or {})),
                           (3, {1: b"identity", 3: 1, 4: 0, 5: 1} | (normalizer or {}))):
        parts.append(field(number, b"".join(field(name, content) for name, content in fields.items())))
    return b"".join(parts)


def write(folder: Path, content: bytes | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model_file() if content is None else content)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def original_files(model: Any, folder: Path) -> Path:
    """A model in the layout of NousResearch/Yarn-Llama-2-7b-128k: `.bin` weights, `tokenizer.model`, YaRN."""
    folder.mkdir(parents=True)
    config = model.config.to_dict() | {
        "rope_theta": 10000.0, "rope_parameters": None, "rope_scaling": {
            "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "finetuned": True}}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return write(folder, add_bos_token=True, add_eos_token=False)
