"""The one error a model that cannot be loaded gives."""

from __future__ import annotations


class ModelError(Exception):
    """Why a model cannot be loaded: one line, for the user, saying what is wrong with which file."""
