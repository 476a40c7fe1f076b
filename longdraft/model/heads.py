"""TokenSwift's chained heads (paper 3.1; `model.medusa_layers.*` in its checkpoints), and loading of all heads.

Head j turns the hidden state of the one before it into a guess one token further:

    x_j = x_{j-1} + W_j RMSNorm_in(x_{j-1})      x_0 = the last layer's output, before the final norm
    logits_j = LM_head(RMSNorm_out(x_j))

so head j of a row at position p speaks of the token at position p + 1 + j.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from longdraft.errors import ModelError
from longdraft.kernels import Linear
from longdraft.model import medusa
from longdraft.model.checkpoint import HEADS_PREFIX, INDEX, WEIGHTS, TensorFiles
from longdraft.model.config import read_json
from longdraft.model.transformer import Transformer

KIND = "tokenswift-heads"


class Heads(Protocol):
    """Heads of either kind: guesses at the tokens further on, from one row of the target."""

    def __len__(self) -> int: ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [heads, V] float32 of one row's hidden state [1, hidden] (before the final norm).

        Row i of a position p speaks of the token at p + 2 + i.
        """


class Head(NamedTuple):
    linear: Linear
    input_norm: Tensor  # [hidden]
    output_norm: Tensor  # [hidden]


class ChainedHeads:
    """The heads of one target model. `layers[j]` is head j + 1."""

    def __init__(self, layers: tuple[Head, ...], model: Transformer) -> None:
        self.layers = layers
        self._model = model

    def __len__(self) -> int:
        return len(self.layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [heads, V] float32 of one row's hidden state [1, hidden] (before the final norm)."""
        kernels, eps = self._model.kernels, self._model.config.rms_norm_eps
        normed = []
        for head in self.layers:
            hidden = hidden + kernels.linear(kernels.rms_norm(hidden, head.input_norm, eps), head.linear)
            normed.append(kernels.rms_norm(hidden, head.output_norm, eps))
        return self._model.head(torch.cat(normed))


def has_heads(files: TensorFiles) -> bool:
    return any(name.startswith(HEADS_PREFIX) for name in files.names())


def find(folder: Path) -> Path | None:
    """Where a folder's heads are: in it, or beside its model in the sub-folder `heads`; None: nowhere."""
    if (folder / "config.json").exists() and _kind(folder) is not None:
        return folder
    beside = folder / "heads"
    return beside if (beside / "config.json").exists() else None


def _kind(folder: Path) -> str | None:
    """"chained", "medusa", or None for a folder that holds no heads itself.

    A whole model that carries heads tells by its tensors, not by what else its config.json says.
    """
    config = read_json(folder / "config.json")
    has_weights = (folder / WEIGHTS).exists() or (folder / INDEX).exists()
    if config.get("kind") == KIND or (has_weights and has_heads(TensorFiles(folder))):
        return "chained"
    is_medusa = medusa.is_medusa(config) or (folder / medusa.FILE).exists()
    return "medusa" if is_medusa and not has_weights else None


def require_model(folder: Path) -> None:
    """ModelError, saying how they are used, for a folder of heads where a model is wanted."""
    config = read_json(folder / "config.json")
    if "model_type" not in config and (config.get("kind") == KIND or medusa.is_medusa(config)):
        base = config.get("base_model") or config.get("base_model_name_or_path") or "the model they were trained for"
        raise ModelError(f"{folder} holds heads, not a model; give --model {base} --heads {folder}")


def load(folder: Path, model: Transformer, fingerprint: Callable[[], str] | None = None) -> Heads:
    """Heads of either kind: from their own folder, from a whole model's that carries them, or from beside a model.

    A folder of their own has a config.json that names kind, sizes and the weights they were trained on; what does
    not fit `model` (or its weights' `fingerprint`, where given; asked for only where it decides) is a ModelError.
    """
    found = find(folder)
    if found is None:
        raise ModelError(f"{folder} holds no heads: neither TokenSwift's (config.json with kind {KIND!r}, or tensors "
                         f"{HEADS_PREFIX}*) nor Medusa's (medusa_num_heads and {medusa.FILE})")
    folder, config = found, read_json(found / "config.json")
    if _kind(folder) == "medusa":
        return medusa.load(folder, config, model)
    _check(folder, config, model, fingerprint)
    files = TensorFiles(folder)
    names = sorted(name for name in files.names() if name.startswith(HEADS_PREFIX))
    count = len(names) // 3
    wanted = {f"{HEADS_PREFIX}{i}.{part}.weight"
              for i in range(count) for part in ("linear", "input_layernorm", "post_layernorm")}
    hidden = model.config.hidden_size
    if not names or set(names) != wanted:
        raise ModelError(f"{folder}: heads need linear, input_layernorm and post_layernorm each; "
                         f"found {', '.join(names) or 'none'}")
    layers = []
    for i in range(count):
        parts = [files.read(f"{HEADS_PREFIX}{i}.{part}.weight")
                 for part in ("linear", "input_layernorm", "post_layernorm")]
        if [tuple(p.shape) for p in parts] != [(hidden, hidden), (hidden,), (hidden,)]:
            raise ModelError(f"{folder}: head {i} has shapes {[list(p.shape) for p in parts]}; the model's "
                             f"hidden size is {hidden}")
        kernels = model.kernels
        norms = [p.to(kernels.device, kernels.dtype, copy=True) for p in parts[1:]]
        layers.append(Head(kernels.pack(parts[0]), norms[0], norms[1]))
    return ChainedHeads(tuple(layers), model)


def _check(folder: Path, config: dict[str, Any], model: Transformer,
           fingerprint: Callable[[], str] | None) -> None:
    for name, wanted in (("hidden_size", model.config.hidden_size), ("vocab_size", model.config.vocab_size)):
        if config.get(name) != wanted:
            raise ModelError(f"{folder}: heads were trained for {name} {config.get(name)}, the model has {wanted}")
    trained_on = config.get("base_sha256")
    if fingerprint and trained_on and trained_on != (actual := fingerprint()):
        raise ModelError(f"{folder}: heads were trained on other weights of {config.get('base_model')!r} "
                         f"(sha256 {str(trained_on)[:12]}, this model's is {actual[:12]}); train heads for this "
                         "model or give those of its own with --heads")
