"""The upkeep of a partial cache on the device, against PyTorch's operations (longdraft/cache/remainder.py).

Without a device in Triton's interpreter (see helpers.cuda_kernels).
"""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

from helpers.attention import parents_of
from helpers.cuda_kernels import DEVICE, DTYPES, HAS_CUDA, OperationRecorder, fill, kernels, rows_of
from longdraft.cache.full import FullCache
from longdraft.cache.partial import PartialBudget, PartialCache
from longdraft.cache.remainder import Remainder, new_fit
from longdraft.kernels import KV, AttentionOutput, AttentionRows, LayersKV
from longdraft.kernels.cuda import remainder
from longdraft.kernels.cuda.kernels import CudaKernels
from longdraft.kernels.cuda.remainder import CudaRemainder

pytestmark = pytest.mark.full

LAYERS, KV_HEADS, HEADS = 2, 1, 2


class Text:
    """A text that grows, its partial cache with sinks and the latest rows, and the attention of its new rows."""

    def __init__(self, kernel: CudaKernels, dim: int) -> None:
        self.kernel, self.dim, self.length = kernel, dim, 0
        self.full, self.part = ([kernel.new_store(KV_HEADS, dim) for _ in range(LAYERS)] for _ in range(2))
        for store in (*self.full, *self.part):
            store.reserve(400)

    def grow(self, rows: int, seed: int) -> tuple[int, AttentionOutput]:
        """`rows` new rows. Returns the length of the partial cache, and the attention of the rows and of one more."""
        first, self.length = self.length, self.length + rows
        k, v, q, content = (rows_of(LAYERS, rows, heads, self.dim, seed=4 * seed + i, dtype=self.kernel.dtype)
                            for i, heads in enumerate((KV_HEADS, KV_HEADS, HEADS, HEADS)))
        self.kernel.keep(LayersKV(self.full, first, k, v), range(rows))
        held = torch.tensor([*range(min(4, self.length)), *range(max(4, self.length - 40), self.length)])
        self.kernel.copy(self.full, self.part, held.expand(LAYERS, KV_HEADS, -1), 0)
        whole = [self.kernel.attention(q[i], KV(self.full[i], first, k[i], v[i]), parents_of(list(range(-1, rows - 1))))
                 for i in range(LAYERS)]
        output, lse = (torch.stack(parts) for parts in zip(*((each.output, each.lse) for each in whole), strict=True))
        more = [torch.cat([part[:, :1], part], 1) for part in (q, output, lse, content)]
        return len(held), AttentionOutput(*more)


