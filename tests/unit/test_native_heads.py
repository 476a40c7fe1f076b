"""Native multi-token prediction: the head computes what its layer computes in `transformers`, and drafts exactly."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

import longdraft
from helpers.checkpoints import load
from helpers.equality import prompt_of
from helpers.families import add_native_head, make_family, make_hybrid
from longdraft.core import SamplingParams
from longdraft.errors import ModelError
from longdraft.model.native_heads import load_native_head
from longdraft.model.transformer import chain_rows

PARAMS = SamplingParams(max_new_tokens=30, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("native")
    make_hybrid(where)
    add_native_head(where)
    return where


@torch.no_grad()
def test_its_logits_are_those_of_the_layer_in_transformers(tmp_path):
    """Of rows of the text, and of the head's own rows behind them."""
    make_hybrid(tmp_path)
    layer = add_native_head(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = prompt_of(20)
    rows = theirs.model(torch.tensor([tokens])).last_hidden_state[0]
    rotary = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(theirs.config)

    def outputs(y: torch.Tensor, following: list[int]) -> torch.Tensor:
        e = layer["pre_fc_norm_embedding"](theirs.model.embed_tokens(torch.tensor(following)))
        x = layer["fc"](torch.cat([e, layer["pre_fc_norm_hidden"](y)], 1))[None]
        mask = torch.full((len(y), len(y)), -torch.inf).triu(1)[None, None]
        places = rotary(x, torch.arange(len(y)).expand(3, 1, -1))
        found = layer["layers"][0](x, position_embeddings=places, attention_mask=mask)
        return layer["norm"](found[0] if found.ndim == 3 else found)

    known = outputs(rows[:19], tokens[1:])
    expected = outputs(torch.cat([rows[:19], known[-1:]]), [*tokens[1:], 7])

    target = load(tmp_path)
    head = load_native_head(tmp_path, target)
    tapped = target.with_taps(head.taps)
    cache = tapped.new_cache()
    tapped.forward(chain_rows(tokens, 0), cache)
    cache.commit(range(20))
    run, = cache.taps.take()
    stores = [head.kernels.new_store(2, 16)]
    y = head.fuse(run.states[:, :19])
    found = head.forward(y, tokens[1:], range(19), stores, 0, torch.arange(-1, 18, dtype=torch.int32))
    torch.testing.assert_close(head.logits(found.hidden), theirs.lm_head(known), atol=2e-3, rtol=1e-3)
    stores[0].write(0, found.k[0], found.v[0])
    again = head.forward(head.fed_back(found.hidden[-1:]), [7], [19], stores, 19, torch.tensor([-1], dtype=torch.int32))
    torch.testing.assert_close(head.logits(again.hidden), theirs.lm_head(expected[-1:]), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype, quantize", [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int4")])
def test_its_drafts_do_not_change_the_text(folder, dtype, quantize):
    engine = longdraft.load(str(folder), drafter="eagle", dtype=dtype, quantize=quantize, quantized_cache="none")
    plain, drafted = (each.generate(prompt_of(60), PARAMS) for each in (engine.with_drafter("plain"), engine))
    assert "".join(event.text for event in plain) == "".join(event.text for event in drafted)
    assert plain.tokens.tolist() == drafted.tokens.tolist()
    assert drafted.stats()["draft_tokens"] > 20


def test_one_of_experts_is_read_too(tmp_path):
    make_family(tmp_path, "qwen3_5_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    layer = next(name.split(".")[2] for name in tensors if "q_proj" in name)
    copied = {name.replace(f"model.layers.{layer}.", "mtp.layers.0."): tensor.clone()
              for name, tensor in tensors.items() if name.startswith(f"model.layers.{layer}.")}
    hidden = len(tensors["model.norm.weight"])
    copied |= {f"mtp.{name}.weight": torch.zeros(hidden)
               for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    save_file(tensors | copied | {"mtp.fc.weight": torch.randn(hidden, 2 * hidden)}, tmp_path / "model.safetensors")
    engine = longdraft.load(str(tmp_path), drafter="eagle")
    plain, drafted = (each.generate(prompt_of(60), PARAMS) for each in (engine.with_drafter("plain"), engine))
    assert [event.tokens for event in plain] and sum((event.tokens for event in drafted), ()) == tuple(plain.tokens)


def test_a_head_that_is_damaged_is_left_out_unless_it_is_asked_for(folder, tmp_path, caplog):
    shutil.copytree(folder, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    assert longdraft.load(str(tmp_path / "m")).loaded.eagle is None
    assert "drafting without eagle" in caplog.text
    with pytest.raises(ModelError, match=r"mtp\.fc\.weight"):
        longdraft.load(str(tmp_path / "m"), drafter="eagle")
    tensors |= {name.replace("layers.0", "layers.1"): tensor.clone()
                for name, tensor in tensors.items() if "mtp.layers" in name}
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ModelError, match="several layers for native drafts"):
        longdraft.load(str(tmp_path / "m"), drafter="eagle")
