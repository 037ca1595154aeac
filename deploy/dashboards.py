"""Grafana's dashboards of the chart, as JSON: panels, laid out in rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from deploy.panels import OVERVIEW, REUSE, Panel, Row

Json = dict[str, Any]

WIDTH: Final = 24
HEIGHT: Final = 8
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
PLUGIN_VERSION: Final = "11.0.0"


def dashboards() -> dict[str, Json]:
    """By file name."""
    return {
        "overview.json": _dashboard("backhaul-overview", "Backhaul: overview", OVERVIEW),
        "reuse.json": _dashboard("backhaul-reuse", "Backhaul: P/D reuse: where each prompt token came from", REUSE),
    }


def text(dashboard: Json) -> str:
    return json.dumps(dashboard, indent=1) + "\n"


def _dashboard(uid: str, title: str, rows: Sequence[Row]) -> Json:
    return {
        "uid": uid,
        "title": title,
        "tags": ["backhaul"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [*_variables()]},
        "panels": [*_laid_out(rows)],
    }


def _variables() -> Iterator[Json]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    for name, label, matching in (("namespace", "Namespace", ""), ("job", "Routers", '{namespace=~"$namespace"}')):
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": DATASOURCE,
            "query": f"label_values(backhaul_router_processes{matching}, {name})",
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        }


def _laid_out(rows: Sequence[Row]) -> Iterator[Json]:
    number, y = 0, 0
    for row in rows:
        number += 1
        yield {"id": number, "type": "row", "title": row.title, "panels": [], "gridPos": _at(0, y, WIDTH, 1)}
        x, y = 0, y + 1
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            number += 1
            yield _panel(panel, number) | {"gridPos": _at(x, y, panel.width, HEIGHT)}
            x += panel.width
        y += HEIGHT


def _panel(panel: Panel, number: int) -> Json:
    custom = {"fillOpacity": 25, "stacking": {"mode": "normal"}} if panel.stacked else {"fillOpacity": 5}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "pluginVersion": PLUGIN_VERSION,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0} | ({"custom": custom} if panel.kind == "timeseries" else {}),
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _at(x: int, y: int, width: int, height: int) -> Json:
    return {"x": x, "y": y, "w": width, "h": height}
