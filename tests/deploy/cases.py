"""Values that people give: every switch of the chart is on in one of them."""

from __future__ import annotations

from typing import Any, Final

Values = dict[str, Any]

REDIS: Final = {"url": "redis://valkey.data:6379/0"}
MODEL: Final = {
    "model": "/models/m.gguf",
    "modelVolume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
}
PLAIN: Final[Values] = {"redis": REDIS, "pools": {"common": MODEL}}


def _with(**values: Any) -> Values:
    return {**PLAIN, **values}


def _pools(prefill: Values | None = None, decode: Values | None = None, **common: Any) -> Values:
    return _with(pools={"common": {**MODEL, **common}, "prefill": prefill or {}, "decode": decode or {}})


VLLM: Final[Values] = {
    "engine": "vllm",
    "model": "Qwen/Qwen3-32B",
    "modelVolume": {},
    "accelerator": {"count": 4},
    "parallelism": {"tensor": 4},
    "shmSize": "8Gi",
}
TRIGGER: Final = {
    "type": "prometheus",
    "metadata": {
        "serverAddress": "http://prometheus.monitoring:9090",
        "query": 'sum(vllm:num_requests_waiting{namespace="{{ .Release.Namespace }}"})',
        "threshold": "4",
    },
}
CPU: Final = [
    {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 60}}}
]
PROMETHEUS: Final = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
GATEWAY: Final = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}]

CASES: Final[dict[str, Values]] = {
    "plain": PLAIN,
    "valkey": {
        "valkey": {"enabled": True},
        "redis": {"passwordSecret": {"name": "valkey"}},
        "pools": {"common": MODEL},
    },
    "endpoint slices": _with(discovery={"mode": "endpointslices"}),
    "dns": _with(discovery={"mode": "dns"}, clusterDomain="example.org"),
    "stateful sets": _pools(kind="StatefulSet"),
    "vllm": _pools(**VLLM, apiKeySecret={"name": "vllm"}, hfTokenSecret={"name": "hf"}),
    "several nodes": _pools(
        **{**VLLM, "kind": "LeaderWorkerSet", "parallelism": {"tensor": 8, "pipeline": 2, "nodes": 2}},
        rdma={"resource": "rdma/ib", "count": 1},
        ipcLock=True,
        kvTransfer={"ucx": {"tls": "rc,cuda", "netDevices": "mlx5_0:1"}},
    ),
    "vllm and ours": _pools(prefill=VLLM, decode={**VLLM, "kind": "LeaderWorkerSet", "hostIPC": True}),
    "scaled by HPA": {
        **_pools(
            autoscaling={
                "enabled": True,
                "metrics": CPU,
                "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
            }
        ),
        "router": {"autoscaling": {"enabled": True}},
    },
    "scaled by KEDA": {
        **_pools(
            autoscaling={
                "enabled": True,
                "type": "keda",
                "triggers": [TRIGGER],
                "behavior": {"scaleUp": {"selectPolicy": "Max"}},
            },
            decode={"kind": "StatefulSet"},
        ),
        "router": {
            "autoscaling": {"enabled": True, "type": "keda", "triggers": [TRIGGER], "keda": {"pollingInterval": 10}}
        },
    },
    "policies": _with(
        networkPolicy={"enabled": True, "clients": GATEWAY, "prometheus": PROMETHEUS, "operators": GATEWAY},
        router={"admin": {"expose": True}},
    ),
    "policies, valkey, vllm": {
        "valkey": {"enabled": True},
        "pools": {"common": {**MODEL, **VLLM, "parallelism": {"tensor": 2, "data": 2}}},
        "networkPolicy": {"enabled": True, "poolEgress": [{"ports": [{"port": 443}]}]},
    },
    "pictures": _with(
        pools={"common": MODEL, "encode": {"enabled": True, "replicas": 2}},
        networkPolicy={"enabled": True, "clients": GATEWAY},
    ),
    "pictures, vllm": {
        **_with(pools={"common": {**MODEL, **VLLM}, "encode": {"enabled": True, "parallelism": {"tensor": 1}}}),
        "router": {"encode": ["http://10.0.0.8:8000"]},
    },
    "watched": _with(
        monitoring={
            "serviceMonitor": {"enabled": True, "namespace": "monitoring", "labels": {"release": "prometheus"}},
            "podMonitor": {
                "enabled": True,
                "relabelings": [{"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}],
            },
        }
    ),
    "exposed": _with(
        ingress={
            "enabled": True,
            "className": "nginx",
            "hosts": ["a.example", "b.example"],
            "tls": [{"secretName": "t", "hosts": ["a.example"]}],
        },
        httpRoute={
            "enabled": True,
            "parentRefs": [{"name": "gateway", "namespace": "gateway"}],
            "hostnames": ["a.example"],
        },
    ),
    "secrets": {
        **PLAIN,
        "redis": {"urlSecret": {"name": "redis"}, "tlsSecret": "redis-tls"},
        "sealKeySecret": {"name": "seal"},
        "global": {"imageRegistry": "registry.example/backhaul", "imagePullSecrets": [{"name": "pull"}]},
    },
    "everything else": _pools(
        config={"max_num_seqs": 8, "kv_cache_memory_bytes": 6000000000},
        statement={"tokenize": True},
        servedModelName="m",
        extraArgs=["--kv-transfer-config.kv-load-failure-policy=fail"],
        preStopSeconds=0,
        terminationGracePeriodSeconds=300,
        topologySpreadConstraints=[],
        nodeSelector={"pool": "gpu"},
        tolerations=[{"key": "gpu", "operator": "Exists"}],
        priorityClassName="high",
        podLabels={"llm-d.ai/role": "engine"},
        extraEnv=[{"name": "UCX_LOG_LEVEL", "value": "warn"}],
    )
    | {
        "fullnameOverride": "front",
        "commonLabels": {"team": "serving"},
        "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}}],
        "router": {
            "decode": ["http://10.0.0.9:8000"],
            "config": {
                "max_record_bytes": 8388608,
                "idle_kv_share": 0.25,
                "engines": {"http://10.0.0.9:8000": {"kind": "vllm", "bidirectional": False}},
            },
            "service": {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "annotations": {"a": "b"}},
            "preStopSeconds": 5,
            "extraArgs": ["--log-level=debug"],
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        },
        "serviceAccount": {"create": False, "name": "mine"},
        "rbac": {"create": False},
    },
    "one pool": {
        "redis": REDIS,
        "pools": {"common": {**MODEL, "kvTransfer": {"leaseSeconds": 60}}, "prefill": {"enabled": False}},
    },
    "routers alone": {
        "redis": REDIS,
        "router": {"prefill": ["http://p:8000"], "decode": ["dns://d.example:8000"]},
        "pools": {"common": {"enabled": False}},
    },
}
