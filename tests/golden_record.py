"""The golden record: what the package writes, hashes and launches at one commit. A later commit that only moves or
renames code must find the same.

    python tests/golden_record.py record tests/promise/golden/record.json     # where a change was meant
    python tests/golden_record.py compare tests/promise/golden/record.json    # before and after each step

Both take `--only configs|families|bundled|launches` (several times), and `compare` takes `--quick`: a third of the
drafters, which is what tests/promise/test_golden_record.py does.

    configs   `ModelConfig.sha256` and the weights' fingerprint, by which journals know a model: every family, as GGUF
              too, and the bundled models with their parts
    families  texts of every family x kernels x dtype, and what each kind of drafter proposed (helpers/golden_texts.py)
    bundled   the same of the bundled models, with many sampling laws, structured output, and batches
    launches  what the CUDA path launches in Triton's interpreter (helpers/golden_launches.py)

What it promises. An entry is the same in each run at one commit on one machine: with one thread or two, alone or beside
other work. Entries belong to the kernels that computed them; `record` on a machine with further kernels adds theirs and
keeps the others, and `compare` skips, with a word, what a machine lacks.

On another machine (`made_by`: processor capability, versions of PyTorch, transformers, Triton and the C library) the
texts of `portable` and of `avx2` are still compared. Every product is written out with its fused operations, sums have
a fixed order, and samplers use functions of the package. Three things come from outside: the random weights, which
PyTorch draws (their fingerprints are recorded; where they differ, the family's texts are not compared); `exp` and
`log1p` of the C library in the gates of delta layers (so hybrids are compared with the same C library only); and
PyTorch's sine and cosine of rotations. The numbers of drafted tokens are compared on the same kind of machine only:
glide, EAGLE and partial caches compute parts of a draft with PyTorch's products, whose order of sums is its own.

The reference kernels take all products from PyTorch. Their texts are not recorded; that drafters agree with each other
there is checked (`reference_disagreements`). The counts of `auto` depend on the clock and are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SECTIONS = ("configs", "families", "bundled", "launches")
FILE = Path(__file__).parent / "promise" / "golden" / "record.json"
Leaves = dict[tuple[str, ...], Any]  # path -> hash or number. A path begins with the section and the kernels


def made_by() -> dict[str, str]:
    """What an entry may depend on beside the package."""
    import importlib.metadata

    import torch

    return {"processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "library": " ".join(platform.libc_ver()),
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "triton")
               if name != "triton" or has_triton()}}


def has_triton() -> bool:
    import importlib.util

    return importlib.util.find_spec("triton") is not None


# Measurements: each yields paths with what was found

def configs(root: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    from helpers import golden_texts
    from helpers.families import make_family
    from helpers.gguf_files import convert
    from longdraft.checkpoint import hub
    from longdraft.checkpoint.config_file import read_config
    from longdraft.checkpoint.tensor_files import TensorFiles
    from longdraft.journal.config_hash import config_sha256

    def of(name: str, path: Path) -> Iterator[tuple[tuple[str, ...], str]]:
        yield ("configs", "any", name), golden_texts.short(config_sha256(read_config(path)))
        yield ("weights", "any", name), golden_texts.short(TensorFiles(path).fingerprint())

    for family in golden_texts.EVERY_FAMILY:
        folder = root / "configs" / family
        model = make_family(folder, family)
        yield from of(family, folder)
        if family in golden_texts.AS_GGUF:
            convert(folder, model, folder / "model.gguf")
            yield from of(f"{family}, GGUF", folder / "model.gguf")
    for name in golden_texts.BUNDLED:
        folder = hub.resolve(name)
        yield from of(name, folder)
        yield from of(f"{name}, draft", folder / "draft")


def families(root: Path, variants: Sequence[str], is_whole: bool,
             names: Sequence[str] | None = None) -> Iterator[tuple[tuple[str, ...], str]]:
    """names: of the families; default: all"""
    from helpers import golden_texts

    for place, family in enumerate(golden_texts.EVERY_FAMILY if names is None else names):
        folder = root / "families" / family
        golden_texts.make_parts(folder, family)
        for turn, (variant, dtype) in enumerate((variant, dtype) for variant in variants
                                                for dtype in golden_texts.DTYPES):
            row = golden_texts.family_row(folder, variant, dtype, golden_texts.drafters_of(place + turn, is_whole))
            yield from ((("families", variant, dtype, family, name), found) for name, found in row.items())


def bundled(variants: Sequence[str], is_whole: bool) -> Iterator[tuple[tuple[str, ...], str]]:
    """Not whole: a third of the drafters, and a third of the laws for all but the first model and kernels."""
    from helpers import golden_texts

    engines = [(variant, name, dtype) for variant in variants for name, dtypes in golden_texts.BUNDLED.items()
               for dtype in dtypes]
    for turn, (variant, name, dtype) in enumerate(engines):
        engine = golden_texts.bundled_engine(name, variant, dtype)
        laws = [(index, law) for index, law in enumerate([*golden_texts.bundled_laws(), "batch"])
                if is_whole or not turn or (index + turn) % 3 == 0]
        for index, law in laws:
            kinds = golden_texts.drafters_of(index + turn, is_whole)
            row = golden_texts.batch_row(engine, kinds) if law == "batch" else golden_texts.bundled_row(
                engine, law, kinds)
            yield from ((("bundled", variant, dtype, f"{name}, {law}", key), found) for key, found in row.items())


def launches(root: Path, cases: Sequence[tuple[str, str]] | None = None) -> Iterator[tuple[tuple[str, ...], Any]]:
    """cases: of `golden_launches.CASES`; default: all"""
    from helpers import golden_launches

    folder = golden_launches.make_model(root / "launches")
    for case in golden_launches.CASES if cases is None else cases:
        for name, row in golden_launches.launch_rows(folder, *case).items():
            yield from ((("launches", golden_launches.KERNELS, name, key), found) for key, found in row.items())


def reference_disagreements(root: Path, names: Sequence[str]) -> list[str]:
    """Drafters that write another text than the plain one on the reference kernels, of families by name."""
    found = families(root, ["reference"], False, names)
    return [" / ".join(path) for path, entry in found if entry == "other text"]


def compiled_variants() -> list[str]:
    from longdraft.kernels import REFERENCE, available

    return [name for name in available() if name != REFERENCE]


def can_count_launches() -> bool:
    """Whether Triton's interpreter stands for the device."""
    import torch

    return has_triton() and not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "1"


