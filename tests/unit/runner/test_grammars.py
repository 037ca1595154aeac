"""Structured output: whatever a random model wants to say, its answers are what the grammar allows."""

from __future__ import annotations

import copy
import json
import re
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from connectors.wire.openai import APIError
from engine.api.bodies import structured
from engine.grammar import MAX_SOURCE, GrammarError, GrammarSpec
from engine.grammars import Grammars
from engine.request import RequestStatus
from tests.running import random_tokens
from tests.tiny import ENDOFTEXT, IM_END, IM_START, VOCAB_SIZE
from tests.tiny_engine import TinyEngine

PROMPT = random_tokens(12)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SUM = 'start: NUMBER ("+" NUMBER){0,3}\nNUMBER: /[0-9]{1,3}/'
GBNF_SUM = 'root ::= number ("+" number){0,3}\nnumber ::= [0-9]{1,3}'


def regex(pattern: str) -> GrammarSpec:
    return GrammarSpec("regex", pattern)


def choice(*strings: str) -> GrammarSpec:
    return GrammarSpec("choice", json.dumps(strings))


def answers(engine: TinyEngine, grammar: GrammarSpec, count: int = 4, **sampling: object) -> list[str]:
    """Of one greedy request and some that draw; all must end by themselves."""
    requests = [
        engine.submit(PROMPT, grammar, **{"max_tokens": 400, "temperature": float(seed > 0), "seed": seed} | sampling)
        for seed in range(count)
    ]
    engine.run()
    assert {engine.output(request).finish_reason for request in requests} == {"stop"}
    return [engine.text(request) for request in requests]


# Patterns whose answers must come to an end, out of pieces that Python and the grammar read alike.
ATOMS = st.sampled_from(["a", "b", " ", "[a-f]", "[^x]", "\\d", "é", "日", "\\.", "th", "\\n"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 3)).map(
            lambda parts: f"(?:{parts[0]}){{{parts[1]},{parts[1] + parts[2]}}}"
        ),
        inner.map(lambda one: f"(?:{one})?"),
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pattern=PATTERNS)
def test_answers_match_any_pattern(engine: TinyEngine, pattern: str) -> None:
    for answer in answers(engine, regex(pattern), count=3):
        assert re.fullmatch(pattern, answer), (pattern, answer)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(strings=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), min_size=1))
@example(strings=["\x7f", "\x00\x1f\x80", "\u2028\U0010ffff", '"', "\\", "/a/", "a | b"])
def test_answers_are_one_of_any_choices(engine: TinyEngine, strings: list[str]) -> None:
    spec = structured.choice(strings, "choice")
    assert spec is not None
    assert set(answers(engine, spec, count=3)) <= set(strings)


def test_answers_follow_a_json_schema(engine: TinyEngine) -> None:
    for answer in answers(engine, GrammarSpec("json_schema", json.dumps(PERSON))):
        person = json.loads(answer)
        assert list(person) == ["name", "age", "kind"]
        assert re.fullmatch("[a-z]{1,8}", person["name"])
        assert 0 <= person["age"] <= 150
        assert person["kind"] in ("cat", "dog")


def test_json_object_is_any_object(engine: TinyEngine) -> None:
    # A random model does not come to an end with it: the braces must be wanted.
    braces = engine.tokenizer.encode("{}", add_special_tokens=False)
    bias = tuple((token, 100.0) for token in braces)
    for answer in answers(engine, GrammarSpec("json_object", ""), logit_bias=bias):
        assert isinstance(json.loads(answer), dict)


@pytest.mark.parametrize("source", [SUM, GBNF_SUM])
def test_answers_follow_a_grammar_in_either_notation(engine: TinyEngine, source: str) -> None:
    for answer in answers(engine, GrammarSpec("lark", source)):
        assert re.fullmatch(r"\d{1,3}(\+\d{1,3}){0,3}", answer)


def test_a_rule_like_text_in_a_string_does_not_make_it_the_other_notation(engine: TinyEngine) -> None:
    assert set(answers(engine, GrammarSpec("lark", 'start: "root ::= x"'))) == {"root ::= x"}


