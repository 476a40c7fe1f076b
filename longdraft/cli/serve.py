"""`longdraft serve`: a server with OpenAI's API, and a page at /."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from longdraft.cli.option_groups import Loading, with_option_groups
from longdraft.cli.options import RUNNING, option
from longdraft.errors import UsageError, check

_SERVING, _LIMITS = "Serving", "Limits"


def _env(text: str, name: str, *, limits: bool = False) -> Any:
    """An option that an environment variable can set too."""
    return typer.Option(help=text, rich_help_panel=_LIMITS if limits else _SERVING, envvar=f"LONGDRAFT_{name}")


@with_option_groups
def serve(
    host: Annotated[str, _env("Address to listen on; 0.0.0.0: all. Give a key then.", "HOST")] = "127.0.0.1",
    port: Annotated[int, _env("Port; 0: any free one.", "PORT")] = 8000,
    api_key: Annotated[list[str] | None, option("Key required for everything except /health. Repeatable. Also "
                                                "LONGDRAFT_API_KEY.", _SERVING, "--api-key")] = None,
    api_key_file: Annotated[Path | None, _env("File of keys, one per line, each followed by an optional label.",
                                              "API_KEY_FILE")] = None,
    certfile: Annotated[Path | None, _env("TLS certificate chain (PEM); the server then speaks HTTPS.",
                                          "CERTFILE")] = None,
    keyfile: Annotated[Path | None, _env("Private key of --certfile (PEM), if that file does not hold it.",
                                         "KEYFILE")] = None,
    served_model_name: Annotated[str | None, _env("The model's name for clients; default: --model.",
                                                  "SERVED_MODEL_NAME")] = None,
    journals: Annotated[str, _env("Folder of journals; 'none': no journals; default: longdraft/journals in "
                                  "XDG_STATE_HOME.", "JOURNALS")] = "",
    cors_origin: Annotated[list[str] | None, option("Web origin that may call this server. Repeatable.", _SERVING,
                                                    "--cors-origin")] = None,
    allowed_host: Annotated[list[str] | None, option(
        "Host name that requests to a server without keys may use. Repeatable.", _SERVING,
        "--allowed-host")] = None,
    no_key: Annotated[bool, option("Let anyone who can reach --host use the server, without a key.", _SERVING,
                                   "--no-key")] = False,
    log_format: Annotated[str, _env("json or text.", "LOG_FORMAT")] = "text",
    log_level: Annotated[str, _env("debug, info, warning or error.", "LOG_LEVEL")] = "info",
    reasoning_format: Annotated[str, _env("The thinking of models that mark it, in chat replies: auto: "
                                          "reasoning_content; none: part of content.", "REASONING_FORMAT")] = "auto",
    key_requests: Annotated[int, _env("Requests per minute of each API key; 0: no limit.", "KEY_REQUESTS",
                                      limits=True)] = 0,
    key_tokens: Annotated[int, _env("Tokens per hour, read and written, of each API key; 0: no limit.", "KEY_TOKENS",
                                    limits=True)] = 0,
    max_running: Annotated[int, _env("Texts written at the same time, at most.", "MAX_RUNNING", limits=True)] = 8,
    max_queued: Annotated[int, _env("Waiting texts, at most; more get status 429.", "MAX_QUEUED", limits=True)] = 64,
    memory_mib: Annotated[int | None, _env("Memory in MiB for the KV caches of running texts; default: 80 % of the "
                                           "memory that is free after loading the model.", "MEMORY_MIB",
                                           limits=True)] = None,
    cache_ram: Annotated[int | None, _env("MiB of that memory for the prefix tree: keys and values of earlier texts, "
                                          "for texts that begin alike; 0: off; default: a quarter, at most 8192, and 0 "
                                          "on CUDA.", "CACHE_RAM", limits=True)] = None,
    unknown_parameters: Annotated[str, _env("Unknown parameters of a body: refuse (status 400), or warn: log their "
                                            "names and leave them out.", "UNKNOWN_PARAMETERS",
                                            limits=True)] = "refuse",
    snapshot: Annotated[str, _env("Keep keys and values beside journals, so that resuming reads a file instead of the "
                                  "text: auto (on the CPU), never or always.", "SNAPSHOT", limits=True)] = "auto",
    snapshot_max: Annotated[float, _env("GiB of all snapshots together; beyond it the oldest are removed.",
                                        "SNAPSHOT_MAX", limits=True)] = 8,
    max_body_mib: Annotated[float, _env("Largest request body in MiB; larger ones get status 413.", "MAX_BODY_MIB",
                                         limits=True)] = 8,
    max_choices: Annotated[int, _env("Maximum number of texts per request.", "MAX_CHOICES", limits=True)] = 32,
    max_connections: Annotated[int, _env("Open connections, at most.", "MAX_CONNECTIONS", limits=True)] = 1024,
    max_connections_per_address: Annotated[int, _env(
        "Open connections of one client address, at most.", "MAX_CONNECTIONS_PER_ADDRESS", limits=True)] = 512,
    timeout: Annotated[float, _env("Time limit of a request in seconds; 0: none.", "TIMEOUT", limits=True)] = 0,
    stall: Annotated[float, _env("Seconds for a client to read the next part of a stream, or to send a body.", "STALL",
                                  limits=True)] = 60,
    drain: Annotated[float, _env("Seconds that running texts get after SIGTERM.", "DRAIN", limits=True)] = 30,
    journal_from: Annotated[int, _env("Texts of at least this many tokens always have a journal.", "JOURNAL_FROM",
                                      limits=True)] = 1024,
    keep_finished: Annotated[int, _env("Number of finished journals to keep.", "KEEP_FINISHED", limits=True)] = 200,
    keep_cut_days: Annotated[float, _env("Days to keep journals of unfinished texts.", "KEEP_CUT_DAYS",
                                         limits=True)] = 30,
    journals_mib: Annotated[int, _env("MiB of all journals; beyond it the oldest are removed.", "JOURNALS_MIB",
                                      limits=True)] = 10240,
    disk_floor_mib: Annotated[int, _env("Free MiB of the disk below which no journal begins.", "DISK_FLOOR_MIB",
                                        limits=True)] = 256,
    progress: Annotated[float, _env("Seconds between progress comments in a stream.", "PROGRESS",
                                    limits=True)] = 5,
    *,
    loading: Loading,
    quiet: Annotated[bool, option("Show no progress bar while the model is loaded.", RUNNING, "--quiet")] = False,
) -> int:
    """Serve a model with OpenAI's completions and chat API, streams, journals, metrics, and a page at /."""
    if log_format not in ("json", "text"):
        raise UsageError(f"--log-format is {log_format!r}; allowed: json or text")
    if log_level not in ("debug", "info", "warning", "error"):
        raise UsageError(f"--log-level is {log_level!r}; allowed: debug, info, warning or error")
    from longdraft.journal.snapshot_folder import SnapshotOptions

    try:
        from longdraft.server import logs, run
        from longdraft.server.settings import MiB, ServerSettings, cache_budget, default_journal_folder, read_keys
    except ImportError as error:
        raise UsageError(f"`longdraft serve` needs {error.name}; pip install 'longdraft[serve]'") from error

    check(0 < max_body_mib <= 1 << 20, "--max-body-mib", max_body_mib, "above 0, at most 1048576")
    root = None if journals == "none" else Path(journals) if journals else default_journal_folder()
    keys = read_keys(tuple(api_key or ()), api_key_file)
    given: dict[str, Any] = dict(
        host=host, port=port, model_name=served_model_name or loading["model"], api_keys=tuple(keys),
        key_labels=tuple(keys.values()), key_requests=key_requests, key_tokens=key_tokens, certfile=certfile,
        keyfile=keyfile, journals=root, journal_from=journal_from,
        keep_finished=keep_finished, keep_cut_s=keep_cut_days * 86400, journals_bytes=journals_mib * MiB,
        disk_floor_bytes=disk_floor_mib * MiB, max_running=max_running, max_queued=max_queued,
        max_body_bytes=int(max_body_mib * MiB), max_choices=max_choices, max_connections=max_connections,
        max_connections_per_address=max_connections_per_address, timeout_s=timeout, stall_s=stall,
        drain_s=drain, progress_s=progress, cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or ()), allows_no_key=no_key,
        unknown_parameters=unknown_parameters, reasoning_format=reasoning_format,
        snapshots=SnapshotOptions.parse(snapshot, snapshot_max))
    if memory_mib is not None:
        given["memory_bytes"] = memory_mib * MiB
    run.require_usable(ServerSettings(**given))  # fail before the model is loaded
    logs.configure_logging(log_format, log_level)
    from longdraft.cli.display import load_with_bar
    from longdraft.engine.loading import MAX_CACHE_RAM

    engine = load_with_bar({**loading, "cache_ram": cache_ram}, quiet=quiet)
    given.setdefault("memory_bytes", cache_budget(engine.model.kernels.free_bytes()))
    if engine.loaded.prefixes is not None and cache_ram is None:
        engine.loaded.prefixes.limit(min(MAX_CACHE_RAM * MiB, given["memory_bytes"] // 4))
    return run.run_server(engine, ServerSettings(**given))
