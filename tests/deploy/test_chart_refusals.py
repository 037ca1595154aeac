"""Mistakes in values are refused by name, before anything is installed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.cases import MODEL, PLAIN, REDIS, VLLM
from tests.deploy.objects import Refused, render

pytestmark = pytest.mark.usefixtures("helm")


def _pools(**common: Any) -> dict[str, Any]:
    return {**PLAIN, "pools": {"common": {**MODEL, **common}}}


def _prefill(**prefill: Any) -> dict[str, Any]:
    return {**PLAIN, "pools": {"common": MODEL, "prefill": prefill}}


def _router(**router: Any) -> dict[str, Any]:
    return {**PLAIN, "router": router}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown value": ({**PLAIN, "rooter": {}}, "rooter"),
    "an unknown value of a pool": (_prefill(replica=2), "replica"),
    "a wrong type": (_router(replicas="abc"), "replicas"),
    "a wrong choice": ({**PLAIN, "discovery": {"mode": "pod"}}, "mode"),
    "a setting that the router does not know": (_router(config={"affinty_slack": 1}), "affinty_slack"),
    "a setting out of range": (_router(config={"dispatch_deadline": 40}), "dispatch_deadline"),
    "a setting of the router that the chart decides": (_router(config={"redis": "redis://x"}), "redis"),
    "a secret among the settings": (_router(config={"seal_key": "0123456789abcdef"}), "seal_key"),
    "a setting that the engine does not know": (_pools(config={"max_seqs": 1}), "max_seqs"),
    "a moving tag": (_router(image={"tag": "latest"}), "tag"),
    "a digest that is none": (_router(image={"digest": "abc"}), "digest"),
    "a misspelt probe": (_router(probes={"readiness": {"periodSecond": 1}}), "periodSecond"),
    "a number as an argument": (_router(extraArgs=[1]), "extraArgs"),
    "runbooks at no address": ({**PLAIN, "monitoring": {"prometheusRule": {"runbooks": "wiki: here"}}}, "runbooks"),
    "no Redis": ({"pools": {"common": MODEL}}, "redis.url"),
    "two of them": ({**PLAIN, "valkey": {"enabled": True}}, "redis"),
    "a password in the URL": ({**PLAIN, "redis": {"url": "redis://u:secret@h:6379"}}, "redis.passwordSecret"),
    "a password twice": (
        {**PLAIN, "redis": {"urlSecret": {"name": "r"}, "passwordSecret": {"name": "p"}}},
        "redis.passwordSecret",
    ),
    "no model": ({"redis": REDIS}, "model"),
    "no decode engines": ({**PLAIN, "pools": {"common": MODEL, "decode": {"enabled": False}}}, "router.decode"),
    "too little grace of the router": (
        _router(terminationGracePeriodSeconds=70),
        "router.terminationGracePeriodSeconds",
    ),
    "too little grace of engines": (_prefill(terminationGracePeriodSeconds=69), "pools.prefill.terminationGracePeriod"),
    "prefill that leaves before its leases end": (_prefill(drain={"timeoutSeconds": 20}), "drain.timeoutSeconds"),
    "vLLM that leaves before its leases end": (_prefill(**VLLM, preStopSeconds=10), "preStopSeconds"),
    "a lease that ends before it is used": (_pools(kvTransfer={"leaseSeconds": 20}), "leaseSeconds"),
    "offers that outlive their blocks": (_pools(**VLLM, kvTransfer={"ttlSeconds": 400}), "ttlSeconds"),
    "several devices of our engine": (_pools(parallelism={"tensor": 2}), "parallelism"),
    "several pods of a Deployment": (_pools(**{**VLLM, "parallelism": {"nodes": 2}}), "LeaderWorkerSet"),
    "leaders that cannot be told": (
        {**_pools(**{**VLLM, "kind": "LeaderWorkerSet", "parallelism": {"nodes": 2}}), "discovery": {"mode": "dns"}},
        "discovery.mode",
    ),
    "our settings for vLLM": (_pools(**VLLM, config={"max_num_seqs": 1}), "extraArgs"),
    "vLLM's key for our engine": (_pools(apiKeySecret={"name": "k"}), "apiKeySecret"),
    "ports that end before they begin": (_pools(kvTransfer={"ucx": {"lastPort": 18000}}), "lastPort"),
    "devices without a name": (_pools(rdma={"count": 1}), "rdma.resource"),
    "scaling by nothing": (_pools(autoscaling={"enabled": True}), "autoscaling.metrics"),
    "KEDA without triggers": (_pools(autoscaling={"enabled": True, "type": "keda"}), "triggers"),
    "fewer at most than at least": (_router(autoscaling={"enabled": True, "max": 1}), "router.autoscaling.max"),
    "a route without a gateway": ({**PLAIN, "httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
}


@pytest.mark.parametrize("helm_version", [3, 4])
@pytest.mark.parametrize("mistake", REFUSED)
def test_mistake_is_refused_and_named(mistake: str, helm_version: int) -> None:
    values, named = REFUSED[mistake]
    with pytest.raises(Refused, match=named):
        render(values, helm=helm_version)


@pytest.mark.parametrize("kube", ["1.29.9", "1.28.0"])
def test_older_clusters_are_refused(kube: str) -> None:
    with pytest.raises(Refused, match="kubeVersion"):
        render(PLAIN, kube=kube)
