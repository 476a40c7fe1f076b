"""The kinds of block heads: which folder has one, and what its config.json means.

    DFlash, JetSpec   `dflash_config`; layers as Qwen3's, the target's embeddings and output head
    DFlash2           the same with convolutions and a selector of pairs
    DSpark            `target_layer_ids` at the top level; a Markov head and a confidence head
    GGUF              the architecture `dflash` of llama.cpp, with the parts of any of them
    speculators       `speculators_model_type` dflash, dflash2 or dspark, sizes in `transformer_layer_config`

The same tensors mean different things in these files, and a head that is read wrongly loads and drafts badly: the
numbers of the tapped layers, attention inside the block, and whether the first row guesses. What a file leaves open is
None here; longdraft/parts/block_probe.py settles it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from longdraft.checkpoint.config_file import read_json
from longdraft.checkpoint.gguf.block_head import block_head_config, is_block_head
from longdraft.errors import ModelError
from longdraft.model.config import ModelConfig
from longdraft.parts.head_config import flag, layer_config, layer_entries, mask_token, positive_number, with_entries_of

BlockKind = Literal["dflash", "dflash2", "dspark"]
_KINDS: dict[Any, BlockKind] = {kind: kind for kind in get_args(BlockKind)}
_MOST_ROWS = 64  # of a block; published ones have 7 to 16
_LAYER_TYPES = ("full_attention", "sliding_attention")
_REFUSED = {"attention_bias": "biases", "mlp_bias": "biases", "attention_sink_bias": "attention sinks"}


@dataclass(frozen=True)
class BlockConfig:
    """A block head.

    layer            sizes and RoPE of its layers
    target_width     width of the target's rows
    layers           of the target, as boundaries (`Taps`); (): the default ones of speculators
    other_layers     the same if the file counts otherwise than its format does: by the layers that rows enter, not by
                     those that they leave, or the other way round
    block_size       rows of a block: the text's last token and masks
    mask_token       id of the masks
    windows          rows of the text that each of its layers was trained with; 0: all
    causal           for each of its layers, whether a row of the block sees the rows before it only
    says_causal      the file says so; else it is assumed that layers with a window do
    first_guesses    the row of the text's last token guesses the next token, so that B rows give B guesses; else each
                     mask guesses its own position. None: the file does not say
    adjacent         RoPE turns adjacent dimensions
    draft_vocab_size tokens that it can guess
    embedding_scale, logits_scale, logits_cap  factors of the embeddings and of the logits, and the soft cap; 0: none
    rank             of the pair terms
    conv_taps, conv_group  rows of a convolution, and channels with one kernel (DFlash2)
    """

    kind: BlockKind
    layer: ModelConfig
    target_width: int
    layers: tuple[int, ...]
    other_layers: tuple[int, ...]
    block_size: int
    mask_token: int
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    says_causal: bool
    first_guesses: bool | None
    adjacent: bool
    draft_vocab_size: int
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float = 0.0
    rank: int = 0
    conv_taps: int = 0
    conv_group: int = 1

    @property
    def num_taps(self) -> int:
        return len(self.layers) or 3


def is_block(folder: Path) -> bool:
    """Whether a folder, or a GGUF file, has a block head."""
    if folder.is_file():
        return is_block_head(folder)
    return (folder / "config.json").is_file() and is_block_config(read_json(folder / "config.json"))


def is_block_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a block head."""
    kind = config.get("speculators_model_type")
    return kind in get_args(BlockKind) or (kind is None and bool({"dflash_config", "target_layer_ids"} & config.keys()))


