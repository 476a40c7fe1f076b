"""The structure of the packages: imports point down the floors, names are unique, and `--help` starts fast."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from helpers.import_graph import import_graph, imported_names, modules_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "longdraft"
MODULES = modules_of(ROOT, "longdraft")

# Lower floors know nothing of higher ones. `version` and `errors` may be read from anywhere.
FLOORS = {
    "version": 0, "errors": 0, "request": 0, "kernels": 0,
    "cache": 1, "parallel": 1, "system": 1,
    "model": 2,
    "checkpoint": 3, "sampling": 3,
    "text": 4,
    "parts": 5,
    "speculation": 6,
    "drafters": 7, "journal": 7,
    "engine": 8,
    "report": 9, "book": 9,
    "cli": 10, "batch": 10, "train": 10, "server": 10,
    "__main__": 11, "__init__": 11,
}
# The command line mounts the trainers' own commands, runs batch jobs and starts the server; other doors do not know
# one another.
DOORS_MAY_IMPORT = {("cli", "batch"), ("cli", "train"), ("cli", "server")}
DOORS = 10  # the floor whose packages do not import one another


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit_of(module: str) -> str:
    """longdraft.cache.full -> cache; longdraft -> __init__"""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path: Path) -> set[str]:
    """The modules of the package that a file imports."""
    return imported_names(path) & MODULES.keys() - {"longdraft"}


def test_imports_point_down_the_floors():
    problems = []
    for path in modules():
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for module in imports_of(path):
            there = unit_of(module)
            if there not in FLOORS:
                problems.append(f"{module} stands on no floor; give it one")
            elif here != there and (here, there) not in DOORS_MAY_IMPORT:
                below = FLOORS[there] < FLOORS[here] or FLOORS[here] == FLOORS[there] < DOORS
                if not below:
                    problems.append(f"{path.relative_to(PACKAGE)} (floor {FLOORS[here]}) imports {module} "
                                    f"(floor {FLOORS[there]})")
    assert not problems


def circles(graph: dict[str, set[str]]) -> set[str]:
    """The nodes that are left after removing, again and again, those without edges and those without edges to them."""
    left = set(graph)
    while True:
        targets = {target for node in left for target in graph[node] & left}
        kept = {node for node in left if graph[node] & left and node in targets}
        if kept == left:
            return left
        left = kept


def test_modules_do_not_import_one_another_in_circles():
    """... within a package, in functions and under `TYPE_CHECKING` included."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == {"a", "b", "c"}
    assert not circles(import_graph(ROOT))


def test_no_two_units_import_one_another():
    graph: dict[str, set[str]] = {}
    for path in modules():
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        graph.setdefault(here, set()).update(unit_of(module) for module in imports_of(path))
    both = {(a, b) for a in graph for b in graph[a] if a < b and a in graph.get(b, ())}
    assert not both


def public_types(path: Path) -> set[str]:
    """Names of a file's classes and type aliases."""
    body = ast.parse(path.read_text()).body
    aliases = {node.targets[0].id for node in body if isinstance(node, ast.Assign)
               and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Subscript)}
    classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
    return {name for name in aliases | classes if name[0].isupper() and not name.isupper()}


def test_no_two_public_types_share_a_name():
    count = Counter(name for path in modules() for name in public_types(path))
    assert not {name for name, places in count.items() if places > 1}


MEASUREMENTS = ROOT / "longdraft_bench"


def packages_imported_by(path: Path) -> set[str]:
    """Names of the packages that a file imports, anywhere in its text."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_the_product_imports_nothing_of_the_measurements():
    """... which are a package of their own, and are found by an entry point."""
    assert MEASUREMENTS.is_dir()
    assert [path for path in modules() if "longdraft_bench" in packages_imported_by(path)] == []


def test_measurements_find_what_they_import():
    """... except the programs of other engines, whose packages another environment has."""
    pytest.importorskip("httpx", reason="needs httpx; pip install '.[dev]'")
    pytest.importorskip("matplotlib", reason="needs matplotlib; pip install '.[bench]'")
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(MEASUREMENTS.rglob("*.py"))
             if "workers" not in path.parts and "cuda" not in path.parts]
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_help_does_not_wait_for_heavy_imports():
    code = ("import sys; from longdraft.__main__ import run; status = run(['--help']);"
            "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'pyarrow'} & set(sys.modules);"
            "sys.exit(status or len(heavy))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
