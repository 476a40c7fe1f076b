"""Journals of a server: what is removed, full disks, privacy; and what must not end the engine's thread."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from helpers import serving
from helpers.journals import HEADER, RUN, replace_os
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.engine.generation import Generation
from longdraft.journal import writer as writing
from longdraft.journal.format import FILE, read_journal
from longdraft.journal.writer import Journal
from longdraft.server import journals, logs, replies, scheduler
from longdraft.server import run as running
from longdraft.server.errors import to_api_error
from longdraft.server.journals import JournalFolder
from longdraft.server.settings import ServerSettings

pytestmark = pytest.mark.full

URL = "/v1/longdraft/generations"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return serving.load(serving.talkative(tmp_path_factory.mktemp("model") / "talker"))


@pytest.fixture
def server(engine, tmp_path):
    with serving.running(engine, journals=tmp_path / "journals", journal_from=10) as found:
        yield found


def post(server, count=20, **body):
    extension = {"min_p": 0.1, **body.pop("longdraft", {})}
    body = {"prompt": "The ship", "max_tokens": count, "seed": 7, "longdraft": extension, **body}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=60)


def text_of(reply) -> str:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def put_journal(folder: Path, days_old: float = 0.0, tokens: int = 5, is_finished: bool = False, header=HEADER,
                run=RUN) -> None:
    with Journal.create(folder, header, run) as journal:
        journal.append([5] * tokens, 0, 0.1)
        if is_finished:
            journal.finish("length")
    when = time.time() - days_old * 86400
    os.utime(folder / FILE, (when, when))


# What is removed


def test_delete_and_pruning_remove_the_journal_and_nothing_else(server):
    root = server.app.service.journals.root
    for name in ("one", "two"):
        put_journal(root / name, is_finished=True)
        (root / name / "notes.txt").write_text("mine")
    (root / "text.txt").write_text("mine")
    assert httpx.delete(f"{server.url}{URL}/one").json()["deleted"]
    server.app.service.journals.prune(dataclasses.replace(server.app.service.settings, keep_finished=0))
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) == [
        "one/notes.txt", "text.txt", "two/notes.txt"]


def test_cut_journals_are_pruned_by_age_and_all_by_size(engine, tmp_path):
    folder = JournalFolder(tmp_path, engine.tokenizer)
    for days in range(1, 5):
        put_journal(tmp_path / f"cut-{days}", days)
        put_journal(tmp_path / f"finished-{days}", days + 0.5, is_finished=True)
    size = (tmp_path / "cut-1" / FILE).stat().st_size
    put_journal(tmp_path / "new", is_finished=True)
    folder._began -= 4000
    folder.prune(ServerSettings(keep_cut_s=3.5 * 86400))
    folder.remove("new")
    assert not (tmp_path / "cut-4").exists() and len(folder.names()) == 7
    journal, _ = Journal.open(tmp_path / "cut-3")
    with journal:
        folder.prune(ServerSettings(journals_bytes=3 * size))
        assert sorted(folder.names()) == ["cut-1", "cut-2", "cut-3"], "finished ones first"
        folder.prune(ServerSettings(journals_bytes=0, keep_cut_s=0))
        assert folder.names() == ["cut-3"], "it is being written"


@pytest.mark.parametrize("uptime_s, newest_days, is_pruned", [(60, 0, False), (4000, 40, False), (4000, 0, True)])
def test_a_clock_that_is_ahead_removes_no_unfinished_journal(engine, tmp_path, uptime_s, newest_days, is_pruned):
    """At the start, or where all journals look old, the clock may be wrong."""
    folder = JournalFolder(tmp_path, engine.tokenizer)
    folder._began -= uptime_s
    put_journal(tmp_path / "cut", days_old=50)
    put_journal(tmp_path / "newest", newest_days)
    folder.prune(ServerSettings(keep_cut_s=30 * 86400.0))
    assert (tmp_path / "cut").exists() != is_pruned and (tmp_path / "newest").exists()


def test_bytes_and_finished_texts_are_counted_as_they_are_written(server):
    folder, settings = server.app.service.journals, server.app.service.settings
    assert not folder.is_due(settings)
    assert not folder.is_due(dataclasses.replace(settings, journals_bytes=1000, keep_finished=0))
    reply = post(server, 30, longdraft={"journal": "mine"})
    assert reply.status_code == 200
    size = (folder.root / "mine" / FILE).stat().st_size
    assert 30 * 4 < folder._num_bytes < size, "less than the whole file, whose header has the settings"
    assert folder.is_due(dataclasses.replace(settings, journals_bytes=100))
    assert folder.is_due(dataclasses.replace(settings, keep_finished=0)) and not folder.is_due(settings)
    folder.prune(settings)
    assert folder._num_bytes == size and folder._num_finished == 1


def test_one_journal_that_cannot_be_removed_does_not_keep_the_others(engine, tmp_path, monkeypatch, caplog):
    for name in ("a", "b", "c"):
        put_journal(tmp_path / name, is_finished=True)
    unlink = Path.unlink

    def fail(path, missing_ok=False):
        if path.parent.name == "b":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", fail)
    folder = JournalFolder(tmp_path, engine.tokenizer)
    folder.prune(ServerSettings(keep_finished=0))
    assert folder.names() == ["b"] and "Read-only file system" in caplog.text


@pytest.mark.parametrize("path, call", [("", "iterdir"), ("/one", "unlink")])
def test_a_folder_of_journals_that_fails_is_one_line_and_no_bug(server, monkeypatch, caplog, path, call):
    put_journal(server.app.service.journals.root / "one")

    def fail(*given, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, call, fail)
    reply = httpx.request("DELETE" if path else "GET", server.url + URL + path)
    assert reply.status_code == 503 and "Read-only file system" in reply.json()["error"]["message"]
    assert str(server.app.service.journals.root) not in reply.text and "Traceback" not in caplog.text


def test_a_journal_that_is_live_is_read_once(engine, tmp_path, monkeypatch):
    put_journal(tmp_path / "live")
    folder, reads = JournalFolder(tmp_path, engine.tokenizer), []
    monkeypatch.setattr(journals, "read_journal", lambda path: reads.append(path) or read_journal(path))
    journal, _ = Journal.open(tmp_path / "live")
    with journal:
        for _ in range(3):
            journal.append([5], 0, 0.0)
            (summary,) = folder.list()
            assert summary["state"] == "running"
    assert len(reads) == 1 and folder.list()[0]["new_tokens"] == 5 + 3 and folder.list(["live"]) == []


@pytest.mark.parametrize("header, run", [
    (HEADER, dataclasses.replace(RUN, began="yesterday")),
    (dataclasses.replace(HEADER, prompt=[2**31 - 1]), RUN)])
def test_a_damaged_journal_does_not_spoil_the_list(engine, tmp_path, header, run):
    put_journal(tmp_path / "good")
    put_journal(tmp_path / "bad", header=header, run=run)
    found = {each["id"]: each["state"] for each in JournalFolder(tmp_path, engine.tokenizer).list()}
    assert found["good"] == "cut" and found["bad"] in ("cut", "unreadable")


def test_journal_false_is_honoured_when_a_text_times_out(engine, tmp_path):
    with serving.running(engine, journals=tmp_path / "j", journal_from=10**6, timeout_s=0.3) as server:
        assert post(server, 50_000, longdraft={"journal": False}).status_code == 408
        assert list((tmp_path / "j").rglob("*")) == []
        assert post(server, 50_000).status_code == 408
        assert len(list((tmp_path / "j").iterdir())) == 1


# Full disks


def test_no_journal_begins_on_a_disk_that_is_nearly_full(server, engine, monkeypatch):
    monkeypatch.setattr(journals.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100 << 20))
    reply = post(server, longdraft={"journal": "mine"})
    assert reply.status_code == 503 and reply.headers["retry-after"] and reply.json()["error"]["code"] == "disk_full"
    assert text_of(post(server)) == serving.written(engine, "The ship", max_new_tokens=20)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("call", ["mkdir", "write"])
def test_a_journal_that_cannot_be_created(server, engine, monkeypatch, number, call):
    """An automatic one is left out; one that was asked for is an error, which does not show the server's folders."""
    def fail(*given, **options):
        raise OSError(number, os.strerror(number))

    if call == "mkdir":
        monkeypatch.setattr(Path, "mkdir", fail)
    else:
        monkeypatch.setattr(writing, "_write", fail)
    assert text_of(post(server)) == serving.written(engine, "The ship", max_new_tokens=20)
    reply = post(server, longdraft={"journal": "mine"})
    assert reply.status_code == (400 if number == errno.EROFS else 503)
    assert str(server.app.service.journals.root) not in reply.text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call, at", [("write", 3), ("write", 12), ("fsync", 1)])
