"""The cold single engine all answers are compared with, and what a prompt's ids may be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.attention.base import Prefill, Step
from engine.output import OutputText
from tests.running import BLOCK_SIZE, make_machine
from tests.tiny import SPECIAL_TOKENS

TIE = 1e-5
"""Logits that are closer are one to the reference: which is larger depends on the shape of the batch."""
MAX_TOKENS = 1024


class Mismatch(AssertionError):
    """An answer that a cold single engine does not give, or a prompt that the request does not have."""


class Reference:
    def __init__(self, folder: Path) -> None:
        self._machine = make_machine(folder, num_blocks=MAX_TOKENS // BLOCK_SIZE)
        self.tokenizer = self._machine.loaded.tokenizer
        self.eos = self.tokenizer.eos_token_ids
        self.num_ties = 0
        self._known: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()

    def check_tokens(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Each token of the answer must be the likeliest after those before it. One forward pass over all of it says
        so: by induction, that is what greedy decoding gives."""
        key = tuple(prompt), tuple(answer)
        if key in self._known:
            return
        logits = self._logits([*prompt, *answer], len(prompt))
        best = logits.max(dim=-1)
        for position, token in enumerate(answer):
            behind = float(best.values[position] - logits[position, token])
            if behind >= TIE:
                raise Mismatch(
                    f"answer token {position} is {token}, a cold engine says {int(best.indices[position])} (logits "
                    f"{behind:.6f} apart) after a prompt of {len(prompt)} tokens; the answer is {list(answer)}"
                )
            self.num_ties += behind > 0
        self._known.add(key)

    def check_end(
        self,
        answer: Sequence[int],
        *,
        text: str,
        finish_reason: str | None,
        max_tokens: int,
        stop: Sequence[str],
        ignore_eos: bool,
    ) -> None:
        """The answer ends where it must, neither earlier nor later, says why, and its text is that of its tokens."""
        output = OutputText(self.tokenizer.stream(skip_special_tokens=True), stop=stop)
        parts, expected = [], None
        for position, token in enumerate(answer):
            if expected is not None:
                raise Mismatch(
                    f"the answer goes on after {position} tokens, where it ends ({expected}): {list(answer)}"
                )
            ends = token in self.eos and not ignore_eos
            last = ends or position + 1 == max_tokens
            delta = output.push([token], last=last, hide_last=ends)
            parts.append(delta.text)
            if ends or delta.stop_string is not None:
                expected = "stop"
            elif last:
                expected = "length"
        if (finish_reason, text) != (expected, "".join(parts)):
            raise Mismatch(
                f"the answer ends by {finish_reason} with {text!r}, it should by {expected} with {''.join(parts)!r}: "
                f"{list(answer)}, max_tokens={max_tokens} stop={stop}"
            )

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """What a cold engine answers, stop tokens and strings not looked at."""
        ids = list(prompt)
        for _ in range(max_tokens):
            ids.append(int(self._logits([*ids, 0], len(ids))[0].argmax()))
        return ids[len(prompt) :]

    def check_beginning(self, prompt: Sequence[int], text: str, max_tokens: int) -> None:
        """The text must be how a cold engine's answer begins, of which the tokens are not known."""
        open_ends: list[list[int]] = [[]]
        while open_ends:
            answer = open_ends.pop()
            said = self.tokenizer.decode(answer, skip_special_tokens=True)
            if said.startswith(text):
                return
            if len(answer) < max_tokens and text.startswith(said.rstrip("\ufffd")):  # half a character, as yet
                logits = self._logits([*prompt, *answer, 0], len(prompt) + len(answer))[0]
                likeliest = (logits > logits.max() - TIE).nonzero().flatten().tolist()
                open_ends += [[*answer, token] for token in likeliest]
        raise Mismatch(f"a cold engine's answer to a prompt of {len(prompt)} tokens does not begin with {text!r}")

    def prompt_kind(self, used: Sequence[int], canonical: Sequence[int]) -> str:
        """`canonical`; or `spliced`: other tokens for the same text, special ones in the same places."""
        if list(used) == list(canonical):
            return "canonical"
        if self._content(used) == self._content(canonical):
            return "spliced"
        same = next((i for i, (a, b) in enumerate(zip(used, canonical, strict=False)) if a != b), "the end")
        raise Mismatch(
            f"the prompt used ({len(used)} tokens) is another than that of the request ({len(canonical)}) from "
            f"{same} on: {self.tokenizer.decode(used, skip_special_tokens=False)!r} instead of "
            f"{self.tokenizer.decode(canonical, skip_special_tokens=False)!r}"
        )

    def _content(self, ids: Sequence[int]) -> list[bytes | int]:
        """The bytes between special tokens, and those tokens."""
        content: list[bytes | int] = [b""]
        for token in ids:
            if token in _SPECIAL:
                content += [token, b""]
            else:
                content[-1] += self.tokenizer.token_bytes(token)  # type: ignore[operator]
        return content

    def is_text_prefix(self, ids: Sequence[int], text: str) -> str | None:
        """What follows in `text` after the text of these ids, if it begins with that."""
        beginning = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text[len(beginning) :] if text.startswith(beginning) else None

    @torch.inference_mode()
    def _logits(self, ids: Sequence[int], first: int) -> Tensor:
        """[len(ids) - first, vocab]: the logits from which the tokens from `first` on are chosen. Nothing is reused."""
        count = len(ids) - 1
        positions = torch.arange(count)
        num_blocks = -(-count // BLOCK_SIZE)
        step = Step(
            positions=positions,
            slots=positions,
            block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
            context_lens=torch.tensor([count], dtype=torch.int32),
            num_decodes=int(count == 1),
            prefills=(Prefill(0, 0, count, count),) if count > 1 else (),
        )
        runner = self._machine.runner
        return runner.model.forward(torch.tensor(ids[:-1]), step, positions[first - 1 :])


_SPECIAL = frozenset(SPECIAL_TOKENS.values())
