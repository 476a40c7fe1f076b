"""`longdraft bench cuda`: its driver survives what parts do, parts measure at the smallest size."""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from longdraft.__main__ import run
from longdraft.errors import UsageError
from longdraft.kernels.switches import SWITCHES
from longdraft_bench.cuda import predictions
from longdraft_bench.cuda.plan import INTERPRETED, LIMITS_S, ON_DEVICE, Part, parts_of
from longdraft_bench.cuda.visit import Document, Driver, doubt, measure_parts, pack_cache, unpack_cache

pytest.importorskip("triton", reason="Triton is not installed")

import helpers.cuda_kernels  # noqa: F401  # it makes the interpreter faster

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is interpreted only without a device")

# A worker without longdraft: the name of a part says what happens to it.
WORKER = """
import json, os, sys, time
path, ends_at, *names = sys.argv[1:]
def put(name, **held):
    filled = json.load(open(path))
    filled["parts"][name] = {"sources": filled["sources"], **filled["parts"].get(name, {}), **held}
    with open(path + ".partial", "w") as file:
        json.dump(filled, file)
    os.replace(path + ".partial", path)
for name in names:
    tries = json.load(open(path))["parts"].get(name, {}).get("tries", 0) + 1
    put(name, state="running", tries=tries, began=time.time())
    if name == "hangs":
        time.sleep(60)
    if name == "switched off":
        put(name, figures={"so far": tries})
    if name == "crashes" or (name in ("crashes once", "switched off") and tries == 1):
        print("segmentation fault, said the device", flush=True)
        os._exit(139)
    put(name, state="done", seconds=0.01, figures=os.environ.get("LONGDRAFT_CUDA_OFF") if "off" in name else tries)
"""


def drive(folder: Path, names: list[str], limit: float = 30, command: list[str] | None = None, sources: str = "a",
          previous: Path | None = None) -> dict[str, dict]:
    document = Document.open(folder, "first", sources, "cpu", previous)
    document.parts.update()
    document.save()
    parts = [Part(name, name, {}, 0.01) for name in names]
    Driver(document, parts, command or [sys.executable, "-S", "-c", WORKER, str(document.path)], folder / "log.txt",
           limit).run()
    return json.loads(document.path.read_text())["parts"]


def test_a_part_that_crashes_or_hangs_is_marked_and_the_others_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("longdraft_bench.cuda.plan._LEAST_PATIENCE", 0.4)
    names = ["sound", "crashes", "crashes once", "hangs", "last"]
    found = drive(tmp_path, names)
    assert {name: held["state"] for name, held in found.items()} == {
        "sound": "done", "crashes": "failed", "crashes once": "done", "hangs": "failed", "last": "done"}
    assert "said the device" in found["crashes"]["error"] and found["crashes"]["tries"] == 2
    assert "ended after 0 s" in found["hangs"]["error"] and found["crashes once"]["figures"] == 2
    again = drive(tmp_path, ["sound", "crashes once", "last"])
    assert again["sound"]["figures"] == 1, "a part that is done is not measured again"


def test_a_second_try_is_made_with_all_switches_off(tmp_path):
    """And a part that fails keeps what it has measured."""
    found = drive(tmp_path, ["switched off", "crashes"])
    assert found["switched off"] | {"state": "done", "tries": 2, "figures": "all"} == found["switched off"]
    document = Document.open(tmp_path / "kept", "first", "a", "cpu")

    def measure(part: Part) -> None:
        document.keep(part.name, {"plain": 5.1})
        raise RuntimeError("eagle")

    assert measure_parts(document, [Part("texts", "texts", {}, 1)], time.time() + 9, measure, lambda error: True) == 3
    assert document.parts["texts"]["state"] == "failed" and document.parts["texts"]["figures"] == {"plain": 5.1}


