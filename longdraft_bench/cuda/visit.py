"""A visit to a device: one JSON document for each slice, and the driver that fills it within a time limit.

    {"bench": "cuda", "slice": "first", "sources": HASH, "machine": {...},
     "parts": {NAME: {"state": "done", "sources": HASH, "seconds": 12.5, "tries": 1, "figures": {...}}}}

A part is `running`, `done`, `failed` (with `error`) or `left_out` (no time was left for it). The document is written
whole and renamed before and after every part, so it is valid whenever the visit ends. Parts run in a worker process.
A part that crashes or hangs is marked as failed, and a new worker goes on with the next part. The next visit continues
where this one ended. A part that is done is measured again only if the kernels have changed since.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from longdraft import kernels
from longdraft.errors import UsageError
from longdraft.kernels.switches import VARIABLE
from longdraft_bench.cuda import predictions
from longdraft_bench.cuda.plan import INTERPRETED, ON_DEVICE, ROWS, SWITCH, Part, parts_of

_PACKAGE = Path(kernels.__file__).resolve().parents[1]
_SOURCES = ("kernels/cuda/*.py", "sampling/*.py", "drafters/**/*.py", "speculation/*.py",
            "model/*.py", "parts/*.py")
_RESERVE = 1.3  # a part starts if so many times its expected seconds are left
_TRIES = 2  # of a part in one visit
_POLL_S = 0.1
_LOG_TAIL = 400  # characters of a worker's last words


def sources_hash() -> str:
    """Of everything that the figures depend on."""
    found = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in _PACKAGE.glob(pattern)):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


@dataclass
class Document:
    """The document of one slice."""

    path: Path
    sources: str
    filled: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, name: str, sources: str, device: str, previous: Path | None = None) -> Document:
        """Start a document, or continue the one in `folder`, or else the one in `previous`.

        UsageError if the file there is not a document of this slice on this device.
        """
        path = folder / f"{name}.json"
        document = cls(path, sources)
        earlier = [place for place in (path, previous / path.name if previous else path) if place.is_file()]
        if earlier:
            try:
                document.filled = json.loads(earlier[0].read_text(encoding="utf-8"))
            except ValueError as error:
                raise UsageError(f"{earlier[0]} is not JSON ({error}); name another folder") from error
            about = {key: document.filled.get(key) for key in ("bench", "slice", "device")}
            if about != {"bench": "cuda", "slice": name, "device": device}:
                raise UsageError(f"{earlier[0]} holds something else than the slice {name!r} of `bench cuda` on "
                                 f"{device}; name another folder")
        document.filled |= {"bench": "cuda", "slice": name, "device": device, "sources": sources}
        folder.mkdir(parents=True, exist_ok=True)
        document.save()
        return document

    @property
    def parts(self) -> dict[str, Any]:
        found: dict[str, Any] = self.filled.setdefault("parts", {})
        return found

    def is_done(self, part: Part) -> bool:
        held = self.parts.get(part.name, {})
        return held.get("state") == "done" and (part.lasts or held.get("sources") == self.sources)

    def seconds_of(self, part: Part) -> float:
        """The seconds that the part took the last time, else those that are expected."""
        held = self.parts.get(part.name, {})
        return float(held["seconds"]) if held.get("state") == "done" else part.seconds

    def set(self, name: str, state: str, **about: Any) -> None:
        """Write the state of a part. One that fails keeps the figures that it has measured."""
        held = self.parts.get(name, {})
        kept = {key: held[key] for key in ("figures", "switched_off") if key in held and state != "running"}
        self.parts[name] = {**kept, **about, "state": state, "sources": self.sources}
        self.save()

    def keep(self, name: str, figures: Any) -> None:
        """Write the figures that a running part has measured so far."""
        self.parts[name]["figures"] = figures
        self.save()

    def is_wanted(self, part: Part) -> bool:
        """Whether the bits so far allow this part to be measured."""
        return not (part.on_bits and wrong_rows(self.parts)) or bool(self.filled.get("force"))

    @property
    def failing(self) -> list[str]:
        """The switches with which a text differed, or could not be written: what they turn on is left off."""
        return [name.removeprefix(SWITCH) for name, held in self.parts.items() if name.startswith(SWITCH)
                and (held["state"] == "failed" or held.get("switched_off") == "all"
                     or not held.get("figures", {}).get("is_equal", True))]

    def save(self) -> None:
        beside = self.path.with_suffix(".partial")
        beside.write_text(json.dumps(self.filled, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self.path)

    def reload(self) -> None:
        self.filled = json.loads(self.path.read_text(encoding="utf-8"))


def is_fatal(error: Exception) -> bool:
    """Whether the device's context is lost, so that every later call in this process would fail."""
    words = f"{type(error).__name__}: {error}"
    return any(mark in words for mark in ("CUDA error", "AcceleratorError", "illegal memory", "device-side assert"))


