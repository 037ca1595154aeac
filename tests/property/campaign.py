"""Many histories against one fleet, and what must be true at the end of them."""

from __future__ import annotations

from collections.abc import Iterable

from tests.property.fleet import Fleet, routers
from tests.property.player import Player
from tests.property.reference import Reference
from tests.property.script import History
from tests.property.tally import Tally

IN_FLIGHT = 14
MAX_TIES = 0.01
"""Share of the turns: more would mean that the tolerance hides something."""


async def campaign(
    fleet: Fleet,
    reference: Reference,
    histories: Iterable[History],
    *,
    in_flight: int = IN_FLIGHT,
    seconds: float | None = None,
) -> Tally:
    """Play them and look behind the scenes. Raises AssertionError for whatever is not as it should be."""
    ties_before = reference.num_ties
    async with routers(fleet) as started:
        player = Player(started, reference)
        tally = player.tally
        try:
            await player.play_all(histories, in_flight=in_flight, seconds=seconds)
        finally:
            fleet.check_alive()
            for role, pool in (("prefill", fleet.prefill), ("decode", fleet.decode)):
                tally.add_engines(role, pool)
            await tally.add_routers(started.all)
            tally["ties between logits"] = reference.num_ties - ties_before
            print(f"\n{tally.table()}", flush=True)
    fleet.check_released()
    assert tally["ties between logits"] <= MAX_TIES * tally["turns"], "too many answers hang on rounding"
    # A turn whose client has left may have pulled too, and only the engine knows.
    told, unseen = tally["tokens pulled for turns"], tally["tokens of prompts of clients gone"]
    assert told <= tally["pulled by prefill"] <= told + unseen, "what turns say they pulled is not what engines did"
    for endpoint in ("chat", "completions", "generate", "responses"):
        failed = tally[f'backhaul_router_turns_total{{endpoint="{endpoint}",outcome="failed"}}']
        assert not failed, f"{failed} turns of {endpoint} failed"
    return tally
