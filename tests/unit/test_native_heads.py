"""Native multi-token prediction: the head computes what its layer computes in `transformers`, and drafts exactly."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5

import longdraft
from helpers.checkpoints import load
from helpers.equality import prompt_of
from helpers.families import HYBRIDS, add_native_head, make_family, make_hybrid, move_native_head
from helpers.family_checks import check_batch_and_resumed_text
from helpers.gguf_files import HYBRID_ARCHS, convert, stored, theirs
from longdraft.errors import ModelError
from longdraft.model.transformer import chain_rows
from longdraft.parts.eagle import Eagle
from longdraft.parts.native_heads import load_native_head, load_speculators_head
from longdraft.request.sampling_params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=30, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("native")
    make_hybrid(where)
    add_native_head(where)
    return where


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_its_logits_are_those_of_the_layer_in_transformers(tmp_path, family):
    """Of rows of the text, and of the head's own rows after them. The head of Qwen3 has a folder of its own."""
    model = tmp_path / "model"
    make_family(model, family, **({} if family == "qwen3" else dict(num_hidden_layers=4)))
    layer = add_native_head(model)
    whole = AutoModelForCausalLM.from_pretrained(model)
    tokens = prompt_of(20)
    rows = whole.model(torch.tensor([tokens])).last_hidden_state[0]
    rotary = (modeling_qwen3.Qwen3RotaryEmbedding if family == "qwen3" else
              modeling_qwen3_5.Qwen3_5TextRotaryEmbedding)(whole.config)

    def outputs(y: torch.Tensor, following: list[int]) -> torch.Tensor:
        e = layer["pre_fc_norm_embedding"](whole.model.embed_tokens(torch.tensor(following)))
        x = layer["fc"](torch.cat([e, layer["pre_fc_norm_hidden"](y)], 1))[None]
        mask = torch.full((len(y), len(y)), -torch.inf).triu(1)[None, None]
        positions = torch.arange(len(y))
        places = rotary(x, positions[None] if family == "qwen3" else positions.expand(3, 1, -1))
        found = layer["layers"][0](x, position_embeddings=places, attention_mask=mask)
        return layer["norm"](found[0] if found.ndim == 3 else found)

    known = outputs(rows[:19], tokens[1:])
    expected = outputs(torch.cat([rows[:19], known[-1:]]), [*tokens[1:], 7])

    if family == "qwen3":
        move_native_head(model, tmp_path / "head")
    target = load(model)
    head = load_speculators_head(tmp_path / "head", target) if family == "qwen3" else load_native_head(model, target)
    tapped = target.with_taps(head.taps)
    cache = tapped.new_cache()
    tapped.forward(chain_rows(tokens, 0), cache)
    cache.commit(range(20))
    run, = cache.taps.take()
    stores = [head.kernels.new_store(2, 16)]
    y = head.fuse(run.states[:, :19])
    found = head.forward(y, tokens[1:], range(19), stores, 0, torch.arange(-1, 18, dtype=torch.int32))
    torch.testing.assert_close(head.logits(found.hidden), whole.lm_head(known), atol=2e-3, rtol=1e-3)
    stores[0].write(0, found.k[0], found.v[0])
    again = head.forward(head.fed_back(found.hidden[-1:]), [7], [19], stores, 19, torch.tensor([-1], dtype=torch.int32))
    torch.testing.assert_close(head.logits(again.hidden), whole.lm_head(expected[-1:]), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype, quantize", [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int4")])
def test_its_drafts_do_not_change_the_text(folder, dtype, quantize):
    engine = longdraft.load(str(folder), drafter="eagle", dtype=dtype, quantize=quantize, quantized_cache="none")
    plain, drafted = (each.generate(prompt_of(60), PARAMS) for each in (engine.with_drafter("plain"), engine))
    assert "".join(event.text for event in plain) == "".join(event.text for event in drafted)
    assert plain.tokens.tolist() == drafted.tokens.tolist()
    assert drafted.stats()["draft_tokens"] > 20


def test_texts_of_a_batch_and_resumed_texts_are_the_plain_ones(folder, tmp_path):
    check_batch_and_resumed_text(folder, "eagle", tmp_path / "j")


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
def test_one_of_experts_is_read_too(tmp_path, monkeypatch, name):
    """Its chains are the same in one call as in single steps."""
    make_family(tmp_path, name)
    copy_layer_as_head(tmp_path)
    engine = longdraft.load(str(tmp_path), drafter="eagle")
    plain, drafted = (each.generate(prompt_of(60), PARAMS) for each in (engine.with_drafter("plain"), engine))
    assert [event.tokens for event in plain] and sum((event.tokens for event in drafted), ()) == tuple(plain.tokens)
    monkeypatch.setattr(Eagle, "model_layers", None)
    list(single := engine.generate(prompt_of(60), PARAMS))
    assert single.stats()["by_source"] == drafted.stats()["by_source"] and drafted.stats()["draft_tokens"] > 20


