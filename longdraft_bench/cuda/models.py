"""Models on the device without checkpoint files, their texts, and timing by the device's own clock.

Random weights cost what trained ones cost, but predict nothing. A stretched model has the cost of a large shape and
the predictions of the bundled `novelist-gqa` (longdraft_bench/models/stretched.py).
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from longdraft import kernels
from longdraft.cache.full import FullCache
from longdraft.checkpoint import config_file, hub
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.kernels import Kernels, LayerWeights, Linear
from longdraft.model.config import ModelConfig
from longdraft.model.transformer import ModelWeights, Transformer
from longdraft.parts.eagle import Eagle
from longdraft.parts.eagle_config import EagleConfig, canonical_names, read_eagle_config
from longdraft.system import machine
from longdraft_bench.cuda.plan import CudaPlan
from longdraft_bench.cuda.visit import is_fatal
from longdraft_bench.models.random_weights import random_model
from longdraft_bench.models.shapes import SHAPES
from longdraft_bench.models.stretched import Correspondence, Stretch, fill, read_by, stretched_settings
from longdraft_bench.models.stretched_eagle import stretched_eagle

_ROOM = 2048  # positions that are reserved after a text


def device_ms(device: torch.device, work: Callable[[], object], repeats: int, warm: int = 2) -> float:
    """Median milliseconds of a call, by the clock of the CUDA device, or by wall clock on the CPU."""
    for _ in range(warm if device.type == "cuda" else 0):
        work()
    samples: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            work()
            samples.append((time.perf_counter() - began) * 1e3)
    return statistics.median(samples)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def switched(owner: object, name: str, value: object) -> Iterator[None]:
    """A context in which a switch of a module (longdraft/kernels/switches.py), a method or another attribute has this
    value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def describe(plan: CudaPlan) -> dict[str, Any]:
    """The machine, the device, and the versions on which the figures depend."""
    import triton

    found = machine.description(kernels.choose(plan.device, plan.dtype, plan.kernels_names[0]))
    found |= {"triton": triton.__version__, "dtype": plan.dtype}
    if plan.device != "cuda":
        return found | {"processor_of_kernels": "Triton's interpreter"}
    about = torch.cuda.get_device_properties(0)
    asked = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"], capture_output=True,
                              text=True, check=True, timeout=20).stdout.strip().splitlines()[0]
        found |= dict(zip(asked.split(","), told.split(", "), strict=True))
    return found | {"gpu": about.name, "gpu_memory_bytes": about.total_memory, "cuda": torch.version.cuda,
                    "multiprocessors": about.multi_processor_count, "l2_bytes": about.L2_cache_size}


