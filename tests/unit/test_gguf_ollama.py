"""Files as Ollama's converter writes them are the models of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import load
from helpers.equality import prompt_of
from helpers.families import make_family
from helpers.gguf_files import Stored, convert, stored, write_gguf
from longdraft.checkpoint.config_file import read_config
from longdraft.checkpoint.gguf.container import GgufFile, open_gguf
from longdraft.checkpoint.gguf.ollama import translate
from longdraft.checkpoint.gguf.types import Array
from longdraft.errors import ModelError
from longdraft.model.transformer import chain_rows

Values, Tensors = dict[str, Any], dict[str, Stored]


def renamed(parts: dict[str, Any], **names: str) -> None:
    """Rename what has this part, with _ for a dot, in its name."""
    for name in list(parts):
        ours = name
        for old, new in names.items():
            ours = ours.replace(old.replace("__", "."), new)
        parts[ours] = parts.pop(name)


def gemma3(values: Values, tensors: Tensors) -> None:
    for key in ("attention.layer_norm_rms_epsilon", "rope.scaling.type", "rope.scaling.factor"):
        del values[f"gemma3.{key}"]
    values["gemma3.rope.global.freq_base"] = values.pop("gemma3.rope.freq_base")
    values["gemma3.rope.local.freq_base"] = 1e4
    values["gemma3.mm.tokens_per_image"] = 256
    more = [f"<image{i}>" for i in range(70)]  # more tokens than the model has
    values["tokenizer.ggml.tokens"] = values["tokenizer.ggml.tokens"] + more
    values["tokenizer.ggml.token_type"] = values["tokenizer.ggml.token_type"] + [4 for _ in more]
    tensors["v.blk.0.attn_q.weight"] = tensors["mm.mm_input_projection.weight"] = stored(torch.ones(2, 3), "F16")


def gemma4(values: Values, tensors: Tensors) -> None:
    values["tokenizer.ggml.model"] = "llama"
    renamed(tensors, ffn_down_exps__scale="ffn_gate_inp.per_expert_scale")
    tensors["a.blk.0.conv_dw.weight"] = tensors["v.clamp_data"] = stored(torch.ones(4), "F32")


def mistral3(values: Values, tensors: Tensors) -> None:
    renamed(values, attention__temperature_scale="rope.scaling_beta",
            rope__scaling__yarn_log_multiplier="rope.scaling.mscale_all_dim",
            rope__scaling__yarn_beta="rope.scaling.beta")
    del values["tokenizer.ggml.pre"]


def gpt_oss(values: Values, tensors: Tensors) -> None:
    renamed(values, **{"gpt-oss__": "gptoss."})
    del values["gptoss.expert_feed_forward_length"], values["gptoss.rope.scaling.type"]
    values |= {"general.architecture": "gptoss", "tokenizer.ggml.pre": "default"}
    renamed(tensors, attn_output="attn_out", attn_sinks__weight="attn_sinks", post_attention_norm="ffn_norm")


def qwen35(values: Values, tensors: Tensors) -> None:
    values["qwen35.attention.head_count_kv"] = [0, 0, 0, values["qwen35.attention.head_count_kv"]]
    renamed(tensors, ssm_dt__bias="ssm_dt")
    tensors["mtp.fc.weight"] = stored(torch.ones(2, 2), "F32")


def as_ollama(source: Path, target: Path, change: Callable[[Values, Tensors], None]) -> None:
    file = GgufFile(source)
    values = {key: file.array(key) if isinstance(value, Array) else value for key, value in file.values.items()}
    tensors: Tensors = {name: (0, entry.shape, file.map[entry.start : entry.stop])
                        for name, entry in file.tensors.items()}
    change(values, tensors)
    write_gguf(target, values, tensors)


@pytest.mark.parametrize("name, change, pre", [
    ("gemma3", gemma3, "gpt-2"), ("gemma4, experts", gemma4, "gpt-2"), ("ministral3", mistral3, "tekken"),
    ("gpt_oss", gpt_oss, "gpt-4o"), ("qwen3_5", qwen35, "gpt-2"),
])
def test_it_is_the_same_model(tmp_path, name, change, pre):
    more = {"gpt_oss": {"swiglu_limit": 7.0}, "gemma3": {"max_position_embeddings": 1 << 17}}
    model = make_family(tmp_path / "folder", name, **more.get(name, {}))
    said = {f"mistral3.rope.scaling.yarn_beta_{end}": beta for end, beta in (("fast", 16.0), ("slow", 2.0))}
    convert(tmp_path / "folder", model, tmp_path / "plain.gguf", values=said if name == "ministral3" else None)
    as_ollama(tmp_path / "plain.gguf", tmp_path / "ollama.gguf", change)
    ours, theirs = (read_config(tmp_path / f"{which}.gguf") for which in ("ollama", "plain"))
    assert ours == theirs
    found = open_gguf(tmp_path / "ollama.gguf")
    assert found.values["tokenizer.ggml.pre"] == pre
    assert len(found.array("tokenizer.ggml.tokens")) <= ours.vocab_size
    assert found.values["tokenizer.ggml.model"] == ("gemma4" if "gemma4" in name else "gpt2")
    results = []
    for which in ("ollama", "plain"):
        loaded = load(tmp_path / f"{which}.gguf")
        results.append(loaded.logits(loaded.forward(chain_rows(prompt_of(20), 0), loaded.new_cache()).hidden))
    assert torch.equal(*results)


def test_two_names_of_one_tensor_are_refused(tmp_path):
    def twice(values: Values, tensors: Tensors) -> None:
        tensors["blk.0.ssm_dt"] = tensors["blk.0.ssm_dt.bias"]

    model = make_family(tmp_path / "folder", "qwen3_5")
    convert(tmp_path / "folder", model, tmp_path / "plain.gguf")
    as_ollama(tmp_path / "plain.gguf", tmp_path / "twice.gguf", twice)
    with pytest.raises(ModelError, match=r"unexpected blk\.0\.ssm_dt"):
        load(tmp_path / "twice.gguf")


@pytest.mark.parametrize("text, pre", [("<|eot_id|>", "llama-bpe"), ("other", None)])
def test_llama_3_is_told_by_its_end_of_turn(text, pre):
    values: Values = {"general.architecture": "llama", "tokenizer.ggml.tokens": Array(8, 128_256, 0)}
    translate(values, [{}], lambda key: ["a"] * 128_009 + [text])
    assert values.get("tokenizer.ggml.pre") == pre
