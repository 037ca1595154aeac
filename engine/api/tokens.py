"""POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from connectors.wire.openai import bad_request
from engine.api.bodies.base import check_ids, parse
from engine.api.bodies.tokenize import (
    DetokenizeBody,
    TokenizeBody,
    TokenizeChat,
    TokenizeResponses,
    TokenizeText,
    parse_tokenize_chat,
)
from engine.api.call import is_large, read_json
from engine.api.chat import render
from engine.api.context import LONG_TEXT, WORKER, Serving
from engine.api.generation import json_response
from engine.api.media import Named, placed, prepare
from engine.api.offload import offload
from engine.api.responses import render as render_responses
from engine.api.responses_input import pictures_of, prompt_of
from engine.media.item import MediaItem

_ANY = Named(None, anybody=True)


async def tokenize(request: web.Request) -> web.Response:
    """The ids of a text, or of a conversation in the model's format, told as chat messages or as input items.

    With `known_token_ids`, those the conversation had up to now, these stand in the answer as far as their text is
    the same: the ids for a prompt whose KV is to be reused. `num_spliced` says how many do in place of others.
    """
    raw = await read_json(request)
    serving = request.app[WORKER].require_serving()
    known = raw.get("known_token_ids")
    if isinstance(known, list) and len(known) > serving.max_model_len:
        where = "known_token_ids"
        raise bad_request(f"{where}: at most {serving.max_model_len}, as many as the context holds", param=where)
    large = is_large(request)
    body: TokenizeChat | TokenizeResponses | TokenizeText
    media: Sequence[MediaItem] = ()
    if "messages" in raw:
        body = await offload(large, parse_tokenize_chat, raw)
        _check(serving, body)
        pictures = await prepare(serving, body, body.pictures, _ANY, param="messages")
        ids = await render(serving, body, pictures, add_special_tokens=bool(body.add_special_tokens), large=large)
        media = placed(serving, ids, pictures, "messages")
    elif "input" in raw:
        body = await offload(large, parse, TokenizeResponses, raw)
        _check(serving, body)
        prompt = await offload(large, prompt_of, body)
        pictures = await prepare(serving, body, pictures_of(body), _ANY, param="input")
        ids = await render_responses(serving, prompt, pictures, large=large)
        media = placed(serving, ids, pictures, "input")
    else:
        body = await offload(large, parse, TokenizeText, raw)
        _check(serving, body)
        ids = await serving.tokenize(
            body.prompt, add_special_tokens=body.add_special_tokens is not False, param="prompt"
        )
    num_spliced = 0
    if body.known_token_ids and not media:
        long = len(ids) + len(body.known_token_ids) >= LONG_TEXT
        ids, num_spliced = await offload(long, serving.tokenizer.splice, ids, body.known_token_ids)
    strings = None
    if body.return_token_strs:
        strings = await offload(len(ids) >= LONG_TEXT, lambda: list(map(serving.tokenizer.token_str, ids)))
    return json_response(
        {
            "count": len(ids),
            "max_model_len": serving.max_model_len,
            "tokens": ids,
            "token_strs": strings,
            "num_spliced": num_spliced,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    raw = await read_json(request)
    serving = request.app[WORKER].require_serving()
    body = await offload(is_large(request), parse, DetokenizeBody, raw)
    serving.check_model(body.model)
    check_ids(body.tokens, serving.vocab_size, "tokens")
    long = len(body.tokens) >= LONG_TEXT
    text = await offload(long, serving.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


def _check(serving: Serving, body: TokenizeBody) -> None:
    serving.check_model(body.model)
    check_ids(body.known_token_ids or (), serving.vocab_size, "known_token_ids")
