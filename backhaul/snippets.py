"""What to paste to try a running stack."""

from __future__ import annotations

import json
import shlex
import shutil
import sys


def announcement(base_url: str, model: str, page_url: str, *, sees: bool = False) -> str:
    """`page_url` is that of the status page; `sees`: the model takes pictures."""
    return f"""
Backhaul is ready.

  base URL   {base_url}
  model      {model}
  status     {page_url}/ in a browser

Try it:

{_indented(curl(base_url, model))}

or in Python, with the openai package:

{_indented(python(base_url, model))}

or in this terminal's neighbour:

    {command()} chat --base-url {base_url}{" --image FILE" if sees else ""}

Ctrl-C stops everything.
"""


def command() -> str:
    """How this program is called from the current folder."""
    return "backhaul" if shutil.which("backhaul") else f"{shlex.quote(sys.executable)} -m backhaul"


def curl(base_url: str, model: str) -> str:
    # With a limit: a small model may otherwise ramble on until its context is full.
    chat = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 100}
    body = json.dumps(chat, ensure_ascii=False)
    quoted = body.replace("'", "'\\''")
    return f"curl {base_url}/chat/completions -H 'Content-Type: application/json' -d '{quoted}'"


def python(base_url: str, model: str) -> str:
    return f"""from openai import OpenAI

client = OpenAI(base_url={base_url!r}, api_key="unused")
answer = client.chat.completions.create(
    model={model!r}, messages=[{{"role": "user", "content": "Hello!"}}], max_tokens=100
)
print(answer.choices[0].message.content)"""


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
