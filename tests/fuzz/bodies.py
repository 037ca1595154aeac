"""Good requests to every endpoint: what the mutations start from. Together they use every field there is."""

from __future__ import annotations

from typing import Any

from tests.unit.server.double import byte_ids

Json = dict[str, Any]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
GENERATING = (CHAT, COMPLETIONS, RESPONSES, GENERATE)

IDS = byte_ids("hello you")
SCHEMA: Json = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", None]}, "c": {"$ref": "#/$defs/c"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"c": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}, "maxItems": 3}},
}
TOOL: Json = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}
CALL: Json = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TALK: list[Json] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}], "name": "n"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]
PICTURE: Json = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
SAMPLING: Json = {
    "n": 2,
    "max_tokens": 3,
    "min_tokens": 1,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "ignore_eos": True,
    "stop": ["zz", "qq"],
    "include_stop_str_in_output": True,
    "stop_token_ids": [1, 2],
    "skip_special_tokens": False,
    "logit_bias": {"5": 2.5, "6": -100},
    "bad_words": ["bad"],
    "allowed_token_ids": [1, 2, 3],
    "priority": 0,
}
BESIDE: Json = {
    "model": "tiny",
    "request_id": "r1",
    "cache_salt": "salt",
    "return_token_ids": True,
    "user": "u",
    "vllm_xargs": {"mine": [1, {"k": "v"}]},
}
STREAM: Json = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}

PREFILL: Json = {
    "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "offer_blocks": True, "x": 1}
}
PULL: Json = {
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[4, 5]],
        "tp_size": 1,
        "remote_engine_id": "gone",
        "remote_request_id": "p",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_num_tokens": 9,
        "remote_prefill_cached_tokens": 0,
        "kv_layout": "layout",
        "offer_blocks": True,
        "remote_block_hashes": ["aa", "bb"],
        "prompt_token_ids": IDS,
        "max_prefill_tokens": 4,
    },
    "ec_transfer_params": {
        "picture": {"peer_host": "127.0.0.1", "peer_port": 1, "size_bytes": 64, "shape": [4, 8], "new": {"a": [1]}}
    },
}
OLD_PULL: Json = {
    "kv_transfer_params": {
        name: value
        for name, value in PULL["kv_transfer_params"].items()
        if name not in ("kv_layout", "remote_block_hashes", "prompt_token_ids")
    }
}
"""Of an engine that tells less."""

