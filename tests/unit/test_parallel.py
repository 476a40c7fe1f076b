"""Tensor parallelism: at each degree, speculative text equals plain text with every drafter, interrupted or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import longdraft
from helpers import block, ranks
from helpers.checkpoints import make_checkpoint, make_glide, make_heads
from helpers.eagle import make_eagle
from helpers.families import add_native_head, make_family, make_hybrid
from helpers.gguf_files import convert
from helpers.processes import free_port, run_longdraft, start_ranks
from longdraft.__main__ import run
from longdraft.checkpoint import config_file
from longdraft.engine.engine import Engine
from longdraft.errors import ModelError, UsageError, WorkerError
from longdraft.journal.format import FILE
from longdraft.model.sharding import shard_config
from longdraft.parallel import ProcessGroup, RankGroup, Shard
from longdraft.request.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    base = make_checkpoint(root / "llama", num_key_value_heads=4, seed=4, vocab_size=322)  # not a multiple of 4
    make_heads(root / "llama" / "heads", base)
    make_glide(root / "llama" / "glide", root / "llama")
    make_eagle(root / "llama" / "eagle", vocab=322)
    return root


@pytest.fixture(scope="module")
def models(folder) -> Path:
    """The folder, with models of other kinds."""
    root = folder
    make_checkpoint(root / "small", seed=8, hidden_size=24, num_hidden_layers=1)
    make_family(root / "phi3", "phi3, longrope, part", num_key_value_heads=4, tie_word_embeddings=False)
    make_family(root / "qwen2", "qwen2", num_key_value_heads=4)
    make_family(root / "olmo2", "olmo2")
    base = make_family(root / "qwen3_5", "qwen3_5", linear_num_value_heads=8, linear_num_key_heads=4)
    convert(root / "qwen3_5", base, root / "qwen3_5.gguf")  # its value heads have another order
    make_heads(root / "qwen3_5" / "heads", base)
    make_glide(root / "qwen3_5" / "glide", root / "qwen3_5")
    add_native_head(root / "qwen3_5")
    for name in ("block", "one-pass"):
        make_checkpoint(root / name, num_key_value_heads=4, seed=4, vocab_size=322)
    block.write_block(root / "block" / "block", block.Shape("dspark", vocab=322, draft_vocab=322))
    make_eagle(root / "one-pass" / "eagle", vocab=322, mask=5, layers=2)
    make_hybrid(root / "small-hybrid", hidden_size=24, num_attention_heads=2, num_key_value_heads=1)
    for name in ("qwen3_next", "qwen3_5_moe", "qwen3_moe", "mixtral", "gpt_oss"):
        make_family(root / name, name)
    return root


@pytest.mark.parametrize("size, plan", [(2, "few drafters"), *(
    pytest.param(*each, marks=pytest.mark.full)
    for each in ((4, "few drafters"), (2, "every drafter"), (2, "blocks"), (2, "hybrids"), (2, "experts")))])
def test_every_drafter_writes_the_plain_text_at_each_degree(request, tmp_path, size, plan):
    folder = request.getfixturevalue("folder" if plan == "few drafters" else "models")
    started = start_ranks(size, tmp_path, ranks.main, folder, tmp_path / "journals", plan)
    ends = [process.wait(240) for process in started]
    assert ends == [0] * size, "\n".join(process.stderr for process in started)
    assert not any(process.stdout for process in started[1:])
    found, plans = json.loads(started[0].stdout), ranks.PLANS[plan]
    wanted = {(f"{model} {sampling}", name) for model, name, _, samplings in plans for sampling in samplings}
    assert wanted <= {(text, name) for text, names in found.items() for name in names}
    for text, written in found.items():
        hashes = {name: sha256 for name, (sha256, _, exactness) in written.items()}
        assert len({*hashes.values()}) == 1, (text, hashes)
        assert all(exactness == "bit-exact" for _, _, exactness in written.values())
        assert all(drafted > 0 for name, (_, drafted, _) in written.items() if name not in ("plain", "auto")), written
    for model in {model for model, name, *_ in plans if name == "tokenswift"}:
        assert found[f"{model} warm"]["resumed"][1] >= 3
    if plan == "hybrids":  # all ranks kept the states at the end of the text that was stopped
        assert found["qwen3_5 continued"]["reused"][1] > len(ranks.PROMPT)


@pytest.mark.full
def test_a_rank_that_dies_is_one_line_and_the_journal_can_be_resumed(folder, tmp_path, capsys):
    settings = ["--model", str(folder / "llama"), "--max-new-tokens", "500", "--seed", "3", "--drafter", "suffix",
                "--ignore-eos", "--on-loop", "off", "--threads", "1", "--tensor-parallel", "2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    journal, output = tmp_path / "journal", tmp_path / "out.txt"
    command = ["-m", "longdraft", "generate", "It was", *settings, "--journal", str(journal)]
    child = subprocess.Popen([*torchrun, str(free_port()), *command], stderr=subprocess.PIPE, text=True,
                             stdout=subprocess.DEVNULL)
    while not ((journal / FILE).exists() and (journal / FILE).stat().st_size > 2500):
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.01)
    os.kill(follower_of(child.pid), signal.SIGKILL)
    _, said = child.communicate(timeout=120)
    lines = [line for line in said.splitlines() if line.startswith("longdraft: ")]
    assert child.returncode and len(lines) == 1 and "resume it with: longdraft resume" in lines[0], said
    again = start_ranks(2, tmp_path, run_longdraft, "resume", journal, "--output", output)
    assert [process.wait() for process in again] == [0, 0], [process.stderr for process in again]
    assert run(["inspect", str(journal), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["state"] == "finished" and len(report["runs"]) == 2 and report["exactness"] == "bit-exact"
    assert report["header"]["arithmetic"]["tensor_parallel"] == "2"
    assert run(["resume", str(journal)]) == 2
    assert "--nproc-per-node 2" in capsys.readouterr().err


def follower_of(torchrun: int) -> int:
    """The process of rank 1."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    return next(int(child) for child in children
                if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{child}/environ").read_bytes() + b"\0")


