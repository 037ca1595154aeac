"""`backhaul` in adverse surroundings: its monotonic clock is OFFSET seconds away from everybody else's, and the answers
to some of its claims take up to LAG seconds, so that much can happen between a claim and the read that follows.

    python tests/property/launcher.py OFFSET LAG engine --model …

Where the environment has a port as BACKHAUL_TEST_CENSUS, whoever connects there is told what the process holds that
cannot be seen from outside.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
import sys
import threading
import time
from typing import Any

CENSUS_PORT = "BACKHAUL_TEST_CENSUS"

LATE_SHARE = 0.4
"""Of the answers to claims."""


def main() -> int:
    offset, lag, real = float(sys.argv[1]), float(sys.argv[2]), time.monotonic
    time.monotonic = lambda: real() + offset  # before anything takes a reference to it
    if lag:
        _delay_claims(lag)
    if port := os.environ.pop(CENSUS_PORT, None):
        threading.Thread(target=_tell_census, args=[int(port)], name="census", daemon=True).start()
    from backhaul.__main__ import main as backhaul

    return backhaul(sys.argv[3:])


def _delay_claims(lag: float) -> None:
    from connectors.peer import PeerClient

    claim, rng = PeerClient.claim, random.Random(0)

    def late(*args: Any, **kwargs: Any) -> Any:
        answer = claim(*args, **kwargs)
        if rng.random() < LATE_SHARE:
            time.sleep(rng.uniform(0, lag))
        return answer

    PeerClient.claim = late  # type: ignore[method-assign]


def _tell_census(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        while True:
            connection, _ = server.accept()
            with connection:
                gc.collect()
                objects = gc.get_objects()
                tasks = sum(isinstance(one, asyncio.Task) and not one.done() for one in objects)
                connection.sendall(json.dumps({"tasks": tasks, "objects": len(objects)}).encode())


if __name__ == "__main__":
    sys.exit(main())
