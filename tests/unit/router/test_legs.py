"""How a client's body becomes a prefill leg and a decode leg."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from connectors.wire.ids import TokenIds
from connectors.wire.transfer import KVTransferParams
from router.api import legs
from router.api.chat import Chat
from router.api.completions import Completions
from router.api.legs import prefill_by_ids
from router.api.responses import Responses
from router.clean import without_engine_talk

PARAMS = KVTransferParams.parse(
    {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "h",
        "remote_port": 1,
        "remote_num_tokens": 20,
        "novel": "kept",
    }
)
IDS = [7, 8]
HOLD = KVTransferParams.for_prefill()
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "m", "messages": MESSAGES}
TEXT = {"model": "m", "prompt": "Hi"}

KEPT_ON_PREFILL = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "response_format": {"type": "json_object"},
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "documents": [{"text": "d"}],
    "cache_salt": "s",
    "priority": 3,
    "mm_processor_kwargs": {"a": 1},
    "truncate_prompt_tokens": 100,
    "stop_token_ids": [5],
    "ignore_eos": True,
    "temperature": 0.5,
    "seed": 1,
    "zz_unknown": {"x": [1]},
}
CHANGED_ON_PREFILL = {
    "max_tokens": 500,
    "max_completion_tokens": 500,
    "min_tokens": 5,
    "n": 1,
    "best_of": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["\n"],
    "include_stop_str_in_output": True,
    "logprobs": True,
    "top_logprobs": 5,
    "structured_outputs": {"json": {}},
    "guided_json": {},
    "repetition_detection": {},
    "return_token_ids": False,
}


def test_prefill_leg_of_a_chat() -> None:
    leg = Chat().prefill_leg({**CHAT, **KEPT_ON_PREFILL, **CHANGED_ON_PREFILL}, HOLD, None)
    assert leg == {
        **CHAT,
        **KEPT_ON_PREFILL,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "stream": False,
        "return_token_ids": True,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }


def test_prefill_by_ids_keeps_what_the_kv_depends_on() -> None:
    body = {**CHAT, **KEPT_ON_PREFILL, **CHANGED_ON_PREFILL, "model": "m", "cache_salt": "s", "priority": 3}
    assert prefill_by_ids(body, HOLD.to_json(), IDS) == {
        "model": "m",
        "cache_salt": "s",
        "priority": 3,
        "prompt": IDS,
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "return_token_ids": True,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }


@pytest.mark.parametrize("limit", [{"max_completion_tokens": 500}, {"max_tokens": 500}, {}])
def test_prefill_leg_makes_one_token_whichever_name_the_limit_has(limit: dict[str, int]) -> None:
    leg = Chat().prefill_leg({**CHAT, **limit}, HOLD, None)
    assert (leg["max_tokens"], leg["max_completion_tokens"]) == (1, 1)
    assert Completions().prefill_leg({**TEXT, **limit}, HOLD, None)["max_tokens"] == 1
    assert "max_completion_tokens" not in Completions().prefill_leg({**TEXT, **limit}, HOLD, None)


def test_decode_leg_is_the_clients_body_with_the_ids_and_blocks() -> None:
    body = {**CHAT, **KEPT_ON_PREFILL, **CHANGED_ON_PREFILL}
    leg = Chat().decode_leg(body, PARAMS, IDS, ours=False)
    params = leg.pop("kv_transfer_params")
    assert params == {**PARAMS.to_json(), "prompt_token_ids": [7, 8]}
    assert leg == {**body, "return_token_ids": True}


@pytest.mark.parametrize("endpoint", [Chat(), Completions(), Responses()])
def test_prompt_ids_are_asked_back_only_where_none_were_sent(endpoint: legs.Endpoint) -> None:
    body = {"chat": CHAT, "completions": TEXT, "responses": {"model": "m", "input": "Hi"}}[endpoint.name]
    assert endpoint.decode_leg(body, PARAMS, IDS, ours=True)["token_note"] == "output"
    assert endpoint.decode_leg(body, PARAMS, None, ours=True)["token_note"] is True
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert Chat().decode_leg({**CHAT, "messages": [picture]}, PARAMS, IDS, ours=True)["token_note"] is True


def test_decode_leg_of_a_completion_has_the_ids_for_a_prompt() -> None:
    leg = Completions().decode_leg(TEXT, PARAMS, IDS, ours=False)
    assert leg["prompt"] == [7, 8]
    assert leg["kv_transfer_params"] == PARAMS.to_json()


@pytest.mark.parametrize("endpoint", [Chat(), Completions()])
def test_decode_leg_without_blocks_has_no_params(endpoint: legs.Endpoint) -> None:
    body = CHAT if endpoint.name == "chat" else TEXT
    leg = endpoint.decode_leg(body, None, None, ours=False)
    assert "kv_transfer_params" not in leg
    assert leg["return_token_ids"] is True


@pytest.mark.parametrize(
    ("content", "ids"),
    [
        ("Hi", True),
        ([{"type": "text", "text": "Hi"}], True),
        (None, True),
        ([{"type": "image_url", "image_url": {"url": "x"}}], False),
        ([{"type": "text", "text": "Hi"}, {"type": "input_audio", "input_audio": {}}], False),
    ],
)
def test_ids_are_sent_only_for_text(content: object, ids: bool) -> None:
    leg = Chat().decode_leg({**CHAT, "messages": [{"role": "user", "content": content}]}, PARAMS, IDS, ours=False)
    assert ("prompt_token_ids" in leg["kv_transfer_params"]) == ids


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        (None, {"include_usage": True}),
        ({"include_usage": False}, {"include_usage": True}),
        ({"continuous_usage_stats": True}, {"continuous_usage_stats": True, "include_usage": True}),
        ("odd", "odd"),
    ],
)
def test_usage_is_asked_for_in_streams(options: object, sent: object) -> None:
    body = {**CHAT, "stream": True} | ({} if options is None else {"stream_options": options})
    assert Chat().decode_leg(body, None, None, ours=False)["stream_options"] == sent
    assert "stream_options" not in Chat().decode_leg(CHAT, None, None, ours=False)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, True),
        ({"stream": True}, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True),
        ({"stream": True, "stream_options": {"include_usage": False}}, False),
        ({"stream": True, "stream_options": "odd"}, False),
    ],
)
def test_usage_the_client_wants(body: dict[str, Any], wanted: bool) -> None:
    assert legs.wants_usage(body) is wanted


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, None),
        ({"n": 1}, None),
        ({"n": None}, None),
        ({"n": 3}, "several_choices"),
        ({"best_of": 2}, "several_choices"),
        ({"use_beam_search": True}, "beam_search"),
        ({"echo": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_the_decode_engine_must_do_alone(body: dict[str, Any], reason: str | None) -> None:
    assert Chat().alone({**CHAT, **body}, ours=False) == reason
    assert Completions().alone({**TEXT, **body}, ours=False) == reason


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("text", None),
        ([1, 2, 3], None),
        (["text"], None),
        ([[1, 2]], None),
        ([], None),
        (None, None),
        (["a", "b"], "several_prompts"),
        ([[1], [2]], "several_prompts"),
    ],
)
def test_several_prompts_go_to_the_decode_engine_alone(prompt: object, reason: str | None) -> None:
    assert Completions().alone({**TEXT, "prompt": prompt}, ours=False) == reason


def test_clients_cannot_speak_engine() -> None:
    body = {
        **CHAT,
        "kv_transfer_params": {"prompt_token_ids": [1]},
        "ec_transfer_params": {"h": {}},
        "vllm_xargs": {"kv_transfer_params": {}, "ec_transfer_params": {}, "other": 1},
        "sampling_params": {"extra_args": {"kv_transfer_params": {}}, "top_k": 3},
    }
    given = copy.deepcopy(body)
    clean = without_engine_talk(body)
    assert clean == {**CHAT, "vllm_xargs": {"other": 1}, "sampling_params": {"top_k": 3}}
    assert body == given


@pytest.mark.parametrize("odd", [{"vllm_xargs": 5}, {"sampling_params": [1]}, {"vllm_xargs": None}])
def test_odd_values_are_left_for_the_engine_to_refuse(odd: dict[str, Any]) -> None:
    assert without_engine_talk({**CHAT, **odd}) == {**CHAT, **odd}


def test_legs_leave_the_clients_body_alone() -> None:
    body: dict[str, Any] = {**CHAT, **KEPT_ON_PREFILL, **CHANGED_ON_PREFILL}
    given = copy.deepcopy(body)
    Chat().prefill_leg(body, HOLD, IDS)
    Chat().decode_leg(body, PARAMS, IDS, ours=False)
    assert body == given


def test_ids_known_to_the_router_spare_the_prefill_engine_its_tokenizer() -> None:
    chat = Chat().prefill_leg(CHAT, HOLD, IDS)
    assert chat["kv_transfer_params"] == {**HOLD.to_json(), "prompt_token_ids": IDS}
    completion = Completions().prefill_leg(TEXT, HOLD, IDS)
    assert (completion["prompt"], completion["kv_transfer_params"]) == (IDS, HOLD.to_json())


def test_offered_blocks_travel_in_the_prefill_leg() -> None:
    offer = PARAMS.with_(do_remote_prefill=False, do_remote_decode=True)
    leg = Chat().prefill_leg(CHAT, KVTransferParams.for_prefill(offer), IDS)
    assert leg["kv_transfer_params"] == {**offer.to_json(), "prompt_token_ids": IDS}


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("body", "query"),
    [
        pytest.param(CHAT, CHAT, id="messages"),
        pytest.param({**CHAT, "tools": TOOLS, "temperature": 0, "stream": True}, {**CHAT, "tools": TOOLS}, id="tools"),
        pytest.param(
            {**CHAT, "chat_template_kwargs": {"a": 1}}, {**CHAT, "chat_template_kwargs": {"a": 1}}, id="kwargs"
        ),
        pytest.param({**CHAT, "tools": None, "novel": None}, CHAT, id="keys without a value"),
        pytest.param({**CHAT, "novel": 1}, None, id="a key nobody here knows may change the prompt"),
        pytest.param({**CHAT, "truncate_prompt_tokens": 5}, None, id="cut by the engine"),
        pytest.param({**CHAT, "response_format": {"type": "json_object"}}, None, id="some templates render it"),
        pytest.param(
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            None,
            id="a picture has no ids",
        ),
        pytest.param(TEXT, TEXT, id="text"),
        pytest.param({**TEXT, "prompt": [1, 2]}, TokenIds.of([1, 2]), id="ids as they are"),
        pytest.param({**TEXT, "prompt": [1, True]}, None, id="no ids"),
        pytest.param({**TEXT, "prompt": ["Hi"]}, None, id="list of texts"),
        pytest.param({**TEXT, "suffix": "!"}, None, id="fill in the middle"),
    ],
)
def test_ids_are_asked_for_only_where_the_answer_is_certain(body: dict[str, Any], query: object) -> None:
    endpoint = Chat() if "messages" in body else Completions()
    assert endpoint.tokenize_body(body, ours=False) == query


def test_our_engines_are_asked_about_more() -> None:
    body = {**CHAT, "documents": [{"text": "d"}], "reasoning_effort": "low", "tool_choice": "none"}
    assert Chat().tokenize_body(body, ours=False) is None
    asked = {key: value for key, value in body.items() if key != "tool_choice"}
    assert Chat().tokenize_body(body, ours=True) == asked
    assert Chat().tokenize_body({**body, "novel": 1}, ours=True) is None
