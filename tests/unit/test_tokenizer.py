"""Streaming text: whole characters only, stop texts wherever the pieces break."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from helpers.checkpoints import write_tokenizer
from longdraft.checkpoint import hub
from longdraft.errors import ModelError, UsageError
from longdraft.text.pieces import has_long_piece
from longdraft.text.tokenizer import StopText, Tokenizer
from longdraft_bench.document import EXAMPLE

BROKEN = "\ufffd"
NOVELIST = Tokenizer(hub.resolve("novelist"))


_VOCABULARY = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581\u2581",
               *"abn,.", "\u2581So", "\u2581it", "was", "\u2581\N{SNOWMAN}", "\N{SNOWMAN}", "\n", "e\u0301")
_SENTENCEPIECE = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]


def sentencepiece_style(folder, decoder):
    """A vocabulary as SentencePiece makes it: `\u2581` for a space, `<0xE2>` for bytes that no token spells."""
    model = models.BPE(vocab={token: i for i, token in enumerate(_VOCABULARY)}, merges=[], byte_fallback=True,
                       unk_token="<unk>", fuse_unk=True)
    tokenizer = HFTokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", " two words ", "<0xZZ>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def byte_level(folder):
    write_tokenizer(folder)
    plain = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    plain.add_special_tokens(["<|im_end|>"])
    plain.add_tokens(["<think>", " two words ", "caf\u00e9"])
    plain.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp("kind") for name in ("byte-level", "llama", "metaspace", "no strip")}
    return {
        "novelist": NOVELIST,
        "byte-level": byte_level(folders["byte-level"]),
        "llama": sentencepiece_style(folders["llama"], decoders.Sequence([*_SENTENCEPIECE, decoders.Strip(" ", 1, 0)])),
        "no strip": sentencepiece_style(folders["no strip"], decoders.Sequence(_SENTENCEPIECE)),
        "metaspace": sentencepiece_style(folders["metaspace"], decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])),
    }


KINDS = pytest.mark.parametrize("kind", ["novelist", "byte-level", "llama", "metaspace", "no strip"])


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in ids), stream.flush()]


@KINDS
@given(st.data())
def test_whatever_the_tokens_the_stream_joins_to_the_decoded_whole(kinds, kind, data):
    """Any ids: halves of characters, bytes that are no text, special and unknown tokens, spaces first or last."""
    tokenizer = kinds[kind]
    heavy = st.sampled_from([*range(min(12, tokenizer.size)), *range(tokenizer.size - 20, tokenizer.size + 2)])
    ids = data.draw(st.lists(heavy | st.integers(0, tokenizer.size - 1), max_size=60))
    whole = tokenizer.decode(ids)
    if not whole.endswith(BROKEN):
        assert "".join(streamed(tokenizer, ids)) == whole
    else:  # what was cut is left out: a character, or the bytes of one
        heard = [token for token in ids if not tokenizer.is_silent(token)]
        shorter = {tokenizer.decode(heard[: len(heard) - cut]) for cut in range(4)}
        assert "".join(streamed(tokenizer, ids)) in shorter | {whole[:-1]}
    end = tokenizer.encode("a", add_special_tokens=False)[-1:]
    assert "".join(streamed(tokenizer, [*ids, *end])) == tokenizer.decode([*ids, *end])


@KINDS
@given(st.text(max_size=60))
def test_streamed_pieces_join_to_the_text_and_never_hold_half_a_character(kinds, kind, text):
    ids = kinds[kind].encode(text, add_special_tokens=False)
    pieces = streamed(kinds[kind], ids)
    assert "".join(pieces) in {kinds[kind].decode(ids), kinds[kind].decode(ids).rstrip(BROKEN)}
    if BROKEN not in text:
        assert "".join(pieces) == kinds[kind].decode(ids)
        assert not any(BROKEN in piece for piece in pieces)


@pytest.mark.parametrize("kind, tokens, pieces", [
    ("llama", ["<0xE2>", "<0x98>", "<0x83>", "a"], ["", "", "", "\N{SNOWMAN}a", ""]),
    ("llama", ["\u2581it", "<0xE2>", "<0x98>", "<0x83>"], ["it", "", "", "", "\N{SNOWMAN}"]),
    ("llama", ["\u2581it", "<0x61>", "<0xE2>", "<0x98>"], ["it", "", "", "", "a"]),
    ("llama", ["<0x61>", "<0xFF>", "b"], ["", "", "\ufffd\ufffdb", ""]),  # as the whole decodes
    ("llama", ["<s>", "\u2581So", "</s>", "\u2581it"], ["", "So", "", " it", ""]),
    ("llama", ["\u2581", "\u2581So"], ["", " So", ""]),
    ("llama", ["<think>", "\u2581it", " two words ", "was"], ["<think>", " it", " two words ", "was", ""]),
    ("metaspace", ["<s>", "\u2581So", "<|im_end|>", "\u2581it"], ["", "So", "", " it", ""]),
    ("no strip", ["\u2581So", "\u2581it"], [" So", " it", ""]),
])
def test_what_is_shown_when(kinds, kind, tokens, pieces):
    vocabulary = kinds[kind].vocabulary()
    assert streamed(kinds[kind], [vocabulary[token] for token in tokens]) == pieces


@pytest.mark.parametrize("kind, byte", [("byte-level", "\u00ff"), ("llama", "<0xFF>")])
def test_a_long_run_of_bytes_that_are_no_text_costs_no_more_for_each(kinds, kind, byte, monkeypatch):
    tokenizer = kinds[kind]
    lengths = []
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: (lengths.append(len(ids)), decode(self, ids))[1])
    ids = [tokenizer.vocabulary()[byte]] * 500
    assert "".join(streamed(tokenizer, ids)) == BROKEN * 500
    assert sum(lengths) < 500 * 40


@given(st.binary(max_size=80))
def test_bytes_that_are_no_text_never_stall_the_stream(data):
    """Ids of single bytes: whatever they spell, every whole character after them comes through."""
    alphabet = Tokenizer(hub.resolve("novelist"))
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


LONG_PIECES = {"letters": "a" * 20_000, "words": "so " * 9000 + "it" * 5000 + " was",
               "blanks": "So" + " " * 20_000 + "it", "punctuation": "-" * 20_000,
               "letters of two bytes": "\N{LATIN SMALL LETTER E WITH ACUTE}" * 20_000}


@pytest.mark.parametrize("name", LONG_PIECES)
def test_a_text_without_breaks_has_the_same_tokens_from_the_process_with_limits(name):
    text = LONG_PIECES[name]
    assert has_long_piece(text)
    for add_special_tokens in (True, False):
        expected = NOVELIST._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        assert NOVELIST.encode(text, add_special_tokens=add_special_tokens) == expected


@pytest.mark.parametrize("before", [0, 1, 2047, 2048, 2049, 100_000])
def test_every_long_piece_is_found_wherever_it_begins(before):
    assert has_long_piece(("It " * before)[:before] + "a" * 4096 + " was " * 1000)


def test_prose_has_no_long_piece():
    assert not has_long_piece(EXAMPLE.read_text(encoding="utf-8") * 10)
    assert not has_long_piece("\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 200 + "\N{IDEOGRAPHIC FULL STOP}")


@pytest.mark.full
def test_a_text_that_a_tokenizer_reads_in_quadratic_time_is_one_clear_line(tmp_path):
    letters = {each: number for number, each in enumerate(["[UNK]", "a", "##a"])}
    tokenizer = HFTokenizer(models.WordPiece(letters, unk_token="[UNK]", max_input_chars_per_word=10**9))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match="without a break, and tokenising it takes more than 10 s; break it up"):
        Tokenizer(tmp_path).encode("a" * 100_000)


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


def test_many_stop_texts_take_no_longer_than_one():
    """Each nearly occurs at every character, which is the worst case of most other methods."""
    many = [f"{'a' * 1000}{i:04}" for i in range(16)] + ["a" * 500 + "b" * 500]

    def seconds(stops):
        matcher, best = StopText(stops), math.inf
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(1000):
                assert not matcher.push("a" * 20)[1]
            best = min(best, time.perf_counter() - began)
        return best

    assert seconds(many) < 3 * seconds(many[:1])


def test_without_stop_texts_nothing_is_held_back():
    assert StopText(()).push("anything") == ("anything", False)


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_a_tokenizer_that_cannot_be_read_is_one_clear_error(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["vocab.json", "tekken.json"])
def test_a_model_with_another_form_of_tokenizer_says_how_to_convert_it(tmp_path, name):
    (tmp_path / name).write_bytes(b"...")
    with pytest.raises(ModelError, match=rf"the folder has {name}.*AutoTokenizer.*save_pretrained") as raised:
        Tokenizer(tmp_path)
    assert "\n" not in str(raised.value)


@KINDS
def test_what_a_token_adds_is_told_with_the_space_in_front_of_it(kinds, kind):
    """Text by text, tokens give the decoded whole: but for the first space, which some decoders drop, and for
    characters of several tokens."""
    tokenizer = kinds[kind]
    ids = tokenizer.encode("So it was a ban, and", add_special_tokens=False)
    assert "".join(map(tokenizer.text_of, ids)).lstrip(" ") == tokenizer.decode(ids).lstrip(" ")


def test_a_tokenizer_of_absurd_size_is_not_read(tmp_path, monkeypatch):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("it was read"))
    with pytest.raises(ModelError, match="bytes; allowed"):
        Tokenizer(tmp_path)