def test_a_case_that_fails_does_not_end_its_part(tmp_path):
    from longdraft_bench.cuda.models import Bench
    from longdraft_bench.cuda.plan import INTERPRETED

    bench, kept = Bench(INTERPRETED, "", time.time() + 60, tmp_path), []
    bench.keep = lambda figures: kept.append(list(figures))

    def lost() -> None:
        raise RuntimeError("CUDA error: gone")

    assert bench.each([("a", lambda: 1 // 0), ("b", lambda: 2)]) == {
        "a": {"failed": "ZeroDivisionError: integer division or modulo by zero"}, "b": 2}
    assert kept == [["a"], ["a", "b"]]
    with pytest.raises(RuntimeError, match="gone"):
        bench.each([("c", lost)])


def test_a_slice_ends_in_time_and_the_next_visit_goes_on(tmp_path):
    began = time.monotonic()
    found = drive(tmp_path / "one", ["sound", "hangs", "last"], limit=1.0)
    assert time.monotonic() - began < 5
    assert found["sound"]["state"] == "done" and "time was over" in found["hangs"]["error"]
    assert found["last"]["state"] == "left_out"
    new = drive(tmp_path / "two", ["sound", "last"], previous=tmp_path / "one")
    assert new["last"]["state"] == "done" and new["sound"] == found["sound"]
    changed = drive(tmp_path / "two", ["sound"], sources="b")
    assert changed["sound"]["sources"] == "b", "other kernels have other figures"


def test_a_worker_that_cannot_start_is_reported(tmp_path):
    found = drive(tmp_path, ["one"], command=[sys.executable, "-S", "-c", "raise SystemExit('no such module')"])
    assert found["one"]["state"] == "failed" and "no such module" in found["one"]["error"]


def test_an_error_of_a_part_does_not_stop_the_next_but_a_lost_device_does(tmp_path):
    document = Document.open(tmp_path, "first", "a", "cpu")
    parts = [Part(name, name, {}, 0.01) for name in ("wrong", "sound", "lost", "after")]

    def measure(part: Part) -> str:
        if part.name in ("wrong", "lost"):
            raise ValueError("CUDA error: gone" if part.name == "lost" else "not this")
        return part.kind

    from longdraft_bench.cuda.worker import is_fatal

    assert measure_parts(document, parts, time.time() + 60, measure, is_fatal) == 3
    states = {name: held["state"] for name, held in document.parts.items()}
    assert states == {"wrong": "failed", "sound": "done", "lost": "failed"}
    assert measure_parts(document, [Part("slow", "slow", {}, 50)], time.time() + 60, measure, is_fatal) == 0
    assert "slow" not in document.parts, "no part is begun that would not end in time"


def test_wrong_rows_forbid_a_measurement_of_speed(tmp_path):
    assert doubt([tmp_path]) is None
    document = Document.open(tmp_path, "first", "a", "cpu")
    document.set("rows triton-64 1000", "done", figures={"differs_in": None})
    assert doubt([tmp_path]) is None
    document.set("rows triton-64 9000", "done", figures={"differs_in": "attention: row 3 of 16"})
    assert "attention: row 3" in doubt([tmp_path])


def test_after_wrong_rows_only_parts_that_do_not_depend_on_bits_are_measured(tmp_path):
    document = Document.open(tmp_path, "decide", "a", "cpu")
    document.set("rows triton-16 1000", "done", figures={"differs_in": "merge: row 3"})
    document.save()
    parts = [Part("steps", "steps", {}, 0.01, on_bits=True), Part("tests", "tests", {}, 0.01)]
    Driver(document, parts, [sys.executable, "-S", "-c", WORKER, str(document.path)], tmp_path / "log.txt", 30).run()
    assert document.parts["steps"]["state"] == "left_out" and "rows" in document.parts["steps"]["error"]
    assert document.parts["tests"]["state"] == "done"
    document.filled["force"] = True
    assert document.is_wanted(parts[0])


def test_parts_after_a_switch_that_fails_run_without_it(tmp_path):
    """A text that differs, a crash, and a text that is equal only with everything else off."""
    document = Document.open(tmp_path, "decide", "a", "cpu")
    document.set("switch FUSES_GATE", "done", figures={"is_equal": True})
    document.set("switch WRITES_AHEAD", "done", figures={"is_equal": False})
    document.set("switch SHARES_CHAINS", "failed", error="the worker died")
    document.set("switch DECIDES_SUMS", "done", figures={"is_equal": True}, switched_off="all")
    assert document.failing == ["WRITES_AHEAD", "SHARES_CHAINS", "DECIDES_SUMS"]
    parts = [Part("steps, what is off", "steps", {}, 0.01)]
    Driver(document, parts, [sys.executable, "-S", "-c", WORKER, str(document.path)], tmp_path / "log.txt", 30).run()
    assert document.parts["steps, what is off"]["figures"] == "WRITES_AHEAD SHARES_CHAINS DECIDES_SUMS"


def test_a_worker_ends_after_a_switch_that_fails(tmp_path):
    document = Document.open(tmp_path, "decide", "a", "cpu")
    parts = [Part(name, name, {}, 0.01) for name in ("switch FUSES_GATE", "switch WRITES_AHEAD", "steps")]

    def measure(part: Part) -> dict:
        return {"is_equal": part.kind != "switch WRITES_AHEAD"}

    assert measure_parts(document, parts, time.time() + 60, measure, lambda error: True) == 0
    assert list(document.parts) == ["switch FUSES_GATE", "switch WRITES_AHEAD"]


def test_the_table_of_predictions_has_a_verdict_for_each_figure_that_was_measured():
    named = {part.name for part in parts_of(ON_DEVICE, "decide")}
    assert {each.part for each in predictions.PREDICTIONS} <= named, "each prediction is of a part of the slice"
    plain, *others = predictions.PREDICTIONS
    for gpu, ms, verdict in (("NVIDIA H100 80GB HBM3", 6.3, "PASS"), ("NVIDIA H100 80GB HBM3", 6.5, "FAIL"),
                             ("NVIDIA H200", 4.6, "PASS"), ("NVIDIA H200", 5.0, "FAIL"), ("NVIDIA A100", 9.0, "")):
        document = {"machine": {"gpu": gpu}, "parts": {plain.part: {"state": "done", "figures": {"plain_ms": ms}}}}
        header, first, *rest = predictions.table(document)
        assert gpu in header and f"{ms:.2f}" in first and first.endswith(verdict or "4.5")
        assert len(rest) == len(others) and not any("PASS" in line or "FAIL" in line for line in rest)
    faster = next(each for each in predictions.PREDICTIONS if each.unit == "x")
    assert faster.verdict(faster.h200 * 1.1, "H200") == "PASS" and faster.verdict(faster.h200 / 2, "H200") == "FAIL"


def test_the_parts_of_decide_fit_into_its_time():
    assert sum(part.seconds for part in parts_of(ON_DEVICE, "decide")) <= LIMITS_S["decide"]


def test_a_visit_that_is_killed_again_and_again_is_measured_in_the_end(tmp_path):
    """The driver and its worker, at random moments. What was done is not measured again."""
    names = [f"part {number}" for number in range(12)]
    worker = WORKER.replace('    if name == "hangs":', '    time.sleep(0.05)\n    if name == "hangs":')
    code = (f"import sys; sys.path[:0] = {sys.path!r}\nfrom pathlib import Path\n"
            "from longdraft_bench.cuda.visit import Document, Driver\nfrom longdraft_bench.cuda.plan import Part\n"
            f"folder = Path({str(tmp_path)!r})\n"
            "document = Document.open(folder, 'decide', 'a', 'cpu')\n"
            f"parts = [Part(name, name, {{}}, 0.01) for name in {names!r}]\n"
            f"worker = [sys.executable, '-S', '-c', {worker!r}, str(document.path)]\n"
            "Driver(document, parts, worker, folder / 'log.txt', 60).run()\n")
    path, pick, done = tmp_path / "decide.json", random.Random(5), dict[str, Any]()

    def finished() -> dict[str, Any]:
        parts = json.loads(path.read_text()).get("parts", {}) if path.exists() else {}
        return {name: part for name, part in parts.items() if part["state"] == "done"}

    while len(done) < len(names):
        driver, wanted = subprocess.Popen([sys.executable, "-c", code], start_new_session=True), pick.randint(1, 4)
        while driver.poll() is None and len(finished()) < len(done) + wanted:
            time.sleep(pick.uniform(0, 0.03))
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        assert done.items() <= finished().items(), "what was done stays"
        done = finished()
    assert len(done) == len(names) and all(part["tries"] <= 2 for part in done.values())
    found = json.loads((tmp_path / "decide.json").read_text())["parts"]
    assert {name: found[name]["state"] for name in names} == dict.fromkeys(names, "done")


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux ends children with their parent")
def test_a_worker_ends_when_its_driver_is_killed(tmp_path):
    """Otherwise the next visit would find it at the same document."""
    code = ("import sys, time; from longdraft_bench.cuda.worker import end_with_parent; end_with_parent();"
            "print('ready', flush=True); time.sleep(60)")
    parent = subprocess.Popen([sys.executable, "-c", "import subprocess, sys, time\n"
                               f"child = subprocess.Popen([sys.executable, '-c', {code!r}], stdout=subprocess.PIPE, "
                               f"start_new_session=True, cwd={str(ROOT)!r})\n"
                               "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)"],
                              stdout=subprocess.PIPE, text=True)
    ended = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    assert select.select([ended], [], [], 60)[0]
    os.close(ended)


def test_documents_of_something_else_are_refused(tmp_path):
    (tmp_path / "first.json").write_text('{"bench": "kernels"}')
    with pytest.raises(UsageError, match="something else"):
        Document.open(tmp_path, "first", "a", "cpu")
    (tmp_path / "first.json").write_text("{")
    with pytest.raises(UsageError, match="not JSON"):
        Document.open(tmp_path, "first", "a", "cpu")


def test_compiled_kernels_travel_with_the_documents(tmp_path):
    (tmp_path / "compiled" / "abc").mkdir(parents=True)
    (tmp_path / "compiled" / "abc" / "kernel.cubin").write_bytes(b"code")
    pack_cache(tmp_path / "compiled", tmp_path / "cache.tar.xz")
    unpack_cache(tmp_path / "cache.tar.xz", tmp_path / "next")
    assert (tmp_path / "next" / "abc" / "kernel.cubin").read_bytes() == b"code"


@interpreted
@pytest.mark.parametrize("name", ["first", "length", "kernels", "families", "whole", "decide"])
def test_every_part_of_a_slice_measures_in_the_interpreter(tmp_path, name, monkeypatch):
    """In this process. The command starts a worker for it: see the tests of the driver."""
    from longdraft_bench.cuda.plan import INTERPRETED, parts_of
    from longdraft_bench.cuda.worker import Worker

    document = Document.open(tmp_path, name, "a", "cpu")
    worker = Worker(INTERPRETED, "", time.time() + 600, tmp_path)
    parts = [part for part in parts_of(INTERPRETED, name) if part.kind != "bundled"]
    assert measure_parts(document, parts, time.time() + 1e6, worker.measure, lambda error: True) == 0
    found = {part.name: document.parts[part.name]["figures"] for part in parts}
    if name == "first":
        assert found["rows triton-16 20"]["differs_in"] is None and len(found["rows triton-16 20"]["cases"]) == 2
        assert all(case["is_invariant"] and case["difference"] < 1e-3 for case in found["reference triton-16"])
    elif name == "length":
        liar = found["texts tiny 24"]["drafters"]["liar"]
        assert liar["is_equal"] and liar["accepted"], "some of the liar's tokens are true"
        assert found["texts tiny 24"]["drafters"]["eagle"]["is_equal"]
    elif name == "kernels":
        assert found["steps tiny 24"]["floor_ms"] > 0 and set(found["steps tiny 24"]["verify_ms"]) == {1, 2}
        assert {each["kernel"] for each in found["kernels tiny"]} >= {"qkv none", "head int8", "attention after 24"}
        assert found["prefill tiny 24"]["tokens_per_s"] > 0
        both = [found[part] for part in ("side by side tiny 24", "filters tiny", "small drafts tiny")]
        both.append({"ahead": found["ahead tiny 24"]})
        upkeep = found["upkeep tiny"]
        assert upkeep["differs_by"] < 1e-3 and min(upkeep["graph"], upkeep["pytorch"], upkeep["selection"]) > 0
        rounds = [case for case in found["side by side tiny 24"].values() if "round" in case]
        assert rounds and all(case.pop("is_same_text") and case.pop("round, choices in turn") and
                              case.pop("round, top-p") and case.pop("round, top-p, choices in turn") for case in rounds)
        assert all(case.pop("is_same_chain") and case.pop("chains") and case.pop("chains in turn")
                   for case in rounds)
        assert all(case["is_equal"] and len(case) <= 4 for cases in both for case in cases.values()), both
    elif name == "families":
        for shape in ("tiny mixture", "tiny hybrid"):
            assert found[f"rows {shape} 24"] == {"rows": 4, "plain_steps": 5, "cases": {}, "differs_in": None}
            assert found[f"steps {shape} 24"]["share_of_floor"] > 0 and found[f"steps {shape} 24"]["verify_ms"][2] > 0
            alone = found[f"chains {shape} 24"]["1 text"]
            assert alone["is_same_chain"] and alone["chain"] > 0 and alone["token by token"] > 0
            assert found[f"chains {shape} 24"]["2 texts"]["is_same_chain"]
        chains = found["layer chains tiny"]
        assert set(chains) == {"eagle, 2 texts", "glide, 2 texts"}
        assert all(case["is_same_chain"] and case["chains"] > 0 and case["chains in turn"] > 0
                   for case in chains.values())
    elif name == "decide":
        assert {part for part in found if part.startswith("switch ")} == {f"switch {each}" for each in SWITCHES}
        assert not document.failing and all(figures["is_equal"] and min(figures["tokens"]) >= 2
                                            for part, figures in found.items() if part.startswith("switch "))
        assert found["boundaries"]["unchained_us"] > 0 and "shim" in found["ring tiny"]["left_out"]
        without = found["without tiny 24"]["1 rows"]
        assert len(without) == 6 and min(without.values()) > 0
        for drafter in ("eagle 0.72", "self 0.87"):
            oracle = found["oracles tiny 24"][drafter]
            assert oracle["is_equal"] and oracle["tokens_a_step"] > 1 and oracle["in_plain_speed_expected"] > 0
        windows = found["windows tiny"]
        assert windows["is_equal"] and set(windows["windows"]) == {16, 20, 24} and windows["plain_minutes"] > 0
        assert windows["eagle 0.72"]["minutes"] > 0
    else:
        long = found["long text tiny"]
        assert long["tokens"] >= 4 and all(window["is_equal"] for window in long["windows"])
        assert json.loads((tmp_path / "long-tiny.json").read_text()) == long


@interpreted
def test_rows_of_a_family_that_differ_are_named(tmp_path, monkeypatch):
    """Plain decoding after another text stands for a wrong kernel."""
    from longdraft_bench.cuda import families
    from longdraft_bench.cuda.models import Bench
    from longdraft_bench.cuda.plan import INTERPRETED

    made, honest = [], families.cache_of
    monkeypatch.setattr(families, "cache_of", lambda model, context: (
        made.append(1), honest(model, context - (len(made) == 3)))[1])
    found = families.family_rows(INTERPRETED, Bench(INTERPRETED, "", time.time() + 60, tmp_path), "tiny mixture", 24)
    assert found["differs_in"] == "row 0: attention 0" and set(found["cases"]) == {0, 3}


@interpreted
def test_a_missing_device_and_wrong_options_get_one_clear_line(tmp_path, capfd):
    for options, words in (([], "no CUDA device"),
                           (["--slices", "fourth"], "allowed: first, length, kernels, families, whole, decide")):
        assert run(["bench", "cuda", "--output", str(tmp_path), *options]) == 2
        error = capfd.readouterr().err
        assert words in error and error.count("\n") == 1


@interpreted
def test_other_cuts_of_products_and_attention_are_timed_in_whole_layers(capsys):
    from longdraft_bench.cuda import tilings

    small = INTERPRETED.shapes["tiny"] | {"hidden_size": 256}
    tilings.measure(INTERPRETED._replace(shapes={"tiny": small}))
    lines = [line.split("; ") for line in capsys.readouterr().out.splitlines()]
    pair = re.compile(r"24: [\d.]+ \([\d.]+ now\)")
    timed = [name for _, name, *times in lines if all(map(pair.fullmatch, times))]
    assert len(timed) == len(lines), lines
    assert {"now", "moved 512", "qkv (64, 32, 2, 2)", "attention (256, 32, 512)", "_NORM_WARPS 16",
            "_WARPS 8"} <= set(timed)
    assert run(["bench", "cuda-tilings"]) == 2 and "no CUDA device" in capsys.readouterr().err


def test_every_launch_says_how_sums_of_products_are_rounded():
    """Triton's default is another from version 3.10 on, and would change texts."""
    launches = 0
    for path in (ROOT / "longdraft" / "kernels" / "cuda").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for found in re.finditer(r"jit_\w+\.(\w+_kernel)\[", text):
            end = text.index("](", found.end()) + 2
            depth = 1
            begin = end
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            stated = "**UNFUSED" in text[begin:end] or "**chained(" in text[begin:end]  # which has UNFUSED in it
            assert stated, f"{path.name}: {found[1]}"
            launches += 1
    assert launches > 25


def test_a_chained_kernel_stores_nothing_and_loads_nothing_before_it_waits():
    """It may only ask for cache lines, which changes no result. All kernels that can be chained wait."""
    chained = 0
    for path in (ROOT / "longdraft" / "kernels" / "cuda").glob("jit_*.py"):
        for kernel in re.split(r"\n(?=def )", path.read_text(encoding="utf-8"))[1:]:
            name, code = kernel[4 : kernel.index("(")], re.sub(r'""".*?"""', "", kernel, flags=re.DOTALL)
            if "IS_CHAINED: tl.constexpr" not in code or name == "wait_for_inputs":
                continue
            before, wait, _ = code.partition("wait_for_inputs(IS_CHAINED)")
            assert wait, f"{name} never waits"
            assert "tl.store" not in before and "tl.load" not in before and "atomic" not in before, name
            chained += 1
    assert chained >= 20
