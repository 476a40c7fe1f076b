"""From what a user calls a model to a folder: a bundled name, a folder, or a Hugging Face hub id.

    novelist        ./my-model        owner/model        owner/model@revision

Of a repository only the files that are needed are fetched, once, to the hub's cache; no code of theirs ever runs.
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
from longdraft.model.checkpoint import INDEX, WEIGHTS, shard_names

if TYPE_CHECKING:
    from collections.abc import Iterator

BUNDLED_DIR = Path(__file__).resolve().parent.parent / "bundled"
DEFAULT_MODEL = "novelist"
_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONFIGS = ("config.json", "generation_config.json")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
              "chat_template.json")
_HEADS = ("medusa_lm_head.safetensors", "heads/config.json", "heads/model.safetensors",
          "heads/medusa_lm_head.safetensors", "glide/config.json", "glide/model.safetensors")
_DRAFT = tuple(f"draft/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json",
                                            "tokenizer_config.json"))


@dataclass(frozen=True)
class Hub:
    """How the hub is asked. What is not given, the hub's own variables say: HF_HOME, HF_HUB_OFFLINE, HF_TOKEN.

    revision   branch, tag or commit; default: the repository's main branch
    token      for private and gated repositories
    cache_dir  where files are kept
    offline    use what was fetched before, ask nobody
    """

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    cache_dir: str | Path | None = None
    offline: bool = False


def bundled_models() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(path.parent.name for path in BUNDLED_DIR.glob("*/config.json"))


def resolve(name: str, hub: Hub | None = None, *, is_config_enough: bool = False) -> Path:
    """The folder of a model or of heads. ModelError where there is none, UsageError for a revision of no hub id."""
    hub = hub or Hub()
    folder = BUNDLED_DIR / name if name in bundled_models() else Path(name)
    if os.path.isdir(folder):
        if hub.revision:
            raise UsageError(f"revision is {hub.revision!r}, but {name!r} is a folder; revisions are those of hub ids")
        return folder
    found = _HUB_ID.fullmatch(name)
    if not found or os.path.exists(name):
        raise ModelError(f"no model {name[:200]!r}; give a bundled name ({', '.join(bundled_models())}), "
                         "a folder with config.json, or a hub id such as owner/model or owner/model@revision")
    if found["revision"] and hub.revision not in (None, found["revision"]):
        raise UsageError(f"{name!r} names another revision than {hub.revision!r}; give it once")
    return _Repository(found["id"], found["revision"] or hub.revision, hub).fetch(is_config_enough)


def is_folder(name: str) -> bool:
    """Whether a model's name is a folder of the user's."""
    return bool(name) and name not in bundled_models() and os.path.isdir(name)


def from_anywhere(name: str) -> str:
    """A name that means the same in another working folder."""
    return str(Path(name).absolute()) if is_folder(name) else name


def lasting_name(name: str, folder: Path) -> str:
    """What will mean the same model tomorrow, and from elsewhere, as `name` did when `folder` was found for it."""
    if name in bundled_models():
        return name
    found = _HUB_ID.fullmatch(name)
    if found and not os.path.isdir(name) and _COMMIT.fullmatch(folder.name):
        return f"{found['id']}@{folder.name}"
    return str(folder.resolve())


@dataclass(frozen=True)
class _Repository:
    id: str
    revision: str | None
    hub: Hub

    def fetch(self, is_config_enough: bool) -> Path:
        """The folder of the files that are needed. Which weights there are, the shards' index says."""
        if is_config_enough:
            return self._download(_CONFIGS)
        folder = self._download((*_CONFIGS, *_TOKENIZER, *_HEADS, *_DRAFT, INDEX))
        names = shard_names(folder / INDEX) if (folder / INDEX).exists() else [WEIGHTS]
        # The cache names a folder by its commit: the weights are those of the same one, whatever came meanwhile.
        commit = folder.name if _COMMIT.fullmatch(folder.name) else self.revision
        folder = replace(self, revision=commit)._download(names)
        if not any((folder / name).exists() for name in (*names, *_HEADS)):
            if self._is_offline:  # nobody knows whether they are there
                raise self._not_whole()
            raise ModelError(f"{self._shown} holds no {WEIGHTS} and no {INDEX}; .bin, .pt and .pth files are pickles, "
                             "which can run code, and are not loaded; look for a revision with safetensors, or save "
                             "the model again with save_pretrained (it writes them)")
        return folder

    @property
    def _is_offline(self) -> bool:
        from huggingface_hub import constants

        return self.hub.offline or constants.HF_HUB_OFFLINE

    def _not_whole(self) -> ModelError:
        from huggingface_hub import constants

        where = f"{self._shown!r} is not whole in {self.hub.cache_dir or constants.HF_HUB_CACHE}"
        if self._is_offline:
            return ModelError(f"{where}, and offline nothing is fetched; leave --offline (HF_HUB_OFFLINE) out once, or "
                              "give a folder")
        return ModelError(f"{where}, and the hub cannot be reached; check the network, or give a folder")

    @property
    def _shown(self) -> str:
        return self.id + (f"@{self.revision}" if self.revision else "")

    def _download(self, names: Sequence[str]) -> Path:
        from huggingface_hub import snapshot_download

        with self._told():
            return Path(snapshot_download(
                self.id, revision=self.revision, token=self.hub.token, cache_dir=self.hub.cache_dir,
                local_files_only=self.hub.offline, allow_patterns=[_exactly(name) for name in names]))

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong at the hub, in one line with its cure."""
        from huggingface_hub import constants, errors

        # Of whichever HTTP library the hub's own stands on.
        HTTPError: type[Exception] = getattr(errors, "HTTPError", errors.HfHubHTTPError)
        try:
            yield
        except errors.GatedRepoError as error:
            raise ModelError(f"{self.id!r} is gated; accept its terms at {constants.ENDPOINT}/{self.id} and set "
                             "HF_TOKEN to a token of yours") from error
        except errors.RevisionNotFoundError as error:
            raise ModelError(f"{self.id!r} has no revision {self.revision!r}; "
                             f"see {constants.ENDPOINT}/{self.id}/tree/main") from error
        except errors.RepositoryNotFoundError as error:
            raise ModelError(f"the hub has no {self.id!r}, or it is private; check the name, and set HF_TOKEN for "
                             "what is private") from error
        except errors.LocalEntryNotFoundError as error:
            raise self._not_whole() from error
        except (HTTPError, errors.HFValidationError, OSError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(f"cannot get {self._shown!r} from the hub: {reason}; check the name and the network, "
                             "or give a folder") from error


def _exactly(name: str) -> str:
    """A name as a pattern that fits nothing else (a hostile index may hold stars)."""
    return re.sub(r"([*?[])", r"[\1]", name)