def measure_parts(document: Document, parts: Sequence[Part], ends_at: float, measure: Callable[[Part], Any],
                  is_fatal: Callable[[Exception], bool]) -> int:
    """What the worker does: measure parts one after the other. Returns its exit status.

    ends_at   time.time() at which the slice must be over
    is_fatal  whether an error leaves the process unable to go on; then it ends with status 3

    It ends after a switch that is found to fail: another process goes on without what that turns on.
    """
    failing = document.failing
    for part in parts:
        if document.seconds_of(part) * _RESERVE > ends_at - time.time() or not document.is_wanted(part):
            continue
        if document.failing != failing:
            return 0
        tries = document.parts.get(part.name, {}).get("tries", 0) + 1
        began, off = time.time(), os.environ.get(VARIABLE)
        document.set(part.name, "running", tries=tries, began=began, **{"switched_off": off} if off else {})
        try:
            figures = measure(part)
        except Exception as error:  # whatever it is, the other parts must be measured
            words = f"{type(error).__name__}: {error}".strip()
            document.set(part.name, "failed", tries=tries, seconds=time.time() - began, error=words[:2000])
            print(f"{part.name}: failed: {words[:200]}", flush=True)
            if is_fatal(error):
                return 3
        else:
            document.set(part.name, "done", tries=tries, seconds=time.time() - began, figures=figures)
            print(f"{part.name}: {time.time() - began:.1f} s", flush=True)
    return 0


@dataclass
class Driver:
    """Runs the parts of one slice in worker processes.

    command      of the worker; the time at which the slice ends and the names of parts are appended
    log          file for what the workers print
    environment  variables of the workers, besides this process's
    """

    document: Document
    parts: Sequence[Part]
    command: Sequence[str]
    log: Path
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Returns when all parts are done, or have failed twice, or when no time is left."""
        ends_at = time.time() + self.limit_s
        for part in self.parts:
            if not self.document.is_done(part):
                self.document.parts.pop(part.name, None)  # a new visit tries a failed part again
        self.document.save()
        while wanted := self._wanted(ends_at):
            self._run_worker(wanted, ends_at)
        for part in self.parts:
            if part.name not in self.document.parts:
                why = "no time was left" if self.document.is_wanted(part) else "rows of trees differ"
                self.document.set(part.name, "left_out", error=why, expected_seconds=part.seconds)
        self.document.save()

    def _wanted(self, ends_at: float) -> list[Part]:
        """Parts to measure next, in order: first all that were not tried, then those that failed once."""
        held, left = self.document.parts, ends_at - time.time()
        wanted = [part for part in self.parts if not self.document.is_done(part) and self.document.is_wanted(part)
                  and held.get(part.name, {}).get("tries", 0) < _TRIES and part.seconds * _RESERVE <= left]
        tries = {part.name: held.get(part.name, {}).get("tries", 0) for part in wanted}
        return [part for part in wanted if tries[part.name] == min(tries.values())]

    def _run_worker(self, wanted: Sequence[Part], ends_at: float) -> None:
        """Start a worker for these parts and wait for it. Mark the part that it did not finish.

        A second try is made with all that can be switched off, a first one without the switches that have failed.
        """
        before = self._tries(wanted)
        names = ["all"] if before[0] else [*os.environ.get(VARIABLE, "").split(), *self.document.failing]
        off = {VARIABLE: " ".join(names)} if names else {}
        with self.log.open("ab") as log:
            worker = subprocess.Popen([*self.command, str(ends_at), *(part.name for part in wanted)], stdout=log,
                                      stderr=subprocess.STDOUT, start_new_session=True,
                                      env={**os.environ, **self.environment, **off})
            reason = self._watch(worker, {part.name: part for part in wanted}, ends_at)
        self.document.reload()
        for name, held in list(self.document.parts.items()):
            if held["state"] == "running":
                self.document.set(name, "failed", tries=held["tries"], error=reason or self._last_words(),
                                  seconds=time.time() - held["began"])
        if self._tries(wanted) != before:
            return
        if worker.returncode:  # it died before its first part
            self.document.set(wanted[0].name, "failed", tries=before[0] + 1, error=reason or self._last_words())
            return
        for part in wanted:  # it found no time for any
            held = self.document.parts.get(part.name, {"state": "left_out", "error": "no time was left"})
            self.document.set(part.name, **held | {"tries": _TRIES})

    def _tries(self, parts: Sequence[Part]) -> list[int]:
        return [self.document.parts.get(part.name, {}).get("tries", 0) for part in parts]

    def _watch(self, worker: subprocess.Popen[bytes], parts: dict[str, Part], ends_at: float) -> str:
        """Wait for the worker; end it at the slice's end or when a part takes too long. Returns why, if so."""
        reason = ""
        while worker.poll() is None:
            time.sleep(_POLL_S)
            self.document.reload()
            now = time.time()
            late = [name for name, held in self.document.parts.items() if held["state"] == "running" and name in parts
                    and now - held["began"] > parts[name].patience]
            if late:
                slow = parts[late[0]]
                reason = f"ended after {slow.patience:.0f} s, it was expected to take {slow.seconds:.0f}"
            elif now > ends_at:
                reason = "the slice's time was over"
            if reason:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
        return reason

    def _last_words(self) -> str:
        words = self.log.read_bytes()[-4 * _LOG_TAIL :].decode(errors="replace").strip()
        return f"the worker died: {words[-_LOG_TAIL:]}"


