"""What a request says about the KV of its turn, and what its answer tells: the params on their way in and out."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from connectors.transport import LeaseReleased
from connectors.wire.transfer import PREFIX_CACHE_MISS, KVTransferParams
from engine.messages import Output
from engine.request import Request
from tests.unit.server.double import (
    BLOCK_SIZE,
    ENGINE_ID,
    MAX_MODEL_LEN,
    Stage,
    byte_ids,
    eventually,
    params_for_decode,
    says,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HOLD = {"do_remote_decode": True, "do_remote_prefill": False}
ALONE = KVTransferParams.for_decode_alone().to_json()
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
PROMPTS: dict[str, dict[str, Any]] = {CHAT: MESSAGES, COMPLETIONS: {"prompt": "hi"}}


def offered(num_tokens: int, **changes: Any) -> dict[str, Any]:
    """What a decode engine's answer says about the blocks of `num_tokens` tokens."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    fields: dict[str, Any] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_block_ids": [list(range(40, 40 + num_blocks))],
        "remote_block_hashes": [f"{index:02x}" for index in range(num_blocks)],
        "remote_num_tokens": num_tokens,
        "remote_block_size": BLOCK_SIZE,
        "remote_blocks_ttl": 480.0,
        "remote_engine_id": "the-decode-engine",
        "remote_request_id": "chatcmpl-d",
        "remote_host": "10.0.0.2",
        "remote_port": 8200,
    }
    return fields | changes


# Ids of the prompt.


async def test_prefill_leg_uses_the_given_ids_and_never_tokenizes(prefill: Stage) -> None:
    ids = list(range(50))
    status, _ = await prefill.chat(max_tokens=1, kv_transfer_params=HOLD | {"prompt_token_ids": ids})
    assert status == 200
    (request,) = prefill.submitted
    assert request.prompt_token_ids == ids
    assert request.kv_transfer_params is not None
    assert request.kv_transfer_params.to_json() == HOLD
    assert prefill.tokenizer.calls == 0


async def test_prefill_leg_takes_ids_beside_the_blocks_of_the_last_turn(prefill: Stage) -> None:
    ids = list(range(50))
    status, _ = await prefill.chat(kv_transfer_params=offered(40, prompt_token_ids=ids))
    assert status == 200
    (request,) = prefill.submitted
    assert request.prompt_token_ids == ids
    assert request.kv_transfer_params == KVTransferParams.parse(offered(40))
    assert prefill.tokenizer.calls == 0


@pytest.mark.parametrize("ids", [[], [-1], [1.5], [1.0], ["1"], [True], "abc", 5, [320], [0, None], {}])
async def test_ids_that_are_none_are_refused_by_name_on_either_leg(prefill: Stage, decode: Stage, ids: object) -> None:
    for stage, params in ((prefill, HOLD), (decode, params_for_decode())):
        status, answer = await stage.chat(kv_transfer_params=params | {"prompt_token_ids": ids})
        assert (status, answer["error"]["param"]) == (400, "kv_transfer_params.prompt_token_ids")
        assert stage.submitted == []


async def test_null_instead_of_ids_means_none(prefill: Stage) -> None:
    assert (await prefill.chat(kv_transfer_params=HOLD | {"prompt_token_ids": None}))[0] == 200
    assert prefill.tokenizer.calls == 1


@pytest.mark.parametrize("params", [{}, {"do_remote_prefill": False, "do_remote_decode": False}])
async def test_ids_are_not_for_clients(both: Stage, params: dict[str, Any]) -> None:
    """Without a hand-off, nobody but a client can have sent them."""
    for ids in ([1, 2, 3], [-1]):
        assert (await both.chat(kv_transfer_params=params | {"prompt_token_ids": ids}))[0] == 200
        assert both.submitted[-1].prompt_token_ids != ids
        told = both.submitted[-1].kv_transfer_params
        assert told is None or told.prompt_token_ids is None


async def test_decode_engine_on_its_own_takes_ids_with_the_offer_it_is_asked_for(decode: Stage) -> None:
    ids = [1, 2, 3]
    assert (await decode.chat(kv_transfer_params=ALONE | {"prompt_token_ids": ids}))[0] == 200
    assert decode.submitted[-1].prompt_token_ids == ids
    assert decode.tokenizer.calls == 0


async def test_too_many_ids_are_refused(prefill: Stage) -> None:
    status, answer = await prefill.chat(kv_transfer_params=HOLD | {"prompt_token_ids": [0] * MAX_MODEL_LEN})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]]])
