"""The chat endpoint: tools, thoughts, formats of the answer, logprobs, several answers, whole and streamed alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.logprobs import TokenLogprobs
from engine.messages import Output
from engine.request import Request
from tests.tiny import CHATML
from tests.unit.server.double import Script, Stage, params_for_decode

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "clock"}}]
USER = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}</tool_call>{% endfor %}"
    "{{ '|' + (m.reasoning_content or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if think %}<think>\n{% endif %}{% endif %}"
    "{# </think> #}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Rome"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.fixture
async def agent(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    """A model that calls tools as Hermes does, and thinks."""
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    async with Stage(tiny_model, chat_template=tmp_path / "template.jinja", capacity=64) as stage:
        yield stage


def answers(stage: Stage, text: str, **end: Any) -> Script:
    """Answer with this text, a token at a time."""

    def script(request: Request) -> Iterable[Output]:
        tokens = stage.tokenizer.encode(text, add_special_tokens=False)
        for number, token in enumerate(tokens, start=1):
            last = {"finish_reason": "length"} | end if number == len(tokens) else {}
            yield Output(request.request_id, [token], logprobs=logprobs_of(request, token), **last)

    return script


def logprobs_of(request: Request, token: int) -> list[TokenLogprobs]:
    if request.sampling.logprobs is None:
        return []
    top = tuple((other, -0.5 * rank) for rank, other in enumerate((token, 5, 6), start=1))
    return [TokenLogprobs(token, -0.5, 1, top[: request.sampling.logprobs])]


def stopping(stage: Stage, text: str) -> Script:
    """The same, ended by EOS."""
    return answers(stage, text + "<|im_end|>", finish_reason="stop")


async def whole(stage: Stage, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the answer, its first choice)."""
    status, answer = await stage.chat(**fields)
    assert status == 200, answer
    ChatCompletion.model_validate(answer, strict=True)
    return answer, answer["choices"][0]


