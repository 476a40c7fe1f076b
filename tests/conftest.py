"""Tiny checkpoints made on the spot: no network, no GPU, nothing outside the repository."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read at Triton's first import, which some libraries below do

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from longdraft import kernels
from longdraft.batch.writer import Job
from longdraft.model import checkpoint, glide
from longdraft.model import config as model_config
from longdraft.model.heads import KIND
from longdraft.model.transformer import Transformer


@pytest.fixture(autouse=True)
def level_of_logs() -> Iterator[None]:
    """A server that a test starts sets it for the whole process."""
    before = logging.getLogger("longdraft").level
    yield
    logging.getLogger("longdraft").setLevel(before)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Gives a script of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    asked: list[str] = []

    def named(name: str) -> ModuleType:
        asked.append(name)
        return importlib.import_module(name)

    yield named
    for name in asked:
        sys.modules.pop(name, None)


VOCAB = 320  # 256 bytes, two specials, some room
hypothesis.settings.register_profile("quiet", deadline=None)  # no test is about the machine's speed
hypothesis.settings.load_profile("quiet")
kernels.set_threads(1)  # tiny tensors: more threads only wait for one another


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


def make_heads(folder: Path, base: LlamaForCausalLM, num: int = 3, **changes: object) -> None:
    """Untrained heads for a base model, as a heads folder."""
    from safetensors.torch import save_file

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
    config = {"kind": KIND, "base_model": "tiny", "hidden_size": hidden, "vocab_size": base.config.vocab_size}
    (folder / "config.json").write_text(json.dumps(config | changes))


def make_glide(folder: Path, model: Path, window: int = 12, **changes: object) -> None:
    """An untrained glide layer for the model of a folder, whose every part adds something."""
    from safetensors.torch import save_file

    config = model_config.read(model)
    torch.manual_seed(9)
    tensors = {name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.2
               for name, shape in glide.shapes(config).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    about = {"kind": glide.KIND, "window": window, "base_model": "tiny", "hidden_size": config.hidden_size,
             "vocab_size": config.vocab_size}
    (folder / "config.json").write_text(json.dumps(about | changes))


def load_glide(folder: Path, model: Transformer) -> glide.Glide:
    return glide.load(folder, model, lambda where, config: None)


def load(folder: Path, dtype: str = "float32", name: str | None = None, quantize: str = "none") -> Transformer:
    """A model on the fastest kernels, or on those of this name."""
    chosen = kernels.choose("cpu", dtype, name)
    return checkpoint.load(checkpoint.TensorFiles(folder), model_config.read(folder), chosen, quantize)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders with heads and glide: `mha` (4 key/value heads) and `gqa` (4 query heads to a key/value head)."""
    root = tmp_path_factory.mktemp("tiny")
    for name, kv_heads in (("mha", 4), ("gqa", 1)):
        base = make_checkpoint(root / name, num_key_value_heads=kv_heads, seed=kv_heads)
        make_heads(root / name / "heads", base)
        make_glide(root / name / "glide", root / name)
    return {name: root / name for name in ("mha", "gqa")}


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a chat template."""
    folder = tmp_path_factory.mktemp("chatty") / "tiny"
    make_checkpoint(folder, num_key_value_heads=2)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if excited %}!{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def job(chatty: Path, tmp_path: Path) -> Job:
    """A batch job of that model, with a work folder of its own."""
    load = {"model": str(chatty), "drafter": "suffix", "threads": 1}
    return Job(tmp_path / "work", load, {"on_loop": "off"}, 0, "tiny", fsync="never")
