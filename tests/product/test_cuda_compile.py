"""Every CUDA kernel compiles for each architecture that people own. Needs no device. For Hopper it does so with the
oldest and the newest Triton that we allow.

The interpreter accepts programs that the compiler rejects. The set-up puts versions that are not installed into folders
of the environment (Makefile).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from itertools import product
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
OLDEST, NEWEST = re.search(r"^TRITONS := (\S+) (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE).groups()
# What the wheels of PyTorch for CUDA require, by their metadata.
BROUGHT = {(2, 8): (3, 4), (2, 9): (3, 5), (2, 10): (3, 6), (2, 11): (3, 6), (2, 12): (3, 7), (2, 13): (3, 7),
           (2, 14): (3, 8), (2, 15): (3, 9)}
UNFUSED = ("attend_split_kernel", "merge_splits_kernel", "add_and_norm_kernel", "best_in_blocks_kernel",
           "penalise_kernel", "search_level_kernel", "end_search_kernel", "support_sums_kernel", "eta_kernel")

FEW_SPILLS = 16  # bytes of registers that a kernel may spill before and after Hopper


def release(version):
    return tuple(map(int, version.split(".")[:2]))


def test_the_bounds_of_triton_are_what_the_allowed_versions_of_pytorch_bring():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest_torch = re.search(r"torch>=([\d.]+)", " ".join(project["dependencies"]))[1]
    low, high = re.search(r"triton>=([\d.]+),<([\d.]+)", " ".join(project["optional-dependencies"]["test"])).groups()
    assert release(low) == release(OLDEST) == BROUGHT[release(oldest_torch)], "the oldest Triton is another"
    major, minor = release(NEWEST)
    assert (major, minor) == max(BROUGHT.values()) and release(high) == (major, minor + 1), "the newest is another"
    used_torch = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert release(used_torch) in BROUGHT
    for requirement in requires("torch") or []:  # of PyTorch for CUDA
        if found := re.match(r"triton[=~]=([\d.]+)", requirement):
            assert release(OLDEST) <= release(found[1]) <= release(NEWEST)


def test_some_kernels_compile_for_every_architecture(tmp_path):
    """One of products, and the one that merges splits. The tests below compile all kernels."""
    names, architectures = {"few_rows_kernel", "merge_splits_kernel"}, {80, 86, 89, 90, 120}
    found = compiled(triton.__version__, sorted(architectures), tmp_path, *sorted(names))
    assert {(each["kernel"], each["architecture"]) for each in found} == {*product(names, architectures)}
    assert all(each["shared"] <= each["limit"] and each["stack"] <= FEW_SPILLS for each in found), found


@pytest.mark.full
@pytest.mark.parametrize("version", sorted({OLDEST, NEWEST, triton.__version__}))
def test_every_kernel_compiles_for_hopper_and_spills_no_more_than_known(version, tmp_path):
    found = compiled(version, [90], tmp_path)
    expected = {*UNFUSED, "few_rows_kernel", "finish_qkv_kernel", "walk_trees_kernel", "scatter_rows_kernel"}
    assert expected <= {each["kernel"] for each in found}
    assert {f"{types} {dim}" for types in ("*bf16 *bf16 *bf16", "*bf16 *i8 *i8", "*bf16 *i8 *u8", "*fp32 *fp32 *fp32")
            for dim in (80, 96, 128, 256)} <= {each["form"] for each in found}

    def of(name, *keys):
        return [tuple(each[key] for key in keys) for each in found if each["kernel"] == name]

    forms = of("attend_split_kernel", "shared", "computed")
    assert all(forms[each] == forms[each + 1] for each in (0, 2, 4)), "several texts are computed another way"
    for each in found:
        check(each)


@pytest.mark.full
@pytest.mark.parametrize("architecture", [80, 86, 89, 120])
def test_every_kernel_fits_into_the_shared_memory_of_each_architecture(architecture, tmp_path):
    """Consumer cards have 99 KiB for a program."""
    found = compiled(triton.__version__, [architecture], tmp_path)
    assert len(found) > 60
    for each in found:
        name = f"{each['kernel']} ({each['form']}) for {architecture}"
        assert each["shared"] <= each["limit"], f"{name} wants {each['shared']} bytes of shared memory"
        assert each["stack"] <= max(each["allowed"], FEW_SPILLS), f"{name} spills {each['stack']} bytes of registers"
        if each["kernel"] in UNFUSED and each["kernel"] != "attend_split_kernel":
            assert each["fused"] == 0, f"{name} has multiply-adds that round once"


def compiled(version, architectures, folder, *names):
    """What `compile_cuda_kernels` prints with this version of Triton, as dictionaries."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if version != triton.__version__:
        place = Path(sys.prefix) / f"triton-{version}"
        if not place.is_dir():
            pytest.skip(f"no {place}: `make test` without network leaves Triton {version} out")
        environment["PYTHONPATH"] = str(place)
    script = ROOT / "tests" / "helpers" / "compile_cuda_kernels.py"
    done = subprocess.run([sys.executable, str(script), *map(str, architectures), *names], cwd=ROOT, check=False,
                          capture_output=True, text=True, env={**environment, "TRITON_CACHE_DIR": str(folder)})
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {each["triton"] for each in found} == {version}
    return found


def check(each):
    name = f"{each['kernel']} ({each['form']})"
    is_attention = each["kernel"] == "attend_split_kernel"
    most = 227 if is_attention else 113  # with heads of 256 there is room for one program
    assert each["shared"] <= most * 1024, f"{name} leaves no room for a second program beside it"
    assert each["is_paired"] or not is_attention, "blocks of the prefix and of a row's end are computed differently"
    assert each["stack"] <= each["allowed"], f"{name} spills {each['stack']} bytes of registers"
    is_float = each["form"].startswith("*fp32")  # whose products are fused multiply-adds
    if each["kernel"] in UNFUSED and not (is_attention and is_float):
        assert each["fused"] == 0, f"{name} has multiply-adds that round once"