@pytest.mark.parametrize("dtype, dim", [*zip(DTYPES, (24, 16, 24), strict=False)])
def test_the_fit_in_graphs_is_the_fit_of_pytorch(dtype, dim):
    """Rows of a tree's path are not next to each other. For one head nothing was left out, and one row is damaged."""
    kernel = kernels(dtype)
    text = Text(kernel, dim)
    fits = [new_fit(kernel, text.part, HEADS), Remainder(kernel, LAYERS, HEADS, dim)]
    assert isinstance(fits[0], CudaRemainder) and fits[0].nbytes > 0
    text.grow(50, 99)
    views: list[torch.Tensor] = []
    for step, rows in enumerate((37, 1, 9, 14, 9, 3)):
        length, whole = text.grow(rows, step)
        whole.lse[1, :, 1] = -100.0
        if step == 3:
            whole.content[0, 5] = torch.nan
        path = AttentionRows(whole, range(-rows, 0) if step % 2 else range(1, rows + 1))
        got, expected = (fit.update(text.part, length, path) for fit in fits)
        views.append(got)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert len({view.data_ptr() for view in views}) == 1, "graphs read the maps where they were"
    assert len({id(view) for view in views}) == len(views), "graphs that have a copy see that the maps have changed"
    length, whole = text.grow(3, 50)
    length -= 1  # the last row of the text is not on the path
    again = [fit.update(text.part, length, AttentionRows(whole, [1, 2])) for fit in fits]
    torch.testing.assert_close(*again, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dim", [16, 64])
def test_nearly_equal_rows_give_a_finite_fit(dim):
    kernel = kernels()
    text = Text(kernel, dim)
    fit = new_fit(kernel, text.part, HEADS)
    text.grow(60, 99)
    for step in range(2):
        length, whole = text.grow(17, step)
        whole.content.copy_(20 + 1e-3 * whole.content)
        whole.output.copy_(1 + 1e-2 * whole.output)
        got = fit.update(text.part, length, AttentionRows(whole, range(1, 18)))
    assert got.isfinite().all() and got[..., :-1].abs().max() < 10
    before = [part.clone() for part in (fit.maps, fit._x, fit._y)]
    (attention,) = fit._attentions.values()
    fit._learn(attention)
    assert all(map(torch.equal, before, (fit.maps, fit._x, fit._y))), "a graph's work runs twice when it is captured"


def test_sweeps_invert_matrices_and_leave_out_equations_without_a_pivot():
    dim, count = 24, 3
    rows = rows_of(count, 40, dim, seed=3)
    rows[1] *= torch.logspace(-2, 2, dim, device=DEVICE)
    rows[2, :, 5] = 0.0
    x = torch.cat([rows, torch.ones(count, 40, 1, device=DEVICE)], 2)
    gram, inverse = x.transpose(1, 2) @ x, torch.empty(count, dim, dim, device=DEVICE)
    remainder.invert_gram(gram, inverse, 1e-5, 0.0, 0.0)
    centred = rows - rows.mean(1, keepdim=True)
    spread = centred.double().square().mean((1, 2))
    expected = centred.double().transpose(1, 2) @ centred.double()
    expected += torch.diag_embed((1e-5 * 40 * spread)[:, None].expand(-1, dim))
    identity = torch.eye(dim, device=DEVICE).double().expand(count, -1, -1)
    torch.testing.assert_close(inverse.double() @ expected, identity, atol=2e-3, rtol=0)
    gram[0, :dim, :dim] = 1.0  # all rows are equal: after the first sweep nothing but rounding errors is left
    gram[0, dim, :dim] = gram[0, :dim, dim] = 0.0
    remainder.invert_gram(gram, inverse, 0.0, 1e-9, 0.0)
    assert inverse.isfinite().all() and (inverse[0].diagonal() != 0).sum() == 1


@pytest.mark.parametrize("name", ["triton-16", "triton-16-k8v4"])
def test_all_layers_in_one_launch_have_the_bits_of_their_own(name):
    """And of rows that are given one by one."""
    kernel = kernels("float16", name)
    text = Text(kernel, 16)
    text.grow(60, 99)
    length, whole = text.grow(5, 1)
    whole = AttentionOutput(*(part[:, 1:].contiguous() for part in whole))
    together = kernel.remainder(text.part, length, whole)
    for layer, store in enumerate(text.part):
        own = AttentionOutput(*(part[layer : layer + 1] for part in whole))
        assert torch.equal(kernel.remainder([store], length, own)[0], together[layer])
    first = AttentionOutput(*(part[:, :1] for part in whole))
    assert torch.equal(kernel.remainder(text.part, length - 4, first), together[:, :1])


@pytest.mark.parametrize("name", ["triton-16", "triton-16-k8v4"])
def test_a_run_of_positions_is_copied_without_a_table(name):
    kernel = kernels("float16", name)
    text = Text(kernel, 16)
    text.grow(50, 1)
    targets = [kernel.new_store(KV_HEADS, 16) for _ in range(LAYERS)]
    kernel.copy(text.full, targets, range(7, 50), 3)
    at = torch.arange(43, device=DEVICE).expand(KV_HEADS, -1)
    for source, target in zip(text.full, targets, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(source.read(at + 7), target.read(at + 3), strict=True))


@pytest.mark.skipif(HAS_CUDA, reason="counts the interpreter's launches")
def test_the_upkeep_of_a_step_is_one_graph_one_launch_and_one_upload(monkeypatch):
    """New rows are copied, then the graph; every 32 rows four launches more. The host waits for nothing."""
    from triton.runtime import interpreter

    kernel = kernels()
    full = FullCache(kernel, [(KV_HEADS, 16)] * LAYERS)
    partial = PartialCache(full, kernel, PartialBudget(200, 4, 8, 180))
    full.reserve(400)
    for store in full.stores:
        fill(store, rows_of(300, KV_HEADS, 16), rows_of(300, KV_HEADS, 16, seed=1))
    full.length = 250

    def rows(count: int) -> AttentionRows:
        parts = [rows_of(LAYERS, count + 2, HEADS, 16, seed=i) for i in range(3)]
        lse = torch.full((LAYERS, count + 2, HEADS), 9.0, device=DEVICE)
        return AttentionRows(AttentionOutput(parts[0], parts[1], lse, parts[2]), [0, *range(3, count + 2)])

    partial.update(rows(8))  # selects rows, and solves
    replays, launches, recorder = [], [], OperationRecorder()
    launch, run = interpreter.GridExecutor.__call__, kernel.graphs.run

    def count_launch(executor: object, *args: object, **named: object) -> None:
        launches.append(executor.fn.__name__)
        names = len(recorder.names)
        launch(executor, *args, **named)
        del recorder.names[names:]

    def replay(owner: object, work: object, key: object = None) -> None:
        before, names = len(launches), len(recorder.names)
        run(owner, work, key)
        replays.append(launches[before:])
        del launches[before:], recorder.names[names:]

    monkeypatch.setattr(kernel.graphs, "run", replay)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", count_launch)
    for count, solves in ((8, False), (8, False), (8, False), (8, True), (8, False)):
        full.length += count
        given = rows(count)
        launches.clear(), replays.clear(), recorder.names.clear()
        with recorder:
            partial.update(given)
        graph = ["gather_queries_kernel", "attend_split_kernel", "merge_splits_kernel", "hold_rows_kernel",
                 "correct_base_kernel"]
        assert replays == [graph]
        assert launches == ["copy_rows_kernel"] + solves * ["add_held_rows_kernel", "invert_gram_kernel",
                                                            "solve_maps_kernel", "correct_base_kernel"]
        assert recorder.names == ["copy_"], "the upload"
    assert math.isfinite(partial._remainder.abs().max().item())
