"""Streaming text: whole characters only, stop texts wherever the pieces break."""

from __future__ import annotations

import hashlib
import json
import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

import longdraft
from helpers.checkpoints import make_checkpoint, write_tokenizer
from longdraft.checkpoint import hub
from longdraft.drafters.corpus import Corpora
from longdraft.errors import ModelError, UsageError
from longdraft.server.settings import read_keys
from longdraft.system.files import read_prompt
from longdraft.text.chat_template import ChatTemplate
from longdraft.text.pieces import has_long_piece
from longdraft.text.tokenizer import StopText, Tokenizer, require_ids_in_vocabulary
from longdraft.train.data import load_tokenizer, tokenise
from longdraft.train.data_files import read_documents
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


# What the files of a folder say, compared with transformers

def with_files(folder: Path, changes: dict[str, object] | None = None, **files: object) -> Path:
    """A folder with a byte-level tokenizer.json, some of whose members are others, and further JSON files."""
    write_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    for name, value in (changes or {}).items():
        content[name] = content[name] | value if isinstance(content[name], dict) and name == "model" else value
    (folder / "tokenizer.json").write_text(json.dumps(content))
    basic = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    files["tokenizer_config"] = basic | dict(files.get("tokenizer_config") or {})  # type: ignore[call-overload]
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


PADDING = dict(direction="Right", pad_to_multiple_of=None, pad_id=0, pad_type_id=0, pad_token="<s>")
ACTING = {
    **{f"truncation {strategy} {direction}": dict(truncation=dict(
        max_length=16, stride=0, strategy=strategy, direction=direction))
       for strategy in ("LongestFirst", "OnlyFirst", "OnlySecond") for direction in ("Right", "Left")},
    "truncation to nothing": dict(truncation=dict(max_length=0, stride=0, strategy="LongestFirst", direction="Right")),
    "padding to 64": dict(padding=PADDING | dict(strategy={"Fixed": 64})),
    "padding on the left": dict(padding=PADDING | dict(strategy={"Fixed": 64}, direction="Left")),
    "padding to the longest": dict(padding=PADDING | dict(strategy="BatchLongest", pad_to_multiple_of=32)),
    "padding to two billion": dict(padding=PADDING | dict(strategy={"Fixed": 2 * 10**9})),
    "both": dict(truncation=dict(max_length=16, stride=0, strategy="LongestFirst", direction="Right"),
                 padding=PADDING | dict(strategy={"Fixed": 64})),
}


@pytest.mark.parametrize("what", ACTING)
def test_a_tokenizer_neither_cuts_nor_fills_texts(tmp_path, what):
    """Nor does that of training."""
    tokenizer = Tokenizer(with_files(tmp_path, ACTING[what]))
    for text in ("hi", "a word " * 300, "a word " * 3000):
        assert len(tokenizer.encode(text)) == len(text)
        assert next(tokenise(iter([text]), load_tokenizer(tmp_path, 320), None, 320)).size == len(text)


def test_merges_are_not_left_out_at_random(tmp_path):
    vocabulary = json.loads((with_files(tmp_path) / "tokenizer.json").read_text())["model"]["vocab"]
    tokenizer = Tokenizer(with_files(tmp_path, {"model": {
        "dropout": 0.5, "vocab": vocabulary | {"ab": 258}, "merges": [["a", "b"]]}}))
    assert tokenizer.encode("ab" * 100) == [258] * 100


def token(content: str, **flags: bool) -> dict[str, object]:
    return dict(content=content, lstrip=False, rstrip=False, normalized=False, single_word=False,
                special=False) | flags


OWN = {"0": token("<s>", special=True), "1": token("</s>", special=True)}
ADDED = {
    **{f"a token with {flags}": dict(tokenizer_config={
        "added_tokens_decoder": OWN | {"258": token("<think>", **flags)}})
       for flags in ({}, *({flag: True} for flag in ("special", "lstrip", "rstrip", "normalized", "single_word")))},
    **{f"an own token with {flags}": dict(tokenizer_config={
        "added_tokens_decoder": OWN | {"1": token("</s>", **flags)}})
       for flags in ({}, {"special": True, "rstrip": True}, {"special": True, "lstrip": True})},
    "two tokens in another order": dict(tokenizer_config={
        "added_tokens_decoder": {"259": token("<b>"), "258": token("<think>")} | OWN}),
    "a token without flags": dict(tokenizer_config={"added_tokens_decoder": OWN | {"258": {"content": "<think>"}}}),
    "a byte": dict(tokenizer_config={"added_tokens_decoder": OWN | {"67": token("a")}}),
    "a gap": dict(tokenizer_config={"added_tokens_decoder": OWN | {"300": token("<think>")}}),
    "added_tokens.json": dict(added_tokens={"<think>": 258, "<b>": 259}),
    "added_tokens.json, an end": dict(added_tokens={"<think>": 258}, special_tokens_map={"eos_token": "<think>"},
                                      tokenizer_config={"eos_token": "<think>"}),
    "added_tokens.json, an own token": dict(added_tokens={"</s>": 1, "<think>": 258}),
    "both files": dict(added_tokens={"<think>": 258}, tokenizer_config={"added_tokens_decoder": OWN}),
    "no added tokens": dict(tokenizer_config={"added_tokens_decoder": {}}),
}


