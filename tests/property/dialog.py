"""A client's side of one conversation: its history, how edits change it, and the request it makes of it."""

from __future__ import annotations

import copy
import json
import random
from typing import Any, Protocol

from engine.tokenizer import Tokenizer
from tests.property.client import Reply
from tests.property.items import functions_of, items_of
from tests.property.script import Edit, History, Turn

MAX_PROMPT = 330
"""Tokens; with the answer it must fit into the engines' context."""
TOOLS = (
    None,
    [{"type": "function", "function": {"name": "the_world", "parameters": {"type": "object", "properties": {}}}}],
    [{"type": "function", "function": {"name": "hello", "parameters": {"type": "object", "required": ["you"]}}}],
)
MARK = "<think>", "</think>"


class Dialog(Protocol):
    def path(self, turn: Turn) -> str: ...

    def edit(self, edit: Edit) -> None: ...

    def shorten(self, turn: Turn) -> None:
        """Forget what does not fit, oldest first."""

    def body(self, turn: Turn, sampling: dict[str, Any]) -> dict[str, Any]:
        """The prompt, and these parameters where and as the endpoint has them."""

    def prompt_ids(self, turn: Turn) -> list[int]:
        """As a cold engine makes them of that body."""

    def rival(self, text: str) -> Dialog:
        """The same history with another last question."""

    def answered(self, reply: Reply) -> None: ...


def make_dialog(history: History, tokenizer: Tokenizer) -> Dialog:
    return Chat(tokenizer) if history.kind == "chat" else Tokens(tokenizer)


class Chat:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.messages: list[dict[str, Any]] = []
        self._ends: list[list[dict[str, Any]]] = []
        """The messages as each turn left them."""
        self._continuing = False

    def path(self, turn: Turn) -> str:
        return "/v1/responses" if self._newer(turn) else "/v1/chat/completions"

    def edit(self, edit: Edit) -> None:
        self._continuing = False
        getattr(self, f"_{edit.kind}")(edit)

    def shorten(self, turn: Turn) -> None:
        while len(self.prompt_ids(turn)) > MAX_PROMPT:
            if len(self._talk) == 1:
                self._talk[0]["content"] = _text(self._talk[0])[-MAX_PROMPT // 2 :]
            self._forget(Edit("forget", max(1, len(self._talk) - 2)))

    def body(self, turn: Turn, sampling: dict[str, Any]) -> dict[str, Any]:
        tools = TOOLS[turn.tools]
        limit = sampling.pop("max_tokens")
        if self._newer(turn):
            body = {"input": items_of(self.messages), "max_output_tokens": limit, **sampling}
            return body | ({"tools": functions_of(tools), "tool_choice": "none"} if tools else {})
        body = {"messages": copy.deepcopy(self.messages), **sampling}
        body["max_completion_tokens" if limit % 4 else "max_tokens"] = limit
        if tools:
            body |= {"tools": tools, "tool_choice": "none"}
        if self._continuing:
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        return body

    def text(self, turn: Turn) -> str:
        return self._tokenizer.render_chat(
            self.messages,
            tools=TOOLS[turn.tools],
            add_generation_prompt=not self._continuing,
            continue_final_message=self._continuing,
        )

    def prompt_ids(self, turn: Turn) -> list[int]:
        return self._tokenizer.encode(self.text(turn), add_special_tokens=False)

    def rival(self, text: str) -> Chat:
        other = copy.deepcopy(self)
        if other._talk:
            other._talk[-1]["content"] = text
        else:  # it was shortened to its system message
            other.messages.append({"role": "user", "content": text})
        return other

    def answered(self, reply: Reply) -> None:
        if self._continuing:
            self.messages[-1]["content"] += reply.text
        else:
            self.messages.append({"role": "assistant", "content": reply.text})
        self._continuing = False
        self._ends.append(copy.deepcopy(self.messages))

    def __deepcopy__(self, memo: dict[int, Any]) -> Chat:
        other = Chat(self._tokenizer)
        other.messages, other._ends = copy.deepcopy(self.messages), list(self._ends)
        other._continuing = self._continuing
        return other

    def _newer(self, turn: Turn) -> bool:
        return turn.newer and not self._continuing  # a response is always a message of its own

    @property
    def _talk(self) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["role"] != "system"]

    @property
    def _answers(self) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["role"] == "assistant"]

    def _say(self, edit: Edit) -> None:
        self.messages.append({"role": "user", "content": edit.text})

    def _change(self, edit: Edit) -> None:
        self.messages[edit.at % len(self.messages)]["content"] = edit.text

    def _drop(self, edit: Edit) -> None:
        if len(self._talk) > 1:
            del self.messages[edit.at % len(self.messages)]

    def _insert(self, edit: Edit) -> None:
        role = "user" if edit.at % 2 else "assistant"
        self.messages.insert(edit.at % len(self.messages), {"role": role, "content": edit.text})

    def _forget(self, edit: Edit) -> None:
        kept = [id(message) for message in self._talk[-edit.at :]]
        self.messages = [m for m in self.messages if m["role"] == "system" or id(m) in kept]

    def _back(self, edit: Edit) -> None:
        del self.messages[max(1, len(self.messages) - edit.at) :]

    def _branch(self, edit: Edit) -> None:
        if self._ends:
            self.messages = copy.deepcopy(self._ends[edit.at % len(self._ends)])

    def _regenerate(self, edit: Edit) -> None:
        if self.messages[-1]["role"] == "assistant" and len(self.messages) > 1:
            del self.messages[-1]

    def _system(self, edit: Edit) -> None:
        self.messages = [m for m in self.messages if m["role"] != "system"]
        if edit.text:
            self.messages.insert(0, {"role": "system", "content": edit.text})

    def _think(self, edit: Edit) -> None:
        for answer in self._answers[-1:]:
            answer["content"] = edit.text.join(MARK) + answer["content"]

    def _unthink(self, edit: Edit) -> None:
        for answer in self._answers:
            answer["content"] = answer["content"].rpartition(MARK[1])[2]

    def _reason(self, edit: Edit) -> None:
        for answer in self._answers[-1:]:
            answer["reasoning_content"] = edit.text

    def _unreason(self, edit: Edit) -> None:
        for answer in self._answers:
            answer.pop("reasoning_content", None)

    def _space(self, edit: Edit) -> None:
        for answer in self._answers[-1:]:
            answer["content"] += " \n"[edit.at % 2]

    def _continue(self, edit: Edit) -> None:
        last = self.messages[-1]
        self._continuing = last["role"] == "assistant" and bool(last["content"].strip())

    def _parts(self, edit: Edit) -> None:
        self.messages[-1]["content"] = [{"type": "text", "text": _text(self.messages[-1])}]


