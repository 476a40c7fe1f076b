"""A stretched model has a large model's shape and a small model's predictions (longdraft_bench/models)."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.checkpoints import VOCAB, load, make_checkpoint
from helpers.eagle import load_eagle, make_eagle
from helpers.families import make_hybrid
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.parts.eagle import Eagle
from longdraft.parts.eagle_config import canonical_names
from longdraft_bench.models.stretched import Correspondence, fill, read_by
from longdraft_bench.models.stretched_eagle import stretched_eagle
from longdraft_bench.models.stretched_model import stretch

pytestmark = pytest.mark.full

# Four times the width and the head size: the factors of norms and queries are powers of two, and no bit is lost.
LARGE = {"hidden_size": 192, "num_hidden_layers": 5, "num_attention_heads": 12, "num_key_value_heads": 2,
         "head_dim": 48, "intermediate_size": 250, "vocab_size": VOCAB + 40}

LARGE_HYBRID = LARGE | {"num_hidden_layers": 4, "head_dim": 64, "linear_conv_kernel_dim": 4,
                        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 3,
                        "linear_num_value_heads": 9, "linear_key_head_dim": 32, "linear_value_head_dim": 32}


def logits_of(folder, tokens):
    model = load(folder)
    return model.forward(chain_rows(tokens, 0), model.new_cache(), len(tokens)).logits


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_logits_of_a_stretched_model_equal_those_of_the_small_one(tmp_path, kv_heads):
    make_checkpoint(tmp_path / "small", dtype=torch.bfloat16, num_key_value_heads=kv_heads, seed=3)
    stretch(tmp_path / "small", LARGE, tmp_path / "large")
    tokens = list(range(2, 60))
    small, large = (logits_of(tmp_path / name, tokens) for name in ("small", "large"))
    torch.testing.assert_close(large[:, :VOCAB], small, atol=1e-3, rtol=1e-4)
    assert (large[:, VOCAB:] < small.min() - 20).all(), "a new token can be chosen"


def eagle_logits(model: Transformer, head: Eagle, tokens: list[int]) -> torch.Tensor:
    """The head's logits after each token but the last."""
    model = model.with_taps(head.taps)
    cache = model.new_cache()
    model.forward(chain_rows(tokens[:-1], 0), cache)
    cache.commit(range(len(tokens) - 1))
    assert cache.taps
    (run,) = cache.taps.take()
    stores = [model.kernels.new_store(head.config.layer.num_kv_heads, head.config.layer.head_dim)]
    count = len(tokens) - 1
    rows = head.forward(head.fuse(run.states), tokens[1:], range(count), stores, 0,
                        torch.arange(-1, count - 1, dtype=torch.int32))
    return head.logits(rows.hidden)


def test_guesses_of_a_stretched_eagle_head_equal_those_of_the_small_one(tmp_path):
    make_checkpoint(tmp_path / "small", dtype=torch.bfloat16, num_key_value_heads=1, seed=3)
    stretch(tmp_path / "small", LARGE, tmp_path / "large")
    small, large = (load(tmp_path / name) for name in ("small", "large"))
    make_eagle(tmp_path / "eagle", kv_heads=1, draft_vocab=VOCAB, fc_norm=True, norm_output=True,
               norm_before_residual=True)
    head = load_eagle(tmp_path / "eagle", small)
    files = TensorFiles(tmp_path / "eagle")
    weights = {own: files.read(name).float() for own, name in canonical_names(files).items()}
    stretched = stretched_eagle(head.config, weights, large, small.config.num_layers)
    assert stretched.taps == (1, 3, 5) and stretched.config.layer.hidden_size == LARGE["hidden_size"]
    tokens = list(range(2, 40))
    wanted, found = eagle_logits(small, head, tokens), eagle_logits(large, stretched, tokens)
    torch.testing.assert_close(found[:, :VOCAB], wanted, atol=2e-3, rtol=1e-3)
    assert (found[:, VOCAB:] < wanted.min() - 20).all()


@pytest.mark.parametrize("layers", [4, 6])
def test_a_stretched_hybrid_has_the_logits_of_the_small_one(tmp_path, layers):
    """With states that remember hundreds of rows, more heads in each group, and heads of other sizes."""
    make_hybrid(tmp_path / "small", dtype=torch.bfloat16)
    stretch(tmp_path / "small", LARGE_HYBRID | {
        "num_hidden_layers": layers,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 4)[:layers]},
        tmp_path / "large")
    tokens = [7 * place % 300 for place in range(90)]
    small, large = (logits_of(tmp_path / name, tokens) for name in ("small", "large"))
    torch.testing.assert_close(large[:, :VOCAB], small, atol=2e-3, rtol=1e-3)
    assert (large[:, VOCAB:] < small.min() - 10).all(), "a new token can be chosen"


def test_a_shape_without_room_for_the_delta_layers_is_refused(tmp_path):
    make_hybrid(tmp_path / "small", dtype=torch.bfloat16)
    for wrong in ({"linear_num_key_heads": 1}, {"layer_types": ["linear_attention", "full_attention"] * 2}):
        with pytest.raises(ValueError, match="the large shape must have at least"):
            stretch(tmp_path / "small", LARGE_HYBRID | wrong, tmp_path / "large")


def test_rows_that_the_small_model_read_serve_the_stretched_one(tmp_path):
    make_checkpoint(tmp_path / "small", dtype=torch.bfloat16, num_key_value_heads=1, seed=3)
    stretch(tmp_path / "small", LARGE, tmp_path / "large")
    small, large = (load(tmp_path / name, "bfloat16") for name in ("small", "large"))
    tokens = list(range(2, 60))
    cache = large.new_cache()
    fill(cache, read_by(small, tokens[:50]), large, Correspondence(small.config, large.config))
    assert cache.length == 50
    wanted = large.forward(chain_rows(tokens, 0), large.new_cache(), 8).logits
    found = large.forward(chain_rows(tokens[50:], 50), cache, 8).logits
    torch.testing.assert_close(found[:, :VOCAB], wanted[:, :VOCAB], atol=0.05, rtol=0.05)


def test_a_stretched_model_has_the_tensors_of_the_large_shape(tmp_path):
    make_checkpoint(tmp_path / "small", dtype=torch.bfloat16, num_key_value_heads=2)
    stretch(tmp_path / "small", LARGE, tmp_path / "large")
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    assert config | LARGE == config and not config["tie_word_embeddings"]
    layers = load(tmp_path / "large").weights.layers
    assert len(layers) == 5 and layers[0].gate_up.out_features == 2 * 250


@pytest.mark.parametrize("change", [{"head_dim": 20}, {"num_hidden_layers": 1}, {"num_attention_heads": 2}])
def test_a_shape_that_cannot_hold_the_small_model_is_refused(tmp_path, change):
    make_checkpoint(tmp_path / "small", num_key_value_heads=2)
    with pytest.raises(ValueError, match="the large shape must have at least"):
        stretch(tmp_path / "small", LARGE | change, tmp_path / "large")
