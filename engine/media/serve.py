"""What a loaded model that takes pictures is served with, as the settings say."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.errors import StartError
from engine.media.address import networks
from engine.media.fetch import Fetcher
from engine.media.sight import Sight
from engine.model.loader import LoadedModel


def make_sight(config: EngineConfig, model: LoadedModel, max_model_len: int) -> Sight | None:
    """None for a model that takes none. Raises StartError."""
    if model.vision is None:
        return None
    try:
        # Only here: an engine whose model sees nothing needs no Pillow.
        from engine.media.processor import Processor, ProcessorLimits
    except ImportError as error:
        raise StartError(f"Pillow cannot be imported ({error}): pip install '.[vision]' in Backhaul's folder") from None
    try:
        allowed = networks(config.allowed_media_networks)
    except ValueError as error:
        raise StartError(f"--allowed-media-networks: {error}") from None
    limits = ProcessorLimits(
        max_pixels=config.max_image_pixels,
        max_rows=max_model_len,
        cache_bytes=int(config.mm_processor_cache_gb * (1 << 30)),
    )
    hosts = {host.lower() for host in (*config.allowed_media_hosts, *config.allowed_media_domains)}
    return Sight(
        processor=Processor(model.vision, limits),
        fetcher=Fetcher(hosts, allowed, config.max_media_bytes, config.media_fetch_timeout),
        max_pictures=config.limit_mm_per_prompt.image,
        max_bytes=config.max_media_bytes,
        takes_embeds=config.enable_mm_embeds,
    )
