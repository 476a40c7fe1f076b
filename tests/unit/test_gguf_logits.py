"""Every form of the metadata of a GGUF file gives the logits that llama.cpp gives.

These tests need llama-cpp-python, which no extra installs, because it is compiled for minutes:

    pip install llama-cpp-python
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.checkpoints import load
from helpers.equality import prompt_of
from helpers.families import CPU_FAMILIES, FAMILIES, GEMMA4, HYBRIDS, MIXTURES, make_family
from helpers.gguf_files import architecture_of, convert, metadata, stored
from helpers.llama_cpp_logits import LlamaCpp, Logits
from longdraft.errors import ModelError
from longdraft.model.transformer import chain_rows

pytestmark = pytest.mark.full

TOKENS = 60  # beyond the windows of the families
# Of the standard deviation of the logits. llama.cpp rounds GELU's argument to float16 and has other exponentials: files
# that both read alike differ by 0.004 at most, files that they read differently by 0.05 and more.
TOLERANCE = 0.02
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
Form = dict[str, Any]  # keys without the architecture; None: left out, ...: the model's own value, for each layer
FORMS: list[Form] = [
    {},
    # rotations
    *({"rope.freq_base": base} for base in (None, 5e5)), {"rope.freq_base_swa": 5e4}, {"rope.freq_base_swa": None},
    *({"rope.dimension_count": dims} for dims in (None, 4, 8, 12, 16)), {"rope.dimension_count_swa": 8},
    *({"rope.scaling.type": kind, "rope.scaling.factor": 4.0} for kind in (None, "none", "linear", "yarn", "longrope")),
    {"rope.scaling.type": None, "rope.scaling.factor": None, "rope.scale_linear": 4.0},
    {"rope.scaling.type": "linear", "rope.scaling.factor": None, "rope.scale_linear": 4.0},
    {"rope.scaling.type": None, "rope.scaling.factor": 4.0, "rope.scale_linear": 7.0},
    *({"rope.scaling.type": None, "rope.scaling.factor": factor} for factor in (0.0, 1.0, 0.5, None)),
    {"rope.scaling.type": None, "rope.scaling.factor": None, "rope.scale_linear": 0.0},
    {"rope.scaling.type": None, "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    {"rope.scaling.type": None, "rope.scaling.factor": None, "rope.scaling.attn_factor": 0.5},
    {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5},
    YARN, YARN | {"rope.scaling.factor": 1.0}, YARN | {"rope.scaling.factor": None},
    YARN | {"rope.scaling.original_context_length": None}, YARN | {"rope.scaling.attn_factor": 0.5},
    YARN | {"rope.scaling.attn_factor": 1.0}, YARN | {"rope.scaling.yarn_ext_factor": 1.0},
    YARN | {"rope.scaling.yarn_attn_factor": 0.5}, YARN | {"rope.scaling.yarn_log_multiplier": 0.5},
    YARN | {"rope.scaling.yarn_log_multiplier": 0.0}, YARN | {"rope.scaling.yarn_log_multiplier": 1.0},
    YARN | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
    YARN | {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
    *({"rope.scaling.finetuned": flag} for flag in (True, False)), {"rope.scaling.alpha": 2.0},
    {"rope.dimension_sections": np.array([3, 3, 2, 0])},
    # attention
    *({f"attention.{key}": [...]} for key in ("head_count", "head_count_kv")), {"attention.head_count_kv": None},
    *({"attention.key_length": length, "attention.value_length": length} for length in (None, ...)),
    {"attention.causal": True}, {"attention.causal": False}, {"attention.layer_norm_rms_epsilon": 1e-2},
    {"attention.layer_norm_epsilon": 1e-2}, *({"attention.scale": scale} for scale in (None, 0.0, 0.2)),
    *({"attention.sliding_window": window} for window in (None, 0, 24, 4096)),
    *({"attention.sliding_window_pattern": pattern} for pattern in (
        None, 0, 1, 2, 3, [True], [False], np.array([1]), [True, False], [False, True])),
    {"attention.temperature_scale": 0.3}, {"attention.temperature_scale": 0.0}, {"attention.temperature_scale": None},
    {"attention.shared_kv_layers": 0}, {"attention.shared_kv_layers": None},
    *({"full_attention_interval": interval} for interval in (None, 2, 4)),
    {"attention.recurrent_layers": [True, True, True, False]}, {"attention.recurrent_layers": np.array([1, 1, 1, 0])},
    # feed-forward
    {"feed_forward_length": [...]}, *({"expert_count": count} for count in (0, None, 2)),
    *({"expert_used_count": count} for count in (1, [...], None)), {"expert_feed_forward_length": [...]},
    {"expert_feed_forward_length": None}, {"expert_weights_scale": 2.0}, {"expert_weights_norm": False},
    {"expert_weights_norm": True}, *({"expert_gating_func": kind} for kind in (1, 2)), {"expert_shared_count": 0},
    {"expert_shared_count": 1}, {"expert_group_count": 2, "expert_group_used_count": 1},
    {"leading_dense_block_count": 0}, {"leading_dense_block_count": 1}, {"interleave_moe_layer_step": 2},
    # scales and caps
    *({key: scale} for key in ("logit_scale", "residual_scale", "embedding_scale", "attn_logit_softcapping",
                               "final_logit_softcapping", "router_logit_softcapping") for scale in (None, 0.0, 3.0)),
    # everything else
    {"nextn_predict_layers": 0}, {"vocab_size": 300}, {"use_parallel_residual": True}, {"pooling_type": 0},
    {"embedding_length_per_layer_input": None}, {"embedding_length_out": None}, {"context_length": 100},
    {"tensor_data_layout": "Meta AI original pth"},
]
NAMES = [*(name for name, (_, own) in FAMILIES.items() if not {"use_sliding_window", "rope_parameters"} & set(own)
           and name not in ("mistral, windows", "exaone4", "seed_oss")), *MIXTURES, *HYBRIDS, *CPU_FAMILIES, *GEMMA4]
MORE: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layers": None, "num_hidden_layers": 5}, "olmo2": {"tie_word_embeddings": False},
    "olmo3": {"tie_word_embeddings": False},
    **{name: {"linear_value_head_dim": 16} for name in ("qwen3_5_moe", "qwen3_next")},
    "gemma4, inputs": {"layer_types": [  # of the layers with keys, llama.cpp shares the last two, a window and none
        "sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
    "gpt_oss": {"swiglu_limit": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
}
# Of the pairs of a wide head of Gemma 4, the first quarter rotates.
STILL = {"rope_freqs.weight": stored(torch.tensor([1.0] * 4 + [1e30] * 12), "F32")}
# Differences that are meant, by architecture; "": all. The files of llama.cpp's converter have the original model's
# settings, and longdraft follows these where llama.cpp does not.
MEANT: list[tuple[str, Form]] = [
    ("", {"rope.scaling.yarn_beta_fast": 16.0}),  # llama.cpp has 32 and 1 for all architectures but mistral3
    ("", {"rope.scaling.yarn_attn_factor": 0.5}),  # llama.cpp has its own rule
    ("gpt-oss", {"rope.scaling.type": "yarn"}),  # gpt-oss does not round the ends of YaRN's ramp; llama.cpp does
    *((arch, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0})  # which llama.cpp divides by within windows
      for arch in ("gemma2", "gpt-oss")),
    *((arch, {"attention.layer_norm_rms_epsilon": 1e-2})  # which is llama.cpp's for the norms of delta layers, too
      for arch in ("qwen3next", "qwen35", "qwen35moe")),
    ("llama", {"attention.sliding_window": 24}), ("phi3", {"attention.sliding_window": 24}),  # llama.cpp has no window
]


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[LlamaCpp]:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    child = LlamaCpp()
    yield child
    child.close()


def layered(form: Form, own: dict[str, Any], arch: str, layers: int) -> dict[str, Any]:
    """The metadata of a form: with the architecture, the model's values, and arrays as long as the layers."""
    values = {}
    for key, new in form.items():
        old = own.get(f"{arch}.{key}")
        if new is ...:
            new = old
        elif isinstance(new, list):
            new = old if new == [...] and isinstance(old, list) else [old if each is ... else each for each in new]
            new = None if None in new else (new * layers)[:layers]
        elif isinstance(new, np.ndarray) and len(new) == 1:
            new = np.repeat(new, layers)
        values[f"{arch}.{key}"] = new
    return values


