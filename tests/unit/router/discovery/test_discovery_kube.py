"""Sources of Kubernetes objects, and an API server that plays every fault."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import uvloop

from router.discovery.kube import MAX_EVENT_BYTES, Cluster
from router.discovery.parse import parse
from router.discovery.source import Source
from tests.kube_stub import PODS, SLICES, KubeStub, endpoint, endpoint_slice, pod
from tests.unit.router.discovery.listening import following

A, B, C = (f"http://10.0.0.{number}:8000" for number in (1, 2, 3))


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator[KubeStub]:
    async with KubeStub(tmp_path).running() as stub:
        yield stub


@pytest.fixture
def cluster(stub: KubeStub, tmp_path: Path) -> Cluster:
    return Cluster(directory=tmp_path, server=stub.url, allow_http=True, longest_pause=0.02)


@pytest.fixture
def pods(cluster: Cluster) -> Source:
    return source("pods://serving?labels=app=engine&port=http", cluster)


def source(text: str, cluster: Cluster) -> Source:
    found = parse(text, cluster)
    assert not isinstance(found, str)
    return found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(record)["why"] for record in caplog.records if record.levelno == logging.WARNING]


class Logged(logging.Handler):
    """Tells when a problem was logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._happened = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self._happened.set()

    async def a_warning(self) -> None:
        async with asyncio.timeout(5):
            await self._happened.wait()


@pytest.fixture
def logged() -> Iterator[Logged]:
    handler = Logged()
    logging.getLogger("router.discovery").addHandler(handler)
    yield handler
    logging.getLogger("router.discovery").removeHandler(handler)


async def test_engines_that_exist_before_the_router_are_told_first(stub: KubeStub, pods: Source) -> None:
    stub.put(PODS, pod("b", "10.0.0.2"))
    uid = stub.put(PODS, pod("a", "10.0.0.1"))["metadata"]["uid"]
    stub.put(PODS, pod("other", "10.0.0.3", labels={"app": "other"}))
    stub.put(PODS, pod("elsewhere", "10.0.0.4", namespace="elsewhere"))
    async with following(pods) as heard:
        await heard.until([A, B])
        assert len(heard.lists) == 1
        assert heard.lists[0][0].incarnation == uid


async def test_no_pods_at_first_are_told_as_an_empty_list(pods: Source) -> None:
    async with following(pods) as heard:
        await heard.until([])


async def test_the_own_namespace_is_that_of_the_service_account(stub: KubeStub, cluster: Cluster) -> None:
    stub.put(PODS, pod("a", "10.0.0.1"))
    async with following(source("pods:///?labels=app=engine&port=8000", cluster)) as heard:
        await heard.until([A])


async def test_a_pod_joins_when_ready_and_leaves_when_not(stub: KubeStub, pods: Source) -> None:
    async with following(pods) as heard:
        await stub.watched()
        stub.put(PODS, pod("a", None, phase="Pending", ready=None))
        stub.put(PODS, pod("a", "10.0.0.1", ready=False))
        stub.put(PODS, pod("a", "10.0.0.1"))
        await heard.until([A])
        assert len(heard.lists) == 2, "what makes no difference is not told"
        stub.put(PODS, pod("a", "10.0.0.1", ready=False))
        await heard.until([])
    assert stub.asked.count("list pods") == 1


async def test_a_deleted_pod_is_leaving_until_it_is_gone(stub: KubeStub, pods: Source) -> None:
    stub.put(PODS, pod("a", "10.0.0.1"))
    async with following(pods) as heard:
        await stub.watched()
        stub.put(PODS, pod("a", "10.0.0.1", deleting=True))
        await heard.until([f"({A})"], seconds=1)
        stub.put(PODS, pod("a", "10.0.0.1", deleting=True, ready=False))
        stub.delete(PODS, "a")
        await heard.until([])
        assert [[one.leaving for one in told] for told in heard.lists] == [[False], [True], []]


async def test_an_evicted_pod_is_out_and_comes_back_at_its_new_address(stub: KubeStub, pods: Source) -> None:
    stub.put(PODS, pod("a", "10.0.0.1"))
    async with following(pods) as heard:
        await stub.watched()
        stub.put(PODS, pod("a", None, phase="Failed", ready=False))
        await heard.until([])
        stub.put(PODS, pod("a", "10.0.0.2"))
        await heard.until([B])


