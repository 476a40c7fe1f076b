"""Native multi-token prediction (MTP): the layer that Qwen3-Next, Qwen3.5 and Qwen3.6 were trained with, as a head.

    x = fc([norm(embedding of the token) | norm(y)])     y: the target's row after its final norm; behind the text, the
    a = an attention layer of the target's kind (x)         head's own row a before, after `mtp.norm`
    logits = the target's head (norm(a))

It is a head of the layout of EAGLE-1 (longdraft/model/eagle.py) with norms of its own. The names are those of Hugging
Face's files; longdraft/model/gguf/tensors.py gives them to those of GGUF files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from longdraft.errors import ModelError
from longdraft.model.checkpoint import Loader
from longdraft.model.config import ModelConfig
from longdraft.model.eagle import Eagle, EagleWeights
from longdraft.model.eagle_config import EagleConfig
from longdraft.model.hybrid import DRAFT_LAYERS
from longdraft.model.tensor_files import TensorFiles
from longdraft.model.tensor_names import expected_shapes
from longdraft.model.transformer import Transformer
from longdraft.parallel import local_kernels

_LAYER = "layers.0."
_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def load_native_head(folder: Path, target: Transformer) -> Eagle | None:
    """The head in the files of the target; None if they have none. Raises ModelError for one that does not fit."""
    config = target.whole
    if config.hybrid is None or not folder.exists():  # a model in memory has no files
        return None
    files = TensorFiles(folder)
    present = {name for name in files.names() if name.startswith(DRAFT_LAYERS)}
    if not present:
        return None
    count = len({name.split(".")[2] for name in present if name.startswith(f"{DRAFT_LAYERS}layers.")})
    if count > 1:  # the engines that read these models chain them in different ways, and no published model has them
        raise ModelError(f"{folder} has {count} layers for native drafts; supported: one; use another drafter")
    layer = replace(config, num_layers=1, hybrid=replace(config.hybrid, is_delta=(False,)))
    files.check(_shapes(layer), present, "its config.json")
    kernels = local_kernels(target.kernels)  # every rank has the head whole

    def norm(name: str) -> Tensor:
        return files.read(f"{DRAFT_LAYERS}{name}.weight").to(kernels.device).float() + config.norm_offset

    embedding_norm, row_norm, last_norm = map(norm, _NORMS)
    weights = EagleWeights(
        embedding=None, fc=kernels.pack(files.stack([f"{DRAFT_LAYERS}fc.weight"], kernels.dtype)), fc_norms=(),
        norms=(embedding_norm, row_norm), norm=last_norm, head=None, ids=None,
        layers=(Loader(files, layer, kernels, target.weights.quantize, None).layer(0, DRAFT_LAYERS),))
    meaning = EagleConfig(
        version=1, layer=layer, target_width=config.hidden_size, tapped_ids=(), uses_taps=False,
        draft_vocab_size=config.vocab_size, norm_before_residual=None, norm_before_fc=False, fc_norm=False,
        norm_output=True, window=0)
    return Eagle(meaning, weights, target, (config.num_layers,))


def _shapes(layer: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of the tensors of a head whose layer has this configuration."""
    hidden, inside = layer.hidden_size, f"model.{_LAYER}"
    found = {name.replace(inside, f"{DRAFT_LAYERS}{_LAYER}"): shape for name, shape in expected_shapes(layer).items()
             if name.startswith(inside)}
    found |= {f"{DRAFT_LAYERS}{name}.weight": (hidden,) for name in _NORMS}
    return found | {f"{DRAFT_LAYERS}fc.weight": (hidden, 2 * hidden)}
