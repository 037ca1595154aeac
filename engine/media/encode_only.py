"""The scheduler of an engine that only encodes: a request ends when its pictures are encoded, without a token."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from connectors.transport import TransferEvent
from engine.batch import Batch, ScheduledRequest, StepResult
from engine.media.schedule import Availability, EncodingUnavailable, MediaSchedule
from engine.messages import Output, Stop
from engine.request import Request, RequestStatus

NO_PICTURES = "this engine only encodes pictures (--role encode), and the request has none"


class EncodeScheduler:
    """Main thread only; the counters may be read from any. There are no KV blocks, and so nothing to wait for but room
    in the encoder cache."""

    def __init__(self, media: MediaSchedule, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.media = media
        self._clock = clock
        self.requests: dict[str, Request] = {}
        """Every unfinished request."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """Those that have room for all their encodings, oldest first."""
        self._outputs: list[Output] = []
        self.num_finished: Counter[str] = Counter()
        """By finish reason."""

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def add(self, request: Request) -> None:
        assert request.request_id not in self.requests, f"{request.request_id}: added twice"
        self.requests[request.request_id] = request
        if not request.media:
            self._finish(request, RequestStatus.FINISHED_ERROR, NO_PICTURES, 400)
            return
        request.media = self.media.fitting(request)  # whoever would have fetched the others encodes them
        if request.media:
            self.waiting.append(request)
        else:
            request.to(RequestStatus.RUNNING)
            self._finish(request, RequestStatus.FINISHED_STOPPED)

    def stop(self, message: Stop) -> None:
        request = self.requests.get(message.request_id)
        if request is not None:
            self._finish(request, RequestStatus.FINISHED_ABORTED)

    def settle(self, event: TransferEvent) -> None:
        raise AssertionError("an engine without KV exchanges none")

    def update_leases(self, now: float) -> None:
        self.media.update_leases(now)

    def fail(self, requests: Sequence[Request], message: str) -> None:
        for request in requests:
            if not request.status.finished:
                self._finish(request, RequestStatus.FINISHED_ERROR, message)

    def abort_all(self) -> None:
        for request in list(self.requests.values()):
            self._finish(request, RequestStatus.FINISHED_ABORTED)

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def schedule(self) -> Batch | None:
        """The pictures to encode in the next step, and whose they are; None if there are none."""
        self.media.begin_step()
        self._admit()
        scheduled = []
        for request in list(self.running):
            count = self.media.chunk(request, 0, request.num_tokens)
            if self.media.give(request, 0, count):
                scheduled.append(ScheduledRequest(request, 0, 0))
            elif count == request.num_tokens:
                self._finish(request, RequestStatus.FINISHED_STOPPED)
        return self.media.batch(scheduled) if scheduled else None

    def finish_step(self, batch: Batch, result: StepResult) -> None:
        self.media.encoded()
        for request in [each for each in self.running if self.media.ready(each)]:
            self._finish(request, RequestStatus.FINISHED_STOPPED)

    def _admit(self) -> None:
        """In order of arrival: the first for whose encodings there is no room stops those behind it."""
        while self.waiting:
            request = self.waiting[0]
            try:
                if self.media.ensure_cache_available(request, 0, is_next=True) is not Availability.READY:
                    return
            except EncodingUnavailable as error:
                self._finish(request, RequestStatus.FINISHED_ERROR, str(error), error.status)
                continue
            self.media.admitted(request)
            self.waiting.popleft()
            request.to(RequestStatus.RUNNING)
            request.first_scheduled_time = self._clock()
            self.running.append(request)

    def _finish(self, request: Request, status: RequestStatus, error: str | None = None, code: int = 500) -> None:
        request.to(status)
        del self.requests[request.request_id]
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        params = self.media.connector.request_finished(request)
        self.media.free(request)
        self.num_finished[status.value] += 1
        output = Output(request.request_id, [], status.value, ec_transfer_params=params, error=error, error_status=code)
        self._outputs.append(output)