async def test_a_pod_whose_label_no_longer_matches_is_out(stub: KubeStub, pods: Source) -> None:
    stub.put(PODS, pod("a", "10.0.0.1"))
    async with following(pods) as heard:
        await stub.watched()
        stub.put(PODS, pod("a", "10.0.0.1", labels={"app": "debug"}))
        await heard.until([])
        stub.put(PODS, pod("a", "10.0.0.1"))
        await heard.until([A])


async def test_another_pod_of_the_same_name_and_address_is_another_engine(stub: KubeStub, pods: Source) -> None:
    stub.put(PODS, pod("a-0", "10.0.0.1", uid="first"))
    async with following(pods) as heard:
        await stub.watched()
        stub.delete(PODS, "a-0")
        stub.put(PODS, pod("a-0", "10.0.0.1", uid="second"))
        await heard.until_it_is(lambda: [one.incarnation for one in heard.lists[-1]] == ["second"])


async def test_a_long_list_comes_in_pages(stub: KubeStub, pods: Source) -> None:
    stub.largest_page = 3
    for number in range(10):
        stub.put(PODS, pod(f"p{number}", f"10.0.0.{number}"))
    async with following(pods) as heard:
        await heard.until([f"http://10.0.0.{number}:8000" for number in range(10)])
        assert len(heard.lists) == 1
    assert [query.get("limit") for query in stub.queries[:4]] == ["100"] * 4


async def test_a_list_that_expires_between_pages_is_begun_again(stub: KubeStub, pods: Source) -> None:
    stub.largest_page = 1
    for number in (1, 2):
        stub.put(PODS, pod(f"p{number}", f"10.0.0.{number}"))
    stub.hang()
    async with following(pods) as heard:
        await stub.has_been_asked("list pods")
        stub.compact_at_next_page = True
        stub.resume()
        await heard.until([A, B])
        assert stub.asked.count("list pods") == 4  # one page, the next one refused, two pages


async def test_bookmarks_change_nothing(stub: KubeStub, pods: Source) -> None:
    stub.put(PODS, pod("a", "10.0.0.1"))
    async with following(pods) as heard:
        await stub.watched()
        stub.bookmark()
        stub.put(PODS, pod("b", "10.0.0.2"))
        await heard.until([A, B])
        assert len(heard.lists) == 2
    assert stub.queries[-1]["allowWatchBookmarks"] == "true"


@pytest.mark.parametrize("how", ["drop", "end_watches"])
async def test_what_a_dead_watch_missed_is_told_by_the_next_list(stub: KubeStub, pods: Source, how: str) -> None:
    stub.put(PODS, pod("a", "10.0.0.1"))
    stub.put(PODS, pod("b", "10.0.0.2"))
    async with following(pods) as heard:
        await stub.watched()
        stub.silence()
        stub.delete(PODS, "a")
        stub.put(PODS, pod("c", "10.0.0.3"))
        getattr(stub, how)()
        await heard.until([B, C])
        await stub.watched(since=1)
        stub.delete(PODS, "b")
        await heard.until([C])


@pytest.mark.parametrize("answer", ["status", "event"])
async def test_a_version_that_is_gone_makes_it_list_again(
    stub: KubeStub, pods: Source, answer: Literal["status", "event"], caplog: pytest.LogCaptureFixture
) -> None:
    stub.put(PODS, pod("a", "10.0.0.1"))
    stub.compact_before_watch = answer
    async with following(pods) as heard:
        await stub.has_been_asked("list pods", 2)
        await stub.watched()
        stub.put(PODS, pod("b", "10.0.0.2"))
        await heard.until([A, B])
    assert warnings(caplog) == [], "it is nothing that an operator could mend"


async def test_compaction_in_the_middle_of_a_watch_loses_no_deletion(stub: KubeStub, pods: Source) -> None:
    stub.put(PODS, pod("a", "10.0.0.1"))
    async with following(pods) as heard:
        await stub.watched()
        stub.silence()
        stub.delete(PODS, "a")
        stub.speak()
        stub.compact("event")
        await heard.until([])