@pytest.mark.parametrize("name, base", [("qwen3_5", "folder"), ("qwen3_5", "gguf"), ("qwen3_5_moe", "folder"),
                                        ("qwen3_next", "folder")])
def test_a_head_in_a_folder_of_its_own_is_the_same_head(tmp_path, name, base):
    """In the format of `speculators`, also for a target from GGUF, whose norms contain the 1 that a folder's leave out.
    """
    model, head = tmp_path / "model", tmp_path / "head"
    theirs = make_family(model, name)
    copy_layer_as_head(model)
    native = longdraft.load(str(model), drafter="eagle").generate(prompt_of(60), PARAMS)
    expected = [(event.tokens, event.drafted, event.sources) for event in native]
    move_native_head(model, head)
    if base == "gguf":
        convert(model, theirs, tmp_path / "model.gguf")
    path = tmp_path / "model.gguf" if base == "gguf" else model
    alone = longdraft.load(str(path), drafter="eagle", heads=str(head)).generate(prompt_of(60), PARAMS)
    assert [(event.tokens, event.drafted, event.sources) for event in alone] == expected
    assert alone.stats()["draft_tokens"] > 20


@pytest.mark.parametrize("changes, message", [
    (dict(num_nextn_predict_layers=2), "num_nextn_predict_layers is 2 in config.json; supported: 1"),
    (dict(transformer_layer_config={"model_type": "gemma2"}), "of the type 'gemma2'; supported: qwen3, qwen3_next"),
    (dict(transformer_layer_config=None), "of the type None"),
    ({}, r"does not match the model that it shall draft for: .*mtp_layers\.0\.mlp"),  # of a model of another width
])
def test_a_head_of_another_kind_or_model_is_refused(folder, tmp_path, changes, message):
    model, head = tmp_path / "model", tmp_path / "head"
    make_family(model, "qwen3_5", intermediate_size=80)
    add_native_head(model)
    move_native_head(model, head)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message) as caught:
        longdraft.load(str(folder), drafter="eagle", heads=str(head))
    assert "\n" not in str(caught.value)


