"""Engines as a plan sees them, without any engine."""

from __future__ import annotations

from typing import NamedTuple

from router.capabilities import UNKNOWN, Capabilities


class EngineView(NamedTuple):
    url: str
    ready: bool
    models: frozenset[str]
    load: float = 0
    last: int = 0
    can: Capabilities = UNKNOWN
    pulls: bool = True
    spared: bool = False
    readable: bool = True
    engine_id: str | None = None

    def has(self, engine_id: str | None) -> bool:
        return engine_id is None or self.engine_id is None or engine_id == self.engine_id
