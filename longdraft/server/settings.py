"""What a server is told at its start, and how much memory it may give to texts."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path

from longdraft.errors import UsageError, check

MiB = 1 << 20
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/*?#\s]+")
_SHARE = 0.8  # of the memory that is free once the model is loaded
_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Settings:
    """Limits and manners.

    host, port         where to listen
    model_name         what clients call the model
    api_keys           any of these opens everything; none: no key is asked for
    journals           folder of the journals; None: nothing is kept on disk
    journal_from       texts of at least so many tokens have a journal from their beginning, asked for or not
    keep_finished      journals of finished texts that stay, the latest
    max_running        texts that are written in turns
    max_queued         texts that may wait; more are refused (429)
    memory_bytes       for the caches of the texts that are written in turns
    max_body_bytes     of a request (413)
    max_choices        texts of one request: prompts times n
    timeout_s          for a request, waiting included; 0: none
    stall_s            for a client to take in what is sent, or to send what it began
    drain_s            what running texts get after SIGTERM
    progress_s         between two comments with the progress in a stream
    cors_origins       web pages of other places that may call this server
    allowed_hosts      names by which a server without a key may be called, beside this machine's own
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = "novelist"
    api_keys: tuple[str, ...] = ()
    journals: Path | None = None
    journal_from: int = 1024
    keep_finished: int = 200
    max_running: int = 8
    max_queued: int = 64
    memory_bytes: int = 1 << 30
    max_body_bytes: int = 8 * MiB
    max_choices: int = 32
    timeout_s: float = 0.0
    stall_s: float = 60.0
    drain_s: float = 30.0
    progress_s: float = 5.0
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("port", 0), ("journal_from", 1), ("keep_finished", 0), ("max_running", 1),
                            ("max_queued", 0), ("max_body_bytes", 1024), ("max_choices", 1), ("memory_bytes", MiB)):
            check(getattr(self, name) >= least, name, getattr(self, name), f"{least} or more")
        check(self.port <= 65535, "port", self.port, "0 to 65535", "0 takes a free one")
        for name in ("timeout_s", "drain_s"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "0 or more seconds")
        for name in ("stall_s", "progress_s"):
            check(getattr(self, name) > 0, name, getattr(self, name), "seconds above 0")
        for origin in self.cors_origins:
            check(bool(_ORIGIN.fullmatch(origin)), "--cors-origin", origin, "an origin such as https://example.org",
                  "name each place: a page of any other could use the server through its reader")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def read_keys(given: tuple[str, ...], file: Path | None, variable: str = "LONGDRAFT_API_KEY") -> tuple[str, ...]:
    """Keys from options, a file (one a line; # begins a remark) and the environment. UsageError for an empty one."""
    keys = list(given)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise UsageError(f"--api-key-file cannot read {file}: {error}") from error
        found = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        if not found:
            raise UsageError(f"--api-key-file {file} holds no key; write one in each line")
        keys += found
    if os.environ.get(variable):
        keys.append(os.environ[variable])
    if not all(key.strip() and key.isascii() and key.isprintable() for key in keys):
        raise UsageError("an API key is empty or has letters other than printable ASCII; give another")
    return tuple(dict.fromkeys(keys))


def free_memory(on_device: int | None = None) -> int:
    """Bytes that texts may take beside a model that is loaded: a share of what is free.

    on_device  free bytes of a device that has memory of its own; None: caches are in the system's memory, of which the
               control group leaves a part
    """
    return max(MiB, int((_of_system() if on_device is None else on_device) * _SHARE))


def _of_system() -> int:
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        free = _figure(_PROC / "meminfo", "MemAvailable:") * 1024
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            # Pages of files that nobody has used lately are the group's too, and make room when it is wanted.
            used = int((_CGROUP / "memory.current").read_text()) - _figure(_CGROUP / "memory.stat", "inactive_file")
            free = min(free, int(limit) - used)
    except (OSError, ValueError, StopIteration):
        pass
    return free


def _figure(file: Path, name: str) -> int:
    """A number of a file with a name and a number in each line."""
    lines = (line.split() for line in file.read_text().splitlines())
    return next(int(words[1]) for words in lines if words[0] == name)


def state_folder() -> Path:
    """Where journals lie if nobody says."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "longdraft" / "journals"