class Tokens:
    """A conversation of bare token ids: each prompt is the last one, its answer, and more."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self._asked: list[int] = []
        self._ends: list[list[int]] = []

    def path(self, turn: Turn) -> str:
        return "/inference/v1/generate" if self._newer(turn) else "/v1/completions"

    def edit(self, edit: Edit) -> None:
        new, at = _some_ids(edit.text), edit.at % max(1, len(self.ids))
        match edit.kind:
            case "say":
                self.ids += new
            case "change":
                self.ids[at : at + 1] = new[:1]
            case "drop" if len(self.ids) > 1:
                del self.ids[at]
            case "insert" | "think":
                self.ids[at:at] = new
            case "forget":
                self.ids = self.ids[-32 * edit.at :]
            case "back":
                self.ids = self.ids[: -8 * edit.at] or self.ids
            case "branch" if self._ends:
                self.ids = list(self._ends[edit.at % len(self._ends)])
            case "regenerate" if self._asked:
                self.ids = list(self._asked)

    def shorten(self, turn: Turn) -> None:
        self.ids = (self.ids or [1])[-MAX_PROMPT:]
        while len(self.prompt_ids(turn)) > MAX_PROMPT:
            self.ids = self.ids[len(self.ids) // 4 :]

    def body(self, turn: Turn, sampling: dict[str, Any]) -> dict[str, Any]:
        if self._newer(turn):
            return {"token_ids": list(self.ids), "output_mode": "text", "sampling_params": sampling}
        return {"prompt": self._text() if turn.as_text else list(self.ids), **sampling}

    def prompt_ids(self, turn: Turn) -> list[int]:
        return self._tokenizer.encode(self._text(), add_special_tokens=True) if turn.as_text else list(self.ids)

    def rival(self, text: str) -> Tokens:
        other = Tokens(self._tokenizer)
        other.ids = [*self.ids[:-1], *_some_ids(text)]
        return other

    def answered(self, reply: Reply) -> None:
        self._asked = list(reply.prompt_ids)
        self.ids = [*reply.prompt_ids, *reply.token_ids]
        self._ends.append(list(self.ids))

    def _newer(self, turn: Turn) -> bool:
        return turn.newer and not turn.as_text  # which takes ids only

    def _text(self) -> str:
        return self._tokenizer.decode(self.ids, skip_special_tokens=False) or "the"


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _some_ids(text: str) -> list[int]:
    rng = random.Random(json.dumps(text))
    return [rng.randrange(1, 317) for _ in range(len(text))]
