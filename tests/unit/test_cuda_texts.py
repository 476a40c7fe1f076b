"""Several texts in one forward on the device: each has the bits that it has alone, whatever its company.

Without a device in Triton's interpreter (see helpers.cuda_kernels).
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

from helpers.cuda_kernels import DEVICE, HAS_CUDA
from helpers.recorded_graphs import watched
from longdraft import kernels
from longdraft.cache.full import FullCache
from longdraft.checkpoint import config_file
from longdraft.drafters.auto.calibration import random_cache
from longdraft.kernels.cuda import shared_forward
from longdraft.kernels.cuda.graph_cache import BUCKETS
from longdraft.model.transformer import ForwardRequest, Transformer, chain_rows, tree_rows
from longdraft.request.tree import Tree
from longdraft_bench.cuda.models import small_transformer, tiny_source

pytestmark = pytest.mark.full

NAMES = ["triton-16", "triton-16-k8v4"] if HAS_CUDA else ["triton-16"]
TREES = [Tree((7,), (-1,), ("",)), Tree((3, 9, 4), (-1, 0, 0), ("", "a", "a")), Tree((5, 1), (-1, 0), ("", "a"))]
LENGTHS = [300, 2, 41] if HAS_CUDA else [140, 2, 41]  # 140: more than a split


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Transformer:
    settings, weights = tiny_source()
    weights = {name: 3 * tensor.to(DEVICE) for name, tensor in weights.items()}
    made = small_transformer(config_file.parse_config(settings), weights, kernels.choose(DEVICE, "float32",
                                                                                        request.param))
    return made.with_taps((1,))


@pytest.fixture(scope="module")
def caches(model: Transformer) -> list[FullCache]:
    return [random_cache(model, length) for length in LENGTHS]


def forward(model: Transformer, caches: list[FullCache], order: list[int]) -> dict[int, list[torch.Tensor]]:
    """What the forward of some texts computes for each: logits, states, keys, values, attention, tapped rows."""
    requests = [ForwardRequest(model, tree_rows(TREES[text], caches[text].length), caches[text], len(TREES[text]))
                for text in order]
    found = {}
    for text, result in zip(order, model.forward_batch(requests), strict=True):
        attended = result.attention_output
        k, v = caches[text].provisional
        found[text] = [result.logits, result.hidden, *k, *v, *attended]
        found[text] = [part.clone() for part in found[text]]
        caches[text].commit([0])
        found[text].append(caches[text].taps.take()[-1].states[:, -1])
        caches[text].truncate(LENGTHS[text])
    return found


def test_a_text_has_its_own_bits_whatever_its_company(model, caches, monkeypatch):
    """Of unlike lengths, with trees of unlike sizes, shuffled, and when one leaves or another comes."""
    ran = watched(monkeypatch, model.kernels.graphs)
    alone = {text: forward(model, caches, [text])[text] for text in range(3)}
    assert len(set(ran)) == 3
    ran.clear()
    for order in ([0, 1, 2], [2, 0, 1], [1, 0]):
        for text, parts in forward(model, caches, order).items():
            assert len(parts) == len(alone[text])
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(parts, alone[text], strict=True))
    assert len(ran) == 3 and ran[0] == ran[1], "a graph belongs to numbers of texts and rows, not to certain texts"
    newcomer = [*caches[:2], random_cache(model, 41)]
    forward(model, newcomer, [0, 1, 2])
    assert ran[3] == ran[0]


def test_without_the_switch_texts_run_one_after_another(model, caches, monkeypatch):
    ran = watched(monkeypatch, model.kernels.graphs)
    monkeypatch.setattr(shared_forward, "SHARES_FORWARDS", False)
    forward(model, caches, [0, 2])
    assert len(set(ran)) == 2


def test_more_texts_than_fit_take_several_forwards(model, monkeypatch):
    """Rows of committed text count too: a chain of 5 rows is one of 8."""
    monkeypatch.setattr(shared_forward, "MAX_ROWS", 16)
    caches = [random_cache(model, length) for length in (3, 4, 6)]
    ran = watched(monkeypatch, model.kernels.graphs)
    requests = [ForwardRequest(model, chain_rows([1, 2, 3, 4, 5], cache.length), cache, 1) for cache in caches]
    together = [result.hidden.clone() for result in model.forward_batch(requests)]
    assert [graph.owner.rows for graph in ran] == [16, 16] and 16 in BUCKETS
    for cache, whole in zip(caches, together, strict=True):
        cache.commit(())
        assert torch.equal(model.forward(chain_rows([1, 2, 3, 4, 5], cache.length), cache).hidden, whole)


@pytest.mark.skipif(HAS_CUDA, reason="counts the interpreter's launches")
def test_before_its_layers_a_forward_of_several_texts_copies_one_tensor(model, caches, monkeypatch):
    """Inputs and stores are uploaded together. The graph has as many kernels as that of one text."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from triton.runtime import interpreter

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.overloadpacket.__name__)
            return function(*args, **kwargs or {})

    names: list[str] = []
    launches: list[str] = []
    counts: list[tuple[int, int]] = []
    launch, run = interpreter.GridExecutor.__call__, model.kernels.graphs.run
    monkeypatch.setattr(interpreter.GridExecutor, "__call__",
                        lambda self, *args, **named: (launches.append(self.fn.__name__), launch(self, *args, **named)))

    def replay(owner: object, work: object, key: object = None) -> None:
        copies, before = names.count("copy_"), len(launches)
        run(owner, work, key)
        counts.append((copies, len(launches) - before))

    monkeypatch.setattr(model.kernels.graphs, "run", replay)
    forward(model, caches, [0, 1, 2])
    names.clear(), counts.clear()
    with Recorder():
        forward(model, caches, [0, 1, 2])
        forward(model, caches, [2, 0])
    (first, several), (_, fewer) = counts
    layers = model.config.num_layers
    assert first == 1 and several == 3 + 10 * layers and fewer == several
