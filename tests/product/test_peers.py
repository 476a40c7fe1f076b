"""Whole texts by other engines, and drafters replayed on recorded journals."""

from __future__ import annotations

import contextlib
import json

import pytest

from helpers.experiments import TEXT, bench
from longdraft.__main__ import run
from longdraft.bench import peers, peers_text


def texts_of(model, names, draft=None, **changes):
    plan = peers.PeersPlan(str(model), model, peers.named(names), peers.interpreter(None), [20], 0, 1, 2, 600, 128)
    report = {"repeats": 2}
    peers_text.measure(plan._replace(**changes), report, list(range(5, 65)), 12, draft, contextlib.nullcontext)
    return report


def test_whole_texts_by_other_engines(capfd, tmp_path, tiny, monkeypatch):
    """Of ours and of transformers a way each: every one is a process."""
    kind, ways = peers_text.MODES["transformers"]
    monkeypatch.setitem(peers_text.MODES, "transformers", (kind, ways[1:2]))
    kind, ways = peers_text.MODES["longdraft"]
    monkeypatch.setitem(peers_text.MODES, "longdraft", (kind, [ways[0], ways[3]]))
    report = texts_of(tiny["gqa"], "longdraft,transformers", tiny["gqa"])
    plain, draft, lookup = report["texts"]
    assert [(each["engine"], each["system"]) for each in report["texts"]] == [
        ("longdraft", "plain"), ("longdraft", "draft model"), ("transformers", "prompt lookup")]
    for record in report["texts"]:
        assert "error" not in record
        assert len(record["tokens"]) == 12 and len(record["seconds"]) == len(record["first_s"]) == 2
        assert record["peak_memory_bytes"] > 1e7 and record["first_token_s"] > 0
        assert record["to_longdraft_plain"]["low"] <= record["to_longdraft_plain"]["high"]
        assert record["settings"] == min(record["tries"], key=lambda each: each["seconds"])["settings"]
    assert draft["as_longdraft"] == draft["as_own_plain"] == 12  # the promise
    assert plain["to_own_plain"] == {"median": 1, "low": 1, "high": 1} and len(lookup["tries"]) == 3
    pytest.importorskip("matplotlib")
    machine = {"machine": {"processor": "x"}, "bench": "peers", "model": "m"}
    (tmp_path / "peers.json").write_text(json.dumps(report | machine))
    bench(capfd, "report", str(tmp_path / "peers.json"), "--output", str(tmp_path / "report"))
    page = (tmp_path / "report" / "report.html").read_text()
    assert "transformers, prompt lookup" in page and "What cannot be compared" in page


def test_a_way_that_cannot_be_is_in_the_table_with_its_reason(tiny, monkeypatch):
    kind = peers.PeerProgram("longdraft", ("no_such_package",), "pip install no-such-package")
    monkeypatch.setitem(peers_text.MODES, "longdraft", (kind, (
        peers_text.DecodingMode("plain"), peers_text.DecodingMode("draft", needs_draft=True),
        peers_text.DecodingMode("magic", unsupported="never"))))
    report = texts_of(tiny["mha"], "longdraft")
    assert [record["error"] for record in report["texts"]] == [
        "not installed: pip install no-such-package (missing: no_such_package)",
        "needs a smaller model: give --draft-model", "never"]
    assert [row[2] for row in peers_text.tables(report)[0].rows][-1] == "never"


def test_a_journal_is_replayed_with_its_own_prompt_and_penalty(capfd, tmp_path, tiny):
    folder = tmp_path / "journal"
    assert run(["generate", TEXT[:200], "--model", str(tiny["mha"]), "--max-new-tokens", "300", "--seed", "7",
                "--repetition-penalty", "1.1", "--penalty-window", "50", "--ignore-eos", "--quiet", "--journal",
                str(folder), "--output", str(tmp_path / "out.txt")]) == 0
    capfd.readouterr()
    out = bench(capfd, "replay", str(folder), "--drafter", "ngram")
    document = json.loads(out.splitlines()[-1])
    assert document["files"]["journal"][0]["tokens"] == 300
    assert "200 of them the prompt, penalty window 50" in out
