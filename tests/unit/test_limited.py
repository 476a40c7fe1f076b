"""Work in a child process with limits: what goes beyond them ends the child only."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from longdraft.system.limited import CallError, LimitedProcess, LimitError, on_large_stack


@pytest.fixture(scope="module")
def child() -> LimitedProcess:
    """A child that evaluates expressions."""
    return LimitedProcess("functools", "partial", lambda: (eval,))


def test_a_call_returns_what_the_function_returns(child):
    child.start()
    for text in ("", "a" * 1_000_000, "é\n\0", "half of a pair: \ud800"):
        assert child.call("a", {"a": text}) == text


@pytest.mark.parametrize("expression, reason", [
    ("'a' * 10**10", "takes more than 1024 MB of memory"),
    ("__import__('os').abort()", "takes more than 1024 MB of memory"),  # as an allocator of Rust does
    ("__import__('ctypes').string_at(0)", "is nested too deeply"),
    ("__import__('os')._exit(0)", "ends its process"),
    pytest.param("all(True for _ in iter(int, 1))", "takes more than 4 s", marks=pytest.mark.full),
])
def test_a_call_beyond_a_limit_is_one_error_and_the_next_call_works(child, expression, reason):
    with pytest.raises(LimitError, match=reason):
        child.call(expression)
    assert child.call("str(1 + 1)") == "2"


@pytest.mark.parametrize("expression", ["1 / 0", "exec('raise SystemExit')", "exec('raise KeyboardInterrupt')",
                                        "(f := lambda: f())()", "object()", "None"])
def test_an_error_of_the_function_is_raised_here_and_the_child_goes_on(child, expression):
    number = child.call("str(__import__('os').getpid())")
    with pytest.raises(CallError):
        child.call(expression)
    assert child.call("str(__import__('os').getpid())") == number


def test_an_argument_that_is_no_plain_data_is_an_error(child):
    with pytest.raises(CallError):
        child.call("a", lambda: 0)


def test_calls_of_many_threads_get_their_own_answers(child):
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(child.call, map(repr, map(str, range(100))))) == [*map(str, range(100))]


def test_a_module_that_cannot_be_imported_is_an_error():
    with pytest.raises(CallError, match="before it was prepared"):
        LimitedProcess("no_such_module", "factory").call()


def test_work_on_a_large_stack_returns_or_raises_as_elsewhere():
    before = threading.stack_size()
    assert on_large_stack(threading.stack_size) >= 64 << 20
    with pytest.raises(ZeroDivisionError):
        on_large_stack(lambda: 1 // 0)
    assert threading.stack_size() == before
