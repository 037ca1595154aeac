"""Where Redis is and how to log in: the `redis` setting, read once and checked before anything starts.

    redis://[USER:PASSWORD@]HOST[:6379][/DB]                            one server
    unix://[USER:PASSWORD@]/PATH[?db=DB]                                one server, by its socket
    redis+sentinel://[USER:PASSWORD@]HOST[:26379],HOST…/SERVICE[/DB]    the master that sentinels name
    redis+cluster://[USER:PASSWORD@]HOST[:6379],HOST…                   a cluster, by some of its nodes

With `rediss` for `redis` the data servers are spoken to with TLS. Messages never quote what may hold a password.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self
from urllib.parse import parse_qsl, unquote

Kind = Literal["single", "sentinel", "cluster"]

MAX_PASSWORD_BYTES: Final = 4096
_FORMS: Final[Mapping[Kind, str]] = {
    "single": "redis://HOST:PORT/DB",
    "sentinel": "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB",
    "cluster": "redis+cluster://HOST:PORT,HOST:PORT",
}
_SCHEMES: Final[Mapping[str, tuple[Kind, bool]]] = {
    "unix": ("single", False),
    "redis": ("single", False),
    "rediss": ("single", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_PORTS: Final[Mapping[Kind, int]] = {"single": 6379, "sentinel": 26379, "cluster": 6379}


class Endpoint(NamedTuple):
    host: str
    """Or the path of a socket, if there is no port."""
    port: int


@dataclass(frozen=True, slots=True)
class Access:
    """How one kind of server is spoken to."""

    tls: bool
    options: Mapping[str, object] = field(repr=False)
    """For redis-py's connections: user, password, database, certificates."""
    password_file: Path | None = None
    """Its first line is the password, as it is when a connection is made."""


@dataclass(frozen=True, slots=True)
class RedisAddress:
    kind: Kind
    endpoints: tuple[Endpoint, ...]
    """The server; the sentinels; or nodes by which the others are found."""
    data: Access
    """To the servers with the records."""
    sentinels: Access
    service: str = ""
    """What the sentinels call the master."""

    @classmethod
    def parse(cls, url: str, password_file: Path | None = None) -> Self:
        """Raises ValueError with a text for the user."""
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in _SCHEMES:
            raise ValueError(f"not a Redis address; give it as one of {', '.join(_FORMS.values())} or unix:///PATH")
        kind, tls = _SCHEMES[scheme]
        rest, _, query = rest.partition("?")
        authority, _, path = rest.partition("/")
        credentials, _, hosts = authority.rpartition("@")
        service = ""
        if scheme == "unix":
            endpoints: tuple[Endpoint, ...] = (Endpoint(_socket(hosts, path), 0),)
            path = ""
        else:
            endpoints = tuple(_endpoint(host, kind) for host in hosts.split(","))
        if kind == "single" and len(endpoints) > 1:
            raise ValueError("has several hosts: give redis+sentinel:// or redis+cluster://, whichever they are")
        if kind == "sentinel":
            service, _, path = path.partition("/")
            if not service:
                raise ValueError(f"names no service; give it as {_FORMS[kind]}")
        options = _options(query, kind, tls) | _credentials(credentials)
        if password_file is not None and "password" in options:
            raise ValueError("has a password, and redis_password_file another; give one of them")
        if path := path.removesuffix("/"):
            options["db"] = _number("DB", path)
        if kind == "cluster" and options.get("db"):
            raise ValueError("names a database: a cluster has only number 0")
        sentinel_tls = bool(options.pop("sentinel_ssl", False))
        to_sentinels = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
        if sentinel_tls:
            to_sentinels |= {name: value for name, value in options.items() if name.startswith("ssl_")}
        return cls(
            kind=kind,
            endpoints=endpoints,
            data=Access(tls, options, password_file),
            sentinels=Access(sentinel_tls, to_sentinels),
            service=unquote(service),
        )


