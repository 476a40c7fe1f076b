"""Training of small models: Llamas like the bundled ones and hybrids (`train lm`), and drafters (`train draft`).

Positional skip-wise training (arXiv 2309.10400) teaches far positions with short sequences: the positions after a
random token jump by thousands, so that every distance occurs. It cannot teach attention over many keys, so a last phase
on sequences of 16,384 tokens or more should follow (docs/training.md).
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from longdraft.train.data import as_ids
from longdraft.train.data_files import Tokens
from longdraft.train.delta import new_hybrid, use_chunks
from longdraft.train.frozen_model import FrozenModel
from longdraft.train.losses import Scores, backward_in_chunks, row_chunks
from longdraft.train.settings import HYBRID, LmSettings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BEGIN, END = "<s>", "</s>"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_ACTIVATION_BYTES = 4 << 30  # above this, gradient checkpointing recomputes the layers


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer, which can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[BEGIN, END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files of a model folder."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def new_model(settings: LmSettings, vocab_size: int, begin: int | None, end: int | None) -> Any:
    """A model of the settings' kind with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(settings.seed)
    sizes = dict(
        vocab_size=vocab_size, hidden_size=settings.hidden_size, intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers, num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads or settings.num_heads, max_position_embeddings=settings.context,
        tie_word_embeddings=settings.tied, bos_token_id=begin, eos_token_id=end)
    if settings.kind == HYBRID:
        return new_hybrid(settings, sizes)
    return LlamaForCausalLM(LlamaConfig(
        **sizes, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta}))


def with_fewer_kv_heads(model: Any, num: int) -> Any:
    """The Llama with `num` KV heads, each the mean of a group (GQA, arXiv 2305.13245, section 2.1)."""
    from transformers import LlamaForCausalLM

    config = copy.deepcopy(model.config)
    config.num_key_value_heads = num
    weights = model.state_dict()
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            grouped = weight.view(num, -1, config.head_dim, weight.shape[1])
            weights[name] = grouped.mean(1).flatten(0, 1)
    fewer = LlamaForCausalLM(config)
    fewer.load_state_dict(weights)
    return fewer


def jumping_positions(settings: LmSettings, index: int, count: int, length: int) -> Tensor:
    """Positions [count, length] int64 of sequences `index`, `index` + 1, ...: some jump by a log-uniform distance.

    They depend on the seed and the index of the sequence, not on the number of processes.
    """
    positions = np.tile(np.arange(length), (count, 1))
    room = settings.context - length
    for row in range(count):
        draw = np.random.default_rng([settings.seed, 3, index + row])
        if room > 1 and length > 1 and draw.random() < settings.skip:
            positions[row, draw.integers(1, length) :] += int(math.exp(draw.random() * math.log(room)))
    return torch.from_numpy(positions)


@dataclass
class LanguageModelTask:
    """The training task of a language model, with distillation from `teacher` if there is one."""

    module: nn.Module  # a model of `transformers`, float32
    settings: LmSettings
    device: torch.device
    dtype: torch.dtype  # of the arithmetic and of the saved weights
    teacher: FrozenModel | None
    validation: Tokens

    def accumulate(self, sequences: Tokens, scale: float, first: int) -> Tensor:
        """Mean cross-entropy of all tokens except the first of each sequence."""
        ids = as_ids(sequences, self.device)
        read, wanted = ids[:, :-1], ids[:, 1:].flatten()
        positions = jumping_positions(self.settings, first, *read.shape).to(self.device)
        hidden = self._hidden(read, positions).flatten(0, 1)
        teacher = self.teacher.probabilities(self.teacher.outputs(read, positions).hidden) if self.teacher else None
        return backward_in_chunks(hidden, wanted, self._logits, teacher, self._row_chunks(len(hidden)),
                                  self.settings.distill, scale)[None]

    @torch.no_grad()
    def validate(self) -> list[dict[str, float]]:
        scores = Scores(1)
        self.module.eval()
        for sequence in self.validation:
            ids = as_ids(sequence[None], self.device)
            rows, wanted = self._hidden(ids[:, :-1], None).flatten(0, 1), ids[0, 1:]
            for run in self._row_chunks(len(rows)):
                scores.add(0, self._logits(rows[run]), wanted[run])
        self.module.train()
        return scores.metrics()

    @property
    def _weight(self) -> Tensor:
        weight: Tensor = self.module.get_output_embeddings().weight  # type: ignore[operator]
        return weight

    def _row_chunks(self, count: int) -> Iterator[slice]:
        return row_chunks(self.device, self._weight.shape[0], count)

    def _hidden(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        """Normalised rows [B, L, hidden] in the arithmetic's dtype."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            # Without a mask, `transformers` takes a jump of the positions for the start of another packed text, and
            # its rows would not attend to the tokens before it. This mask hides nothing.
            hidden: Tensor = self.module.model(  # type: ignore[operator]
                input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids),
                use_cache=False).last_hidden_state
        return hidden

    def _logits(self, rows: Tensor) -> Tensor:
        logits = functional.linear(rows.to(self.dtype), self._weight.to(self.dtype)).float()
        return logits / getattr(self.module.config, "logits_scaling", 1.0)  # Granite's

    def export(self, folder: Path, record: dict[str, Any]) -> None:
        """A Hugging Face model folder, with `training.json` beside it."""
        from longdraft.checkpoint.tensor_files import dump_json

        module: Any = self.module
        module.to(self.dtype).save_pretrained(folder)
        dump_json(folder / "training.json", record)


def prepare(module: Any, settings: LmSettings, device: torch.device) -> Any:
    """Prepare a model for training: float32 weights, and gradient checkpointing if the activations are large."""
    module = use_chunks(module.float().train().requires_grad_(True).to(device))
    if _activation_bytes(module.config, settings) > _ACTIVATION_BYTES:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    return module


def _activation_bytes(config: Any, settings: LmSettings) -> int:
    """A forward's activations in bytes, roughly: ten rows of hidden size and four of the MLP's per layer."""
    row: int = 10 * config.hidden_size + 4 * config.intermediate_size
    rows: int = settings.batch_size * settings.sequence_length * config.num_hidden_layers
    return 4 * rows * row