async def test_a_watch_that_is_silent_beyond_its_time_is_cut(stub: KubeStub, cluster: Cluster) -> None:
    cluster = replace(cluster, watch_seconds=1, grace_seconds=0.1)
    stub.put(PODS, pod("a", "10.0.0.1"))
    async with following(source("pods://serving?labels=app=engine&port=http", cluster)) as heard:
        await stub.watched()
        stub.silence()
        stub.delete(PODS, "a")
        await heard.until([])
    assert stub.queries[-1]["timeoutSeconds"] == "1"


async def test_the_last_list_stands_while_the_server_hangs(stub: KubeStub, cluster: Cluster) -> None:
    cluster = replace(cluster, answer_seconds=0.05)
    stub.put(PODS, pod("a", "10.0.0.1"))
    async with following(source("pods://serving?labels=app=engine&port=http", cluster)) as heard:
        await stub.watched()
        stub.hang()
        stub.delete(PODS, "a")
        stub.drop()
        await stub.has_been_asked("list pods", 4)
        assert heard.urls == [A]
        stub.resume()
        await heard.until([])


async def test_the_last_list_stands_while_the_server_is_away(tmp_path: Path) -> None:
    server = KubeStub(tmp_path)
    server.put(PODS, pod("a", "10.0.0.1"))
    async with AsyncExitStack() as first:
        await first.enter_async_context(server.running())
        cluster = Cluster(directory=tmp_path, server=server.url, allow_http=True, longest_pause=0.02)
        async with following(source("pods://serving?labels=app=engine&port=http", cluster)) as heard:
            await server.watched()
            await first.aclose()
            assert heard.urls == [A]
            server.delete(PODS, "a")
            async with server.running(port=int(server.url.rpartition(":")[2])):
                await heard.until([])
            assert len(heard.lists) == 2


async def test_an_empty_list_after_an_outage_is_believed(stub: KubeStub, pods: Source) -> None:
    stub.put(PODS, pod("a", "10.0.0.1"))
    async with following(pods) as heard:
        await stub.watched()
        stub.refuse["list"] = 500
        stub.silence()
        stub.delete(PODS, "a")
        stub.drop()
        await stub.has_been_asked("list pods", 4)
        assert heard.urls == [A]
        stub.refuse.clear()
        await heard.until([])


async def test_a_new_token_is_read_when_the_old_one_is_refused(
    stub: KubeStub, pods: Source, caplog: pytest.LogCaptureFixture
) -> None:
    stub.put(PODS, pod("a", "10.0.0.1"))
    async with following(pods) as heard:
        await stub.watched()
        stub.rotate("second-token")
        await stub.has_been_asked("401", 3)
        assert heard.urls == [A]
        stub.delete(PODS, "a")
        stub.write_token()
        await heard.until([])
    assert warnings(caplog) == ["the API server says 401: Unauthorized"], "once, not per try"
    assert "token" not in caplog.text


