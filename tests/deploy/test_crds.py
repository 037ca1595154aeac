"""Custom resources are what their controllers take."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.deploy.cases import CASES
from tests.deploy.objects import Manifest, render, templates

CHECK = Path(__file__).parent / "crds/check.mjs"
CHECKED = ("ServiceMonitor", "PodMonitor", "ScaledObject", "HTTPRoute")


def wrong(objects: Sequence[Manifest]) -> list[str | None]:
    if shutil.which("node") is None or not (CHECK.parent / "node_modules/.installed").exists():
        pytest.skip("no schemas of custom resources: `make clients` installs them, where there is npm")
    run = subprocess.run(["node", CHECK], input=json.dumps(objects), capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    answer: list[str | None] = json.loads(run.stdout)
    return answer


@pytest.mark.usefixtures("helm")
def test_custom_resources_fit_their_schemas() -> None:
    objects = [one for values in CASES.values() for one in render(values) if one["kind"] in CHECKED]
    assert {one["kind"] for one in objects} == set(CHECKED)
    assert [text for text in wrong(objects) if text] == []


def test_schemas_find_what_is_wrong() -> None:
    about = {"metadata": {"name": "x"}}
    monitor = {"apiVersion": "monitoring.coreos.com/v1", "kind": "ServiceMonitor", **about, "spec": {"endpoints": []}}
    scaled = {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", **about, "spec": {"triggers": []}}
    found = wrong([monitor, scaled])
    assert "selector" in str(found[0])
    assert "scaleTargetRef" in str(found[1])


@pytest.mark.usefixtures("helm")
def test_leader_worker_set_has_what_its_controller_requires() -> None:
    [one, *_] = render(CASES["several nodes"]).of("LeaderWorkerSet")
    spec = one["spec"]
    assert set(spec) == {"replicas", "startupPolicy", "rolloutStrategy", "leaderWorkerTemplate"}
    assert spec["leaderWorkerTemplate"]["size"] == 2
    assert set(spec["leaderWorkerTemplate"]) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    for template in templates(one):
        assert set(template) <= {"metadata", "spec"}
        assert "--nnodes=$(LWS_GROUP_SIZE)" in template["spec"]["containers"][0]["args"]
