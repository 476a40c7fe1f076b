"""`longdraft models` and `longdraft doctor`: list the models on this machine, and describe the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from longdraft.cli.options import OptionValues, engine_options, with_option_groups
from longdraft.engine.settings import SETTINGS
from longdraft.errors import UsageError

_CONTEXTS = (4096, 100_000)  # tokens, for the estimated time per token
_READ_BYTES = 1 << 29  # buffer for measuring the bandwidth; larger than any cache
_MAX_WIDTH = 400  # characters of a table
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@with_option_groups
def models(
    *,
    loading: Annotated[OptionValues, engine_options([SETTINGS["cache_dir"]], "Options")],
    as_json: _Json = False,
) -> None:
    """List the models on this machine: bundled, in the hub's cache, of Ollama and of LM Studio."""
    from longdraft.checkpoint import config_file, inventory

    entries = inventory.models_here(loading["cache_dir"])
    if as_json:
        print(json.dumps([model._asdict() | {"runs": not model.problem} for model in entries], indent=2))
        return
    home = f"{Path.home()}/"
    _table([{"model": model.model.replace(home, "~/", 1), "from": model.place, "format": model.format,
             "parameters": model.parameters or "", "size": f"{model.nbytes / 1e9:,.2f} GB",
             "context": model.context or "", "runs": "no" if model.problem else "yes"} for model in entries])
    if any(model.problem for model in entries):
        print("\n`longdraft doctor --model NAME` says why a model does not run.")
    print(f"\nCheckpoints of these model families work too ({', '.join(config_file.SUPPORTED)}): --model FOLDER, "
          "--model FILE.gguf, or --model owner/name from the hub.")


@with_option_groups
def doctor(
    *,
    loading: Annotated[OptionValues, engine_options(
        [SETTINGS[name] for name in ("model", "file", "cache_dir", "offline")], "Options",
        model=dict(default=None, help="Show what this model (bundled name, folder, GGUF file or hub id) needs and how "
                                      "fast it can be here, or why it does not run; from its config.json or header "
                                      "alone."))],
    as_json: _Json = False,
) -> None:
    """Show versions, hardware and kernels, with what is missing; or what a model needs."""
    model = loading.pop("model")
    if model is None and any(loading.values()):
        raise UsageError("--file, --cache-dir and --offline apply to a model; give --model with them")
    report = _report() if model is None else _needs(model, **loading)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    shown = report if model is None else _in_words(report)
    width = max(len(name) for name in shown)
    for name, value in shown.items():
        print(f"{name:{width}}  {value}")


def _needs(model: str, file: str | None, cache_dir: Path | None, offline: bool) -> dict[str, Any]:
    """The memory that a model needs, and a lower bound of its time per token, in bfloat16 on the CPU."""
    from longdraft.checkpoint import config_file, hub, sizing
    from longdraft.checkpoint.checkpoint import require_tensors
    from longdraft.checkpoint.tensor_files import TensorFiles, has_weights
    from longdraft.parts import draft_copy, public_heads
    from longdraft.parts.heads import require_model
    from longdraft.system import machine

    model = hub.with_file(model, file)
    folder = hub.resolve(model, hub.Hub(cache_dir=cache_dir, offline=offline), is_config_enough=True)
    require_model(folder)
    parsed = config_file.read_config(folder)
    if folder.is_file() or has_weights(folder):  # not of the hub, whose weights are not downloaded for this
        require_tensors(TensorFiles(folder), parsed)
    has_mxfp4 = sizing.has_mxfp4(folder, parsed)
    sizes = sizing.model_sizes(parsed, has_mxfp4=has_mxfp4)
    copy_format, copy_bytes = draft_copy.copy_size(parsed, sizes)
    memory = machine.memory_bytes()
    bandwidth = machine.read_bandwidth(_READ_BYTES)
    kept = sizing.kept_sizes(folder, parsed)
    return {
        "model": model,
        "dtype": "bfloat16",
        "experts": "mxfp4" if has_mxfp4 else None,
        "parameters": sizes.parameters,
        "weights_bytes": sizes.weights_bytes,
        "bytes_per_token": sizes.read_bytes,
        "quantized_bytes": {name: sizing.quantized_bytes(parsed, name) for name in ("int8", "int4")},
        "draft_copy": copy_format,
        "draft_copy_bytes": copy_bytes,
        "cache_bytes_per_1k_tokens": 1024 * sizes.cache_bytes_per_token,
        "state_bytes": sizes.state_bytes,
        "context_limit": sizes.context_limit,
        "memory_bytes": memory,
        "max_context_in_memory": None if memory is None else sizes.max_context(memory, copy_bytes),
        "read_bandwidth_gb_per_s": bandwidth / 1e9,
        "ms_per_token": {str(context): sizes.ms_per_token(context, bandwidth) for context in _CONTEXTS},
        "quantize_file": None if kept is None else {
            "weights_bytes": kept.weights_bytes,
            "bytes_per_token": kept.read_bytes,
            "max_context_in_memory": None if memory is None else kept.max_context(memory),
            "ms_per_token": {str(context): kept.ms_per_token(context, bandwidth) for context in _CONTEXTS},
        },
        "public_heads": [{"target": target.repository, **head._asdict(), "loads": not head.lacks}
                         for target in public_heads.fitting_targets(model, parsed) for head in target.heads],
    }