def test_a_disk_that_fills_while_a_text_is_written(server, engine, monkeypatch, caplog, number, call, at):
    """The text goes on without a journal that was not asked for. One that was asked for is an error, and can be resumed
    as far as it was written."""
    monkeypatch.setattr(writing, "_PATH_CHECK_INTERVAL_S", 0.0)
    expected, root = serving.written(engine, "The ship", max_new_tokens=20), server.app.service.journals.root

    def full():
        calls, real = iter(range(1000)), getattr(os, call)

        def fail(*given):
            if next(calls) < at:
                return real(*given)
            raise OSError(number, os.strerror(number))

        return SimpleNamespace(**{**vars(os), call: fail})

    replace_os(monkeypatch, full())
    assert text_of(post(server, longdraft={"drafter": "plain"})) == expected
    assert any(entry.getMessage() == "journal_left_out" for entry in caplog.records)
    assert not list(root.iterdir()), "what was written of it is removed"
    replace_os(monkeypatch, full())
    reply = post(server, longdraft={"journal": "mine", "drafter": "plain"})
    assert reply.status_code == 503 and os.strerror(number) in reply.json()["error"]["message"]
    replace_os(monkeypatch, os)
    resumed = httpx.post(f"{server.url}{URL}/mine/resume", json={}, timeout=60)
    assert text_of(resumed) == expected


