"""Precedence of flag, environment, file and default; and what a wrong value is answered with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import Field, SecretStr

from backhaul.errors import UsageError
from backhaul.settings import Settings, load, to_yaml
from engine.config import EngineConfig


class Lease(Settings):
    """How long blocks are held."""

    duration: Annotated[float, Field(gt=0)] = 30.0
    """Seconds."""
    mode: Literal["pull", "push"] = "pull"


class Transfer(Settings):
    connector: str | None = None
    lease: Lease = Lease()


class Demo(Settings):
    """A program with one of everything."""

    model: str
    """The one that must be given; 100% of the time."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    backends: tuple[str, ...] = ()
    """Where to send requests."""
    caching: bool = True
    """Keep what was computed."""
    spares: Annotated[int, Field(ge=0, json_schema_extra={"bare": 1})] = 0
    key: SecretStr | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    output: Annotated[Path | None, Field(alias="json")] = None
    transfer: Transfer = Transfer()


def load_demo(*argv: str, env: dict[str, str] | None = None) -> Demo:
    return load(Demo, argv, prog="demo", env_prefix="DEMO_", environ=env or {})


def refusal(*argv: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        load_demo(*argv, env=env)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text("model: from-file\nport: 1\nbackends: [a, b]\ntransfer:\n  lease: {duration: 7}\n")
    return path


def test_each_source_wins_over_the_next(file: Path) -> None:
    env = {"DEMO_PORT": "2", "DEMO_MODEL": "from-env", "DEMO_CONFIG": str(file)}
    assert load_demo("--model", "x").port == 8000
    assert load_demo("--config", str(file)).port == 1
    assert load_demo(env=env).port == 2
    assert load_demo("--port", "3", env=env).port == 3
    mixed = load_demo("--port", "3", env=env)
    assert (mixed.model, mixed.backends, mixed.transfer.lease.duration) == ("from-env", ("a", "b"), 7.0)


def test_a_list_from_a_stronger_source_replaces_the_weaker_one(file: Path) -> None:
    assert load_demo("--config", str(file), "--backends", "c").backends == ("c",)


@pytest.mark.parametrize(
    ("argv", "backends"),
    [
        (["--backends", "http://a", "--backends=http://b"], ("http://a", "http://b")),
        (["--backends", "http://a,http://b"], ("http://a", "http://b")),
        (["--backends", '["a,b"]', "--backends", "c"], ("a,b", "c")),
    ],
)
def test_list_flags_can_be_repeated(argv: list[str], backends: tuple[str, ...]) -> None:
    assert load_demo("--model", "x", *argv).backends == backends


@pytest.mark.parametrize(("text", "backends"), [("a, b", ("a", "b")), ('["a,b", "c"]', ("a,b", "c"))])
def test_list_in_the_environment(text: str, backends: tuple[str, ...]) -> None:
    assert load_demo(env={"DEMO_MODEL": "x", "DEMO_BACKENDS": text}).backends == backends


@pytest.mark.parametrize(
    ("argv", "caching"),
    [
        ([], True),
        (["--no-caching"], False),
        (["--caching", "false"], False),
        (["--caching=0"], False),
        (["--no-caching", "--caching"], True),
    ],
)
def test_switches(argv: list[str], caching: bool) -> None:
    assert load_demo("--model", "x", *argv).caching is caching


@pytest.mark.parametrize(("argv", "spares"), [([], 0), (["--spares"], 1), (["--spares", "3"], 3), (["--spares=0"], 0)])
def test_flag_that_may_stand_alone(argv: list[str], spares: int) -> None:
    assert load_demo("--model", "m", *argv, "--port", "1").spares == spares


def test_a_section_as_json_and_its_fields_singly() -> None:
    demo = load_demo(
        *("--model", "x", "--transfer.lease.mode", "push"),
        *("--transfer", '{"connector": "N", "lease": {"mode": "pull", "duration": 3}}'),
    )
    assert demo.transfer == Transfer(connector="N", lease=Lease(duration=3.0, mode="push"))


def test_a_section_given_in_part_keeps_what_weaker_sources_say_about_the_rest(file: Path) -> None:
    env = {"DEMO_TRANSFER__LEASE__MODE": "push", "DEMO_TRANSFER": '{"connector": "E"}'}
    demo = load_demo("--config", str(file), "--transfer", '{"connector": "F"}', env=env)
    assert demo.transfer == Transfer(connector="F", lease=Lease(duration=7.0, mode="push"))


def test_underscores_are_taken_for_dashes_in_flags_and_dashes_for_underscores_in_files(tmp_path: Path) -> None:
    config = load(
        EngineConfig,
        [
            "--model=some_model",
            "--max_model_len=9",
            *("--kv-transfer-config", '{"kv_connector":"NixlConnector"}'),
            *("--kv-transfer-config.kv_load_failure_policy", "fail"),
        ],
        prog="engine",
        env_prefix="E_",
        environ={},
    )
    assert (config.model, config.max_model_len) == ("some_model", 9)
    assert config.kv_transfer_config.kv_connector == "NixlConnector"
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"
    path = tmp_path / "engine.yaml"
    path.write_text("model: m\nkv-transfer-config: {kv-load-failure-policy: fail}\n")
    config = load(EngineConfig, ["--config", str(path)], prog="engine", env_prefix="E_", environ={})
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"


def test_an_aliased_field_goes_by_its_alias() -> None:
    assert load_demo("--model", "x", "--json", "/tmp/f").output == Path("/tmp/f")


def test_dictionaries_are_json() -> None:
    assert load_demo("--model", "x", "--labels", '{"a-b": "c"}').labels == {"a-b": "c"}


def test_empty_environment_variables_and_service_links_are_no_settings() -> None:
    env = {
        "DEMO_MODEL": "x",
        "DEMO_OUTPUT_TYPO": "",
        "DEMO_PORT": "tcp://10.0.0.7:8000",
        "DEMO_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "DEMO_PORT_8000_TCP_ADDR": "10.0.0.7",
        "DEMO_SERVICE_HOST": "10.0.0.7",
        "DEMO_SERVICE_PORT_HTTP": "8000",
        "DEMO_DECODE_PORT": "tcp://10.0.0.8:1",
    }
    assert load_demo(env=env).port == 8000


@pytest.mark.parametrize(
    ("argv", "env", "parts"),
    [
        ([], {}, ["--model is required", "DEMO_MODEL", "model in a --config file"]),
        (["--port", "70000"], {}, ["--port: must be less than or equal to 65535, not '70000'"]),
        (["--port", "x"], {}, ["--port: must be a valid integer", "not 'x'"]),
        (["--port"], {}, ["--port: expected one argument"]),
        ([], {"DEMO_PORT": "-1"}, ["DEMO_PORT: must be greater than or equal to 0"]),
        (["--prot", "1"], {}, ["unknown flag --prot; did you mean --port?"]),
        (["--por", "1"], {}, ["unknown flag --por"]),
        (["stray"], {}, ["unexpected argument 'stray'"]),
        (["--caching", "perhaps"], {}, ["--caching: must be a valid boolean"]),
        (["--transfer.lease.mode", "beam"], {}, ["--transfer.lease.mode: must be 'pull' or 'push', not 'beam'"]),
        (["--transfer", '{"lease": {"mode": "beam"}}'], {}, ["--transfer: lease.mode: must be 'pull' or 'push'"]),
        (["--transfer", '{"leese": {}}'], {}, ["--transfer: unknown key `leese`; did you mean lease?"]),
        (["--transfer", "{"], {}, ["--transfer: not JSON"]),
        (["--transfer", "[]"], {}, ["--transfer: must be an object with any of connector, lease"]),
        ([], {"DEMO_PROT": "1"}, ["DEMO_PROT in the environment is no setting; did you mean DEMO_PORT?"]),
        ([], {"DEMO_TRANSFER__LEASE__DURATION": "0"}, ["DEMO_TRANSFER__LEASE__DURATION: must be greater than 0"]),
        (["--config", "/no/such.yaml"], {}, ["--config /no/such.yaml: No such file"]),
    ],
)
def test_what_is_wrong_is_named(argv: list[str], env: dict[str, str], parts: list[str]) -> None:
    required = [] if not argv and not env else ["--model", "x"]
    message = refusal(*argv, *required, env=env)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("document", "part"),
    [
        ("model: x\nprot: 1\n", "unknown key `prot`; did you mean port?"),
        ("model: x\ntransfer: {lease: {mode: beam}}\n", "transfer.lease.mode: must be 'pull' or 'push', not 'beam'"),
        ("model: x\ntransfer: {lease: {foo: 1}}\n", "transfer.lease: unknown key `foo`; known: duration, mode"),
        ("model: x\n  port: : 3", "line 2: not YAML"),
        ("- model\n", "must be a mapping"),
        ("model: x\nport: eighty\n", "port: must be a valid integer"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(tmp_path: Path, document: str, part: str) -> None:
    path = tmp_path / "demo.yaml"
    path.write_text(document)
    message = refusal("--config", str(path))
    assert str(path) in message
    assert part in message


def test_secrets_are_in_no_error_and_no_printed_settings() -> None:
    assert "hunter2" not in refusal("--model", "x", "--key", "hunter2", "--port", "x")
    shown = to_yaml(load_demo("--model", "redis://me:hunter2@host:1/0", "--key", "hunter2"))
    assert "hunter2" not in shown
    assert "redis://***@host:1/0" in shown


def test_printed_settings_are_a_config_file(tmp_path: Path) -> None:
    demo = load_demo("--model", "x", "--backends", "a", "--no-caching", "--transfer.lease.duration", "2", "--json", "f")
    path = tmp_path / "demo.yaml"
    path.write_text(to_yaml(demo))
    assert load_demo("--config", str(path)) == demo
    assert yaml.safe_load(path.read_text())["transfer"]["lease"] == {"duration": 2.0, "mode": "pull"}


def test_help_shows_docstrings_defaults_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load_demo("--help")
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "usage: demo --model TEXT [flags]",
        "100% of the time",
        "--port N [8000]",
        "--backends TEXT Where to send requests. May be repeated.",
        "--transfer.lease.duration X Seconds. [30.0]",
        "{pull,push}",
        "How long blocks are held.",
        "DEMO_<FLAG>",
    ):
        assert part in text
