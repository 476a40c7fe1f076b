"""What the core (`make test`) runs of a test's parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def extent(values: Iterable[Any], core: Collection[Any]) -> list[Any]:
    """Parameters of a test: those of the core, and all others with the mark `full`. A tuple has several of them."""
    values = list(values)
    assert all(each in values for each in core), "the core has a parameter that the test has not"
    rest = pytest.mark.full
    return [value if value in core else
            pytest.param(*value, marks=rest) if isinstance(value, tuple) else pytest.param(value, marks=rest)
            for value in values]
