"""What can be trained: each kind's settings, what it stands on, and how it drafts when it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from longdraft.errors import UsageError, check
from longdraft.model.config import read_config
from longdraft.model.hub import resolve
from longdraft.model.tokenizer import vocabulary_sha256
from longdraft.train import data, glide, heads, lm
from longdraft.train.base import DTYPES, Base, load_base, pretrained
from longdraft.train.data import Tokens
from longdraft.train.loop import Trainee
from longdraft.train.probe import Drafting
from longdraft.train.settings import DraftSettings, GlideSettings, HeadSettings, LmSettings, Settings
from longdraft.train.team import Team

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_SAME = "a model learns from, and drafts for, one with its own tokenizer: give --start or --tokenizer of that kind"


def _vocabulary_sha256(tokenizer: Tokenizer) -> str:
    return vocabulary_sha256(tokenizer.get_vocab(with_added_tokens=True))


class Exports(Trainee, Protocol):
    def export(self, folder: Path, record: dict[str, Any]) -> None:
        """Write what was learnt, with its provenance."""


class Ground(Protocol):
    """What a training stands on: a tokenizer, and whatever of it is frozen."""

    tokenizer: Tokenizer
    end_id: int | None  # of a text
    fingerprint: str  # of what is frozen; empty: nothing is

    def trainee(self, sample: Tokens, validation: Tokens) -> Exports: ...

    def about(self) -> dict[str, Any]:
        """What the record says of the frozen model."""

    def drafting(self, output: Path) -> Drafting | None:
        """How to draft with what lies in `output`; None: it is no drafter."""


class _OnBase:
    """Heads and glide stand on a frozen model."""

    def __init__(self, settings: HeadSettings | GlideSettings, output: Path, team: Team) -> None:
        self._settings = settings
        folder = resolve(settings.model)
        self._base = load_base(folder, settings.dtype, team.device, shard=settings.shard)
        config = self._base.config
        self.tokenizer = data.load_tokenizer(folder, config.vocab_size)
        self.end_id = next(iter(config.eos_token_ids), None)
        self.fingerprint = self._base.fingerprint

    def trainee(self, sample: Tokens, validation: Tokens) -> Exports:
        if isinstance(self._settings, HeadSettings):
            return heads.new_trainee(self._base, self._settings, sample, validation)
        return glide.new_trainee(self._base, self._settings, validation)

    def about(self) -> dict[str, Any]:
        config = self._base.config
        return {"base_model": data.model_name(self._settings.model), "hidden_size": config.hidden_size,
                "vocab_size": config.vocab_size, "base_sha256": self.fingerprint,
                "vocabulary_sha256": _vocabulary_sha256(self.tokenizer)}

    def drafting(self, output: Path) -> Drafting:
        settings = self._settings
        if isinstance(settings, GlideSettings):
            return Drafting(settings.model, "glide", {}, str(output))
        if settings.kind == "medusa":
            return Drafting(settings.model, "medusa", {"tree": ",".join(["1"] * settings.heads)}, str(output))
        depth = min(2, settings.heads + 1)
        return Drafting(settings.model, "tokenswift", {"tree": ",".join(["1"] * depth)}, str(output))


class _Lm:
    """A language model stands on a tokenizer, one to go on from, one that teaches."""

    def __init__(self, settings: LmSettings, output: Path, team: Team) -> None:
        self._settings, self._team = settings, team
        self._base = self._teacher()
        source = self._tokenizer_folder(output)
        if source != output and team.leads:
            lm.copy_tokenizer(source, output)
        self._start = self._model(source)
        self.tokenizer = data.load_tokenizer(source, self._start.config.vocab_size)
        eos = self._start.config.eos_token_id
        self.end_id = eos[0] if isinstance(eos, list) else eos
        self.fingerprint = self._base.fingerprint if self._base else ""
        self._require_one_vocabulary()

    def _require_one_vocabulary(self) -> None:
        """Of the new model, of the one it learns from and of the one it will draft for: every id means the same."""
        settings = self._settings
        other = settings.model if isinstance(settings, DraftSettings) else settings.distill_from
        if not other:
            return
        ours, theirs = self._start.config.vocab_size, read_config(resolve(other)).vocab_size
        if self._base and ours != theirs:
            raise UsageError(f"{other!r} has a vocabulary of {theirs}, the new model one of {ours}; {_SAME}")
        tokenizer = data.load_tokenizer(resolve(other), theirs)
        if _vocabulary_sha256(self.tokenizer) != _vocabulary_sha256(tokenizer):
            raise UsageError(f"{other!r} has another tokenizer than the new model: the same ids are other tokens; "
                             f"{_SAME}")

    def _teacher(self) -> Base | None:
        settings = self._settings
        name = settings.model if isinstance(settings, DraftSettings) and settings.distill else settings.distill_from
        return load_base(resolve(name), settings.dtype, self._team.device) if name else None

    def _tokenizer_folder(self, output: Path) -> Path:
        settings = self._settings
        named = settings.start or (settings.model if isinstance(settings, DraftSettings) else settings.tokenizer)
        if named:
            return resolve(named)
        if self._team.leads and not (output / "tokenizer.json").exists():
            texts = data.read_documents(settings.data, settings.text_column)
            tokenizer = lm.train_tokenizer(texts, settings.vocab_size)
            partial = output / "tokenizer.partial"
            tokenizer.save(str(partial))
            partial.replace(output / "tokenizer.json")
        self._team.wait()
        return output

    def _model(self, source: Path) -> Any:
        settings = self._settings
        if settings.start:
            return self._grouped(pretrained(source, torch.float32, self._team.device))
        if (source / "config.json").exists():
            config = read_config(source)
            begin, end = None, next(iter(config.eos_token_ids), None)
            return lm.new_model(settings, config.vocab_size, begin, end)
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

    def trainee(self, sample: Tokens, validation: Tokens) -> Exports:
        settings, device = self._settings, self._team.device
        module = lm.prepare(self._start, settings, device)
        dtype = torch.bfloat16 if settings.dtype == "auto" else DTYPES[settings.dtype]
        return lm.LmTrainee(module, settings, device, dtype, dtype, self._base, validation)

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


MODELS = ("model", "tokenizer", "start", "distill_from")  # settings that name one


class Kind(NamedTuple):
    settings: type[Settings]
    prepare: Callable[[Any, Path, Team], Ground]

    def settle(self, settings: Settings) -> Settings:
        """The settings of a new training, with what the models that they name decide.

        ModelError for a model that is not there, UsageError for what would have no effect, before anything is made.
        """
        settings.check_idle()
        folders = {name: resolve(value) for name in MODELS if (value := getattr(settings, name, ""))}
        if isinstance(settings, LmSettings) and settings.start:
            limit = read_config(folders["start"]).trained_positions
            usual = next(each.default for each in fields(settings) if each.name == "context")
            check(settings.context in (limit, usual), "context", settings.context,
                  f"{limit}, what {settings.start!r} declares", "leave it out")
            check(settings.sequence_length <= limit, "sequence_length", settings.sequence_length,
                  f"at most the model's context ({limit})")
            return replace(settings, context=limit)
        return settings


KINDS: dict[str, Kind] = {
    "heads": Kind(HeadSettings, _OnBase),
    "glide": Kind(GlideSettings, _OnBase),
    "draft": Kind(DraftSettings, _Lm),
    "lm": Kind(LmSettings, _Lm),
}
