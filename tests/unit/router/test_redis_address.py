"""Addresses of Redis: every kind that is deployed is understood, the others are refused without quoting a password."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from backhaul.__main__ import main
from router.config import RouterConfig
from router.redis_address import Endpoint, RedisAddress, read_password

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "kind", "tls", "endpoints", "options", "service"),
    [
        ("redis://h", "single", False, [("h", 6379)], {}, ""),
        ("redis://h:1/2", "single", False, [("h", 1)], {"db": 2}, ""),
        ("redis://h:1/", "single", False, [("h", 1)], {}, ""),
        ("redis://h?db=3&client_name=n", "single", False, [("h", 6379)], {"db": 3, "client_name": "n"}, ""),
        ("redis://[::1]:7", "single", False, [("::1", 7)], {}, ""),
        ("redis://[::1]", "single", False, [("::1", 6379)], {}, ""),
        ("redis://:p%40%2F@h", "single", False, [("h", 6379)], {"password": "p@/"}, ""),
        ("redis://u:p@w@h", "single", False, [("h", 6379)], {"username": "u", "password": "p@w"}, ""),
        ("redis://u@h", "single", False, [("h", 6379)], {"username": "u"}, ""),
        ("rediss://h:1/0", "single", True, [("h", 1)], {"db": 0}, ""),
        ("rediss://h?ssl_cert_reqs=none", "single", True, [("h", 6379)], {"ssl_cert_reqs": "none"}, ""),
        ("rediss://h?ssl_check_hostname=False", "single", True, [("h", 6379)], {"ssl_check_hostname": False}, ""),
        ("unix:///run/valkey.sock", "single", False, [("/run/valkey.sock", 0)], {}, ""),
        ("unix://u:p@/s?db=1", "single", False, [("/s", 0)], {"username": "u", "password": "p", "db": 1}, ""),
        ("redis+sentinel://a,b:1/main", "sentinel", False, [("a", 26379), ("b", 1)], {}, "main"),
        ("rediss+sentinel://:p@a/m/4", "sentinel", True, [("a", 26379)], {"password": "p", "db": 4}, "m"),
        ("redis+cluster://a,[::2]:1", "cluster", False, [("a", 6379), ("::2", 1)], {}, ""),
        ("rediss+cluster://:p@a/0", "cluster", True, [("a", 6379)], {"password": "p", "db": 0}, ""),
    ],
)
def test_address(
    url: str, kind: str, tls: bool, endpoints: list[tuple[str, int]], options: dict[str, Any], service: str
) -> None:
    address = RedisAddress.parse(url)
    assert (address.kind, address.data.tls, address.service) == (kind, tls, service)
    assert address.endpoints == tuple(Endpoint(*one) for one in endpoints)
    assert address.data.options == options


def test_sentinels_have_a_login_of_their_own() -> None:
    url = "redis+sentinel://u:p@a/m?sentinel_username=su&sentinel_password=sp"
    address = RedisAddress.parse(url)
    assert address.data.options == {"username": "u", "password": "p"}
    assert address.sentinels.options == {"username": "su", "password": "sp"}
    assert not address.sentinels.tls


def test_sentinels_use_the_same_certificates_if_they_have_tls() -> None:
    address = RedisAddress.parse("rediss+sentinel://u:p@a/m?sentinel_ssl=true&ssl_check_hostname=no")
    assert address.sentinels.tls
    assert address.sentinels.options["ssl_check_hostname"] is False
    assert address.sentinels.options["password"] is None


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:6379", "not a Redis address; give it as one of redis://HOST:PORT/DB"),
        ("http://h", "not a Redis address"),
        ("redis://", "give it as redis://HOST:PORT/DB"),
        ("redis://h:x", "give it as redis://HOST:PORT/DB"),
        ("redis://h:0", "give it as redis://HOST:PORT/DB"),
        ("redis://h:65536", "give it as redis://HOST:PORT/DB"),
        ("redis://[::1", "give it as redis://HOST:PORT/DB"),
        ("redis://:hunter2/more@h", "in a password as %2F"),
        ("redis://:hunter2?more@h", "in a password as %2F"),
        ("redis://h/hunter2", "DB: must be a number"),
        ("redis://a,b", "has several hosts"),
        ("redis://h?hunter2=1", "has an unknown option; known: db, username"),
        ("redis://h?protocol=3", "has an unknown option"),
        ("redis://h?ssl_ca_certs=/x", "ssl_ca_certs is for TLS; give the address as rediss"),
        ("redis://h?sentinel_password=hunter2", "sentinel_password is for redis"),
        ("rediss://h?ssl_ca_certs=/none", "ssl_ca_certs: /none: No such file"),
        ("rediss://h?ssl_ca_path=/none", "ssl_ca_path: /none: no such folder"),
        ("rediss://h?ssl_cert_reqs=maybe", "ssl_cert_reqs: must be none, optional or required"),
        ("rediss://h?ssl_check_hostname=maybe", "ssl_check_hostname: must be true or false"),
        ("rediss://h?ssl_keyfile=/dev/null", "ssl_keyfile needs ssl_certfile"),
        ("unix://", "names no socket"),
        ("unix://relative", "names no socket"),
        ("redis+sentinel://a", "names no service; give it as redis+sentinel"),
        ("redis+sentinel://a/m/x", "DB: must be a number"),
        ("redis+sentinel://a,/m", "give it as redis+sentinel"),
        ("redis+sentinel://a/m?sentinel_ssl=true", "sentinel_ssl needs rediss"),
        ("redis+cluster://a,:1", "give it as redis+cluster"),
        ("redis+cluster://a/1", "a cluster has only number 0"),
        ("redis+cluster://a/main", "DB: must be a number"),
    ],
)
def test_address_that_cannot_be_used_is_refused(url: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "router", "--decode", "http://d:1", "--redis", url]) == 2
    said = capsys.readouterr().err
    assert said.startswith("backhaul config: --redis: ")
    assert words in said
    assert SECRET not in said


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@h:1/0",
        "redis://u:hunter2@h",
        "redis://:a@hunter2@h",
        "redis://:a hunter2@h",
        "redis://h?password=hunter2&db=1",
        "redis://h?db=1&password=hunter2",
        "unix://:hunter2@/s",
        "redis+sentinel://u:hunter2@a:1,b:2/m/0?sentinel_username=s&sentinel_password=hunter2",
        "rediss+cluster://:hunter2@a,b?ssl_password=hunter2",
    ],
)
def test_password_is_shown_nowhere(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "router", "--decode", "http://d:1", "--redis", url]) == 0
    shown = capsys.readouterr().out
    assert "***" in shown
    assert SECRET not in shown
    assert SECRET not in repr(RedisAddress.parse(url))


@pytest.mark.parametrize("content", [b"hunter2", b"hunter2\n", b"hunter2\r\nsecond line\n"])
def test_password_is_the_first_line_of_its_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "password"
    file.write_bytes(content)
    assert read_password(file) == SECRET
    config = RouterConfig(decode=("http://d:1",), redis="redis://u@h", redis_password_file=file)
    address = RedisAddress.parse(config.redis, config.redis_password_file)
    assert (address.data.options, address.data.password_file) == ({"username": "u"}, file)


@pytest.mark.parametrize(("content", "words"), [(None, "No such file"), (b"\n", "is empty"), (b"\xff", "not a text")])
def test_file_without_a_password_is_refused(
    tmp_path: Path, content: bytes | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    assert main(["config", "router", "--decode", "http://d:1", "--redis-password-file", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"backhaul config: --redis-password-file: {file}: ")
    assert words in said


def test_two_passwords_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("other")
    with pytest.raises(ValidationError, match="redis: has a password, and redis_password_file another"):
        RouterConfig(decode=("http://d:1",), redis="redis://:hunter2@h", redis_password_file=file)
