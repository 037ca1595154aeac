"""Random histories, as data: what a client does, turn by turn. The same seed gives the same history.

A failure prints its history as Python, so that it can be pasted, made smaller by hand and run again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any, Literal

Kind = Literal["chat", "tokens"]
Topology = Literal["1P1D", "2P2D"]
Identity = Literal["none", "body", "X-Conversation-Id", "X-Session-Id", "shared"]

WORDS = (" the", " and", " of", " to", " is", " that", " you", " hello", " world", " what", " have", "ing", "tion",
         "ment", " red", ".", "\n", "é", "<|im_end|>")  # fmt: skip
SYSTEMS = ("", "You are to the world", "You have the world with you.\nhello", "Answer é in what is the world and that")
STOPS = ((" w",), ("th", "ou"), ("s w", "zzz"), ("you",))
UNKNOWN_MODEL = "nobody"
VARIANTS = ("next", "change", "drop", "insert", "forget", "back", "branch", "regenerate", "system", "think", "unthink",
            "reason", "unreason", "space", "parts", "continue")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Edit:
    """One change a client makes to its history before it asks again. What there is nothing of is left alone.

    say: add a user message · change, drop, insert: the message (or token) `at` · forget: keep only the last `at`
    messages · back: take the last `at` away · branch: go on from where turn `at` ended · regenerate: ask again for
    the last answer · system: another system prompt · think, unthink: reasoning in the text of the last answer, and
    out of all · reason, unreason: the same as a field · space: white space behind the last answer · parts: the last
    question as a list of content parts · continue: have the last answer gone on with
    """

    kind: str
    at: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    edits: tuple[Edit, ...]
    pause: float = 0.0
    """Seconds before it."""
    router: int = 0
    stream: bool = False
    max_tokens: int = 10
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    tools: int = 0
    """Which set of tools; 0: none."""
    salt: str = ""
    tenant: str = ""
    model: str = ""
    """Empty: the one there is."""
    copies: int = 1
    """The same request so many times at once."""
    rival: str = ""
    """Another last question for the same history, asked at the same time."""
    leave: float | None = None
    """The client leaves: after so many events of a stream, or so many milliseconds."""
    news: bool = False
    """The request has a field that the router does not know: it may change the prompt, for all it can tell."""
    as_text: bool = False
    """A completion's prompt as text instead of ids."""
    newer: bool = False
    """By the newer endpoint for the same: a chat by that for responses, token ids by that which generates them."""


@dataclass(frozen=True, slots=True)
class History:
    seed: int
    kind: Kind
    topology: Topology
    identity: Identity
    turns: tuple[Turn, ...]


def history(seed: int) -> History:
    rng = random.Random(f"history {seed}")
    kind: Kind = "chat" if rng.random() < 0.75 else "tokens"
    identities: list[Identity] = ["none", "none", "none", "body", "X-Conversation-Id", "X-Session-Id", "shared"]
    identity = rng.choice(identities if kind == "chat" else identities[3:])
    topology: Topology = rng.choice(("1P1D", "2P2D"))
    world = _World(rng)
    first = world.turn((Edit("system", text=rng.choice(SYSTEMS)), Edit("say", text=world.text(6, 30))))
    later = [world.turn(world.edits()) for _ in range(rng.choice((2, 3, 3, 4, 4, 5, 7)))]
    return History(seed, kind, topology, identity, (first, *later))


class _World:
    """What one client tends to do."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._calm = rng.random() < 0.35
        """Plain turns only: what most conversations are, and where reuse must work."""
        self._router = rng.randrange(2)
        self._tools = rng.choice((0, 0, 0, 1))
        self._salt = rng.choice(("", "", "", "salt", "pepper"))
        self._tenant = rng.choice(("", "", "alice", "bob"))
        self._stream = rng.random() < 0.5
        self._news = rng.random() < 0.12
        self._newer = rng.random() < 0.3

    def text(self, least: int, most: int) -> str:
        return "".join(self._rng.choices(WORDS, k=self._rng.randint(least, most)))

    def edits(self) -> tuple[Edit, ...]:
        rng = self._rng
        say = Edit("say", text=self.text(1, 14))
        kind = "next" if self._calm or rng.random() < 0.35 else rng.choice(VARIANTS)
        if kind == "next":
            return (say,)
        if kind in ("regenerate", "continue"):
            return (Edit(kind),)
        if kind == "system":
            return (Edit("system", text=rng.choice(SYSTEMS)), say)
        if kind == "parts":
            return (say, Edit("parts"))
        edit = Edit(
            kind, at=rng.randrange(1 << 16) if kind in ("change", "drop", "insert", "branch") else rng.randint(1, 4)
        )
        if kind in ("change", "insert", "think", "reason"):
            edit = Edit(kind, edit.at, self.text(1, 8))
        return (edit, say) if rng.random() < 0.8 else (edit,)

    def turn(self, edits: tuple[Edit, ...]) -> Turn:
        rng, odd = self._rng, self._rng.random() >= (0.9 if self._calm else 0.55)
        turn: dict[str, Any] = {
            "edits": edits,
            "router": rng.randrange(2) if rng.random() < 0.5 else self._router,
            "stream": rng.random() < 0.5 if odd else self._stream,
            "max_tokens": rng.choice((1, 1, 2, 6, 10, 40, 60)) if odd else rng.choice((8, 12, 16)),
            "tools": self._tools,
            "salt": self._salt,
            "tenant": self._tenant,
            "news": self._news,
            "newer": self._newer,
        }
        if rng.random() < 0.12:
            turn["pause"] = rng.choice((0.1, 0.5, 0.8, 1.5, 2.2))
        if odd:
            oddity = rng.choice(
                ("stop", "eos", "tools", "salt", "tenant", "model", "copies", "rival", "leave", "news", "text", "newer")
            )
            changes: dict[str, dict[str, Any]] = {
                "stop": {"stop": rng.choice(STOPS)},
                "eos": {"ignore_eos": True},
                "tools": {"tools": rng.randrange(3)},
                "salt": {"salt": rng.choice(("", "salt", "pepper"))},
                "tenant": {"tenant": rng.choice(("", "alice", "bob"))},
                "model": {"model": UNKNOWN_MODEL},
                "copies": {"copies": rng.choice((2, 2, 3))},
                "rival": {"rival": self.text(1, 8)},
                "leave": {"leave": rng.choice((1, 2, 5) if turn["stream"] else (2, 10, 25, 60))},
                "news": {"news": True},
                "text": {"as_text": True},
                "newer": {"newer": not self._newer},
            }
            turn |= changes[oddity]
        return Turn(**turn)


def show(value: object, indent: str = "") -> str:
    """The history as Python that makes it again, defaults left out, one line a turn."""
    if isinstance(value, History):
        turns = "".join(f"\n{indent}    {show(turn)}," for turn in value.turns)
        head = f"{value.seed}, {value.kind!r}, {value.topology!r}, {value.identity!r}"
        return f"History({head}, ({turns}\n{indent}))"
    if isinstance(value, Turn | Edit):
        given = [f for f in fields(value) if getattr(value, f.name) != f.default]
        return f"{type(value).__name__}({', '.join(f'{f.name}={show(getattr(value, f.name))}' for f in given)})"
    if isinstance(value, tuple):
        return f"({''.join(f'{show(item)}, ' for item in value).removesuffix(' ')})"
    return repr(value)
