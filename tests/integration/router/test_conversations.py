"""What a router makes of the turn before: whose blocks go to which prefill engine, and that none are left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from multidict import CIMultiDict
from redis.asyncio import Redis

from tests.router_harness import NOBODY, Front, router_over, until
from tests.stub_engine import BLOCK_SIZE, OUTPUT_IDS, START_OF_ANSWER, TEXT, StubEngine, hang_up, refuse, word

EXPLAIN = {"X-Backhaul-Explain": "1"}
FIRST = "one two three four five six"
SETTINGS: dict[str, Any] = {"kv_recompute_threshold": 2, "decode_only_tokens": 0}
Message = dict[str, str]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


ANSWER = {"role": "assistant", "content": TEXT}
TURN_1 = [user(FIRST)]
TURN_2 = [*TURN_1, ANSWER, user("and what then")]
PROMPT_1 = [1, *map(word, FIRST.split()), START_OF_ANSWER]
HELD_1 = len(PROMPT_1) + len(OUTPUT_IDS) - 1
"""Tokens whose KV the decode engine holds after the first turn."""


def chat(messages: list[Message], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": messages, **fields}


@pytest.fixture
async def p() -> AsyncIterator[StubEngine]:
    async with StubEngine("prefill", tokenizes=True).running() as engine:
        yield engine


@pytest.fixture
async def d() -> AsyncIterator[StubEngine]:
    async with StubEngine("decode", tokenizes=True).running() as engine:
        yield engine


async def complains(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    error = {"message": "bad blocks", "param": "kv_transfer_params.remote_block_ids", "code": 400}
    return web.json_response({"error": error}, status=400)


@asynccontextmanager
async def after_first_turn(
    p: StubEngine, d: StubEngine, redis: str, *, prefill: list[StubEngine | str] | None = None, **settings: Any
) -> AsyncIterator[Front]:
    async with router_over(prefill or [p], [d], redis, **{**SETTINGS, **settings}) as front:
        assert (await front.post(chat(TURN_1))).text_of_whole == TEXT
        p.seen.clear()
        d.seen.clear()
        yield front


def offered(engine: StubEngine, number: int = -1) -> list[int] | None:
    """The blocks named in a prefill leg."""
    groups = engine.bodies[number]["kv_transfer_params"].get("remote_block_ids")
    return None if groups is None else groups[0]


async def released(d: StubEngine, *request_ids: str) -> None:
    await until(lambda: [lease["request_id"] for lease in d.released] == list(request_ids), f"released: {request_ids}")


async def test_next_turn_pulls_what_the_last_one_left(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    async with after_first_turn(p, d, redis_url) as front:
        answer = await front.post(chat(TURN_2), headers=EXPLAIN)
        [prefill], [decode] = p.bodies, d.bodies
    params = prefill["kv_transfer_params"]
    prompt = [*PROMPT_1, *OUTPUT_IDS, 1, *map(word, ["and", "what", "then"]), START_OF_ANSWER]
    assert params["prompt_token_ids"] == prompt
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert params["remote_num_tokens"] == HELD_1
    assert params["remote_block_ids"] == [list(range(3, 3 + -(-HELD_1 // BLOCK_SIZE)))]
    assert params["remote_request_id"] == "decode-1"
    assert decode["kv_transfer_params"]["prompt_token_ids"] == prompt
    assert [query["known_token_ids"] for query in p.tokenized] == [[*PROMPT_1, *OUTPUT_IDS]]
    assert not d.tokenized
    told = answer.explain
    assert (told["reason"], told["kv"], told["turn"]) == ("affinity", "offered", 2)
    assert (told["prefill"], told["decode"]) == (p.url, d.url)
    assert (told["prompt_tokens"], told["tokens_reused"], told["tokens_pulled"]) == (len(prompt), 1, HELD_1)
    assert told["tokens_computed"] == len(prompt) - 1 - HELD_1
    assert not d.released, "the prefill engine sees to what it was given"


async def test_third_turn_goes_on_from_the_second(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    async with after_first_turn(p, d, redis_url) as front:
        await front.post(chat(TURN_2, stream=True))
        answer = await front.post(chat([*TURN_2, ANSWER, user("more")]), headers=EXPLAIN)
        assert answer.explain["turn"] == 3
        assert p.bodies[-1]["kv_transfer_params"]["remote_request_id"] == d_request(d, -2)


def d_request(d: StubEngine, number: int) -> str:
    """The request id a decode engine gave its answer: they are counted from the last clearing of `seen`."""
    return f"decode-{len(d.seen) + 1 + number}"


@pytest.mark.parametrize(
    ("messages", "num_known", "kv"),
    [
        pytest.param(
            [user(FIRST), {"role": "assistant", "content": "other words"}, user("x")], 8, "offered", id="answer"
        ),
        pytest.param([user("one two three four and then"), ANSWER, user("x")], 5, "offered", id="end of a message"),
        pytest.param([user("one two three four five")], 6, "offered", id="cut short"),
        pytest.param([user("six five four"), ANSWER, user("x")], None, "short", id="first message"),
        pytest.param([{"role": "system", "content": "Be brief"}, *TURN_2], None, "short", id="system prompt"),
    ],
)
async def test_edited_history_gets_what_is_still_true_of_it(
    p: StubEngine, d: StubEngine, redis_url: str, messages: list[Message], num_known: int | None, kv: str
) -> None:
    async with router_over([p], [d], redis_url, **SETTINGS) as front:
        named = {"conversation_id": "edited"}
        await front.post(chat(TURN_1, **named))
        answer = await front.post(chat(messages, **named), headers=EXPLAIN)
        assert (answer.status, answer.explain["kv"]) == (200, kv)
        if num_known is None:
            assert offered(p) is None
            await released(d, "decode-1")
        else:
            num_blocks = num_known // BLOCK_SIZE
            assert offered(p) == list(range(3, 3 + num_blocks))
            assert p.bodies[-1]["kv_transfer_params"]["remote_num_tokens"] == num_blocks * BLOCK_SIZE
            assert len(p.bodies[-1]["kv_transfer_params"]["remote_block_hashes"]) == num_blocks


async def test_reasoning_that_the_client_drops_is_not_pulled(redis_url: str) -> None:
    """The decode engine computed the thinking too; of the next prompt, which lacks it, only the start is the same."""
    thinking = "<think> let me see </think> " + TEXT

    async def thinks(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        whole = d.whole(body)
        whole["choices"][0]["message"]["content"] = thinking
        whole["choices"][0]["token_ids"] = [7, 7, 7, 7, *OUTPUT_IDS]
        whole["usage"]["completion_tokens"] = 4 + len(OUTPUT_IDS)
        whole["kv_transfer_params"] = {**d.params(body), "remote_num_tokens": HELD_1 + 4} | _blocks(HELD_1 + 4)
        return web.json_response(whole)

    async with (
        StubEngine("prefill", tokenizes=True).running() as p,
        StubEngine("decode", tokenizes=True).running() as d,
        router_over([p], [d], redis_url, **SETTINGS) as front,
    ):
        d.scripts.append(thinks)
        await front.post(chat(TURN_1))
        answer = await front.post(chat(TURN_2), headers=EXPLAIN)
        assert (answer.explain["turn"], answer.explain["kv"]) == (2, "offered")
        assert p.bodies[-1]["kv_transfer_params"]["remote_num_tokens"] == len(PROMPT_1) // BLOCK_SIZE * BLOCK_SIZE


def _blocks(num_tokens: int) -> dict[str, Any]:
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    return {
        "remote_block_ids": [list(range(3, 3 + num_blocks))],
        "remote_block_hashes": [f"{block:032x}" for block in range(num_blocks)],
    }


async def test_of_parallel_turns_one_gets_the_blocks(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    async with after_first_turn(p, d, redis_url) as front:
        answers = await asyncio.gather(*(front.post(chat(TURN_2), headers=EXPLAIN) for _ in range(5)))
        assert sorted(answer.explain["kv"] for answer in answers) == ["no_offer"] * 4 + ["offered"]
        assert sum(offered(p, number) is not None for number in range(5)) == 1
        assert {answer.explain["turn"] for answer in answers} == {2}


async def test_regenerated_answer_finds_its_engines_but_no_blocks(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    async with after_first_turn(p, d, redis_url) as front:
        await front.post(chat(TURN_2))
        again = await front.post(chat(TURN_2), headers=EXPLAIN)
        assert (again.explain["turn"], again.explain["kv"], again.explain["reason"]) == (2, "no_offer", "affinity")
        other = await front.post(chat([*TURN_2, ANSWER, user("a")]), headers=EXPLAIN)
        branch = await front.post(chat([*TURN_2, ANSWER, user("b")]), headers=EXPLAIN)
        assert (other.explain["kv"], branch.explain["kv"]) == ("offered", "no_offer")


async def test_prefill_engine_that_cannot_be_reached_costs_no_blocks(
    p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    async with after_first_turn(p, d, redis_url) as front:
        assert p.site is not None
        await p.stop_listening()
        for connection in p.connections:
            connection.close()
        assert (await front.post(chat(TURN_2))).status == 503
        assert not d.released
        async with p.running(int(p.url.rsplit(":", 1)[1])):
            await until(lambda: front.router.pool.is_up("prefill"), "the prefill engine is back")
            answer = await front.post(chat(TURN_2), headers=EXPLAIN)
        assert (answer.explain["kv"], answer.explain["turn"]) == ("offered", 2)


@pytest.mark.parametrize("status", [400, 413, 503])
async def test_refused_turn_leaves_the_blocks_for_the_next(
    p: StubEngine, d: StubEngine, redis_url: str, status: int
) -> None:
    async with after_first_turn(p, d, redis_url) as front:
        p.scripts.append(refuse(status, "too long"))
        refused = await front.post(chat(TURN_2))
        assert (refused.status, refused.error["message"]) == (status, "too long")
        await until(front.is_settled, "the offer is back in the store")
        answer = await front.post(chat(TURN_2), headers=EXPLAIN)
        assert (answer.explain["kv"], answer.explain["attempts"]) == ("offered", 1)
        assert not d.released


async def test_failed_pull_is_tried_again_without_blocks(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    """An engine that fails requests whose KV did not come says 500; it is not ill."""
    async with after_first_turn(p, d, redis_url) as front:
        p.scripts.append(refuse(500, "the KV could not be loaded"))
        answer = await front.post(chat(TURN_2), headers=EXPLAIN)
        assert (answer.text_of_whole, answer.explain["attempts"], answer.explain["kv"]) == (TEXT, 2, "gone")
        assert (offered(p, 0) is not None, offered(p, 1)) == (True, None)
        await released(d, "decode-1")


async def test_prefill_engine_that_hangs_up_is_replaced_and_the_blocks_are_let_go(
    p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    async def dies(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        hang_up(request)
        return web.Response()

    async with (
        StubEngine("prefill", tokenizes=True).running() as p2,
        after_first_turn(p, d, redis_url, prefill=[p, p2]) as front,
    ):
        p2.seen.clear()
        p.scripts.append(dies)
        p2.scripts.append(dies)
        await front.post(chat(TURN_2))
        await released(d, "decode-1")
        legs = [body["kv_transfer_params"] for engine in (p, p2) for body in engine.bodies]
        assert sorted("remote_block_ids" in leg for leg in legs) == [False, True], "offered to one, and once"


async def test_params_the_prefill_engine_does_not_understand_are_not_the_clients_fault(
    p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    async with after_first_turn(p, d, redis_url) as front:
        p.scripts.append(complains)
        answer = await front.post(chat(TURN_2), headers=EXPLAIN)
        assert (answer.text_of_whole, answer.explain["kv"]) == (TEXT, "gone")
        await released(d, "decode-1")


async def test_client_that_leaves_during_the_prefill_leg(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    """The prefill engine may be reading: the blocks are its affair, and the turn leaves nothing else behind."""
    arrived = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        arrived.set()
        await asyncio.sleep(60)
        raise AssertionError

    async with after_first_turn(p, d, redis_url) as front:
        p.scripts.append(slow)
        leaving = asyncio.create_task(front.post(chat(TURN_2)))
        await arrived.wait()
        leaving.cancel()
        await until(lambda: p.aborted == 1, "the prefill leg is cut")
        await until(front.is_settled, "nothing is left to do")
        answer = await front.post(chat(TURN_2), headers=EXPLAIN)
        assert (answer.explain["kv"], answer.explain["turn"]) == ("no_offer", 2)


async def test_short_suffix_is_left_to_the_decode_engine(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    async with after_first_turn(p, d, redis_url, decode_only_tokens=8) as front:
        answer = await front.post(chat(TURN_2), headers=EXPLAIN)
        assert (answer.explain["reason"], answer.explain["kv"]) == ("short_suffix", "own_cache")
        assert not p.seen
        params = d.bodies[-1]["kv_transfer_params"]
        assert params["offer_blocks"] is True
        assert params["max_prefill_tokens"] >= len(params["prompt_token_ids"]) - HELD_1
        await released(d, "decode-1")
        third = [*TURN_2, ANSWER, user("now a rather longer question than the ones before it was")]
        answer = await front.post(chat(third, stream=True), headers=EXPLAIN)
        assert (answer.explain["reason"], answer.explain["kv"]) == ("affinity", "offered")


async def test_prefill_engine_that_knows_most_is_remembered_over_turns_without_one(
    p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    async with (
        StubEngine("prefill", tokenizes=True).running() as p2,
        after_first_turn(p, d, redis_url, prefill=[p, p2], decode_only_tokens=8) as front,
    ):
        pool = front.router.pool
        first = pool.get("prefill", p2.url if p2.seen else p.url)
        await front.post(chat(TURN_2))
        third = [*TURN_2, ANSWER, user("now a rather longer question than the ones before it was")]
        with pool.expecting(first):  # by the load alone it would be the other's turn
            answer = await front.post(chat(third), headers=EXPLAIN)
        assert (answer.explain["turn"], answer.explain["prefill"]) == (3, first.url)


async def test_decode_engine_that_has_lost_the_blocks_says_so(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    async def missing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = {"message": "not in the prefix cache", "code": "prefix_cache_miss"}
        return web.json_response({"error": error}, status=409)

    async with after_first_turn(p, d, redis_url, decode_only_tokens=8) as front:
        d.scripts.append(missing)
        answer = await front.post(chat(TURN_2), headers=EXPLAIN)
        assert (answer.text_of_whole, answer.explain["reason"]) == (TEXT, "affinity")
        assert (len(p.seen), answer.explain["attempts"]) == (1, 2)


async def test_engines_of_others_get_only_what_was_compared(redis_url: str) -> None:
    async with (
        StubEngine("prefill", tokenizes=True, owned_by="vllm", kv_layout=None).running() as p,
        StubEngine("decode", tokenizes=True, owned_by="vllm", kv_layout=None).running() as d,
        after_first_turn(p, d, redis_url) as front,
    ):
        p.tokenizes = d.tokenizes = False  # and so the ids cannot be had
        answer = await front.post(chat(TURN_2), headers=EXPLAIN)
        assert (answer.explain["kv"], offered(p)) == ("unverified", None)
        p.tokenizes = d.tokenizes = True
        answer = await front.post(chat([*TURN_2, ANSWER, user("x y")]), headers=EXPLAIN)
        assert "known_token_ids" not in p.tokenized[-1]
        # What was answered while they could not tokenize was not this prompt's.
        assert answer.explain["kv"] in ("mismatch", "short")


async def test_engines_of_others_do_not_tokenize_twice(redis_url: str) -> None:
    """What their prefill engine has just tokenized for the comparison it is sent as ids."""
    async with (
        StubEngine("prefill", tokenizes=True, owned_by="vllm", kv_layout=None).running() as p,
        StubEngine("decode", tokenizes=True, owned_by="vllm", kv_layout=None).running() as d,
        router_over([p], [d], redis_url, **SETTINGS) as front,
    ):
        salted = {"cache_salt": "twice", "temperature": 0.5, "tools": []}
        await front.post(chat(TURN_1, **salted))
        assert p.seen[-1].path == "/v1/chat/completions", "nothing to compare, so nothing was tokenized"
        answer = await front.post(chat(TURN_2, **salted), headers=EXPLAIN)
        assert (answer.text_of_whole, answer.explain["kv"]) == (TEXT, "offered")
        assert (p.seen[-1].path, p.bodies[-1]["prompt"]) == ("/v1/completions", p.ids(p.tokenized[-1]))
        assert p.bodies[-1]["cache_salt"] == "twice"
        assert offered(p)
        assert p.bodies[-1]["max_tokens"] == 1
        assert (d.seen[-1].path, d.bodies[-1]["messages"]) == ("/v1/chat/completions", TURN_2)


async def test_engines_that_compare_hashes_themselves_are_offered_what_could_not_be_compared(
    p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    async with after_first_turn(p, d, redis_url) as front:
        answer = await front.post(chat(TURN_2, novel_key=1), headers=EXPLAIN)
        assert answer.explain["kv"] == "self_checked"
        assert "prompt_token_ids" not in p.bodies[-1]["kv_transfer_params"]
        assert p.bodies[-1]["kv_transfer_params"]["remote_num_tokens"] == HELD_1
        assert not p.tokenized


async def test_several_cache_groups_are_used_whole_or_not_at_all(redis_url: str) -> None:
    async with (
        StubEngine("prefill", tokenizes=True).running() as p,
        StubEngine("decode", tokenizes=True, groups=2).running() as d,
        router_over([p], [d], redis_url, **SETTINGS) as front,
    ):
        named = {"conversation_id": "groups"}
        await front.post(chat(TURN_1, **named))
        whole = await front.post(chat(TURN_2, **named), headers=EXPLAIN)
        assert whole.explain["kv"] == "offered"
        assert len(p.bodies[-1]["kv_transfer_params"]["remote_block_ids"]) == 2
        edited = [*TURN_1, {"role": "assistant", "content": "no"}, user("x")]
        answer = await front.post(chat(edited, **named), headers=EXPLAIN)
        assert (answer.explain["kv"], offered(p)) == ("uncuttable", None)


@pytest.mark.parametrize(("layout", "kv"), [("layout-1", "self_checked"), (None, "media")], ids=["ours", "others"])
async def test_kv_of_pictures_is_offered_only_to_who_compares_them(
    p: StubEngine, d: StubEngine, redis_url: str, layout: str | None, kv: str
) -> None:
    p.kv_layout = d.kv_layout = layout

    def picture(url: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}

    async with router_over([p], [d], redis_url, **SETTINGS) as front:
        named = {"conversation_id": f"pictures {kv}"}
        await front.post(chat([picture("a")], **named))
        answer = await front.post(chat([picture("b"), ANSWER, user("x")], **named), headers=EXPLAIN)
        assert answer.explain["kv"] == kv
        assert (offered(p) is None) is (layout is None)
        assert bool(p.bodies[-1]["kv_transfer_params"].get("remote_block_hashes")) is (layout is not None)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "prompt": "one two"},
        {"model": "m", "prompt": "one two", "stream": True},
        chat(TURN_1, n=2),
        chat(TURN_1, n=2, conversation_id="named"),
    ],
    ids=["completion", "stream", "several", "several, named"],
)
async def test_turn_that_nobody_can_go_on_from_is_not_offered(
    p: StubEngine, d: StubEngine, redis_url: str, body: dict[str, Any]
) -> None:
    async with router_over([p], [d], redis_url, **SETTINGS) as front:
        assert (await front.post(body)).status == 200
        params = d.bodies[-1]["kv_transfer_params"]
        assert (params["do_remote_prefill"], params["offer_blocks"]) == (True, False)
        assert "remote_blocks_ttl" not in params
        assert (await front.post({**body, "n": 1, "conversation_id": "named"})).status == 200
        params = d.bodies[-1]["kv_transfer_params"]
        assert "offer_blocks" not in params, "a name is there to be found by"
        assert params["remote_blocks_ttl"] > 0
        await until(front.is_settled, "nothing is left to do")
        assert not d.released


async def test_nor_is_one_that_a_decode_engine_has_prefilled(d: StubEngine, redis_url: str) -> None:
    async with router_over([NOBODY], [d], redis_url, prefill_fallback="decode", **SETTINGS) as front:
        assert (await front.post({"model": "m", "prompt": "one two"})).status == 200
        assert "kv_transfer_params" not in d.bodies[-1]


async def test_replaced_offer_is_released(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    async with router_over([p], [d], redis_url, **SETTINGS) as front:
        named = {"conversation_id": "twice"}
        await front.post(chat([user("a b c d")], **named))
        await front.post(chat([user("e f g h")], **named))
        await released(d, "decode-1")


async def test_offer_that_cannot_be_kept_is_released(p: StubEngine, d: StubEngine) -> None:
    async with router_over([p], [d], "redis://127.0.0.1:1/0", **SETTINGS) as front:
        assert (await front.post(chat(TURN_1))).text_of_whole == TEXT
        await released(d, "decode-1")


async def test_owner_that_is_down_is_not_asked_for_blocks(p: StubEngine, redis_url: str) -> None:
    async with StubEngine("decode", tokenizes=True).running() as d2:
        d1 = StubEngine("decode", tokenizes=True)
        async with d1.running(), router_over([p], [d1], redis_url, **SETTINGS) as front:
            await front.post(chat(TURN_1))
        async with router_over([p], [d1.url, d2], redis_url, wait=False, **SETTINGS) as front:
            await until(lambda: front.router.pool.is_up("decode") and front.router.pool.is_up("prefill"), "up")
            await until(lambda: front.router.pool.decode[0].state == "ejected", "the owner is known to be down")
            answer = await front.post(chat(TURN_2), headers=EXPLAIN)
        assert (answer.explain["reason"], answer.explain["kv"]) == ("moved", "owner_down")
        assert offered(p) is None


async def test_conversations_of_different_tenants_have_nothing_in_common(
    p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    async with router_over([p], [d], redis_url, tenant_header="X-Tenant", **SETTINGS) as front:
        for fields in ({}, {"conversation_id": "same"}):
            await front.post(chat(TURN_1, **fields), headers={"X-Tenant": "a"})
            other = await front.post(chat(TURN_2, **fields), headers={"X-Tenant": "b", **EXPLAIN})
            assert (other.explain["turn"], other.explain["kv"]) == (1, "no_record")
            same = await front.post(chat(TURN_2, **fields), headers={"X-Tenant": "a", **EXPLAIN})
            assert (same.explain["turn"], same.explain["kv"]) == (2, "offered")


async def test_decisions_are_counted(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    async with after_first_turn(p, d, redis_url) as front:
        await front.post(chat(TURN_2))
        for reason, kv in (("new", "no_record"), ("affinity", "offered")):
            assert await front.metric("backhaul_router_plans_total", reason=reason, kv=kv) == 1
        assert await front.metric("backhaul_router_tokens_total", kind="pulled") == HELD_1
        assert await front.metric("backhaul_router_tokenizations_total", result="ok") == 1
        cached = await front.metric("backhaul_router_tokens_total", kind="cached")
        computed = await front.metric("backhaul_router_tokens_total", kind="computed")
        prompt = await front.metric("backhaul_router_tokens_total", kind="prompt")
        assert prompt == cached + computed + HELD_1


async def test_prefill_engine_gone_from_the_start(d: StubEngine, redis_url: str) -> None:
    """Turns that decode engines prefill for themselves offer their blocks to the turn that finds a prefill engine."""
    async with router_over([NOBODY], [d], redis_url, prefill_fallback="decode", **SETTINGS) as front:
        answer = await front.post(chat(TURN_1), headers=EXPLAIN)
        assert answer.explain["reason"] == "no_prefill_engine"
        assert d.bodies[-1]["kv_transfer_params"]["offer_blocks"] is True


async def test_client_that_leaves_before_the_prefill_engine_looks_costs_the_decode_engine_nothing(
    p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    arrived = asyncio.Event()

    async def refuses_late(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        arrived.set()
        await asyncio.sleep(0.05)
        return await refuse(503)(request, body)

    async with after_first_turn(p, d, redis_url) as front:
        p.scripts.append(refuses_late)
        leaving = asyncio.create_task(front.post(chat(TURN_2)))
        await arrived.wait()
        leaving.cancel()
        await released(d, "decode-1")


async def test_turn_is_filed_though_its_client_leaves_at_the_last_moment(
    p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    async with (
        router_over([p], [d], redis_url, **{**SETTINGS, "redis_timeout": 20.0}) as front,
        Redis.from_url(redis_url) as redis,
    ):
        await redis.client_pause(60_000, all=False)
        try:
            leaving = asyncio.create_task(front.post(chat(TURN_1)))
            await until(lambda: front.router.store.num_pending, "the turn is being saved")
            leaving.cancel()
            await until(lambda: front.router.turns.count == 0, "the turn is over")
            assert front.router.store.num_pending == 1
        finally:
            await redis.client_unpause()
        await until(lambda: not front.router.store.num_pending, "and filed")
        answer = await front.post(chat(TURN_2), headers=EXPLAIN)
        assert (answer.explain["turn"], answer.explain["kv"]) == (2, "offered")


async def test_counts_are_those_of_the_attempt_that_was_answered(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    async def without_blocks(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(p.whole(body) | {"kv_transfer_params": None})

    async with StubEngine("decode", tokenizes=True).running() as d2:
        async with router_over([p], [d, d2], redis_url, **SETTINGS) as front:
            await front.post(chat(TURN_1))
            p.seen.clear()
            owner = d if d.seen else d2
            owner.scripts.append(refuse(500))
            p.scripts.extend([_as_it_is(p), without_blocks])
            answer = await front.post(chat(TURN_2), headers=EXPLAIN)
        told = answer.explain
        assert (told["attempts"], len(p.seen)) == (2, 2)
        assert "tokens_pulled" not in told, "nothing of it is in the answer"


def _as_it_is(engine: StubEngine) -> Any:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(engine.whole(body))

    return script


async def test_pull_is_told_though_another_decode_engine_had_to_step_in(p: StubEngine, redis_url: str) -> None:
    async with StubEngine("decode", tokenizes=True).running() as d2:
        d1 = StubEngine("decode", tokenizes=True, keep_alive=False)
        async with d1.running():
            async with router_over([p], [d1], redis_url, **SETTINGS) as front:
                await front.post(chat(TURN_1))
            async with router_over([p], [d1, d2], redis_url, probe_interval=60.0, **SETTINGS) as front:
                assert d1.site is not None
                await d1.stop_listening()
                answer = await front.post(chat(TURN_2), headers=EXPLAIN)
        assert (answer.status, answer.explain["decode"]) == (200, d2.url)
        assert (answer.explain["kv"], answer.explain["tokens_pulled"]) == ("offered", HELD_1)


async def test_decode_engine_that_refuses_the_blocks_is_not_the_clients_fault(
    p: StubEngine, d: StubEngine, redis_url: str
) -> None:
    async with (
        StubEngine("decode", tokenizes=True).running() as d2,
        router_over([p], [d, d2], redis_url, **SETTINGS) as front,
    ):
        for engine in (d, d2):
            engine.scripts.append(complains)
        answer = await front.post(chat(TURN_1))
        assert answer.status == 502
        assert "kv_transfer_params" not in answer.raw.decode()
        assert (await front.post(chat(TURN_1))).status == 200


async def test_second_failure_of_a_prefill_engine_is_not_excused_by_the_first(d: StubEngine, redis_url: str) -> None:
    async def dies(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        hang_up(request)
        return web.Response()

    async with (
        StubEngine("prefill", tokenizes=True).running() as p1,
        StubEngine("prefill", tokenizes=True).running() as p2,
        router_over([p1, p2], [d], redis_url, **SETTINGS) as front,
    ):
        await front.post(chat(TURN_1))
        for engine in (p1, p2):
            engine.seen.clear()
        last = p1 if front.router.pool.prefill[0].dispatched else p2
        other = p2 if last is p1 else p1
        last.scripts.append(dies)
        other.scripts.append(refuse(500))
        assert (await front.post(chat(TURN_2))).status == 500
        assert len(p1.seen) + len(p2.seen) == 2


async def test_engines_that_cannot_refuse_are_not_left_alone(redis_url: str) -> None:
    async with (
        StubEngine("prefill", tokenizes=True, owned_by="vllm", kv_layout=None).running() as p,
        StubEngine("decode", tokenizes=True, owned_by="vllm", kv_layout=None).running() as d,
        after_first_turn(p, d, redis_url, decode_only_tokens=100) as front,
    ):
        answer = await front.post(chat(TURN_2), headers=EXPLAIN)
        assert (answer.explain["reason"], answer.explain["kv"]) == ("affinity", "offered")
        assert not d.released, "theirs is no route for it"


async def test_value_beside_the_proxys_makes_another_tenant(p: StubEngine, d: StubEngine, redis_url: str) -> None:
    async with router_over([p], [d], redis_url, tenant_header="X-Tenant", **SETTINGS) as front:
        await front.post(chat(TURN_1), headers={"X-Tenant": "victim"})
        forged = CIMultiDict([("X-Tenant", "victim"), ("X-Tenant", "attacker"), *EXPLAIN.items()])
        answer = await front.post(chat(TURN_2), headers=forged)
        assert (answer.explain["turn"], answer.explain["kv"]) == (1, "no_record")
