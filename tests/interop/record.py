"""Ask real vLLM engines for every kind of answer that the router has to read, and keep what was sent and came back in
tests/fixtures/vllm-0.32: `make interop-record`, or `python -m tests.interop.record P D D33` with URLs of engines.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.interop.engines import MODEL, VLLM

FOLDER = Path(__file__).parents[1] / "fixtures/vllm-0.32"
HOLD = {"do_remote_decode": True, "do_remote_prefill": False}
METRICS = (
    "vllm:nixl_",
    "vllm:prompt_tokens_by_source",
    "vllm:cache_config_info",
    "vllm:num_requests_",
    "vllm:kv_cache",
)
QUESTION = {
    "role": "user",
    "content": "My name is Anna. These are my things: a lamp, copper, timber, a ship, a river, a train, two letters, "
    "silver, a garden, salt, a bridge, one window and a road. What is my name, and which of my things float?",
}
MORE = {"role": "user", "content": "And which of them would you take along to the mountains in winter, and why?"}

Json = dict[str, Any]


class Recorder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str, url: str, method: str, path: str, body: Json | None = None) -> Any:
        """Make the request and keep it. Returns the answer: what its JSON says, or its text."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=300) as answer:
                status, kind, raw = answer.status, answer.headers["Content-Type"], answer.read()
        except urllib.error.HTTPError as error:
            status, kind, raw = error.code, error.headers["Content-Type"], error.read()
        kind = kind.partition(";")[0]
        said: Any = json.loads(raw) if kind == "application/json" else raw.decode()
        if path == "/metrics":
            said = "\n".join(line for line in said.splitlines() if line.startswith(METRICS)) + "\n"
        request: Json = {"method": method, "path": path} | ({} if body is None else {"body": body})
        response: Json = {"status": status, "content_type": kind}
        response |= {"body": said} if kind == "application/json" else {"lines": said.split("\n")}
        text = json.dumps({"request": request, "response": response}, indent=1, ensure_ascii=False)
        (self.folder / f"{name}.json").write_text(_lists_of_numbers_in_one_line(text) + "\n")
        print(f"{status} {name}", flush=True)
        return said


def record(keep: Recorder, prefill: str, decode: str, decode_33: str) -> None:
    keep("version", prefill, "GET", "/version")
    keep("models", prefill, "GET", "/v1/models")
    keep("tokenize", prefill, "POST", "/tokenize", {"model": MODEL, "messages": [QUESTION]})
    _probes(keep, prefill)
    _chats(keep, prefill, decode)
    _streams(keep, prefill, decode, decode_33)
    _completions(keep, prefill, decode)
    _refusals(keep, prefill, decode)
    keep("metrics_prefill", prefill, "GET", "/metrics")
    keep("metrics_decode", decode, "GET", "/metrics")


def _probes(keep: Recorder, prefill: str) -> None:
    """How one finds out whether there are routes, without having anything done."""
    keep("probe_tokenize", prefill, "GET", "/tokenize")
    keep("probe_release", prefill, "GET", "/kv/release")
    keep("probe_generate", prefill, "GET", "/inference/v1/generate")
    keep("probe_generate_empty", prefill, "POST", "/inference/v1/generate", {})


def _chats(keep: Recorder, prefill: str, decode: str) -> None:
    """Two turns; then pulls that fail: of blocks whose time is over, and of those of an engine that is no more."""
    history = [QUESTION]
    first = keep("prefill_1", prefill, "POST", "/v1/chat/completions", _prefill_leg(history))
    answer = keep("decode_1", decode, "POST", "/v1/chat/completions", _decode_leg(history, first))
    offer = answer["kv_transfer_params"]
    history += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]}, MORE]
    second = keep("prefill_2", prefill, "POST", "/v1/chat/completions", _prefill_leg(history, {**offer, **HOLD}))
    answer = keep("decode_2", decode, "POST", "/v1/chat/completions", _decode_leg(history, second))
    late = {**answer["kv_transfer_params"], **HOLD, "remote_blocks_expiry_time": 0.0}
    history += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]}, MORE]
    other = [{**QUESTION, "content": "Nobody. " + QUESTION["content"]}, *history[1:]]  # of which nothing is cached
    keep("prefill_failed_pull", prefill, "POST", "/v1/chat/completions", _prefill_leg(other, late))
    third = keep("prefill_3", prefill, "POST", "/v1/chat/completions", _prefill_leg(history))
    lost = {**third, "kv_transfer_params": {**third["kv_transfer_params"], "remote_engine_id": "nobody"}}
    keep("decode_failed_pull", decode, "POST", "/v1/chat/completions", _decode_leg(history, lost))
    streamed = {**_decode_leg(history, lost), "stream": True}
    keep("decode_failed_pull_stream", decode, "POST", "/v1/chat/completions", streamed)
    stopped = {**_decode_leg(history, third), "stop": ["e"]}
    keep("decode_stop_string", decode, "POST", "/v1/chat/completions", stopped)


