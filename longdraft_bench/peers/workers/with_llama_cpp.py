"""llama.cpp through llama-cpp-python: a GGUF file, or a folder as GGUF; keys and values as float16 (its default).

Long contexts are reached by loading a state of random keys and values in llama.cpp's format. If the format is not the
expected one, tokens are read until the time limit.
"""

from __future__ import annotations

import ctypes
import json
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as llama
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from numpy.typing import NDArray
from safetensors import safe_open

_PREFILL_ROWS = 512  # rows of a forward while a prompt is read
_RANDOM_BLOCK = 1024 * 256  # random numbers, repeated


class StepEngine:
    def __init__(self, folder: str, threads: int, longest: int, flash: bool = False, weights: str = "bf16",
                 slots: int = 1, repacks: bool = True) -> None:
        llama.llama_backend_init()
        settings = llama.llama_model_default_params()
        settings.use_extra_bufts = repacks
        settings.use_mmap = False  # the file may be deleted
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(folder)
            if path.is_dir():
                path = Path(scratch) / "model.gguf"
                convert(Path(folder), path, weights)
            else:
                weights = "the file"
            self._model = llama.llama_model_load_from_file(str(path).encode(), settings)
        self.version = f"{llama.__version__} ({weights}, flash attention {'on' if flash else 'off'})"
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        wanted = llama.llama_context_default_params()
        wanted.n_ctx = longest * slots
        wanted.n_seq_max = self._slots = slots
        wanted.n_batch = wanted.n_ubatch = _PREFILL_ROWS
        wanted.n_threads = wanted.n_threads_batch = threads
        wanted.flash_attn_type = (llama.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash
                                  else llama.LLAMA_FLASH_ATTN_TYPE_DISABLED)
        self._context = llama.llama_init_from_model(self._model, wanted)
        if not self._context:
            raise MemoryError("llama.cpp could not create a context")

    def prefill(self, tokens: Sequence[int]) -> None:
        self._clear()
        for start in range(0, len(tokens), _PREFILL_ROWS):
            self._decode(tokens[start : start + _PREFILL_ROWS])

    def fill(self, length: int, limit_s: float) -> tuple[str, int]:
        self.prefill([5] * 8)
        state = random_state(self._state(), 8, length, self._slots)
        self._clear()
        if state is not None and all(llama.llama_state_seq_set_data(self._context, state, len(state), slot)
                                     for slot in range(self._slots)):
            self._length = length
            return "random", length
        if self._slots > 1:
            raise RuntimeError("a state of random keys and values was refused")
        self._clear()
        end = time.monotonic() + limit_s
        done = 0
        while done < length and time.monotonic() < end:
            count = min(_PREFILL_ROWS, length - done)
            self._decode([5] * count)
            done += count
        return "prefill", done

    def step(self, token: int) -> int:
        self._decode([token])
        logits = llama.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())

    def nats(self, tokens: Sequence[int]) -> float:
        self._clear()
        total = 0.0
        for start in range(0, len(tokens) - 1, _PREFILL_ROWS):
            rows = tokens[start : min(start + _PREFILL_ROWS, len(tokens) - 1)]
            batch = llama.llama_batch_init(len(rows), 0, 1)
            batch.n_tokens = len(rows)
            for i, token in enumerate(rows):
                batch.token[i], batch.pos[i] = token, start + i
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, True
            status = llama.llama_decode(self._context, batch)
            llama.llama_batch_free(batch)
            if status:
                raise RuntimeError(f"llama_decode failed with status {status}")
            for i in range(len(rows)):
                row = llama.llama_get_logits_ith(self._context, i)
                logits = np.ctypeslib.as_array(row, (self._vocabulary,)).astype(np.float64)
                highest = float(logits.max())
                total += highest + float(np.log(np.exp(logits - highest).sum())) - float(logits[tokens[start + i + 1]])
        return total / (len(tokens) - 1)

    def together(self, tokens: Sequence[int]) -> list[int]:
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for slot, token in enumerate(tokens):  # each call overwrites the same position
            llama.llama_memory_seq_rm(llama.llama_get_memory(self._context), slot, self._length, -1)
            batch.token[slot], batch.pos[slot] = token, self._length
            batch.n_seq_id[slot], batch.seq_id[slot][0], batch.logits[slot] = 1, slot, True
        status = llama.llama_decode(self._context, batch)
        llama.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode failed with status {status}")
        llama.llama_synchronize(self._context)
        logits = [llama.llama_get_logits_ith(self._context, slot) for slot in range(len(tokens))]
        return [int(np.ctypeslib.as_array(row, (self._vocabulary,)).argmax()) for row in logits]

    def _decode(self, tokens: Sequence[int]) -> None:
        given = (llama.llama_token * len(tokens))(*tokens)
        status = llama.llama_decode(self._context, llama.llama_batch_get_one(given, len(tokens)))
        if status:
            raise RuntimeError(f"llama_decode failed with status {status}")
        llama.llama_synchronize(self._context)

    def _clear(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def _state(self) -> bytes:
        size = llama.llama_state_seq_get_size(self._context, 0)
        buffer = (ctypes.c_uint8 * size)()
        llama.llama_state_seq_get_data(self._context, buffer, size, 0)
        return bytes(buffer)


def random_state(sample: bytes, cells: int, length: int, streams: int) -> Any:
    """The state of a sequence of `length` random positions, or None if the format is unknown.

    The format is taken from `sample`, the state of a sequence of `cells` positions:

        a header; u32 streams, u32 cells; per cell i32 position, u32 1, i32 sequence; u32 transposed, u32 layers
        keys of each layer      i32 type, u64 bytes of a row, rows
        values of each layer    the same; if transposed: i32 type, u32 bytes of an element, u32 rows, rows by dimension
        u32 cells (0) of each other stream; each slot has one
    """
    try:
        pieces = list(_pieces(sample, cells, length, streams))
    except struct.error:
        return None
    if None in pieces:
        return None
    data = b"".join(piece for piece in pieces if piece is not None)
    return (ctypes.c_uint8 * len(data)).from_buffer_copy(data)


def _pieces(sample: bytes, cells: int, length: int, streams: int) -> Iterator[bytes | None]:
    """The parts of the state. A part is None if the sample does not match the format."""
    start = sample.find(struct.pack("<IIiIi", streams, cells, 0, 1, 0), 0, 64)
    if start < 0:
        yield None
        return
    yield sample[:start]
    yield struct.pack("<II", streams, length)
    yield b"".join(struct.pack("<iIi", position, 1, 0) for position in range(length))
    at = start + 8 + 12 * cells
    transposed, layers = struct.unpack_from("<II", sample, at)
    yield sample[at : at + 8]
    at += 8
    for part in range(2 * layers):
        if part >= layers and transposed:
            _, element, rows = struct.unpack_from("<iII", sample, at)
            width = element * rows
        else:
            _, width = struct.unpack_from("<iQ", sample, at)
        yield sample[at : at + 12]
        yield _random_float16(length * width)
        at += 12 + cells * width
    others = bytes(4 * (streams - 1))
    yield others if sample[at:] == others else None


def _random_float16(nbytes: int) -> bytes:
    block = np.random.default_rng(5).standard_normal(_RANDOM_BLOCK, dtype=np.float32).astype(np.float16).tobytes()
    return (block * (nbytes // len(block) + 1))[:nbytes]


def convert(folder: Path, path: Path, weights: str, has_tokenizer: bool = False) -> int:
    """Write a Llama folder as a GGUF file. Returns the size of the vocabulary.

    has_tokenizer  writes the folder's tokenizer.json too, which must be byte-level BPE split as GPT-2's
    """
    config = json.loads((folder / "config.json").read_text())
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads, dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if has_tokenizer:
        _add_tokenizer(writer, folder)
    else:
        writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType[weights.upper()]
    for name, tensor in _tensors(folder):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _interleaved(tensor, heads if "q_proj" in name else kv_heads)
        is_matrix = tensor.ndim == 2
        data = gguf.quants.quantize(tensor, kind) if is_matrix else tensor
        writer.add_tensor(_name(name), data, raw_dtype=kind if is_matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return int(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    ids = content["model"]["vocab"] | special
    tokens = sorted(ids, key=lambda token: int(ids[token]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge)
                             for merge in content["model"]["merges"]])


def rope_theta(config: dict[str, Any]) -> float:
    """The base of the rotary positions, as old (`rope_theta`) and new (`rope_parameters`) configs spell it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"this conversion supports plain rotary positions only, not {rope}")
    return float(rope.get("rope_theta") or config.get("rope_theta", 10000.0))


def _tensors(folder: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                yield name, file.get_tensor(name).float().numpy()


def _interleaved(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of each head for llama.cpp's rotation, which pairs neighbours instead of halves."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}


def _name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{_NAMES[part]}.{kind}"


class TextEngine:
    """llama-cpp-python's own `generate`: plain, or with its prompt lookup (`lookup` draft tokens)."""

    def __init__(self, folder: str, threads: int, longest: int, draft: str | None = None, flash: bool = False) -> None:
        self.version = f"{llama.__version__} (flash attention {'on' if flash else 'off'})"
        self._folder = tempfile.TemporaryDirectory()
        self._path = folder
        if Path(folder).is_dir():
            self._path = str(Path(self._folder.name) / "model.gguf")
            convert(Path(folder), Path(self._path), "bf16")
        self._about = {"n_ctx": longest, "n_threads": threads, "n_threads_batch": threads, "verbose": False,
                       "flash_attn": flash, "n_batch": _PREFILL_ROWS, "n_ubatch": _PREFILL_ROWS}
        self._lookup = -1

    def write(self, prompt: Sequence[int], count: int, lookup: int = 0) -> Iterator[int]:
        if lookup != self._lookup:  # prompt lookup is set when the model is loaded
            drafting = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
            # Without `logits_all`, prompt lookup reads logits that were not stored.
            self._model = llama.Llama(self._path, draft_model=drafting, logits_all=bool(lookup), **self._about)
            self._lookup = lookup
        self._model.reset()
        llama.llama_memory_clear(llama.llama_get_memory(self._model.ctx), True)
        generated = self._model.generate(list(prompt), temp=0.0, reset=True)
        yield from (int(next(generated)) for _ in range(count))
