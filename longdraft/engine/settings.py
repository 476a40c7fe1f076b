"""Settings of loading, drafting and journals, which several commands and the server share.

`longdraft.load`, `Engine.generate` and `Engine.resume` take them by these names, and check them.
"""

from __future__ import annotations

from pathlib import Path

from longdraft.request.settings import Range, Setting

LOADING = (
    Setting("model", str, "novelist",
            "Bundled name, folder, GGUF file, or hub id (owner/model or owner/model@revision)."),
    Setting("file", str, None, "GGUF file to take from the folder or the hub id.", shown="the only one"),
    Setting("tokenizer", str, None, "Folder, GGUF file or hub id of another tokenizer and chat template.",
            shown="the model's"),
    Setting("chat_template", Path, None, "File with another chat template, in jinja's language.",
            shown="the tokenizer's"),
    Setting("revision", str, None, "Branch, tag or commit of a hub id.", shown="main"),
    Setting("cache_dir", Path, None, "Cache folder for files from the hub.", shown="that of HF_HOME"),
    Setting("offline", bool, False, "Use files from the hub's cache only."),
    Setting("drafter", str, "auto",
            "auto, plain, ngram, suffix, tokenswift, medusa, magicdec, draft-model, glide, eagle, block or triforce."),
    Setting("drafter_options", dict[str, str], None, "KEY=VALUE for the drafter (see docs/drafters.md). Repeatable.",
            option="drafter-option"),
    Setting("heads", str, None, "Folder or hub id of trained heads, an EAGLE or block head or a glide layer; auto: a "
            "public head for the model.", shown="the model's"),
    Setting("device", str, "auto", "auto (a GPU if there is one), cpu or cuda."),
    Setting("dtype", str, "auto",
            "auto (the checkpoint's; float16 becomes bfloat16 on the CPU), float32, bfloat16, or on CUDA float16."),
    Setting("quantize", str, "auto",
            "none, int8 or int4: weights in half or a third of the memory; file: keep the numbers of a quantised file; "
            "auto: file for quantised files, else none. The text differs from the unquantised model's."),
    Setting("quantized_cache", str, None, "Folder that keeps quantised weights for the next start, or none.",
            has_env=True, shown="the user's cache folder"),
    Setting("threads", int, None, "CPU threads.", Range(1, 1024), shown="PyTorch's choice"),
)
"""What every command that loads a model has."""

TENSOR_PARALLEL = Setting(
    "tensor_parallel", int, 1,
    "Number of ranks that share the model. Start them with `torchrun --nproc-per-node N -m longdraft ...`.",
    Range(1, 1024))
CACHE_RAM = Setting(
    "cache_ram", int, None,
    "MiB for the prefix tree: keys and values of earlier texts, for texts that begin alike; 0: off.",
    Range(0, 1 << 30, words="0 to 1073741824 MiB"), shown="a quarter of the free memory, at most 8192; 0 on CUDA")

FSYNC = Setting(
    "fsync", str, "1",
    "When the journal is synced to the disk, to survive a power cut: always, never, or an interval in seconds.")
SNAPSHOT = Setting(
    "snapshot", str, "auto",
    "Keep keys and values beside the journal, so that resuming reads a file, not the text: auto (on the CPU, after 10 "
    "seconds), never or always.")
SNAPSHOT_MAX = Setting("snapshot_max", float, 8, "Largest size of a text's snapshot in GiB.")
JOURNALING = (FSYNC, SNAPSHOT, SNAPSHOT_MAX)

SETTINGS = {each.name: each for each in (*LOADING, TENSOR_PARALLEL, CACHE_RAM, *JOURNALING)}
