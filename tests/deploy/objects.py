"""Kubernetes manifests as the chart renders them, and how tests look at them."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from deploy import tools
from deploy.generate import CHART

Manifest = dict[str, Any]
Values = Mapping[str, Any]

NAMESPACE: Final = "serving"
WORKLOADS: Final = ("Deployment", "StatefulSet", "LeaderWorkerSet")
RENDER_SECONDS: Final = 60


class Refused(Exception):
    """Helm's own words."""


# C's loader takes a tenth of the time.
class _Loader(yaml.CSafeLoader):
    """Refuses a key that is given twice, of which YAML takes one and Kubernetes' decoder none."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is given twice: {keys}, {node.start_mark}"
        return super().construct_mapping(node, deep)


@dataclass(frozen=True, slots=True)
class Rendered:
    manifests: Sequence[Manifest]

    def __iter__(self) -> Iterator[Manifest]:
        return iter(self.manifests)

    def of(self, kind: str) -> list[Manifest]:
        return [one for one in self.manifests if one["kind"] == kind]

    def one(self, kind: str, component: str) -> Manifest:
        [found] = [one for one in self.of(kind) if component_of(one) == component]
        return found

    def workloads(self) -> list[Manifest]:
        return [one for one in self.manifests if one["kind"] in WORKLOADS]

    def workload(self, component: str) -> Manifest:
        [found] = [one for one in self.workloads() if component_of(one) == component]
        return found


def component_of(manifest: Manifest) -> str:
    """Empty for what users add."""
    component: str = manifest["metadata"].get("labels", {}).get("app.kubernetes.io/component", "")
    return component


def templates(workload: Manifest) -> list[Manifest]:
    """Of its pods."""
    spec = workload["spec"]
    if workload["kind"] == "LeaderWorkerSet":
        return [spec["leaderWorkerTemplate"][one] for one in ("leaderTemplate", "workerTemplate")]
    return [spec["template"]]


def pod_of(workload: Manifest) -> Manifest:
    spec: Manifest = templates(workload)[0]["spec"]
    return spec


def container_of(workload: Manifest) -> Manifest:
    [container] = pod_of(workload)["containers"]
    assert isinstance(container, dict)
    return container


def settings_of(rendered: Rendered, component: str) -> Manifest:
    """The content of its --config file."""
    [text] = rendered.one("ConfigMap", component)["data"].values()
    settings: Manifest = yaml.safe_load(text)
    return settings


def render(values: Values, *, helm: int = 4, kube: str = tools.KUBE_VERSIONS[-1], release: str = "r") -> Rendered:
    """Raises Refused."""
    return _rendered(json.dumps(values), helm, kube, release)


@functools.cache
def _rendered(values: str, helm: int, kube: str, release: str) -> Rendered:
    command = [str(tools.helm(helm)), "template", release, str(CHART), "--namespace", NAMESPACE, "--kube-version", kube]
    run = subprocess.run(
        [*command, "--values", "-"], input=values, capture_output=True, text=True, timeout=RENDER_SECONDS
    )
    if run.returncode != 0:
        raise Refused(run.stderr)
    return _parsed(run.stdout)


@functools.cache
def _parsed(text: str) -> Rendered:
    """Most renderings are the same for all versions of Helm and Kubernetes."""
    return Rendered([one for one in yaml.load_all(text, _Loader) if one])


def lint(values: Values, helm: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(tools.helm(helm)), "lint", "--strict", str(CHART), "--values", "-"],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=RENDER_SECONDS,
    )
