"""A SentencePiece BPE vocabulary, as GGUF files of Llama 2, TinyLlama and Mistral hold, as a `tokenizers` pipeline.

SentencePiece joins the neighbours whose union has the best score; `tokenizers` wants a list of merges in that order.
"""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers

SPACE = "▁"


def build_pieces(
    tokens: list[str], scores: list[float], unknown: str | None, *, space_prefix: bool
) -> tokenizers.Tokenizer:
    """A tokenizer that makes of `tokens` with these `scores` what SentencePiece makes of them.

    space_prefix: every text starts with a space, which decoding takes away again. Characters without a token become
    their UTF-8 bytes.
    """
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    model = models.BPE(vocabulary, _merges(vocabulary, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    replace_spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace_spaces])
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = replace_spaces
        backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best token's first."""
    found = []
    for token, id_ in vocabulary.items():
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[id_], vocabulary[left], left, right))
    return [(left, right) for _, _, left, right in sorted(found)]
