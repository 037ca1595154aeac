"""Known token ids in place of canonical ones, where they spell the same text.

What a model sampled is often not how its tokenizer would cut the same text: the ids of an answer, sent back as a
message, differ from the ids whose KV exists, and reuse would stop at the first odd token. So the ids a conversation had
up to now are put back into the prompt of its next turn, but only where that provably changes nothing else:

- Texts are compared token by token as the decoder spells them, to the byte. No part of a character is ever rounded to
  a replacement character.
- An added token (`<|im_end|>`) is a sign of its own, equal to itself only, and never to a text that reads the same.
  The same goes for the unknown token, which hides what it stands for, and for every token of a vocabulary whose
  spelling is not understood: there, nothing differs in ids and is equal in text.
- Known and canonical ids are exchanged at an edge that both have, and what comes before it spells the same in both. It
  lies beside an added token, or where the known ids end: so a stretch between two added tokens, such as the text of a
  message, is taken as known or left canonical, never mixed out of an old and an edited text.

What follows the last such edge stays canonical. The result spells what the canonical ids spell, and begins with more
of the known ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate

import tokenizers
from tokenizers import decoders, models

from engine.detokenizer import bytes_of_piece, bytes_of_token

_SIGN = "\u0100"
"""Characters below stand for a byte each, those from here on for one whole token. There are enough for a million."""
_PIECES = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_FIRST = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class Spelling(dict[int, str]):
    """What each token of a vocabulary adds to a text, wherever it stands: one character per byte, or one for the token
    as a whole. Filled as tokens are asked for; thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._bytes_of = _token_bytes(backend)
        self._signs = set(backend.get_added_tokens_decoder())
        unknown = getattr(backend.model, "unk_token", None)
        if unknown is not None and (unknown_id := backend.token_to_id(unknown)) is not None:
            self._signs.add(unknown_id)

    def __missing__(self, token_id: int) -> str:
        spelled = self[token_id] = self._spell(token_id) or chr(ord(_SIGN) + token_id)
        return spelled

    def _spell(self, token_id: int) -> str:
        if self._bytes_of is None or token_id in self._signs:
            return ""
        token: str | None = self._backend.id_to_token(token_id)
        return "" if token is None else self._bytes_of(token).decode("latin-1")


def splice(canonical: list[int], known: Sequence[int], spelling: Spelling) -> tuple[list[int], int]:
    """(the ids to use for the text of `canonical`, how many of `known` stand in them for canonical ones).

    Takes time linear in the number of ids, whatever they are.
    """
    start = _common_prefix(canonical, known)
    theirs, ours = [list(map(spelling.__getitem__, ids[start:])) for ids in (known, canonical)]
    their_text, our_text = "".join(theirs), "".join(ours)
    num_known = {end: number for number, end in enumerate(accumulate(map(len, theirs)), 1)}
    num_taken = num_replaced = equal = end = 0
    for number, (token, following) in enumerate(zip(ours, [*ours[1:], ""], strict=False), 1):
        end += len(token)
        if end > len(their_text):
            break
        at_edge = token >= _SIGN or following >= _SIGN or end == len(their_text)
        if not at_edge or end not in num_known:
            continue
        if their_text[equal:end] != our_text[equal:end]:
            break
        num_taken, num_replaced, equal = num_known[end], number, end
    if not num_taken:
        return canonical, 0
    return [*known[: start + num_taken], *canonical[start + num_replaced :]], num_taken


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _token_bytes(backend: tokenizers.Tokenizer) -> Callable[[str], bytes] | None:
    """The bytes of a token as the vocabulary writes it; None if they are not known to be the same in every context."""
    model = backend.model
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    decoder = backend.decoder
    if isinstance(decoder, decoders.ByteLevel):
        return bytes_of_token
    steps = json.loads(decoder.__getstate__()).get("decoders") if isinstance(decoder, decoders.Sequence) else None
    # The first token of a text may lose its leading space: the same one, as long as the texts are compared with it.
    return bytes_of_piece if model.byte_fallback and steps in (_PIECES, [*_PIECES, _STRIP_FIRST]) else None
