"""The status page in a real browser: it shows what the router says, in every size, by keyboard too, and fails aloud."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from playwright.async_api import Page, expect

from router import page as page_files
from router.app import operators_runner
from router.context import Router
from tests.page.conftest import SHOTS, Opening
from tests.page.scenario import busy_status
from tests.router_harness import CHAT, listening, router_over
from tests.stub_engine import StubEngine

AXE = Path(__file__).parent / "node_modules/axe-core/axe.min.js"
NO_REDIS = "redis://127.0.0.1:1/0"

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass
class Told:
    """A router that tells what a test wants."""

    url: str = ""
    status: dict[str, Any] = field(default_factory=dict)
    code: int = 200
    num_asked: int = 0

    async def answer(self, _: web.Request) -> web.Response:
        self.num_asked += 1
        return web.json_response(self.status, status=self.code)


@asynccontextmanager
async def telling(**changes: Any) -> AsyncIterator[Told]:
    told = Told(status=busy_status(time.time()) | changes)
    async with serving(app_of(told)) as told.url:
        yield told


def app_of(told: Told) -> web.Application:
    app = web.Application()
    for path, handler in page_files.routes():
        app.router.add_get(path, partial(handler, cast(Router, None)))
    app.router.add_get("/admin/status", told.answer)
    return app


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    async with listening(web.AppRunner(app, access_log=None, shutdown_timeout=0.1)) as url:
        yield f"{url}/"


async def test_shows_a_real_router(opened: Opening) -> None:
    async with (
        StubEngine("prefill").running() as p,
        StubEngine("decode").running() as d,
        router_over([p], [d], NO_REDIS) as front,
    ):
        assert (await front.post(CHAT)).status == 200
        assert (await front.post({**CHAT, "stream": True})).status == 200
        assert (await front.post(b"{")).status == 400
        async with listening(operators_runner(front.router)) as url, opened(url) as page:
            await expect(page.locator("#state")).to_have_text("Ready")
            await expect(page).to_have_title("Ready – Backhaul router")
            engines = page.locator("#engines tbody tr")
            await expect(engines).to_have_count(2)
            await expect(engines.nth(0)).to_contain_text(p.url.removeprefix("http://"))
            await expect(engines.nth(1)).to_contain_text(d.url.removeprefix("http://"))
            turns = page.locator("#turns tbody tr")
            await expect(turns).to_have_count(3)
            await expect(turns.nth(0)).to_contain_text("rejected")
            await expect(turns.nth(2)).to_contain_text("ok")
            await expect(page.locator("#redis")).to_contain_text("does not answer")


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [360, 1440])
async def test_fits_and_can_be_read(width: int, scheme: str, opened: Opening, request: pytest.FixtureRequest) -> None:
    """No part of the page is wider than the window, and nothing is wrong for axe: names, roles, contrast."""
    async with telling() as told, opened(told.url, width=width, scheme=scheme) as page:
        await expect(page.locator("#turns tbody tr").first).to_be_visible()
        assert await page.locator("#chart rect.bar").count() > 50
        assert await page.evaluate("document.documentElement.scrollWidth") == width
        await page.locator("summary").first.click()
        assert await page.evaluate("document.documentElement.scrollWidth") == width
        await page.locator("summary").first.click()
        SHOTS.mkdir(parents=True, exist_ok=True)
        shot = SHOTS / f"status-{width}-{scheme}.png"
        await page.screenshot(path=shot, full_page=True)
        reporter = request.config.pluginmanager.get_plugin("terminalreporter")
        print(shot) if reporter is None else reporter.write_line(f"screenshot: {shot}")
        assert await wrong_for(page) == []


async def wrong_for(page: Page) -> list[str]:
    """What axe finds, one line each."""
    if not AXE.is_file():
        pytest.skip("needs node and npm: `make clients` installs axe-core")
    await page.evaluate(AXE.read_text())
    found = json.loads(await page.evaluate("axe.run(document).then((found) => JSON.stringify(found.violations))"))
    return [
        f"{one['id']}: {node['html'][:160]} {node['failureSummary'][:300]}" for one in found for node in one["nodes"]
    ]


async def test_all_that_acts_is_reached_by_keyboard(opened: Opening) -> None:
    async with telling() as told, opened(told.url) as page:
        await expect(page.locator("#turns tbody tr").first).to_be_visible()
        reached = []
        for _ in range(12):
            await page.keyboard.press("Tab")
            reached.append(
                await page.evaluate(
                    "((at) => [at.id || at.className || at.textContent.trim().slice(0, 20), at === document.body ||"
                    " getComputedStyle(at).outlineStyle !== 'none'])(document.activeElement)"
                )
            )
        names = [name for name, _ in reached]
        assert names[0] == "skip"
        assert names[1:5] == ["pause", "chart", "Show as a table", "release, seal"]
        assert {"problems", "more"} <= set(names)
        assert [name for name, has_outline in reached if not has_outline] == []


async def test_chart_is_read_out_by_arrow_keys(opened: Opening) -> None:
    async with telling() as told, opened(told.url) as page:
        await expect(page.locator("#chart rect.bar").first).to_be_visible()
        await page.focus("#chart")
        await page.keyboard.press("ArrowLeft")
        await page.keyboard.press("ArrowLeft")
        readout = page.locator("#readout")
        await expect(readout).to_have_text(re.compile(r"^\d\d:\d\d:\d\d, 5 s: \d+ turns, .* cached, .* pulled"))
        await page.keyboard.press("Escape")
        await expect(readout).to_have_text("")


async def test_what_is_opened_stays_open_when_the_page_is_refreshed(opened: Opening) -> None:
    async with telling() as told, opened(told.url, timers=False) as page:
        summary = page.locator("#engines summary")
        await summary.click()
        await summary.focus()
        told.status["engines"][5]["in_flight"] = 77
        await page.clock.run_for(2500)
        await expect(page.locator("#engines tbody tr").nth(5)).to_contain_text("77")
        assert await page.locator("#engines details").get_attribute("open") is not None
        assert await page.evaluate("document.activeElement.tagName") == "SUMMARY"


async def test_no_answer_is_said_and_what_is_shown_is_kept(opened: Opening) -> None:
    async with telling() as told, opened(told.url, timers=False, known="500 (Internal Server Error)") as page:
        rows = page.locator("#turns tbody tr")
        await expect(rows.first).to_be_visible()
        told.code = 500
        await page.clock.run_for(2500)
        notice = page.locator("#notice")
        await expect(notice).to_contain_text("The router does not answer: status 500. What is shown is of")
        assert await notice.get_attribute("role") == "status"
        await expect(rows.first).to_be_visible()
        told.code = 200
        await page.clock.run_for(20_000)
        await expect(notice).to_be_hidden()


async def test_nothing_is_asked_while_paused_or_hidden(opened: Opening) -> None:
    hide = "hidden => {{ Object.defineProperty(document, 'hidden', {{ value: {}, configurable: true }});"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }}"
    async with telling() as told, opened(told.url, timers=False) as page:
        await expect(page.locator("#turns tbody tr").first).to_be_visible()
        await page.click("#pause")
        before = told.num_asked
        await page.clock.run_for(30_000)
        await expect(page.locator("#freshness")).to_have_text("Paused 30 s ago")
        assert told.num_asked == before
        await page.click("#pause")
        await expect(page.locator("#freshness")).to_have_text("Updated 0 s ago")
        assert told.num_asked == before + 1
        await page.evaluate(hide.format("true"))
        await page.clock.run_for(30_000)
        assert told.num_asked == before + 1
        await page.evaluate(hide.format("false"))
        await expect(page.locator("#freshness")).to_have_text("Updated 0 s ago")
        assert told.num_asked == before + 2


async def test_turns_with_problems_alone(opened: Opening) -> None:
    async with telling() as told, opened(told.url) as page:
        rows = page.locator("#turns tbody tr")
        await expect(rows).to_have_count(20)
        await page.check("#problems")
        await expect(rows).to_have_count(5)
        await page.uncheck("#problems")
        await page.click("#more")
        await expect(rows).to_have_count(100)


async def test_what_engines_call_themselves_stays_text(opened: Opening) -> None:
    name = "<img src=x onerror=alert(1)>"
    async with telling() as told, opened(told.url) as page:
        await expect(page.locator("#engines tbody tr").first).to_be_visible()
        told.status["engines"][0] |= {"models": [name], "why": name, "state": "suspect"}
        told.status["plans"] = {name: 3}
        await expect(page.locator("#engines tbody tr").first).to_contain_text(name, timeout=10_000)
        await expect(page.locator("#plans")).to_contain_text(name.replace("_", " "))
        assert await page.locator("main img").count() == 0


async def test_a_router_that_has_just_begun(opened: Opening) -> None:
    nothing: dict[str, Any] = {
        "ready": False,
        "engines": [],
        "recent": {"bucket_seconds": 5, "buckets": [], "turns": []},
        **{name: {} for name in ("turns", "plans", "last_kv", "releases")},
        "lowered": [],
        "redis": {"state": "silent", "why": "ConnectionError", "pending": 0, "latency_ms": {}, "operations": {}},
    }
    async with telling(**nothing) as told, opened(told.url, width=360) as page:
        await expect(page.locator("#state")).to_have_text("Not ready")
        await expect(page.locator("#no-turns")).to_have_text("No turn has ended yet.")
        await expect(page.locator("#redis")).to_contain_text("ConnectionError")
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        assert await wrong_for(page) == []


async def test_names_of_any_length_fit(opened: Opening) -> None:
    async with telling() as told:
        for engine in told.status["engines"]:
            engine |= {"models": [256 * "m"], "why": "lists " + 256 * "m", "state": "suspect"}
        for turn in told.status["recent"]["turns"]:
            turn["model"] = 256 * "m"
        async with opened(told.url, width=360) as page:
            await expect(page.locator("#turns tbody tr").first).to_be_visible()
            assert await page.evaluate("document.documentElement.scrollWidth") == 360


async def test_works_below_another_path(opened: Opening) -> None:
    """As behind `kubectl proxy`, or an ingress for operators."""
    async with telling() as told:
        app = web.Application()
        app.add_subapp("/some/where", app_of(told))
        async with serving(app) as url, opened(f"{url}some/where/") as page:
            await expect(page.locator("#state")).to_have_text("Ready")
