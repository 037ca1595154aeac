"""Traces of turns, where they are wanted. OpenTelemetry is an extra (`tracing`), imported only then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit

from router.report import Report


class Tracing(Protocol):
    def begin(self, report: Report, headers: Mapping[str, str]) -> None:
        """A turn begins; its headers may say of which trace it is a part."""
        ...

    async def close(self) -> None:
        """Send what is not sent yet, for a short time."""
        ...


def collector_url(text: str) -> str:
    """Raises ValueError for what cannot be where a collector takes traces."""
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname or not url.path.strip("/"):
        raise ValueError(f"{text[:100]!r} is not the URL of a collector, such as http://collector:4318/v1/traces")
    return text


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
