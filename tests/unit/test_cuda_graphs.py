"""The cache of CUDA graphs, and what graphs must not outlive: buffers, tables of addresses, the text's memory.

Without a device, graphs are records of launches (helpers.recorded_graphs).
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

from helpers.cuda_kernels import DEVICE, HAS_CUDA, kernels, rows_of
from helpers.recorded_graphs import RecordedGraphs
from longdraft.kernels.cuda import choices as choices_module
from longdraft.kernels.cuda import graph_cache
from longdraft.kernels.cuda.choices import LogitsSource, TextChoices, TextTree
from longdraft.kernels.cuda.device_text import ChoiceRules, DeviceText
from longdraft.kernels.cuda.graph_cache import GraphCache
from longdraft.kernels.cuda.kernels import CudaKernels
from longdraft.kernels.cuda.kv_store import CudaStore, scatter_rows
from longdraft.kernels.cuda.logprobs import ranked_masses
from longdraft.kernels.cuda.support import FilterRules

pytestmark = pytest.mark.full

VOCAB, HIDDEN = 60, 32


def source_of(kernel: CudaKernels) -> LogitsSource:
    norm = torch.ones(HIDDEN, dtype=kernel.dtype, device=DEVICE)
    head = kernel.pack(rows_of(VOCAB, HIDDEN, seed=1))
    source = kernel.logits_source(norm, 1e-5, False, head, 1.0)
    assert source is not None
    return source


def text_of(length: int) -> DeviceText:
    rules = ChoiceRules(0.8, FilterRules(0.8, log_min_p=-3.0), 1.4, 5000, 9, [1])
    text = DeviceText(rules, torch.device(DEVICE))
    text.extend(np.arange(length, dtype=np.int32) % VOCAB, 0)
    return text


def path_of(text: DeviceText, rows: int) -> TextTree:
    return TextTree(text, np.zeros(0, dtype=np.int32), [3] * rows, range(-1, rows - 1), 50, 0)


def chosen(choices: TextChoices, text: DeviceText, source: LogitsSource, rows: int, seed: int) -> list[int]:
    hidden = rows_of(rows, HIDDEN, seed=seed)
    tokens: list[int] = choices.launch(source, hidden, [path_of(text, rows)]).choices.tolist()
    return tokens


def test_log_probabilities_of_many_numbers_of_rows_leave_the_graphs_of_choices_valid():
    """They need buffers, of which a request keeps the latest ones. A graph ends with its buffers."""
    kernel = kernels()
    source, choices, text = source_of(kernel), TextChoices(), text_of(50)
    expected = [chosen(TextChoices(), text_of(50), source_of(kernels()), 3, seed) for seed in (5, 6)]
    assert chosen(choices, text, source, 3, 5) == expected[0]
    for rows in range(1, choices_module._MAX_BUFFERS + 2):
        logits = rows_of(rows, VOCAB, seed=rows)
        ranked_masses(choices, path_of(text, rows), logits, [0] * rows, 2)
    assert chosen(choices, text, source, 3, 6) == expected[1]


def test_a_text_that_outgrows_its_memory_has_new_graphs():
    """For a longer window of the penalty, which is as long as the text's memory at most."""
    source, choices, text = source_of(kernels()), TextChoices(), text_of(50)
    chosen(choices, text, source, 1, 4)
    text.extend(np.full(4100, 7, dtype=np.int32), 50)
    grown = text_of(50)
    grown.extend(np.full(4100, 7, dtype=np.int32), 50)
    assert chosen(choices, text, source, 1, 5) == chosen(TextChoices(), grown, source_of(kernels()), 1, 5)


def test_a_store_keeps_its_table_of_addresses_while_it_keeps_its_memory():
    """Graphs read it, however many other stores were written to since."""
    kernel = kernels()
    store = kernel.new_store(1, 16)
    assert isinstance(store, CudaStore)
    store.reserve(4)
    row, place = rows_of(1, 1, 1, 16), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    scatter_rows(row, row, [store], place, place)
    (table,) = store.tables.values()
    scatter_rows(row, row, [store], place, place)
    assert next(iter(store.tables.values())) is table
    store.reserve(1000)
    scatter_rows(row, row, [store], place, place)
    assert [held is table for held in store.tables.values()] == [False]


class _Owner:
    """Of graphs."""


OWNER = _Owner()


