"""An unchanged OpenAI client works against the router."""

from __future__ import annotations

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tests.e2e.support import Stack

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def client(stack: Stack) -> OpenAI:
    return OpenAI(base_url=stack.base_url, api_key="none", max_retries=0, timeout=60)


def test_lists_models(client: OpenAI, stack: Stack) -> None:
    assert [model.id for model in client.models.list()] == [stack.model]


def test_chat_stream_equals_non_stream(client: OpenAI, stack: Stack) -> None:
    request = {
        "model": stack.model,
        "messages": [
            {"role": "system", "content": "You are brief."},
            {"role": "user", "content": "Name a colour."},
            {"role": "assistant", "content": "Blue."},
            {"role": "tool", "content": "The colour service says: red.", "tool_call_id": "call-1"},
            {"role": "user", "content": "Another one?"},
        ],
        "max_tokens": 20,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    finish = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert finish[-1] == whole.choices[0].finish_reason
    assert finish[:-1] == [None] * (len(finish) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_no_usage_chunk_unless_asked_for(client: OpenAI, stack: Stack) -> None:
    chunks = list(
        client.chat.completions.create(
            model=stack.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=3, stream=True
        )
    )
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_clients_never_see_engine_fields(client: OpenAI, stack: Stack) -> None:
    request = {"model": stack.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    whole = client.chat.completions.create(**request).to_json()
    streamed = "".join(chunk.to_json() for chunk in client.chat.completions.create(**request, stream=True))
    for field in ("kv_transfer_params", "ec_transfer_params", "prompt_token_ids", "token_ids", "remote_"):
        assert field not in whole
        assert field not in streamed


def test_stop_string_ends_the_answer(client: OpenAI, stack: Stack) -> None:
    request = {"model": stack.model, "messages": [{"role": "user", "content": "Count from 1 to 9."}], "temperature": 0}
    full = client.chat.completions.create(**request, max_tokens=40).choices[0].message.content or ""
    stop = full[len(full) // 2 : len(full) // 2 + 3]
    cut = client.chat.completions.create(**request, max_tokens=40, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == full[: full.index(stop)]


def test_unknown_model_is_404(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "Hi"}])
    assert caught.value.code == "model_not_found"


def test_too_long_prompt_is_400(client: OpenAI, stack: Stack) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model=stack.model, messages=[{"role": "user", "content": "word " * 9000}])
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in str(caught.value)


def test_bad_parameter_is_400_naming_it(client: OpenAI, stack: Stack) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model=stack.model, messages=[{"role": "user", "content": "Hi"}], temperature=-1)
    assert caught.value.param == "temperature"
