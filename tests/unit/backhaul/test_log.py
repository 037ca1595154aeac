from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from backhaul import log


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def test_console_lines_carry_their_fields() -> None:
    out = io.StringIO()
    log.setup("info", "console", stream=out)
    logging.getLogger("router.pool").info("engine is %s", "down", extra={"engine": "http://a"})
    logging.getLogger("router.pool").debug("not shown")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} INFO    router\.pool  engine is down engine=http://a\n", out.getvalue())


def test_what_others_say_begins_no_line_of_its_own() -> None:
    out = io.StringIO()
    log.setup("info", "console", stream=out)
    logging.getLogger("router.pool").info("engine", extra={"why": "lists a\n12:00:00.000 ERROR\x1b[31m"})
    assert out.getvalue().endswith("why=lists a\\n12:00:00.000 ERROR\\x1b[31m\n")


def test_json_lines_are_one_object_each() -> None:
    out = io.StringIO()
    log.setup("warning", "json", stream=out)
    try:
        raise ValueError("line\nbreak")
    except ValueError:
        logging.getLogger("engine").exception("failed", extra={"request_id": "r1"})
    line = json.loads(out.getvalue())
    assert out.getvalue().count("\n") == 1
    assert line["message"] == "failed"
    assert (line["level"], line["logger"], line["request_id"]) == ("error", "engine", "r1")
    assert "ValueError" in line["exception"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])


class Writes(io.StringIO):
    """Counts."""

    count = 0

    def write(self, text: str) -> int:
        self.count += 1
        return super().write(text)


async def test_lines_of_a_moment_are_written_in_one_go_and_in_their_order() -> None:
    out = Writes()
    log.setup("info", "console", stream=out, gather=True)
    for number in range(100):
        logging.getLogger("router.turn").info("turn", extra={"number": number})
    assert out.getvalue() == ""
    await asyncio.sleep(3 * log.GATHER_SECONDS)
    assert [line.rpartition("=")[2] for line in out.getvalue().splitlines()] == [str(n) for n in range(100)]
    assert out.count == 1


async def test_warnings_and_many_lines_do_not_wait() -> None:
    out = Writes()
    log.setup("info", "console", stream=out, gather=True)
    logging.getLogger("router").info("before")
    logging.getLogger("router").warning("now")
    assert [line.split("  ")[-1] for line in out.getvalue().splitlines()] == ["before", "now"]
    for _ in range(log.MOST_GATHERED):
        logging.getLogger("router").info("more")
    assert len(out.getvalue().splitlines()) == 2 + log.MOST_GATHERED


async def test_other_threads_and_the_end_of_the_program_leave_nothing_unwritten() -> None:
    out = Writes()
    log.setup("info", "console", stream=out, gather=True)
    logging.getLogger("router").info("here")
    await asyncio.to_thread(logging.getLogger("router").info, "there")
    assert len(out.getvalue().splitlines()) == 2
    logging.getLogger("router").info("last")
    logging.shutdown()
    assert out.getvalue().splitlines()[-1].endswith("last")


def test_loop_that_ended_before_it_could_write_is_no_hindrance() -> None:
    out = Writes()
    log.setup("info", "console", stream=out, gather=True)

    async def say(text: str) -> None:
        logging.getLogger("router").info(text)

    asyncio.run(say("first"))

    async def later() -> None:
        await say("second")
        await asyncio.sleep(2 * log.GATHER_SECONDS)

    asyncio.run(later())
    assert len(out.getvalue().splitlines()) == 2


@pytest.mark.parametrize(
    ("error", "is_told"), [(BadHttpMessage("Bearer secret"), False), (RuntimeError("a bug"), True)]
)
def test_what_is_no_http_is_not_quoted(error: Exception, is_told: bool) -> None:
    out = io.StringIO()
    log.setup("info", "console", stream=out)
    logging.getLogger("aiohttp.server").error("Error handling request", exc_info=error)
    assert bool(out.getvalue()) is is_told
