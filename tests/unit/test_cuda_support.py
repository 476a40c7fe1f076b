"""The tokens that the filters leave, and log-probabilities, on the device against the host's definition, to the bit.

Without a device in Triton's interpreter (see helpers.cuda_kernels).
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it
import triton
import triton.language as tl

from helpers.cuda_kernels import DEVICE
from longdraft import kernels
from longdraft.kernels.cuda import jit_support
from longdraft.kernels.cuda.launch import UNFUSED, ceil_div
from longdraft.kernels.cuda.support import BLOCK, FilterRules, SupportSearch
from longdraft.kernels.cuda.text_rows import TextNeeds, TextRows, TextSupport, entry_of
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree, root_only
from longdraft.sampling import process
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.logprobs import path_logprobs

pytestmark = pytest.mark.full

PARAMS = [
    dict(top_k=top_k, top_p=top_p, min_p=min_p, eta_cutoff=eta, min_tokens_to_keep=at_least, **temperature)
    for top_k, top_p, min_p, eta in itertools.product((0, 20), (1.0, 0.9), (0.0, 0.05), (0.0, 2e-3))
    for at_least in ((1, 7) if min_p or eta else (1,))
    for temperature in (dict(temperature=0.6), dict(temperature=1.7, temperature_last=True))
]
EXTREME = [dict(top_p=1 - 2.0**-53), dict(top_p=1e-12), dict(top_k=1), dict(top_k=5000), dict(eta_cutoff=0.999),
           dict(top_k=3, top_p=0.5, min_p=0.99, min_tokens_to_keep=2), dict(temperature=1e-3, top_p=0.5),
           dict(temperature=50.0, top_p=0.999, top_k=600, eta_cutoff=1e-4)]


def rows(vocabulary: int) -> torch.Tensor:
    """Rows that are broad, narrow, full of ties, with zeros of both signs, and with few finite logits."""
    pick = torch.Generator().manual_seed(vocabulary)
    made = [spread * torch.randn(vocabulary, generator=pick) for spread in (0.3, 3.0, 12.0)]
    made += [torch.randint(-2, 3, (vocabulary,), generator=pick).float(), torch.full((vocabulary,), -1.5)]
    made.append(torch.where(torch.arange(vocabulary) % 2 == 0, -0.0, 0.0))
    lonely = torch.full((vocabulary,), -math.inf)
    lonely[vocabulary // 2 :: 3] = 2.0
    made += [lonely, 1e30 * made[1]]
    return torch.stack(made)


def support_of(logits: torch.Tensor, params: SamplingParams) -> list[list[int]]:
    least, eta = (math.log(value) if value > 0 else None for value in (params.min_p, params.eta_cutoff))
    rules = FilterRules(process.filter_temperature(params), params.top_k, params.top_p, least, eta,
                        params.min_tokens_to_keep)
    rows, vocabulary = logits.shape
    settings = torch.tensor(rows * [[params.temperature, *rules.settings, 0.0]], dtype=torch.float64, device=DEVICE)
    most, fewest = (torch.full((rows,), goal, device=DEVICE) for goal in rules.goals)
    found, on_it = SupportSearch(rules.kinds, vocabulary, settings, (most, fewest)), logits.to(DEVICE)
    bests = bests_of(logits)
    with np.errstate(all="ignore"):
        found.find(on_it, bests)
        return tokens_of(found.orders(on_it, bests))


def bests_of(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit of each block."""
    blocks = ceil_div(logits.shape[1], BLOCK)
    padded = torch.nn.functional.pad(logits, (0, blocks * BLOCK - logits.shape[1]), value=-math.inf)
    return padded.view(len(logits), blocks, BLOCK).amax(2).contiguous().to(DEVICE)


def tokens_of(orders: torch.Tensor) -> list[list[int]]:
    """The tokens that the filters leave of each row."""
    return [(row > jit_support.NO_CUT.value).nonzero()[:, 0].tolist() for row in orders.cpu()]


@pytest.mark.parametrize("settings", [*PARAMS[::11], *EXTREME], ids=lambda each: " ".join(map(str, each.items())))
def test_the_filters_leave_the_tokens_that_they_leave_on_the_host(settings):
    params = SamplingParams(**settings)
    logits = rows(1500)
    found = support_of(logits, params)
    for row, kept in zip(logits.numpy(), found, strict=True):
        assert kept == process.filtered(row, params).ids.tolist()


