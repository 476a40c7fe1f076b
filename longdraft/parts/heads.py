"""TokenSwift's chained heads (section 3.1 of the paper), and loading of heads of every kind.

Head j turns the hidden state of head j - 1 into a prediction one token further ahead:

    x_j = x_{j-1} + W_j RMSNorm_in(x_{j-1})      x_0 = the last layer's output, before the final norm
    or      x_{j-1} + D_j silu(U_j RMSNorm_in(x_{j-1})), our variant (`train heads --kind mlp`; tensors up and down)
    logits_j = LM_head(RMSNorm_out(x_j))

For a row at position p, head j predicts the token at position p + 1 + j. The tensors are `model.medusa_layers.*`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longdraft.checkpoint.config_file import read_json
from longdraft.checkpoint.gguf.block_head import is_block_head
from longdraft.checkpoint.tensor_files import TensorFiles, has_weights, require_no_adapter
from longdraft.checkpoint.tensor_source import HEADS_PREFIX
from longdraft.errors import ModelError
from longdraft.kernels import Linear
from longdraft.kernels.chain_plan import Heads
from longdraft.model.transformer import Transformer
from longdraft.parts import medusa
from longdraft.parts.eagle_config import is_eagle

HEADS_KIND = "tokenswift-heads"


class Head(NamedTuple):
    """One chained head."""

    maps: tuple[Linear, ...]  # W, or U and D
    input_norm: Tensor  # [hidden]
    output_norm: Tensor  # [hidden]


class ChainedHeads(medusa.HeadsOfModel[Head]):
    def logits(self, hidden: Tensor) -> Tensor:
        """See `Heads.logits`."""
        kernels, eps = self._model.kernels, self._model.config.rms_norm_eps
        normed = []
        for head in self.layers:
            inner = kernels.linear(kernels.rms_norm(hidden, head.input_norm, eps), head.maps[0])
            hidden = hidden + (kernels.linear(functional.silu(inner), head.maps[1]) if len(head.maps) > 1 else inner)
            normed.append(kernels.rms_norm(hidden, head.output_norm, eps))
        return self._model.head(torch.cat(normed))


def has_heads(files: TensorFiles) -> bool:
    """Whether a model's weights include chained heads."""
    return any(name.startswith(HEADS_PREFIX) for name in files.names())


def find_heads(folder: Path) -> Path | None:
    """The folder of a model's heads: the folder itself, or its sub-folder `heads`; None: it has none."""
    if (folder / "config.json").exists() and _heads_kind(folder) is not None:
        return folder
    beside = folder / "heads"
    return beside if (beside / "config.json").exists() else None


def _heads_kind(folder: Path) -> str | None:
    """"chained", "medusa", or None for a folder that has no heads itself.

    For a whole model, its tensors decide: its config.json may have entries of heads that are elsewhere.
    """
    config = read_json(folder / "config.json")
    is_whole = has_weights(folder)
    if config.get("kind") == HEADS_KIND or (is_whole and has_heads(TensorFiles(folder))):
        return "chained"
    is_medusa = medusa.is_medusa(config) or (folder / medusa.MEDUSA_FILE).exists()
    return "medusa" if is_medusa and not is_whole else None


def require_model(folder: Path) -> None:
    """Raise ModelError if the folder has heads instead of a model. The message says how to use them."""
    is_gguf = folder.is_file()
    if is_eagle(folder) or (is_gguf and is_block_head(folder)):
        raise ModelError(f"{folder} has a drafter, not a model; give the model that it was trained for as --model, and "
                         f"--heads {folder} with --drafter eagle or block")
    if is_gguf:
        return
    require_no_adapter(folder)
    if not (folder / "config.json").exists():
        raise ModelError(f"{folder} has no config.json; give a model's folder in Hugging Face's format, or a GGUF file")
    config = read_json(folder / "config.json")
    if "model_type" not in config and (config.get("kind") == HEADS_KIND or medusa.is_medusa(config)):
        base = config.get("base_model") or config.get("base_model_name_or_path") or "the model they were trained for"
        raise ModelError(f"{folder} has heads, not a model; give --model {base} --heads {folder}")


