"""transformers: bfloat16, scaled-dot-product attention, DynamicCache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache


class StepEngine:
    def __init__(self, folder: str, threads: int, longest: int) -> None:
        torch.set_num_threads(threads)
        self.version = f"{transformers.__version__} (torch {torch.__version__})"
        self._model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16,
                                                           attn_implementation="sdpa").eval()
        self._cache = DynamicCache()

    def prefill(self, tokens: Sequence[int]) -> None:
        self._cache = DynamicCache()
        if tokens:
            self._forward(tokens)

    def fill(self, length: int, limit_s: float) -> tuple[str, int]:
        config = self._model.config
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._cache = DynamicCache()
        for layer in range(config.num_hidden_layers):
            k, v = (torch.randn(1, heads, length, dim).to(torch.bfloat16) for _ in range(2))
            self._cache.update(k, v, layer)
        return "random", length

    def step(self, token: int) -> int:
        return int(self._forward([token]).argmax())

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int]) -> torch.Tensor:
        given = torch.tensor([list(tokens)])
        logits: torch.Tensor = self._model(given, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        return logits[0, -1]


class TextEngine:
    """`generate`: plain, prompt lookup (`lookup` tokens) or assisted by a smaller model (`assisted`)."""

    def __init__(self, folder: str, threads: int, longest: int, draft: str | None = None) -> None:
        torch.set_num_threads(threads)
        self.version = f"{transformers.__version__} (torch {torch.__version__})"
        self._model = self._load(folder)
        self._draft = self._load(draft) if draft else None

    def write(self, prompt: Sequence[int], count: int, lookup: int = 0, assisted: bool = False) -> list[int]:
        given = torch.tensor([list(prompt)])
        drafting: dict[str, Any] = {"prompt_lookup_num_tokens": lookup} if lookup else {}
        if assisted:  # assisted generation rejects min_new_tokens
            drafting["assistant_model"] = self._draft
        else:
            drafting["min_new_tokens"] = count
        with torch.inference_mode():
            tokens = self._model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count,
                                          do_sample=False, **drafting)
        return [int(token) for token in tokens[0, len(prompt) :]]

    @staticmethod
    def _load(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
