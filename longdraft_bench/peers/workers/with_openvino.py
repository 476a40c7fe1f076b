"""OpenVINO on the CPU: the stateful model that optimum-intel exports, with weights and cache in bfloat16.

OpenVINO's default is an 8-bit cache, which changes the text and is not compared here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino
from optimum.intel import OVModelForCausalLM

_PREFILL_ROWS = 1024  # rows of a forward while a prompt is read


class StepEngine:
    def __init__(self, folder: str, threads: int, longest: int) -> None:
        self.version = openvino.__version__.split("-")[0] + " (bfloat16 cache)"
        exported = OVModelForCausalLM.from_pretrained(folder, export=True, compile=False, stateful=True,
                                                      load_in_8bit=False)
        settings = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16", "PERFORMANCE_HINT": "LATENCY",
                    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "INFERENCE_NUM_THREADS": threads}
        compiled = openvino.Core().compile_model(exported.model, "CPU", settings)
        self._request = compiled.create_infer_request()
        self._inputs = {name for port in compiled.inputs for name in port.names}
        self._length = 0

    def prefill(self, tokens: Sequence[int]) -> None:
        self._request.reset_state()
        self._length = 0
        for start in range(0, len(tokens), _PREFILL_ROWS):
            self._forward(tokens[start : start + _PREFILL_ROWS])

    def fill(self, length: int, limit_s: float) -> tuple[str, int]:
        self.prefill([5])
        rng = np.random.default_rng(5)
        for state in self._request.query_state():
            _, heads, _, dim = state.state.shape
            keys = rng.standard_normal((1, heads, length, dim), dtype=np.float32)
            state.state = openvino.Tensor(keys)
        self._length = length
        return "random", length

    def step(self, token: int) -> int:
        return int(self._forward([token]).argmax())

    def _forward(self, tokens: Sequence[int]) -> np.ndarray:
        end = self._length + len(tokens)
        given = {
            "input_ids": np.array([list(tokens)], dtype=np.int64),
            "attention_mask": np.ones((1, end), dtype=np.int64),
            "position_ids": np.arange(self._length, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        self._request.infer({name: value for name, value in given.items() if name in self._inputs})
        self._length = end
        logits: np.ndarray = self._request.get_tensor("logits").data[0, -1]
        return logits
