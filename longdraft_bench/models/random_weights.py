"""Models, heads and layers of random weights in memory, without checkpoint files.

They cost what trained ones cost, but predict nothing. The loader of checkpoints builds them, so that every family has
the parts that it has in a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.checkpoint import config_file
from longdraft.checkpoint.checkpoint import Loader
from longdraft.checkpoint.tensor_file import stored_bytes
from longdraft.checkpoint.tensor_names import StackedLinear, expected_shapes
from longdraft.checkpoint.tensor_source import TensorSource
from longdraft.kernels import Kernels, LayerWeights, Linear
from longdraft.kernels.cpu.kernels import CpuKernels
from longdraft.kernels.cpu.store import CpuLinear
from longdraft.model.config import ModelConfig
from longdraft.model.transformer import Transformer
from longdraft.parallel import Pick
from longdraft.parts.block import BlockHead, BlockWeights, PairTerms
from longdraft.parts.block_config import BlockConfig
from longdraft.parts.eagle import Eagle, EagleWeights
from longdraft.parts.eagle_config import EagleConfig
from longdraft.parts.glide import Glide, GlideWeights

_DEVIATION = 0.02  # standard deviation of the weights, as in initialised models
_SPREAD = 3.5  # standard deviation of logits: that of SmolLM2-135M, with nine tokens above a tenth of the best
_SLOW = -4.0  # of the rate at which states forget: 5 % for each token
_GUESSES = 32_000  # of an EAGLE head at most, as many as the published heads of Llama-3.1-8B have
_WINDOW = 512  # rows of its own that a glide layer sees


class RandomTensors(TensorSource):
    """Tensors of these shapes: vectors of ones, and random matrices. States forget slowly, as trained ones do."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], kernels: Kernels, seed: int = 0) -> None:
        self.folder = Path("random model")
        self._shapes = shapes
        self._kernels = kernels
        self._generator = torch.Generator(kernels.device).manual_seed(seed)

    def names(self) -> set[str]:
        return set(self._shapes)

    @property
    def nbytes(self) -> int:
        return sum(self._kernels.dtype.itemsize * prod(shape) for shape in self._shapes.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def wrong_type(self, name: str) -> str:
        return ""

    def stored(self, name: str) -> tuple[str, Tensor]:
        return stored_bytes(self.read(name))

    def read(self, name: str, pick: Pick | None = None, dtype: torch.dtype | None = None) -> Tensor:
        shape, kernels = self._shapes[name], self._kernels
        tensor = torch.ones(shape, dtype=dtype or kernels.dtype, device=kernels.device)
        if name.endswith("dt_bias"):
            tensor.fill_(_SLOW)
        if len(shape) > 1:
            tensor.normal_(0, _DEVIATION, generator=self._generator)
        return tensor if pick is None else pick(tensor)

    def stack(self, names: Sequence[str], dtype: torch.dtype | None, picks: Sequence[Pick | None] = ()) -> Tensor:
        parts = [self.read(name, pick, dtype) for name, pick in zip(names, picks or [None] * len(names), strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def random_model(shape: dict[str, Any], kernels: Kernels, seed: int = 0, quantize: str = "none") -> Transformer:
    """A model with the sizes of a config.json."""
    config = config_file.parse_config(shape)
    return Loader(RandomTensors(expected_shapes(config), kernels, seed), config, kernels, quantize, None).transformer()


class _PatternedMatrices:
    """Random matrices. Quantised ones of one shape are copies of one matrix: times do not depend on the numbers, and
    memory never holds an unquantised model."""

    def __init__(self, ops: CpuKernels, quantize: str) -> None:
        self._ops, self._quantize = ops, quantize
        self._patterns: dict[tuple[int, int, bool, str], CpuLinear] = {}

    def new(self, rows: int, columns: int, has_bias: bool = False, quantize: str | None = None) -> Linear:
        quantize = self._quantize if quantize is None else quantize
        if quantize == "none":
            return self._packed(rows, columns, has_bias, quantize)
        key = (rows, columns, has_bias, quantize)
        if key not in self._patterns:
            self._patterns[key] = self._packed(rows, columns, has_bias, quantize)
        new = self._ops.new_linear(quantize, rows, columns, has_bias)
        for part, pattern in zip(new.memory(), self._patterns[key].memory(), strict=True):
            part[:] = pattern
        return new

    def _packed(self, rows: int, columns: int, has_bias: bool, quantize: str) -> CpuLinear:
        weight = torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, _DEVIATION)
        return self._ops.pack(weight, torch.zeros(rows) if has_bias else None, quantize=quantize)


class _PatternedLoader(Loader):
    """Builds a model of any family with random matrices."""

    def __init__(self, config: ModelConfig, ops: CpuKernels, quantize: str) -> None:
        super().__init__(RandomTensors(expected_shapes(config), ops), config, ops, quantize, None)
        self._matrices = _PatternedMatrices(ops, quantize)

    def _linear(self, layer: str, stacked: StackedLinear, order: Tensor | None = None,
                is_fine: bool = False) -> Linear:
        return self._matrices.new(sum(sum(rows) for _, rows in stacked.parts), stacked.columns, stacked.has_bias)

    def _table(self, name: str, shape: tuple[int, int] | None = None) -> Linear:
        rows, columns = shape or (self._config.vocab_size, self._config.hidden_size)
        return self._matrices.new(rows, columns, quantize="int8" if self._quantize == "int4" else self._quantize)


def patterned_model(config: ModelConfig, kernels: CpuKernels, quantize: str) -> Transformer:
    """A model of any family for the CPU, whose quantised matrices of one shape are copies of one random matrix."""
    return _PatternedLoader(config, kernels, quantize).transformer()


class _Random:
    """Matrices and norms for a target."""

    def __init__(self, target: Transformer) -> None:
        self._kernels = target.kernels
        self._generator = torch.Generator(target.kernels.device).manual_seed(1)

    def table(self, rows: int, columns: int) -> Tensor:
        values = torch.empty(rows, columns, dtype=self._kernels.dtype, device=self._kernels.device)
        return values.normal_(0, _DEVIATION, generator=self._generator)

    def matrix(self, rows: int, columns: int, quantize: str = "none") -> Linear:
        return self._kernels.pack(self.table(rows, columns), quantize=quantize)

    def norm(self, width: int) -> Tensor:
        return torch.ones(width, dtype=self._kernels.dtype, device=self._kernels.device)

    def last_norm(self, width: int) -> Tensor:
        """In front of an output head, whose logits then spread as those of a trained model do: of even logits, a filter
        would leave thousands of candidates."""
        return self.norm(width) * (_SPREAD / (_DEVIATION * math.sqrt(width)))


def random_eagle(target: Transformer, guesses: int = _GUESSES, quantize: str = "none") -> Eagle:
    """An EAGLE-3 head with the sizes of one of the target's layers, which reads three of them.

    guesses   tokens among which it guesses, at most
    quantize  format of its layer; its output head is int8 then
    """
    config, made = target.config, _Random(target)
    width, inner, taps = config.hidden_size, config.intermediate_size, (0, config.num_layers // 2, config.num_layers)
    heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    count = min(guesses, config.vocab_size)
    about = EagleConfig(3, replace(config, num_layers=1), width, taps, True, count, True, False, False, False, 0)
    qkv, out, gate_up, down = (made.matrix(*size, quantize) for size in (
        (heads + 2 * keys, 2 * width), (width, heads), (2 * inner, width), (width, inner)))
    layer = LayerWeights(made.norm(width), qkv, out, made.norm(width), gate_up, down)
    of_head = "none" if quantize == "none" else "int8"
    ids = None if count == config.vocab_size else torch.arange(count, device=target.kernels.device)
    weights = EagleWeights(None, made.matrix(width, len(taps) * width, quantize), (),
                           (made.norm(width), made.norm(width)), (layer,), made.last_norm(width),
                           made.matrix(count, width, of_head), ids)
    return Eagle(about, weights, target, taps)


class BlockShape(NamedTuple):
    """The sizes of a random block head.

    layers, rows  of the head, and of a block
    vocabulary    tokens that an output head of its own guesses among; 0: the target's output head
    quantize      format of its layers; its own output head is int8 then
    rank          of DSpark's Markov head; 0: the head has none
    """

    layers: int
    rows: int
    vocabulary: int
    quantize: str
    rank: int = 0


def random_block(target: Transformer, shape: BlockShape) -> BlockHead:
    """A block head whose layers have the sizes of the target's, which reads five of them (or all, if it has fewer)."""
    config, made = target.config, _Random(target)
    width, inner = config.hidden_size, config.intermediate_size
    heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    taps = tuple(sorted({1 + (config.num_layers - 1) * place // 4 for place in range(5)}))
    count = min(shape.vocabulary or config.vocab_size, config.vocab_size)
    about = BlockConfig(
        kind="dspark" if shape.rank else "dflash", layer=replace(config, num_layers=shape.layers, head_norms="none"),
        target_width=width, layers=taps, other_layers=taps, block_size=shape.rows, mask_token=0,
        windows=(0,) * shape.layers, causal=(False,) * shape.layers, says_causal=True, first_guesses=False,
        adjacent=False, draft_vocab_size=count, rank=shape.rank)

    def layer() -> LayerWeights:
        own = [made.matrix(*size, shape.quantize) for size in (
            (heads + 2 * keys, width), (width, heads), (2 * inner, width), (width, inner))]
        return LayerWeights(made.norm(width), own[0], own[1], made.norm(width), own[2], own[3])

    of_head = "none" if shape.quantize == "none" else "int8"
    ids = torch.arange(count, device=target.kernels.device) if shape.vocabulary and count < config.vocab_size else None
    pairs = PairTerms(made.table(config.vocab_size, shape.rank), made.matrix(count, shape.rank, of_head),
                      trust=made.matrix(1, width + shape.rank)) if shape.rank else None
    weights = BlockWeights(
        None, made.matrix(width, len(taps) * width, shape.quantize), made.norm(width),
        made.matrix(shape.layers * 2 * keys, width, shape.quantize), tuple(layer() for _ in range(shape.layers)),
        made.last_norm(width) if shape.vocabulary else made.norm(width),
        made.matrix(count, width, of_head) if shape.vocabulary else None, ids, pairs)
    return BlockHead(about, weights, target, taps)


def random_glide(target: Transformer) -> Glide:
    """A glide layer with the sizes of one of the target's layers."""
    config, made = target.config, _Random(target)
    width, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    weights = GlideWeights(
        made.matrix(heads + 2 * config.num_kv_heads * config.head_dim, width), made.matrix(width, heads),
        made.matrix(heads, width), made.matrix(width, heads), made.matrix(2 * inner, width),
        made.matrix(width, inner), tuple(made.norm(width) for _ in range(4)))
    return Glide(weights, _WINDOW, target)
