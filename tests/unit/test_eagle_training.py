"""Training of EAGLE heads: what is trained is what drafts, in our format and in that of speculators."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import VOCAB, load, make_checkpoint
from helpers.eagle import load_eagle
from helpers.equality import prompt_of
from helpers.families import CPU_FAMILIES, GEMMA4, HYBRIDS, make_family
from helpers.generation import by_name, generate
from helpers.training import At
from longdraft.drafters.eagle import EagleDraftModel
from longdraft.errors import UsageError
from longdraft.model.transformer import chain_rows
from longdraft.parts.eagle_config import is_eagle
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Tally
from longdraft.train import eagle as training
from longdraft.train import frozen_model as frozen
from longdraft.train import job, state_heads
from longdraft.train.loop import make_optimizers
from longdraft.train.processes import DistributedProcesses
from longdraft.train.settings import EagleSettings

IDS = prompt_of(16)


def task_of(folder: Path, **changes) -> training.EagleTask:
    """A head none of whose weights is zero."""
    base = frozen.load_frozen_model(folder, "auto", torch.device("cpu"))
    given = dict(data=("none",), window=5, passes=4, draft_vocab=200, seed=3)
    tokens = np.tile(np.arange(20, 260, dtype=np.int32), 3)
    task = training.eagle_task(base, EagleSettings(**(given | changes)), tokens, np.empty(0))
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in task.module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return task


@pytest.mark.parametrize("name", ["mha", "gqa", *CPU_FAMILIES, "gpt_oss", *GEMMA4, *HYBRIDS])
def test_the_drafter_computes_what_was_trained(tiny, tmp_path, name):
    """Row i of pass s over a whole sequence is the guess after the text up to i + 1 and s forced drafts."""
    folder = tiny.get(name) or tmp_path / "model"
    if name not in tiny:
        make_family(folder, name)
    task, target = task_of(folder), load(folder)
    task.export(tmp_path, {"hidden_size": 48, "vocab_size": VOCAB})
    assert is_eagle(tmp_path)
    head = load_eagle(tmp_path, target)
    assert head.config == replace(task.module.config, layer=head.config.layer)
    assert head.layers == state_heads.tapped_layers(target.config.num_layers)
    ids, places = torch.tensor([IDS]), torch.arange(len(IDS))[None]
    with torch.no_grad():
        outputs = task.module(ids, places, task._states(ids, places)[0], 4)
    tapped = target.with_taps(head.taps)
    for end in (3, 9, 12):
        cache, context = tapped.new_cache(), Context(IDS[:end])
        tapped.forward(chain_rows(IDS[: end - 1], 0), cache)
        cache.commit(range(end - 1))
        draft_model = EagleDraftModel(head, cache, head.config.window, 0, 4)
        for s in range(4):
            found = run_alone(draft_model.next_logits(context, IDS[end - 1 : end + s]))[0, task.module.ids]
            wanted = task.module.logits(outputs[s][0, end - 2 : end - 1])[0]
            torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-3)


def test_the_losses_compare_each_row_with_the_models_distribution_after_its_token(tiny):
    """The chunks of accumulate, compared with one pass over everything."""
    for loss in ("soft", "tv"):
        task = task_of(tiny["mha"], loss=loss, positions=len(IDS))
        sequences = np.array([IDS, IDS[::-1]], dtype=np.int32)
        ids = torch.from_numpy(sequences).long()
        found = task.accumulate(sequences, 1.0, 0)
        gradient = task.module.weights["fc/weight"].grad.clone()
        task.module.zero_grad()
        places = torch.arange(len(IDS)).expand(2, -1)
        states, taught = task._states(ids, places)
        taught = task.base.normed(taught)
        logits = task.base.logits(taught.flatten(0, 1)).view(2, len(IDS), -1)
        total = 0.0
        for s, rows in enumerate(task.module(ids, places, states, 4)):
            following = logits[:, 1 + s :]
            said = following[..., task.module.ids].softmax(-1)
            drafted = task.module.logits(rows.flatten(0, 1)).view_as(said)
            each = (0.5 * (drafted.softmax(-1) - said).abs().sum(-1) if loss == "tv"
                    else -(said * drafted.log_softmax(-1)).sum(-1))
            own = each[torch.isin(following.argmax(-1), task.module.ids)].sum() / each.numel()
            torch.testing.assert_close(found[s], own.detach(), atol=1e-4, rtol=1e-4)
            total = total + own * task.settings.decay**s
        total.backward()
        torch.testing.assert_close(gradient, task.module.weights["fc/weight"].grad, atol=1e-4, rtol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("name", ["mha", "gqa"])
def test_a_new_head_is_the_linear_map_of_least_squares(tiny, name):
    """Row 0 attends to itself alone. Keys and values of `gqa` have half the rank of the token's part of the map."""
    base = frozen.load_frozen_model(tiny[name], "auto", torch.device("cpu"))
    tokens = np.random.default_rng(1).integers(20, 260, (100, 16)).astype(np.int32)
    task = training.eagle_task(base, EagleSettings(data=("none",), draft_vocab=200), tokens, np.empty(0))
    maps = []
    task.module.become = lambda fitted: (maps.append(fitted), type(task.module).become(task.module, fitted))
    task.fit(tokens, DistributedProcesses("cpu"))
    fitted, = maps
    ids = torch.from_numpy(tokens[:, :2]).long()
    states, last_rows = task._states(ids, torch.arange(2).expand_as(ids))
    read = task.module.inputs(ids, states)
    split = fitted.weight.shape[1] - base.config.hidden_size
    of_states, of_token = (read[..., part] @ fitted.weight[:, part].T for part in (slice(0, split), slice(split, None)))
    if name == "gqa":
        first, second = fitted.factors(slice(split, None), base.config.num_kv_heads * base.config.head_dim)
        of_token = read[..., split:] @ (first @ second).T
    of_states = torch.nn.functional.rms_norm(of_states, of_states.shape[-1:]) * fitted.size(slice(0, split))
    wanted = torch.nn.functional.rms_norm(of_states + of_token, of_states.shape[-1:]) * base.final_norm
    with torch.no_grad():
        found, = task.module(ids, torch.arange(2).expand_as(ids), states, 1)
    torch.testing.assert_close(found, wanted * fitted.size(slice(None)), atol=1e-3, rtol=1e-3)
    rest = base.normed(last_rows)[:, 1:] / base.final_norm - read @ fitted.weight.T
    assert float(rest.detach().square().mean()) < 0.9  # of rows of size one


