"""How well a model predicts a text: by quantisation (`bench perplexity`), by position in the text (`bench context`),
and by the format of a device's cache (`bench cache-formats`).

    longdraft bench perplexity --text novel.txt --quantize "none int8"
    longdraft bench context --text novel.txt --text another.txt --edges 1024,8192,32768,65536,100000
    longdraft bench cache-formats --text novel.txt --tokens 32768
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from longdraft.checkpoint import hub
from longdraft.drafters.auto.calibration import random_cache
from longdraft.errors import check
from longdraft.kernels.cuda.cache_format import CacheFormat
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.report.table import Table
from longdraft.speculation.logprobs import text_logprobs
from longdraft.system.files import read_text
from longdraft.text.tokenizer import Tokenizer
from longdraft_bench.machine.roofline import CachedText, ModelCopies, time_steps
from longdraft_bench.timing import in_rounds

_FORWARD_ROWS = 256  # rows of a forward
STEPS_PER_TURN = 4  # steps of plain decoding before the next setting's turn


def encode_file(model: str, path: Path, most: int, least: int, allowed: str) -> list[int]:
    """The first `most` tokens of a text file. Raises UsageError if there are fewer than `least`."""
    ids = Tokenizer(hub.resolve(model)).encode(read_text(str(path), "--text"))[:most]
    check(len(ids) >= least, f"tokens in {path.name}", len(ids), allowed)
    return ids


def by_quantization(models: Sequence[ModelCopies], ids: Sequence[int], context: int,
                    repeats: int) -> list[dict[str, Any]]:
    """A record for each setting: perplexity in whole windows of `context` tokens, bytes of weights, and speed.

    The settings take turns in decoding, so that a slow moment of the machine affects all.
    """
    texts = [CachedText(each.model, random_cache(each.model, context)) for each in models]
    rounds = in_rounds({str(index): partial(_step_ms, text) for index, text in enumerate(texts)}, repeats)
    records = []
    for each, times in zip(models, rounds.values(), strict=True):
        model = each.model.for_length(context)
        windows = [ids[start : start + context] for start in range(0, len(ids) - context + 1, context)]
        nats = [float(nats.sum()) for window in windows for nats in token_nats(model, window)]
        count = len(windows) * (context - 1)
        step = median(times)
        mean = sum(nats) / count
        records.append({
            "quantize": each.quantize, "nats_per_token": mean, "perplexity": math.exp(mean),
            "predicted_tokens": count, "weights_bytes": each.weights_bytes, "step_ms": step, "step_ms_low": min(times),
            "step_ms_high": max(times), "tokens_per_second": 1e3 / step,
            "to_first": median(rounds["0"]) / step})
    return records


def _step_ms(text: CachedText) -> float:
    return time_steps(text, STEPS_PER_TURN)["step_ms"]


def by_position(model: Transformer, texts: Sequence[Sequence[int]], edges: Sequence[int]) -> list[dict[str, Any]]:
    """A record for each stretch between two edges: the mean nats per token over its positions and over the texts.

    The mean falls with the position if the model uses its context, and rises beyond the context that it can use.
    """
    model = model.for_length(edges[-1])
    mean = torch.stack([torch.cat(list(token_nats(model, ids[: edges[-1] + 1]))) for ids in texts]).mean(0)
    return [{"from": start, "until": end, "nats_per_token": float(mean[start:end].mean()), "texts": len(texts)}
            for start, end in zip([0, *edges], edges, strict=False)]


def token_nats(model: Transformer, ids: Sequence[int]) -> Iterator[Tensor]:
    """-log p of each token but the first, given all tokens before it: float64 [rows], forward by forward."""
    cache = model.new_cache()
    for start in range(0, len(ids) - 1, _FORWARD_ROWS):
        rows = ids[start : min(start + _FORWARD_ROWS, len(ids) - 1)]
        hidden = model.forward(chain_rows(rows, start), cache).hidden
        cache.commit(range(len(rows)))
        scores = text_logprobs(model, hidden, ids[start + 1 : start + 1 + len(rows)], 0)
        yield -torch.tensor([each.logprob for each in scores], dtype=torch.float64)


def by_cache_format(model: Transformer, ids: Sequence[int]) -> list[dict[str, Any]]:
    """A record for each format of a device's cache: perplexity, and how near the distributions are to the exact ones.

    Every token is read alone, as plain decoding does it, with its keys and values rounded after it; so its own key and
    value are exact for itself.
    """
    model, exact = model.for_length(len(ids)), CacheFormat.EXACT
    caches = {each: model.new_cache() for each in CacheFormat}
    sums = {each: {"nats": 0.0, "divergence": 0.0, "agree": 0} for each in CacheFormat}
    for place in range(len(ids) - 1):
        found = {}
        for each, cache in caches.items():
            hidden = model.forward(chain_rows(ids[place : place + 1], place), cache).hidden
            found[each] = model.logits(hidden)[0].float().log_softmax(-1)
            for keys, values in zip(*cache.provisional, strict=True):
                for rows, rounded in zip((keys, values), each.rounded(keys.float(), values.float()), strict=True):
                    rows.copy_(rounded)
            cache.commit([0])
        for each, own in found.items():
            sums[each]["nats"] -= float(own[ids[place + 1]])
            sums[each]["divergence"] += float((found[exact].exp() * (found[exact] - own)).sum())
            sums[each]["agree"] += int(own.argmax() == found[exact].argmax())
    count, heads = len(ids) - 1, model.config.kv_shapes
    return [{"cache": each.name.lower(), "perplexity": math.exp(own["nats"] / count),
             "divergence": own["divergence"] / count, "agreement": own["agree"] / count, "predicted_tokens": count,
             "bytes_per_token": sum(num * each.row_bytes(dim, torch.bfloat16) for num, dim in heads)}
            for each, own in sums.items()]


def quantization_table(records: Sequence[dict[str, Any]]) -> Table:
    return Table.of_records("Quantisation: perplexity, memory and speed", (
        ("quantize", "quantize", ""), ("nats per token", "nats_per_token", ".5f"), ("perplexity", "perplexity", ".3f"),
        ("tokens", "predicted_tokens", ","), ("bytes of weights", "weights_bytes", ","),
        ("ms a step", "step_ms", ".2f"), ("tokens/s", "tokens_per_second", ",.1f"), ("to the first", "to_first", ".2f"),
    ), records)


def cache_table(records: Sequence[dict[str, Any]]) -> Table:
    return Table.of_records("Formats of a device's cache, beside 16 bits", (
        ("cache", "cache", ""), ("perplexity", "perplexity", ".4f"), ("nats of divergence", "divergence", ".5f"),
        ("same best token", "agreement", ".4f"), ("tokens", "predicted_tokens", ","),
        ("bytes a token", "bytes_per_token", ",")), records)


def position_table(records: Sequence[dict[str, Any]]) -> Table:
    return Table.of_records("Nats per token by position", (
        ("from", "from", ","), ("until", "until", ","), ("nats per token", "nats_per_token", ".4f"),
        ("texts", "texts", "")), records)
