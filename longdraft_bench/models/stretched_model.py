"""Write a model with the cost of a large one and the predictions of a small one.

    longdraft bench model stretched --like qwen2.5-1.5b OUT
    longdraft bench model stretched --like yarn-llama-2-7b-128k --source longdraft/bundled/novelist OUT
    longdraft bench model stretched --like qwen3.5-2b --source HYBRID OUT    # of `train lm --kind hybrid`
    longdraft generate "It was" --model OUT

The checkpoint has the large model's shape (weights, layers, KV cache) and computes the small model's function, up to
rounding. So speeds measured on it are those of the large shape, while acceptance is that of a small trained model.
Random weights predict nothing and could show neither. The small model's weights quantise worse than those of a large
model, so drafts with quantised weights are accepted less often here than on a real model of this size.

How each dimension is filled:

    width       The new channels of the residual stream stay 0 (one holds a small constant). RMSNorm divides by the root
                of the mean square, so its weight is multiplied by sqrt(d / D) and its epsilon by d / D.
    inner size  New gate and up rows are random, new down columns are 0.
    heads       A small head becomes the first heads of a group; new heads have random queries and zero outputs.
    head size   Rotary frequency j of a head of size h is frequency j H / h of a head of size H. Queries are multiplied
                by sqrt(H / h), because attention divides by sqrt(H).
    layers      New layers have random weights and zero output projections: they cost what any layer costs, and add 0.
    vocabulary  New tokens get a large negative logit from the constant channel.
    delta nets  (hybrids) A small head becomes the first channels of a large one, and the others are 0. The norm of its
                output is multiplied by sqrt(h / H). A small layer becomes a large one of the same kind.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from longdraft.checkpoint import config_file
from longdraft.checkpoint.tensor_files import INDEX, dump_json
from longdraft_bench.models.random_model import write_tokenizer
from longdraft_bench.models.stretched import Stretch, stretched_settings

_COPIED = ("tokenizer_config.json", "generation_config.json")


def stretch(source: Path, shape: dict[str, Any], target: Path) -> None:
    """Write the model of `source` in the sizes of `shape` to the new folder `target`, a file for each part."""
    settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
    small = config_file.read_config(source)
    large = stretched_settings(settings, shape)
    weights = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    parts = Stretch(small, config_file.parse_config(large), weights)
    target.mkdir(parents=True)
    dump_json(target / "config.json", large)
    write_tokenizer(target, shape["vocab_size"])
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)
    where: dict[str, str] = {}
    for number, tensors in enumerate(parts.parts()):
        file = f"model-{number:05}.safetensors"
        save_file(tensors, target / file, {"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    dump_json(target / INDEX, {"metadata": {}, "weight_map": where})
