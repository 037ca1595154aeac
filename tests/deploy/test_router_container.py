"""The router's container as the chart renders it: its command is started here, finds pods, passes its own probes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme

from deploy.lock import ROOT
from tests.deploy.cases import PLAIN
from tests.deploy.mounts import brought
from tests.deploy.objects import Manifest, Rendered, container_of, pod_of, render, templates
from tests.kube_stub import PODS, SLICES, KubeStub, endpoint, endpoint_slice, pod
from tests.router_harness import CHAT
from tests.stub_engine import TEXT, StubEngine
from tests.valkey import free_port

pytestmark = pytest.mark.usefixtures("helm")

GUIDE = ROOT / "docs/kubernetes.md"
IPS = {"prefill": "127.0.0.11", "decode": "127.0.0.12"}


@dataclass
class Router:
    process: asyncio.subprocess.Process
    container: Manifest
    client: aiohttp.ClientSession
    port: int

    async def passes(self, probe: str) -> bool:
        """One try, as the kubelet does it."""
        rendered = self.container[probe]
        [port] = [one["containerPort"] for one in self.container["ports"] if one["name"] == rendered["httpGet"]["port"]]
        timeout = aiohttp.ClientTimeout(total=rendered["timeoutSeconds"])
        try:
            async with self.client.get(
                f"http://127.0.0.1:{port}{rendered['httpGet']['path']}", timeout=timeout
            ) as answer:
                return 200 <= answer.status < 400
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def becomes(self, probe: str, wanted: bool) -> None:
        """Within what the probe allows for."""
        allowed = self.container[probe]["periodSeconds"] * self.container[probe]["failureThreshold"]
        async with asyncio.timeout(allowed):
            while await self.passes(probe) is not wanted:
                assert self.process.returncode is None
                await asyncio.sleep(0.02)


@pytest.fixture
async def kube(tmp_path: Path) -> AsyncIterator[KubeStub]:
    account = tmp_path / "serviceaccount"
    account.mkdir()
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(account / "ca.crt"))
    async with KubeStub(account, tls=context).running() as kube:
        yield kube


def _values(tmp_path: Path, mode: str) -> dict[str, Any]:
    return {
        **PLAIN,
        "discovery": {"mode": mode},
        "redis": {"url": "redis://127.0.0.1:1/0", "passwordSecret": {"name": "redis"}},
        "sealKeySecret": {"name": "seal"},
        "router": {
            "port": free_port(),
            "admin": {"port": free_port()},
            "drain": {"delaySeconds": 1, "timeoutSeconds": 5},
            "extraArgs": [f"--service-account={tmp_path / 'serviceaccount'}"],
        },
        "pools": {"common": {**PLAIN["pools"]["common"], "port": free_port()}},
    }


@asynccontextmanager
async def started(rendered: Rendered, kube: KubeStub, folder: Path) -> AsyncIterator[Router]:
    container = brought(rendered, "router", folder)
    environment = {
        "PATH": os.environ["PATH"],
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": kube.url.rsplit(":", 1)[1],
        **container.env,
    }
    rendered_container = container_of(rendered.workload("router"))
    port = rendered_container["ports"][0]["containerPort"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "backhaul", *container.args, env=environment, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with aiohttp.ClientSession() as client:
            yield Router(process, rendered_container, client, port)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def _appear(kube: KubeStub, rendered: Rendered) -> None:
    """The pods of both pools, with the labels and ports that they are rendered with."""
    for role, ip in IPS.items():
        workload = rendered.workload(role)
        labels = templates(workload)[0]["metadata"]["labels"]
        kube.put(PODS, pod(f"{role}-0", ip, labels=labels, containers=pod_of(workload)["containers"]))
        service = rendered.one("Service", role)["metadata"]["name"]
        [port] = [one["containerPort"] for one in container_of(workload)["ports"] if one["name"] == "http"]
        kube.put(
            SLICES,
            endpoint_slice(f"{role}-abc", [endpoint(ip, ready=True)], service=service, ports={"http": port}),
        )


@pytest.mark.parametrize("mode", ["pods", "endpointslices"])
async def test_container_finds_its_pools_and_passes_its_probes(kube: KubeStub, tmp_path: Path, mode: str) -> None:
    values = _values(tmp_path, mode)
    rendered = render(values)
    async with AsyncExitStack() as stack:
        for role, ip in IPS.items():
            await stack.enter_async_context(StubEngine(role).running(values["pools"]["common"]["port"], ip))
        router = await stack.enter_async_context(started(rendered, kube, tmp_path / "etc"))
        await router.becomes("startupProbe", True)
        assert await router.passes("livenessProbe")
        assert not await router.passes("readinessProbe")

        _appear(kube, rendered)
        await router.becomes("readinessProbe", True)
        url = f"http://127.0.0.1:{router.port}"
        async with router.client.post(f"{url}/v1/chat/completions", json=CHAT) as answer:
            assert answer.status == 200
            assert (await answer.json())["choices"][0]["message"]["content"] == TEXT
        assert {asked for asked in kube.asked if asked.startswith(("list", "watch "))} == {
            f"list {mode}",
            f"watch {mode}",
        }
        async with router.client.get(f"{url}/admin/status") as answer:
            assert answer.status == 404
        async with router.client.get(f"http://127.0.0.1:{values['router']['admin']['port']}/admin/status") as answer:
            assert answer.status == 200
        async with router.client.get(f"{url}/metrics") as answer:
            exposition = await answer.text()
        named = set(re.findall(r"backhaul_router_[a-z_]+", GUIDE.read_text()))
        assert {name for name in named if f"# TYPE {name} " not in exposition} == set(), "docs/kubernetes.md names them"

        router.process.send_signal(signal.SIGTERM)
        await router.becomes("readinessProbe", False)
        assert await router.passes("livenessProbe")
        grace = pod_of(rendered.workload("router"))["terminationGracePeriodSeconds"]
        assert await asyncio.wait_for(router.process.wait(), grace) == 0
