"""Blocks of vLLM's decode engine that nobody will read: given back through a prefill engine, or left to their lease."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from router.release import AT_LEAST
from tests.router_harness import Front, router_over, until
from tests.stub_engine import TEXT, refuse
from tests.vllm_stub import RELEASE_PROMPT, VLLMStub

MAX_TURNS = 10
REMOTE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@asynccontextmanager
async def pair(redis_url: str, **settings: Any) -> AsyncIterator[tuple[VLLMStub, VLLMStub, Front]]:
    p_settings = settings.pop("p", {})
    settings = {"kv_recompute_threshold": 2, "decode_only_tokens": 0} | settings
    async with (
        VLLMStub("decode").running() as d,
        VLLMStub("prefill", decode=d, **p_settings).running() as p,
        router_over([p], [d], redis_url, **settings) as front,
    ):
        yield p, d, front


async def talk(front: Front, text: str, name: str) -> None:
    messages = [{"role": "user", "content": text}]
    answer = await front.post({"model": "m", "messages": messages, "conversation_id": name})
    assert answer.status == 200


async def released(front: Front, result: str) -> float:
    return await front.metric("backhaul_router_kv_releases_total", result=result)


async def test_replaced_offer_is_given_back(redis_url: str) -> None:
    """A named conversation that begins anew: what its last turn left serves nothing."""
    async with pair(redis_url) as (p, d, front):
        for text in ("one two three", "four five six"):
            await talk(front, text, "vllm-replaced")
        await until(front.is_settled, "settled")
        assert len(d.held) == 1
        assert await released(front, "ok") == 1
        (asked,) = p.release_requests
        assert asked["model"] == "m"
        assert asked["max_tokens"] == 1
        params = asked["kv_transfer_params"]
        assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
        assert (params["remote_num_tokens"], len(params["remote_block_ids"][0])) == (0, 1)
        assert all(params[key] for key in REMOTE)
        assert params["remote_request_id"] not in d.held
    assert not d.released, "a call that it does not have"


async def test_offer_of_a_conversation_that_does_not_go_on_is_given_back(redis_url: str) -> None:
    async with pair(redis_url, conversation_ttl=1.0) as (p, d, front):
        await talk(front, "one two three", "vllm-left")
        await until(lambda: p.release_requests, "it is given back before its record expires")
        await until(front.is_settled, "settled")
        assert not d.held
        assert await released(front, "ok") == 1


@pytest.mark.parametrize(
    "p_settings",
    [
        pytest.param({"pulls": 0}, id="not known to pull"),
        pytest.param({"version": "0.99.0"}, id="another version"),
        pytest.param({"num_blocks": 1000, "model": "other"}, id="another model"),
    ],
)
async def test_without_means_it_waits_for_the_lease(redis_url: str, p_settings: Any, request: Any) -> None:
    name = f"vllm-waits-{request.node.callspec.id}"
    async with pair(redis_url, p=p_settings, prefill_fallback="decode") as (p, d, front):
        d.scripts.extend([offering(d), offering(d)])
        for text in ("one two three", "four five six"):
            await talk(front, text, name)
        await until(front.is_settled, "settled")
        assert p.release_requests == []
        assert len(d.held) == 2
        assert await released(front, "waits_for_ttl") >= 1
        assert await released(front, "ok") == 0


def offering(d: VLLMStub) -> Any:
    """It offers its blocks also where it has prefilled by itself."""

    async def script(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(d.whole({**body, "kv_transfer_params": {"do_remote_prefill": True}}))

    return script


async def test_engine_started_anew_is_not_told_of_what_it_held_before(redis_url: str) -> None:
    """The prefill engine would look for an engine of that id, and complain."""
    async with pair(redis_url) as (p, d, front):
        await talk(front, "one two three", "vllm-anew")
        await until(front.is_settled, "settled")
        front.router.pool.decode[0].known.forget()  # as when it was down
        d.role = "another"
        await talk(front, "four five six", "vllm-anew")
        await until(front.is_settled, "settled")
        assert p.release_requests == []
        assert await released(front, "waits_for_ttl") == 1


async def test_prefill_engine_spends_few_blocks_on_it(redis_url: str) -> None:
    """Each release leaves a block there for its lease."""
    async with pair(redis_url, p={"num_blocks": 64}) as (p, _, front):
        for number in range(AT_LEAST + 3):
            await talk(front, f"{number} two three", "vllm-often")
            await until(front.is_settled, "settled")
        assert len(p.release_requests) == AT_LEAST
        assert (await released(front, "ok"), await released(front, "waits_for_ttl")) == (AT_LEAST, 2)


async def test_refusal_and_failure_are_counted_and_hurt_no_turn(redis_url: str) -> None:
    async with pair(redis_url) as (p, _, front):

        async def unless_release(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            p.scripts.append(unless_release)
            if body.get("prompt") == RELEASE_PROMPT:
                status = 500 if len(p.release_requests) == 1 else 403
                return await refuse(status)(request, body)
            return web.json_response(p.whole(body))

        p.scripts.append(unless_release)
        for text in ("one two three", "four five six", "seven eight nine"):
            await talk(front, text, "vllm-refused")
            await until(front.is_settled, "settled")
        assert (await released(front, "failed"), await released(front, "refused")) == (1, 1)
        assert await front.metric("backhaul_router_turns_total", outcome="ok") == 3
        assert all(engine.state == "ready" for engine in front.router.pool.engines)


async def test_blocks_that_may_still_be_read_are_left_alone(redis_url: str) -> None:
    """P breaks off with the offer in its hands: it may be reading, and vLLM would not notice the blocks go."""
    async with pair(redis_url) as (p, _, front):
        messages = [{"role": "user", "content": "one two three"}]
        body = {"model": "m", "messages": messages, "conversation_id": "vllm-read"}
        await front.post(body)

        async def break_off(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

        p.scripts.append(break_off)
        messages += [{"role": "assistant", "content": TEXT}, {"role": "user", "content": "go on"}]
        await front.post(body)
        await until(front.is_settled, "settled")
        assert p.release_requests == []
        assert await released(front, "waits_for_ttl") == 1


async def test_offer_of_a_conversation_that_ended_is_given_back_before_its_deadline(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.sweep.LEAD_SECONDS", 1000.0)
    monkeypatch.setattr("router.sweep.LEAD_SHARE", 1.0)
    async with pair(redis_url) as (p, d, front):
        await talk(front, "one two three", "vllm-ended")
        await until(lambda: d.seen and not d.held, "its blocks are given back")
        assert len(p.release_requests) == 1
        assert await front.metric("backhaul_router_idle_kv_blocks", engine=d.url) == 0


async def test_idle_conversations_hold_no_more_than_their_share(redis_url: str) -> None:
    async with pair(redis_url, idle_kv_share=0.02) as (p, d, front):  # of 1000
        for number in range(MAX_TURNS):
            await talk(front, "one two three", f"vllm-idle-{number}")
            await until(front.is_settled, "settled")
            assert sum(d.held.values()) <= 20
        held = await front.metric("backhaul_router_idle_kv_blocks", engine=d.url)
        assert held == sum(d.held.values())
        num_capped = await front.metric("backhaul_router_kv_capped_releases_total", engine=d.url)
        assert num_capped == len(p.release_requests) == MAX_TURNS - len(d.held) > 0
        assert list(d.held)[-1] == f"decode-{MAX_TURNS}"
        # What was taken back is computed again, and what was not is pulled.
        for number, kv in ((0, "no_offer"), (MAX_TURNS - 1, "offered")):
            follow_up = [{"role": "assistant", "content": TEXT}, {"role": "user", "content": "go on"}]
            messages = [{"role": "user", "content": "one two three"}, *follow_up]
            body = {"model": "m", "messages": messages, "conversation_id": f"vllm-idle-{number}"}
            answer = await front.post(body, headers={"X-Backhaul-Explain": "1"})
            assert answer.explain["kv"] == kv
