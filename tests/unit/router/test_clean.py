"""What clients may not say to engines."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.wire.openai import APIError
from router.clean import without_engine_talk

PLAIN = {"model": "m", "messages": [], "vllm_xargs": {"mine": 1}, "sampling_params": {"max_tokens": 3}}
SPOKEN: list[tuple[str, dict[str, Any]]] = [
    ("kv_transfer_params", {"kv_transfer_params": {"do_remote_prefill": True}}),
    ("kv_transfer_params", {"kv_transfer_params": {}}),
    ("ec_transfer_params", {"ec_transfer_params": {"a": {}}}),
    ("prompt_token_ids", {"prompt_token_ids": [1]}),
    ("known_token_ids", {"known_token_ids": [1]}),
    ("token_note", {"token_note": True}),
    ("extra_args", {"extra_args": {"kv_transfer_params": {}}}),
    ("vllm_xargs.kv_transfer_params", {"vllm_xargs": {"mine": 1, "kv_transfer_params": {}}}),
    ("vllm_xargs.ec_transfer_params", {"vllm_xargs": {"mine": 1, "ec_transfer_params": "x"}}),
    ("sampling_params.extra_args", {"sampling_params": {"max_tokens": 3, "extra_args": {"x": 1}}}),
]


@pytest.mark.parametrize(("param", "spoken"), SPOKEN)
def test_engine_talk_is_dropped_or_refused(param: str, spoken: dict[str, Any]) -> None:
    body = {**PLAIN, **spoken}
    assert without_engine_talk(body) == PLAIN
    assert body == {**PLAIN, **spoken}, "the client's own body is left as it was"
    with pytest.raises(APIError) as caught:
        without_engine_talk(body, refuse=True)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_plain_body_stays_as_it_is() -> None:
    for body in (PLAIN, {**PLAIN, "vllm_xargs": 5}, {**PLAIN, "kv_transfer_params": None}):
        kept = {key: value for key, value in body.items() if key != "kv_transfer_params"}
        assert without_engine_talk(body) == without_engine_talk(body, refuse=True) == kept
