"""A DNS server, over UDP and TCP, with records to change and hooks for what goes wrong with real ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, cast

import dns.flags
import dns.message
import dns.rcode
import dns.rrset

Fault = Literal["servfail", "refused", "silent"]


class DNSStub:
    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        """Texts of records by name and type, such as ("engines.test.", "A"). A name without any is NXDOMAIN."""
        self.beside: list[tuple[str, str, str]] = []
        """Name, type and text of what is told along with every answer."""
        self.faults: dict[tuple[str, str], Fault] = {}
        """By name and type, either of which may be "*"."""
        self.ttls: dict[tuple[str, str], int] = {}
        """By name and type; else 0."""
        self.truncates = False
        """Whether answers over UDP are cut, as long ones are."""
        self.asked: list[tuple[str, str, str]] = []
        """Name, type and transport."""
        self.port = 0
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def server(self) -> str:
        return f"127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[DNSStub]:
        udp, datagrams, tcp = await self._listen()
        try:
            yield self
        finally:
            udp.close()
            tcp.close()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await tcp.wait_closed()
            await datagrams.closed.wait()

    async def _listen(self) -> tuple[asyncio.DatagramTransport, _Datagrams, asyncio.Server]:
        """On one port of both kinds; one that is free for UDP may be taken for TCP."""
        loop = asyncio.get_running_loop()
        while True:
            udp, datagrams = await loop.create_datagram_endpoint(lambda: _Datagrams(self), ("127.0.0.1", 0))
            self.port = udp.get_extra_info("sockname")[1]
            try:
                return udp, datagrams, await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            except OSError:
                udp.close()
                await datagrams.closed.wait()

    async def has_been_asked(self, times: int, name: str = "", transport: str = "") -> None:
        def count() -> int:
            return sum(name in ("", one[0]) and transport in ("", one[2]) for one in self.asked)

        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: count() >= times)

    def answer(self, wire: bytes, transport: str) -> bytes | None:
        query = dns.message.from_wire(wire)
        question = query.question[0]
        name, kind = question.name.to_text(), question.rdtype.name
        self.asked.append((name, kind, transport))
        self._start(self._tell())
        response = dns.message.make_response(query)
        fault = next((self.faults[n, k] for n in (name, "*") for k in (kind, "*") if (n, k) in self.faults), None)
        if fault == "silent":
            return None
        if fault is not None:
            response.set_rcode(dns.rcode.from_text(fault.upper()))
        elif transport == "udp" and self.truncates:
            response.flags |= dns.flags.TC
        elif texts := self.records.get((name, kind)):
            response.answer = [dns.rrset.from_text_list(name, self.ttls.get((name, kind), 0), "IN", kind, texts)]
            response.additional = [dns.rrset.from_text(n, 0, "IN", k, text) for n, k, text in self.beside]
        elif not any(known == name for known, _ in self.records):
            response.set_rcode(dns.rcode.NXDOMAIN)
        return response.to_wire(max_size=65535)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _start(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await reader.readexactly(2), "big")
                if (answer := self.answer(await reader.readexactly(size), "tcp")) is not None:
                    writer.write(len(answer).to_bytes(2, "big") + answer)
                    await writer.drain()
        writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, stub: DNSStub) -> None:
        self._stub = stub
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)  # uvloop's is not derived from it

    def datagram_received(self, data: bytes, address: tuple[str | object, int]) -> None:
        if (answer := self._stub.answer(data, "udp")) is not None:
            self._transport.sendto(answer, address)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()
