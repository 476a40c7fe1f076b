"""Snapshots: a resumed text reads its rows from files; damage of any kind costs time and never changes the text."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import longdraft
from helpers.checkpoints import make_checkpoint, make_glide, make_heads
from helpers.eagle import make_eagle
from helpers.equality import DRAFTERS, prompt_of
from helpers.extents import extent
from helpers.families import make_hybrid
from helpers.processes import Fork, run_code, wait_for
from longdraft.errors import UsageError
from longdraft.journal import snapshot
from longdraft.journal.format import FILE
from longdraft.journal.snapshot_folder import snapshot_bytes
from longdraft.journal.writer import remove_journal
from longdraft.kernels.interface import STORE_BLOCK
from longdraft.request.sampling_params import SamplingParams

PROMPT = prompt_of(2 * STORE_BLOCK + 100)
PARAMS = SamplingParams(max_new_tokens=1000, seed=5, min_p=0.1, ignore_eos=True, on_loop="off")
ROWS = 2 * STORE_BLOCK + 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("model") / "m"
    base = make_checkpoint(where, num_key_value_heads=1, max_position_embeddings=16384)
    make_heads(where / "heads", base)
    make_glide(where / "glide", where)
    make_eagle(where / "eagle")
    return where


@pytest.fixture(scope="module")
def engine(folder) -> longdraft.Engine:
    return longdraft.load(str(folder), drafter="plain", dtype="bfloat16", cache_ram=0)


@pytest.fixture(scope="module")
def whole(engine) -> list[int]:
    generation = engine.generate(PROMPT, PARAMS)
    list(generation)
    return generation.tokens.tolist()


@pytest.fixture(scope="module")
def cut(engine, tmp_path_factory) -> Path:
    """A journal of a text that was ended after 2 blocks and 700 rows, with its snapshot."""
    where = tmp_path_factory.mktemp("cut")
    with engine.generate(PROMPT, PARAMS, journal=where, snapshot="always") as generation:
        while len(generation.step.context) <= ROWS:
            next(generation)
    return where


@pytest.fixture
def journal(cut, tmp_path) -> Path:
    """A copy of it."""
    shutil.copytree(cut, tmp_path / "j")
    return tmp_path / "j"


def resumed(engine, journal, whole, at_least: int = ROWS - len(PROMPT)) -> int:
    """Resume for 20 tokens, which must be those of the uncut text; returns the number of restored rows."""
    generation = engine.resume(journal)
    found: list[int] = []
    for event in generation:
        found += event.tokens
        if len(found) >= generation.num_resumed + 20:
            break
    generation._journal.snapshot = None  # the next test reads the same files
    restored = generation.stats()["restored_tokens"]
    generation.close()
    assert found == whole[: len(found)] and len(found) > at_least
    return restored


def test_a_snapshot_has_the_rows_of_the_text(engine, cut):
    index = snapshot.read_index(cut / "kv")
    assert [(block.block, block.rows) for block in index.values()] == [
        (0, STORE_BLOCK), (1, STORE_BLOCK), (2, ROWS - 2 * STORE_BLOCK)]
    assert sorted(path.name for path in (cut / "kv").iterdir()) == [
        "00000.safetensors", "00001.safetensors", "00002.safetensors", "index"]
    assert snapshot_bytes(cut) >= ROWS * engine.model.cache_bytes_per_token


def test_the_rows_are_read_and_the_text_is_the_uncut_one(engine, journal, whole):
    assert resumed(engine, journal, whole) == ROWS - 128


@pytest.mark.full
@pytest.mark.parametrize("drafter", ["auto", "tokenswift", "magicdec, streaming", "glide", "eagle", "triforce, n-grams",
                                     "medusa", "ngram", "suffix"])
def test_every_kind_of_drafter_goes_on_from_a_snapshot(folder, journal, whole, drafter):
    name, options = DRAFTERS.get(drafter, (drafter, {}))
    other = longdraft.load(str(folder), drafter=name, drafter_options=options, dtype="bfloat16", cache_ram=0)
    assert resumed(other, journal, whole) == ROWS - 128


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> tuple[Path, Path, list[int]]:
    """A hybrid, the journal of a text of it that was ended after 2 blocks and 700 rows, and the whole text."""
    model, where = tmp_path_factory.mktemp("hybrid"), tmp_path_factory.mktemp("hybrid-cut")
    make_hybrid(model, max_position_embeddings=16384)
    engine = longdraft.load(str(model), drafter="plain", cache_ram=0)
    with engine.generate(PROMPT, PARAMS, journal=where, snapshot="always") as generation:
        while len(generation.step.context) <= ROWS:
            next(generation)
    whole = engine.generate(PROMPT, replace(PARAMS, max_new_tokens=640))
    list(whole)
    return model, where, whole.tokens.tolist()


@pytest.mark.full
@pytest.mark.parametrize("drafter", ["plain", "magicdec", "suffix"])
@pytest.mark.parametrize("cache_ram", [0, 100])
def test_a_text_of_a_hybrid_goes_on_from_the_states_of_its_last_full_block(hybrid, tmp_path, drafter, cache_ram):
    model, cut, whole = hybrid
    shutil.copytree(cut, tmp_path / "j")
    assert len(snapshot.read_index(cut / "kv")) == 2
    engine = longdraft.load(str(model), drafter=drafter, cache_ram=cache_ram)
    assert resumed(engine, tmp_path / "j", whole) == 2 * STORE_BLOCK


@pytest.mark.parametrize("part", extent(["matrix", "history"], ["matrix"]))
def test_wrong_states_of_a_snapshot_cost_time_only(hybrid, tmp_path, part, monkeypatch):
    model, cut, whole = hybrid
    shutil.copytree(cut, tmp_path / "j")
    read = snapshot.read_block

    def lying(*given):
        found = read(*given)
        for state in found.states:
            getattr(state, part).mul_(-8)
        return found

    monkeypatch.setattr(snapshot, "read_block", lying)
    engine = longdraft.load(str(model), drafter="plain", cache_ram=100)
    assert resumed(engine, tmp_path / "j", whole) == 0
    other = engine.generate(PROMPT, replace(PARAMS, max_new_tokens=30))  # nor do they reach other texts
    list(other)
    assert other.tokens.tolist() == whole[:30] and other.reuse.cached_tokens == 2 * STORE_BLOCK - 16


def test_a_finished_text_has_no_snapshot(engine, journal, whole):
    generation = engine.resume(journal)
    list(generation)
    assert generation.tokens.tolist() == whole and os.listdir(journal) == [FILE]


def test_a_snapshot_grows_when_the_text_is_resumed_and_cut_again(engine, journal, whole):
    with engine.resume(journal, snapshot="always") as generation:
        for _ in range(50):
            next(generation)
    last = snapshot.read_index(journal / "kv")[2]
    assert last.rows > ROWS - 2 * STORE_BLOCK
    (journal / "kv" / "00002.safetensors").unlink()
    generation = engine.resume(journal)
    found = [token for _ in range(60) for token in next(generation).tokens]
    assert found == whole[: len(found)] and generation.stats()["restored_tokens"] == 2 * STORE_BLOCK


def test_removing_a_journal_removes_its_snapshot(journal):
    (journal / "kv" / "00003.safetensors.partial").write_bytes(b"x")
    remove_journal(journal)
    assert not journal.exists()


# Damage


@pytest.mark.full
def test_an_index_cut_at_any_byte(engine, journal, whole):
    """Blocks of complete lines are found. (Reading the index is what differs; the text is checked at some places.)"""
    content = (journal / "kv" / "index").read_bytes()
    ends = [place + 1 for place, byte in enumerate(content) if byte == 10]
    for size in range(len(content) + 1):
        (journal / "kv" / "index").write_bytes(content[:size])
        assert len(snapshot.read_index(journal / "kv")) == sum(end <= size for end in ends)
    for size, expected in ((0, 0), (ends[0] - 1, 0), (ends[0], STORE_BLOCK), (ends[1] + 9, 2 * STORE_BLOCK)):
        (journal / "kv" / "index").write_bytes(content[:size])
        assert resumed(engine, journal, whole) == expected


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes_of_a_block(engine, journal, whole, seed):
    pick = random.Random(seed)
    block = pick.randrange(3)
    path = journal / "kv" / f"{block:05}.safetensors"
    content = bytearray(path.read_bytes())
    content[pick.randrange(len(content))] ^= 1 << pick.randrange(8)
    path.write_bytes(content)
    assert resumed(engine, journal, whole) == block * STORE_BLOCK


@pytest.mark.full
@pytest.mark.parametrize("damage, expected", [
    ("missing first", 0), ("missing second", STORE_BLOCK), ("swapped", 0), ("empty", STORE_BLOCK),
    ("short", STORE_BLOCK),
    ("a folder", STORE_BLOCK), ("no index", 0), ("an index of other things", 0), ("a huge index", 0)])
def test_missing_and_swapped_files(engine, journal, whole, damage, expected):
    first, second = journal / "kv" / "00000.safetensors", journal / "kv" / "00001.safetensors"
    index = journal / "kv" / "index"
    if damage == "missing first":
        first.unlink()
    elif damage == "missing second":
        second.unlink()
    elif damage == "swapped":
        contents = first.read_bytes(), second.read_bytes()
        second.write_bytes(contents[0])
        first.write_bytes(contents[1])
    elif damage in ("empty", "short"):
        second.write_bytes(b"" if damage == "empty" else second.read_bytes()[:-1])
    elif damage == "a folder":
        second.unlink()
        second.mkdir()
    elif damage == "no index":
        index.unlink()
    else:
        index.write_bytes(b'[1]\n{"block": {}}\n' if damage == "an index of other things" else b"[" * 100_000 + b"\n")
    assert resumed(engine, journal, whole) == expected


def rewritten(journal: Path, **changes) -> None:
    """The same blocks with other rows, and an index that names them."""
    from safetensors.torch import load, save

    lines = []
    for block in snapshot.read_index(journal / "kv").values():
        path = journal / "kv" / f"{block.block:05}.safetensors"
        tensors = load(path.read_bytes())
        data = save({name: changes["of"](x) for name, x in tensors.items()})
        path.write_bytes(data)
        digest = snapshot.hashlib.blake2b(data, digest_size=32).hexdigest()
        lines.append(json.dumps(block._replace(nbytes=len(data), blake2b=digest)._asdict()) + "\n")
    (journal / "kv" / "index").write_text("".join(lines))


@pytest.mark.parametrize("number", [math.nan, *(pytest.param(number, marks=pytest.mark.full)
                                                for number in (math.inf, -math.inf))])
def test_rows_that_are_not_finite_are_computed_anew(engine, journal, whole, number):
    """Whether or not the hashes fit: a forged block must not make each resume fail."""
    def spoiled(x):
        x = x.clone()
        x.view(-1)[7] = number
        return x

    rewritten(journal, of=spoiled)
    assert resumed(engine, journal, whole) == 0


@pytest.mark.parametrize("name, expected", [("index", 0), ("00001.safetensors", STORE_BLOCK)])
@pytest.mark.parametrize("kind", ["pipe", *(pytest.param(kind, marks=pytest.mark.full)
                                            for kind in ("endless device", "link to a huge file"))])
def test_a_pipe_or_an_endless_file_in_a_snapshot_does_not_block(engine, journal, whole, tmp_path, name, expected, kind):
    path = journal / "kv" / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless device":
        path.symlink_to("/dev/zero")
    else:
        with (tmp_path / "huge").open("wb") as file:
            file.truncate(1 << 40)
        path.symlink_to(tmp_path / "huge")
    assert resumed(engine, journal, whole) == expected


def test_a_link_to_a_models_folder_loses_no_file_of_the_model(journal, tmp_path):
    shutil.rmtree(journal / "kv")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model-00001.safetensors").write_bytes(b"weights")
    (journal / "kv").symlink_to(tmp_path / "model")
    remove_journal(journal)
    assert (tmp_path / "model" / "model-00001.safetensors").exists()


def test_rows_of_another_machine_are_found_by_computing_the_last_ones(engine, journal, whole, caplog):
    """The hashes fit, the last bit of each number does not: the snapshot is discarded with a warning."""
    rewritten(journal, of=lambda x: (x.view(torch.int16) ^ 1).view(torch.bfloat16))
    assert resumed(engine, journal, whole) == 0
    assert "has other rows than this machine computes" in caplog.text and not (journal / "kv").exists()


def test_a_discarded_snapshot_and_the_prefix_tree(folder, journal, whole):
    """The tree has the beginning of the text. It is not put after rows of the snapshot that was discarded."""
    with_tree = longdraft.load(str(folder), drafter="plain", dtype="bfloat16", cache_ram=50)
    list(with_tree.generate(PROMPT[:600], SamplingParams(max_new_tokens=2)))
    rewritten(journal, of=lambda x: (x.view(torch.int16) ^ 1).view(torch.bfloat16))
    assert resumed(with_tree, journal, whole) == 0
    generation = with_tree.resume(journal)
    assert [token for event in generation for token in event.tokens] == whole
    assert generation.reuse.cached_tokens > 600


@pytest.mark.full
@pytest.mark.parametrize("of", [lambda x: x.float(), lambda x: x[:1], lambda x: x[:, :, :9]],
                         ids=["dtype", "layers", "rows"])
def test_blocks_of_other_shapes_are_not_used(engine, journal, whole, of):
    rewritten(journal, of=lambda x: of(x).contiguous())
    assert resumed(engine, journal, whole) == 0


@pytest.mark.full
def test_blocks_of_another_model_or_text_are_not_used(engine, journal, whole, tmp_path):
    other = make_checkpoint(tmp_path / "other", num_key_value_heads=1, max_position_embeddings=16384, seed=4)
    assert other is not None
    stranger = longdraft.load(str(tmp_path / "other"), drafter="plain", dtype="bfloat16", cache_ram=0)
    for name, writer, prompt in (("model", stranger, PROMPT), ("text", engine, prompt_of(ROWS, seed=9))):
        with writer.generate(prompt, PARAMS, journal=tmp_path / name, snapshot="always") as generation:
            next(generation)
        shutil.rmtree(journal / "kv")
        shutil.copytree(tmp_path / name / "kv", journal / "kv")
        assert resumed(engine, journal, whole) == 0


def test_a_full_disk_ends_the_snapshot_and_not_the_text(engine, whole, tmp_path, monkeypatch, caplog):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(snapshot, "write_whole", full)
    with engine.generate(PROMPT, PARAMS, journal=tmp_path / "j", snapshot="always") as generation:
        found = [token for _ in range(40) for token in next(generation).tokens]
    assert "No space left on device; resuming will read more of the text again" in caplog.text
    assert found == whole[: len(found)] and not list((tmp_path / "j" / "kv").glob("*.safetensors*"))
    monkeypatch.undo()
    more = [token for event in engine.resume(tmp_path / "j") for token in event.tokens]
    assert more == whole


@pytest.mark.full
def test_the_bound_limits_the_blocks(engine, tmp_path, monkeypatch):
    bytes_of_block = STORE_BLOCK * engine.model.cache_bytes_per_token
    for gib, expected in ((0, 0), (1.5 * bytes_of_block / 2**30, 1)):
        where = tmp_path / str(expected)
        with engine.generate(PROMPT, PARAMS, journal=where, snapshot="always", snapshot_max=gib) as generation:
            next(generation)
        assert len(snapshot.read_index(where / "kv")) == expected
    monkeypatch.setattr(snapshot, "_DISK_FLOOR", 1 << 60)
    with engine.generate(PROMPT, PARAMS, journal=tmp_path / "floor", snapshot="always") as generation:
        next(generation)
    assert not snapshot.read_index(tmp_path / "floor" / "kv")


def test_short_texts_and_auto_write_nothing(engine, tmp_path):
    for name, prompt, mode in (("short", PROMPT[:400], "always"), ("auto", PROMPT, "auto"), ("never", PROMPT, "never")):
        with engine.generate(prompt, PARAMS, journal=tmp_path / name, snapshot=mode) as generation:
            next(generation)
        assert os.listdir(tmp_path / name) == [FILE]


def test_wrong_options_are_refused_before_a_journal_exists(engine, tmp_path):
    for options, message in ((dict(snapshot="often"), "snapshot is 'often'; allowed: auto, never or always"),
                             (dict(snapshot_max=-1), "snapshot_max is -1; allowed: 0 to 1048576 GiB")):
        with pytest.raises(UsageError, match=message):
            engine.generate(PROMPT, PARAMS, journal=tmp_path / "j", **options)
        with pytest.raises(UsageError, match=message):
            engine.batch().add(PROMPT, PARAMS, journal=tmp_path / "j", **options)
    assert not (tmp_path / "j").exists()


@pytest.mark.full
def test_kill_9_while_blocks_are_written(folder, engine, whole, tmp_path):
    """Whole blocks remain, and the text goes on."""
    code = f"""
import sys, longdraft
from longdraft.request.sampling_params import SamplingParams
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
from helpers.equality import prompt_of
engine = longdraft.load({str(folder)!r}, drafter="plain", dtype="bfloat16", threads=1)
for event in engine.generate(prompt_of({len(PROMPT)}), {PARAMS!r}, journal=sys.argv[1], snapshot="always"):
    print("step", flush=True)
"""
    for blocks in (0, 2):  # killed when so many are complete
        where = tmp_path / str(blocks)
        child = Fork(tmp_path / f"process-{blocks}", run_code, code, where)
        wait_for(lambda child=child: child.stdout, 60)
        wait_for(lambda where=where, blocks=blocks: len(snapshot.read_index(where / "kv")) >= blocks)
        child.kill(signal.SIGKILL)
        child.wait()
        assert resumed(engine, where, whole, at_least=0) >= min(blocks, 1) * STORE_BLOCK
