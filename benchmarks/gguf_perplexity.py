"""Perplexity of a text by longdraft and by llama.cpp, with the numbers of the same GGUF files.

    python benchmarks/gguf_perplexity.py OUT-Q8_0.gguf OUT-Q4_0.gguf --text TEXT --python peers/bin/python

benchmarks/gguf_files.py writes such files. Both programs read the same tokens, with whole numbers of 8 bits for the
rows. The other Python needs llama-cpp-python, whose repacked weights are left out where they crash (`--no-repacking`).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

_ROWS = 256  # of a forward


def by_llama_cpp(path: Path, ids: list[int], threads: int, repacks: bool) -> float:
    """The mean of -log p of each token but the first."""
    import llama_cpp as llama
    import numpy as np

    llama.llama_backend_init()
    about = llama.llama_model_default_params()
    about.use_extra_bufts = repacks
    model = llama.llama_model_load_from_file(str(path).encode(), about)
    wanted = llama.llama_context_default_params()
    wanted.n_ctx, wanted.n_batch, wanted.n_ubatch = len(ids), _ROWS, _ROWS
    wanted.n_threads = wanted.n_threads_batch = threads
    context = llama.llama_init_from_model(model, wanted)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    total = 0.0
    for start in range(0, len(ids) - 1, _ROWS):
        rows = ids[start : min(start + _ROWS, len(ids) - 1)]
        batch = llama.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, token in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, start + i, 1, True
            batch.seq_id[i][0] = 0
        if status := llama.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode failed with status {status}")
        for i in range(len(rows)):
            logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, i), (vocabulary,)).astype(np.float64)
            top = float(logits.max())
            total += top + math.log(float(np.exp(logits - top).sum())) - float(logits[ids[start + i + 1]])
        llama.llama_batch_free(batch)
    return total / (len(ids) - 1)


def by_longdraft(path: Path, ids: list[int], dtype: str) -> float:
    from longdraft import kernels
    from longdraft_bench.decode import ModelCopies
    from longdraft_bench.perplexity import token_nats

    model = ModelCopies(str(path), kernels.choose("cpu", dtype), "file").model.for_length(len(ids))
    return sum(float(nats.sum()) for nats in token_nats(model, ids)) / (len(ids) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="GGUF files with one tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the text that are read; default: 1024")
    parser.add_argument("--python", default=sys.executable, help="a Python with llama-cpp-python; default: this one")
    parser.add_argument("--threads", type=int, default=2, help="of each program; default: 2")
    parser.add_argument("--no-repacking", action="store_true", help="llama.cpp without its repacked weights")
    parser.add_argument("--ids", help=argparse.SUPPRESS)  # of the process with llama.cpp: the tokens, as JSON
    given = parser.parse_args()
    if given.ids:
        print(by_llama_cpp(given.files[0], json.loads(given.ids), given.threads, not given.no_repacking))
        return
    from longdraft import kernels
    from longdraft.text.tokenizer import Tokenizer

    kernels.set_threads(given.threads)
    ids = Tokenizer(given.files[0]).encode(given.text.read_text(encoding="utf-8"))[: given.tokens]
    if len(ids) < max(2, given.tokens):
        parser.error(f"--text has {len(ids)} tokens; name a text of {given.tokens} or more")
    print("file, perplexity by llama.cpp, by longdraft in float32 and in bfloat16, ratios to llama.cpp")
    for path in given.files:
        more = ["--no-repacking"] if given.no_repacking else []
        answer = subprocess.run([given.python, __file__, str(path), "--text", str(given.text), "--threads",
                                 str(given.threads), "--ids", json.dumps(ids), *more], check=True, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        theirs, *ours = (math.exp(nats) for nats in (float(answer.stdout), *(
            by_longdraft(path, ids, dtype) for dtype in ("float32", "bfloat16"))))
        print(path.name, f"{theirs:.3f}", *(f"{own:.3f}" for own in ours), *(f"{own / theirs:.4f}" for own in ours))


if __name__ == "__main__":
    main()