STOP = (0.0, 0.0, 0.0)  # rank 0 stops the text


class RecordedGroup:
    """The group of rank 0 without other ranks. Records the numbers that it broadcasts."""

    rank = 0

    def __init__(self) -> None:
        self.sent: list[tuple[float, ...]] = []

    def broadcast_object(self, value):
        return value

    def concatenate(self, part):
        return part

    def broadcast_numbers(self, values):
        self.sent.append(values)
        return values


def leading(folder, drafter: str, num_tokens: int):
    """An engine of rank 0, its group, the settings, and the tokens that a single process writes after "It was"."""
    engine = longdraft.load(str(folder / "llama"), drafter=drafter, threads=1)
    params = SamplingParams(max_new_tokens=num_tokens, seed=5, ignore_eos=True)
    expected = [token for event in engine.generate("It was", params) for token in event.tokens]
    group = RecordedGroup()
    engine = Engine(replace(engine.loaded, ranks=RankGroup(group)), engine.choice)
    return engine, group, params, expected


def test_a_second_text_is_refused_and_the_first_continues(folder):
    engine, group, params, expected = leading(folder, "plain", 12)
    first, second = engine.generate("It was", params), engine.generate("Once", params)
    found = list(next(first).tokens)
    with pytest.raises(UsageError, match="another text is being written"):
        next(second)
    second.close()
    with pytest.raises(UsageError, match="another text is being written"):
        next(engine.generate("Once", params))
    assert STOP not in group.sent, "the other ranks got a stop of the first text"
    assert found + [token for event in first for token in event.tokens] == expected
    assert next(engine.generate("Once", params)).tokens, "the first has ended"


