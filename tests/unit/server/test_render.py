"""/v1/…/render and /v1/…/derender: what is between them may be another engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import orjson
import pytest

from connectors.wire.seal import SEAL_HEADER, SealKeys
from engine.logprobs import TokenLogprobs
from engine.messages import Output
from engine.request import Request
from tests.unit.server.double import MAX_MODEL_LEN, Stage, byte_ids, params_for_decode, says

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GENERATE = "/inference/v1/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
}
EC = {"picture": {"peer_host": "10.0.0.3", "peer_port": 7000}}
every_path = pytest.mark.parametrize("path", list(BODIES))


async def rendered(stage: Stage, path: str, body: dict[str, Any], **options: Any) -> Any:
    status, answer = await stage.post(f"{path}/render", body, **options)
    assert status == 200, answer
    return answer[0] if path == COMPLETIONS else answer


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created", "created_at")}


@every_path
async def test_rendered_body_asks_generate_for_the_same(stage: Stage, path: str) -> None:
    limits = {"max_output_tokens": 9} if path == RESPONSES else {"max_tokens": 9, "stop": "x", "seed": 3}
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    wanted = {"text": {"format": form | form["json_schema"]}} if path == RESPONSES else {"response_format": form}  # type: ignore[dict-item]
    body = BODIES[path] | limits | wanted | {"temperature": 0.5, "top_p": 0.9, "cache_salt": "salt"}
    assert (await stage.post(path, body))[0] == 200
    assert (await stage.post(GENERATE, await rendered(stage, path, body)))[0] == 200
    direct, by_ids = stage.submitted
    assert by_ids.prompt_token_ids == direct.prompt_token_ids
    assert by_ids.hash_seed == direct.hash_seed
    for name in ("max_tokens", "temperature", "top_p", "seed", "stop", "stop_token_ids", "logprobs"):
        assert getattr(by_ids.sampling, name) == getattr(direct.sampling, name)
    assert direct.sampling.grammar is not None
    assert by_ids.sampling.grammar is not None
    assert by_ids.sampling.grammar.source == direct.sampling.grammar.source


@pytest.mark.parametrize(
    "constraint",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"guided_regex": "a+"},
        {"structured_outputs": {"grammar": 'start: "a"'}},
    ],
    ids=lambda constraint: next(iter(constraint)),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_constraints_of_every_kind_are_rendered(stage: Stage, path: str, constraint: dict[str, Any]) -> None:
    body = BODIES[path] | constraint
    assert (await stage.post(path, body))[0] == 200
    assert (await stage.post(GENERATE, await rendered(stage, path, body)))[0] == 200
    direct, by_ids = (request.sampling.grammar for request in stage.submitted)
    assert direct is not None
    assert by_ids is not None
    assert (by_ids.kind, by_ids.source) == (direct.kind, direct.source)


async def test_completions_without_max_tokens_keep_their_sixteen(stage: Stage) -> None:
    body = await rendered(stage, COMPLETIONS, BODIES[COMPLETIONS])
    assert body["sampling_params"]["max_tokens"] == 16
    assert "max_tokens" not in (await rendered(stage, CHAT, BODIES[CHAT]))["sampling_params"]


async def test_every_prompt_is_a_body_of_its_own(decode: Stage) -> None:
    params = {"kv_transfer_params": params_for_decode(), "ec_transfer_params": EC}
    status, bodies = await decode.post("/v1/completions/render", {"prompt": ["a", "bc"], "request_id": "mine"} | params)
    assert status == 200
    assert [body["token_ids"] for body in bodies] == [byte_ids("a"), byte_ids("bc")]
    assert [body["request_id"] for body in bodies] == ["cmpl-mine-0", "cmpl-mine-1"]
    for body in bodies:
        assert {name: body[name] for name in params} == params


@every_path
async def test_transfer_params_stand_at_the_top_and_are_left_alone(decode: Stage, path: str) -> None:
    """Whoever generates answers for the blocks, not who renders, even if it refuses."""
    kv = params_for_decode()
    for body in (
        {"kv_transfer_params": kv | {"prompt_token_ids": [1, 2]}, "ec_transfer_params": EC},
        {"vllm_xargs": {"kv_transfer_params": kv, "ec_transfer_params": EC, "mine": 1}},
    ):
        told = await rendered(decode, path, BODIES[path] | body)
        assert (told["kv_transfer_params"], told["ec_transfer_params"]) == (kv, EC)
        assert told["sampling_params"].get("extra_args") == ({"mine": 1} if "vllm_xargs" in body else None)
    assert "kv_transfer_params" not in await rendered(decode, path, BODIES[path] | {"kv_transfer_params": None})
    assert (await rendered(decode, path, BODIES[path] | {"kv_transfer_params": {}}))["kv_transfer_params"] == {}
    assert (await decode.post(f"{path}/render", {"kv_transfer_params": kv}))[0] == 400
    assert decode.transport.released == []


@every_path
async def test_unsealed_transfer_params_are_not_rendered(tiny_model: Path, path: str) -> None:
    keys = SealKeys((b"0123456789abcdef",))
    body = BODIES[path] | {"kv_transfer_params": params_for_decode()}
    async with Stage(tiny_model, role="decode", kv=True, seals=keys) as stage:
        assert (await stage.post(f"{path}/render", body))[0] == 403
        seal = keys.seal(f"{path}/render", body)
        assert (await rendered(stage, path, body, headers={SEAL_HEADER: seal}))["kv_transfer_params"]


@every_path
async def test_request_id_and_return_token_ids_are_passed_on(stage: Stage, path: str) -> None:
    prefix = {CHAT: "chatcmpl-{}", COMPLETIONS: "cmpl-{}-0", RESPONSES: "resp_{}"}[path]
    body = BODIES[path] | {"request_id": "theirs", "return_token_ids": True}
    told = await rendered(stage, path, body, headers={"X-Request-Id": "mine"})
    assert (told["request_id"], told["return_token_ids"]) == (prefix.format("mine"), True)
    told = await rendered(stage, path, body)
    assert told["request_id"] == prefix.format("theirs")


@every_path
async def test_what_the_endpoint_refuses_is_not_rendered(stage: Stage, path: str) -> None:
    field = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}[path]
    for change, status in (({field: None}, 400), ({"model": "other"}, 404), ({"temperature": -1}, 400)):
        assert (await stage.post(f"{path}/render", BODIES[path] | change))[0] == status
    long = "x" * 2000
    text = [{"role": "user", "content": long}] if path == CHAT else long
    status, answer = await stage.post(f"{path}/render", BODIES[path] | {field: text})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


# And back.


async def test_chat_answer_is_the_same_by_way_of_ids(stage: Stage) -> None:
    stage.script = says("hello!", finish_reason="stop", stop_token_id=byte_ids("!")[0])
    body = BODIES[CHAT] | {"stop_token_ids": byte_ids("!"), "n": 2, "return_token_ids": True}
    _, direct = await stage.post(CHAT, body)
    _, generated = await stage.post(GENERATE, await rendered(stage, CHAT, body))
    status, answer = await stage.post(
        "/v1/chat/completions/derender", {"model": "tiny", "generate_response": generated, "chat_request": body}
    )
    assert status == 200
    assert without_times(answer) == without_times(direct)
    assert answer["id"] == generated["request_id"]


async def test_completion_answer_is_the_same_by_way_of_ids(stage: Stage) -> None:
    def script(request: Request) -> list[Output]:
        ids = byte_ids("one two")
        told = [TokenLogprobs(token, -1.0, 1, ((token, -1.0),)) for token in ids]
        return [Output(request.request_id, ids, "length", logprobs=told)]

    stage.script = script
    body = {"prompt": ["a", "b"], "n": 2, "stop": ["e t"], "logprobs": 1, "return_token_ids": True}
    _, direct = await stage.post(COMPLETIONS, body)
    _, bodies = await stage.post("/v1/completions/render", body)
    answers = [(await stage.post(GENERATE, each))[1] for each in bodies]
    status, answer = await stage.post(
        "/v1/completions/derender", {"generate_responses": answers, "completion_request": body | {"stream": True}}
    )
    assert status == 200
    assert without_times(answer) == without_times(direct)
    assert [choice["text"] for choice in answer["choices"]] == ["on"] * 4
    _, plain = await stage.post("/v1/completions/derender", {"generate_responses": answers})
    assert [choice["text"] for choice in plain["choices"]] == ["one t"] * 4  # nobody said what to stop at
    assert plain["choices"][0]["logprobs"] == direct["choices"][0]["logprobs"]


def generated(text: str = "hi", **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": byte_ids(text), "finish_reason": "length"}
    return {"request_id": "r", "choices": [choice]} | fields


async def test_derendered_tool_calls_are_read_as_the_chat_asked(stage: Stage) -> None:
    _, answer = await stage.post("/v1/chat/completions/derender", {"generate_response": generated()})
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
    assert answer["id"] == "chatcmpl-r"
    assert answer["object"] == "chat.completion"


async def test_usage_is_what_the_answers_say_or_else_the_request(stage: Stage) -> None:
    path = "/v1/completions/derender"
    said = generated(usage={"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}})
    for responses, fields, expected in (
        ([said, said], {"prompt_tokens": 3}, (14, 4, 8)),
        ([generated(), said], {"prompt_tokens": 3}, (3, 4, 4)),
        ([generated(prompt_token_ids=[1, 2])], {}, (2, 2, 0)),
        ([generated()], {"prompt_token_ids": [1, 2, 3]}, (3, 2, 0)),
        ([generated()], {}, (0, 2, 0)),
    ):
        status, answer = await stage.post(path, {"generate_responses": responses} | fields)
        assert status == 200
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], cached) == expected


async def test_kv_params_pass_and_others_do_not(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    kv = {"do_remote_prefill": True, "unknown": [1]}
    one = generated(kv_transfer_params=kv, ec_transfer_params=EC)
    _, answer = await stage.post("/v1/chat/completions/derender", {"generate_response": one})
    assert answer["kv_transfer_params"] == kv
    assert "ec_transfer_params" not in answer
    _, answer = await stage.post("/v1/completions/derender", {"generate_responses": [one, one]})
    assert answer["kv_transfer_params"] == kv
    for other in (generated(), generated(kv_transfer_params={})):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            _, answer = await stage.post("/v1/completions/derender", {"generate_responses": [one, other]})
        assert answer["kv_transfer_params"] is None
        assert "different kv_transfer_params" in caplog.text
    _, answer = await stage.post("/v1/completions/derender", {"generate_responses": [generated()]})
    assert "kv_transfer_params" not in answer


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"stream": True}, "stream"),
        ({"generate_responses": []}, "generate_responses"),
        ({"generate_responses": None}, "generate_responses"),
        ({"generate_responses": [{"choices": []}]}, "generate_responses[0].choices"),
        ({"generate_responses": [generated(choices=[{"token_ids": [320]}])]}, "generate_responses"),
        ({"generate_responses": [generated(choices=[{"token_ids": [1] * (MAX_MODEL_LEN + 1)}])]}, "generate_responses"),
        (
            {"generate_responses": [generated(choices=[{"token_ids": ["a"]}])]},
            "generate_responses[0].choices[0].token_ids[0]",
        ),
        ({"completion_request": {"prompt": ["a", "b"]}}, "generate_responses"),
        ({"completion_request": {"prompt": "a", "n": 2}}, "generate_responses[0].choices"),
        ({"completion_request": {"prompt": [400], "echo": True}}, "completion_request.prompt"),
        ({"completion_request": {"prompt": "a", "suffix": "b"}}, "suffix"),
        ({"completion_request": 1}, "completion_request"),
        ({"prompt_tokens": -1}, "prompt_tokens"),
        ({"prompt_tokens": 2**64 - 1}, "prompt_tokens"),
    ],
)
async def test_bad_bodies_are_refused_naming_the_field(stage: Stage, change: dict[str, Any], param: str) -> None:
    status, answer = await stage.post("/v1/completions/derender", {"generate_responses": [generated()]} | change)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_chat_derender_refuses_likewise(stage: Stage) -> None:
    path, body = "/v1/chat/completions/derender", {"generate_response": generated()}
    for change, status, param in (
        ({"stream": True}, 400, "stream"),
        ({"generate_response": None}, 400, "generate_response"),
        ({"generate_response": generated(choices=[{"token_ids": [320]}])}, 400, "generate_response"),
        ({"generate_response": generated(prompt_token_ids=[2**63 - 1])}, 400, "prompt_token_ids"),
        ({"prompt_token_ids": [320]}, 400, "prompt_token_ids"),
        ({"prompt_token_ids": [1] * (MAX_MODEL_LEN + 1)}, 400, "prompt_token_ids"),
        ({"chat_request": {}}, 400, "messages"),
        ({"model": "other"}, 404, "model"),
    ):
        told = await stage.post(path, orjson.loads(orjson.dumps(body | change)))
        assert (told[0], told[1]["error"]["param"]) == (status, param)


async def test_more_alternatives_than_this_engine_tells_are_read_back(stage: Stage) -> None:
    top = [{"token_id": token, "logprob": -float(token)} for token in range(stage.serving.max_logprobs + 5)]
    told = {"content": [{"token_id": 0, "logprob": 0.0, "top_logprobs": top}]}
    one = generated(choices=[{"token_ids": [0], "finish_reason": "length", "logprobs": told}])
    status, answer = await stage.post("/v1/completions/derender", {"generate_responses": [one]})
    assert status == 200, answer
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == len(top)
