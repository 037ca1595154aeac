"""Pictures by URL: only from where the operator lets, and never from where only this machine can reach."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from engine.media.address import is_odd_number, may_connect, networks
from engine.media.errors import MediaError
from engine.media.fetch import Fetcher, decode_data_url

LOOPBACK = networks(["127.0.0.0/8"])


class Names:
    """A resolver with records to change, which writes down what it is asked."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@asynccontextmanager
async def serving(handler: object) -> AsyncIterator[TestServer]:
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)  # type: ignore[arg-type]
    async with TestServer(app, host="127.0.0.1") as server:
        yield server


async def picture(request: web.Request) -> web.Response:
    return web.Response(body=b"bytes of " + request.path.encode(), content_type="image/png")


def fetcher(server: TestServer, names: Names, **changes: object) -> Fetcher:
    settings = {"networks": LOOPBACK, "max_bytes": 1000, "timeout": 5.0, "resolve": names} | changes
    return Fetcher({f"pictures.test:{server.port}"}, **settings)  # type: ignore[arg-type]


async def test_a_picture_comes_from_an_allowed_host() -> None:
    async with serving(picture) as server:
        names = Names(["127.0.0.1"])
        url = f"http://pictures.test:{server.port}/a.png?key=secret#part"
        assert await fetcher(server, names).fetch(url) == b"bytes of /a.png"
        assert names.asked == ["pictures.test"]


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test/a.png",
        "http://pictures.test/a.png",
        "http://pictures.test.evil.test:{port}/",
        "http://evil.test:{port}/#pictures.test:{port}",
        "http://pictures.test:{port}@evil.test/",
        "http://user@pictures.test:{port}/",
        "http://user:secret@pictures.test:{port}/",
        "http://127.0.0.1:{port}/",
        "http://localhost:{port}/",
        "http:///a.png",
        "http://",
        "http://[::1",
        "ftp://pictures.test:{port}/a.png",
        "file:///etc/passwd",
        "FILE:/etc/passwd",
        "gopher://pictures.test:{port}/",
        "/etc/passwd",
        "javascript:1",
        "pictures.test",
        "http://pictures.test:99999/",
        "",
        "http://pictures.test:{port}/" + "a" * 5000,
    ],
)
async def test_no_other_url_is_asked_for(url: str) -> None:
    async with serving(picture) as server:
        names = Names(["127.0.0.1"])
        with pytest.raises(MediaError):
            await fetcher(server, names).fetch(url.replace("{port}", str(server.port)))
        assert names.asked == []


async def test_nothing_is_fetched_unless_a_host_is_allowed() -> None:
    with pytest.raises(MediaError, match="data URL"):
        await Fetcher((), (), 1000, 5.0, Names(["93.184.216.34"])).fetch("https://example.com/a.png")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.9.9.9",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.169.254",
        "192.0.0.192",
        "168.63.129.16",
        "198.18.0.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:0a01:0203",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::7f00:1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::",
        "2001:0:7f00:1::",
        "2001:db8::1",
        "not an address",
        "",
    ],
)
async def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not may_connect(address, ())
    names = Names([address])
    with pytest.raises(MediaError, match="does not connect to"):
        await Fetcher({"pictures.test"}, (), 1000, 5.0, names).fetch("http://pictures.test/a.png")
    assert names.asked == ["pictures.test"]


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "2606:2800:220:1::", "64:ff9b::5db8:d822", "::ffff:93.184.216.34"]
)
def test_public_addresses_may_be_connected_to(address: str) -> None:
    assert may_connect(address, ())


def test_networks_are_opened_one_by_one() -> None:
    inside = networks(["10.0.0.0/8", "fd00::/8"])
    assert may_connect("10.1.2.3", inside)
    assert may_connect("::ffff:10.1.2.3", inside)
    assert may_connect("fd00::5", inside)
    assert not may_connect("169.254.169.254", inside)
    with pytest.raises(ValueError, match=r"'10\.0\.0\.1/8' is no network"):
        networks(["10.0.0.1/8"])


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0x7f.1", "127.0.0.01", "127.0.0.1."]
)
async def test_hosts_that_are_numbers_in_disguise_are_refused(host: str) -> None:
    assert is_odd_number(host)
    names = Names(["93.184.216.34"])
    with pytest.raises(MediaError):
        await Fetcher({"*", host}, (), 1000, 5.0, names).fetch(f"http://{host}/a.png")
    assert names.asked == []


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "10.0.0.1"])
async def test_any_host_is_still_none_within(host: str) -> None:
    with pytest.raises(MediaError, match="does not connect to"):
        await Fetcher({"*"}, (), 1000, 5.0, Names(["93.184.216.34"])).fetch(f"http://{host}/a.png")


@pytest.mark.parametrize("host", ["example.com", "1.2.3.4", "a1", "9a.test", "[2606:2800:220:1::]"])
def test_hosts_and_addresses_as_they_are_written_are_no_disguise(host: str) -> None:
    assert not is_odd_number(host.strip("[]"))


async def test_one_forbidden_address_among_several_is_enough_to_refuse() -> None:
    names = Names(["93.184.216.34", "127.0.0.1"])
    with pytest.raises(MediaError, match="does not connect to"):
        await Fetcher({"pictures.test"}, (), 1000, 5.0, names).fetch("http://pictures.test/")


