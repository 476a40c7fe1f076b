"""Texts by the CUDA kernels: the same promise, and what is decided on the device equals what the host decides.

Without a device in Triton's interpreter, graphs off: a model of one layer, texts of a few tokens.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

import longdraft
from helpers.checkpoints import load_glide, make_checkpoint, make_glide, make_heads
from helpers.cuda_kernels import DEVICE, HAS_CUDA
from helpers.cuda_texts import LENGTH, NAME, NEW, generate, load, text_of_shared_chunks, use_small_chunks
from helpers.eagle import load_eagle, make_eagle
from helpers.equality import liar, prompt_of
from helpers.generation import by_name
from longdraft import kernels
from longdraft.checkpoint import memory_plan
from longdraft.errors import UsageError
from longdraft.kernels import noise
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.parts import heads
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree
from longdraft.sampling.device import DeviceSampler
from longdraft.sampling.sampler import NO_TOKEN, Sampler
from longdraft.speculation.step import Tally

pytestmark = pytest.mark.full

needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")

LAWS = {
    "greedy": dict(temperature=0.0),
    "greedy, penalty": dict(temperature=0.0, repetition_penalty=1.3, penalty_window=9),
    "all tokens": dict(temperature=1.3),
    "paper": dict(min_p=0.1, repetition_penalty=1.2, penalty_window=1024),
    "short window, not ended early": dict(min_p=0.01, temperature=0.7, repetition_penalty=1.4, penalty_window=5,
                                          min_new_tokens=3),
}


def random_tree(context: Context, nodes: int, vocabulary: int, seed: int) -> Tree:
    pick = random.Random(seed)
    near = context.slice(len(context) - 8, len(context)).tolist()
    parents = [-1] + [pick.randrange(node) for node in range(1, nodes)]
    tokens = [context.last] + [pick.choice([pick.randrange(vocabulary), *near]) for _ in range(nodes - 1)]
    return Tree(tuple(tokens), tuple(parents), ("",) + ("liar",) * (nodes - 1))


@pytest.mark.parametrize("law, length", [*((law, 40) for law in LAWS), ("paper", 3)])
def test_the_device_chooses_the_same_tokens_as_the_host(law, length):
    """At every node, from the same logits: penalty, bans, min-p, noise. The walk along the tree is the same too."""
    vocabulary = 1300
    params = SamplingParams(max_new_tokens=50, seed=2**64 - 59, **LAWS[law])
    context = Context([(7 * i) % 90 for i in range(length)])
    kernel = kernels.choose(DEVICE, "float32", NAME)
    host, device = Sampler(params, [5, 1200], is_fast=False), Sampler(params, [5, 1200], kernels=kernel)
    assert device.on_device
    for step in range(2 if HAS_CUDA else 1):
        tree = random_tree(context, 7, vocabulary, step)
        logits = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(step)) * 3
        logits[:, list(range(90))] += 3
        logits[3] = float("nan")
        logits[4, 7] = float("inf")
        logits[5, ::2] = float("-inf")
        expected = host.choose(logits, tree, context)
        assert expected[3] == expected[4] == NO_TOKEN
        on_it = logits.to(DEVICE)
        with np.errstate(all="ignore"):
            assert device.choose(on_it, tree, context) == expected
        truth = Tree((context.last, expected[0], expected[0], expected[1], 1), (-1, 0, 0, 1, 1), ("",) * 5)
        again = host.choose(logits[[0, 1, 6, 2, 2]], truth, context)
        placed: list[torch.Tensor] = []
        with np.errstate(all="ignore"):
            nodes, chosen = device.on_device.walk(on_it[[0, 1, 6, 2, 2]].contiguous(), truth, context,
                                                  lambda rows, at, placed=placed: placed.extend((rows, at)))
        assert nodes == truth.along(again) and chosen == [again[node] for node in nodes]
        count, at = len(nodes), len(context) - 1
        assert placed[0].tolist()[:count] == nodes
        assert placed[1].tolist() == [*range(at, at + count), *[-1] * (5 - count)]
        context.extend([4, 8, 15])


def test_the_device_draws_the_same_random_bits():
    """The token with the largest random bits of the definition is chosen, because all logits are equal."""
    params = SamplingParams(max_new_tokens=1, seed=99)
    kernel = kernels.choose(DEVICE, "float32", NAME)
    sampler, vocabulary = Sampler(params, kernels=kernel), 2100
    for length in (2, 100_000):
        context = Context(np.zeros(length, dtype=np.int32))
        tree = Tree((0,), (-1,), ("",))
        chosen = sampler.choose(torch.zeros(1, vocabulary, device=DEVICE), tree, context)
        assert chosen == [int(noise.bits(99, length, np.arange(vocabulary)).argmax())]
        sampler = Sampler(params, kernels=kernel)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("cuda")
    found = {}
    for name, seed in (("model", 1), ("another", 2)):
        base = make_checkpoint(root / name, seed=seed, num_hidden_layers=1, hidden_size=32, intermediate_size=48,
                               num_attention_heads=2, num_key_value_heads=1)
        make_heads(root / name / "heads", base)
        make_glide(root / name / "glide", root / name)
        make_eagle(root / name / "eagle", target=32, taps=(0, 1), hidden=32, heads=2, kv_heads=1, dim=16, inner=48)
        found[name] = root / name
    return found


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> Transformer:
    return load(folders["model"])


PARAMS = SamplingParams(max_new_tokens=NEW, seed=11, min_p=0.05, repetition_penalty=1.3, penalty_window=7)


@pytest.fixture(scope="module")
def plain(model: Transformer) -> list[int]:
    return generate(model, PARAMS, by_name("plain"))


DRAFTERS = {
    "suffix": dict(min_probability=0, min_match=1), "ngram": dict(seen=1, delay=0), "medusa": dict(tree="2,1"),
    "tokenswift": dict(chain=2, tree="2,1", budget=40, sinks=4, recent=8, room=8),
    "magicdec": dict(budget=24, sinks=4, refresh=5, chain=2), "glide": dict(chain=2), "eagle": dict(chain=2),
    "triforce": dict(budget=48, stride=10, chain=2), "auto": {},
}
QUICK = ["suffix", "medusa", "tokenswift", "glide", "eagle", "triforce"]  # those that the interpreter has time for


@pytest.mark.parametrize("drafter", DRAFTERS if HAS_CUDA else QUICK)
def test_every_drafter_writes_the_plain_text(model, plain, folders, drafter):
    trained = heads.load_heads(folders["model"] / "heads", model)
    glide, eagle = load_glide(folders["model"] / "glide", model), load_eagle(folders["model"] / "eagle", model)
    factory = by_name(drafter, trained, None, glide, eagle, **DRAFTERS[drafter])
    assert generate(model, PARAMS, factory) == plain


@pytest.mark.parametrize("kind", ["half true", "duplicated branches", "colliding with the penalty",
                                  *(["huge"] if HAS_CUDA else [])])
def test_drafters_that_lie_change_nothing(model, plain, kind):
    tally, drafter = Tally(), liar(kind, plain, LENGTH)
    assert generate(model, PARAMS, lambda given: drafter, tally) == plain
    if kind == "half true":
        assert tally.accepted.total() > 0 and tally.steps < NEW


@pytest.mark.parametrize("cache", ["-kv8", "-k8v4"])
def test_with_a_cache_of_fewer_bits_speculative_text_equals_plain_text(folders, cache):
    model = load(folders["model"], NAME + cache)
    text = generate(model, PARAMS, by_name("plain"))
    drafter = liar("half true", text, LENGTH)
    assert generate(model, PARAMS, lambda given: drafter) == text


def engine_of(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, drafter: str = "suffix") -> longdraft.Engine:
    monkeypatch.setenv("LONGDRAFT_KERNELS", NAME)
    return longdraft.load(str(folders["model"]), drafter=drafter, device=DEVICE, dtype="float32")


def test_a_resumed_text_equals_the_uninterrupted_text(folders, monkeypatch, tmp_path):
    """The resumed run reads the prompt and the written tokens with the same kernels as the first run."""
    engine = engine_of(folders, monkeypatch)
    whole = engine.generate(prompt_of(30), PARAMS)
    *_, last = whole
    assert last.stats["exactness"] == "bit-exact" and last.stats["kernels"] == NAME
    cut = engine.generate(prompt_of(30), PARAMS, journal=tmp_path / "work")
    for _ in range(3):
        next(cut)
    cut.close()
    remainder = engine_of(folders, monkeypatch, "plain").resume(tmp_path / "work")
    list(remainder)
    assert remainder.tokens.tolist() == whole.tokens.tolist()


@pytest.mark.parametrize("name", [NAME, NAME + "-k8v4"])
def test_texts_share_the_rows_of_whole_prompt_chunks(folders, monkeypatch, name):
    """Rows of the last, shorter chunk and of written tokens are computed by other operations, and stay out."""
    use_small_chunks(monkeypatch)
    monkeypatch.setenv("LONGDRAFT_KERNELS", name)
    engine = longdraft.load(str(folders["model"]), drafter="suffix", device=DEVICE, dtype="float32", cache_ram=50)
    prompt, params = prompt_of(44), SamplingParams(max_new_tokens=4, seed=5, ignore_eos=True)
    text_of_shared_chunks(engine, prompt, params)


def test_the_cache_is_reserved_in_full_and_an_error_says_how_many_tokens_would_fit(folders, monkeypatch):
    engine = engine_of(folders, monkeypatch)
    text = engine.generate(prompt_of(30), PARAMS)
    before = text.step.cache.nbytes
    per_token = engine.model.cache_bytes_per_token
    assert before >= (30 + NEW) * per_token
    next(text)
    assert text.step.cache.nbytes == before
    text.close()
    monkeypatch.setattr(type(engine.model.kernels), "free_bytes", lambda self: 1500 * per_token)
    monkeypatch.setattr(memory_plan, "prompt_bytes", lambda *given, **options: 0)
    with pytest.raises(MemoryError, match=r"the cache of \d+ tokens takes .* 326 tokens would fit.*int4 and .*-k8v4"):
        engine.generate(prompt_of(30), SamplingParams(max_new_tokens=450))
    monkeypatch.setattr(type(engine.model.kernels), "free_bytes", lambda self: 30_000)
    with pytest.raises(MemoryError, match=r"the weights take .* what would fit: .*int8"):
        engine_of(folders, monkeypatch)


def test_log_probabilities_of_a_text_are_those_that_the_host_computes(folders, monkeypatch):
    """The host reads a few numbers of each row, not its logits."""
    found = []
    for is_on_device in (True, False):
        monkeypatch.setattr(DeviceSampler, "supports", staticmethod(lambda params, kernels, on=is_on_device: on))
        text = engine_of(folders, monkeypatch).generate(prompt_of(30), PARAMS, logprobs=2)
        found.append([event.logprobs for event in text])
        assert (text.step.sampler.on_device is not None) == is_on_device
    assert found[0] == found[1] and all(len(each.top) == 2 for step in found[0] for each in step)


def test_log_probabilities_of_a_prompt_are_the_same_bits_beside_another_text(folders, monkeypatch):
    """... and those of the model's logits, also where chunks of the prompt meet."""
    use_small_chunks(monkeypatch)
    engine, prompt = engine_of(folders, monkeypatch), prompt_of(44)
    alone = next(engine.generate(prompt, PARAMS, prompt_logprobs=2)).prompt_logprobs
    rows = chain_rows(prompt[:-1], 0)
    expected = engine.model.forward(rows, engine.model.new_cache(), 43).logits.log_softmax(-1).cpu()
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert [each.logprob for each in alone[1:]] == pytest.approx(own.tolist(), abs=1e-3)
    with engine.batch() as batch:
        batch.add(prompt_of(30), PARAMS)
        text, found = batch.add(prompt, PARAMS, prompt_logprobs=2), {}
        while batch:
            found.update({number: event.prompt_logprobs for number, event in batch.step() if event.prompt_logprobs})
    assert found == {text: alone}


