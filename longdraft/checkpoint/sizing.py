"""Memory of a model and the speed limit that memory bandwidth sets, from its config.json alone.

    ms per token = (bytes of the weights that a forward reads + bytes of the cache) / read bandwidth

is a lower bound for plain decoding, which reads both for each token.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from longdraft.checkpoint import gpt_oss
from longdraft.checkpoint.config_file import read_json
from longdraft.checkpoint.gguf.container import open_gguf
from longdraft.checkpoint.gguf.types import DEVICE_BYTES, KEPT_BYTES
from longdraft.checkpoint.tensor_names import layer_shapes, linears_of, outer_shapes
from longdraft.checkpoint.tensor_source import TensorSource
from longdraft.errors import ModelError
from longdraft.kernels import Kernels
from longdraft.kernels.interface import DEVICE_CHUNK, DEVICE_PIECE, REPORTED_ROWS
from longdraft.kernels.weights import FILE
from longdraft.model.config import ModelConfig

USABLE = 0.9  # share of the memory that weights and cache may take; the rest is for the system and buffers
LARGEST_TREE = 1024  # rows that a reserved cache has for a draft tree, besides the text
_MAX_PARAMETERS = 10**14  # a hundred times the largest public model
_MAX_EXPERTS = 1 << 16
_BYTES = {"bfloat16": 2, "float32": 4}
_INT4_BYTES = 19 / 32  # of a weight: 32 of them have 16 bytes and 3 for scale and zero point
_DEVICE_INT4_BYTES = 20 / 32  # on a device they have 4 for scale and zero point
_MXFP4_BYTES = 17 / 32  # of a weight: 32 of them have 16 bytes and an exponent
_STACKED = re.compile(r"attn_[qkv]\.weight|ffn_(?:gate|up)(?P<kind>_exps|_shexp|)\.weight")  # of GGUF: in one matrix
_ONE_SCALE = {"Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"}  # types that 8 bits with a scale for 32 weights can hold


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model in one dtype."""

    parameters: int
    weights_bytes: int
    read_bytes: int  # bytes that a forward of one token reads: not those of an untied embedding or of other experts
    cache_bytes_per_token: int
    context_limit: int
    state_bytes: int = 0  # of the delta layers' states, which a token reads and writes; a text has them twice

    def max_context(self, memory_bytes: int, copy_bytes: int = 0) -> int:
        """Tokens whose cache fits beside the weights, up to the context limit; 0 if the weights do not fit.

        copy_bytes  of a draft copy of the weights, which is left out where nothing else would fit
        """
        free = int(memory_bytes * USABLE) - self.weights_bytes - 2 * self.state_bytes
        free -= copy_bytes if free > copy_bytes else 0
        return max(0, min(self.context_limit, free // self.cache_bytes_per_token))

    def ms_per_token(self, context: int, bytes_per_s: float) -> float:
        """Lower bound of the time per token of plain decoding, in ms, at a context of so many tokens."""
        states = 2 * self.state_bytes
        return (self.read_bytes + states + context * self.cache_bytes_per_token) / bytes_per_s * 1e3


def model_sizes(config: ModelConfig, dtype: str = "bfloat16", *, has_mxfp4: bool = False) -> Sizes:
    """Sizes of a model. Counts one layer of each kind. Raises ModelError for absurd sizes.

    has_mxfp4  the matrices of experts are kept in MXFP4 (`has_mxfp4`)
    """
    if config.experts and config.experts.count > _MAX_EXPERTS:
        raise ModelError(f"config.json says {config.experts.count} experts; allowed: {_MAX_EXPERTS:,}")
    hidden = config.hidden_size
    parameters = sum(map(prod, outer_shapes(config).values()))
    least = parameters + config.num_layers * sum(map(prod, layer_shapes(config.layer(0), hidden).values()))
    if least > _MAX_PARAMETERS:  # before each of so many layers is looked at
        raise ModelError(f"config.json describes a model of 10**{len(str(least)) - 1} parameters or more; "
                         f"allowed: {_MAX_PARAMETERS:,}")
    for spec, count in Counter(config.layers).items():
        parameters += count * sum(map(prod, layer_shapes(spec, hidden).values()))
    width = _BYTES[dtype]
    unread = 0 if config.is_tied else config.vocab_size * hidden
    if config.input_table:
        unread += prod(config.input_table)
    saved = saved_of_read = 0.0  # bytes
    if config.experts:
        count, chosen = (config.num_layers * each for each in (config.experts.count, config.experts.chosen))
        expert = 3 * hidden * config.experts.size
        unread += (count - chosen) * expert
        saving = expert * (width - _MXFP4_BYTES) if has_mxfp4 else 0.0  # of an expert
        saved, saved_of_read = count * saving, chosen * saving
    return Sizes(parameters, parameters * width - int(saved), (parameters - unread) * width - int(saved_of_read),
                 2 * sum(heads * dim for heads, dim in config.kv_shapes) * width, config.max_positions,
                 _state_bytes(config))


def has_mxfp4(path: Path, config: ModelConfig) -> bool:
    """Whether the experts of a folder or a GGUF file are in MXFP4, which kernels keep."""
    if config.experts is None:
        return False
    if path.is_file():
        experts = [entry.type.name for name, entry in open_gguf(path).tensors.items() if "_exps.weight" in name]
        return bool(experts) and set(experts) == {"MXFP4"}
    quantized = read_json(path / "config.json").get("quantization_config")
    return isinstance(quantized, dict) and quantized.get("quant_method") == gpt_oss.METHOD


def kept_sizes(path: Path, config: ModelConfig, *, is_on_device: bool = False) -> Sizes | None:
    """Sizes of a GGUF file whose quantised numbers are kept (`--quantize file`); None: it has none."""
    widths = KEPT_BYTES | (DEVICE_BYTES if is_on_device else {})
    if not path.is_file():
        return None
    stacks = defaultdict(list)
    for name, entry in open_gguf(path).tensors.items():
        stacks[_STACKED.sub(lambda match: f"stack{match['kind']}", name)].append(entry)
    if not any(entry.type.name in KEPT_BYTES for entries in stacks.values() for entry in entries):
        return None
    weights = read = 0.0
    for name, entries in stacks.items():
        types = {entry.type.name for entry in entries}
        width = max(widths.get(kind, _BYTES["bfloat16"]) for kind in types)
        if is_on_device and types <= KEPT_BYTES.keys() - {"MXFP4"}:  # unlike parts keep their own forms
            sizes = [prod(entry.shape) for entry in entries]
            width = sum(size * widths[entry.type.name] for size, entry in zip(sizes, entries, strict=True)) / sum(sizes)
        elif len(types) > 1 and types <= KEPT_BYTES.keys() - {"MXFP4"}:
            width = widths["Q8_0" if types <= _ONE_SCALE else "Q5_1"]
        elif len(types) > 1:
            width = _BYTES["bfloat16"]
        nbytes = width * sum(prod(entry.shape) for entry in entries)
        is_table = name == "per_layer_token_embd.weight" or (name == "token_embd.weight" and not config.is_tied)
        share = config.experts.chosen / config.experts.count if config.experts and "_exps" in name else 1
        weights, read = weights + nbytes, read + (0 if is_table else share * nbytes)
    return replace(model_sizes(config), weights_bytes=int(weights), read_bytes=int(read))


def _state_bytes(config: ModelConfig) -> int:
    shapes = [spec.delta.shape for spec in config.layers if spec.delta]
    return sum(4 * shape.key_dim * shape.values for shape in shapes)


def fine_mlps(config: ModelConfig) -> range:
    """The layers whose MLPs are int8 in an int4 draft copy for the compiled CPU kernels: the last tenth. There int4
    loses most: of a trained model's guesses 0.76 were right, with these MLPs in int8 0.85 (notebook/2026-11.md)."""
    return range(config.num_layers - config.num_layers // 10, config.num_layers)


def quantized_bytes(config: ModelConfig, quantize: str, *, is_draft_copy: bool = False,
                    is_on_device: bool = False) -> int:
    """Bytes of the weights in int8 or int4. Tables are int8 in both; a draft copy shares the embedding table.

    is_on_device  in the formats of CUDA devices, without what pads matrices of other shapes than multiples of 128
    """
    layers, int4_bytes = 0.0, _DEVICE_INT4_BYTES if is_on_device else _INT4_BYTES
    for spec, count in Counter(config.layers).items():
        matrices = [shape for shape in layer_shapes(spec, config.hidden_size).values() if len(shape) == 2]
        layers += count * sum(rows * (columns * int4_bytes if quantize == "int4" else columns + 4)
                              for rows, columns in matrices)
    if is_draft_copy and quantize == "int4" and not is_on_device:
        for mlp in (config.layers[index].mlp for index in fine_mlps(config)):
            width, hidden = mlp.width if mlp else 0, config.hidden_size
            layers += 3 * hidden * width * (1 - _INT4_BYTES) + 4 * (2 * width + hidden) * bool(mlp)
    if config.input_table and not is_draft_copy:
        layers += prod(config.input_table)
    tables = 1 if config.is_tied or is_draft_copy else 2
    return int(layers + tables * config.vocab_size * (config.hidden_size + 4))


def prompt_bytes(config: ModelConfig, dtype_bytes: int, *, unpacks: bool) -> int:
    """Upper bound of what a device holds at a time, beside weights and cache, while it reads a chunk of a prompt.

    unpacks  one matrix at a time is expanded to the model's dtype, for the library's product
    """
    rows, hidden, held, most = DEVICE_CHUNK, config.hidden_size, 0, 0
    for spec in set(config.layers):
        linears = [(sum(sum(segments) for _, segments in each.parts), each.columns)
                   for each in linears_of(spec, hidden).values()]
        # Products and the activation after gate and up, of half their width.
        part = rows * 3 * max(outputs for outputs, _ in linears) // 2 * dtype_bytes
        if attention := spec.attention:
            queries, pairs = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
            held = max(held, 3 * queries + 4 * pairs)  # before and after the rotation; the output
            # Queries in another order, repeated keys and values; outputs of two pieces and their sum, in float32.
            pieces = rows * queries * (3 * dtype_bytes + 12) + 2 * DEVICE_PIECE * pairs * (dtype_bytes + 4)
            part = max(part, pieces)
        matrix = max(outputs * columns for outputs, columns in linears) * dtype_bytes if unpacks else 0
        most = max(most, part + matrix)
    new_rows = sum(2 * heads * dim for heads, dim in config.kv_shapes)
    reported = REPORTED_ROWS * sum(3 * layer.num_heads * layer.head_dim for layer in config.kv_attention)
    return (rows * (6 * hidden + new_rows + held) + reported) * dtype_bytes + most


def require_room(config: ModelConfig, chosen: Kernels, quantize: str, parts: int, files: TensorSource) -> None:
    """Raise MemoryError if the weights do not fit in the device's free memory. The message says what would fit.

    parts  number of ranks that share the weights
    files  the tensors, of which `file` keeps the numbers
    """
    free = chosen.free_bytes()
    if free is None:
        return
    share = model_sizes(config).parameters / parts
    if quantize == FILE:
        kept = kept_sizes(files.folder, config, is_on_device=True)
        needed: float = kept.weights_bytes if kept else min(files.nbytes, share * chosen.dtype.itemsize)
    elif quantize == "none":
        needed = share * chosen.dtype.itemsize
    else:
        needed = quantized_bytes(config, quantize, is_on_device=True) / parts
    if needed > free * USABLE:
        smaller = [f"{name} ({share * width / 2**30:.1f} GiB)"
                   for name, width in (("--dtype bfloat16", 2), ("--quantize int8", 1))
                   if share * width <= free * USABLE]
        raise MemoryError(f"the weights take {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB of {chosen.device} "
                          f"are free; what would fit: {' or '.join(smaller) or 'a smaller model'}")
