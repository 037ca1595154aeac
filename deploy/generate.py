"""`make chart`: writes what is made of other files: the chart's schema, README and dashboards, the Kustomize base, and
the tables of docs/metrics.md."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from deploy import tools
from deploy.dashboards import dashboards, text
from deploy.documented import with_table
from deploy.metrics import with_tables
from deploy.schema import schema

DEPLOY: Final = Path(__file__).parent
CHART: Final = DEPLOY / "helm/backhaul"
KUSTOMIZE: Final = DEPLOY / "kustomize"
METRICS: Final = DEPLOY.parent / "docs/metrics.md"
OF_HELM: Final = ("helm.sh/chart", "app.kubernetes.io/managed-by")
"""Labels that say how an object was made."""


def made() -> dict[Path, str]:
    """What each file is to be. Raises tools.Unavailable."""
    values = (CHART / "values.yaml").read_text()
    readme = CHART / "README.md"
    return {
        CHART / "values.schema.json": json.dumps(schema(values), indent=1) + "\n",
        readme: with_table(readme.read_text(), values),
        METRICS: with_tables(METRICS.read_text()),
        **{CHART / "files/dashboards" / name: text(board) for name, board in dashboards().items()},
    }


def base() -> dict[Path, str]:
    """The same of the Kustomize base; the chart's schema must be current. Raises tools.Unavailable."""
    command = [str(tools.helm(4)), "template", "backhaul", str(CHART), "--values", str(KUSTOMIZE / "values.yaml")]
    rendered = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    manifests = [_plain(one) for one in yaml.safe_load_all(rendered) if one]
    rest = "---\n".join(yaml.safe_dump(one, sort_keys=False, width=120) for one in manifests)
    return {KUSTOMIZE / "base/backhaul.yaml": f"# Rendered from the Helm chart by `make chart`.\n{rest}"}


def _plain(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without what only Helm's releases have, and without the namespace, which is the user's to say."""
    manifest["metadata"].pop("namespace", None)
    for subject in manifest.get("subjects", ()):
        subject["namespace"] = "default"  # Kustomize puts the user's in its place
    for name in OF_HELM:
        manifest["metadata"]["labels"].pop(name, None)
    return manifest


def main() -> None:
    for make in (made, base):
        for path, written in make().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text() != written:
                path.write_text(written)
                print(re.sub(f"^{re.escape(str(DEPLOY.parent))}/", "", str(path)))


if __name__ == "__main__":
    main()
