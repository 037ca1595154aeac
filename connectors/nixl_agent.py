"""The NIXL agent: one registered arena, and the peers whose arenas can be read. The only file that imports NIXL."""

from __future__ import annotations

import importlib
import logging
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import numpy as np

from connectors.agent import AgentError, PeerLost
from connectors.peer import AgentInfo

logger = logging.getLogger(__name__)

Memory = Literal["DRAM", "VRAM"]


class NixlAgent:
    """Implements `connectors.agent.Agent`. To be used by the thread that made it, alone."""

    def __init__(self, base_address: int, num_blocks: int, block_bytes: int, memory: Memory, device_id: int) -> None:
        if memory == "VRAM":
            _make_cuda_current(device_id)
        nixl, self._disconnected = _load()
        # A name of its own for every process: a restarted peer is then never taken for the one before it.
        self.name = str(uuid.uuid4())
        self._agent: Any = nixl.nixl_agent(self.name, nixl.nixl_agent_config(enable_prog_thread=False))
        self._agent.register_memory([(base_address, num_blocks * block_bytes, device_id, "")], memory)
        blocks = _blocks(base_address, num_blocks, block_bytes, device_id)
        self._local: Any = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", blocks, memory)
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._remotes: set[NixlRemote] = set()
        self._num_remotes: Counter[str] = Counter()
        """By agent name: two addresses may lead to one peer."""

    def connect(self, info: AgentInfo) -> NixlRemote:
        """Get ready to read a peer's memory. Raises AgentError."""
        try:
            with self.errors():
                loaded: str | bytes = self._agent.add_remote_agent(info.agent_metadata)
        except AgentError:
            self._drop_half_made(info.agent_name)
            raise
        name = loaded.decode(errors="replace") if isinstance(loaded, bytes) else loaded
        self._num_remotes[name] += 1
        try:
            if name != info.agent_name:
                raise AgentError("the agent metadata is another agent's")
            with self.errors():
                blocks = _blocks(info.base_address, info.num_blocks, info.block_bytes, info.device_id)
                remote = NixlRemote(self, name, self._agent.prep_xfer_dlist(name, blocks, info.memory))
        except AgentError:
            self._drop(name)
            raise
        self._remotes.add(remote)
        return remote

    def notifications(self) -> list[bytes]:
        """What came in since the last call; also lets NIXL work on reads, own ones and those of peers."""
        return [message for messages in self._agent.get_new_notifs().values() for message in messages]

    def close(self) -> None:
        """Destroy the agent with all its connections: afterwards nothing reads from or writes to the arena."""
        for remote in self._remotes:
            remote.abandon()
        self._remotes.clear()
        self._local.release()
        # The agent dies with the last reference; it deregisters the arena only once no connection can use it.
        del self._local, self._agent

    # For NixlRemote.

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Translate what the bindings raise; the block should do nothing but call them."""
        try:
            yield
        except self._disconnected as error:
            raise PeerLost(f"the connection to the peer was lost ({error})") from None
        except AgentError:
            raise
        except Exception as error:
            raise AgentError(f"{type(error).__name__}: {error}") from None

    def post_read(self, blocks: Any, local_ids: Sequence[int], remote_ids: Sequence[int], notification: bytes) -> Any:
        """Returns the handle and whether the read is done already."""
        local, remote = np.array(local_ids, np.int32), np.array(remote_ids, np.int32)
        handle = self._agent.make_prepped_xfer("READ", self._local, local, blocks, remote, notification)
        try:
            state = self._agent.transfer(handle)
            if state not in ("DONE", "PROC"):
                raise AgentError(f"the read was refused ({state})")
        except Exception:
            # UCX refuses the first block for any reason it would refuse one for, so none is under way.
            handle.release()
            raise
        return handle, state == "DONE"

    def is_done(self, handle: Any) -> bool:
        state = self._agent.check_xfer_state(handle)
        if state not in ("DONE", "PROC"):
            raise AgentError(f"the read ended in state {state}")
        return bool(state == "DONE")

    def notify(self, name: str, notification: bytes) -> None:
        self._agent.send_notif(name, notification)

    def forget(self, remote: NixlRemote) -> None:
        self._remotes.discard(remote)
        self._drop(remote.name)

    def _drop_half_made(self, name: str) -> None:
        """NIXL may keep what it read of a peer's metadata before it failed, and then refuse the good ones."""
        if name not in self._num_remotes:
            with suppress(AgentError), self.errors():
                self._agent.remove_remote_agent(name)

    def _drop(self, name: str) -> None:
        self._num_remotes[name] -= 1
        if not self._num_remotes[name]:
            del self._num_remotes[name]
            try:
                with self.errors():
                    self._agent.remove_remote_agent(name)
            except AgentError as error:
                logger.debug("remove agent failed detail=%s", error)


