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
    from longdraft.batching import Batch
    from longdraft.core import Event, SamplingParams
    from longdraft.engine import Engine
    from longdraft.errors import JournalError, LongdraftError, ModelError, NumericalError, UsageError
    from longdraft.generation import Generation
    from longdraft.huggingface import from_transformers, hf_generate
    from longdraft.loading import load, resume

_HOME = {
    "Batch": "batching", "Event": "core", "SamplingParams": "core",
    "Engine": "engine", "Generation": "generation", "load": "loading", "resume": "loading",
    "JournalError": "errors", "LongdraftError": "errors", "ModelError": "errors", "NumericalError": "errors",
    "UsageError": "errors",
    "from_transformers": "huggingface", "hf_generate": "huggingface",
}
__all__ = ["Batch", "Engine", "Event", "Generation", "JournalError", "LongdraftError", "ModelError", "NumericalError",
           "SamplingParams", "UsageError", "__version__", "from_transformers", "hf_generate", "load", "resume"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `longdraft --help` does not wait for PyTorch."""
    if name not in _HOME:
        raise AttributeError(f"module 'longdraft' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"longdraft.{_HOME[name]}"), name)
