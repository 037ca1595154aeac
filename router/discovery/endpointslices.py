"""Engines as the endpoints of a Kubernetes service."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from router.discovery.collection import Collection, CollectionSource, Unusable
from router.discovery.kube import Cluster, at, items, word
from router.discovery.source import Found, Scheme, address_url


def endpointslices(
    name: str, cluster: Cluster, namespace: str, service: str, *, port: int | str, scheme: Scheme
) -> CollectionSource:
    selector = f"kubernetes.io/service-name={service}"
    collection = Collection("/apis/discovery.k8s.io/v1", "endpointslices", namespace, selector)
    return CollectionSource(name, cluster, collection, partial(slice_engines, port=port, scheme=scheme))


def slice_engines(part: object, *, port: int | str, scheme: Scheme) -> Sequence[Found]:
    """The engines in one slice. An engine that drains says that it is not ready, so one that is terminating may or may
    not be "serving"; either way it is leaving until its endpoint is gone."""
    found = []
    for endpoint in items(at(part, "endpoints")):
        leaving = at(endpoint, "conditions", "terminating") is True
        if not leaving and at(endpoint, "conditions", "ready") is False:  # not said: ready
            continue
        addresses = items(at(endpoint, "addresses"))  # more than one has no meaning
        url = address_url(scheme, addresses[0] if addresses else None, _port(part, port))
        if url:
            found.append(Found(url, word(at(endpoint, "targetRef", "uid")), leaving))
    return tuple(found)


def _port(part: object, port: int | str) -> int:
    """Raises Unusable."""
    if isinstance(port, int):
        return port
    for one in items(at(part, "ports")):
        number = at(one, "port")
        if at(one, "name") == port and isinstance(number, int):
            return number
    raise Unusable(f"it has no port named {port!r}")
