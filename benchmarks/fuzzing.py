"""Inputs for `soak.py fuzz`: damaged and hostile user input. Each input depends on its number only.

Each process tries some thousands. An input passes if it is accepted or raises a LongdraftError with one line, within
seconds and less than a GiB of memory.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import mmap
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import longdraft
from longdraft import kernels
from longdraft.__main__ import run as command_line
from longdraft.errors import LongdraftError
from longdraft.files import read_prompt
from longdraft.journal import FILE, read_journal
from longdraft.journal import format as form
from longdraft.model import checkpoint
from longdraft.model import config as model_config
from longdraft.model.sentencepiece_file import NAME as PIECES
from longdraft.model.tensor_files import TORCH_WEIGHTS as BIN
from longdraft.model.tensor_files import WEIGHTS, TensorFiles
from longdraft.model.tokenizer import Tokenizer

SECONDS = 20  # for one input, on a busy machine
BYTES = 1 << 30  # that a process may grow by
VALUES: list[Any] = [None, True, False, 0, 1, 2, -1, 2**31, 2**63, -(2**70), 1e308, -0.0, 0.5, float("nan"),
                     float("inf"), "", "x", "\0", "\ud800", [], {}, [[]], [1, "a"], {"a": []}, "9" * 400, [0] * 1000]


def run(first: int, count: int, chunk: int, chosen: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """The figures, and a line for each failure. chosen: kinds of inputs; none: all."""
    kernels.set_threads(1)
    began, failures = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make_model(folder / "model")
        counts: Counter[str] = Counter()
        for start in range(first, first + count, chunk):
            done, failed = _child(folder, start, min(chunk, first + count - start), chosen)
            counts.update(done)
            failures += failed
    kinds = {kind: {what: counts[f"{kind} {what}"] for what in ("accepted", "refused")}
             for kind in chosen or KINDS}
    figures = {"inputs": counts.total(), "kinds": kinds, "failures": len(failures), "largest_growth_bytes": _grown[0],
               "slowest_seconds": _slowest[0], "seconds": time.monotonic() - began}
    return figures, failures


_grown, _slowest = [0], [0.0]


def _make_model(folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from helpers.checkpoints import make_checkpoint
    from helpers.gguf_files import convert
    from helpers.sentencepiece_files import write

    torch.save(make_checkpoint(folder, num_hidden_layers=1).state_dict(), folder / BIN)
    write(folder, add_bos_token=True)
    small = make_checkpoint(folder / "small", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    convert(folder, small, folder / "model.gguf", "Q8_0")
    shutil.rmtree(folder / "small")


def _child(folder: Path, start: int, count: int, chosen: Sequence[str]) -> tuple[Counter[str], list[str]]:
    """Try inputs in a child process. Returns its counts and failures, or its exit status as a failure."""
    shared = mmap.mmap(-1, 8)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            found = Tries(folder, shared).run(start, count, chosen)
            os.write(writer, json.dumps(found).encode()[:60_000])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status or not answer:
        return Counter(), [f"input {int.from_bytes(shared[:8], 'little')}: the process ended ({status})"]
    found = json.loads(answer)
    _grown[0], _slowest[0] = max(_grown[0], found["grown"]), max(_slowest[0], found["slowest"])
    failures = found["failures"] + ([f"inputs from {start}: {found['grown']} bytes"] if found["grown"] > BYTES else [])
    return Counter(found["counts"]), failures


class Hang(BaseException):
    pass


def _hang(number: int, frame: object) -> None:
    raise Hang


class Tries:
    """The inputs of one process."""

    def __init__(self, folder: Path, number: mmap.mmap) -> None:
        self._number = number
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
        found = read_journal(self.here / "journal")
        self.header, self.tokens = found.header, found.tokens.tolist()
        self.begins = self.journal.index(b'"began"')
        self.files = {name: (self.sound / name).read_bytes() for name in ("config.json", "generation_config.json",
                                                                          "tokenizer.json", WEIGHTS, "model.gguf",
                                                                          BIN, PIECES)}
        for name, given in (("bin", "config.json"), ("pieces", "tokenizer_config.json")):
            (self.here / name).mkdir()
            shutil.copy(self.sound / given, self.here / name)

    def run(self, start: int, count: int, chosen: Sequence[str] = ()) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        failures, before, slowest = [], _peak(), 0.0
        signal.signal(signal.SIGALRM, _hang)
        names = [name for name, kind in KINDS.items() for _ in range(kind[0]) if not chosen or name in chosen]
        for number in range(start, start + count):
            self._number[:] = number.to_bytes(8, "little")
            rng = random.Random(number)
            kind = names[number % len(names)]
            began = time.monotonic()
            signal.alarm(SECONDS)
            try:
                KINDS[kind][1](self, rng)
                counts[f"{kind} accepted"] += 1
            except LongdraftError as error:
                counts[f"{kind} refused"] += 1
                if "\n" in str(error).strip() or len(str(error)) > 5000:
                    failures.append(f"input {number} ({kind}): not one line: {str(error)[:200]!r}")
            except BaseException as error:  # every other exception is a failure
                failures.append(f"input {number} ({kind}): {type(error).__name__}: {str(error)[:200]}")
                counts[f"{kind} failed"] += 1
            signal.alarm(0)
            slowest = max(slowest, time.monotonic() - began)
        shutil.rmtree(self.here)
        return {"counts": counts, "failures": failures, "grown": _peak() - before, "slowest": slowest}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def mutated(rng: random.Random, data: bytes, least: int = 0, most: int = 1 << 14) -> bytes:
    """Change, insert, cut and repeat bytes in the range from `least` to `most`."""
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 6])):
        at = rng.randrange(least, max(least + 1, min(len(found), most)))
        length = rng.choice([0, 1, 1, 2, 4, 8, 100, 1000])
        piece = rng.choice([rng.randbytes(length), bytes(length), b"\xff" * length, b"99999999999999999999",
                               bytes(found[at : at + length]), b"-1", b"[[[[", b'"', b"{}"])
        found[at : at + rng.choice([0, 0, 1, len(piece), length])] = piece
    return bytes(found[: rng.randrange(len(found) + 1)] if rng.random() < 0.1 else found)


def changed(rng: random.Random, content: dict[str, Any]) -> bytes:
    """A JSON object with other values at some places of any depth."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        place: Any = content
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.5:
                place = place[key]
                continue
            place[key] = copy.deepcopy(rng.choice(VALUES))
            break
    return json.dumps(content).encode()