@pytest.mark.parametrize("what", ADDED)
def test_tokens_of_the_files_beside_tokenizer_json_are_those_of_transformers(tmp_path, what):
    ours, theirs = Tokenizer(with_files(tmp_path, **ADDED[what])), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("So <s> it <think>  was </s> a<b> man", "<think>", "x<think>y </s>  <s>", "<Think> <b><think><b>"):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_the_tokenizers_hash_counts_tokens_that_other_files_add(tmp_path):
    """The hash of a folder whose files agree is that of tokenizer.json, as journals have it."""
    folders = [tmp_path / str(number) for number in range(4)]
    for folder in folders:
        folder.mkdir()
    added = {"added_tokens_decoder": OWN | {"258": token("<think>")}}
    plain, agreeing, more, shown = (Tokenizer(with_files(folder, tokenizer_config=settings)).sha256 for folder, settings
                                    in zip(folders, ({}, {"added_tokens_decoder": OWN}, added, {
                                        "added_tokens_decoder": OWN | {"1": token("</s>")}}), strict=True))
    assert plain == agreeing == hashlib.sha256((folders[0] / "tokenizer.json").read_bytes()).hexdigest()
    assert len({plain, more, shown}) == 3


@pytest.mark.parametrize("decoder", [
    {"x": token("<a>")}, {"-1": token("<a>")}, {"258": "<a>"}, {"258": {"content": 3}}, {"258": {}},
    {"258": token("<a>") | {"special": 1}}, {str(i): token(f"<{i}>") for i in range((1 << 16) + 1)}], ids=range(7))
def test_an_added_token_that_cannot_be_read_is_one_clear_line(tmp_path, decoder):
    with pytest.raises(ModelError, match="; allowed: ") as caught:
        Tokenizer(with_files(tmp_path, tokenizer_config={"added_tokens_decoder": decoder}))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