def test_special_tokens_can_be_part_of_a_grammar(engine: TinyEngine) -> None:
    request = engine.submit(PROMPT, GrammarSpec("lark", 'start: <|im_start|> "ab" <|im_start|>'))
    engine.run()
    ids = engine.output(request).token_ids
    assert (ids[0], ids[-2], ids[-1] in engine.tokenizer.eos_token_ids) == (IM_START, IM_START, True)


def test_others_in_the_batch_are_not_touched(engine: TinyEngine) -> None:
    alone = engine.submit(PROMPT, ignore_eos=True, max_tokens=30)
    engine.run()
    expected = engine.output(alone).token_ids
    engine.restart()
    plain = [engine.submit(PROMPT, ignore_eos=True, max_tokens=30) for _ in range(2)]
    held = [engine.submit(PROMPT, spec, max_tokens=30) for spec in (regex("[ab]{9}"), choice("yes", "no"))]
    engine.run()
    for request in plain:
        assert engine.output(request).token_ids == expected
    assert re.fullmatch("[ab]{9}", engine.text(held[0]))
    assert engine.text(held[1]) in ("yes", "no")


@pytest.mark.parametrize("num_blocks", [5, 6, 7])
def test_a_preempted_answer_goes_on_where_it_was(engine: TinyEngine, num_blocks: int) -> None:
    def both() -> list[list[int]]:
        requests = [engine.submit(PROMPT, regex("[a-f ]{40}"), max_tokens=60) for _ in range(2)]
        engine.run()
        for request in requests:
            assert re.fullmatch("[a-f ]{40}", engine.text(request))
        return [engine.output(request).token_ids for request in requests]

    expected = both()
    engine.restart(num_blocks=num_blocks)
    assert both() == expected
    assert engine.scheduler.num_preemptions > 0


def test_answer_cut_by_its_length_is_a_beginning(engine: TinyEngine) -> None:
    request = engine.submit(PROMPT, regex("[ab]{50}"), max_tokens=10)
    engine.run()
    assert engine.output(request).finish_reason == "length"
    assert re.fullmatch("[ab]{10,}", engine.text(request))


@pytest.mark.parametrize("wish", [{"min_tokens": 20}, {"ignore_eos": True}])
def test_an_answer_that_is_whole_ends_whatever_else_is_wished(engine: TinyEngine, wish: dict[str, object]) -> None:
    assert set(answers(engine, choice("yes"), count=2, max_tokens=40, **wish)) == {"yes"}


def test_min_tokens_makes_an_answer_longer_where_the_grammar_lets_it(engine: TinyEngine) -> None:
    request = engine.submit(
        PROMPT, regex("a+"), min_tokens=10, max_tokens=30, logit_bias=((IM_END, 100.0), (ENDOFTEXT, 100.0))
    )
    engine.run()
    assert (len(engine.output(request).token_ids), engine.output(request).finish_reason) == (11, "stop")


def test_a_stop_token_may_end_only_what_is_whole(engine: TinyEngine) -> None:
    (stop,) = engine.tokenizer.encode("#", add_special_tokens=False)
    bias = ((stop, 100.0),)
    request = engine.submit(
        PROMPT, regex("[ab]{4}[cd]*"), max_tokens=50, stop_token_ids=frozenset({stop}), logit_bias=bias
    )
    engine.run()
    assert re.fullmatch("[ab]{4}", engine.text(request))
    assert engine.output(request).stop_token_id == stop


def test_logit_bias_chooses_within_the_grammar(engine: TinyEngine) -> None:
    (letter,) = engine.tokenizer.encode("q", add_special_tokens=False)
    assert set(answers(engine, regex("[a-z]{5}"), logit_bias=((letter, 100.0),))) == {"qqqqq"}


