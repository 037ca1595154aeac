"""Which engine an object of Kubernetes tells of."""

from __future__ import annotations

from typing import Any

import pytest

from router.discovery.collection import Unusable
from router.discovery.endpointslices import slice_engines
from router.discovery.pods import pod_engines
from router.discovery.source import Found, one_each
from tests.kube_stub import endpoint, endpoint_slice, pod

READY = Found("http://10.0.0.1:8000", "u")
LEAVING = Found("http://10.0.0.1:8000", "u", leaving=True)


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({}, READY),
        ({"ready": False}, None),
        ({"ready": None}, None),
        ({"ip": None}, None),
        ({"ip": "", "phase": "Pending", "ready": None}, None),
        ({"ip": "no address"}, None),
        ({"phase": "Pending"}, None),
        ({"phase": "Failed"}, None),
        ({"phase": "Failed", "ip": None, "ready": False}, None),
        ({"phase": "Succeeded"}, None),
        ({"phase": "Unknown"}, None),
        ({"deleting": True}, LEAVING),
        ({"deleting": True, "ready": False}, LEAVING),
        ({"deleting": True, "phase": "Succeeded"}, None),
        ({"deleting": True, "phase": "Pending", "ip": None}, None),
    ],
    ids=str,
)
def test_a_pod_is_in_only_if_running_ready_and_not_deleted(state: dict[str, Any], found: Found | None) -> None:
    """Its containers say that they are ready in each of these."""
    one = pod("a", **{"ip": "10.0.0.1", "uid": "u"} | state)
    assert list(pod_engines(one, port=8000, scheme="http")) == ([found] if found else [])


def test_an_ipv6_pod_has_brackets() -> None:
    (found,) = pod_engines(pod("a", "fd00:0:0::1"), port=8000, scheme="https")
    assert found.url == "https://[fd00::1]:8000"


def _container(port: int, name: str = "http", **more: object) -> dict[str, Any]:
    return {
        "name": f"c{port}",
        "ports": [{"containerPort": 1, "name": "other"}, {"containerPort": port, "name": name}],
    } | more


@pytest.mark.parametrize(
    ("containers", "init_containers", "port"),
    [
        ([{"name": "plain"}, _container(8001)], [], 8001),
        ([_container(8001)], [_container(8002, restartPolicy="Always")], 8001),
        ([{"name": "plain"}], [_container(8002), _container(8003, restartPolicy="Always")], 8003),
    ],
)
def test_a_named_port_is_that_of_a_container_that_stays(
    containers: list[Any], init_containers: list[Any], port: int
) -> None:
    one = pod("a", "10.0.0.1", containers=containers, init_containers=init_containers)
    (found,) = pod_engines(one, port="http", scheme="http")
    assert found.url == f"http://10.0.0.1:{port}"


def test_a_named_port_that_is_nowhere_is_unusable() -> None:
    with pytest.raises(Unusable, match="no container has a port named 'grpc'"):
        pod_engines(pod("a", "10.0.0.1"), port="grpc", scheme="http")
    assert pod_engines(pod("a", "10.0.0.1", ready=False), port="grpc", scheme="http") == ()


@pytest.mark.parametrize(
    "rubbish", [None, [], "x", {}, {"status": []}, {"status": {"phase": "Running", "conditions": [None, 3]}}]
)
def test_rubbish_is_no_engine(rubbish: object) -> None:
    assert list(pod_engines(rubbish, port=8000, scheme="http")) == []
    assert list(slice_engines(rubbish, port=8000, scheme="http")) == []
    assert list(slice_engines({"endpoints": [rubbish]}, port=8000, scheme="http")) == []


@pytest.mark.parametrize(
    ("conditions", "found"),
    [
        ({}, READY),
        ({"ready": None, "serving": None, "terminating": None}, READY),
        ({"ready": True, "serving": True, "terminating": False}, READY),
        ({"ready": False, "serving": False, "terminating": False}, None),
        ({"ready": False}, None),
        ({"ready": False, "serving": True, "terminating": True}, LEAVING),
        ({"ready": False, "serving": False, "terminating": True}, LEAVING),
        ({"ready": True, "serving": True, "terminating": True}, LEAVING),
    ],
    ids=str,
)
def test_an_endpoint_is_in_only_if_ready_and_not_terminating(conditions: dict[str, Any], found: Found | None) -> None:
    part = endpoint_slice("s", [endpoint("10.0.0.1", uid="u", **conditions)])
    assert list(slice_engines(part, port="http", scheme="http")) == ([found] if found else [])


def test_a_named_port_is_that_of_the_slice() -> None:
    part = endpoint_slice("s", [endpoint("fd00::1")], ports={"metrics": 9000, "http": 8123})
    assert [one.url for one in slice_engines(part, port="http", scheme="http")] == ["http://[fd00::1]:8123"]
    assert [one.url for one in slice_engines(part, port=7000, scheme="http")] == ["http://[fd00::1]:7000"]
    with pytest.raises(Unusable, match="no port named 'grpc'"):
        slice_engines(part, port="grpc", scheme="http")


def test_an_address_with_a_successor_is_the_successors() -> None:
    old, new = Found("http://10.0.0.1:1", "b", leaving=True), Found("http://10.0.0.1:1", "a")
    assert one_each([old, new]) == one_each([new, old]) == (new,)


def test_a_pod_of_two_address_families_is_one_engine() -> None:
    v4, v6 = Found("http://10.0.0.1:1", "u", leaving=True), Found("http://[fd00::1]:1", "u")
    assert one_each([v6, v4]) == (v4,)
    assert one_each([Found(v6.url), Found(v4.url)]) == (Found(v4.url), Found(v6.url))  # who knows
