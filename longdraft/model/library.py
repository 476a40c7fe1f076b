"""From what a user calls a model to a folder: a bundled name, a folder, or a Hugging Face hub id."""

from __future__ import annotations

import os
import re
from pathlib import Path

from longdraft.errors import ModelError

BUNDLED_DIR = Path(__file__).resolve().parent.parent / "bundled"
DEFAULT = "novelist"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "*.jinja")


def bundled() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(path.parent.name for path in BUNDLED_DIR.glob("*/config.json"))


def resolve(name: str) -> Path:
    """The folder of a model. Hub ids are downloaded once to the hub's cache (HF_HOME, HF_HUB_OFFLINE)."""
    if name in bundled():
        return BUNDLED_DIR / name
    if os.path.isdir(name):
        return Path(name)
    if not _HUB_ID.fullmatch(name) or os.path.exists(name):
        raise ModelError(f"no model {name!r}; give a bundled name ({', '.join(bundled())}), "
                         "a folder with config.json, or a hub id such as owner/model")
    return _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot get {name!r} from the hub: {reason}; check the name and the network, "
                         "or give a folder") from error
