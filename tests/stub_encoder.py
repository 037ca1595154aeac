"""An encode engine without a model: names media by their content, encodes each once, and says where that lies."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.stub_engine import StubEngine

Told = dict[str, dict[str, Any]]

MODALITIES = {"image_url": "image", "audio_url": "audio", "input_audio": "audio", "video_url": "video"}


@dataclass
class StubEncoder(StubEngine):
    role: str = "encode"
    encoded: Counter[str] = field(default_factory=Counter)
    """Identifiers, by how often it has encoded them: once, unless `encoded` is cleared."""
    told: Callable[[Told], Any] = lambda told: told
    """What becomes of its answer's params."""

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        items: Told = {}
        for index, part in enumerate(body["messages"][0]["content"]):
            name = identifier(part, body)
            if name not in self.encoded:
                self.encoded[name] += 1
            fresh = {
                "modality": MODALITIES[part["type"]],
                "metadata": {"grid": [[index + 1, 2]]},
                "item_indices": [],
                "peer_host": self.url,
                "peer_port": 5601,
                "size_bytes": 64,
                "shape": [4, 4],
            }
            items.setdefault(name, fresh)["item_indices"].append(index)
        return super().whole(body) | {"kv_transfer_params": None, "ec_transfer_params": self.told(items)}

    def media(self) -> list[list[str]]:
        """What it was asked to encode, request by request."""
        return [[content(part) for part in body["messages"][0]["content"]] for body in self.bodies]


def content(part: dict[str, Any]) -> str:
    held = part[part["type"]]
    return str(held.get("url") or held["data"])


def identifier(part: dict[str, Any], body: dict[str, Any]) -> str:
    seen = [content(part), body.get("mm_processor_kwargs")]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]


def picture(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}, **more}


def named(*names: str, **settings: Any) -> set[str]:
    """The identifiers of pictures."""
    return {identifier(picture(name), settings) for name in names}


def looking_at(*pictures: dict[str, Any], text: str = "What is it?", **body: Any) -> dict[str, Any]:
    """A chat about pictures, or other media."""
    return {
        "model": "m",
        "messages": [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}],
        **body,
    }