def _journal(tries: Tries, rng: random.Random) -> None:
    """A journal file with damaged or random bytes."""
    path = tries.here / "journal" / FILE
    least = rng.choice([0, tries.begins, tries.begins])  # mostly behind the header
    path.write_bytes(mutated(rng, tries.journal, least) if rng.random() < 0.95 else rng.randbytes(200))
    found = read_journal(path.parent)
    assert found.tokens.tolist() == tries.tokens[: len(found.tokens)], "wrong tokens"
    assert found.header == tries.header, "another header"


def _records(tries: Tries, rng: random.Random) -> None:
    """Wrong records with correct checksums, which are then resumed."""
    path = tries.here / "journal" / FILE
    path.write_bytes(tries.journal)
    found, digest = read_journal(path.parent), form.RunningHash()
    header = json.loads(form.dump_payload(found.header))
    run = json.loads(form.dump_payload(found.runs[0]))
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
    with tries.engine.resume(path.parent, fsync="never") as generation:
        if generation.num_resumed < 1000:
            for _ in zip(range(4), generation):
                pass


def _config(tries: Tries, rng: random.Random) -> None:
    for name in ("config.json", "generation_config.json"):
        data = tries.files[name]
        data = changed(rng, json.loads(data)) if rng.random() < 0.7 else mutated(rng, data)
        (tries.model / name).write_bytes(data)
    longdraft.model.defaults.read_defaults(tries.model)
    model_config.read_config(tries.model)


def _weights(tries: Tries, rng: random.Random) -> None:
    """A safetensors file with another header, or with damaged bytes in its header or in its tensors."""
    data = tries.files[WEIGHTS]
    length = 8 + int.from_bytes(data[:8], "little")
    if rng.random() < 0.5:
        header = changed(rng, json.loads(data[8:length]))
        data = len(header).to_bytes(8, "little") + header + data[length:]
    else:
        data = mutated(rng, data, 0, length) if rng.random() < 0.8 else mutated(rng, data, length, len(data))
    (tries.model / WEIGHTS).write_bytes(data)
    config = model_config.read_config(tries.sound)
    checkpoint.load_transformer(TensorFiles(tries.model), config, tries.engine.model.kernels)


