"""Conversations whose clients do to their history what clients do: go on, edit, branch, shorten, start over.

A script asks by calling `say` with the messages and gets the text of the answer; who answers, and whether it is right,
is the caller's business. All requests of a script are of one conversation, as far as their client says.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from bench.chat import WORDS, Message

Say = Callable[[list[Message]], Awaitable[str]]
Script = Callable[[Say, random.Random], Awaitable[None]]

NAMES: Final = ("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Henry")
TURNS: Final = 3


def told(chooser: random.Random, name: str, words: int = 60) -> Message:
    things = " ".join(chooser.choice(WORDS) for _ in range(words))
    return {"role": "user", "content": f"My name is {name}. These are my things: {things}. What is my name?"}


def asked(chooser: random.Random, words: int = 20) -> Message:
    things = " ".join(chooser.choice(WORDS) for _ in range(words))
    return {"role": "user", "content": f"Now there are these too: {things}. Who am I, and what do I have?"}


async def _begun(say: Say, chooser: random.Random, turns: int = 2) -> list[Message]:
    """A conversation of so many turns, the last answer included."""
    messages = [told(chooser, chooser.choice(NAMES))]
    for turn in range(turns):
        if turn:
            messages.append(asked(chooser))
        messages.append({"role": "assistant", "content": await say(list(messages))})
    return messages


async def plain(say: Say, chooser: random.Random) -> None:
    """Every turn adds to the last."""
    await _begun(say, chooser, TURNS)


async def edited(say: Say, chooser: random.Random) -> None:
    """The first message is changed: as many words, other things, another name."""
    messages = await _begun(say, chooser)
    messages[0] = told(chooser, chooser.choice(NAMES))
    await say([*messages, asked(chooser)])


async def edited_late(say: Say, chooser: random.Random) -> None:
    """The second question is changed, and its answer kept."""
    messages = await _begun(say, chooser)
    messages[2] = asked(chooser)
    await say([*messages, asked(chooser)])


async def branched(say: Say, chooser: random.Random) -> None:
    """Back to the first answer, and another question there; then on from the branch that was left."""
    messages = await _begun(say, chooser)
    await say([*messages[:2], asked(chooser)])
    await say([*messages, asked(chooser)])


async def regenerated(say: Say, chooser: random.Random) -> None:
    """The last question once more."""
    messages = await _begun(say, chooser)
    await say(messages[:-1])
    await say([*messages, asked(chooser)])


async def stripped(say: Say, chooser: random.Random) -> None:
    """Of each answer only the second half comes back, as when thoughts are left out of the history."""
    messages = await _begun(say, chooser)
    for message in messages:
        if message["role"] == "assistant":
            message["content"] = message["content"][len(message["content"]) // 2 :]
    await say([*messages, asked(chooser)])


async def shortened(say: Say, chooser: random.Random) -> None:
    """The oldest turn is dropped, as when a history grows too long."""
    messages = await _begun(say, chooser)
    await say([*messages[2:], asked(chooser)])


async def instructed(say: Say, chooser: random.Random) -> None:
    """System instructions come in front of all there was."""
    messages = await _begun(say, chooser)
    await say([{"role": "system", "content": "Answer like a pirate, in rhymes."}, *messages, asked(chooser)])


async def replaced(say: Say, chooser: random.Random) -> None:
    """Another conversation altogether, under the same name."""
    await _begun(say, chooser)
    await _begun(say, chooser)


SCRIPTS: Final[Mapping[str, Script]] = {
    script.__name__: script
    for script in (plain, edited, edited_late, branched, regenerated, stripped, shortened, instructed, replaced)
}