@pytest.mark.full
def test_a_resumed_training_is_not_fitted_again(trained, tmp_path, monkeypatch):
    wanted = EagleSettings(**(vars(trained[2]) | dict(steps=3, own_tokens=0, warmup_steps=2)))
    job.train(wanted, tmp_path / "head", At(1, lambda: signal.raise_signal(signal.SIGTERM)))
    monkeypatch.setattr(training.EagleTask, "fit", lambda *args: pytest.fail("fitted again"))
    assert job.resume("eagle", tmp_path / "head", {}).step == 3


def test_muon_takes_the_maps_and_adamw_the_norms(tiny):
    task = task_of(tiny["mha"])
    muon, adamw = make_optimizers(task.module, task.settings)
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    shapes = [[p.ndim for group in each.param_groups for p in group["params"]] for each in (muon, adamw)]
    assert set(shapes[0]) == {2} and set(shapes[1]) == {1}
    assert sum(map(len, shapes)) == len(list(task.module.parameters()))
    alone, = make_optimizers(task.module, EagleSettings(data=("none",), optimizer="adamw"))
    assert isinstance(alone, torch.optim.AdamW)


def test_muon_without_a_pytorch_that_has_it_is_one_line(tiny, monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    task = task_of(tiny["mha"])
    with pytest.raises(UsageError, match=r"needs PyTorch 2\.9.*give --optimizer adamw"):
        make_optimizers(task.module, task.settings)


def test_the_vocabulary_of_a_head_is_the_commonest_tokens():
    tokens = np.array([5, 5, 5, 9, 9, 2, 2, 7], dtype=np.int32)
    assert state_heads.commonest(tokens, 3, 12).tolist() == [2, 5, 9]
    assert state_heads.commonest(tokens, 12, 12).tolist() == list(range(12))


@pytest.mark.parametrize("layers, wanted", [(1, (0, 1)), (2, (0, 1, 2)), (6, (1, 3, 6)), (8, (2, 4, 5)),
                                            (32, (2, 16, 29))])
def test_the_tapped_layers_are_eagles_or_nearer_to_the_ends(layers, wanted):
    assert state_heads.tapped_layers(layers) == wanted


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path, EagleSettings]:
    """A model, and a head that learned from text that the model writes, because the tiny model is random."""
    root = tmp_path_factory.mktemp("eagle")
    make_checkpoint(root / "tiny", initializer_range=0.15)
    (root / "text.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 300)
    wanted = EagleSettings(model=str(root / "tiny"), data=(str(root / "text.txt"),), own_tokens=6000,
                           sequence_length=64, steps=60, batch_size=4, learning_rate=1e-2, warmup_steps=5, window=32,
                           passes=3, draft_vocab=300, eval_every=0, checkpoint_every=0, probe_tokens=0, device="cpu",
                           threads=1)
    result = job.train(wanted, root / "head")
    assert [part["draft"] for part in result.validation] == [1.0, 2.0, 3.0]
    return root / "tiny", root / "head", wanted


@pytest.mark.full
def test_drafts_of_a_trained_head_are_accepted(trained):
    folder, head_folder, _ = trained
    target, tally = load(folder), Tally()
    head = load_eagle(head_folder, target)
    params = SamplingParams(max_new_tokens=80, temperature=1.0, min_p=0.1, seed=5)
    prompt = [2 + i % 26 for i in range(60)]
    written = generate(target, prompt, params, by_name("eagle", eagle=head, suffix="false"), tally=tally)
    assert written == generate(target, prompt, params, by_name("plain"))
    assert tally.accepted["eagle"] > 10


@pytest.mark.full
def test_the_output_has_the_format_of_speculators(trained):
    _, folder, wanted = trained
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert config["speculators_model_type"] == "eagle3" and config["longdraft"]["training"]["steps_done"] == 60
    assert config["transformer_layer_config"]["sliding_window"] == wanted.window
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    ids = torch.arange(300) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids) and tensors["lm_head.weight"].shape == (300, 48)
    assert {"fc.weight", "fc_norm.0.weight", "fc_norm.2.weight", "layers.0.hidden_norm.weight"} < set(tensors)


@pytest.mark.full
def test_an_interrupted_training_resumes_to_the_same_weights(trained, tmp_path):
    wanted = EagleSettings(**(vars(trained[2]) | dict(steps=8, own_tokens=0, warmup_steps=2)))
    job.train(wanted, tmp_path / "whole")
    cut = job.train(wanted, tmp_path / "cut", At(3, lambda: signal.raise_signal(signal.SIGTERM)))
    assert cut.signal == signal.SIGTERM
    job.resume("eagle", tmp_path / "cut", {})
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("changes, message", [
    (dict(passes=17), "passes is 17; allowed: 1 to 16"), (dict(decay=0.0), "decay is 0.0; allowed: above 0"),
    (dict(optimizer="sgd"), "optimizer is 'sgd'; allowed: adamw or muon"),
    (dict(loss="kl"), "loss is 'kl'; allowed: soft or tv"), (dict(window=5000), "window is 5000; allowed: 1 to 4096"),
    (dict(sequence_length=5), "sequence_length is 5; allowed: 7 or more")])
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        EagleSettings(data=("none",), **changes)
