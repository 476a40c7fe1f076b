"""Load a model and what drafts for it: `longdraft.load`, and `longdraft.resume` for the model of a journal.

    engine = longdraft.load("novelist", drafter="tokenswift")
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from longdraft import drafters, kernels, parallel
from longdraft.cache.prefix import PrefixTree
from longdraft.checkpoint import checkpoint, config_file, defaults, hub, memory_plan, sizing
from longdraft.checkpoint import quantized_cache as quantized_cache_of
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.engine.engine import Engine
from longdraft.engine.generation import Generation
from longdraft.engine.loaded_model import DrafterChoice, LoadedModel
from longdraft.engine.provenance import load_options
from longdraft.engine.settings import SETTINGS
from longdraft.errors import UsageError, check
from longdraft.journal.format import Header, read_journal
from longdraft.kernels.weights import FILE
from longdraft.parts.heads import require_model
from longdraft.parts.public_heads import chosen_heads
from longdraft.system import machine
from longdraft.system.files import named_folder
from longdraft.text.tokenizer import Tokenizer, require_ids_in_vocabulary

log = logging.getLogger(__name__)
AUTO = "auto"  # of `quantize`
MAX_CACHE_RAM = 8192  # MiB of the prefix tree, unless the caller asks for more


def load(model: str = hub.DEFAULT_MODEL, *, drafter: str = drafters.AUTO,
         drafter_options: Mapping[str, Any] | None = None, heads: str | None = None, device: str = "auto",
         dtype: str = "auto", quantize: str = AUTO, threads: int | None = None, revision: str | None = None,
         token: str | None = None, cache_dir: str | Path | None = None, offline: bool = False,
         kernels_name: str | None = None, tensor_parallel: int = 1, quantized_cache: str | Path | None = None,
         cache_ram: int | None = None, file: str | None = None, tokenizer: str | None = None,
         chat_template: str | Path | None = None, on_load: Callable[[int, int], None] | None = None) -> Engine:
    """An engine for a bundled name, a model folder, a GGUF file or a hub id.

    drafter          auto | plain | ngram | suffix | tokenswift | medusa | magicdec | draft-model | glide | eagle |
                     block | triforce
    drafter_options  the drafter's options by name; values may be strings, as on the command line
    heads            folder or hub id of trained heads (TokenSwift, Medusa, EAGLE, block heads) or a glide layer, or
                     auto: a public head for the model; default: those in the model's own folder
    device           auto | cpu | cuda
    dtype            auto (the checkpoint's) | float32 | bfloat16 | float16 (CUDA only)
    quantize         auto | none | int8 | int4 | file: weights take half or about a third of bfloat16's memory, or with
                     file about that of a quantised file, whose numbers they keep; auto is file where the files are
                     quantised and the kernels have their types, else none. The quantised model is another model: all
                     drafters write its plain text. Applies to a draft model too, not to heads
    threads          CPU threads for arithmetic; default: PyTorch's choice
    revision         branch, tag or commit of a hub id (or write owner/model@revision)
    token            for private and gated repositories; default: HF_TOKEN, or the hub client's login
    cache_dir        folder for files from the hub; default: HF_HOME's
    offline          use only files that are in the cache; default: HF_HUB_OFFLINE
    kernels_name     kernels by name, as in LONGDRAFT_KERNELS; default: that variable, else the fastest
    tensor_parallel  number of ranks that share the model. torchrun starts them, all with the same arguments; ranks
                     other than the first call `Engine.follow`
    quantized_cache  folder of quantised weights, which are made once and read later; "none": no folder; default:
                     LONGDRAFT_QUANTIZED_CACHE, else the user's cache folder
    cache_ram        MiB for the prefix tree, which keeps keys and values of former texts for texts that begin alike;
                     0: none. Default: a quarter of the free memory, at most 8192, and 0 on CUDA
    file             GGUF file of a folder or hub id; or write owner/model:file.gguf
    tokenizer        folder, GGUF file or hub id of the tokenizer and chat template; default: the model's own
    chat_template    file with another chat template, in jinja's language; default: the tokenizer's
    on_load          called with (bytes read, bytes in all) while the weights are read. The numbers start again when a
                     quantised copy for drafts is made

    A drafting part that cannot be used is left out with one log line, unless the drafter or `heads` asks for it.

    Raises ModelError for files that are missing, corrupt or unsupported, and UsageError for settings.
    """
    device = checked_device(device)
    dtypes = ("auto", "float32", "bfloat16", *(("float16",) if device == "cuda" else ()))
    check(dtype in dtypes, "dtype", dtype, f"{', '.join(dtypes[:-1])} or {dtypes[-1]}",
          "float16 is for CUDA devices" if dtype == "float16" else "")
    check(quantize in (AUTO, *checkpoint.QUANTIZE), "quantize", quantize, f"{AUTO}, {checkpoint.QUANTIZE_CHOICES}")
    for name, count in (("threads", threads), ("tensor_parallel", tensor_parallel), ("cache_ram", cache_ram)):
        SETTINGS[name].require(count)
    for name, text in (("model", model), ("heads", heads), ("tokenizer", tokenizer), ("chat_template", chat_template),
                       ("kernels_name", kernels_name)):
        is_left_out = text is None and name != "model"
        check(is_left_out or isinstance(text, str | Path), name, text, "a name, or the path of a file or folder")
    group = parallel.join(tensor_parallel, device) if tensor_parallel > 1 else None
    if threads is None and group:
        threads = group.cores  # torchrun sets one thread
    if threads:
        kernels.set_threads(threads)
    choice = DrafterChoice.parse(drafter, drafter_options)
    drafters.check_heads(drafter, choice.options, heads)
    hub_options = hub.Hub(revision, token, cache_dir, offline)
    model = hub.with_file(model, file)
    folder = hub.resolve(model, hub_options)
    require_model(folder)
    config_file.require_family(folder)
    words = Tokenizer(hub.resolve_tokenizer(str(tokenizer), hub_options) if tokenizer else folder,
                      None if chat_template is None else Path(chat_template))
    if chat_template is not None:
        _ = words.chat_template  # raises now for a file that cannot be used
    config = config_file.read_config(folder, words.end_id)
    heads = chosen_heads(heads, model, config, choice.needs, replace(hub_options, revision=None))
    chosen = kernels.choose(device, config.dtype if dtype == "auto" else dtype, kernels_name)
    files = TensorFiles(folder, on_read=on_load)
    quantize = _resolved_quantize(quantize, model, files, is_whole=not group)
    sizing.require_room(config, chosen, quantize, tensor_parallel, files)
    if group:
        chosen = parallel.ParallelKernels(chosen, group)
    require_ids_in_vocabulary(words.vocabulary(), config.vocab_size, folder)
    cache = quantized_cache_of.chosen_folder(quantized_cache)
    packed = quantized_cache_of.open_packed(cache, files, config, chosen, quantize, "target")
    target = checkpoint.load_transformer(files, config, chosen, quantize, packed)
    if not config.eos_token_ids:
        log.warning("%s: neither its configuration nor its tokenizer names a token that ends a text, so texts end at "
                    "--max-new-tokens or --stop", model)
    sampling = defaults.read_defaults(folder)
    if sampling.ignored:
        log.warning("%s of %s: ignored %s", defaults.GENERATION_CONFIG, model, "; ".join(sampling.ignored))
    log.info("%s: %s kernels, %s on %s, weights quantised: %s, drafter %s", model, chosen.name, chosen.dtype,
             chosen.device, quantize, drafter)
    loaded = LoadedModel.load_parts(
        model, files, target, words, choice, heads_name=heads, hub_options=replace(hub_options, revision=None),
        defaults=sampling, ranks=parallel.RankGroup(group) if group else None, quantized_cache=cache)
    loaded = replace(loaded, prefixes=_prefix_tree(cache_ram, chosen))
    memory_plan.report(target, loaded.draft_copy)
    if group:
        group.require_same({**loaded.identity, "drafter": drafter, "drafter options": str(choice.options)})
    return Engine(loaded, choice)


def _prefix_tree(cache_ram: int | None, chosen: kernels.Kernels) -> PrefixTree | None:
    """The engine's prefix tree; None where it would be empty. The default on a device: off, memory is scarce there."""
    if cache_ram is None:
        cache_ram = 0 if chosen.is_device else min(MAX_CACHE_RAM, machine.available_memory() // 4 >> 20)
    return PrefixTree(cache_ram << 20) if cache_ram else None


def _resolved_quantize(quantize: str, model: str, files: TensorFiles, *, is_whole: bool) -> str:
    """What `auto` means for these files: `file` in one process, whose kernels multiply whole numbers."""
    if quantize == AUTO:
        quantize = FILE if is_whole and files.has_own_numbers else "none"
        if quantize == FILE:
            log.warning("%s: computed with the file's own quantised numbers; --quantize none turns them into "
                        "floating-point numbers first, which takes more memory and time", model)
    elif quantize == FILE and not files.is_quantised:
        log.warning("%s: --quantize file changes nothing, because its files have no quantised matrices; int8 and int4 "
                    "quantise the weights while they are loaded", model)
    return quantize


def checked_device(device: str) -> str:
    """cpu or cuda. UsageError for an unknown device, and for cuda if there is none."""
    check(device in ("auto", "cpu", "cuda"), "device", device, "auto, cpu or cuda")
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise UsageError("device is 'cuda', but PyTorch sees no CUDA device; use cpu or auto")
    return ("cuda" if has_cuda else "cpu") if device == "auto" else device


def load_for(header: Header, *, model: str | None = None, drafter: str | None = None,
             drafter_options: Mapping[str, Any] | None = None, heads: str | None = None, **options: Any) -> Engine:
    """An engine like the one that a journal was begun with, on the same kernels if this machine has them.

    model                             the model's folder or name now; default: the journal's
    drafter, drafter_options, heads   default: the journal's; the text does not depend on them
    options                           threads, token, cache_dir, offline, quantized_cache, cache_ram, on_load, and
                                      tokenizer and chat_template, to be given again if they were given to the
                                      journal's run: as for `load`

    The errors are those of `load`.
    """
    return load(model or header.model, **options, **load_options(header, drafter=drafter, heads=heads,
                                                                 drafter_options=drafter_options))


def resume(journal: str | Path, *, fsync: str | float = 1.0, allow_different_kernels: bool = False,
           on_prefill: Callable[[int, int], None] | None = None, **options: Any) -> Generation:
    """Load the model of a journal and resume its text: `Engine.resume`, with the `options` of `load_for`."""
    engine = load_for(read_journal(named_folder(journal)).header, **options)
    return engine.resume(journal, fsync=fsync, allow_different_kernels=allow_different_kernels, on_prefill=on_prefill)