class NixlRemote:
    """A peer's arena. Implements `connectors.agent.Remote`."""

    def __init__(self, agent: NixlAgent, name: str, blocks: Any) -> None:
        self._agent = agent
        self.name = name
        self._blocks = blocks
        self._reads: set[NixlRead] = set()

    def read(self, local_ids: Sequence[int], remote_ids: Sequence[int], notification: bytes) -> NixlRead:
        with self._agent.errors():
            handle, done = self._agent.post_read(self._blocks, local_ids, remote_ids, notification)
        read = NixlRead(self._agent, self._reads, handle, done)
        self._reads.add(read)
        return read

    def notify(self, notification: bytes) -> None:
        with self._agent.errors():
            self._agent.notify(self.name, notification)

    def disconnect(self) -> None:
        assert not self._reads, "reads are under way"
        self._release_blocks()
        self._agent.forget(self)

    def abandon(self) -> None:
        """Let go of everything, reads under way included: only for an agent about to be destroyed."""
        for read in list(self._reads):
            read.release()
        self._release_blocks()

    def _release_blocks(self) -> None:
        self._blocks.release()
        # Like every handle, it would keep the agent alive.
        del self._blocks


class NixlRead:
    """Implements `connectors.agent.Read`."""

    def __init__(self, agent: NixlAgent, owner: set[NixlRead], handle: Any, done: bool) -> None:
        self._agent = agent
        self._owner = owner
        self._handle = handle
        self._done = done

    def done(self) -> bool:
        if not self._done:
            with self._agent.errors():
                self._done = self._agent.is_done(self._handle)
        return self._done

    def release(self) -> None:
        self._handle.release()
        self._owner.discard(self)
        del self._handle


def _blocks(base_address: int, num_blocks: int, block_bytes: int, device_id: int) -> np.ndarray[Any, Any]:
    """[num_blocks, 3]: address, length and device of every block."""
    blocks = np.empty((num_blocks, 3), np.uint64)
    blocks[:, 0] = np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes) + np.uint64(base_address)
    blocks[:, 1] = block_bytes
    blocks[:, 2] = device_id
    return blocks


def _load() -> tuple[Any, type[Exception]]:
    """The NIXL bindings and the exception by which they tell of a dead peer. Raises ImportError."""
    # Without these NIXL and UCX print their own lines about every dead peer; ours say who it was.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    # Over TCP, UCX's own keep-alive now and then aborts the process whose reader was killed in the middle of a read.
    # The kernel's finds dead hosts too, and stays on.
    os.environ.setdefault("UCX_KEEPALIVE_INTERVAL", "inf")
    try:
        nixl = importlib.import_module("nixl_cu12._api")
    except ModuleNotFoundError as error:
        if error.name != "nixl_cu12":
            raise
        nixl = importlib.import_module("nixl._api")
    return nixl, nixl.nixlBind.nixlRemoteDisconnectError


def _make_cuda_current(device_id: int) -> None:
    """Give this thread the device's CUDA context before NIXL connects: UCX leaves CUDA out without one."""
    import torch

    torch.cuda.set_device(device_id)
    torch.zeros(1, device=f"cuda:{device_id}")
