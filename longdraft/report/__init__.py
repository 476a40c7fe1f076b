"""Reports: tables, figures and one-file HTML pages, for `longdraft generate --report` and for the benchmarks.

    longdraft generate "It was" --report report.html
"""

from __future__ import annotations

from importlib.util import find_spec

from longdraft.errors import missing_extra

PACKAGES = ("matplotlib", "pandas", "tabulate")  # of the extra `bench`, which figures and tables are made with


def require_packages(option: str, packages: tuple[str, ...] = PACKAGES) -> None:
    """Raise UsageError before any work if a package that `option` needs is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise missing_extra(option, " and ".join(missing), "bench")
