"""Engines as pods, found by their labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from router.discovery.collection import Collection, CollectionSource, Unusable
from router.discovery.kube import Cluster, at, items, word
from router.discovery.source import Found, Scheme, address_url


def pods(
    name: str, cluster: Cluster, namespace: str, labels: str, *, port: int | str, scheme: Scheme
) -> CollectionSource:
    collection = Collection("/api/v1", "pods", namespace, labels)
    return CollectionSource(name, cluster, collection, partial(pod_engines, port=port, scheme=scheme))


def pod_engines(pod: object, *, port: int | str, scheme: Scheme) -> Sequence[Found]:
    """The engine in a pod, if it is ready or was told to stop: what it serves then may end, and be read. Anything else,
    such as a pod that was evicted, or whose probe fails, is none."""
    leaving = at(pod, "metadata", "deletionTimestamp") is not None
    if at(pod, "status", "phase") != "Running" or not (leaving or _is_ready(pod)):
        return ()
    url = address_url(scheme, at(pod, "status", "podIP"), _port(pod, port))
    return (Found(url, word(at(pod, "metadata", "uid")), leaving),) if url else ()


def _is_ready(pod: object) -> bool:
    """By the condition: containers may be ready while a readiness gate is not, and after the node was lost."""
    conditions = items(at(pod, "status", "conditions"))
    return any(at(one, "type") == "Ready" and at(one, "status") == "True" for one in conditions)


def _port(pod: object, port: int | str) -> int:
    """Raises Unusable."""
    if isinstance(port, int):
        return port
    # Containers that start before the others and then stay are listed among those that initialize.
    stay = [one for one in items(at(pod, "spec", "initContainers")) if at(one, "restartPolicy") == "Always"]
    for container in [*items(at(pod, "spec", "containers")), *stay]:
        for one in items(at(container, "ports")):
            number = at(one, "containerPort")
            if at(one, "name") == port and isinstance(number, int):
                return number
    raise Unusable(f"no container has a port named {port!r}")
