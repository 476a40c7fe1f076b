"""The skeleton of a persistent kernel (longdraft_bench/cuda/skeleton.cu), compiled by g++ with a shim of CUDA."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from longdraft_bench.cuda import skeletons

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
# Each program is a thread: it waits at barriers for the others.
PROGRAM = """
#include "cuda_shim.h"
#define STAGES 4
#include "kernel.h"
extern "C" void run(const Chunk* weights, unsigned* counter, unsigned* sums, unsigned* failed, int patience, int chunks,
                    int phases, int has_barriers, int programs, int grid) {
    gridDim.x = grid;
    std::vector<std::thread> threads;
    for (int program = 0; program < programs; ++program)
        threads.emplace_back([=] {
            blockIdx.x = program;
            ring(weights, counter, sums, failed, patience, chunks, phases, has_barriers);
        });
    for (std::thread& thread : threads) thread.join();
}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("skeleton")
    (folder / "kernel.h").write_text(skeletons.SOURCE.read_text().replace(
        "extern __shared__ Chunk held[];", "static thread_local Chunk held[STAGES];"))
    (folder / "run.cpp").write_text(PROGRAM)
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", f"-I{HELPERS}", "run.cpp", "-o",
                    "run.so"], cwd=folder, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(folder / "run.so")).run


def launch(run, weights, phases, chunks, has_barriers, patience=1 << 30, grid=None):
    """The sums, the counter, and whether a program gave up."""
    programs = len(weights)
    counter, failed, sums = (np.zeros(count, np.uint32) for count in (1, 1, programs))
    run(*(ctypes.c_void_p(part.ctypes.data) for part in (weights, counter, sums, failed)), patience, chunks, phases,
        has_barriers, programs, grid or programs)
    return sums.tolist(), counter[0], bool(failed[0])


@pytest.mark.parametrize(("programs", "chunks", "phases", "has_barriers"), [
    (1, 1, 1, 0), (3, 2, 5, 1), (3, 7, 3, 1), (4, 1, 9, 1), (2, 30, 1, 0), (3, 2, 1, 1)])
def test_every_chunk_is_summed_once_and_read_after_it_arrived(run, programs, chunks, phases, has_barriers):
    weights = np.random.default_rng(1).integers(0, 1 << 32, (programs, phases * chunks, 4), dtype=np.uint32)
    wanted = np.bitwise_xor.reduce(weights, 2).sum(1, dtype=np.uint32).tolist()
    assert launch(run, weights, phases, chunks, has_barriers) == (wanted, programs * phases * has_barriers, False)


def test_a_program_that_waits_too_long_for_another_says_so_and_goes_on(run):
    weights = np.ones((1, 2, 4), np.uint32)
    assert launch(run, weights, 2, 1, 1, patience=1000, grid=2)[2], "the second program was never started"
