"""Tool calls out of text: what is a call, what is content, and that neither depends on how the text was cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats.base import CallDelta, Piece
from engine.formats.calls import CallReader, CallSyntax
from engine.formats.hermes import HermesCalls
from engine.formats.llama3 import Llama3Calls

HERMES, LLAMA3 = HermesCalls(), Llama3Calls()


def read(syntax: CallSyntax, parts: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and the calls as (name, arguments)."""
    pieces = pieces_of(syntax, parts)
    whole = sum(pieces, Piece())
    calls: dict[int, list[str]] = {}
    for call in whole.calls:
        if call.id is not None:
            assert call.index == len(calls), "calls are numbered in their order"
            assert call.id == f"call-{call.index}"
            calls[call.index] = [call.name or "", ""]
        else:
            assert call.name is None
        calls[call.index][1] += call.arguments
    return whole.content, [(name, arguments) for name, arguments in calls.values()]


def pieces_of(syntax: CallSyntax, parts: Sequence[str]) -> list[Piece]:
    ids = (f"call-{number}" for number in itertools.count())
    reader = CallReader(syntax, lambda: next(ids))
    return [*map(reader.push, parts), reader.end()]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain text ", "plain text ", []),
        ("", "", []),
        (call("f", '{"a": 1}'), "", [("f", '{"a": 1}')]),
        ("Let me see.\n" + call("f", "{}"), "Let me see.", [("f", "{}")]),
        (call("f", "{}") + "\n" + call("g", '{"b":  [1, {}]}') + "\n", "", [("f", "{}"), ("g", '{"b":  [1, {}]}')]),
        (call("f", "{}") + "\nDone.", "\nDone.", [("f", "{}")]),
        ('<tool_call>{"arguments": {"x": "}"}, "name": "f"}</tool_call>', "", [("f", '{"x": "}"}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"type": "function", "id": "1", "name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f\\u00e9", "arguments": {}}</tool_call>', "", [("fé", "{}")]),
        # Ended before its closing tag, in it, or in the arguments: by a stop token, or by max_tokens.
        ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}\n</tool', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
        # Not calls.
        ("a <tool_call> b", "a <tool_call> b", []),
        ("<tool_ca", "<tool_ca", []),
        (call("f", "[1]"), call("f", "[1]"), []),
        (call("f", '"{}"'), call("f", '"{}"'), []),
        (call("", "{}"), call("", "{}"), []),
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}', '<tool_call>{"name": "\\ud800", "arguments": {}}', []),
        ('<tool_call>{"answer": 42}</tool_call>', '<tool_call>{"answer": 42}</tool_call>', []),
        ("<tool_call><function=f></function></tool_call>", "<tool_call><function=f></function></tool_call>", []),
        # What follows garbage is read anew, and a call that has begun stays one.
        ("<tool_call>" + call("f", "{}"), "<tool_call>", [("f", "{}")]),
        ("<<tool_call>x" + call("f", "{}"), "<<tool_call>x", [("f", "{}")]),
        (call("f", "{}") + "<tool_ca", "<tool_ca", [("f", "{}")]),
        (call("f", "{}") + '<tool_call>{"name"', '<tool_call>{"name"', [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}, 5}</tool_call>', ", 5}</tool_call>", [("f", "{}")]),
    ],
)
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(HERMES, [text]) == (content, calls)
    assert read(HERMES, list(text)) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain text", "plain text", []),
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (' <|python_tag|> {"name": "f", "parameters": {}}\n', "", [("f", "{}")]),
        ('{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        (
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
            "",
            [("f", "{}"), ("g", '{"b": 2}')],
        ),
        ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('{"name": "f", "parameters": {"a', "", [("f", '{"a')]),
        ('{"answer": 42}', '{"answer": 42}', []),
        (' {"name": 5}', ' {"name": 5}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("<|python", "<|python", []),
        ('Sure: {"name": "f", "parameters": {}}', 'Sure: {"name": "f", "parameters": {}}', []),
        ('{"name": "f", "parameters": {}} and more', " and more", [("f", "{}")]),
        ('{"name": "f", "parameters": {}}; {"nam', '; {"nam', [("f", "{}")]),
    ],
)
def test_llama3(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(LLAMA3, [text]) == (content, calls)
    assert read(LLAMA3, list(text)) == (content, calls)


def test_arguments_are_told_as_they_come() -> None:
    parts = ["<tool_call>\n{", '"name": "f", "argum', 'ents": {"a', '": "b', '"}}', "\n</tool_call>"]
    assert [piece.calls for piece in pieces_of(HERMES, parts)] == [
        (),
        (),
        (CallDelta(0, '{"a', "call-0", "f"),),
        (CallDelta(0, '": "b'),),
        (CallDelta(0, '"}'),),
        (),
        (),
    ]


def test_content_is_held_back_only_while_it_may_be_a_call() -> None:
    contents = [piece.content for piece in pieces_of(HERMES, ["Hi", " ", "you", " <", "b> <tool_", "box", " \n"])]
    assert contents == ["Hi", "", " you", "", " <b>", " <tool_box", "", " \n"]


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "<",
    "<|python_tag|>",
    '{"name": "f", ',
    '"name": ',
    '"arguments": ',
    '"parameters": ',
    '{"a": [1, "}"]}',
    "{",
    "}",
    '"',
    "\\",
    "\\u00e9",
    ";",
    ",",
    ":",
    "\n",
    " ",
    "hello",
    "é",
    "\x00",
    call("g", '{"q": "<tool_call>"}'),
    '{"name": "h", "parameters": {}}',
]
texts = st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join))


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return text, [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


@pytest.mark.parametrize("syntax", [HERMES, LLAMA3])
@settings(deadline=None)
@given(cut=cut_texts())
def test_the_same_however_the_text_is_cut(syntax: CallSyntax, cut: tuple[str, list[str]]) -> None:
    text, parts = cut
    assert read(syntax, parts) == read(syntax, [text])


@pytest.mark.parametrize("syntax", [HERMES, LLAMA3])
@settings(deadline=None)
@given(cut=cut_texts())
def test_without_a_call_the_content_is_the_text(syntax: CallSyntax, cut: tuple[str, list[str]]) -> None:
    text, parts = cut
    content, calls = read(syntax, parts)
    if not calls:
        assert content == text
    for _, arguments in calls:
        assert arguments == "{}" or arguments in text
    # Content is made of the text's own characters, each at most once and in their order.
    rest = iter(text)
    assert all(character in rest for character in content)


names = st.from_regex(r"[a-zA-Z_]{1,12}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
good_calls = st.lists(st.tuples(names, st.dictionaries(st.text(), values, max_size=4)), min_size=1, max_size=3)


@settings(deadline=None)
@given(calls=good_calls, ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
def test_arguments_are_the_models_own_text(
    calls: list[tuple[str, dict[str, object]]], ascii_only: bool, indent: int | None
) -> None:
    written = [(name, json.dumps(value, ensure_ascii=ascii_only, indent=indent)) for name, value in calls]
    assert read(HERMES, ["\n".join(call(*one) for one in written)]) == ("", written)
    llama = ";".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in written)
    assert read(LLAMA3, list(llama)) == ("", written)
