"""The router over engines that say, word for word, what vLLM 0.32 has said."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.contract.recorded import BLOCK_SIZE, MODEL, RecordedEngine, body_said, events_said, recorded
from tests.router_harness import Answer, Front, router_over
from tests.valkey import valkey

HOLD = {"do_remote_decode": True, "do_remote_prefill": False}
INTERNAL = (b"kv_transfer_params", b"remote_engine_id", b"token_ids")
REFUSALS = ("error_unknown_model", "error_bad_field", "error_too_long")


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server.url


@pytest.fixture
async def p() -> AsyncIterator[RecordedEngine]:
    async with RecordedEngine("prefill").running() as engine:
        assert isinstance(engine, RecordedEngine)
        yield engine


@pytest.fixture
async def d() -> AsyncIterator[RecordedEngine]:
    async with RecordedEngine("decode").running() as engine:
        assert isinstance(engine, RecordedEngine)
        yield engine


@pytest.fixture
async def front(
    p: RecordedEngine, d: RecordedEngine, redis_url: str, request: pytest.FixtureRequest
) -> AsyncIterator[Front]:
    # The same messages come up in many tests, and are not to be one conversation.
    headers = f"X-Tenant-{request.node.name.encode().hex()[:32]}"
    async with router_over([p], [d], redis_url, kv_block_size=BLOCK_SIZE, tenant_header=headers) as front:
        front.client.headers[headers] = request.node.name.encode().hex()
        yield front


def question(name: str, *, stream: bool = False) -> dict[str, Any]:
    """What a client asked of whom the recorded request is a leg."""
    body = recorded(name)["request"]["body"]
    kept = {key: body[key] for key in ("model", "messages", "prompt", "temperature") if key in body}
    return {**kept, "max_tokens": 24, **({"stream": True} if stream else {})}


async def ask(front: Front, p: RecordedEngine, d: RecordedEngine, prefill: str, decode: str, **how: Any) -> Answer:
    p.plays(prefill)
    d.plays(decode)
    said = recorded(prefill)["response"]["body"]
    p.prompt_ids = d.prompt_ids = said.get("prompt_token_ids") or []
    return await front.post(question(prefill, **how), headers={"X-Backhaul-Explain": "1"})


def params_sent(engine: RecordedEngine) -> dict[str, Any]:
    """The transfer params of the request it got last."""
    return dict(engine.bodies[-1]["kv_transfer_params"])


async def test_prefill_answer_goes_to_decode_as_it_came(front: Front, p: RecordedEngine, d: RecordedEngine) -> None:
    answer = await ask(front, p, d, "prefill_1", "decode_1")
    assert answer.status == 200
    assert params_sent(p) == HOLD
    said = body_said("prefill_1")
    assert params_sent(d) == {**said["kv_transfer_params"], "prompt_token_ids": said["prompt_token_ids"]}
    assert answer.text_of_whole == body_said("decode_1")["choices"][0]["message"]["content"]
    assert answer.json["usage"] == body_said("decode_1")["usage"]
    assert not any(name in answer.raw for name in INTERNAL)


async def test_next_turn_has_prefill_pull_what_decode_offered(
    front: Front, p: RecordedEngine, d: RecordedEngine
) -> None:
    await ask(front, p, d, "prefill_1", "decode_1")
    answer = await ask(front, p, d, "prefill_2", "decode_2")
    assert answer.explain["kv"] == "offered"
    sent = {key: value for key, value in params_sent(p).items() if key != "prompt_token_ids"}
    assert sent == body_said("decode_1")["kv_transfer_params"]
    assert sent == {
        key: value
        for key, value in recorded("prefill_2")["request"]["body"]["kv_transfer_params"].items()
        if key != "prompt_token_ids"
    }


async def test_edited_history_cuts_the_offer_at_a_block_before_the_edit(
    front: Front, p: RecordedEngine, d: RecordedEngine
) -> None:
    await ask(front, p, d, "prefill_1", "decode_1")
    offered = body_said("decode_1")["kv_transfer_params"]
    p.plays("prefill_2")
    d.plays("decode_2")
    same = 2 * BLOCK_SIZE + 5
    known = body_said("prefill_2")["prompt_token_ids"]
    p.prompt_ids = d.prompt_ids = [*known[:same], *(token + 1 for token in known[same:])]
    answer = await front.post(question("prefill_2"), headers={"X-Backhaul-Explain": "1"})
    assert answer.explain["kv"] == "offered"
    assert params_sent(p)["remote_num_tokens"] == 2 * BLOCK_SIZE
    assert params_sent(p)["remote_block_ids"] == [offered["remote_block_ids"][0][:2]]


async def test_failed_pull_is_asked_again_without_the_blocks(
    front: Front, p: RecordedEngine, d: RecordedEngine
) -> None:
    assert recorded("prefill_failed_pull")["response"]["status"] == 500
    await ask(front, p, d, "prefill_1", "decode_1")
    p.plays("prefill_failed_pull")
    answer = await ask(front, p, d, "prefill_2", "decode_2")
    assert answer.status == 200
    assert [("remote_block_ids" in body["kv_transfer_params"]) for body in p.bodies] == [False, True, False]
    assert answer.explain["attempts"] == 2


async def test_stream_without_params_leaves_nothing_to_pull(front: Front, p: RecordedEngine, d: RecordedEngine) -> None:
    answer = await ask(front, p, d, "prefill_stream", "decode_stream", stream=True)
    assert answer.text == body_said("decode_1")["choices"][0]["message"]["content"]
    assert not any(name in answer.raw for name in INTERNAL)
    answer = await ask(front, p, d, "prefill_2", "decode_2")
    assert answer.explain["kv"] == "no_offer"
    assert answer.explain["turn"] == 2
    assert "remote_block_ids" not in params_sent(p)


async def test_stream_with_params_is_pulled_next(front: Front, p: RecordedEngine, d: RecordedEngine) -> None:
    answer = await ask(front, p, d, "prefill_stream_with_params", "decode_stream_with_params", stream=True)
    assert answer.text == body_said("decode_1")["choices"][0]["message"]["content"]
    assert not any(name in answer.raw for name in INTERNAL)
    (told,) = [said for event in events_said("decode_stream_with_params") if (said := event.get("kv_transfer_params"))]
    answer = await ask(front, p, d, "prefill_2", "decode_2")
    assert answer.explain["kv"] == "offered"
    assert params_sent(p)["remote_block_ids"] == told["remote_block_ids"]


async def test_stop_string_leaves_nothing_to_pull(front: Front, p: RecordedEngine, d: RecordedEngine) -> None:
    assert body_said("decode_stop_string")["kv_transfer_params"] is None
    answer = await ask(front, p, d, "prefill_3", "decode_stop_string")
    assert answer.json["choices"][0]["stop_reason"] == "e"
    again = question("prefill_3")
    again["messages"] = [*again["messages"], answer.json["choices"][0]["message"], {"role": "user", "content": "On."}]
    p.plays("prefill_3")
    d.plays("decode_stop_string")
    answer = await front.post(again, headers={"X-Backhaul-Explain": "1"})
    assert answer.explain["kv"] == "no_offer"


async def test_completion_hands_over_too(front: Front, p: RecordedEngine, d: RecordedEngine) -> None:
    answer = await ask(front, p, d, "prefill_completion", "decode_completion")
    assert (
        params_sent(d)["remote_block_ids"] == body_said("prefill_completion")["kv_transfer_params"]["remote_block_ids"]
    )
    assert answer.text_of_whole == body_said("decode_completion")["choices"][0]["text"]
    assert not any(name in answer.raw for name in INTERNAL)


async def test_completion_streamed(front: Front, p: RecordedEngine, d: RecordedEngine) -> None:
    answer = await ask(front, p, d, "prefill_completion_stream", "decode_completion_stream", stream=True)
    assert answer.text == body_said("decode_completion")["choices"][0]["text"]
    assert not any(name in answer.raw for name in INTERNAL)


@pytest.mark.parametrize("name", REFUSALS)
async def test_refusal_reaches_the_client_in_the_engines_words(
    front: Front, p: RecordedEngine, d: RecordedEngine, name: str
) -> None:
    p.plays(name)
    answer = await front.post(question("prefill_1"))
    assert answer.status == recorded(name)["response"]["status"]
    assert answer.error["message"] == body_said(name)["error"]["message"]
    assert len(p.seen) == 1
    assert not d.seen


@pytest.mark.parametrize("name", ["error_bad_ids", "error_ids_beyond_vocabulary"])
async def test_refused_ids_are_no_fault_of_the_client(
    front: Front, p: RecordedEngine, d: RecordedEngine, name: str
) -> None:
    assert recorded(name)["response"]["status"] == 400
    p.plays("prefill_1")
    d.plays(name)
    answer = await front.post(question("prefill_1"))
    assert answer.status == 502
    assert MODEL not in answer.error["message"]


@pytest.mark.parametrize("how", ["whole", "stream"])
async def test_failed_hand_over_is_prefilled_again_for_the_same_engine(
    front: Front, p: RecordedEngine, d: RecordedEngine, how: str
) -> None:
    stream = how == "stream"
    p.plays("prefill_1")
    d.plays("decode_failed_pull_stream" if stream else "decode_failed_pull")
    good = ("prefill_stream_with_params", "decode_stream_with_params") if stream else ("prefill_1", "decode_1")
    answer = await ask(front, p, d, *good, stream=stream)
    assert answer.status == 200
    assert answer.explain["attempts"] == 2
    assert len(p.seen) == len(d.seen) == 2
    assert (answer.text if stream else answer.text_of_whole).startswith("Dear Anna")