def test_errors_do_not_show_the_servers_folders(tmp_path, engine):
    plain = serving.load("novelist")  # without a chat template
    with serving.running(plain, journals=tmp_path) as server:
        reply = httpx.post(server.url + "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
        assert reply.status_code == 400 and str(plain.loaded.files.folder) not in reply.text
        put_journal(tmp_path / "foreign")
        reply = httpx.post(f"{server.url}{URL}/foreign/resume", json={})
        assert reply.status_code == 409 and str(tmp_path) not in reply.text


def test_journals_are_readable_by_their_owner_only(server):
    post(server, longdraft={"journal": "mine"})
    root = server.app.service.journals.root
    assert (root / "mine").stat().st_mode & 0o777 == 0o700
    assert (root / "mine" / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode, warnings", [(0o755, ["journals_readable"]), (0o700, [])])
def test_a_folder_of_journals_that_others_can_read_is_a_warning(engine, tmp_path, monkeypatch, caplog, mode, warnings):
    tmp_path.chmod(mode)
    monkeypatch.setattr(running.sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(running.HttpServer, "run", lambda self: None)
    running.run_server(engine, ServerSettings(port=0, journals=tmp_path))
    assert [entry.getMessage() for entry in caplog.records if entry.name == "longdraft.server"] == warnings


# The engine's thread


def test_weights_are_hashed_once_and_the_template_is_compiled_at_load_and_not_by_the_engine(tmp_path, monkeypatch):
    fingerprint, threads = TensorFiles.fingerprint, []
    monkeypatch.setattr(TensorFiles, "fingerprint",
                        lambda self: threads.append(threading.current_thread().name) or fingerprint(self))
    engine = serving.load("novelist")
    with serving.running(engine, journals=tmp_path, journal_from=1) as server:
        assert "chat_template" in vars(engine.tokenizer) and len(threads) == 1
        for _ in range(3):
            text_of(post(server))
    assert len(threads) == 1 and threads != ["engine"]


def test_the_drain_keeps_every_journal(engine, tmp_path, monkeypatch):
    """One that cannot be saved costs no other text its own."""
    save = Generation.save_journal

    def failing(self, folder):
        if self.params.seed == 3:
            raise MemoryError
        save(self, folder)

    monkeypatch.setattr(Generation, "save_journal", failing)
    monkeypatch.setattr(journals.shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    with serving.running(engine, journals=tmp_path, journal_from=10**6) as server, httpx.Client() as client:
        bodies = [{"prompt": "It was", "max_tokens": 4000, "seed": seed, "stream": True} for seed in range(6)]
        requests = [client.build_request("POST", server.url + "/v1/completions", json=body) for body in bodies]
        streams = [client.send(request, stream=True) for request in requests]
        serving.wait_for(lambda: sum(job.num_tokens > 0 for job in server.scheduler.jobs()) == 6)
        server.scheduler.close()
        for stream in streams:
            stream.close()
    found = [read_journal(folder) for folder in tmp_path.iterdir()]
    assert sorted(content.header.params.seed for content in found) == [0, 1, 2, 4, 5]
    assert all(len(content.tokens) for content in found)


def test_nothing_that_one_text_does_ends_the_engines_thread(server, engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.Scheduler, "_begin", lambda self, job: 1 / 0)
        assert post(server).status_code == 500
    with monkeypatch.context() as patch:
        patch.setattr(Generation, "advance", lambda *given, **options: 1 / 0)
        patch.setattr(Generation, "stats", lambda self: 1 / 0)
        assert post(server).status_code == 500
    assert text_of(post(server)) == serving.written(engine, "The ship", max_new_tokens=20)
    assert server.scheduler.load()["reserved_bytes"] == 0


def test_ready_says_no_and_why_when_no_round_ends(server, monkeypatch):
    monkeypatch.setattr(scheduler, "_STALLED_S", 0.1)
    gate, advance = threading.Event(), Generation.advance
    monkeypatch.setattr(Generation, "advance", lambda self, *a, **o: gate.wait(20) and advance(self, *a, **o))
    thread = threading.Thread(target=post, args=(server,))
    thread.start()
    try:
        serving.wait_for(lambda: httpx.get(server.url + "/ready").status_code == 503)
        assert "no step has ended" in httpx.get(server.url + "/ready").json()["problem"]
        assert httpx.get(server.url + "/health").status_code == 200
    finally:
        gate.set()
        thread.join()
    assert httpx.get(server.url + "/ready").json()["problem"] is None


def test_a_log_that_is_not_read_delays_nothing_and_is_bounded(monkeypatch):
    """The pipe is full: lines wait for a reader, then they are dropped and counted."""
    monkeypatch.setattr(logs, "_MAX_LINES", 100)
    monkeypatch.setattr(logs, "_FLUSH_S", 0.01)
    read, write = os.pipe()
    handler = logs.BackgroundHandler(write)
    handler.setFormatter(logs.TextFormatter())
    record = logging.LogRecord("longdraft.server", logging.INFO, "", 0, "x" * 5000, (), None)
    for _ in range(1000):
        handler.handle(record)
    handler.flush()
    assert handler._lines.qsize() <= 101
    found = b""
    while b"lines of the log were dropped" not in found:
        found += os.read(read, 1 << 16)
        if not handler._lines.qsize():
            handler.handle(record)
    os.close(read)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_file_descriptors_the_log_has_one_line(server, caplog, number):
    http = running.HttpServer(server.app, server.app.service.settings)
    error = OSError(number, os.strerror(number))
    for _ in range(5000):
        http._on_loop_error(None, {"message": "socket.accept() out of system resource", "exception": error})
    assert [entry.getMessage() for entry in caplog.records] == ["connections_refused"]

    http.should_exit = True  # asyncio still has timers to accept connections, whose socket is closed
    http._on_loop_error(None, {"message": "Exception in callback BaseSelectorEventLoop._start_serving()",
                               "exception": ValueError("Invalid file descriptor: -1")})
    assert len(caplog.records) == 1
    assert to_api_error(error).status_code == 503  # no bug, which would be a traceback


def test_a_long_method_is_cut_in_the_log(server, caplog):
    caplog.set_level(logging.INFO, logger="longdraft.server")
    httpx.request("X" * 50_000, server.url + "/version")
    serving.wait_for(lambda: "request" in caplog.messages)
    (fields,) = [entry.longdraft_fields for entry in caplog.records if entry.getMessage() == "request"]
    assert fields["method"] == "X" * 20


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    body = {"prompt": "It was", "max_tokens": 50_000, "stream": True}
    options = ("--journals", str(tmp_path / "journals"), "--drain", "60")
    with serving.process(tmp_path / "server", *options) as server, httpx.stream(
            "POST", server.url + "/v1/completions", timeout=30, json=body) as reply:
        lines = reply.iter_lines()
        while not next(lines).startswith("data: {"):
            pass
        server.child.kill(signal.SIGTERM)
        serving.wait_for(lambda: "draining" in server.child.stderr)
        server.child.kill(signal.SIGTERM)
        assert server.child.wait(2) == 128 + signal.SIGTERM
    (folder,) = (tmp_path / "journals").iterdir()
    assert len(read_journal(folder).tokens) > 0


# Large replies


@pytest.mark.parametrize("path, body", [
    ("/v1/completions", {"prompt": ["The ship", "It was"], "logprobs": 2}),
    ("/v1/completions", {"prompt": "The ship"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2})])
def test_a_large_reply_is_encoded_in_pieces_and_is_the_same(server, monkeypatch, path, body):
    def choices():
        reply = httpx.post(server.url + path, json={"max_tokens": 20, "seed": 7, **body}, timeout=60)
        assert reply.headers["content-type"] == "application/json"
        return [{key: value for key, value in choice.items() if key in ("text", "message", "logprobs")}
                for choice in reply.json()["choices"]]

    whole = choices()
    assert ("logprobs" not in body) or all(choice["logprobs"] for choice in whole)
    monkeypatch.setattr(replies, "_SLICE", 3)
    monkeypatch.setattr(replies, "_LARGE", 0)
    assert choices() == whole


# Access


def test_an_open_server_without_a_key_must_be_confirmed(engine, capfd):
    from longdraft.__main__ import run
    assert run(["serve", "--host", "0.0.0.0", "--journals", "none"]) == 2
    assert "--no-key" in capfd.readouterr().err
    assert ServerSettings(host="0.0.0.0", allows_no_key=True).host
