"""The parts of a worker whose model takes pictures: arena, encoder, cache, schedule, and the connector to its peers."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from connectors.ec import EncoderConnector, EncoderLayout
from connectors.transport import Peer, TransferEvent
from engine.address import advertised_host, side_channel
from engine.api.context import ECSide
from engine.config import EngineConfig
from engine.media.arena import ROWS_PER_BLOCK, EncoderArena
from engine.media.cache import EncoderCacheManager
from engine.media.encoder import Encoder
from engine.media.schedule import MediaSchedule
from engine.messages import EncoderTransfer, Inbox
from engine.model.layers import compute_dtype
from engine.model.loader import LoadedVision
from engine.sizing import choose_encoder_blocks
from engine.transports import start_transport


@dataclass(frozen=True, slots=True)
class MediaSide:
    schedule: MediaSchedule
    encoder: Encoder
    ec: ECSide | None
    """None: encodings are not exchanged."""


def media_side(
    config: EngineConfig,
    vision: LoadedVision,
    *,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    inbox: SimpleQueue[Inbox],
    port: int,
    on_failure: Callable[[str], None],
) -> MediaSide:
    """`width` is that of an encoding's rows. Raises StartError."""
    block_bytes = ROWS_PER_BLOCK * width * dtype.itemsize
    num_blocks = choose_encoder_blocks(config, block_bytes, ROWS_PER_BLOCK, max_model_len, device)
    arena = EncoderArena(num_blocks, ROWS_PER_BLOCK, width, dtype, device)
    cache = EncoderCacheManager(num_blocks, ROWS_PER_BLOCK)
    ec = _ec_side(config, arena, cache, vision.fingerprint, inbox, port, on_failure)
    schedule = MediaSchedule(
        cache,
        None if ec is None else ec.connector,
        max_rows_per_step=config.max_num_batched_tokens,
        wait_seconds=config.ec_transfer_config.ec_connector_extra_config.ec_wait_timeout,
    )
    return MediaSide(schedule, Encoder(vision, arena, activations=compute_dtype(dtype, device)), ec)


def _ec_side(
    config: EngineConfig,
    arena: EncoderArena,
    cache: EncoderCacheManager,
    fingerprint: bytes,
    inbox: SimpleQueue[Inbox],
    port: int,
    on_failure: Callable[[str], None],
) -> ECSide | None:
    if not config.ec_transfer_enabled:
        return None
    settings = config.ec_transfer_config.ec_connector_extra_config
    engine_id, layout = str(uuid.uuid4()), arena.fingerprint(fingerprint)

    def tell(event: TransferEvent) -> None:
        inbox.put(EncoderTransfer(event))

    transport, leases = start_transport(
        "ec",
        engine_id=engine_id,
        layout=layout,
        base_address=arena.base_address,
        num_blocks=arena.num_blocks,
        block_bytes=arena.block_bytes,
        device=arena.tensor.device,
        transfer_timeout=settings.transfer_timeout,
        handshake_timeout=settings.handshake_timeout,
        tell=tell,
        on_failure=on_failure,
    )
    connector = EncoderConnector(
        transport=transport,
        leases=leases,
        cache=cache,
        layout=EncoderLayout(layout, arena.rows_per_block, arena.width, arena.row_bytes),
        me=Peer(engine_id, *side_channel(config, advertised_host(config), port)),
        produces=config.announces_encodings,
        consumes=config.fetches_encodings,
        lease_seconds=settings.ec_lease_duration,
    )
    return ECSide(engine_id, connector)
