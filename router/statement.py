"""What an operator can state of an engine, in place of having it found out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit, urlunsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from router.capabilities import Capabilities, Kind

MAX_KEY_BYTES: Final = 4096


def engine_url(value: str) -> str:
    parts = urlsplit(value)
    try:
        port_is_good = parts.port != 0
    except ValueError:
        port_is_good = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_good or parts.query or parts.fragment:
        raise ValueError(f"{value!r} is not an engine's address; give it as http://HOST:PORT")
    return value.rstrip("/").removesuffix("/v1")


def without_user(url: str) -> str:
    """An URL without the name and password that it may carry."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _key_file(path: Path) -> Path:
    _read_key(path)
    return path


def _read_key(path: Path) -> str:
    """Raises ValueError."""
    try:
        with path.open(encoding="ascii") as file:
            key = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not an API key, which is one line of ASCII") from None
    if not key or len(key) > MAX_KEY_BYTES or not key.isprintable():
        raise ValueError(f"{path}: not an API key, which is one line of ASCII")
    return key


class EngineStatement(BaseModel):
    """What is left out is found out, or assumed."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Kind | None = None
    """Whose engine it is, where its model list does not say."""
    block_size: Annotated[int, Field(ge=1)] | None = None
    """Tokens per KV block (vLLM's --block-size)."""
    bidirectional: bool | None = None
    """Whether it was started with `bidirectional_kv_xfer`."""
    streams_carry_params: bool | None = None
    """Whether the end of a stream tells the blocks it holds (vLLM: since 0.33, with the Python front end)."""
    tokenize: bool | None = None
    """Whether to ask it for the ids of prompts."""
    api_key_file: Annotated[Path, AfterValidator(_key_file)] | None = None
    """File with the API key for the router's own questions. Turns are sent with the client's."""

    def capabilities(self) -> Capabilities:
        return Capabilities(
            kind=self.kind,
            block_size=self.block_size,
            bidirectional=self.bidirectional,
            streams_carry_params=self.streams_carry_params,
            tokenize=self.tokenize,
        )

    def headers(self) -> dict[str, str]:
        """For the router's own questions."""
        return {} if self.api_key_file is None else {"Authorization": f"Bearer {_read_key(self.api_key_file)}"}


EngineURL = Annotated[str, AfterValidator(engine_url)]
