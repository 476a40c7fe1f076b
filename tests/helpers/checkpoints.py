"""Write tiny random models, heads and glide layers to folders, and load them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from longdraft import kernels
from longdraft.checkpoint import checkpoint, config_file
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.model.transformer import Transformer
from longdraft.parts import glide
from longdraft.parts.heads import HEADS_KIND

VOCAB = 320  # 256 bytes, two specials, some room
HIDDEN = 48  # width of the models that make_checkpoint writes


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: ids 0 and 1 are <s> and </s>, then the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: i + 2 for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def make_checkpoint(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, shard: str | None = None,
                    **changes: object) -> LlamaForCausalLM:
    """A random Llama of two layers with sharp attention and sharp logits, saved as a model folder."""
    torch.manual_seed(seed)
    settings: dict[str, object] = dict(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=4096, initializer_range=0.3, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1)
    config = LlamaConfig(**(settings | changes))
    model = LlamaForCausalLM(config).to(dtype).eval()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    write_tokenizer(folder)
    return model


def write_chain(model: PreTrainedModel, chain: Sequence[int]) -> None:
    """Make a model with a head of its own write a chain of different tokens: its greedy choice after each is the next.
    """
    with torch.no_grad():  # layers add nothing, and the head gives what follows each token
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name or name == "lm_head.weight":
                parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        table = torch.nn.init.normal_(model.model.embed_tokens.weight)
        for token, follower in pairwise(chain):
            model.lm_head.weight[follower] += table[token]


def released(folder: Path, model: Path) -> Path:
    """A folder in TokenSwift's release format: a model's tensors plus model.medusa_layers.* of its folder `heads`."""
    shutil.copytree(model, folder)
    shutil.rmtree(folder / "heads")
    save_file(load_file(model / "model.safetensors") | load_file(model / "heads" / "model.safetensors"),
              folder / "model.safetensors")
    return folder


def make_heads(folder: Path, base: LlamaForCausalLM, num: int = 3, **changes: object) -> None:
    """Untrained heads for a base model, as a heads folder."""
    hidden = base.config.hidden_size
    torch.manual_seed(7)
    tensors = {}
    for i in range(num):
        prefix = f"model.medusa_layers.{i}."
        tensors[prefix + "linear.weight"] = torch.randn(hidden, hidden) * 0.1
        tensors[prefix + "input_layernorm.weight"] = torch.ones(hidden)
        tensors[prefix + "post_layernorm.weight"] = torch.ones(hidden)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {"kind": HEADS_KIND, "base_model": "tiny", "hidden_size": hidden, "vocab_size": base.config.vocab_size}
    (folder / "config.json").write_text(json.dumps(config | changes))


def make_glide(folder: Path, model: Path, window: int = 12, **changes: object) -> None:
    """An untrained glide layer for the model in a folder; none of its weights is zero."""
    config = config_file.read_config(model)
    torch.manual_seed(9)
    tensors = {name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.2
               for name, shape in glide.glide_shapes(config).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    about = {"kind": glide.GLIDE_KIND, "window": window, "base_model": "tiny", "hidden_size": config.hidden_size,
             "vocab_size": config.vocab_size}
    (folder / "config.json").write_text(json.dumps(about | changes))


def load_glide(folder: Path, model: Transformer) -> glide.Glide:
    return glide.load_glide(folder, model, lambda where, config: None)


def load(folder: Path, dtype: str = "float32", name: str | None = None, quantize: str = "none") -> Transformer:
    """Load a model on the fastest kernels, or on the kernels with this name."""
    chosen = kernels.choose("cpu", dtype, name)
    config = config_file.read_config(folder)
    return checkpoint.load_transformer(TensorFiles(folder), config, chosen, quantize)


def write_medusa(folder: Path, num_heads: int = 2, num_blocks: int = 2, *, own: bool = True) -> dict[str, torch.Tensor]:
    """A Medusa folder as FasterDecoding publishes it, except that the file format is safetensors."""
    torch.manual_seed(5)
    tensors = {}
    for i in range(num_heads):
        for j in range(num_blocks):
            tensors[f"{i}.{j}.linear.weight"] = torch.randn(HIDDEN, HIDDEN) * 0.2
            tensors[f"{i}.{j}.linear.bias"] = torch.randn(HIDDEN)
        if own:
            tensors[f"{i}.{num_blocks}.weight"] = torch.randn(VOCAB, HIDDEN)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({
        "medusa_num_heads": num_heads, "medusa_num_layers": num_blocks, "base_model_name_or_path": "lmsys/vicuna"}))
    return tensors
