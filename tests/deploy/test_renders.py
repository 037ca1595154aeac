"""Every case renders, with both Helms and for all Kubernetes versions, into objects that Kubernetes takes."""

from __future__ import annotations

import json
import subprocess

import pytest

from deploy import tools
from deploy.generate import CHART
from tests.deploy import schemas
from tests.deploy.cases import CASES, PLAIN
from tests.deploy.objects import WORKLOADS, Manifest, lint, render, templates

pytestmark = pytest.mark.usefixtures("helm")


@pytest.mark.parametrize("kube", tools.KUBE_VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_objects_are_what_kubernetes_takes(case: str, kube: str) -> None:
    rendered = render(CASES[case], kube=kube)
    assert list(render(CASES[case], kube=kube, helm=3)) == list(rendered)
    wrong = {f"{one['kind']} {one['metadata']['name']}": found for one in rendered if (found := _errors(one, kube))}
    assert wrong == {}


def _errors(manifest: Manifest, kube: str) -> list[str]:
    if manifest["kind"] == "LeaderWorkerSet":
        return [error for template in templates(manifest) for error in schemas.pod_errors(template, kube)]
    return [] if manifest["apiVersion"] in schemas.CUSTOM else schemas.errors(manifest, kube)


@pytest.mark.parametrize("major", tools.HELM)
def test_lint_finds_nothing(major: int) -> None:
    run = lint(PLAIN, major)
    assert run.returncode == 0, run.stdout + run.stderr


def test_schemas_find_what_is_wrong() -> None:
    [workload] = [one for one in render(PLAIN).workloads() if one["metadata"]["name"] == "r-backhaul-router"]
    container = workload["spec"]["template"]["spec"]["containers"][0]
    spoiled = {**container, "imagePullPolcy": "Always", "ports": [{"containerPort": "80a"}]}
    spec = {**workload["spec"], "template": {**workload["spec"]["template"], "spec": {"containers": [spoiled]}}}
    found = schemas.errors({**workload, "spec": spec}, tools.KUBE_VERSIONS[-1])
    assert len(found) == 2
    assert "imagePullPolcy" in str(found)
    assert "80a" in str(found)


def test_notes_tell_how_to_ask() -> None:
    """With Helm 4, whose dry run needs no cluster."""
    command = [str(tools.helm(4)), "install", "r", str(CHART), "--dry-run=client", "--values", "-"]
    run = subprocess.run(command, input=json.dumps(PLAIN), check=True, capture_output=True, text=True)
    assert "port-forward service/r-backhaul-router 8000:80" in run.stdout.partition("NOTES:")[2]


def test_no_two_objects_are_the_same() -> None:
    for values in CASES.values():
        known = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in render(values)]
        assert len(known) == len(set(known))


def test_every_kind_of_workload_is_among_the_cases() -> None:
    assert {one["kind"] for values in CASES.values() for one in render(values).workloads()} == set(WORKLOADS)
