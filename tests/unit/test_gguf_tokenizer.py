"""Tokenizers in the metadata of GGUF files."""

from __future__ import annotations

import pytest

from helpers.gguf_files import tokenizer_values, write_gguf
from helpers.sentencepiece_files import model_file
from longdraft.checkpoint import hub
from longdraft.checkpoint.gguf.container import open_gguf
from longdraft.checkpoint.gguf.metadata import config_of
from longdraft.errors import ModelError
from longdraft.text.tokenizer import Tokenizer


def test_a_byte_level_tokenizer_is_that_of_tokenizer_json(tmp_path):
    """The bundled model's, with the regular expressions of Qwen and of GPT-2."""
    source = hub.resolve("novelist")
    for pre in ("qwen2", "gpt-2"):
        write_gguf(tmp_path / f"{pre}.gguf", tokenizer_values(source, pre) | {"general.architecture": "llama"}, {})
    ours, theirs = Tokenizer(tmp_path / "gpt-2.gguf"), Tokenizer(source)
    assert ours.vocabulary() == theirs.vocabulary()
    texts = ["It was 1849,  and the  door's ajar.\n\n\tHe\u2019d gone", "caf\u00e9 \N{SNOWMAN}", " ", "x" * 50,
             "</s> a"]
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == text.replace("</s>", "")
        assert Tokenizer(tmp_path / "qwen2.gguf").decode(ids) == ours.decode(ids)
    assert ours.encode("in 1849") == theirs.encode("in 1849", add_special_tokens=False)
    assert ours.sha256 == Tokenizer(tmp_path / "gpt-2.gguf").sha256 != Tokenizer(tmp_path / "qwen2.gguf").sha256


@pytest.mark.parametrize("name, parts", [
    ("deepseek-coder", ["it", "'", "s", " ", "1", "2", "3", "4", " at", "\n", " ok", "!?", "\n"]),
    ("minicpm5", ["it", "'s", " ", "123", "4", " at", "\n", " ok", "!?\n"]),
    ("seed-coder", ["it", "'s", " ", "1", "2", "3", "4", " at", "\n", " ok", "!?", "\n"]),
])
def test_a_pre_tokenizer_cuts_what_each_of_its_regular_expressions_left_over(tmp_path, name, parts):
    values = tokenizer_values(hub.resolve("novelist"), name) | {"general.architecture": "llama"}
    write_gguf(tmp_path / "model.gguf", values, {})
    found = Tokenizer(tmp_path / "model.gguf")._tokenizer.pre_tokenizer.pre_tokenize_str("it's 1234 at\n ok!?\n")
    assert [part.replace("\u0120", " ").replace("\u010a", "\n") for part, _ in found] == parts


PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((f"<0x{i:02X}>", 0.0, 6) for i in range(256)),
          ("\u2581\u2581", -1e9, 1), ("\u2581a", -1.0, 1), ("ab", -2.0, 1), ("\u2581ab", -3.0, 1), ("<x>", 0.0, 4),
          ("\u2581", -4.0, 1), ("a", -5.0, 1), ("b", -6.0, 1)]