def read_block_config(folder: Path, names: Mapping[str, str], vocabulary: int) -> BlockConfig:
    """The configuration in a head's folder or GGUF file. names: of its tensors, by ours; vocabulary: of the target.
    Raises ModelError for what is not supported."""
    config = (block_head_config(folder, vocabulary) if folder.is_file() else read_json(folder / "config.json"))
    is_speculators = "speculators_model_type" in config
    given = with_entries_of(config, "dflash_config")
    sizes = layer_entries(folder, config)
    for name, word in _REFUSED.items():
        if sizes.get(name) or given.get(name):
            raise ModelError(f"{folder}: {name} is true in config.json; longdraft's block heads have no {word}; use a "
                             "head without them")
    kind = _kind(config)
    layer = layer_config(sizes, names)
    windows, default_causal = _attention(folder, {**sizes, **given}, layer.num_layers)
    says = next((name for name in ("is_causal", "causal", "causal_head") if given.get(name) is not None), None)
    causal = (bool(flag(given, says, None)),) * layer.num_layers if says else default_causal
    if is_speculators and given.get("sliding_window_non_causal"):
        causal = (False,) * layer.num_layers
    block = positive_number(folder, given, "block_size", 8)
    if not 2 <= block <= _MOST_ROWS:
        raise ModelError(f"{folder}: block_size is {block} in config.json; allowed: 2 to {_MOST_ROWS}")
    layers = _boundaries(folder, given, is_speculators)
    return BlockConfig(
        kind=kind, layer=layer,
        target_width=positive_number(folder, config, "target_hidden_size", layer.hidden_size),
        layers=layers, other_layers=tuple(each + (1 if is_speculators else -1) for each in layers),
        block_size=block, mask_token=mask_token(folder, given, layer.vocab_size), windows=windows, causal=causal,
        says_causal=says is not None or is_speculators,
        first_guesses=_first_guesses(given, kind, is_speculators),
        adjacent=flag(given, "is_neox_style", True) is False,
        draft_vocab_size=positive_number(folder, given, "draft_vocab_size", layer.vocab_size),
        embedding_scale=_factor(folder, given, "input_embedding_scale"),
        logits_scale=_factor(folder, given, "output_multiplier"),
        logits_cap=_factor(folder, given, "final_logit_softcapping", 0.0),
        rank=_rank(folder, given, kind),
        conv_taps=positive_number(folder, given, "conv_kernel_size", 2) if kind == "dflash2" else 0,
        conv_group=positive_number(folder, given, "conv_group_size", 16) if kind == "dflash2" else 1,
    )


def _kind(config: Mapping[str, Any]) -> BlockKind:
    named = config.get("speculators_model_type")
    if named in _KINDS:
        return _KINDS[named]
    keys = with_entries_of(config, "dflash_config").keys()
    architectures = str(config.get("architectures"))
    if "selector_rank" in keys or "DFlash2" in architectures:
        return "dflash2"
    return "dspark" if "markov_rank" in keys or "DSpark" in architectures else "dflash"


def _attention(folder: Path, given: Mapping[str, Any], count: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """The window of each layer, and whether it is causal inside the block unless the file says otherwise."""
    types: Any = given.get("layer_types") or ["full_attention"] * count
    if not isinstance(types, list) or len(types) != count or not all(each in _LAYER_TYPES for each in types):
        raise ModelError(f"{folder}: layer_types is {str(types)[:200]} in config.json; allowed: {count} times "
                         f"{' or '.join(_LAYER_TYPES)}")
    window = given.get("sliding_window")
    if given.get("use_swa"):
        types = ["sliding_attention"] * count
        window = given.get("swa_window_size", window)
    if "sliding_attention" in types and (type(window) is not int or window < 1):
        raise ModelError(f"{folder}: sliding_window is {window!r} in config.json; allowed: 1 or more rows")
    slides = tuple(each == "sliding_attention" for each in types)
    return tuple(int(window or 0) if each else 0 for each in slides), slides


def _boundaries(folder: Path, given: Mapping[str, Any], is_speculators: bool) -> tuple[int, ...]:
    name = "aux_hidden_state_layer_ids" if is_speculators else "target_layer_ids"
    ids = given.get(name)
    if ids is None and is_speculators:
        return ()
    least = 0 if is_speculators else -1  # the output of no layer: the embedding
    if not isinstance(ids, list) or not ids or not all(type(each) is int and each >= least for each in ids) or (
            ids != sorted(set(ids))):
        raise ModelError(f"{folder}: {name} is {str(ids)[:200]} in config.json; allowed: numbers of the model's "
                         "layers, ascending; engines that guessed them read other rows than the head was trained with")
    return tuple(each if is_speculators else each + 1 for each in ids)


def _first_guesses(given: Mapping[str, Any], kind: BlockKind, is_speculators: bool) -> bool | None:
    says = flag(given, "sample_from_anchor", None)
    if says is not None:
        return says
    if is_speculators:
        return None if kind == "dspark" else False
    return kind == "dspark"


def _rank(folder: Path, given: Mapping[str, Any], kind: BlockKind) -> int:
    if kind == "dflash":
        return 0
    if kind == "dflash2":
        return positive_number(folder, given, "selector_rank", 256)
    head = given.get("markov_head_type", "vanilla")
    if head != "vanilla":
        raise ModelError(f"{folder}: markov_head_type is {head!r} in config.json; supported: vanilla")
    return positive_number(folder, given, "markov_rank", 256)


def _factor(folder: Path, given: Mapping[str, Any], name: str, default: float = 1.0) -> float:
    value = given.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e6:
        raise ModelError(f"{folder}: {name} is {value!r} in config.json; allowed: a positive number")
    return float(value)
