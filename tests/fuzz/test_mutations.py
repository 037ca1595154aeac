"""Good bodies with one thing wrong, to an engine and to the router: nothing may break, whatever the place.

`make fuzz FUZZ_CASES=20000 FUZZ_SEED=7` takes more of them, and others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import orjson
import pytest

from connectors.wire.seal import SEAL_HEADER
from tests.fuzz.bodies import BODIES, PEERS, TRANSFERS
from tests.fuzz.conftest import CASES, SEALS, SEED, Servers
from tests.fuzz.mutations import Request, chosen
from tests.fuzz.target import Target

MAX_FAULTS = 5
"""Told of one run; it ends there."""
TIMEOUT = 120 + CASES


@pytest.mark.timeout(TIMEOUT)
def test_engine_bears_bodies_with_one_thing_wrong(engine: Servers) -> None:
    bear(engine.front, chosen(BODIES, CASES * 7 // 20, SEED))


@pytest.mark.timeout(TIMEOUT)
def test_engine_bears_transfer_params_with_one_thing_wrong(engine: Servers) -> None:
    bear(engine.front, chosen(TRANSFERS, CASES * 2 // 20, SEED))


@pytest.mark.timeout(TIMEOUT)
def test_engine_bears_peers_that_talk_nonsense(engine: Servers) -> None:
    bear(engine.front, chosen(PEERS, CASES // 20, SEED))


@pytest.mark.timeout(TIMEOUT)
def test_sealed_engine_bears_transfer_params_with_one_thing_wrong(sealed: Servers) -> None:
    requests = list(chosen(TRANSFERS, CASES * 2 // 20, SEED + 1))
    bear(sealed.front, _sealed(requests))


@pytest.mark.timeout(TIMEOUT)
def test_router_bears_bodies_with_one_thing_wrong(router: Servers) -> None:
    bear(router.front, chosen((*BODIES, *TRANSFERS), CASES * 4 // 20, SEED + 2))


def bear(target: Target, requests: Iterable[Request]) -> None:
    """Fails with the first few answers that are none, and the requests."""
    found: list[str] = []
    asked = 0
    for request in requests:
        asked += 1
        fault = target.fault(request.path, request.body, request.headers)
        if fault is not None:
            found.append(f"{fault}\n  to {request}")
        if len(found) == MAX_FAULTS:
            break
    assert asked, "nothing was asked"
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def _sealed(requests: Iterable[Request]) -> Iterator[Request]:
    """As by who has the key, where the body can be sealed; every other one without."""
    for index, request in enumerate(requests):
        try:
            seal = SEALS.seal(request.path, orjson.loads(request.body)) if index % 4 else None
        except Exception:  # a body that nobody can seal
            seal = None
        yield Request(request.path, request.body, request.headers | ({SEAL_HEADER: seal} if seal else {}))
