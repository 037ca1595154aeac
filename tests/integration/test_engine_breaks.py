"""An engine that cannot recover: its clients are told, it says that it is not healthy, and ends with one clear line."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.integration.engines import Engine, engine_command, engines, wait_until

BREAKS = """
import os, sys
from connectors.nixl_agent import NixlAgent
from engine.runner import Runner
from backhaul.__main__ import main

def breaks(owner, name, flag, error):
    sound = getattr(owner, name)
    def method(*args):
        if os.path.exists(flag):
            raise error
        return sound(*args)
    setattr(owner, name, method)

folder = sys.argv.pop(1)
breaks(NixlAgent, "notifications", folder + "/transfer", RuntimeError("NIXL_ERR_BACKEND"))
breaks(Runner, "run", folder + "/memory", MemoryError("no room for the step"))
sys.exit(main())
"""


def breakable(folder: Path, model: Path, *flags: str) -> list[str]:
    """An engine that breaks once a file called `transfer` or `memory` lies in the folder."""
    command = engine_command(model, *flags)
    assert command[:4] == [sys.executable, "-m", "backhaul", "engine"]
    return [sys.executable, "-c", BREAKS, str(folder), *command[3:]]


def health(engine: Engine) -> int:
    try:
        with urllib.request.urlopen(f"{engine.url}/health", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.parametrize(
    ("what", "last_line", "answer_is_whole"),
    [
        ("transfer", "backhaul engine: KV can no longer be exchanged: RuntimeError: NIXL_ERR_BACKEND", True),
        ("memory", "backhaul engine: MemoryError: no room for the step", False),
    ],
)
def test_engine_that_cannot_recover_ends_with_one_line_and_an_exit_code(
    tiny_model: Path, tmp_path: Path, what: str, last_line: str, answer_is_whole: bool
) -> None:
    with engines(tmp_path, breakable(tmp_path, tiny_model, "--role", "prefill")) as (engine,):
        held = {"prompt": [5] * 40, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        assert engine.post("/v1/completions", held)[0] == 200
        body = json.dumps({"prompt": "a", "max_tokens": 600, "ignore_eos": True, "stream": True}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{engine.url}/v1/completions", body)) as stream:
            assert stream.readline().startswith(b"data: ")
            (tmp_path / what).touch()
            wait_until(lambda: health(engine) != 200, 10, "it is not healthy")
            rest = stream.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert (b'"finish_reason":"length"' in rest) is answer_is_whole
        assert (b'data: {"error"' in rest) is not answer_is_whole
        assert engine.process.wait(15) == 1
        assert engine.log.read_text().splitlines()[-1] == last_line


def test_what_is_on_offer_to_a_next_turn_holds_no_exit_up(tiny_model: Path, tmp_path: Path) -> None:
    with engines(tmp_path, engine_command(tiny_model, "--role", "decode")) as (engine,):
        body = {"prompt": [5] * 40, "max_tokens": 3, "ignore_eos": True, "kv_transfer_params": {"offer_blocks": True}}
        status, answer = engine.post("/v1/completions", body)
        assert status == 200, answer
        assert engine.metrics()["backhaul_engine_leases_held"] == 1
        engine.process.send_signal(15)
        assert engine.process.wait(10) == 0
