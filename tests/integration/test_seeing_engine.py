"""An engine whose model takes pictures, as a process, says what transformers says of the same pictures."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.integration.engines import Engine, engine_command, engines
from tests.seeing import data_url, draw, reference_processor, reference_vlm

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
Json = dict[str, Any]
Part = str | Image.Image
Turn = tuple[str, list[Part]]
A, B, C, D = (draw(*size, seed=seed) for seed, size in enumerate([(64, 64), (100, 50), (31, 97), (20, 20)], start=1))
TURNS: dict[str, list[Part]] = {
    "none": ["what is that"],
    "one": [A, "what is that"],
    "two": ["see ", A, " and ", B],
    "three, one of them twice": [A, B, A, " which?"],
    "four": [C, "a", D, "b", B, "c", A, "d"],
    "the same in another order": [A, "a", B, "b", D, "c", C, "d"],
}


@pytest.fixture(scope="module")
def engine(tiny_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """With little room: long prompts come in chunks, and not all requests fit at once."""
    command = engine_command(
        *(tiny_vlm, "--served-model-name", "vlm", "--dtype", "float32", "--max-model-len", "1024"),
        *("--max-num-batched-tokens", "96", "--num-gpu-blocks-override", "96"),
    )
    with engines(tmp_path_factory.mktemp("seeing"), command) as (engine,):
        yield engine
        log = engine.log.read_text()
        assert "Traceback" not in log
        assert "base64" not in log


class Reference:
    def __init__(self, folder: Path) -> None:
        self._processor, self._model = reference_processor(folder), reference_vlm(folder)

    def say(self, turns: list[Turn], count: int) -> list[int]:
        """The most likely tokens after this conversation."""
        images = [part for _, parts in turns for part in parts if not isinstance(part, str)]
        text = "<|im_start|>"
        for role, parts in turns:
            begins = ":" if not isinstance(parts[0], str) else ": "
            shown = "".join(part if isinstance(part, str) else "<image>" for part in parts)
            text += f"{role.capitalize()}{begins}{shown}<end_of_utterance>\n"
        inputs = self._processor(text=text + "Assistant:", images=[images] if images else None, return_tensors="pt")
        with torch.inference_mode():
            said = self._model.generate(
                **inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=-1
            )
        tokens: list[int] = said[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens


@pytest.fixture(scope="module")
def reference(tiny_vlm: Path) -> Reference:
    return Reference(tiny_vlm)


def chat(turns: list[Turn], **fields: Any) -> Json:
    messages = [
        {
            "role": role,
            "content": [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "image_url", "image_url": {"url": data_url(part)}}
                for part in parts
            ],
        }
        for role, parts in turns
    ]
    sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    return {"model": "vlm", "messages": messages} | sampling | fields


def said(engine: Engine, body: Json) -> list[int]:
    status, answer = engine.post(CHAT, body)
    assert status == 200, answer
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def streamed(engine: Engine, body: Json) -> list[int]:
    request = urllib.request.Request(
        engine.url + CHAT, json.dumps(body | {"stream": True}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    return [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or ()]


@pytest.mark.parametrize("name", TURNS)
def test_answers_are_those_of_transformers_streamed_or_not(engine: Engine, reference: Reference, name: str) -> None:
    turns: list[Turn] = [("user", TURNS[name])]
    expected = reference.say(turns, 8)
    assert said(engine, chat(turns)) == expected
    assert streamed(engine, chat(turns)) == expected
    assert said(engine, chat(turns, cache_salt="computed again")) == expected


def test_a_second_turn_is_about_the_pictures_of_both(engine: Engine, reference: Reference) -> None:
    turns: list[Turn] = [("user", [A, "what is that"]), ("assistant", ["that"]), ("user", ["and ", B, "?"])]
    assert said(engine, chat(turns[:1])) == reference.say(turns[:1], 8)
    assert said(engine, chat(turns)) == reference.say(turns, 8)
    other: list[Turn] = [("user", [draw(64, 64, seed=9), "what is that"]), *turns[1:]]
    assert said(engine, chat(other)) == reference.say(other, 8)


def test_responses_say_the_same(engine: Engine) -> None:
    parts = [
        {"type": "input_image", "image_url": data_url(A)},
        {"type": "input_text", "text": "what is that"},
    ]
    items = [{"role": "user", "content": parts}]
    sampling = {"temperature": 0, "max_output_tokens": 8, "ignore_eos": True}
    status, answer = engine.post(RESPONSES, {"model": "vlm", "input": items} | sampling)
    assert status == 200, answer
    _, whole = engine.post(CHAT, chat([("user", [A, "what is that"])]))
    assert answer["output"][0]["content"][0]["text"] == whole["choices"][0]["message"]["content"]


def test_broken_pictures_disturb_nobody_beside_them(engine: Engine, reference: Reference) -> None:
    good: list[Turn] = [("user", TURNS["four"])]
    plain: list[Turn] = [("user", ["hello world"])]
    expected = reference.say(good, 8), reference.say(plain, 8)
    whole = data_url(A)
    broken = [whole[:150], whole.replace("iVBOR", "iVBOS"), "data:image/png;base64,AAAA", "http://127.0.0.1:1/a.png"]
    bad = [chat([("user", ["a"])]) for _ in broken]
    for body, url in zip(bad, broken, strict=True):
        body["messages"][0]["content"].append({"type": "image_url", "image_url": url})
    answers: dict[str, Any] = {}

    def ask(name: str, body: Json) -> None:
        answers[name] = engine.post(CHAT, body)

    asked = [(f"bad {place}", body) for place, body in enumerate(bad)]
    asked += [(f"good {place}", chat(good, cache_salt=str(place))) for place in range(4)]
    asked += [(f"plain {place}", chat(plain, cache_salt=str(place))) for place in range(4)]
    threads = [threading.Thread(target=ask, args=each) for each in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name, (status, answer) in answers.items():
        if name.startswith("bad"):
            assert (status, answer["error"]["param"]) == (400, "messages"), answer
        else:
            assert status == 200, answer
            assert answer["choices"][0]["token_ids"] == expected[name.startswith("plain")]
    assert len(answers) == len(asked)
