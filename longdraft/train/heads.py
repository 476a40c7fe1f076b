"""TokenSwift's chained heads as a module that learns (paper 3.1), and the frozen model under it.

    x_j = x_{j-1} + W_j RMSNorm_in(x_{j-1})      x_0 = the last layer's output, before the final norm
    logits_j = LM_head(RMSNorm_out(x_j))         the loss of head j at row t is that of token t + 1 + j

No row of the heads looks at another, so a long sequence is cut into runs of rows whose logits are made,
differentiated and dropped one run at a time: [heads, tokens, vocabulary] never exists at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from longdraft.errors import ModelError, UsageError
from longdraft.model.checkpoint import HEADS_PREFIX, TensorFiles, dump_json
from longdraft.model.config import ModelConfig, read
from longdraft.model.heads import KIND
from longdraft.train.checkpoint import write_tensors
from longdraft.train.data import Tokens

CPU_RUN_ELEMENTS = 2**21  # logits of a run; float32 they still fit the second-level cache of a server's core
GPU_RUN_ELEMENTS = 2**28
TOP = 3
IGNORED = -100


@dataclass(frozen=True)
class Base:
    """A frozen model: rows of hidden states in, logits out."""

    folder: Path
    config: ModelConfig
    fingerprint: str
    initializer_range: float
    body: nn.Module  # its final norm taken out
    final_norm: Tensor  # [hidden]
    head_weight: Tensor  # [V, hidden]
    saved_dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        """Rows of the last layer before the final norm, [B * L, hidden] float32, of ids [B, L]."""
        hidden: Tensor = self.body(input_ids=ids, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1).float()

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [R, V] float32 of normalised rows [R, hidden]; differentiable in the rows."""
        return functional.linear(normed.to(self.head_weight.dtype), self.head_weight).float()


def load_base(folder: Path, dtype: str, device: str) -> Base:
    """The frozen model of a folder. ModelError where a file or tensor is missing or not supported."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise UsageError(f"training needs {error.name}; pip install 'longdraft[train]'") from error

    config = read(folder)
    fingerprint = TensorFiles(folder).fingerprint()
    logging.disable_progress_bar()
    saved = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    compute = saved if dtype == "auto" else {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=compute, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"cannot load {folder}: {str(error).strip().splitlines()[0]}") from error
    if report["missing_keys"]:
        raise ModelError(f"{folder} lacks the tensors {', '.join(sorted(report['missing_keys']))}")
    model.requires_grad_(False).eval().to(device)
    body, norm = model.model, model.model.norm.weight.detach().float()
    # With an identity in its place the body returns what the heads read: the rows before the final norm.
    body.norm = nn.Identity()
    spread = float(getattr(model.config, "initializer_range", 0.02))
    head_weight = model.get_output_embeddings().weight.detach()
    return Base(folder, config, fingerprint, spread, body, norm, head_weight, saved)


def choose_device(device: str) -> str:
    """cpu or cuda, for auto: the GPU where there is one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is 'cuda', but PyTorch sees no GPU; give --device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


class Head(nn.Module):
    """One link of the chain. The names of its parameters are those of TokenSwift's checkpoints."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.post_layernorm = nn.RMSNorm(hidden, eps)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The next x [R, hidden] float32; only the product is made in `dtype`."""
        normed = self.input_layernorm(x).to(dtype)
        return x + functional.linear(normed, self.linear.weight.to(dtype)).float()


