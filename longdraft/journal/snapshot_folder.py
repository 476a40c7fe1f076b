"""When a text has a snapshot, and the files of its folder. (Imports nothing that takes time.)"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from longdraft.errors import check
from longdraft.request.settings import Range

FOLDER, INDEX = "kv", "index"
MODES = ("auto", "never", "always")


@dataclass(frozen=True)
class SnapshotOptions:
    """When a text has a snapshot.

    mode       never | always | auto: on the CPU, where reading the text again takes far longer than reading a file,
               once the text has taken 10 seconds
    max_bytes  of all blocks of a text; later blocks are left out
    """

    mode: str = "auto"
    max_bytes: int = 8 << 30

    def __post_init__(self) -> None:
        check(self.mode in MODES, "snapshot", self.mode, "auto, never or always")

    @classmethod
    def parse(cls, mode: str, max_gib: float) -> SnapshotOptions:
        """From the values of --snapshot and --snapshot-max."""
        Range(0, 1 << 20, words="0 to 1048576 GiB").require("snapshot_max", max_gib, float)
        return cls(mode, int(max_gib * 2**30))


def files_of(folder: Path) -> list[Path]:
    """The files of a snapshot in its own folder, incomplete ones too. Their names begin with a number: where the folder
    is a link to a model's, the model's files are not among them."""
    names = ("[0-9]*.safetensors", "[0-9]*.safetensors.partial", INDEX, f"{INDEX}.partial")
    return [path for name in names for path in folder.glob(name)] if folder.is_dir() else []


def remove_snapshot(journal: Path) -> None:
    """Remove the snapshot of a journal, if it has one. Other files in its folder stay."""
    for path in files_of(journal / FOLDER):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        (journal / FOLDER).rmdir()


def snapshot_bytes(journal: Path) -> int:
    """Bytes of the snapshot of a journal."""
    total = 0
    for path in files_of(journal / FOLDER):
        with suppress(OSError):
            total += path.stat().st_size
    return total
