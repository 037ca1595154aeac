"""What engines say of how busy they are."""

from __future__ import annotations

import pytest

from router.load import FULL_WEIGHT, Load, read_load

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
USE = "vllm:kv_cache_usage_perc"


@pytest.mark.parametrize(
    ("text", "beside"),
    [
        pytest.param(f"{RUNNING} 5\n{WAITING} 3\n", 6.0, id="others' requests"),
        pytest.param(f'{RUNNING}{{engine="0"}} 1.0\n{RUNNING}{{engine="1"}} 4.0\n', 3.0, id="of several ranks"),
        pytest.param(f"{RUNNING} 1\n", 0.0, id="only ours"),
        pytest.param(f"{USE} 0.5\n", 0.0, id="cache half full"),
        pytest.param(f"{USE} 1.0\n", FULL_WEIGHT, id="cache full"),
        pytest.param(f"{USE} 7\n", FULL_WEIGHT, id="more than full is full"),
        pytest.param(f"{RUNNING} NaN\n{WAITING} 1e400\n{RUNNING} -5\n{RUNNING} +Inf\n", 0.0, id="nonsense"),
        pytest.param("vllm:num_requests_running_total 9\nother 1\n", 0.0, id="other metrics"),
        pytest.param("", 0.0, id="nothing"),
    ],
)
def test_load_beside_ours(text: str, beside: float) -> None:
    assert read_load(text.encode(), ours=2).beside == pytest.approx(beside)


def test_one_that_says_nothing_is_as_busy_as_we_make_it() -> None:
    assert Load().beside == 0.0