async def streamed(stage: Stage, **fields: Any) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together as clients do it."""
    events = await stage.stream(CHAT, {"messages": USER} | fields)
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        ChatCompletionChunk.model_validate(event, strict=True)
        for entry in event["choices"]:
            new = entry["index"] not in choices
            choice = choices.setdefault(entry["index"], {"message": {"content": ""}, "token_ids": [], "logprobs": []})
            message, delta = choice["message"], entry["delta"]
            assert new == ("role" in delta), "the first chunk has the role"
            message["role"] = delta.get("role", message.get("role"))
            for name in ("content", "reasoning_content", "reasoning"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    assert call["index"] == len(calls)
                    calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                else:
                    assert set(call) == {"index", "function"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            assert "finish_reason" not in choice, "nothing follows the last chunk"
            if entry["finish_reason"] is not None:
                choice |= {"finish_reason": entry["finish_reason"], "stop_reason": entry["stop_reason"]}
            choice["token_ids"] += entry.get("token_ids", [])
            if entry["logprobs"] is not None:
                choice["logprobs"] += entry["logprobs"]["content"]
                if "token_ids" in entry:
                    assert len(entry["logprobs"]["content"]) == len(entry["token_ids"])
    return choices


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between any two answers, and with what a stream cannot tell apart made one."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls", "finish_reason"),
    [
        ("Hello.", "Hello.", None, [], "stop"),
        (CALL, None, None, [("weather", '{"city":  "Rome"}')], "tool_calls"),
        (
            f"Let me see.\n{CALL}\n{CLOCK}",
            "Let me see.",
            None,
            [("weather", '{"city":  "Rome"}'), ("clock", "{}")],
            "tool_calls",
        ),
        (f"<think>\nhm\n</think>\n\n{CALL}", None, "\nhm\n", [("weather", '{"city":  "Rome"}')], "tool_calls"),
        ("<think>hm</think>\n\nYes.", "\n\nYes.", "hm", [], "stop"),
        ("<think>hm", None, "hm", [], "stop"),
        ("<tool_call>no</tool_call>", "<tool_call>no</tool_call>", None, [], "stop"),
        ("<tool_call>", "<tool_call>", None, [], "stop"),
    ],
)
async def test_answers_and_streams_tell_the_same(
    agent: Stage, text: str, content: str, reasoning: str | None, calls: list[tuple[str, str]], finish_reason: str
) -> None:
    agent.script = stopping(agent, text)
    _, choice = await whole(agent, tools=TOOLS, return_token_ids=True)
    message = choice["message"]
    assert message["role"] == "assistant"
    assert message["content"] == content
    assert message.get("reasoning_content") == message.get("reasoning") == reasoning
    assert [tuple(call["function"].values()) for call in message.get("tool_calls", ())] == calls
    assert len({call["id"] for call in message.get("tool_calls", ())}) == len(calls)
    assert choice["finish_reason"] == finish_reason
    told = (await streamed(agent, tools=TOOLS, return_token_ids=True))[0]
    assert comparable(told["message"]) == comparable(message)
    assert (told["finish_reason"], told["token_ids"]) == (finish_reason, choice["token_ids"])
    assert told["token_ids"] == agent.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)


async def test_calls_cut_off_by_length_say_so(agent: Stage) -> None:
    agent.script = answers(agent, CALL[: CALL.index("Rome")])
    _, choice = await whole(agent, tools=TOOLS)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city"')
    assert (await streamed(agent, tools=TOOLS))[0]["finish_reason"] == "length"


@pytest.mark.parametrize("asked", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_calls_nobody_asked_for_are_content(agent: Stage, asked: dict[str, Any]) -> None:
    agent.script = stopping(agent, CALL)
    _, choice = await whole(agent, **asked)
    assert choice["message"] == {"role": "assistant", "content": CALL}
    assert choice["finish_reason"] == "stop"
    assert (await streamed(agent, **asked))[0]["message"]["content"] == CALL


async def test_only_the_first_call_is_told_without_parallel_ones(agent: Stage) -> None:
    agent.script = stopping(agent, f"{CALL}\n{CLOCK}")
    _, choice = await whole(agent, tools=TOOLS, parallel_tool_calls=False)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    told = (await streamed(agent, tools=TOOLS, parallel_tool_calls=False))[0]
    assert comparable(told["message"]) == comparable(choice["message"])


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["required", "named"]
)
async def test_calls_that_are_demanded_reach_the_engine_as_a_grammar(agent: Stage, choice: object) -> None:
    agent.script = stopping(agent, CALL)
    _, told = await whole(agent, tools=TOOLS, tool_choice=choice)
    assert told["finish_reason"] == "tool_calls"
    grammar = agent.submitted[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "lark"
    assert "weather" in grammar.source
    assert ("clock" in grammar.source) is (choice == "required")
    assert agent.submitted[-1].matcher is not None


async def test_without_demands_there_is_no_grammar(agent: Stage) -> None:
    await whole(agent, tools=TOOLS, response_format={"type": "text"})
    assert agent.submitted[-1].sampling.grammar is None
    assert agent.submitted[-1].matcher is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"tools": TOOLS, "structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 2, "functions": [{}]}, "functions"),
        (
            {"messages": [*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[1].content",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 5}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_what_cannot_be_done_is_400(agent: Stage, fields: dict[str, Any], param: str) -> None:
    status, answer = await agent.chat(**fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert agent.submitted == []


async def test_tools_that_the_model_cannot_call_are_refused(stage: Stage) -> None:
    status, answer = await stage.chat(tools=TOOLS)
    assert (status, answer["error"]["param"]) == (400, "tool_choice")
    assert (await stage.chat(tools=TOOLS, tool_choice="none"))[0] == 200


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": True}}},
            "json_schema",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}}, "json_schema"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
        ({"guided_regex": "a+"}, "regex"),
    ],
)
async def test_formats_of_the_answer_reach_the_engine(stage: Stage, fields: dict[str, Any], kind: str) -> None:
    await whole(stage, **fields)
    grammar = stage.submitted[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == kind


async def test_thoughts_that_the_prompt_begins(agent: Stage) -> None:
    agent.script = stopping(agent, "hm</think>\nYes.")
    asked: dict[str, Any] = {"chat_template_kwargs": {"think": True}, "response_format": {"type": "json_object"}}
    _, choice = await whole(agent, **asked)
    assert choice["message"] == {
        "role": "assistant",
        "content": "\nYes.",
        "reasoning": "hm",
        "reasoning_content": "hm",
    }
    assert comparable((await streamed(agent, **asked))[0]["message"]) == comparable(choice["message"])
    grammar = agent.submitted[-1].sampling.grammar
    assert grammar is not None
    assert "</think>" in grammar.source.replace("\\/", "/"), "it may think before its JSON"


async def test_thoughts_are_left_out_on_request_but_their_ids_are_not(agent: Stage) -> None:
    agent.script = stopping(agent, "<think>hm</think>Yes.")
    _, choice = await whole(agent, include_reasoning=False)
    assert choice["message"] == {"role": "assistant", "content": "Yes."}
    told = (await streamed(agent, include_reasoning=False, return_token_ids=True))[0]
    assert told["message"] == {"role": "assistant", "content": "Yes."}
    assert told["token_ids"] == agent.tokenizer.encode("<think>hm</think>Yes.<|im_end|>", add_special_tokens=False)


async def test_logprobs_whole_and_streamed(agent: Stage) -> None:
    agent.script = answers(agent, "<think>a</think>hé")
    _, choice = await whole(agent, logprobs=True, top_logprobs=2, return_token_ids=True)
    content = choice["logprobs"]["content"]
    tokens = choice["token_ids"]
    assert [entry["bytes"] for entry in content] == [list(agent.tokenizer.token_bytes(token)) for token in tokens]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "<think>a</think>hé"
    assert content[0] == {
        "token": "<",
        "logprob": -0.5,
        "bytes": [60],
        "top_logprobs": [
            {"token": "<", "logprob": -0.5, "bytes": [60]},
            {"token": agent.tokenizer.token_str(5), "logprob": -1.0, "bytes": list(agent.tokenizer.token_bytes(5))},
        ],
    }
    told = await streamed(agent, logprobs=True, top_logprobs=2, return_token_ids=True)
    assert told[0]["logprobs"] == content
    assert (await streamed(agent, logprobs=True, top_logprobs=2))[0]["logprobs"] == content
    _, choice = await whole(agent, logprobs=True, return_tokens_as_token_ids=True)
    assert choice["logprobs"]["content"][0]["token"] == f"token_id:{tokens[0]}"
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


async def test_an_impossible_token_has_a_logprob_that_json_can_tell(stage: Stage) -> None:
    never = TokenLogprobs(7, float("-inf"), 9, ((8, float("-inf")),))
    stage.script = lambda request: [Output(request.request_id, [7], "length", logprobs=[never])]
    _, choice = await whole(stage, logprobs=True, top_logprobs=1)
    (entry,) = choice["logprobs"]["content"]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


async def test_logprobs_of_the_prompt(stage: Stage) -> None:
    told = [None, TokenLogprobs(5, -1.0, 2, ((6, -0.5),))]
    stage.script = lambda request: [Output(request.request_id, [7], "length", prompt_logprobs=told)]
    answer, _ = await whole(stage, prompt_logprobs=1)
    assert answer["prompt_logprobs"][0] is None
    assert set(answer["prompt_logprobs"][1]) == {"5", "6"}


async def test_several_answers_are_parsed_each_on_its_own(agent: Stage) -> None:
    texts = {"0": "Hello.", "1": CALL, "2": "<think>hm</think>x"}
    agent.script = lambda request: stopping(agent, texts[request.request_id[-1]])(request)
    answer, _ = await whole(agent, n=3, tools=TOOLS, seed=1)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "tool_calls", "stop"]
    told = await streamed(agent, n=3, tools=TOOLS, seed=1)
    for choice in answer["choices"]:
        assert comparable(told[choice["index"]]["message"]) == comparable(choice["message"])
    assert [request.sampling.seed for request in agent.submitted[:3]] == [1, 2, 3]


@pytest.mark.parametrize("stop", ["lo", ["zzz", "<tool_call>"]])
async def test_stop_strings_end_what_the_parser_reads(agent: Stage, stop: object) -> None:
    text = "<think>a</think>Hello" if stop == "lo" else f"<think>a</think>Hel{CALL}"
    agent.script = answers(agent, text)
    _, choice = await whole(agent, stop=stop, tools=TOOLS)
    assert choice["message"]["content"] == "Hel"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "lo" if stop == "lo" else "<tool_call>")
    told = (await streamed(agent, stop=stop, tools=TOOLS))[0]
    assert comparable(told["message"]) == comparable(choice["message"])


async def test_sampling_fields_reach_the_engine(stage: Stage) -> None:
    fields = {"min_tokens": 2, "max_completion_tokens": 9, "seed": 5, "ignore_eos": True, "logit_bias": {"7": 1}}
    await whole(stage, **fields, max_tokens=3)
    sampling = stage.submitted[-1].sampling
    assert (sampling.min_tokens, sampling.max_tokens, sampling.seed, sampling.ignore_eos) == (2, 9, 5, True)
    assert sampling.logit_bias == ((7, 1.0),)


async def test_the_final_message_is_continued_and_echoed(stage: Stage) -> None:
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    asked: dict[str, Any] = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    _, choice = await whole(stage, **asked)
    assert choice["message"] == {"role": "assistant", "content": "hello"}
    prompt = stage.tokenizer.decode(stage.submitted[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("assistant\nWell, ")
    _, choice = await whole(stage, **asked, echo=True)
    assert choice["message"]["content"] == "Well, hello"
    assert (await streamed(stage, **asked, echo=True))[0]["message"]["content"] == "Well, hello"
    _, choice = await whole(stage, echo=True)
    assert choice["message"]["content"] == "hello", "the last message is not of the one who answers"


async def test_the_role_is_the_last_ones_without_a_generation_prompt(stage: Stage) -> None:
    _, choice = await whole(stage, messages=[{"role": "assistant", "content": "a"}], add_generation_prompt=False)
    assert choice["message"]["role"] == "assistant"
    status, answer = await stage.chat(add_generation_prompt=False)
    assert (status, answer["choices"][0]["message"]["role"]) == (200, "user")


async def test_history_with_calls_results_and_thoughts_renders(agent: Stage) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    _, answer = await agent.post("/tokenize", {"messages": messages, "tools": TOOLS})
    await whole(agent, messages=messages, tools=TOOLS)
    ids = agent.submitted[-1].prompt_token_ids
    assert ids == answer["tokens"]
    assert agent.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<weather><clock><|im_start|>user\na\nb|<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>Rome</tool_call>|hm<|im_end|>\n"
        "<|im_start|>tool\nsunny|<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_given_ids_skip_template_and_tokenizer_but_not_the_parser(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    async with Stage(tiny_model, role="decode", kv=True, chat_template=tmp_path / "template.jinja") as stage:
        ids = stage.tokenizer.encode("<|im_start|>a\n<think>\nabc" + "d" * 7, add_special_tokens=False)
        params = params_for_decode(prompt_token_ids=ids, remote_num_tokens=len(ids))
        stage.script = stopping(stage, f"hm</think>{CALL}")
        calls = stage.tokenizer.calls
        asked: dict[str, Any] = {"kv_transfer_params": params, "tools": TOOLS, "tool_choice": "required"}
        told = (await streamed(stage, **asked))[0]
        assert stage.submitted[-1].prompt_token_ids == ids
        assert told["message"]["reasoning_content"] == "hm"
        assert told["finish_reason"] == "tool_calls"
        assert stage.submitted[-1].sampling.grammar is not None
        assert stage.tokenizer.calls == calls + 1, "the script's own"
        await whole(stage, **asked | {"tool_choice": "auto"}, echo=True)
        assert stage.submitted[-1].prompt_token_ids != ids, "what is echoed is what the client sent"


async def test_a_stream_tells_arguments_before_the_call_has_ended(agent: Stage) -> None:
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def script(request: Request) -> Iterable[Output]:
        half = CALL.index("Rome")
        yield Output(request.request_id, agent.tokenizer.encode(CALL[:half], add_special_tokens=False))
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(5)
        yield Output(request.request_id, agent.tokenizer.encode(CALL[half:], add_special_tokens=False), "stop")

    agent.script = script
    async with agent.session.post(CHAT, json={"messages": USER, "tools": TOOLS, "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        event = json.loads((await response.content.readuntil(b"\n\n")).removeprefix(b"data: "))
        assert event["choices"][0]["delta"]["tool_calls"][0]["function"] == {
            "name": "weather",
            "arguments": '{"city":  "',
        }
        gate.set()
        assert b"Rome" in await response.read()


async def test_plain_models_have_no_thoughts(stage: Stage) -> None:
    assert "</think>" not in CHATML
    stage.script = answers(stage, "<think>hm</think>x")
    _, choice = await whole(stage)
    assert choice["message"] == {"role": "assistant", "content": "<think>hm</think>x"}
