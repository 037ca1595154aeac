"""A browser that several tests share, and a page that fails them if anything is wrong in its console."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from tests.page.browser import FLAGS, Unavailable, find_chromium

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "build/page"
"""Where screenshots are kept."""

expect.set_options(timeout=20_000)  # the machine may have other work

Opening = Callable[..., AbstractAsyncContextManager[Page]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    try:
        chromium = find_chromium()
    except Unavailable as why:
        pytest.skip(str(why))
    async with async_playwright() as playwright:
        found = await playwright.chromium.launch(
            executable_path=chromium.path, args=list(FLAGS), env={**chromium.env} if chromium.env else None
        )
        yield found
        await found.close()


@pytest.fixture
def opened(browser: Browser) -> Opening:
    """Opens a page of a size in a colour scheme. Its console has to stay empty, but for what `known` says."""

    @asynccontextmanager
    async def opening(
        url: str, *, width: int = 1440, height: int = 900, scheme: str = "light", known: str = "\0", timers: bool = True
    ) -> AsyncIterator[Page]:
        context = await browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
            reduced_motion="reduce",
        )
        page = await context.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"uncaught: {error}"))
        if not timers:
            await page.clock.install()
        await page.goto(url)
        yield page
        await context.close()
        assert [line for line in said if known not in line] == []

    return opening
