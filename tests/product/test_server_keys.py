"""API keys with labels and quotas, and TLS."""

from __future__ import annotations

import re
import ssl

import httpx
import openai
import pytest
import trustme

from helpers import serving
from longdraft.__main__ import run
from longdraft.errors import UsageError
from longdraft.server.keys import Bucket
from longdraft.server.settings import ServerSettings, read_keys

engine = pytest.fixture(scope="module")(serving.talker)


def ask(server, key: str, tokens: int = 1, path: str = "/v1/completions") -> httpx.Response:
    body = {"prompt": "It was", "max_tokens": tokens, "longdraft": {"drafter": "plain"}}
    return httpx.post(server.url + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=30)


def test_a_key_in_the_file_may_have_a_label(tmp_path):
    (tmp_path / "keys").write_text("# key label\none ann\ntwo\nthree ann\n")
    assert read_keys(("zero",), tmp_path / "keys") == {"zero": "key-1", "one": "ann", "two": "key-3", "three": "ann"}
    for line in ("secret two words", "secret a/b", "secret " + "a" * 65):
        (tmp_path / "keys").write_text(line)
        with pytest.raises(UsageError, match="write KEY or KEY LABEL") as caught:
            read_keys((), tmp_path / "keys")
        assert "secret" not in str(caught.value)
    with pytest.raises(UsageError, match=r"--api-key-file cannot read [^ ]*/none: No such file or directory; give"):
        read_keys((), tmp_path / "none")


def test_the_log_and_the_metrics_name_keys_by_their_labels(engine, caplog):
    with serving.running(engine, api_keys=("anns-key", "bobs-key"), key_labels=("ann", "bob")) as server:
        with caplog.at_level("INFO", logger="longdraft.server"):
            assert ask(server, "bobs-key", 5).status_code == 200
            assert ask(server, "third").status_code == 401
            serving.wait_for(lambda: sum(entry.getMessage() == "request" for entry in caplog.records) == 2)
        text = httpx.get(server.url + "/metrics", headers={"Authorization": "Bearer anns-key"}).text
    fields = [entry.longdraft_fields for entry in caplog.records if hasattr(entry, "longdraft_fields")]
    assert [each.get("key") for each in fields if "status" in each] == ["bob", None]
    assert [each["key"] for each in fields if "new_tokens" in each] == ["bob"]
    assert re.search(r'key_tokens_total{key="bob",model_name="novelist"} 7\.0', text), "two of the prompt, five written"
    assert re.search(r'key_requests_total{key="bob",model_name="novelist"} 1\.0', text)
    assert 'key="ann"' not in text and "bobs-key" not in text


def test_requests_beyond_a_keys_quota_wait_and_other_keys_do_not(engine):
    with serving.running(engine, api_keys=("first", "second"), key_requests=2) as server:
        assert [ask(server, "first").status_code for _ in range(3)] == [200, 200, 429]
        refused = ask(server, "first")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded" and "per minute" in refused.text
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert ask(server, "second").status_code == 200
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="first", max_retries=0)
        assert client.models.list().data, "reading costs nothing"
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="novelist", prompt="a", max_tokens=1)
        assert ask(server, "first", path="/v1/longdraft/generations/none/cancel").status_code == 404, "is let in"


def test_a_text_beyond_a_keys_tokens_is_finished_and_the_next_one_waits(engine):
    with serving.running(engine, api_keys=("first",), key_tokens=20) as server:
        reply = ask(server, "first", 50)
        assert reply.json()["usage"]["completion_tokens"] == 50
        refused = ask(server, "first")
        assert refused.status_code == 429 and "tokens per hour" in refused.text
        assert 32 * 180 <= int(refused.headers["retry-after"]) <= 34 * 180, "one token comes back every 180 s"


def test_a_bucket_refills_evenly_up_to_its_amount():
    now = 0.0
    bucket = Bucket(3, 60.0, lambda: now)
    for _ in range(3):
        assert bucket.wait_s() == 0
        bucket.take(1)
    assert bucket.wait_s() == pytest.approx(20)
    now = 20.0
    assert bucket.wait_s() == pytest.approx(0)
    now = 1e6
    assert bucket.wait_s() == 0
    bucket.take(4)  # no more than 3 were there
    assert bucket.wait_s() == pytest.approx(40)


@pytest.mark.parametrize("changes, message", [
    (dict(key_requests=-1, api_keys=("a",)), "--key-requests is -1; allowed: 0 or more"),
    (dict(key_tokens=5), "--key-tokens limits each API key, and there is none")])
def test_quotas_without_sense_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        ServerSettings(**changes)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A certificate authority, and a folder with the files of a server's certificate."""
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(folder / "chain.pem")
    begin, end = (f"-----{word} ENCRYPTED PRIVATE KEY-----\n" for word in ("BEGIN", "END"))
    (folder / "encrypted.pem").write_text(f"{begin}AAAA\n{end}")
    return authority, folder


def test_a_server_with_a_certificate_speaks_https(engine, authority):
    ca, folder = authority
    context = ssl.create_default_context()
    ca.configure_trust(context)
    with serving.running(engine, certfile=folder / "chain.pem", keyfile=folder / "key.pem") as server:
        url = f"https://127.0.0.1:{server.port}"
        with httpx.Client(verify=context, base_url=url, timeout=30) as client:
            assert client.get("/health").json() == {"status": "ok"}
            body = {"prompt": "It was", "max_tokens": 30, "seed": 7, "min_p": 0.1, "stream": True}
            chunks = serving.events(client.post("/v1/completions", json=body).text)
            assert "".join(each["choices"][0]["text"] for each in chunks) == serving.written(engine, "It was")
            assert client.post("/v1/completions", json=body, headers={"Origin": url}).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=10)


@pytest.mark.parametrize("options, message", [
    (["--keyfile", "key.pem"], "--keyfile needs --certfile"),
    (["--certfile", "none.pem"], "No such file"),
    (["--certfile", "key.pem", "--keyfile", "key.pem"], "cannot be used"),
    (["--certfile", "chain.pem"], "cannot be used"),
    (["--certfile", "chain.pem", "--keyfile", "encrypted.pem"], "cannot be used")])
def test_certificates_that_cannot_be_used_are_refused(authority, monkeypatch, capfd, options, message):
    monkeypatch.chdir(authority[1])
    assert run(["serve", *options]) == 2
    error = capfd.readouterr().err
    assert message in error and "Traceback" not in error and error.count("\n") <= 2
