"""Say which optional parts of the installation a command needs."""

from __future__ import annotations

import importlib.util
from typing import Literal

from backhaul.errors import CommandError

Extra = Literal["engine", "embedded"]

_MODULES: dict[Extra, tuple[str, ...]] = {
    "engine": ("torch", "numpy", "tokenizers", "safetensors", "gguf", "jinja2"),
    "embedded": (),  # a Valkey found on PATH will do, and plain lines instead of a live display
}


def require(*extras: Extra, command: str) -> None:
    """Raise CommandError unless what `extras` bring is installed. Imports nothing."""
    missing = [module for extra in extras for module in _MODULES[extra] if importlib.util.find_spec(module) is None]
    if missing:
        install = f"pip install '.[{','.join(extras)}]' in Backhaul's folder"
        raise CommandError(f"`backhaul {command}` needs {', '.join(missing)}: {install}")
