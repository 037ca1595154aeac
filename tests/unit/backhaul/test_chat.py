"""The real command, as a process, against a scripted server."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

USAGE = {"prompt_tokens": 20, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}


class Upstream:
    """Answers "one two three" to everything, but hangs after "one" when asked to wait, and refuses bad requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.chat)
        self.server = TestServer(app)

    @property
    def base_url(self) -> str:
        return str(self.server.make_url("/v1"))

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "demo"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        asked = body["messages"][-1]["content"]
        if asked == "bad":
            return web.json_response({"error": {"message": "too\nlong"}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b": keep-alive\n\n" + sse({"choices": [{"delta": {"role": "assistant"}}]}))
        await response.write(sse({"choices": [{"delta": {"content": "one"}}]}))
        if asked == "wait":
            await asyncio.sleep(60)
        if asked == "fail":
            await response.write(sse({"error": {"message": "engine lost"}}))
            return response
        if asked == "break":
            return response
        await asyncio.sleep(0.01)
        await response.write(sse({"choices": [{"delta": {"content": " two"}}]}))
        await response.write(sse({"choices": [{"delta": {"content": " three"}}]}))
        await response.write(sse({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n")
        return response


def sse(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    async with upstream.server:
        yield upstream


async def chat(base_url: str, text: str, *flags: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "backhaul", "chat", "--base-url", base_url, *flags),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )
    out, err = await asyncio.wait_for(process.communicate(text.encode()), 20)
    return process.returncode or 0, out.decode(), err.decode()


async def test_piped_lines_are_turns_of_one_conversation(upstream: Upstream) -> None:
    code, out, err = await chat(
        upstream.base_url, "hello\n\nagain\n", "--system", "be brief", env={"OPENAI_API_KEY": "k"}
    )
    assert (code, out) == (0, "one two three\none two three\n")
    assert len(err.splitlines()) == 2
    assert err.startswith("prompt 20 tokens, 16 reused, 4 computed · first token after ")
    assert " tok/s" in err
    first, second = upstream.requests
    assert (first["model"], first["stream"], first["stream_options"]) == ("demo", True, {"include_usage": True})
    assert first["max_tokens"] == 1024
    assert second["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "one two three"},
        {"role": "user", "content": "again"},
    ]
    assert upstream.headers[0]["Authorization"] == "Bearer k"


async def test_pictures_go_with_the_first_message(upstream: Upstream, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    (tmp_path / "b.jpg").write_bytes(b"more")
    flags = ("--image", str(tmp_path / "a.png"), "--image", str(tmp_path / "b.jpg"))
    code, _, _ = await chat(upstream.base_url, "what is it?\nand now?\n", *flags)
    assert code == 0
    first, second = upstream.requests
    a, b = (f"data:image/{kind}" for kind in ("png;base64,cGl4ZWxz", "jpeg;base64,bW9yZQ=="))
    assert first["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": a}},
        {"type": "image_url", "image_url": {"url": b}},
        {"type": "text", "text": "what is it?"},
    ]
    assert second["messages"][0] == first["messages"][0]
    assert second["messages"][2] == {"role": "user", "content": "and now?"}


@pytest.mark.parametrize(("name", "message"), [("a.txt", "not a picture"), ("a.png", "No such file")])
async def test_picture_that_cannot_be_sent_is_one_line(
    upstream: Upstream, tmp_path: Path, name: str, message: str
) -> None:
    code, _, err = await chat(upstream.base_url, "hello\n", "--image", str(tmp_path / name))
    assert (code, len(err.splitlines())) == (1, 1)
    assert message in err


async def test_flags_reach_the_request(upstream: Upstream) -> None:
    code, _, _ = await chat(upstream.base_url, "hello\n", "--model", "m", "--max-tokens", "5", "--temperature", "0")
    assert code == 0
    assert [upstream.requests[0][key] for key in ("model", "max_tokens", "temperature")] == ["m", 5, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [("bad", "too long"), ("fail", "engine lost"), ("break", "the answer broke off before its end")],
)
async def test_a_failed_turn_ends_a_script_with_one_line(upstream: Upstream, text: str, message: str) -> None:
    code, _, err = await chat(upstream.base_url, f"{text}\nhello\n")
    assert code == 1
    assert len(err.splitlines()) == 1
    assert err.startswith("backhaul chat: ")
    assert message in err
    assert len(upstream.requests) == 1


async def test_nobody_there_is_one_line() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # bound but not listening: refuses
        code, out, err = await chat(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", "hello\n")
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "nobody answers at http://127.0.0.1:" in err


async def test_ctrl_c_cancels_an_answer_and_ctrl_d_leaves(upstream: Upstream) -> None:
    terminal, inner = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "backhaul", "chat", "--base-url", upstream.base_url),
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        preexec_fn=_take_terminal,  # so that ^C typed into it becomes a signal
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(inner)
    screen = Screen(terminal)
    try:
        await screen.wait_for("> ")
        os.write(terminal, b"wait\n")
        await screen.wait_for("one")
        os.write(terminal, b"\x03")
        await screen.wait_for("[cancelled]")
        await screen.wait_for("> ")
        os.write(terminal, b"bad\n")
        await screen.wait_for("too long")
        await screen.wait_for("> ")
        os.write(terminal, b"hello\n")
        await screen.wait_for("tok/s")
        await screen.wait_for("> ")
        os.write(terminal, b"\x04")
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        screen.close()
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert upstream.requests[-1]["messages"] == [
        {"role": "user", "content": "wait"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "hello"},
    ]


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Screen:
    """What a terminal shows, read as it comes; each wait goes on after what the last one found."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._text = ""
        self._more = asyncio.Event()
        asyncio.get_running_loop().add_reader(terminal, self._read)

    def _read(self) -> None:
        try:
            self._text += os.read(self._terminal, 4096).decode()
        except OSError:  # the other side is gone
            asyncio.get_running_loop().remove_reader(self._terminal)
        self._more.set()

    async def wait_for(self, text: str) -> None:
        try:
            async with asyncio.timeout(10):
                while text not in self._text:
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            pytest.fail(f"no {text!r} in {self._text!r}")
        self._text = self._text.partition(text)[2]

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._terminal)
        os.close(self._terminal)
