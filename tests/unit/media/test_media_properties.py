"""Whatever clients, encoders and the network do: no wrong rows, no picture encoded in vain, nobody stuck, nothing left.

An encoder and two engines that fetch from it, with room for a few pictures, under random traffic: requests with and
without their pictures, with announcements that are good, late or made up, aborted at any time, over a network that
delays and fails. `check` holds after every step, `MediaRunner` refuses to read rows that are not the picture's own, and
at the end every request has had its answer or a reason.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from connectors.fake import FakeNetwork, Fault
from connectors.wire.transfer import ECTransferParams
from engine.request import Request
from tests.fake_runner import expected_output
from tests.media_engines import EncodeEngine, MediaEngine, merged

PICTURES = [("a", 3), ("b", 4), ("c", 5), ("d", 1), ("e", 7)]
REASONS = ("claim", "handshake", "engine_id", "disconnected", "timeout", "transfer", "expired", "lost", "overdue")


class Traffic:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.network = FakeNetwork(faults=self.fault)
        choose = self.random.choice
        self.encoder = EncodeEngine(
            self.network, encoder_blocks=choose([8, 12, 40]), max_rows_per_step=choose([4, 8, 64])
        )
        self.engines = [
            MediaEngine(
                network=self.network,
                name=name,
                encoder_blocks=choose([7, 9, 30]),
                max_rows_per_step=choose([4, 8, 64]),
                max_num_batched_tokens=choose([4, 16, 64]),
                num_blocks=choose([14, 20, 64]),
                max_num_seqs=choose([2, 4]),
                scheduling_policy=choose(["fcfs", "priority"]),
                produces=choose([True, False]),
            )
            for name in ("p", "q")
        ]
        self.announced: list[ECTransferParams] = []
        self.asked: list[tuple[MediaEngine, Request, bool]] = []
        self.encoding: list[Request] = []

    def fault(self, pull: object) -> Fault:
        if self.random.random() < 0.5:
            return Fault()
        delays = {
            name: self.random.choice([0.0, 0.3, 1.0, 5.0]) for name in ("before_claim", "before_read", "before_done")
        }
        how: dict[str, Any] = {"fails": self.random.choice([None, None, "transfer", "timeout"])}
        if self.random.random() < 0.1:
            how = {"stalls": self.random.choice([1.0, 20.0, 90.0])}
        return Fault(**delays, **how, notify_lost=self.random.random() < 0.1)

    def parts(self) -> list[Any]:
        pictures = [self.random.choice(PICTURES) for _ in range(self.random.randint(0, 2))]
        parts: list[Any] = []
        for picture in pictures:
            parts += [self.random.randint(1, 5), picture]
        return [*parts, self.random.randint(1, 6)]

    def ask(self, engine: MediaEngine) -> None:
        parts, described = self.parts(), self.random.random() < 0.4
        params = None
        if self.announced and self.random.random() < 0.8:
            params = merged(*self.random.sample(self.announced, min(3, len(self.announced))))
        request = engine.ask(
            *parts,
            described=described,
            ec_params=params,
            max_tokens=self.random.randint(1, 6),
            priority=self.random.randint(0, 2),
        )
        self.asked.append((engine, request, described))

    def act(self) -> None:
        match self.random.randint(0, 9):
            case 0 | 1:
                self.ask(self.random.choice(self.engines))
            case 2:
                self.encoding.append(self.encoder.ask(*self.parts()))
            case 3 if self.asked:
                engine, request, _ = self.random.choice(self.asked[-4:])
                if self.random.random() < 0.3:
                    engine.abort(request)
            case 4:
                self.network.advance(self.random.choice([0.0, 0.3, 1.0, 7.0]))
            case 5 if self.random.random() < 0.05:
                self.encoder.evict()
            case _:
                self.step()

    def step(self) -> None:
        self.encoder.step()
        for request in [each for each in self.encoding if each.request_id in self.encoder.finals]:
            self.encoding.remove(request)
            params = self.encoder.final(request).ec_transfer_params
            if params is not None:
                self.announced = [*self.announced[-5:], ECTransferParams.parse(params.to_json())]
        for engine in self.engines:
            engine.step(during=partial(self.meanwhile, engine))

    def meanwhile(self, engine: MediaEngine) -> None:
        """While this engine computes a step, some leave, some come, and loads end."""
        if self.random.random() < 0.2:
            for request in list(engine.scheduler.running):
                if not request.num_output_tokens:
                    engine.abort(request)
                    self.ask(engine)
            engine.settle()


@pytest.mark.parametrize("seed", range(60))
def test_random_traffic_ends_well(seed: int) -> None:
    traffic = Traffic(seed)
    for _ in range(250):
        traffic.act()
    for _ in range(1500):
        traffic.step()
        traffic.network.advance(0.2)
        if not any(engine.scheduler.requests for engine in (traffic.encoder, *traffic.engines)):
            break
    else:
        raise AssertionError("a request is stuck")
    for engine, request, described in traffic.asked:
        final = engine.final(request)
        if final.finish_reason == "error":
            assert described or final.error_status == 400
            assert "only described" in (final.error or "") or any(
                f"({each})" in (final.error or "") for each in REASONS
            )
        elif final.finish_reason != "abort":
            wanted = expected_output(request.prompt_token_ids, max_tokens=request.sampling.max_tokens)
            assert engine.answer(request) == wanted
    for _ in range(120):
        traffic.step()
        traffic.network.advance(1.0)
    traffic.step()
    for each in (traffic.encoder, *traffic.engines):
        each.check_idle()
