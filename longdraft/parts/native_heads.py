"""Native multi-token prediction (MTP): the layer that Qwen3-Next, Qwen3.5 and Qwen3.6 were trained with, as a head.

    x = fc([norm(embedding of the token) | norm(y)])     y: the target's row after its final norm; after the text, the
    a = an attention layer of the target's kind (x)         head's own row a before, after the last norm
    logits = the target's head (norm(a))

It is a head of the layout of EAGLE-1 (longdraft/parts/eagle.py) with norms of its own. It is in the target's files, by
the names of Hugging Face (checkpoint/gguf/tensors.py gives them to those of GGUF files), or in a folder of its own
that `speculators` has written (kind `mtp`), also for Qwen3.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from longdraft.checkpoint.checkpoint import Loader
from longdraft.checkpoint.config_file import read_json
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.checkpoint.tensor_names import expected_shapes
from longdraft.errors import ModelError
from longdraft.model.config import ModelConfig
from longdraft.model.families import FAMILIES
from longdraft.model.hybrid import DRAFT_LAYERS
from longdraft.model.transformer import Transformer
from longdraft.parallel import local_kernels
from longdraft.parts.eagle import Eagle, EagleWeights
from longdraft.parts.eagle_config import EagleConfig

_LAYER = "layers.0."
SPECULATORS_KIND = "mtp"
_KINDS = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # of layers that `speculators` writes, and we have


class _Names(NamedTuple):
    """Names of a head's tensors: `prefix` of those of its layer, then of fc and of the norms, without `.weight`."""

    prefix: str
    fc: str
    embedding_norm: str
    row_norm: str
    last_norm: str


_NATIVE = _Names(DRAFT_LAYERS, *(DRAFT_LAYERS + name for name in (
    "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")))
_SPECULATORS = _Names("mtp_", *(f"mtp_{_LAYER}{name}" for name in (
    "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")))


def load_native_head(folder: Path, target: Transformer) -> Eagle | None:
    """The head in the files of the target; None if they have none. Raises ModelError for one that does not fit."""
    if target.whole.hybrid is None or not folder.exists():  # a model in memory has no files
        return None
    files = TensorFiles(folder)
    present = {name for name in files.names() if name.startswith(DRAFT_LAYERS)}
    if not present:
        return None
    count = len({name.split(".")[2] for name in present if name.startswith(f"{DRAFT_LAYERS}layers.")})
    if count > 1:  # the engines that read these models chain them in different ways, and no published model has them
        raise ModelError(f"{folder} has {count} layers for native drafts; supported: one; use another drafter")
    return _head(files, present, _NATIVE, target.whole.norm_offset, target)


def is_speculators_head(folder: Path) -> bool:
    """Whether a folder, which `is_eagle` has accepted, has a head of the kind `mtp` of speculators."""
    return read_json(folder / "config.json").get("speculators_model_type") == SPECULATORS_KIND


def load_speculators_head(folder: Path, target: Transformer) -> Eagle:
    """The head in a folder of its own. Raises ModelError for one that does not fit the target."""
    config = read_json(folder / "config.json")
    layer: Any = config.get("transformer_layer_config")
    kind = layer.get("model_type") if isinstance(layer, dict) else None
    if kind not in _KINDS:
        raise ModelError(f"{folder}: the head's layer is of the type {kind!r}; supported: {', '.join(_KINDS)}")
    if (count := config.get("num_nextn_predict_layers", 1)) != 1:
        raise ModelError(f"{folder}: num_nextn_predict_layers is {count!r} in config.json; supported: 1")
    files = TensorFiles(folder)
    return _head(files, files.names(), _SPECULATORS, FAMILIES[kind].norm_offset, target)


def _head(files: TensorFiles, present: Set[str], names: _Names, norm_offset: float, target: Transformer) -> Eagle:
    """The head of the tensors `present`. norm_offset: of these files, which is not that of a target from GGUF"""
    config = replace(target.whole, norm_offset=norm_offset)
    hybrid = config.hybrid and replace(config.hybrid, is_delta=(False,))
    layer = replace(config, num_layers=1, hybrid=hybrid)
    files.check(_shapes(layer, names), present, "the model that it shall draft for")
    kernels = local_kernels(target.kernels)  # every rank has the head whole

    def norm(name: str) -> Tensor:
        weight = files.read(f"{name}.weight").to(kernels.device).float() + norm_offset
        return weight if config.float_norms else weight.to(kernels.dtype)

    weights = EagleWeights(
        embedding=None, fc=kernels.pack(files.stack([f"{names.fc}.weight"], kernels.dtype)), fc_norms=(),
        norms=(norm(names.embedding_norm), norm(names.row_norm)), norm=norm(names.last_norm), head=None, ids=None,
        layers=(Loader(files, layer, kernels, target.weights.quantize, None).layer(0, names.prefix),))
    meaning = EagleConfig(
        version=1, layer=layer, target_width=config.hidden_size, tapped_ids=(), uses_taps=False,
        draft_vocab_size=config.vocab_size, norm_before_residual=None, norm_before_fc=False, fc_norm=False,
        norm_output=True, window=0)
    return Eagle(meaning, weights, target, (config.num_layers,))


def _shapes(layer: ModelConfig, names: _Names) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a head whose layer has this configuration."""
    hidden, inside = layer.hidden_size, f"model.{_LAYER}"
    shapes = {name.replace(inside, f"{names.prefix}{_LAYER}"): shape for name, shape in expected_shapes(layer).items()
              if name.startswith(inside)}
    shapes |= {f"{name}.weight": (hidden,) for name in (names.embedding_norm, names.row_norm, names.last_norm)}
    return shapes | {f"{names.fc}.weight": (hidden, 2 * hidden)}
