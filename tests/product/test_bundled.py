"""The bundled models: their size, their model card, and their drafters, whose text equals that of plain decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import longdraft
from longdraft.checkpoint import hub

MIB = 2**20
ROOT = Path(__file__).parents[2]
CHAPTER = (ROOT / "examples" / "chapter.txt").read_text(encoding="utf-8")
DRAFTERS = ("auto", "tokenswift", "medusa", "magicdec", "draft-model", "glide", "eagle", "triforce")

pytestmark = pytest.mark.parametrize("name", hub.bundled_models())


def folder(name: str) -> Path:
    return hub.resolve(name)


def test_the_model_and_its_drafters_are_small(name):
    assert sum(file.stat().st_size for file in folder(name).rglob("*.safetensors")) <= 20 * MIB


def test_the_model_card_reports_loss_by_context_and_the_training_record_exists(name):
    card = (folder(name) / "README.md").read_text(encoding="utf-8")
    assert "| 64-100K |" in card and "longdraft train lm" in card
    for file in ("training.json", "loss.jsonl", "loss.svg"):
        assert (folder(name) / file).is_file(), file
    config = json.loads((folder(name) / "config.json").read_text())
    assert config["max_position_embeddings"] == 131_072


@pytest.mark.parametrize("part", ["heads", "glide", "eagle"])
def test_trained_drafters_name_their_base_model(name, part):
    config = json.loads((folder(name) / part / "config.json").read_text())
    assert config.get("longdraft", config)["base_model"] == name


def test_the_text_has_no_stray_space_after_contractions(name):
    """Most novels of the first trainings had one ("don't  let")."""
    engine = longdraft.load(name, drafter="plain")
    prompt = engine.encode('"I don\'t know," he said. "They\'ve gone, and we can\'t')
    text = "".join(event.text for event in engine.generate(prompt, longdraft.SamplingParams(
        max_new_tokens=400, seed=5, min_p=0.1, repetition_penalty=1.2)))
    assert not text.startswith("  ") and "n't  " not in text and "'ve  " not in text


@pytest.mark.full
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_drafts_and_writes_the_text_of_plain_decoding(name, drafter):
    params = longdraft.SamplingParams(max_new_tokens=80, seed=3, min_p=0.1, repetition_penalty=1.2)

    def stats(drafter: str) -> dict[str, object]:
        engine = longdraft.load(name, drafter=drafter)
        return [event.stats for event in engine.generate(engine.encode(CHAPTER)[:600], params)][-1]

    found = stats(drafter)
    assert found["sha256_tokens"] == stats("plain")["sha256_tokens"]
    if drafter != "auto":  # auto may choose plain decoding here
        assert sum(source["drafted"] for source in found["by_source"].values()) > 0


@pytest.mark.full
def test_the_block_head_beside_the_benchmarks_drafts_a_token_a_forward_and_more(name):
    head = ROOT / "benchmarks" / "heads" / f"{name}-block"
    if not head.is_dir():
        pytest.skip("this model has none")
    params = longdraft.SamplingParams(max_new_tokens=200, seed=3, min_p=0.1, repetition_penalty=1.2)
    stats = {}
    for drafter, heads in (("block", str(head)), ("plain", None)):
        options = {"suffix": False} if heads else {}
        engine = longdraft.load(name, drafter=drafter, heads=heads, drafter_options=options)
        stats[drafter] = [event.stats for event in engine.generate(engine.encode(CHAPTER)[:600], params)][-1]
    assert stats["block"]["sha256_tokens"] == stats["plain"]["sha256_tokens"]
    assert stats["block"]["mean_accepted_length"] > 2
