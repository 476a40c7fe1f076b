"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# They count living tensors, which a watcher holds; have a watcher of their own; launch no Triton kernel.
_UNWATCHED = "test_cuda_memory_plan", "test_cuda_hazards", "test_cuda_skeleton"


@pytest.fixture(autouse=True)
def watched_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Watch the launches of every test of CUDA kernels in Triton's interpreter for what goes wrong on a device."""
    name = request.path.stem
    if not name.startswith("test_cuda_") or name in _UNWATCHED:
        yield
        return
    from helpers.cuda_kernels import HAS_CUDA

    if HAS_CUDA:
        yield
        return
    from helpers.launch_hazards import watched_launches

    with watched_launches():
        yield
