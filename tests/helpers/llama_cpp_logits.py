"""The logits of llama.cpp for a GGUF file, computed in a child process: it aborts on files that it does not like."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]  # [tokens, vocabulary]
_SECONDS = 60  # for a file


class LlamaCpp:
    """A child process with llama.cpp, and a new one after each that ended."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def logits(self, path: Path, tokens: Sequence[int]) -> Logits | None:
        """None if llama.cpp refuses the file."""
        self._connection.send((str(path), list(tokens)))
        with contextlib.suppress(EOFError, OSError):
            if self._connection.poll(_SECONDS):
                return self._connection.recv()
        self.close()
        self._start()
        return None

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection) -> None:
    os.environ["GGML_NO_BACKTRACE"] = "1"
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # where it aborts, its message goes there
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    while True:
        connection.send(_logits(*connection.recv()))


def _logits(path: str, tokens: list[int]) -> Logits | None:
    """Exact where llama.cpp can be: keys and values of 32 bits, no repacked weights, no flash attention."""
    import llama_cpp

    settings = llama_cpp.llama_model_default_params()
    settings.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(path.encode(), settings)
    if not model:
        return None
    wanted = llama_cpp.llama_context_default_params()
    wanted.n_ctx, wanted.n_batch, wanted.n_ubatch, wanted.n_threads, wanted.n_threads_batch = 256, 256, 256, 1, 1
    wanted.type_k = wanted.type_v = llama_cpp.GGML_TYPE_F32
    wanted.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, wanted)
    if not context:
        llama_cpp.llama_model_free(model)
        return None
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, True
    status = llama_cpp.llama_decode(context, batch)
    rows = [] if status else [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (vocabulary,)).copy()
                              for i in range(len(tokens))]
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return None if status else np.stack(rows)
