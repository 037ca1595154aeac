"""Pictures in requests: from what a client sends to the engine's request, and every refusal on the way."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from connectors.wire.seal import SEAL_HEADER, SealKeys
from engine.media.address import networks
from engine.media.fetch import Fetcher
from engine.media.processor import Processor, ProcessorLimits
from engine.media.sight import Sight
from engine.model.loader import LoadedVision, load_model
from engine.request import Request
from tests.seeing import data_url, draw, encoded
from tests.tiny_vlm import IMAGE_TOKEN_ID
from tests.unit.server.double import Stage, params_for_decode

CHAT, RESPONSES, GENERATE = "/v1/chat/completions", "/v1/responses", "/inference/v1/generate"
SQUARE, WIDE = data_url(draw(64, 64, seed=1)), data_url(draw(100, 50, seed=2))
KEYS = SealKeys((b"0123456789abcdef",))
Json = dict[str, Any]


@pytest.fixture(scope="module")
def vision(tiny_vlm: Path) -> LoadedVision:
    loaded = load_model(tiny_vlm, dtype=torch.float32).vision
    assert loaded is not None
    return loaded


@pytest.fixture
def sight(vision: LoadedVision) -> Sight:
    limits = ProcessorLimits(max_pixels=1 << 16, max_rows=1024, cache_bytes=1 << 20)
    return Sight(Processor(vision, limits), Fetcher((), (), 20_000, 5.0), 4, 20_000, takes_embeds=False)


@pytest.fixture
async def stage(tiny_vlm: Path, sight: Sight) -> AsyncIterator[Stage]:
    async with Stage(tiny_vlm, max_model_len=1024, sight=sight) as stage:
        yield stage


def picture(url: str, **more: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": url}} | more


def text(text: str) -> Json:
    return {"type": "text", "text": text}


def user(*parts: Json) -> Json:
    return {"messages": [{"role": "user", "content": list(parts)}]}


async def taken(stage: Stage, body: Json, path: str = CHAT, **options: Any) -> Request:
    async with stage.session.post(path, json=body, **options) as response:
        assert response.status == 200, await response.text()
        await response.read()
    return stage.submitted[-1]


async def refused(stage: Stage, body: Json, path: str = CHAT) -> Json:
    before = len(stage.submitted)
    status, answer = await stage.post(path, body)
    assert status == 400, answer
    assert len(stage.submitted) == before
    error: Json = answer["error"]
    assert error["message"].startswith(error["param"])
    return error


def names(request: Request) -> list[str]:
    return [item.identifier for item in request.media]


async def test_pictures_come_with_the_request_in_their_places(stage: Stage) -> None:
    request = await taken(stage, user(text("a"), picture(SQUARE), text("b"), picture(WIDE), picture(SQUARE)))
    first, second, third = request.media
    assert [item.metadata for item in request.media] == [
        {"rows": 2, "cols": 2},
        {"rows": 1, "cols": 2},
        {"rows": 2, "cols": 2},
    ]
    assert first.identifier == third.identifier != second.identifier
    assert first.pixels is not None
    assert (first.pixels.shape, first.pixels.dtype) == ((5, 3, 32, 32), torch.uint8)
    places = [place for item in request.media for place in item.positions]
    assert places == [place for place, token in enumerate(request.prompt_token_ids) if token == IMAGE_TOKEN_ID]
    assert [item.num_rows for item in request.media] == [80, 48, 80]


async def test_prompts_are_those_of_the_reference_processor(stage: Stage, tiny_vlm: Path) -> None:
    from tests.seeing import reference_processor

    processor = reference_processor(tiny_vlm)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [picture(SQUARE), text("what"), text(" is that"), picture(WIDE)]},
        {"role": "assistant", "content": "that"},
        {"role": "user", "content": "and\n\n what?"},
    ]
    prompt = (
        "<|im_start|>System: be brief<end_of_utterance>\nUser:<image>what is that<image><end_of_utterance>\n"
        "Assistant: that<end_of_utterance>\nUser: and\n\n what?<end_of_utterance>\nAssistant:"
    )
    expected = processor(text=prompt, images=[[draw(64, 64, seed=1), draw(100, 50, seed=2)]])["input_ids"][0]
    assert (await taken(stage, {"messages": messages})).prompt_token_ids == expected


async def test_text_alone_is_seen_by_a_template_that_wants_parts(stage: Stage) -> None:
    request = await taken(stage, {"messages": [{"role": "user", "content": "hello"}]})
    prompt = stage.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>User: hello<end_of_utterance>\nAssistant:"
    assert request.media == ()
    continued = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes "}]}
    request = await taken(stage, continued | {"continue_final_message": True})
    prompt = stage.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("Assistant: yes ")


async def test_every_way_to_send_a_picture_gives_it_the_same_name(stage: Stage) -> None:
    bmp = "data:image/bmp;base64," + base64.b64encode(encoded(draw(64, 64, seed=1), "BMP")).decode()
    requests = [
        await taken(stage, user(picture(SQUARE))),
        await taken(stage, user({"type": "image_url", "image_url": SQUARE})),
        await taken(stage, user({"type": "image_url", "image_url": {"url": SQUARE, "detail": "low"}, "uuid": "mine"})),
        await taken(stage, user(picture(bmp))),
        await taken(stage, {"input": [{"role": "user", "content": [input_image(SQUARE)]}]}, RESPONSES),
        await taken(stage, user(picture(SQUARE, uuid="mine"))),
    ]
    assert {tuple(names(request)) for request in requests} == {tuple(names(requests[0]))}


async def test_another_picture_or_another_way_to_prepare_it_is_another_name(stage: Stage) -> None:
    """Whatever the request calls it."""
    whole = await taken(stage, user(picture(SQUARE, uuid="one")))
    other = await taken(stage, user(picture(data_url(draw(64, 64, seed=3)), uuid="one")))
    unsplit = await taken(stage, user(picture(SQUARE)) | {"mm_processor_kwargs": {"do_image_splitting": False}})
    small = await taken(stage, user(picture(SQUARE)) | {"mm_processor_kwargs": {"size": {"longest_edge": 32}}})
    assert len({names(each)[0] for each in (whole, other, unsplit, small)}) == 4
    assert [each.media[0].num_rows for each in (whole, other, unsplit, small)] == [80, 80, 16, 16]
    assert len({each.block_hashes[-1] for each in (whole, other)}) == 2


def input_image(url: str) -> Json:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


async def test_responses_show_the_same_as_chats(stage: Stage) -> None:
    chat = await taken(stage, user(text("a"), picture(SQUARE), text("b"), picture(WIDE)))
    parts = [{"type": "input_text", "text": "a"}, input_image(SQUARE), {"type": "input_text", "text": "b"}]
    items: list[Json] = [{"role": "user", "content": [*parts, input_image(WIDE)]}]
    response = await taken(stage, {"input": items}, RESPONSES)
    assert response.prompt_token_ids == chat.prompt_token_ids
    assert names(response) == names(chat)
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [input_image(WIDE)]}
    request = await taken(
        stage, {"input": [{"role": "user", "content": [input_image(SQUARE)]}, call, output]}, RESPONSES
    )
    assert names(request) == names(chat)


async def test_tokenize_and_render_tell_the_expanded_ids(stage: Stage) -> None:
    body = user(picture(SQUARE), text("a"), picture(WIDE))
    request = await taken(stage, body)
    _, told = await stage.post("/tokenize", body)
    assert told["tokens"] == request.prompt_token_ids
    _, rendered = await stage.post(f"{CHAT}/render", body)
    assert rendered["token_ids"] == request.prompt_token_ids
    features = rendered["features"]
    assert features["mm_hashes"] == {"image": names(request)}
    for item, place in zip(request.media, features["mm_placeholders"]["image"], strict=True):
        assert (place["offset"], place["offset"] + place["length"]) == (item.positions[0], item.positions[-1] + 1)
    assert "features" not in (await stage.post(f"{CHAT}/render", user(text("a"))))[1]
    items = {"input": [{"role": "user", "content": [input_image(SQUARE)]}]}
    _, told = await stage.post("/tokenize", items)
    _, rendered = await stage.post(f"{RESPONSES}/render", items)
    assert told["tokens"] == rendered["token_ids"]
    assert rendered["features"]["mm_hashes"] == {"image": names(request)[:1]}


async def test_given_ids_do_not_count_for_a_prompt_with_pictures(tiny_vlm: Path, sight: Sight) -> None:
    """They look the same for every picture, and another picture may have another number of them."""
    async with Stage(tiny_vlm, role="decode", kv=True, max_model_len=1024, sight=sight) as stage:
        alone = await taken(stage, user(picture(SQUARE)))
        for ids in (["no", "ids"], list(range(20))):
            params = params_for_decode(prompt_token_ids=ids)
            request = await taken(stage, user(picture(SQUARE)) | {"kv_transfer_params": params})
            assert request.prompt_token_ids == alone.prompt_token_ids
            assert request.kv_transfer_params is not None
        items = {"input": [{"role": "user", "content": [input_image(SQUARE)]}], "kv_transfer_params": params}
        assert (await taken(stage, items, RESPONSES)).prompt_token_ids == request.prompt_token_ids
        assert (await taken(stage, user(text("a")) | {"kv_transfer_params": params})).prompt_token_ids == [*range(20)]


BOMB = "data:image/jpeg;base64," + base64.b64encode(encoded(draw(300, 300, seed=1), "JPEG")).decode()
TIFF = "data:image/tiff;base64," + base64.b64encode(encoded(draw(8, 8, seed=1), "TIFF")).decode()
LARGE = "data:image/png;base64," + "A" * 40_000


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([picture("data:image/png;base64,AAAA")], "picture 1: the picture is in none of the known formats"),
        ([picture(SQUARE), picture("data:image/png;base64,AA")], "picture 2: not valid base64"),
        ([picture(SQUARE[:200])], "picture 1: "),
        ([picture(TIFF)], "known formats"),
        ([picture(BOMB)], "at most 65536"),
        ([picture(LARGE)], "at most 20000 bytes"),
        ([picture("data:,")], "data:image/"),
        ([picture("http://example.com/a.png")], "fetches nothing from example.com"),
        ([picture("http://169.254.169.254/latest/meta-data")], "fetches nothing from"),
        ([picture("file:///etc/passwd")], "a data URL expected"),
        ([picture("a.png")], "a data URL expected"),
        ([picture(SQUARE)] * 5, "at most 4 pictures"),
        ([picture(SQUARE), text("<image>")], "2 places for 1 pictures"),
        ([{"type": "image_embeds", "image_embeds": "AAAA"}], "--enable-mm-embeds"),
        ([{"type": "image_embeds", "image_embeds": {"rows": 0, "cols": 0}, "uuid": "a"}], "ec_transfer_params"),
    ],
)
async def test_what_cannot_be_shown_is_one_error_about_the_messages(
    stage: Stage, parts: Sequence[Json], message: str
) -> None:
    for path in (CHAT, "/tokenize", f"{CHAT}/render"):
        if path == "/tokenize" and "ec_transfer" in message:
            continue  # nothing is computed of it
        error = await refused(stage, user(*parts), path)
        assert error["param"] == "messages"
        assert message in error["message"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, "content part 0 has no url"),
        ({"type": "image_url", "image_url": {}}, "content part 0 has no url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "content part 0 has no url"),
        ({"type": "image_url", "image_url": None, "uuid": "a"}, "content part 0 has no url"),
        ({"type": "image_embeds"}, "content part 0 has no image_embeds"),
        ({"type": "image_embeds", "image_embeds": {"rows": 1}}, "neither a tensor nor a uuid"),
        ({"type": "image_embeds", "image_embeds": {"image_embeds": 5}}, "no text"),
        ({"type": "input_audio", "input_audio": {}}, "takes text and image_url parts"),
        ({"type": "video_url", "video_url": {"url": SQUARE}}, "takes text and image_url parts"),
    ],
)
async def test_parts_that_are_no_pictures_are_named(stage: Stage, part: Json, message: str) -> None:
    error = await refused(stage, user(part))
    assert error["param"] == "messages[0].content"
    assert message in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mm_processor_kwargs": {"do_image_splitting": "no"}}, "mm_processor_kwargs.do_image_splitting"),
        ({"mm_processor_kwargs": {"size": {"longest_edge": 10**9}}}, "mm_processor_kwargs.size"),
        ({"mm_processor_kwargs": {"num_crops": 4}}, "mm_processor_kwargs.num_crops"),
        ({"mm_processor_kwargs": []}, "mm_processor_kwargs"),
        ({"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}}, "media_io_kwargs"),
    ],
)
async def test_what_cannot_be_changed_is_named(stage: Stage, fields: Json, param: str) -> None:
    assert (await refused(stage, user(picture(SQUARE)) | fields))["param"] == param


async def test_a_model_that_sees_nothing_says_so(tiny_model: Path) -> None:
    async with Stage(tiny_model) as stage:
        error = await refused(stage, user(picture(SQUARE)))
        assert error["message"] == "messages: this model takes no pictures, text only"
        items = {"input": [{"role": "user", "content": [input_image(SQUARE)]}]}
        assert (await refused(stage, items, RESPONSES))["param"] == "input"


async def test_pictures_that_take_more_than_the_context_are_refused(tiny_vlm: Path, vision: LoadedVision) -> None:
    limits = ProcessorLimits(max_pixels=1 << 16, max_rows=100, cache_bytes=0)
    sight = Sight(Processor(vision, limits), Fetcher((), (), 20_000, 5.0), 4, 20_000, takes_embeds=False)
    async with Stage(tiny_vlm, max_model_len=120, sight=sight) as stage:
        assert (await taken(stage, user(picture(SQUARE)))).num_tokens < 120
        error = await refused(stage, user(picture(SQUARE), picture(SQUARE)))
        assert error["code"] == "context_length_exceeded"
        huge = user(picture(SQUARE)) | {"mm_processor_kwargs": {"size": {"longest_edge": 4096}}}
        error = await refused(stage, huge)
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


async def test_files_are_not_kept(stage: Stage) -> None:
    part = input_image(SQUARE) | {"file_id": "file-1"}
    error = await refused(stage, {"input": [{"role": "user", "content": [part]}]}, RESPONSES)
    assert error["param"] == "input[0].content[0].file_id"
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [input_image(SQUARE)]}]
    error = await refused(stage, {"input": said}, RESPONSES)
    assert error["param"] == "input[1].content[0].type"


async def test_pictures_are_fetched_once_from_hosts_that_are_allowed(tiny_vlm: Path, sight: Sight) -> None:
    hits: list[str] = []

    async def serve(request: web.Request) -> web.Response:
        hits.append(request.path)
        return web.Response(body=encoded(draw(64, 64, seed=len(hits))), content_type="image/png")

    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    app = web.Application()
    app.router.add_get("/{name}", serve)
    async with TestServer(app, host="127.0.0.1") as server:
        hosts = {f"pictures.test:{server.port}"}
        fetching = replace(sight, fetcher=Fetcher(hosts, networks(["127.0.0.0/8"]), 20_000, 5.0, resolve))
        async with Stage(tiny_vlm, max_model_len=1024, sight=fetching) as stage:
            url = f"http://pictures.test:{server.port}/a.png"
            request = await taken(stage, user(picture(url), picture(url)))
            assert hits == ["/a.png"]
            assert names(request) == names(await taken(stage, user(picture(SQUARE)))) * 2
            changed = await taken(stage, user(picture(url)))  # what is there now is what counts
            assert names(changed) != names(request)[:1]


def tensor(*shape: int, value: float = 0.5, dtype: torch.dtype = torch.float32) -> str:
    buffer = io.BytesIO()
    torch.save(torch.full(shape, value, dtype=dtype), buffer)
    return base64.b64encode(buffer.getvalue()).decode()


async def test_encodings_are_taken_where_the_operator_says_so(tiny_vlm: Path, sight: Sight) -> None:
    def embeds(value: Any) -> Json:
        return user({"type": "image_embeds", "image_embeds": value})

    async with Stage(tiny_vlm, max_model_len=1024, sight=replace(sight, takes_embeds=True)) as stage:
        whole = await taken(stage, embeds(tensor(16, 64)))
        assert whole.media[0].pixels is not None
        assert whole.media[0].pixels.shape == (16, 64)
        split = await taken(stage, embeds({"image_embeds": tensor(5, 16, 64), "rows": 2, "cols": 2}))
        assert (split.media[0].num_rows, split.media[0].metadata) == (80, {"rows": 2, "cols": 2})
        other = await taken(stage, embeds(tensor(16, 64, value=0.25)))
        assert names(whole) != names(other)
        assert names(whole) == names(await taken(stage, embeds(tensor(1, 16, 64))))
        for value in (
            tensor(16, 63),
            tensor(17, 64),
            tensor(80, 64),
            tensor(16, 64, value=float("nan")),
            "AAAA",
            "%%%%",
            {"image_embeds": tensor(16, 64), "rows": 1},
            {"image_embeds": tensor(16, 64), "rows": 1, "cols": 1},
            {"image_embeds": tensor(16, 64), "rows": 10**9, "cols": 1},
        ):
            assert (await refused(stage, embeds(value)))["param"] == "messages"


EC = {"known": {"modality": "image", "metadata": {"rows": 2, "cols": 2}, "shape": [80, 64], "size_bytes": 20480}}


def named(uuid: str = "known", **metadata: Any) -> Json:
    return {"type": "image_embeds", "image_embeds": {"rows": 2, "cols": 2} | metadata, "uuid": uuid}


async def test_encodings_made_elsewhere_are_known_by_name(stage: Stage) -> None:
    request = await taken(stage, user(named(), text("a")) | {"ec_transfer_params": EC})
    (item,) = request.media
    assert (item.identifier, item.pixels, item.num_rows) == ("known", None, 80)
    seen = await taken(stage, user(picture(SQUARE), text("a")))
    assert request.prompt_token_ids == seen.prompt_token_ids
    _, told = await stage.post("/tokenize", user(named(), text("a")))
    assert told["tokens"] == request.prompt_token_ids
    assert [each.ec_transfer_params is not None for each in stage.submitted] == [True, False]
    for part in (named("other"), named(rows=0), named(rows=True), named(more=1), named(rows=129, cols=129)):
        await refused(stage, user(part) | {"ec_transfer_params": EC})


async def test_only_the_router_may_name_them(tiny_vlm: Path, sight: Sight) -> None:
    body = user(named()) | {"ec_transfer_params": EC}
    async with Stage(tiny_vlm, max_model_len=1024, seals=KEYS, sight=sight) as stage:
        assert (await stage.post(CHAT, body))[0] == 403
        assert (await stage.post(CHAT, user(named())))[0] == 400
        request = await taken(stage, body, headers={SEAL_HEADER: KEYS.seal(CHAT, body)})
        assert names(request) == ["known"]


async def test_rendered_prompts_are_generated_from_with_encodings_made_elsewhere(stage: Stage) -> None:
    _, rendered = await stage.post(f"{CHAT}/render", user(picture(SQUARE), text("a")))
    (name,) = rendered["features"]["mm_hashes"]["image"]
    assert (await refused(stage, rendered, GENERATE))["param"] == "features"
    request = await taken(stage, rendered | {"ec_transfer_params": {name: EC["known"]}}, GENERATE)
    seen = await taken(stage, user(picture(SQUARE), text("a")))
    assert request.prompt_token_ids == seen.prompt_token_ids
    assert request.block_hashes == seen.block_hashes
    assert request.media[0].pixels is None
    whole = rendered | {"ec_transfer_params": {name: EC["known"]}, "return_token_ids": True}
    _, answer = await stage.post(GENERATE, whole)
    assert answer["mm_placeholders"] == rendered["features"]["mm_placeholders"]
    assert answer["prompt_token_ids"] == rendered["token_ids"]
    for change in (
        {"mm_metadata": {"image": []}},
        {"mm_metadata": {"image": [{"rows": 1, "cols": 2}]}},
        {"mm_hashes": {"audio": [name]}},
        {"kwargs_data": {"image": ["AAAA"]}},
    ):
        body = rendered | {"ec_transfer_params": {name: EC["known"]}, "features": rendered["features"] | change}
        await refused(stage, body, GENERATE)


async def test_all_answers_of_one_request_are_about_the_same_pictures(stage: Stage) -> None:
    await taken(stage, user(named()) | {"ec_transfer_params": EC, "n": 2, "temperature": 1.0})
    assert [names(request) for request in stage.submitted] == [["known"]] * 2
    assert all(request.ec_transfer_params is not None for request in stage.submitted)
    assert stage.submitted[0].block_hashes == stage.submitted[1].block_hashes


async def test_pictures_that_come_again_are_not_prepared_again(stage: Stage) -> None:
    first = await taken(stage, user(picture(SQUARE)))
    again = await taken(stage, user(picture(SQUARE), text("a")))
    assert again.media[0].pixels is first.media[0].pixels
