"""`longdraft bench cuda`: kernels, equality and speed on a CUDA device, in parts.

    longdraft bench cuda --output cuda.json

Each part is written to the document as soon as it is measured. Parts for which no time is left are listed under
`left_out`. Run the command again with the same --output to measure them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longdraft import kernels, machine
from longdraft.bench import cuda_models as models
from longdraft.bench.shapes import SHAPES
from longdraft.core import Context, SamplingParams
from longdraft.drafters.plain import PlainDrafter
from longdraft.errors import UsageError
from longdraft.files import open_outputs
from longdraft.kernels import KV, Kernels
from longdraft.kernels.reference import ReferenceKernels
from longdraft.model.routine import atomic, run_alone
from longdraft.model.transformer import Transformer, tree_rows
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.step import Step, Tally, Timings
from longdraft.tree import Tree, chain

_SAMPLING = SamplingParams(max_new_tokens=200_000, seed=7, min_p=0.1, repetition_penalty=1.2, ignore_eos=True)


class CudaPlan(NamedTuple):
    """What is measured. In Triton's interpreter all parts run at the smallest size.

    kernels_names    kernels, the default first
    shapes           model name -> its config.json
    equality         contexts of the equality test, which writes `equality_tokens` tokens
    drafter, tokens  of the bundled model's long text
    """

    device: str
    dtype: str
    kernels_names: tuple[str, ...]
    shapes: dict[str, dict[str, Any]]
    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    equality: tuple[int, ...]
    equality_tokens: int
    drafter: str
    tokens: int
    bytes_copied: int
    repeats: int
    has_peer: bool


_MODELS = ("llama-3.1-8b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "yarn-llama-2-7b-128k")
ON_DEVICE = CudaPlan("cuda", "bfloat16", ("triton-64", "triton-32", "triton-16", "triton-64-fp8"),
                 {name: SHAPES[name] for name in _MODELS}, (4096, 32768, 61440, 102400), (1, 8, 16, 32, 64),
                 (4096, 61440), 48, "auto", 100_000, 1 << 31, 9, True)
_TRANSFORMERS = Path(__file__).parent / "workers" / "cuda_transformers.py"
_ROOM = 1024  # positions that are reserved behind a context
_TINY = SHAPES["qwen2.5-1.5b"] | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                                  "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
INTERPRETED = CudaPlan("cpu", "float32", ("triton-16",), {"tiny": _TINY}, (40,), (1, 2), (40,), 4, "plain", 1,
                       1 << 12, 1, False)


@dataclass
class CudaDocument:
    """The JSON document, written after every part. `deadline` is a time of the monotonic clock."""

    path: Path
    deadline: float
    filled: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, plan: CudaPlan, limit_s: float) -> CudaDocument:
        """Start a document, or continue the one at `path`. Raises UsageError if that is not of this benchmark."""
        document = cls(path, time.monotonic() + limit_s)
        if path.exists():
            try:
                document.filled = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UsageError(f"--output {path} exists and is not JSON ({error}); name another file") from error
            if document.filled.get("bench") != "cuda" or document.filled.get("device") != plan.device:
                raise UsageError(f"--output {path} holds something else than this benchmark's figures on "
                                 f"{plan.device}; name another file")
        document.filled |= {"bench": "cuda", "device": plan.device, "dtype": plan.dtype, "left_out": []}
        document.save()
        return document

    @property
    def parts(self) -> dict[str, Any]:
        found: dict[str, Any] = self.filled.setdefault("parts", {})
        return found

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def save(self) -> None:
        file = open_outputs({"--output": self.path})["--output"]
        file.write((json.dumps(self.filled, indent=2) + "\n").encode())
        file.finish()

    def part(self, name: str, seconds: float, measure: Callable[[], Any]) -> None:
        """Measure a part that the document lacks, if at least `seconds` are left."""
        if name in self.parts:
            return
        if self.seconds_left() < seconds:
            self.filled["left_out"].append(name)
        else:
            began = time.monotonic()
            figures = measure()
            self.parts[name] = {"seconds": time.monotonic() - began, "figures": figures}
            print(f"{name}: {self.parts[name]['seconds']:.1f} s", flush=True)
        self.save()


def measure_device(plan: CudaPlan, document: CudaDocument) -> None:
    chosen = kernels.choose(plan.device, plan.dtype, plan.kernels_names[0])
    document.filled["machine"] = machine.description(chosen) | _device(plan.device)
    document.part("bandwidth", 5, lambda: bandwidth(plan))
    document.part("correctness", 40, lambda: correctness(plan))
    rate = document.parts.get("bandwidth", {}).get("figures", {}).get("bytes_per_s")
    is_cuda = plan.device == "cuda"
    for place, (name, shape) in enumerate(plan.shapes.items()):
        parts = {f"steps {name} {context}": partial(steps, plan, rate=rate, context=context)
                 for context in plan.contexts}
        if place == 0:
            parts |= {f"equality {context}": partial(equality, plan, context=context) for context in plan.equality}
        missing = {part: measure for part, measure in parts.items() if part not in document.parts}
        if not missing or document.seconds_left() < (25 if is_cuda else 1):  # for the model alone
            document.filled["left_out"] += missing
            continue
        model = models.random_model(shape, chosen)
        for part, measure in missing.items():
            document.part(part, 8 if is_cuda else 1, partial(measure, model))
        del model
    for other in plan.kernels_names[1:]:
        document.part(f"kernels {other}", 20, partial(variant, plan, other, rate))
    document.part("run", 30, lambda: long_run(plan, document))
    if plan.has_peer:
        document.part("transformers", 60, lambda: peer(plan, document))
    document.save()
    print(json.dumps(document.filled))


def _device(device: str) -> dict[str, Any]:
    if device != "cuda":
        return {"processor_of_kernels": "Triton's interpreter"}
    about = torch.cuda.get_device_properties(0)
    return {"gpu": about.name, "gpu_memory_bytes": about.total_memory, "cuda": torch.version.cuda}


def bandwidth(plan: CudaPlan) -> dict[str, Any]:
    """Bytes/s of a copy on the device, counting reads and writes; the fastest of the repeats."""
    source = torch.zeros(plan.bytes_copied, dtype=torch.uint8, device=plan.device)
    target = torch.empty_like(source)
    ms = min(models.device_ms(source.device, lambda: target.copy_(source), 1) for _ in range(plan.repeats))
    return {"bytes": 2 * plan.bytes_copied, "ms": ms, "bytes_per_s": 2 * plan.bytes_copied / ms * 1e3}


def correctness(plan: CudaPlan) -> list[dict[str, Any]]:
    """Each kernel: its largest difference from the float32 reference, and whether it is row-invariant.

    It is row-invariant if a row computed among many equals, bit for bit, the row computed alone.
    """
    found = []
    for name in plan.kernels_names:
        ours, definition = kernels.choose(plan.device, plan.dtype, name), ReferenceKernels(plan.device, "float32")
        sizes = (16, 48, 70) if plan.device == "cpu" else (64, 4096, 6144)
        for dim in (16,) if plan.device == "cpu" else (64, 80, 96, 128, 256):
            found.append(_attention_case(ours, definition, dim, *((50, 3) if plan.device == "cpu" else (5000, 64))))
        rows, inner, outer = sizes
        x = torch.randn(rows, inner, device=plan.device).to(ours.dtype)
        weight = (torch.randn(outer, inner, device=plan.device) / inner**0.5).to(ours.dtype)
        packed, wanted = ours.pack(weight), definition.pack(weight)
        many = ours.linear(x, packed, keep_float=True)
        found.append({"kernels": name, "kernel": f"linear {outer}x{inner}", "rows": rows,
                      "difference": _difference(many[-2:], definition.linear(x[-2:], wanted)),
                      "is_invariant": torch.equal(many[-1:], ours.linear(x[-1:], packed, keep_float=True))})
    return found


def _attention_case(ours: Kernels, definition: Kernels, dim: int, length: int, rows: int) -> dict[str, Any]:
    k, v = (torch.randn(length + rows, 2, dim, device=ours.device).to(ours.dtype) for _ in range(2))
    q = torch.randn(rows, 8, dim, device=ours.device).to(ours.dtype)
    parents = torch.arange(-1, rows - 1, dtype=torch.int32)
    outputs = []
    for kernel in (ours, definition):
        store = kernel.new_store(2, dim)
        store.reserve(length + rows)
        store.write(0, k[:length], v[:length])
        outputs.append(kernel.attention(q.to(kernel.dtype), KV(store, length, k[length:], v[length:]), parents).output)
        if kernel is ours:
            flat = kernel.new_store(2, dim)
            flat.reserve(length + rows)
            flat.write(0, k[:-1], v[:-1])
            run_alone = kernel.attention(q[-1:], KV(flat, length + rows - 1, k[-1:], v[-1:]), parents[:1]).output
    return {"kernels": ours.name, "kernel": f"attention {dim}", "rows": rows, "length": length,
            "difference": _difference(*outputs), "is_invariant": torch.equal(run_alone[0], outputs[0][-1])}


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).abs().max())


def _verifies(model: Transformer, context: int, rows: int) -> Callable[[], object]:
    """A verification of `rows` rows behind `context` random ones: forward, logits and sampling. Commits nothing."""
    cache, text = model.random_cache(context, _ROOM), Context([5] * (context + 1))
    sampler = Sampler(_SAMPLING, kernels=model.kernels)
    tree = chain(5, [5] * (rows - 1), "guess")

    def work() -> object:
        result = model.forward(tree_rows(tree, context), cache, rows)
        assert sampler.on_device
        chosen = sampler.on_device.launch(result.logits, tree, text)
        cache.commit([])
        return chosen

    return work


def steps(plan: CudaPlan, model: Transformer, context: int, rate: float | None) -> dict[str, Any]:
    """A plain step by wall clock, and verifications by the device's clock, beside the memory bandwidth's floor."""
    device = model.kernels.device
    size = model.weights_bytes + context * model.cache_bytes_per_token
    floor = None if rate is None else size / rate * 1e3
    by_rows = {}
    for rows in plan.rows:
        work = _verifies(model, context, rows)
        by_rows[rows] = models.queued_ms(device, work, plan.repeats)
        del work
    wall = _wall_ms(model, context, 4 * plan.repeats)
    first = by_rows[plan.rows[0]]
    return {
        "context": context, "bytes": size, "floor_ms": floor, "plain_ms": wall, "tokens_per_s": 1e3 / wall,
        "share_of_floor": None if floor is None else floor / wall, "host_gap": max(0.0, 1 - first / wall),
        "verify_ms": by_rows, "to_one_row": {rows: ms / first for rows, ms in by_rows.items()},
    }


def _wall_ms(model: Transformer, context: int, count: int) -> float:
    """Milliseconds of a step of plain decoding while a text is written."""
    cache = model.random_cache(context, _ROOM)
    sampler = Sampler(_SAMPLING, kernels=model.kernels)
    step = Step(model, cache, PlainDrafter(), sampler, Context([5] * (context + 1)), Timings(), Tally())
    for _ in range(3):
        run_alone(step.run(1))
    models.synchronise(model.kernels.device)
    began = time.perf_counter()
    for _ in range(count):
        run_alone(step.run(1))
    models.synchronise(model.kernels.device)
    return (time.perf_counter() - began) / count * 1e3


class _LyingDrafter:
    """Drafts the true continuation with some tokens changed, and wrong siblings beside it."""

    def __init__(self, truth: Sequence[int], start: int) -> None:
        self._truth, self._start = truth, start

    def begin(self, context: Context, verified: object) -> None: ...

    def observe(self, context: Context, accepted: object) -> None: ...

    @atomic
    def propose(self, context: Context, max_depth: int) -> Tree:
        place = len(context) - self._start
        draft = [token if (place + i) % 5 else (token + 1) % 7
                 for i, token in enumerate(self._truth[place : place + 6])]
        tokens, parents = [context.last, 3, 3], [-1, 0, 1]
        for depth, token in enumerate(draft):
            parents.append(len(tokens) - 1 if depth else 0)
            tokens.append(token)
        return Tree(tuple(tokens), tuple(parents), ("", *["lying"] * (len(tokens) - 1))).pruned(max_depth)


def equality(plan: CudaPlan, model: Transformer, context: int) -> dict[str, Any]:
    """Compare the text of plain decoding behind random rows with the text of a drafter that is often wrong."""
    texts: list[list[int]] = []
    taken = 0
    for is_plain in (True, False):
        cache, text, tally = model.random_cache(context, _ROOM), Context([5] * (context + 1)), Tally()
        drafter = PlainDrafter() if is_plain else _LyingDrafter(texts[0], len(text))
        step = Step(model, cache, drafter, Sampler(_SAMPLING, kernels=model.kernels), text, Timings(), tally)
        while len(text) - context - 1 < plan.equality_tokens:
            run_alone(step.run(plan.equality_tokens - (len(text) - context - 1)))
        texts.append(text.slice(context + 1, len(text)).tolist())
        taken = tally.accepted.total()
    return {"context": context, "tokens": plan.equality_tokens, "accepted": taken, "is_equal": texts[0] == texts[1]}


def variant(plan: CudaPlan, name: str, rate: float | None) -> dict[str, Any]:
    """Other kernels on the first shape: the cost of larger row tiles for one row, and the gain of 8-bit caches."""
    chosen = kernels.choose(plan.device, plan.dtype, name)
    model = models.random_model(next(iter(plan.shapes.values())), chosen)
    ends = dict.fromkeys((plan.contexts[0], plan.contexts[-1]))
    return {str(context): steps(plan, model, context, rate) for context in ends}


def long_run(plan: CudaPlan, document: CudaDocument) -> dict[str, Any]:
    """Statistics of the bundled model's text, which ends early when the time is over."""
    from longdraft.loading import load

    engine = load(drafter=plan.drafter, device=plan.device, dtype=plan.dtype, kernels_name=plan.kernels_names[0])
    until = document.deadline - (75 if plan.has_peer else 0)
    limit = min(plan.tokens, engine.model.config.max_positions - 100)
    with engine.generate("It was", SamplingParams(
            max_new_tokens=limit, seed=7, min_p=0.1, repetition_penalty=1.2, ignore_eos=True)) as text:
        for _ in text:
            if time.monotonic() > until:
                break
        return text.stats()


def peer(plan: CudaPlan, document: CudaDocument) -> dict[str, Any]:
    """A step of transformers with a static cache and torch.compile, in its own process, at the shortest context."""
    shape = next(iter(plan.shapes.values()))
    command = [sys.executable, str(_TRANSFORMERS), json.dumps(shape), str(plan.contexts[0])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False,
                              timeout=max(10, document.seconds_left() - 5))
    except subprocess.TimeoutExpired:
        return {"failed": "no result within the remaining time"}
    if done.returncode:
        printed = done.stderr.strip().splitlines() or ["the process printed no error"]
        return {"failed": printed[-1][:400]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
