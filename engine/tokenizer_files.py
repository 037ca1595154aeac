"""Tokenizers from a Hugging Face folder, or from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import tokenizers

from engine.gguf_vocabulary import build_backend
from engine.model.errors import ModelError
from engine.model.fields import Fields
from engine.model.gguf_file import GGUFFile
from engine.tokenizer import DEFAULT_TEMPLATE, Tokenizer

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>")
"""End a turn wherever they exist, also where a model's files name only the end of a text."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GGUF_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Read tokenizer.json, and what tokenizer_config.json, config.json and generation_config.json say besides."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path} is missing (other tokenizer formats are not supported)")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} is not a tokenizer: {' '.join(str(error).split())[:200]}") from None
    backend.no_truncation()
    backend.no_padding()

    settings = _optional(folder / "tokenizer_config.json")
    special = dict(_special_tokens(settings))
    config = _optional(folder / "config.json")
    sources = [config, config.section("text_config") or Fields("", {}), _optional(folder / "generation_config.json")]
    eos = {id_ for source in sources for id_ in _ids(source, "eos_token_id")}
    eos |= _known_ids(backend, (special.get("eos_token"), *_END_OF_TURN))
    bos = _known_ids(backend, (special.get("bos_token"),)) or {
        id_ for source in sources for id_ in _ids(source, "bos_token_id")
    }
    return Tokenizer(
        backend,
        eos_token_ids=frozenset(eos),
        bos_token_id=min(bos, default=None),
        chat_templates=_folder_templates(folder, settings),
        special_tokens=special,
    )


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    fields = Fields(str(file.path), file.metadata)
    backend = build_backend(fields)

    ends = [_gguf_id(fields, backend, f"{name}_token_id") for name in ("eos", "eot", "eom")]
    # GGUF names one end of text only. A folder's generation_config.json lists this one too where it applies.
    eos = _known_ids(backend, (*_END_OF_TURN, "<|endoftext|>")) | {id_ for id_ in ends if id_ is not None}
    named = {name: _gguf_id(fields, backend, key) for name, key in _GGUF_SPECIAL.items()}
    return Tokenizer(
        backend,
        eos_token_ids=frozenset(eos),
        bos_token_id=named["bos_token"],
        chat_templates=dict(_gguf_templates(file.metadata)),
        special_tokens={name: str(backend.id_to_token(id_)) for name, id_ in named.items() if id_ is not None},
    )


def _optional(path: Path) -> Fields:
    return Fields.from_json(path) if path.is_file() else Fields(str(path), {})


def _special_tokens(settings: Fields) -> Iterator[tuple[str, str]]:
    for name in _SPECIAL:
        value = settings.get(name)
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str):
            yield name, content


def _ids(fields: Fields, key: str) -> Iterator[int]:
    value = fields.get(key)
    for id_ in value if isinstance(value, list) else [value]:
        if isinstance(id_, int):
            yield id_
        elif id_ is not None:
            raise fields.wrong(key, "a token id or a list of them")


def _known_ids(backend: tokenizers.Tokenizer, tokens: tuple[str | None, ...]) -> set[int]:
    return {id_ for token in tokens if token and (id_ := backend.token_to_id(token)) is not None}


def _gguf_id(fields: Fields, backend: tokenizers.Tokenizer, key: str) -> int | None:
    """The token id under `tokenizer.ggml.<key>`, if there is such a token: files write -1 or 2³² - 1 for none."""
    value = fields.get(f"tokenizer.ggml.{key}")
    if isinstance(value, int) and 0 <= value < 1 << 32 and backend.id_to_token(value) is not None:
        return value
    return None


def _folder_templates(folder: Path, settings: Fields) -> dict[str, str]:
    """By name. chat_template.jinja goes before chat_template.json, which models that see have, and that before
    tokenizer_config.json, as transformers has it."""
    templates: dict[str, str] = {}
    value = settings.get("chat_template")
    if isinstance(value, str):
        templates[DEFAULT_TEMPLATE] = value
    elif isinstance(value, list):
        for entry in value:
            if not (isinstance(entry, Mapping) and isinstance(entry.get("template"), str)):
                raise settings.wrong("chat_template", "a string, or a list of named templates")
            templates[str(entry.get("name"))] = entry["template"]
    beside = _optional(folder / "chat_template.json").get("chat_template")
    if isinstance(beside, str):
        templates[DEFAULT_TEMPLATE] = beside
    files = {DEFAULT_TEMPLATE: folder / "chat_template.jinja"}
    files |= {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    try:
        return templates | {name: path.read_text() for name, path in files.items() if path.is_file()}
    except UnicodeDecodeError:
        raise ModelError(f"{folder}: a chat template (*.jinja) is not UTF-8 text") from None


def _gguf_templates(metadata: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    prefix = "tokenizer.chat_template"
    for key, value in metadata.items():
        if isinstance(value, str) and (key == prefix or key.startswith(f"{prefix}.")):
            yield key[len(prefix) + 1 :] or DEFAULT_TEMPLATE, value
