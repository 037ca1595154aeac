"""POST /tokenize and /detokenize."""

from __future__ import annotations

from aiohttp import web

from connectors.wire.openai import bad_request
from engine.api.call import is_large, read_json
from engine.api.chat import render
from engine.api.context import LONG_TEXT, WORKER
from engine.api.generation import json_response
from engine.api.offload import offload
from engine.api.protocol import DetokenizeBody, TokenizeChat, TokenizeText, parse


async def tokenize(request: web.Request) -> web.Response:
    """The ids of a text, or of a conversation under the chat template."""
    raw = await read_json(request)
    serving = request.app[WORKER].require_serving()
    body: TokenizeChat | TokenizeText
    if "messages" in raw:
        large = is_large(request)
        body = await offload(large, parse, TokenizeChat, raw)
        serving.check_model(body.model)
        ids = await render(serving, body, add_special_tokens=bool(body.add_special_tokens), large=large)
    else:
        body = parse(TokenizeText, raw)
        serving.check_model(body.model)
        ids = await serving.tokenize(
            body.prompt, add_special_tokens=body.add_special_tokens is not False, param="prompt"
        )
    strings = None
    if body.return_token_strs:
        strings = await offload(len(ids) >= LONG_TEXT, lambda: list(map(serving.tokenizer.token_str, ids)))
    return json_response(
        {"count": len(ids), "max_model_len": serving.max_model_len, "tokens": ids, "token_strs": strings}
    )


async def detokenize(request: web.Request) -> web.Response:
    raw = await read_json(request)
    serving = request.app[WORKER].require_serving()
    body = await offload(is_large(request), parse, DetokenizeBody, raw)
    serving.check_model(body.model)
    if max(body.tokens, default=0) >= serving.vocab_size:
        raise bad_request(f"tokens: out of vocabulary, ids end at {serving.vocab_size - 1}", param="tokens")
    long = len(body.tokens) >= LONG_TEXT
    text = await offload(long, serving.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})
