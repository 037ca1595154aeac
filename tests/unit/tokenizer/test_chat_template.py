"""Chat templates: rendered as transformers renders them, and contained when they misbehave."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine import chat_template
from engine.chat_template import ChatTemplate, ChatTemplateError
from engine.model.errors import ModelError
from engine.model.gguf_file import GGUFFile
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf
from tests.tiny import CHATML, make_tiny

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 2 + 2? <b>&</b> \"quotes\" 'n' é 日本"}
ASSISTANT = {"role": "assistant", "content": "4"}
TOOL_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "é"}}}],
}
TOOL = {"role": "tool", "content": '{"sum": 4}', "tool_call_id": "c1"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "Sure?"}],
    "tools": [USER, TOOL_CALL, TOOL, {"role": "assistant", "content": "It is 4."}],
    "spaces": [{"role": "user", "content": "\n  indented\n\n"}],
}
# Every construct of the templates in use: whitespace control, loop controls, namespaces, macros, tools, dates.
ELABORATE = """\
{%- macro call(c) %}<call>{{ c.name }}{{ c.arguments | tojson }}</call>{% endmacro %}
{%- set ns = namespace(system=false) %}
{{- bos_token }}
    {% if tools %}
# Tools
    {% for tool in tools %}
{{ tool | tojson(indent=2) }}
    {% endfor %}
    {% endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'system' %}{% set ns.system = true %}{% endif %}
