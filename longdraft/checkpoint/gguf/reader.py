"""Values of a GGUF file's metadata by type, with errors that name the key."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from longdraft.checkpoint.gguf.container import Gguf
from longdraft.checkpoint.gguf.types import Array


class Reader:
    """Values of the metadata by type, with errors that name the key."""

    def __init__(self, model: Gguf, prefix: str) -> None:
        self._model = model
        self._prefix = prefix
        self.layers = self._all_layers = 0
        self.layers = self._all_layers = self.whole("block_count")
        if self.has("nextn_predict_layers"):  # layers for native drafts, which are the last ones
            self.layers -= int(self.number("nextn_predict_layers"))

    def has(self, key: str) -> bool:
        return f"{self._prefix}.{key}" in self._model.values

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive whole number; of an array with one for each layer, their common value."""
        value = self._common(key) if self.has(key) else default
        if value is None:
            self._model.fail(f"{self._prefix}.{key} is missing; get the file again")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._model.fail(f"{self._prefix}.{key} is {value!r}; allowed: a whole number of 1 or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._common(key) if self.has(key) else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._model.fail(f"{self._prefix}.{key} is {value!r}; allowed: a finite number")
        return shortest(value)

    def require_equal(self, key: str, value: float) -> None:
        """ModelError if a number of layers with a window differs from that of other layers."""
        if (given := self.number(key, value)) != value:
            self._model.fail(f"{self._prefix}.{key} is {given:g}; supported: {value:g}, as in layers without a window")

    def flags_or_period(self, key: str) -> int | list[Any]:
        """A number, or an array with a value for each layer."""
        name = f"{self._prefix}.{key}"
        value = self._model.values.get(name)
        if not isinstance(value, Array):
            return self.whole(key)
        if not self._fits(value):
            self._model.fail(f"{name} has {value.size} values; allowed: {self.layers}, one for each layer")
        return self._model.array(name)[: self.layers]

    def _fits(self, values: Array) -> bool:
        """Whether an array has a value for each layer, those for native drafts left out or not."""
        return values.size in (self.layers, self._all_layers)

    def text(self, key: str, default: str) -> str:
        value = self._model.values.get(f"{self._prefix}.{key}", default)
        if not isinstance(value, str):
            self._model.fail(f"{self._prefix}.{key} is {value!r}; allowed: a text")
        return value

    def _common(self, key: str) -> Any:
        name = f"{self._prefix}.{key}"
        value = self._model.values[name]
        if not isinstance(value, Array):
            return value
        values = self._model.array(name)[: self.layers] if self._fits(value) else []
        if not values or any(other != values[0] for other in values):
            self._model.fail(f"{name} must have {self.layers} equal values, one for each layer; models whose layers "
                             "differ are not supported")
        return values[0]


def shortest(value: float) -> float:
    """The shortest decimal that is this number in float32."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
