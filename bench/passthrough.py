"""The other side of `bench.router`: the least a prefill/decode proxy can do with aiohttp.

    python -m bench.passthrough --prefill URL --decode URL --json FILE

Each request goes to the prefill engine, asking for blocks to be held, and then to the decode engine with what that
answered. Nothing is parsed: the few keys are spliced into the client's bytes, the transfer params are cut out of the
prefill engine's answer, where the stub engine writes them last, and the decode engine's answer is relayed as it comes.
There is no state, no check, no second try, no log and no metrics; a request that fails is a 500.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web

PREFILL = b',"stream":false,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}'
PARAMS = b',"kv_transfer_params":'
HEADERS = {"Content-Type": "application/json"}


class Passthrough:
    def __init__(self, session: aiohttp.ClientSession, prefill: str, decode: str) -> None:
        """The engines' URLs."""
        self._session = session
        self._prefill = prefill
        self._decode = decode

    async def turn(self, request: web.Request) -> web.StreamResponse:
        body = (await request.read()).rstrip()[:-1]  # without the closing brace
        async with self._session.post(self._prefill + request.path, data=body + PREFILL, headers=HEADERS) as answer:
            held = await answer.read()
        data = body + held[held.rindex(PARAMS) :]
        async with self._session.post(self._decode + request.path, data=data, headers=HEADERS) as answer:
            headers = {"Content-Type": answer.headers["Content-Type"]}
            if answer.content_length is not None:
                return web.Response(status=answer.status, body=await answer.read(), headers=headers)
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


async def serve(prefill: str, decode: str, ready: Path) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/{path:.+}", Passthrough(session, prefill, decode).turn)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        part = ready.with_suffix(".part")
        part.write_text(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}))
        part.replace(ready)
        await stop.wait()
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--prefill", required=True, help="URL of the prefill engine")
    parser.add_argument("--decode", required=True, help="URL of the decode engine")
    parser.add_argument("--json", type=Path, required=True, help='write {"url"} here once it listens')
    args = parser.parse_args()
    uvloop.run(serve(args.prefill, args.decode, args.json))


if __name__ == "__main__":
    main()