<{{ message['role'] | upper }}>
    {%- if message.tool_calls %}
        {%- for c in message.tool_calls %}{{ call(c.function) }}{% endfor %}
    {%- endif %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- else %}{{ message.content.strip() }}{% endif %}
{{ eos_token -}}
    {%- if loop.index > 10 %}{% break %}{% endif %}
{%- endfor %}
{%- if not ns.system %} no system{% endif %}
{%- if enable_thinking is defined and enable_thinking %}<think>{% endif %}
{%- if add_generation_prompt %}<ASSISTANT>{% endif %}
"""


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return tokenizer_from_folder(tiny_model)


@pytest.fixture(scope="module")
def real(smollm2_path: Path) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(smollm2_path))


@pytest.fixture(scope="module")
def real_template(smollm2_path: Path) -> str:
    return str(GGUFFile(smollm2_path).metadata["tokenizer.chat_template"])


def expect(reference: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(reference.apply_chat_template(copy.deepcopy(messages), tokenize=False, **options))


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("template", [CHATML, ELABORATE], ids=["chatml", "elaborate"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}, {"enable_thinking": True}])
def test_rendering_equals_transformers(
    tokenizer: Tokenizer,
    reference: transformers.PreTrainedTokenizerFast,
    name: str,
    template: str,
    tools: list[dict[str, Any]] | None,
    options: dict[str, Any],
) -> None:
    messages = CONVERSATIONS[name]
    expected = expect(reference, messages, tools=tools, chat_template=template, **options)
    options = {"add_generation_prompt": False} | options
    assert tokenizer.render_chat(messages, tools=tools, chat_template=template, **options) == expected


@pytest.mark.parametrize("template", [CHATML, ELABORATE], ids=["chatml", "elaborate"])
@pytest.mark.parametrize("content", ["The answer", "The answer ", "The answer\n\n", " 4"])
def test_continued_message_equals_transformers(
    tokenizer: Tokenizer, reference: transformers.PreTrainedTokenizerFast, template: str, content: str
) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    expected = expect(reference, messages, chat_template=template, continue_final_message=True)
    rendered = tokenizer.render_chat(
        messages, chat_template=template, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered == expected


@pytest.mark.model
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_real_template_equals_transformers(
    real: Tokenizer, reference: transformers.PreTrainedTokenizerFast, real_template: str, name: str
) -> None:
    messages = CONVERSATIONS[name]
    for prompt in (False, True):
        rendered = real.render_chat(messages, add_generation_prompt=prompt)
        assert rendered == expect(reference, messages, chat_template=real_template, add_generation_prompt=prompt)


def test_what_clients_send_becomes_what_templates_expect() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m | tojson(sort_keys=true) }}\n{% endfor %}")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": [1]}'}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "not json"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
    ]
    before = copy.deepcopy(messages)
    assert [json.loads(line) for line in template.render(messages).splitlines()] == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1]}}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "not json"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
    ]
    assert messages == before


def test_date_is_the_present_one() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([USER])
    assert len(rendered) == 10
    assert rendered.startswith("20")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for %}", "the chat template is invalid"),
        ("{{ '" + "(" * 5000 + "' }}{{ " + "(" * 5000, "the chat template is invalid"),
        ("{{ raise_exception('roles must\nalternate') }}", "chat template: roles must alternate"),
        ("{{ messages[0].nothing.further }}", "chat template: "),
        ("{{ 1 + 'a' }}", "chat template: TypeError"),
        ("{{ 1 / 0 }}", "chat template: ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template: RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "chat template: access to attribute"),
        ("{{ messages.append(1) }}", "chat template: "),
        ("{{ range(10**9) | list }}", "chat template: "),
        ("{% include 'etc/passwd' %}", "chat template: "),
    ],
)
def test_whatever_a_template_does_wrong_is_one_line_for_the_client(source: str, says: str) -> None:
    with pytest.raises(ChatTemplateError) as raised:
        ChatTemplate(source).render([USER])
    assert str(raised.value).startswith(says)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED", 1000)
    endless = "{% for a in range(90000) %}{% for b in range(90000) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="more than 1000 characters"):
        ChatTemplate(endless).render([USER])


@pytest.mark.parametrize(
    ("messages", "template", "says"),
    [
        ([USER, {"role": "assistant", "content": ""}], CHATML, "needs a last message with text"),
        ([], CHATML, "needs a last message with text"),
        ([USER], "{{ messages | length }}", "changes or drops the final message"),
    ],
)
def test_message_that_cannot_be_continued(messages: list[dict[str, str]], template: str, says: str) -> None:
    with pytest.raises(ChatTemplateError, match=says):
        ChatTemplate(template).render(messages, continue_final_message=True)


def test_prompt_and_continuation_exclude_each_other() -> None:
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        ChatTemplate(CHATML).render([USER], add_generation_prompt=True, continue_final_message=True)


def test_clients_variables_cannot_replace_the_messages(tokenizer: Tokenizer) -> None:
    rendered = tokenizer.render_chat([USER], chat_template="{{ bos_token }}{{ messages[0].role }}", bos_token="B")
    assert rendered == "Buser"
    with pytest.raises(TypeError):
        tokenizer.render_chat([USER], messages=[])  # type: ignore[misc]


def test_template_is_taken_from_the_place_that_counts(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())

    def rendered(**options: Any) -> str:
        return tokenizer_from_folder(folder).render_chat([USER], **options)

    assert rendered() == ChatTemplate(CHATML).render([USER], add_generation_prompt=True)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    assert (rendered(), rendered(tools=TOOLS), rendered(tools=[])) == ("plain", "with tools", "plain")
    (folder / "chat_template.jinja").write_text("from the file")
    assert rendered() == "from the file"
    assert rendered(chat_template="from the client") == "from the client"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="is not UTF-8 text"):
        rendered()
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": [1]}))
    with pytest.raises(ModelError, match="chat_template must be a string, or a list of named templates"):
        rendered()


def test_model_without_a_template(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / "tokenizer_config.json").unlink()
    tokenizer = tokenizer_from_folder(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template: use /v1/completions"):
        tokenizer.render_chat([USER])


def test_template_from_a_file_replaces_the_models(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(make_tiny(tmp_path / "m"))
    path = tmp_path / "t.jinja"
    with pytest.raises(ModelError, match=r"t\.jinja cannot be read: No such file"):
        tokenizer.use_chat_template(path)
    path.write_text("{% if %}")
    with pytest.raises(ModelError, match=r"t\.jinja: the chat template is invalid"):
        tokenizer.use_chat_template(path)
    path.write_text("{{ messages[0].content }}!")
    tokenizer.use_chat_template(path)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}], tools=TOOLS) == "hi!"


def test_tool_call_arguments_nested_too_deep_are_the_clients_mistake() -> None:
    arguments = '{"a":' * 5000 + "1" + "}" * 5000
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    with pytest.raises(ChatTemplateError, match="nested too deep"):
        ChatTemplate("{{ messages[0].role }}").render([message])
