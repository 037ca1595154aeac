"""Where peers reach this engine."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping

from engine.config import EngineConfig
from engine.errors import StartError

_WILDCARDS = ("", "0.0.0.0", "::")


def advertised_host(config: EngineConfig) -> str:
    """Where peers reach this engine: as configured, else where it listens, else the address of its default route."""
    if config.advertise_host:
        return config.advertise_host
    if config.host not in _WILDCARDS:
        return config.host
    family, probe = (socket.AF_INET6, "2001:db8::1") if config.host == "::" else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((probe, 9))  # sends nothing; the kernel picks the source address
            return str(sock.getsockname()[0])
        except OSError:
            return "::1" if config.host == "::" else "127.0.0.1"


def side_channel(
    config: EngineConfig, host: str, port: int, environ: Mapping[str, str] = os.environ
) -> tuple[str, int]:
    """Where peers ask for encodings: as configured, else as the environment names vLLM has for it say, else where they
    ask for KV. Raises StartError."""
    given = config.ec_transfer_config
    for name in (f"VLLM_{kind}_SIDE_CHANNEL_PORT" for kind in ("EC", "NIXL")):
        if given.ec_port is None and environ.get(name):
            text = environ[name]
            if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
                raise StartError(f"{name}: a port expected, got {text[:20]!r}")
            port = int(text)
            break
    named = environ.get("VLLM_EC_SIDE_CHANNEL_HOST") or environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST")
    return given.ec_ip or named or host, given.ec_port or port


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host under that name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") in ("localhost", "localhost.localdomain", "ip6-localhost")
