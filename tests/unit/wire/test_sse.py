"""However a stream is cut into reads, the parser sees the same events and gives back the same bytes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.wire import sse
from connectors.wire.sse import SSEError, SSEParser

STREAM = (
    ": keep-alive\n\n"
    'data: {"text":"Grüß 👋 漢字"}\n\n'
    "data: carriage\r\rdata: both\r\n\r\n"
    "data:no space\ndata: second line\n\n"
    "event: named\nid: 7\ndata: with fields\n\n"
    "data\n\n"
    "dataset: not data\r\n\r\n"
    "data: [DONE]\n\n"
    "data: unfinished"
).encode()
DATA = ['{"text":"Grüß 👋 漢字"}', "carriage", "both", "no space\nsecond line", "with fields", "", "[DONE]"]
RECORDED = (Path(__file__).parents[2] / "data/vllm_decode_stream.sse").read_bytes()


def parse(pieces: list[bytes]) -> tuple[bytes, list[str]]:
    parser = SSEParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    raw = b"".join(event.raw for event in events) + parser.close()
    return raw, [event.data.decode() for event in events if event.data is not None]


def test_whole_stream() -> None:
    assert parse([STREAM]) == (STREAM, DATA)


@pytest.mark.parametrize("cut", range(1, len(STREAM)))
def test_cut_anywhere(cut: int) -> None:
    assert parse([STREAM[:cut], STREAM[cut:]]) == (STREAM, DATA)


def test_one_byte_at_a_time() -> None:
    assert parse([bytes([byte]) for byte in STREAM]) == (STREAM, DATA)


@given(st.lists(st.integers(1, len(RECORDED) - 1), max_size=30))
def test_recorded_stream_cut_in_many_places(cuts: list[int]) -> None:
    edges = [0, *sorted(set(cuts)), len(RECORDED)]
    raw, data = parse([RECORDED[a:b] for a, b in itertools.pairwise(edges)])
    assert raw == RECORDED
    assert data[-1] == "[DONE]"
    assert all(isinstance(json.loads(text), dict) for text in data[:-1])


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_come_back_unchanged(noise: bytes, cut: int) -> None:
    assert parse([noise[:cut], noise[cut:]])[0] == noise


@given(st.text(alphabet="ab:\r\n d", max_size=60), st.integers(0, 60))
def test_any_line_ends_give_the_same_data_wherever_cut(text: str, cut: int) -> None:
    stream = text.encode()
    assert parse([stream[:cut], stream[cut:]])[1] == parse([stream])[1]


@given(st.text(alphabet="ab:\n d\ufeff", max_size=40).map(lambda text: text.replace("d", "\n\ndata: ")))
def test_whole_events_at_once_are_those_that_come_byte_by_byte(text: str) -> None:
    stream = (text + "\n\n").encode()
    bytewise = SSEParser()
    events = [event for byte in stream for event in bytewise.feed(bytes([byte]))]
    assert SSEParser().feed(stream) == events


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_event_is_seen_with_its_last_byte(end: str) -> None:
    parser = SSEParser()
    *before, last = f"data: x{end}{end}".encode()
    seen = [len(parser.feed(bytes([byte]))) for byte in [*before, last]]
    assert seen.index(1) == len(before)


TWO_ENDS = [(a, b) for a, b in itertools.product(["\n", "\r\n", "\r"], repeat=2) if a + b != "\r\n"]


@pytest.mark.parametrize(("first", "second"), TWO_ENDS)
@pytest.mark.parametrize(("third", "fourth"), TWO_ENDS)
def test_events_are_the_same_wherever_cut_whatever_the_line_ends(
    first: str, second: str, third: str, fourth: str
) -> None:
    stream = f"data: x{first}{second}data: y{third}{fourth}data".encode()
    whole = SSEParser().feed(stream)
    assert [event.data for event in whole] == [b"x", b"y"]
    for at in range(1, len(stream)):
        parser = SSEParser()
        assert [*parser.feed(stream[:at]), *parser.feed(stream[at:])] == whole


def test_byte_order_mark_before_the_first_event_is_no_part_of_its_data() -> None:
    mark = b"\xef\xbb\xbf"
    stream = mark + b"data: x\n\n" + mark + b"data: y\n\n"
    assert parse([stream]) == (stream, ["x"])
    assert parse([bytes([byte]) for byte in stream]) == (stream, ["x"])
    [event] = SSEParser().feed(mark + b"id: 1\ndata: x\n\n")
    assert sse.replaced(event, {}) == b"id: 1\ndata: {}\n\n"


def test_event_beyond_the_bound_is_refused() -> None:
    parser = SSEParser(max_event_bytes=10)
    parser.feed(b"data: 12345678901234567890\n\n" * 3)  # complete ones are not held
    with pytest.raises(SSEError, match="10 bytes"):
        parser.feed(b"data: 123456")


@pytest.mark.parametrize("value", [{"a": "Grüß\n\n"}, {"bad": "\ud800"}, ["x"], None])
def test_event_survives_the_parser(value: object) -> None:
    _, data = parse([sse.event(value) + sse.comment("hello") + sse.DONE_EVENT])
    assert [json.loads(data[0]), data[1]] == [value, "[DONE]"]
