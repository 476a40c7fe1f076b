"""Where the memory of a process is: a model loaded, after a prompt, and after some tokens; `longdraft bench memory`.

    longdraft bench memory stretched --quantize int4 --prompt-file novel.txt --prefill 1000
    longdraft bench memory stretched --prompt-file novel.txt --prefill 4000 --drafter auto

A row for each stage, in MB:

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

import ctypes
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from longdraft import kernels
from longdraft.checkpoint import hub
from longdraft.engine.engine import Engine
from longdraft.engine.loading import load
from longdraft.kernels.cpu import native
from longdraft.report.table import Table
from longdraft.report.turns import Record
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation.abilities import memory_of
from longdraft.system import machine
from longdraft.text.tokenizer import Tokenizer

_CHARACTERS_PER_TOKEN = 8  # at most, on average; the rest of a long file is not encoded
_COLUMNS = ("resident", "held", "files", "malloc", "free", "workspace", "returned")


class MemoryPlan(NamedTuple):
    """What the process does: it loads a model, reads `prefill` tokens and writes `max_new_tokens`."""

    model: str
    prefill: int
    max_new_tokens: int
    quantize: str
    drafter: str
    threads: int


class _Mallinfo(ctypes.Structure):  # struct mallinfo2 of glibc
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


class _Heap(NamedTuple):
    """Bytes that the C library gave to its callers, and those that they gave back and it keeps."""

    given: int
    kept: int


def _heap() -> _Heap:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return _Heap(info.uordblks + info.hblkhd, info.fordblks)


def _resident(name: str = "VmRSS") -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def _tokenizer_bytes(model: str) -> int:
    """What the tokenizer adds to the resident size."""
    before = _resident()
    tokenizer = Tokenizer(hub.resolve(model))
    machine.return_free_memory()
    added = _resident() - before
    del tokenizer
    return added


def _weights_bytes(engine: Engine) -> int:
    """Of the target and of its draft copy. A table of embeddings that is no head is read by rows."""
    model = engine.model
    copy = engine.loaded.draft_copy
    embedding = model.weights.embedding
    own = 0 if embedding is model.weights.head else embedding.nbytes
    return model.weights_bytes + own + (copy.weights_bytes if copy else 0)


def measure(plan: MemoryPlan, text: str) -> Record:
    """The figures of each stage, in bytes. Raises AttributeError where the C library is not glibc."""
    torch.set_num_threads(plan.threads)
    chosen = kernels.choose("cpu", "bfloat16")
    chosen.linear(torch.ones(1, 64, dtype=chosen.dtype), chosen.pack(torch.ones(64, 64)))  # the first call maps much
    before = _resident()
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as other:
        tokenizer = other.submit(_tokenizer_bytes, plan.model).result()
    stages: list[Record] = []

    def add(stage: str, held: int) -> None:
        heap = _heap()
        resident = _resident() - before
        figures = {"resident": resident, "held": held, "files": _resident("RssFile"), "malloc": heap.given,
                   "free": heap.kept, "workspace": native.workspace_bytes()}
        machine.return_free_memory()
        stages.append({"stage": stage, "to_held": (resident - tokenizer) / held, **figures,
                       "returned": resident - (_resident() - before)})

    engine = load(plan.model, quantize=plan.quantize, drafter=plan.drafter, device="cpu", threads=plan.threads)
    weights = _weights_bytes(engine)
    tree = engine.loaded.prefixes
    add("loaded", weights)
    params = SamplingParams(max_new_tokens=plan.max_new_tokens, min_p=0.1, seed=7)
    prompt = engine.encode(text[: _CHARACTERS_PER_TOKEN * plan.prefill])[: plan.prefill]
    with engine.generate(prompt, params) as generation:
        for stage in ("first token", "last token"):
            for _ in generation:
                if stage == "first token":
                    break
            held = generation.step.cache.nbytes + memory_of(generation.step.drafter)
            add(stage, weights + held + (tree.nbytes if tree else 0))
    return {"before_bytes": before, "tokenizer_bytes": tokenizer, "peak_bytes": _resident("VmHWM") - before,
            "stages": stages}


def table(document: Record) -> Table:
    stages = [{"stage": stage["stage"], "to_held": stage["to_held"],
               **{name: stage[name] / 1e6 for name in _COLUMNS}} for stage in document["stages"]]
    title = (f"Memory, MB; Python, PyTorch, kernels {document['before_bytes'] / 1e6:.1f}, "
             f"the tokenizer {document['tokenizer_bytes'] / 1e6:.1f}")
    return Table.of_records(title, (("stage", "stage", ""), ("to held", "to_held", ".3f"),
                                    *((name, name, ".1f") for name in _COLUMNS)), stages)