async def test_what_was_looked_up_is_what_is_connected_to() -> None:
    """A name that resolves to something else the next time (DNS rebinding) is looked up once, and not by others."""
    hits: list[str] = []

    async def count(request: web.Request) -> web.Response:
        hits.append(request.headers["Host"])
        return await picture(request)

    async with serving(count) as server:
        names = Names(["127.0.0.1"], ["127.0.0.2"])
        one = fetcher(server, names, networks=networks(["127.0.0.1/32"]))
        url = f"http://pictures.test:{server.port}/"
        assert await one.fetch(url)
        assert (len(names.asked), hits) == (1, [f"pictures.test:{server.port}"])
        with pytest.raises(MediaError, match="does not connect to"):  # nor is the first connection used again
            await one.fetch(url)
        assert len(hits) == 1


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("http://127.0.0.1:{port}/secret", "another host"),
        ("http://other.test/", "another host"),
        ("//other.test/a", "another host"),
        ("https://pictures.test:{port}/", "another host"),
        ("http://pictures.test/", "another host"),
        ("file:///etc/passwd", "another host"),
        ("http://user@pictures.test:{port}/x", "without a user"),
        ("", "another host"),
        ("/again", "more than 3 times"),
    ],
)
async def test_redirects_lead_nowhere_else(location: str, message: str) -> None:
    asked: list[str] = []

    async def away(request: web.Request) -> web.Response:
        asked.append(request.path)
        to = location.replace("{port}", request.headers["Host"].partition(":")[2])
        return web.Response(status=302, headers={"Location": to})

    async with serving(away) as server:
        with pytest.raises(MediaError, match=message):
            await fetcher(server, Names(["127.0.0.1"])).fetch(f"http://pictures.test:{server.port}/start")
    assert set(asked) <= {"/start", "/again"}


async def test_a_redirect_on_the_same_host_is_followed() -> None:
    async def away(request: web.Request) -> web.Response:
        if request.path == "/start":
            return web.Response(status=307, headers={"Location": "there.png"})
        return await picture(request)

    async with serving(away) as server:
        url = f"http://pictures.test:{server.port}/start"
        assert await fetcher(server, Names(["127.0.0.1"])).fetch(url) == b"bytes of /there.png"


async def test_answers_that_are_no_picture_of_the_right_size_are_refused() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/html":
                return web.Response(text="<html>", content_type="text/html")
            case "/missing":
                return web.Response(status=404)
            case "/large":
                return web.Response(body=bytes(1001), content_type="image/png")
            case "/zipped":
                return web.Response(body=b"x", content_type="image/png", headers={"Content-Encoding": "gzip"})
            case "/exact":
                return web.Response(body=bytes(1000), content_type="application/octet-stream")
        response = web.StreamResponse(headers={"Content-Type": "image/png"})  # /endless says no length
        await response.prepare(request)
        while True:
            await response.write(bytes(600))

    async with serving(answer) as server:
        one = fetcher(server, Names(["127.0.0.1"]))
        for path, message in (
            ("html", "text/html"),
            ("missing", "answers 404"),
            ("large", "more than 1000 bytes"),
            ("zipped", "compressed"),
            ("endless", "more than 1000 bytes"),
        ):
            with pytest.raises(MediaError, match=message):
                await one.fetch(f"http://pictures.test:{server.port}/{path}")
        assert len(await one.fetch(f"http://pictures.test:{server.port}/exact")) == 1000


async def test_a_host_that_is_silent_or_gone_costs_a_limited_time() -> None:
    released = asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    async with serving(silent) as server:
        one = fetcher(server, Names(["127.0.0.1"]), timeout=0.05)
        with pytest.raises(MediaError, match=r"longer than 0\.05 seconds"):
            await one.fetch(f"http://pictures.test:{server.port}/")
        released.set()
        port = server.port
    gone = Fetcher({f"pictures.test:{port}"}, LOOPBACK, 1000, 5.0, Names(["127.0.0.1"]))
    with pytest.raises(MediaError, match="cannot be reached"):
        await gone.fetch(f"http://pictures.test:{port}/")


async def test_errors_do_not_repeat_what_may_be_secret() -> None:
    async def missing(request: web.Request) -> web.Response:
        return web.Response(status=403)

    async with serving(missing) as server:
        with pytest.raises(MediaError) as raised:
            await fetcher(server, Names(["127.0.0.1"])).fetch(f"http://pictures.test:{server.port}/a?signature=secret")
    assert "secret" not in str(raised.value)


def test_data_urls_are_read() -> None:
    text = base64.b64encode(b"bytes").decode()
    for head in ("data:image/png;base64", "DATA:image/jpeg;BASE64", "data:image/svg+xml;charset=utf-8;base64"):
        assert decode_data_url(f"{head},{text}", max_bytes=5) == b"bytes"


@pytest.mark.parametrize(
    "url",
    [
        "data:,",
        "data:image/png,abc",
        "data:image/png;base64",
        "data:text/html;base64,AAAA",
        "data:;base64,AAAA",
        "data:image/png;base64,%%%%",
        "data:image/png;base64,AAA",
        "data:image/png;base64,AA AA",
        "data:image/png;base64,\u0130AAA",
        "data:image/png;base64," + "A" * 16,
    ],
)
def test_data_urls_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(MediaError):
        decode_data_url(url, max_bytes=8)
