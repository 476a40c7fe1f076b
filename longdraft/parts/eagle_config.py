"""The dialects of EAGLE heads: which folder has one, and what its config.json means.

    bare          SafeAILab/EAGLE and SpecForge: the layer's sizes, `draft_vocab_size`, `eagle_config`
    speculators   vllm-project/speculators: `speculators_model_type`, sizes in `transformer_layer_config`
    EAGLE-1, -2   the layer's sizes and nothing else: recognised by the tensors
    P-EAGLE       any of the first two with the tensor `mask_hidden` and the id of a mask token

The dialects differ in defaults and in what the numbers of the tapped layers mean. Both errors are silent: the head
loads and its guesses are rejected. `layer_readings` has the possible meanings; longdraft/parts/eagle_probe.py tries
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longdraft.checkpoint.config_file import read_json
from longdraft.checkpoint.tensor_files import TensorFiles, has_weights
from longdraft.errors import ModelError
from longdraft.model.config import ModelConfig
from longdraft.parts.block_config import is_block_config
from longdraft.parts.head_config import flag, layer_config, layer_entries, mask_token, positive_number, with_entries_of

FC = "fc.weight"
_FIRST_Q = "layers.0.self_attn.q_proj.weight"
MASK_HIDDEN = "mask_hidden"
PARALLEL_KIND = "peagle"
_EAGLE_KINDS = ("eagle3", "eagle", PARALLEL_KIND)
_LATER_KINDS = {"xpress": "its refiner"}  # speculators that are not EAGLE, and what longdraft lacks for them
# The id of the mask token: of speculators and NeMo, of earlier versions of speculators and Amazon's heads, of vLLM.
_MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token")
_BIASES = ("attention_bias", "mlp_bias", "qkv_bias")


@dataclass(frozen=True)
class EagleConfig:
    """An EAGLE head.

    version               3, or 1 for the layout that EAGLE-1 and EAGLE-2 share
    layer                 sizes and RoPE of its layers
    target_width          width of the target's rows
    tapped_ids            numbers of the target's layers in config.json; (): the default ones
    uses_taps             whether it reads several layers of the target; else its last rows, after the final norm
    draft_vocab_size      tokens that it can guess
    norm_before_residual  the residual of the first layer is the normalised row; None: config.json does not say
    norm_before_fc        the tapped rows are normalised together, before fc
    fc_norm               they are normalised each by itself, before fc (EAGLE 3.1)
    norm_output           the row that is fed back is normalised (EAGLE 3.1); None: config.json says so, but SpecForge
                          writes that for heads which it trained without
    window                rows that its attention was trained with; 0: all
    mask_token            id of the token in the rows that guess further places in one pass (P-EAGLE); None: the head
                          guesses one token after the other
    """

    version: int
    layer: ModelConfig
    target_width: int
    tapped_ids: tuple[int, ...]
    uses_taps: bool
    draft_vocab_size: int
    norm_before_residual: bool | None
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool | None
    window: int
    mask_token: int | None = None

    @property
    def num_taps(self) -> int:
        return len(self.tapped_ids) or 3

    @property
    def is_parallel(self) -> bool:
        """Whether it guesses several places in one pass."""
        return self.mask_token is not None


def canonical_names(files: TensorFiles) -> dict[str, str]:
    """Our names of the tensors in a head's file -> those of the file."""
    legacy = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
    names = {}
    for name in files.names():
        own = name.removeprefix("model.")
        own = f"layers.0.{own.removeprefix('midlayer.')}" if own.startswith("midlayer.") else own
        first = own.partition(".")[0]
        names[own.replace(first, legacy[first], 1) if first in legacy else own] = name
    return names


def is_eagle(folder: Path) -> bool:
    """Whether a folder has an EAGLE head, or a kind of speculator that longdraft refuses by name."""
    if not (folder / "config.json").is_file():
        return False
    config = read_json(folder / "config.json")
    if {"speculators_model_type", "speculators_config", "dflash_config", "target_layer_ids", "eagle_config",
            "draft_vocab_size"} & config.keys():
        return True
    if any("eagle3" in name.lower() for name in _architectures(config)):
        return True
    if "medusa_num_heads" in config or not has_weights(folder):
        return False
    files = TensorFiles(folder)
    names = canonical_names(files)
    has_layer = FC in names and _FIRST_Q in names and "layers.1.self_attn.q_proj.weight" not in names
    return has_layer and len(files.shape(names[FC])) == 2 and files.shape(names[FC])[1] > files.shape(names[FC])[0]


