"""A container of a rendered pod, brought to this machine: its files in a folder, its command and environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.deploy.objects import Rendered, container_of, pod_of

HOME: Final = "/etc/backhaul"
SECRET: Final = "a-secret-of-the-tests"


@dataclass(frozen=True, slots=True)
class Container:
    args: list[str]
    """Without the command."""
    env: Mapping[str, str]


def brought(rendered: Rendered, component: str, folder: Path) -> Container:
    """What would be below /etc/backhaul is in the folder; every key of a Secret is one and the same text."""
    workload = rendered.workload(component)
    volumes = {volume["name"]: volume for volume in pod_of(workload)["volumes"]}
    container = container_of(workload)
    for mount in container["volumeMounts"]:
        if mount["mountPath"].startswith(HOME):
            place = Path(mount["mountPath"].replace(HOME, str(folder)))
            place.mkdir(parents=True)
            volume = volumes[mount["name"]]
            for item in volume.get("secret", {}).get("items", ()):
                (place / item["path"]).write_text(SECRET + "\n")
            if "configMap" in volume:
                for name, text in rendered.one("ConfigMap", component)["data"].items():
                    (place / name).write_text(text.replace(HOME, str(folder)))
    assert container["command"] == ["backhaul"]
    env = {
        one["name"]: one.get("value", "10.0.0.1" if one["name"] == "POD_IP" else SECRET)
        for one in container.get("env", ())
    }
    args = [arg.replace(HOME, str(folder)) for arg in container["args"]]
    for name, value in env.items():
        args = [arg.replace(f"$({name})", value) for arg in args]
    return Container(args, env)