def _streams(keep: Recorder, prefill: str, decode: str, decode_33: str) -> None:
    for name, engine in (("", decode), ("_with_params", decode_33)):
        held = keep(f"prefill_stream{name}", prefill, "POST", "/v1/chat/completions", _prefill_leg([QUESTION]))
        asked = {**_decode_leg([QUESTION], held), "stream": True, "stream_options": {"include_usage": True}}
        keep(f"decode_stream{name}", engine, "POST", "/v1/chat/completions", asked)


def _completions(keep: Recorder, prefill: str, decode: str) -> None:
    body: Json = {"model": MODEL, "prompt": QUESTION["content"], "temperature": 0, "return_token_ids": True}
    held = keep("prefill_completion", prefill, "POST", "/v1/completions", body | _LAST_OF_PREFILL)
    params = {"kv_transfer_params": held["kv_transfer_params"]}
    keep("decode_completion", decode, "POST", "/v1/completions", {**body, "max_tokens": 8, **params})
    held = keep("prefill_completion_stream", prefill, "POST", "/v1/completions", body | _LAST_OF_PREFILL)
    params = {"kv_transfer_params": held["kv_transfer_params"]}
    streamed = {**body, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}, **params}
    keep("decode_completion_stream", decode, "POST", "/v1/completions", streamed)


def _refusals(keep: Recorder, prefill: str, decode: str) -> None:
    chat = "/v1/chat/completions"
    keep("error_unknown_model", prefill, "POST", chat, {**_prefill_leg([QUESTION]), "model": "nobody"})
    keep("error_bad_field", prefill, "POST", chat, {**_prefill_leg([QUESTION]), "temperature": "warm"})
    keep("error_no_messages", prefill, "POST", chat, {"model": MODEL, "messages": []})
    too_long = {"role": "user", "content": "salt " * 5000}
    shown = keep("error_too_long", prefill, "POST", chat, _prefill_leg([too_long]))
    assert "error" in shown
    for name, ids in (("error_bad_ids", [1, -1]), ("error_ids_beyond_vocabulary", [1, 10**6])):
        keep(name, decode, "POST", chat, {**_leg([QUESTION]), "kv_transfer_params": {"prompt_token_ids": ids}})
    keep("error_no_generate", decode, "POST", "/inference/v1/generate", {"token_ids": [1, 2, 3]})
    keep("error_no_release", decode, "POST", "/kv/release", {"engine_id": "e", "request_id": "r"})


_LAST_OF_PREFILL: Json = {"max_tokens": 1, "kv_transfer_params": HOLD}


def _leg(messages: Sequence[Json]) -> Json:
    return {"model": MODEL, "messages": list(messages), "temperature": 0, "max_tokens": 24, "return_token_ids": True}


def _prefill_leg(messages: Sequence[Json], params: Json = HOLD) -> Json:
    return {**_leg(messages), "max_tokens": 1, "kv_transfer_params": params}


def _decode_leg(messages: Sequence[Json], prefilled: Json) -> Json:
    params = {**prefilled["kv_transfer_params"], "prompt_token_ids": prefilled["prompt_token_ids"]}
    return {**_leg(messages), "kv_transfer_params": params}


def _lists_of_numbers_in_one_line(text: str) -> str:
    return re.sub(r"\[\n[\s\d,-]+\]", lambda found: re.sub(r"\s+", "", found[0]).replace(",", ", "), text)


@contextlib.contextmanager
def engines() -> Iterator[Sequence[str]]:
    with tempfile.TemporaryDirectory(prefix="backhaul-record-") as folder:
        logs = Path(folder)
        started = [VLLM("prefill", logs), VLLM("decode", logs), VLLM("decode_33", logs, params_in_streams=True)]
        try:
            for engine in started:
                engine.start()
            for engine in started:
                engine.wait()
            yield [engine.url for engine in started]
        finally:
            for engine in started:
                engine.kill()


def main(urls: Sequence[str]) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with engines() if not urls else contextlib.nullcontext(urls) as (prefill, decode, decode_33):
        record(Recorder(FOLDER), prefill, decode, decode_33)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
