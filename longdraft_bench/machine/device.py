"""The device that an experiment runs on: its name, its clocks, its measured bandwidth, and how many caches it holds."""

from __future__ import annotations

import subprocess
from typing import Any

import torch

from longdraft.checkpoint.sizing import LARGEST_TREE
from longdraft.kernels import Kernels
from longdraft.model.transformer import Transformer
from longdraft.system import machine
from longdraft_bench.cuda import models as cuda_models

_CPU_SHARE = 0.5  # of the available memory, for the caches of all systems of a text
_DEVICE_SHARE = 0.9
_MARGIN = 1.2  # of a text's cache, for the caches of its drafter
_COPIED_BYTES = 1 << 30
_CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "driver_version")


def description(device: str) -> dict[str, Any]:
    """The GPU by name, for the record; empty for the CPU."""
    if not device.startswith("cuda"):
        return {}
    about = torch.cuda.get_device_properties(device)
    return {"gpu": about.name, "gpu_memory_bytes": about.total_memory, "cuda": torch.version.cuda}


def limits(kernels: Kernels) -> dict[str, Any]:
    """The device's bandwidth, measured now, and its clocks: what may change from one run to the next."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=kernels.device)
    target = torch.empty_like(source)
    ms = min(cuda_models.device_ms(kernels.device, lambda: target.copy_(source), 1) for _ in range(9))
    return {"read_bandwidth_gb_per_s": 2 * _COPIED_BYTES / ms / 1e6, "clocks": clocks()}


def clocks() -> dict[str, str]:
    """What nvidia-smi says of the first GPU's clocks, in its own units; empty without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader", "--id=0"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_CLOCKS, (value.strip() for value in printed.split(",")), strict=False))


def num_caches(model: Transformer, positions: int) -> int:
    """How many texts of `positions` tokens can be written at the same time, with what their drafters hold."""
    free = model.kernels.free_bytes()
    rows = positions + (LARGEST_TREE if model.kernels.is_device else 0)  # a device reserves the whole cache
    cache_bytes = _MARGIN * rows * model.cache_bytes_per_token
    room = _CPU_SHARE * machine.available_memory() if free is None else _DEVICE_SHARE * free
    return int(room / cache_bytes)
