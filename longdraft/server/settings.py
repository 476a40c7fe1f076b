"""The server's settings, and how much memory it may give to KV caches."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from longdraft.errors import UsageError, check
from longdraft.journal.snapshot_folder import SnapshotOptions

MiB = 1 << 20
_LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/*?#\s]+")
_USABLE_SHARE = 0.8  # of the memory that is free once the model is loaded
_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class ServerSettings:
    """Address, access rules and limits of a server. `longdraft serve --help` lists the matching options.

    host, port         address to listen on; port 0 takes a free one
    model_name         the model's name in the API
    api_keys           each of these grants full access; none: no key is required
    key_labels         a label for each key, for logs, metrics and quotas; none: key-1, key-2, ...
    key_requests       requests per minute of each label; 0: no limit
    key_tokens         tokens per hour, read and written, of each label; 0: no limit
    certfile, keyfile  TLS certificate chain and private key (PEM); without a certificate the server speaks HTTP
    journals           folder of the journals; None: nothing is kept on disk
    journal_from       texts with at least this max_new_tokens have a journal even if the request asks for none
    keep_finished      number of journals of finished texts to keep, newest first
    keep_cut_s         time in seconds that journals of unfinished texts are kept after their last token
    journals_bytes     size of all journals together; beyond it the oldest are removed, those of finished texts first
    disk_floor_bytes   free space of the disk below which no journal begins
    max_running        texts that are written at the same time
    max_queued         texts that may wait; beyond that requests get 429
    memory_bytes       budget for the caches of all running texts
    max_body_bytes     largest request body; larger ones get 413
    max_choices        texts of one request: number of prompts times n
    max_connections    open connections
    max_connections_per_address  of them, from one IPv4 address or one IPv6 network of 64 bits
    timeout_s          limit for a request, including its time in the queue; 0: none
    stall_s            limit for a client to read from a stream, or to send a whole body
    drain_s            time that running texts get after SIGTERM
    progress_s         interval of the progress comments in a stream
    cors_origins       origins of other web pages that may call this server
    allowed_hosts      host names that a server without a key accepts, besides its address and, if it is local, this
                       machine's; none: a local server accepts this machine's, any other accepts all
    snapshots          of the texts with journals; max_bytes is the size of all of them together
    unknown_parameters  of a body: refuse | warn, which leaves them out and logs their names
    reasoning_format   of chat replies: auto, which gives the thinking of models that mark it as `reasoning_content`, or
                       none, which leaves it in `content`
    allows_no_key      listen on an address that other machines can reach without a key
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = "novelist"
    api_keys: tuple[str, ...] = ()
    key_labels: tuple[str, ...] = ()
    key_requests: int = 0
    key_tokens: int = 0
    certfile: Path | None = None
    keyfile: Path | None = None
    journals: Path | None = None
    journal_from: int = 1024
    keep_finished: int = 200
    keep_cut_s: float = 30 * 86400.0
    journals_bytes: int = 10 << 30
    disk_floor_bytes: int = 256 * MiB
    max_running: int = 8
    max_queued: int = 64
    memory_bytes: int = 1 << 30
    max_body_bytes: int = 8 * MiB
    max_choices: int = 32
    max_connections: int = 1024
    max_connections_per_address: int = 512
    timeout_s: float = 0.0
    stall_s: float = 60.0
    drain_s: float = 30.0
    progress_s: float = 5.0
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    snapshots: SnapshotOptions = field(default_factory=SnapshotOptions)
    unknown_parameters: str = "refuse"
    reasoning_format: str = "auto"
    allows_no_key: bool = False

    def __post_init__(self) -> None:
        for count, least in (("journal_from", 1), ("keep_finished", 0), ("max_running", 1), ("max_queued", 0),
                             ("max_choices", 1), ("max_connections", 1), ("max_connections_per_address", 1)):
            check(getattr(self, count) >= least, f"--{count.replace('_', '-')}", getattr(self, count),
                  f"{least} or more")
        for name, value, lowest in (("--memory-mib", self.memory_bytes / MiB, 1),
                                    ("--max-body-mib", self.max_body_bytes / MiB, 1 / 1024),
                                    ("--journals-mib", self.journals_bytes / MiB, 0),
                                    ("--disk-floor-mib", self.disk_floor_bytes / MiB, 0),
                                    ("--keep-cut-days", self.keep_cut_s / 86400, 0), ("--timeout", self.timeout_s, 0),
                                    ("--drain", self.drain_s, 0)):
            check(value >= lowest, name, value, f"{lowest:g} or more")
        check(self.unknown_parameters in ("refuse", "warn"), "--unknown-parameters", self.unknown_parameters,
              "refuse or warn")
        check(self.reasoning_format in ("auto", "none"), "--reasoning-format", self.reasoning_format, "auto or none")
        check(0 <= self.port <= 65535, "--port", self.port, "0 to 65535", "0 takes a free port")
        for name, value in (("--stall", self.stall_s), ("--progress", self.progress_s)):
            check(value > 0, name, value, "more than 0 seconds")
        if not self.is_local and not self.api_keys and not self.allows_no_key:
            raise UsageError(f"--host {self.host} is open to other machines, and there is no key; set "
                             "LONGDRAFT_API_KEY or --api-key-file, or confirm with --no-key that anyone may use it")
        self._check_keys()
        self._check_certificate()
        for origin in self.cors_origins:
            check(bool(_ORIGIN.fullmatch(origin)), "--cors-origin", origin, "an origin such as https://example.org",
                  "list each origin; wildcards would let any web page use the server")

    def _check_keys(self) -> None:
        for name in ("key_requests", "key_tokens"):
            check(getattr(self, name) >= 0, f"--{name.replace('_', '-')}", getattr(self, name), "0 or more",
                  "0 sets no limit")
            if getattr(self, name) and not self.api_keys:
                raise UsageError(f"--{name.replace('_', '-')} limits each API key, and there is none; set "
                                 "LONGDRAFT_API_KEY or --api-key-file")
        check(len(self.key_labels) in (0, len(self.api_keys)), "key_labels", len(self.key_labels),
              "one label for each key, or none")

    def _check_certificate(self) -> None:
        if self.keyfile and not self.certfile:
            raise UsageError("--keyfile needs --certfile, the certificate that belongs to the key")
        if self.certfile:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile, _no_password)
            except (OSError, ValueError) as error:  # SSLError is an OSError
                given = f"--certfile {self.certfile}" + (f" with --keyfile {self.keyfile}" if self.keyfile else "")
                reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
                raise UsageError(f"{given} cannot be used: {reason}; give a PEM certificate chain and its "
                                 "unencrypted private key") from error

    @property
    def labels(self) -> tuple[str, ...]:
        """The label of each key."""
        return self.key_labels or tuple(f"key-{i}" for i in range(1, len(self.api_keys) + 1))

    @property
    def is_local(self) -> bool:
        """Whether the server listens on a loopback address only."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _no_password() -> str:
    raise ValueError("the private key is encrypted")


def read_keys(given: tuple[str, ...], file: Path | None, variable: str = "LONGDRAFT_API_KEY") -> dict[str, str]:
    """API keys with their labels, from options, a file and the environment.

    A line of the file is a key, or a key and a label after white space; # starts a comment. Other keys are labelled
    key-1, key-2, ... in order. Keys of one label share its quotas.

    Raises UsageError for a file that cannot be read or has no key, for an empty or non-ASCII key and for a bad label.
    """
    keys = [(key, "") for key in given]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise UsageError(f"--api-key-file {file} cannot be read: {error}") from error
        words = [line.split() for line in lines if line.strip() and not line.strip().startswith("#")]
        for number, line in enumerate(words, 1):
            if len(line) > 2 or not all(map(_LABEL.fullmatch, line[1:])):
                raise UsageError(f"--api-key-file {file}: key {number} is not followed by one label of letters, "
                                 "digits, _, . and -, at most 64; write KEY or KEY LABEL on each line")
        found = [(line[0], "".join(line[1:])) for line in words]
        if not found:
            raise UsageError(f"--api-key-file {file} holds no key; write one key per line")
        keys += found
    if os.environ.get(variable):
        keys.append((os.environ[variable], ""))
    if not all(key.strip() and key.isascii() and key.isprintable() for key, _ in keys):
        raise UsageError("an API key is empty or has characters other than printable ASCII; choose another key")
    labels: dict[str, str] = {}
    for key, label in keys:
        labels.setdefault(key, label or f"key-{len(labels) + 1}")
    return labels


def cache_budget(device_free: int | None = None) -> int:
    """Bytes that caches may take beside the loaded model: a share of the free memory.

    device_free  free bytes of a device with its own memory; None: caches are in system memory, within the limit of the
                 control group
    """
    return max(MiB, int((_free_system_memory() if device_free is None else device_free) * _USABLE_SHARE))


def _free_system_memory() -> int:
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        free = _read_counter(_PROC / "meminfo", "MemAvailable:") * 1024
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            # The group's usage includes inactive file pages, which the kernel reclaims on demand.
            used = int((_CGROUP / "memory.current").read_text()) - _read_counter(_CGROUP / "memory.stat",
                                                                                 "inactive_file")
            free = min(free, int(limit) - used)
    except (OSError, ValueError, StopIteration):
        pass
    return free


def _read_counter(file: Path, name: str) -> int:
    """The number beside `name` in a file with a name and a number on each line."""
    lines = (line.split() for line in file.read_text().splitlines())
    return next(int(words[1]) for words in lines if words[0] == name)


def default_journal_folder() -> Path:
    """The folder of journals without --journals: $XDG_STATE_HOME/longdraft/journals."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "longdraft" / "journals"
