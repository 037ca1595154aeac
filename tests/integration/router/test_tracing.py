"""Traces of turns: what a collector gets over HTTP, and what engines are told."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from router import otel
from router.app import check_settings
from router.config import RouterConfig
from router.report import Report
from tests.router_harness import CHAT, NOBODY, router_over
from tests.stub_engine import StubEngine

NO_REDIS = "redis://127.0.0.1:1/0"
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Collector:
    url: str = ""
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)
    answers: bool = True

    async def take(self, request: web.Request) -> web.Response:
        if not self.answers:
            await asyncio.sleep(3600)
        message = ExportTraceServiceRequest.FromString(await request.read())
        for one in message.resource_spans:
            self.resources.append({each.key: each.value.string_value for each in one.resource.attributes})
            for scope in one.scope_spans:
                self.spans += scope.spans
        return web.Response(content_type="application/x-protobuf")

    def named(self, name: str) -> Span:
        (span,) = [one for one in self.spans if one.name == name]
        return span

    def below(self, parent: Span) -> list[str]:
        """Names of its children, in the order in which they began."""
        children = [one for one in self.spans if one.parent_span_id == parent.span_id]
        return [one.name for one in sorted(children, key=lambda one: one.start_time_unix_nano)]


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    try:
        yield collector
    finally:
        await runner.cleanup()


def attributes(span: Any) -> dict[str, Any]:
    told = {}
    for one in span.attributes:
        value = one.value
        told[one.key] = getattr(value, value.WhichOneof("value"))
    return told


def places(engine: StubEngine) -> list[tuple[str, str, bool]]:
    """What it was told: the trace, the span that its own belong to, whether they are wanted."""
    told = [request.headers["traceparent"].split("-") for request in engine.seen]
    return [(trace_id, span_id, bool(int(flags, 16) & 1)) for _, trace_id, span_id, flags in told]


async def test_a_turn_is_one_span_with_one_per_phase(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.turn")
    async with (
        collecting() as collector,
        StubEngine("prefill", tokenizes=True).running() as p,
        StubEngine("decode", tokenizes=True).running() as d,
    ):
        async with router_over([p], [d], redis_url, trace_endpoint=collector.url) as front:
            answer = await front.post(CHAT, headers={"X-Request-Id": "the-request"})
            assert answer.status == 200
        turn = collector.named("turn chat")
        assert collector.below(turn) == ["read", "recall", "prefill", "decode", "remember"]
        told = attributes(turn)
        legs = [collector.named("prefill"), collector.named("decode")]
    assert not turn.parent_span_id
    assert {one.trace_id for one in collector.spans} == {turn.trace_id}
    assert turn.kind == Span.SPAN_KIND_SERVER
    assert told["backhaul.plan"] == "new"
    assert told["backhaul.kv"] == "no_record"
    assert told["backhaul.engine.prefill"] == p.url
    assert told["backhaul.engine.decode"] == d.url
    assert told["backhaul.outcome"] == "ok"
    assert told["http.response.status_code"] == 200
    assert told["backhaul.tokens.prompt"] > 0
    assert [attributes(leg)["server.address"] for leg in legs] == [p.url, d.url]
    assert [leg.kind for leg in legs] == [Span.SPAN_KIND_CLIENT] * 2
    trace_id = turn.trace_id.hex()
    assert places(p) == [(trace_id, legs[0].span_id.hex(), True)]
    assert places(d) == [(trace_id, legs[1].span_id.hex(), True)]
    assert collector.resources[0]["service.name"] == "backhaul-router"
    (line,) = [record for record in caplog.records if record.getMessage() == "turn"]
    assert vars(line)["fields"]["trace_id"] == trace_id
    assert vars(line)["fields"]["request_id"] == "the-request" == told["backhaul.request_id"]


async def test_a_streamed_second_turn_tells_its_comparison(redis_url: str) -> None:
    async with (
        collecting() as collector,
        StubEngine("prefill", tokenizes=True).running() as p,
        StubEngine("decode", tokenizes=True).running() as d,
    ):
        async with router_over([p], [d], redis_url, trace_endpoint=collector.url) as front:
            first = await front.post(CHAT)
            message = first.json["choices"][0]["message"]
            messages = [*CHAT["messages"], message, {"role": "user", "content": "and then?"}]
            answer = await front.post({**CHAT, "messages": messages, "stream": True})
            assert answer.status == 200
        turns = sorted(
            (one for one in collector.spans if one.name == "turn chat"), key=lambda one: one.start_time_unix_nano
        )
    phases = collector.below(turns[1])
    assert phases[:4] == ["read", "recall", "tokenize", "recall"]
    assert phases[-2:] == ["decode", "remember"]
    told = attributes(turns[1])
    assert told["backhaul.turn"] == 2
    assert told["backhaul.first_byte_ms"] > 0


async def test_a_clients_trace_goes_on_and_its_place_in_it_is_not_the_engines() -> None:
    headers = {"traceparent": CLIENT, "tracestate": "vendor=1"}
    async with (
        collecting() as collector,
        StubEngine("prefill").running() as p,
        StubEngine("decode").running() as d,
    ):
        async with router_over([p], [d], NO_REDIS, trace_endpoint=collector.url, trace_sample=0.0) as front:
            assert (await front.post(CHAT, headers=headers)).status == 200
        turn = collector.named("turn chat")
    _, trace_id, span_id, _ = CLIENT.split("-")
    assert (turn.trace_id.hex(), turn.parent_span_id.hex()) == (trace_id, span_id)
    assert places(p) == [(trace_id, collector.named("prefill").span_id.hex(), True)]
    assert p.seen[0].headers.getall("tracestate") == ["vendor=1"]


async def test_what_is_not_sampled_is_not_sent_and_engines_are_told_so() -> None:
    async with (
        collecting() as collector,
        StubEngine("prefill").running() as p,
        StubEngine("decode").running() as d,
        router_over([p], [d], NO_REDIS, trace_endpoint=collector.url, trace_sample=0.0) as front,
    ):
        assert (await front.post(CHAT)).status == 200
        not_sampled = {"traceparent": CLIENT[:-2] + "00"}
        assert (await front.post(CHAT, headers=not_sampled)).status == 200
        assert front.router.tracing is not None
        await front.router.tracing.close()
        assert collector.spans == []
    first, second = places(p)
    assert not first[2]
    assert (second[0], second[2]) == (CLIENT.split("-")[1], False)


async def test_retries_are_events_and_failures_errors() -> None:
    async def fails(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no", "type": "x", "code": 500}}, status=500)

    async with (
        collecting() as collector,
        StubEngine("prefill").running() as p,
        StubEngine("prefill").running() as q,
        StubEngine("decode").running() as d,
    ):
        async with router_over([p, q], [d], NO_REDIS, trace_endpoint=collector.url) as front:
            p.scripts.append(fails)
            q.scripts.append(fails)
            assert (await front.post(CHAT)).status == 500
        turn = collector.named("turn chat")
    (event,) = turn.events
    told = attributes(event)
    assert (event.name, told["backhaul.role"], told["backhaul.fault"]) == ("retry", "prefill", "status")
    assert turn.status.code == Status.STATUS_CODE_ERROR
    assert attributes(turn)["backhaul.outcome"] == "failed"
    prefills = [one for one in collector.spans if one.name == "prefill"]
    assert [one.status.code for one in prefills] == [Status.STATUS_CODE_ERROR, Status.STATUS_CODE_UNSET]


async def test_a_refused_request_is_a_span_too() -> None:
    async with collecting() as collector, StubEngine("decode").running() as d:
        async with router_over([], [d], NO_REDIS, trace_endpoint=collector.url) as front:
            assert (await front.post(b"{", headers={"traceparent": "nonsense"})).status == 400
        turn = collector.named("turn chat")
    assert attributes(turn)["http.response.status_code"] == 400
    assert turn.status.code == Status.STATUS_CODE_UNSET
    assert collector.below(turn) == ["read"]


async def test_no_collector_is_no_matter_for_turns_or_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "CLOSE_SECONDS", 0.2)
    async with (
        StubEngine("decode").running() as d,
        asyncio.timeout(10),
        router_over([], [d], NO_REDIS, trace_endpoint=f"{NOBODY}/v1/traces") as front,
    ):
        assert (await front.post(CHAT)).status == 200


async def test_why_traces_are_not_taken_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otel, "EXPORT_SECONDS", 1.5)
    sender = otel.exporter_to(f"{NOBODY}/v1/traces")
    tracing = otel.OTelTracing(sender, 1.0)
    for number in range(2):
        tracing.begin(report := Report(str(number), "chat"), {})
        assert report.span is not None
        report.span.end(report)
        await asyncio.to_thread(sender.force_flush)
    await tracing.close()
    told = [record for record in caplog.records if record.name == "router.traces"]
    assert len(told) == 1
    assert "refused" in told[0].reason  # type: ignore[attr-defined]


async def test_a_collector_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(otel, "EXPORT_SECONDS", 0.5)
    async with collecting() as collector, StubEngine("decode").running() as d:
        collector.answers = False
        async with asyncio.timeout(5), router_over([], [d], NO_REDIS, trace_endpoint=collector.url) as front:
            assert (await front.post(CHAT)).status == 200


async def test_without_tracing_a_clients_headers_pass_and_nothing_is_made() -> None:
    async with StubEngine("decode").running() as d, router_over([], [d], NO_REDIS) as front:
        assert front.router.tracing is None
        assert (await front.post(CHAT, headers={"traceparent": CLIENT})).status == 200
    assert d.seen[0].headers.getall("traceparent") == [CLIENT]


def test_without_tracing_its_part_of_opentelemetry_is_not_imported() -> None:
    script = "import sys, router.run; print([m for m in sys.modules if m == 'router.otel' or 'exporter' in m])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "[]", found.stderr


def test_tracing_without_its_extra_is_a_mistake_in_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "router.otel", None)
    config = RouterConfig(decode=(NOBODY,), trace_endpoint="http://collector:4318/v1/traces")
    with pytest.raises(ValueError, match=r"^trace_endpoint needs .*: pip install '.\[tracing\]' in Backhaul's folder$"):
        check_settings(config)


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://collector:4318", "grpc://collector:4317/v1/traces"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="trace_endpoint"):
        RouterConfig(decode=(NOBODY,), trace_endpoint=endpoint)


async def test_server_timing_comes_with_an_explained_answer() -> None:
    async with (
        StubEngine("prefill").running() as p,
        StubEngine("decode").running() as d,
        router_over([p], [d], NO_REDIS) as front,
    ):
        plain = await front.post(CHAT)
        whole = await front.post(CHAT, headers={"X-Backhaul-Explain": "1"})
        stream = await front.post({**CHAT, "stream": True}, headers={"X-Backhaul-Explain": "1"})
    assert "Server-Timing" not in plain.headers

    def names(answer: Any) -> list[str]:
        return [part.partition(";")[0] for part in answer.headers["Server-Timing"].split(", ")]

    assert names(whole) == ["read", "recall", "prefill", "decode", "remember", "total"]
    assert names(stream) == ["read", "recall", "prefill", "decode", "total"]
