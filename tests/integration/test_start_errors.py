"""What `backhaul engine` and `backhaul router` say when they cannot start: one line, exit code 1, soon."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.tiny import make_tiny, make_tiny_gguf

# All in one process, one after the other: importing torch takes longer than everything else here together.
RUN_ALL = """
import contextlib, io, json, sys
from backhaul.__main__ import main
outcomes = {}
for name, argv in json.load(sys.stdin).items():
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = main(argv)
    outcomes[name] = [code, errors.getvalue()]
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    folder = tmp_path_factory.mktemp("models")
    good = make_tiny(folder / "good")
    mamba = make_tiny(folder / "mamba")
    (mamba / "config.json").write_text(json.dumps(json.loads((mamba / "config.json").read_text()) | MAMBA))
    unfinished = make_tiny(folder / "unfinished")
    (unfinished / "model.safetensors").unlink()
    text = folder / "text.gguf"
    text.write_text("this is not a model\n" * 100)
    cut = make_tiny_gguf(folder / "cut.gguf")
    os.truncate(cut, cut.stat().st_size // 2)
    engine = ["engine", "--port", "0", "--log-level", "error", "--model"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        yield {
            "model missing": [*engine, str(folder / "nowhere")],
            "architecture": [*engine, str(mamba)],
            "weights missing": [*engine, str(unfinished)],
            "not a model": [*engine, str(text)],
            "model cut short": [*engine, str(cut)],
            "model length": [*engine, str(good), "--max-model-len", "1000000"],
            "no GPU": [*engine, str(good), "--device", "cuda"],
            "loopback": [*engine, str(good), "--require-routable-host"],
            "engine port": ["engine", "--model", str(good), "--port", port],
            "router port": ["router", "--decode", "http://127.0.0.1:9", "--port", port, "--log-level", "error"],
        }


MAMBA = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}


@pytest.fixture(scope="module")
def outcomes(commands: dict[str, list[str]]) -> dict[str, tuple[int, str]]:
    result = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return {name: (code, text) for name, (code, text) in json.loads(result.stdout).items()}


def test_an_engine_that_must_be_reachable_does_not_name_itself_localhost(outcomes: dict[str, tuple[int, str]]) -> None:
    code, text = outcomes["loopback"]
    assert code == 2
    assert text.count("\n") == 1
    assert "--advertise-host" in text
    assert "127.0.0.1" in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model missing", ["nowhere"]),
        ("architecture", ["mamba"]),
        ("weights missing", ["unfinished"]),
        ("not a model", ["text.gguf"]),
        ("model cut short", ["cut.gguf"]),
        ("model length", ["--max-model-len", "4096"]),
        ("no GPU", ["--device"]),
        ("engine port", ["port"]),
        ("router port", ["--port"]),
    ],
)
def test_a_program_that_cannot_start_says_why_in_one_line(
    outcomes: dict[str, tuple[int, str]], name: str, words: list[str]
) -> None:
    code, text = outcomes[name]
    assert code == 1
    assert text.count("\n") == 1, text
    assert text.startswith(("backhaul engine: ", "backhaul router: "))
    for word in words:
        assert word in text.lower() if word.islower() else word in text
