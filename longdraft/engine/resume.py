"""Resuming a journal: open it for writing, and compare what it was begun with to what is loaded now."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longdraft import kernels
from longdraft.engine.loaded_model import DrafterChoice, LoadedModel
from longdraft.engine.provenance import differences, new_header, new_run
from longdraft.errors import JournalError, UnusableJournalError
from longdraft.journal.format import Header, JournalContent, Run, read_journal
from longdraft.journal.writer import Journal
from longdraft.request.sampling_params import SamplingParams


class Resumption(NamedTuple):
    """A journal that can be resumed.

    content  what it holds
    params   its sampling settings
    is_pure  whether all its runs, this one included, have the same arithmetic
    run      the record of this run
    writer   appends to the journal; None if the text is finished
    """

    content: JournalContent
    params: SamplingParams
    is_pure: bool
    run: Run
    writer: Journal | None

    def begin(self) -> None:
        """Write the record of this run: the journal's torn end, if any, is cut off."""
        if self.writer:
            self.writer.begin(self.run)

    def close(self) -> None:
        if self.writer:
            self.writer.close()


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
    content, writer = read_journal(folder), None
    if content.finish is None:
        writer, content = Journal.open(folder, fsync)
    try:
        params = content.header.params
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
