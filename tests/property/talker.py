"""A tiny random model that talks text, in a way that makes histories interesting.

Of the tokens it may say, many pairs have a token of their own for the two together: what it samples is then not how its
text is tokenized when it comes back in a history. Now and then it says half a character, which no client can send back
as it was. And it ends its answers by itself.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.tiny import IM_END, make_tiny, vocabulary

LETTERS = "Ġthandofisyuwlrem"
"""Single characters it says (Ġ is the space of a byte-level vocabulary)."""
HALF_CHARACTERS = (0xC3, 0xA9)
"""Bytes that are no text alone."""
LETTER, MERGED, HALF, END = 1.0, 0.8, 0.75, 1.2
"""How loud each kind of token is, against the others."""

# A message's reasoning and the tools are rendered, so that a history that loses or changes them has another prompt.
TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message['content'] or '' }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_talker(folder: Path) -> Path:
    """Write the model's folder; returns it."""
    make_tiny(folder, seed=7)
    loudness = _loudness()
    path = folder / "model.safetensors"
    weights = load_file(path)
    head = weights["lm_head.weight"]
    for token in range(head.shape[0]):
        head[token] *= loudness.get(token, 0.0)
    save_file(weights, path, metadata={"format": "pt"})
    (folder / "template.jinja").write_text(TEMPLATE)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def _loudness() -> dict[int, float]:
    tokens, merges = vocabulary()
    ids = {token: index for index, token in enumerate(tokens)}
    loud = {ids[left + right]: MERGED for left, right in merges}
    loud |= {ids[letter]: LETTER for letter in LETTERS}
    byte_tokens = {tokens.index(chr(byte)): HALF for byte in HALF_CHARACTERS}
    return loud | byte_tokens | {IM_END: END}
