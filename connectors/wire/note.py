"""The token note: what our decode engine tells the router of a turn's tokens, apart from what the client gets.

A request with `"token_note": true` has its answer's first event carry `{"prompt_token_ids", "num_cached_tokens"}` under
that name, and the last one `{"token_ids"}`; an answer in one piece carries all three. So the events between them need
no look on their way, where `return_token_ids` would put ids into each. With `"token_note": "output"`, from who has sent
the prompt as ids and knows them, `prompt_token_ids` is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

TOKEN_NOTE: Final = "token_note"
LEG_HEADER: Final = "X-Backhaul-Leg"
"""A name that the router makes up for the legs of one turn, by which it may end them: request ids are the clients' own,
and two may have the same."""
OUTPUT: Final = "output"
"""What to ask for where the prompt's ids are known."""


def first_note(asked: object, prompt_token_ids: Sequence[int], num_cached_tokens: int) -> dict[str, Any]:
    """`asked`: the request's `token_note`."""
    told = {} if asked == OUTPUT else {"prompt_token_ids": list(prompt_token_ids)}
    return {**told, "num_cached_tokens": num_cached_tokens}


def last_note(token_ids: Sequence[int]) -> dict[str, Any]:
    return {"token_ids": list(token_ids)}


def note_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The note in an event or answer, empty if it has none."""
    note = body.get(TOKEN_NOTE)
    return note if isinstance(note, dict) else {}
