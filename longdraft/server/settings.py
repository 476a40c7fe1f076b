"""The server's settings, and how much memory it may give to KV caches."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from longdraft.engine.settings import CACHE_RAM, SNAPSHOT, SNAPSHOT_MAX
from longdraft.errors import UsageError, check
from longdraft.journal.snapshot_folder import SnapshotOptions
from longdraft.request.settings import Range, Setting, setting, settings_of
from longdraft.request.tools import FORM_NAMES
from longdraft.system.files import read_text

MiB = 1 << 20
_LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/*?#\s]+")
_HOST = re.compile(r"[^\s/:@?#\[\]]+|(?=.*:.*:)[0-9A-Fa-f:.]+")
_USABLE_SHARE = 0.8  # of the memory that is free once the model is loaded
_QUOTA = Range(0, cure="0 sets no limit")
_INTERVAL = Range(0, above=True, words="more than 0 seconds")
T = TypeVar("T")


def _serving(default: T, help: str, allowed: Range | tuple[str, ...] | None = None, **about: Any) -> T:
    return setting(default, help, allowed, **{"panel": "Serving", "has_env": True, **about})


def _limit(default: T, help: str, allowed: Range | tuple[str, ...] | None = None, **about: Any) -> T:
    return setting(default, help, allowed, panel="Limits", has_env=True, **about)


@dataclass(frozen=True)
class ServerSettings:
    """Address, access rules and limits of a server. Fields with a help are options of `longdraft serve`, in units of
    their own there: MiB for bytes, for example.

    api_keys     each of these grants full access; none: no key is required
    key_labels   a label for each key, for logs, metrics and quotas; none: key-1, key-2, ...
    journals     folder of the journals; None: nothing is kept on disk
    snapshots    of the texts with journals; max_bytes is the size of all of them together
    """

    host: str = _serving("127.0.0.1", "Address to listen on; 0.0.0.0: all. Give a key then.")
    port: int = _serving(8000, "Port; 0: any free one.", Range(0, 65535, cure="0 takes a free port"))
    ollama_port: int | None = _serving(
        None, "A second port, for clients of Ollama that cannot set one: 11434 is Ollama's own.", Range(0, 65535))
    api_keys: tuple[str, ...] = ()
    key_labels: tuple[str, ...] = ()
    certfile: Path | None = _serving(None, "TLS certificate chain (PEM); the server then speaks HTTPS.")
    keyfile: Path | None = _serving(None, "Private key of --certfile (PEM), if that file does not hold it.")
    model_name: str = _serving(
        "novelist", "The model's name for clients; default: --model, of a file or folder without its path.",
        option="served-model-name")
    journals: Path | None = None
    cors_origins: tuple[str, ...] = _serving((), "Web origin that may call this server. Repeatable.",
                                             option="cors-origin", has_env=False)
    allowed_hosts: tuple[str, ...] = _serving(
        (), "Host name that requests to a server without keys may use. Repeatable.", option="allowed-host",
        has_env=False)
    allows_no_key: bool = _serving(False, "Let anyone who can reach --host use the server, without a key.",
                                   option="no-key", has_env=False)
    reasoning_format: str = _serving(
        "auto", "The thinking of models that mark it, in chat replies: auto: reasoning_content; none: part of content.",
        ("auto", "none"))
    tool_form: str = _serving(
        "auto", "How the model writes calls of functions; auto: as its chat template shows.", FORM_NAMES)
    tool_grammar: str = _serving(
        "always", "Calls of functions follow a grammar: always, or strict: where one is required or has strict. Calls "
        "without it that cannot be read are content.", ("always", "strict"))
    key_requests: int = _limit(0, "Requests per minute of each API key; 0: no limit.", _QUOTA)
    key_tokens: int = _limit(0, "Tokens per hour, read and written, of each API key; 0: no limit.", _QUOTA)
    max_running: int = _limit(8, "Texts written at the same time, at most.", Range(1))
    max_queued: int = _limit(64, "Waiting texts, at most; more get status 429.", Range(0))
    memory_bytes: int = _limit(
        1 << 30, "Memory in MiB for the KV caches of running texts; default: 80 % of the memory that is free after "
        "loading the model.", Range(1), option="memory-mib", unit=MiB)
    unknown_parameters: str = _limit(
        "refuse", "Unknown parameters of a body: refuse (status 400), or warn: log their names and leave them out.",
        ("refuse", "warn"))
    snapshots: SnapshotOptions = field(default_factory=SnapshotOptions)
    max_body_bytes: int = _limit(
        8 * MiB, "Largest request body in MiB; larger ones get status 413.",
        Range(1 / 1024, 1 << 20, words="above 0 (1 KiB or more), at most 1048576"), option="max-body-mib", unit=MiB)
    max_choices: int = _limit(32, "Maximum number of texts per request.", Range(1))
    max_connections: int = _limit(1024, "Open connections, at most.", Range(1))
    # An address is one of IPv4, or a network of 64 bits of IPv6.
    max_connections_per_address: int = _limit(512, "Open connections of one client address, at most.", Range(1))
    timeout_s: float = _limit(0.0, "Time limit of a request in seconds; 0: none.", Range(0), option="timeout")
    stall_s: float = _limit(60.0, "Seconds for a client to read the next part of a stream, or to send a body.",
                            _INTERVAL, option="stall")
    detach_s: float = _limit(600.0, "Seconds that a detached text goes on, and is kept, without a reader.", _INTERVAL,
                             option="detach")
    drain_s: float = _limit(30.0, "Seconds that running texts get after SIGTERM.", Range(0), option="drain")
    journal_from: int = _limit(1024, "Texts of at least this many tokens always have a journal.", Range(1))
    keep_finished: int = _limit(200, "Number of finished journals to keep.", Range(0))
    keep_cut_s: float = _limit(30 * 86400.0, "Days to keep journals of unfinished texts.", Range(0),
                               option="keep-cut-days", unit=86400)
    journals_bytes: int = _limit(10 << 30, "MiB of all journals; beyond it the oldest are removed.", Range(0),
                                 option="journals-mib", unit=MiB)
    disk_floor_bytes: int = _limit(256 * MiB, "Free MiB of the disk below which no journal begins.", Range(0),
                                   option="disk-floor-mib", unit=MiB)
    progress_s: float = _limit(5.0, "Seconds between progress comments in a stream.", _INTERVAL, option="progress")

    def __post_init__(self) -> None:
        for name, each in settings_of(ServerSettings).items():
            value = getattr(self, name)
            if isinstance(each.allowed, Range) and value is not None:
                each.allowed.check(each.flag, value if each.unit == 1 else value / each.unit)
            elif each.allowed:
                each.require(value, each.flag)
        if not self.is_local and not self.api_keys and not self.allows_no_key:
            raise UsageError(f"--host {self.host} is open to other machines, and there is no key; set "
                             "LONGDRAFT_API_KEY or --api-key-file, or confirm with --no-key that anyone may use it")
        self._check_keys()
        self._check_certificate()
        for host in self.allowed_hosts:
            check(bool(_HOST.fullmatch(host)), "--allowed-host", host, "a name or an address, such as writer.local",
                  "leave scheme and port out")
        for origin in self.cors_origins:
            check(bool(_ORIGIN.fullmatch(origin)), "--cors-origin", origin, "an origin such as https://example.org",
                  "list each origin; wildcards would let any web page use the server")

    @classmethod
    def from_options(cls, given: Mapping[str, Any], model: str, memory_bytes: int | None = None) -> ServerSettings:
        """The settings of options, by their names in SERVE_OPTIONS. Raises UsageError for what cannot be used.

        model         the name for clients, unless the options have one
        memory_bytes  the budget for caches, unless the options have one
        """
        keys = read_keys(tuple(given["api_keys"] or ()), given["api_key_file"])
        folder = given["journals"]
        chosen: dict[str, Any] = {
            "api_keys": tuple(keys), "key_labels": tuple(keys.values()),
            "journals": None if folder == "none" else Path(folder) if folder else default_journal_folder(),
            "snapshots": SnapshotOptions.parse(given["snapshot"], given["snapshot_max"])}
        if memory_bytes is not None:
            chosen["memory_bytes"] = memory_bytes
        for name, each in settings_of(cls).items():
            if (value := given[name]) is None:
                continue
            if isinstance(each.allowed, Range) and each.unit != 1:
                each.allowed.check(each.flag, value)  # before it becomes a whole number
                value *= each.unit
                value = int(min(value, sys.maxsize)) if each.type is int else value
            chosen[name] = tuple(value) if isinstance(value, list) else value
        path = Path(model)  # whose folders are no business of clients
        name = path.stem if path.is_file() else path.resolve().name if path.is_dir() else model
        return cls(**{**chosen, "model_name": given["model_name"] or name})

    def _check_keys(self) -> None:
        for name in ("key_requests", "key_tokens"):
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


LOGGING = (
    Setting("log_format", str, "text", "json or text.", ("json", "text"), panel="Serving", has_env=True),
    Setting("log_level", str, "info", "debug, info, warning or error.", ("debug", "info", "warning", "error"),
            panel="Serving", has_env=True))
_OWN = settings_of(ServerSettings)
SERVE_OPTIONS = (
    Setting("api_keys", tuple[str, ...], None, option="api-key", panel="Serving",
            help="Key required for everything except /health. Repeatable. Also LONGDRAFT_API_KEY."),
    Setting("api_key_file", Path, None, "File of keys, one per line, each followed by an optional label.",
            panel="Serving", has_env=True),
    Setting("journals", str, "", panel="Serving", has_env=True,
            help="Folder of journals; 'none': no journals; default: $XDG_STATE_HOME/longdraft/journals."),
    *LOGGING,
    # None: the default of these depends on the model.
    *(_OWN | {name: replace(_OWN[name], default=None) for name in ("model_name", "memory_bytes")}).values(),
    replace(CACHE_RAM, shown="", panel="Limits", has_env=True,
            help="MiB of that memory for the prefix tree: keys and values of earlier texts, for texts that begin "
                 "alike; 0: off; default: a quarter, at most 8192, and 0 on CUDA."),
    replace(SNAPSHOT, panel="Limits", has_env=True,
            help="Keep keys and values beside journals, so that resuming reads a file instead of the text: auto (on "
                 "the CPU), never or always."),
    replace(SNAPSHOT_MAX, panel="Limits", has_env=True,
            help="GiB of all snapshots together; beyond it the oldest are removed."),
)
"""The options of `longdraft serve`: those of `ServerSettings`, and those from which it follows."""


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
        lines = read_text(str(file), "--api-key-file").splitlines()
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
    from longdraft.system.machine import available_memory  # needs PyTorch

    free = available_memory() if device_free is None else device_free
    return max(MiB, int(free * _USABLE_SHARE))


def default_journal_folder() -> Path:
    """The folder of journals without --journals: $XDG_STATE_HOME/longdraft/journals."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "longdraft" / "journals"
