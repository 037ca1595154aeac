from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

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
