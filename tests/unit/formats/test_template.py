"""Formats over chat templates: prompts, what is parsed, and grammars that hold the model to its own syntax."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.formats.base import ChatFormat, FormatError, Piece, Prompt, PromptTooLong
from engine.formats.choose import choose_format
from engine.formats.constraint import content_rule
from engine.grammar import GrammarError, GrammarSpec
from engine.grammars import Grammars
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import tokenizer_from_folder
from tests.tiny import CHATML, VOCAB_SIZE

HERMES = CHATML + "{# <tool_call> #}"
LLAMA3 = CHATML + "{# <|python_tag|> #}"
QWEN3 = HERMES + "{# <think></think> #}"
R1 = CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
Make = Callable[..., ChatFormat]


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return tokenizer_from_folder(tiny_model)


@pytest.fixture
def make(tokenizer: Tokenizer, tmp_path: Path) -> Make:
    def make(template: str, **settings: Any) -> ChatFormat:
        path = tmp_path / "template.jinja"
        path.write_text(template)
        tokenizer.use_chat_template(path)
        return choose_format(tokenizer, **{"max_model_len": 4096} | settings)

    return make


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def parse(format: ChatFormat, text: str, prompt: list[int], **asked: Any) -> Piece:
    parser = format.parser(**{"tools": TOOLS, "choice": "auto", "prompt_token_ids": prompt} | asked)
    return sum((parser.push(character, []) for character in text), Piece()) + parser.end()


@pytest.mark.parametrize(
    ("template", "role"),
    [("{{ messages[0].role }}", "system"), ("{{ messages[0].role }}{# developer #}", "developer")],
)
def test_a_developer_is_the_system_where_the_template_knows_no_developer(
    make: Make, tokenizer: Tokenizer, template: str, role: str
) -> None:
    ids = make(template).render(Prompt([{"role": "developer", "content": "x"}]))
    assert tokenizer.decode(ids, skip_special_tokens=False) == role


def test_render_is_the_template(make: Make, tokenizer: Tokenizer) -> None:
    format = make("{{ messages[0].content }}|{{ tools[0].function.name }}|{{ messages[1].reasoning_content }}|{{ x }}")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "reasoning": "hm"}]
    ids = format.render(Prompt(messages, tools=TOOLS, variables={"x": 5}))
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hi|weather|hm|5"


def test_what_cannot_be_rendered_is_told(make: Make) -> None:
    with pytest.raises(FormatError, match="bad thing"):
        make("{{ raise_exception('bad thing') }}").render(Prompt([{"role": "user", "content": "hi"}]))
    with pytest.raises(FormatError, match="surrogate"):
        make(CHATML).render(Prompt([{"role": "user", "content": "\ud800"}]))


def test_hopelessly_long_prompts_are_not_tokenized(make: Make, tokenizer: Tokenizer) -> None:
    format = make(CHATML, max_model_len=10)
    calls = tokenizer.calls
    with pytest.raises(PromptTooLong):
        format.render(Prompt([{"role": "user", "content": "x" * 10_000}]))
    assert tokenizer.calls == calls


@pytest.mark.parametrize(
    ("template", "settings", "text", "parsed"),
    [
        (HERMES, {}, '<tool_call>{"name": "clock"}</tool_call>', True),
        (LLAMA3, {}, '{"name": "clock", "parameters": {}}', True),
        (CHATML + '{# "parameters": dictionary of argument name and its value #}', {}, '{"name": "clock"}', True),
        (CHATML, {}, '<tool_call>{"name": "clock"}</tool_call>', False),
        (HERMES + "{# <function= #}", {}, '<tool_call>{"name": "clock"}</tool_call>', False),
        (HERMES, {"tool_call_parser": "none"}, '<tool_call>{"name": "clock"}</tool_call>', False),
        (CHATML, {"tool_call_parser": "hermes"}, '<tool_call>{"name": "clock"}</tool_call>', True),
        (HERMES, {"tool_call_parser": "llama3_json"}, '{"name": "clock"}', True),
    ],
)
def test_calls_are_read_as_template_or_settings_say(
    make: Make, template: str, settings: dict[str, str], text: str, parsed: bool
) -> None:
    piece = parse(make(template, **settings), text, [])
    assert ([call.name for call in piece.calls] == ["clock"]) is parsed
    assert (piece.content == text) is not parsed


@pytest.mark.parametrize("asked", [{"tools": None}, {"tools": []}, {"choice": "none"}])
def test_without_tools_calls_are_content(make: Make, asked: dict[str, Any]) -> None:
    text = '<tool_call>{"name": "clock"}</tool_call>'
    assert parse(make(HERMES), text, [], **asked) == Piece(content=text)


@pytest.mark.parametrize(
    ("template", "settings", "reasoning"),
    [
        (QWEN3, {}, "hm"),
        (HERMES, {}, ""),
        (QWEN3, {"reasoning_parser": "none"}, ""),
        (HERMES, {"reasoning_parser": "think"}, "hm"),
    ],
)
def test_thoughts_are_read_as_template_or_settings_say(
    make: Make, template: str, settings: dict[str, str], reasoning: str
) -> None:
    piece = parse(make(template, **settings), '<think>hm</think>\n\nOk <tool_call>{"name": "clock"}</tool_call>', [])
    assert piece.reasoning == reasoning
    assert [call.name for call in piece.calls] == ["clock"]
    assert piece.content == ("\n\nOk" if reasoning else "<think>hm</think>\n\nOk")


def test_the_prompts_end_says_whether_thoughts_have_begun(make: Make, tokenizer: Tokenizer) -> None:
    format = make(R1)
    opened = format.render(Prompt([{"role": "user", "content": "hi"}]))
    assert parse(format, "hm</think>yes", opened).reasoning == "hm"
    partial = ids_of(tokenizer, "<|im_start|>assistant\n<think>I am")
    assert parse(format, " sure</think>yes", partial).reasoning == " sure"
    asked_about = ids_of(tokenizer, "<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert parse(format, "It is", asked_about) == Piece(content="It is")


JSON = GrammarSpec("json_object", "")


def follows(tokenizer: Tokenizer, spec: GrammarSpec | None, text: str, vocab_size: int = VOCAB_SIZE) -> bool:
    """Whether an answer may be this text."""
    assert spec is not None
    (matcher,) = Grammars(tokenizer, vocab_size).compile(spec)
    for token_id in ids_of(tokenizer, text):
        mask = matcher.bitmask()
        assert matcher.failure is None
        if not mask[token_id // 8] >> token_id % 8 & 1:
            return False
        matcher.advance(token_id)
    matcher.bitmask()
    return matcher.may_end


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


ROME, NOW = '{"name": "weather", "arguments": {"city": "Rome"}}', '{"name": "clock", "arguments": {}}'
LLAMA_ROME = ROME.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("template", "choice", "parallel", "text", "may"),
    [
        (HERMES, "required", True, hermes(ROME), True),
        (HERMES, "required", True, hermes(NOW, ROME), True),
        (HERMES, "required", False, hermes(NOW, ROME), False),
        (HERMES, "required", True, "", False),
        (HERMES, "required", True, "No.", False),
        (HERMES, "required", True, hermes(ROME) + " Done.", False),
        (HERMES, "required", True, hermes('{"name": "other", "arguments": {}}'), False),
        (HERMES, "required", True, hermes('{"name": "weather", "arguments": {}}'), False),
        (HERMES, "required", True, hermes(ROME.replace("}}", ', "x": 1}}')), False),
        (HERMES, "=clock", True, hermes(NOW), True),
        (HERMES, "=clock", True, hermes(ROME), False),
        (LLAMA3, "required", True, LLAMA_ROME, True),
        (LLAMA3, "required", True, f"{LLAMA_ROME}; {LLAMA_ROME}", True),
        (LLAMA3, "required", False, f"{LLAMA_ROME}; {LLAMA_ROME}", False),
        (LLAMA3, "=clock", True, LLAMA_ROME, False),
        (QWEN3, "required", True, hermes(ROME), True),
        (QWEN3, "required", True, f"<think>\nhm </thi\n</think>\n\n{hermes(ROME)}", True),
        (QWEN3, "required", True, f"<think>hm</think>No.{hermes(ROME)}", False),
        (R1 + "{# <tool_call> #}", "required", True, f"hm\n</think>\n\n{hermes(ROME)}", True),
        (R1 + "{# <tool_call> #}", "required", True, hermes(ROME), False),
    ],
)
def test_calls_that_must_be_made(
    make: Make, tokenizer: Tokenizer, template: str, choice: str, parallel: bool, text: str, may: bool
) -> None:
    format = make(template)
    prompt = format.render(Prompt([{"role": "user", "content": "hi"}]))
    spec = format.grammar(JSON, tools=TOOLS, choice=choice, parallel=parallel, prompt_token_ids=prompt)
    assert follows(tokenizer, spec, text) is may
    if may:  # and what was enforced is what is read
        assert parse(format, text, prompt).calls
        assert parse(format, text, prompt).content == ""


SCHEMA = GrammarSpec("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))


@pytest.mark.parametrize(
    ("template", "content", "text", "may"),
    [
        (QWEN3, JSON, '<think>{no</think>\n\n{"a": [1]}', True),
        (QWEN3, JSON, '{"a": [1]}', True),
        (QWEN3, JSON, "Yes.", False),
        (QWEN3, SCHEMA, '<think></think>{"a": 1}', True),
        (QWEN3, SCHEMA, '<think></think>{"a": "b"}', False),
        (R1, JSON, 'so</think>{"a": 1}', True),
        (R1, GrammarSpec("regex", r"a/b\/c\d\n?"), "so</think>a/b/c7", True),
        (R1, GrammarSpec("regex", r"a/b\/c\d"), "so</think>a/b/c", False),
        (R1, GrammarSpec("regex", "a\nb"), "so</think>a\nb", True),
        (R1, GrammarSpec("choice", json.dumps(['say "x"', "\n"])), 'so</think>say "x"', True),
        (R1, GrammarSpec("choice", json.dumps(['say "x"', "\n"])), "so</think>say", False),
        (R1, GrammarSpec("lark", 'start: "x" more\nmore: /[0-9]+/'), "so</think>x12", True),
        (R1, GrammarSpec("lark", 'root ::= "x" more\nmore ::= [0-9]+'), "so</think>x12", True),
        (R1, GrammarSpec("lark", 'start: "x" more\nmore: /[0-9]+/'), "so</think>y", False),
        (R1, GrammarSpec("lark", 'start: "a ::= b"'), "so</think>a ::= b", True),
    ],
)
def test_constrained_content_comes_after_free_thoughts(
    make: Make, tokenizer: Tokenizer, template: str, content: GrammarSpec, text: str, may: bool
) -> None:
    format = make(template)
    prompt = format.render(Prompt([{"role": "user", "content": "hi"}]))
    spec = format.grammar(content, tools=None, choice="none", parallel=True, prompt_token_ids=prompt)
    assert follows(tokenizer, spec, text) is may


def test_content_that_is_no_grammar_is_refused(make: Make, tokenizer: Tokenizer) -> None:
    format = make(R1)
    prompt = format.render(Prompt([{"role": "user", "content": "hi"}]))
    content = GrammarSpec("lark", "root ::= (")
    with pytest.raises(GrammarError, match="neither Lark nor GBNF"):
        format.grammar(content, tools=None, choice="none", parallel=True, prompt_token_ids=prompt)


def test_there_are_no_thoughts_after_those_of_the_prompt(make: Make, tokenizer: Tokenizer) -> None:
    format = make(QWEN3)
    prompt = ids_of(tokenizer, "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    asked: dict[str, Any] = {"tools": TOOLS, "parallel": True, "prompt_token_ids": prompt}
    spec = format.grammar(None, choice="required", **asked)
    assert follows(tokenizer, spec, hermes(NOW))
    assert not follows(tokenizer, spec, f"<think>hm</think>{hermes(NOW)}")
    assert format.grammar(JSON, choice="none", **asked) is JSON


def test_with_tools_at_will_constrained_content_or_a_call_is_possible(make: Make, tokenizer: Tokenizer) -> None:
    spec = make(HERMES).grammar(SCHEMA, tools=TOOLS, choice="auto", parallel=True, prompt_token_ids=[])
    assert follows(tokenizer, spec, '{"a": 1}')
    assert follows(tokenizer, spec, hermes(ROME))
    assert not follows(tokenizer, spec, "Yes.")


@pytest.mark.parametrize("parameters", [None, {}, {"type": "string"}, {"$ref": "#/$defs/a", "$defs": {"a": {}}}])
def test_arguments_are_an_object_whatever_the_schema_says(
    make: Make, tokenizer: Tokenizer, parameters: dict[str, Any] | None
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    spec = make(HERMES).grammar(None, tools=[tool], choice="required", parallel=True, prompt_token_ids=[])
    assert follows(tokenizer, spec, hermes('{"name": "f", "arguments": {"a": 1}}'))
    assert not follows(tokenizer, spec, hermes('{"name": "f", "arguments": "a"}'))


@pytest.mark.parametrize("name", ['q"x', "back\\slash", "é😀", "{}%json", "a/b #c"])
def test_names_of_any_characters_can_be_demanded(make: Make, tokenizer: Tokenizer, name: str) -> None:
    tool = {"type": "function", "function": {"name": name}}
    text = hermes(json.dumps({"name": name, "arguments": {}}, ensure_ascii=False))
    format = make(HERMES)
    spec = format.grammar(None, tools=[tool], choice="required", parallel=True, prompt_token_ids=[])
    assert follows(tokenizer, spec, text)
    assert [call.name for call in parse(format, text, [], tools=[tool]).calls] == [name]


def test_schemas_beyond_all_measure_are_refused(make: Make) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"description": "x" * (1 << 18)}}}
    with pytest.raises(FormatError, match="at most 262144"):
        make(HERMES).grammar(None, tools=[tool], choice="required", parallel=True, prompt_token_ids=[])


def test_nothing_is_constrained_that_need_not_be(make: Make) -> None:
    asked: dict[str, Any] = {"parallel": True, "prompt_token_ids": []}
    assert make(QWEN3).grammar(None, tools=TOOLS, choice="auto", **asked) is None
    assert make(QWEN3).grammar(None, tools=None, choice="none", **asked) is None
    assert make(HERMES).grammar(JSON, tools=TOOLS, choice="none", **asked) is JSON


def test_tools_without_a_known_syntax_are_refused(make: Make) -> None:
    format = make(CHATML)
    for choice in ("auto", "required", "=clock"):
        with pytest.raises(FormatError, match="no known way to call tools"):
            format.grammar(None, tools=TOOLS, choice=choice, parallel=True, prompt_token_ids=[])
    assert format.grammar(None, tools=TOOLS, choice="none", parallel=True, prompt_token_ids=[]) is None


def test_a_function_that_is_not_among_the_tools_cannot_be_demanded(make: Make) -> None:
    with pytest.raises(FormatError, match="no function 'other'"):
        make(HERMES).grammar(None, tools=TOOLS, choice="=other", parallel=True, prompt_token_ids=[])


@pytest.fixture
def marked(tiny_model: Path, tmp_path: Path) -> Tokenizer:
    """A vocabulary with special tokens for thoughts and calls."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "marked"))
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    for token in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        added = vocabulary["added_tokens"]
        added.append(added[-1] | {"id": VOCAB_SIZE + len(added) - 3, "content": token})
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    (folder / "template.jinja").write_text(QWEN3)
    tokenizer = tokenizer_from_folder(folder)
    tokenizer.use_chat_template(folder / "template.jinja")
    return tokenizer


