"""What clients may not say: what only router and engines say to each other, and an engine would believe.

It would let a client read another's KV, or bypass the chat template.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from connectors.wire.note import TOKEN_NOTE
from connectors.wire.openai import bad_request
from router.headers import EXPLAIN, OURS

TRANSFER_KEYS: Final = ("kv_transfer_params", "ec_transfer_params")
_AT_THE_TOP: Final = (*TRANSFER_KEYS, TOKEN_NOTE, "prompt_token_ids", "known_token_ids")
# Where engines look for more; what else is there is the client's affair, but for what ends like this.
_INSIDE: Final = ("vllm_xargs", "sampling_params")
_EXTRA: Final = "extra_args"
_SUFFIX: Final = "transfer_params"
_ANYWHERE: Final = frozenset({*_AT_THE_TOP, *_INSIDE, _EXTRA})


def without_engine_talk(body: dict[str, Any], headers: Iterable[str] = (), *, refuse: bool = False) -> dict[str, Any]:
    """The client's body without it. With `refuse`: raises APIError 400 that names the first thing found instead, in the
    body or among the names of its headers (which do not go on to engines anyway)."""
    if not refuse and body.keys().isdisjoint(_ANYWHERE):  # as it should be
        return body
    found = [key for key in _AT_THE_TOP if body.get(key) is not None]
    found += [name for name in headers if name.lower().startswith(OURS) and name.lower() != EXPLAIN.lower()]
    clean = {key: value for key, value in body.items() if key not in _AT_THE_TOP}
    for holder in _INSIDE:
        inner = clean.get(holder)
        if not isinstance(inner, dict):
            continue
        dropped = [key for key in inner if key.endswith(_SUFFIX) or key == _EXTRA]
        if dropped:
            found += [f"{holder}.{key}" for key in dropped if inner[key] is not None]
            clean[holder] = {key: value for key, value in inner.items() if key not in dropped}
    if _EXTRA in clean:
        found += [_EXTRA] if clean[_EXTRA] is not None else []
        del clean[_EXTRA]
    if refuse and found:
        raise bad_request(f"{found[0]}: only the router may say this to an engine; leave it out.", param=found[0])
    return clean
