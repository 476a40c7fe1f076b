"""The tables of the benchmarks, from the records of their JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longdraft.bench.report import Record, table

_RATES = (("ms", "ms", ".3f"), ("low", "ms_low", ".3f"), ("high", "ms_high", ".3f"), ("GB/s", "gb_per_s", ".1f"),
          ("of bandwidth", "of_bandwidth", ".0%"), ("GFLOP/s", "gflop_per_s", ",.0f"), ("of peak", "of_peak", ".1%"))


def attention(records: Sequence[Record]) -> None:
    table("Attention, one layer", (
        ("heads", "heads", ""), ("KV heads", "kv_heads", ""), ("dim", "head_dim", ""), ("positions", "positions", ","),
        ("rows", "rows", ""), *_RATES), records)


def linear(records: Sequence[Record]) -> None:
    table("Linear", (("weight", "weight", ""), ("N", "n", ""), ("K", "k", ""), ("rows", "rows", ""), *_RATES,
                     ("to one row", "to_one_row", ".2f")), records)


def row_wise(records: Sequence[Record]) -> None:
    table("Row by row", (("kernel", "kernel", ""), ("rows", "rows", ""), ("ms", "ms", ".4f"),
                         ("us per row", "us_per_row", ".2f")), records)


def forward(records: Sequence[Record]) -> None:
    table("A forward of one row with logits, nothing cached", (
        ("context", "context", ","), ("ms", "forward_ms", ".2f"), ("attention", "attention_ms", ".2f"),
        ("linear", "linear_ms", ".2f"), ("rest", "rest_ms", ".2f"), ("floor", "floor_ms", ".2f"),
        ("of floor", "share_of_floor", ".0%")), records)


def roofline(records: Sequence[Record]) -> None:
    table("A step of plain decoding, ms", (
        ("context", "context", ","), ("step", "step_ms", ".2f"), ("forward", "forward_ms", ".2f"),
        ("sample", "sample_ms", ".2f"), ("commit", "commit_ms", ".2f"), ("other", "other_ms", ".2f"),
        ("floor", "floor_ms", ".2f"), ("of floor", "share_of_floor", ".0%"),
        ("forward, nothing cached", "forward_cold_ms", ".2f"), ("of floor", "share_of_floor_cold", ".0%"),
        ("tokens/s", "tokens_per_second", ".1f")), records)
    rows = [{"context": record["context"], **{str(row["rows"]): row["ms"] for row in record["rows"]}}
            for record in records]
    counts = [row["rows"] for row in records[0]["rows"]] if records else []
    table("Forwards by rows, nothing cached, ms", (
        ("context", "context", ","), *((str(count), str(count), ".2f") for count in counts)), rows)


def perplexity(records: Sequence[Record]) -> None:
    table("What quantising costs and brings", (
        ("quantize", "quantize", ""), ("nats per token", "nats_per_token", ".5f"), ("perplexity", "perplexity", ".3f"),
        ("tokens", "predicted_tokens", ","), ("bytes of weights", "weights_bytes", ","),
        ("ms a step", "step_ms", ".2f"), ("tokens/s", "tokens_per_second", ",.1f"), ("to the first", "to_first", ".2f"),
    ), records)


def context(records: Sequence[Record]) -> None:
    table("Nats per token by place", (("from", "from", ","), ("until", "until", ","),
                                      ("nats per token", "nats_per_token", ".4f"), ("texts", "texts", "")), records)


def peers(report: Record) -> None:
    table("Engines", (
        ("engine", "engine", ""), ("version", "version", ""), ("greedy tokens as the first", "greedy_agreement", ""),
        ("of", "greedy_asked", ""), ("error", "error", "")), report["engines"])
    table("A step of plain decoding", (
        ("context", "context", ","), ("engine", "engine", ""), ("cache", "cache", ""),
        ("reached", "context_reached", ","), ("ms", "ms", ".2f"), ("low", "ms_low", ".2f"), ("high", "ms_high", ".2f"),
        ("to longdraft", "to_longdraft", ".2f"), ("error", "error", "")), report["steps"])
    if report["prefill"]:
        table("Prefill", (
            ("engine", "engine", ""), ("tokens", "tokens", ","), ("seconds", "seconds", ".2f"),
            ("tokens/s", "tokens_per_second", ",.0f"), ("error", "error", "")), report["prefill"])


def length(figures: Mapping[str, Any]) -> None:
    """Speed by length, and how it compares with the first drafter's in the same bucket."""
    rounds = zip(*(figure["buckets"] for figure in figures.values()), strict=False)
    records = [bucket | {"drafter": name} for each in rounds for name, bucket in zip(figures, each, strict=True)]
    table("Speed by length", (
        ("until", "until", ","), ("drafter", "drafter", ""), ("seconds", "seconds", ".1f"),
        ("tokens/s", "tokens_per_second", ",.1f"), ("mean accepted length", "mean_accepted_length", ".2f"),
        ("to the first", "to_first", ".2f")), records)


def batch(report: Mapping[str, Any]) -> None:
    table("Texts side by side, all together", (
        ("context", "context", ","), ("drafter", "drafter", ""), ("texts", "texts", ","),
        ("tokens/s", "tokens_per_second", ",.1f"), ("one after another", "alone_tokens_per_second", ",.1f"),
        ("times", "to_one_after_another", ".2f"),
        ("of processor time", "of_processor_to_one_after_another", ".2f"), ("bytes would give", "limit", ".2f"),
        ("mean accepted length", "mean_accepted_length", ".2f"), ("peer's slots", "peer", ""),
        ("tokens/s", "peer_tokens_per_second", ",.1f"), ("to it", "to_peer", ".2f"), ("error", "error", "")),
        report["texts"])
    if report["peer"]:
        table("The peer", (("context", "context", ","), ("engine", "engine", ""), ("version", "version", ""),
                           ("error", "error", "")), report["peer"])