def test_wishes_that_exclude_each_other_end_one_request_only(engine: TinyEngine) -> None:
    (letter,) = engine.tokenizer.encode("x", add_special_tokens=False)
    only_x = bytes(1 << letter % 8 if index == letter // 8 else 0 for index in range(40))
    stuck = engine.submit(PROMPT, choice("yes"), allowed_tokens=only_x, logprobs=1)
    fine = engine.submit(PROMPT, choice("yes"))
    engine.run()
    output = engine.output(stuck)
    assert (output.finish_reason, output.error_status) == ("error", 400)
    assert "leave no token" in (output.error or "")
    assert engine.text(fine) == "yes"
    assert stuck.status is RequestStatus.FINISHED_ERROR


def test_a_grammar_that_becomes_too_much_ends_one_request_only(engine: TinyEngine) -> None:
    words = " | ".join(f'"{word:04x}"' for word in range(3000))
    stuck = engine.submit(PROMPT, GrammarSpec("lark", f'start: "x" rest\nrest: {words}'))
    fine = engine.submit(PROMPT, choice("yes"))
    engine.run()
    output = engine.output(stuck)
    assert (output.finish_reason, output.error_status) == ("error", 400)
    assert "its grammar" in (output.error or "")
    assert engine.text(fine) == "yes"


BAD = [
    ("regex", "(a"),
    ("regex", "(?=a)b"),
    ("regex", "a{1000000000000}"),
    ("regex", "(" * 20_000 + ")" * 20_000),
    ("json_schema", "{"),
    ("json_schema", '"text"'),
    ("json_schema", '{"type": "nope"}'),
    ("json_schema", '{"$ref": "#"}'),
    ("json_schema", '{"$ref": "http://127.0.0.1:1/schema"}'),
    ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}'),
    ("json_schema", '{"a":' * 20_000 + "1" + "}" * 20_000),
    ("json_schema", '{"type": "object", "x-guidance": {"lenient": 5}}'),
    ("lark", "start: missing"),
    ("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ("lark", "root ::= missing"),
    ("lark", "root ::= " + '("a" | ' * 20_000),
    ("lark", 'root ::= "\\'),
]


@pytest.mark.parametrize(("kind", "source"), BAD, ids=[f"{kind}-{source[:20]}" for kind, source in BAD])
def test_bad_and_hostile_grammars_are_refused_at_once(engine: TinyEngine, kind: str, source: str) -> None:
    started = time.monotonic()
    with pytest.raises(GrammarError) as caught:
        engine.grammars.compile(GrammarSpec(kind, source))  # type: ignore[arg-type]
    assert time.monotonic() - started < 10
    assert 0 < len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("ends", "says"), [([], "no token that ends"), ([10**6], "do not allow it")])
def test_models_whose_vocabulary_does_not_do_are_told_of(engine: TinyEngine, ends: list[int], says: str) -> None:
    tokenizer = copy.copy(engine.tokenizer)
    tokenizer.eos_token_ids = frozenset(ends)
    with pytest.raises(GrammarError, match=says):
        Grammars(tokenizer, VOCAB_SIZE).compile(regex("a"))


def test_a_grammar_too_long_is_refused_unread(engine: TinyEngine) -> None:
    with pytest.raises(GrammarError, match="more than"):
        engine.grammars.compile(GrammarSpec("regex", "a" * (MAX_SOURCE + 1)))


@pytest.mark.parametrize("size", [0, structured.MAX_GRAMMAR_LENGTH + 1])
def test_what_clients_send_is_bounded(size: int) -> None:
    with pytest.raises(APIError, match=f"guided_regex: 1 to 131072 characters expected, got {size}"):
        structured.regex("a" * size, "guided_regex")


def test_matchers_of_one_grammar_go_their_own_ways(engine: TinyEngine) -> None:
    first, second = engine.grammars.compile(regex("ab"), 2)
    (a,) = engine.tokenizer.encode("a", add_special_tokens=False)
    before = second.bitmask()
    first.advance(a)
    assert first.bitmask() != before
    assert second.bitmask() == before
    (third,) = engine.grammars.compile(regex("ab"))
    assert third.bitmask() == before


def test_a_token_out_of_place_is_told_not_raised(engine: TinyEngine) -> None:
    (matcher,) = engine.grammars.compile(regex("ab"))
    matcher.advance(10_000)
    assert "cannot be followed" in (matcher.failure or "")
    matcher.bitmask()
    assert not matcher.may_end
