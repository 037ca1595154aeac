"""What must hold for whatever values are given."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.cases import CASES, PLAIN
from tests.deploy.objects import (
    NAMESPACE,
    Manifest,
    Rendered,
    component_of,
    container_of,
    pod_of,
    render,
    settings_of,
    templates,
)

pytestmark = pytest.mark.usefixtures("helm")

CHANGING = ("helm.sh/chart", "app.kubernetes.io/version", "app.kubernetes.io/managed-by")


@pytest.fixture(params=CASES)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render(CASES[request.param])


def _selectors(rendered: Rendered) -> Iterator[tuple[Manifest, dict[str, str]]]:
    for one in rendered:
        spec = one.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector and one["kind"] != "ServiceMonitor":
            yield one, selector if one["kind"] == "Service" else selector["matchLabels"]


def test_selectors_choose_pods_of_their_component_and_never_change(rendered: Rendered) -> None:
    pods = [template for workload in rendered.workloads() for template in templates(workload)]
    for pod in pods:
        assert not set(CHANGING) & set(pod["metadata"]["labels"]), "a new chart would restart it"
    for one, wanted in _selectors(rendered):
        assert not set(CHANGING) & set(wanted), one["metadata"]["name"]
        told = {key: value for key, value in wanted.items() if not key.startswith("leaderworkerset")}
        chosen = [pod["metadata"]["labels"] for pod in pods if told.items() <= pod["metadata"]["labels"].items()]
        assert {labels["app.kubernetes.io/component"] for labels in chosen} == {component_of(one)}


def test_named_ports_are_ports_of_the_pods(rendered: Rendered) -> None:
    ports = {
        component_of(one): {port["name"]: port["containerPort"] for port in container_of(one)["ports"]}
        for one in rendered.workloads()
    }
    for one in rendered.of("Service"):
        for port in one["spec"]["ports"]:
            assert port["targetPort"] in ports[component_of(one)]
    for one in rendered.of("PodMonitor"):
        assert one["spec"]["podMetricsEndpoints"][0]["port"] in ports[component_of(one)]
    for one in rendered.of("ServiceMonitor"):
        [service] = [it for it in rendered.of("Service") if component_of(it) == component_of(one)]
        assert one["spec"]["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]
        assert one["spec"]["namespaceSelector"] == {"matchNames": [NAMESPACE]}
    for workload in rendered.workloads():
        container = container_of(workload)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            for how in ("httpGet", "tcpSocket"):
                if how in container.get(probe, {}):
                    assert container[probe][how]["port"] in ports[component_of(workload)]


def test_pods_have_the_least_that_they_need(rendered: Rendered) -> None:
    for workload in rendered.workloads():
        for template in templates(workload):
            pod = template["spec"]
            [container] = pod["containers"]
            assert pod["securityContext"]["runAsNonRoot"]
            assert pod["securityContext"]["runAsUser"] > 0
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            context = container["securityContext"]
            assert not context["allowPrivilegeEscalation"]
            assert context["readOnlyRootFilesystem"]
            assert context["capabilities"]["drop"] == ["ALL"]
            assert pod["enableServiceLinks"] is False
            assert container["resources"]["limits"]["memory"]
            assert re.fullmatch(r"\S+(:(?!latest)\S+|@sha256:\S+)", container["image"])
            assert not {"hostNetwork", "hostPID"} & set(pod)


def test_only_routers_that_ask_the_api_have_a_token(rendered: Rendered) -> None:
    for workload in rendered.workloads():
        sources = str(settings_of(rendered, "router")["prefill"]) + str(settings_of(rendered, "router")["decode"])
        asks = component_of(workload) == "router" and ("pods://" in sources or "endpointslices://" in sources)
        for template in templates(workload):
            assert template["spec"]["automountServiceAccountToken"] >= asks
            if component_of(workload) != "router":
                assert template["spec"]["automountServiceAccountToken"] is False


def test_grace_is_more_than_what_leaving_takes(rendered: Rendered) -> None:
    for workload in rendered.workloads():
        component, pod, container = component_of(workload), pod_of(workload), container_of(workload)
        stopping = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        if container["command"] == ["backhaul"]:
            settings = settings_of(rendered, component)
            stopping += settings["drain_timeout"] + settings.get("drain_delay", 0)
        for arg in container["args"]:
            if arg.startswith("--shutdown-timeout="):
                stopping += int(arg.partition("=")[2])
        assert pod["terminationGracePeriodSeconds"] >= stopping + 5


def test_autoscalers_own_the_number_of_replicas(rendered: Rendered) -> None:
    scaled = {
        (one["spec"]["scaleTargetRef"]["kind"], one["spec"]["scaleTargetRef"]["name"])
        for one in [*rendered.of("HorizontalPodAutoscaler"), *rendered.of("ScaledObject")]
    }
    for one in rendered.workloads():
        assert ("replicas" in one["spec"]) is ((one["kind"], one["metadata"]["name"]) not in scaled)
    assert scaled <= {(one["kind"], one["metadata"]["name"]) for one in rendered.workloads()}


def test_every_pool_and_the_router_scale_where_that_is_asked_for() -> None:
    for case, kind in (("scaled by HPA", "HorizontalPodAutoscaler"), ("scaled by KEDA", "ScaledObject")):
        assert {component_of(one) for one in render(CASES[case]).of(kind)} == {"router", "prefill", "decode"}


def test_routers_are_replaced_one_by_one_and_never_missed() -> None:
    router = render(PLAIN).workload("router")
    assert router["spec"]["replicas"] >= 2
    assert router["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert render(PLAIN).one("PodDisruptionBudget", "router")["spec"]["maxUnavailable"] == 1


def test_pools_are_found_by_addresses_of_ready_pods(rendered: Rendered) -> None:
    for service in rendered.of("Service"):
        if component_of(service) in ("prefill", "decode", "encode"):
            assert service["spec"]["clusterIP"] == "None"
            assert service["spec"]["publishNotReadyAddresses"] is False


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("plain", {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}),
        (
            "endpoint slices",
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
        ),
        ("dns", None),
    ],
)
def test_role_is_what_discovery_needs(case: str, rule: Manifest | None) -> None:
    rendered = render(CASES[case])
    assert [one["rules"] for one in rendered.of("Role")] == ([[rule]] if rule else [])
    assert not rendered.of("ClusterRole")
    account = pod_of(rendered.workload("router"))["serviceAccountName"]
    for binding in rendered.of("RoleBinding"):
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]
        assert binding["roleRef"]["name"] == rendered.of("Role")[0]["metadata"]["name"]
    assert len(rendered.of("RoleBinding")) == (rule is not None)
    assert account in [one["metadata"]["name"] for one in rendered.of("ServiceAccount")]


@pytest.mark.parametrize("case", ["valkey", "policies", "scaled by KEDA", "watched", "exposed", "several nodes"])
def test_two_releases_in_a_namespace_have_nothing_in_common(case: str) -> None:
    names, labels = [], []
    for release in ("one", "two"):
        rendered = render(CASES[case], release=release)
        names.append({(one["kind"], one["metadata"]["name"]) for one in rendered})
        labels.append({json.dumps(wanted, sort_keys=True) for _, wanted in _selectors(rendered)})
    assert not names[0] & names[1]
    assert not labels[0] & labels[1]


def test_long_names_still_fit() -> None:
    rendered = render(CASES["stateful sets"], release="a" * 53)
    assert max(len(one["metadata"]["name"]) for one in rendered) <= 63 - len("-1234567890")


def _values(manifest: Any, key: str) -> Iterator[Any]:
    """Of that key, wherever it is."""
    if isinstance(manifest, dict):
        for name, value in manifest.items():
            if name == key:
                yield value
            yield from _values(value, key)
    elif isinstance(manifest, list):
        for value in manifest:
            yield from _values(value, key)


def test_secrets_are_referred_to_and_never_made(rendered: Rendered) -> None:
    assert not rendered.of("Secret")
    for env in _values(list(rendered), "env"):
        for one in env:
            assert not ("value" in one and re.search("PASSWORD|TOKEN|KEY|SECRET", one["name"]))


def test_secrets_reach_whom_they_are_for() -> None:
    rendered = render(CASES["secrets"])
    router = rendered.workload("router")
    assert container_of(router)["env"] == [
        {"name": "BACKHAUL_ROUTER_REDIS", "valueFrom": {"secretKeyRef": {"name": "redis", "key": "url"}}}
    ]
    assert "redis" not in settings_of(rendered, "router")
    for component in ("router", "decode"):
        assert settings_of(rendered, component)["seal_key_file"] == "/etc/backhaul/seal/key"
        mounts = {
            mount["mountPath"]: mount["name"] for mount in container_of(rendered.workload(component))["volumeMounts"]
        }
        volumes = {volume["name"]: volume for volume in pod_of(rendered.workload(component))["volumes"]}
        assert volumes[mounts["/etc/backhaul/seal"]]["secret"]["secretName"] == "seal"
    vllm = render(CASES["vllm"])
    keys = {source: stated["api_key_file"] for source, stated in settings_of(vllm, "router")["engines"].items()}
    assert set(keys) == {settings_of(vllm, "router")[role][0] for role in ("prefill", "decode")}
    mounted = {mount["mountPath"] for mount in container_of(vllm.workload("router"))["volumeMounts"]}
    assert {file.rpartition("/")[0] for file in keys.values()} <= mounted


def test_volumes_are_mounted_and_mounts_have_volumes(rendered: Rendered) -> None:
    for workload in rendered.workloads():
        for template in templates(workload):
            volumes = [volume["name"] for volume in template["spec"]["volumes"]]
            mounts = [mount["name"] for mount in template["spec"]["containers"][0]["volumeMounts"]]
            assert sorted(volumes) == sorted(set(mounts))


def test_operators_port_is_for_them_only(rendered: Rendered) -> None:
    settings = settings_of(rendered, "router")
    ports = [port["name"] for port in container_of(rendered.workload("router"))["ports"]]
    assert ("admin" in ports) is (settings["admin_host"] == "0.0.0.0")
    [service] = [one for one in rendered.of("Service") if component_of(one) == "router"]
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http"]


def test_only_what_clients_ask_is_reached_from_outside() -> None:
    rendered = render(CASES["exposed"])
    [ingress], [route] = rendered.of("Ingress"), rendered.of("HTTPRoute")
    assert [path["path"] for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]] == ["/v1", "/v1"]
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == ["a.example", "b.example"]
    assert [match["path"]["value"] for match in route["spec"]["rules"][0]["matches"]] == ["/v1"]
    assert settings_of(rendered, "router")["status"] is False


@pytest.mark.parametrize("component", ["router", "prefill"])
def test_pods_are_replaced_when_their_settings_change(component: str) -> None:
    changed = copy.deepcopy(PLAIN)
    changed["pools"]["common"]["port"] = 8001
    changed["router"] = {"config": {"queue_timeout": 5}}
    sums = {
        render(values).workload(component)["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        for values in (PLAIN, changed)
    }
    assert len(sums) == 2


def test_devices_are_asked_for() -> None:
    pod = templates(render(CASES["several nodes"]).workload("decode"))
    for template in pod:
        [container] = template["spec"]["containers"]
        assert {"nvidia.com/gpu": "4", "rdma/ib": "1"}.items() <= container["resources"]["limits"].items()
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in template["spec"]["volumes"]


def test_workers_of_a_leader_are_no_engines_of_their_own() -> None:
    rendered = render(CASES["several nodes"])
    leader, worker = (one["spec"]["containers"][0] for one in templates(rendered.workload("decode")))
    assert "--headless" in worker["args"]
    assert "--headless" not in leader["args"]
    assert "readinessProbe" not in worker
    leads = "leaderworkerset.sigs.k8s.io/worker-index"
    assert rendered.one("Service", "decode")["spec"]["selector"][leads] == "0"
    assert f"labels={leads}=0" in settings_of(rendered, "router")["decode"][0]
