"""Thinking between tags, against a reader of whole texts."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HFTokenizer

from helpers.answers import streamed_parts
from helpers.checkpoints import write_tokenizer
from longdraft.text.thinking import ThinkingTags, closed_thinking, find_format, opened_thinking
from longdraft.text.tokenizer import Tokenizer

# How a model has its tags: as special tokens, as tokens with a text, or as text that its template looks for.
KINDS = [("<think>", "</think>", "text"), ("<think>", "</think>", "added"), ("<think>", "</think>", "special"),
         ("[THINK]", "[/THINK]", "special"), ("<|channel>thought", "<channel|>", "special"),
         ("<seed:think>", "</seed:think>", "added")]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]} {kind[2]}")
def tags(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ThinkingTags:
    opening, closing, kind = request.param
    return make_tags(tmp_path_factory.mktemp("tags"), opening.removesuffix("thought"), closing, kind)


def make_tags(folder: Path, opening: str, closing: str, kind: str) -> ThinkingTags | None:
    write_tokenizer(folder)
    tokenizer = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    if kind == "added":
        tokenizer.add_tokens([opening, closing])
    elif kind == "special":
        tokenizer.add_special_tokens([opening, closing])
    else:
        template = f"{{{{ messages[0].content.split('{closing}')[-1] }}}}"
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    tokenizer.save(str(folder / "tokenizer.json"))
    return find_format(Tokenizer(folder))


def texts(tags: ThinkingTags) -> tuple[str, str]:
    """The tags as a model writes them."""
    names = {mark: tags.tokenizer.letters(token) for token, mark in tags.marks.items()}
    return tuple("".join(names.get(letter, letter) for letter in tag) for tag in (tags.opening, tags.closing))


def whole(answer: str, opening: str, closing: str, *, is_open: bool) -> tuple[str, str]:
    """Thinking and content of a whole answer."""
    block = re.compile(rf"\s*({re.escape(opening)}){'?' if is_open else ''}"
                       rf"(?P<thinking>.*?)(\s*{re.escape(closing)}\s*(?P<content>.*)|\Z)", re.DOTALL)
    found = block.match(answer)
    if not found:
        return "", answer
    return found["thinking"].lstrip(), found["content"] or ""


def streamed(tags: ThinkingTags, answer: str, prompt: str = "Hi", begun: str = "", stop: tuple[str, ...] = (),
             seed: int = 0, limit: int | None = None) -> tuple[str, str]:
    """What arrives of the first `limit` tokens of an answer, in steps of one to four tokens."""
    tokenizer = tags.tokenizer
    reader = tags.reader(tokenizer.encode(prompt, add_special_tokens=False), begun)
    parts, rest = streamed_parts(tokenizer, reader, answer, stop, seed, limit)
    return parts.reasoning + rest.reasoning, parts.content + rest.content


@pytest.mark.parametrize("seed", range(30))
def test_the_parts_are_those_of_the_whole_text(tags, seed):
    draw, (opening, closing) = random.Random(seed), texts(tags)
    words = ["We think ", "é€ 漢", "\n", "\n\n", "  ", "</", "<th", "[/", "so: 1 + 1\n"]
    some = [draw.choice(["", opening]), *draw.choices(words, k=draw.randint(0, 5)), draw.choice(["", closing]),
            *draw.choices(words, k=draw.randint(0, 4))]
    answer, is_open = draw.choice(["", "\n"]) + "".join(some) + ".", draw.random() < 0.5
    prompt, stops = "Hi" + f"{opening}\n" * is_open, ("think no", "1 + 2", "漢字", "\n \n")
    wanted = whole(answer, opening, closing, is_open=is_open)
    if tags.marks:  # special tokens have no text
        wanted = tuple(part.replace(closing, "") for part in wanted)
    assert streamed(tags, answer, prompt, seed=seed) == wanted
    assert streamed(tags, answer, prompt, stop=stops, seed=seed) == wanted


def test_no_beginning_of_a_tag_is_shown_before_the_answer_ends(tags):
    opening, closing = texts(tags)
    reader = tags.reader(())
    parts = [reader.push([token], tags.tokenizer.text_of(token)) for token in
             tags.tokenizer.encode(f"{opening}\nHm.\n{closing}\n\nYes", add_special_tokens=False)]
    assert "".join(part.reasoning for part in parts) == "Hm."
    assert "".join(part.content for part in parts) == "Yes" and reader.finish() == ("", "")


def test_text_that_only_resembles_a_tag_is_kept(tags):
    opening, closing = texts(tags)
    assert streamed(tags, "<thin air") == ("", "<thin air")
    assert streamed(tags, "<thi") == ("", "<thi")
    assert streamed(tags, f"{opening}a </thi") == ("a </thi", "")
    assert streamed(tags, f"{opening}a </thi b \n") == ("a </thi b \n", "")
    shown = opening if not tags.marks else "thought" if "thought" in opening else ""  # special tokens have no text
    assert streamed(tags, f" Yes {opening}x") == ("", f" Yes {shown}x")
    assert streamed(tags, f"{opening}a{closing}b {closing}c") == ("a", f"b {'' if tags.marks else closing}c")


def test_a_stop_text_ends_the_answer_within_its_part(tags):
    opening, closing = texts(tags)
    assert streamed(tags, f"{opening}a STOP{closing}b", stop=("STOP",)) == ("a ", "")
    if not tags.marks:
        assert streamed(tags, f"{opening}a{closing}b", stop=(closing,)) == ("a", "")


@pytest.mark.parametrize("begun, answer, wanted", [
    ("{0}Thi", "nk {1}Yes", ("nk", "Yes")), ("{0}Hm{1}Y", "es", ("", "es")), ("Hello", " {1}x", ("", " {1}x")),
    ("{0}", "\nHm{1}Yes", ("Hm", "Yes")), ("Hello {0}", "x{1}y", ("", "x{1}y"))])
def test_a_continued_message_is_continued_in_its_part(tags, begun, answer, wanted):
    begun, answer = (text.format(*texts(tags)) for text in (begun, answer))
    wanted = tuple(text.format(*(("", "") if tags.marks else texts(tags))) for text in wanted)
    assert streamed(tags, answer, f"user: Hi assistant: {begun}", begun) == wanted


def test_much_white_space_is_shown_before_the_next_text_is_known(tags):
    opening, _ = texts(tags)
    reader = tags.reader(tags.tokenizer.encode(opening, add_special_tokens=False))
    token, = tags.tokenizer.encode("\n", add_special_tokens=False)
    shown = reader.push((), "Hm").reasoning + "".join(reader.push([token], "\n").reasoning for _ in range(5000))
    assert shown.startswith("Hm\n") and len(shown) > 4000
    reader = tags.reader(())
    assert len("".join(reader.push([token], "\n").content for _ in range(5000))) > 4000


def test_other_models_have_no_tags(tmp_path):
    write_tokenizer(tmp_path)
    assert find_format(Tokenizer(tmp_path)) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    assert find_format(Tokenizer(tmp_path)) is None


@pytest.mark.parametrize("prompt, opened, closed", [
    ("a<think>\n", "<think>\n", "</think>"), ("a<think>", "<think>", "</think>"), ("<think>x", "", ""),
    ("<think>\n\n</think>\n\n", "", ""), ("", "", ""), ("<seed:think>", "<seed:think>", "</seed:think>"),
    ("<|channel>thought\n", "<|channel>thought\n", "<channel|>"), ("<|channel>", "", "")])
def test_a_template_may_open_the_thinking(prompt, opened, closed):
    assert (opened_thinking(prompt), closed_thinking(prompt)) == (opened, closed)
