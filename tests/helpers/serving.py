"""A server for tests: the application on a socket, in a thread of this process or in a process of its own."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai

import longdraft
from helpers.processes import Fork, run_longdraft, wait_for
from longdraft.checkpoint import hub
from longdraft.server.app import App
from longdraft.server.run import HttpServer
from longdraft.server.settings import ServerSettings

TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% if shout %}!{% endif %}{% endif %}")


def talkative(folder: Path) -> Path:
    """A copy of the bundled model, with a chat template."""
    shutil.copytree(hub.resolve("novelist"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def load(folder: Path | str, **options) -> longdraft.Engine:
    return longdraft.load(str(folder), threads=1, **options)


@contextmanager
def running(engine: longdraft.Engine, **settings):
    """A server in a thread: `url`, `app` and its `scheduler`."""
    settings = ServerSettings(**(dict(port=0, progress_s=0.1, stall_s=5.0) | settings))
    app = App(engine, settings)
    server = HttpServer(app, settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", port=port, app=app, scheduler=app.service.scheduler)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive()


# Fixtures; a test file defines them by pytest.fixture(scope="module")(serving.talker).


def talker(tmp_path_factory) -> longdraft.Engine:
    """An engine with a chat template."""
    return load(talkative(tmp_path_factory.mktemp("model") / "talker"))


def opened(engine, tmp_path_factory):
    """A server with journals."""
    with running(engine, journals=tmp_path_factory.mktemp("journals"), max_body_bytes=100_000) as found:
        yield found


def client(server) -> openai.OpenAI:
    """OpenAI's client."""
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def poster(server):
    """Posts a body to a path of the fixture `server`."""
    return lambda path, body, **options: httpx.post(server.url + path, json=body, timeout=60, **options)


def written(engine, prompt, **settings) -> str:
    """The text that the library generates."""
    params = engine.params(**({"max_new_tokens": 30, "seed": 7, "min_p": 0.1} | settings))
    return "".join(event.text for event in engine.generate(prompt, params))


@contextmanager
def process(folder: Path, *options: str):
    """`longdraft serve` as a process, killed at the end, with its output in a folder."""
    child = Fork(folder, run_longdraft, "serve", "--port", 0, "--threads", 1, "--log-format", "json", *options)
    try:
        address = re.compile(r'"(http://[\d.]+:\d+)"')
        wait_for(lambda: address.search(child.stderr) or not child.is_running(), 60)
        found = address.search(child.stderr)
        assert found, child.stderr
        yield SimpleNamespace(child=child, url=found[1])
    finally:
        if child.is_running():
            child.kill(signal.SIGKILL)
        child.wait()


def events(body: str) -> list[dict]:
    """The objects of a stream, without the final [DONE]."""
    found = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    assert found[-1] == "[DONE]"
    return [json.loads(line) for line in found[:-1]]
