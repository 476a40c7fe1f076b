"""Keys, hosts, origins and slow connections; the log; the series that the dashboard uses."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import socket
import urllib.error
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from helpers import serving
from longdraft.cli.serve import serve
from longdraft.errors import UsageError
from longdraft.server import connections
from longdraft.server.settings import ServerSettings, read_keys

engine = pytest.fixture(scope="module")(serving.talker)
server = pytest.fixture(scope="module")(serving.opened)


def test_everything_but_health_is_behind_the_key(engine):
    with serving.running(engine, api_keys=("first-key", "second-key")) as server:
        assert httpx.get(server.url + "/health").status_code == 200
        for path in ("/", "/ready", "/version", "/metrics", "/v1/models", "/openapi.json", "/v1/longdraft/generations",
                     "/nowhere", "/page/page.js"):
            assert httpx.get(server.url + path).status_code == 401, path
        for path in ("/v1/completions", "/tokenize"):
            reply = httpx.post(server.url + path, json={"prompt": "a"})
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
        for key in ("first-key", "second-key"):
            client = openai.OpenAI(base_url=server.url + "/v1", api_key=key)
            assert client.completions.create(model="novelist", prompt="a", max_tokens=1).choices
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.url + "/v1", api_key="first").models.list()
        asked = httpx.get(server.url + "/", headers={"Accept": "text/html"})
        assert asked.headers["www-authenticate"].startswith("Basic")
        assert httpx.get(server.url + "/", auth=("anybody", "second-key")).status_code == 200


def test_a_foreign_web_page_cannot_use_a_local_server(server, engine):
    url = server.url + "/v1/completions"
    assert httpx.post(url, json={"prompt": "a"}, headers={"Host": "evil.example"}).status_code == 403
    reply = httpx.options(url, headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"})
    assert "access-control-allow-origin" not in reply.headers
    reply = httpx.post(url, json={"prompt": "a", "max_tokens": 1}, headers={"Origin": "https://evil.example"})
    assert reply.status_code == 403 and reply.json()["error"]["code"] == "origin_not_allowed"
    assert httpx.post(url, json={"prompt": "a", "max_tokens": 1}, headers={"Origin": server.url}).status_code == 200
    assert httpx.get(server.url + "/version", headers={"Host": "["}).status_code == 403
    with serving.running(engine, cors_origins=("https://good.example",)) as open_server:
        reply = httpx.options(open_server.url + "/v1/completions", headers={
            "Origin": "https://good.example", "Access-Control-Request-Method": "POST"})
        assert reply.headers["access-control-allow-origin"] == "https://good.example"


def test_request_ids_are_returned_and_logs_contain_no_text(server, caplog):
    with caplog.at_level("INFO", logger="longdraft.server"):
        reply = httpx.post(server.url + "/v1/completions", headers={"X-Request-Id": "abc-1"}, timeout=30,
                           json={"prompt": "A very secret prompt", "max_tokens": 3, "user": "ann"})
        serving.wait_for(lambda: any(entry.getMessage() == "request" for entry in caplog.records))
    assert reply.headers["x-request-id"] == "abc-1"
    fields = [getattr(entry, "longdraft_fields", {}) for entry in caplog.records]
    assert any(each.get("id") == "abc-1" and each.get("status") == 200 for each in fields)
    assert any(each.get("user") == "ann" and each.get("new_tokens") == 3 for each in fields)
    assert "secret" not in str(fields) + caplog.text


def test_clients_that_are_no_browsers_may_name_any_type(server):
    """curl names the type of forms, and LiteLLM none, to Ollama's API. A form of a foreign page names one, too."""
    paths = {"/api/generate": {"model": "novelist", "options": {"num_predict": 1}, "prompt": "a", "raw": True},
             "/api/v1/generate": {"prompt": "a", "max_length": 1}, "/completion": {"prompt": "a", "n_predict": 1},
             "/v1/completions": {"prompt": "a", "max_tokens": 1}}
    for path, body in paths.items():
        for kind in ({}, {"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": "text/plain"}):
            for browser, status in (({}, 200), ({"Origin": server.url}, 400), ({"Origin": "null"}, 403),
                                    ({"Sec-Fetch-Site": "cross-site"}, 400), ({"Referer": "https://evil.net"}, 400)):
                reply = httpx.post(server.url + path, content=json.dumps(body), headers=kind | browser, timeout=60)
                assert reply.status_code == status, (path, kind, browser, reply.text)


