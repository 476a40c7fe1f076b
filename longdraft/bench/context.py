"""What a model makes of a long context: nats per token by place, over whole texts that it has not seen.

    longdraft bench context --text novel.txt --text another.txt --edges 1024,8192,32768,65536,100000

A model whose context is real does not get worse with the place; one that only declares it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longdraft.errors import check
from longdraft.files import read_text
from longdraft.model import hub
from longdraft.model.tokenizer import Tokenizer
from longdraft.model.transformer import Transformer, chain_rows

_CHUNK = 256  # rows of a forward, whose logits are held at once


def read(model: str, paths: Sequence[Path], length: int) -> list[list[int]]:
    """The first `length` tokens of each text, and the one behind them. UsageError where one is shorter."""
    tokenizer = Tokenizer(hub.resolve(model))
    found = []
    for path in paths:
        ids = tokenizer.encode(read_text(str(path), "--text"))[: length + 1]
        check(len(ids) > length, f"tokens in {path.name}", len(ids), f"at least {length + 1}, one beyond the edges")
        found.append(ids)
    return found


def measure(model: Transformer, texts: Sequence[Sequence[int]], edges: Sequence[int]) -> list[dict[str, Any]]:
    """A record for each stretch between edges: the mean over texts and places."""
    length = edges[-1]
    total = torch.zeros(length, dtype=torch.float64)
    for ids in texts:
        done = 0
        for nats in nats_of(model.for_length(length), ids):
            total[done : done + len(nats)] += nats
            done += len(nats)
    mean = total / len(texts)
    return [{"from": start, "until": end, "nats_per_token": float(mean[start:end].mean()), "texts": len(texts)}
            for start, end in zip([0, *edges], edges, strict=False)]


def nats_of(model: Transformer, ids: Sequence[int]) -> Iterator[Tensor]:
    """Nats of each token but the first, given all before it: float64 [rows], a chunk after the other."""
    cache = model.new_cache()
    for start in range(0, len(ids) - 1, _CHUNK):
        rows = ids[start : min(start + _CHUNK, len(ids) - 1)]
        logits = model.logits(model.forward(chain_rows(rows, start), cache).hidden)
        cache.commit(range(len(rows)))
        following = torch.tensor(ids[start + 1 : start + 1 + len(rows)])
        yield torch.nn.functional.cross_entropy(logits.double(), following, reduction="none")
