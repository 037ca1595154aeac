"""Why an engine does not start."""

from __future__ import annotations


class StartError(Exception):
    """The engine cannot be started like this; the message is one line that says what to change."""