async def test_a_new_token_is_read_before_the_old_one_is_refused(stub: KubeStub, pods: Source) -> None:
    async with following(pods) as heard:
        await stub.watched()
        stub.token = "second-token"
        stub.write_token()
        stub.end_watches()
        await stub.watched(since=1)
        stub.put(PODS, pod("a", "10.0.0.1"))
        await heard.until([A])
    assert "401" not in stub.asked


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_a_missing_permission_is_logged_once_and_over_when_given(
    stub: KubeStub, pods: Source, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.discovery")
    stub.refuse[verb] = 403
    async with following(pods) as heard:
        await stub.has_been_asked(f"{verb} pods", 3)
        assert warnings(caplog) == [f"the API server says 403: pods is forbidden: cannot {verb}"]
        assert bool(heard.lists) == (verb == "watch"), "nothing is told before anything is known"
        del stub.refuse[verb]
        await stub.has_been_asked("watching")
        stub.put(PODS, pod("a", "10.0.0.1"))
        await heard.until([A])
    assert [vars(record)["state"] for record in caplog.records] == ["failing", "works"]


async def test_a_port_that_no_pod_has_is_logged_once(
    stub: KubeStub, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        stub.put(PODS, pod(name, "10.0.0.1"))
    async with following(source("pods://serving?labels=app=engine&port=grpc", cluster)) as heard:
        await heard.until([])
        await stub.watched()
        stub.end_watches()
        await stub.watched(since=1)
    assert warnings(caplog) == ["a: no container has a port named 'grpc'"]


@pytest.mark.parametrize(
    "raw",
    [
        b"not JSON\n",
        b"[]\n",
        b'{"type": "ADDED"}\n',
        b'{"type": "ADDED", "object": {"metadata": 3, "status": {"phase": "Running"}}}\n',
        b'{"type": "SURPRISE", "object": {"metadata": {"name": "a"}}}\n',
        b'{"type": "ERROR", "object": {"code": 500, "message": "etcd is away"}}\n',
        b'{"type": "ERROR"}\n',
        b"\n\n",
        b'{"type": "ADDED", "obj',
    ],
)
async def test_no_event_ends_the_following(stub: KubeStub, pods: Source, raw: bytes) -> None:
    stub.put(PODS, pod("a", "10.0.0.1"))
    async with following(pods) as heard:
        await stub.watched()
        stub.send(raw)
        stub.end_watches()
        await stub.watched(since=1)
        stub.put(PODS, pod("b", "10.0.0.2"))
        await heard.until([A, B])


async def test_a_large_event_is_read_and_one_without_end_is_not(stub: KubeStub, pods: Source) -> None:
    async with following(pods) as heard:
        await stub.watched()
        large = pod("a", "10.0.0.1")
        large["metadata"]["annotations"] = {"note": "x" * (1 << 20)}
        stub.put(PODS, large)
        await heard.until([A])
        stub.send(b"x" * (MAX_EVENT_BYTES + 1))
        await stub.watched(since=1)


async def test_a_service_is_all_its_slices_merged(stub: KubeStub, cluster: Cluster) -> None:
    stub.put(SLICES, endpoint_slice("s1", [endpoint("10.0.0.1", uid="u1"), endpoint("10.0.0.2", uid="u2")]))
    stub.put(SLICES, endpoint_slice("s2", [endpoint("10.0.0.2", uid="u2"), endpoint("10.0.0.3", uid="u3")]))
    stub.put(SLICES, endpoint_slice("x", [endpoint("10.0.0.4")], service="other"))
    async with following(source("endpointslices://serving/engines?port=http", cluster)) as heard:
        await heard.until([A, B, C])
        await stub.watched()
        stub.put(SLICES, endpoint_slice("s1", [endpoint("10.0.0.1", uid="u1", ready=False, terminating=True)]))
        await heard.until([f"({A})", B, C])
        stub.delete(SLICES, "s1")
        await heard.until([B, C])
        stub.drop()
        stub.delete(SLICES, "s2")
        await heard.until([])


@pytest.fixture
def authorities(tmp_path: Path) -> Path:
    """A folder with two certificates for 127.0.0.1, ours and theirs, and their keys."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    name = ["-days", "2", "-subj", "/CN=kube", "-addext", "subjectAltName=IP:127.0.0.1"]
    for which in ("ours", "theirs"):
        files = ["-keyout", str(tmp_path / f"{which}.key"), "-out", str(tmp_path / f"{which}.crt")]
        subprocess.run(["openssl", "req", "-x509", *curve, *name, *files], check=True, capture_output=True)
    return tmp_path


async def test_the_server_is_believed_by_its_own_authority_only(
    authorities: Path, logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(authorities / "ours.crt", authorities / "ours.key")
    async with KubeStub(authorities, tls=tls).running() as stub:
        stub.put(PODS, pod("a", "10.0.0.1"))
        (authorities / "ca.crt").write_bytes((authorities / "theirs.crt").read_bytes())
        cluster = Cluster(directory=authorities, server=stub.url, longest_pause=0.02)
        async with following(source("pods://serving?labels=app=engine&port=http", cluster)) as heard:
            await logged.a_warning()
            assert "certificate verify failed" in warnings(caplog)[0]
            assert stub.asked == []
            (authorities / "ca.crt").write_bytes((authorities / "ours.crt").read_bytes())
            await heard.until([A])
            await stub.watched()


def test_pods_are_followed_on_the_routers_loop(tmp_path: Path) -> None:
    async def work() -> None:
        async with KubeStub(tmp_path).running() as stub:
            cluster = Cluster(directory=tmp_path, server=stub.url, allow_http=True, longest_pause=0.02)
            async with following(source("pods://serving?labels=app=engine&port=http", cluster)) as heard:
                await stub.watched()
                stub.put(PODS, pod("a", "10.0.0.1"))
                await heard.until([A])
                stub.drop()
                stub.delete(PODS, "a")
                await heard.until([])

    uvloop.run(work())
