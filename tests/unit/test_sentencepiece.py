"""`tokenizer.model`: the ids and the texts are those of the SentencePiece library."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import longdraft
from helpers.checkpoints import make_checkpoint
from helpers.sentencepiece_files import PIECES, SPACE, field, model_file, write
from longdraft.__main__ import run
from longdraft.errors import ModelError, UsageError
from longdraft.text.tokenizer import Tokenizer

# Text -> pieces, as `sentencepiece` 0.2.3 cuts it with this file.
ENCODED: dict[str, list[str]] = {
    '': [],
    'the he': ['\u2581the', '\u2581', 'he'],
    '  the': ['\u2581\u2581', '\u2581the'],
    ' and  the    in': ['\u2581', '\u2581and', '\u2581', '\u2581the', '\u2581\u2581\u2581\u2581', 'in'],
    '\tat\n': ['\u2581', '<0x09>', 'at', '<0x0A>'],
    '\xe9t\xe9': ['\u2581', '<0xC3>', '<0xA9>', 't', '<0xC3>', '<0xA9>'],
    'reading the wand': ['\u2581', 're', 'a', 'd', 'ing', '\u2581the', '\u2581w', 'a', 'nd'],
    '    ': ['\u2581\u2581\u2581\u2581', '\u2581'],
    'a\u2581b': ['\u2581a', '\u2581', '<0x62>'],
    '\u2603x': ['\u2581', '<0xE2>', '<0x98>', '<0x83>', '<0x78>'],
    '     at': ['\u2581\u2581\u2581\u2581', '\u2581', '\u2581a', 't'],
}


def test_texts_are_cut_as_by_the_library(tmp_path):
    tokenizer = Tokenizer(write(tmp_path))
    for text, pieces in ENCODED.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert [tokenizer.letters(i) for i in ids] == pieces, text
        assert tokenizer.decode(ids) == text.replace(SPACE, " ")


def test_texts_begin_and_end_as_the_configuration_says(tmp_path):
    assert Tokenizer(write(tmp_path / "a")).encode("he")[0] == 1
    assert Tokenizer(write(tmp_path / "b", add_bos_token=False, add_eos_token=True)).encode("he")[-1] == 2
    other = Tokenizer(write(tmp_path / "c", bos_token={"content": "</s>"}))
    assert other.encode("he")[0] == 2


def test_without_a_prefix_no_space_is_added(tmp_path):
    tokenizer = Tokenizer(write(tmp_path, model_file(normalizer={3: 0})))
    ids = tokenizer.encode("the he", add_special_tokens=False)
    assert [tokenizer.letters(i) for i in ids] == ["t", "he", SPACE, "he"]
    assert tokenizer.decode(ids) == "the he"


@pytest.mark.parametrize("legacy, pieces", [(True, [f"{SPACE}the", "<x>", SPACE, "he"]),
                                            (False, [f"{SPACE}the", "<x>", "he"])])
def test_after_a_special_token_a_space_is_added_in_legacy_models_only(tmp_path, legacy, pieces):
    count = len(PIECES)
    folder = write(tmp_path, legacy=legacy, add_bos_token=False,
                   added_tokens_decoder={str(count): {"content": "<x>", "special": True}})
    tokenizer = Tokenizer(folder)
    assert [tokenizer.letters(i) for i in tokenizer.encode("the<x>he")] == pieces
    assert tokenizer.is_silent(count) and tokenizer.size == count + 1


@pytest.mark.parametrize("content, message", [
    (b"", "it has no pieces, or one twice"),
    (model_file([*PIECES, PIECES[5]]), "it has no pieces, or one twice"),
    (model_file(trainer={3: 1}), r"its model type is 1; supported: 2 \(byte-pair encoding\)"),
    (model_file(normalizer={2: b"map"}), "normalises characters or removes spaces, which is not supported"),
    (model_file(normalizer={4: 1}), "normalises characters or removes spaces, which is not supported"),
    (model_file()[:-3], "a field reaches beyond its end"),
    (field(1, field(1, b"\xff")), "can't decode byte"),
    (field(1, 7), "a number is where a message must be"),
    (field(1, field(3, 9)), "a piece is damaged"),
    (b"\xff" * 20, "a number has more than ten bytes"),
])
def test_a_damaged_file_gets_one_clear_line(tmp_path, content, message):
    with pytest.raises(ModelError, match=f"is not a readable SentencePiece model: .*{message}") as caught:
        Tokenizer(write(tmp_path, content))
    assert "\n" not in str(caught.value)


@settings(max_examples=150, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_file_with_changed_bytes_is_read_or_refused_in_one_line(tmp_path, data):
    content = bytearray(model_file(PIECES[:3] + PIECES[257:]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        new = data.draw(st.binary(min_size=1, max_size=8))
        content[at : at + len(new)] = new
    refused = ""
    try:
        Tokenizer(write(tmp_path, bytes(content))).encode("the he")
    except ModelError as error:
        refused = str(error)
    assert "\n" not in refused


def test_an_added_token_with_a_gap_before_its_id_is_refused(tmp_path):
    (write(tmp_path) / "added_tokens.json").write_text(json.dumps({"<pad>": 999}))
    with pytest.raises(ModelError, match="'<pad>' has the id 999, which does not follow the others"):
        Tokenizer(tmp_path)


def test_another_tokenizer_can_be_chosen(tmp_path, capfd):
    make_checkpoint(tmp_path / "model", vocab_size=len(PIECES))
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="give another tokenizer with --tokenizer"):
        longdraft.load(str(tmp_path / "model"))
    folder = write(tmp_path / "words")
    engine = longdraft.load(str(tmp_path / "model"), tokenizer=str(folder))
    assert engine.encode("the he") == Tokenizer(folder).encode("the he")
    arguments = ["--max-new-tokens", "3", "--seed", "1", "--tokenizer", str(folder)]
    journal = tmp_path / "journal"
    model = ["--model", str(tmp_path / "model")]
    assert run(["generate", "the he", *model, "--journal", str(journal), *arguments]) == 0
    assert run(["resume", str(journal), "--tokenizer", str(folder)]) == 0
    assert run(["generate", "the", *model, "--tokenizer", str(tmp_path), *arguments[:4]]) == 2
    assert "tokenizer.json is missing" in capfd.readouterr().err


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    make_checkpoint(tmp_path / "model", vocab_size=270)
    with pytest.raises((ModelError, UsageError), match="has ids up to"):
        longdraft.load(str(tmp_path / "model"), tokenizer=str(write(tmp_path / "words")))
