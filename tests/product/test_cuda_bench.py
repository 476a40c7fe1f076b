"""`longdraft bench cuda` at the smallest sizes, and the compilation of every kernel for a CUDA device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longdraft.__main__ import run

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter must be chosen before Triton is imported")
def test_every_part_is_written_and_the_next_run_measures_what_is_missing(tmp_path, capfd):
    output = tmp_path / "cuda.json"
    command = ["bench", "cuda", "--interpret", "--output", str(output)]
    assert run(command) == 0
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
    capfd.readouterr()
    assert run(command) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("bandwidth: ") and printed.count("\n") == 2
    assert json.loads(printed.splitlines()[-1])["bench"] == "cuda"
    assert json.loads(output.read_text())["parts"]["run"]["figures"] == "kept"
    output.write_text('{"bench": "kernels"}')
    assert run(command) == 2
    error = capfd.readouterr().err
    assert "something else" in error and error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_gets_one_clear_line(tmp_path, capfd):
    assert run(["bench", "cuda", "--output", str(tmp_path / "cuda.json")]) == 2
    error = capfd.readouterr().err
    assert "no CUDA device" in error and error.count("\n") == 1


def test_every_kernel_compiles_for_hopper(tmp_path):
    """To machine code, without a device. The interpreter accepts programs that the compiler rejects."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = ROOT / "tests" / "helpers" / "compile_cuda_kernels.py"
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, check=False,
                         capture_output=True, text=True, env={**environment, "TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-2000:]
    found = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert {"attend_split_kernel", "merge_splits_kernel", "few_rows_kernel", "finish_qkv_kernel", "add_and_norm_kernel",
            "noisy_block_maxima_kernel", "walk_tree_kernel", "scatter_rows_kernel"} <= set(found)
    for kernel, (shared, fused, spilt) in found.items():
        assert int(shared) <= 113 * 1024, f"{kernel} leaves no room for a second program beside it"
        assert int(spilt) == 0, f"{kernel} spills registers"
        if kernel in ("attend_split_kernel", "merge_splits_kernel", "add_and_norm_kernel", "noisy_block_maxima_kernel",
                      "penalise_kernel"):
            assert int(fused) == 0, f"{kernel} has multiply-adds that round once"
