"""Very many engines as a router's looks see them: one process that listens on a port for each, and answers.

python -m bench.scale_engines --engines 1000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from typing import Final

from bench.scale_fleet import CARDS

METRIC_LINES: Final = 400
"""Of an engine's metrics, most of them of histograms: about 40 KB, as of vLLM."""
LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")


def metrics() -> bytes:
    told = 'vllm:num_requests_running{engine="0",model_name="m"} 7.0\n'
    told += 'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0\n'
    told += 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.42\n'
    line = 'vllm:e2e_request_latency_seconds_bucket{{engine="0",le="{}.0",model_name="m"}} {}.0\n'
    return (told + "".join(line.format(number, 1000 * number) for number in range(METRIC_LINES))).encode()


def answer(status: str, body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


ANSWERS: Final = {
    b"GET /v1/models": answer("200 OK", json.dumps({"object": "list", "data": list(CARDS.values())}).encode()),
    b"GET /metrics": answer("200 OK", metrics(), "text/plain"),
    b"GET /version": answer("200 OK", b'{"version":"0.1.0"}'),
    b"GET /kv/agent": answer("200 OK", b'{"engine_id":"e","kv_layout":"layout","num_blocks":4096}'),
    b"POST /inference/v1/generate": answer("400 Bad Request", b"{}"),
}
OTHERS: Final = answer("405 Method Not Allowed", b"{}")


class Engine(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._text = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._text += data
        while (end := self._text.find(b"\r\n\r\n")) >= 0:
            head = self._text[:end]
            length = LENGTH.search(head)
            end += 4 + (int(length[1]) if length else 0)
            if len(self._text) < end:
                return
            self._text = self._text[end:]
            self._transport.write(ANSWERS.get(b" ".join(head.split(b" ", 2)[:2]), OTHERS))


async def serve(num_engines: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Engine, "127.0.0.1", 0) for _ in range(num_engines)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--engines", type=int, default=1000)
    asyncio.run(serve(parser.parse_args().engines))


if __name__ == "__main__":
    main()
