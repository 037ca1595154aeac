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
def test_rules_and_dashboards_are_taken_from_the_charts_files(tmp_path: Path, major: int) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    rules = {
        "groups": [{"name": "g", "rules": [{"alert": "A", "expr": "up == 0", "annotations": {"s": "{{ $value }}"}}]}]
    }
    for name, text in (
        ("rules/backhaul.yaml", yaml.safe_dump(rules)),
        ("dashboards/overview.json", '{"title": "{{x}}"}'),
    ):
        file = chart / "files" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    both = {"prometheusRule": {"enabled": True, "labels": {"release": "p"}}, "dashboards": {"enabled": True}}
    made = subprocess.run(
        [
            str(tools.helm(major)),
            "template",
            "r",
            str(chart),
            "--show-only",
            "templates/monitoring.yaml",
            "--values",
            "-",
        ],
        input=json.dumps({**PLAIN, "monitoring": both}),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = {one["kind"]: one for one in yaml.safe_load_all(made)}
    assert found["PrometheusRule"]["spec"] == rules
    assert found["PrometheusRule"]["metadata"]["labels"]["release"] == "p"
    assert json.loads(found["ConfigMap"]["data"]["overview.json"]) == {"title": "{{x}}"}
    assert found["ConfigMap"]["metadata"]["labels"]["grafana_dashboard"] == "1"