def test_a_bucket_of_rows_allocates_its_buffers_and_graph_once(folders):
    from longdraft.kernels.cuda.graph_cache import BUCKETS

    seen, model = [], load(folders["model"])  # of its own: what reads the logits keeps the graphs

    class Recorder:
        is_on = False

        def run(self, owner, work, key=None):
            seen.append((owner.rows, id(owner)))
            work()

    cache = model.new_cache()
    cache.reserve(300)
    model.kernels.graphs = Recorder()
    for rows in (3, 1, 4, 1):
        model.forward(chain_rows([5] * rows, cache.length), cache)
        cache.commit([0])
    assert [rows for rows, _ in seen] == [4, 1, 4, 1] and set(dict(seen)) <= set(BUCKETS)
    assert len(set(seen)) == 2


def test_kernel_names_that_the_device_cannot_run_are_refused(monkeypatch):
    with pytest.raises(UsageError, match=r"allowed on cuda: auto, triton-16, triton-32, triton-64, .*-k8v4, reference"):
        kernels.choose("cuda", "bfloat16", "amx")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match=r"allowed here: auto, .*reference"):
        kernels.choose("cpu", "float32", "triton-16")


@needs_cuda
@pytest.mark.needs_cuda
def test_graphs_change_nothing(model, plain):
    model.kernels.graphs.is_on = False
    try:
        assert generate(model, PARAMS, by_name("plain")) == plain
    finally:
        model.kernels.graphs.is_on = True


@needs_cuda
@pytest.mark.needs_cuda
def test_a_whole_run_of_the_bundled_model_on_the_device():
    texts = []
    for drafter in ("plain", "tokenswift", "auto"):
        engine = longdraft.load("novelist", drafter=drafter, device="cuda")
        text = engine.generate("It was a dark and stormy night", SamplingParams(max_new_tokens=600, seed=7, min_p=0.1))
        *_, last = text
        assert last.stats["exactness"] == "bit-exact"
        texts.append(text.tokens.tolist())
    assert texts[0] == texts[1] == texts[2]


