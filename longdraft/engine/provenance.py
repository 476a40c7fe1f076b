"""The origin of a text in its journal: its header and its runs, and the check that a loaded model can resume it."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longdraft import kernels
from longdraft.checkpoint import hub
from longdraft.checkpoint.tensor_files import WEIGHTS
from longdraft.engine import run_statistics
from longdraft.engine.loaded_model import DrafterChoice, LoadedModel
from longdraft.errors import JournalError, UnusableJournalError
from longdraft.journal.format import UNNAMED, Header, JournalContent, Run, read_journal
from longdraft.journal.writer import Journal
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling import grammar


def new_header(model: LoadedModel, drafter: DrafterChoice, prompt: Sequence[int], params: SamplingParams) -> Header:
    """The header of a new journal. ModelError if the weights on disk have changed since they were loaded."""
    identity = model.identity
    return Header(
        model=hub.lasting_name(model.name, model.files.folder),
        weights=identity["weights"],
        tokenizer=identity["tokenizer"],
        config=identity["config"],
        prompt_sha256=run_statistics.sha256_tokens(prompt),
        prompt=list(prompt),
        sampling=json.loads(json.dumps(asdict(params))),
        eos_token_ids=list(model.target.config.eos_token_ids),
        quantize=identity["quantize"],
        arithmetic=_arithmetic(model, params),
        exactness="bit-exact" if model.target.kernels.is_row_invariant else "distribution",
        drafter=drafter.name,
        drafter_options=json.loads(json.dumps(asdict(drafter.options))),
        heads=model.heads_name,
    )


def _arithmetic(model: LoadedModel, params: SamplingParams) -> dict[str, str]:
    """The inputs that determine the logits and the allowed tokens: with a grammar also the version of llguidance, with
    a JSON schema also that its objects are closed."""
    kind = params.structured_outputs[:1]
    return model.arithmetic | ({"llguidance": grammar.version()} if kind else {}) | (
        {"schemas": "closed"} if kind == ("json",) else {})


def new_run(model: LoadedModel, drafter: DrafterChoice, params: SamplingParams, num_tokens: int) -> Run:
    """The record of a process that starts to write after `num_tokens` new tokens."""
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Run(began, num_tokens, _arithmetic(model, params), drafter.name, kernels.threads(model.target.kernels))


def differences(began: Header, now: Header) -> tuple[list[str], list[str]]:
    """How two headers differ, in words: in the inputs of the text, and in the arithmetic alone."""
    inputs = [f"the {words} other than the journal's ({getattr(began, name)[:12]}, now {getattr(now, name)[:12]})"
              for name, words in (("weights", "model's weights are"), ("tokenizer", "tokenizer is"),
                                  ("config", "model's configuration is"), ("prompt_sha256", "prompt is"))
              if getattr(began, name) != getattr(now, name)]
    if began.quantize != now.quantize:
        inputs.append(f"quantize was {began.quantize}, now {now.quantize}")
    if began.eos_token_ids != now.eos_token_ids:
        inputs.append(f"the model's end-of-text ids were {began.eos_token_ids}, now {now.eos_token_ids}")
    names = sorted(began.arithmetic.keys() | now.arithmetic.keys())
    was, is_now = ({name: UNNAMED.get(name, "unknown") for name in names} | each.arithmetic for each in (began, now))
    return inputs, [f"{name.replace('_', ' ')} {was[name]}, now {is_now[name]}"
                    for name in names if began.arithmetic.get(name) != now.arithmetic.get(name)]


def provenance(model: LoadedModel) -> dict[str, Any]:
    """The loaded files: names and hashes of the model's parts, and the bytes that decoding reads."""
    folder = model.files.folder
    files = {part: folder / part / WEIGHTS for part in ("heads", "glide", "eagle", "block", "draft")}
    parts = {f"{part}_sha256": hashlib.sha256(file.read_bytes()).hexdigest() for part, file in files.items()
             if not model.heads_name and file.exists()}
    identity = model.identity
    return {"model": hub.lasting_name(model.name, folder), "weights_sha256": identity["weights"],
            "tokenizer_sha256": identity["tokenizer"], "heads": model.heads_name, **parts,
            "quantize": identity["quantize"],
            "weights_bytes": model.target.weights_bytes,
            "cache_bytes_per_token": model.target.cache_bytes_per_token}


