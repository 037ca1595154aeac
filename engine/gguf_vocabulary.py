"""The vocabulary in a GGUF file's metadata, made into a `tokenizers` pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.model.errors import ModelError
from engine.model.fields import Fields
from engine.sentencepiece_vocabulary import build_pieces

_CONTROL, _USER_DEFINED = 3, 4
"""Token types: neither is made of smaller tokens, and control tokens are not shown in decoded text."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_FAMILY = {
    "smollm": "smollm",
    "gpt-2": "gpt-2",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "llama-bpe": "llama-bpe",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "default": "default",
}
"""`tokenizer.ggml.pre`: how text is cut into words, under the name of the first model that did it so."""


def build_backend(fields: Fields) -> tokenizers.Tokenizer:
    """A tokenizer from `tokenizer.ggml.*`; ModelError for kinds whose token ids would come out differently."""
    kind = fields.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{fields.source}: tokenizer.ggml.model {kind!r} is not supported (supported: gpt2, llama)")
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        twice = next(token for id_, token in enumerate(tokens) if tokens.index(token) != id_)
        raise ModelError(f"{fields.source}: tokenizer.ggml.tokens holds {twice[:60]!r} twice")
    try:
        backend = _byte_level(fields, tokens) if kind == "gpt2" else _sentencepiece(fields, tokens)
        _add_special_tokens(backend, fields, tokens)
        _add_post_processor(backend, fields, default_bos=kind == "llama" or _family(fields) == "llama-bpe")
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ModelError(
            f"{fields.source}: the tokenizer is inconsistent: {' '.join(str(error).split())[:200]}"
        ) from None
    return backend


def _byte_level(fields: Fields, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    family = _family(fields)
    merges = [_pair(fields, merge) for merge in _strings(fields, "tokenizer.ggml.merges")]
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=family == "llama-bpe"))
    backend.pre_tokenizer = _splitter(family)
    backend.decoder = decoders.ByteLevel()
    if family == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _family(fields: Fields) -> str:
    pre = fields.text("tokenizer.ggml.pre", "default")
    if pre not in _FAMILY:
        raise ModelError(
            f"{fields.source}: tokenizer.ggml.pre {pre!r} is not supported (supported: {', '.join(_FAMILY)})"
        )
    return _FAMILY[pre]


def _splitter(family: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut into words before the merges: as the models' publishers do it, and llama.cpp."""
    if family == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    patterns = {"gpt-2": (_GPT2,), "qwen2": (_QWEN2,), "llama-bpe": (_LLAMA3,), "default": _DEFAULT}[family]
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(fields: Fields, tokens: list[str]) -> tokenizers.Tokenizer:
    if fields.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        raise ModelError(f"{fields.source}: tokenizer.ggml.remove_extra_whitespaces is not supported")
    scores = fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens) or not np.isfinite(scores).all():
        raise ModelError(
            f"{fields.source}: tokenizer.ggml.scores must give one number for each of {len(tokens)} tokens"
        )
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    return build_pieces(
        tokens,
        scores.tolist(),
        tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
        space_prefix=fields.flag("tokenizer.ggml.add_space_prefix", True),
    )


def _strings(fields: Fields, key: str) -> list[str]:
    value = fields.get(key)
    if value is None:
        raise ModelError(f"{fields.source}: {key} is missing")
    if not isinstance(value, list) or not value:
        raise ModelError(f"{fields.source}: {key} must be a list of strings")
    return value


def _pair(fields: Fields, merge: str) -> tuple[str, str]:
    separator = merge.find(" ", 1)
    if not 0 < separator < len(merge) - 1:
        raise ModelError(f"{fields.source}: tokenizer.ggml.merges holds {merge[:60]!r}, which is not a pair")
    return merge[:separator], merge[separator + 1 :]


def _add_special_tokens(backend: tokenizers.Tokenizer, fields: Fields, tokens: Sequence[str]) -> None:
    """Have control and user-defined tokens found in text before anything else happens to it."""
    types = fields.get("tokenizer.ggml.token_type")
    if types is None:
        return
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise ModelError(
            f"{fields.source}: tokenizer.ggml.token_type must give one type for each of {len(tokens)} tokens"
        )
    added = [
        AddedToken(tokens[id_], special=bool(types[id_] == _CONTROL), normalized=False)
        for id_ in np.flatnonzero((types == _CONTROL) | (types == _USER_DEFINED)).tolist()
    ]
    backend.add_tokens(added)


def _add_post_processor(backend: tokenizers.Tokenizer, fields: Fields, *, default_bos: bool) -> None:
    """Say what encode(add_special_tokens=True) puts around a text."""
    begin = _wanted_token(backend, fields, "bos", default_bos)
    end = _wanted_token(backend, fields, "eos", False)
    special = [named for named in (begin, end) if named is not None]
    if special:
        template = [*([begin[0]] if begin else []), "$A", *([end[0]] if end else [])]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)


def _wanted_token(backend: tokenizers.Tokenizer, fields: Fields, name: str, default: bool) -> tuple[str, int] | None:
    if not fields.flag(f"tokenizer.ggml.add_{name}_token", default):
        return None
    id_ = fields.get(f"tokenizer.ggml.{name}_token_id")
    token = backend.id_to_token(id_) if isinstance(id_, int) and 0 <= id_ < 1 << 32 else None
    if token is None:
        raise ModelError(f"{fields.source}: tokenizer.ggml.{name}_token_id must name a token")
    assert isinstance(id_, int)
    return token, id_
