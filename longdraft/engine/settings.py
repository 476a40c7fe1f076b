"""Settings of loading, drafting and journals, which several commands and the server share.

`longdraft.load`, `Engine.generate` and `Engine.resume` take them by these names; they check the values.
"""

from __future__ import annotations

from longdraft.request.settings import FilePath, Number, OneOf, Pairs, Setting, Truth, ValueKind, WholeNumber

LOADING = (
    Setting("model", ValueKind(), "novelist",
            "Bundled name, folder, GGUF file, or hub id (owner/model or owner/model@revision)."),
    Setting("file", ValueKind(), None, "GGUF file to take from the folder or the hub id.", shown="the only one"),
    Setting("tokenizer", ValueKind(), None, "Folder, GGUF file or hub id of another tokenizer and chat template.",
            shown="the model's"),
    Setting("revision", ValueKind(), None, "Branch, tag or commit of a hub id.", shown="main"),
    Setting("cache_dir", FilePath(), None, "Cache folder for files from the hub.", shown="that of HF_HOME"),
    Setting("offline", Truth(), False, "Use files from the hub's cache only."),
    Setting("drafter", ValueKind(), "auto",
            "auto, plain, ngram, suffix, tokenswift, medusa, magicdec, draft-model, glide, eagle or triforce."),
    Setting("drafter_options", Pairs(), None, "KEY=VALUE for the drafter (see docs/drafters.md). Repeatable.",
            option="drafter-option"),
    Setting("heads", ValueKind(), None, "Folder or hub id of trained heads, an EAGLE head or a glide layer.",
            shown="the model's"),
    Setting("device", ValueKind(), "auto", "auto (a GPU if there is one), cpu or cuda."),
    Setting("dtype", ValueKind(), "auto",
            "auto (the checkpoint's; float16 becomes bfloat16 on the CPU), float32, bfloat16, or on CUDA float16."),
    Setting("quantize", ValueKind(), "none",
            "none, int8 or int4: weights in half or a third of the memory; file: keep the numbers of a quantised file. "
            "The text differs from the unquantised model's."),
    Setting("quantized_cache", ValueKind(), None, "Folder that keeps quantised weights for the next start, or none.",
            has_env=True, shown="the user's cache folder"),
    Setting("threads", WholeNumber(1), None, "CPU threads.", shown="PyTorch's choice"),
)
"""What every command that loads a model has."""

TENSOR_PARALLEL = Setting(
    "tensor_parallel", WholeNumber(1), 1,
    "Number of ranks that share the model. Start them with `torchrun --nproc-per-node N -m longdraft ...`.")
CACHE_RAM = Setting(
    "cache_ram", WholeNumber(0), None,
    "MiB for the prefix tree: keys and values of earlier texts, for texts that begin alike; 0: off.",
    shown="a quarter of the free memory, at most 8192; 0 on CUDA")

FSYNC = Setting(
    "fsync", ValueKind(), "1",
    "When the journal is synced to the disk, to survive a power cut: always, never, or an interval in seconds.")
SNAPSHOT = Setting(
    "snapshot", OneOf(("auto", "never", "always")), "auto",
    "Keep keys and values beside the journal, so that resuming reads a file, not the text: auto (on the CPU, after 10 "
    "seconds), never or always.")
SNAPSHOT_MAX = Setting("snapshot_max", Number(0, 1 << 20), 8, "Largest size of a text's snapshot in GiB.")
JOURNALING = (FSYNC, SNAPSHOT, SNAPSHOT_MAX)

SETTINGS = {each.name: each for each in (*LOADING, TENSOR_PARALLEL, CACHE_RAM, *JOURNALING)}