class Bench:
    """The common data of the parts of one process: kernels, one model at a time, and the text after which it writes.

    prompt   a file whose text the stretched models continue, repeated where it is too short
    ends_at  time.time() at which the slice must be over
    folder   for files beside the documents
    """

    def __init__(self, plan: CudaPlan, prompt: str, ends_at: float, folder: Path) -> None:
        self.plan, self.ends_at, self.folder = plan, ends_at, folder
        self._prompt = prompt
        self._held: dict[tuple[str, ...], Transformer] = {}
        self._small: tuple[ModelConfig, dict[str, Tensor]] | None = None
        self._filled: tuple[str, FullCache] | None = None
        self._eagle: tuple[Transformer, Eagle] | None = None
        self.rate: float | None = None  # bytes/s of a copy
        self.keep: Callable[[Any], None] = lambda figures: None  # writes what a part has measured so far

    def each(self, cases: Iterable[tuple[str, Callable[[], Any]]]) -> dict[str, Any]:
        """The figures of each case, which are kept after every one. A case that fails is marked, and the next is
        measured."""
        found: dict[str, Any] = {}
        for name, measure in cases:
            try:
                found[name] = measure()
            except Exception as error:  # whatever it is, the other cases must be measured
                if is_fatal(error):
                    raise
                found[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
            self.keep(found)
        return found

    def seconds_left(self) -> float:
        return self.ends_at - time.time()

    def kernels(self, name: str | None = None) -> Kernels:
        return kernels.choose(self.plan.device, self.plan.dtype, name or self.plan.kernels_names[0])

    def model(self, shape: str, quantize: str = "none") -> Transformer:
        """The first of these kernels with a model of random weights, which costs what a model of this shape costs."""
        shapes = self.plan.shapes | self.plan.families
        return self._made(("random", shape, quantize),
                          lambda: random_model(shapes[shape], self.kernels(), quantize=quantize))

    def stretched(self, shape: str, quantize: str = "none") -> Transformer:
        """A model of this shape with the predictions of the small one; `quantize` for a copy that drafts."""
        return self._made(("stretched", shape, quantize), lambda: self._stretch(shape, quantize))

    def _made(self, key: tuple[str, ...], make: Callable[[], Transformer]) -> Transformer:
        if key not in self._held:
            if any(other[:2] != key[:2] for other in self._held):
                self._held.clear()  # two large models need not fit
                self._filled = self._eagle = None
            self._held[key] = make()
        return self._held[key]

    def _source(self) -> tuple[ModelConfig, dict[str, Any], dict[str, Tensor]]:
        """Configuration, config.json and weights of the small model, on the device."""
        if self.plan.device == "cuda":
            folder = hub.BUNDLED_DIR / "novelist-gqa"
            settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            weights = {name: tensor.to(self.plan.device).float()
                       for name, tensor in load_file(folder / "model.safetensors").items()}
        else:
            settings, weights = tiny_source()
        return config_file.parse_config(settings), settings, weights

    def _stretch(self, shape: str, quantize: str) -> Transformer:
        small, settings, weights = self._source()
        config = config_file.parse_config(stretched_settings(settings, self.plan.shapes[shape]))
        return transformer_of(Stretch(small, config, weights), config, self.kernels(), quantize)

    def small(self) -> Transformer:
        """The small model itself, which reads prompts for the large ones."""
        small, _, weights = self._source()
        return small_transformer(small, weights, self.kernels())

    def eagle(self, shape: str) -> Eagle:
        """An EAGLE head of the stretched model, with the guesses of the small model's head."""
        target = self.stretched(shape)
        if self._eagle is None or self._eagle[0] is not target:
            if self.plan.device == "cuda":
                files = TensorFiles(hub.BUNDLED_DIR / "novelist-gqa" / "eagle")
                config = read_eagle_config(files.folder, files)
                weights = {own: files.read(name).float().to(self.plan.device)
                           for own, name in canonical_names(files).items()}
            else:
                config, weights = tiny_eagle()
            head = stretched_eagle(config, weights, target, self._source()[0].num_layers)
            self._eagle = target, head
        return self._eagle[1]

    def tokens(self, count: int) -> list[int]:
        """A text of `count` tokens."""
        vocabulary = self._source()[0].vocab_size
        if self.plan.device == "cuda":
            from longdraft.text.tokenizer import Tokenizer

            words = Path(self._prompt).read_text(encoding="utf-8")
            found = list(Tokenizer(hub.BUNDLED_DIR / "novelist-gqa").encode(words))
        else:
            found = [7 * place % vocabulary for place in range(50)]
        return (found * (count // len(found) + 1))[:count]

    def filled(self, shape: str, length: int) -> FullCache:
        """A cache of the stretched model with the first `length` rows of the text.

        The cache is filled for the longest context of the plan, and then cut.
        """
        model = self.stretched(shape)
        if self._filled is None or self._filled[0] != shape or self._filled[1].length < length:
            self._filled = None
            small, rows = self.small(), max(length, *self.plan.contexts)
            cache = model.new_cache()
            cache.reserve(rows + _ROOM)
            fill(cache, read_by(small, self.tokens(rows)), model, Correspondence(small.config, model.config))
            self._filled = shape, cache
        self._filled[1].truncate(length)
        return self._filled[1]


def transformer_of(parts: Stretch, config: ModelConfig, kernels: Kernels, quantize: str) -> Transformer:
    """A stretched model in memory. Embedding and head are int8 where the layers are int4."""
    tables = parts.tables()
    table_format = "int8" if quantize == "int4" else quantize

    def layer(index: int) -> LayerWeights:
        named = dict(parts.layer(index))
        return LayerWeights(
            named["input_layernorm"].to(kernels.dtype),
            _packed(kernels, quantize, *(named[f"self_attn.{each}_proj"] for each in "qkv")),
            _packed(kernels, quantize, named["self_attn.o_proj"]),
            named["post_attention_layernorm"].to(kernels.dtype),
            _packed(kernels, quantize, named["mlp.gate_proj"], named["mlp.up_proj"]),
            _packed(kernels, quantize, named["mlp.down_proj"]))

    embedding = kernels.pack(tables["model.embed_tokens.weight"], quantize=table_format)
    head = kernels.pack(tables["lm_head.weight"], quantize=table_format)
    norm = tables["model.norm.weight"].to(kernels.dtype)
    layers = tuple(layer(index) for index in range(config.num_layers))
    return Transformer(config, ModelWeights(embedding, layers, norm, head, quantize), kernels)


def _packed(kernels: Kernels, quantize: str, *parts: Tensor) -> Linear:
    weight = torch.cat(parts) if len(parts) > 1 else parts[0]
    return kernels.pack(weight, quantize=quantize)


def small_transformer(config: ModelConfig, weights: dict[str, Tensor], kernels: Kernels) -> Transformer:
    """The small model of these tensors, whose head is its embedding table."""
    def named(index: int, name: str) -> Tensor:
        return weights[f"model.layers.{index}.{name}.weight"]

    layers = tuple(
        LayerWeights(
            named(index, "input_layernorm").to(kernels.dtype),
            _packed(kernels, "none", *(named(index, f"self_attn.{each}_proj") for each in "qkv")),
            _packed(kernels, "none", named(index, "self_attn.o_proj")),
            named(index, "post_attention_layernorm").to(kernels.dtype),
            _packed(kernels, "none", named(index, "mlp.gate_proj"), named(index, "mlp.up_proj")),
            _packed(kernels, "none", named(index, "mlp.down_proj")))
        for index in range(config.num_layers))
    table = kernels.pack(weights["model.embed_tokens.weight"])
    return Transformer(config, ModelWeights(table, layers, weights["model.norm.weight"].to(kernels.dtype), table),
                       kernels)


def tiny_eagle() -> tuple[EagleConfig, dict[str, Tensor]]:
    """An EAGLE-3 head of `tiny_source` with random weights."""
    config = config_file.parse_config(tiny_source()[0])
    generator = torch.Generator().manual_seed(4)
    part = "layers.0."
    shapes = {"fc": (16, 32), "lm_head": (40, 16), **{f"{part}self_attn.{each}_proj": (16, 32) for each in "qkv"},
              **{f"{part}{each}_proj": (16, 16) for each in ("self_attn.o", "mlp.gate", "mlp.up", "mlp.down")}}
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}
    for name in ("norm", f"{part}input_layernorm", f"{part}hidden_norm", f"{part}post_attention_layernorm"):
        weights[f"{name}.weight"] = torch.ones(16)
    return EagleConfig(3, config, 16, (0, 1), True, 40, True, False, False, True, 0), weights


def tiny_source() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and random weights of a model of one layer, for the interpreter."""
    settings = SHAPES["qwen2.5-1.5b"] | {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 16,
        "num_attention_heads": 1, "num_key_value_heads": 1}
    generator = torch.Generator().manual_seed(3)
    shapes = {"model.embed_tokens": (40, 16), "self_attn.q_proj": (16, 16), "self_attn.k_proj": (16, 16),
              "self_attn.v_proj": (16, 16), "self_attn.o_proj": (16, 16), "mlp.gate_proj": (16, 16),
              "mlp.up_proj": (16, 16), "mlp.down_proj": (16, 16)}
    weights = {f"{name if name.startswith('model') else 'model.layers.0.' + name}.weight":
               torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}
    for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        weights[f"{name}.weight"] = torch.ones(16)
    return settings, weights
