"""The page in a real browser, with up to 100,000 tokens."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from helpers import serving
from helpers.thinkers import make_thinker

CHROMIUM = os.environ.get("LONGDRAFT_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.full, pytest.mark.skipif(
    not CHROMIUM, reason="no Chromium here; install it, or name it in LONGDRAFT_CHROMIUM")]
SHOTS = os.environ.get("LONGDRAFT_SCREENSHOTS")  # a folder: keep pictures of what was seen

at_length = pytest.mark.skipif(not SHOTS, reason="takes a minute; `make test-page` runs it")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving.running(serving.load("novelist"), journals=tmp_path_factory.mktemp("journals")) as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with playwright.sync_playwright() as runner:
        browser = runner.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
    page.goto(server.url)
    page.wait_for_selector("#drafter option", state="attached")
    yield page
    page.close()
    serving.wait_for(lambda: server.scheduler.num_jobs == 0)
    assert not [fault for fault in faults if "status of 400" not in fault]


def shot(page, name: str) -> None:
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png")


def write(page, tokens: int, prompt: str = "It was", seed: int = 7) -> None:
    page.fill("#prompt", prompt)
    page.fill("#max_tokens", str(tokens))
    page.fill("#seed", str(seed))
    page.press("#prompt", "Control+Enter")


def state(page, wanted: str, timeout: float = 180) -> None:
    page.wait_for_selector(f"body[data-state={wanted}]", timeout=timeout * 1000)


def count(page) -> int:
    found = re.match(r"[\d,]+", page.inner_text("#count"))
    return int(found.group().replace(",", "")) if found else 0


def test_a_text_is_generated_highlighted_measured_and_downloaded(page, server, tmp_path):
    page.select_option("#drafter", "magicdec")  # `auto` may not draft in a short text
    write(page, 300)
    state(page, "done")
    assert count(page) == 300 and page.inner_text("#status") == "Finished"
    engine = server.app.service.engine
    expected = "".join(event.text for event in engine.generate("It was", engine.params(max_new_tokens=300, seed=7,
                                                                                       min_p=0.1)))
    with page.expect_download() as text:
        page.click("#downloads summary")
        page.click("#save-text")
    assert Path(text.value.path()).read_text() == "It was" + expected
    with page.expect_download() as book:
        page.click("#downloads summary")
        page.click("#save-epub")
    with zipfile.ZipFile(book.value.path()) as archive:
        assert "It was" in archive.read("OEBPS/chapter-0001.xhtml").decode()
        assert "<dc:title>It was" in archive.read("OEBPS/package.opf").decode()
    with page.expect_download() as tokens:
        page.click("#downloads summary")
        page.click("#save-tokens")
    ids = np.load(tokens.value.path())
    assert ids.dtype == np.int32 and engine.tokenizer.decode(ids.tolist()) == expected
    with page.expect_download() as report:
        page.click("#downloads summary")
        page.click("#save-report")
    content = Path(report.value.path()).read_text()
    assert "bit-exact" in content and content.count("data:image/png") == 2
    assert page.inner_text("#rate") != "–" and page.inner_text("#gain").endswith("×")
    assert page.locator(".text .g").count() > 0 and page.locator("#legend li").count() >= 2
    assert "tokens per second" in page.get_attribute("#speed-chart", "aria-label")
    page.keyboard.press("t")
    assert "tinted" not in page.get_attribute("#text", "class")


def test_calls_of_functions_are_folded_blocks(browser, tmp_path_factory):
    """With the arguments that the server's reply has."""
    pytest.importorskip("llguidance")
    function = {"name": "look", "parameters": {"type": "object", "required": ["a"],
                                               "properties": {"a": {"enum": ["x"]}}}}
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}<answer>"
    folder = make_thinker(tmp_path_factory.mktemp("caller"), template, ("<answer>",), ("<tool_call>", "</tool_call>"),
                          ("<tool_call>", "</tool_call>"))  # the grammar forces what is between
    with serving.running(serving.load(folder, drafter="plain")) as server:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(server.url)
        page.wait_for_selector("#tools-row:not([hidden])")
        page.check("#chat")
        page.fill("#temperature", "0")
        page.click("#tools-row summary")
        page.fill("#tools", "[{")
        page.click("#start")
        assert "not valid JSON" in page.inner_text("#error")
        page.fill("#tools", json.dumps([function]))
        write(page, 90)
        state(page, "done")
        block = page.locator("#calls details")
        assert block.count() == 1 and block.locator("summary").inner_text() == "Call of look"
        assert not block.locator("pre").is_visible()
        block.locator("summary").click()
        assert block.locator("pre").inner_text() == '{"a": "x"}'
        shot(page, "calls")
        page.close()


