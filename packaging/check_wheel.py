"""Checks of a wheel before it is published: `python packaging/check_wheel.py [--installed] WHEEL`.

The file: size, compiled kernels, bundled models, metadata. With --installed also the package that this interpreter
imports: its kernels are the compiled ones, and two drafters write one text.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

MAX_BYTES = 80 << 20  # of the file; the largest part are the bundled models
MODELS = ("novelist", "novelist-gqa")


def problems_of_file(path: Path) -> list[str]:
    """What is wrong with a wheel's file; nothing if it can be published."""
    problems = []
    if path.stat().st_size > MAX_BYTES:
        problems.append(f"the file has {path.stat().st_size:,} bytes; allowed: at most {MAX_BYTES:,}")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(wheel.read(metadata).decode())
        points = wheel.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    if not any(name.startswith("longdraft/kernels/cpu/_cpu.") for name in names):
        problems.append("the compiled kernels are missing; was there a C++ compiler?")
    problems += [f"the bundled model {model} is missing" for model in MODELS
                 if f"longdraft/bundled/{model}/model.safetensors" not in names]
    problems += [f"{name} does not belong into the package" for name in names
                 if not name.startswith(("longdraft/", "longdraft_bench/", "longdraft-")) and ".libs/" not in name]
    if "longdraft = longdraft.__main__:main" not in points:
        problems.append("the command is missing")
    wanted = {"Name": "longdraft", "Requires-Python": "<3.14,>=3.11", "License-Expression": "Apache-2.0"}
    problems += [f"the metadata field {field} is {fields[field]!r}; wanted: {value!r}"
                 for field, value in wanted.items() if fields[field] != value]
    if fields["Version"] != path.name.split("-")[1]:
        problems.append(f"the version in the metadata is {fields['Version']}, the file's name says otherwise")
    return problems


def problems_of_installed() -> list[str]:
    """What is wrong with the package that is imported here."""
    import longdraft

    if Path(longdraft.__file__).is_relative_to(Path.cwd()):
        return ["the package of the current folder is imported; run this from another folder"]
    params = longdraft.SamplingParams(max_new_tokens=200, seed=7, min_p=0.1)
    texts = {}
    for drafter in ("plain", "magicdec"):
        with longdraft.load(drafter=drafter) as engine:
            *events, last = engine.generate("It was the best of times,", params)
            texts[drafter] = "".join(event.text for event in [*events, last])
            kernels = last.stats["kernels"]
    problems = [] if kernels != "reference" else ["the compiled kernels cannot be loaded"]
    return problems + ([] if texts["plain"] == texts["magicdec"] else ["two drafters write different texts"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--installed", action="store_true", help="check the installed package too")
    asked = parser.parse_args()
    problems = problems_of_file(asked.wheel) + (problems_of_installed() if asked.installed else [])
    for problem in problems:
        print(f"{asked.wheel.name}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
