"""Work on untrusted text in a child process, with limits of time, memory and stack.

    child = LimitedProcess("longdraft.sampling.grammar", "checker", lambda: (tokenizer_json, 49152, 0))
    child.call("json", schema, "")    # what checker(tokenizer_json, 49152, 0)("json", schema, "") returns

Grammar engines and template languages recurse and multiply: a kilobyte of input can end a process, or hold it for
minutes. Such an input ends the child only. The function takes plain data, returns a text, and gives the same result for
the same arguments in every process. The child is not trusted: nothing of its answers is executed here.

A large stack for the same work in this process: `on_large_stack`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

try:
    import resource
except ImportError:  # a system without limits of this kind; the time is limited nevertheless
    resource = None  # type: ignore[assignment]

T = TypeVar("T")

_NICE = 5  # of the child, its start included: texts that are being written come first
_WALL_TIMES = 5  # that a call may take on a busy machine, in times of its processor time
_START_S = 120.0  # for imports and the preparation, on a busy machine
_MAX_CHARACTERS = 1 << 26  # of a result: eight of the largest bodies of a server
_STACK_BYTES = 32 << 20  # of the child's thread: some 10,000 levels in the grammar engine
_LARGE_STACK_BYTES = 2 * _STACK_BYTES  # here: what the child survives, this process survives
_IDLE_S = 60.0  # after which the child ends: it has a tokenizer in its memory
_RESULT, _LIMIT, _ERROR = b"r", b"l", b"e"  # the first byte of an answer
_stack_size_lock = threading.Lock()  # the size is a setting of the whole process


class LimitError(Exception):
    """A call went beyond a limit; the message says which, as "takes more than 4 s"."""


class Limits(NamedTuple):
    """Processor time of a call in seconds, and bytes of memory beyond those of the prepared child."""

    cpu_s: int
    memory_bytes: int


class CallError(Exception):
    """The function has raised an error. kind: its class"""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class LimitedProcess:
    """A child process that is started when it is needed. Any thread may call it; calls wait for one another.

    module, factory, arguments   the function is what `factory(*arguments())` of the module returns in the child
    cpu_s, memory_bytes          of a call
    """

    def __init__(self, module: str, factory: str, arguments: Callable[[], tuple[Any, ...]] = tuple, *,
                 cpu_s: int = 4, memory_bytes: int = 1 << 30) -> None:
        self._job = module, factory, arguments
        self._limits = Limits(cpu_s, memory_bytes)
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def call(self, *arguments: Any) -> str:
        """The result of the function. LimitError beyond a limit; CallError where it fails or an argument is no data."""
        try:
            request = pickle.dumps(arguments)
        except Exception as error:  # the kinds of errors depend on the object
            raise CallError(type(error).__name__, str(error)) from error
        with self._lock:
            answer = self._usable_child().exchange(request)
            if answer is None:  # it has just ended, because it was idle
                answer = self._usable_child().exchange(request)
        if answer is None:
            raise LimitError("ends its process")
        kind, text = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
        if kind == _LIMIT:
            raise LimitError(text)
        if kind == _ERROR:
            name, _, message = text.partition(" ")
            raise CallError(name, message)
        return text

    def start(self) -> None:
        """Start the child, which takes up to seconds, without waiting for it."""
        with self._lock:
            self._usable_child()

    def _usable_child(self) -> _Child:
        if self._child is None or not self._child.is_usable():
            module, factory, arguments = self._job
            self._child = _Child(pickle.dumps((module, factory, arguments(), self._limits)), self._limits)
        return self._child


class _Child:
    """A running child."""

    def __init__(self, job: bytes, limits: Limits) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Without -P the working directory would be searched for modules. One thread of arithmetic is enough.
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1",
                                        "OPENBLAS_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"import os; os.nice({_NICE}); from {__name__} import serve; "
                                             f"serve({theirs.fileno()})"],
                pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True)  # Ctrl-C is not for it
        self._connection = Connection(ours.detach())
        self._owner = os.getpid()
        self._limits = limits
        self.end = weakref.finalize(self, _end, self._process, self._connection, self._owner)
        self._is_prepared = False
        self._connection.send_bytes(job)

    def is_usable(self) -> bool:
        """Whether it runs, and for this process: a fork would share the connection."""
        return self._owner == os.getpid() and self._process.poll() is None

    def exchange(self, message: bytes) -> bytes | None:
        """The answer to a message; None if the child had ended by itself. LimitError, and the child has ended, without
        an answer."""
        try:
            if not self._is_prepared:
                self._receive(_START_S)
                self._is_prepared = True
            self._connection.send_bytes(message)
            return self._receive(_WALL_TIMES * self._limits.cpu_s)
        except (EOFError, OSError):
            status = self._process.wait(_WALL_TIMES * self._limits.cpu_s)
            if status == 0:
                return None
            raise LimitError(self._reason(status)) from None
        except BaseException:  # a child whose answer is not read cannot be used again
            self.end()
            raise

    def _receive(self, seconds: float) -> bytes:
        if not self._connection.poll(seconds):
            raise LimitError(f"takes more than {seconds:g} s")
        return self._connection.recv_bytes()

    def _reason(self, status: int) -> str:
        """Why a child has ended, from its exit status."""
        if status > 0:
            raise CallError("ChildProcessError", f"a child process ended with status {status} before it was prepared")
        if status == -signal.SIGXCPU:
            return f"takes more than {self._limits.cpu_s} s"
        if status in (-signal.SIGSEGV, -signal.SIGBUS):
            return "is nested too deeply"
        # An allocator of Rust ends the process.
        return f"takes more than {self._limits.memory_bytes >> 20} MB of memory"


def _end(process: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    if owner == os.getpid():
        connection.close()
        process.kill()
        process.wait()


def serve(descriptor: int) -> None:
    """The child: prepare the function, then answer calls until the parent has gone or does not call for a while."""
    prepared: list[bool] = []
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(Connection(descriptor), prepared))
    thread.start()
    thread.join()
    sys.exit(not prepared)


def _serve(connection: Connection, prepared: list[bool]) -> None:
    module, factory, arguments, limits = pickle.loads(connection.recv_bytes())
    function = getattr(importlib.import_module(module), factory)(*arguments)
    connection.send_bytes(b"")
    prepared.append(True)
    base = _address_space()
    if resource:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if base:
            resource.setrlimit(resource.RLIMIT_AS, (base + limits.memory_bytes, base + limits.memory_bytes))
    with contextlib.suppress(EOFError, OSError):
        while connection.poll(_IDLE_S):
            request = connection.recv_bytes()
            if resource:
                used_s = math.ceil(time.process_time())
                resource.setrlimit(resource.RLIMIT_CPU, (used_s + limits.cpu_s, resource.RLIM_INFINITY))
            connection.send_bytes(_answer(function, request, limits))
            if _address_space() > base + limits.memory_bytes // 2:  # the next call would have less
                break


def _answer(function: Callable[..., str], request: bytes, limits: Limits) -> bytes:
    try:
        kind, text = _RESULT, function(*pickle.loads(request))
        if len(text) > _MAX_CHARACTERS:
            kind, text = _LIMIT, f"takes more than {_MAX_CHARACTERS:,} characters"
        return kind + text.encode("utf-8", "surrogatepass")
    except MemoryError:
        return _LIMIT + f"takes more than {limits.memory_bytes >> 20} MB of memory".encode()
    except BaseException as error:  # a panic of Rust is no Exception
        return _ERROR + f"{type(error).__name__} {error}".encode("utf-8", "surrogatepass")


def _address_space() -> int:
    """Bytes of this process's address space; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def on_large_stack(work: Callable[[], T]) -> T:
    """The result of `work`, in a thread of its own whose stack is larger than that of a limited process."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    with _stack_size_lock:
        before = threading.stack_size(_LARGE_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