def redis_url(value: str) -> str:
    """The URL as it is, if it can be used."""
    RedisAddress.parse(value)
    return value


def password_file(path: Path) -> Path:
    """The path as it is, if a password is there."""
    read_password(path)
    return path


def read_password(path: Path) -> str:
    """The first line. Raises ValueError with a text for the user."""
    try:
        with path.open("rb") as file:
            line = file.read(MAX_PASSWORD_BYTES).partition(b"\n")[0].removesuffix(b"\r").decode()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None
    if not line:
        raise ValueError(f"{path}: the first line is empty; it should be the password")
    return line


def _credentials(text: str) -> dict[str, object]:
    username, _, password = text.partition(":")
    given = {"username": unquote(username), "password": unquote(password)}
    return {name: value for name, value in given.items() if value}


def _socket(hosts: str, path: str) -> str:
    if hosts or not path:
        raise ValueError("names no socket; give it as unix:///PATH")
    return "/" + unquote(path)


def _endpoint(text: str, kind: Kind) -> Endpoint:
    """HOST, HOST:PORT, [IPv6] or [IPv6]:PORT."""
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        colon, port = rest[:1], rest[1:]
        good = bool(closed) and colon in ("", ":")
    else:
        host, colon, port = text.partition(":")
        good = True
    number = _PORTS[kind] if not colon else int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0
    if not (good and host and 0 < number < 65536):
        raise ValueError(
            f"not a Redis address; give it as {_FORMS[kind]}, and write / ? @ in a password as %2F %3F %40"
        )
    return Endpoint(unquote(host), number)


def _options(query: str, kind: Kind, tls: bool) -> dict[str, object]:
    known = _COMMON | (_TLS if tls else {}) | (_SENTINEL if kind == "sentinel" else {})
    options: dict[str, object] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in known:
            options[name] = known[name](name, value)
        elif name in _TLS:
            raise ValueError(f"{name} is for TLS; give the address as rediss…://")
        elif name in _SENTINEL:
            raise ValueError(f"{name} is for redis+sentinel://")
        else:
            raise ValueError(f"has an unknown option; known: {', '.join(known)}")
    if options.get("sentinel_ssl") and not tls:
        raise ValueError("sentinel_ssl needs rediss+sentinel://")
    if "ssl_keyfile" in options and "ssl_certfile" not in options:
        raise ValueError("ssl_keyfile needs ssl_certfile, the certificate that goes with it")
    return options


def _text(name: str, value: str) -> str:
    return value


def _number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 6):
        raise ValueError(f"{name}: must be a number, the database's")
    return int(value)


def _switch(name: str, value: str) -> bool:
    said = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(value.lower())
    if said is None:
        raise ValueError(f"{name}: must be true or false")
    return said


def _file(name: str, value: str) -> str:
    try:
        with open(value, "rb"):
            return value
    except OSError as error:
        raise ValueError(f"{name}: {value}: {error.strerror}") from None


def _folder(name: str, value: str) -> str:
    if not Path(value).is_dir():
        raise ValueError(f"{name}: {value}: no such folder")
    return value


def _verification(name: str, value: str) -> str:
    if value not in ("none", "optional", "required"):
        raise ValueError(f"{name}: must be none, optional or required")
    return value


_Reader = Callable[[str, str], object]
_COMMON: Final[dict[str, _Reader]] = {
    "db": _number,
    "username": _text,
    "password": _text,
    "client_name": _text,
}
_TLS: Final[dict[str, _Reader]] = {
    "ssl_ca_certs": _file,
    "ssl_ca_path": _folder,
    "ssl_certfile": _file,
    "ssl_keyfile": _file,
    "ssl_password": _text,
    "ssl_cert_reqs": _verification,
    "ssl_check_hostname": _switch,
    "ssl_ciphers": _text,
}
_SENTINEL: Final[dict[str, _Reader]] = {
    "sentinel_username": _text,
    "sentinel_password": _text,
    "sentinel_ssl": _switch,
}
"""By their names in a URL, which for servers are redis-py's."""