def test_stop_reload_and_resume(page, server):
    """A resumed text equals the uninterrupted one."""
    write(page, 1200, "The ship")
    serving.wait_for(lambda: count(page) > 20)
    page.keyboard.press("Escape")
    page.focus("body")
    page.keyboard.press("Escape")
    state(page, "cut")
    assert serving.wait_for(lambda: server.scheduler.num_jobs == 0) < 2
    stopped = count(page)
    page.reload()
    page.wait_for_selector("#offer:not([hidden])")
    assert "The ship" in page.inner_text("#offer")
    page.click("#offer .primary")
    state(page, "done")
    assert count(page) == 1200 > stopped
    engine = server.app.service.engine
    expected = "".join(event.text for event in engine.generate("The ship", engine.params(max_new_tokens=1200, seed=7,
                                                                                         min_p=0.1)))
    with page.expect_download() as text:
        page.click("#downloads summary")
        page.click("#save-text")
    assert Path(text.value.path()).read_text() == "The ship" + expected
    page.focus("#text")
    page.keyboard.press("g")
    page.wait_for_selector("#list li .state")
    assert "of 1,200" in page.inner_text("#list")
    page.click("#list button:text('Read')")
    page.wait_for_selector("#past", state="hidden")
    assert count(page) == 1200


def text_on_display(page) -> str:
    with page.expect_download() as text:
        page.click("#downloads summary")
        page.click("#save-text")
    return Path(text.value.path()).read_text().removeprefix("It was")


def cut(page) -> int:
    """Click into the text; returns the number of tokens before the cut."""
    page.locator(".text .block").first.click(position={"x": 150, "y": 140})
    page.wait_for_selector("#here:not([hidden])")
    return int(re.search(r"token ([\d,]+)", page.inner_text("#here-at")).group(1).replace(",", "")) - 1


def test_a_text_is_cut_at_a_token_and_goes_on_with_another_seed_or_other_words(page, server):
    """Takes of one text are kept side by side, and each is the text that the library writes after the same tokens."""
    engine = server.app.service.engine
    write(page, 120, seed=7)
    state(page, "done")
    first = text_on_display(page)
    tokens = [token for event in engine.generate("It was", engine.params(max_new_tokens=120, seed=7, min_p=0.1))
              for token in event.tokens]

    def after(kept: list[int], seed: int) -> str:
        params = engine.params(max_new_tokens=120 - len(kept), seed=seed, min_p=0.1)
        new = [token for event in engine.generate(engine.encode("It was") + kept, params) for token in event.tokens]
        return engine.tokenizer.decode(kept + new)

    count_kept = cut(page)
    assert 0 < count_kept < 119 and page.inner_text("#here-go") == "Another take (seed 8)"
    page.click("#here-go")
    page.wait_for_selector("#takes button:nth-child(2)")
    state(page, "done")
    second = text_on_display(page)
    assert second == after(tokens[:count_kept], 8) != first and count(page) == 120
    page.click("#takes button:nth-child(1)")
    assert text_on_display(page) == first

    assert cut(page) == count_kept
    page.fill("#here-words", "Suddenly the door")
    assert page.inner_text("#here-go") == "Go on after these words"
    page.click("#here-go")
    page.wait_for_selector("#takes button:nth-child(3)")
    state(page, "done")
    own = engine.tokenizer.encode("Suddenly the door", add_special_tokens=False)
    assert text_on_display(page) == after(tokens[:count_kept] + own, 7)
    page.click("#takes button:nth-child(1)")
    cut(page)
    page.click("#here-go")  # the same take again
    page.wait_for_selector("#takes button:nth-child(4)")
    state(page, "done")
    assert text_on_display(page) == second
    shot(page, "takes")


def test_an_invalid_setting_shows_an_error_in_the_form(page):
    page.fill("#seed", "9007199254740993")  # a JavaScript number does not hold it
    page.click("#start")
    assert "seed" in page.inner_text("#error")


def test_a_refused_prompt_leaves_the_text_on_display(page):
    write(page, 30)
    state(page, "done")
    text = page.inner_text("#text")
    page.keyboard.press("p")
    page.fill("#top_p", "0")
    page.click("#start")
    state(page, "failed")
    assert "top_p" in page.inner_text("#error") and page.inner_text("#text") == text and count(page) == 30
    page.fill("#top_p", "0.555")
    page.click("#start")
    state(page, "done")
    assert page.evaluate("document.activeElement.id") == "text"


