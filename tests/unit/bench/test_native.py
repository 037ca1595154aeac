"""The benchmark's C programs: they compile cleanly, and the load generator takes no bad answer for a good one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from bench.native.build import Program, build, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler here")

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b"data: {}\n\n"
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("program", get_args(Program))
def test_the_programs_compile_without_a_warning(program: Program, tmp_path: Path) -> None:
    assert build(program, tmp_path, "-Werror").exists()


async def load(tmp_path: Path, answer: bytes, *flags: str) -> tuple[dict[str, Any], list[bytes]]:
    """What the load generator says of a server that always answers this, and the bodies it has sent."""
    bodies: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                bodies.append(await reader.readexactly(length))
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    body = tmp_path / "body"
    body.write_bytes(b'{"number": "########"}')
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        command = [str(build("load")), "--port", str(server.sockets[0].getsockname()[1]), "--body", str(body)]
        command += [*flags, "--seconds", "0.1", "--connections", "3"]  # of two that are the same the first counts
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        printed, _ = await asyncio.wait_for(process.communicate(), 60)
    return json.loads(printed), bodies


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        CHUNKED + chunk(EVENT) + chunk(DONE) + LAST,
        CHUNKED + chunk(EVENT + DONE) + LAST,
    ],
    ids=["whole", "stream", "events in one chunk"],
)
async def test_a_complete_answer_is_good(answer: bytes, tmp_path: Path) -> None:
    seen, bodies = await load(tmp_path, answer)
    assert seen["bad"] == 0
    assert seen["good"] == len(bodies) >= 3
    assert seen["events"] == (seen["good"] if answer.startswith(CHUNKED) else 0)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}!",
        CHUNKED + chunk(EVENT) + LAST,
    ],
    ids=["status", "too long", "stream cut off"],
)
async def test_any_other_answer_is_bad(answer: bytes, tmp_path: Path) -> None:
    seen, bodies = await load(tmp_path, answer)
    assert seen["good"] == 0
    assert seen["bad"] == len(bodies) >= 3


@pytest.mark.parametrize("by", ["request", "connection"])
async def test_the_mark_becomes_the_number_of_the_request_or_connection(by: str, tmp_path: Path) -> None:
    _, bodies = await load(tmp_path, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "--number", by, "--first", "7")
    numbers = [int(json.loads(body)["number"]) for body in bodies]
    if by == "connection":
        assert set(numbers) == {7, 8, 9}
    else:
        assert len(set(numbers)) == len(numbers) > 3


async def test_a_rate_is_kept_whatever_the_answers(tmp_path: Path) -> None:
    seen, bodies = await load(tmp_path, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "--rate", "100")
    assert seen["good"] == len(bodies) == 10
    assert seen["bad"] == 0


async def test_events_are_counted_as_they_come_and_gaps_are_between_those_of_one_answer(tmp_path: Path) -> None:
    answer = CHUNKED + chunk(EVENT) + chunk(EVENT + EVENT) + chunk(DONE) + LAST
    seen, bodies = await load(tmp_path, answer, "--seconds", "0", "--connections", "3")
    assert (seen["good"], seen["bad"], seen["events"]) == (3, 0, 9)
    assert len(bodies) == 3  # with no time to ask again, one each
    assert 0 <= seen["gap_p50_ms"] <= seen["gap_p99_ms"] <= seen["p99_ms"]


async def asked(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body, separators=(",", ":")).encode()
    writer.write(b"POST %b HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(content), content))
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
    answer: dict[str, Any] = json.loads(await reader.readexactly(length))
    writer.close()
    return answer


@pytest.mark.parametrize("kind", ["backhaul", "vllm"])
async def test_the_stub_tells_what_engines_of_its_kind_do(kind: str) -> None:
    process = await asyncio.create_subprocess_exec(
        str(build("stub_engine")), "--kind", kind, "--chunks", "2", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), 30))
        prefill = {"messages": [], "kv_transfer_params": {"do_remote_decode": True}}
        decode = {"messages": [], "kv_transfer_params": {"do_remote_prefill": True}}
        held = await asked(port, "/v1/chat/completions", prefill)
        told = await asked(port, "/v1/chat/completions", {**prefill, "return_token_ids": True})
        answer = await asked(port, "/v1/chat/completions", decode)
    finally:
        process.kill()
        await process.wait()
    ours = kind == "backhaul"
    assert held["kv_transfer_params"]["remote_block_ids"]
    assert ("remote_block_hashes" in held["kv_transfer_params"]) == ("prompt_token_ids" in held) == ours
    assert len(told["prompt_token_ids"]) == told["usage"]["prompt_tokens"]
    assert told["choices"][0].get("token_ids") == (None if ours else [10000])
    assert ("kv_transfer_params" in answer) == ours  # the blocks it offers to the next turn
