"""Quantised weights are cached on disk: read if they are whole, made anew if not, and never in the way of a start."""

from __future__ import annotations

import logging
import os
import shutil
import time

import pytest
import torch
from rich.console import Console

import longdraft
from helpers.equality import params_of, prompt_of
from longdraft.checkpoint import packed_file, quantized_cache
from longdraft.cli.display import LoadBar
from longdraft.kernels import Kernels
from longdraft.kernels.cpu.kernels import CpuKernels
from longdraft.kernels.formats import int4

PARAMS = longdraft.SamplingParams(max_new_tokens=8, seed=3, ignore_eos=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for the cache, in which small models are cached too."""
    monkeypatch.setattr(quantized_cache, "_MIN_BYTES", 0)
    return tmp_path / "cache"


def text_of(model, folder, quantize="int4", **options) -> str:
    engine = longdraft.load(str(model), drafter="plain", quantize=quantize, quantized_cache=folder, **options)
    return list(engine.generate("It was", PARAMS))[-1].stats["sha256_tokens"]


@pytest.fixture
def packs(monkeypatch):
    """The matrices that were quantised since the fixture was made."""
    packed, pack = [], CpuKernels.pack

    def counted(self, weight, bias=None, *, quantize="none"):
        if quantize != "none" and weight.shape != (70, 100):  # not the small matrix of the file's name
            packed.append(quantize)
        return pack(self, weight, bias, quantize=quantize)

    monkeypatch.setattr(CpuKernels, "pack", counted)
    return packed


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gqa", "mha"])
def test_weights_from_the_file_are_those_that_were_quantised(tiny, folder, packs, family, dtype, quantize):
    made = text_of(tiny[family], folder, quantize, dtype=dtype)
    quantised = len(packs)
    assert text_of(tiny[family], folder, quantize, dtype=dtype) == made and len(packs) == quantised > 0
    assert text_of(tiny[family], "none", quantize, dtype=dtype) == made
    assert len(list(folder.iterdir())) == 1


def test_products_with_a_matrix_from_the_file_are_equal_to_the_bit(folder):
    kernels: Kernels = load_kernels()
    weight, bias, x = torch.randn(130, 70), torch.randn(130), torch.randn(3, 70)
    ordered = int4.quantise(weight)._replace(order=torch.randperm(70))
    for i, (quantize, numbers) in enumerate((("int8", weight), ("int4", weight), ("int4", ordered))):
        path = folder / f"m-{i}-k.safetensors"
        shape, makes = (130, 70), lambda q=quantize, w=numbers: kernels.pack(w, bias, quantize=q)
        first = packed_file.PackedFile(path, kernels)
        made = first.linear("m", quantize, shape, True, makes)
        first.save()
        read = packed_file.PackedFile(path, kernels).linear("m", quantize, shape, True, lambda: pytest.fail("not read"))
        assert torch.equal(kernels.linear(x, read), kernels.linear(x, made))


def load_kernels() -> CpuKernels:
    from longdraft import kernels

    return kernels.choose("cpu", "float32")


def test_a_draft_copy_is_cached_too(tiny, folder, packs):
    for _ in range(2):
        engine = longdraft.load(str(tiny["gqa"]), drafter="magicdec", drafter_options={"draft_weights": "int4"},
                                quantized_cache=folder)
        assert engine.loaded.draft_copy.weights.quantize == "int4"
    once = len(packs)
    longdraft.load(str(tiny["gqa"]), drafter="magicdec", drafter_options={"draft_weights": "int4"},
                   quantized_cache="none")
    assert len(packs) == 2 * once
    plain = longdraft.load(str(tiny["gqa"]), drafter="plain")
    texts = {list(made.generate(prompt_of(60), params_of("paper")))[-1].stats["sha256_tokens"]
             for made in (plain, engine)}
    assert len(texts) == 1


@pytest.mark.parametrize("damage", ["a flipped byte", "cut", "empty", "not a safetensors file", "another matrix"])
def test_a_damaged_file_is_noticed_and_made_anew(tiny, folder, caplog, damage):
    made = text_of(tiny["gqa"], folder)
    file, = folder.iterdir()
    whole = file.read_bytes()
    if damage == "a flipped byte":
        file.write_bytes(whole[:-3000] + bytes([whole[-3000] ^ 1]) + whole[-2999:])
    elif damage == "another matrix":
        path = folder / "other-name-key.safetensors"
        other = packed_file.PackedFile(path, load_kernels())
        other.linear("m", "int4", (64, 32), False, lambda: load_kernels().pack(torch.ones(64, 32), quantize="int4"))
        other.save()
        path.rename(file)
    else:
        file.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "not a safetensors file": b"x" * 100}[damage])
    with caplog.at_level(logging.WARNING):
        assert text_of(tiny["gqa"], folder) == made
    assert "quantising again" in caplog.text
    assert file.read_bytes() == whole


def test_files_of_other_layouts_are_removed_and_those_of_other_models_stay(tiny, folder):
    text_of(tiny["gqa"], folder)
    file, = folder.iterdir()
    outdated = file.with_name(file.name.rsplit("-", 1)[0] + "-0123456789abcdef.safetensors")
    file.rename(outdated)
    abandoned, written = outdated.with_suffix(".123"), outdated.with_suffix(".124")  # by processes
    for partial, age in ((abandoned, 7200), (written, 60)):
        partial.write_bytes(b"x")
        os.utime(partial, (time.time() - age,) * 2)
    text_of(tiny["mha"], folder)
    assert outdated.exists() and abandoned.exists()
    text_of(tiny["gqa"], folder)
    assert file.exists() and written.exists() and not outdated.exists() and not abandoned.exists()


def test_a_full_disk_and_a_folder_that_cannot_be_written_cost_one_line(tiny, folder, caplog, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    made = text_of(tiny["gqa"], "none")
    with caplog.at_level(logging.WARNING):
        assert text_of(tiny["gqa"], tmp_path / "file" / "cache") == made
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(packed_file.shutil, "disk_usage", lambda path: usage._replace(free=10))
        assert text_of(tiny["gqa"], folder) == made
        monkeypatch.undo()
        monkeypatch.setattr(quantized_cache, "_MIN_BYTES", 0)

        def full(file: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(packed_file.os, "fsync", full)
        assert text_of(tiny["gqa"], folder) == made
    lines = [record.getMessage() for record in caplog.records if "not cached" in record.getMessage()]
    assert len(lines) == 3 and all("--quantized-cache" in line for line in lines)
    assert "No space left on device" in lines[2] and not list(folder.iterdir())


def test_the_folder_is_the_options_the_variables_or_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv(quantized_cache.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert quantized_cache.chosen_folder(None) == tmp_path / "longdraft" / "quantized"
    monkeypatch.setenv(quantized_cache.CACHE_VARIABLE, str(tmp_path / "a"))
    assert quantized_cache.chosen_folder(None) == tmp_path / "a"
    assert quantized_cache.chosen_folder(tmp_path / "b") == tmp_path / "b"
    assert quantized_cache.chosen_folder("none") is None
    monkeypatch.setenv(quantized_cache.CACHE_VARIABLE, "none")
    assert quantized_cache.chosen_folder(None) is None


def test_small_weights_unquantised_weights_and_the_reference_kernels_are_not_cached(tiny, tmp_path, monkeypatch):
    text_of(tiny["gqa"], tmp_path)
    monkeypatch.setattr(quantized_cache, "_MIN_BYTES", 0)
    text_of(tiny["gqa"], tmp_path, "none")
    text_of(tiny["gqa"], tmp_path, kernels_name="reference")
    assert not os.listdir(tmp_path)


def test_the_bar_says_what_is_done_and_ends_with_loading(monkeypatch):
    monkeypatch.setattr(Console, "is_terminal", True)
    large, bar = 1 << 31, LoadBar(quiet=False)
    with bar:
        shown = []
        for done in (large // 2, large, 5, large):  # the second reading quantises
            bar.show(done, large)
            task, = bar._progress.tasks
            shown.append((task.description, task.completed))
        assert shown == [("loading", large // 2), ("loading", large), ("quantising", 5), ("quantising", large)]
        assert bar._progress.live.is_started
    bar.show(5, large)
    assert not bar._progress.live.is_started


def test_a_copy_is_read_with_progress_from_the_beginning(tiny):
    seen: list[tuple[int, int]] = []
    longdraft.load(str(tiny["gqa"]), drafter="magicdec", drafter_options={"draft_weights": "int4"},
                   on_load=lambda done, total: seen.append((done, total)))
    restarts = [i for i in range(1, len(seen)) if seen[i][0] < seen[i - 1][0]]
    assert len(restarts) == 1 and seen[restarts[0] - 1][0] == seen[-1][0] == seen[0][1]