def test_a_text_that_is_being_written_is_left_after_a_question_only(page):
    write(page, 3000)
    serving.wait_for(lambda: count(page) > 20)
    page.keyboard.press("p")
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector("#sure[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#sure", state="hidden")
    assert page.get_attribute("body", "data-state") == "running"
    cut(page)
    page.press("#here-words", "Control+Enter")  # another take
    page.wait_for_selector("#takes button:nth-child(1)")
    page.wait_for_selector("body[data-state=running]")
    page.click("#takes button:nth-child(1)")
    page.click("#sure-yes")
    page.wait_for_selector("#takes button:nth-child(1)[aria-pressed=true]")
    assert page.is_visible("#resume") and page.title() == "longdraft"
    page.click("#takes button:nth-child(2)")
    page.wait_for_selector("#takes button:nth-child(2)[aria-pressed=true]")
    second = text_on_display(page)
    page.click("#resume")
    state(page, "done")
    whole = text_on_display(page)
    assert count(page) == 3000 and whole.startswith(second) and whole != second
    page.click("#takes button:nth-child(1)")
    page.wait_for_selector("#takes button:nth-child(1)[aria-pressed=true]")
    assert page.is_visible("#resume")
    page.click("#takes button:nth-child(2)")
    assert text_on_display(page) == whole and not page.is_visible("#resume")


def test_failures_are_told_beside_the_text(page):
    """Of a text that had begun, and of the list of texts."""
    detail = {"id": "x", "seed": 1, "tokens": [5], "pieces": [" so"], "sources": [""], "steps": [1], "progress": {
        "state": "running", "prompt_tokens": 4, "new_tokens": 1, "max_new_tokens": 9, "elapsed_seconds": 1}}
    lines = [{"choices": [{}], "longdraft": detail}, {"error": {"message": "too slow " * 60, "code": "timeout"}}]
    page.route("**/v1/completions", lambda route: route.fulfill(
        body="".join(f"data: {json.dumps(line)}\n\n" for line in lines),
        headers={"Content-Type": "text/event-stream", "X-Generation-Id": "x"}))
    write(page, 9)
    state(page, "failed")
    assert page.is_visible("#failure") and "too slow" in page.inner_text("#failure")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1440
    page.route("**/generations", lambda route: route.fulfill(status=400, json={"error": {"message": "no list"}}))
    page.keyboard.press("g")
    page.wait_for_selector("#past-failure:has-text('no list')")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "show-past"


def test_the_page_works_without_storage(browser, server):
    page = browser.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new Error('denied'); } })")
    page.goto(server.url)
    page.wait_for_selector("#drafter option", state="attached")
    page.click("#theme")
    page.close()
    assert not faults


def test_stop_can_be_pressed_on_a_narrow_screen(page):
    page.set_viewport_size({"width": 360, "height": 740})
    write(page, 4000)
    serving.wait_for(lambda: count(page) > 20)
    assert page.evaluate("""() => { const r = document.querySelector("#stop-run").getBoundingClientRect();
        return document.elementFromPoint(r.left + r.width / 2, r.top + r.height / 2).id; }""") == "stop-run"
    assert page.evaluate("""document.querySelector("#count").getBoundingClientRect().top
        >= document.querySelector(".bar").getBoundingClientRect().bottom""")
    page.click("#stop-run")
    state(page, "cut")


def test_a_chat_has_its_thought_apart_and_a_book_of_its_answer(browser, tmp_path_factory):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:<answer>"
    folder = make_thinker(tmp_path_factory.mktemp("thinker"), template, ("<answer>",), ("<think>", "</think>"),
                          ("<think>", "The", " plan", "</think>", "\n\n", "Hello", " you"))
    with serving.running(serving.load(folder, drafter="plain"), journals=tmp_path_factory.mktemp("kept")) as server:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(server.url)
        page.wait_for_selector("#chat-row:not([hidden])")
        page.check("#chat")
        page.fill("#temperature", "0")
        write(page, 30, "Greet me")

        def check() -> None:
            state(page, "done")
            assert not page.locator("#text .thinking .block").first.is_visible()
            assert page.locator("#text > .block").first.inner_text().strip() == "Hello you"
            assert text_on_display(page) == "Hello you"
            with page.expect_download() as book:
                page.click("#downloads summary")
                page.click("#save-epub")
            with zipfile.ZipFile(book.value.path()) as archive:
                assert "<dc:title>Greet me</dc:title>" in archive.read("OEBPS/package.opf").decode()
                chapter = archive.read("OEBPS/chapter-0001.xhtml").decode()
                assert "Hello you</p>" in chapter and "plan" not in chapter

        check()
        shot(page, "thought")
        page.click("#show-past")
        page.click("#list button:text('Read')")
        page.wait_for_selector("#past", state="hidden")
        assert page.inner_text("#text .prompt") == "Greet me"
        check()
        page.close()


