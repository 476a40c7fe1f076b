"""The kinds of trainings: the settings of each, the models it needs, and how to draft with its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from longdraft.checkpoint.config_file import read_config, read_json
from longdraft.checkpoint.hub import resolve
from longdraft.errors import UsageError, check
from longdraft.parts.head_config import OWN_KEY
from longdraft.text.tokenizer import vocabulary_sha256
from longdraft.train import block, data, data_files, eagle, glide, heads, lm
from longdraft.train.data_files import Tokens
from longdraft.train.frozen_model import TORCH_DTYPES, FrozenModel, load_frozen_model, pretrained
from longdraft.train.loop import TrainingTask
from longdraft.train.processes import DistributedProcesses
from longdraft.train.settings import (
    BlockSettings,
    DraftSettings,
    EagleSettings,
    GlideSettings,
    HeadSettings,
    LmSettings,
    TrainingSettings,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_SAME_TOKENIZER = "a drafter and its target need the same tokenizer; give --start or --tokenizer with it"
MODELS = ("model", "tokenizer", "start", "distill_from")  # settings that name one


def _vocabulary_sha256(tokenizer: Tokenizer) -> str:
    return vocabulary_sha256(tokenizer.get_vocab(with_added_tokens=True))


class Drafting(NamedTuple):
    """How to draft with a trained drafter."""

    model: str
    drafter: str
    options: dict[str, Any]
    heads: str | None


class TrainingContext(Protocol):
    """The tokenizer and the models that a training needs."""

    tokenizer: Tokenizer
    vocab_size: int  # rows of the model
    end_id: int | None  # token id at the end of a document
    fingerprint: str  # sha256 of the frozen model's weights; empty without one

    def task(self, tokens: Tokens, validation: Tokens, *, is_new: bool) -> TrainingTask:
        """The task of training on the packed sequences `tokens`. is_new: with its first weights; a resumed training
        takes those of its checkpoint."""

    def about(self) -> dict[str, Any]:
        """The record's entries about the frozen model."""

    def drafting(self, output: Path) -> Drafting | None:
        """How to draft with the weights in `output`; None if they are not a drafter's."""


class _FrozenModelContext:
    """For heads, glide and EAGLE heads: a frozen model."""

    def __init__(self, settings: HeadSettings | GlideSettings | EagleSettings | BlockSettings, output: Path,
                 processes: DistributedProcesses) -> None:
        self._settings = settings
        self._processes = processes
        folder = resolve(settings.model)
        self._base = load_frozen_model(folder, settings.dtype, processes.device, shard=settings.shard)
        config = self._base.config
        self.vocab_size = config.vocab_size
        self.tokenizer = data.load_tokenizer(folder, self.vocab_size)
        self.end_id = next(iter(config.eos_token_ids), None)
        self.fingerprint = self._base.fingerprint

    def task(self, tokens: Tokens, validation: Tokens, *, is_new: bool) -> TrainingTask:
        task = self._new_task(tokens, validation)
        if is_new and self._settings.start:
            folder = resolve(self._settings.start)
            self._require_same_vocabulary(folder)
            task.start_from(folder)
        elif is_new and isinstance(task, eagle.EagleTask):
            task.fit(tokens, self._processes)
        return task

    def _new_task(self, tokens: Tokens,
                  validation: Tokens) -> heads.HeadsTask | glide.GlideTask | eagle.EagleTask | block.BlockTask:
        if isinstance(self._settings, HeadSettings):
            return heads.heads_task(self._base, self._settings, tokens[:1], validation)
        if isinstance(self._settings, BlockSettings):
            return block.block_task(self._base, self._settings, tokens, validation)
        if isinstance(self._settings, EagleSettings):
            return eagle.eagle_task(self._base, self._settings, tokens, validation)
        return glide.glide_task(self._base, self._settings, validation)

    def _require_same_vocabulary(self, folder: Path) -> None:
        """Raise UsageError if the part in `folder` was trained with other tokens than the model's."""
        config = read_json(folder / "config.json")
        record = config.get(OWN_KEY, config)
        if record.get("vocabulary_sha256", (own := _vocabulary_sha256(self.tokenizer))) != own:
            raise UsageError(f"start is {str(folder)!r}, which was trained with another tokenizer than that of "
                             f"{self._settings.model!r}; give a part that was trained with it")

    def about(self) -> dict[str, Any]:
        config = self._base.config
        return {"base_model": data.model_name(self._settings.model), "hidden_size": config.hidden_size,
                "vocab_size": config.vocab_size, "base_sha256": self.fingerprint,
                "vocabulary_sha256": _vocabulary_sha256(self.tokenizer)}

    def drafting(self, output: Path) -> Drafting:
        settings = self._settings
        if not isinstance(settings, HeadSettings):
            return Drafting(settings.model, settings.KIND, {}, str(output))
        if settings.kind == "medusa":
            return Drafting(settings.model, "medusa", {"tree": ",".join(["1"] * settings.heads)}, str(output))
        depth = min(2, settings.heads + 1)
        return Drafting(settings.model, "tokenswift", {"tree": ",".join(["1"] * depth)}, str(output))