def wrong_rows(parts: Mapping[str, Any]) -> str | None:
    """The part that found rows of trees that differ from plain decoding, and where they do."""
    return next((f"part {name!r}: rows differ in {held['figures']['differs_in']}" for name, held in parts.items()
                 if name.startswith(ROWS) and held.get("state") == "done" and held["figures"]["differs_in"]), None)


def doubt(folders: Sequence[Path]) -> str | None:
    """Why no speed should be measured: rows of trees that differ from plain decoding in the slice `first`."""
    for path in (folder / "first.json" for folder in folders):
        if path.is_file():
            reason = wrong_rows(json.loads(path.read_text(encoding="utf-8")).get("parts", {}))
            return f"{path}, {reason}" if reason else None
    return None


def unpack_cache(archive: Path, folder: Path) -> None:
    """Put the compiled kernels of an earlier visit into Triton's cache folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if archive.is_file():
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")


def pack_cache(folder: Path, archive: Path) -> None:
    """Keep the compiled kernels for the next visit."""
    if folder.is_dir() and any(folder.iterdir()):
        with tarfile.open(archive, "w:xz", preset=1) as packed:  # the device waits
            packed.add(folder, ".")


class Visit(NamedTuple):
    """Slices of one visit.

    output    folder of the documents and of the files beside them
    previous  folder of an earlier visit; None: there is none
    plan      of the worker: device | interpret
    prompt    a text file
    force     measure speed although rows differ
    parts     beginnings of the names of the parts to measure; empty: all
    """

    output: Path
    previous: Path | None
    plan: str
    prompt: str
    force: bool
    parts: tuple[str, ...] = ()

    def run(self, slices: Sequence[str], limits: Mapping[str, float]) -> None:
        """Run slices one after the other, each with its limit in seconds. UsageError where rows differ."""
        plan = ON_DEVICE if self.plan == "device" else INTERPRETED
        self.output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as compiled:
            archive = f"triton-cache-{_triton_version()}-{sys.implementation.cache_tag}.tar.xz"
            for folder in (self.previous, self.output):
                if folder:
                    unpack_cache(folder / archive, Path(compiled))
            for name in slices:
                reason = doubt([self.output]) if name != "first" else None
                if reason and not self.force:
                    raise UsageError(f"{reason}; no speed is measured on wrong bits. Mend the kernel, or use --force")
                document = Document.open(self.output, name, sources_hash(), plan.device, self.previous)
                document.filled |= {"prompt": self.prompt, "force": self.force}
                document.save()
                command = [sys.executable, "-m", "longdraft_bench.cuda.worker", self.plan, name, str(document.path)]
                wanted = [part for part in parts_of(plan, name) if not self.parts or part.name.startswith(self.parts)]
                Driver(document, wanted, command, self.output / "log.txt", limits[name],
                       {"TRITON_CACHE_DIR": compiled}).run()
                with contextlib.suppress(OSError):  # a full disk must not end the visit
                    pack_cache(Path(compiled), self.output / archive)
                print(summary(document), flush=True)


def summary(document: Document) -> str:
    """A line for each part."""
    lines = [f"{name}: {held['state']}" + (f", {held['seconds']:.1f} s" if "seconds" in held else "")
             + (f": {held['error'][:160]}" if "error" in held else "") for name, held in document.parts.items()]
    judged = predictions.table(document.filled) if document.filled["slice"] == "decide" else []
    return "\n".join([f"slice {document.filled['slice']}, {document.path}", *lines, *judged])


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"
