"""Wrong settings are refused at the start, saying what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from backhaul.__main__ import main
from router.config import RouterConfig

GOOD: dict[str, Any] = {"decode": ["http://d:1"]}


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/", "http://h:1"),
        ("http://h:1/v1", "http://h:1"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://h", "https://h"),
        ("http://[::1]:8", "http://[::1]:8"),
    ],
)
def test_engine_address(given: str, url: str) -> None:
    assert RouterConfig(decode=(given,)).decode == (url,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decode": []}, "at least 1"),
        ({"decode": ["d:1"]}, "http://HOST:PORT"),
        ({"decode": ["http://d:99999"]}, "http://HOST:PORT"),
        ({"decode": ["http://"]}, "http://HOST:PORT"),
        ({"prefill": ["http://p:1", "http://p:1/"]}, "given twice"),
        ({"encode": ["http://e:1", "http://e:1/"]}, "given twice"),
        ({"encode": ["e:1"]}, "http://HOST:PORT"),
        ({"encode_batch": -1}, "greater than or equal to 0"),
        ({"engines": {"http://e:1": {}}, "encode": ["http://e:2"]}, "nor as encode"),
        ({"redis": "localhost:6379"}, "redis://HOST:PORT"),
        ({"redis": "http://localhost:6379"}, "redis://HOST:PORT"),
        ({"redis": "redis://h:x"}, "redis://HOST:PORT"),
        ({"port": 65536}, "65535"),
        ({"redis_timeout": 0}, "greater than 0"),
        ({"dispatch_deadline": 30}, "less than 30"),
        ({"prefil": ["http://p:1"]}, "Extra inputs"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RouterConfig(**{**GOOD, **change})


def test_password_of_redis_is_not_in_the_message() -> None:
    with pytest.raises(ValidationError) as refused:
        RouterConfig(**{**GOOD, "redis": "redis://:secret@h:x"})
    assert all("secret" not in error["msg"] for error in refused.value.errors())


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RouterConfig(**GOOD).port = 1  # type: ignore[misc]


def test_what_is_stated_of_engines_is_by_their_address() -> None:
    config = RouterConfig(**GOOD, engines={"http://d:1/v1/": {"kind": "vllm", "block_size": 32}})
    assert config.engines["http://d:1"].capabilities().block_size == 32


@pytest.mark.parametrize(
    ("engines", "words"),
    [
        ('{"http://x:1": {}}', "engines: http://x:1 is given neither as prefill nor as decode"),
        ('{"d:1": {}}', "--engines: d:1.[key]: 'd:1' is neither an engine's address"),
        ('{"http://d:1": {"block_size": 0}}', "--engines: http://d:1.block_size: must be greater than or equal to 1"),
        ('{"http://d:1": {"blocksize": 8}}', "--engines: http://d:1.blocksize: "),
        ('{"http://d:1": {"kind": "x"}}', "--engines: http://d:1.kind: must be 'backhaul' or 'vllm', not 'x'"),
        ('{"http://d:1": {"api_key_file": "/none"}}', "--engines: http://d:1.api_key_file: /none: No such file"),
        ("[]", "--engines: must be a valid"),
    ],
)
def test_wrong_statement_names_engine_and_key(engines: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "router", "--decode", "http://d:1", "--engines", engines]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"backhaul config: {words}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("text", [b"", b"\n", b"two\nlines", b"\xc3\xa9", b"k" * 5000])
def test_api_key_is_one_line_and_never_shown(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(text)
    with pytest.raises(ValidationError) as refused:
        RouterConfig(**GOOD, engines={"http://d:1": {"api_key_file": file}})
    assert "one line of ASCII" in str(refused.value)
    assert "lines" not in str(refused.value)