async def test_ids_of_one_prompt_are_not_for_several(decode: Stage, prompts: list[Any]) -> None:
    params = params_for_decode(prompt_token_ids=[1, 2, 3])
    status, answer = await decode.post(COMPLETIONS, {"prompt": prompts, "kv_transfer_params": params})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert decode.submitted == []


# Offers.


async def test_offer_asked_for_reaches_the_engine(decode: Stage, both: Stage) -> None:
    for stage in (decode, both):
        for path, prompt in PROMPTS.items():
            for extra in ({}, {"max_prefill_tokens": 5}, {"remote_blocks_ttl": 60.0}):
                status, _ = await stage.post(path, prompt | {"kv_transfer_params": ALONE | extra})
                assert status == 200
                params = stage.submitted[-1].kv_transfer_params
                assert params is not None
                assert {k: v for k, v in params.to_json().items() if v is not None} == ALONE | extra


async def test_nothing_but_the_offer_is_taken_from_params_without_a_flag(decode: Stage) -> None:
    params = params_for_decode(do_remote_prefill=False, offer_blocks=True, unknown=1)
    assert (await decode.chat(kv_transfer_params=params))[0] == 200
    told = decode.submitted[0].kv_transfer_params
    assert told is not None
    assert {k: v for k, v in told.to_json().items() if v is not None} == ALONE
    assert decode.transport.released == []


async def test_offer_is_ignored_where_none_is_possible(stage: Stage, prefill: Stage, decode: Stage) -> None:
    for server, prompt in ((stage, "a"), (prefill, "a"), (decode, ["a", "b"])):
        status, _ = await server.post(COMPLETIONS, {"prompt": prompt, "kv_transfer_params": ALONE})
        assert status == 200
        assert all(request.kv_transfer_params in (None, KVTransferParams()) for request in server.submitted)
    for params in ({"offer_blocks": False}, {"offer_blocks": None}, {"max_prefill_tokens": 3}):
        assert (await decode.chat(kv_transfer_params=params))[0] == 200
        assert decode.submitted[-1].kv_transfer_params == KVTransferParams()
    status, answer = await decode.chat(kv_transfer_params={"offer_blocks": 1})
    assert (status, answer["error"]["param"]) == (400, "kv_transfer_params.offer_blocks")


async def test_engine_that_lacks_the_prefix_says_so_by_code(decode: Stage) -> None:
    decode.script = lambda request: [
        Output(request.request_id, [], "error", error="90 tokens are missing", error_status=409)
    ]
    for streaming in (False, True):
        status, answer = await decode.chat(stream=streaming, kv_transfer_params=ALONE | {"max_prefill_tokens": 5})
        assert (status, answer["error"]["code"]) == (409, PREFIX_CACHE_MISS)
        assert answer["error"]["message"] == "90 tokens are missing"


# What the answer tells.


LEGS = {
    "alone": ("both", None, {"num_cached_tokens": 3}, 3),
    "prefill": ("prefill", HOLD, {"num_cached_tokens": 3, "num_external_tokens": 4}, 7),
    "prefill, all of it": ("prefill", HOLD, {"num_cached_tokens": 3, "num_external_tokens": 4000}, None),
    "decode": ("decode", params_for_decode(), {"num_cached_tokens": 2, "num_external_tokens": 5}, 16),
    "decode, pulled too": (
        "decode",
        params_for_decode(remote_prefill_pulled_tokens=3),
        {"num_cached_tokens": 2},
        19,
    ),
    "decode, only pulled": (
        "decode",
        params_for_decode(remote_prefill_pulled_tokens=3, remote_prefill_cached_tokens=None),
        {"num_cached_tokens": 2},
        3,
    ),
    "decode, beyond the prompt": ("decode", params_for_decode(remote_prefill_pulled_tokens=3000), {}, None),
    "decode, not told": (
        "decode",
        params_for_decode(remote_prefill_cached_tokens=None),
        {"num_cached_tokens": 2, "num_external_tokens": 5},
        2,
    ),
}
PROMPT_IDS = [*range(1, 21)]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("leg", LEGS)
async def test_first_chunk_and_usage_say_what_nobody_computed(tiny_model: Path, path: str, leg: str) -> None:
    role, params, counts, expected = LEGS[leg]
    body: dict[str, Any] = {"return_token_ids": True, "stream_options": {"include_usage": True}}
    if path == COMPLETIONS:
        body |= {"prompt": PROMPT_IDS, "kv_transfer_params": params}
    else:
        body |= MESSAGES | {"kv_transfer_params": params and params | {"prompt_token_ids": PROMPT_IDS}}

    def script(request: Request) -> Iterable[Output]:
        yield Output(request.request_id, byte_ids("a"), **counts)
        yield Output(request.request_id, byte_ids("b"), "length", **counts)

    async with Stage(tiny_model, role=role, kv=True) as stage:
        stage.script = script
        first, *others, last = await stage.stream(path, body)
        _, whole = await stage.post(path, {key: value for key, value in body.items() if key != "stream_options"})
        num_prompt = stage.submitted[0].num_prompt_tokens
        silent = await stage.stream(path, body | {"return_token_ids": False})
    expected = num_prompt if expected is None else expected
    assert first["num_cached_tokens"] == expected
    assert (first["choices"][0] if path == COMPLETIONS else first)["prompt_token_ids"] == (
        stage.submitted[0].prompt_token_ids
    )
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
    assert all("num_cached_tokens" not in event for event in [*others, last, whole, *silent])


