"""Where the memory of a process is: before a model is loaded, loaded, after a prompt, and after some tokens.

    python benchmarks/memory.py stretched --quantize int4 --prompt-file novel.txt --prefill 1000
    python benchmarks/memory.py stretched --prompt-file novel.txt --prefill 4000 --drafter auto

A line for each stage, in MB:

    to held     the process above Python, PyTorch, the kernels and the tokenizer, divided by what is held: 1 is ideal
    resident    of the process, above what Python, PyTorch and the kernels take before a model is loaded
    held        the weights and their draft copy, the cache, the prefix tree and the drafter's caches
    files       the part that the system can drop, because it is mapped from files
    malloc      what the C library gave to its callers; weights and large blocks of caches are not among it
    free        what callers gave back and the C library keeps
    workspace   of the compiled kernels, of all threads
    returned    what `malloc_trim` gives back, called after the line was measured
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import longdraft
from longdraft import kernels
from longdraft.kernels.cpu import native
from longdraft.system import machine
from longdraft.text.tokenizer import Tokenizer


class _Mallinfo(ctypes.Structure):  # struct mallinfo2 of glibc
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def _heap() -> tuple[int, int]:
    """Bytes that the C library gave to its callers, and those that they gave back and it keeps."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return found.uordblks + found.hblkhd, found.fordblks


def _resident(name: str = "VmRSS") -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def _tokenizer_bytes(folder: str) -> int:
    """What the tokenizer adds to the resident size."""
    before, tokenizer = _resident(), Tokenizer(Path(folder))
    machine.return_free_memory()
    found = _resident() - before
    del tokenizer
    return found


def _weights_bytes(engine: longdraft.Engine) -> int:
    """Of the target and of its draft copy. A table of embeddings that is no head is read by rows."""
    model, copy = engine.model, engine.loaded.draft_copy
    embedding = model.weights.embedding
    own = 0 if embedding is model.weights.head else embedding.nbytes
    return model.weights_bytes + own + (copy.weights_bytes if copy else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder")
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--prefill", type=int, default=1000, help="tokens of the prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--drafter", default="plain")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    chosen = kernels.choose("cpu", "bfloat16")
    chosen.linear(torch.ones(1, 64, dtype=chosen.dtype), chosen.pack(torch.ones(64, 64)))  # the first call maps much
    before, stages = _resident(), []
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as other:
        tokenizer = other.submit(_tokenizer_bytes, options.model).result()
    print(f"Python, PyTorch, kernels {before / 1e6:.1f} MB, the tokenizer {tokenizer / 1e6:.1f} MB")

    def show(stage: str, held: int) -> None:
        malloc, free = _heap()
        resident = _resident() - before
        figures = {"resident": resident, "held": held, "files": _resident("RssFile"), "malloc": malloc, "free": free,
                   "workspace": native.workspace_bytes()}
        machine.return_free_memory()
        figures["returned"] = resident - (_resident() - before)
        stages.append({"stage": stage, **figures})
        shown = "  ".join(f"{name} {value / 1e6:.1f}" for name, value in figures.items())
        print(f"{stage:12} to held {(resident - tokenizer) / held:.3f}  {shown}", flush=True)

    engine = longdraft.load(options.model, quantize=options.quantize, drafter=options.drafter, device="cpu",
                            threads=options.threads)
    weights, tree = _weights_bytes(engine), engine.loaded.prefixes
    show("loaded", weights)
    text = options.prompt_file.read_text(encoding="utf-8")[: 8 * options.prefill]
    params = longdraft.SamplingParams(max_new_tokens=options.max_new_tokens, min_p=0.1, seed=7)
    with engine.generate(engine.loaded.encode(text)[: options.prefill], params) as generation:
        for stage in ("first token", "last token"):
            for _ in generation:
                if stage == "first token":
                    break
            show(stage, weights + generation.cache_bytes + generation.drafter_bytes + (tree.nbytes if tree else 0))
    print(json.dumps({"before_bytes": before, "tokenizer_bytes": tokenizer,
                      "peak_bytes": _resident("VmHWM") - before, "stages": stages}))


if __name__ == "__main__":
    main()
