from __future__ import annotations

from connectors.wire.openai import MAX_MESSAGE, MAX_PARAM, bad_request


def test_error_does_not_give_all_of_a_request_back() -> None:
    error = bad_request("m" * 1_000_000, param="p" * 1_000_000).body()["error"]
    assert (len(error["message"]), len(error["param"])) == (MAX_MESSAGE, MAX_PARAM)


def test_error_without_a_param_says_so() -> None:
    assert bad_request("wrong").body() == {
        "error": {"message": "wrong", "type": "BadRequestError", "param": None, "code": 400}
    }
