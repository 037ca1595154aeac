"""Sources of DNS names, and a server that plays every fault."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
import uvloop

from router.discovery import names
from router.discovery.names import LEAST_TTL, kept_seconds
from router.discovery.parse import parse
from router.discovery.source import Problems, Source
from tests.dns_stub import DNSStub, Fault
from tests.unit.router.discovery.listening import following

NAME, SERVICE = "engines.test.", "_http._tcp.engines.test."
A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
V6 = "http://[fd00::1]:8000"


@pytest.fixture
async def stub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DNSStub]:
    monkeypatch.setattr(names, "TRY_SECONDS", 0.1)
    monkeypatch.setattr(names, "ANSWER_SECONDS", 0.2)
    async with DNSStub().running() as stub:
        yield stub


def source(text: str, stub: DNSStub, interval: str = "0.02") -> Source:
    found = parse(f"{text}?interval={interval}&server={stub.server}")
    assert not isinstance(found, str)
    return found


def name(stub: DNSStub) -> Source:
    return source("dns://engines.test:8000", stub)


async def test_each_address_of_both_families_is_an_engine(stub: DNSStub) -> None:
    stub.records = {(NAME, "A"): ["10.0.0.2", "10.0.0.1"], (NAME, "AAAA"): ["fd00::1"]}
    async with following(name(stub)) as heard:
        await heard.until([A, B, V6])
        assert {one.incarnation for one in heard.lists[0]} == {""}


async def test_engines_join_and_leave_with_their_addresses(stub: DNSStub) -> None:
    stub.records[NAME, "A"] = ["10.0.0.1"]
    async with following(name(stub)) as heard:
        await heard.until([A])
        stub.records[NAME, "A"] = ["10.0.0.2", "10.0.0.1"]
        await heard.until([A, B])
        stub.records[NAME, "A"] = ["10.0.0.2"]
        await heard.until([B])
        await stub.has_been_asked(len(stub.asked) + 6)
        assert len(heard.lists) == 3, "what makes no difference is not told"


@pytest.mark.parametrize("rest", [{}, {(NAME, "TXT"): ["other"]}], ids=["no such name", "no addresses"])
async def test_no_addresses_are_an_empty_list(stub: DNSStub, rest: dict[tuple[str, str], list[str]]) -> None:
    stub.records = dict(rest)
    async with following(name(stub)) as heard:
        await heard.until([])
        stub.records[NAME, "A"] = ["10.0.0.1"]
        await heard.until([A])
        stub.records = dict(rest)
        await heard.until([])


@pytest.mark.parametrize("fault", ["servfail", "refused", "silent"])
async def test_the_last_list_stands_while_nobody_answers(
    stub: DNSStub, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.discovery")
    stub.records[NAME, "A"] = ["10.0.0.1"]
    async with following(name(stub)) as heard:
        await heard.until([A])
        stub.faults["*", "*"] = fault
        stub.records[NAME, "A"] = ["10.0.0.2"]
        await stub.has_been_asked(len(stub.asked) + 8)
        assert heard.urls == [A]
        stub.faults.clear()
        await heard.until([B])
    assert [vars(record)["state"] for record in caplog.records] == ["failing", "works"], "once, not per try"
    assert "engines.test" in vars(caplog.records[0])["why"]


async def test_nothing_is_told_before_anybody_answers(stub: DNSStub) -> None:
    stub.faults["*", "*"] = "servfail"
    async with following(name(stub)) as heard:
        await stub.has_been_asked(8)
        assert heard.lists == []
        stub.faults.clear()
        await heard.until([])


async def test_a_server_that_fails_for_one_family_is_used_for_the_other(stub: DNSStub) -> None:
    stub.records[NAME, "A"] = ["10.0.0.1"]
    stub.faults["*", "AAAA"] = "servfail"
    async with following(name(stub)) as heard:
        await heard.until([A])
        stub.records[NAME, "A"] = ["10.0.0.2"]
        await heard.until([B])


async def test_a_long_answer_comes_over_tcp(stub: DNSStub) -> None:
    stub.records[NAME, "A"] = [f"10.0.1.{number}" for number in range(250)]
    stub.truncates = True
    async with following(name(stub)) as heard:
        await heard.until(sorted(f"http://10.0.1.{number}:8000" for number in range(250)))
        assert ("engines.test.", "A", "tcp") in stub.asked


@pytest.mark.parametrize(
    ("ttl", "seconds"),
    [(None, 7.0), (0.0, LEAST_TTL), (3.0, 3.0), (600.0, 7.0)],
    ids=["none", "none left", "some", "long"],
)
def test_an_answer_is_kept_for_its_ttl_but_not_beyond_the_interval(ttl: float | None, seconds: float) -> None:
    assert kept_seconds(ttl, interval=7.0) == seconds


async def test_the_ttl_is_the_shortest_of_all_answers(stub: DNSStub) -> None:
    stub.records = {(NAME, "A"): ["10.0.0.1"], (NAME, "AAAA"): ["fd00::1"]}
    stub.ttls = {(NAME, "A"): 30, (NAME, "AAAA"): 20}
    asked = names.Names(names.Server("127.0.0.1", stub.port), Problems("dns://engines.test:8000"))
    asked.begin()
    assert asked.ttl is None
    await asked.addresses("engines.test")
    assert asked.ttl == 20
    stub.faults["*", "*"] = "servfail"
    asked.begin()
    assert await asked.addresses("engines.test") == ["10.0.0.1", "fd00::1"]
    assert asked.ttl is None


async def test_services_records_tell_ports_and_names_with_addresses(stub: DNSStub) -> None:
    stub.records = {
        (SERVICE, "SRV"): ["0 50 8001 a.test.", "10 0 8002 b.test.", "0 0 8003 gone.test.", "0 0 0 .", "0 0 0 a.test."],
        ("a.test.", "A"): ["10.0.0.1"],
        ("b.test.", "A"): ["10.0.0.2"],
        ("b.test.", "AAAA"): ["fd00::2"],
    }
    async with following(source("srv://_http._tcp.engines.test", stub)) as heard:
        await heard.until(["http://10.0.0.1:8001", "http://10.0.0.2:8002", "http://[fd00::2]:8002"])
        stub.records[SERVICE, "SRV"] = ["0 50 8009 a.test."]
        await heard.until(["http://10.0.0.1:8009"])
        del stub.records[SERVICE, "SRV"]
        await heard.until([])


async def test_addresses_beside_services_records_are_not_asked_for(stub: DNSStub) -> None:
    stub.records[SERVICE, "SRV"] = ["0 0 8001 a.test."]
    stub.beside = [("a.test.", "A", "10.0.0.1")]
    async with following(source("srv://_http._tcp.engines.test", stub)) as heard:
        await heard.until(["http://10.0.0.1:8001"])
    assert {kind for _, kind, _ in stub.asked} == {"SRV"}


async def test_a_target_that_cannot_be_asked_for_is_where_it_was(stub: DNSStub) -> None:
    stub.records = {
        (SERVICE, "SRV"): ["0 0 8001 a.test.", "0 0 8001 b.test."],
        ("a.test.", "A"): ["10.0.0.1"],
        ("b.test.", "A"): ["10.0.0.2"],
    }
    async with following(source("srv://_http._tcp.engines.test", stub)) as heard:
        await heard.until(["http://10.0.0.1:8001", "http://10.0.0.2:8001"])
        stub.faults["a.test.", "*"] = "servfail"
        stub.records["b.test.", "A"] = ["10.0.0.3"]
        await heard.until(["http://10.0.0.1:8001", "http://10.0.0.3:8001"])


def test_names_are_followed_on_the_routers_loop() -> None:
    async def work() -> None:
        async with DNSStub().running() as stub:
            stub.records[NAME, "A"] = ["10.0.0.1"]
            stub.truncates = True
            async with following(name(stub)) as heard:
                await heard.until([A])

    uvloop.run(work())
