"""What can be wrong with a picture that a request brings."""

from __future__ import annotations


class MediaError(ValueError):
    """Why a picture cannot be had, or has no place: one line, for the client."""


class SettingsError(MediaError):
    """What a request would change that it cannot; `field` is the name of it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class TooLarge(MediaError):
    """A picture that takes more placeholders than a prompt can have."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(f"the picture takes {num_rows} tokens")
        self.num_rows = num_rows