async def test_every_choice_of_several_prompts_tells_it_once(stage: Stage) -> None:
    stage.script = says("hello", num_cached_tokens=3)
    prompts = [PROMPT_IDS, PROMPT_IDS[:2]]
    events = await stage.stream(COMPLETIONS, {"prompt": prompts, "return_token_ids": True})
    told = {e["choices"][0]["index"]: e["num_cached_tokens"] for e in events if "num_cached_tokens" in e}
    assert told == {0: 3, 1: 2}
    assert sum("num_cached_tokens" in event for event in events) == 2


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("include", [False, True])
async def test_offer_comes_after_a_stop_string_and_on_the_finish_chunk_alone(
    decode: Stage, path: str, include: bool
) -> None:
    """The engine hears of the stop string, ends the request, and says in its last output what it holds."""
    asked: list[int] = []

    def ending(request: Request, num_output_tokens: int) -> Output:
        asked.append(num_output_tokens)
        params = KVTransferParams.parse(offered(request.num_prompt_tokens + num_output_tokens))
        return Output(request.request_id, [], "stop", kv_transfer_params=params)

    decode.script = lambda request: [Output(request.request_id, [token]) for token in byte_ids("one two")]
    decode.on_stop = ending
    body = PROMPTS[path] | {
        "kv_transfer_params": ALONE,
        "stop": ["e t"],
        "include_stop_str_in_output": include,
        "return_token_ids": True,
    }
    events = await decode.stream(path, body | {"stream_options": {"include_usage": True}})
    *chunks, usage = events
    (with_params,) = [event for event in events if "kv_transfer_params" in event]
    (finish,) = [event for event in chunks if event["choices"][0]["finish_reason"]]
    assert with_params is finish is chunks[-1]
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert finish["choices"][0]["stop_reason"] == "e t"
    assert usage["usage"]["completion_tokens"] == 5
    num_tokens = decode.submitted[0].num_prompt_tokens + 5
    assert finish["kv_transfer_params"]["remote_num_tokens"] == num_tokens
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == byte_ids("one t")
    status, answer = await decode.post(path, body)
    assert status == 200
    assert answer["kv_transfer_params"]["remote_num_tokens"] == num_tokens
    assert answer["choices"][0]["token_ids"] == byte_ids("one t")
    assert asked == [5, 5]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("together", [False, True])
async def test_offer_of_an_engine_that_went_past_the_stop_string_is_cut(
    decode: Stage, streaming: bool, together: bool
) -> None:
    """It ended by itself, before it heard of the stop string: what it sampled since is no part of the answer."""

    def script(request: Request) -> Iterable[Output]:
        params = KVTransferParams.parse(offered(request.num_prompt_tokens + len(text) - 1))
        if together:
            yield Output(request.request_id, byte_ids(text), "length", kv_transfer_params=params)
            return
        yield Output(request.request_id, byte_ids(text[:20]))
        deadline = time.monotonic() + 5
        while decode.inbox.empty() and time.monotonic() < deadline:  # until the server has asked to stop
            time.sleep(0.002)
        yield Output(request.request_id, byte_ids(text[20:]), "length", kv_transfer_params=params)

    text = "a" * 17 + "b" + "c" * 40
    decode.script = script
    body = {"prompt": PROMPT_IDS, "stop": ["b"], "max_tokens": 60, "kv_transfer_params": ALONE}
    if streaming:
        (params,) = [
            e["kv_transfer_params"] for e in await decode.stream(COMPLETIONS, body) if "kv_transfer_params" in e
        ]
    else:
        params = (await decode.post(COMPLETIONS, body))[1]["kv_transfer_params"]
    # 20 + 18 tokens count; an offer can be cut between blocks only.
    assert params["remote_num_tokens"] == 32
    assert params["remote_block_ids"] == [[40, 41]]
    assert params["remote_block_hashes"] == ["00", "01"]
    assert decode.other == []


