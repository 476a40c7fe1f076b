"""This commit writes, hashes and launches what the golden record says (tests/golden_record.py). The record can fail.

    .venv/bin/python -m pytest tests/promise/test_golden_record.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import golden_record
from golden_record import Leaves, differences
from helpers import golden_texts
from longdraft import drafters
from longdraft.checkpoint.config_file import read_config
from longdraft.drafters import Resources
from longdraft.journal.config_hash import config_sha256
from longdraft.request.context import Context
from longdraft.request.tree import Tree
from longdraft.speculation.drafter import Drafter

RECORDED = golden_record.read()
# Kernels of this machine. A record of others is kept for the machines that have them.
VARIANTS = [pytest.param(name, marks=pytest.mark.skipif(
    ("families", name) not in {path[:2] for path in RECORDED},
    reason=f"no texts of {name} are recorded; `record` on a machine that has it adds them"))
    for name in golden_record.compiled_variants()]
needs_interpreter = pytest.mark.skipif(not golden_record.can_count_launches(),
                                       reason="launches are counted in Triton's interpreter")


def check(found: Leaves) -> None:
    assert found
    assert differences(RECORDED, found, golden_record.made_by()) == []


@pytest.fixture(scope="module")
def configurations(tmp_path_factory) -> Leaves:
    return dict(golden_record.configs(tmp_path_factory.mktemp("configs")))


def test_every_configuration_and_checkpoint_has_its_recorded_hash(configurations):
    check(configurations)
    assert configurations.keys() == {path for path in RECORDED if path[0] in ("configs", "weights")}


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_writes_the_recorded_text_with_the_recorded_drafts(variant, configurations, tmp_path):
    """A third of the drafters for each dtype; `compare` of the tool meets all."""
    check(configurations | dict(golden_record.families(tmp_path, [variant], False)))


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_bundled_models_write_the_recorded_texts_with_the_recorded_drafts(variant):
    check(dict(golden_record.bundled([variant], False)))


@pytest.mark.full
@needs_interpreter
def test_the_cuda_path_launches_what_is_recorded(tmp_path):
    check(dict(golden_record.launches(tmp_path)))


@pytest.mark.full
def test_on_the_reference_kernels_drafters_write_the_plain_text(tmp_path):
    """Its products are PyTorch's, whose bits differ between machines: nothing is recorded."""
    assert golden_record.reference_disagreements(tmp_path, ["llama", "qwen3_moe", "qwen3_5", "gemma3"]) == []


def test_every_kind_of_drafter_and_every_family_of_the_helpers_is_recorded():
    # Of `block`, tests/unit/test_block.py compares the texts of each kind of head.
    assert {"plain", *golden_texts.KINDS} == set(drafters.DRAFTERS) - {"block"}
    rows = {path[1:4] for path in RECORDED if path[0] == "families"}
    for variant in {variant for variant, _, _ in rows}:
        for dtype in golden_texts.DTYPES:
            assert {family for *kernels, family in rows if kernels == [variant, dtype]} == set(
                golden_texts.EVERY_FAMILY)


def test_any_three_turns_in_sequence_meet_every_drafter():
    for turn in range(4):
        met = [*golden_texts.drafters_of(turn, False), *golden_texts.drafters_of(turn + 1, False),
               *golden_texts.drafters_of(turn + 2, False)]
        assert sorted(met) == sorted(golden_texts.KINDS)


# The record can fail

VARIANT = "portable"
ROW = ("families", VARIANT, "float32", "llama")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    golden_texts.make_parts(tmp_path / "model", "llama")
    return tmp_path / "model"


def changed(folder: Path) -> list[str]:
    """The last parts of the entries that are not as recorded, compared as on the machine of the record."""
    row = golden_texts.family_row(folder, VARIANT, "float32", ["medusa", "magicdec"])
    made = {name: RECORDED["made by", *ROW[:2], name] for name in golden_record.made_by()}
    lines = differences(RECORDED, {(*ROW, name): entry for name, entry in row.items()}, made)
    return [line.split(": ")[0].split(" / ")[-1] for line in lines]


@pytest.fixture
def is_like_the_recording_machine() -> None:
    made = golden_record.made_by()
    if made != {name: RECORDED.get(("made by", *ROW[:2], name)) for name in made}:
        pytest.skip("the record was made on another kind of machine")


@pytest.mark.usefixtures("is_like_the_recording_machine")
def test_one_changed_weight_is_noticed(folder):
    assert changed(folder) == []
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 1.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "text" in changed(folder)


@pytest.mark.usefixtures("is_like_the_recording_machine")
def test_a_drafter_that_proposes_less_is_noticed_though_its_text_is_the_same(folder, monkeypatch):
    spec = drafters.DRAFTERS["magicdec"]

    def build(options: object, resources: Resources) -> Drafter:
        drafter = spec.build(options, resources)
        propose = drafter.propose

        def shorter(context: Context, max_depth: int):
            tree: Tree = yield from propose(context, min(max_depth, 1))
            return tree

        monkeypatch.setattr(drafter, "propose", shorter)
        return drafter

    monkeypatch.setitem(drafters.DRAFTERS, "magicdec", spec._replace(build=build))
    assert changed(folder) == ["magicdec"]


def test_a_drafter_that_writes_another_text_is_a_difference_on_every_machine():
    found = {("families", "unknown", "float32", "llama", "ngram"): "other text"}
    assert differences(RECORDED, found, {}) == ["families / unknown / float32 / llama / ngram: not the plain text"]


def test_one_changed_field_of_a_configuration_is_noticed(configurations, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 2e-6}))
    path = ("configs", "any", "llama")
    found = {path: golden_texts.short(config_sha256(read_config(folder)))}
    assert configurations[path] == RECORDED[path]
    assert len(differences(RECORDED, found, golden_record.made_by())) == 1


@pytest.mark.full
@needs_interpreter
def test_chains_that_texts_no_longer_launch_together_are_noticed(tmp_path, monkeypatch):
    from longdraft.kernels.cuda import ranker

    monkeypatch.setattr(ranker, "SHARES_CHAINS", False)
    found = dict(golden_record.launches(tmp_path, [("magicdec", "")]))
    made = {name: RECORDED["made by", *next(iter(found))[:2], name] for name in golden_record.made_by()}
    lines = differences(RECORDED, found, made)
    assert any("several texts / graphs" in line for line in lines)


def test_a_record_keeps_the_entries_of_kernels_that_this_machine_lacks(tmp_path):
    file, made = tmp_path / "record.json", {"processor": "here"}
    golden_record.write(file, {("families", "amx", "float32", "llama", "text"): "a"}, {"processor": "there"})
    golden_record.write(file, {("families", "avx2", "float32", "llama", "text"): "b"}, made)
    golden_record.write(file, {("families", "avx2", "float32", "llama", "text"): "c"}, made)
    assert golden_record.read(file) == {
        ("families", "amx", "float32", "llama", "text"): "a", ("families", "avx2", "float32", "llama", "text"): "c",
        ("made by", "families", "amx", "processor"): "there", ("made by", "families", "avx2", "processor"): "here"}


def test_an_entry_that_is_no_longer_found_is_a_difference_of_a_whole_comparison():
    row = {("families", "avx2", "float32", "llama", name): "1" for name in ("text", "ngram")}
    found = {path: entry for path, entry in row.items() if path[-1] == "text"}
    assert differences(row, found, {}) == []
    assert len(differences(row, found, {}, is_whole=True)) == 1
