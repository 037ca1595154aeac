"""The transport between processes and hosts: NIXL moves the KV, HTTP makes the appointments.

One thread owns the NIXL agent: it posts the reads of `connectors/puller.py`, helps along those of peers from this
engine's memory (over TCP a read needs its target's help), and receives the notifications by which readers give blocks
back. NIXL's own progress thread stays off: it would keep a core busy for nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from connectors.nixl_agent import Memory, NixlAgent
from connectors.peer import AgentInfo, Service
from connectors.puller import NOTIFICATION_PREFIX, Puller
from connectors.transport import Emit, LeaseReleased, Peer, Pull, PullFailed

logger = logging.getLogger(__name__)

BUSY_PAUSE = 0.001
"""Seconds between two looks at NIXL while something is under way."""
IDLE_PAUSE = 0.050
"""The longest pause. With nothing under way there is nothing to miss: peers read here only under a claim, which wakes
the thread."""
PAUSE_SHARE = 0.01
"""Between these, the pause is this share of the time that nothing was under way: it grows in some seconds."""
FORGET_INTERVAL = 60.0
START_TIMEOUT = 60.0
CLOSE_SECONDS = 2.0
"""What reads and messages under way get to end by themselves when the engine stops."""
JOIN_TIMEOUT = 30.0
MAX_NOTIFICATION_BYTES = 4096
SERVICES: dict[Service, str] = {"kv": "KV", "ec": "encodings"}


class TransportError(Exception):
    """The transport cannot start; the message is one line for the user."""


class NixlTransport:
    """One engine's KV memory, readable by peers and filled from theirs; see `connectors.transport.Transport`.

    The counters may be read from any thread.
    """

    # Set by the transfer thread before it is ready.
    _start_error: Exception | None = None
    _info: AgentInfo | None = None
    _puller: Puller | None = None

    def __init__(
        self,
        *,
        engine_id: str,
        kv_layout: str,
        base_address: int,
        num_blocks: int,
        block_bytes: int,
        emit: Emit,
        memory: Memory = "DRAM",
        device_id: int = 0,
        claims_open: Callable[[], bool] = lambda: False,
        on_failure: Callable[[str], None] = lambda reason: None,
        transfer_timeout: float = 20.0,
        handshake_timeout: float = 5.0,
        service: Service = "kv",
    ) -> None:
        """Offer `num_blocks` blocks of `block_bytes` at `base_address`, which must stay there until `close` returns;
        `service` is what they are to peers.

        `emit`, `claims_open` and `on_failure` are called on the transfer thread, the last when it breaks down: every
        pull then fails, and no reader is heard any more. `claims_open` says whether a peer may be reading
        here: then its reads and notifications are attended to every millisecond; `wake` has it asked at once. Timeouts
        in seconds.

        Raises TransportError.
        """
        self._emit = emit
        self._service: Service = service
        self._claims_open = claims_open
        self._on_failure = on_failure
        self._transfer_timeout = transfer_timeout
        self._handshake_timeout = handshake_timeout
        self._num_blocks = num_blocks
        self._actions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._ready = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._ended = False
        self.failed = False
        """The transfer thread broke down: every pull fails from then on."""
        self.num_notifications = 0
        self.num_bad_notifications = 0
        """Received, but not from a Backhaul reader."""

        def start() -> NixlAgent:
            agent = NixlAgent(base_address, num_blocks, block_bytes, memory, device_id)
            self._info = AgentInfo(
                version=1,
                engine_id=engine_id,
                agent_name=agent.name,
                agent_metadata=agent.metadata,
                base_address=base_address,
                num_blocks=num_blocks,
                block_bytes=block_bytes,
                kv_layout=kv_layout,
                memory=memory,
                device_id=device_id,
            )
            return agent

        self._thread = threading.Thread(target=self._run, args=(start,), name="transfer", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT):
            raise TransportError(f"NIXL did not start within {START_TIMEOUT:.0f} s")
        if self._start_error is not None:
            error = self._start_error
            hint = "; install backhaul[engine]" if isinstance(error, ImportError) else ""
            raise TransportError(f"NIXL cannot start: {type(error).__name__}: {error}{hint}") from error

    @property
    def num_handshakes_failed(self) -> Counter[str]:
        """By reason: handshake, engine_id, layout."""
        return self._started_puller.num_handshakes_failed

    @property
    def num_messages_dropped(self) -> int:
        """Releases and heartbeats not sent because too many other peers are busy."""
        return self._started_puller.num_messages_dropped

    @property
    def num_pulls(self) -> int:
        """Pulls under way, those included whose peer hangs."""
        return self._started_puller.num_pulls

    @property
    def num_peers(self) -> int:
        return self._started_puller.num_peers

    def pull(self, pull: Pull) -> None:
        local, remote = pull.local_block_ids, pull.remote_block_ids
        assert len(local) == len(remote) > 0, f"{pull.request_id}: {len(local)} local and {len(remote)} remote blocks"
        assert len(pull.block_hashes) == len(remote), f"{pull.request_id}: {len(pull.block_hashes)} hashes"
        assert 0 <= min(local) <= max(local) < self._num_blocks, f"{pull.request_id}: local block ids out of range"
        if not self._do(lambda: self._started_puller.pull(pull)):
            self._emit(PullFailed(pull.request_id, "transfer", "the transfer thread has ended"))

    def release(self, peer: Peer, remote_request_id: str) -> None:
        self._do(lambda: self._started_puller.release(peer, remote_request_id))

    def renew(self, peer: Peer, remote_request_ids: Sequence[str]) -> None:
        request_ids = tuple(remote_request_ids)
        self._do(lambda: self._started_puller.renew(peer, request_ids))

    def wake(self) -> None:
        """A peer is about to read here. From any thread."""
        self._do(lambda: None)

    def agent_info(self) -> dict[str, Any]:
        assert self._info is not None, "not started"
        return self._info.to_json()

    def close(self) -> None:
        self._closing.set()
        self._do(lambda: None)
        self._thread.join(JOIN_TIMEOUT)
        if self._thread.is_alive():
            logger.error("transfer thread did not end within %.0f s", JOIN_TIMEOUT)

    @property
    def _started_puller(self) -> Puller:
        assert self._puller is not None, "not started"
        return self._puller

    def _do(self, action: Callable[[], None]) -> bool:
        """Have the transfer thread run `action`; False if it has ended."""
        with self._lock:
            if not self._ended:
                self._actions.put(action)
            return not self._ended

    # The transfer thread.

    def _run(self, start: Callable[[], NixlAgent]) -> None:
        try:
            agent = start()
            assert self._info is not None, "started without describing itself"
            puller = self._puller = Puller(
                agent,
                me=self._info,
                emit=self._emit,
                post=self._actions.put,
                transfer_timeout=self._transfer_timeout,
                handshake_timeout=self._handshake_timeout,
                service=self._service,
            )
        except Exception as error:
            self._start_error = error
            self._ended = True
            return
        finally:
            self._ready.set()
        try:
            self._serve(agent, puller)
        except Exception as error:
            logger.exception("transfer thread failed; pulls fail from now on")
            self.failed = True
            self._on_failure(f"{SERVICES[self._service]} can no longer be exchanged: {type(error).__name__}: {error}")
        finally:
            self._end(agent, puller)

    def _serve(self, agent: NixlAgent, puller: Puller) -> None:
        idle_since = time.monotonic()
        forget_at = idle_since + FORGET_INTERVAL
        while not self._closing.is_set():
            now = time.monotonic()
            if puller.reading or self._claims_open():
                idle_since = now
            self._work(agent, puller, min(max(BUSY_PAUSE, PAUSE_SHARE * (now - idle_since)), IDLE_PAUSE))
            if now >= forget_at:
                puller.forget_idle()
                forget_at = now + FORGET_INTERVAL

    def _work(self, agent: NixlAgent, puller: Puller, pause: float) -> None:
        """Wait for an action for `pause` seconds; then do what there is to do."""
        with suppress(Empty):
            self._act(self._actions.get(timeout=pause))
            while True:
                self._act(self._actions.get_nowait())
        for notification in agent.notifications():
            self._notified(notification)
        puller.poll()

    def _act(self, action: Callable[[], None]) -> None:
        """What one action runs into must not end the others; a pull that is left over meets its deadline."""
        try:
            action()
        except Exception:
            logger.exception("an action of the transfer thread failed")

    def _notified(self, notification: bytes) -> None:
        self.num_notifications += 1
        prefix, request_id = notification[: len(NOTIFICATION_PREFIX)], notification[len(NOTIFICATION_PREFIX) :]
        try:
            if prefix != NOTIFICATION_PREFIX or not 0 < len(request_id) <= MAX_NOTIFICATION_BYTES:
                raise ValueError("not a release")
            self._emit(LeaseReleased(request_id.decode()))
        except ValueError:  # or a UnicodeDecodeError
            self.num_bad_notifications += 1
            logger.warning("bad notification bytes=%d", len(notification))

    def _end(self, agent: NixlAgent, puller: Puller) -> None:
        """Let what is under way end, for a while; then take the memory away from NIXL."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._run_one_action():
            pass
        lanes = puller.close()
        while puller.num_pulls and not self.failed and time.monotonic() < deadline:
            self._work(agent, puller, BUSY_PAUSE)
        for lane in lanes:
            lane.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._ended = True
        while self._run_one_action():
            pass
        try:
            agent.close()
        except Exception:  # a broken agent may still write to the blocks of its reads: none of them is given back
            logger.exception("NIXL did not let go of the KV memory")
            return
        puller.fail_all()

    def _run_one_action(self) -> bool:
        try:
            action = self._actions.get_nowait()
        except Empty:
            return False
        self._act(action)
        return True
