"""Kubernetes' own schemas of its objects, in the strict form: a name that they do not know is an error."""

from __future__ import annotations

import functools
import json
from typing import Any, Final

from jsonschema_rs import Validator, validator_for

from deploy import tools
from tests.deploy.objects import Manifest

CUSTOM: Final = (
    "monitoring.coreos.com/v1",
    "keda.sh/v1alpha1",
    "gateway.networking.k8s.io/v1",
    "leaderworkerset.x-k8s.io/v1",
)
"""Of which Kubernetes has no schemas."""


def errors(manifest: Manifest, kube: str) -> list[str]:
    """All of them, each with its place."""
    found = _validator(manifest["apiVersion"], manifest["kind"], kube).iter_errors(manifest)
    return [f"{'.'.join(map(str, one.instance_path))}: {one.message[:200]}" for one in found]


def pod_errors(template: Manifest, kube: str) -> list[str]:
    """Of a template in an object of another API."""
    return errors({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}, kube)


@functools.cache
def _validator(api: str, kind: str, kube: str) -> Validator:
    group, _, version = api.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], version)))
    schema = _read(kube, name)
    return validator_for({**schema, "$defs": _definitions(kube)})


@functools.cache
def _definitions(kube: str) -> Any:
    return _read(kube, "_definitions")["$defs"]


def _read(kube: str, name: str) -> Any:
    text = (tools.schemas(kube) / f"{name}.json").read_text()
    return json.loads(text.replace("/api/_definitions.json#", "#").replace("_definitions.json#", "#"))
