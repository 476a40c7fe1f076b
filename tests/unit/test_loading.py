"""Where models come from: folders, the hub and its cache; and what reading them costs."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import longdraft
from helpers.checkpoints import make_checkpoint, make_heads
from helpers.terminal import terminal
from longdraft import kernels
from longdraft.__main__ import run
from longdraft.checkpoint import hub
from longdraft.cli import display
from longdraft.errors import ModelError, UsageError
from longdraft.kernels.cpu import native
from longdraft.request.sampling_params import SamplingParams

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}


class FakeHub:
    """Repositories as folders, and what was asked of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[dict[str, object]] = []
        self.fetched: set[str] = set()
        self.error: Exception | None = None

    def snapshot_download(self, repo_id: str, *, allow_patterns: list[str], **asked: object) -> str:
        if self.error:
            raise self.error
        self.asked.append({"repo_id": repo_id, **asked})
        source, target = self.root / repo_id, self.root / "cache" / "snapshots" / COMMIT
        for path in source.rglob("*"):
            name = str(path.relative_to(source))
            if path.is_file() and any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target / name)
                self.fetched.add(name)
        return str(target)

    def list_repo_files(self, repo_id: str, **asked: object) -> list[str]:
        folder = self.root / repo_id
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def hub_options(tmp_path, monkeypatch):
    fake = FakeHub(tmp_path)
    for name in ("snapshot_download", "list_repo_files"):
        monkeypatch.setattr(huggingface_hub, name, getattr(fake, name))
    return fake


def clutter(folder: Path) -> None:
    """What repositories hold beside what is needed."""
    (folder / "original").mkdir()
    for name in ("pytorch_model.bin", "consolidated.safetensors", "model.fp16.safetensors", "modeling_evil.py",
                 "original/params.json", "original/model.safetensors", "README.md", "onnx.json"):
        (folder / name).write_bytes(b"x")


def test_of_a_repository_only_what_is_needed_is_fetched(hub_options, tmp_path):
    make_checkpoint(tmp_path / "owner/model", shard="60KB")
    clutter(tmp_path / "owner/model")
    engine = longdraft.load("owner/model", drafter="plain")
    shards = {path.name for path in (tmp_path / "owner/model").glob("model-*.safetensors")}
    assert len(shards) > 1
    assert hub_options.fetched == shards | {"config.json", "generation_config.json", "tokenizer.json",
                                    "model.safetensors.index.json"}
    assert len(list(engine.generate("It", SamplingParams(max_new_tokens=3)))) == 3


def test_the_hub_is_asked_for_what_the_user_said(hub_options, tmp_path):
    make_checkpoint(tmp_path / "owner/model")
    longdraft.load("owner/model", drafter="plain", revision="v2", token="secret", cache_dir=tmp_path, offline=True)
    first, second = hub_options.asked
    assert first == {"repo_id": "owner/model", "revision": "v2", "token": "secret", "cache_dir": tmp_path,
                     "local_files_only": True}
    assert second == first | {"revision": COMMIT}  # the weights of the same commit, should the branch have moved


@pytest.mark.parametrize("name, revision, expected", [
    ("owner/model@v2", None, "v2"), ("owner/model@refs/pr/3", None, "refs/pr/3"), ("owner/model@v2", "v2", "v2"),
    ("owner/model", None, None)])
def test_a_revision_may_stand_in_the_name(hub_options, tmp_path, name, revision, expected):
    make_checkpoint(tmp_path / "owner/model")
    hub.resolve(name, hub.Hub(revision))
    assert hub_options.asked[0]["repo_id"] == "owner/model" and hub_options.asked[0]["revision"] == expected


@pytest.mark.parametrize("name, revision, message", [
    ("owner/model@v2", "v3", "has another revision than 'v3'"), ("novelist", "v3", "'novelist' is on this machine")])
def test_a_revision_that_means_nothing_is_refused(hub_options, name, revision, message):
    with pytest.raises(UsageError, match=message):
        hub.resolve(name, hub.Hub(revision))


def test_a_config_comes_without_the_weights(hub_options, tmp_path):
    make_checkpoint(tmp_path / "owner/model")
    hub.resolve("owner/model", is_config_enough=True)
    assert hub_options.fetched == {"config.json", "generation_config.json"}


def test_a_repository_of_pickles_says_so(hub_options, tmp_path):
    make_checkpoint(tmp_path / "owner/model")
    (tmp_path / "owner/model/model.safetensors").rename(tmp_path / "owner/model/consolidated.pth")
    with pytest.raises(ModelError, match=r"has no model.safetensors.*pickles, which can run code.*save_pretrained"):
        hub.resolve("owner/model")


