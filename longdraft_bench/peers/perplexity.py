"""Perplexity of a text by longdraft and by llama.cpp, with the numbers of the same GGUF file.

Both programs read the same tokens, with whole numbers of 8 bits for the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from longdraft import kernels
from longdraft.kernels.weights import FILE
from longdraft.report.table import Table
from longdraft.report.turns import Record
from longdraft_bench.machine.roofline import ModelCopies
from longdraft_bench.peers.process import PEERS, PeerProcess
from longdraft_bench.texts.perplexity import token_nats

_DTYPES = ("float32", "bfloat16")


def measure(path: Path, ids: Sequence[int], python: str, limit_s: float, *, repacks: bool) -> Record:
    """The record of one file. Raises PeerError if llama.cpp fails.

    repacks  whether llama.cpp repacks the weights
    """
    with PeerProcess(PEERS["llama.cpp"]["llama.cpp"], python) as process:
        about = process.open(path, len(ids), limit_s, repacks=repacks)
        theirs = math.exp(process.ask(limit_s, do="nats", tokens=list(ids))["nats_per_token"])
    ours = {dtype: math.exp(_nats_per_token(path, ids, dtype)) for dtype in _DTYPES}
    return {"file": path.name, "version": about["version"], "llama_cpp": theirs, **ours,
            **{f"{dtype}_to_llama_cpp": value / theirs for dtype, value in ours.items()}}


def _nats_per_token(path: Path, ids: Sequence[int], dtype: str) -> float:
    model = ModelCopies(str(path), kernels.choose("cpu", dtype), FILE).model.for_length(len(ids))
    return sum(float(nats.sum()) for nats in token_nats(model, ids)) / (len(ids) - 1)


def table(records: Sequence[Record]) -> Table:
    return Table.of_records("Perplexity of GGUF files", (
        ("file", "file", ""), ("llama.cpp", "llama_cpp", ".3f"), ("float32", "float32", ".3f"),
        ("bfloat16", "bfloat16", ".3f"), ("float32 to llama.cpp", "float32_to_llama_cpp", ".4f"),
        ("bfloat16 to llama.cpp", "bfloat16_to_llama_cpp", ".4f")), records)
