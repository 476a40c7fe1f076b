"""Fixtures that several test modules share. Tests need no network and no GPU."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from longdraft.batch.worker import BatchJob

AFFECTED: pytest.StashKey[set[Path] | None] = pytest.StashKey()  # with --changed-since; None: every file is

HELD_SETTINGS = "_hypothesis_internal_use_settings"  # where Hypothesis keeps a test's settings

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--changed-since", metavar="REVISION",
                     help="run the tests alone that reach a file that differs from this revision (make test-changed)")
    parser.addoption("--most-examples", metavar="COUNT", type=int,
                     help="examples of a test with random inputs, at most (make test-arm-all: an emulator is slow)")


def pytest_configure(config: pytest.Config) -> None:
    if revision := config.getoption("--changed-since"):
        from helpers.import_graph import affected_tests, changed_files

        config.stash[AFFECTED] = affected_tests(ROOT, changed_files(ROOT, revision))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --changed-since, leave out the files of tests that no change can affect."""
    affected = config.stash.get(AFFECTED, None)
    if affected is None or collection_path.is_dir():
        return None
    return True if collection_path not in affected else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Prepare a process that runs tests. One that only distributes them to others need not import PyTorch."""
    if session.config.pluginmanager.has_plugin("dsession"):
        return
    import hypothesis
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read at Triton's first import, which some libraries do
    from longdraft import kernels

    kernels.set_threads(1)  # tiny tensors: more threads only wait for one another
    hypothesis.settings.register_profile("quiet", deadline=None)  # no test is about the machine's speed
    hypothesis.settings.load_profile("quiet")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --most-examples, limit every test of random inputs. A profile could not: decorators ask for more."""
    most = config.getoption("--most-examples")
    if most is None:
        return
    from hypothesis import settings

    for test in {item.obj for item in items if hasattr(getattr(item, "obj", None), HELD_SETTINGS)}:
        own = getattr(test, HELD_SETTINGS)
        setattr(test, HELD_SETTINGS, settings(own, max_examples=min(own.max_examples, most)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and collected tests live as long as the process: the garbage collector need not walk them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests keep nothing in the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def restore_log_level() -> Iterator[None]:
    """Restore the log level, which a server started by a test sets for the whole process."""
    before = logging.getLogger("longdraft").level
    yield
    logging.getLogger("longdraft").setLevel(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders with heads, glide and an EAGLE head: `mha` (4 KV heads) and `gqa` (4 query heads per KV head)."""
    from helpers.checkpoints import make_checkpoint, make_glide, make_heads
    from helpers.eagle import make_eagle

    root = tmp_path_factory.mktemp("tiny")
    for name, kv_heads in (("mha", 4), ("gqa", 1)):
        base = make_checkpoint(root / name, num_key_value_heads=kv_heads, seed=kv_heads)
        make_heads(root / name / "heads", base)
        make_glide(root / name / "glide", root / name)
        make_eagle(root / name / "eagle")
    return {name: root / name for name in ("mha", "gqa")}


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a chat template."""
    from helpers.checkpoints import make_checkpoint

    folder = tmp_path_factory.mktemp("chatty") / "tiny"
    make_checkpoint(folder, num_key_value_heads=2)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if excited %}!{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def job(chatty: Path, tmp_path: Path) -> BatchJob:
    """A batch job of that model with its own work folder."""
    from longdraft.batch.worker import BatchJob

    load = {"model": str(chatty), "drafter": "suffix", "threads": 1}
    return BatchJob(tmp_path / "work", load, {"on_loop": "off"}, 0, "tiny", fsync="never")
