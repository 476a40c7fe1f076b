"""Damaged and hostile user input of several kinds, for fuzzing.py. A function of a kind makes and tries one input."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import longdraft
from longdraft import kernels
from longdraft.__main__ import run as command_line
from longdraft.checkpoint import checkpoint, config_file
from longdraft.checkpoint.tensor_files import TORCH_WEIGHTS as BIN
from longdraft.checkpoint.tensor_files import WEIGHTS, TensorFiles
from longdraft.errors import LongdraftError
from longdraft.journal import format as form
from longdraft.journal.format import FILE, read_journal
from longdraft.system.files import read_prompt
from longdraft.text.sentencepiece_file import NAME as PIECES
from longdraft.text.tokenizer import Tokenizer

VALUES: list[Any] = [None, True, False, 0, 1, 2, -1, 2**31, 2**63, -(2**70), 1e308, -0.0, 0.5, float("nan"),
                     float("inf"), "", "x", "\0", "\ud800", [], {}, [[]], [1, "a"], {"a": []}, "9" * 400, [0] * 1000]


class Samples:
    """A process's own folder with sound files, which inputs are made of, and an engine."""

    def __init__(self, folder: Path) -> None:
        self.sound = folder / "model"
        self.here = folder / f"try-{os.getpid()}"
        shutil.copytree(self.sound, self.here / "model")
        os.chdir(self.here)  # files with random names are written here
        self.model = self.here / "model"
        self.engine = longdraft.load(str(self.sound), drafter="suffix")
        self.params = longdraft.SamplingParams(max_new_tokens=60, seed=1)
        for _ in self.engine.generate("It was", self.params, journal=self.here / "journal"):
            pass
        self.journal = (self.here / "journal" / FILE).read_bytes()
        content = read_journal(self.here / "journal")
        self.header = content.header
        self.tokens = content.tokens.tolist()
        self.begins = self.journal.index(b'"began"')
        self.files = {name: (self.sound / name).read_bytes() for name in ("config.json", "generation_config.json",
                                                                          "tokenizer.json", WEIGHTS, "model.gguf",
                                                                          BIN, PIECES)}
        for name, given in (("bin", "config.json"), ("pieces", "tokenizer_config.json")):
            (self.here / name).mkdir()
            shutil.copy(self.sound / given, self.here / name)


def mutated(rng: random.Random, data: bytes, least: int = 0, most: int = 1 << 14) -> bytes:
    """Change, insert, cut and repeat bytes in the range from `least` to `most`."""
    changed_bytes = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 6])):
        at = rng.randrange(least, max(least + 1, min(len(changed_bytes), most)))
        length = rng.choice([0, 1, 1, 2, 4, 8, 100, 1000])
        piece = rng.choice([rng.randbytes(length), bytes(length), b"\xff" * length, b"99999999999999999999",
                               bytes(changed_bytes[at : at + length]), b"-1", b"[[[[", b'"', b"{}"])
        changed_bytes[at : at + rng.choice([0, 0, 1, len(piece), length])] = piece
    return bytes(changed_bytes[: rng.randrange(len(changed_bytes) + 1)] if rng.random() < 0.1 else changed_bytes)


