"""What is fuzzed: an engine that trusts whoever asks, and a pair of engines with a key behind a router."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from connectors.wire.seal import SealKeys
from tests.fuzz.bodies import CHAT
from tests.fuzz.target import HANG_SECONDS, Target
from tests.integration.engines import START_TIMEOUT, Engine, engine_command, engines, wait_until
from tests.property.fleet import PATIENT, held
from tests.tiny import make_tiny
from tests.valkey import valkey

CASES = int(os.environ.get("FUZZ_CASES", "2000"))
"""In all; each test takes its share."""
SEED = int(os.environ.get("FUZZ_SEED", "0"))
KEY = "a key for the fuzzed only"
SEALS = SealKeys((KEY.encode(),))

# Reads everything a message can have.
TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif -%}
{%- for document in documents or [] %}{{ document.title }}: {{ document.text }}{% endfor -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }} {{ message.name or '' }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{%- if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif -%}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_TRANSFER = {
    "kv_connector_extra_config": {
        "kv_lease_duration": 1.0,
        "decoder_kv_blocks_ttl": 1.0,
        "transfer_timeout": 1.0,
        "handshake_timeout": 0.5,
    }
}
_ROUTER = "import sys; from router.config import RouterConfig; from router.run import run_router; "
_RUN_ROUTER = _ROUTER + "sys.exit(run_router(RouterConfig.model_validate_json(sys.argv[1])))"
_PLAIN = json.dumps(
    {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0, "seed": 1}
).encode()


@dataclass(frozen=True)
class Servers:
    """The engines, and what in front of them is asked."""

    engines: list[Engine]
    front: Target
    processes: list[tuple[subprocess.Popen[bytes], Path]]

    def answer(self) -> str:
        """The one to a plain request."""
        reply = self.front.ask("POST", CHAT, _PLAIN)
        assert reply.status == 200, reply
        return str(json.loads(reply.body)["choices"][0]["message"])

    def check_well(self, answer: str) -> None:
        """All live, nothing has failed within, nothing is held or left open, a plain request is answered as ever."""
        for process, log in self.processes:
            text = log.read_text(errors="replace")
            assert process.poll() is None, f"ended with {process.returncode}:\n{text[-3000:]}"
            assert "Traceback" not in text, text[text.index("Traceback") - 300 :][:4000]
        assert self.answer() == answer
        for engine in self.engines:
            wait_until(lambda engine=engine: not busy(engine), HANG_SECONDS, f"{engine.url} is idle")  # type: ignore[misc]


def busy(engine: Engine) -> float:
    metrics = engine.metrics()
    return held(engine) + metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]


@pytest.fixture(scope="package")
def fuzzed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny(tmp_path_factory.mktemp("fuzzed") / "model")
    (folder / "template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="package")
def started(fuzzed_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Servers, Servers, Servers]]:
    """The open engine; the sealed pair's decode engine; the router."""
    folder = tmp_path_factory.mktemp("servers")
    key = folder / "key"
    key.write_text(KEY)
    command = [
        *engine_command(
            fuzzed_model,
            "--served-model-name",
            "tiny",
            "--dtype",
            "float32",
            "--max-model-len",
            "256",
            "--max-num-seqs",
            "8",
        ),
        *("--chat-template", str(fuzzed_model / "template.jinja"), "--max-body-bytes", "1000000"),
        *("--tool-call-parser", "hermes", "--reasoning-parser", "think", "--num-gpu-blocks-override", "256"),
    ]
    transfer = json.dumps({"kv_connector": "NixlConnector", **_TRANSFER})
    open_, prefill, decode = (
        [*command, "--role", role, "--kv-transfer-config", transfer, *more]
        for role, more in (
            ("both", []),
            ("prefill", ["--seal-key-file", str(key)]),
            ("decode", ["--seal-key-file", str(key)]),
        )
    )
    with engines(folder, open_, prefill, decode) as (lone, first, second), valkey(folder) as store:
        config = {
            "prefill": [first.url],
            "decode": [second.url],
            "redis": store.url,
            "seal_key": KEY,
            "port": 0,
            "max_body_bytes": 1_000_000,
            "redis_timeout": 2.0,
            "json_file": str(folder / "router.json"),
            **PATIENT,
        }
        with _router(folder, config) as (process, url):
            log = folder / "router.log"
            logs = [(first.process, first.log), (second.process, second.log), (process, log)]
            servers = (
                Servers([lone], Target(lone.url), [(lone.process, lone.log)]),
                Servers([second], Target(second.url), logs[1:2]),
                Servers([first, second], Target(url), logs),
            )
            yield servers
            for one in servers:
                one.front.close()


@contextmanager
def _router(folder: Path, config: dict[str, object]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    ready = folder / "router.json"
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN_ROUTER, json.dumps(config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, START_TIMEOUT, "the router listens")
        assert ready.exists(), f"the router ended with {process.returncode}"
        target = Target(json.loads(ready.read_text())["url"])
        wait_until(lambda: target.ask("GET", "/ready", None).status == 200, START_TIMEOUT, "the router has engines")
        target.close()
        yield process, target.url
    finally:
        process.kill()
        process.wait()


def _well(servers: Servers) -> Iterator[Servers]:
    answer = servers.answer()
    yield servers
    servers.check_well(answer)


@pytest.fixture
def engine(started: tuple[Servers, Servers, Servers]) -> Iterator[Servers]:
    yield from _well(started[0])


@pytest.fixture
def sealed(started: tuple[Servers, Servers, Servers]) -> Iterator[Servers]:
    yield from _well(started[1])


@pytest.fixture
def router(started: tuple[Servers, Servers, Servers]) -> Iterator[Servers]:
    yield from _well(started[2])
