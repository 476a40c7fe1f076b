"""OpenVINO GenAI on the CPU: its pipeline with plain decoding, prompt lookup or a smaller model, in bfloat16.

optimum-intel exports the models when they are opened. The cache has 16 bits, like that of the other engines, instead
of OpenVINO's default of 8.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import PreTrainedTokenizerFast


class TextEngine:
    def __init__(self, folder: str, threads: int, longest: int, draft: str | None = None) -> None:
        self.version = genai.__version__.split("-")[0]
        self._place = tempfile.TemporaryDirectory()
        self._settings = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16",
                          "PERFORMANCE_HINT": "LATENCY", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
                          "INFERENCE_NUM_THREADS": threads}
        self._model = self._exported(folder, "model")
        self._draft = self._exported(draft, "draft") if draft else None
        self._drafting = ""
        self._pipeline: Any = None

    def write(self, prompt: Sequence[int], count: int, lookup: int = 0, assisted: int = 0) -> list[int]:
        drafting = "lookup" if lookup else "assisted" if assisted else "plain"
        if drafting != self._drafting:
            given: dict[str, Any] = {"prompt_lookup": True} if lookup else {}
            if assisted:
                given["draft_model"] = genai.draft_model(str(self._draft), "CPU", **self._settings)
            # By default the pipeline caches prompts, so that the first token of a known prompt takes no time. Without
            # that (SchedulerConfig's enable_prefix_caching) it takes 0.9 s after 8,192 tokens, and prompt lookup is
            # slower.
            self._pipeline = genai.LLMPipeline(str(self._model), "CPU", **self._settings, **given)
            self._drafting = drafting
        config = genai.GenerationConfig()
        config.max_new_tokens, config.min_new_tokens, config.ignore_eos = count, count, True
        config.do_sample = False
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = lookup, 3
        if assisted:
            config.num_assistant_tokens = assisted
        ids = openvino.Tensor(np.array([list(prompt)], dtype=np.int64))
        return [int(token) for token in self._pipeline.generate(ids, config).tokens[0]]

    def _exported(self, folder: str, name: str) -> Path:
        place = Path(self._place.name) / name
        exported = OVModelForCausalLM.from_pretrained(folder, export=True, compile=False, stateful=True,
                                                      load_in_8bit=False)
        exported.save_pretrained(place)
        read = PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / "tokenizer.json"))
        tokenizer, detokenizer = convert_tokenizer(read, with_detokenizer=True)
        openvino.save_model(tokenizer, place / "openvino_tokenizer.xml")
        openvino.save_model(detokenizer, place / "openvino_detokenizer.xml")
        return place
