"""Write a Llama folder as GGUF files: in bfloat16, and from that in the types that llama.cpp itself quantises to.

    python gguf_files.py FOLDER THREADS Q8_0=7 Q4_0=2    # FOLDER-BF16.gguf, FOLDER-Q8_0.gguf, ...

Each type has its number in llama_ftype of llama.h.

`longdraft bench model gguf` runs it. It needs the packages llama-cpp-python, gguf, safetensors and torch, and not
longdraft.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp as llama
from with_llama_cpp import convert  # type: ignore[import-not-found]  # a module of this folder


def quantise(source: Path, target: Path, kind: int, threads: int) -> None:
    """Quantise a GGUF file by llama.cpp's own rules for a type, which keep some matrices in better ones."""
    settings = llama.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = kind, threads
    status = llama.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings))
    if status:
        raise RuntimeError(f"llama.cpp could not write {target.name}: status {status}")


def main(folder: Path, threads: int, *kinds: str) -> None:
    unquantised = folder.with_name(f"{folder.name}-BF16.gguf")
    convert(folder, unquantised, "bf16", has_tokenizer=True)
    for name, number in (kind.split("=") for kind in kinds):
        quantise(unquantised, folder.with_name(f"{folder.name}-{name}.gguf"), int(number), threads)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), *sys.argv[3:])