TEMPLATE = dict(type="TemplateProcessing", pair=[], special_tokens={})
PANICS: dict[str, dict[str, object]] = {  # in `tokenizers`, of which some are no Exception
    "an empty prefix": dict(normalizer=dict(type="Prepend", prepend="")),
    "a table of nothing": dict(normalizer=dict(type="Precompiled", precompiled_charsmap="")),
    "a table cut short": dict(normalizer=dict(type="Precompiled", precompiled_charsmap="AAAA")),
    "a table of gigabytes": dict(normalizer=dict(type="Precompiled", precompiled_charsmap="////////AAAAAAAA")),
    "a table of gigabytes, inside": dict(normalizer=dict(type="Sequence", normalizers=[
        dict(type="Precompiled", precompiled_charsmap="////////AAAAAAAA")])),
    "an empty pattern": dict(normalizer=dict(type="Replace", pattern={"Regex": ""}, content="x")),
    "an empty text": dict(normalizer=dict(type="Replace", pattern={"String": ""}, content="x")),
    "a decoder that strips more than there is": dict(decoder=dict(type="Strip", content="a", start=3, stop=3)),
    "parts of no characters": dict(pre_tokenizer=dict(type="FixedLength", length=0)),
    "a template without its token": dict(post_processor=TEMPLATE | dict(single=[
        {"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}])),
    "a template of a second text": dict(post_processor=TEMPLATE | dict(single=[
        {"Sequence": {"id": "B", "type_id": 0}}])),
    "merges within a character": dict(model=dict(continuing_subword_prefix="\u00e9\u00e9", merges=[["a", "b"]])),
}


@pytest.mark.parametrize("what", PANICS)
def test_a_tokenizer_whose_library_panics_is_one_clear_line(tmp_path, what):
    """An Exception, in the thread of the engine, and not the end of the process."""
    def read_and_write() -> None:
        tokenizer = Tokenizer(tmp_path)
        for text in ("a man", "\u00e9\u00e8 \u0e01\u0e33 \u4e2d", "  \u0301x"):
            tokenizer.decode(tokenizer.encode(text))

    with_files(tmp_path, PANICS[what])
    with pytest.raises(ModelError, match="tokenizer") as caught:
        read_and_write()
    assert "\n" not in str(caught.value)


def test_names_with_needless_escapes_are_read_as_they_are(tmp_path):
    with_files(tmp_path, PANICS["a table of gigabytes"])
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("precompiled_charsmap", "precom\\u0070iled_charsmap"))
    with pytest.raises(ModelError, match="charsmap claims 4,294,967,295 bytes and has 12"):
        Tokenizer(tmp_path)


# Tokens that a model has no row for

@pytest.fixture(scope="module")
def lacking(tmp_path_factory) -> longdraft.Engine:
    """A model whose tokenizer has two ids more than the model has rows, as Gemma 3 1B has one."""
    folder = tmp_path_factory.mktemp("lacking")
    make_checkpoint(folder, vocab_size=258)
    tokenizer = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.add_tokens(["ab"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return longdraft.load(str(folder), drafter="plain")


@pytest.mark.parametrize("prompt, token", [("So <image> it", "<image>"), ("<image>", "<image>"), ("cab", "ab")])
def test_a_prompt_with_a_token_that_the_model_has_no_row_for_is_refused(lacking, prompt, token):
    with pytest.raises(UsageError, match=f"allowed: 0 to 257; the model has no row for the token '{token}'"):
        lacking.generate(prompt)


@pytest.mark.parametrize("settings", [
    {}, {"banned_strings": ["ab", "<image>"]}, {"stop": ["ab", "<image>"]}, {"xtc_probability": 0.5},
    {"dry_multiplier": 0.8, "dry_sequence_breakers": ["ab", "a"]}, {"structured_outputs": {"regex": "ab+c"}},
    {"structured_outputs": {"regex": "<image>"}}], ids=str)
def test_a_model_without_rows_for_a_few_tokens_writes_with_every_setting(lacking, settings):
    generation = lacking.generate("So it", lacking.params(max_new_tokens=12, seed=1, **settings))
    tokens = [token for event in generation for token in event.tokens]
    assert tokens and max(tokens) < 258


def test_training_refuses_tokens_without_a_row_and_a_corpus_leaves_them_out(lacking, tmp_path):
    folder = lacking.loaded.files.folder
    with pytest.raises(UsageError, match="a token id of the data is 259; allowed: 0 to 257"):
        list(tokenise(iter(["a cab"]), load_tokenizer(folder, 258), None, 258))
    (tmp_path / "corpus.txt").write_text("a cab")
    engine = lacking.with_drafter("suffix", {"corpus": str(tmp_path)})
    params = lacking.params(max_new_tokens=20, seed=1)
    texts = [[token for event in each.generate("a c", params) for token in event.tokens] for each in (engine, lacking)]
    assert texts[0] == texts[1]
    assert max(Corpora(engine.tokenizer.encode, 258)._tokens(tmp_path / "corpus.txt")) < 258


@pytest.mark.parametrize("missing, is_refused", [(11, False), (12, True), (500, True)])
def test_a_model_that_lacks_ids_by_the_dozen_belongs_to_another_tokenizer(missing, is_refused):
    vocabulary = {f"t{i}": i for i in range(600)}
    if is_refused:
        with pytest.raises(ModelError, match=f"which lacks {missing} of them"):
            require_ids_in_vocabulary(vocabulary, 600 - missing, Path("x"))
    else:
        require_ids_in_vocabulary(vocabulary, 600 - missing, Path("x"))


# How prompts begin

def test_a_prompt_that_begins_with_the_text_that_the_tokenizer_adds_gets_one_warning(tmp_path, caplog):
    make_checkpoint(tmp_path)
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    with_files(tmp_path, {"post_processor": TEMPLATE | dict(single=single, special_tokens={
        "<s>": dict(id="<s>", ids=[0], tokens=["<s>"])})})
    engine = longdraft.load(str(tmp_path), drafter="plain")
    assert engine.tokenizer.begin_id == 0 and engine.encode("<s>So") == [0, *engine.encode("<s>So")[1:]]
    assert len(caplog.messages) == 1 and "begins with '<s>', which the tokenizer adds to every prompt" in caplog.text
    engine.encode("<s>It")
    engine.encode("So <s>")
    engine.encode([0, 0, 5])  # ids are as the caller wants them
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("start", ["", "<s>", "</s>", "a"])
def test_a_tokenizer_that_adds_nothing_warns_of_nothing(lacking, start, caplog):
    assert lacking.tokenizer.begin_id is None
    lacking.encode(start + "So")
    assert not caplog.messages


def test_a_byte_order_mark_is_no_text(tmp_path):
    """In each file of text that longdraft reads."""
    content = "\ufeffIt was"
    for name in ("prompt.txt", "keys", "chat_template.jinja", "rows.jsonl"):
        (tmp_path / name).write_text(content if name != "rows.jsonl" else '\ufeff{"text": "It was"}', encoding="utf-8")
    assert read_prompt(None, str(tmp_path / "prompt.txt")) == "It was"
    assert list(read_documents((str(tmp_path / "prompt.txt"), str(tmp_path / "rows.jsonl")), "text")) == ["It was"] * 2
    (tmp_path / "keys").write_text("\ufeffsecret-key", encoding="utf-8")
    assert list(read_keys((), tmp_path / "keys", "NO_SUCH_VARIABLE")) == ["secret-key"]
    template = ChatTemplate.find(with_files(tmp_path))
    assert template is not None and template.source == "It was"
    assert "\ufeff" in read_prompt("\ufeffas given", None)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "prompt.txt").rename(tmp_path / "corpus" / "a.txt")
    corpora = Corpora(lambda text: [ord(letter) for letter in text], 1 << 20)
    assert corpora._tokens(tmp_path / "corpus" / "a.txt")[0] == ord("I")
