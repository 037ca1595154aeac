"""Where peers reach this engine."""

from __future__ import annotations

import ipaddress
import socket

from engine.config import EngineConfig

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


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host under that name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") in ("localhost", "localhost.localdomain", "ip6-localhost")
