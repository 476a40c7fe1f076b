"""Medusa's independent heads (arXiv 2401.10774), in the format of the public files.

Head i reads the target's last hidden state *after* the final norm, and predicts the token i places after the next:

    x <- x + SiLU(W_ij x + b_ij)    for each residual block j      logits_i = U_i x

A folder has config.json (medusa_num_heads, medusa_num_layers) and medusa_lm_head.safetensors with the tensors
`{i}.{j}.linear.weight`, `{i}.{j}.linear.bias` and `{i}.{layers}.weight` (U_i [V, hidden]). If the file has no U_i, the
target's output head takes its place. The authors' .pt files are pickles, which can run code, and are never loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import ModelError
from longdraft.kernels import Linear
from longdraft.model.transformer import Transformer

MEDUSA_FILE = "medusa_lm_head.safetensors"


class MedusaHead(NamedTuple):
    blocks: tuple[Linear, ...]
    output: Linear | None  # U_i; None: the target's output head


Layer = TypeVar("Layer")


class HeadsOfModel(Generic[Layer]):
    """What all kinds of heads of one target model have. `layers[i]` is head i + 1."""

    def __init__(self, layers: tuple[Layer, ...], model: Transformer) -> None:
        self.layers = layers
        self._model = model

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def vocabulary(self) -> int:
        return self._model.config.vocab_size


class MedusaHeads(HeadsOfModel[MedusaHead]):
    def logits(self, hidden: Tensor) -> Tensor:
        """See `Heads.logits`."""
        model = self._model
        kernels = model.kernels
        normed = model.normed(hidden)
        rows = []
        for head in self.layers:
            x = normed
            for block in head.blocks:
                x = x + functional.silu(kernels.linear(x, block))
            rows.append(kernels.linear(x, head.output, keep_float=True) if head.output else model.head(x))
        return torch.cat(rows)


def is_medusa(config: dict[str, Any]) -> bool:
    """Whether a config.json describes Medusa heads."""
    return "medusa_num_heads" in config


def load_medusa(folder: Path, config: dict[str, Any], model: Transformer) -> MedusaHeads:
    """Heads from a folder in the public format. Raises ModelError for heads that do not fit `model`."""
    if not (folder / MEDUSA_FILE).exists():
        raise ModelError(f"{folder / MEDUSA_FILE} is missing; Medusa's .pt files are pickles, which can run code, and "
                         "are not loaded; convert one with safetensors.torch.save_file(torch.load("
                         f"'medusa_lm_head.pt', weights_only=True), '{MEDUSA_FILE}')")
    count, num_blocks = (_read_count(folder, config, name) for name in ("medusa_num_heads", "medusa_num_layers"))
    files = TensorFiles(folder, MEDUSA_FILE)
    hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
    own: dict[str, tuple[int, ...]] = {f"{i}.{num_blocks}.weight": (vocabulary, hidden) for i in range(count)}
    expected = dict(own) if files.names() & own.keys() else {}
    for i in range(count):
        for j in range(num_blocks):
            expected |= {f"{i}.{j}.linear.weight": (hidden, hidden), f"{i}.{j}.linear.bias": (hidden,)}
    files.check(expected, files.names(), "its config.json and this model")
    pack = model.kernels.pack
    return MedusaHeads(tuple(MedusaHead(
        tuple(pack(*(files.read(f"{i}.{j}.linear.{part}") for part in ("weight", "bias"))) for j in range(num_blocks)),
        pack(files.read(f"{i}.{num_blocks}.weight")) if f"{i}.{num_blocks}.weight" in expected else None,
    ) for i in range(count)), model)


def _read_count(folder: Path, config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or not 1 <= value <= 16:
        raise ModelError(f"{folder}: {name} is {value!r} in config.json; allowed: 1 to 16")
    return value
