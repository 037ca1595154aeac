"""llama.cpp as a worker of `bench.engine_peers`, or as a server: the C interface of the library in the xllamacpp wheel.

    VENV/bin/python -m bench.engine_llama MODEL.gguf --threads 2 [--port 8080 --parallel 16]

Runs in an environment of its own (`pip install xllamacpp`); needs nothing else but the standard library. Contexts have
llama.cpp's own defaults: KV in float16, 512 tokens to a micro-batch. Nothing is sampled, as in llama.cpp's own benches.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import threading
import time
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_int8, c_int32, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from bench.engine_worker import median_seconds, serve

ROOM = 256
"""Tokens of every open sequence's answer."""
MAX_BATCH = 2048
"""Tokens to a call, llama.cpp's default."""


class _ModelParams(ctypes.Structure):
    """Never looked into. Longer than the real one, which is passed in memory: what is behind its end is not read."""

    _fields_ = (("_all", c_uint64 * 64),)


class _ContextParams(ctypes.Structure):
    """Its beginning, and as above."""

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("_rest", c_uint64 * 64),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


def _library() -> ctypes.CDLL:
    package = importlib.import_module("xllamacpp")
    (path,) = Path(str(package.__file__)).parent.glob("xllamacpp*.so")
    library = ctypes.CDLL(str(path))
    for name, result, *arguments in (
        ("llama_print_system_info", c_char_p),
        ("llama_model_default_params", _ModelParams),
        ("llama_context_default_params", _ContextParams),
        ("llama_model_load_from_file", c_void_p, c_char_p, _ModelParams),
        ("llama_init_from_model", c_void_p, c_void_p, _ContextParams),
        ("llama_free", None, c_void_p),
        ("llama_set_n_threads", None, c_void_p, c_int32, c_int32),
        ("llama_get_memory", c_void_p, c_void_p),
        ("llama_memory_clear", None, c_void_p, c_bool),
        ("llama_memory_seq_cp", None, c_void_p, c_int32, c_int32, c_int32, c_int32),
        ("llama_batch_init", _Batch, c_int32, c_int32, c_int32),
        ("llama_decode", c_int32, c_void_p, _Batch),
        ("llama_synchronize", None, c_void_p),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class LlamaCpp:
    """Implements bench.engine_worker.Measured."""

    def __init__(self, model: Path, threads: int) -> None:
        self._library = _library()
        self._library.llama_backend_init()
        self._threads = threads
        self._model = self._library.llama_model_load_from_file(
            str(model).encode(), self._library.llama_model_default_params()
        )
        assert self._model, f"{model}: llama.cpp cannot load it"
        self._batch: Any = self._library.llama_batch_init(MAX_BATCH, 0, 1)
        self._prefilling: dict[int, int] = {}
        """Contexts by the length of their prompt, kept so that their memory is warm."""
        self._context: int | None = None
        """Of the open sequences."""
        self._num_sequences = 0
        self._position = 0

    def about(self) -> str:
        flags = self._library.llama_print_system_info().decode()
        names = [flag.split("=")[0].strip() for flag in flags.removeprefix("CPU :").split("|") if "= 1" in flag]
        return f"llama.cpp (xllamacpp {importlib.metadata.version('xllamacpp')}: {' '.join(names)})"

    def prefill(self, prompt: Sequence[int]) -> float:
        context = self._prefilling.get(len(prompt)) or self._make_context(1, len(prompt))
        self._prefilling[len(prompt)] = context
        self._library.llama_memory_clear(self._library.llama_get_memory(context), False)
        started = time.perf_counter()
        self._compute(context, prompt)
        return time.perf_counter() - started

    def open(self, prompt: Sequence[int], batch: int) -> None:
        self._context = self._make_context(batch, len(prompt) + ROOM)
        self._num_sequences, self._position = batch, len(prompt)
        self._compute(self._context, prompt)
        memory = self._library.llama_get_memory(self._context)
        for sequence in range(1, batch):
            self._library.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        self._step()  # copies

    def decode(self, steps: int) -> float:
        return median_seconds(steps, self._step)

    def close(self) -> None:
        self._library.llama_free(self._context)
        self._context = None

    def _make_context(self, sequences: int, tokens: int) -> int:
        params = self._library.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = sequences * (-(-tokens // 256) * 256), MAX_BATCH, sequences
        context: int | None = self._library.llama_init_from_model(self._model, params)
        assert context, "llama.cpp made no context"
        self._library.llama_set_n_threads(context, self._threads, self._threads)
        return context

    def _compute(self, context: int, prompt: Sequence[int]) -> None:
        for start in range(0, len(prompt), MAX_BATCH):
            piece = prompt[start : start + MAX_BATCH]
            for row, token in enumerate(piece):
                self._row(row, token, start + row, 0, wanted=start + row == len(prompt) - 1)
            self._run(context, len(piece))

    def _step(self) -> None:
        assert self._context is not None
        for sequence in range(self._num_sequences):
            self._row(sequence, 100 + sequence, self._position, sequence, wanted=True)
        self._run(self._context, self._num_sequences)
        self._position += 1

    def _row(self, row: int, token: int, position: int, sequence: int, *, wanted: bool) -> None:
        batch = self._batch
        batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, position, 1, wanted
        batch.seq_id[row][0] = sequence

    def _run(self, context: int, num_tokens: int) -> None:
        self._batch.n_tokens = num_tokens
        status = self._library.llama_decode(context, self._batch)
        assert status == 0, f"llama_decode: {status}"
        self._library.llama_synchronize(context)


def serve_http(model: Path, threads: int, port: int, parallel: int, tokens: int) -> None:
    """llama.cpp's own server, until the process is ended."""
    package = importlib.import_module("xllamacpp")
    params = package.CommonParams()
    params.model.path, params.hostnames, params.port = str(model), ["127.0.0.1"], port
    params.n_parallel, params.n_ctx = parallel, parallel * tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = package.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="llama.cpp, to be measured.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--port", type=int, help="be a server there instead")
    parser.add_argument("--parallel", type=int, default=16, help="requests at once")
    parser.add_argument("--tokens", type=int, default=1024, help="of each")
    arguments = parser.parse_args()
    if arguments.port is None:
        serve(lambda: LlamaCpp(arguments.model, arguments.threads))
    else:
        serve_http(arguments.model, arguments.threads, arguments.port, arguments.parallel, arguments.tokens)


if __name__ == "__main__":
    main()