def _in_words(needs: dict[str, Any]) -> dict[str, str]:
    limit, kept = needs["context_limit"], needs["quantize_file"]
    times = {f"at {int(context):,} tokens": f"{ms:,.1f} ms per token at least, without drafts"
             + (f"; the model's limit is {limit:,}" if int(context) > limit else "")
             for context, ms in needs["ms_per_token"].items()}
    quantized = " and ".join(f"{size / 1e9:,.2f} GB in {name}" for name, size in needs["quantized_bytes"].items())
    copy = (f"{needs['draft_copy_bytes'] / 1e9:,.2f} GB in {needs['draft_copy']}, beside the weights"
            if needs["draft_copy_bytes"] else "none: the weights stay in the processor's caches")
    memory = "" if needs["memory_bytes"] is None else f" ({needs['memory_bytes'] / 1e9:.1f} GB)"
    dtype = "bfloat16 with experts in MXFP4, as in the file" if needs["experts"] else "bfloat16"
    return {
        "model": needs["model"],
        "parameters": f"{needs['parameters']:,}",
        "weights": f"{needs['weights_bytes'] / 1e9:,.2f} GB in {dtype}, {quantized} quantised",
        **({"read for a token": f"{needs['bytes_per_token'] / 1e9:,.2f} GB of them"}
           if needs["bytes_per_token"] < needs["weights_bytes"] else {}),
        "draft copy": copy,
        "cache": f"{needs['cache_bytes_per_1k_tokens'] / 1e6:,.1f} MB for 1,024 tokens",
        **({"states": f"{needs['state_bytes'] / 1e6:,.1f} MB, whatever the length of the text"}
           if needs["state_bytes"] else {}),
        f"fits here{memory}": _room(needs, limit),
        "read bandwidth": f"{needs['read_bandwidth_gb_per_s']:.1f} GB/s, measured now",
        **times,
        **({"as in the file (the default)": f"{kept['weights_bytes'] / 1e9:,.2f} GB of weights, "
            f"{kept['bytes_per_token'] / 1e9:,.2f} GB of them read for a token; fits here: {_room(kept, limit)}; at "
            f"{_CONTEXTS[0]:,} tokens {kept['ms_per_token'][str(_CONTEXTS[0])]:,.1f} ms per token at least"}
           if kept else {}),
        "public heads": _heads_in_words(needs["public_heads"]),
    }


def _heads_in_words(heads: list[dict[str, Any]]) -> str:
    """The public heads for a model, by target, and how one is taken."""
    from longdraft.parts.public_heads import PublicHead

    if not heads:
        return "none known; `longdraft train eagle` and `train block` train one"
    by_target: dict[str, list[str]] = {}
    for head in heads:
        words = str(PublicHead(*(head[name] for name in PublicHead._fields)))
        by_target.setdefault(head["target"], []).append(words)
    known = ". ".join(f"For {target}: {'; '.join(words)}" for target, words in by_target.items())
    if len(by_target) > 1:
        return f"{known}. These models have the same sizes; give the head of yours with --heads"
    is_usable = any(head["loads"] and head["repository"] for head in heads)
    return known + (". --heads auto takes the first that loads" if is_usable else "")


def _room(needs: dict[str, Any], limit: int) -> str:
    """How long a text fits into this machine's memory, in words."""
    fits = needs["max_context_in_memory"]
    if fits is None:
        return "unknown: this system does not report its memory"
    if not fits:
        return "nothing: the weights alone are too large"
    return f"{fits:,} tokens" + (" (the model's limit)" if fits == limit else "")


def _report() -> dict[str, Any]:
    import platform

    import numpy
    import torch

    from longdraft import drafters, kernels
    from longdraft.checkpoint import hub
    from longdraft.kernels.cpu import native
    from longdraft.system import machine
    from longdraft.version import __version__

    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = kernels.choose(device, "bfloat16")
    return {
        "longdraft": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": kernels.threads(chosen),
        "memory_bytes": machine.memory_bytes(),
        "kernels": chosen.name,
        "kernels_available": ", ".join(kernels.available()),
        "kernels_missing": native.IMPORT_ERROR or "none",
        "exactness": "bit-exact" if chosen.is_row_invariant else "distribution",
        "drafters": ", ".join(drafters.DRAFTERS),
        "bundled_models": ", ".join(hub.bundled_models()),
    }


def _table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*(f"{value:,}" if type(value) is int else str(value) for value in row.values()))
    console = Console()
    Console(width=max(console.width, _MAX_WIDTH)).print(table)  # names are not cut off
