"""What `make chart` writes is what lies here."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from deploy import generate, tools
from deploy.documented import documented
from deploy.generate import CHART, KUSTOMIZE
from tests.deploy.cases import PLAIN

REPOSITORY = CHART.parents[2]


def test_schema_and_readme_are_current() -> None:
    stale = [str(path.relative_to(REPOSITORY)) for path, text in generate.made().items() if path.read_text() != text]
    assert not stale, f"run `make chart`: {stale}"


def test_value_without_a_comment_is_found() -> None:
    with pytest.raises(ValueError, match=r"line 4: b\.d has no comment"):
        list(documented("b:\n  # Text.\n  c: 1\n  d: 2\n"))


def test_versions_are_those_of_the_package() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version
    assert chart["kubeVersion"] == f">={tools.KUBE_VERSIONS[0]}-0"


@pytest.mark.usefixtures("helm")
def test_kustomize_base_is_the_chart() -> None:
    [(path, text)] = generate.base().items()
    assert path.read_text() == text, "run `make chart`"


@pytest.mark.usefixtures("helm")
def test_kustomize_puts_everything_into_its_namespace(tmp_path: Path) -> None:
    shutil.copytree(KUSTOMIZE / "base", tmp_path / "base")
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text("namespace: mine\nresources: [../base]\n")
    command = [str(tools.kubectl()), "kustomize", str(overlay)]
    built = list(yaml.safe_load_all(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    assert len(built) == len([*yaml.safe_load_all((KUSTOMIZE / "base/backhaul.yaml").read_text())])
    assert {one["metadata"]["namespace"] for one in built} == {"mine"}
    [binding] = [one for one in built if one["kind"] == "RoleBinding"]
    assert [one["namespace"] for one in binding["subjects"]] == ["mine"]


@pytest.mark.usefixtures("helm")
@pytest.mark.parametrize("major", tools.HELM)
def test_rules_and_dashboards_are_the_charts_files(major: int) -> None:
    runbooks = "https://git.example/backhaul/blob/main/"
    monitoring = {
        "prometheusRule": {"enabled": True, "labels": {"release": "p"}, "runbooks": runbooks},
        "dashboards": {"enabled": True},
    }
    command = [str(tools.helm(major)), "template", "r", str(CHART), "--values", "-"]
    made = subprocess.run(
        [*command, "--show-only", "templates/monitoring.yaml"],
        input=json.dumps({**PLAIN, "monitoring": monitoring}),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    objects = list(yaml.safe_load_all(made))
    [rules] = [one for one in objects if one["kind"] == "PrometheusRule"]
    text = (CHART / "files/rules/backhaul.yaml").read_text()
    assert rules["spec"] == yaml.safe_load(text.replace("runbook_url: ", f"runbook_url: {runbooks}"))
    assert rules["metadata"]["labels"]["release"] == "p"
    boards = [one for one in objects if one["kind"] == "ConfigMap"]
    assert {one["metadata"]["labels"]["grafana_dashboard"] for one in boards} == {"1"}
    assert {name: text for one in boards for name, text in one["data"].items()} == {
        file.name: file.read_text() for file in (CHART / "files/dashboards").iterdir()
    }
