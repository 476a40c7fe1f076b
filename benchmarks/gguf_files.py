"""Write a Llama folder as GGUF files: in bfloat16, and from that in the types that llama.cpp itself quantises to.

    python benchmarks/stretched_model.py --like qwen2.5-0.5b OUT
    peers/bin/python benchmarks/gguf_files.py OUT --types "Q8_0 Q4_0 Q4_K_M"    # OUT-BF16.gguf, OUT-Q8_0.gguf, ...

It needs the packages llama-cpp-python, gguf, safetensors and torch, and not longdraft.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path

WORKERS = Path(__file__).parents[1] / "longdraft_bench" / "workers"
TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}  # llama_ftype of llama.h


def quantise(source: Path, target: Path, kind: str, threads: int) -> None:
    """Quantise a GGUF file by llama.cpp's own rules for a type, which keep some matrices in better ones."""
    import llama_cpp as llama

    settings = llama.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = TYPES[kind], threads
    status = llama.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings))
    if status:
        raise RuntimeError(f"llama.cpp could not write {target.name}: status {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="Q8_0 Q4_0 Q4_K_M", help=f"with spaces between them: {' '.join(TYPES)}")
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp; default: 2")
    parser.add_argument("folder", type=Path, help="folder of a Llama; the files are written beside it")
    given = parser.parse_args()
    kinds = given.types.split()
    if unknown := [kind for kind in kinds if kind not in TYPES]:
        parser.error(f"--types has {unknown[0]}; allowed: {', '.join(TYPES)}")
    if not (given.folder / "config.json").is_file():
        parser.error(f"{given.folder} has no config.json; name the folder of a model")
    sys.path.insert(0, str(WORKERS))
    from with_llama_cpp import convert

    folder = given.folder.resolve()
    unquantised = folder.with_name(f"{folder.name}-BF16.gguf")
    convert(folder, unquantised, "bf16", has_tokenizer=True)
    for kind in kinds:
        quantise(unquantised, folder.with_name(f"{folder.name}-{kind}.gguf"), kind, given.threads)


if __name__ == "__main__":
    main()