class _LanguageModelContext:
    """For a language model: a tokenizer, a model to start from, and a teacher for distillation."""

    def __init__(self, settings: LmSettings, output: Path, processes: DistributedProcesses) -> None:
        self._settings = settings
        self._processes = processes
        self._base = self._teacher()
        source = self._tokenizer_folder(output)
        if source != output and processes.is_main:
            lm.copy_tokenizer(source, output)
        self._start = self._model(source)
        self.vocab_size: int = self._start.config.vocab_size
        self.tokenizer = data.load_tokenizer(source, self.vocab_size)
        eos = self._start.config.eos_token_id
        self.end_id = eos[0] if isinstance(eos, list) else eos
        self.fingerprint = self._base.fingerprint if self._base else ""
        self._require_one_vocabulary()

    def _require_one_vocabulary(self) -> None:
        """Raise UsageError unless the new model shares its token ids with its teacher and its target."""
        settings = self._settings
        other = settings.model if isinstance(settings, DraftSettings) else settings.distill_from
        if not other:
            return
        ours, theirs = self._start.config.vocab_size, read_config(resolve(other)).vocab_size
        if self._base and ours != theirs:
            raise UsageError(f"{other!r} has a vocabulary of {theirs}, the new model one of {ours}; {_SAME_TOKENIZER}")
        tokenizer = data.load_tokenizer(resolve(other), theirs)
        if _vocabulary_sha256(self.tokenizer) != _vocabulary_sha256(tokenizer):
            raise UsageError(f"{other!r} has another tokenizer than the new model; "
                             f"{_SAME_TOKENIZER}")

    def _teacher(self) -> FrozenModel | None:
        settings = self._settings
        name = settings.model if isinstance(settings, DraftSettings) and settings.distill else settings.distill_from
        return load_frozen_model(resolve(name), settings.dtype, self._processes.device) if name else None

    def _tokenizer_folder(self, output: Path) -> Path:
        settings = self._settings
        named = settings.start or (settings.model if isinstance(settings, DraftSettings) else settings.tokenizer)
        if named:
            return resolve(named)
        if self._processes.is_main and not (output / "tokenizer.json").exists():
            texts = data_files.read_documents(settings.data, settings.text_column)
            tokenizer = lm.train_tokenizer((text for text in texts if isinstance(text, str)), settings.vocab_size)
            partial = output / "tokenizer.partial"
            tokenizer.save(str(partial))
            partial.replace(output / "tokenizer.json")
        self._processes.wait_for_all()
        return output

    def _model(self, source: Path) -> Any:
        settings = self._settings
        if settings.start:
            return self._grouped(pretrained(source, torch.float32, self._processes.device))
        if (source / "config.json").exists():
            config = read_config(source)
            return lm.new_model(settings, config.vocab_size, None, next(iter(config.eos_token_ids), None))
        tokenizer = data.load_tokenizer(source, 2**31)
        return lm.new_model(settings, tokenizer.get_vocab_size(), tokenizer.token_to_id(lm.BEGIN),
                            tokenizer.token_to_id(lm.END))

    def _grouped(self, model: Any) -> Any:
        wanted, has = self._settings.num_kv_heads, model.config.num_key_value_heads
        if wanted in (0, has):
            return model
        if model.config.model_type != "llama" or has % wanted:
            raise UsageError(f"num_kv_heads is {wanted}; allowed: a divisor of {has}, the KV heads of "
                             f"{self._settings.start!r}, if that is a Llama")
        return lm.with_fewer_kv_heads(model, wanted)

    def task(self, tokens: Tokens, validation: Tokens, *, is_new: bool) -> TrainingTask:
        settings = self._settings
        device = self._processes.device
        module = lm.prepare(self._start, settings, device)
        dtype = torch.bfloat16 if settings.dtype == "auto" else TORCH_DTYPES[settings.dtype]
        return lm.LanguageModelTask(module, settings, device, dtype, self._base, validation)

    def about(self) -> dict[str, Any]:
        settings = self._settings
        if not isinstance(settings, DraftSettings):
            return {"kind": "language-model"}
        return {"kind": "draft-model", "base_model": data.model_name(settings.model), "base_sha256": self.fingerprint}

    def drafting(self, output: Path) -> Drafting | None:
        if not isinstance(self._settings, DraftSettings):
            return None
        context = self._start.config.max_position_embeddings
        options = {"model": str(output.absolute()), "budget": min(1024, context), "refresh": min(256, context // 4)}
        return Drafting(self._settings.model, "draft-model", options, None)


class TrainingKind(NamedTuple):
    settings: type[TrainingSettings]
    prepare: Callable[[Any, Path, DistributedProcesses], TrainingContext]


TRAININGS: dict[str, TrainingKind] = {
    "heads": TrainingKind(HeadSettings, _FrozenModelContext),
    "glide": TrainingKind(GlideSettings, _FrozenModelContext),
    "eagle": TrainingKind(EagleSettings, _FrozenModelContext),
    "block": TrainingKind(BlockSettings, _FrozenModelContext),
    "draft": TrainingKind(DraftSettings, _LanguageModelContext),
    "lm": TrainingKind(LmSettings, _LanguageModelContext),
}


def settle(settings: TrainingSettings) -> TrainingSettings:
    """The settings of a new training, with those that the named models decide.

    Raises ModelError for a missing model and UsageError for settings without effect.
    """
    settings.require_effective()
    folders = {name: resolve(value) for name in MODELS if (value := getattr(settings, name, ""))}
    if not isinstance(settings, LmSettings) or not settings.start:
        return settings
    limit = read_config(folders["start"]).trained_positions
    check(settings.context in (limit, type(settings).context), "context", settings.context,
          f"{limit}, the context of {settings.start!r}", "leave it out")
    check(settings.sequence_length <= limit, "sequence_length", settings.sequence_length,
          f"at most the model's context ({limit})")
    return replace(settings, context=limit)
