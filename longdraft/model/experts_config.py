"""The configuration of mixtures of experts (longdraft/kernels/experts.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longdraft.errors import ModelError
from longdraft.model.families import ExpertsFormat


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of every layer. `families.ExpertsFormat` explains the other fields.

    count   experts of a layer
    chosen  experts for each row
    size    width of an expert
    clamp   (alpha, limit) of the activation; None: that of the MLP
    shared  width of the expert that every row has besides; 0: there is none
    """

    count: int
    chosen: int
    size: int
    prefix: str
    names: tuple[str, str, str]
    normalises: bool
    rounds: bool
    shared: int = 0
    router: str = "gate"
    has_bias: bool = False
    clamp: tuple[float, float] | None = None
    is_beside: bool = False

    def path(self, name: str) -> str:
        """The name of a tensor in a layer."""
        return f"{self.prefix}.{name}" if self.prefix else name


def parse_experts(config: Mapping[str, Any], form: ExpertsFormat | None) -> ExpertsConfig | None:
    """From the values of a config.json. None for a model without experts. ModelError for sizes that do not fit."""
    if form is None or (form.switch and not config.get(form.switch)):
        return None
    count = int(config.get("num_local_experts") or config["num_experts"])
    chosen = int(config[form.chosen])
    size = int(config[form.size])
    if not 1 <= chosen <= count or size < 1:
        raise ModelError(f"config.json: {chosen} of {count} experts of width {size}; allowed: 1 or more of each, and "
                         "no more than there are")
    if config.get("mlp_only_layers") or int(config.get("decoder_sparse_step", 1)) != 1:
        raise ModelError("mlp_only_layers and decoder_sparse_step in config.json make some layers dense; supported: "
                         "experts in all layers")
    normalises = bool(config.get("norm_topk_prob", False)) if form.normalises is None else form.normalises
    shared = int(config[form.shared]) if form.shared else 0
    if shared < bool(form.shared):
        raise ModelError(f"{form.shared} is {shared} in config.json; allowed: 1 or more")
    clamp = (float(config["swiglu_alpha"]), float(config["swiglu_limit"])) if form.is_clamped else None
    if clamp and not (0 < clamp[0] < 100 and 0 < clamp[1] < 1e6):
        raise ModelError(f"config.json: swiglu_alpha is {clamp[0]} and swiglu_limit {clamp[1]}; allowed: positive "
                         "numbers")
    return ExpertsConfig(count, chosen, size, form.prefix, form.names, normalises, form.rounds, shared, form.router,
                         form.has_bias, clamp, form.is_beside)
