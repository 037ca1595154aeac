"""Wrong settings are refused at the start, saying what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

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