def test_marks_that_are_special_tokens_are_seen(marked: Tokenizer) -> None:
    format = choose_format(marked, max_model_len=4096)
    answer = ids_of(marked, f"<think>hm</think>Let me see.{hermes(NOW)}<|im_end|>")
    assert {VOCAB_SIZE, VOCAB_SIZE + 1, VOCAB_SIZE + 2, VOCAB_SIZE + 3} < set(answer)
    text = marked.stream(skip_special_tokens=True).step(answer)
    assert text == marked.decode(answer, skip_special_tokens=True)
    piece = parse(format, text, [])
    assert (piece.reasoning, piece.content) == ("hm", "Let me see.")
    assert [(call.name, call.arguments) for call in piece.calls] == [("clock", "{}")]
    assert parse(format, "so</think>yes", ids_of(marked, "<|im_start|>assistant\n<think>")).reasoning == "so"


def test_marks_that_are_special_tokens_are_enforced_as_such(marked: Tokenizer) -> None:
    format = choose_format(marked, max_model_len=4096)
    spec = format.grammar(None, tools=TOOLS, choice="required", parallel=True, prompt_token_ids=[])
    assert follows(marked, spec, hermes(ROME, NOW), VOCAB_SIZE + 4)
    assert follows(marked, spec, f"<think>hm</think>\n\n{hermes(NOW)}", VOCAB_SIZE + 4)
    assert not follows(marked, spec, f"<think>hm{hermes(NOW)}", VOCAB_SIZE + 4)
    assert not follows(marked, spec, "Yes", VOCAB_SIZE + 4)


def test_choice_with_a_control_character_is_a_string_of_the_grammar() -> None:
    assert content_rule(GrammarSpec("choice", '["a\\u007f", "b"]')) == 'content: "a\\u007f" | "b"'
