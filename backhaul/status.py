"""`backhaul status`: what a router says of itself and its engines, once or again and again."""

from __future__ import annotations

import http.client
import json
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Annotated, Final, TextIO

from pydantic import Field, ValidationError

from backhaul.errors import CommandError
from backhaul.settings import Settings
from backhaul.status_view import Status, lines

PATH: Final = "/admin/status"
MAX_BYTES: Final = 16 << 20
CLEAR: Final = "\x1b[H\x1b[J"
"""To the first line, and nothing below."""


class StatusConfig(Settings):
    """Show what a router says of its engines: their state and load, what they can do, and what turns do without. Its
    admin port tells of the last turns too."""

    url: str = "http://127.0.0.1:8000"
    """Of the router, or of its admin port."""
    as_json: Annotated[bool, Field(alias="json")] = False
    """Print what it answers instead of a table; with --watch, each answer on a line."""
    watch: bool = False
    """Go on showing it, until Ctrl-C."""
    interval: Annotated[float, Field(ge=0.1)] = 2.0
    """Seconds between two looks, with --watch."""
    timeout: Annotated[float, Field(gt=0)] = 5.0
    """Seconds to wait for its answer."""


def run_status(config: StatusConfig) -> int:
    """Print it. Returns 0 if the router serves turns, 1 if not. Raises CommandError if it does not answer."""
    url = config.url.rstrip("/").removesuffix("/v1")
    if config.watch:
        return _watch(config, url)
    answer = fetch(url, config.timeout)
    status = _read(answer, url)
    if config.as_json:
        print(json.dumps(json.loads(answer), indent=2))
    else:
        for line in lines(status, url):
            print(_printable(line))
    return 0 if status.ready else 1


def _watch(config: StatusConfig, url: str) -> int:
    """A router that does not answer may be starting: it is asked again."""
    try:
        while True:
            try:
                answer = fetch(url, config.timeout)
                if config.as_json:
                    print(json.dumps(json.loads(answer)), flush=True)
                else:
                    _show(lines(_read(answer, url), url), sys.stdout)
            except CommandError as error:
                _show([f"{time.strftime('%H:%M:%S')} {error}"], sys.stderr if config.as_json else sys.stdout)
            time.sleep(config.interval)
    except KeyboardInterrupt:
        return 0


def _show(text: Iterable[str], stream: TextIO) -> None:
    """In place of what is on the terminal, as much as there is room for; elsewhere below what was there."""
    printable = [_printable(line) for line in text]
    if stream.isatty():
        width, height = shutil.get_terminal_size()
        printable = [CLEAR + printable[0][: width - 1], *(line[: width - 1] for line in printable[1 : height - 1])]
    print("\n".join(printable), file=stream, flush=True)


def _read(answer: bytes, url: str) -> Status:
    """Raises CommandError."""
    try:
        return Status.model_validate_json(answer)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = _printable(".".join(map(str, first["loc"]))) or "the answer"
        raise CommandError(f"--url {url}: no status of a router: {where}: {first['msg']}") from None


def fetch(url: str, timeout: float) -> bytes:
    """What the router answers. Raises CommandError."""
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--url {url}: not an address; give it as http://HOST:PORT")
    # No proxy: the router is asked, whatever the environment says of the outside.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url + PATH, timeout=timeout) as answer:
            body: bytes = answer.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            hint = "; is it a router, and not run with --status false?" if error.code == 404 else ""
            raise CommandError(f"--url {url}: answered with status {error.code}{hint}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = _printable(str(getattr(error, "reason", None) or error))  # it may quote what came instead of an answer
        raise CommandError(f"--url {url}: no answer: {why}") from None
    if len(body) > MAX_BYTES:
        raise CommandError(f"--url {url}: answered with more than {MAX_BYTES} bytes")
    return body


def _printable(text: str) -> str:
    """Names come from engines: nothing of them is for the terminal itself."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
