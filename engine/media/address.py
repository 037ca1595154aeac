"""Which addresses pictures may be fetched from: public ones, and those of networks that the operator names.

A URL is a client's, and this engine is within a network where metadata services, databases and its own peers trust
whoever can reach them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_NAT64 = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))
"""Behind these prefixes, a gateway connects to the IPv4 address in the last 32 bits."""
_WITHIN = tuple(map(IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")))
"""Protocols' own, with a cloud's metadata service among them, and another cloud's, whose address looks public."""
_NUMERIC = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)", re.IGNORECASE)


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Raises ValueError naming what is no network."""
    found = []
    for text in texts:
        try:
            found.append(ip_network(text))
        except ValueError as error:
            raise ValueError(f"{text!r} is no network such as 10.0.0.0/8: {error}") from None
    return tuple(found)


def may_connect(text: str, allowed: Sequence[Network]) -> bool:
    """Whether this address, as a resolver gives it, may be connected to."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    return all(_is_public(each) or any(each in network for network in allowed) for each in _meant(address))


def is_odd_number(host: str) -> bool:
    """True for an IPv4 address that is not written as one: 2130706433, 0x7f.1, 0177.0.0.1. What reads a URL, and what
    connects, disagree about these."""
    if not _NUMERIC.fullmatch(host.rstrip(".").rpartition(".")[2]):
        return False
    try:
        return str(IPv4Address(host)) != host
    except ValueError:
        return True


def _meant(address: Address) -> list[Address]:
    """The address, or those that a packet to it is in truth for."""
    if isinstance(address, IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address.sixtofour is not None:
        return [address, address.sixtofour]
    if address.teredo is not None:
        return [address, *address.teredo]
    if any(address in network for network in _NAT64):
        return [IPv4Address(int(address) & 0xFFFFFFFF)]
    return [address]


def _is_public(address: Address) -> bool:
    within = address.is_site_local if isinstance(address, IPv6Address) else any(address in each for each in _WITHIN)
    return address.is_global and not (address.is_multicast or address.is_reserved or within)