@at_length
def test_a_hundred_thousand_tokens_scroll_smoothly(page):
    """All at once. Frames are drawn, the document stays small, and every part can be scrolled to."""
    draw, total = random.Random(1), 100_000
    words = [" the", " house", " was", ",", " not", " quite", " empty", ".", "\n", " and", " yet", " a", " light"]
    lines, at = [], 0
    while at < total:
        size = draw.randint(1, 9)
        sources = ["self"] * (size - 1) if draw.random() < 0.8 else ["suffix"] * (size - 1)
        at = min(total, at + size)
        detail = {"id": "x", "seed": 1, "tokens": [5] * size, "pieces": [draw.choice(words) for _ in range(size)],
                  "sources": [*sources, ""], "steps": [size], "progress": {
                      "state": "running", "prompt_tokens": 4, "new_tokens": at, "max_new_tokens": total,
                      "own_tokens_per_second": 180 + draw.random() * 20, "plain_tokens_per_second": 9e5 / (9000 + at),
                      "mean_accepted_length": 4.2, "elapsed_seconds": at / 150, "eta_seconds": (total - at) / 150}}
        lines.append("data: " + json.dumps({"choices": [], "longdraft": detail}) + "\n\n")
    body = "".join(lines) + "data: [DONE]\n\n"
    page.route("**/v1/completions", lambda route: route.fulfill(
        body=body, headers={"Content-Type": "text/event-stream", "X-Generation-Id": "x"}))
    page.evaluate("""() => { window.gaps = []; let last = performance.now();
        const tick = (now) => { window.gaps.push(now - last); last = now; requestAnimationFrame(tick); };
        requestAnimationFrame(tick); }""")
    began = time.monotonic()
    write(page, 100_000)
    state(page, "done")
    seconds = time.monotonic() - began
    assert count(page) >= total
    shot(page, "page-100k")
    nodes = page.evaluate("document.querySelectorAll('#text *').length")
    assert nodes < 12_000, nodes
    page.evaluate("window.gaps.length = 0")
    for place in (0, 0.5, 0.9, 0.1, 1):
        page.evaluate("(p) => { const t = document.querySelector('#text'); t.scrollTop = p * t.scrollHeight; }", place)
        page.wait_for_timeout(120)
        assert page.evaluate("""() => { const t = document.querySelector('#text'), r = t.getBoundingClientRect();
            return [...t.querySelectorAll('.block')].some((b) => { const q = b.getBoundingClientRect();
            return q.bottom > r.top && q.top < r.bottom && b.textContent.length > 0; }); }"""), place
    gaps = sorted(page.evaluate("window.gaps"))
    median = gaps[len(gaps) // 2]
    print(f"\n100,000 tokens taken in {seconds:.1f} s, {nodes} nodes, scrolling {median:.0f} ms a frame (median)")
    assert median < 100 and page.evaluate("performance.memory.usedJSHeapSize") < 300e6


@at_length
def test_themes_and_widths(page, browser, server):
    """No horizontal overflow, enough contrast, and pictures for the documentation."""
    shot(page, "page-idle")
    chapter = (Path(__file__).parents[2] / "examples" / "chapter.txt").read_text()
    write(page, 2500, chapter)
    state(page, "done", 120)
    page.emulate_media(color_scheme="light")
    shot(page, "page-light")
    page.focus("#text")
    page.keyboard.press("d")
    page.wait_for_timeout(200)
    shot(page, "page-dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("g")
    page.wait_for_selector("#list li .state")
    shot(page, "page-past")
    page.keyboard.press("Escape")
    page.keyboard.press("d")
    for width, height in ((1024, 768), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(200)
        shot(page, f"page-{width}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    for theme in ("light", "dark"):
        page.evaluate("(name) => { document.documentElement.dataset.theme = name; }", theme)
        for what in ("#status", "#text .g", ".facts dt", "#start"):
            assert contrast(page, what) >= 4.5, (theme, what)


def contrast(page, selector: str) -> float:
    """Contrast of the text and its background (WCAG)."""
    return page.evaluate("""(selector) => {
        const parse = (c) => { const m = c.match(/[\\d.]+/g).map(Number); return [m[0], m[1], m[2], m[3] ?? 1]; };
        const linear = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
        const light = (c) => { const l = c.slice(0, 3).map((v) => linear(v / 255));
            return .2126 * l[0] + .7152 * l[1] + .0722 * l[2]; };
        const element = document.querySelector(selector), layers = [];
        for (let e = element; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
        let back = [255, 255, 255];
        for (const [r, g, b, a] of layers.reverse()) back = [r, g, b].map((v, i) => v * a + back[i] * (1 - a));
        const [a, b] = [light(parse(getComputedStyle(element).color)), light(back)].sort((x, y) => y - x);
        return (a + .05) / (b + .05); }""", selector)
