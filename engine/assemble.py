"""A worker's parts, put together: model, KV arena, connector, scheduler, and the loop over them."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from connectors.base import Connector, NullConnector
from connectors.kv import KVConnector
from connectors.transport import TransferEvent
from connectors.wire.seal import SealKeys
from engine.address import advertised_host, is_loopback
from engine.api.context import KVSide, Serving
from engine.blocks import BlockPool
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.core import EngineCore, StepRunner, StepScheduler
from engine.errors import StartError
from engine.formats.base import ChatFormat, FormatError
from engine.formats.choose import choose_format
from engine.kv_cache import KVCache, KVLayout
from engine.media.encode_only import EncodeScheduler
from engine.media.encode_runner import EncodeRunner
from engine.media.readings import encode_only_readings, media_readings
from engine.media.serve import make_sight
from engine.media.side import MediaSide, media_side
from engine.messages import Inbox
from engine.metrics import EngineMetrics
from engine.model.loader import LoadedModel, load_model
from engine.readings import engine_readings
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.server import HTTPServer
from engine.sizing import choose_device, choose_dtype, choose_max_model_len, choose_sizes, choose_threads
from engine.tokenizer import Tokenizer
from engine.transports import start_transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    core: EngineCore
    serving: Serving


def assemble(
    config: EngineConfig, server: HTTPServer, port: int, on_failure: Callable[[str], None] = lambda reason: None
) -> Engine:
    """Load the model and build everything around it; `port` is the one bound. `on_failure` is told, on another thread,
    if KV can no longer be exchanged.

    Raises ModelError or StartError.
    """
    started = time.monotonic()
    try:
        seals = SealKeys.from_settings(config.seal_key, config.seal_key_file)
    except ValueError as error:
        raise StartError(str(error)) from None
    if seals is None and (config.kv_transfer_enabled or config.ec_transfer_enabled) and not is_loopback(config.host):
        logger.warning("no seal_key: who reaches this engine may name other engines' memory and bypass its template")
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    torch.set_num_threads(choose_threads(config))
    if config.quantization is not None and device.type != "cpu":
        raise StartError(f"--quantization {config.quantization} is for CPUs; leave it out, or give --device cpu")
    model = load_model(config.model, dtype=dtype, quantization=config.quantization, vision_only=config.role == "encode")
    if config.chat_template is not None:
        model.tokenizer.use_chat_template(config.chat_template)
    max_model_len = choose_max_model_len(config, model.config)
    inbox: SimpleQueue[Inbox] = SimpleQueue()
    name = config.served_model_name or model.name
    metrics = EngineMetrics(name, kv_transfer=config.kv_transfer_enabled)
    media = None
    if model.vision is not None:
        media = media_side(
            config,
            model.vision,
            width=model.config.hidden_size,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            inbox=inbox,
            port=port,
            on_failure=on_failure,
        )
        metrics.watch(media_readings(media.schedule, None if media.ec is None else media.ec.connector))
    if config.role == "encode":
        steps = _encoding(model, media, metrics)
    else:
        steps = _generating(config, model, media, dtype, device, metrics, inbox, port, on_failure)
    client = EngineClient(
        inbox, server.loop, capacity=config.max_num_seqs + config.max_num_queued_reqs, observer=metrics
    )
    serving = Serving(
        model_name=name,
        tokenizer=model.tokenizer,
        chat=_chat_format(config, model.tokenizer, max_model_len),
        client=client,
        metrics=metrics,
        inbox=inbox,
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        model_fingerprint=model.fingerprint,
        kv=steps.kv,
        ec=None if media is None else media.ec,
        sight=make_sight(config, model, max_model_len),
        seals=seals,
        max_logprobs=config.max_logprobs,
        priority_scheduling=config.scheduling_policy == "priority",
    )
    logger.info(
        "engine ready",
        extra={
            "model": name,
            "role": config.role,
            "port": port,
            "max_model_len": max_model_len,
            "kv_blocks": steps.num_blocks,
            "kv_mib": steps.num_blocks * steps.block_bytes >> 20,
            "encoder_blocks": 0 if media is None else media.schedule.cache.pool.num_blocks,
            "seconds": round(time.monotonic() - started, 1),
        },
    )
    core = EngineCore(steps.scheduler, steps.runner, steps.connector, inbox, client.emit, on_failure=client.fail)
    return Engine(core, serving)


@dataclass(frozen=True, slots=True)
class _Steps:
    """What the loop goes over."""

    scheduler: StepScheduler
    runner: StepRunner
    connector: Connector
    kv: KVSide | None = None
    num_blocks: int = 0
    block_bytes: int = 0


def _generating(
    config: EngineConfig,
    model: LoadedModel,
    media: MediaSide | None,
    dtype: torch.dtype,
    device: torch.device,
    metrics: EngineMetrics,
    inbox: SimpleQueue[Inbox],
    port: int,
    on_failure: Callable[[str], None],
) -> _Steps:
    layout = KVLayout(
        model.config.num_layers, model.config.num_kv_heads, model.config.head_dim, config.block_size, dtype
    )
    sizes = choose_sizes(config, model.config, layout, device)
    cache = KVCache(layout, sizes.num_blocks, device)
    encoder = None if media is None else media.encoder
    runner = Runner(model, cache, max_num_seqs=config.max_num_seqs, encoder=encoder)
    kv = _kv_side(config, cache, layout.fingerprint(model.fingerprint), metrics, inbox, port, on_failure)
    connector: Connector = NullConnector() if kv is None else kv.connector
    scheduler = Scheduler(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        pool=BlockPool(sizes.num_blocks),
        connector=connector,
        media=None if media is None else media.schedule,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=config.scheduling_policy,
    )
    metrics.watch(engine_readings(scheduler, model.tokenizer, None if kv is None else kv.connector))
    return _Steps(scheduler, runner, connector, kv, sizes.num_blocks, layout.block_bytes)


def _encoding(model: LoadedModel, media: MediaSide | None, metrics: EngineMetrics) -> _Steps:
    if media is None:
        raise StartError(f"--role encode: {model.name} takes no pictures")
    scheduler = EncodeScheduler(media.schedule)
    metrics.watch(encode_only_readings(scheduler, model.tokenizer))
    return _Steps(scheduler, EncodeRunner(media.encoder), NullConnector())


def _chat_format(config: EngineConfig, tokenizer: Tokenizer, max_model_len: int) -> ChatFormat:
    gives_template = config.chat_format == "auto" and config.chat_template is not None
    try:
        return choose_format(
            tokenizer,
            max_model_len=max_model_len,
            chat_format="template" if gives_template else config.chat_format,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
    except FormatError as error:
        raise StartError(f"chat_format {config.chat_format}: {error}") from None


def _kv_side(
    config: EngineConfig,
    cache: KVCache,
    kv_layout: str,
    metrics: EngineMetrics,
    inbox: SimpleQueue[Inbox],
    port: int,
    on_failure: Callable[[str], None],
) -> KVSide | None:
    if not config.kv_transfer_enabled or config.role == "encode":
        return None
    settings = config.kv_transfer_config.kv_connector_extra_config
    engine_id = str(uuid.uuid4())

    def tell(event: TransferEvent) -> None:
        metrics.transferred(event)
        inbox.put(event)

    transport, leases = start_transport(
        "kv",
        engine_id=engine_id,
        layout=kv_layout,
        base_address=cache.base_address,
        num_blocks=cache.num_blocks,
        block_bytes=cache.layout.block_bytes,
        device=cache.device,
        transfer_timeout=settings.transfer_timeout,
        handshake_timeout=settings.handshake_timeout,
        tell=tell,
        on_failure=on_failure,
    )
    connector = KVConnector(
        transport=transport,
        leases=leases,
        role=config.role,
        engine_id=engine_id,
        host=advertised_host(config),
        port=port,
        block_size=config.block_size,
        kv_layout=kv_layout,
        lease_seconds=settings.kv_lease_duration,
        load_failure_policy=config.kv_transfer_config.kv_load_failure_policy,
        bidirectional=settings.bidirectional_kv_xfer,
        recompute_threshold=settings.kv_recompute_threshold,
        offer_seconds=settings.decoder_kv_blocks_ttl,
    )
    return KVSide(engine_id, connector)
