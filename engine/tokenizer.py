"""Text to token ids and back, and messages to a prompt."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from engine.chat_template import ChatTemplate, ChatTemplateError, Message, compiled
from engine.detokenizer import ByteLevelDecoder, IncrementalDecoder, WindowDecoder, bytes_of_piece, bytes_of_token
from engine.model.errors import ModelError
from engine.splice import Spelling, splice

DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"


class Tokenizer:
    """A model's vocabulary and chat templates. Tokens such as <|im_end|> are recognised in text."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: frozenset[int],
        bos_token_id: int | None,
        chat_templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
    ) -> None:
        """chat_templates: by name, of which DEFAULT_TEMPLATE and TOOL_TEMPLATE are used; special_tokens: what
        templates may read, such as {"bos_token": "<s>"}.
        """
        self._backend = backend
        self._templates = dict(chat_templates)
        self._special_tokens = dict(special_tokens)
        self._special = frozenset(id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special)
        self._skipped = self._special
        self._byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._token_bytes: dict[int, bytes] = {}
        self._spelling = Spelling(backend)
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.max_token_id = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.calls = 0
        """Texts encoded since the start."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; ValueError if it is not Unicode text (a lone surrogate from a JSON escape)."""
        self.calls += 1
        return _ids(self._backend, text, add_special_tokens=add_special_tokens)

    def encode_ordinary(self, text: str) -> list[int]:
        """encode() for text of others' making: in it <|im_end|> is nothing but these ten characters."""
        self.calls += 1
        return _ids(self._ordinary, text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        shown = [id_ for id_ in ids if id_ not in self._skipped] if skip_special_tokens else list(ids)
        text: str = self._backend.decode(shown, skip_special_tokens=False)
        return text

    def is_special(self, token: str) -> bool:
        """Whether this text is a token that text cannot spell: one that answers do not show."""
        return self._backend.token_to_id(token) in self._special

    def show(self, tokens: Collection[str]) -> None:
        """Have these tokens seen in answers although they are special: they are marks of the model's format."""
        self._skipped -= {self._backend.token_to_id(token) for token in tokens}

    def text_since_special(self, ids: Sequence[int]) -> str:
        """The text after the last special token, of those that answers do not show."""
        start = next((at for at in range(len(ids), 0, -1) if ids[at - 1] in self._skipped), 0)
        return self.decode(ids[start:], skip_special_tokens=False)

    @cached_property
    def max_characters_per_token(self) -> int:
        """No text has more characters for each of its tokens."""
        longest = max(len(self.token_str(token)) for token in range(self.vocab_size))
        return 2 * longest  # normalisation may compose two characters into one

    def splice(self, ids: list[int], known: Sequence[int]) -> tuple[list[int], int]:
        """`ids` with the beginning of `known` in place of theirs where the text is provably the same, and how many of
        `known` that put in."""
        return splice(ids, known, self._spelling)

    def stream(self, *, skip_special_tokens: bool) -> IncrementalDecoder:
        """A decoder for one output, fed as its tokens come."""
        if self._byte_level:
            return ByteLevelDecoder(self._shown_bytes if skip_special_tokens else self.token_bytes)
        return WindowDecoder(partial(self.decode, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for: part of a character, perhaps; none if there is no such token."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._find_bytes(token_id)
        return known

    def token_str(self, token_id: int) -> str:
        """One token as text, special ones included; replacement characters for parts of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def to_json(self) -> str:
        """The vocabulary, and how text falls into it, as a tokenizer.json has them."""
        text: str = self._backend.to_str()
        return text

    def token_id(self, token: str) -> int | None:
        id_: int | None = self._backend.token_to_id(token)
        return id_

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that ordinary text cannot spell."""
        return self._special

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def template_text(self) -> str:
        """The text of all chat templates, which shows how the model is talked to."""
        return "\n".join(self._templates.values())

    def use_chat_template(self, path: Path) -> None:
        """Use the template in this file instead of the model's own; ModelError if it is none."""
        try:
            source = path.read_text()
            ChatTemplate(source)
        except OSError as error:
            raise ModelError(f"chat template {path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ModelError(f"chat template {path}: {error}") from None
        self._templates = {DEFAULT_TEMPLATE: source}

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`; encode it without special tokens, the template has put them in.

        `variables` are the client's chat_template_kwargs. Raises ChatTemplateError (a ValueError) for the client.
        """
        source = chat_template or self._template_for(tools)
        return compiled(source).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=self._special_tokens | variables,
        )

    def _template_for(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        wanted = TOOL_TEMPLATE if tools and TOOL_TEMPLATE in self._templates else DEFAULT_TEMPLATE
        source = self._templates.get(wanted)
        if source is None:
            raise ChatTemplateError(
                "the model has no chat template: use /v1/completions, or start the engine with --chat-template"
            )
        return source

    @cached_property
    def _ordinary(self) -> tokenizers.Tokenizer:
        """A copy, for the setting is one for all who use a backend, in other threads too."""
        backend = copy.deepcopy(self._backend)
        backend.encode_special_tokens = True
        return backend

    def _shown_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self.token_bytes(token_id)

    def _find_bytes(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        return bytes_of_token(token) if self._byte_level else bytes_of_piece(token)


def _ids(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text is not valid Unicode: it holds half of a surrogate pair") from None
    ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
    return ids
