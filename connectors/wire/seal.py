"""The seal: how an engine knows that transfer params come from the router, and not from a client.

Transfer params name memory of other engines and carry token ids past the chat template, so an engine with a key takes
them only from who has the key too. The seal is a request header, `<expiry>.<mac>`: Unix seconds, and HMAC-SHA256
(RFC 2104) over the path, the expiry, both dictionaries in canonical JSON, and the ids of the prompt by their digest.
It says nothing about the rest of the body, which a client may write as it likes.
"""

from __future__ import annotations

import hmac
import secrets
import time
from array import array
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, Self

import orjson
from pydantic import SecretStr

from connectors.wire.ids import ID_TYPE, TokenIds, digest_of

SEAL_HEADER: Final = "X-Backhaul-Seal"
SEAL_SECONDS: Final = 300.0
"""For how long a seal is good: what a request may queue on its way, and what two machines' clocks may differ by."""
MIN_KEY_LENGTH: Final = 16
NUM_REMEMBERED: Final = 16
"""Seals made last."""

_KV, _EC, _IDS = "kv_transfer_params", "ec_transfer_params", "prompt_token_ids"


class SealError(Exception):
    """Transfer params that are not sealed, or not by who has the key; the text says which."""


class SealKeys:
    """One key or several: the first seals, each of them opens, so that a key can be changed without a gap."""

    def __init__(self, keys: tuple[bytes, ...]) -> None:
        assert keys
        self._keys = [hmac.new(key, digestmod="sha256") for key in keys]
        # What prefill legs of first turns say is the same for all of one second.
        self._newest = lru_cache(NUM_REMEMBERED)(partial(_mac, self._keys[0]))

    @classmethod
    def from_settings(cls, key: SecretStr | None, file: Path | None) -> Self | None:
        """The keys of a program's settings, None if it has none. Raises ValueError with a text for the user."""
        if key is not None and file is not None:
            raise ValueError("--seal-key and --seal-key-file exclude each other")
        if file is not None:
            try:
                text = file.read_text()
            except OSError as error:
                raise ValueError(f"--seal-key-file {file} cannot be read: {error.strerror}") from None
            except UnicodeDecodeError:
                raise ValueError(f"--seal-key-file {file} is not a text file") from None
            return cls._parsed(f"--seal-key-file {file}", text)
        return None if key is None else cls._parsed("--seal-key", key.get_secret_value())

    @classmethod
    def _parsed(cls, where: str, text: str) -> Self:
        keys = tuple(line.strip().encode() for line in text.splitlines() if line.strip())
        if not keys or min(map(len, keys)) < MIN_KEY_LENGTH:
            raise ValueError(f"{where}: a key of at least {MIN_KEY_LENGTH} characters expected, one per line")
        return cls(keys)

    def seal(self, path: str, body: Mapping[str, Any], *, clock: Callable[[], float] = time.time) -> str:
        """The header's value for the transfer params of a body."""
        expiry = str(int(clock() + SEAL_SECONDS))
        return f"{expiry}.{self._newest(_text(path, expiry, body))}"

    def check(
        self, seal: str | None, path: str, body: Mapping[str, Any], *, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises SealError unless this seal was made for these params with one of the keys, and is still good."""
        if seal is None:
            raise SealError(f"they are not sealed: {SEAL_HEADER} is missing")
        expiry, _, mac = seal.partition(".")
        if not (expiry.isascii() and expiry.isdigit() and len(expiry) < 20 and mac.isascii()):
            raise SealError("the seal is malformed")
        try:
            text = _text(path, expiry, body)
            good = any(hmac.compare_digest(mac, _mac(key, text)) for key in self._keys)
        except (TypeError, ValueError, OverflowError, RecursionError):  # what no router can have written
            good = False
        if not good:
            raise SealError("the seal is not theirs, or was made with another key")
        if clock() > int(expiry):
            raise SealError("the seal has expired; if it never was good, compare the clocks of router and engine")


def new_key() -> str:
    return secrets.token_urlsafe(32)


def _text(path: str, expiry: str, body: Mapping[str, Any]) -> bytes:
    """What is sealed."""
    kv, ids = body.get(_KV), b""
    if isinstance(kv, dict) and isinstance(given := kv.get(_IDS), (TokenIds, list)):
        # As JSON they would cost more than all the rest.
        ids = digest_of(array(ID_TYPE, given)) if isinstance(given, list) else given.digest()
        kv = kv.copy()
        del kv[_IDS]
    return orjson.dumps([path, expiry, kv, body.get(_EC)], option=orjson.OPT_SORT_KEYS) + ids


def _mac(keyed: hmac.HMAC, text: bytes) -> str:
    """`keyed`: an HMAC of the key and nothing else, which is copied rather than made anew."""
    mac = keyed.copy()
    mac.update(text)
    return mac.hexdigest()
