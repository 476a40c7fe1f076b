"""Public heads: which fit a model, what `doctor` says about them, and the one that `--heads auto` takes."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors
from transformers import AutoModelForCausalLM

import longdraft
from helpers.block import Shape, write_block
from helpers.checkpoints import HIDDEN, VOCAB
from helpers.eagle import make_eagle
from longdraft import drafters
from longdraft.__main__ import run
from longdraft.checkpoint import config_file, hub
from longdraft.errors import ModelError, UsageError
from longdraft.journal.format import read_journal
from longdraft.model.families import FAMILIES
from longdraft.parts import block_config, eagle_config, native_heads, public_heads
from longdraft.parts.public_heads import TARGETS, KnownTarget, PublicHead, TargetSizes, chosen_heads, fitting_targets
from longdraft.request.sampling_params import SamplingParams

QWEN3_8B = dict(model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
                num_attention_heads=32, num_key_value_heads=8, head_dim=128)
QWEN35_27B = dict(model_type="qwen3_5_text", vocab_size=248320, hidden_size=5120, intermediate_size=17408,
                  num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4)
GEMMA4_12B = dict(model_type="gemma4_unified_text", vocab_size=512, hidden_size=64, intermediate_size=64,
                  num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=16)
BLOCK, EAGLE = PublicHead("owner/block", "dflash", "MIT"), PublicHead("owner/eagle", "eagle3")
LATER = PublicHead("owner/later", "dflash", lacks="layers of another kind")


def names_of(model: str, sizes: dict[str, object]) -> list[str]:
    return [target.repository for target in fitting_targets(model, config_file.parse_config(sizes))]


class StubHub:
    """Repositories as folders. For any other repository it raises the error that the client raises offline."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[str] = []

    def snapshot_download(self, repo_id: str, **options: object) -> str:
        self.asked.append(repo_id)
        if not (self.root / repo_id).is_dir():
            raise errors.LocalEntryNotFoundError("not in the cache")
        return str(self.root / repo_id)


@pytest.fixture
def stub(tmp_path, monkeypatch):
    stub = StubHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stub.snapshot_download)
    return stub


def know(monkeypatch: pytest.MonkeyPatch, *heads: PublicHead) -> None:
    """Make the tiny model the only target."""
    sizes = TargetSizes(2, HIDDEN, VOCAB)
    monkeypatch.setattr(public_heads, "TARGETS", (KnownTarget("owner/small", "llama", sizes, heads),))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.repository)
def test_every_entry_of_the_table_is_complete(target):
    assert target.family in FAMILIES and target.heads
    for head in target.heads:
        assert head.repository == "" or hub._HUB_ID.fullmatch(head.repository)[0] == head.repository
        assert head.repository or head.kind == native_heads.SPECULATORS_KIND
        assert head.drafter in drafters.DRAFTERS
        assert bool(head.lacks) >= (head.kind in eagle_config._LATER_KINDS)  # such a head does not load
        known = (*block_config._KINDS, *eagle_config._LATER_KINDS, *eagle_config._EAGLE_KINDS, "jetspec", "mtp")
        assert head.kind in known


def test_the_document_names_every_target():
    document = (Path(__file__).resolve().parents[2] / "docs/drafters.md").read_text(encoding="utf-8")
    section = document.partition("## Public heads")[2]
    for target in TARGETS:
        series, size = re.fullmatch(r".*/(Qwen3[.\d]*|Llama-3.\d|gpt-oss|gemma-4)-(.*)", target.repository).groups()
        assert re.search(rf"{re.escape(series)} \([^)]*\b{re.escape(size)}\b", section), target.repository


