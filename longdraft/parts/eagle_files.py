"""Reading of EAGLE heads from their folders: tensors and maps of the vocabulary, checked against the target."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from longdraft.checkpoint.config_file import read_json
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import ModelError
from longdraft.kernels import Linear
from longdraft.model.transformer import Transformer
from longdraft.parallel import local_kernels
from longdraft.parts.draft_copy import SAME, head_format
from longdraft.parts.eagle import Eagle, EagleWeights, eagle_shapes
from longdraft.parts.eagle_config import (
    FC,
    MASK_HIDDEN,
    EagleConfig,
    canonical_names,
    layer_readings,
    read_eagle_config,
)
from longdraft.parts.eagle_probe import likeliest
from longdraft.parts.head_config import OWN_KEY
from longdraft.parts.head_tensors import CURE, MAPS, HeadTensors, check_sizes, draft_ids

log = logging.getLogger(__name__)


def load_eagle(folder: Path, target: Transformer, check: Callable[[Path, dict[str, Any]], None],
               encode: Callable[[str], list[int]] | None = None, asked: str = SAME) -> Eagle:
    """The head in a folder, which `is_eagle` has accepted. Raises ModelError for a head that does not fit the target.

    check   raises ModelError if the head's own record (`OWN_KEY`) names another target
    encode  the target's tokenizer, for the short text that settles what config.json leaves open; None: the likeliest
            meaning is taken
    asked   draft_copy.CHOICES: format of the matrices of its layers
    """
    files = TensorFiles(folder)
    config = read_eagle_config(folder, files)
    own = read_json(folder / "config.json").get(OWN_KEY)
    if isinstance(own, dict):
        check(folder, own)
        readings = [config.tapped_ids]  # our own exports number boundaries, as vLLM does
    else:
        readings = layer_readings(config, target.config.num_layers)
    check_sizes(folder, config, canonical_names(files), target)
    _check_layers(folder, config, readings, target.whole.num_layers)
    weights = _read_weights(files, config, target, asked)
    head = Eagle(config, weights, target, readings[0])
    taken = likeliest(head, readings, target, encode)
    log.info("%s: EAGLE-%d%s, reads layers %s, window %s, guesses %s of the model's %s tokens", folder, config.version,
             " in one pass (P-EAGLE)" if config.is_parallel else "", ", ".join(map(str, taken.layers)),
             config.window or "none", f"{config.draft_vocab_size:,}", f"{target.whole.vocab_size:,}")
    return taken


def _check_layers(folder: Path, config: EagleConfig, readings: Sequence[Sequence[int]], count: int) -> None:
    if not readings or not readings[0] or not 0 <= min(readings[0]) <= max(readings[0]) <= count:
        raise ModelError(f"{folder}: the head reads layers {list(config.tapped_ids) or 'by default'}, which a model of "
                         f"{count} layers does not have; {CURE}")


def _read_weights(files: TensorFiles, config: EagleConfig, target: Transformer, asked: str) -> EagleWeights:
    kernels, names, layer = local_kernels(target.kernels), canonical_names(files), config.layer
    shapes = eagle_shapes(config, set(names), target.whole.vocab_size)
    known = {names.get(name, name): shape for name, shape in shapes.items()}
    if config.is_parallel and (mask := names.get(MASK_HIDDEN)) and math.prod(files.shape(mask)) == math.prod(
            shapes[MASK_HIDDEN]):
        known[mask] = files.shape(mask)  # [1, 1, n H] of speculators, [1, n H] of NeMo
    files.check(known, files.names() - {names[name] for name in MAPS if name in names}, "its config.json")
    ids = draft_ids(files, names, config.draft_vocab_size, target.whole.vocab_size)
    hidden = layer.hidden_size
    size = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers."))
    quantize = head_format(asked, size * kernels.dtype.itemsize, kernels)
    of_head = "none" if quantize == "none" else "int8"
    tensors = HeadTensors(files, names, kernels, quantize)
    pack, norm = tensors.pack, tensors.norm
    fc = pack("fc", quantize=quantize) if FC in shapes else None
    head = pack("lm_head", quantize=of_head) if "lm_head.weight" in shapes else None
    if config.version == 3 and head is None and (ids is not None or hidden != target.whole.hidden_size):
        head = _rows_of_the_targets_head(files.folder, target, hidden, ids, of_head)
    is_third = config.version == 3
    fc_norms = [f"fc_norm.{i}" for i in range(config.num_taps)] if config.fc_norm else []
    fc_norms = ["input_norm"] if config.norm_before_fc else fc_norms
    return EagleWeights(
        pack("embed_tokens") if "embed_tokens.weight" in shapes else None, fc,
        tuple(norm(name) for name in fc_norms),
        (norm("layers.0.input_layernorm"), norm("layers.0.hidden_norm")) if is_third else (),
        tuple(tensors.layer(index, layer.head_norms != "none") for index in range(layer.num_layers)),
        norm("norm") if is_third else None, head,
        None if ids is None else ids.to(kernels.device),
        files.read(names[MASK_HIDDEN]).to(kernels.device, kernels.dtype, copy=True).view(
            config.num_taps, 1, config.target_width) if config.is_parallel else None)


def _rows_of_the_targets_head(folder: Path, target: Transformer, width: int, ids: Tensor | None,
                              quantize: str) -> Linear:
    """The output head of a head that has none: the target's rows for its tokens. ModelError if they cannot serve."""
    whole, kernels = target.whole, target.kernels
    if ids is None or width != whole.hidden_size:
        raise ModelError(f"{folder} has no lm_head.weight, and the model's own does not fit the head's width; get the "
                         "file again")
    is_scaled = whole.logits_divisor != 1 or whole.logits_cap
    if not whole.is_tied or is_scaled or local_kernels(kernels) is not kernels:
        raise ModelError(f"{folder} has no lm_head.weight. longdraft takes the model's rows for the head's "
                         f"{len(ids):,} tokens only from an embedding table that is the output head, without a "
                         "factor, and not with --tensor-parallel; use another head")
    return kernels.pack(kernels.embed(target.weights.embedding, ids.tolist()), None, quantize=quantize)
