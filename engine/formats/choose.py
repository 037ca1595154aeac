"""Which format a model is talked to in: as its settings say, or what its template and vocabulary show."""

from __future__ import annotations

from collections.abc import Mapping

from engine.formats import hermes, llama3, reasoning
from engine.formats.base import ChatFormat
from engine.formats.calls import CallSyntax
from engine.formats.harmony import HarmonyFormat, has_markers
from engine.formats.template import TemplateFormat
from engine.tokenizer import Tokenizer

AUTO = "auto"
_SYNTAXES: Mapping[str, CallSyntax] = {"hermes": hermes.HermesCalls(), "llama3_json": llama3.Llama3Calls()}


def choose_format(
    tokenizer: Tokenizer,
    *,
    max_model_len: int,
    chat_format: str = AUTO,
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
) -> ChatFormat:
    """Raises FormatError if the model cannot be talked to in the format demanded."""
    nothing_said = chat_format == tool_call_parser == reasoning_parser == AUTO
    if chat_format == "harmony" or (nothing_said and has_markers(tokenizer)):
        return HarmonyFormat(tokenizer, max_model_len=max_model_len)
    template = tokenizer.template_text
    syntax = _calls_in(template) if tool_call_parser == AUTO else tool_call_parser
    thinks = reasoning.CLOSE in template if reasoning_parser == AUTO else reasoning_parser == "think"
    return TemplateFormat(tokenizer, calls=_SYNTAXES.get(syntax), thinks=thinks, max_model_len=max_model_len)


def _calls_in(template: str) -> str:
    """The name of the syntax in which a template writes calls, or asks for them."""
    # Some models write XML within the same tag, each function and each argument as an element.
    if hermes.OPEN in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    if llama3.TAG in template or '"parameters": dictionary of argument name' in template:
        return "llama3_json"
    return "none"
