"""Mixtures of experts: a router chooses some of many MLPs for each row (Shazeer et al. 2017, Jiang et al. 2024).

    p = softmax(router x);   y = sum over the chosen experts e, in ascending order, of  w[e] * expert[e](x)

with w[e] = p[e], divided by the sum over the chosen ones if the model does so. A shared expert, if there is one, is
added last, with the weight sigmoid(gate x). Rows that chose the same expert are multiplied together, so an expert's
weights are read once. Where ranks share the model, each has a part of the width of every expert, and y is summed over
them. A row's result does not depend on the other rows: products are row-invariant, the softmax and the sorting work on
each row by itself, and a row's sum has a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from longdraft.kernels.weights import Experts, Linear


class ExpertOperations(Protocol):
    """The operations of an expert. See :class:`longdraft.kernels.interface.Kernels`."""

    def linear(self, x: Tensor, weight: Linear, *, keep_float: bool = False) -> Tensor: ...

    def swiglu(self, gate_up: Tensor) -> Tensor: ...

    def geglu(self, gate_up: Tensor) -> Tensor: ...

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor: ...

    def route(self, logits: Tensor, experts: Experts) -> Routing: ...

    def sigmoid(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class GroupsExperts(Protocol):
    """Operations that have the products of all experts in one."""

    def grouped_experts(self, x: Tensor, experts: Experts, routed: Tensor | None) -> Tensor | None:
        """As `experts_forward`; None for experts whose weights are not of one form."""


class Routing(NamedTuple):
    """The experts of some rows, best first, and their weights."""

    experts: Tensor  # int64 [R, k]
    weights: Tensor  # float32 [R, k]


def route(logits: Tensor, experts: Experts) -> Routing:
    """The routing for logits [R, E] in the model's dtype, in PyTorch.

    Of equal probabilities the lower index comes first. A row that is not finite chooses the first experts, and its
    weights are NaN.
    """
    probabilities = torch.softmax(logits.float(), -1)
    ordered, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights, chosen = ordered[:, : experts.chosen], order[:, : experts.chosen]
    if experts.normalises:
        total = weights[:, 0]
        for column in weights.unbind(1)[1:]:  # one after another: the order is the same for any number of rows
            total = total + column
        weights = weights / total[:, None]
    if experts.scales is not None:
        weights = weights * experts.scales[chosen]
    return Routing(chosen, weights.to(logits.dtype).float() if experts.rounds else weights)


def experts_forward(ops: ExpertOperations, x: Tensor, experts: Experts, routed: Tensor | None = None) -> Tensor:
    """The mixture's outputs for rows x [R, hidden], in the dtype of x, operation by operation.

    routed  the rows that the router sees; None: x

    The compiled decoder computes the same in one call (csrc/mixture.cpp).
    """
    if isinstance(ops, GroupsExperts) and (grouped := ops.grouped_experts(x, experts, routed)) is not None:
        return grouped
    chosen, weights = ops.route(ops.linear(x if routed is None else routed, experts.router), experts)
    gated = ops.geglu if experts.has_gelu else ops.swiglu
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in torch.unique(chosen).tolist():  # ascending
        rows, ranks = torch.where(chosen == index)
        expert = experts.mlps[index]
        gate_up = ops.linear(x[rows], expert.gate_up)
        inner = ops.clamped_swiglu(gate_up, *experts.clamp) if experts.clamp else gated(gate_up)
        total[rows] += ops.linear(inner, expert.down, keep_float=True) * weights[rows, ranks, None]
    if (shared := shared_expert(ops, x, experts)) is not None:
        total += shared[0] * shared[1]
    return (experts.complete(total) if experts.complete else total).to(x.dtype)


def shared_expert(ops: ExpertOperations, x: Tensor, experts: Experts) -> tuple[Tensor, Tensor] | None:
    """The shared expert's outputs [R, hidden] float32 for rows x, and their weights [R, 1]; None: there is none."""
    if experts.shared is None or experts.shared_gate is None:
        return None
    inner = ops.swiglu(ops.linear(x, experts.shared.gate_up))
    weight = ops.sigmoid(ops.linear(x, experts.shared_gate, keep_float=True))
    return ops.linear(inner, experts.shared.down, keep_float=True), weight
