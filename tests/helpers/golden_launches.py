"""What the CUDA path launches, counted in Triton's interpreter, for the golden record (tests/golden_record.py).

Counted for one text and for several texts of each kind of drafter: kernels by name, inside graphs and outside of them;
graphs that ran, and graphs that were recorded; operations of PyTorch outside of graphs, most of which a device launches
too; uploads and other copies among them; and waits of the host. A graph is a record of launches there
(helpers.recorded_graphs). Times mean nothing. A device launches the same kernels and graphs; of the operations, some
are the host's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter

import longdraft
from helpers.checkpoints import make_checkpoint, make_glide, make_heads
from helpers.cuda_kernels import DEVICE, OperationRecorder
from helpers.eagle import make_eagle
from helpers.equality import prompt_of
from helpers.golden_texts import text_hash
from helpers.recorded_graphs import RecordedGraphs
from longdraft.kernels import launched
from longdraft.kernels.cuda import choices
from longdraft.request.sampling_params import SamplingParams

KERNELS = "triton-16"
# The places where the host waits for the device. A step that moves one of them moves it here, too.
WAITS = ((launched, "copied_to_host"), (choices, "_read"))
DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": {}, "eagle": dict(chain=2), "medusa": dict(tree="2,1"), "draft-model": dict(chain=2),
    "magicdec": dict(budget=12, sinks=2, refresh=3, chain=2), "glide": dict(chain=2),
    "tokenswift": dict(chain=2, tree="2,1", budget=12, sinks=2, recent=4, room=4),
    "triforce": dict(budget=48, stride=4, chain=2),
}
PARTS = {"eagle": "eagle", "glide": "glide", "medusa": "heads", "tokenswift": "heads"}
NEW = 3
PROMPTS = [prompt_of(14), prompt_of(9)]
LAWS: dict[str, list[dict[str, Any]]] = {  # of the two texts: without filters, and with them
    "": [dict(min_p=0.05, repetition_penalty=1.3, penalty_window=7), dict(temperature=0.0)],
    ", filters": [dict(top_p=0.9), dict(top_k=12, eta_cutoff=0.02, logit_bias=((5, 2.0),))],
}
# Each kind of chain and choice; filters for one drafter, as they take the interpreter longest.
CASES = [*((drafter, "") for drafter in DRAFTERS), ("plain", ", filters")]


def make_model(folder: Path) -> Path:
    """A model of one small layer with all parts."""
    base = make_checkpoint(folder, num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=2,
                           num_key_value_heads=1)
    make_heads(folder / "heads", base)
    make_glide(folder / "glide", folder)
    make_eagle(folder / "eagle", target=32, taps=(0, 1), hidden=32, heads=2, kv_heads=1, dim=16, inner=48)
    return folder


def engine_of(folder: Path, drafter: str) -> longdraft.Engine:
    options = DRAFTERS[drafter] | ({"model": str(folder)} if drafter in ("draft-model", "triforce") else {})
    part = PARTS.get(drafter)
    return longdraft.load(str(folder), drafter=drafter, drafter_options=options, device=DEVICE, dtype="float32",
                          kernels_name=KERNELS, heads=None if part is None else str(folder / part))


class Counts:
    """What happened while `counting` was open."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._graphs = 0  # that run now, one inside another
        self._operations = OperationRecorder()

    @contextmanager
    def counting(self) -> Iterator[None]:
        hooks = [(RecordedGraphs, "run", self._graph), (interpreter.GridExecutor, "__call__", self._launch),
                 *((owner, name, self._wait) for owner, name in WAITS)]
        with ExitStack() as stack:
            for owner, name, counted in hooks:
                stack.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name))))
            stack.enter_context(self._operations)
            yield
        names = self._operations.names
        self.found["operations"] = len(names)
        self.found["copies"] = sum(name in ("copy_", "_to_copy", "clone", "index_copy_") for name in names)

    def _graph(self, run: Callable[..., None]) -> Callable[..., None]:
        def counted(graphs: RecordedGraphs, owner: object, work: Callable[[], None], key: Any = None) -> None:
            self.found["graphs"] += 1
            self.found["recorded graphs"] += not graphs.holds(owner, key)
            before = len(self._operations.names)
            self._graphs += 1
            try:
                run(graphs, owner, work, key)
            finally:
                self._graphs -= 1
            del self._operations.names[before:]

        return counted

    def _launch(self, run: Callable[..., None]) -> Callable[..., None]:
        def counted(executor: Any, *given: Any, **named: Any) -> None:
            self.found[("graph: " if self._graphs else "") + executor.fn.__name__.removesuffix("_kernel")] += 1
            with _disable_current_modes():  # what the interpreter itself does
                run(executor, *given, **named)

        return counted

    def _wait(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            self.found["waits"] += 1
            return read(*given)

        return counted


def launch_rows(folder: Path, drafter: str, filters: str = "") -> dict[str, dict[str, Any]]:
    """The counts of one text and of several texts by name, with the hash of what they wrote."""
    params = [SamplingParams(max_new_tokens=NEW, seed=seed, ignore_eos=True, **law)
              for seed, law in enumerate(LAWS[filters])]
    rows = {}
    for name, texts in (("one text", 1), ("several texts", len(PROMPTS))):
        engine, counts = engine_of(folder, drafter), Counts()
        tokens: list[list[int]] = [[] for _ in range(texts)]
        with counts.counting():
            if texts == 1:
                for event in engine.generate(PROMPTS[0], params[0]):
                    tokens[0] += event.tokens
            else:
                for text, event in engine.generate_many(PROMPTS, params):
                    assert event.error is None, event.error
                    tokens[text] += event.tokens
        rows[f"{drafter}{filters}, {name}"] = {"text": text_hash([*chain.from_iterable(tokens)]),
                                               **dict(sorted(counts.found.items()))}
    return rows