def read_eagle_config(folder: Path, files: TensorFiles) -> EagleConfig:
    """The configuration in a head's folder. Raises ModelError for kinds and layers that longdraft does not have."""
    config = read_json(folder / "config.json")
    _refuse_other_kinds(folder, config)
    eagle = with_entries_of(config, "eagle_config")
    is_speculators = "speculators_model_type" in config
    sizes = layer_entries(folder, config)
    names = canonical_names(files)
    version = _version(files, names)
    for bias in (*_BIASES, *(("bias",) if version == 3 else ())):
        if sizes.get(bias) or config.get(bias):
            raise ModelError(f"{folder}: {bias} is true in config.json; longdraft's EAGLE layers have no biases; use a "
                             "head without them")
    layer, window = _layer(folder, sizes, names)
    width = positive_number(folder, config, "target_hidden_size", layer.hidden_size)
    uses_taps = version == 3 and eagle.get("use_aux_hidden_state", True) is not False
    is_parallel = config["speculators_model_type"] == PARALLEL_KIND if is_speculators else MASK_HIDDEN in names
    if is_parallel and not uses_taps:
        raise ModelError(f"{folder}: the head guesses in one pass (P-EAGLE), but does not read several layers of the "
                         "model; longdraft has this for EAGLE-3 alone")
    return EagleConfig(
        version=version,
        layer=layer,
        target_width=width,
        tapped_ids=_tapped_ids(folder, eagle),
        uses_taps=uses_taps,
        draft_vocab_size=positive_number(folder, config, "draft_vocab_size", layer.vocab_size),
        norm_before_residual=flag(eagle, "norm_before_residual",
                                  None if is_speculators and not is_parallel else False),
        norm_before_fc=bool(flag(eagle, "norm_before_fc", False)),
        fc_norm=bool(flag(eagle, "fc_norm", bool(flag(eagle, "use_aux_norm", False)))),
        norm_output=(False if is_parallel or not flag(eagle, "norm_output", False)  # of a row that is not fed back
                     else True if is_speculators else None),
        window=window,
        mask_token=mask_token(folder, eagle, layer.vocab_size, _MASK_TOKENS) if is_parallel else None,
    )


def layer_readings(config: EagleConfig, num_layers: int) -> list[tuple[int, ...]]:
    """The possible meanings of the tapped layers' numbers, as boundaries (`Taps`), the likeliest first.

    An engine's id is the number of the layer that a row enters, or of the layer that it leaves, which is one less.
    Ids that begin with 0 or 1 are the latter: a first tap that early is what the default is in that numbering.
    Empty: none fits a model of this many layers.
    """
    if config.version != 3 or not config.uses_taps:
        return [(num_layers,)]
    if not config.tapped_ids:
        return [(2, num_layers // 2, num_layers - 3)]
    entered, left = config.tapped_ids, tuple(layer + 1 for layer in config.tapped_ids)
    readings = [left, entered] if entered[0] <= 1 else [entered, left]
    return [layers for layers in readings if layers[-1] <= num_layers]


def _refuse_other_kinds(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("speculators_model_type")
    if is_block_config(config):
        raise ModelError(f"{folder} has a block head, not an EAGLE head; give it by --heads with --drafter block, "
                         "or put it into the folder block of the model")
    if kind is not None and kind not in _EAGLE_KINDS:
        lacks = _LATER_KINDS.get(str(kind))
        raise ModelError(f"{folder} has a drafter of the kind {kind!r}, which longdraft does not load yet"
                         + (f"; it lacks {lacks}" if lacks else "")
                         + "; supported: eagle3, peagle, mtp, EAGLE-1 and EAGLE-2, and block heads")


def _architectures(config: Mapping[str, Any]) -> list[str]:
    named = config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def _version(files: TensorFiles, names: Mapping[str, str]) -> int:
    """3 where queries are made from two rows, the token's and the target's; else 1."""
    if _FIRST_Q not in names:
        raise ModelError(f"{files.folder} has neither {_FIRST_Q} nor midlayer.self_attn.q_proj.weight; an EAGLE head "
                         "has one of them")
    shapes = [files.shape(names[name]) for name in (_FIRST_Q, "layers.0.self_attn.o_proj.weight") if name in names]
    return 3 if len(shapes) == 2 and all(len(s) == 2 for s in shapes) and shapes[0][1] == 2 * shapes[1][0] else 1


def _layer(folder: Path, sizes: Mapping[str, Any], names: Mapping[str, str]) -> tuple[ModelConfig, int]:
    """Sizes and RoPE of the layers, and their window."""
    kind = sizes.get("model_type")
    if kind not in ("llama", "qwen3", "qwen2"):
        raise ModelError(f"{folder}: the head's layers are of the type {kind!r}; supported: llama, qwen2, qwen3")
    layer = layer_config({"num_hidden_layers": 1, **sizes}, names)
    types, window = sizes.get("layer_types") or [], sizes.get("sliding_window")
    if "sliding_attention" not in types:
        return layer, 0
    if set(types) != {"sliding_attention"} or not isinstance(window, int) or window < 1:
        raise ModelError(f"{folder}: layer_types mixes kinds, or sliding_window is {window!r}; allowed: one window for "
                         "all layers, of 1 row or more, or none")
    return layer, window


def _tapped_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return ()
    are_numbers = isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)
    if not are_numbers or ids != sorted(set(ids)):
        raise ModelError(f"{folder}: eagle_aux_hidden_state_layer_ids is {ids!r}; allowed: layer numbers, ascending")
    return tuple(ids)
