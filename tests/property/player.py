"""Plays histories against the fleet, and checks every answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.property.client import Reply, ask
from tests.property.dialog import Chat, Dialog, make_dialog
from tests.property.fleet import Routers
from tests.property.ledger import Ledger, Visit
from tests.property.reference import Reference
from tests.property.script import UNKNOWN_MODEL, History, Turn, show
from tests.property.tally import Tally

SHARED_NAMES = 3
"""Names that conversations of several clients go by, by mistake."""
MAX_FAILURES = 3


class Failure(AssertionError):
    """What went wrong, and the history in which it did."""


@dataclass
class Player:
    routers: Routers
    reference: Reference
    ledger: Ledger = field(default_factory=Ledger)
    tally: Tally = field(default_factory=Tally)

    async def play_all(self, histories: Iterable[History], *, in_flight: int, seconds: float | None = None) -> None:
        """Play them, so many at a time, for at most `seconds`. Raises Failure with the first few that fail."""
        source, failures = iter(histories), list[str]()
        deadline = None if seconds is None else time.monotonic() + seconds

        async def work() -> None:
            while len(failures) < MAX_FAILURES and (deadline is None or time.monotonic() < deadline):
                history = next(source, None)
                if history is None:
                    return
                try:
                    await self.play(history)
                except Failure as failure:
                    failures.append(str(failure))

        async with asyncio.TaskGroup() as workers:
            for _ in range(in_flight):
                workers.create_task(work())
        failures += self.ledger.unexplained()[:MAX_FAILURES]
        assert not failures, "\n\n".join(failures)

    async def play(self, history: History) -> None:
        dialog = make_dialog(history, self.reference.tokenizer)
        answers: list[list[int]] = []
        self.tally["histories"] += 1
        for number, turn in enumerate(history.turns):
            try:
                await self._turn(history, turn, dialog, answers)
            except Exception as error:
                what = "; ".join(f"{type(one).__name__}: {one}" for one in _leaves(error))
                raise Failure(f"turn {number} of history {history.seed}: {what}\n{show(history)}") from error

    async def _turn(self, history: History, turn: Turn, dialog: Dialog, answers: list[list[int]]) -> None:
        if turn.pause:
            await asyncio.sleep(turn.pause)
        for edit in turn.edits:
            dialog.edit(edit)
            self.tally[f"edit {edit.kind}"] += 1
        dialog.shorten(turn)
        dialogs = [dialog] * turn.copies + ([dialog.rival(turn.rival)] if turn.rival else [])
        self.tally["parallel turns"] += len(dialogs) - 1
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._ask(history, turn, each, answers)) for each in dialogs]
        reply = asked[0].result()
        if reply is not None:
            dialog.answered(reply)

    async def _ask(self, history: History, turn: Turn, dialog: Dialog, answers: list[list[int]]) -> Reply | None:
        """One request, checked; its answer if it has one."""
        canonical = dialog.prompt_ids(turn)
        body, headers = request_of(history, turn, dialog)
        front = self.routers.fronts[history.topology][turn.router]
        self.tally["turns"] += 1
        with self.ledger.visit() as visit:
            reply = await ask(front, dialog.path(turn), body, headers, leave=turn.leave)
            if turn.model == UNKNOWN_MODEL:
                assert reply.status == 404, f"status {reply.status} for a model nobody serves: {reply.error}"
                self.tally["unknown models"] += 1
                return None
            if not reply.ended and turn.leave is not None:
                self._left(visit, turn, dialog, reply, canonical, answers)
                return None
            assert (reply.status, reply.error) == (200, None), f"status {reply.status}: {reply.error}"
            self.tally[f"answer of {dialog.path(turn)}"] += 1
            self._check(visit, turn, reply, canonical, front.url)
            answers.append([*reply.prompt_ids, *reply.token_ids])
        return reply

    def _check(self, visit: Visit, turn: Turn, reply: Reply, canonical: list[int], where: str) -> None:
        kind = check_answer(self.reference, turn, reply, canonical)
        self.tally[f"prompt {kind}"] += 1
        self.tally[f"answer {reply.finish_reason}"] += 1
        self._check_reuse(visit, turn, reply, where)

    def _check_reuse(self, visit: Visit, turn: Turn, reply: Reply, where: str) -> None:
        """Whatever was not computed for this prompt must be what some earlier request has in common with it."""
        explained, prompt = reply.explain, reply.prompt_ids
        reason, _, kv = str(explained.get("plan")).partition("; kv=")
        self.tally[f"plan {reason}"] += 1
        self.tally[f"kv {kv}"] += 1
        everyone, own = _scopes(turn)
        cached = (reply.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        pulled = int(explained.get("tokens-pulled", 0))
        about = f"of {len(prompt)} prompt tokens; turn at {where}: {show(turn)}, {explained}"
        self.ledger.check(visit, everyone, prompt, cached, f"{cached} tokens are said to be cached {about}")
        self.ledger.check(visit, own, prompt, pulled, f"{pulled} tokens were pulled {about}")
        self.tally["tokens of prompts"] += len(prompt)
        self.tally["tokens cached"] += cached
        self.tally["tokens pulled for turns"] += pulled
        self.tally["turns with a pull"] += pulled > 0
        # The last token sampled has no KV; but where a stop string ended the answer, more were sampled than count.
        computed = reply.token_ids if turn.stop else reply.token_ids[:-1]
        self.ledger.note(visit, [*prompt, *computed], everyone, own)

    def _left(
        self, visit: Visit, turn: Turn, dialog: Dialog, reply: Reply, canonical: list[int], answers: list[list[int]]
    ) -> None:
        """The client has gone; how far the engines got it does not know. What it saw must be right all the same."""
        self.tally["clients gone"] += 1
        self.tally["tokens of prompts of clients gone"] += len(canonical)
        possible = [canonical]
        if reply.prompt_ids:
            self.reference.prompt_kind(reply.prompt_ids, canonical)
            self.reference.check_tokens(reply.prompt_ids, reply.token_ids)
            possible = [reply.prompt_ids]
        elif isinstance(dialog, Chat):
            text, reference = dialog.text(turn), self.reference
            rests = [(ids, reference.is_text_prefix(ids, text)) for ids in answers]
            encode = reference.tokenizer.encode
            possible += [[*ids, *encode(rest, add_special_tokens=False)] for ids, rest in rests if rest]
        for prompt in possible:
            self.ledger.note(visit, [*prompt, *self.reference.greedy(prompt, turn.max_tokens)], *_scopes(turn))


def check_answer(reference: Reference, turn: Turn, reply: Reply, canonical: list[int]) -> str:
    """Raise AssertionError unless it is the whole answer that a cold engine gives, told as it must be. Returns the kind
    of prompt that it is to."""
    prompt, answer = reply.prompt_ids, reply.token_ids
    assert reply.ended, "the stream ends without [DONE]"
    assert not reply.leaked, "transfer params reach the client"
    kind = reference.prompt_kind(prompt, canonical)
    reference.check_tokens(prompt, answer)
    reference.check_end(
        answer,
        text=reply.text,
        finish_reason=reply.finish_reason,
        max_tokens=turn.max_tokens,
        stop=turn.stop,
        ignore_eos=turn.ignore_eos,
    )
    counted = reply.usage.get("prompt_tokens"), reply.usage.get("completion_tokens")
    assert counted == (len(prompt), len(answer)), f"usage says {counted}: {len(prompt)} and {len(answer)} tokens"
    return kind


def request_of(history: History, turn: Turn, dialog: Dialog) -> tuple[dict[str, Any], dict[str, str]]:
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": turn.max_tokens}
    if turn.stop:
        sampling["stop"] = list(turn.stop)
    if turn.ignore_eos:
        sampling["ignore_eos"] = True
    body = dialog.body(turn, sampling) | {"model": turn.model or "tiny", "return_token_ids": True}
    headers = {"X-Backhaul-Explain": "1"}
    if turn.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if turn.news:
        body["seventh_sense"] = True
    if turn.salt:
        body["cache_salt"] = turn.salt
    if turn.tenant:
        headers["Authorization"] = f"Bearer {turn.tenant}"
    match history.identity:
        case "body":
            body["conversation_id"] = f"history {history.seed}"
        case "shared":
            body["conversation_id"] = f"shared {history.seed % SHARED_NAMES}"
        case "X-Conversation-Id" | "X-Session-Id" as header:
            headers[header] = f"history-{history.seed}"
    return body, headers


def _leaves(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _scopes(turn: Turn) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Who may have computed what an engine has cached, and who what it pulls for a conversation."""
    return ("everyone", turn.salt), ("own", turn.tenant, turn.salt)
