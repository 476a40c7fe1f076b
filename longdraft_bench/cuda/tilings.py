"""Time how products and attention are cut into programs, in whole layers on a CUDA device: `bench cuda-tilings`.

    longdraft bench cuda-tilings > benchmarks/results/cuda-h100-tilings.txt

All layers of Llama-3.1-8B and Qwen2.5-1.5B for one row are one graph, in which the cut of one kind of kernel is
replaced: columns, block, stages and splits of a product (`longdraft.kernels.cuda.linear.Tiling`), the splits of
attention (`longdraft.kernels.cuda.attention.Splits`), warps of the norms and of weights of few bits. By themselves
kernels rank otherwise: programs of neighbours fill the device together. It prints a line for each cut, with
milliseconds after each context, and beside them those of the cut as it is, timed directly afterwards: a card does not
keep one speed. Kernels are compiled in parallel processes first. Some two minutes on 16 cores.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from longdraft import kernels
from longdraft.kernels.cuda import few_bits, layers
from longdraft.kernels.cuda.attention import Splits
from longdraft.kernels.cuda.kernels import CudaKernels
from longdraft.kernels.cuda.layers import CudaLayers
from longdraft.kernels.cuda.linear import CudaLinear, Tiling
from longdraft.model.transformer import Transformer
from longdraft_bench.cuda.decide import layers_ms
from longdraft_bench.cuda.models import switched
from longdraft_bench.cuda.plan import ON_DEVICE, CudaPlan
from longdraft_bench.models.random_weights import random_model

_PROCESSES = 14
_PRODUCTS = "qkv", "out", "gate_up", "down"
_MOVED = 512, 1 << 12, 1 << 16, 1 << 21


class Cut(NamedTuple):
    """What is replaced.

    product, tiling  of each layer
    splits           of attention
    module, name, value  a number of a module
    moved            bytes that are allocated in front of the buffers: the cut is the same, the addresses are not
    """

    product: str = ""
    tiling: Tiling | None = None
    splits: Splits | None = None
    module: Any = None
    name: str = ""
    value: int = 0
    moved: int = 0

    def __str__(self) -> str:
        if self.moved:
            return f"moved {self.moved}"
        if self.tiling:
            return f"{self.product} {tuple(self.tiling)}"
        return f"attention {tuple(self.splits)}" if self.splits else f"{self.name} {self.value}" if self.name else "now"

    @contextmanager
    def applied(self, model: Transformer) -> Iterator[None]:
        held = torch.empty(self.moved, dtype=torch.uint8, device=model.kernels.device)
        with ExitStack() as stack:
            if self.module:
                stack.enter_context(switched(self.module, self.name, self.value))
            if self.splits:
                assert isinstance(model.kernels, CudaKernels)
                stack.enter_context(switched(model.kernels, "splits", self.splits))
            for layer in model.weights.layers if self.tiling else ():
                stack.enter_context(switched(getattr(layer, self.product), "tiling", self.tiling))
            yield
        del held


def cuts(model: Transformer) -> list[Cut]:
    """What is timed with this model: as it is, and other cuts of each kind."""
    layer, tried = model.weights.layers[0], [Cut(), *(Cut(moved=size) for size in _MOVED)]
    for product in _PRODUCTS:
        weight = getattr(layer, product)
        assert isinstance(weight, CudaLinear)
        now, splits = weight.tiling, weight.splits
        others = [now._replace(splits=max(1, splits // 2)), now._replace(splits=2 * splits)]
        if not isinstance(weight, few_bits.CudaFewBits):
            others += [Tiling(64, 64, 6, splits), Tiling(64, 64, 6, 2 * splits), Tiling(64, 128, 4, splits),
                       Tiling(64, 128, 4, 2 * splits), Tiling(128, 64, 4, splits), Tiling(128, 128, 3, splits)]
        tried += [Cut(product, tiling) for tiling in dict.fromkeys(others)
                  if tiling != now and weight.in_features >= 2 * tiling.splits * tiling.block]
    if isinstance(layer.qkv, few_bits.CudaFewBits):
        return [*tried, Cut(module=few_bits, name="_WARPS", value=8), Cut(module=few_bits, name="_MOST_ROWS", value=8)]
    cut = Splits.of_heads(model.config.num_kv_heads)
    tried += [Cut(splits=other) for other in (cut._replace(long=cut.long // 2), cut._replace(long=2 * cut.long),
                                              Splits(2 * cut.short, cut.num_short // 2, cut.long))]
    return [*tried, *(Cut(module=layers, name="_NORM_WARPS", value=warps) for warps in (4, 16))]


def measure(plan: CudaPlan = ON_DEVICE) -> None:
    """Compile all kernels in parallel processes, then time the layers and print them. A cut that fails has a line too.
    """
    kinds = [(shape, quantize) for shape in plan.shapes for quantize in ("none", "int4")]
    if plan.device == "cuda":
        jobs = [(plan, *kind, number, _PROCESSES // 4) for kind in kinds for number in range(_PROCESSES // 4)]
        with multiprocessing.get_context("spawn").Pool(_PROCESSES) as pool:
            pool.starmap(compile_some, jobs, chunksize=1)
    for shape, quantize in kinds:
        model = _model(plan, shape, quantize, {})
        for cut in cuts(model):
            contexts = plan.decide.contexts if not cut.tiling else plan.decide.contexts[:1]
            pair = (_timed(plan, model, each, contexts, plan.repeats) for each in (cut, Cut()))
            times = [f"{own} ({before.split(': ', 1)[-1]} now)" for own, before in zip(*pair, strict=True)]
            print(f"{shape} {quantize}", cut, *times, sep="; ", flush=True)
        del model


def compile_some(plan: CudaPlan, shape: str, quantize: str, number: int, of: int) -> None:
    """Put the machine code of each `of`-th cut into Triton's cache, with one layer."""
    model = _model(plan, shape, quantize, {"num_hidden_layers": 1, "vocab_size": 512})
    for cut in cuts(model)[number::of]:
        _timed(plan, model, cut, plan.decide.contexts[:1], 1)


def _model(plan: CudaPlan, shape: str, quantize: str, changed: dict[str, int]) -> Transformer:
    made = kernels.choose(plan.device, plan.dtype, plan.kernels_names[0])
    return random_model(plan.shapes[shape] | changed, made, quantize=quantize)


def _timed(plan: CudaPlan, model: Transformer, cut: Cut, contexts: Sequence[int], repeats: int) -> list[str]:
    """Milliseconds of the layers after each context; why, where they fail."""
    found = []
    for context in contexts:
        try:
            with cut.applied(model):
                assert isinstance(model.kernels, CudaKernels)
                own = CudaLayers(model.kernels, model.weights.layers, model.geometry)
                found.append(f"{context}: {layers_ms(own, model, context, 1, repeats):.3f}")
        except Exception as error:  # a cut may want too much shared memory
            found.append(f"{context}: {type(error).__name__}: {error}"[:80])
    return found
