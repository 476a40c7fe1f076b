"""`--start` of heads, glide and EAGLE heads: a training goes on from an earlier part, also of another model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from helpers import training
from helpers.checkpoints import make_checkpoint
from helpers.training import settings
from longdraft.errors import LongdraftError, ModelError, UsageError
from longdraft.train import job
from longdraft.train.settings import EagleSettings, GlideSettings, HeadSettings

pytestmark = pytest.mark.full

base = pytest.fixture(scope="module")(training.alphabet)

KINDS = {
    "mlp": (HeadSettings, {"kind": "mlp"}),
    "linear": (HeadSettings, {"kind": "tokenswift"}),
    "medusa": (HeadSettings, {"kind": "medusa"}),
    "glide": (GlideSettings, {"window": 16}),
    "eagle": (EagleSettings, {"passes": 2, "window": 32, "draft_vocab": 0}),
}
NO_STEP = {"steps": 1, "learning_rate": 1e-12, "weight_decay": 0.0}  # what is written is what was read


def wanted(base, name, **changes):
    kind, given = KINDS[name]
    common = {key: value for key, value in vars(settings(base)).items() if key in vars(kind(data=("none",)))}
    common = {key: value for key, value in common.items() if key not in ("kind", "window", "sinks", "beta2")}
    return kind(**(common | given | changes))


@pytest.fixture(scope="module")
def other(base, tmp_path_factory):
    """A model of the same sizes and vocabulary with other weights."""
    folder = tmp_path_factory.mktemp("other") / "tiny"
    make_checkpoint(folder, initializer_range=0.15, seed=9)
    shutil.copy(base.parent / "text.txt", folder.parent)
    return folder


@pytest.fixture(scope="module", params=KINDS)
def trained(request, base, tmp_path_factory):
    """The name of a kind, and a part of it."""
    folder = tmp_path_factory.mktemp(request.param) / "part"
    job.train(wanted(base, request.param), folder)
    return request.param, folder


def weights(folder):
    path = next(path for path in folder.iterdir() if path.name.startswith(("model", "medusa")))
    return {name: tensor for name, tensor in load_file(path).items() if name != "lm_head.weight"}


def test_a_training_begins_with_the_weights_of_the_part(trained, other, tmp_path):
    name, folder = trained
    job.train(wanted(other, name, start=str(folder), **NO_STEP), tmp_path / "next")
    found, given = weights(tmp_path / "next"), weights(folder)
    assert found.keys() == given.keys()
    for key, tensor in given.items():
        torch.testing.assert_close(found[key], tensor, atol=1e-6, rtol=1e-5)
    config = json.loads((tmp_path / "next" / "config.json").read_text())
    record = config.get("longdraft", config)
    assert record["training"]["start"] and record["base_sha256"] != json.loads(
        (folder / "config.json").read_text()).get("longdraft", record | {"base_sha256": ""})["base_sha256"]


def test_a_part_of_another_kind_is_refused_in_one_line(trained, base, tmp_path):
    name, folder = trained
    for asked in KINDS.keys() - {name}:
        with pytest.raises(LongdraftError) as caught:
            job.train(wanted(base, asked, start=str(folder)), tmp_path / asked)
        assert "\n" not in str(caught.value) and not (tmp_path / asked / job.METRICS).exists()


def test_a_part_of_other_sizes_or_another_tokenizer_is_refused(trained, base, tmp_path):
    name, folder = trained
    make_checkpoint(tmp_path / "wide", hidden_size=64)
    with pytest.raises(ModelError, match="give --start a"):
        job.train(wanted(base, name, model=str(tmp_path / "wide"), start=str(folder)), tmp_path / "no")
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config.get("longdraft", config)["vocabulary_sha256"] = "0" * 64
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="trained with another tokenizer"):
        job.train(wanted(base, name, start=str(copy)), tmp_path / "nor")


def test_fewer_heads_than_the_part_has_can_go_on(base, tmp_path, caplog):
    job.train(settings(base, heads=3, steps=2), tmp_path / "three")
    job.train(replace(settings(base, heads=2, start=str(tmp_path / "three")), **NO_STEP), tmp_path / "two")
    assert "has 3 heads, and the first 2 are trained further; --heads 3 keeps all" in caplog.text
    three, two = weights(tmp_path / "three"), weights(tmp_path / "two")
    assert len(two) < len(three) and all(torch.allclose(three[key], tensor, rtol=1e-5) for key, tensor in two.items())


def test_an_eagle_head_with_other_norms_is_refused(base, tmp_path):
    job.train(wanted(base, "eagle", steps=1), tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"norm_output": False}))
    with pytest.raises(ModelError, match="norm_output False, the head to train True; give --start a head"):
        job.train(wanted(base, "eagle", start=str(path.parent)), tmp_path / "no")


def test_a_missing_part_is_an_error_before_anything_is_read(base, tmp_path):
    with pytest.raises(ModelError, match="no model 'nowhere'"):
        job.train(settings(base, start="nowhere"), tmp_path / "no")
    assert not (tmp_path / "no").exists()
