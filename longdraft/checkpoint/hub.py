"""From a model's name to its folder or GGUF file. A name is a bundled model, a folder, a file, or a hub id:

    novelist        ./my-model        owner/model        owner/model@revision
                    ./model.gguf      owner/model:file.gguf

Only the files that longdraft needs are downloaded, once, to the hub's cache. Code from a repository never runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from longdraft.checkpoint.tensor_files import (
    ADAPTER,
    INDEX,
    TORCH_INDEX,
    TORCH_WEIGHTS,
    WEIGHTS,
    has_weights,
    require_no_adapter,
    shard_names,
)
from longdraft.errors import ModelError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

BUNDLED_DIR = Path(__file__).resolve().parent.parent / "bundled"
DEFAULT_MODEL = "novelist"
_HUB_ID = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<file>[^:]+))?")
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_MAX_PARTS = 1000
_MAX_LISTED = 12  # files that an error message lists
_COMMIT_HASH = re.compile(r"[0-9a-f]{40}")
_CONFIG_FILES = ("config.json", "generation_config.json", ADAPTER)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "added_tokens.json", "tokenizer_config.json",
                    "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
_HEADS_FILES = ("medusa_lm_head.safetensors", "heads/config.json", "heads/model.safetensors",
          "heads/medusa_lm_head.safetensors", "glide/config.json", "glide/model.safetensors",
          "eagle/config.json", "eagle/model.safetensors", "block/config.json", "block/model.safetensors")
_DRAFT_FILES = tuple(f"draft/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json",
                                            "tokenizer_config.json"))


@dataclass(frozen=True)
class Hub:
    """Options for the hub. Those that are not given come from HF_HOME, HF_HUB_OFFLINE and HF_TOKEN.

    revision   branch, tag or commit; default: the repository's main branch
    token      for private and gated repositories
    cache_dir  folder of downloaded files
    offline    use downloaded files only
    """

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    cache_dir: str | Path | None = None
    offline: bool = False


def bundled_models() -> list[str]:
    """Names of the models that are part of the package."""
    return sorted(path.parent.name for path in BUNDLED_DIR.glob("*/config.json"))


def resolve(name: str, hub: Hub | None = None, *, is_config_enough: bool = False) -> Path:
    """The folder of a model or of heads, or a GGUF file, downloaded if necessary.

    is_config_enough  download the configuration only; of a GGUF file nothing is downloaded

    Raises ModelError if there is none, and UsageError for a revision of what is not a hub id.
    """
    hub = hub or Hub()
    folder = BUNDLED_DIR / name if name in bundled_models() else Path(name)
    if os.path.isdir(folder) or os.path.isfile(folder):
        if hub.revision:
            raise UsageError(f"revision is {hub.revision!r}, but {name!r} is on this machine; only hub ids have "
                             "revisions")
        return gguf_in(folder) or folder
    found = _HUB_ID.fullmatch(name)
    if not found or os.path.exists(name):
        raise ModelError(f"no model {name[:200]!r} exists; give a bundled name ({', '.join(bundled_models())}), "
                         "a folder with config.json, a GGUF file, or a hub id such as owner/model or "
                         "owner/model@revision")
    if found["revision"] and hub.revision not in (None, found["revision"]):
        raise UsageError(f"{name!r} has another revision than {hub.revision!r}; give one of them")
    repository = _Repository(found["id"], found["revision"] or hub.revision, hub)
    return repository.fetch_file(found["file"], is_config_enough) if found["file"] else repository.fetch(
        is_config_enough)


def resolve_tokenizer(name: str, hub: Hub | None = None) -> Path:
    """The folder or GGUF file of a model whose tokenizer is wanted. Of a hub id only the tokenizer is downloaded."""
    hub = replace(hub or Hub(), revision=None)
    found = _HUB_ID.fullmatch(name)
    if not found or found["file"] or name in bundled_models() or os.path.exists(name):
        return resolve(name, hub)
    return _Repository(found["id"], found["revision"], hub)._download(_TOKENIZER_FILES)


def with_file(name: str, file: str | None) -> str:
    """The name of the GGUF file `file` of a folder or a hub id; without a file the name itself."""
    if not file:
        return name
    if name not in bundled_models() and os.path.isdir(name):
        return str(Path(name) / file)
    found = _HUB_ID.fullmatch(name)
    if not found or found["file"] or os.path.exists(name) or name in bundled_models():
        raise UsageError(f"file is {file!r}, but {name!r} is neither a folder nor a hub id; only they have files to "
                         "choose from", "file")
    return f"{name}:{file}"


def is_first_part(name: str) -> bool:
    """Whether a GGUF file of this name is a model, not a later part of one or the vision part (mmproj) of another."""
    return not name.startswith("mmproj") and _LATER_PART.search(name) is None


def gguf_in(folder: Path) -> Path | None:
    """The GGUF file of a folder without other weights. None: the folder has some, or is a file itself.

    Of a split file, the first part. Raises ModelError if the folder has several GGUF files.
    """
    if not folder.is_dir() or has_weights(folder):
        return None
    files = sorted(path for path in folder.glob("*.gguf") if is_first_part(path.name))
    if len(files) > 1:
        raise ModelError(f"{folder} has {len(files)} GGUF files; choose one with --file: "
                         f"{', '.join(path.name for path in files[:_MAX_LISTED])}"
                         + (", ..." if len(files) > _MAX_LISTED else ""))
    return files[0] if files else None


def is_local(name: str) -> bool:
    """Whether a model's name is a folder or a file, not a bundled name or a hub id."""
    return bool(name) and name not in bundled_models() and (os.path.isdir(name) or os.path.isfile(name))


