"""Reading of block heads from their folders or GGUF files, checked against the target."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from longdraft.checkpoint.config_file import read_json
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import ModelError
from longdraft.kernels import LayerWeights
from longdraft.kernels.weights import Convolution
from longdraft.model.transformer import Transformer
from longdraft.parallel import local_kernels
from longdraft.parts.block import BlockHead, BlockWeights, PairTerms
from longdraft.parts.block_config import BlockConfig, read_block_config
from longdraft.parts.block_probe import likeliest
from longdraft.parts.draft_copy import SAME, head_format
from longdraft.parts.head_config import OWN_KEY
from longdraft.parts.head_tensors import CURE, MAPS, HeadTensors, check_sizes, draft_ids, layer_shapes

log = logging.getLogger(__name__)
_CONFIDENCE = "confidence_head.proj"


def load_block(folder: Path, target: Transformer, check: Callable[[Path, dict[str, Any]], None],
               encode: Callable[[str], list[int]] | None = None, asked: str = SAME) -> BlockHead:
    """The head in a folder or GGUF file, which `is_block` has accepted. Raises ModelError for one that does not
    fit the target.

    check   raises ModelError if the head's own record (`OWN_KEY`) names another target
    encode  the target's tokenizer, for the short text that settles what config.json leaves open; None: the likeliest
            meaning is taken
    asked   draft_copy.CHOICES: format of the matrices of its layers
    """
    files = TensorFiles(folder)
    names = canonical_names(files)
    config = read_block_config(folder, names, target.whole.vocab_size)
    own = None if folder.is_file() else read_json(folder / "config.json").get(OWN_KEY)
    if isinstance(own, dict):
        check(folder, own)
    count = target.config.num_layers
    layers = config.layers or (2, count // 2, count - 3)
    check_sizes(folder, config, names, target)
    if not 0 <= layers[0] <= layers[-1] <= target.whole.num_layers:
        raise ModelError(f"{folder}: the head reads what enters the layers {list(layers)}, which a model of "
                         f"{target.whole.num_layers} layers does not have; {CURE}")
    head = BlockHead(config, _read_weights(files, names, config, target, asked), target, layers)
    taken = likeliest(head, target, None if isinstance(own, dict) else encode)
    log.info("%s: a block head (%s) of %d rows, reads layers %s, windows %s, guesses %s of the model's %s tokens",
             folder, config.kind, config.block_size, ", ".join(map(str, taken.layers)),
             ", ".join(str(window or "none") for window in config.windows), f"{config.draft_vocab_size:,}",
             f"{target.whole.vocab_size:,}")
    return taken


def canonical_names(files: TensorFiles) -> dict[str, str]:
    """Our names of the tensors in a head's file -> those of the file. Ours end with `.weight`, `.bias` or the name of a
    map."""
    names = {}
    for name in files.names():
        own = name.removeprefix("model.")
        names[own if own.endswith((".weight", ".bias")) or own in MAPS else f"{own}.weight"] = name
    return names


def block_shapes(config: BlockConfig, present: Mapping[str, str], vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Shape of every floating-point tensor of a head, by our names. present: those in the file, of parts that may be
    missing; vocabulary: size of the target's"""
    layer, hidden, rank = config.layer, config.layer.hidden_size, config.rank
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.num_taps * config.target_width), "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,)}
    groups = hidden // config.conv_group
    for index in range(layer.num_layers):
        shapes |= layer_shapes(layer, index, hidden) | {f"layers.{index}.input_layernorm.weight": (hidden,)}
        for part in ("attention_conv", "mlp_conv") if config.conv_taps else ():
            shapes[f"layers.{index}.{part}.base_kernel.weight"] = (2, config.conv_taps, hidden)
            shapes[f"layers.{index}.{part}.kernel_projection.weight"] = (2 * config.conv_taps * groups, hidden)
    if config.kind == "dspark":
        shapes |= {"markov_head.markov_w1.weight": (vocabulary, rank),
                   "markov_head.markov_w2.weight": (config.draft_vocab_size, rank)}
    elif config.kind == "dflash2":
        shapes |= {f"candidate_selector.{name}_codebook.weight": (vocabulary, rank)
                   for name in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    optional: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (config.draft_vocab_size, hidden)}
    if config.kind == "dspark":
        optional |= {f"{_CONFIDENCE}.weight": (1, hidden + rank), f"{_CONFIDENCE}.bias": (1,)}
    return shapes | {name: shape for name, shape in optional.items() if name in present}


def _read_weights(files: TensorFiles, names: Mapping[str, str], config: BlockConfig, target: Transformer,
                  asked: str) -> BlockWeights:
    """The packed weights of a head whose tensors have our `names`. asked: format of its layers"""
    kernels, layer, vocabulary = local_kernels(target.kernels), config.layer, target.whole.vocab_size
    if layer.hidden_size % config.conv_group:
        raise ModelError(f"{files.folder}: conv_group_size is {config.conv_group} in config.json, which does not "
                         f"divide the head's {layer.hidden_size} channels; get the file again")
    shapes = block_shapes(config, names, vocabulary)
    files.check({names.get(name, name): shape for name, shape in shapes.items()},
                files.names() - {names[name] for name in MAPS if name in names}, "its config.json")
    ids = draft_ids(files, names, config.draft_vocab_size, vocabulary)
    if "lm_head.weight" not in names and (ids is not None or layer.hidden_size != target.whole.hidden_size):
        raise ModelError(f"{files.folder} has no lm_head.weight, and the model's own does not fit the head's "
                         "vocabulary and width; get the file again")
    size = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers."))
    quantize = head_format(asked, size * kernels.dtype.itemsize, kernels)
    tensors = HeadTensors(files, names, kernels, quantize, layer.head_dim if config.adjacent else 0)

    of_head = "none" if quantize == "none" else "int8"

    def convolution(part: str) -> Convolution | None:
        if not config.conv_taps:
            return None
        return Convolution(tensors.tensor(f"{part}.base_kernel").float(), tensors.pack(f"{part}.kernel_projection"))

    def read_layer(index: int) -> LayerWeights:
        weights = tensors.layer(index, layer.head_norms != "none")
        return weights._replace(attention_conv=convolution(f"layers.{index}.attention_conv"),
                                mlp_conv=convolution(f"layers.{index}.mlp_conv"))

    of_text = [f"layers.{index}.self_attn.{name}_proj" for index in range(layer.num_layers) for name in "kv"]
    pairs = None
    if config.kind == "dspark":
        trust = tensors.pack(_CONFIDENCE) if f"{_CONFIDENCE}.weight" in shapes else None
        pairs = PairTerms(tensors.tensor("markov_head.markov_w1").to(kernels.dtype),
                          tensors.pack("markov_head.markov_w2", quantize=of_head), trust=trust)
    elif config.kind == "dflash2":
        pairs = PairTerms(tensors.tensor("candidate_selector.predecessor_codebook").to(kernels.dtype),
                          tensors.pack("candidate_selector.successor_codebook"),
                          gate=tensors.pack("candidate_selector.hidden_projection"))
    return BlockWeights(
        tensors.pack("embed_tokens") if "embed_tokens.weight" in names else None, tensors.pack("fc", quantize=quantize),
        tensors.norm("hidden_norm"), tensors.pack(*of_text, quantize=quantize),
        tuple(read_layer(index) for index in range(layer.num_layers)),
        tensors.norm("norm"),
        tensors.pack("lm_head", quantize=of_head) if "lm_head.weight" in names else None,
        None if ids is None else ids.to(kernels.device), pairs)