def test_a_batch_is_left_between_two_steps(folder):
    """... where the other ranks wait for a message of rank 0, and get it."""
    engine, group, params, expected = leading(folder, "suffix", 30)
    with engine.batch() as batch:
        text, found = batch.add("It was", params), []
        while len(found) < 10:
            found += [token for _, event in batch.step() for token in event.tokens]
        assert group.sent[-1] != STOP and batch[text].tokens.tolist() == found == expected[: len(found)]
    assert group.sent[-1] == STOP and group.sent.count(STOP) == 1
    assert [token for event in engine.generate("It was", params) for token in event.tokens] == expected


@pytest.mark.parametrize("error, told", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), MemoryError),
    (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), WorkerError)])
def test_memory_that_runs_out_on_a_rank_is_not_another_ranks_fault(monkeypatch, error, told):
    def fails(*arguments, **options):
        raise error

    for name in ("broadcast", "all_gather"):
        monkeypatch.setattr(torch.distributed, name, fails)
    for name, number in (("get_rank", 0), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda number=number: number)
    group = ProcessGroup()
    for call in (lambda: group.broadcast_numbers((1.0,)), lambda: group.sum(torch.zeros(3))):
        with pytest.raises(told, match=r"memory|another rank is gone: Connection closed by peer"):
            call()


@pytest.mark.parametrize("name, size, quantize, complaint", [
    ("llama", 3, "none", "num_key_value_heads is 4, which is not a multiple of it; allowed: 1, 2, 4"),
    ("llama", 8, "none", "num_key_value_heads is 4"),
    ("llama", 2, "int8", "quantised to int8 cannot be divided"),
    *(pytest.param(*each, marks=pytest.mark.full) for each in (
        ("olmo2", 2, "none", "over all heads at once"),
        ("qwen3_5", 4, "none", "num_key_value_heads is 2, which is not a multiple of it; allowed: 1, 2$"),
        ("small-hybrid", 2, "none", "num_key_value_heads is 1, which is not a multiple of it; allowed: 1$")))])
def test_what_cannot_be_shared_is_refused_with_the_reason(request, name, size, quantize, complaint):
    folder = request.getfixturevalue("folder" if name == "llama" else "models")
    with pytest.raises(ModelError, match=complaint):
        shard_config(config_file.read_config(folder / name), Shard(0, size), quantize)


@given(size=st.integers(1, 5), segments=st.lists(st.integers(1, 4), min_size=1, max_size=3), columns=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_parts_are_the_whole_each_number_once(size, segments, columns):
    rows = [count * size for count in segments]
    whole = torch.arange(sum(rows) * columns * size).view(sum(rows), columns * size)
    picks = [Shard(rank, size).rows(rows) for rank in range(size)]
    parts = [pick(whole) if pick else whole for pick in picks]
    assert all(len(part) == sum(segments) for part in parts)
    assert sorted(torch.cat(parts).flatten().tolist()) == whole.flatten().tolist()
    picks = [Shard(rank, size).columns() for rank in range(size)]
    assert torch.equal(torch.cat([pick(whole) if pick else whole for pick in picks], 1), whole)


@given(size=st.integers(1, 9), vocabulary=st.integers(1, 400))
def test_every_token_is_one_ranks(size, vocabulary):
    shares = [range(vocabulary)[Shard(rank, size).vocabulary(vocabulary)] for rank in range(size)]
    assert [token for share in shares for token in share] == list(range(vocabulary))


def test_torchrun_without_the_option_and_the_option_without_torchrun_are_refused(monkeypatch, capsys):
    assert run(["generate", "x", "--tensor-parallel", "2"]) == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["generate", "x"]) == 2
    assert "with --tensor-parallel 2 they share one model" in capsys.readouterr().err
    assert run(["batch", "in", "out", "--tensor-parallel", "2", "--workers", "2"]) == 2
    assert "one text at a time" in capsys.readouterr().err
