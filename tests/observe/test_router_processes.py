"""A router of several processes: one port, one set of counts, and no process that is needed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from router.siblings import MAX_FRAME_BYTES
from tests.router_harness import CHAT, until
from tests.router_process import Running, listening, started
from tests.stub_engine import StubEngine
from tests.valkey import free_port

SETTINGS: dict[str, Any] = {"processes": 2, "drain_delay": 0.0, "redis_timeout": 2.0, "prefill_fallback": "decode"}


@asynccontextmanager
async def several(folder: Path, p: StubEngine, d: StubEngine, **settings: Any) -> AsyncIterator[Running]:
    admin = free_port()
    async with started(folder, prefill=[p.url], decode=[d.url], admin_port=admin, **SETTINGS | settings) as router:
        await listening(router, folder)
        yield router


def children(router: Running) -> list[psutil.Process]:
    return psutil.Process(router.process.pid).children()


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def turn(router: Running, body: dict[str, Any] = CHAT, **headers: str) -> int:
    """Over a connection of its own, so that any process may have it."""
    headers["Connection"] = "close"
    async with router.client.post(router.url + "/v1/chat/completions", json=body, headers=headers) as answer:
        await answer.read()
        return answer.status


async def counts(router: Running) -> dict[str, float]:
    async with router.client.get(router.url + "/metrics", headers={"Connection": "close"}) as answer:
        assert answer.status == 200
        lines = (await answer.text()).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


OK = 'backhaul_router_turns_total{endpoint="chat",outcome="ok"}'


async def eventually(router: Running, name: str, value: float) -> None:
    async with asyncio.timeout(20):
        while (await counts(router)).get(name) != value:  # noqa: ASYNC110 (it happens elsewhere)
            await asyncio.sleep(0.02)


async def test_turns_land_on_all_and_are_counted_once(p: StubEngine, d: StubEngine, store: str, tmp_path: Path) -> None:
    async with several(tmp_path, p, d, redis=store) as router:
        for _ in range(40):
            assert await turn(router) == 200
        told = await counts(router)
        assert told[OK] == 40
        assert told['backhaul_router_turn_seconds_count{endpoint="chat"}'] == 40
        assert told["backhaul_router_processes"] == 2
        assert told[f'backhaul_router_engine_ready{{engine="{d.url}",role="decode"}}'] == 1
        assert told["process_start_time_seconds"] == pytest.approx(psutil.Process(router.process.pid).create_time(), 1)
        assert not [name for name in told if "pid" in name]
        busy = [sum(one.cpu_times()[:2]) for one in children(router)]
        assert min(busy) > 0.2 * max(busy)


async def test_counts_go_on_when_a_process_is_killed(p: StubEngine, d: StubEngine, store: str, tmp_path: Path) -> None:
    async with several(tmp_path, p, d, redis=store) as router:
        for _ in range(20):
            await turn(router)
        before = await counts(router)
        killed, other = children(router)
        killed.kill()
        for _ in range(20):
            with suppress(aiohttp.ClientError):  # its connection may wait for the one that is no more
                assert await turn(router) == 200, "also of the new one, from its first connection on"
            now = await counts(router)
            counters = [name for name in before if name.endswith(("_total", "_count", "_sum"))]
            assert not [name for name in counters if now[name] < before[name]]
        await eventually(router, "backhaul_router_processes", 2)
        after = await counts(router)
        assert after["backhaul_router_process_restarts_total"] == 1
        assert after["backhaul_router_turns_in_flight"] == 0
        assert runs(other)
        ok = after[OK]
        await turn(router)
        assert (await counts(router))[OK] == ok + 1 >= 30


async def test_a_process_that_hangs_holds_up_no_scrape_for_long(
    p: StubEngine, d: StubEngine, store: str, tmp_path: Path
) -> None:
    async with several(tmp_path, p, d, redis=store) as router:
        for _ in range(10):
            await turn(router)
        assert (await counts(router))[OK] == 10
        hung = children(router)[0]
        hung.suspend()
        try:  # by so many that the other gets some
            scrapes = [asyncio.create_task(counts(router)) for _ in range(20)]
            await asyncio.wait(scrapes, timeout=4)
            assert {one.result()[OK] for one in scrapes if one.done()} == {10}
        finally:
            hung.resume()
        assert [told[OK] for told in await asyncio.gather(*scrapes)] == [10] * 20


async def test_sigterm_drains_all(p: StubEngine, d: StubEngine, store: str, tmp_path: Path) -> None:
    release = asyncio.Event()

    async def held(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await release.wait()
        return web.json_response(d.whole(body))

    async with several(tmp_path, p, d, redis=store, drain_delay=1.0) as router:
        d.scripts.extend([held] * 10)
        turns = [asyncio.create_task(turn(router)) for _ in range(10)]
        await until(lambda: len(d.seen) == 10, "all turns run")
        there = children(router)
        router.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(5):
            while await router.ready() != 503:
                pass
        release.set()
        assert await asyncio.gather(*turns) == [200] * 10
        assert await router.end(10) == 0
        assert not any(map(runs, there))


async def test_processes_end_when_their_parent_is_gone(
    p: StubEngine, d: StubEngine, store: str, tmp_path: Path
) -> None:
    async with several(tmp_path, p, d, redis=store) as router:
        there = children(router)
        router.process.kill()
        await until(lambda: not any(map(runs, there)), "all have ended", 10)


async def test_drained_engine_is_so_for_all_and_for_those_that_come_later(
    p: StubEngine, d: StubEngine, store: str, tmp_path: Path
) -> None:
    async with several(tmp_path, p, d, redis=store, processes=3) as router:
        admin = await admin_url(router)
        async with router.client.post(admin + "/admin/drain", json={"engine": p.url}) as answer:
            [told] = (await answer.json())["engines"]
        assert (told["state"], told["in_flight"]) == ("draining", 0)
        ready = f'backhaul_router_engine_ready{{engine="{p.url}",role="prefill"}}'
        await eventually(router, ready, 0)
        children(router)[0].kill()
        await eventually(router, "backhaul_router_process_restarts_total", 1)
        await eventually(router, "backhaul_router_processes", 3)
        await eventually(router, f'backhaul_router_engine_ready{{engine="{d.url}",role="decode"}}', 1)
        assert (await counts(router))[ready] == 0


async def admin_url(router: Running) -> str:
    ports = {one.laddr.port for child in children(router) for one in child.net_connections() if one.status == "LISTEN"}
    [port] = ports - {int(router.url.rsplit(":", 1)[1])}
    return f"http://127.0.0.1:{port}"


async def test_abort_finds_turns_of_other_processes(p: StubEngine, d: StubEngine, store: str, tmp_path: Path) -> None:
    async def held(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with several(tmp_path, p, d, redis=store) as router:
        d.scripts.extend([held] * 8)
        names = [f"request-{number}" for number in range(8)]
        turns = [asyncio.create_task(turn(router, **{"X-Request-Id": name})) for name in names]
        await until(lambda: len(d.seen) == 8, "all turns run")
        async with router.client.post(router.url + "/inference/v1/abort_requests", json={"request_ids": names}) as told:
            assert (await told.json()) == {"aborted": 8}
        assert await asyncio.gather(*turns) == [409] * 8


async def test_abort_of_what_cannot_be_an_id_goes_no_further(
    p: StubEngine, d: StubEngine, store: str, tmp_path: Path
) -> None:
    """Though a request may be larger than what processes say to each other."""
    async with several(tmp_path, p, d, redis=store, max_body_bytes=MAX_FRAME_BYTES + 1000) as router:
        name = "n" * MAX_FRAME_BYTES
        body = BytesIO(json.dumps({"request_ids": [name]}).encode())
        async with router.client.post(router.url + "/inference/v1/abort_requests", data=body) as told:
            assert (await told.json()) == {"aborted": 0}
        assert (await counts(router))["backhaul_router_process_restarts_total"] == 0


async def test_conversation_goes_on_in_any_process(p: StubEngine, d: StubEngine, store: str, tmp_path: Path) -> None:
    """What a turn leaves for the next is in the store, and in no process."""
    p.tokenizes = d.tokenizes = True
    async with several(tmp_path, p, d, redis=store, kv_recompute_threshold=0, decode_only_tokens=0) as router:
        for number in range(12):
            assert await turn(router, **{"X-Conversation-Id": f"c{number}"}) == 200
        for number in range(12):
            assert await turn(router, **{"X-Conversation-Id": f"c{number}"}) == 200
        told = await counts(router)
    hits = sum(value for name, value in told.items() if 'op="claim",result="hit' in name)
    assert hits == 12


async def refused(folder: Path, check: Callable[[str], bool], **settings: Any) -> None:
    config = {"decode": ["http://127.0.0.1:1"], "processes": 2, **settings}
    async with started(folder, **config) as router:
        _, errors = await router.process.communicate()
        assert router.process.returncode == 1
        assert check(errors.decode()), errors.decode()


async def test_port_that_others_have_is_refused_once(p: StubEngine, d: StubEngine, store: str, tmp_path: Path) -> None:
    """Though it could be shared with them."""
    async with several(tmp_path, p, d, redis=store) as router:
        port = int(router.url.rsplit(":", 1)[1])
        (tmp_path / "other").mkdir()
        await refused(tmp_path / "other", lambda text: text.count("cannot listen") == 1, port=port)


async def test_wrong_settings_are_told_once(tmp_path: Path) -> None:
    missing = str(tmp_path / "key")
    await refused(tmp_path, lambda text: text.count("backhaul router: ") == 1, seal_key_file=missing)
    nowhere = str(tmp_path / "missing/facts.json")
    await refused(tmp_path, lambda text: text.startswith("backhaul router: --json-file"), json_file=nowhere)


async def test_process_that_ends_by_itself_is_replaced(
    p: StubEngine, d: StubEngine, store: str, tmp_path: Path
) -> None:
    async with several(tmp_path, p, d, redis=store) as router:
        for _ in range(10):
            await turn(router)
        os.kill(children(router)[0].pid, signal.SIGTERM)  # one by hand: it drains
        await eventually(router, "backhaul_router_process_restarts_total", 1)
        await eventually(router, "backhaul_router_processes", 2)
        assert (await counts(router))[OK] == 10
        assert json.loads((tmp_path / "router.json").read_text())["pid"] == router.process.pid


DYING = """
import sys, time
from router.processes import Processes
from router.siblings import Frame

def work(channel):
    channel.sendall(Frame("listens").pack())
    print(time.monotonic(), flush=True)
    return 3

sys.exit(Processes(1, work).run())
"""


async def test_process_that_dies_again_is_given_time() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", DYING, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    first, second, third = [float(await process.stdout.readline()) for _ in range(3)]
    process.terminate()
    await asyncio.wait_for(process.wait(), 5)
    assert third - second > max(0.9, second - first)
