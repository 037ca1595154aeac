"""The checks of the equality property find what they are there to find."""

from __future__ import annotations

import pytest

from tests.property.client import Reply
from tests.property.dialog import Chat
from tests.property.ledger import Ledger
from tests.property.reference import Mismatch, Reference
from tests.property.script import Edit, History, Turn, history, show
from tests.tiny import IM_END

QUESTION = " the world is that of you"


@pytest.fixture
def prompt(reference: Reference) -> list[int]:
    return reference.tokenizer.encode(QUESTION, add_special_tokens=False)


@pytest.fixture
def answer(reference: Reference, prompt: list[int]) -> list[int]:
    answer = reference.greedy(prompt, 8)
    assert IM_END not in answer
    return answer


def test_greedy_answer_passes(reference: Reference, prompt: list[int], answer: list[int]) -> None:
    reference.check_tokens(prompt, answer)
    text = reference.tokenizer.decode(answer, skip_special_tokens=True)
    reference.check_end(answer, text=text, finish_reason="length", max_tokens=8, stop=(), ignore_eos=False)


@pytest.mark.parametrize("position", [0, 4, 7])
def test_one_wrong_token_is_found(reference: Reference, prompt: list[int], answer: list[int], position: int) -> None:
    answer[position] = 5 if answer[position] != 5 else 6
    with pytest.raises(Mismatch, match=f"answer token {position} "):
        reference.check_tokens(prompt, answer)


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 9},
        {"max_tokens": 7},
        {"finish_reason": "stop"},
        {"finish_reason": None},
        {"text": "something else"},
        {"stop": ("",)},
    ],
)
def test_wrong_end_is_found(reference: Reference, answer: list[int], change: dict[str, object]) -> None:
    text = reference.tokenizer.decode(answer, skip_special_tokens=True)
    if "stop" in change:
        change = {"stop": (text[2:4],)}
    right = {"text": text, "finish_reason": "length", "max_tokens": 8, "stop": (), "ignore_eos": False}
    with pytest.raises(Mismatch):
        reference.check_end(answer, **(right | change))  # type: ignore[arg-type]


def test_other_tokens_for_the_same_text_are_a_splice_and_no_other_text_is(
    reference: Reference, prompt: list[int]
) -> None:
    letters = [token for byte in QUESTION.encode() for token in _bytes(reference, byte)]
    assert reference.prompt_kind(prompt, prompt) == "canonical"
    assert reference.prompt_kind([*letters, IM_END], [*prompt, IM_END]) == "spliced"
    spelled = reference.tokenizer.encode("<|im_end|>"[:5], add_special_tokens=False)
    for wrong in ([*letters[:-1], IM_END], [*letters, IM_END, IM_END], [IM_END, *letters], [*letters, *spelled]):
        with pytest.raises(Mismatch):
            reference.prompt_kind(wrong, [*prompt, IM_END])


def _bytes(reference: Reference, byte: int) -> list[int]:
    return [token for token in range(256) if reference.tokenizer.token_bytes(token) == bytes([byte])]


def test_ledger_explains_reuse_by_earlier_and_by_concurrent_requests_only() -> None:
    ledger = Ledger()
    with ledger.visit() as first:
        ledger.note(first, [1, 2, 3, 300], "a")
    with ledger.visit() as second:
        with ledger.visit() as meanwhile:
            ledger.check(second, "a", [1, 2, 3, 300, 5], 4, "an earlier one")
            ledger.check(second, "a", [7, 8, 9], 2, "a concurrent one")
            ledger.check(second, "a", [1, 2, 3, 301], 4, "one token too many")
            ledger.check(second, "b", [1, 2, 3], 1, "another's")
            ledger.note(meanwhile, [7, 8, 10], "a")
        ledger.note(second, [1, 2, 3, 301], "a")
    with ledger.visit() as later:
        ledger.note(later, [1, 2, 3], "b")
    assert ledger.unexplained() == ["one token too many", "another's"]


def test_response_is_read_as_its_events_and_its_end_say_the_same() -> None:
    def end(text: str, **more: object) -> dict[str, object]:
        output = [{"type": "message", "content": [{"type": "output_text", "text": text}]}]
        usage = {"input_tokens": 1, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 0}}
        return {"status": "incomplete", "output": output, "token_ids": [3, 4], "usage": usage, "error": None, **more}

    def told(*texts: str) -> Reply:
        reply = Reply(200, {})
        reply.take({"type": "response.created", "response": {"status": "in_progress", "prompt_token_ids": [1]}})
        for text in texts:
            reply.take({"type": "response.output_text.delta", "delta": text})
        assert not reply.ended
        return reply

    streamed, whole = told("a", "b"), Reply(200, {})
    streamed.take({"type": "response.incomplete", "response": end("ab")})
    whole.take(end("ab", prompt_token_ids=[1]))
    assert streamed == whole
    assert (whole.text, whole.finish_reason, whole.prompt_ids, whole.token_ids) == ("ab", "length", [1], [3, 4])
    assert (whole.ended, whole.leaked, whole.error) == (True, False, None)
    with pytest.raises(AssertionError, match="the last event says 'ab'"):
        told("a").take({"type": "response.incomplete", "response": end("ab")})
    broken, leaking = told("a"), told("a")
    broken.take({"type": "error", "message": "broken"})
    leaking.take({"type": "response.incomplete", "response": end("a", kv_transfer_params={})})
    assert broken.error
    assert leaking.leaked


def test_histories_are_the_same_for_the_same_seed_and_can_be_pasted() -> None:
    for seed in range(50):
        made = history(seed)
        assert made == history(seed) != history(seed + 1)
        assert eval(show(made), {"History": History, "Turn": Turn, "Edit": Edit}) == made


def test_every_edit_leaves_a_history_that_can_be_asked(reference: Reference) -> None:
    kinds = {edit.kind for seed in range(200) for turn in history(seed).turns for edit in turn.edits}
    assert len(kinds) > 14
    for kind in sorted(kinds):
        for at in range(7):
            dialog = Chat(reference.tokenizer)
            dialog.edit(Edit("say", text="hello"))
            dialog.edit(Edit(kind, at, "the world"))
            assert dialog.messages, (kind, at)
            assert dialog.prompt_ids(Turn(()))