def copy_layer_as_head(folder: Path) -> None:
    """Give a hybrid of `make_family` an `mtp` layer that is a copy of its attention layer."""
    tensors = load_file(folder / "model.safetensors")
    layer = next(name.split(".")[2] for name in tensors if "q_proj" in name)
    copied = {name.replace(f"model.layers.{layer}.", "mtp.layers.0."): tensor.clone()
              for name, tensor in tensors.items() if name.startswith(f"model.layers.{layer}.")}
    hidden = len(tensors["model.norm.weight"])
    copied |= {f"mtp.{name}.weight": torch.randn(hidden) * 0.2
               for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    save_file(tensors | copied | {"mtp.fc.weight": torch.randn(hidden, 2 * hidden)}, folder / "model.safetensors",
              {"format": "pt"})


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
    with pytest.raises(ModelError, match="has 2 layers for native drafts; supported: one"):
        longdraft.load(str(tmp_path / "m"), drafter="eagle")


# From GGUF files.

NEXTN = {"fc": "nextn.eh_proj", "pre_fc_norm_embedding": "nextn.enorm", "pre_fc_norm_hidden": "nextn.hnorm",
         "norm": "nextn.shared_head_norm"}


def converted(folder: Path, path: Path, kind: str = "F32", layers: int = 1) -> None:
    """The model of a folder with its draft layer, by the rules of llama.cpp's converter: the layer is a block after
    the others, and norms are 1 + w.

    layers  copies of the draft layer
    """
    model = AutoModelForCausalLM.from_pretrained(folder)
    arch, tensors, experts = HYBRID_ARCHS[model.config.model_type], {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem = name.removeprefix("mtp.").removesuffix(".weight")
        if stem in NEXTN:
            tensors[f"blk.4.{NEXTN[stem]}.weight"] = stored(tensor if stem == "fc" else tensor.float() + 1,
                                                            kind if stem == "fc" else "F32")
        elif found := re.fullmatch(r"layers\.0\.mlp\.experts\.(\d+)\.(\w+)_proj", stem):
            experts.setdefault(found[2], {})[int(found[1])] = tensor
        elif name.startswith("mtp."):
            part = theirs(f"model.{stem}.weight", arch).partition("blk.0.")[2]
            rows = stored(tensor.float() + 1 if tensor.ndim == 1 else tensor, "F32" if tensor.ndim == 1 else kind)
            tensors |= {f"blk.{4 + layer}.{part}": rows for layer in range(layers)}
    for part, each in experts.items():
        tensors[f"blk.4.ffn_{part}_exps.weight"] = stored(torch.stack([each[i] for i in range(len(each))]), kind)
    counts = {f"{arch}.block_count": 4 + layers, f"{arch}.nextn_predict_layers": layers}
    convert(folder, model, path, kind, counts, tensors)


def outputs_of(path: Path, dtype: str) -> list[torch.Tensor]:
    """What the head of a model computes for six rows."""
    target = load(path, dtype)
    head = load_native_head(path, target)
    y = torch.randn(6, target.config.hidden_size, generator=torch.Generator().manual_seed(1)).to(target.kernels.dtype)
    stores = [head.kernels.new_store(2, 16)]
    rows = head.forward(y, prompt_of(6), range(6), stores, 0, torch.arange(-1, 5, dtype=torch.int32))
    return [head.logits(rows.hidden), rows.k, rows.v, head.fed_back(rows.hidden)]


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("kind, dtype", [("F32", "float32"), ("BF16", "bfloat16")])
def test_the_head_of_a_gguf_file_is_that_of_the_folder(tmp_path, name, kind, dtype):
    make_family(tmp_path / "folder", name)
    copy_layer_as_head(tmp_path / "folder")
    converted(tmp_path / "folder", tmp_path / "model.gguf", kind)
    pairs = zip(*(outputs_of(tmp_path / path, dtype) for path in ("folder", "model.gguf")), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("kind, quantize", [("BF16", "none"), ("Q8_0", "file"), ("Q8_0", "int4")])
def test_drafts_of_a_gguf_file_do_not_change_its_text(tmp_path, kind, quantize):
    make_family(tmp_path, "qwen3_5", hidden_size=64, linear_key_head_dim=32, linear_value_head_dim=32)
    copy_layer_as_head(tmp_path)
    converted(tmp_path, tmp_path / "model.gguf", kind)
    engine = longdraft.load(str(tmp_path / "model.gguf"), drafter="eagle", quantize=quantize, quantized_cache="none")
    plain, drafted = (each.generate(prompt_of(60), PARAMS) for each in (engine.with_drafter("plain"), engine))
    assert [event.tokens for event in plain] and sum((event.tokens for event in drafted), ()) == tuple(plain.tokens)
    assert drafted.stats()["draft_tokens"] > 20


def test_what_is_missing_or_too_much_in_a_gguf_file_is_refused(folder, tmp_path, caplog):
    converted(folder, tmp_path / "two.gguf", layers=2)
    with pytest.raises(ModelError, match="has 2 layers for native drafts; supported: one"):
        longdraft.load(str(tmp_path / "two.gguf"), drafter="eagle")
    assert longdraft.load(str(tmp_path / "two.gguf")).loaded.eagle is None
    assert "drafting without eagle" in caplog.text
    for name in NEXTN.values():
        converted(folder, tmp_path / "whole.gguf")
        content = (tmp_path / "whole.gguf").read_bytes().replace(name.encode(), name.encode()[:-1] + b"x")
        (tmp_path / "renamed.gguf").write_bytes(content)
        with pytest.raises(ModelError, match=r"missing mtp\."):
            longdraft.load(str(tmp_path / "renamed.gguf"), drafter="eagle")


def test_a_file_that_the_gguf_package_wrote_has_the_same_head(folder, tmp_path):
    gguf = pytest.importorskip("gguf")
    converted(folder, tmp_path / "ours.gguf")
    named = {gguf.TENSOR_NAMES[getattr(gguf.MODEL_TENSOR, f"NEXTN_{part}")].format(bid=4)
             for part in ("EH_PROJ", "ENORM", "HNORM", "SHARED_HEAD_NORM")}
    assert named == {f"blk.4.{name}" for name in NEXTN.values()}
    reader = gguf.GGUFReader(tmp_path / "ours.gguf")
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "qwen35")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture", "qwen35.nextn", "tokenizer.")):
            writer.add_key_value(key, field.contents(), field.types[0],
                                 field.types[-1] if len(field.types) > 1 else None)
    writer.add_nextn_predict_layers(1)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    pairs = zip(*(outputs_of(tmp_path / path, "float32") for path in ("ours.gguf", "theirs.gguf")), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
