"""`longdraft serve`: a server with OpenAI's API, and a page at /."""

from __future__ import annotations

from typing import Annotated

from longdraft.cli.options import RUNNING, OptionValues, engine_options, option, with_option_groups
from longdraft.errors import missing_extra
from longdraft.server.settings import LOGGING, SERVE_OPTIONS, MiB, ServerSettings, cache_budget


@with_option_groups
def serve(
    *,
    serving: Annotated[OptionValues, engine_options(SERVE_OPTIONS)],
    loading: Annotated[OptionValues, engine_options()],
    quiet: Annotated[bool, option("Show no progress bar while the model is loaded.", RUNNING, "--quiet")] = False,
) -> int:
    """Serve a model with OpenAI's completions and chat API, streams, journals, metrics, and a page at /."""
    for each in LOGGING:
        each.require(serving[each.name], each.flag)
    try:
        from longdraft.server import logs, run
    except ImportError as error:
        raise missing_extra("`longdraft serve`", str(error.name), "serve") from error

    run.require_usable(ServerSettings.from_options(serving, loading["model"]))  # fail before the model is loaded
    logs.configure_logging(serving["log_format"], serving["log_level"])
    from longdraft.cli.display import load_with_bar
    from longdraft.engine.loading import MAX_CACHE_RAM

    cache_ram = serving["cache_ram"]
    engine = load_with_bar({**loading, "cache_ram": cache_ram}, quiet=quiet)
    settings = ServerSettings.from_options(serving, loading["model"],
                                           cache_budget(engine.model.kernels.free_bytes()))
    if engine.loaded.prefixes is not None and cache_ram is None:
        engine.loaded.prefixes.limit(min(MAX_CACHE_RAM * MiB, settings.memory_bytes // 4))
    return run.run_server(engine, settings)
