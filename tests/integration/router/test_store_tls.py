"""A store behind TLS, on both event loops: the router runs on uvloop, whose TLS is its own."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
import uvloop

from router.metrics import Metrics
from tests.redis_stub import forwarder, sentinel
from tests.store_parts import count, offer, record, store_at
from tests.valkey import valkey

TIMEOUT = 0.1
MARGIN = 0.5
"""What a busy machine may add."""

NewLoop = Callable[[], asyncio.AbstractEventLoop]
both_loops = pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


@dataclass(frozen=True)
class Certificates:
    ca: trustme.CA
    ca_file: Path
    other_ca_file: Path
    client_file: Path
    """Certificate and key."""

    def context(self, host: str = "127.0.0.1", *, asks: bool = False) -> ssl.SSLContext:
        """Of a server with a certificate for this host, which may ask for the client's."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert(host).configure_cert(context)
        if asks:
            self.ca.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    ca = trustme.CA()
    made = Certificates(ca, folder / "ca.pem", folder / "other.pem", folder / "client.pem")
    ca.cert_pem.write_to_path(str(made.ca_file))
    trustme.CA().cert_pem.write_to_path(str(made.other_ca_file))
    ca.issue_cert("router.example").private_key_and_cert_chain_pem.write_to_path(str(made.client_file))
    return made


@both_loops
@pytest.mark.parametrize(
    ("host", "asks", "options"),
    [
        ("127.0.0.1", False, "ssl_ca_certs={ca}"),
        ("127.0.0.1", True, "ssl_ca_certs={ca}&ssl_certfile={client}&ssl_keyfile={client}"),
        ("other.example", False, "ssl_ca_certs={ca}&ssl_check_hostname=false"),
        ("other.example", False, "ssl_cert_reqs=none"),
    ],
)
def test_tls(
    new_loop: NewLoop, tmp_path: Path, certificates: Certificates, host: str, asks: bool, options: str
) -> None:
    query = options.format(ca=certificates.ca_file, client=certificates.client_file)
    large = record(ids=tuple(range(300_000)))

    async def work() -> None:
        with valkey(tmp_path, None, "--requirepass", "secret") as server:
            async with forwarder(server.port, certificates.context(host, asks=asks)) as address:
                url = address.url.replace("redis://", "rediss://:secret@") + "?" + query
                async with store_at(url) as store:
                    assert (await store.save("k", large, offer())).kept
                    found = await asyncio.gather(*(store.claim("k") for _ in range(8)))
                    assert [one.record for one in found if one is not None] == [large] * 8

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work())


@both_loops
@pytest.mark.parametrize(
    ("host", "asks", "options"),
    [
        ("127.0.0.1", False, ""),
        ("127.0.0.1", False, "ssl_ca_certs={other}"),
        ("127.0.0.1", True, "ssl_ca_certs={ca}"),
        ("other.example", False, "ssl_ca_certs={ca}"),
    ],
)
def test_certificate_that_does_not_do_is_a_miss_in_time(
    new_loop: NewLoop, tmp_path: Path, certificates: Certificates, host: str, asks: bool, options: str
) -> None:
    query = options.format(ca=certificates.ca_file, other=certificates.other_ca_file)
    metrics = Metrics(["chat"])

    async def work() -> None:
        with valkey(tmp_path) as server:
            async with forwarder(server.port, certificates.context(host, asks=asks)) as address:
                url = address.url.replace("redis://", "rediss://") + "?" + query
                async with store_at(url, seconds=TIMEOUT, metrics=metrics) as store:
                    for _ in range(6):
                        started = time.monotonic()
                        assert await store.claim("k") is None
                        assert time.monotonic() - started < TIMEOUT + MARGIN

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work())
    assert count(metrics, "claim", "error") + count(metrics, "claim", "timeout") >= 3
    assert count(metrics, "claim", "miss") == 0


async def test_tls_to_sentinels_too(tmp_path: Path, certificates: Certificates) -> None:
    with valkey(tmp_path) as server:
        async with forwarder(server.port, certificates.context()) as data:
            port = int(data.url.rpartition(":")[2].removesuffix("/0"))
            async with sentinel(lambda: port, certificates.context()) as knows:
                url = f"rediss+sentinel://{knows}/records?ssl_ca_certs={certificates.ca_file}"
                async with store_at(url + "&sentinel_ssl=true") as store:
                    assert (await store.save("k", record(), offer())).kept
                async with store_at(url) as store:
                    assert not (await store.save("k", record(), offer())).kept
