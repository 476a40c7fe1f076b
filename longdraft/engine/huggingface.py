"""longdraft for loaded models of `transformers`, with its GenerationConfig and its streamers.

    writer = longdraft.from_transformers(model, tokenizer, drafter="auto")
    ids = writer.generate(inputs.input_ids, max_new_tokens=20_000, do_sample=True, min_p=0.1, streamer=streamer)

    ids = model.generate(**inputs, max_new_tokens=20_000, custom_generate=longdraft.hf_generate, drafter="auto")

Greedy texts equal those of `model.generate`. In bfloat16, rounding may change a token if two are about equally likely.
Sampled texts have the same distribution and are reproducible with `seed` or with torch's generator. Options that
longdraft does not support raise a UsageError that names them.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longdraft import drafters, kernels
from longdraft.checkpoint import checkpoint, config_file, defaults, hub
from longdraft.checkpoint.state_dict import StateDict, with_single_experts
from longdraft.checkpoint.tensor_file import text_entries
from longdraft.engine.engine import Engine
from longdraft.engine.generation import Generation
from longdraft.engine.loaded_model import DrafterChoice, LoadedModel
from longdraft.errors import UsageError, check, missing_extra
from longdraft.parts.public_heads import chosen_heads
from longdraft.request.sampling_params import MAX_SEED, SamplingParams
from longdraft.text.chat_template import ChatTemplate
from longdraft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

# Options of a GenerationConfig that longdraft does not support, with the values that mean "off".
_REFUSED: dict[str, tuple[Any, ...]] = defaults.FOREIGN | {
    "num_return_sequences": (1,), "dola_layers": (), "max_time": (), "token_healing": (False,),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores", "output_logits"), (False,)),
}
# What `model.generate` creates from supported options: the option, and the attribute that has its value. Other
# processors and criteria, and those with other values, come from the caller and are refused.
_MADE_OF = {
    "TemperatureLogitsWarper": ("temperature", "temperature"), "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"), "MinPLogitsWarper": ("min_p", "min_p"),
    "TypicalLogitsWarper": ("typical_p", "mass"), "EtaLogitsWarper": ("eta_cutoff", "epsilon"),
    "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", "penalty"),
    "NoRepeatNGramLogitsProcessor": ("no_repeat_ngram_size", "ngram_size"),
    "MinLengthLogitsProcessor": ("min_length", "min_length"),
    "MinNewTokensLengthLogitsProcessor": ("min_new_tokens", "min_new_tokens"),
    "InfNanRemoveLogitsProcessor": ("remove_invalid_values", ""), "LogitNormalization": ("renormalize_logits", ""),
    "MaxLengthCriteria": ("max_length", "max_length"), "EosTokenCriteria": ("eos_token_id", "eos_token_id"),
    "StopStringCriteria": ("stop_strings", ""),
}
_COMPARED_VALUES = 1024  # values of each parameter that are hashed to detect changes


class TransformersWriter:
    """A model of `transformers` that generates with longdraft. `engine` is the longdraft engine."""

    def __init__(self, engine: Engine, own: GenerationConfig) -> None:
        self.engine = engine
        self._own = own

    def generate(self, input_ids: Tensor | Sequence[int], generation_config: GenerationConfig | None = None, *,
                 streamer: Any = None, seed: int | None = None, penalty_window: int | None = None,
                 **options: Any) -> Any:
        """Token ids [1, prompt + new] (int64), or with `return_dict_in_generate` an object with `sequences`.

        input_ids          the prompt, [1, n] or [n]
        generation_config  default: the model's own; `options` (max_new_tokens=, do_sample=, ...) change it
        streamer           `put(tensor)` for the prompt and each new token, `end()` (TextStreamer and the like)
        seed               default: drawn from torch's generator, which `torch.manual_seed` seeds
        penalty_window     tokens that `repetition_penalty` looks at; default: all, as in transformers

        UsageError names every option that longdraft does not have.
        """
        config = _changed(generation_config or self._own, options)
        prompt = _prompt(input_ids, options.get("attention_mask"))
        params = _params(config, len(prompt), self.engine.model.config.vocab_size, seed, penalty_window)
        if params.stop and isinstance(self.engine.tokenizer, _NoTokenizer):
            raise UsageError("stop_strings needs a tokenizer: longdraft.from_transformers(model, tokenizer)")
        if streamer is not None:
            streamer.put(torch.tensor([prompt]))
        with self.engine.generate(prompt, params) as text:
            new = _write(text, streamer)
        sequences = torch.tensor([[*prompt, *new]])
        if not config.return_dict_in_generate:
            return sequences
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=sequences)


def from_transformers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *,
                      drafter: str = drafters.AUTO, drafter_options: Mapping[str, Any] | None = None,
                      heads: str | None = None, quantize: str = "none") -> TransformersWriter:
    """A writer around a loaded model.

    The weights are copied once into the layout of the kernels. After that `model` is not used; deleting it frees its
    memory.

    tokenizer  needed for stop strings and for texts of `writer.engine`; not needed for token ids
    others     as for `longdraft.load`

    Raises ModelError for an unsupported architecture, UsageError for invalid settings.
    """
    _require_version()
    choice = DrafterChoice.parse(drafter, drafter_options)
    drafters.check_heads(drafter, choice.options, heads)
    check(quantize in checkpoint.QUANTIZE, "quantize", quantize, checkpoint.QUANTIZE_CHOICES)
    own = model.generation_config
    config = config_file.parse_config(model.config.to_dict(), own.eos_token_id)
    dtype = "float32" if model.dtype == torch.float32 else "bfloat16"
    chosen = kernels.choose(model.device.type, dtype)
    folder = Path(str(model.config.name_or_path or "model in memory"))
    heads = chosen_heads(heads, str(folder), config, choice.needs, hub.Hub())
    tensors = text_entries(model.state_dict())
    if config.is_tied:
        tensors.pop("lm_head.weight", None)  # a second name of the embedding, which checkpoints leave out
    files = StateDict(with_single_experts(tensors, config), folder)
    target = checkpoint.load_transformer(files, config, chosen, quantize)
    words = _NoTokenizer() if tokenizer is None else _SavedTokenizer(tokenizer)
    loaded = LoadedModel.load_parts(str(folder), files, target, words, choice, heads_name=heads,
                                    hub_options=hub.Hub(), defaults=defaults.Defaults())
    files.release_tensors()
    return TransformersWriter(Engine(loaded, choice), own)


def _require_version() -> None:
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("`longdraft.from_transformers`", str(error.name), "train") from error
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise UsageError(f"transformers is {transformers.__version__}; needed: 5.0 or newer; "
                         "pip install --upgrade transformers")


_WRITERS: weakref.WeakKeyDictionary[Any, tuple[Any, TransformersWriter]] = weakref.WeakKeyDictionary()


def hf_generate(model: PreTrainedModel, input_ids: Tensor, logits_processor: Any = None, stopping_criteria: Any = None,
                generation_config: GenerationConfig | None = None, *, drafter: str = drafters.AUTO,
                drafter_options: Mapping[str, Any] | None = None, heads: str | None = None, seed: int | None = None,
                penalty_window: int | None = None, text_streamer: Any = None, **model_kwargs: Any) -> Any:
    """For `model.generate(..., custom_generate=longdraft.hf_generate)`, which passes on the keywords of this function.

    The packed weights are cached for each model and packed again if its parameters change. `generate` does not pass
    `streamer` to a custom function: give it as `text_streamer`.
    """
    if generation_config is None:
        raise UsageError("hf_generate needs a generation_config; call model.generate(..., "
                         "custom_generate=longdraft.hf_generate), which prepares one")
    _require_plain_input(model_kwargs, input_ids)
    foreign = [type(one).__name__ for one in (*(logits_processor or ()), *(stopping_criteria or ()))
               if not _is_made_of(one, generation_config)]
    if foreign:
        raise UsageError(f"longdraft cannot apply your {', '.join(foreign)}; leave it out, or set generate's option")
    if generation_config.stop_strings:
        raise UsageError("stop_strings need a tokenizer, which longdraft.hf_generate is not given; use "
                         "longdraft.from_transformers(model, tokenizer)")
    state = (drafter, repr(drafter_options), heads, tuple(map(_state, model.parameters())))
    kept = _WRITERS.get(model)
    if kept is None or kept[0] != state:
        kept = state, from_transformers(model, drafter=drafter, drafter_options=drafter_options, heads=heads)
        _WRITERS[model] = kept
    ids = kept[1].generate(input_ids, generation_config, streamer=text_streamer, seed=seed,
                           penalty_window=penalty_window, attention_mask=model_kwargs.get("attention_mask"))
    return ids.to(input_ids.device) if isinstance(ids, Tensor) else ids


class _NoTokenizer(Tokenizer):
    """Replaces a tokenizer where only token ids are used: its vocabulary is empty and it decodes to no text."""

    sha256 = ""

    def __init__(self) -> None:
        pass

    def token_id(self, token: str) -> int | None:
        return None

    def vocabulary(self) -> dict[str, int]:
        return {}

    def vocabulary_sha256(self) -> str:
        return ""  # unknown

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise UsageError("a text needs a tokenizer: longdraft.from_transformers(model, tokenizer)")

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        return None

    def is_silent(self, token: int) -> bool:
        return True

    def decode(self, ids: Sequence[int], *, shows_special: bool = False) -> str:
        return ""


class _SavedTokenizer(Tokenizer):
    """A tokenizer of `transformers`, read from temporary files."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._source = tokenizer
        with self._saved() as folder:
            super().__init__(folder)
        self._folder = Path(tokenizer.name_or_path or "memory")

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        with self._saved() as folder:
            return ChatTemplate.find(folder)

    @contextmanager
    def _saved(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as folder:
            self._source.save_pretrained(folder)
            yield Path(folder)


def _is_made_of(one: Any, config: GenerationConfig) -> bool:
    """Whether `generate` makes this processor or criterion of its options."""
    option, attribute = _MADE_OF.get(type(one).__name__, ("", ""))
    wanted = getattr(config, option, None)
    if not attribute or wanted is None:
        return bool(wanted)
    return bool(torch.equal(*(torch.as_tensor(value).double().flatten().sort().values.float().cpu()
                              for value in (getattr(one, attribute), wanted))))


def _require_plain_input(model_kwargs: Mapping[str, Any], input_ids: Tensor) -> None:
    """UsageError for inputs other than token ids and a mask. `generate` itself adds positions that count from 0 in each
    row; those of several rows, and behind a mask, are refused by these."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    given = [name for name in ("inputs_embeds", "token_type_ids") if model_kwargs.get(name) is not None]
    is_whole = len(input_ids) == 1 and (mask is None or bool(mask.all()))
    if is_whole and positions is not None and positions.flatten().tolist() != list(range(input_ids.shape[-1])):
        given.append("position_ids")
    if given:
        raise UsageError(f"longdraft reads input_ids alone; leave {', '.join(given)} out")


def _state(parameter: Tensor) -> tuple[int, int, int]:
    """A value that changes with the parameter: its address, autograd's version counter, and a hash of some values.

    The hash is needed because autograd does not see writes through `.data`.
    """
    flat = parameter.detach().reshape(-1)
    sample = flat[:: max(1, len(flat) // _COMPARED_VALUES)].cpu().contiguous()
    return parameter.data_ptr(), parameter._version, hash(sample.view(torch.uint8).numpy().tobytes())


def _changed(config: GenerationConfig, options: Mapping[str, Any]) -> GenerationConfig:
    """A copy of a configuration with these options. UsageError for an unknown option."""
    from transformers import GenerationConfig

    given = {name: value for name, value in options.items() if name != "attention_mask"}
    changed = GenerationConfig.from_dict(config.to_dict())
    unknown = [name for name in given if not hasattr(changed, name)]
    if unknown:
        raise UsageError(f"generate has no option {', '.join(unknown)}; see transformers.GenerationConfig")
    if "max_new_tokens" in given:
        changed.max_length = None
    # Defaults of transformers (a top_k of 50, for example) for options that neither the model nor the caller sets.
    filled = {name: value for name, value in GenerationConfig._get_default_generation_params().items()
              if getattr(changed, name, None) is None and name != "max_length"}
    for name, value in {**filled, **given}.items():
        setattr(changed, name, value)
    return changed


def _prompt(input_ids: Tensor | Sequence[int], attention_mask: Tensor | None) -> list[int]:
    ids = torch.as_tensor(input_ids)
    ids = ids[None] if ids.ndim == 1 else ids
    if len(ids) != 1:
        raise UsageError(f"input_ids has {len(ids)} rows; longdraft writes one text at a time")
    if attention_mask is not None and not bool(torch.as_tensor(attention_mask).bool().all()):
        raise UsageError("attention_mask hides tokens; longdraft reads all of a prompt: leave padding out")
    prompt: list[int] = ids[0].tolist()
    return prompt


def _params(config: GenerationConfig, prompt: int, vocabulary: int, seed: int | None,
            penalty_window: int | None) -> SamplingParams:
    """Translate a GenerationConfig. `prompt`: length of the prompt, tokens; `vocabulary`: size of the model's."""
    refused = [f"{name}={getattr(config, name)!r}" for name, off in _REFUSED.items()
               if not defaults.is_off(getattr(config, name, None), off)]
    if refused:
        raise UsageError(f"longdraft does not have {', '.join(refused)}; leave it out")
    if config.max_new_tokens is not None:
        count = int(config.max_new_tokens)
    else:
        count = int(config.max_length if config.max_length is not None else prompt + 20) - prompt
    check(count >= 1, "max_new_tokens", count, "1 or more", "max_length counts the prompt")
    settings = {name: defaults.within_limits(name, value) for name in defaults.SUPPORTED
                if (value := getattr(config, name, None)) is not None}
    return SamplingParams.from_names(settings | {
        "max_new_tokens": count, "do_sample": bool(config.do_sample),
        "min_new_tokens": max(config.min_new_tokens or 0, (config.min_length or 0) - prompt, 0),
        "penalty_window": prompt + count if penalty_window is None else penalty_window,
        "ignore_eos": True, "stop_token_ids": config_file.valid_token_ids(config.eos_token_id, vocabulary),
        "seed": seed if seed is not None else int(torch.randint(0, MAX_SEED >> 1, ()).item()),
    })


def _write(text: Generation, streamer: Any) -> list[int]:
    new: list[int] = []
    for event in text:
        new += event.tokens
        for token in event.tokens if streamer is not None else ():
            streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    return new
