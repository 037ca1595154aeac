"""What an operator writes in the lists of engines: engines' own URLs, or those of sources that name engines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Final
from urllib.parse import SplitResult, parse_qsl, urlsplit

from router.discovery.collection import CollectionSource
from router.discovery.endpointslices import endpointslices
from router.discovery.kube import Cluster
from router.discovery.pods import pods
from router.discovery.source import Scheme, Source
from router.statement import engine_url

DEFAULT_INTERVAL: Final = 5.0
LONGEST_INTERVAL: Final = 3600.0
MAX_TEXT: Final = 2048

FORMS: Final = {
    "dns": "dns://NAME:PORT",
    "srv": "srv://_SERVICE._tcp.NAME",
    "pods": "pods://NAMESPACE?labels=KEY=VALUE&port=PORT",
    "endpointslices": "endpointslices://NAMESPACE/SERVICE?port=PORT",
}

_NAME_PART: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_DNS_NAME: Final = re.compile(rf"{_NAME_PART}(?:\.{_NAME_PART})*\.?")
_KUBE_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_PORT_NAME: Final = re.compile(r"(?=.*[a-z])[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")  # those of services may be long

_WORD: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_KEY: Final = rf"(?:[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_WORD}"
_REQUIREMENT: Final = (
    rf" *(?:{_KEY} *(?:==?|!=) *(?:{_WORD})?|!?{_KEY}|{_KEY} +(?:not)?in *\( *(?:{_WORD})?(?: *, *(?:{_WORD})?)* *\)) *"
)
_SELECTOR: Final = re.compile(rf"{_REQUIREMENT}(?:,{_REQUIREMENT})*")


def parse(text: str, cluster: Cluster | None = None) -> Source | str:
    """The source, or the engine's URL, normalized. Raises ValueError, also for what cannot work here: Kubernetes
    without a service account."""
    source = _parse(text, cluster or Cluster())
    if isinstance(source, CollectionSource):
        source.check()
    return source


def check(text: str) -> str:
    """The same entry, normalized. Looks at nothing but the text. Raises ValueError."""
    source = _parse(text, Cluster())
    return source if isinstance(source, str) else text


def _parse(text: str, cluster: Cluster) -> Source | str:
    form = FORMS.get(text.partition("://")[0].lower())
    if form is None:
        return _engine(text)
    try:
        return _source(text, cluster)
    except ValueError as error:
        raise ValueError(f"{text[:MAX_TEXT]!r}: {error}; give it as {form}") from None


def _engine(text: str) -> str:
    if "://" not in text:
        raise ValueError(
            f"{text[:MAX_TEXT]!r} is neither an engine's address, http://HOST:PORT, nor a source of engines, such as "
            f"{FORMS['dns']} (a comma ends an entry: write %2C within one)"
        )
    return engine_url(text)


def _source(text: str, cluster: Cluster) -> Source:
    if len(text) > MAX_TEXT or not text.isprintable() or " " in text:
        raise ValueError(f"must have at most {MAX_TEXT} characters, and no spaces (write %20)")
    parts = urlsplit(text)
    if "@" in parts.netloc or parts.fragment:
        raise ValueError("has no place for a user or a fragment")
    if parts.scheme in ("dns", "srv"):
        return _names(text, parts)
    return _collection(text, parts, cluster)


def _names(text: str, parts: SplitResult) -> Source:
    from router.discovery.names import NameSource, Server  # takes a while, and most routers ask no names

    options = _options(parts.query, ("scheme", "interval", "server"))
    host = parts.hostname or ""
    if _is_address(host):
        raise ValueError(f"{host} is an address, not a name: give the engine as http://HOST:PORT")
    if not _DNS_NAME.fullmatch(host) or len(host) > 253 or parts.path.strip("/"):
        raise ValueError(f"names no host, got {host + parts.path!r}")
    port = parts.port  # raises ValueError
    if parts.scheme == "srv" and port is not None:
        raise ValueError("has no port, SRV records tell it")
    if parts.scheme == "dns" and not port:
        raise ValueError("names no port")
    interval = _interval(options.get("interval"))
    server = Server(*_server(options["server"])) if "server" in options else None
    return NameSource(text, host, port, scheme=_scheme(options), interval=interval, server=server)


def _collection(text: str, parts: SplitResult, cluster: Cluster) -> CollectionSource:
    is_pods = parts.scheme == "pods"
    options = _options(parts.query, ("port", "scheme", *(["labels"] if is_pods else [])))
    namespace, name = parts.netloc, parts.path.strip("/")
    if namespace and not _KUBE_NAME.fullmatch(namespace):
        raise ValueError(f"names no namespace, got {namespace!r}")
    if "port" not in options:
        raise ValueError("needs port=, a number or the name of a port")
    port, scheme = _port(options["port"]), _scheme(options)
    if not is_pods:
        if not _KUBE_NAME.fullmatch(name):
            raise ValueError(f"names no service, got {name!r}")
        return endpointslices(text, cluster, namespace, name, port=port, scheme=scheme)
    if name:
        raise ValueError(f"has nothing after the namespace, got {name!r}")
    labels = options.get("labels", "")
    if not _SELECTOR.fullmatch(labels):
        raise ValueError(f"needs labels=, a label selector such as app=engine, got {labels!r}")
    return pods(text, cluster, namespace, labels, port=port, scheme=scheme)


def _options(query: str, known: Sequence[str]) -> dict[str, str]:
    """What stands after the question mark. Only labels may be given several times: all of them must match."""
    options: dict[str, str] = {}
    for key, value in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=32):
        if key not in known:
            raise ValueError(f"knows no option {key!r}, only {', '.join(known)}")
        if key in options and key != "labels":
            raise ValueError(f"has {key}= twice")
        options[key] = f"{options[key]},{value}" if key in options else value
    return options


def _scheme(options: Mapping[str, str]) -> Scheme:
    match options.get("scheme", "http"):
        case "http":
            return "http"
        case "https":
            return "https"
        case other:
            raise ValueError(f"scheme= is http or https, got {other!r}")


def _interval(text: str | None) -> float:
    if text is None:
        return DEFAULT_INTERVAL
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text) or not 0 < float(text) <= LONGEST_INTERVAL:
        raise ValueError(f"interval= is a number of seconds, at most {LONGEST_INTERVAL:.0f}, got {text!r}")
    return float(text)


def _port(text: str) -> int | str:
    if re.fullmatch(r"[0-9]{1,5}", text) and 0 < int(text) < 1 << 16:
        return int(text)
    if not _PORT_NAME.fullmatch(text):
        raise ValueError(f"port= is a number or the name of a port, got {text!r}")
    return text


def _server(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    host = parts.hostname or ""
    if not _is_address(host) or parts.port == 0 or parts.netloc != text or "@" in text:
        raise ValueError(f"server= is the IP address of a DNS server, with or without its port, got {text!r}")
    return host, parts.port or 53


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
