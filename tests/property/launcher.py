"""`backhaul` in adverse surroundings: its monotonic clock is OFFSET seconds away from everybody else's, and the answers
to some of its claims take up to LAG seconds, so that much can happen between a claim and the read that follows.

    python tests/property/launcher.py OFFSET LAG engine --model …
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

LATE_SHARE = 0.4
"""Of the answers to claims."""


def main() -> int:
    offset, lag, real = float(sys.argv[1]), float(sys.argv[2]), time.monotonic
    time.monotonic = lambda: real() + offset  # before anything takes a reference to it
    if lag:
        _delay_claims(lag)
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


if __name__ == "__main__":
    sys.exit(main())
