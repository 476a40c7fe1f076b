"""Training as published: schedules, documents, token ids, recipes, and models with their original files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from helpers import training
from helpers.checkpoints import make_checkpoint
from helpers.sentencepiece_files import original_files
from helpers.training import settings
from longdraft.errors import UsageError
from longdraft.train import data, data_files, job
from longdraft.train.loop import Position, learning_rate
from longdraft.train.presets import PRESETS
from longdraft.train.registry import TRAININGS
from longdraft.train.settings import HeadSettings

pytestmark = pytest.mark.full

base = pytest.fixture(scope="module")(training.alphabet)


def test_the_published_schedule_is_that_of_transformers():
    from transformers import get_cosine_schedule_with_warmup

    given = HeadSettings(data=("x.txt",), steps=200, warmup_steps=50, learning_rate=5e-3, schedule="warmup-cosine")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=5e-3)
    theirs = get_cosine_schedule_with_warmup(optimizer, 50, 200)
    for step in range(200):
        assert learning_rate(given, Position(step)) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()
    assert max(learning_rate(given, Position(step)) for step in range(200)) == 5e-3
    assert learning_rate(given, Position(200)) == 0


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, found in PRESETS.items() for name in found])
def test_every_recipe_has_settings_that_take_effect(kind, name):
    TRAININGS[kind].settings(**PRESETS[kind][name], data=("x.txt",)).require_effective()


def test_only_the_first_tokens_of_long_documents_are_used_and_no_more_are_read():
    read = []

    def documents():
        for length in (3, 9, 8, 2, 12, 20):
            read.append(length)
            yield np.arange(length, dtype=np.int32)

    found = list(data.limited(documents(), 8, 8, 3))
    assert [len(document) for document in found] == [8, 8, 8] and read == [3, 9, 8, 2, 12]
    assert len(list(data.limited(documents(), 0, 0, 0))) == 6


def save_dataset(folder, column, rows):
    """A folder like those of `Dataset.save_to_disk`, with two files."""
    import pyarrow

    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (rows[:1], rows[1:])):
        table = pyarrow.table({column: part, "other": [1] * len(part)})
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def test_token_ids_are_read_from_every_format(tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = [[1, 2, 3], [4], [5, 6]]
    save_dataset(tmp_path / "saved" / "train", "input_ids", rows)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    parquet.write_table(pyarrow.table({"input_ids": rows}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    for name in ("saved", "saved/train", "a.parquet", "b.jsonl"):
        found = list(data_files.read_documents([str(tmp_path / name)], "input_ids"))
        assert [document.tolist() for document in found] == rows and found[0].dtype == np.int32
    save_dataset(tmp_path / "texts", "text", ["one", "two"])
    assert list(data_files.read_documents([str(tmp_path / "texts")], "text")) == ["one", "two"]


@pytest.mark.parametrize(("content", "message"), [
    ('{"input_ids": [1, "a"]}', "not a list of token ids"), ('{"input_ids": [[1]]}', "not a list of token ids"),
    ('{"input_ids": [1.5]}', "not a list of token ids"), ('{"input_ids": [4294967296]}', "not a list of token ids")])
def test_faulty_token_ids_get_one_line(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        list(data_files.read_documents([str(tmp_path / "a.jsonl")], "input_ids"))
    assert "\n" not in str(caught.value)


def test_training_on_token_ids_is_training_on_their_text(base, tmp_path):
    tokenizer = data.load_tokenizer(base, 2**31)
    ids = tokenizer.encode((base.parent / "text.txt").read_text()).ids
    save_dataset(tmp_path / "ids", "input_ids", [ids, ids])
    given = settings(base, data=(str(tmp_path / "ids"),), text_column="input_ids", steps=3)
    result = job.train(given, tmp_path / "out")
    assert result.tokens == 3 * 2 * 64
    (tmp_path / "bad.jsonl").write_text(json.dumps({"input_ids": [10**6] * 200}))
    with pytest.raises(UsageError, match="a token id of the data is 1000000"):
        job.train(settings(base, data=(str(tmp_path / "bad.jsonl"),), text_column="input_ids"), tmp_path / "no")


def test_heads_are_trained_for_a_model_with_bin_weights_and_a_sentencepiece_tokenizer(tmp_path):
    """The layout of NousResearch/Yarn-Llama-2-7b-128k."""
    folder = original_files(make_checkpoint(tmp_path / "made"), tmp_path / "model")
    assert {path.suffix for path in folder.iterdir()} == {".bin", ".json", ".model"}
    (tmp_path / "text.txt").write_text("abc abd " * 400)
    given = settings(folder, data=(str(tmp_path / "text.txt"),), steps=2, kind="tokenswift")
    result = job.train(given, tmp_path / "out")
    assert result.step == 2
