"""The command line as a whole: dispatch, exit codes, one-line errors, and what is not imported."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from backhaul import extras
from backhaul.__main__ import main
from backhaul.errors import CommandError


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["unknown"], 2, "backhaul: unknown command 'unknown'"),
        (["config"], 2, "backhaul config: say whose settings: backhaul config up|chat|router|engine"),
        (["config", "unknown"], 2, "backhaul config: say whose settings"),
        (["config", "engine"], 2, "backhaul config: --model is required"),
        (["engine"], 2, "backhaul engine: --model is required (or BACKHAUL_ENGINE_MODEL"),
        (["engine", "--model", "m", "--role", "judge"], 2, "backhaul engine: --role: must be 'prefill', 'decode'"),
        (["engine", "--model", "m", "--kv-transfer-config", "{"], 2, "backhaul engine: --kv-transfer-config: not JSON"),
        (["router"], 2, "backhaul router: --decode is required"),
        (["router", "--decode", "nonsense"], 2, "backhaul router: --decode: 'nonsense' is neither an engine's address"),
        (
            ["router", "--decode", "http://d:1", "--port", "eighty"],
            2,
            "backhaul router: --port: must be a valid integer",
        ),
        (["up", "--prefill", "0"], 2, "backhaul up: --prefill: must be greater than or equal to 1"),
        (["up", "--model", "/no/such"], 1, "backhaul up: --model /no/such: no such file or folder"),
        (["up", "--encoder"], 1, "backhaul up: --encoder: needs a model that sees pictures; give its Hugging Face"),
        (["chat", "--base-url", "nonsense"], 1, "backhaul chat: --base-url nonsense: not a URL"),
    ],
)
def test_errors_are_one_line(argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "backhaul COMMAND" in capsys.readouterr().out
    assert main([]) == 2
    assert "backhaul COMMAND" in capsys.readouterr().err
    assert main(["version"]) == main(["--version"]) == 0
    assert capsys.readouterr().out == f"backhaul {version('backhaul')}\n" * 2


def test_config_prints_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "router", "--decode", "http://d:1", "--redis", "redis://:pa55@r:1/0"]) == 0
    out = capsys.readouterr().out
    assert "- http://d:1" in out
    assert "redis: redis://***@r:1/0" in out
    assert "pa55" not in out


@pytest.mark.parametrize("command", ["up", "chat", "router", "engine", "config"])
def test_help_of_a_command_loads_nothing_heavy(command: str) -> None:
    code = f"""
import sys
from backhaul.__main__ import main
try:
    main([{command!r}, "--help"])
except SystemExit:
    pass
print([name for name in ("torch", "numpy", "nixl_cu12", "transformers", "redis") if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30).stdout
    assert out.startswith("usage: backhaul")
    assert out.splitlines()[-1] == "[]"


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    extras.require("engine", "embedded", command="up")
    monkeypatch.setitem(extras._MODULES, "engine", ("json", "torch_that_nobody_has"))
    with pytest.raises(CommandError) as caught:
        extras.require("engine", "embedded", command="up")
    install = "pip install '.[engine,embedded]' in Backhaul's folder"
    assert str(caught.value) == f"`backhaul up` needs torch_that_nobody_has: {install}"
