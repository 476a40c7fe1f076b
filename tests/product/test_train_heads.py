"""Training of heads: the offsets they predict, the losses and their gradients, and error messages of one line."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import training
from helpers.checkpoints import load, make_checkpoint
from helpers.families import make_family
from helpers.processes import Fork, run_longdraft
from helpers.training import ALPHABET, At, losses, settings
from longdraft.__main__ import run
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import LongdraftError, ModelError, UsageError
from longdraft.model.transformer import chain_rows
from longdraft.parts import heads as trained_heads
from longdraft.text.tokenizer import Tokenizer
from longdraft.train import data, data_files, heads, job
from longdraft.train import frozen_model as frozen
from longdraft.train.loop import Position, learning_rate
from longdraft.train.losses import CPU_CHUNK_ELEMENTS, IGNORED, mixed_loss
from longdraft.train.settings import HeadSettings

pytestmark = pytest.mark.full

base = pytest.fixture(scope="module")(training.alphabet)


RECIPES = {
    "ours": {},
    "the paper's": {"kind": "tokenswift", "init": "paper", "distill": 0.0},
    "linear": {"kind": "tokenswift"},
    "medusa": {"kind": "medusa"},
    "on a partial cache": {"window": 16, "sinks": 2},
    "distilled only": {"distill": 1.0},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_falls(base, tmp_path, recipe):
    result = job.train(settings(base, steps=60, learning_rate=2e-2, **RECIPES[recipe]), tmp_path / "heads")
    if recipe == "distilled only":  # the random teacher predicts nothing about the text
        return
    assert result.step == 60 and result.tokens == 60 * 2 * 64
    first, last = losses(tmp_path / "heads")[0], losses(tmp_path / "heads")[-1]
    assert all(after < 0.9 * before for before, after in zip(first, last, strict=True))


@pytest.mark.parametrize("kind", ["mlp", "tokenswift", "medusa"])
def test_trained_heads_load_in_the_engine_and_predict_the_right_tokens(base, tmp_path, kind):
    """Head j at row t must predict token t + 1 + j, which is j + 1 letters further in the alphabet."""
    output = tmp_path / "heads"
    result = job.train(settings(base, kind=kind, distill=0.0, steps=200, learning_rate=0.1 if kind != "mlp" else 2e-2,
                                gradient_accumulation=2), output)
    assert all(part["top1"] > 0.99 and part["top3"] >= part["top1"] for part in result.validation)
    model = load(base)
    loaded = trained_heads.load_heads(output, model, TensorFiles(base).fingerprint)
    ids = data.load_tokenizer(base, model.config.vocab_size).encode(ALPHABET * 3).ids
    hidden = model.forward(chain_rows(ids[:60], 0), model.new_cache()).hidden
    for row in range(30, 60):
        said = loaded.logits(hidden[row : row + 1]).argmax(-1).tolist()
        assert said == [ids[row + 1 + j] for j in (1, 2, 3)]


def test_targets_beyond_the_end_of_a_sequence_are_ignored():
    ids = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    wanted = heads.targets(ids, 2).view(2, 2, 5).tolist()
    assert wanted[0] == [[12, 13, 14, -100, -100], [22, 23, 24, -100, -100]]
    assert wanted[1] == [[13, 14, -100, -100, -100], [23, 24, -100, -100, -100]]


@pytest.mark.parametrize("kind", ["mlp", "tokenswift", "medusa"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "num_key_value_heads": 1}, "gemma2", "qwen3_5"])
def test_training_and_engine_compute_the_same_hidden_states_and_logits(tmp_path, changes, kind):
    if isinstance(changes, str):  # a family whose norms have an offset, and whose logits a cap; a hybrid
        make_family(tmp_path / "tiny", changes, initializer_range=0.2 if changes == "gemma2" else 0.05)
    else:
        make_checkpoint(tmp_path / "tiny", **changes)
    trained = frozen.load_frozen_model(tmp_path / "tiny", "auto", torch.device("cpu"))
    ids = torch.arange(2, 50)
    wanted = HeadSettings(data=("none",), kind=kind, init="paper", seed=3)
    task = heads.heads_task(trained, wanted, ids[None].numpy(), ids[None].numpy())
    module = task.module
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    about = {"base_model": "tiny", "hidden_size": trained.config.hidden_size, "vocab_size": trained.config.vocab_size}
    (tmp_path / "heads").mkdir()
    task.export(tmp_path / "heads", about)
    model = load(tmp_path / "tiny")
    hidden = model.forward(chain_rows(ids.tolist(), 0), model.new_cache()).hidden
    assert torch.allclose(hidden, trained.hidden(ids[None]), atol=1e-4)
    ours = trained_heads.load_heads(tmp_path / "heads", model).logits(hidden[-1:])
    theirs = [trained.logits(normed) for normed in module(hidden[-1:].clone())]
    assert torch.allclose(ours, torch.cat(theirs), atol=1e-4)


def test_a_window_hides_keys_from_a_hybrids_attention_and_nothing_from_its_states(tmp_path):
    make_family(tmp_path, "qwen3_5")
    trained, ids = frozen.load_frozen_model(tmp_path, "auto", torch.device("cpu")), torch.arange(2, 40)[None]
    whole, narrow = trained.hidden(ids), trained.hidden(ids, window=4, sinks=1)
    assert torch.equal(trained.hidden(ids, window=38), whole)
    assert torch.allclose(narrow[:5], whole[:5], atol=1e-3) and not torch.allclose(narrow[5:], whole[5:], atol=1e-3)


@pytest.mark.parametrize("distill", [0.0, 0.5])
def test_computing_rows_in_chunks_does_not_change_the_gradient(base, monkeypatch, distill):
    trained = frozen.load_frozen_model(base, "auto", torch.device("cpu"))
    ids = np.random.default_rng(0).integers(2, 250, (2, 100))
    found = []
    for elements in (1, CPU_CHUNK_ELEMENTS):
        monkeypatch.setattr("longdraft.train.losses.CPU_CHUNK_ELEMENTS", elements)
        wanted = HeadSettings(data=("none",), kind="tokenswift", heads=2, init="paper", seed=3, distill=distill)
        task = heads.heads_task(trained, wanted, ids[:1], ids)
        loss = task.accumulate(ids, 1.0, 0)
        found.append([loss, *(p.grad for p in task.module.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("part", [0.0, 0.3, 1.0])
def test_the_mixed_loss_has_the_gradient_of_its_two_losses(part):
    """The reference is the sum of two losses, differentiated by PyTorch."""
    draw = torch.Generator().manual_seed(5)
    taught = (3 * torch.randn(12, 40, generator=draw)).softmax(-1)
    wanted = torch.randint(40, (12,), generator=draw)
    wanted[[2, 7]] = IGNORED
    ours = (3 * torch.randn(12, 40, generator=draw)).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    known = wanted != IGNORED
    loss = mixed_loss(ours, wanted, taught, part)
    obvious = (1 - part) * torch.nn.functional.cross_entropy(theirs[known], wanted[known], reduction="sum")
    obvious = obvious - part * (taught[known] * theirs[known].log_softmax(-1)).sum()
    (3 * loss).backward()
    (3 * obvious).backward()
    assert torch.allclose(loss, obvious) and torch.allclose(ours.grad, theirs.grad, atol=1e-6)


def test_the_loss_equals_a_direct_computation(base):
    """The reference computes all logits at once, and the loss of each head and row separately."""
    trained = frozen.load_frozen_model(base, "auto", torch.device("cpu"))
    ids = np.random.default_rng(1).integers(2, 250, (2, 30))
    wanted = HeadSettings(data=("none",), heads=2, init="paper", distill=0.3, window=8, sinks=2)
    task = heads.heads_task(trained, wanted, ids[:1], ids)
    losses = task.accumulate(ids, 1.0, 0)
    tokens = torch.from_numpy(ids)
    with torch.no_grad():
        said = trained.logits(trained.normed(trained.hidden(tokens))).view(2, 30, -1)
        rows = list(task.module(trained.hidden(tokens, 8, 2)))
        for j in (1, 2):
            logits = trained.logits(rows[j - 1]).view(2, 30, -1).log_softmax(-1)
            each = [0.7 * -logits[b, t, ids[b, t + 1 + j]] - 0.3 * (said[b, t + j].softmax(-1) * logits[b, t]).sum()
                    for b in range(2) for t in range(30 - 1 - j)]
            assert losses[j - 1] == pytest.approx(float(torch.stack(each).mean()), rel=1e-4)


def test_the_order_of_sequences_depends_on_the_seed_only():
    packed = np.arange(40, dtype=np.int32).reshape(10, 4)
    one, other = data.Sequences(packed, 1), data.Sequences(packed, 1)
    whole = one.read(0, 30)
    assert (np.concatenate([other.read(p, 5) for p in range(0, 30, 5)]) == whole).all()
    assert all(sorted(whole[start : start + 10, 0]) == list(packed[:, 0]) for start in (0, 10, 20))
    assert (whole[:10] != whole[10:20]).any() and (data.Sequences(packed, 2).read(0, 10) != whole[:10]).any()


def test_documents_are_read_from_every_supported_file_format(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": ["one", None, "two"]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"body": "three"}\n\n{"body": " "}\n{"body": "fünf"}\n')
    (tmp_path / "c.txt").write_text("six")
    files = [str(tmp_path / name) for name in ("a.parquet", "b.jsonl", "c.txt")]
    assert list(data_files.read_documents(files, "body")) == ["one", "two", "three", "fünf", "six"]
    with pytest.raises(UsageError, match=r"no text column 'text'; its columns: body; .*--text-column"):
        list(data_files.read_documents(files[:1], "text"))
    with pytest.raises(UsageError, match="line 1: not an object with the key 'text'"):
        list(data_files.read_documents(files[1:2], "text"))


@pytest.mark.parametrize(("name", "content", "message"), [
    ("bad.parquet", b"PAR?", "not a readable parquet"),
    ("bad.txt", b"\xff\xfe\xfa", "not UTF-8"),
    ("bad.jsonl", b"{\n", "line 1"),
    ("bad.jsonl", b'{"text": 3}\n', "'text' is a int"),
    ("bad.jsonl", b'{"text": "fine \\ud83d\\ude00"}\n{"text": "\\ud83d half"}\n',
     r"bad.jsonl line 2: 'text' has a lone surrogate at character 0"),
    ("bad.csv", b"a,b", "the format of .* is unknown"),
    ("empty.txt", b"  \n", "holds no text"),
    ("short.txt", b"abc", "sequence_length is 64, but the training data has 3 tokens"),
])
def test_invalid_data_raises_an_error_that_names_it(base, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        job.train(settings(base, data=(str(tmp_path / name),)), tmp_path / "heads")
    assert not (tmp_path / "heads" / job.METRICS).exists()


@pytest.mark.parametrize(("changes", "message"), [
    ({"data": ()}, "give --data"), ({"data": ("nowhere.txt",)}, "no file 'nowhere.txt'"),
    ({"model": "nowhere"}, "no model 'nowhere'"), ({"heads": 0}, "heads is 0"), ({"heads": 17}, "1 to 16"),
    ({"sequence_length": 4}, "5 or more"), ({"steps": 0}, "steps is 0"),
    ({"batch_size": 0}, "batch_size is 0"), ({"learning_rate": 0.0}, "above 0, at most 1"),
    ({"learning_rate": float("nan")}, "a finite number"),
    ({"holdout": 0.9}, "at most 0.5"), ({"max_seconds": 0.0}, "max_seconds"),
    ({"init": "zeros"}, "identity or paper"), ({"kind": "eagle"}, "mlp, tokenswift or medusa"),
    ({"distill": 1.5}, "0 to 1"), ({"window": -1}, "window is -1"), ({"beta2": 1.0}, "beta2"),
    ({"dtype": "float16"}, "auto, float32 or bfloat16"),
])
def test_invalid_settings_raise_an_error_that_names_them(base, tmp_path, changes, message):
    with pytest.raises(LongdraftError, match=message):
        job.train(settings(base, **changes), tmp_path / "heads")
    assert not (tmp_path / "heads").exists()


def test_a_tokenizer_of_another_model_is_an_error(tmp_path):
    make_checkpoint(tmp_path / "small", vocab_size=200)
    (tmp_path / "text.txt").write_text(ALPHABET * 100)
    with pytest.raises(ModelError, match="belong together"):
        job.train(settings(tmp_path / "small"), tmp_path / "heads")


def test_outputs_that_must_not_be_overwritten_are_refused(base, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("")
    with pytest.raises(UsageError, match="is not empty"):
        job.train(settings(base), tmp_path / "full")
    with pytest.raises(UsageError, match="cannot write"):
        job.train(settings(base), tmp_path / "full" / "precious")
    with pytest.raises(UsageError, match="holds no checkpoint"):
        job.resume("heads", tmp_path / "full", {})
    job.train(settings(base), tmp_path / "done")
    with pytest.raises(UsageError, match="holds a complete training"):
        job.resume("heads", tmp_path / "done", {})
    cut = tmp_path / "cut"
    job.train(settings(base), cut, At(2, lambda: signal.raise_signal(signal.SIGINT)))
    with pytest.raises(UsageError, match="continue it with --resume"):
        job.train(settings(base), cut)
    with pytest.raises(UsageError, match=r"learning_rate is 0.5, but the training to resume has 0.01"):
        job.resume("heads", cut, {"learning_rate": 0.5})
    path = cut / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelError, match="not a readable checkpoint"):
        job.resume("heads", cut, {})


def test_resuming_on_other_data_is_an_error(base, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(ALPHABET * 100)
    stop = At(2, lambda: signal.raise_signal(signal.SIGINT))
    job.train(settings(base, data=(str(text),)), tmp_path / "heads", stop)
    text.write_text(ALPHABET[::-1] * 100)
    with pytest.raises(UsageError, match="data differs from that of the checkpoint"):
        job.resume("heads", tmp_path / "heads", {})


def test_the_schedule_follows_steps_or_the_clock_whichever_ends_first(base):
    by_steps = settings(base, steps=100, warmup_steps=10)
    assert learning_rate(by_steps, Position(0)) == pytest.approx(1e-3)
    assert learning_rate(by_steps, Position(50)) == pytest.approx(5e-3)
    by_clock = settings(base, steps=100000, warmup_steps=0, max_seconds=10)
    assert learning_rate(by_clock, Position(3, 5.0)) == pytest.approx(5e-3)
    assert learning_rate(by_clock, Position(3, 10.0)) == 0


def test_the_time_budget_ends_a_training(base, tmp_path):
    result = job.train(settings(base, steps=10**9, max_seconds=0.5), tmp_path / "heads")
    assert 0.5 <= result.seconds < 10 and result.validation


def command(base: Path, output: Path, *more: str) -> list[str]:
    return ["train", "heads", "--model", str(base), "--data", str(base.parent / "text.txt"),
            "--output", str(output), "--sequence-length", "64", "--threads", "1", "--probe-tokens", "8", *more]


def test_the_command_writes_heads_and_ends_with_json(base, tmp_path, capsys):
    assert run(command(base, tmp_path / "heads", "--steps", "3", "--heads", "2")) == 0
    shown = capsys.readouterr()
    last = json.loads(shown.out.splitlines()[-1])
    assert last["kind"] == "heads" and len(last["validation"]) == 2
    assert [measured["temperature"] for measured in last["probe"]] == [0.0, 1.0]
    assert all(measured["mean_accepted_length"] >= 1 for measured in last["probe"])
    assert "mean accepted length" in shown.out
    assert "step 3" in shown.err
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert config["num_heads"] == 2 and config["base_sha256"] == TensorFiles(base).fingerprint()
    assert config["vocabulary_sha256"] == Tokenizer(base).vocabulary_sha256()
    assert config["training"]["data"] == ["text.txt"] and str(tmp_path) not in json.dumps(config)
    assert config["training"]["tokens_seen"] == last["tokens"] == 3 * 4 * 64
    assert run(command(base, tmp_path / "heads")) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_ctrl_c_saves_a_checkpoint_and_prints_the_resume_command(base, tmp_path, capsys):
    output = tmp_path / "my heads"
    arguments = command(base, output, "--steps", "1000000")
    child = Fork(tmp_path / "child", run_longdraft, *arguments)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not ((output / job.METRICS).exists() and losses_so_far(output)):
        time.sleep(0.05)
    child.kill(signal.SIGINT)
    assert child.wait() == 130, child.stderr
    assert child.stderr.splitlines()[-1].endswith(f"longdraft train heads --resume --output '{output}'")
    assert run(["train", "heads", "--resume", "--output", str(output), "--steps", "5"]) == 2
    assert "steps is 5, but the training to resume has 1000000" in capsys.readouterr().err


def losses_so_far(output: Path) -> bool:
    return '"losses"' in (output / job.METRICS).read_text()