def test_no_head_is_listed_twice():
    listed = [head.repository for target in TARGETS for head in target.heads if head.repository]
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("model, sizes, expected", [
    ("Qwen/Qwen3-8B", QWEN3_8B, ["Qwen/Qwen3-8B"]),
    ("my-own-name", QWEN3_8B, ["Qwen/Qwen3-8B"]),
    ("my-own-name", QWEN3_8B | {"num_hidden_layers": 35}, []),
    ("Qwen/Qwen3-8B", QWEN3_8B | {"hidden_size": 2048}, []),
    ("Qwen/Qwen3-8B", QWEN3_8B | {"vocab_size": 151935}, []),
    ("Qwen/Qwen3-8B", QWEN3_8B | {"model_type": "llama"}, []),
    ("Qwen/Qwen3-4B", QWEN3_8B, ["Qwen/Qwen3-8B"]),
    ("owner/x", QWEN35_27B, ["Qwen/Qwen3.5-27B", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.8-27B"]),
    ("owner/qwen3.6-27b-GGUF:Q.gguf", QWEN35_27B, ["Qwen/Qwen3.6-27B"]),
    ("/models/Qwen3_6-27B", QWEN35_27B, ["Qwen/Qwen3.5-27B", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.8-27B"]),
    ("/models/Qwen3.8-27B.gguf", QWEN35_27B, ["Qwen/Qwen3.8-27B"]),
    ("/models/Qwen3.8-27Bee", QWEN35_27B, ["Qwen/Qwen3.5-27B", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.8-27B"]),
    ("google/gemma-4-12B-it", GEMMA4_12B, ["google/gemma-4-12B-it"]),
    ("owner/x", GEMMA4_12B, []),
])
def test_a_model_is_recognised_by_its_architecture_and_sizes_and_then_by_its_name(model, sizes, expected):
    assert names_of(model, sizes) == expected


@pytest.mark.parametrize("target", [target for target in TARGETS if target.sizes], ids=lambda target: target.repository)
def test_every_target_with_known_sizes_is_recognised_without_its_name_and_not_as_another_architecture(target):
    layers, hidden, vocabulary = target.sizes
    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, vocab_size=vocabulary, intermediate_size=64,
                 num_attention_heads=16, num_key_value_heads=8, head_dim=64)
    assert target.repository in names_of("mine", sizes | {"model_type": target.family})
    assert names_of(target.repository, sizes | {"model_type": target.family}) == [target.repository]
    assert names_of(target.repository, sizes | {"model_type": "olmo2"}) == []


@pytest.mark.parametrize("heads, drafter, taken", [
    ((BLOCK, EAGLE), "auto", "owner/block"), ((EAGLE, BLOCK), "auto", "owner/eagle"),
    ((BLOCK, EAGLE), "eagle", "owner/eagle"), ((LATER, BLOCK), "block", "owner/block"),
    ((PublicHead("", "mtp"), EAGLE), "auto", "owner/eagle")])
def test_auto_takes_the_first_head_that_loads_and_says_why(stub, tiny, tmp_path, monkeypatch, caplog, heads, drafter,
                                                           taken):
    know(monkeypatch, *heads)
    write_block(tmp_path / "owner/block", Shape())
    make_eagle(tmp_path / "owner/eagle")
    with caplog.at_level(logging.WARNING):
        engine = longdraft.load(str(tiny["gqa"]), drafter=drafter, heads="auto")
    assert engine.loaded.heads_name == taken and set(stub.asked) == {taken}
    assert (engine.loaded.block is not None) == (taken == "owner/block")
    [line] = [record.getMessage() for record in caplog.records if "--heads auto" in record.getMessage()]
    assert line.startswith(f"--heads auto: {taken} (") and "has the architecture and sizes of owner/small" in line
    assert all(str(head) in line for head in heads)


def test_a_text_with_auto_is_plain_text_and_its_journal_names_the_head(stub, tiny, tmp_path, monkeypatch):
    know(monkeypatch, BLOCK)
    write_block(tmp_path / "owner/block", Shape())
    params = SamplingParams(max_new_tokens=24, seed=3, temperature=1.0)
    engine = longdraft.load(str(tiny["gqa"]), drafter="block", heads="auto")
    text = [event.text for event in engine.generate("It was", params, journal=tmp_path / "journal")]
    plain = longdraft.load(str(tiny["gqa"]), drafter="plain").generate("It was", params)
    assert "".join(text) == "".join(event.text for event in plain)
    assert read_journal(tmp_path / "journal").header.heads == "owner/block"


def test_a_head_that_is_not_in_the_cache_is_passed_over_with_a_line(stub, tiny, tmp_path, monkeypatch, caplog):
    know(monkeypatch, BLOCK, EAGLE)
    make_eagle(tmp_path / "owner/eagle")
    engine = longdraft.load(str(tiny["gqa"]), heads="auto", offline=True)
    assert engine.loaded.heads_name == "owner/eagle" and stub.asked[:2] == ["owner/block", "owner/eagle"]
    assert "--heads auto: passed over a head: 'owner/block' is not complete" in caplog.text


@pytest.mark.parametrize("heads, drafter, error, message", [
    ((BLOCK, EAGLE), "auto", ModelError, "no head for owner/small can be downloaded: .owner/block' is not complete .*"
                                   "offline nothing is downloaded; run once without --offline"),
    ((LATER,), "auto", UsageError, "can use none: owner/later .dflash, not supported: layers of .*; name a head"),
    ((PublicHead("", "mtp"),), "auto", UsageError, "can use none: in the files of the model itself .mtp.; name a head"),
    ((BLOCK,), "medusa", UsageError, "this drafter can use none: owner/block .dflash, MIT.; name a head"),
    ((BLOCK,), "plain", UsageError, "drafter 'plain' uses no heads")])
def test_without_a_usable_head_there_is_one_line_with_a_cure(stub, tiny, monkeypatch, caplog, heads, drafter, error,
                                                             message):
    know(monkeypatch, *heads)
    with pytest.raises(error, match=message) as raised:
        longdraft.load(str(tiny["gqa"]), drafter=drafter, heads="auto", offline=True)
    assert "\n" not in str(raised.value) and "--heads auto" not in caplog.text


def test_an_unknown_model_and_one_of_several_of_one_size_are_refused():
    config, options = config_file.parse_config(QWEN35_27B), hub.Hub(offline=True)
    with pytest.raises(UsageError, match=r"no public head is known .* name a head with --heads FOLDER or OWNER"):
        chosen_heads("auto", "Qwen/Qwen3.5-27B", replace(config, num_layers=60), "", options)
    with pytest.raises(UsageError, match=r"may be Qwen/Qwen3.5-27B or .* choose one .*: z-lab/Qwen3.5-27B-DFlash"):
        chosen_heads("auto", "mine", config, "", options)
    assert chosen_heads("owner/mine", "mine", config, "", options) == "owner/mine"
    assert chosen_heads(None, "mine", config, "", options) is None


def test_a_model_of_transformers_takes_a_public_head_too(stub, tiny, tmp_path, monkeypatch):
    know(monkeypatch, BLOCK)
    write_block(tmp_path / "owner/block", Shape())
    model = AutoModelForCausalLM.from_pretrained(tiny["gqa"])
    writer = longdraft.from_transformers(model, drafter="block", heads="auto")
    assert writer.engine.loaded.heads_name == "owner/block"


@pytest.mark.parametrize("sizes, expected", [
    (QWEN3_8B, ["deepseek-ai/dspark_qwen3_8b_block7 (dspark, MIT); ",
                "RedHatAI/Qwen3-8B-speculator.peagle (peagle, Apache-2.0)", "--heads auto takes the first"]),
    (QWEN35_27B, ["For Qwen/Qwen3.6-27B: z-lab/Qwen3.6-27B-DFlash (dflash, MIT); in the files of the model itself (mtp",
                  "These models have the same sizes; give the head of yours with --heads"]),
    (QWEN3_8B | {"num_hidden_layers": 2}, ["none known; `longdraft train eagle`"])])
def test_doctor_lists_the_heads_that_fit(capfd, tmp_path, monkeypatch, sizes, expected):
    from longdraft.system import machine

    monkeypatch.setattr(machine, "read_bandwidth", lambda memory: 20e9)
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert run(["doctor", "--model", str(tmp_path)]) == 0
    [line] = [line for line in capfd.readouterr().out.splitlines() if line.startswith("public heads")]
    assert all(part in line for part in expected)
    assert run(["doctor", "--model", str(tmp_path), "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)["public_heads"]
    assert all(head.keys() == {"target", "repository", "kind", "licence", "lacks", "loads"} for head in listed)
    assert len(listed) == sum(len(target.heads) for target in TARGETS if target.repository in {
        head["target"] for head in listed})