def is_meant(form: Form, arch: str) -> bool:
    return any(where in ("", arch) and all(form.get(key) == value for key, value in meant.items())
               for where, meant in MEANT)


def ours(path: Path, tokens: list[int]) -> Logits | str:
    """The logits of longdraft, or why it refuses the file."""
    try:
        model = load(path)
    except ModelError as error:
        return str(error)
    return model.logits(model.forward(chain_rows(tokens, 0), model.new_cache()).hidden).numpy()


@pytest.mark.parametrize("name", NAMES)
def test_each_form_of_the_metadata_gives_the_logits_of_llama_cpp(tmp_path, llama_cpp, name):
    model = make_family(tmp_path, name, **MORE.get(name, {}))
    config = model.config
    arch, tokens, path = architecture_of(config), prompt_of(TOKENS), tmp_path / "model.gguf"
    if arch == "gemma4":
        config.allow_global_per_layer_attribute_access = True
    no_vocabulary = {"tokenizer.ggml.model": "no_vocab", "tokenizer.ggml.tokens": None,
                     "tokenizer.ggml.token_type": None, "tokenizer.ggml.merges": None, f"{arch}.vocab_size": 320}
    own = metadata(config, arch)
    outcomes: Counter[str] = Counter()
    differences, lines = [], []
    for form in FORMS:
        values = layered(form, own, arch, config.num_hidden_layers)
        convert(tmp_path, model, path, values=no_vocabulary | values, tensors=STILL if arch == "gemma4" else None)
        here, there = ours(path, tokens), llama_cpp.logits(path, tokens)
        if there is not None and not np.isfinite(there).all():
            there = None
        if there is None or isinstance(here, str):
            outcome = "both refuse" if there is None and isinstance(here, str) else (
                "llama.cpp refuses" if there is None else "longdraft refuses")
            lines.append(f"{name}: {outcome}: {form}" + (f": {here}" if isinstance(here, str) else ""))
        else:
            difference = float(np.abs(here[:, :there.shape[1]] - there).max() / there.std())
            outcome = "equal" if difference < TOLERANCE else "different"
            lines.append(f"{name}: {outcome} {difference:.5f}: {form}")
            if outcome == "different" and not is_meant(form, arch):
                differences.append(lines[-1])
        outcomes[outcome] += 1
    print("\n".join(lines))
    print(f"{name}: {len(FORMS)} forms: {dict(outcomes)}")
    assert outcomes["equal"] and not differences, "\n".join(differences)