def load_heads(folder: Path, model: Transformer, fingerprint: Callable[[], str] | None = None,
               vocabulary: Callable[[], str] | None = None) -> Heads:
    """Heads from their own folder, from the sub-folder of a model, or from a model that includes them.

    fingerprint  returns the hash of the target's weights; called only if the heads record the hash they need
    vocabulary   returns the hash of the target's vocabulary, or "" if unknown; called only if the heads record one

    Raises ModelError for heads that do not fit `model`.
    """
    own = find_heads(folder)
    if own is None:
        raise ModelError(f"{folder} has no heads; give a folder with TokenSwift's heads (config.json with kind "
                         f"{HEADS_KIND!r}, or tensors {HEADS_PREFIX}*) or Medusa's (medusa_num_heads and "
                         f"{medusa.MEDUSA_FILE}), with an EAGLE head or with a glide layer")
    folder, config = own, read_json(own / "config.json")
    if _heads_kind(folder) == "medusa":
        if "base_sha256" in config:  # heads that longdraft trained; public ones do not record it
            check_target(folder, config, model, fingerprint, vocabulary)
        return medusa.load_medusa(folder, config, model)
    check_target(folder, config, model, fingerprint, vocabulary)
    files = TensorFiles(folder)
    names = sorted(name for name in files.names() if name.startswith(HEADS_PREFIX))
    maps = ("up", "down") if any(name.endswith(".up.weight") for name in names) else ("linear",)
    parts = (*maps, "input_layernorm", "post_layernorm")
    count = len(names) // len(parts)
    if not names or set(names) != {f"{HEADS_PREFIX}{i}.{part}.weight" for i in range(count) for part in parts}:
        raise ModelError(f"{folder}: each head needs the tensors linear (or up and down), input_layernorm and "
                         f"post_layernorm; found: {', '.join(names) or 'none'}")
    return ChainedHeads(tuple(_head(folder, files, i, maps, model) for i in range(count)), model)


def _head(folder: Path, files: TensorFiles, index: int, maps: tuple[str, ...], model: Transformer) -> Head:
    tensors = [files.read(f"{HEADS_PREFIX}{index}.{part}.weight")
               for part in (*maps, "input_layernorm", "post_layernorm")]
    hidden, kernels = model.config.hidden_size, model.kernels
    inner = tensors[0].shape[0]
    wanted = [[hidden, hidden]] if len(maps) == 1 else [[inner, hidden], [hidden, inner]]
    if (shapes := [list(each.shape) for each in tensors]) != [*wanted, [hidden], [hidden]]:
        raise ModelError(f"{folder}: head {index} has shapes {shapes}; the model's hidden size is {hidden}; use heads "
                         "that were trained for this model")
    *matrices, first, second = tensors
    norms = [norm.to(kernels.device, kernels.dtype, copy=True) for norm in (first, second)]
    return Head(tuple(map(kernels.pack, matrices)), *norms)


def check_target(folder: Path, config: dict[str, Any], model: Transformer,
                 fingerprint: Callable[[], str] | None, vocabulary: Callable[[], str] | None) -> None:
    """Raise ModelError if the folder's config.json records another model than `model`. See `load_heads`."""
    for name, wanted in (("hidden_size", model.config.hidden_size), ("vocab_size", model.config.vocab_size)):
        if config.get(name) != wanted:
            raise ModelError(f"{folder}: trained for {name} {config.get(name)}, but the model has {wanted}; train for "
                             "this model, or choose others with --heads")
    trained_on = config.get("base_sha256")
    if fingerprint and trained_on and trained_on != (actual := fingerprint()):
        raise ModelError(f"{folder}: trained on other weights of {config.get('base_model')!r} "
                         f"(sha256 {str(trained_on)[:12]}, this model's is {actual[:12]}); train for this "
                         "model, or choose others with --heads")
    words = config.get("vocabulary_sha256")
    if vocabulary and words and vocabulary() not in ("", words):  # "": unknown
        raise ModelError(f"{folder}: trained with another tokenizer than the model's; train for this model, or choose "
                         "others with --heads")
