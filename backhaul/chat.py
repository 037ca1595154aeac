"""`backhaul chat`: a small terminal chat that shows, turn by turn, what the prompt cost."""

from __future__ import annotations

import asyncio
import base64
import json
import mimetypes
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
from pydantic import Field, SecretStr

from backhaul.errors import CommandError
from backhaul.settings import Settings

Message = dict[str, Any]
MAX_IMAGE_BYTES: Final = 20 << 20


class ChatConfig(Settings):
    """Chat with a model; each line of standard input is one message when that is not a terminal."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """Of any OpenAI-compatible server."""
    model: str | None = None
    """Default: the first one the server lists."""
    system: str | None = None
    """System prompt."""
    image: tuple[Path, ...] = ()
    """Picture that goes with the first message."""
    max_tokens: Annotated[int, Field(ge=1)] = 1024
    """Longest answer, in tokens: a small model may otherwise ramble on until its context is full."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Default: the server's."""
    api_key: SecretStr | None = None
    """Default: OPENAI_API_KEY."""
    timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds to wait for the next piece of an answer."""


@dataclass(slots=True)
class Answer:
    """What came back in one turn."""

    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    began: float = 0.0
    """When the request was sent, on the monotonic clock, in seconds; so are the next two."""
    first: float | None = None
    last: float = 0.0

    def summary(self) -> str:
        """One line; `reused` are the prompt tokens that were not computed for this turn."""
        parts = []
        if self.usage:
            prompt = self.usage.get("prompt_tokens") or 0
            reused = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            parts.append(f"prompt {prompt} tokens, {reused} reused, {prompt - reused} computed")
        if self.first is not None:
            parts.append(f"first token after {(self.first - self.began) * 1000:.0f} ms")
            num_tokens = self.usage.get("completion_tokens") or 0
            if num_tokens > 1 and self.last > self.first:
                parts.append(f"{(num_tokens - 1) / (self.last - self.first):.1f} tok/s")
        return " · ".join(parts)


def run_chat(config: ChatConfig) -> int:
    """Talk until the input ends. Raises CommandError where nobody is there to try again."""
    with asyncio.Runner() as runner:
        chat = runner.run(_connect(config))
        try:
            _converse(chat, runner)
        finally:
            runner.run(chat.close())
    return 0


def _converse(chat: Chat, runner: asyncio.Runner) -> None:
    interactive = sys.stdin.isatty()
    if interactive:
        print(_dim(f"{chat.model}: Ctrl-C cancels an answer, Ctrl-D leaves.", sys.stdout))
    for text in _typed() if interactive else _piped():
        answer = Answer()
        try:
            if not runner.run(_interruptible(chat.say(text, answer))):
                if not interactive:
                    raise KeyboardInterrupt
                print(_dim(" [cancelled]", sys.stdout), end="")
        except CommandError as error:
            if not interactive:
                raise
            print(f"error: {error}", file=sys.stderr)
            continue
        print(flush=True)
        if summary := answer.summary():
            print(_dim(summary, sys.stderr), file=sys.stderr, flush=True)


async def _interruptible(work: Coroutine[Any, Any, None]) -> bool:
    """Return False if Ctrl-C came first. A handler of the loop's own: a plain one may not wake a waiting loop."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait({task})
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    if task.cancelled():
        return False
    await task
    return True


def _typed() -> Iterator[str]:
    import readline  # noqa: F401  (gives input() editing and history)

    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if text:
            yield text


def _piped() -> Iterator[str]:
    for line in sys.stdin:
        if text := line.strip():
            yield text


async def _connect(config: ChatConfig) -> Chat:
    chat = Chat(config)
    try:
        if config.model is None:
            chat.model = await chat.first_model()
    except BaseException:
        await chat.close()
        raise
    return chat


class Chat:
    """One conversation with one server; the history is ours, as it is with every OpenAI client."""

    def __init__(self, config: ChatConfig) -> None:
        self.model = config.model or ""
        self.base_url = config.base_url.rstrip("/")
        self.history: list[Message] = [{"role": "system", "content": config.system}] if config.system else []
        self._images = [_image(path) for path in config.image]
        """For the next message."""
        self._limits = {"max_tokens": config.max_tokens, "temperature": config.temperature}
        key = config.api_key.get_secret_value() if config.api_key else os.environ.get("OPENAI_API_KEY")
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=config.timeout),
            read_bufsize=1 << 20,  # a line of the stream must fit
        )

    async def close(self) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        try:
            async with self._session.get(f"{self.base_url}/models") as response:
                await self._check(response)
                return str((await response.json(content_type=None))["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from None
        except (LookupError, TypeError, ValueError):
            raise CommandError(f"{self.base_url}/models lists no model; name one with --model") from None

    async def say(self, text: str, answer: Answer) -> None:
        """Send one message and print the answer as it comes. What was shown stays in the history, cut short or not."""
        content = [*self._images, {"type": "text", "text": text}] if self._images else text
        self.history.append({"role": "user", "content": content})
        answer.began = time.monotonic()
        try:
            async for piece in self._stream(answer):
                answer.text += piece
                print(piece, end="", flush=True)
        finally:
            if answer.text:
                self.history.append({"role": "assistant", "content": answer.text})
                self._images = []
            else:
                self.history.pop()

    async def _stream(self, answer: Answer) -> AsyncIterator[str]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self.history,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {name: value for name, value in self._limits.items() if value is not None}
        try:
            async with self._session.post(f"{self.base_url}/chat/completions", json=body) as response:
                await self._check(response)
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    if piece := _piece(json.loads(data), answer):
                        yield piece
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self._unreachable(error) from None
        raise CommandError("the answer broke off before its end")

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status >= 400:
            raise CommandError(f"{response.status} from {response.url}: {_error_message(await response.text())}")

    def _unreachable(self, error: Exception) -> CommandError:
        if isinstance(error, aiohttp.ClientConnectorError):
            return CommandError(f"nobody answers at {self.base_url}; start one with `backhaul up`, or give --base-url")
        if isinstance(error, aiohttp.InvalidURL):
            return CommandError(f"--base-url {self.base_url}: not a URL; give it as http://HOST:PORT/v1")
        reason = "timed out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        return CommandError(f"{self.base_url}: {reason}")


def _image(path: Path) -> Message:
    """The picture as part of a message. Raises CommandError."""
    kind = mimetypes.guess_type(path.name)[0] or ""
    if not kind.startswith("image/"):
        raise CommandError(f"--image {path}: not a picture, by its name; one ends in .png, .jpg and the like")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise CommandError(f"--image {path}: {error.strerror}") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise CommandError(f"--image {path}: larger than {MAX_IMAGE_BYTES >> 20} MiB")
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}


def _piece(chunk: dict[str, Any], answer: Answer) -> str:
    """Take from one chunk what there is: an error, usage, the next piece of text."""
    if "error" in chunk:
        raise CommandError(_error_message(json.dumps(chunk)))
    answer.usage = chunk.get("usage") or answer.usage
    choices = chunk.get("choices") or [{}]
    piece = (choices[0].get("delta") or {}).get("content") or ""
    if piece:
        answer.last = time.monotonic()
        answer.first = answer.first or answer.last
    return str(piece)


def _error_message(body: str) -> str:
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (LookupError, TypeError, ValueError):
        text = body
    return " ".join(str(text).split())[:300] or "no reason given"


def _dim(text: str, stream: Any) -> str:
    return f"\x1b[2m{text}\x1b[0m" if stream.isatty() else text