def changed(rng: random.Random, content: dict[str, Any]) -> bytes:
    """A JSON object with other values at any depth."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        inner: Any = content
        while True:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(inner[key], dict | list) and inner[key] and rng.random() < 0.5:
                inner = inner[key]
                continue
            inner[key] = copy.deepcopy(rng.choice(VALUES))
            break
    return json.dumps(content).encode()


def _journal(samples: Samples, rng: random.Random) -> None:
    """A journal file with damaged or random bytes."""
    path = samples.here / "journal" / FILE
    least = rng.choice([0, samples.begins, samples.begins])  # mostly after the header
    path.write_bytes(mutated(rng, samples.journal, least) if rng.random() < 0.95 else rng.randbytes(200))
    content = read_journal(path.parent)
    assert content.tokens.tolist() == samples.tokens[: len(content.tokens)], "wrong tokens"
    assert content.header == samples.header, "another header"


def _records(samples: Samples, rng: random.Random) -> None:
    """Wrong records with correct checksums, which are then resumed."""
    path = samples.here / "journal" / FILE
    path.write_bytes(samples.journal)
    written = read_journal(path.parent)
    digest = form.RunningHash()
    header = json.loads(form.dump_payload(written.header))
    run = json.loads(form.dump_payload(written.runs[0]))
    records = [(form.HEADER, changed(rng, header) if rng.random() < 0.5 else json.dumps(header).encode()),
               (form.RUN, changed(rng, run) if rng.random() < 0.3 else json.dumps(run).encode())]
    for _ in range(rng.randint(0, 3)):
        tokens = np.array([rng.choice([0, 1, 5, 300, 319, 320, 2**31 - 1, -1])
                           for _ in range(rng.randint(0, 5))], np.int32)
        records.append(rng.choice([(form.TOKENS, form.dump_step(tokens, rng.randrange(2**32), rng.random())),
                                      (form.TOKENS, rng.randbytes(rng.randrange(40))),
                                      (form.FINISH, b'{"finish_reason": "length"}'), (rng.randrange(256), b"x")]))
    content = form.MAGIC + b"".join(form.encode_record(kind, payload, digest) for kind, payload in records)
    path.write_bytes(content)
    with samples.engine.resume(path.parent, fsync="never") as generation:
        if generation.num_resumed < 1000:
            for _ in zip(range(4), generation):
                pass


def _config(samples: Samples, rng: random.Random) -> None:
    for name in ("config.json", "generation_config.json"):
        data = samples.files[name]
        data = changed(rng, json.loads(data)) if rng.random() < 0.7 else mutated(rng, data)
        (samples.model / name).write_bytes(data)
    longdraft.checkpoint.defaults.read_defaults(samples.model)
    config_file.read_config(samples.model)


def _weights(samples: Samples, rng: random.Random) -> None:
    """A safetensors file with another header, or with damaged bytes in its header or in its tensors."""
    data = samples.files[WEIGHTS]
    length = 8 + int.from_bytes(data[:8], "little")
    if rng.random() < 0.5:
        header = changed(rng, json.loads(data[8:length]))
        data = len(header).to_bytes(8, "little") + header + data[length:]
    else:
        data = mutated(rng, data, 0, length) if rng.random() < 0.8 else mutated(rng, data, length, len(data))
    (samples.model / WEIGHTS).write_bytes(data)
    config = config_file.read_config(samples.sound)
    checkpoint.load_transformer(TensorFiles(samples.model), config, samples.engine.model.kernels)


def _gguf(samples: Samples, rng: random.Random) -> None:
    """A GGUF file with a damaged header, numbers, lengths, names and offsets, or with damaged tensors."""
    data = bytearray(samples.files["model.gguf"])
    end = data.index(b"blk.0.ffn_down") + 100
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.choice([rng.randrange(24), rng.randrange(end), rng.randrange(end), rng.randrange(end, len(data))])
        new = rng.choice([rng.randbytes(rng.randint(1, 8)), b"\xff" * 8, bytes(8), (1 << 40).to_bytes(8, "little")])
        data[at : at + len(new)] = new
    path = samples.model / "model.gguf"
    path.write_bytes(data if rng.random() < 0.7 else mutated(rng, bytes(data), 0, end))
    config, files = config_file.read_config(path), TensorFiles(path)
    Tokenizer(path).encode("It was")
    checkpoint.load_transformer(files, config, samples.engine.model.kernels)


def _bin(samples: Samples, rng: random.Random) -> None:
    """A `.bin` file with damage in its pickle, in its directory, in the headers of its members, or in its tensors."""
    data = samples.files[BIN]
    pickle, directory = data.index(b"data.pkl"), data.rindex(b"PK\x01\x02")
    first = data.index(b"PK\x01\x02")
    least, most = rng.choice([(pickle, data.index(b"PK\x03\x04", pickle)), (first, len(data)), (directory, len(data)),
                              (0, 1 << 14), (0, first)])
    (samples.here / "bin" / BIN).write_bytes(mutated(rng, data, least, most))
    config = config_file.read_config(samples.sound)
    checkpoint.load_transformer(TensorFiles(samples.here / "bin"), config, samples.engine.model.kernels)


def _pieces(samples: Samples, rng: random.Random) -> None:
    """A SentencePiece model with damaged fields."""
    (samples.here / "pieces" / PIECES).write_bytes(mutated(rng, samples.files[PIECES]))
    _use(Tokenizer(samples.here / "pieces"))


def _tokenizer(samples: Samples, rng: random.Random) -> None:
    data = samples.files["tokenizer.json"]
    data = changed(rng, json.loads(data)) if rng.random() < 0.5 else mutated(rng, data)
    (samples.model / "tokenizer.json").write_bytes(data)
    _use(Tokenizer(samples.model))


def _use(tokenizer: Tokenizer) -> None:
    """Encode and decode a few tokens, known ones and others."""
    stream = tokenizer.stream()
    for token in [*tokenizer.encode("It was\0é"), 0, 5, 319, 9999]:
        stream.push(token)
    stream.flush()


def _prompt(samples: Samples, rng: random.Random) -> None:
    pieces = [rng.randbytes(rng.randrange(50)), "é€😀".encode(), b"\xef\xbb\xbf", b"\0", b"<s></s>",
              b"a" * rng.randrange(3000), b"\r\n\x1b[2J", "\u202e\u0301".encode() * 20]
    (samples.here / "prompt").write_bytes(b"".join(rng.choices(pieces[rng.random() < 0.7 :], k=3)))
    ids = samples.engine.encode(read_prompt(None, str(samples.here / "prompt")))
    assert all(0 <= token < 320 for token in ids)
    stream = samples.engine.tokenizer.stream()
    shown = "".join(map(stream.push, ids)) + stream.flush()
    assert len(shown) <= len(ids)


_OPTIONS = ["--max-new-tokens", "--min-new-tokens", "--seed", "--temperature", "--top-k", "--top-p", "--min-p",
            "--eta-cutoff", "--min-tokens-to-keep", "--repetition-penalty", "--penalty-window", "--stop", "--on-loop",
            "--stop-token-id", "--prefill", "--drafter-option", "--chat-option", "--fsync", "--dtype", "--device",
            "--quantize", "--heads", "--drafter", "--prompt-file", "--ignore-eos", "--chat", "--nothing", "--threads"]
_OPTIONS_OF_JOURNALS = ["--fsync", "--drafter", "--drafter-option", "--threads", "--heads", "--json", "--quiet",
                        "--allow-different-kernels", "--text", "--output", "--nothing"]
_NUMBERS = ["0", "1", "-1", "2", "3", "0.1", "0.5", "1.5"]
_WORDS = [*_NUMBERS, "", "1e-300", "1e400", "nan", "inf", "-inf", "99999999999999999999", "x", "=",
          "a=b", "always", "never", "stop", "warn", "off", "auto", "plain", "suffix", "int8", "cpu", "/", "\udcff", "é",
          "--", "-", "1_0", "0x10", " 1", "1,2", "chain=9999999", "budget=1", "True", "None"]


def _options(samples: Samples, rng: random.Random) -> None:
    """A command line of random options and words. `--offline` keeps it from the network."""
    arguments = ["generate", "It was", "--model", str(samples.sound), "--drafter", "plain", "--max-new-tokens", "2",
                 "--offline"]
    if rng.random() < 0.3:
        arguments = [rng.choice(["resume", "inspect"]), str(samples.here / "journal"), "--offline"]
        content = samples.journal if rng.random() < 0.5 else mutated(rng, samples.journal, samples.begins)
        (samples.here / "journal" / FILE).write_bytes(content)
    for _ in range(rng.randint(1, 3)):
        option = rng.choice(_OPTIONS if arguments[0] == "generate" else _OPTIONS_OF_JOURNALS)
        if rng.random() < 0.9:
            word = rng.choice(_NUMBERS if rng.random() < 0.6 else _WORDS)
            if option == "--prompt-file" and word == "-":  # would read the terminal
                continue
            arguments += [option, word] if rng.random() < 0.5 else [f"{option}={word}"]
        else:
            arguments.insert(rng.randrange(1, len(arguments)), option)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        status = command_line(arguments)
    kernels.set_threads(1)
    said = err.getvalue()
    assert "Traceback" not in said, arguments
    assert status in (0, 1, 2), (status, arguments)
    if status:
        assert said.startswith("longdraft: ") or "warning" in said.lower(), (arguments, said)
        raise LongdraftError(said.strip().splitlines()[-1])


# Kind -> how many of a hundred inputs, and the function that tries one.
KINDS: dict[str, tuple[int, Callable[[Samples, random.Random], None]]] = {
    "journal": (26, _journal),
    "records": (8, _records),
    "config": (14, _config),
    "safetensors": (10, _weights),
    "gguf": (10, _gguf),
    "bin": (8, _bin),
    "sentencepiece": (6, _pieces),
    "tokenizer": (8, _tokenizer),
    "prompt": (6, _prompt),
    "options": (4, _options),
}
assert sum(share for share, _ in KINDS.values()) == 100
