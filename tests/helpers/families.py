"""Random checkpoints of every supported model family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5

from helpers.checkpoints import VOCAB, write_tokenizer
from longdraft.model.transformer import Transformer, chain_rows

WINDOW = 24  # far below the prompts here, and below the partial caches
LONGROPE = dict(rope_type="longrope", short_factor=[1.0, 1.1, 1.2], long_factor=[1.5, 2.0, 4.0], rope_theta=10000.0)
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", dict(rope_parameters=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=10000.0,
        original_max_position_embeddings=64))),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2", dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)),
    "qwen3": ("qwen3", dict(head_dim=16)),
    "mistral": ("mistral", dict(sliding_window=None, head_dim=8)),
    "mistral, windows": ("mistral", dict(sliding_window=WINDOW)),
    "phi3": ("phi3", dict(pad_token_id=None)),
    "phi3, longrope, part": ("phi3", dict(
        pad_token_id=None, hidden_size=40, rope_parameters=LONGROPE | dict(partial_rotary_factor=0.6),
        original_max_position_embeddings=1024)),
    "granite": ("granite", dict(embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.4,
                                logits_scaling=2.5)),
    "olmo2": ("olmo2", {}),
    "exaone4": ("exaone4", dict(sliding_window=WINDOW, head_dim=16, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"])),
    "seed_oss": ("seed_oss", dict(head_dim=8, pad_token_id=None)),
    "smollm3": ("smollm3", dict(no_rope_layers=[1, 0, 1], pad_token_id=None)),
}
MIXTURES: dict[str, tuple[str, dict[str, object]]] = {  # of experts, which take longer
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": ("qwen3_moe", dict(head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32,
                                    norm_topk_prob=True)),
    "gpt_oss": ("gpt_oss", dict(
        head_dim=16, num_local_experts=6, num_experts_per_tok=3, sliding_window=WINDOW, tie_word_embeddings=False,
        swiglu_limit=0.8, pad_token_id=None, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(rope_type="yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                             original_max_position_embeddings=256, rope_theta=150000.0))),
}
_DELTA = dict(num_hidden_layers=4, head_dim=16, linear_key_head_dim=16, linear_value_head_dim=32,
              linear_num_key_heads=2, linear_num_value_heads=4)
_SHARED = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32, shared_expert_intermediate_size=24)
HYBRIDS: dict[str, tuple[str, dict[str, object]]] = {  # of delta layers and attention
    "qwen3_5": ("qwen3_5_text", _DELTA | dict(linear_value_head_dim=16)),
    "qwen3_5_moe": ("qwen3_5_moe_text", _DELTA | _SHARED),
    "qwen3_next": ("qwen3_next", _DELTA | _SHARED),
}
CPU_FAMILIES: dict[str, tuple[str, dict[str, object]]] = {  # norms on both sides, soft caps, several rotations
    "gemma2": ("gemma2", dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=WINDOW, attn_logit_softcapping=4.0,
                              final_logit_softcapping=8.0)),
    "gemma3": ("gemma3_text", dict(
        head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW, rope_parameters={
            "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1e6),
            "sliding_attention": dict(rope_type="default", rope_theta=1e4)},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "olmo3": ("olmo3", dict(sliding_window=WINDOW, pad_token_id=None, rope_parameters={
        "full_attention": dict(rope_type="yarn", factor=4.0, rope_theta=5e5, original_max_position_embeddings=32),
        "sliding_attention": dict(rope_type="default", rope_theta=5e5)},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "glm4": ("glm4", dict(head_dim=16, tie_word_embeddings=False, rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5), attention_bias=True, pad_token_id=None)),
    "ministral3": ("ministral3", dict(head_dim=16, pad_token_id=None, rope_parameters=dict(
        rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=32, beta_fast=32.0,
        beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4))),
}
_GEMMA4: dict[str, object] = dict(head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
               sliding_window=WINDOW, hidden_size_per_layer_input=0, final_logit_softcapping=8.0,
               layer_types=["sliding_attention", "full_attention", "full_attention"])
GEMMA4: dict[str, tuple[str, dict[str, object]]] = {  # with heads of two sizes
    "gemma4": ("gemma4_text", _GEMMA4),
    "gemma4, experts": ("gemma4_text", _GEMMA4 | dict(
        attention_k_eq_v=False, enable_moe_block=True, num_experts=6, top_k_experts=3, moe_intermediate_size=32)),
    "gemma4, inputs": ("gemma4_text", _GEMMA4 | dict(
        attention_k_eq_v=False, num_hidden_layers=5, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=2, use_double_wide_mlp=True, layer_types=[
            "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"])),
}
UNIFIED = {"gemma4_unified": ("gemma4_unified_text", {name: value for name, value in _GEMMA4.items()
                                                     if name != "hidden_size_per_layer_input"})}
LAYERS = 3


EVERY_FAMILY = FAMILIES | MIXTURES | HYBRIDS | CPU_FAMILIES | GEMMA4 | UNIFIED


def family_config(name: str, **changes: object) -> PreTrainedConfig:
    """The configuration of `make_family`'s model."""
    kind, own = EVERY_FAMILY[name]
    settings: dict[str, object] = dict(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.2, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=1)
    return CONFIG_MAPPING[kind](**(settings | own | changes))


