"""What the chart writes for router and engine is what they take, and says what was meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backhaul.settings import load
from engine.config import EngineConfig
from router.config import RouterConfig
from router.discovery.kube import Cluster
from router.discovery.parse import parse
from tests.deploy.cases import CASES
from tests.deploy.mounts import brought
from tests.deploy.objects import Rendered, component_of, container_of, render, settings_of

pytestmark = pytest.mark.usefixtures("helm")


def _router(rendered: Rendered, folder: Path, monkeypatch: pytest.MonkeyPatch) -> RouterConfig:
    container = brought(rendered, "router", folder)
    for name, value in container.env.items():
        monkeypatch.setenv(name, value if name != "BACKHAUL_ROUTER_REDIS" else "redis://:secret@valkey:6379/0")
    assert container.args[0] == "router"
    return load(RouterConfig, container.args[1:], prog="backhaul router", env_prefix="BACKHAUL_ROUTER_")


def _engine(rendered: Rendered, role: str, folder: Path) -> EngineConfig:
    args = brought(rendered, role, folder).args
    assert args[0] == "engine"
    return load(EngineConfig, args[1:], prog="backhaul engine", env_prefix="BACKHAUL_ENGINE_")


@pytest.mark.parametrize("case", CASES)
def test_settings_are_taken(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render(CASES[case])
    router = _router(rendered, tmp_path / "router", monkeypatch)
    ports = {port["name"]: port["containerPort"] for port in container_of(rendered.workload("router"))["ports"]}
    assert (router.host, router.port) == ("0.0.0.0", ports["http"])
    for entry in (*router.prefill, *router.decode, *router.encode):
        parse(entry, Cluster(_service_account(tmp_path), "http://10.0.0.1", allow_http=True))
    assert set(router.engines) <= {*router.prefill, *router.decode, *router.encode}
    for workload in rendered.workloads():
        role = component_of(workload)
        if role in ("prefill", "decode", "encode") and container_of(workload)["command"] == ["backhaul"]:
            engine = _engine(rendered, role, tmp_path / role)
            assert engine.role == role
            assert engine.advertise_host == "10.0.0.1"
            if role == "encode":
                assert router.encode
                continue
            extra = engine.kv_transfer_config.kv_connector_extra_config
            assert role == "decode" or engine.drain_timeout >= extra.kv_lease_duration
            assert router.dispatch_deadline < extra.kv_lease_duration
            assert router.kv_recompute_threshold == extra.kv_recompute_threshold


def _service_account(folder: Path) -> Path:
    for name in ("token", "namespace"):
        (folder / name).write_text("x")
    return folder


def test_sources_name_the_pods_of_the_pool() -> None:
    sources = {
        case: settings_of(render(CASES[case]), "router")["decode"][0] for case in ("plain", "endpoint slices", "dns")
    }
    assert sources == {
        "plain": "pods:///?labels=app.kubernetes.io/component=decode&labels=app.kubernetes.io/instance=r"
        "&labels=app.kubernetes.io/name=backhaul&port=http",
        "endpoint slices": "endpointslices:///r-backhaul-decode?port=http",
        "dns": "dns://r-backhaul-decode.serving.svc.example.org.:8000",
    }


def test_numbers_are_whole_however_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render(CASES["everything else"])
    router = _router(rendered, tmp_path / "router", monkeypatch)
    assert (router.max_record_bytes, router.idle_kv_share) == (8388608, 0.25)
    engine = _engine(rendered, "decode", tmp_path / "engine")
    assert (engine.kv_cache_memory_bytes, engine.max_num_seqs) == (6_000_000_000, 8)
    assert engine.kv_transfer_config.kv_load_failure_policy == "fail"


def test_vllm_is_started_as_the_guide_says() -> None:
    rendered = render(CASES["vllm"])
    extra = {}
    for role in ("prefill", "decode"):
        container = container_of(rendered.workload(role))
        [config] = [arg.partition("=")[2] for arg in container["args"] if arg.startswith("--kv-transfer-config=")]
        told = json.loads(config)
        extra[role] = told.pop("kv_connector_extra_config")
        assert told == {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
        env = {one["name"]: one for one in container["env"]}
        assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        assert {"nixl": 5600}.items() <= {port["name"]: port["containerPort"] for port in container["ports"]}.items()
    assert extra == {
        "prefill": {"bidirectional_kv_xfer": True, "kv_lease_duration": 30, "kv_recompute_threshold": 64},
        "decode": {"bidirectional_kv_xfer": True, "kv_lease_duration": 30, "decoder_kv_blocks_ttl": 480},
    }


def test_vllm_encodes_where_there_is_a_pool_for_it() -> None:
    rendered = render(CASES["pictures, vllm"])
    roles: dict[str, dict[str, str]] = {}
    for component in ("prefill", "decode", "encode"):
        container = container_of(rendered.workload(component))
        given = dict(arg.removeprefix("--").partition("=")[::2] for arg in container["args"] if arg.startswith("--"))
        config = json.loads(given.get("ec-transfer-config", "{}"))
        roles[component] = {"ec": config.get("ec_role", ""), "kv": str("kv-transfer-config" in given)}
        if config:
            assert config["ec_connector"] == "ECCPUConnector"
            assert config["ec_connector_extra_config"] == {"ec_enable_nixl": True}
    assert roles == {
        "prefill": {"ec": "ec_consumer", "kv": "True"},
        "decode": {"ec": "", "kv": "True"},
        "encode": {"ec": "ec_producer", "kv": "False"},
    }
    env = {one["name"]: one for one in container["env"]}
    assert env["VLLM_EC_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert env["VLLM_EC_SIDE_CHANNEL_PORT"]["value"] == "5600"
    router = settings_of(rendered, "router")
    assert router["encode"][1:] == ["http://10.0.0.8:8000"]
    assert router["engines"][router["encode"][0]] == {"kind": "vllm"}


def test_decode_fetches_encodings_where_nobody_else_prefills() -> None:
    pools = {**CASES["pictures, vllm"]["pools"], "prefill": {"enabled": False}}
    container = container_of(render({**CASES["pictures, vllm"], "pools": pools}).workload("decode"))
    [config] = [arg.partition("=")[2] for arg in container["args"] if arg.startswith("--ec-transfer-config=")]
    assert json.loads(config)["ec_role"] == "ec_consumer"