def test_bin_weights_are_fetched_where_there_are_no_others(hub_options, tmp_path):
    model = make_checkpoint(tmp_path / "owner/model")
    (tmp_path / "owner/model/model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "owner/model/pytorch_model.bin")
    assert (hub.resolve("owner/model") / "pytorch_model.bin").exists()


def test_a_gguf_file_of_a_repository_is_fetched_alone(hub_options, tmp_path):
    folder = tmp_path / "owner/model"
    folder.mkdir(parents=True)
    for name in ("a-Q4_K_M.gguf", "a-Q8_0.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"):
        (folder / name).write_bytes(b"GGUF")
    assert hub.resolve(hub.with_file("owner/model", "a-Q8_0.gguf")).name == "a-Q8_0.gguf"
    assert hub_options.fetched == {"a-Q8_0.gguf"}
    assert hub.resolve("owner/model@v2:b-00002-of-00002.gguf").name == "b-00001-of-00002.gguf"
    assert hub_options.fetched == {"a-Q8_0.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"}
    assert hub.lasting_name("owner/model:a-Q8_0.gguf", hub.resolve("owner/model:a-Q8_0.gguf")) == (
        f"owner/model@{COMMIT}:a-Q8_0.gguf")
    with pytest.raises(ModelError, match=r"choose one with --file: a-Q4_K_M.gguf, a-Q8_0.gguf, b-00001-of-00002.gguf"):
        hub.resolve("owner/model")
    with pytest.raises(ModelError, match=r"has no file 'c\.gguf'; it has: a-Q4_K_M.gguf"):
        hub.resolve("owner/model:c.gguf")


def test_what_was_not_fetched_is_no_pickle(hub_options, tmp_path):
    """Offline, behind `doctor --model`, which fetches config.json alone."""
    make_checkpoint(tmp_path / "owner/model")
    (tmp_path / "owner/model/model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"'owner/model' is not complete in .*offline nothing is downloaded"):
        hub.resolve("owner/model", hub.Hub(offline=True))


def test_a_folder_of_pickles_says_so(tmp_path):
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "consolidated.pth")
    with pytest.raises(ModelError, match=r"consolidated.pth is a pickle, which can run code; of those only"):
        longdraft.load(str(tmp_path))


class Response:
    """As much of an HTTP answer as the hub's errors look at."""

    headers: dict[str, str] = {}  # noqa: RUF012
    request = None


@pytest.mark.parametrize("error, message", [
    (errors.GatedRepoError("403", response=Response()), "is gated; accept its terms at https://.*/owner/model and set"),
    (errors.RepositoryNotFoundError("404", response=Response()), "or it is private; check the name, and set HF_TOKEN"),
    (errors.RevisionNotFoundError("404", response=Response()), "has no revision 'v9'"),
    (errors.LocalEntryNotFoundError("no"), "is not complete in .*the hub is not reachable; check the network"),
    (errors.HFValidationError("bad\nname"), "from the hub: bad; check"),
    (errors.HTTPError("timed out"), "from the hub: timed out; check"),
    (PermissionError(13, "Permission denied"), "Permission denied"),
])
def test_what_goes_wrong_at_the_hub_is_one_line_with_its_cure(hub_options, error, message):
    hub_options.error = error
    with pytest.raises(ModelError, match=message) as caught:
        hub.resolve("owner/model@v9")
    assert len(str(caught.value).splitlines()) == 1


def fill_hub_cache(cache: Path, checkpoint: Path) -> None:
    """A cache as the hub's own client leaves it: snapshots of links into blobs, and a name for the commit."""
    repository = cache / "models--owner--model"
    for folder in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(checkpoint.iterdir())):
        shutil.copy(path, repository / "blobs" / str(number))
        (repository / "snapshots" / COMMIT / path.name).symlink_to(f"../../blobs/{number}")


GENERATE = ["generate", "It was", "--max-new-tokens", "4", "--drafter", "plain", "--ignore-eos", "--temperature", "0",
            "--model", "owner/model"]


@pytest.fixture
def cache(tmp_path) -> Path:
    """A cache of the hub that holds owner/model."""
    make_checkpoint(tmp_path / "made")
    fill_hub_cache(tmp_path / "home" / "hub", tmp_path / "made")
    return tmp_path / "home" / "hub"


