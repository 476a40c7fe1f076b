"""`longdraft bench cuda` at the smallest sizes, and that every kernel compiles for a device that is not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]


def bench(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "longdraft", "bench", "cuda", *options], cwd=ROOT, check=False,
                          capture_output=True, text=True, env={**os.environ, **environment})


def test_every_part_is_written_and_what_is_missing_is_done_by_the_next_run(tmp_path):
    output = tmp_path / "cuda.json"
    run = bench("--interpret", "--output", str(output))
    assert run.returncode == 0, run.stderr
    filled = json.loads(output.read_text())
    parts = filled["parts"]
    assert list(parts) == ["bandwidth", "correctness", "steps tiny 40", "equality 40", "run"]
    assert all(case["is_invariant"] and case["difference"] < 1e-3 for case in parts["correctness"]["figures"])
    assert parts["equality 40"]["figures"]["is_equal"] and parts["equality 40"]["figures"]["accepted"] > 0
    steps = parts["steps tiny 40"]["figures"]
    assert set(steps["verify_ms"]) == {"1", "2"} and steps["floor_ms"] > 0
    assert parts["run"]["figures"]["new_tokens"] == 1 and filled["left_out"] == []
    del parts["bandwidth"]
    parts["run"] = {"seconds": 1, "figures": "kept"}
    output.write_text(json.dumps(filled))
    again = bench("--interpret", "--output", str(output))
    assert again.returncode == 0 and again.stdout.startswith("bandwidth: ") and again.stdout.count("\n") == 2
    assert json.loads(again.stdout.splitlines()[-1])["bench"] == "cuda"
    assert json.loads(output.read_text())["parts"]["run"]["figures"] == "kept"
    output.write_text('{"bench": "kernels"}')
    other = bench("--interpret", "--output", str(output))
    assert other.returncode == 2 and "something else" in other.stderr and "Traceback" not in other.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_one_line_says_so(tmp_path):
    run = bench("--output", str(tmp_path / "cuda.json"))
    assert run.returncode == 2 and "no CUDA device" in run.stderr and run.stderr.count("\n") == 1


def test_every_kernel_compiles_for_hopper(tmp_path):
    """To machine code, without a device: the interpreter takes more than the compiler does."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = ROOT / "tests" / "helpers" / "compile_cuda_kernels.py"
    run = subprocess.run([sys.executable, str(script)], cwd=ROOT, check=False,
                         capture_output=True, text=True, env={**environment, "TRITON_CACHE_DIR": str(tmp_path)})
    assert run.returncode == 0, run.stderr[-2000:]
    found = {line.split()[0]: line.split()[1:] for line in run.stdout.splitlines()}
    assert {"attend", "merge", "few_rows", "rotate", "add_and_norm", "with_noise", "walk", "place"} <= set(found)
    for kernel, (shared, fused, spilt) in found.items():
        assert int(shared) <= 113 * 1024, f"{kernel} leaves no room for a second program beside it"
        assert int(spilt) == 0, f"{kernel} spills registers"
        if kernel in ("attend", "merge", "add_and_norm", "with_noise", "penalise"):
            assert int(fused) == 0, f"{kernel} has multiply-adds that round once"
