"""What the operating system says of the processor: its name, vector units, cores and cache. No PyTorch is needed."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from pathlib import Path

_PROC, _SYS = Path("/proc"), Path("/sys")
_X86_UNITS = ("amx_bf16", "avx512_bf16", "avx512f", "avx_vnni", "avx2")
_ARM_UNITS = ("i8mm", "bf16", "asimddp")  # as Linux names them
_MACOS_UNITS = {"i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16", "asimddp": "FEAT_DotProd"}


def name() -> str:
    """The processor's name and its vector units that the kernels can use."""
    if platform.system() == "Darwin":
        units = [unit for unit, feature in _MACOS_UNITS.items() if sysctl(f"hw.optional.arm.{feature}") == "1"]
        return _with_units(sysctl("machdep.cpu.brand_string") or platform.machine(), units)
    with contextlib.suppress(OSError):
        lines = (_PROC / "cpuinfo").read_text().splitlines()
        facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if "model name" in facts:
            flags = facts.get("flags", "").split()
            return _with_units(facts["model name"], [unit for unit in _X86_UNITS if unit in flags])
        if "CPU part" in facts:  # Linux on ARM has numbers in place of a name
            board = ""
            with contextlib.suppress(OSError):
                board = (_PROC / "device-tree" / "model").read_text().rstrip("\0") + ", "
            units = [unit for unit in _ARM_UNITS if unit in facts.get("Features", "").split()]
            return _with_units(f"{board}ARM {facts.get('CPU implementer', '?')} {facts['CPU part']}", units)
    return platform.processor() or platform.machine()


def _with_units(text: str, units: list[str]) -> str:
    return f"{text} ({' '.join(units)})" if units else text


def cores() -> int:
    """The number of cores; on a processor of two kinds of cores under macOS, that of the fast ones."""
    fast = sysctl("hw.perflevel0.physicalcpu")
    return int(fast) if fast.isdecimal() else os.cpu_count() or 1


def last_level_cache() -> int | None:
    """Bytes of the largest cache of a core; None if the system does not report it."""
    size = sysctl("hw.perflevel0.l2cachesize")
    if size.isdecimal():
        return int(size)
    with contextlib.suppress(OSError, ValueError):
        text = max((_SYS / "devices/system/cpu/cpu0/cache").glob("index*/size")).read_text().strip()
        return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    return None


def macos_available_memory() -> int | None:
    """Bytes that macOS can give to a process: free pages, and those of files that it may drop. None elsewhere."""
    words = {"Pages free", "Pages inactive", "Pages speculative", "Pages purgeable"}
    lines = (line.partition(":") for line in _output("vm_stat").splitlines())
    pages = [int(value.strip(" .")) for key, _, value in lines if key in words and value.strip(" .").isdecimal()]
    page = sysctl("hw.pagesize")
    return sum(pages) * int(page) if pages and page.isdecimal() else None


def sysctl(variable: str) -> str:
    """A variable of macOS; empty on other systems and for an unknown one."""
    return _output("sysctl", "-n", variable).strip()


def _output(*command: str) -> str:
    """What a program of macOS prints; empty on other systems, and if it fails."""
    if platform.system() != "Darwin":
        return ""
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return ""