def sentencepiece_values(**more):
    tokens, scores, kinds = (list(part) for part in zip(*PIECES, strict=True))
    return {"general.architecture": "llama", "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2} | {f"tokenizer.ggml.{name}": content for name, content in more.items()}


@pytest.mark.parametrize("text, tokens, more", [
    ("ab", ["<s>", "\u2581ab"], {}),  # \u2581a has the best score, then \u2581ab
    ("ab", ["ab"], dict(add_bos_token=False, add_space_prefix=False)),
    (" a", ["<s>", "\u2581", "\u2581a"], {}),  # the double space has a small id and the worst score
    ("a  b", ["<s>", "\u2581a", "\u2581\u2581", "b"], {}),
    ("a<x>b</s>", ["<s>", "\u2581a", "<x>", "\u2581", "b", "</s>"], {}),
    ("\u00e9", ["<s>", "\u2581", "<0xC3>", "<0xA9>", "</s>"], dict(add_eos_token=True)),
])
def test_pieces_are_joined_by_their_scores(tmp_path, text, tokens, more):
    write_gguf(tmp_path / "model.gguf", sentencepiece_values(**more), {})
    tokenizer = Tokenizer(tmp_path / "model.gguf")
    assert [tokenizer.letters(i) for i in tokenizer.encode(text)] == tokens
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("</s>", "").replace("<x>b", "<x> b")


@pytest.mark.parametrize("more, message", [
    (dict(model="t5"), "tokenizer.ggml.model is 't5'; supported: llama"),
    (dict(model="gpt2"), "the pre-tokenizer, is None; supported: llama-bpe"),
    (dict(model="gpt2", pre="deepseek-llm"), "the pre-tokenizer, is 'deepseek-llm'; supported"),
    (dict(model="gpt2", pre="gpt-2"), "tokenizer.ggml.merges is missing"),
    (dict(model="gpt2", pre="gpt-2", merges=["a b", "b \u2581"]), "the merge 'b \u2581' does not join two tokens"),
    (dict(scores=[1.0]), "tokenizer.ggml.scores has 1 values for"),
    (dict(tokens=["a", "b", "a"]), "tokenizer.ggml.scores has 267 values for 3 tokens"),
    (dict(tokens=["a", "[PAD2]", "", "b"], scores=[0.0] * 4, token_type=[1] * 4), "the names of its padding"),
    (dict(tokens=[1, 2]), "allowed: 1 to"),
    (dict(bos_token_id=10**6), "tokenizer.ggml.bos_token_id is 1000000; allowed: 0 to"),
    (dict(add_bos_token=3), "tokenizer.ggml.add_bos_token is 3; allowed: true or false"),
])
def test_a_tokenizer_that_cannot_be_made_is_one_clear_line(tmp_path, more, message):
    write_gguf(tmp_path / "model.gguf", sentencepiece_values(**more), {})
    with pytest.raises(ModelError, match=message):
        Tokenizer(tmp_path / "model.gguf")


def test_a_file_with_a_vocabulary_alone_is_no_model(tmp_path):
    write_gguf(tmp_path / "model.gguf", sentencepiece_values(), {})
    with pytest.raises(ModelError, match="a file with a vocabulary alone is not a model"):
        config_of(open_gguf(tmp_path / "model.gguf"))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("twins", [["a"], ["ab", "b", "<x>"], ["</s>", "ab"]], ids=str)
def test_of_tokens_with_equal_texts_the_last_is_written_and_each_is_read(tmp_path, kind, twins):
    """Official files of Gemma 4 have three such tokens."""
    values = sentencepiece_values(add_bos_token=False, add_space_prefix=False) if kind == "llama" else tokenizer_values(
        hub.resolve("novelist")) | {"general.architecture": "llama"}
    tokens = [str(token) for token in values["tokenizer.ggml.tokens"]]
    twins = [twin if twin in tokens else "a" for twin in twins]
    more = {"tokenizer.ggml.tokens": [*tokens, *twins]}
    for name, value in (("scores", -7.0), ("token_type", 1)):
        if (key := f"tokenizer.ggml.{name}") in values:
            kinds = [values[key][tokens.index(twin)] if name == "token_type" else value for twin in twins]
            more[key] = [*(each.item() if hasattr(each, "item") else each for each in values[key]),
                         *(each.item() if hasattr(each, "item") else each for each in kinds)]
    for name, content in (("one", values), ("twins", values | more)):
        write_gguf(tmp_path / f"{name}.gguf", content, {})
    one, both = Tokenizer(tmp_path / "one.gguf"), Tokenizer(tmp_path / "twins.gguf")
    newest = {tokens.index(twin): len(tokens) + i for i, twin in enumerate(twins)}
    for text in ("ab", "a b", "abba <x> ab", "b</s>a"):
        ids = one.encode(text, add_special_tokens=False)
        assert both.encode(text, add_special_tokens=False) == [newest.get(i, i) for i in ids]
        assert both.decode(ids) == one.decode(ids) == both.decode([newest.get(i, i) for i in ids])
    for first, last in newest.items():
        assert both.letters(first) == both.letters(last) and both.is_silent(first) == both.is_silent(last)
        assert both.texts[first] == both.texts[last] == one.texts[first]


@pytest.mark.parametrize("pieces, message", [
    (["q" * length for length in range(1, 65)], ""),
    (["q" * length for length in range(1, 1026)], "it has a piece of 1,025 characters; allowed: 1,024"),
    (["q" * length for length in range(1, 1025)],
     "its pieces can be joined in ways of more than 16,777,216 characters"),
    (["q" * (1 << 23)], "it has a piece of 8,388,608 characters; allowed: 1,024"),
])
def test_pieces_that_are_joined_in_too_many_ways_are_refused_before_the_memory_is_taken(tmp_path, pieces, message):
    values = sentencepiece_values(tokens=pieces, scores=[0.0] * len(pieces), token_type=[1] * len(pieces),
                                  bos_token_id=0, eos_token_id=0)
    write_gguf(tmp_path / "model.gguf", values, {})
    (tmp_path / "tokenizer.model").write_bytes(model_file([(piece, 0.0, 1) for piece in pieces]))
    for path in (tmp_path / "model.gguf", tmp_path):
        if not message:
            assert Tokenizer(path).size == len(pieces)
            continue
        with pytest.raises(ModelError, match=message):
            Tokenizer(path)
