"""Chat templates: Jinja programs that come with a model and turn messages into its prompt.

They are other people's code, so they run in Jinja's sandbox, see plain JSON values only, and whatever goes wrong in one
is a ChatTemplateError: a bad request, never a crash.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

MAX_RENDERED = 1 << 24
"""Characters. Far beyond any context window; a template that loops ends here instead of in the memory limit."""

# Ends the final message's text while the template runs, so that its place in the prompt is known. Its last character
# shows whether the template trims what it is given.
_END = "\ue000end of the message to continue\ue000 "


class ChatTemplateError(ValueError):
    """The messages cannot be turned into a prompt; the text is one line, for the client."""


class ChatTemplate:
    def __init__(self, source: str) -> None:
        """Compile `source`; raises ChatTemplateError if it is not a template."""
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template is invalid: {_one_line(error)}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. continue_final_message ends it within the last message, for the model to go on from there.

        variables: what else the template can read, such as bos_token, or a client's chat_template_kwargs.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("add_generation_prompt and continue_final_message exclude each other")
        plain = [_plain(message, parts=self.takes_parts) for message in messages]
        final = _mark_end(plain) if continue_final_message else None
        rendered = self._run(
            {"documents": None}
            | dict(variables or {})
            | {"messages": plain, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        )
        return rendered if final is None else _cut_at_end(rendered, final)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether what is said is seen only as a list of parts, as it is in the templates of some models that see."""
        probe = "a probe"

        def shows(content: object) -> bool:
            try:
                text = self._run({"messages": [{"role": "user", "content": content}], "add_generation_prompt": False})
            except ChatTemplateError:
                return False
            return probe in text and "'type'" not in text

        return not shows(probe) and shows([{"type": "text", "text": probe}])

    def _run(self, variables: dict[str, Any]) -> str:
        pieces = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED:
                    raise ChatTemplateError(f"the chat template produced more than {MAX_RENDERED} characters")
        except ChatTemplateError:
            raise
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"chat template: {_one_line(error)}") from None
        except Exception as error:  # the template's own, and it may raise any
            raise ChatTemplateError(f"chat template: {type(error).__name__}: {_one_line(error)}") from None
        return "".join(pieces)


@lru_cache(maxsize=16)
def compiled(source: str) -> ChatTemplate:
    """ChatTemplate(source), kept for the next request that sends the same one."""
    return ChatTemplate(source)


def _plain(message: Message, *, parts: bool) -> dict[str, Any]:
    """A message as templates expect it: no nulls, content a string, or parts, tool-call arguments an object.

    Clients send nulls for what does not apply, lists of text parts, and arguments as the JSON string the API gave them.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.setdefault("content", "")
    if parts:
        plain["content"] = (
            content if isinstance(content, list) and content else [{"type": "text", "text": content or ""}]
        )
    elif isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        plain["content"] = "\n".join(str(part["text"]) for part in content)
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [_plain_tool_call(call) for call in calls]
    return plain


def _plain_tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    except RecursionError:
        raise ChatTemplateError("the arguments of a tool call are nested too deep") from None
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _mark_end(messages: list[dict[str, Any]]) -> str:
    content = messages[-1]["content"] if messages else None
    parts = content if isinstance(content, list) else []
    text = parts[-1].get("text") if parts else content
    if not isinstance(text, str) or not text.strip():
        raise ChatTemplateError("continue_final_message needs a last message with text to continue")
    marked = text + _END
    messages[-1] = messages[-1] | {"content": [*parts[:-1], {"type": "text", "text": marked}] if parts else marked}
    return text


def _cut_at_end(rendered: str, final: str) -> str:
    end = rendered.rfind(_END.rstrip())
    if end < 0 or final.strip() not in rendered:
        raise ChatTemplateError("this chat template changes or drops the final message, so it cannot be continued")
    cut = rendered[:end]
    return cut if rendered.startswith(_END, end) else cut.rstrip()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, with which training code finds the answers; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's attribute, not ours)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    filters: dict[str, Callable[..., Any]] = environment.filters
    filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
