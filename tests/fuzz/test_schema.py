"""Requests made from what the servers declare of themselves, some as declared and some not: nothing may break."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from connectors.wire.openapi import PATH
from tests.fuzz.conftest import CASES, SEED, Servers
from tests.fuzz.target import HANG_SECONDS, Reply, wrong_with

MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
MOST = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "n": 4}
SKIPPED = ("/ready",)
"""Its 503 is no error, but its answer."""
TIMEOUT = 120 + CASES


@pytest.mark.timeout(TIMEOUT)
def test_engine_bears_what_its_schema_makes(engine: Servers) -> None:
    ask_all(engine.front.url, CASES * 2 // 20)


@pytest.mark.timeout(TIMEOUT)
def test_router_bears_what_its_schema_makes(router: Servers) -> None:
    ask_all(router.front.url, CASES * 2 // 20)


def ask_all(url: str, count: int) -> None:
    """So many requests in all: most where there is a body, half of them as declared."""
    with requests.Session() as session:
        declared = session.get(url + PATH, timeout=HANG_SECONDS).json()
        schema = schemathesis.openapi.from_dict(declared)
        schema.config.update(base_url=url)
        every = [result.ok() for result in schema.get_all_operations()]
        found = [operation for operation in every if operation.path not in SKIPPED]
        bodies = [operation for operation in found if operation.body]
        for operation in found:
            if operation.body:
                for mode in MODES:
                    ask(operation, mode, session, max(1, count // (2 * len(bodies))))
            else:
                ask(operation, GenerationMode.POSITIVE, session, 2)


def ask(
    operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, session: requests.Session, count: int
) -> None:
    @seed(SEED)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode))
    def check(case: Case) -> None:
        tame(case.body)
        answer = case.call(session=session, timeout=HANG_SECONDS)
        headers = {name.lower(): values[0] for name, values in answer.headers.items()}
        wrong = wrong_with(Reply(answer.status_code, headers, answer.content or b""))
        assert wrong is None, f"{wrong}\n  to {case.method} {case.path} {json.dumps(case.body, default=repr)[:3000]}"
        case.validate_response(answer, checks=[content_type_conformance, response_schema_conformance])

    check()


def tame(body: object) -> None:
    """Let what is asked for be done soon, by the model there is."""
    if not isinstance(body, dict):
        return
    for holder in (body, body.get("sampling_params")):
        if isinstance(holder, dict):
            holder |= {
                name: min(holder[name], most) for name, most in MOST.items() if isinstance(holder.get(name), int)
            }
    if isinstance(body.get("model"), str) and len(body["model"]) % 4:
        body["model"] = "tiny"
