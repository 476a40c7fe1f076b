"""longdraft writes ultra-long texts by speculative decoding: faster, and exactly the text of plain decoding.

    import longdraft
    engine = longdraft.load("novelist")
    for event in engine.generate("It was", longdraft.SamplingParams(max_new_tokens=1000, seed=7)):
        print(event.text, end="")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longdraft.version import __version__

if TYPE_CHECKING:
    from longdraft.engine.batching import Batch
    from longdraft.engine.engine import Engine
    from longdraft.engine.generation import Generation
    from longdraft.engine.huggingface import from_transformers, hf_generate
    from longdraft.engine.loading import load, resume
    from longdraft.errors import JournalError, LongdraftError, ModelError, NumericalError, UsageError
    from longdraft.request.events import Event
    from longdraft.request.sampling_params import SamplingParams

_HOME = {
    "Batch": "engine.batching", "Event": "request.events", "SamplingParams": "request.sampling_params",
    "Engine": "engine.engine", "Generation": "engine.generation", "load": "engine.loading", "resume": "engine.loading",
    "JournalError": "errors", "LongdraftError": "errors", "ModelError": "errors", "NumericalError": "errors",
    "UsageError": "errors",
    "from_transformers": "engine.huggingface", "hf_generate": "engine.huggingface",
}
__all__ = ["Batch", "Engine", "Event", "Generation", "JournalError", "LongdraftError", "ModelError", "NumericalError",
           "SamplingParams", "UsageError", "__version__", "from_transformers", "hf_generate", "load", "resume"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `longdraft --help` does not wait for PyTorch."""
    if name not in _HOME:
        raise AttributeError(f"module 'longdraft' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"longdraft.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