CHATS: tuple[Json, ...] = (
    {"messages": TALK, **SAMPLING, **BESIDE, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1},
    {
        "messages": TALK,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "max_completion_tokens": 3,
        "include_reasoning": False,
        **STREAM,
        "documents": [{"title": "t", "text": "x"}],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"k": [1]},
    },
    {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "we"}],
        "max_tokens": 3,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
        "add_special_tokens": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
    },
    {
        "messages": [{"role": "user", "content": [PICTURE]}],
        "max_tokens": 2,
        "logprobs": True,
        "structured_outputs": {"regex": "[a-c]{2}"},
        "return_tokens_as_token_ids": True,
        "service_tier": "auto",
    },
)
COMPLETED: tuple[Json, ...] = (
    {"prompt": ["hi", IDS], **SAMPLING, **BESIDE, "echo": True, "logprobs": 2, "best_of": 2},
    {"prompt": "hi", "max_tokens": 2, "guided_choice": ["ab", "cd"], "prompt_logprobs": 0, "suffix": None},
    {"prompt": IDS, "max_tokens": 2, "structured_outputs": {"json": SCHEMA}, "return_tokens_as_token_ids": True},
    {"prompt": "hi", "max_tokens": 2, "guided_grammar": 'start: "a" | "b"', **STREAM},
    {"prompt": [[1, 2], [3]], "max_tokens": 2, "response_format": {"type": "json_object"}, "add_special_tokens": False},
)
RESPONDED: tuple[Json, ...] = (
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "t"}], "content": None},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "2"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        ],
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": False}],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": True,
        "max_output_tokens": 3,
        "instructions": "i",
        "reasoning": {"effort": "low", "summary": "auto"},
        "stream": True,
        "store": True,
        "metadata": {"k": "v"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "p",
    },
    {
        "input": "hi",
        "max_output_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_logprobs": 2,
        **BESIDE,
        "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}, "verbosity": "low"},
        "include": ["message.output_text.logprobs"],
        "truncation": "disabled",
        "background": False,
    },
)
GENERATED: tuple[Json, ...] = (
    {
        "token_ids": IDS,
        "sampling_params": {**SAMPLING, "logprobs": 1, "prompt_logprobs": 1},
        **BESIDE,
        "output_mode": "text",
        "priority": 0,
        "features": None,
    },
    {
        "token_ids": IDS,
        "sampling_params": {"max_tokens": 3, "extra_args": {"mine": 1}},
        "output_mode": "derender",
        "parse_context": {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
    },
)
TOKENS: tuple[Json, ...] = (
    {"prompt": "hi", "add_special_tokens": True, "return_token_strs": True, "known_token_ids": [1, 2], "model": "tiny"},
    {"messages": TALK, "tools": [TOOL], "known_token_ids": IDS, "add_generation_prompt": True},
    {"input": RESPONDED[0]["input"], "instructions": "i", "known_token_ids": IDS},
)
_ANSWERED: Json = {
    "request_id": "g",
    "choices": [
        {
            "index": 0,
            "token_ids": IDS,
            "finish_reason": "stop",
            "stop_reason": 5,
            "logprobs": {
                "content": [
                    {"token_id": 1, "logprob": -0.5, "rank": 1, "top_logprobs": [{"token_id": 2, "logprob": -1}]}
                ]
            },
        }
    ],
    "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}},
    "prompt_token_ids": [1, 2, 3],
    "kv_transfer_params": {"do_remote_prefill": True},
}
DERENDERED: tuple[tuple[str, Json], ...] = (
    (
        f"{CHAT}/derender",
        {
            "generate_response": _ANSWERED,
            "model": "tiny",
            "prompt_tokens": 3,
            "prompt_token_ids": [1, 2, 3],
            "chat_request": {"messages": TALK, "tools": [TOOL], "logprobs": True, "top_logprobs": 1},
        },
    ),
    (
        f"{COMPLETIONS}/derender",
        {
            "generate_responses": [_ANSWERED, _ANSWERED],
            "completion_request": {"prompt": ["hi", [1, 2]], "logprobs": 1, "echo": False, "stop": ["l"]},
        },
    ),
)
_LEASE: Json = {"engine_id": "e", "request_id": "r"}

BODIES: tuple[tuple[str, Json], ...] = (
    *((CHAT, body) for body in CHATS),
    *((COMPLETIONS, body) for body in COMPLETED),
    *((RESPONSES, body) for body in RESPONDED),
    *((GENERATE, body) for body in GENERATED),
    *((f"{CHAT}/render", body) for body in CHATS[:3]),
    *((f"{COMPLETIONS}/render", body) for body in COMPLETED[:3]),
    *((f"{RESPONSES}/render", body) for body in RESPONDED),
    *DERENDERED,
    *(("/tokenize", body) for body in TOKENS),
    ("/detokenize", {"tokens": IDS, "model": "tiny"}),
    (ABORT, {"request_ids": ["r1", "r2"]}),
)
"""What clients send."""

_PLAIN: tuple[tuple[str, Json], ...] = (
    (CHAT, {"messages": TALK, "max_tokens": 2}),
    (COMPLETIONS, {"prompt": "hello you", "max_tokens": 2}),
    (RESPONSES, {"input": "hi", "max_output_tokens": 2}),
    (GENERATE, {"token_ids": IDS, "sampling_params": {"max_tokens": 2}}),
)
TRANSFERS: tuple[tuple[str, Json], ...] = tuple(
    (path, {**body, **transfer}) for path, body in _PLAIN for transfer in (PREFILL, PULL, OLD_PULL)
)
"""What the router sends."""

PEERS: tuple[tuple[str, Json], ...] = (
    ("/kv/claim", {**_LEASE, "reader": "r"}),
    ("/kv/renew", {"engine_id": "e", "request_ids": ["r"]}),
    ("/kv/release", {**_LEASE, "claim_id": "c"}),
)
"""What other engines send."""
