"""The import graph of the packages and of the tests, read from their syntax trees.

    graph = import_graph(ROOT, ("longdraft", "longdraft_bench"))        # module -> the modules that it imports
    affected_tests(ROOT, {Path("longdraft/server/replies.py")})         # the test files that reach a changed file
"""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("longdraft", "longdraft_bench")
# A change of these can change the outcome of any test.
_EVERYWHERE = ("pyproject.toml", "constraints.txt", "CMakeLists.txt", "tests/conftest.py")
_DOCUMENTS = (".md", ".yml", ".yaml")


def modules_of(root: Path, folder: str) -> dict[str, Path]:
    """Module name -> file of all modules below a folder of the repository. Test modules are named as imports name them:
    tests/helpers/x.py is `helpers.x`."""
    base = root if folder != "tests" else root / "tests"
    return {".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
            for pattern in ("*.py", "*.pyi") for path in (root / folder).rglob(pattern)}


def imported_names(path: Path) -> set[str]:
    """Every name that a file imports anywhere in its text: in functions and under `TYPE_CHECKING` too.

    `from a import b` counts as `a.b` and as `a`.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: imports are absolute"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def import_graph(root: Path, folders: tuple[str, ...] = PACKAGES) -> dict[str, set[str]]:
    """Module -> modules of these folders that it imports. `from a import b` leads to `a.b` where that is a module, and
    to `a` otherwise."""
    files: dict[str, Path] = {}
    for folder in folders:
        files |= modules_of(root, folder)
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        names = imported_names(path) & files.keys()
        deepest = {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
        graph[module] = deepest - {module}
    return graph


def _importers(graph: dict[str, set[str]], modules: set[str]) -> set[str]:
    """These modules, and all that import one of them, directly or through other modules."""
    importers: dict[str, set[str]] = {module: set() for module in graph}
    for module, imported in graph.items():
        for name in imported:
            importers[name].add(module)
    reached = set(modules)
    waiting = list(modules)
    while waiting:
        following = importers[waiting.pop()] - reached
        reached |= following
        waiting += following
    return reached


def changed_files(root: Path, revision: str) -> set[Path]:
    """Files that differ from a revision, relative to the repository; untracked files count."""
    def lines(*command: str) -> list[str]:
        answer = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True)
        return answer.stdout.split("\n")

    names = lines("diff", "--name-only", revision) + lines("ls-files", "--others", "--exclude-standard")
    return {Path(name) for name in names if name}


def affected_tests(root: Path, changed: Iterable[Path]) -> set[Path] | None:
    """The test files that reach one of the changed files by imports; None: all of them can be affected.

    A file that is no module (a page of the server, a bundled model) counts as all modules of the package that it lies
    in; C++ counts as the compiled module; a document as what tests/unit/test_documents.py reads.
    """
    folders = (*PACKAGES, "tests")
    files: dict[str, Path] = {}
    for folder in folders:
        files |= modules_of(root, folder)
    module_of = {path.relative_to(root): module for module, path in files.items()}
    graph = import_graph(root, folders)
    touched: set[str] = set()
    tests: set[Path] = set()
    for path in changed:
        if str(path) in _EVERYWHERE:
            return None
        if path in module_of:
            touched.add(module_of[path])
        elif path.parts[0] == "csrc":
            touched.add("longdraft.kernels.cpu._cpu")
        elif path.suffix in _DOCUMENTS or path.parts[0] in ("docs", "notebook"):
            tests.add(root / "tests" / "unit" / "test_documents.py")
        elif path.parts[0] in folders:
            touched |= {module for file, module in module_of.items() if path.parent in file.parents}
            if path.suffix == ".py":  # a module that was deleted: everything in its package may have used it
                touched.add(next((module_of[parent / "__init__.py"] for parent in path.parents
                                  if parent / "__init__.py" in module_of), "longdraft"))
    return tests | {files[module] for module in _importers(graph, touched) if files[module].name.startswith("test_")}
