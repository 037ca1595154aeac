"""An encoder and engines that fetch from it as real processes, joined by NIXL; the test does what the router does."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engines import Engine, engine_command, engines, wait_until

pytest.importorskip("PIL")

from tests.seeing import data_url, draw

CHAT = "/v1/chat/completions"
SAMPLING = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
BLOCK_BYTES = 64 * 64 * 4  # rows, hidden size, float32
CONSUMER = {
    "ec_connector": "NixlECConnector",
    "ec_role": "ec_consumer",
    "ec_connector_extra_config": {"handshake_timeout": 1.0},
}
SHORT = {"ec_connector_extra_config": {"ec_lease_duration": 5.0}}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def fleet(tiny_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """Two encoders, one of them with room for two pictures; a consumer; and a lone engine that is a producer too."""
    common = engine_command(tiny_vlm, "--served-model-name", "vlm", "--dtype", "float32")
    small = ("--encoder-cache-bytes", str(4 * BLOCK_BYTES))
    with engines(
        tmp_path_factory.mktemp("encoders"),
        [*common, "--role", "encode"],
        [*common, "--role", "encode", *small, "--ec-transfer-config", json.dumps(SHORT)],
        [*common, "--ec-transfer-config", json.dumps(CONSUMER)],
        [*common, "--ec-transfer-config", json.dumps({"ec_role": "ec_both"} | SHORT)],
    ) as fleet:
        yield fleet
        for engine in fleet:
            assert "Traceback" not in engine.log.read_text()


@pytest.fixture
def encoder(fleet: list[Engine]) -> Engine:
    return fleet[0]


@pytest.fixture
def consumer(fleet: list[Engine]) -> Engine:
    return fleet[2]


@pytest.fixture
def lone(fleet: list[Engine]) -> Engine:
    return fleet[3]


def picture(seed: int) -> Json:
    return {"type": "image_url", "image_url": {"url": data_url(draw(60, 60, seed=seed))}}


def chat(*parts: Json | str, **body: Any) -> Json:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"model": "vlm", "messages": [{"role": "user", "content": content}], **SAMPLING, **body}


def announce(encoder: Engine, pictures: Sequence[Json]) -> Json:
    status, answer = encoder.post(CHAT, chat(*pictures))
    assert status == 200, answer
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"] or "") == ("stop", "")
    assert answer["usage"]["completion_tokens"] == 0
    params: Json = answer["ec_transfer_params"]
    return params


def described(parts: Sequence[Json | str], announced: Json) -> list[Json | str]:
    """The same with names in the places of the pictures."""
    name_at = {index: name for name, item in announced.items() for index in item["item_indices"]}
    told: list[Json | str] = []
    for part in parts:
        if isinstance(part, str):
            told.append(part)
        else:
            name = name_at[sum(not isinstance(each, str) for each in told)]
            told.append({"type": "image_embeds", "uuid": name, "image_embeds": announced[name]["metadata"]})
    return told


def ids(answer: tuple[int, Json]) -> list[int]:
    status, body = answer
    assert status == 200, body
    tokens: list[int] = body["choices"][0]["token_ids"]
    return tokens


def rise(engine: Engine, name: str, before: dict[str, float]) -> float:
    return engine.metrics().get(name, 0.0) - before.get(name, 0.0)


def check_idle(*fleet: Engine) -> None:
    gauges = ("encoder_cache_usage", "encoding_leases_held", "encoding_blocks_stalled", "requests_fetching_encodings")

    def idle(engine: Engine) -> bool:
        values = engine.metrics()
        return not any(values.get(f"backhaul_engine_{name}", 0.0) for name in gauges)

    for engine in fleet:
        wait_until(lambda engine=engine: idle(engine), 40, f"nothing is held on {engine.url}")  # type: ignore[misc]


@pytest.mark.parametrize("names_only", [False, True], ids=["with pictures", "names only"])
def test_fetched_encodings_give_the_answer_of_a_lone_engine(
    encoder: Engine, consumer: Engine, lone: Engine, names_only: bool
) -> None:
    seed = 100 * names_only
    first, second = picture(seed + 1), picture(seed + 2)
    parts = ["See ", first, " and ", second, " and ", first, "?"]
    at_e, at_c, at_l = encoder.metrics(), consumer.metrics(), lone.metrics()
    announced = announce(encoder, [first, second, first])
    assert sorted(item["item_indices"] for item in announced.values()) == [[0, 2], [1]]
    shown = described(parts, announced) if names_only else parts
    expected = ids(lone.post(CHAT, chat(*parts)))
    assert ids(consumer.post(CHAT, chat(*shown, ec_transfer_params=announced))) == expected
    assert ids(consumer.post(CHAT, chat(*parts))) == expected, "by its prefix cache"
    assert rise(encoder, "backhaul_engine_encodes_total", at_e) == 2
    assert rise(consumer, "backhaul_engine_encodes_total", at_c) == 0
    assert rise(lone, "backhaul_engine_encodes_total", at_l) == 2
    assert rise(consumer, "backhaul_engine_encodings_pulled_total", at_c) == 2
    assert rise(consumer, "backhaul_engine_encoding_bytes_pulled_total", at_c) == 2 * 2 * BLOCK_BYTES
    check_idle(encoder, consumer)


def test_another_answer_comes_of_another_picture(encoder: Engine, consumer: Engine) -> None:
    """Else all of this would show nothing."""
    answers = set()
    for seed in range(10, 16):
        announced = announce(encoder, [picture(seed)])
        shown = described([picture(seed), "What?"], announced)
        answers.add(tuple(ids(consumer.post(CHAT, chat(*shown, ec_transfer_params=announced)))))
    assert len(answers) > 1
    check_idle(encoder, consumer)


def test_an_engine_that_announces_is_a_whole_engine(lone: Engine, consumer: Engine) -> None:
    parts = [picture(20), "What?"]
    status, answer = lone.post(CHAT, chat(*parts))
    assert status == 200
    announced = answer["ec_transfer_params"]
    before = consumer.metrics()
    shown = described(parts, announced)
    again = consumer.post(CHAT, chat(*shown, ec_transfer_params=announced))
    assert ids(again) == answer["choices"][0]["token_ids"]
    assert rise(consumer, "backhaul_engine_encodings_pulled_total", before) == 1
    check_idle(lone, consumer)


def test_an_encoder_takes_pictures_only(encoder: Engine) -> None:
    status, answer = encoder.post(CHAT, chat("Hello"))
    assert (status, answer["error"]["code"]) == (400, 400)
    assert "only encodes pictures" in answer["error"]["message"]
    assert encoder.post("/v1/completions", {"model": "vlm", "prompt": "Hello"})[0] == 400


def test_a_stream_ends_with_what_is_announced(encoder: Engine, consumer: Engine) -> None:
    host, _, port = encoder.url.removeprefix("http://").partition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=30)) as connection:
        body = json.dumps(chat(picture(30), stream=True))
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        text = connection.getresponse().read().decode()
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    announced = next(params for event in events[:-1] if (params := json.loads(event).get("ec_transfer_params")))
    shown = described([picture(30), "What?"], announced)
    ids(consumer.post(CHAT, chat(*shown, ec_transfer_params=announced)))
    check_idle(encoder, consumer)


def expect_alone(consumer: Engine, lone: Engine, parts: Sequence[Json | str], announced: Json, reason: str) -> None:
    """A request with the pictures encodes them itself; one without fails, and no other does."""
    before = consumer.metrics()
    neighbours: list[tuple[int, Json]] = []

    def talk() -> None:
        neighbours.extend(consumer.post(CHAT, chat(f"Number {number}")) for number in range(5))

    talker = threading.Thread(target=talk)
    talker.start()
    status, answer = consumer.post(CHAT, chat(*described(parts, announced), ec_transfer_params=announced))
    talker.join()
    assert status == 500, answer
    assert f"({reason}); try again" in answer["error"]["message"]
    assert [status for status, _ in neighbours] == [200] * 5
    expected = ids(lone.post(CHAT, chat(*parts)))
    assert ids(consumer.post(CHAT, chat(*parts, ec_transfer_params=announced))) == expected
    assert rise(consumer, "backhaul_engine_encodes_total", before) == 1
    name = f'backhaul_engine_encoding_fallbacks_total{{engine="0",model_name="vlm",reason="{reason}"}}'
    assert rise(consumer, name, before) == 1


def test_what_was_evicted_before_it_was_read(fleet: list[Engine], consumer: Engine, lone: Engine) -> None:
    small, parts = fleet[1], [picture(40), "What?"]
    announced = announce(small, parts[:1])
    announce(small, [picture(41), picture(42)])
    expect_alone(consumer, lone, parts, announced, "claim")


def test_a_shape_that_is_not_the_pictures(encoder: Engine, consumer: Engine, lone: Engine) -> None:
    parts = [picture(50), "What?"]
    announced = announce(encoder, parts[:1])
    (item,) = announced.values()
    item["shape"][0] += 1
    expect_alone(consumer, lone, parts, announced, "shape")


def test_announcements_that_are_no_announcements_are_refused(consumer: Engine) -> None:
    wrong: Sequence[Any] = (
        "text",
        {"a": 7},
        {"a": {"peer_port": 0}},
        {"a": {"block_ids": [-1]}},
        {"a": {"shape": [1]}},
    )
    for params in wrong:
        status, answer = consumer.post(CHAT, chat("Hello", ec_transfer_params=params))
        assert status == 400, params
        assert answer["error"]["param"].startswith("ec_transfer_params")


def test_a_reader_that_leaves_in_the_middle(encoder: Engine, consumer: Engine) -> None:
    parts = [picture(60), "What?"]
    announced = announce(encoder, parts[:1])
    shown = chat(*described(parts, announced), ec_transfer_params=announced)
    host, _, port = consumer.url.removeprefix("http://").partition(":")
    encoder.process.send_signal(signal.SIGSTOP)
    try:
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.request("POST", CHAT, json.dumps(shown), {"Content-Type": "application/json"})
        fetching = "backhaul_engine_requests_fetching_encodings"
        wait_until(lambda: consumer.metrics()[fetching] == 1, 5, "the encoder is asked")
        connection.close()
        wait_until(lambda: consumer.metrics()[fetching] == 0, 5, "the request is gone")
        assert consumer.post(CHAT, chat("Hello"))[0] == 200
    finally:
        encoder.process.send_signal(signal.SIGCONT)
    check_idle(encoder, consumer)


def test_an_encoder_that_is_told_to_end_lets_what_it_announced_be_read(fleet: list[Engine], consumer: Engine) -> None:
    """And what it announces no more is not waited for."""
    small, parts = fleet[1], [picture(70), "What?"]
    check_idle(small)
    announced = announce(small, parts[:1])
    small.process.send_signal(signal.SIGTERM)
    assert ids(consumer.post(CHAT, chat(*described(parts, announced), ec_transfer_params=announced)))
    assert small.process.wait(15) == 0
    check_idle(consumer)


def test_an_encoder_that_dies_while_it_is_asked(encoder: Engine, consumer: Engine, lone: Engine) -> None:
    """The last test with it."""
    parts = [picture(80), "What?"]
    announced = announce(encoder, parts[:1])
    encoder.process.send_signal(signal.SIGSTOP)
    threading.Timer(0.5, encoder.process.kill).start()
    expect_alone(consumer, lone, parts, announced, "claim")
    check_idle(consumer, lone)
