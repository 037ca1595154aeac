"""values.schema.json: types from the defaults in values.yaml, what they do not tell from here, and the settings of
router and engine from the models that declare them. A name that is not among the values is refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

import yaml

from engine.config import EngineConfig
from router.config import RouterConfig

Schema = dict[str, Any]

ROUTER_BY_CHART: Final = [
    "admin_host",
    "admin_port",
    "port",
    "prefill",
    "decode",
    "encode",
    "drain_delay",
    "drain_timeout",
    "redis",
    "redis_password_file",
    "seal_key",
    "seal_key_file",
    "service_account",
    "json_file",
]
"""Settings of the router that other values decide, or that only a process of a shell has."""
ENGINE_BY_CHART: Final = [
    "model",
    "role",
    "port",
    "advertise_host",
    "served_model_name",
    "device",
    "drain_timeout",
    "kv_transfer_config",
    "seal_key",
    "seal_key_file",
    "json_file",
]


def _enum(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _map_of(schema: Schema) -> Schema:
    return {"type": "object", "additionalProperties": schema}


def _list_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


TEXT: Final[Schema] = {"type": "string"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
SECONDS: Final[Schema] = {"type": "number", "minimum": 0}
PORT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 65535}
SHARE: Final[Schema] = {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]{1,3}%$"}
ANY_OBJECT: Final[Schema] = {"type": "object"}
OBJECTS: Final = _list_of(ANY_OBJECT)
NAME: Final[Schema] = {"type": "string", "minLength": 1}
QUANTITIES: Final = _map_of({"type": ["string", "number"]})
PATHS: Final = _list_of({"type": "string", "pattern": "^/"}) | {"minItems": 1}
URL: Final[Schema] = {
    "type": "string",
    "pattern": r"^$|^(redis|rediss|unix|redis\+sentinel|rediss\+sentinel|redis\+cluster|rediss\+cluster)://",
}
ENV: Final = _list_of(_object(name=NAME, value=TEXT, valueFrom=ANY_OBJECT) | {"required": ["name"]})
HANDLERS: Final = dict.fromkeys(("httpGet", "tcpSocket", "exec", "grpc"), ANY_OBJECT)
PROBE: Final = _object(
    **HANDLERS,
    **dict.fromkeys(
        [
            "initialDelaySeconds",
            "periodSeconds",
            "timeoutSeconds",
            "successThreshold",
            "failureThreshold",
            "terminationGracePeriodSeconds",
        ],
        COUNT,
    ),
)

BY_NAME: Final[Mapping[str, Schema]] = {
    "annotations": _map_of(TEXT),
    "labels": _map_of(TEXT),
    "commonLabels": _map_of(TEXT),
    "podLabels": _map_of(TEXT),
    "podAnnotations": _map_of(TEXT),
    "nodeSelector": _map_of(TEXT),
    "extraArgs": _list_of(TEXT),
    "extraEnv": ENV,
    "imagePullSecrets": _list_of(_object(name=NAME) | {"required": ["name"]}),
    "resources": _object(requests=QUANTITIES, limits=QUANTITIES, claims=OBJECTS),
    "liveness": PROBE,
    "readiness": PROBE,
    "startup": PROBE,
    "rollingUpdate": _object(maxSurge=SHARE, maxUnavailable=SHARE),
    "maxUnavailable": SHARE,
    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "tag": {"type": "string", "not": {"enum": ["latest"]}},
    "pullPolicy": _enum("Always", "IfNotPresent", "Never"),
    "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
    "paths": PATHS,
    "topologySpreadConstraints": {"type": ["array", "null"], "items": ANY_OBJECT},
    "preStopSeconds": {"type": ["integer", "null"], "minimum": 0},
    "terminationGracePeriodSeconds": {"type": ["integer", "null"], "minimum": 1},
    "podSecurityContext": ANY_OBJECT,
    "securityContext": ANY_OBJECT,
    "cacheVolume": ANY_OBJECT | {"minProperties": 1},
    "config": {"$ref": "#/definitions/routerConfig"},
    "statement": {"$ref": "#/definitions/statement"},
    "labelSelector": ANY_OBJECT,
}
"""Wherever a value of that name is."""
BY_PATH: Final[Mapping[str, Schema]] = {
    "discovery.mode": _enum("pods", "endpointslices", "dns"),
    "redis.url": URL,
    "router.prefill": _list_of(TEXT),
    "router.decode": _list_of(TEXT),
    "router.encode": _list_of(TEXT),
    "router.service.type": _enum("ClusterIP", "NodePort", "LoadBalancer"),
    "router.service.externalTrafficPolicy": _enum("", "Cluster", "Local"),
    "router.autoscaling.type": _enum("hpa", "keda"),
    "pools.common.autoscaling.type": _enum("hpa", "keda"),
    "pools.common.engine": _enum("backhaul", "vllm"),
    "pools.common.kind": _enum("Deployment", "StatefulSet", "LeaderWorkerSet"),
    "pools.common.config": {"$ref": "#/definitions/engineConfig"},
    "pools.common.parallelism.tensor": COUNT | {"minimum": 1},
    "pools.common.parallelism.pipeline": COUNT | {"minimum": 1},
    "pools.common.parallelism.data": COUNT | {"minimum": 1},
    "pools.common.parallelism.nodes": COUNT | {"minimum": 1},
    "pools.prefill": {"$ref": "#/definitions/pool"},
    "pools.decode": {"$ref": "#/definitions/pool"},
    "pools.encode": {"$ref": "#/definitions/pool"},
    "networkPolicy.redis.ports": _list_of(PORT),
    "networkPolicy.apiServer.ports": _list_of(PORT),
    "monitoring.prometheusRule.runbooks": {"type": "string", "pattern": r"^(https?://[^\s'\"#]+/)?$"},
    "ingress.hosts": _list_of(TEXT),
    "httpRoute.hostnames": _list_of(TEXT),
}


def schema(source: str) -> Schema:
    """Of the values whose defaults are given as YAML."""
    whole = _of(yaml.safe_load(source), "")
    whole["properties"]["global"]["additionalProperties"] = True  # a chart around this one puts there what it likes
    pool = whole["properties"]["pools"]["properties"]["common"]
    whole["properties"]["pools"]["properties"]["common"] = {"$ref": "#/definitions/pool"}
    definitions = {
        "pool": pool,
        "routerConfig": _settings(RouterConfig.model_json_schema(), leave_out=ROUTER_BY_CHART),
        "engineConfig": _settings(EngineConfig.model_json_schema(), leave_out=ENGINE_BY_CHART),
    }
    known = RouterConfig.model_json_schema()["$defs"]
    definitions["statement"] = _settings(known["EngineStatement"], leave_out=["api_key_file"])
    definitions["engineStatement"] = _settings(known["EngineStatement"], leave_out=[])
    return {"$schema": "http://json-schema.org/draft-07/schema#", **whole, "definitions": definitions}


def _of(default: object, path: str) -> Schema:
    name = path.rpartition(".")[2]
    if path in BY_PATH or name in BY_NAME:
        return copy.deepcopy(BY_PATH.get(path) or BY_NAME[name])
    match default:
        case bool():
            return {"type": "boolean"}
        case int() | float():
            return PORT if name.lower().endswith("port") else SECONDS if name.endswith("Seconds") else COUNT
        case str():
            return TEXT
        case list():
            return OBJECTS
        case {}:
            return (
                ANY_OBJECT
                if not default
                else _object(**{key: _of(value, f"{path}.{key}".lstrip(".")) for key, value in default.items()})
            )
    raise ValueError(f"values.yaml: what {path} may be is not known")


def _settings(model: Schema, *, leave_out: list[str]) -> Schema:
    """A model of settings, as a section of values."""
    sections = model.get("$defs", {})
    fields = {name: _field(field, sections) for name, field in model["properties"].items() if name not in leave_out}
    return {"type": "object", "additionalProperties": False, "properties": fields}


def _field(value: Any, sections: Mapping[str, Schema]) -> Any:
    """Without texts and defaults."""
    if isinstance(value, list):
        return [_field(one, sections) for one in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        if name == "EngineStatement":
            return {"$ref": "#/definitions/engineStatement"}
        return _settings({**sections[name], "$defs": sections}, leave_out=[])
    dropped = ("title", "description", "default", "format", "propertyNames")
    return {key: _field(one, sections) for key, one in value.items() if key not in dropped}
