"""The record of the origin of a text in its journal: its header, its runs, and how two headers differ."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from longdraft import kernels
from longdraft.checkpoint import hub
from longdraft.checkpoint.tensor_files import WEIGHTS
from longdraft.engine import run_statistics
from longdraft.engine.loaded_model import DrafterChoice, LoadedModel
from longdraft.journal.format import Header, Run
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
        prompt_sha256=run_statistics.sha256_tokens(np.array(prompt, dtype=np.int32)),
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
    """The inputs that determine the logits and the allowed tokens: with a grammar also the version of llguidance."""
    return model.arithmetic | ({"llguidance": grammar.version()} if params.structured_outputs else {})


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
    return inputs, [f"{name.replace('_', ' ')} {began.arithmetic.get(name, 'unknown')}, "
                    f"now {now.arithmetic.get(name, 'unknown')}"
                    for name in names if began.arithmetic.get(name) != now.arithmetic.get(name)]


def provenance(model: LoadedModel) -> dict[str, Any]:
    """The loaded files: names and hashes of the model's parts, and the bytes that decoding reads."""
    folder = model.files.folder
    files = {part: folder / part / WEIGHTS for part in ("heads", "glide", "eagle", "draft")}
    parts = {f"{part}_sha256": hashlib.sha256(file.read_bytes()).hexdigest() for part, file in files.items()
             if not model.heads_name and file.exists()}
    identity = model.identity
    return {"model": hub.lasting_name(model.name, folder), "weights_sha256": identity["weights"],
            "tokenizer_sha256": identity["tokenizer"], "heads": model.heads_name, **parts,
            "quantize": identity["quantize"],
            "weights_bytes": model.target.weights_bytes,
            "cache_bytes_per_token": model.target.cache_bytes_per_token}