def make_family(folder: Path, name: str, dtype: torch.dtype = torch.float32, **changes: object) -> torch.nn.Module:
    """Save a random model of a family as a model folder; norms and biases are random too."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(family_config(name, **changes))
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1 or parameter_name.endswith("_bias"):
            is_factor = "norm" in parameter_name or "scale" in parameter_name
            torch.nn.init.normal_(parameter, mean=1.0 if is_factor else 0.0, std=0.2)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, mean=1.0, std=0.2)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def pack_experts(folder: Path, target: Path, shards: int = 1) -> None:
    """The folder's model with random experts in MXFP4 at `target`, and the same numbers unquantised at target/whole."""
    generator = torch.Generator().manual_seed(8)
    tensors = load_file(folder / "model.safetensors")
    whole = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj")) and ".experts." in name]:
        count, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, (count, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert whole[name].shape == (count, inputs, outputs)
    config = json.loads((folder / "config.json").read_text())
    for path, each in ((target, tensors), (target / "whole", whole)):
        path.mkdir(parents=True, exist_ok=True)
        save_file(each, path / "model.safetensors")
        quantized = {"quantization_config": {"quant_method": "mxfp4"}} if path == target else {}
        (path / "config.json").write_text(json.dumps(config | quantized))
        (path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    if shards > 1:  # blocks and scales in different files
        parts = [{name: tensor for name, tensor in tensors.items() if name.endswith("_scales") == is_scale}
                 for is_scale in (False, True)]
        (target / "model.safetensors").unlink()
        for i, part in enumerate(parts):
            save_file(part, target / f"model-{i}.safetensors")
        weights = {name: f"model-{i}.safetensors" for i, part in enumerate(parts) for name in part}
        (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def make_hybrid(folder: Path, **changes: object) -> None:
    """A Qwen3.5 whose states remember hundreds of rows. Those of other random models forget a row within ten."""
    make_family(folder, "qwen3_5", **changes)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: torch.full_like(tensor, -5.0) if "A_log" in name else tensor for name, tensor in tensors.items()},
              folder / "model.safetensors", {"format": "pt"})


def add_native_head(folder: Path, seed: int = 3) -> torch.nn.Module:
    """Give a Qwen3.5 or Qwen3 of `make_family` a random `mtp` layer. Returns what `transformers` computes it with."""
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(seed)
    hidden, last = config.hidden_size, config.layer_types.index("full_attention")
    layer, norm = ((modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RMSNorm) if config.model_type == "qwen3" else
                   (modeling_qwen3_5.Qwen3_5DecoderLayer, modeling_qwen3_5.Qwen3_5RMSNorm))
    head = torch.nn.ModuleDict({
        "fc": torch.nn.Linear(2 * hidden, hidden, bias=False), "layers": torch.nn.ModuleList([
            layer(config, last)]),
        **{name: norm(hidden, config.rms_norm_eps)
           for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}})
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"mtp.{name}": part.to(tensors["model.norm.weight"].dtype)
                         for name, part in head.state_dict().items()}, folder / "model.safetensors", {"format": "pt"})
    return head.eval()


SPECULATORS = {"fc": "input_proj", "pre_fc_norm_embedding": "token_layernorm", "pre_fc_norm_hidden": "hidden_layernorm",
               "norm": "final_layernorm"}


def move_native_head(folder: Path, to: Path) -> None:
    """Move the `mtp` layer from a model folder to one of its own, by the rules of the converter of `speculators`."""
    tensors, head = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.startswith("mtp.")]:
        stem = name.removeprefix("mtp.").removesuffix(".weight")
        stem = SPECULATORS.get(stem, stem.removeprefix("layers.0."))
        head[f"mtp_layers.0.{stem}.weight"] = tensors.pop(name)
    experts = "mtp_layers.0.mlp.experts."
    if count := sum(name.startswith(experts) and "down_proj" in name for name in head):
        gate, up, down = (torch.stack([head.pop(f"{experts}{expert}.{part}_proj.weight") for expert in range(count)])
                          for part in ("gate", "up", "down"))
        head |= {f"{experts}gate_up_proj": torch.cat([gate, up], 1), f"{experts}down_proj": down}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    to.mkdir()
    save_file(head, to / "model.safetensors", {"format": "pt"})
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    (to / "config.json").write_text(json.dumps({
        "architectures": ["MTPDraftModel"], "num_nextn_predict_layers": 1, "speculators_model_type": "mtp",
        "speculators_config": {"algorithm": "mtp"}, "transformer_layer_config": {"model_type": kind}}))


def logits_of(model: Transformer, tokens: list[int], prefill: int) -> torch.Tensor:
    """Logits [tokens, vocabulary] of our model: the first `prefill` tokens in one forward, each further one alone."""
    cache = model.new_cache()
    parts = []
    for start, end in [(0, prefill)] + [(i, i + 1) for i in range(prefill, len(tokens))]:
        parts.append(model.logits(model.forward(chain_rows(tokens[start:end], start), cache).hidden))
        cache.commit(range(end - start))
    return torch.cat(parts)


def theirs_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def greedy_text_of(theirs: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens that transformers writes at temperature 0, whatever the end-of-text token."""
    return theirs.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None,
                           pad_token_id=0)[0, len(prompt):].tolist()


def rounding_errors(folder: Path, name: str, ours: Callable[[], torch.Tensor], tokens: list[int],
                    spread: float) -> tuple[float, float]:
    """Mean errors of bfloat16 logits against transformers' float32: of `ours()`, and of transformers itself.

    spread  initializer_range of the checkpoint, which is written to `folder`
    """
    exact = theirs_of(make_family(folder, name, initializer_range=spread), tokens)
    rounded = theirs_of(make_family(folder, name, torch.bfloat16, initializer_range=spread), tokens)
    return float((ours() - exact).abs().mean()), float((rounded - exact).abs().mean())
