"""A power cut loses any part of what was not synced: records of a batch job stay, and snapshots are true or unused.

After a power cut the disk has any subset of the sectors, truncations and names that were not synced (helpers/power.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.power import Disk, after_power_cut, power_cuts
from longdraft.batch import job_files, work_folder
from longdraft.batch.job_files import RecordFile
from longdraft.journal import snapshot
from longdraft.journal.snapshot import Block, BlockJob, SnapshotWriter, read_block, read_index
from longdraft.journal.snapshot_folder import FOLDER
from longdraft.system import files

pytestmark = pytest.mark.full

GOOD = {name: {"id": name, "text": name * 900} for name in "abcd"}  # longer than a sector
BAD = {"id": "b", "error": {"code": "timeout", "message": "x" * 700}}


def put(folder: Path, found: dict[str, bytes]) -> None:
    """Replace what is in the folder."""
    for path in folder.iterdir():
        path.unlink()
    for name, content in found.items():
        (folder / Path(name).name).write_bytes(content)


@pytest.fixture
def records_life(tmp_path) -> Disk:
    """Three records, one of them an error; then a run with --retry-errors, which writes that one and a further one."""
    disk, output = Disk(), tmp_path / "life" / "out.jsonl"
    with disk.under(files, job_files):
        with RecordFile(output, tmp_path) as records:
            for record in (GOOD["a"], BAD, GOOD["c"]):
                records.add(record)
                disk.confirm(record)
        with RecordFile(output, tmp_path, without_errors=True) as records:
            for record in (GOOD["b"], GOOD["d"]):
                records.add(record)
                disk.confirm(record)
    return disk


def test_a_record_that_was_added_survives_any_power_cut_and_the_job_goes_on(records_life, tmp_path):
    folder, output, torn = tmp_path / "left", tmp_path / "left" / "out.jsonl", 0
    folder.mkdir()
    for confirmed, found in power_cuts(records_life.operations):
        put(folder, found)
        before = output.stat().st_size if output.exists() else 0
        with RecordFile(output, tmp_path) as records:
            torn += output.stat().st_size < before
            assert records.done.keys() >= {record["id"] for record in confirmed if record != BAD}
            for record in GOOD.values():
                if record["id"] not in records.done:
                    records.add(record)
        lines = [json.loads(line) for line in output.read_bytes().splitlines()]
        assert sorted(line["id"] for line in lines) == list("abcd")
        assert all(line in (GOOD[line["id"]], BAD) for line in lines)
    assert torn > 10  # the power cuts did damage records


def test_a_job_that_a_power_cut_has_interrupted_at_its_beginning_can_be_continued(tmp_path):
    """Its description is whole, or not there."""
    disk, life, left = Disk(), tmp_path / "life" / "job.json", tmp_path / "left"
    with disk.under(files, work_folder):
        disk.confirm(work_folder.write_once(life, GOOD["a"]))
    left.mkdir()
    for confirmed, found in power_cuts(disk.operations):
        put(left, found)
        assert work_folder.write_once(left / "job.json", GOOD["b"]) in ([GOOD["a"]] if confirmed else GOOD.values())


def test_the_disk_of_these_tests_loses_what_was_not_synced(records_life):
    operations = records_life.operations
    first = next(i for i, each in enumerate(operations) if each.kind == "write")
    assert list(after_power_cut(operations[: first + 1], lambda: False).values()) == [b""]
    assert list(after_power_cut(operations[: first + 1], lambda: True).values()) == [operations[first].data]
    last = next(i for i, each in enumerate(operations) if each.kind == "rename")
    names = {Path(name).name for name in after_power_cut(operations[: last + 1], lambda: False)}
    assert names == {"out.jsonl"}, "the old file still has the name"


class Store:
    """Keys and values of one layer and head that tell block and row."""

    def __init__(self, block: int) -> None:
        self._k = torch.arange(64.0).reshape(1, 16, 4) + 1000 * block
        self.shape = (1, 4)

    def read(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = places[0]
        return self._k[:, rows], -self._k[:, rows]


def test_a_block_of_a_snapshot_is_the_true_one_or_unused_after_any_power_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_DISK_FLOOR", 0)
    disk, journal = Disk(), tmp_path / "life"
    journal.mkdir()
    written: list[Block] = []
    with disk.under(files):
        for blocks in ([(0, 16), (1, 4)], [(1, 16), (2, 9)]):  # the last block of the first run grows in the second
            writer = SnapshotWriter(journal, 1 << 30, written)
            for block, rows in blocks:
                writer.put(BlockJob(block, rows, f"{block}-{rows}", [Store(block)]))
            writer.close()
            written = list(read_index(journal / FOLDER).values())
            disk.confirm({block.block for block in written})
    folder, used = tmp_path / FOLDER, 0
    folder.mkdir()
    for confirmed, found in power_cuts(disk.operations):
        put(folder, found)
        good = set()
        for number, block in read_index(folder).items():
            assert block.chain == f"{number}-{block.rows}"
            tensors = read_block(folder, block, [(1, 4)], torch.float32, [])
            if tensors is not None:
                k, v = Store(number).read(torch.arange(block.rows).expand(1, -1))
                assert torch.equal(tensors[0][0], k) and torch.equal(tensors[1][0], v)
                good.add(number)
        kept = confirmed[-1] if confirmed else set()
        assert good >= (kept if kept != {0, 1} else {0})  # block 1 is replaced meanwhile
        used += len(good)
    assert used > 50