@pytest.mark.parametrize("settings", [PARAMS[place ^ place // 2 % 2] for place in range(0, len(PARAMS), 2)])
def test_a_small_vocabulary_is_filtered_as_on_the_host(settings):
    params, logits = SamplingParams(**settings), rows(7)[[1, 3, 5, 6]]
    assert support_of(logits, params) == [process.filtered(row, params).ids.tolist() for row in logits.numpy()]


@pytest.mark.parametrize("vocabulary", [7, 1500])
def test_rows_with_settings_of_their_own_keep_the_tokens_that_they_keep_alone(vocabulary):
    """A filter that only other rows have leaves all tokens of a row, whatever these others are."""
    settings = [SamplingParams(seed=1, **each) for each in (dict(temperature=0.0), {}, *PARAMS[1::9], *EXTREME)]
    logits, device = rows(vocabulary)[[1, 3, 6]], kernels.choose(DEVICE, "float32", "triton-16")
    alone = [[row.isfinite().nonzero()[:, 0].tolist() for row in logits] if each.temperature == 0 else
             support_of(logits, each) for each in settings]
    for company in (range(len(settings)), [1, -1, 0], [1, 2, -4], [-3, 0]):
        held = [Sampler(settings[place], kernels=device).on_device._held for place in company]
        entries = np.stack([entry_of(text, 0, 1, 0) for text in held])
        texts = torch.arange(len(held), dtype=torch.int32, device=DEVICE).repeat_interleave(len(logits))
        of_text = texts[:, None]
        support = TextSupport(TextRows(texts, of_text, texts, texts, torch.from_numpy(entries).to(DEVICE).view(-1),
                                       of_text, of_text), vocabulary)
        given, needs = logits.repeat(len(held), 1).to(DEVICE), TextNeeds.of([(each, 0) for each in held])
        bests = bests_of(given)
        with np.errstate(all="ignore"):
            support.read_filters()
            _, flags = support.find(given, bests, needs)
            found = tokens_of(support.search(needs).orders(given, bests))
        assert flags == needs.filters.flags
        assert found == [kept for place in company for kept in alone[place]]


@triton.jit
def _masses_kernel(gaps, masses, count, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    gap = tl.load(gaps + place, mask=place < count, other=0.0)
    tl.store(masses + place, jit_support.mass_of(gap), mask=place < count)


def test_masses_have_the_bits_of_the_host():
    gaps = np.concatenate([np.linspace(0, 32, 3000), np.random.default_rng(1).exponential(3, 3000)])
    expected = np.where(gaps < process.NEGLIGIBLE, process._mass_of(np.minimum(gaps, 40)), 0)
    found = torch.empty(len(gaps), dtype=torch.int64, device=DEVICE)
    with np.errstate(all="ignore"):
        _masses_kernel[(1,)](torch.from_numpy(gaps).to(DEVICE), found, len(gaps), BLOCK=8192, **UNFUSED)
    assert found.tolist() == expected.tolist() and process._mass_of(np.array([process.NEGLIGIBLE])) == 0


LAWS = {
    "greedy": dict(temperature=0.0, logit_bias=((3, 4.0), (1200, -2.0))),
    "llama": dict(temperature=0.6, top_p=0.9, min_new_tokens=2),
    "qwen": dict(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, logit_bias=((7, 2.5),)),
    "last": dict(temperature=1.4, temperature_last=True, min_p=0.05, eta_cutoff=1e-3, min_tokens_to_keep=3),
}


@pytest.mark.parametrize("law", LAWS)
def test_choices_guesses_and_log_probabilities_are_those_of_the_host(law):
    vocabulary = 1300
    params = SamplingParams(max_new_tokens=50, seed=2**64 - 59, **LAWS[law])
    context = Context([(7 * place) % 90 for place in range(40)])
    host = Sampler(params, [5, 1200], is_fast=False)
    device = Sampler(params, [5, 1200], kernels=kernels.choose(DEVICE, "float32", "triton-16"))
    assert device.on_device
    tree = Tree((context.last, 3, 9, 4, 4), (-1, 0, 0, 1, 3), ("", *["liar"] * 4))
    logits = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(3)) * 2
    logits[:, :90] += 3
    with np.errstate(all="ignore"):
        expected = host.choose(logits, tree, context)
        assert device.choose(logits.to(DEVICE), tree, context) == expected
        both = (host, logits), (device, logits.to(DEVICE))
        guesses = [each.ranked(given[1], context, [3], 4) for each, given in both]
        path, tokens = [0, 1, 3], [expected[node] for node in (0, 1, 3)]
        entries = [path_logprobs(each, given, tree, path, tokens, context, 5) for each, given in both]
    assert guesses[1].tokens == guesses[0].tokens[: len(guesses[1].tokens)] and guesses[1].lead == guesses[0].lead
    assert entries[0] == entries[1]


def test_log_probabilities_of_a_single_token_that_the_filters_leave():
    params = SamplingParams(max_new_tokens=5, seed=1, top_k=1)
    device = Sampler(params, kernels=kernels.choose(DEVICE, "float32", "triton-16"))
    tree = root_only(2)
    (entry,) = path_logprobs(device, torch.tensor([[1.0, 2.0, 2.0]], device=DEVICE), tree, [0], [1], Context([2]), 4)
    assert entry == (1, 0.0, ((1, 0.0),))
