"""Traces of turns, where they are wanted. OpenTelemetry is an extra (`tracing`), imported only then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from router.report import Report


class Tracing(Protocol):
    def begin(self, report: Report, headers: Mapping[str, str]) -> None:
        """A turn begins; its headers may say of which trace it is a part."""
        ...

    async def close(self) -> None:
        """Send what is not sent yet, for a short time."""
        ...


def check_tracing() -> None:
    """Raises ValueError where OpenTelemetry is not installed."""
    try:
        import router.otel  # noqa: F401
    except ImportError as error:
        raise ValueError(f"trace_endpoint needs {error.name}: pip install '.[tracing]' in Backhaul's folder") from None


def open_tracing(endpoint: str, sample: float) -> Tracing:
    """Starts a thread that sends."""
    from router.otel import OTelTracing, exporter_to

    return OTelTracing(exporter_to(endpoint), sample)
