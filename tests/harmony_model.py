"""The tiny model with the special tokens of the Harmony format, in place of its last words."""

from __future__ import annotations

import json
from pathlib import Path

from engine.formats.harmony_prompt import Marker
from tests.tiny import ENDOFTEXT, make_tiny

IDS = {marker: ENDOFTEXT - len(Marker) + index for index, marker in enumerate(Marker)}


def make_tiny_harmony(folder: Path) -> Path:
    """Write the model's folder. Its vocabulary is as large as that of make_tiny()."""
    make_tiny(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    words = {token: id_ for token, id_ in model["vocab"].items() if id_ not in IDS.values()}
    model["vocab"] = words | {marker.value: id_ for marker, id_ in IDS.items()}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in words]
    added += [added[0] | {"id": id_, "content": marker.value} for marker, id_ in IDS.items()]
    path.write_text(json.dumps(tokenizer))
    return folder