async def test_offer_of_which_nothing_is_left_is_released(decode: Stage) -> None:
    def script(request: Request) -> Iterable[Output]:
        params = KVTransferParams.parse(offered(18, remote_request_id=request.request_id))
        yield Output(request.request_id, byte_ids("b" + "c" * 16), "length", kv_transfer_params=params)

    decode.script = script
    body = {"prompt": [1], "stop": ["b"], "kv_transfer_params": ALONE}
    status, answer = await decode.post(COMPLETIONS, body)
    assert status == 200
    assert "kv_transfer_params" not in answer
    await eventually(lambda: decode.other == [LeaseReleased(decode.submitted[0].request_id)])


async def test_blocks_prefill_holds_for_decode_are_never_cut(prefill: Stage) -> None:
    """They are those of the prompt, whatever the one token sampled here says."""
    params = KVTransferParams.parse(params_for_decode(remote_num_tokens=32))
    prefill.script = lambda request: [Output(request.request_id, byte_ids("b"), "length", kv_transfer_params=params)]
    body = {"prompt": [1], "stop": ["b"], "max_tokens": 1, "kv_transfer_params": HOLD}
    _, answer = await prefill.post(COMPLETIONS, body)
    assert answer["kv_transfer_params"] == params.to_json()


# Refusals.


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "nobody"}, 404),
        ({"temperature": -1}, 400),
        ({"n": 2}, 400),
        ({"messages": []}, 400),
        ({"messages": [{"role": "user", "content": "x" * MAX_MODEL_LEN}]}, 400),
        ({"messages": [{"role": "user", "content": "x" * 200_000}]}, 413),
        ({"kv_transfer_params": offered(40, prompt_token_ids=[320])}, 400),
        ({"kv_transfer_params": offered(40, remote_num_tokens="40")}, 400),
    ],
)
async def test_blocks_offered_to_a_refused_prefill_leg_are_left_alone(
    prefill: Stage, change: dict[str, Any], status: int
) -> None:
    """They are the router's: another prefill engine may pull them."""
    got, answer = await prefill.post(CHAT, MESSAGES | {"kv_transfer_params": offered(40)} | change)
    assert got == status, answer
    assert prefill.submitted == []
    assert prefill.transport.released == []
    assert prefill.other == []


async def test_blocks_offered_to_a_draining_or_full_engine_are_left_alone(tiny_model: Path) -> None:
    async with Stage(tiny_model, role="prefill", kv=True, capacity=0) as stage:
        for draining in (False, True):
            stage.worker.draining = draining
            status, _ = await stage.chat(kv_transfer_params=offered(40))
            assert status == 503
            status, _ = await stage.chat(kv_transfer_params=params_for_decode())
            assert status == 503
    assert [peer.engine_id for peer, _ in stage.transport.released] == ["the-prefill-engine"] * 2


# Leases.


async def test_refused_claim_says_why(decode: Stage) -> None:
    names = {"engine_id": ENGINE_ID, "request_id": "r"}

    async def code() -> str:
        status, answer = await decode.post("/kv/claim", names)
        assert (status, answer["error"]["type"]) == (410, "LeaseError")
        return str(answer["error"]["code"])

    assert await code() == "lease_expired"
    decode.leases.hold("r", [1], ["aa"], 30)
    assert (await decode.post("/kv/claim", names))[0] == 200
    assert await code() == "lease_claimed"
    decode.leases.release("r")
    decode.leases.hold("r", [1], ["aa"], 30)
    assert await decode.post("/kv/release", names) == (200, {"released": True})
    assert await code() == "lease_cancelled"
    decode.leases.release("r")
    assert await code() == "lease_released"
    decode.leases.hold("r", [1], ["aa"], 30, revocable=True)
    assert decode.leases.revoke_oldest() is not None
    assert await code() == "lease_revoked"
    assert await decode.post("/kv/release", names) == (200, {"released": False})


async def test_engine_that_cannot_exchange_kv_any_more_takes_itself_out(prefill: Stage) -> None:
    assert (await prefill.session.get("/health")).status == 200
    prefill.transport.failed = True
    for path in ("/health", "/v1/models"):
        assert (await prefill.session.get(path)).status == 503
    status, answer = await prefill.chat(kv_transfer_params=HOLD)
    assert (status, "restarted" in answer["error"]["message"]) == (503, True)
