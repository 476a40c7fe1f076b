"""Streaming text: whole characters only, stop texts wherever the pieces break."""

from __future__ import annotations

import json

import pytest
from conftest import write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from longdraft.errors import ModelError, UsageError
from longdraft.model import library
from longdraft.model.tokenizer import StopText, Tokenizer

NOVELIST = Tokenizer(library.resolve("novelist"))


@given(st.text(max_size=60))
def test_streamed_pieces_join_to_the_text_and_never_end_in_half_a_character(text):
    ids = NOVELIST.encode(text)
    stream = NOVELIST.stream()
    pieces = [stream.push(token) for token in ids]
    whole = NOVELIST.decode(ids)
    assert "".join(pieces) == whole.rstrip("\ufffd") or "".join(pieces) == whole
    if "\ufffd" not in text:
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=80))
def test_bytes_that_are_no_text_never_stall_the_stream(data):
    """Ids of single bytes: whatever they spell, every whole character behind them comes through."""
    alphabet = Tokenizer(library.resolve("novelist"))
    stream = alphabet.stream()
    byte_ids = {bytes([b]): alphabet.encode(chr(b))[-1] for b in range(128)}
    shown = "".join(stream.push(byte_ids.get(bytes([b]), 200)) for b in data)
    shown += "".join(stream.push(token) for token in alphabet.encode(" end of it"))
    assert shown.endswith(" end of it")


def test_a_character_of_several_tokens_is_shown_when_it_is_whole():
    ids = NOVELIST.encode("\N{SNOWMAN}")
    assert len(ids) > 1
    stream = NOVELIST.stream()
    assert [stream.push(token) for token in ids] == [""] * (len(ids) - 1) + ["\N{SNOWMAN}"]


def test_special_tokens_are_not_text():
    stream = NOVELIST.stream()
    assert "".join(stream.push(token) for token in [0, *NOVELIST.encode("So"), 1]) == "So"


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_the_first_stop_text_ends_the_stream_however_it_is_cut(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher, shown, stopped = StopText(stops), "", False
    for piece in pieces:
        new, stopped = matcher.push(piece)
        shown += new
        assert not any(stop in shown for stop in stops)
        if stopped:
            break
    # The place where the first stop text is complete, and the earliest stop text there.
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    assert stopped == bool(ends)
    if stopped:
        assert any(text.startswith(shown + stop) for stop in stops)
    else:
        assert shown + matcher.flush() == text


def test_without_stop_texts_nothing_is_held_back():
    assert StopText(()).push("anything") == ("anything", False)


def test_a_chat_template_wraps_the_prompt(tmp_path):
    write_tokenizer(tmp_path)
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": "<s>"}))
    assert Tokenizer(tmp_path).chat("Hello") == "<s>[user] Hello\n[assistant]"


def test_no_template_or_a_broken_one_is_one_clear_error(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="no chat template"):
        Tokenizer(tmp_path).chat("Hello")
    (tmp_path / "chat_template.jinja").write_text("{{ messages.nothing.at.all }}")
    with pytest.raises(ModelError, match="template fails"):
        Tokenizer(tmp_path).chat("Hello")


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_a_tokenizer_that_cannot_be_read_is_one_clear_error(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