class TokenSwiftHeads(nn.Module):
    """The chain, in float32. `init` says how it begins; `sample` is a sequence [1, L] of the training data.

    identity  linear 0; the output norm is the model's final norm; the input norm is the usual size of a
              hidden row. Every head then begins by saying what the model says of the next token.
    paper     norms 1, linear normal(0, initializer_range).

    Why not the paper's: a normalised row has size 1, the hidden rows of a trained model have a size of
    their own (20 in the bundled one), and Adam moves an entry by about the learning rate a step whatever
    its gradient: W spends hundreds of steps growing to where it can be heard. With the input norm at that
    size the entries of W are of the identity's order, and the rate no longer depends on the model's scale.

    Measured on the bundled model, validation loss summed over 3 heads after 200 steps of 4,096 tokens:

        learning rate   5e-3    1e-2    2e-2
        paper           20.08           19.22
        identity        19.11   19.00   18.95      after 600 steps: 18.89, 18.87; 18.87 at 3e-2
    """

    def __init__(self, base: Base, num_heads: int, init: str, seed: int, sample: Tokens) -> None:
        super().__init__()
        self.medusa_layers = nn.ModuleList(
            Head(base.config.hidden_size, base.config.rms_norm_eps) for _ in range(num_heads))
        generator = torch.Generator().manual_seed(seed)
        size = base.hidden(as_ids(sample, base.device)).square().mean(-1).sqrt().median()
        with torch.no_grad():
            for head in self._heads():
                if init == "identity":
                    head.linear.weight.zero_()
                    head.input_layernorm.weight.fill_(float(size))
                    head.post_layernorm.weight.copy_(base.final_norm)
                else:
                    head.linear.weight.normal_(std=base.initializer_range, generator=generator)
        self.to(base.device)

    def _heads(self) -> Iterator[Head]:
        for layer in self.medusa_layers:
            assert isinstance(layer, Head)
            yield layer

    def forward(self, hidden: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Normalised rows [R, hidden] of each head in turn, for rows of hidden states [R, hidden]."""
        for head in self._heads():
            hidden = head(hidden, dtype)
            yield head.post_layernorm(hidden)

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameters for the optimizer: decay pulls a linear map to zero, but would pull a norm from one."""
        maps = [head.linear.weight for head in self._heads()]
        norms = [norm.weight for head in self._heads()
                 for norm in (head.input_layernorm, head.post_layernorm)]
        return [{"params": maps, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]


def as_ids(sequences: Tokens, device: torch.device) -> Tensor:
    return torch.from_numpy(sequences).long().to(device)


def targets(ids: Tensor, num_heads: int) -> Tensor:
    """What each head should say: [heads, B * L], IGNORED where the sequence ends before it.

    ids            a b c d e f
    head 1         c d e f . .      row t speaks of token t + 2
    head 2         d e f . . .      row t speaks of token t + 3
    """
    rows = torch.full((num_heads, *ids.shape), IGNORED, dtype=torch.long, device=ids.device)
    for j in range(1, num_heads + 1):
        rows[j - 1, :, : -(1 + j)] = ids[:, 1 + j :]
    return rows.flatten(1)


def _runs(base: Base, count: int) -> Iterator[slice]:
    elements = CPU_RUN_ELEMENTS if base.device.type == "cpu" else GPU_RUN_ELEMENTS
    rows = max(64, elements // base.config.vocab_size)
    return (slice(start, start + rows) for start in range(0, count, rows))


def accumulate(heads: TokenSwiftHeads, base: Base, ids: Tensor, scale: float) -> Tensor:
    """Add `scale` times the loss's gradient to the heads' `.grad`; each head's mean loss [heads].

    The loss is the sum over heads of the mean cross-entropy over their rows.
    """
    hidden, wanted = base.hidden(ids), targets(ids, len(heads.medusa_layers))
    counts = (wanted != IGNORED).sum(1)
    losses = torch.zeros(len(wanted), device=ids.device)
    for run in _runs(base, len(hidden)):
        total = torch.zeros((), device=ids.device)
        for j, normed in enumerate(heads(hidden[run], base.head_weight.dtype)):
            loss = functional.cross_entropy(base.logits(normed), wanted[j, run], ignore_index=IGNORED,
                                            reduction="sum") / counts[j]
            losses[j] += loss.detach()
            total = total + loss
        (total * scale).backward()  # type: ignore[no-untyped-call]
    return losses


class HeadMetrics(NamedTuple):
    """Validation of one head: mean cross-entropy in nats, and how often the token is its first (three)."""

    loss: float
    top1: float
    top3: float


@torch.no_grad()
def evaluate(heads: TokenSwiftHeads, base: Base, sequences: Tokens) -> list[HeadMetrics]:
    """Each head's validation over sequences [N, L]."""
    sums = torch.zeros(len(heads.medusa_layers), 4, dtype=torch.float64)  # loss, top 1, top 3, rows
    for sequence in sequences:
        ids = as_ids(sequence[None], base.device)
        hidden, wanted = base.hidden(ids), targets(ids, len(sums))
        for run in _runs(base, len(hidden)):
            for j, normed in enumerate(heads(hidden[run], base.head_weight.dtype)):
                known = wanted[j, run] != IGNORED
                target = wanted[j, run][known]
                if len(target):
                    sums[j] += _score(base.logits(normed[known]), target).cpu()
    return [HeadMetrics(*(row[:3] / row[3]).tolist()) for row in sums]


def _score(logits: Tensor, target: Tensor) -> Tensor:
    own = logits.gather(1, target[:, None])
    rank = (logits > own).sum(1)
    loss = functional.cross_entropy(logits, target, reduction="sum")
    return torch.stack([loss.double(), (rank < 1).sum().double(), (rank < TOP).sum().double(),
                        torch.tensor(float(len(target)), dtype=torch.float64, device=logits.device)])


def export(folder: Path, heads: TokenSwiftHeads, base: Base, name: str, training: dict[str, Any]) -> None:
    """Write `config.json` and `model.safetensors`, as longdraft.model.heads.load reads them."""
    prefix = HEADS_PREFIX.removesuffix("medusa_layers.")
    tensors = {prefix + key: p.detach().to("cpu", base.saved_dtype) for key, p in heads.named_parameters()}
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    dump_json(folder / "config.json", {
        "kind": KIND,
        "base_model": name,
        "hidden_size": base.config.hidden_size,
        "vocab_size": base.config.vocab_size,
        "num_heads": len(heads.medusa_layers),
        "base_sha256": base.fingerprint,
        "training": training,
    })
