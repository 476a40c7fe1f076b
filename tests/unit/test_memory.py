"""The memory of a prompt besides its cache. The bytes of buffers are counted, so other programs cannot disturb it."""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import load, make_checkpoint
from longdraft.kernels.cpu import native
from longdraft.kernels.interface import REPORTED_ROWS
from longdraft.model.transformer import Transformer, chain_rows

pytestmark = pytest.mark.skipif(not native.variants(), reason="the compiled kernels are missing")

CHUNK, HIDDEN, INNER, LAYERS = 512, 128, 2048, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Transformer:
    folder = tmp_path_factory.mktemp("wide")
    make_checkpoint(folder, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
                    num_attention_heads=4, num_key_value_heads=2)
    return load(folder, "bfloat16")


def test_the_kernels_give_back_what_a_prompt_needed_and_steps_do_not(model):
    cache = model.new_cache()
    model.forward(chain_rows([1] * CHUNK, 0), cache, is_prompt=True)
    cache.commit(range(CHUNK))
    busy = native.workspace_bytes()
    for position in range(CHUNK, CHUNK + 300 // LAYERS):
        model.forward(chain_rows([1], position), cache, 1)
        cache.commit([0])
    gate_up = CHUNK * 2 * INNER * 2  # bytes of the largest intermediate result
    assert busy - native.workspace_bytes() >= 3 * gate_up, "for the input, the output and the activations of a product"


def test_a_prompt_reports_the_attention_of_its_last_rows(model):
    tokens = torch.randint(3, 90, (CHUNK,), generator=torch.Generator().manual_seed(1)).tolist()
    of_a_prompt, of_all = (model.forward(chain_rows(tokens, 0), model.new_cache(), is_prompt=is_prompt)
                           for is_prompt in (True, False))
    assert torch.equal(of_a_prompt.hidden, of_all.hidden)
    for some, every in zip(of_a_prompt.attention_output, of_all.attention_output, strict=True):
        assert some.shape[1] == REPORTED_ROWS and torch.equal(some, every[:, -REPORTED_ROWS:])
