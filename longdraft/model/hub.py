"""From a model's name to its folder. A name is a bundled model, a folder, or a Hugging Face hub id:

    novelist        ./my-model        owner/model        owner/model@revision

Only the files that longdraft needs are downloaded, once, to the hub's cache. Code from a repository never runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from longdraft.errors import ModelError, UsageError
from longdraft.model.tensor_files import INDEX, WEIGHTS, shard_names

if TYPE_CHECKING:
    from collections.abc import Iterator

BUNDLED_DIR = Path(__file__).resolve().parent.parent / "bundled"
DEFAULT_MODEL = "novelist"
_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_COMMIT_HASH = re.compile(r"[0-9a-f]{40}")
_CONFIG_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
              "chat_template.json")
_HEADS_FILES = ("medusa_lm_head.safetensors", "heads/config.json", "heads/model.safetensors",
          "heads/medusa_lm_head.safetensors", "glide/config.json", "glide/model.safetensors",
          "eagle/config.json", "eagle/model.safetensors")
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
    """The folder of a model or of heads, downloaded if necessary.

    is_config_enough  download the configuration only

    Raises ModelError if there is none, and UsageError for a revision of what is not a hub id.
    """
    hub = hub or Hub()
    folder = BUNDLED_DIR / name if name in bundled_models() else Path(name)
    if os.path.isdir(folder):
        if hub.revision:
            raise UsageError(f"revision is {hub.revision!r}, but {name!r} is a folder; only hub ids have revisions")
        return folder
    found = _HUB_ID.fullmatch(name)
    if not found or os.path.exists(name):
        raise ModelError(f"no model {name[:200]!r} exists; give a bundled name ({', '.join(bundled_models())}), "
                         "a folder with config.json, or a hub id such as owner/model or owner/model@revision")
    if found["revision"] and hub.revision not in (None, found["revision"]):
        raise UsageError(f"{name!r} has another revision than {hub.revision!r}; give one of them")
    return _Repository(found["id"], found["revision"] or hub.revision, hub).fetch(is_config_enough)


def is_folder(name: str) -> bool:
    """Whether a model's name is a folder, not a bundled name or a hub id."""
    return bool(name) and name not in bundled_models() and os.path.isdir(name)


def from_anywhere(name: str) -> str:
    """The name, absolute if it is a folder, so that it is valid in any working folder."""
    return str(Path(name).absolute()) if is_folder(name) else name


def lasting_name(name: str, folder: Path) -> str:
    """A permanent name for the model `name`, which was found in `folder`: with its commit, or an absolute path."""
    if name in bundled_models():
        return name
    found = _HUB_ID.fullmatch(name)
    if found and not os.path.isdir(name) and _COMMIT_HASH.fullmatch(folder.name):
        return f"{found['id']}@{folder.name}"
    return str(folder.resolve())


@dataclass(frozen=True)
class _Repository:
    id: str
    revision: str | None
    hub: Hub

    def fetch(self, is_config_enough: bool) -> Path:
        """Download the files that longdraft needs. The index of shards lists the weights."""
        if is_config_enough:
            return self._download(_CONFIG_FILES)
        folder = self._download((*_CONFIG_FILES, *_TOKENIZER_FILES, *_HEADS_FILES, *_DRAFT_FILES, INDEX))
        names = shard_names(folder / INDEX) if (folder / INDEX).exists() else [WEIGHTS]
        # The cache names folders by commit. Take the weights of the same commit, even if the branch has moved.
        commit = folder.name if _COMMIT_HASH.fullmatch(folder.name) else self.revision
        folder = replace(self, revision=commit)._download(names)
        if not any((folder / name).exists() for name in (*names, *_HEADS_FILES)):
            if self._is_offline:  # the files may exist in the repository
                raise self._incomplete()
            raise ModelError(f"{self._full_name} has no {WEIGHTS} and no {INDEX}; .bin, .pt and .pth files are "
                             "pickles, which can run code, and are not loaded; choose a revision with safetensors, "
                             "or save the model again with save_pretrained, which writes them")
        return folder

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
