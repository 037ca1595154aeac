"""The seal: good for exactly the params, the path and the time it was made for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from connectors.wire.seal import SEAL_SECONDS, SealError, SealKeys, new_key

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "prompt_token_ids": [5, 6, 7]},
    "ec_transfer_params": {"picture": {"modality": "image"}},
}


def keys(*secrets: str) -> SealKeys:
    made = SealKeys.from_settings(SecretStr("\n".join(secrets or ("k" * 16,))), None)
    assert made is not None
    return made


def test_a_seal_opens_with_its_key_whatever_the_order_of_the_fields() -> None:
    seal = keys().seal(CHAT, BODY)
    reordered = {name: dict(reversed(value.items())) for name, value in BODY.items() if isinstance(value, dict)}
    keys().check(seal, CHAT, reordered)


@pytest.mark.parametrize(
    "forged",
    [
        ("kv_transfer_params", "remote_block_ids", [[1, 3]]),
        ("kv_transfer_params", "prompt_token_ids", [5, 6, 8]),
        ("kv_transfer_params", "prompt_token_ids", [5, 6]),
        ("kv_transfer_params", "prompt_token_ids", [5.0, 6, 7]),
        ("kv_transfer_params", "prompt_token_ids", ["5", 6, 7]),
        ("kv_transfer_params", "prompt_token_ids", [-5, 6, 7]),
        ("kv_transfer_params", "prompt_token_ids", [2**70, 6, 7]),
        ("kv_transfer_params", "prompt_token_ids", None),
        ("kv_transfer_params", "more", 1),
        ("ec_transfer_params", "picture", {}),
    ],
)
def test_a_seal_is_not_good_for_other_params(forged: tuple[str, str, object]) -> None:
    seal = keys().seal(CHAT, BODY)
    body = copy.deepcopy(BODY)
    body[forged[0]][forged[1]] = forged[2]
    with pytest.raises(SealError):
        keys().check(seal, CHAT, body)


def test_a_seal_is_not_good_for_another_path_or_key_or_time() -> None:
    seal = keys().seal(CHAT, BODY, clock=lambda: 1000.0)
    keys().check(seal, CHAT, BODY, clock=lambda: 1000.0 + SEAL_SECONDS)
    for path, other, now in (
        ("/v1/completions", keys(), 1000.0),
        (CHAT, keys("another key of some length"), 1000.0),
        (CHAT, keys(), 1001.0 + SEAL_SECONDS),
    ):
        with pytest.raises(SealError):
            other.check(seal, path, BODY, clock=lambda now=now: now)  # type: ignore[misc]


@pytest.mark.parametrize(
    "seal", [None, "", ".", "12", "x.y", "1" * 30 + ".ab", "99999999999.", "99999999999.é", "²³.ab"]
)
def test_what_is_no_seal_is_refused(seal: str | None) -> None:
    with pytest.raises(SealError):
        keys().check(seal, CHAT, BODY)


def test_an_expiry_cannot_be_moved() -> None:
    expiry, mac = keys().seal(CHAT, BODY).split(".")
    with pytest.raises(SealError):
        keys().check(f"{int(expiry) + 1}.{mac}", CHAT, BODY)


def test_keys_change_without_a_gap() -> None:
    old, new = "the old key of engines", "the new key of routers"
    keys(new, old).check(keys(old).seal(CHAT, BODY), CHAT, BODY)
    keys(new, old).check(keys(new).seal(CHAT, BODY), CHAT, BODY)
    with pytest.raises(SealError):
        keys(old).check(keys(new, old).seal(CHAT, BODY), CHAT, BODY)


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{new_key()}\n\n{new_key()}\n")
    made = SealKeys.from_settings(None, file)
    assert made is not None
    made.check(made.seal(CHAT, BODY), CHAT, BODY)


@pytest.mark.parametrize("text", ["", "  \n", "short", "long enough to be a key\nshort"])
def test_short_keys_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"--seal-key-file .*: a key of at least 16"):
        SealKeys.from_settings(None, file)
    with pytest.raises(ValueError, match="cannot be read"):
        SealKeys.from_settings(None, tmp_path / "none")
