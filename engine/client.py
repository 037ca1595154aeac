"""The server's end of the two queues to the engine: submit requests, await their outputs, abort what is left.

Everything but `emit` and `fail` runs on the server's event loop. The engine's thread calls `emit` once per step,
which crosses over with one `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self

from connectors.transport import LeaseReleased
from connectors.wire.openai import unavailable
from connectors.wire.transfer import KVTransferParams
from engine.messages import Inbox, Output, Stop, Submit
from engine.request import Request

LEAVING = "this engine is shutting down, send the request to another"


class Observer(Protocol):
    """Told what passes, for metrics."""

    def submitted(self, request: Request) -> None: ...
    def observed(self, request: Request, output: Output) -> None: ...
    def aborted(self, request: Request) -> None: ...


class EngineClient:
    """Keeps at most `capacity` requests unfinished, which bounds the engine's inbox."""

    def __init__(
        self, inbox: SimpleQueue[Inbox], loop: asyncio.AbstractEventLoop, *, capacity: int, observer: Observer
    ) -> None:
        self._inbox = inbox
        self._loop = loop
        self.capacity = capacity
        self._observer = observer
        self._open: dict[str, tuple[Request, Outputs]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusal: str | None = None
        """Why nothing is taken any more."""
        self.failed = False
        """The engine's loop has ended for good, without having been told to."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(
        self, requests: Sequence[Request], later: Sequence[Request] = (), *, names: Iterable[str] = ()
    ) -> Outputs:
        """Hand requests to the engine, all or none; use as `async with client.submit([...]) as outputs`. `later` are
        those that the caller will `start`, for which room is kept. `names` are what else than their own ids `abort`
        finds them by.

        Raises APIError 503 if there is no room for them.
        """
        self.check_room(len(requests) + len(later))
        outputs = Outputs(self, [*requests, *later], names)
        for request in (*requests, *later):
            self._open[request.request_id] = (request, outputs)
            self._observer.submitted(request)
        for request in requests:
            outputs.started.add(request.request_id)
            self._inbox.put(Submit(request))
        self._idle.clear()
        return outputs

    def check_room(self, count: int = 1) -> None:
        """Raises APIError 503 if `submit` would for so many requests: asked early, it saves the work on a prompt."""
        if self._refusal is not None:
            raise unavailable(self._refusal, retry_after=5)
        if len(self._open) + count > self.capacity:
            raise unavailable(f"the queue is full: {len(self._open)} requests wait or run; try again later")

    def close(self) -> None:
        """Take nothing more: the engine's loop is about to be ended."""
        self._refusal = LEAVING

    def start(self, request: Request) -> None:
        """Hand over a request for which `submit` kept room."""
        known = self._open.get(request.request_id)
        if known is not None:
            known[1].started.add(request.request_id)
            self._inbox.put(Submit(request))

    def stop(self, request_id: str, num_output_tokens: int) -> None:
        """A stop string was found: end the request with this many output tokens. Its last output still comes."""
        if request_id in self._open:
            self._inbox.put(Stop(request_id, aborted=False, num_output_tokens=num_output_tokens))

    def abort(self, names: Collection[str]) -> int:
        """End the open requests with these names or ids; how many there are. Unlike a client's leaving, this is told:
        their last output comes, with the finish reason "abort"."""
        found = [known for known in self._open.values() if not known[1].names_of(known[0]).isdisjoint(names)]
        for request, outputs in found:
            outputs.aborted.add(request.request_id)
            if request.request_id in outputs.started:
                self._inbox.put(Stop(request.request_id, aborted=True))
            else:  # the engine has never heard of it
                self._deliver([Output(request.request_id, [], "abort")])
        return len(found)

    async def wait_idle(self) -> None:
        """Return when no request is unfinished."""
        await self._idle.wait()

    def emit(self, outputs: Sequence[Output]) -> None:
        """The outputs of one engine step; from the engine's thread."""
        self._cross_over(lambda: self._deliver(outputs))

    def fail(self, message: str) -> None:
        """The engine's loop ended for good: open requests end with this error, later ones are refused. From any
        thread."""
        self.failed = True
        self._cross_over(lambda: self._fail(message))

    def _cross_over(self, action: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:  # the loop is closed: the server has ended, nobody is waiting
            pass

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            known = self._open.get(output.request_id)
            if known is None:
                self.give_back(output.kv_transfer_params)
                continue
            request, mailbox = known
            self._observer.observed(request, output)
            if output.finished:
                self._forget(output.request_id)
            mailbox.put(output)

    def _fail(self, message: str) -> None:
        self._refusal = message
        self._deliver([Output(request_id, [], "error", error=message) for request_id in self._open])

    def _abort(self, request_id: str) -> None:
        known = self._open.get(request_id)
        if known is not None:
            self._inbox.put(Stop(request_id, aborted=True))
            self._observer.aborted(known[0])
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._open[request_id]
        if not self._open:
            self._idle.set()

    def give_back(self, params: KVTransferParams | None) -> None:
        """Of an ending nobody hears of: the blocks it offers would stay pinned until their lease ends."""
        if params is not None and params.remote_request_id:
            self._inbox.put(LeaseReleased(params.remote_request_id))


class Outputs:
    """The outputs of the requests of one call, as they come; ends when all have finished.

    A reader slower than the engine finds the outputs of a request merged into one. Leaving the `async with` block
    aborts what has not finished, whatever the reason.
    """

    def __init__(self, client: EngineClient, requests: Sequence[Request], names: Iterable[str]) -> None:
        self._client = client
        self._names = frozenset(names)
        self.started: set[str] = set()
        """Ids of the requests that the engine was given."""
        self.aborted: set[str] = set()
        """Ids of those that `EngineClient.abort` was told to end."""
        self._unfinished = {request.request_id for request in requests}
        self._arrived = asyncio.Event()
        self._pending: dict[str, Output] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for request_id in self._unfinished:
            self._client._abort(request_id)
        for output in self._pending.values():
            self._client.give_back(output.kv_transfer_params)

    def names_of(self, request: Request) -> frozenset[str]:
        """What `abort` finds a request by: its id, with or without the random part, and the names of its call."""
        return self._names | {request.request_id, request.request_id.rpartition("-")[0]}

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while not self._pending:
            if not self._unfinished:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        output = self._pending.pop(next(iter(self._pending)))
        if output.finished:
            self._unfinished.discard(output.request_id)
        return output

    def put(self, output: Output) -> None:
        earlier = self._pending.get(output.request_id)
        if earlier is not None:
            output = output.after(earlier)
        self._pending[output.request_id] = output
        self._arrived.set()