def _gguf(tries: Tries, rng: random.Random) -> None:
    """A GGUF file with a damaged header, numbers, lengths, names and offsets, or with damaged tensors."""
    data = bytearray(tries.files["model.gguf"])
    end = data.index(b"blk.0.ffn_down") + 100
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.choice([rng.randrange(24), rng.randrange(end), rng.randrange(end), rng.randrange(end, len(data))])
        new = rng.choice([rng.randbytes(rng.randint(1, 8)), b"\xff" * 8, bytes(8), (1 << 40).to_bytes(8, "little")])
        data[at : at + len(new)] = new
    path = tries.model / "model.gguf"
    path.write_bytes(data if rng.random() < 0.7 else mutated(rng, bytes(data), 0, end))
    config, files = model_config.read_config(path), TensorFiles(path)
    Tokenizer(path).encode("It was")
    checkpoint.load_transformer(files, config, tries.engine.model.kernels)


def _bin(tries: Tries, rng: random.Random) -> None:
    """A `.bin` file with damage in its pickle, in its directory, in the headers of its members, or in its tensors."""
    data = tries.files[BIN]
    pickle, directory = data.index(b"data.pkl"), data.rindex(b"PK\x01\x02")
    first = data.index(b"PK\x01\x02")
    least, most = rng.choice([(pickle, data.index(b"PK\x03\x04", pickle)), (first, len(data)), (directory, len(data)),
                              (0, 1 << 14), (0, first)])
    (tries.here / "bin" / BIN).write_bytes(mutated(rng, data, least, most))
    config = model_config.read_config(tries.sound)
    checkpoint.load_transformer(TensorFiles(tries.here / "bin"), config, tries.engine.model.kernels)


def _pieces(tries: Tries, rng: random.Random) -> None:
    """A SentencePiece model with damaged fields."""
    (tries.here / "pieces" / PIECES).write_bytes(mutated(rng, tries.files[PIECES]))
    _use(Tokenizer(tries.here / "pieces"))


def _tokenizer(tries: Tries, rng: random.Random) -> None:
    data = tries.files["tokenizer.json"]
    data = changed(rng, json.loads(data)) if rng.random() < 0.5 else mutated(rng, data)
    (tries.model / "tokenizer.json").write_bytes(data)
    _use(Tokenizer(tries.model))


def _use(tokenizer: Tokenizer) -> None:
    """Encode and decode a few tokens, known ones and others."""
    stream = tokenizer.stream()
    for token in [*tokenizer.encode("It was\0é"), 0, 5, 319, 9999]:
        stream.push(token)
    stream.flush()


def _prompt(tries: Tries, rng: random.Random) -> None:
    pieces = [rng.randbytes(rng.randrange(50)), "é€😀".encode(), b"\xef\xbb\xbf", b"\0", b"<s></s>",
              b"a" * rng.randrange(3000), b"\r\n\x1b[2J", "\u202e\u0301".encode() * 20]
    (tries.here / "prompt").write_bytes(b"".join(rng.choices(pieces[rng.random() < 0.7 :], k=3)))
    ids = tries.engine.encode(read_prompt(None, str(tries.here / "prompt")))
    assert all(0 <= token < 320 for token in ids)
    stream = tries.engine.tokenizer.stream()
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


def _options(tries: Tries, rng: random.Random) -> None:
    """A command line of random options and words. `--offline` keeps it from the network."""
    arguments = ["generate", "It was", "--model", str(tries.sound), "--drafter", "plain", "--max-new-tokens", "2",
                 "--offline"]
    if rng.random() < 0.3:
        arguments = [rng.choice(["resume", "inspect"]), str(tries.here / "journal"), "--offline"]
        content = tries.journal if rng.random() < 0.5 else mutated(rng, tries.journal, tries.begins)
        (tries.here / "journal" / FILE).write_bytes(content)
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
KINDS: dict[str, tuple[int, Callable[[Tries, random.Random], None]]] = {
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
