"""The channels of gpt-oss's answers, against a reader of whole texts."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HFTokenizer

from helpers.answers import streamed_parts
from helpers.checkpoints import write_tokenizer
from longdraft.text.harmony import MARKS, Harmony
from longdraft.text.tokenizer import Tokenizer

_MESSAGE = re.compile(r"<\|channel\|>(?P<channel>\w+)[^<]*<\|message\|>(?P<text>[^<]*)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harmony")
    write_tokenizer(folder)
    tokenizer = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([*MARKS, "<|return|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def whole(answer: str) -> tuple[str, str]:
    """Thinking and answer of a whole text of complete messages."""
    parts = {True: "", False: ""}
    for channel, text in _MESSAGE.findall(answer):
        parts[channel == "analysis"] += text
    return parts[True], parts[False]


def streamed(tokenizer: Tokenizer, answer: str, prompt: str = "<|start|>user<|message|>Hi<|end|><|start|>assistant",
             stop: tuple[str, ...] = (), seed: int = 0, limit: int | None = None) -> tuple[str, str]:
    """What arrives of the first `limit` tokens of an answer, in steps of one to four tokens."""
    form = Harmony.find(tokenizer)
    assert form is not None
    reader = form.reader(tokenizer.encode(prompt, add_special_tokens=False))
    parts, rest = streamed_parts(tokenizer, reader, answer, stop, seed, limit)
    assert rest == ("", "")
    return parts


@pytest.mark.parametrize("seed", range(40))
def test_the_parts_are_those_of_the_whole_text(tokenizer, seed):
    draw = random.Random(seed)
    words = ["We think ", "é€ 漢", "analysis", " final ", "so: 1 + 1\n", "assistant"]
    messages = [f"<|channel|>{draw.choice(['analysis', 'final', 'commentary', 'commentary to=x <json>'])}<|message|>"
                + "".join(draw.choices(words, k=draw.randint(0, 4))) for _ in range(draw.randint(1, 4))]
    answer = "<|end|><|start|>assistant".join(messages).replace("<json>", "json") + "<|return|>"
    assert streamed(tokenizer, answer, seed=seed) == whole(answer)
    stops = ("think no", "1 + 2", "漢字")  # their beginnings are held back, and are shown in the channel they belong to
    assert streamed(tokenizer, answer, stop=stops, seed=seed) == whole(answer)


def test_no_beginning_of_a_header_is_ever_shown(tokenizer):
    """Whatever token the answer ends at."""
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    for limit in range(1, len(tokenizer.encode(answer, add_special_tokens=False)) + 1):
        reasoning, content = streamed(tokenizer, answer, seed=limit, limit=limit)
        assert "Hm.".startswith(reasoning) and "Yes".startswith(content)
    assert (reasoning, content) == ("Hm.", "Yes")


def test_a_stop_text_ends_the_answer_within_its_channel(tokenizer):
    answer = "<|channel|>analysis<|message|>a STOP<|end|><|start|>assistant<|channel|>final<|message|>b"
    assert streamed(tokenizer, answer, stop=("STOP",)) == ("a ", "")


@pytest.mark.parametrize("prompt, answer, wanted", [
    ("<|start|>assistant", "No header", ("", "No header")),
    ("<|start|>assistant<|channel|>final<|message|>Hel", "lo", ("", "lo")),
    ("<|start|>assistant<|channel|>analysis<|message|>", "Hm<|end|><|message|>x", ("Hm", "x")),
    ("<|start|>assistant<|channel|>", "analysis<|message|>Hm", ("Hm", "")),
    ("Hi", "<|channel|>final<|message|>a<|end|>b", ("", "ab")),
    ("Hi", "<|channel|>" + "a b " * 100, ("", "a b " * 100)),
    ("Hi", "<|channel|><|message|>a", ("", "a")),
])
def test_prompts_within_messages_and_broken_answers(tokenizer, prompt, answer, wanted):
    assert streamed(tokenizer, answer, prompt) == wanted


def test_other_tokenizers_have_no_channels(tmp_path):
    write_tokenizer(tmp_path)
    assert Harmony.find(Tokenizer(tmp_path)) is None
