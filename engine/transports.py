"""A transport over a piece of this engine's memory, its leases, and the ways between them and the engine's loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from connectors.lease import Leases
from connectors.transport import LeasesRenewed, TransferEvent, Transport
from engine.errors import StartError

CLAIM_MARGIN = 5.0
"""Seconds a claimed lease outlives its reader's deadline: the claim and the notification take their time."""


def start_transport(
    service: Literal["kv", "ec"],
    *,
    engine_id: str,
    layout: str,
    base_address: int,
    num_blocks: int,
    block_bytes: int,
    device: torch.device,
    transfer_timeout: float,
    handshake_timeout: float,
    tell: Callable[[TransferEvent], None],
    on_failure: Callable[[str], None],
) -> tuple[Transport, Leases]:
    """`tell` brings an event to the engine's loop, from any thread. Raises StartError."""

    def on_claim() -> None:
        transport.wake()
        tell(LeasesRenewed(()))  # an idle engine must not sleep past the end of the claim

    leases = Leases(claim_seconds=transfer_timeout + CLAIM_MARGIN, on_claim=on_claim)
    try:
        # Only here: an engine on its own needs no NIXL, and importing it takes a second.
        from connectors.nixl import NixlTransport, TransportError
    except ImportError as error:
        raise StartError(f"NIXL cannot be imported ({error}): pip install '.[engine]' in Backhaul's folder") from None
    try:
        transport = NixlTransport(
            engine_id=engine_id,
            kv_layout=layout,
            base_address=base_address,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            emit=tell,
            memory="VRAM" if device.type == "cuda" else "DRAM",
            device_id=device.index or 0,
            claims_open=lambda: leases.num_claimed > 0,
            on_failure=on_failure,
            transfer_timeout=transfer_timeout,
            handshake_timeout=handshake_timeout,
            service=service,
        )
    except TransportError as error:
        raise StartError(str(error)) from None
    return transport, leases
