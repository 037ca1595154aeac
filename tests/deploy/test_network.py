"""NetworkPolicies admit what the parts say to each other, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.deploy.cases import CASES, GATEWAY, PLAIN, PROMETHEUS
from tests.deploy.objects import Manifest, Rendered, component_of, container_of, render

pytestmark = pytest.mark.usefixtures("helm")

UCX: Final = (18500, 18699)
Way = tuple[str, str, str, int, int]
"""Who, whom, protocol, first and last port."""


def _ports(rule: Manifest, names: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    for one in rule["ports"]:
        first = names[one["port"]] if isinstance(one["port"], str) else one["port"]
        yield one.get("protocol", "TCP"), first, one.get("endPort", first)


def _peers(rule: Manifest, key: str, rendered: Rendered) -> Iterator[str]:
    """Components of this release, or what the values say, by name."""
    known = {str(PROMETHEUS[0]): "prometheus", str(GATEWAY[0]): "gateway"}
    for peer in rule.get(key, [None]):
        if peer is None:
            yield "anybody"
        elif "podSelector" in peer:
            wanted = peer["podSelector"]["matchLabels"].items()
            yield from (
                component_of(one) for one in rendered.workloads() if wanted <= one["metadata"]["labels"].items()
            )
        else:
            yield known[str(peer)]


def ways(rendered: Rendered) -> set[Way]:
    """What both ends admit, or the one that is a pod of this release."""
    components = {component_of(one) for one in rendered.workloads()}
    names = {
        component_of(one): {port["name"]: port["containerPort"] for port in container_of(one)["ports"]}
        for one in rendered.workloads()
    }
    into: set[Way] = set()
    out: set[Way] = set()
    for policy in rendered.of("NetworkPolicy"):
        me = component_of(policy)
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        for rule in policy["spec"]["ingress"]:
            into |= {(who, me, *ports) for who in _peers(rule, "from", rendered) for ports in _ports(rule, names[me])}
        for rule in policy["spec"]["egress"]:
            for whom in _peers(rule, "to", rendered):
                out |= {(me, whom, *ports) for ports in _ports(rule, names.get(whom, {}))}
    assert {component_of(one) for one in rendered.of("NetworkPolicy")} == components
    both = into & out
    one_sided = {way for way in into | out if not {way[0], way[1]} <= components}
    assert into | out == both | one_sided, f"only one end admits {(into | out) - both - one_sided}"
    return both | one_sided


def _among_engines(*ports: tuple[int, int]) -> set[Way]:
    return {(a, b, "TCP", *range_) for a in ("prefill", "decode") for b in ("prefill", "decode") for range_ in ports}


def _to_engines(*who: str) -> set[Way]:
    return {(one, role, "TCP", 8000, 8000) for one in who for role in ("prefill", "decode")}


DNS: Final[set[Way]] = {("router", "anybody", "UDP", 53, 53), ("router", "anybody", "TCP", 53, 53)}
API: Final[set[Way]] = {("router", "anybody", "TCP", port, port) for port in (443, 6443)}


def test_what_is_used_is_admitted_and_nothing_else() -> None:
    assert ways(render(CASES["policies"])) == {
        *_to_engines("router", "prometheus"),
        *_among_engines((8000, 8000), UCX),
        ("gateway", "router", "TCP", 8000, 8000),
        ("prometheus", "router", "TCP", 8000, 8000),
        ("gateway", "router", "TCP", 9000, 9000),
        ("router", "anybody", "TCP", 6379, 6379),
        *DNS,
        *API,
    }


def test_vllm_has_a_side_channel_and_what_it_loads_models_from() -> None:
    assert ways(render(CASES["policies, valkey, vllm"])) == {
        *_to_engines("router"),
        *_among_engines((5600, 5601), UCX),
        ("anybody", "router", "TCP", 8000, 8000),
        ("router", "valkey", "TCP", 6379, 6379),
        *DNS,
        *API,
        *((role, "anybody", "TCP", 443, 443) for role in ("prefill", "decode")),
        *((role, "anybody", protocol, 53, 53) for role in ("prefill", "decode") for protocol in ("UDP", "TCP")),
    }


def test_encoders_are_reached_by_engines_and_by_routers() -> None:
    admitted = ways(render(CASES["pictures"]))
    to_encoders = {(way[0], way[3:]) for way in admitted if way[1] == "encode"}
    assert to_encoders >= {("router", (8000, 8000)), ("prefill", (8000, 8000)), ("prefill", UCX)}
    assert {who for who, _ in to_encoders} == {"router", "prefill", "decode", "encode"}


def test_each_pool_has_ports_of_its_own() -> None:
    theirs = (19000, 19100)
    pools = {**PLAIN["pools"], "decode": {"kvTransfer": {"ucx": {"firstPort": theirs[0], "lastPort": theirs[1]}}}}
    admitted = ways(render({**CASES["policies"], "pools": pools}))
    for who in ("prefill", "decode"):
        assert {(way[1], way[3:]) for way in admitted if way[0] == who} == {
            ("prefill", (8000, 8000)),
            ("prefill", UCX),
            ("decode", (8000, 8000)),
            ("decode", theirs),
        }


def test_discovery_by_dns_needs_no_api() -> None:
    without = render({**CASES["policies"], "discovery": {"mode": "dns"}})
    assert not API & ways(without)


def test_engines_listen_only_where_they_are_admitted() -> None:
    for case in ("policies", "policies, valkey, vllm"):
        for workload in render(CASES[case]).workloads():
            for one in container_of(workload).get("env", ()):
                if one["name"] == "UCX_TCP_PORT_RANGE":
                    assert one["value"] == f"{UCX[0]}-{UCX[1]}"
