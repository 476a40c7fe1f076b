"""All layers of a model for a few rows, operation by operation: for layers that `decoder.CudaDecoder` does not have.

Those are delta layers, mixtures of experts, norms on both sides, several rotations, sinks and heads of several sizes.
Each operation is row-invariant, so the texts are those of plain decoding. The host launches every kernel, so the host
limits the speed of such a step. No CUDA graph holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.cuda.prefill import prefill, with_all_rows
from longdraft.kernels.interface import AttentionOutput, LayersKV
from longdraft.kernels.layer import LayerwiseDecoder
from longdraft.kernels.weights import Geometry, LayerWeights


class CudaLayerwiseDecoder:
    """See :class:`longdraft.kernels.interface.Decoder`."""

    def __init__(self, ops: CudaOperations, layers: Sequence[LayerWeights], geometry: Geometry) -> None:
        self._ops, self._layers, self._geometry = ops, layers, geometry
        self._few_rows = LayerwiseDecoder(ops, layers, geometry)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, texts: Sequence[LayersKV],
                parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        """The rows of all texts together, or one text after another if a chunk of a prompt is among them."""
        if not any(kv.is_prompt for kv in texts):
            return self._few_rows.forward(x, cos, sin, texts, parents)
        if len(texts) == 1:
            return prefill(self._ops, self._layers, self._geometry, x, cos, sin, texts[0], parents)
        results, start = [], 0
        for kv in texts:
            own = slice(start, start + kv.k.shape[1])
            results.append(self.forward(x[own], cos[own], sin[own], [kv], parents[own]))
            start = own.stop
        attended = (with_all_rows(output, len(hidden)) for hidden, output in results)
        outputs = (torch.cat(part, 1) for part in zip(*attended, strict=True))
        return torch.cat([hidden for hidden, _ in results]), AttentionOutput(*outputs)
