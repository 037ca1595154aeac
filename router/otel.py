"""Traces by OpenTelemetry: a span per turn, one below it per phase, and engines' own spans below those.

What it does on the event loop is to make spans; a thread of its own sends them, in batches, and what a collector does
not take in time is lost. No part of a turn waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.faults import EngineFault
from router.phases import Phase
from router.report import Report
from router.statement import without_user

EXPORT_SECONDS: Final = 5.0
"""For one batch to be taken by the collector, tries included."""
CLOSE_SECONDS: Final = 3.0
"""For what is not sent yet when the router ends."""

CONTEXT_HEADERS: Final = ("traceparent", "tracestate")
LEGS: Final[frozenset[Phase]] = frozenset({"tokenize", "encode", "prefill", "decode"})
"""Phases that are a request to an engine."""
ATTRIBUTES: Final = {
    "gen_ai.request.model": "model",
    "http.response.status_code": "status",
    "backhaul.request_id": "request_id",
    "backhaul.endpoint": "endpoint",
    "backhaul.outcome": "outcome",
    "backhaul.turn": "turn",
    "backhaul.attempts": "attempts",
    "backhaul.plan": "reason",
    "backhaul.kv": "kv",
    "backhaul.handoff": "handoff",
    "backhaul.media": "media",
    "backhaul.media.known": "media_known",
    "backhaul.media.encoded": "media_encoded",
    "backhaul.media.local": "media_local",
    "backhaul.engine.encode": "encoders",
    "backhaul.tokens.prompt": "prompt_tokens",
    "backhaul.tokens.cached": "cached_tokens",
    "backhaul.tokens.pulled": "pulled_tokens",
    "backhaul.tokens.computed": "computed_tokens",
    "backhaul.tokens.completion": "completion_tokens",
}
"""Of a turn's span, by the field of its report."""

log = logging.getLogger("router.traces")


class OTelTracing:
    def __init__(self, processor: SpanProcessor, sample: float) -> None:
        """`sample`: of the turns whose client does not say whether they are traced, how many are."""
        ours = {
            "service.name": "backhaul-router",
            "service.version": _version(),
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        }
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample)),
            resource=Resource(ours).merge(OTELResourceDetector().detect()),  # what the environment says
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("backhaul.router", _version())
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, report: Report, headers: Mapping[str, str]) -> None:
        span = TurnSpan(self._tracer, self._propagator, report.endpoint, headers)
        report.span, report.trace_id = span, span.trace_id
        if report.phase is not None:
            span.enter(report.phase)

    async def close(self) -> None:
        """In a thread that nobody waits for beyond a time: the collector may hang."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut_down, name="send traces", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await done.wait()
        except TimeoutError:
            log.warning("the last turns' traces may not have been sent: the collector does not answer")


class TurnSpan:
    """One turn's span, and below it one for each phase, one after the other."""

    def __init__(
        self, tracer: Tracer, propagator: TraceContextTextMapPropagator, endpoint: str, headers: Mapping[str, str]
    ) -> None:
        self._tracer = tracer
        self._propagator = propagator
        parent = propagator.extract({name: headers[name] for name in CONTEXT_HEADERS if name in headers}, Context())
        self._span = tracer.start_span(f"turn {endpoint}", parent, SpanKind.SERVER)
        self._context = set_span_in_context(self._span, Context())
        self._phase: Span | None = None
        self.trace_id = format_trace_id(self._span.get_span_context().trace_id)

    def enter(self, phase: Phase | None) -> None:
        if self._phase is not None:
            self._phase.end()
            self._phase = None
        if phase is not None:
            kind = SpanKind.CLIENT if phase in LEGS else SpanKind.INTERNAL
            self._phase = self._tracer.start_span(phase, self._context, kind)

    def context(self, engine: str) -> str:
        context = self._context
        if self._phase is not None:
            self._phase.set_attribute("server.address", engine)
            context = set_span_in_context(self._phase, Context())
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context)
        return "".join(f"{name}: {value}\r\n" for name, value in carrier.items())

    def retried(self, fault: EngineFault) -> None:
        told = {
            "backhaul.role": fault.engine.role,
            "backhaul.engine": fault.engine.name,
            "backhaul.fault": fault.kind,
            "backhaul.status": str(fault.status),
        }
        self._span.add_event("retry", told)
        if self._phase is not None:
            self._phase.set_status(StatusCode.ERROR, fault.kind)

    def end(self, report: Report) -> None:
        if self._span.is_recording():
            told = {name: getattr(report, field) for name, field in ATTRIBUTES.items()}
            for role, url in (("prefill", report.prefill), ("decode", report.decode)):
                told[f"backhaul.engine.{role}"] = url and without_user(url)
            if report.first_byte is not None:
                told["backhaul.first_byte_ms"] = round(1000 * report.first_byte, 1)
            self._span.set_attributes({name: value for name, value in told.items() if value is not None})
            if report.outcome in ("failed", "cut"):
                self._span.set_status(StatusCode.ERROR, report.outcome)
        self._span.end()


class _Exporter(SpanExporter):
    """Sends batches, and says once if they are not taken, and once when they are again."""

    def __init__(self, endpoint: str) -> None:
        self._exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)
        self._reason = _Reason()
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._reason.first = None
        result = self._exporter.export(spans)
        failing = result is not SpanExportResult.SUCCESS
        if failing and not self._is_failing:
            log.warning(
                "traces are not taken, and lost: turns go on. Check --trace-endpoint and the collector.",
                extra={"reason": self._reason.first},
            )
        elif self._is_failing and not failing:
            log.info("traces are taken again")
        self._is_failing = failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class _Reason(logging.Handler):
    """Keeps the first that OpenTelemetry's exporters have to say of a batch: later it is only that trying has ended."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first: str | None = None
        logger = logging.getLogger("opentelemetry.exporter")
        logger.propagate = False
        logger.handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        self.first = self.first or record.getMessage()[:400]


def exporter_to(endpoint: str) -> SpanProcessor:
    logging.getLogger("opentelemetry.sdk._shared_internal").setLevel(logging.CRITICAL)
    return BatchSpanProcessor(_Exporter(endpoint))


def _version() -> str:
    try:
        return version("backhaul")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