class _Device(SimpleNamespace):
    """Stands for `torch.cuda` during a capture. `works` says whether the next capture succeeds."""

    def __init__(self, works: bool = True) -> None:
        nothing = SimpleNamespace(__enter__=lambda self: None, __exit__=lambda self, *error: None)
        context = type("Context", (), vars(nothing))
        stream = SimpleNamespace(wait_stream=lambda other: None)
        super().__init__(works=works, is_open=False, device=lambda device: context(), stream=lambda stream: context(),
                         synchronize=lambda: None, Stream=lambda: stream, current_stream=lambda: stream,
                         CUDAGraph=lambda: _Graph(self))


class _Graph:
    """Stands for a CUDA graph."""

    def __init__(self, device: _Device) -> None:
        self._device = device
        self.replays = 0

    def capture_begin(self, capture_error_mode: str) -> None:
        self._device.is_open = True

    def capture_end(self) -> None:
        self._device.is_open = False
        if not self._device.works:
            raise RuntimeError("the capture was invalidated")

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> _Device:
    found = _Device()
    monkeypatch.setattr(graph_cache.torch, "cuda", found)
    return found


def cache_on_a_device() -> GraphCache:
    graphs = GraphCache(torch.device("cpu"))
    graphs.is_on = True
    return graphs


def test_work_that_cannot_be_captured_is_run_kernel_by_kernel(device, caplog):
    graphs, ran = cache_on_a_device(), []
    device.works = False

    def work() -> None:
        ran.append(device.is_open)
        if device.is_open:
            raise RuntimeError("operation not permitted when stream is capturing")

    for _ in range(2):
        graphs.run(OWNER, work)
    assert ran == [False, True, False, False], "to compile, captured in vain, and twice as it was asked for"
    assert graphs.failures == ["operation not permitted when stream is capturing"] and not graphs.recent
    assert "launched one by one" in caplog.text


def test_pieces_in_turn_are_captured_before_the_first_one_runs(device, monkeypatch):
    """Also where so many graphs are held that old ones are dropped."""
    monkeypatch.setattr(graph_cache, "_MAX_GRAPHS", 3)
    graphs, ran = cache_on_a_device(), []
    pieces = [(name, lambda name=name: ran.append(name)) for name in "abab"]
    graphs.run_in_turn(OWNER, pieces, lambda: ran.append("begin"))
    assert ran == ["begin", "a", "a", "b", "b", "begin"], "each once to compile and once captured, then replays"
    graphs.run(OWNER, lambda: None, "x")
    graphs.run(OWNER, lambda: None, "y")  # the oldest one, a, is dropped
    ran.clear()
    graphs.run_in_turn(OWNER, pieces, lambda: ran.append("begin"))
    assert ran == ["begin", "a", "a", "begin"]


@pytest.mark.skipif(HAS_CUDA, reason="tests the stand-in for a device")
def test_a_record_repeats_operations_and_not_python():
    graphs, given = RecordedGraphs(torch.device("cpu")), torch.zeros(3)
    made: list[torch.Tensor] = []
    number = [2.0]

    def work() -> None:
        twice = given * number[0]
        twice[0] += 5
        made.append(torch.cat([twice, given.clone()]))

    graphs.run(OWNER, work)
    number[0] = 100.0
    given.fill_(1)
    graphs.run(OWNER, work)
    assert len(made) == 1 and made[0].tolist() == [7, 2, 2, 1, 1, 1]
    with pytest.raises(AssertionError, match="waits for the device"):
        graphs.run(OWNER, lambda: given.sum().item(), "another")


@pytest.mark.parametrize("reason, captures", [(torch.OutOfMemoryError("full"), 1), (RuntimeError("old driver"), 2)])
def test_only_a_capture_that_the_driver_refuses_ends_the_chaining_of_kernels(reason, captures, monkeypatch):
    """Of this device, for the life of the process. Memory may be free again later."""
    stopped, tried = list[object](), list[object]()
    monkeypatch.setattr(graph_cache, "stop_chaining", lambda device: not stopped.append(device))
    graphs = GraphCache(torch.device("cuda"))
    monkeypatch.setattr(graphs, "_captured", lambda work: (tried.append(work), (None, reason))[1])
    ran = list[int]()
    for _ in range(2):
        graphs.run(OWNER, lambda: ran.append(1))
    assert len(tried) == captures and len(stopped) == captures - 1
    assert len(ran) == 2, "kernel by kernel, without another try"
