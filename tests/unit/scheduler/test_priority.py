"""Who is served first under each policy, and who has to go when the room does not do."""

from __future__ import annotations

import pytest

from engine.request import Request, RequestStatus
from tests.fake_engines import FakeEngine, pair
from tests.fake_runner import expected_output, prompt_of


def submit(engine: FakeEngine, *priorities: int, length: int = 5, max_tokens: int = 3) -> list[Request]:
    """One request for each priority, in order of arrival."""
    return [
        engine.submit(prompt_of(length, seed), max_tokens=max_tokens, priority=priority, arrival_time=float(seed))
        for seed, priority in enumerate(priorities)
    ]


def order_of_ends(engine: FakeEngine, requests: list[Request]) -> list[int]:
    engine.run()
    for seed, request in enumerate(requests):
        output = expected_output(prompt_of(request.num_prompt_tokens, seed), max_tokens=request.sampling.max_tokens)
        assert engine.answer(request) == output
    ended = list(engine.finals)
    return sorted(range(len(requests)), key=lambda index: ended.index(requests[index].request_id))


@pytest.mark.parametrize(
    ("policy", "expected"), [("fcfs", [0, 1, 2, 3, 4]), ("priority", [4, 1, 3, 0, 2])], ids=["fcfs", "priority"]
)
def test_lower_is_served_first_and_ties_by_arrival(policy: str, expected: list[int]) -> None:
    engine = FakeEngine(max_num_seqs=1, scheduling_policy=policy)
    assert order_of_ends(engine, submit(engine, 5, 0, 9, 0, -1)) == expected


def test_a_running_request_is_not_interrupted_while_there_is_room() -> None:
    engine = FakeEngine(max_num_seqs=1, scheduling_policy="priority")
    (first,) = submit(engine, 9)
    engine.step()
    second = engine.submit(prompt_of(5, 1), priority=0)
    engine.step()
    assert (first.status, second.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", 2), ("priority", 0)])
def test_the_least_urgent_goes_when_the_blocks_run_out(policy: str, victim: int) -> None:
    engine = FakeEngine(num_blocks=9, scheduling_policy=policy, enable_prefix_caching=False)
    requests = submit(engine, 7, 1, 1, length=8, max_tokens=9)
    while not engine.scheduler.num_preemptions:
        assert engine.step()
    assert [request.num_preemptions for request in requests] == [int(index == victim) for index in range(3)]
    order_of_ends(engine, requests)


def test_a_preempted_request_goes_behind_a_more_urgent_one() -> None:
    engine = FakeEngine(num_blocks=6, scheduling_policy="priority", enable_prefix_caching=False)
    low, high = submit(engine, 5, 0, length=8, max_tokens=6)
    while not low.num_preemptions:
        assert engine.step()
    urgent = engine.submit(prompt_of(4, 9), priority=-3)
    assert list(engine.scheduler.waiting) == [urgent, low]
    engine.run()
    assert engine.answer(low) == expected_output(prompt_of(8, 0), max_tokens=6)
    assert engine.answer(high) == expected_output(prompt_of(8, 1), max_tokens=6)


def test_what_has_been_loaded_keeps_its_rank() -> None:
    p, d, network = pair(decode={"scheduling_policy": "priority", "max_num_seqs": 2})
    prompts = [prompt_of(9, seed) for seed in range(2)]
    for seed in (20, 21):
        d.submit(prompt_of(4, seed), max_tokens=12)
    d.step()
    loads = [d.submit(prompt, params=p.prefill(prompt), priority=5 - i) for i, prompt in enumerate(prompts)]
    d.step()
    network.advance()
    d.settle()
    assert list(d.scheduler.loaded) == loads[::-1]
    d.run()
    for request, prompt in zip(loads, prompts, strict=True):
        assert d.answer(request) == expected_output(prompt)