def from_anywhere(name: str) -> str:
    """The name, absolute if it is a folder or a file, so that it is valid in any working folder."""
    return str(Path(name).absolute()) if is_local(name) else name


def lasting_name(name: str, folder: Path) -> str:
    """A permanent name for the model `name`, which was found in `folder`: with its commit, or an absolute path."""
    if name in bundled_models():
        return name
    found = _HUB_ID.fullmatch(name)
    commit = next((part for part in reversed(folder.parts) if _COMMIT_HASH.fullmatch(part)), None)
    if found and not os.path.exists(name) and commit:
        return f"{found['id']}@{commit}" + (f":{found['file']}" if found["file"] else "")
    return str(folder.resolve() if folder.is_dir() else folder.absolute())


@dataclass(frozen=True)
class _Repository:
    id: str
    revision: str | None
    hub: Hub

    def fetch(self, is_config_enough: bool) -> Path:
        """Download the files that longdraft needs. The index of shards lists the weights."""
        if is_config_enough:
            return self._download(_CONFIG_FILES)
        folder = self._download((*_CONFIG_FILES, *_TOKENIZER_FILES, *_HEADS_FILES, *_DRAFT_FILES, INDEX, TORCH_INDEX))
        # The cache names folders by commit. Take the weights of the same commit, even if the branch has moved.
        same = replace(self, revision=folder.name) if _COMMIT_HASH.fullmatch(folder.name) else self
        for index, single in ((INDEX, WEIGHTS), (TORCH_INDEX, TORCH_WEIGHTS)):
            names = shard_names(folder / index) if (folder / index).exists() else [single]
            folder = same._download(names)
            if any((folder / name).exists() for name in (*names, *_HEADS_FILES)):
                return folder
        if not any((folder / name).exists() for name in _HEADS_FILES):
            require_no_adapter(folder)
            if self._is_offline:  # the files may exist in the repository
                raise self._incomplete()
            files: list[str] = []
            with suppress(ModelError):
                files = self._gguf_files()
            if files:
                raise ModelError(f"{self._full_name} has GGUF files; choose one with --file: "
                                 f"{', '.join(files[:_MAX_LISTED])}" + (", ..." if len(files) > _MAX_LISTED else ""))
            raise ModelError(f"{self._full_name} has no {WEIGHTS}, no {TORCH_WEIGHTS} and no index of shards; other "
                             ".bin, .pt and .pth files are pickles, which can run code, and are not loaded; choose a "
                             "revision with safetensors, or save the model again with save_pretrained, which writes "
                             "them")
        return folder

    def fetch_file(self, name: str, is_config_enough: bool) -> Path:
        """Download a GGUF file, with all parts if it is split. Nothing is downloaded if the header is enough."""
        found = _PART.fullmatch(name)
        names = [name] if not found else [f"{found['stem']}-{number:05}-of-{found['count']}.gguf"
                                          for number in range(1, min(int(found["count"]), _MAX_PARTS) + 1)]
        repository = replace(self, hub=replace(self.hub, offline=True)) if is_config_enough else self
        file = repository._download(names) / names[0]
        if not file.is_file():
            if repository._is_offline:
                raise repository._incomplete()
            raise ModelError(f"{self._full_name} has no file {name!r}; it has: "
                             f"{', '.join(self._gguf_files()[:_MAX_LISTED]) or 'no GGUF files'}")
        return file

    def _gguf_files(self) -> list[str]:
        """The names of the repository's GGUF files, without later parts of split ones."""
        from huggingface_hub import list_repo_files

        with self._translate_errors():
            files = list_repo_files(self.id, revision=self.revision, token=self.hub.token)
        return [name for name in files if name.endswith(".gguf") and not _LATER_PART.search(name)]

    @property
    def _is_offline(self) -> bool:
        from huggingface_hub import constants

        return self.hub.offline or constants.HF_HUB_OFFLINE

    def _incomplete(self) -> ModelError:
        from huggingface_hub import constants

        where = f"{self._full_name!r} is not complete in {self.hub.cache_dir or constants.HF_HUB_CACHE}"
        if self._is_offline:
            return ModelError(f"{where}, and offline nothing is downloaded; run once without --offline "
                              "(HF_HUB_OFFLINE), or give a folder")
        return ModelError(f"{where}, and the hub is not reachable; check the network, or give a folder")

    @property
    def _full_name(self) -> str:
        return self.id + (f"@{self.revision}" if self.revision else "")

    def _download(self, names: Sequence[str]) -> Path:
        from huggingface_hub import snapshot_download

        with self._translate_errors():
            return Path(snapshot_download(
                self.id, revision=self.revision, token=self.hub.token, cache_dir=self.hub.cache_dir,
                local_files_only=self.hub.offline, allow_patterns=[_literal_pattern(name) for name in names]))

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn the hub client's exceptions into ModelErrors of one line, with a cure."""
        from huggingface_hub import constants, errors

        # The base class depends on the HTTP library that the client uses.
        HTTPError: type[Exception] = getattr(errors, "HTTPError", errors.HfHubHTTPError)
        try:
            yield
        except errors.GatedRepoError as error:
            raise ModelError(f"{self.id!r} is gated; accept its terms at {constants.ENDPOINT}/{self.id} and set "
                             "HF_TOKEN to your token") from error
        except errors.RevisionNotFoundError as error:
            raise ModelError(f"{self.id!r} has no revision {self.revision!r}; "
                             f"see {constants.ENDPOINT}/{self.id}/tree/main") from error
        except errors.RepositoryNotFoundError as error:
            raise ModelError(f"the hub has no {self.id!r}, or it is private; check the name, and set HF_TOKEN for "
                             "private repositories") from error
        except errors.LocalEntryNotFoundError as error:
            raise self._incomplete() from error
        except (HTTPError, errors.HFValidationError, OSError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(f"cannot download {self._full_name!r} from the hub: {reason}; check the name and the "
                             "network, or give a folder") from error


def _literal_pattern(name: str) -> str:
    """A glob pattern that matches this name only. A hostile index may list names with wildcards."""
    return re.sub(r"([*?[])", r"[\1]", name)