class Resumption(NamedTuple):
    """A journal that can be resumed.

    content  what it holds
    params   its sampling settings
    is_pure  whether all its runs, this one included, have the same arithmetic
    run      the record of this run, for `Journal.begin`
    writer   appends to the journal; None if the text is finished
    """

    content: JournalContent
    params: SamplingParams
    is_pure: bool
    run: Run
    writer: Journal | None


def create_journal(model: LoadedModel, drafter: DrafterChoice, prompt: Sequence[int], params: SamplingParams,
                   folder: Path, fsync: float) -> Journal:
    """The journal of a new text. JournalError if `folder` holds one already."""
    return Journal.create(folder, new_header(model, drafter, prompt, params), new_run(model, drafter, params, 0), fsync)


def open_for_resume(folder: Path, model: LoadedModel, drafter: DrafterChoice, fsync: float,
                    allow_different_kernels: bool) -> Resumption:
    """Lock the journal in `folder` and check that `model` continues its text. Nothing is written yet.

    JournalError if there is no journal, another process writes it, or it was begun with another model, tokenizer,
    configuration or arithmetic (the last is accepted with `allow_different_kernels`).
    """
    content = read_journal(folder)
    writer: Journal | None = None
    if content.finish is None:
        writer, content = Journal.open(folder, fsync)
    try:
        params = content.params
        now = new_header(model, drafter, model.check_request(content.header.prompt, params), params)
        inputs, arithmetic = differences(content.header, now)
        if inputs:
            raise JournalError(f"the journal {folder} cannot be resumed with this model: {'; '.join(inputs)}; give the "
                               "journal's model with --model")
        if arithmetic and writer and not allow_different_kernels:
            raise JournalError(f"the journal {folder} was begun with other kernels: {'; '.join(arithmetic)}; with "
                               "--allow-different-kernels it continues, but the text may differ from an uncut one")
        vocabulary = model.target.config.vocab_size
        if len(content.tokens) and int(content.tokens.max()) >= vocabulary:
            raise JournalError(f"the journal {folder} holds a token id {int(content.tokens.max())}; allowed: 0 to "
                               f"{vocabulary - 1}")
    except BaseException:
        if writer:
            writer.close()
        raise
    run = new_run(model, drafter, params, len(content.tokens))
    runs = [*content.runs, run] if writer else content.runs
    is_pure = all(each.arithmetic == content.header.arithmetic for each in runs)
    return Resumption(content, params, is_pure, run, writer)


def load_options(header: Header, *, drafter: str | None, drafter_options: Mapping[str, Any] | None,
                 heads: str | None) -> dict[str, Any]:
    """Options of `longdraft.load` for the model of a journal, on the same device and kernels if this machine has them.

    The drafter, its options and its heads are the journal's if they are not given; the text does not depend on them.
    """
    if drafter in (None, header.drafter):
        drafter_options, heads = drafter_options or header.drafter_options, heads or header.heads
    device, dtype = header.arithmetic.get("device", "auto").partition(":")[0], header.arithmetic.get("dtype", "auto")
    if device == "cuda" and not torch.cuda.is_available():
        device, dtype = "cpu", "auto" if dtype == "float16" else dtype
    name = header.arithmetic.get("kernels", "")
    is_available = kernels.VARIABLE not in os.environ and name in kernels.available(device)
    return {"drafter": drafter or header.drafter, "drafter_options": drafter_options, "heads": heads,
            "device": device, "dtype": dtype, "quantize": header.quantize,
            "kernels_name": name if is_available else None,
            "tensor_parallel": _tensor_parallel(header)}


def _tensor_parallel(header: Header) -> int:
    given = header.arithmetic.get("tensor_parallel", "1")
    if not re.fullmatch("[1-9][0-9]{0,3}", given):
        raise UnusableJournalError(f"the journal's tensor_parallel is {given[:80]!r}, not a number of ranks; it cannot "
                                   "be used")
    return int(given)