def test_the_files_of_the_page_are_in_the_log_at_level_debug_only(server, caplog):
    with caplog.at_level("INFO", logger="longdraft.server"):
        assert httpx.get(server.url + "/page/page.js").status_code == 200
        assert httpx.get(server.url + "/page/nothing.js").status_code == 404
        assert httpx.get(server.url + "/").status_code == 200
        serving.wait_for(lambda: len(caplog.records) >= 2)
    assert [entry.longdraft_fields["path"] for entry in caplog.records] == ["/page/nothing.js", "/"]


def test_clients_see_the_name_of_a_file_or_folder_without_its_path(tmp_path, monkeypatch):
    from longdraft.server.settings import SERVE_OPTIONS, ServerSettings

    (tmp_path / "some.Q4_1.gguf").touch()
    options = dict.fromkeys(each.name for each in SERVE_OPTIONS) | {"snapshot": "auto", "snapshot_max": 8.0}
    for model, name in ((str(tmp_path / "some.Q4_1.gguf"), "some.Q4_1"), (str(tmp_path), tmp_path.name),
                        ("owner/model", "owner/model"), ("novelist", "novelist")):
        assert ServerSettings.from_options(options, model).model_name == name
    assert ServerSettings.from_options(options | {"model_name": "mine"}, str(tmp_path)).model_name == "mine"


def test_keys_are_read_from_options_a_file_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_API_KEY", "three")
    (tmp_path / "keys").write_text("# ours\none\n\ntwo\n")
    assert list(read_keys(("zero",), tmp_path / "keys")) == ["zero", "one", "two", "three"]
    (tmp_path / "keys").write_text("# none yet\n")
    with pytest.raises(UsageError, match="holds no key"):
        read_keys((), tmp_path / "keys")


@pytest.mark.parametrize("host, is_local", [("127.0.0.1", True), ("::1", True), ("localhost", True),
                                            ("0.0.0.0", False), ("example.org", False)])
def test_loopback_addresses_are_local(host, is_local):
    assert ServerSettings(host=host, api_keys=("key",)).is_local is is_local


def test_the_dashboard_uses_existing_series(server):
    body = {"prompt": "a", "max_tokens": 30, "temperature": 0}
    httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    told = set(re.findall(r"longdraft:\w+", httpx.get(server.url + "/metrics").text))
    dashboard = (Path(__file__).parents[2] / "docs" / "grafana.json").read_text()
    asked = set(re.findall(r"longdraft:\w+", dashboard))
    assert len(json.loads(dashboard)["panels"]) >= 10 and len(asked) > 12
    assert asked - told <= {"longdraft:request_failure_total"}  # there when something has failed


ASKED = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("before, beginning", [(b"", b""), (b"", b"GET /hea"), (ASKED, b"G")])
def test_a_connection_with_incomplete_headers_is_closed(server, monkeypatch, before, beginning):
    """For the first request of a connection, and for a later one."""
    monkeypatch.setattr(connections, "_HEADER_TIMEOUT_S", 0.3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(before)
        if before:
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        connection.sendall(beginning)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(65_536):
                pass


def test_a_connection_stays_open_while_its_response_is_generated(server, monkeypatch):
    monkeypatch.setattr(connections, "_HEADER_TIMEOUT_S", 0.05)
    body = {"prompt": "It was", "max_tokens": 300, "ignore_eos": True, "longdraft": {"drafter": "plain"}}
    with httpx.Client() as client:
        reply = client.post(server.url + "/v1/completions", json=body, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 300 and reply.elapsed.total_seconds() > 0.05
        assert client.get(server.url + "/health").status_code == 200


def test_the_kubernetes_example_has_probes_that_work_and_time_to_drain(engine, monkeypatch):
    manifest = (Path(__file__).parents[2] / "examples" / "kubernetes.yaml").read_text()
    found = {each["kind"]: each["spec"] for each in yaml.safe_load_all(manifest)}
    pod = found["Deployment"]["template"]["spec"]
    (container,) = pod["containers"]
    arguments = container["args"]
    assert pod["terminationGracePeriodSeconds"] >= int(arguments[arguments.index("--drain") + 1]) + 15
    options = "".join(str(each) for each in inspect.signature(serve).parameters)
    assert all(each[2:].replace("-", "_") in options for each in arguments if each.startswith("--"))
    with serving.running(engine, api_keys=("secret",)) as server:
        for probe in ("startupProbe", "livenessProbe"):
            assert httpx.get(server.url + container[probe]["httpGet"]["path"]).status_code == 200
        code = container["readinessProbe"]["exec"]["command"][2].replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        monkeypatch.setenv("LONGDRAFT_API_KEY", "secret")
        exec(compile(code, "probe", "exec"), {})
        server.scheduler.drain()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            exec(compile(code, "probe", "exec"), {})
