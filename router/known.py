"""What is known of one engine while the router runs: found by probing, shown by answers, kept until it changes."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from connectors.wire.transfer import KVTransferParams
from router.capabilities import FACTS, UNKNOWN, Capabilities, Flag, Kind, assumed, merged

NUM_IDS: Final = 16
"""Engine ids behind one URL from which on it is no engine that was started anew, but a door to many."""
MAX_TRIES: Final = 5
PULLS_AT_LEAST: Final = 64
"""vLLM's default `kv_recompute_threshold`: fewer missing tokens it computes, whatever it was offered."""

_RANK: Final = re.compile(r"_dp\d+$")  # of one that is data-parallel

log = logging.getLogger("router.known")


class Known:
    """One engine's capabilities. What it has shown to work counts as working until it is another engine: so a fact
    changes twice at most, and so do the log lines about it."""

    def __init__(
        self,
        url: str,
        role: str,
        stated: Capabilities = UNKNOWN,
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called whenever something else may be known."""
        self.stated = stated
        self.stale = True
        """To be probed at the next look."""
        self.trying = False
        """A turn finds out whether it can pull."""
        self._who = {"engine": url, "role": role}
        self._found = UNKNOWN
        self._shown = UNKNOWN
        self._ids: set[str] = set()
        self._wrong_block_size = False
        self._num_tries = 0
        self._told: dict[str, object] = {}
        self._on_change = on_change
        self.now = self._merged()

    @property
    def pulls(self) -> bool:
        """Whether a prefill engine may be given blocks now. What is not known is tried by one turn."""
        return self.now.bidirectional or (self.now.bidirectional is None and not self.trying)

    @property
    def is_named(self) -> bool:
        """Whether an id of it is known."""
        return bool(self._ids)

    def goes_by(self, engine_id: str) -> bool:
        """Whether it has named blocks under this id."""
        return without_rank(engine_id) in self._ids

    @contextmanager
    def given_blocks(self) -> Iterator[None]:
        """For the time of a prefill leg that has blocks to pull."""
        first = self.now.bidirectional is None
        self.trying = self.trying or first
        try:
            yield
        finally:
            if first:
                self.trying = False

    # What a probe finds.

    def forget(self) -> None:
        """It was down: whoever comes back may be another."""
        self._found = self._shown = UNKNOWN
        self._wrong_block_size = False
        self._ids.clear()
        self._num_tries = 0
        self.stale = True
        self._know()

    def found(self, probed: Capabilities, *, complete: bool = True) -> None:
        """Take what a probe found. If it is another engine than before, what that one showed counts no more. One that
        did not answer all is probed again, a few times."""
        if any(_changed(getattr(self._found, name), getattr(probed, name)) for name in FACTS):
            self._shown = UNKNOWN
            self._wrong_block_size = False
            self._found = probed
        else:
            self._found = merged(("seen", probed), ("seen", self._found))  # a probe may have had no answer to some
        self._num_tries = 0 if complete else self._num_tries + 1
        self.stale = 0 < self._num_tries < MAX_TRIES
        self._know()
        told = {name: getattr(self.now, name) for name in ("kind", "version", "block_size", "bidirectional")}
        if told != self._told:
            self._told = told
            log.info("engine can", extra={**self._who, **told})

    # What its answers show.

    def saw(self, flag: Flag, works: bool) -> None:
        """An answer showed that something works, or that it does not."""
        before = getattr(self._shown, flag)
        if before is True or before is works:
            return
        was = getattr(self.now, flag)
        changes: dict[str, Any] = {flag: works}
        self._shown = replace(self._shown, **changes)
        self._know()
        if (stated := getattr(self.stated, flag)) is not None and stated is not works:
            log.warning("engine is not as stated", extra={**self._who, "capability": flag, "seen": works})
        elif was is not works:
            log.info("engine shows", extra={**self._who, "capability": flag, "works": works})

    def saw_params(self, params: KVTransferParams) -> None:
        """It has named blocks of its own."""
        self._saw_id(params.remote_engine_id)
        if self.now.kv_layout is None and params.kv_layout is not None:
            self._shown = replace(self._shown, kv_layout=params.kv_layout)
            self._know()
        size = params.remote_block_size
        if self.now.block_size is None and size is not None:
            self._shown = replace(self._shown, block_size=size)
            self._know()
        elif (size := self.now.block_size) is not None and self.stated.block_size is None:
            groups, num_tokens = params.remote_block_ids, params.remote_num_tokens
            if groups and len(groups) == 1 and num_tokens and -(-num_tokens // size) != len(groups[0]):
                # Some report one size and use another. Nothing can be cut by it.
                self._wrong_block_size = True
                self._know()
                log.warning("engine's block size is not what it says", extra={**self._who, "block_size": size})

    def saw_prefill(
        self, params: KVTransferParams | None, *, told_ids: bool | None, offered: KVTransferParams | None = None
    ) -> None:
        """A prefill leg was answered. `offered` are the blocks it was given; `told_ids`: whether it told the prompt's,
        None if this endpoint has no way to."""
        if told_ids is not None:
            self.saw("return_token_ids", told_ids)
        if params is None:
            return
        self.saw_params(params)
        had = params.remote_prefill_cached_tokens
        if offered is not None and had is not None:
            # With so much missing it would wait for ever if it could not pull.
            num_offered = min(offered.remote_num_tokens or 0, params.remote_num_tokens or 0)
            if num_offered - had >= 2 * PULLS_AT_LEAST:
                self.saw("bidirectional", True)

    def saw_decode(
        self,
        offer: KVTransferParams | None,
        *,
        endpoint: str,
        pulled: bool,
        streamed: bool,
        stop_reason: object = None,
        told_ids: bool | None = None,
    ) -> None:
        """A decode leg came to its end by itself, with or without an offer. `endpoint`: its name in the metrics;
        `pulled`: it had a hand-over, without which others than ours offer nothing; `stop_reason`: of its choice, as
        vLLM has it; `told_ids`: whether it told them, if it was asked."""
        if told_ids is not None:
            self.saw("return_token_ids", told_ids)
        if offer is not None:
            self.saw_params(offer)
            self.saw("bidirectional", True)
            if streamed:
                self.saw("streams_carry_params", True)
        elif pulled and not isinstance(stop_reason, str):  # a stop string aborts the request in vLLM's engine
            if not streamed:
                self.saw("bidirectional", False)
            elif self.now.bidirectional and endpoint != "generate":  # whose streams never do, in vLLM
                self.saw("streams_carry_params", False)

    def _saw_id(self, engine_id: str | None) -> None:
        if engine_id is None:
            return
        engine_id = without_rank(engine_id)
        if engine_id in self._ids or len(self._ids) == NUM_IDS:  # there are many behind its URL: nothing to be gained
            return
        if self._ids:
            self.stale = True  # it was started anew, unseen
            self._shown = UNKNOWN
            self._wrong_block_size = False
            self._know()
        self._ids.add(engine_id)

    def _know(self) -> None:
        self.now = self._merged()
        self._on_change()

    def _merged(self) -> Capabilities:
        kind: Kind | None = self.stated.kind or self._found.kind
        version = self.stated.version or self._found.version
        known = merged(
            ("stated", self.stated),
            ("seen", self._shown),
            ("seen", self._found),
            ("assumed", assumed(kind, version)),
        )
        return replace(known, block_size=None) if self._wrong_block_size else known


def without_rank(engine_id: str) -> str:
    """The id of an engine, whichever of its data-parallel ranks was named."""
    return _RANK.sub("", engine_id)


def _changed(before: object, after: object) -> bool:
    return before is not None and after is not None and before != after
