"""Reads a Harmony answer: markers by their ids, so that text which spells one is text."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.formats.base import CallDelta, Piece
from engine.formats.calls import new_call_id
from engine.formats.harmony_grammar import Within
from engine.formats.harmony_prompt import Marker
from engine.tokenizer import Tokenizer

MAX_HEADER = 512
"""Characters. What goes on longer without a <|message|> is no header but the answer of a model that left it out."""

_RECIPIENT = re.compile(r"\bto=(\S+)")
_ROLE = re.compile(r"(assistant)?(\s*to=\S*)?")
_CHANNEL = re.compile(r"\s*(analysis|commentary|final)?(\s*to=\S*)?")
_FUNCTIONS = "functions."

Kind = Literal["content", "reasoning", "call", "nothing"]
"""Of the message that is read; between two there is nothing, or text that should not be there."""


@dataclass(frozen=True, slots=True)
class _Token:
    """What a token adds to the text of the answer."""

    text: str
    special: bool = False
    marker: Marker | None = None


class HarmonyParser:
    """Lays ids and text side by side: the ids say what is a marker, the text how much of the answer is to be shown."""

    def __init__(self, tokenizer: Tokenizer, markers: Mapping[int, Marker], messages: Messages) -> None:
        """`messages`: read up to the end of the prompt."""
        self._tokenizer = tokenizer
        self._markers = markers
        self._messages = messages
        self._decoder = tokenizer.stream(skip_special_tokens=False)
        self._ahead: deque[_Token] = deque()
        """Told by their ids, not yet by their text."""
        self._shown = 0
        """Characters of text that none of the tokens so far accounts for."""

    def push(self, text: str, token_ids: Sequence[int]) -> Piece:
        for token_id in token_ids:
            self._add(token_id)
        self._shown += len(text)
        self._read()
        return self._messages.take()

    def end(self) -> Piece:
        if rest := self._decoder.flush():
            self._ahead.append(_Token(rest))
        self._read()
        # A stop token is not shown, but it ends a message; text that is not shown belongs to a stop string.
        while self._ahead and self._ahead[0].special:
            self._messages.marker(self._ahead.popleft().marker)
        self._messages.end()
        return self._messages.take()

    def _add(self, token_id: int) -> None:
        text = self._decoder.step([token_id])
        if token_id not in self._tokenizer.special_token_ids:
            self._ahead.append(_Token(text))
            return
        spelling = self._tokenizer.token_str(token_id)
        before = text.removesuffix(spelling)  # an unfinished character, which this token shows to remain one
        self._ahead += (_Token(before), _Token(text[len(before) :], True, self._markers.get(token_id)))

    def _read(self) -> None:
        while self._ahead:
            token = self._ahead[0]
            length = len(token.text)
            if token.special and length > self._shown:
                return
            if length > self._shown:
                if self._shown:
                    self._messages.text(token.text[: self._shown])
                    self._ahead[0] = _Token(token.text[self._shown :])
                    self._shown = 0
                return
            self._ahead.popleft()
            self._shown -= length
            if token.special:
                self._messages.marker(token.marker)
            else:
                self._messages.text(token.text)


@dataclass(slots=True)
class _Header:
    """What stands before a <|message|>: `role to=recipient<|channel|>channel to=recipient<|constrain|>format`."""

    role: str = ""
    channel: str | None = None
    format: str | None = None

    def add(self, text: str) -> None:
        if self.format is not None:
            self.format += text
        elif self.channel is not None:
            self.channel += text
        else:
            self.role += text

    @property
    def text(self) -> str:
        return self.role + (self.channel or "") + (self.format or "")

    @property
    def recipient(self) -> str | None:
        found = _RECIPIENT.search(f"{self.role} {self.channel or ''}")
        return found[1] if found else None

    @property
    def is_thought(self) -> bool:
        return (self.channel or "").split()[:1] == ["analysis"]

    @property
    def stray(self) -> str:
        """What has no place in a header."""
        role, channel = self.role, self.channel or ""
        return _ROLE.sub("", role, count=1).strip() + _CHANNEL.sub("", channel, count=1).strip()


class Messages:
    """Markers and the text between them, to what they mean. Nothing is malformed: what is in no message is content."""

    def __init__(self, functions: frozenset[str]) -> None:
        """`functions`: the names of those that can be called; with none, what looks like a call is content."""
        self._functions = functions
        self._header: _Header | None = _Header()
        self._kind: Kind = "content"
        self._pieces: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._calls: list[CallDelta] = []
        self._arguments: list[str] = []
        """Of the last call, not yet in a delta."""
        self._num_calls = 0
        self._told: set[str] = set()
        self._apart = False
        """The next text begins a message."""

    @property
    def within(self) -> Within:
        if self._header is not None:
            return "header"
        return "content" if self._kind == "call" else self._kind

    def begin(self, prompt: Sequence[tuple[Marker | None, str]]) -> None:
        """Go through the message in which a prompt ends; the answer goes on with it, as content if it is a call."""
        for marker, text in prompt:
            if marker is not None:
                self.marker(marker)
            else:
                self.text(text)
        self.take()
        self._told.clear()
        self._num_calls = 0
        if self._kind == "call":
            self._kind = "content"
        if self._header is not None:
            self._header.role = self._header.role.removeprefix("assistant")  # none of the answer, whatever follows

    def take(self) -> Piece:
        """What has been gained since the last time."""
        self._settle_arguments()
        piece = Piece("".join(self._pieces["content"]), "".join(self._pieces["reasoning"]), tuple(self._calls))
        for texts in self._pieces.values():
            texts.clear()
        self._calls.clear()
        return piece

    def end(self) -> None:
        """Nothing will follow: a header that was cut short is none of the answer, unless nothing says it is one."""
        if self._header is not None and self._header.channel is None:
            self._give_up_header()

    def text(self, text: str) -> None:
        if self._header is None:
            self._tell(text)
            return
        self._header.add(text)
        if len(self._header.text) > MAX_HEADER:
            stray, self._header, self._kind = self._header.text, None, "content"
            self._tell(stray)

    def marker(self, marker: Marker | None) -> None:
        """None for special tokens of no meaning here."""
        match marker:
            case Marker.START:
                self._give_up_header()
                self._header = _Header()
            case Marker.CHANNEL:
                self._header = self._header or _Header()
                self._header.channel = self._header.channel or ""
            case Marker.CONSTRAIN if self._header is not None:
                self._header.format = self._header.format or ""
            case Marker.MESSAGE if self._header is not None:
                self._open(self._header)
            case Marker.END | Marker.RETURN | Marker.CALL:
                self._give_up_header()
                self._kind = "nothing"
                self._apart = True

    def _open(self, header: _Header) -> None:
        self._header = None
        self._apart = True
        name = self._function(header.recipient)
        if name is not None:
            self._settle_arguments()
            self._kind = "call"
            self._calls.append(CallDelta(self._num_calls, id=new_call_id(), name=name))
            self._num_calls += 1
        else:
            self._kind = "reasoning" if header.is_thought else "content"

    def _function(self, recipient: str | None) -> str | None:
        if recipient is None or not self._functions:
            return None
        if recipient.startswith(_FUNCTIONS):
            return recipient.removeprefix(_FUNCTIONS)
        return recipient if recipient in self._functions else None

    def _give_up_header(self) -> None:
        if self._header is not None:
            stray, self._header, self._kind = self._header.stray, None, "content"
            self._tell(stray)

    def _tell(self, text: str) -> None:
        if not text:
            return
        if self._kind == "call":
            self._arguments.append(text)
            return
        kind = "reasoning" if self._kind == "reasoning" else "content"
        # Nothing separates a preamble from the answer, or thoughts from further ones, but that they are two messages.
        if self._apart and kind in self._told:
            text = "\n" + text
        self._apart = False
        self._told.add(kind)
        self._pieces[kind].append(text)

    def _settle_arguments(self) -> None:
        if self._arguments:
            last = self._calls.pop() if self._calls else CallDelta(self._num_calls - 1)
            self._calls.append(replace(last, arguments="".join(self._arguments)))
            self._arguments.clear()
