"""What is said of encoder output, on its way from the scheduler to the answer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from connectors.base import TransferRequest
from connectors.wire.transfer import ECTransferParams
from engine.messages import Output
from engine.request import Request
from tests.fake_engines import FakeEngine
from tests.fake_runner import prompt_of
from tests.unit.server.double import Stage, byte_ids, one_by_one

OLD, NEW = (ECTransferParams.parse({name: {"size_bytes": 1}}) for name in ("old", "new"))


class Encoder:
    """An encoder-cache connector that tells something of each request, and notes what it still finds of it."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}

    def request_finished(self, request: TransferRequest) -> ECTransferParams | None:
        assert request.request_id not in self.blocks, "asked once"
        self.blocks[request.request_id] = list(request.block_ids)
        return NEW


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_item_90_the_newest_params_count_and_what_was_said_stays_said(
    tiny_model: Path, merged: bool, stream: bool
) -> None:
    """Whether the reader keeps up with the engine or finds its outputs merged."""

    def outputs(request: Request) -> Iterable[Output]:
        yield Output(request.request_id, byte_ids("a"), ec_transfer_params=OLD)
        yield Output(request.request_id, byte_ids("b"), ec_transfer_params=NEW)
        yield Output(request.request_id, byte_ids("c"), "length")

    def as_one(request: Request) -> Iterable[Output]:
        first, second, third = outputs(request)
        yield third.after(second.after(first))

    async with Stage(tiny_model) as stage:
        stage.script = as_one if merged else one_by_one(outputs)
        body = {"prompt": "hi"}
        if stream:
            last = (await stage.stream("/v1/completions", body))[-1]
        else:
            last = (await stage.post("/v1/completions", body))[1]
    assert last["ec_transfer_params"] == NEW.to_json()


@pytest.mark.parametrize("end", ["length", "abort"])
def test_item_92_the_encoder_connector_is_asked_before_anything_is_freed(end: str) -> None:
    engine, encoder = FakeEngine(), Encoder()
    engine.scheduler.ec_connector = encoder
    request = engine.submit(prompt_of(9), max_tokens=5)
    engine.step()
    held = list(request.block_ids)
    if end == "abort":
        engine.abort(request)
    engine.run()
    engine.collect()
    assert held
    assert encoder.blocks[request.request_id][: len(held)] == held
    assert engine.final(request).finish_reason == end
    assert engine.final(request).ec_transfer_params == NEW
    engine.check_idle()


def test_item_93_an_engine_without_an_encoder_says_nothing() -> None:
    engine = FakeEngine()
    request = engine.submit(prompt_of(9), max_tokens=5)
    request.sampling.extra_args["ec_transfer_params"] = OLD  # type: ignore[index]
    assert request.ec_transfer_params == OLD
    engine.run()
    assert engine.final(request).ec_transfer_params is None
    engine.check_idle()