@pytest.mark.parametrize("options", [["--revision", "main"], ["--model", f"owner/model@{COMMIT}"]], ids=str)
def test_the_hubs_cache_serves_without_a_network(cache, capfd, options):
    assert run([*GENERATE, "--cache-dir", str(cache), "--offline", *options]) == 0
    captured = capfd.readouterr()
    assert captured.out and captured.err == ""


@pytest.mark.full
def test_the_hubs_own_variables_say_where_its_cache_is(cache):
    """In a process of its own: the hub's library reads them when it is imported."""
    variables = {"HF_HOME": str(cache.parent), "HF_HUB_OFFLINE": "1"}
    work = subprocess.run([sys.executable, "-m", "longdraft", *GENERATE], env=ENVIRONMENT | variables,
                          capture_output=True, text=True, check=False)
    assert (work.returncode, work.stderr) == (0, "") and work.stdout


def test_what_the_cache_lacks_is_one_line(tmp_path, capfd):
    assert run([*GENERATE, "--offline", "--cache-dir", str(tmp_path)]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert f"'owner/model' is not complete in {tmp_path}, and offline nothing is downloaded; run once" in said


# What reading costs

MEASURE = """
import os, sys, torch
from pathlib import Path
from longdraft import kernels
from longdraft.checkpoint import checkpoint, config_file
from longdraft.checkpoint.tensor_files import TensorFiles

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name + ":"))

def measure(folder, dtype):
    chosen = kernels.choose("cpu", dtype)
    kernels.set_threads(1)
    chosen.linear(torch.ones(1, 64, dtype=chosen.dtype), chosen.pack(torch.ones(64, 64)))
    torch.ones(4, dtype=torch.float16).sum().isfinite()
    files, parsed = TensorFiles(folder), config_file.read_config(folder)
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("VmRSS")
    model = checkpoint.load_transformer(files, parsed, chosen)
    final = sum(linear.nbytes for linear in model.linears)  # the embedding is tied to the last
    print(folder.name, dtype, (kilobytes("VmHWM") - before) * 1024 / final, flush=True)

for folder in sorted(Path(sys.argv[1]).iterdir()):
    for dtype in ("bfloat16", "float32"):
        if not os.fork():  # a process for each, without importing all again
            measure(folder, dtype)
            os._exit(0)
        os.wait()
"""


@pytest.mark.full
@pytest.mark.skipif(not native.variants(), reason="the reference holds its weights as they come")
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory cannot be reset here")
def test_loading_takes_little_more_memory_than_the_weights(tmp_path):
    for stored in (torch.bfloat16, torch.float16, torch.float32):
        make_checkpoint(tmp_path / str(stored), dtype=stored, hidden_size=512, intermediate_size=2048,
                        num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=4, vocab_size=4096)
    work = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    found = [line.split() for line in work.stdout.splitlines()]
    assert len(found) == 6
    for stored, wanted, times in found:
        assert 0.9 < float(times) < 1.15, (stored, wanted)


def test_progress_ends_where_all_is_read(tmp_path):
    make_checkpoint(tmp_path, shard="60KB")
    seen: list[tuple[int, int]] = []
    longdraft.load(str(tmp_path), drafter="plain", on_load=lambda done, total: seen.append((done, total)))
    sizes = sum(tensor.nbytes for path in tmp_path.glob("*.safetensors") for tensor in load_file(path).values())
    assert seen[-1] == (sizes, sizes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("name", kernels.available())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_loaded_model_needs_its_files_no_more(tmp_path, dtype, name):
    make_checkpoint(tmp_path, dtype=dtype)
    make_heads(tmp_path / "heads", LlamaForCausalLM.from_pretrained(tmp_path))
    engine = longdraft.load(str(tmp_path), drafter="tokenswift", kernels_name=name)
    params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    texts = []
    for _ in range(2):
        texts.append([event.tokens for event in engine.generate("It was a dark and stormy night", params)])
        for path in tmp_path.rglob("*.safetensors"):
            with path.open("r+b") as file:
                file.write(b"\0" * path.stat().st_size)
    assert texts[0] == texts[1]


def test_a_bar_is_shown_of_large_models_only(monkeypatch, tmp_path):
    make_checkpoint(tmp_path)
    generate = ["generate", "It", "--max-new-tokens", "2", "--model", str(tmp_path), "--drafter", "plain"]
    for large, options, is_shown in ((1, [], True), (1, ["--quiet"], False), (1 << 30, [], False)):
        monkeypatch.setattr(display, "_LARGE_MODEL", large)
        with terminal("stderr") as shown:
            assert run([*generate, *options]) == 0
        assert ("kB" in shown()) == is_shown, shown()
