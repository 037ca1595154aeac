"""What both programs declare of their API is what they serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp.test_utils import make_mocked_request

from connectors.wire.openapi import PATH, names_in
from engine.api.context import Worker
from engine.app import make_app
from engine.config import EngineConfig
from engine.openapi import openapi as engine_openapi
from router.app import routes
from router.config import RouterConfig
from router.context import Request, Router
from router.openapi import openapi as router_openapi
from tests.unit.server.double import Stage

METHODS = {"GET": "GET", "POST": "POST", "DELETE": "DELETE", "*": "GET"}
"""As declared, by how a route is registered: with any method, it is one that answers 405 to all but GET itself."""


def engine_routes() -> set[tuple[str, str]]:
    routes = make_app(Worker(EngineConfig(model="tiny"))).router.routes()
    return {(route.method, route.resource.canonical) for route in routes if route.resource}


def router_routes() -> set[tuple[str, str]]:
    return {
        (route.method, route.path.replace(":.+", "")) for route in routes(RouterConfig(decode=("http://127.0.0.1:1",)))
    }


async def engine_document() -> Any:
    return json.loads((await engine_openapi(make_mocked_request("GET", PATH))).body or b"")


async def router_document() -> Any:
    return json.loads((await router_openapi(cast(Router, None), cast(Request, None))).body or b"")


BOTH = pytest.mark.parametrize(
    ("routes_of", "read"),
    [(engine_routes, engine_document), (router_routes, router_document)],
    ids=["engine", "router"],
)


@BOTH
async def test_every_route_is_declared_and_nothing_else(routes_of: Any, read: Any) -> None:
    served = {(METHODS[method], path) for method, path in routes_of() if method in METHODS}
    declared = {(method.upper(), path) for path, methods in (await read())["paths"].items() for method in methods}
    assert declared == served


@BOTH
async def test_every_reference_and_path_parameter_resolves(routes_of: Any, read: Any) -> None:
    document = await read()
    schemas = document["components"]["schemas"]
    names = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert names <= schemas.keys()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            in_path = [one["name"] for one in operation["parameters"] if one["in"] == "path"]
            assert in_path == names_in(path)


async def test_fields_that_take_several_types_declare_them_all() -> None:
    schemas = (await engine_document())["components"]["schemas"]

    def types(body: str, field: str) -> set[str]:
        return {one["type"] for one in schemas[body]["properties"][field]["anyOf"]}

    assert types("ChatBody", "stop") == {"string", "array", "null"}
    assert types("ChatBody", "tool_choice") == {"string", "object", "null"}
    assert types("CompletionBody", "prompt") == {"string", "array"}


async def test_document_is_served_also_before_the_model_is_loaded(tiny_model: Path) -> None:
    async with Stage(tiny_model) as stage:
        stage.worker.serving = None
        async with stage.session.get(PATH) as answer:
            assert (answer.status, answer.content_type) == (200, "application/json")
            assert (await answer.json())["openapi"] == "3.1.0"