def measured(root: Path, sections: Sequence[str] = SECTIONS, is_whole: bool = True) -> Leaves:
    """What this commit does on this machine. root: an empty folder for models."""
    variants, found = compiled_variants(), Leaves()
    if "configs" in sections:
        found |= dict(configs(root))
    if "families" in sections:
        found |= dict(families(root, variants, is_whole))
    if "bundled" in sections:
        found |= dict(bundled(variants, is_whole))
    if "launches" in sections and can_count_launches():
        found |= dict(launches(root))
    return found


# The file: sections / kernels / ... / row, one row a line

def _nested(leaves: Leaves) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        part = tree
        for name in path[:-1]:
            part = part.setdefault(name, {})
        part[path[-1]] = leaf
    return tree


def _flat(tree: Any, path: tuple[str, ...] = ()) -> Leaves:
    if not isinstance(tree, dict):
        return {path: tree}
    return {place: leaf for name, part in tree.items() for place, leaf in _flat(part, (*path, name)).items()}


def _written(tree: Any, indent: str = "") -> str:
    if not isinstance(tree, dict) or not any(isinstance(part, dict) for part in tree.values()):
        return json.dumps(tree)
    parts = [f"{indent} {json.dumps(name)}: {_written(part, indent + ' ')}" for name, part in tree.items()]
    return "{\n" + ",\n".join(parts) + f"\n{indent}}}"


def read(file: Path = FILE) -> Leaves:
    return _flat(json.loads(file.read_text()))


def write(file: Path, found: Leaves, made: dict[str, str]) -> None:
    """Replace the entries of the sections and kernels that `found` has, and keep the others."""
    groups = {path[:2] for path in found}
    kept = {path: leaf for path, leaf in (read(file) if file.exists() else {}).items()
            if path[:2] not in groups and path[1:3] not in groups}
    origins = {("made by", *group, name): value for group in groups for name, value in made.items()}
    leaves = kept | origins | found
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_written(_nested(dict(sorted(leaves.items())))) + "\n")


# The comparison

def differences(recorded: Leaves, found: Leaves, made: dict[str, str], is_whole: bool = False) -> list[str]:
    """The entries that are not as recorded, in words.

    is_whole  entries that were recorded and not found are differences too
    """
    groups = {path[:2] for path in found}
    known = {path[:2] for path in recorded}
    lines = []
    for path, entry in found.items():
        if path[:2] in known and _is_comparable(path, recorded, found, made) and recorded.get(path) != entry:
            lines.append(f"{' / '.join(path)}: recorded {recorded.get(path, 'nothing')!r}, found {entry!r}")
        elif entry == "other text":
            lines.append(f"{' / '.join(path)}: not the plain text")
    lines += [f"{' / '.join(path)}: recorded {entry!r}, found nothing" for path, entry in recorded.items()
              if is_whole and path[:2] in groups and path not in found and not _needs_llguidance(path)]
    return lines


def _needs_llguidance(path: tuple[str, ...]) -> bool:
    import importlib.util

    return path[-2].endswith("structured") and importlib.util.find_spec("llguidance") is None


def _is_comparable(path: tuple[str, ...], recorded: Leaves, found: Leaves, made: dict[str, str]) -> bool:
    """Whether an entry must be as recorded: always where it was made on a machine like this one."""
    from helpers.families import HYBRIDS

    origin = {name: recorded.get(("made by", *path[:2], name)) for name in made}
    if origin == made or path[0] == "configs":
        return True
    if path[0] == "families" and path[-1] == "text":
        family = path[3]
        weights = ("weights", "any", family)
        return recorded.get(weights) == found.get(weights) and (
            family not in HYBRIDS or origin["library"] == made["library"])
    return path[0] == "bundled" and path[-1] == "text"


def unmeasured(recorded: Leaves, found: Leaves) -> list[str]:
    """Sections and kernels of the record that this run has not measured."""
    groups = {path[:2] for path in recorded if path[0] != "made by"} - {path[:2] for path in found}
    return sorted(" / ".join(group) for group in groups)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="The golden record of texts, configurations and launches.")
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", action="append", choices=SECTIONS)
    parser.add_argument("--quick", action="store_true", help="compare a third of the drafters")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    if given.action == "record" and given.quick:
        parser.error("a record is whole; leave --quick out")
    sections = given.only or SECTIONS
    from longdraft import kernels

    kernels.set_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"  # costs that `auto` measures
        # The weights say which texts can be compared.
        found = measured(Path(folder), [*sections, *(["configs"] if "families" in sections else [])], not given.quick)
    if given.action == "record":
        write(given.file, found, made_by())
        print(f"{len(found)} entries recorded in {given.file}")
        return 0
    recorded = read(given.file)
    lines = differences(recorded, found, made_by(), not given.quick)
    for group in unmeasured(recorded, found):
        print(f"not measured here: {group}")
    print("\n".join([*lines, f"{len(found)} entries compared, {len(lines)} differences"]))
    return 1 if lines else 0


if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read at Triton's first import
    sys.exit(main(sys.argv[1:]))
