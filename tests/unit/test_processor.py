"""What other systems say of the processor, its memory and its files: macOS and Linux on ARM, from what they print."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from longdraft.server import connections
from longdraft.system import files, machine, processor

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            200000.
Pages inactive:                          150000.
Pages speculative:                         5000.
Pages throttled:                              0.
Pages wired down:                        100000.
Pages purgeable:                           1000.
"Translation faults":                 123456789.
"""
M1 = {"machdep.cpu.brand_string": "Apple M1", "hw.optional.arm.FEAT_DotProd": "1", "hw.optional.arm.FEAT_BF16": "0",
      "hw.perflevel0.physicalcpu": "4", "hw.perflevel0.l2cachesize": "12582912", "hw.pagesize": "16384"}
M4 = M1 | {"machdep.cpu.brand_string": "Apple M4", "hw.optional.arm.FEAT_BF16": "1", "hw.optional.arm.FEAT_I8MM": "1"}


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch):
    """Call it with the variables of sysctl: the system is macOS."""
    def begin(variables: dict[str, str]) -> None:
        def run(command: tuple[str, ...], **options: object) -> SimpleNamespace:
            name = command[-1]
            return SimpleNamespace(stdout=VM_STAT if name == "vm_stat" else variables.get(name, "") + "\n")

        monkeypatch.setattr(processor.platform, "system", lambda: "Darwin")
        monkeypatch.setattr(processor.subprocess, "run", run)

    return begin


def test_macos_names_the_processor_and_its_vector_units(macos):
    macos(M1)
    assert processor.name() == "Apple M1 (asimddp)"
    assert (processor.cores(), processor.last_level_cache()) == (4, 12 << 20)
    macos(M4)
    assert processor.name() == "Apple M4 (i8mm bf16 asimddp)"


def test_macos_has_the_memory_of_pages_that_it_may_drop(macos, monkeypatch):
    macos(M1)
    monkeypatch.setattr(machine, "_PROC", Path("/nowhere"))
    assert machine.available_memory() == 166_000 * 16384


def test_a_macos_without_these_programs_has_half_of_its_memory(macos, monkeypatch):
    macos({})
    monkeypatch.setattr(processor.subprocess, "run", lambda *given, **options: (_ for _ in ()).throw(OSError))
    monkeypatch.setattr(machine, "_PROC", Path("/nowhere"))
    assert machine.available_memory() == machine.memory_bytes() // 2
    assert processor.cores() == os.cpu_count()


@pytest.mark.parametrize("board", ["Raspberry Pi 5 Model B Rev 1.0", ""])
def test_linux_on_arm_has_numbers_in_place_of_a_name(monkeypatch, tmp_path, board):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd asimddp i8mm bf16\n"
                                      "CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n")
    if board:
        (tmp_path / "device-tree").mkdir()
        (tmp_path / "device-tree" / "model").write_text(board + "\0")
    monkeypatch.setattr(processor, "_PROC", tmp_path)
    assert processor.name() == f"{board + ', ' if board else ''}ARM 0x41 0xd4f (i8mm bf16 asimddp)"


@pytest.mark.parametrize("refusal", [None, errno.ENOTSUP, errno.EINVAL, errno.ENOTTY, errno.EIO, errno.ENOSPC])
def test_files_are_synced_past_the_cache_of_the_drive_where_macos_can(monkeypatch, tmp_path, refusal):
    calls = []

    def operate(file: int, operation: int) -> None:
        calls.append(operation)
        if refusal:
            raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(files, "_FULL_SYNC", 51)
    monkeypatch.setattr(fcntl, "fcntl", operate)
    monkeypatch.setattr(files.os, "fsync", lambda file: calls.append("fsync"))
    if refusal in (errno.EIO, errno.ENOSPC):
        with pytest.raises(OSError, match=os.strerror(refusal)):
            files.write_synced(tmp_path / "a", b"text")
        assert calls == [51]
    else:
        files.write_synced(tmp_path / "a", b"text")
        assert calls == ([51] if refusal is None else [51, "fsync"])


def test_no_module_calls_fsync_by_itself():
    root = Path(files.__file__).parents[2]
    sources = [path for package in ("longdraft", "longdraft_bench") for path in (root / package).rglob("*.py")]
    assert [str(path.relative_to(root)) for path in sources if "os.fsync(" in path.read_text()] == [
        "longdraft/system/files.py"]


@pytest.mark.parametrize("limits, allowed, expected", [
    ((256, resource.RLIM_INFINITY), 10240, 10240), ((20000, resource.RLIM_INFINITY), 10240, 20000),
    ((256, 1024), 10240, 1024), ((256, resource.RLIM_INFINITY), resource.RLIM_INFINITY, 1 << 20), ((256, 512), 0, 256)])
def test_the_limit_of_open_files_is_raised_as_far_as_macos_allows(monkeypatch, limits, allowed, expected):
    def limit(which: int, values: tuple[int, int]) -> None:
        if allowed != resource.RLIM_INFINITY and not 0 <= values[0] <= allowed:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(connections.resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(connections.resource, "setrlimit", limit)
    assert connections.raise_file_limit() == expected


def test_connections_have_a_limit_for_data_that_is_not_acknowledged():
    option, value = connections._UNACKNOWLEDGED
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as each:
        each.setsockopt(socket.IPPROTO_TCP, option, value)
