"""Exactness on the device: rows of trees, kernels against the reference, the tests, a memory checker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch

from longdraft.kernels import KV, Geometry, Kernels, LayerWeights
from longdraft.kernels.cuda.row_invariance import first_difference
from longdraft.kernels.reference import ReferenceKernels
from longdraft_bench.cuda.models import Bench
from longdraft_bench.cuda.plan import CudaPlan

_ROOT = Path(__file__).resolve().parents[2]
_TREE_ROWS, _CHAIN = (70, 16), (30, 9)  # sizes of trees, and the length of the chain in each
_FAILURES = 20  # that are reported
_PYTEST = ("-q", "--numprocesses", "14", "--timeout", "120", "-p", "no:cacheprovider")
_CHECKER = "compute-sanitizer"


def rows(plan: CudaPlan, bench: Bench, name: str, prefix: int) -> dict[str, Any]:
    """Whether every row of a tree gets the bits of plain decoding, in one layer of the first shape.

    Where rows differ, it names the first operation of the layer whose result differs, for each kind of weights.
    """
    chosen, shape = bench.kernels(name), next(iter(plan.shapes.values()))
    heads, kv_heads, dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    geometry = Geometry(heads, kv_heads, dim, 1e-5)
    found: dict[str, str | None] = {}
    for quantize in ("none", "int8") if plan.device == "cuda" else ("int8",):
        decoder = chosen.new_decoder([_layer(chosen, shape, quantize)], geometry)
        for count, depth in zip(_TREE_ROWS, _CHAIN, strict=True) if plan.device == "cuda" else ((4, 3),):
            for has_remainder in (False, True):
                case = f"{quantize}, {count} rows{', remainder' * has_remainder}"
                found[case] = first_difference(chosen, decoder, geometry, shape["hidden_size"], prefix, count, depth,
                                               has_remainder)
    wrong = {case: place for case, place in found.items() if place}
    return {"differs_in": next((f"{place} ({case})" for case, place in wrong.items()), None), "cases": found}


def _layer(kernels: Kernels, shape: dict[str, Any], quantize: str) -> LayerWeights:
    generator = torch.Generator(kernels.device).manual_seed(5)
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim

    def weight(out: int, into: int) -> Any:
        values = torch.randn(out, into, generator=generator, device=kernels.device)
        return kernels.pack((values / into**0.5).to(kernels.dtype), quantize=quantize)

    norm = torch.ones(hidden, dtype=kernels.dtype, device=kernels.device)
    return LayerWeights(norm, weight(queries + 2 * keys, hidden), weight(hidden, queries), norm,
                        weight(2 * inner, hidden), weight(hidden, inner))


def reference(plan: CudaPlan, bench: Bench, name: str) -> list[dict[str, Any]]:
    """Each kernel: its largest difference from the float32 reference, and whether a row alone has the same bits."""
    ours, definition = bench.kernels(name), ReferenceKernels(plan.device, "float32")
    is_small = plan.device == "cpu"
    found = [_attention_case(ours, definition, dim, *((50, 3) if is_small else (5000, 64)))
             for dim in ((16,) if is_small else (64, 80, 96, 128, 256))]
    for outer, inner in ((70, 48),) if is_small else ((6144, 4096), (4096, 14336), (128256, 4096)):
        rows = 4 if is_small else 64
        x = torch.randn(rows, inner, device=plan.device).to(ours.dtype)
        weight = (torch.randn(outer, inner, device=plan.device) / inner**0.5).to(ours.dtype)
        for quantize in ("none", "int8"):
            packed, wanted = (kernel.pack(weight, quantize=quantize) for kernel in (ours, definition))
            many = ours.linear(x, packed, keep_float=True)
            found.append({"kernel": f"linear {outer}x{inner} {quantize}", "rows": rows,
                          "difference": _difference(many[-2:], definition.linear(x[-2:].float(), wanted)),
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
            alone = kernel.attention(q[-1:], KV(flat, length + rows - 1, k[-1:], v[-1:]), parents[:1]).output
    return {"kernel": f"attention {dim}", "rows": rows, "length": length, "difference": _difference(*outputs),
            "is_invariant": torch.equal(alone[0], outputs[0][-1])}


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).abs().max())


def tests(plan: CudaPlan, bench: Bench) -> dict[str, Any]:
    """The kernels' tests on the device, in processes of their own. Their report is kept as junit.xml."""
    report = bench.folder / "junit.xml"
    began = time.monotonic()
    files = sorted(str(path.relative_to(_ROOT)) for path in (_ROOT / "tests" / "unit").glob("test_cuda_*.py"))
    command = [sys.executable, "-m", "pytest", *files, *_PYTEST, f"--junitxml={report}"]
    done = subprocess.run(command, cwd=_ROOT, check=False, capture_output=True, text=True,
                          timeout=max(20.0, bench.seconds_left() - 10))
    if not report.is_file():
        raise RuntimeError(f"pytest wrote no report: {(done.stdout + done.stderr)[-500:]}")
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    failures = [f"{case.get('classname')}::{case.get('name')}: {(case[0].get('message') or '')[:300]}"
                for case in suite.iter("testcase") if len(case) and case[0].tag in ("failure", "error")]
    return {"status": done.returncode, "seconds": time.monotonic() - began, "failures": failures[:_FAILURES],
            **{name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
               if name != "failures"}, "failed": len(failures)}


def memory_checker(plan: CudaPlan, bench: Bench) -> dict[str, Any]:
    """One step of a tiny model under NVIDIA's memory checker, if that is installed."""
    tool = shutil.which(_CHECKER) or f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin/{_CHECKER}"
    if not Path(tool).is_file():
        return {"left_out": f"{_CHECKER} is not installed"}
    code = ("from longdraft_bench.cuda.checks import small_step; small_step()")
    done = subprocess.run([tool, "--error-exitcode", "9", sys.executable, "-c", code], cwd=_ROOT, check=False,
                          capture_output=True, text=True, timeout=max(20.0, bench.seconds_left() - 5))
    return {"status": done.returncode, "last_lines": (done.stdout + done.stderr).strip().splitlines()[-12:]}


def small_step() -> None:
    """A tree's rows and plain rows of one small layer on the device."""
    from longdraft import kernels

    chosen = kernels.choose("cuda", "bfloat16")
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 64}
    geometry = Geometry(4, 2, 64, 1e-5)
    decoder = chosen.new_decoder([_layer(chosen, shape, "none")], geometry)
    print("differs in", first_difference(chosen, decoder, geometry, 256, 300, 12, 6, True))
