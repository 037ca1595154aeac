"""Thoughts as DeepSeek-R1, Qwen 3 and many others write them: `<think>…</think>` before the answer.

Some prompts end in the opening tag, so that the answer begins within the thoughts. White space stays as the model put
it, on either side of the closing tag.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


class Thoughts:
    """Parts one answer into thoughts and what follows them."""

    def __init__(self, *, begun: bool) -> None:
        """begun: the prompt has opened them."""
        self._within = begun
        self._started = False
        """Whether the answer has an opening tag is known; after one of the prompt's, a second says nothing new."""
        self._over = False
        self._held = ""
        """Read, but it may be the beginning of a tag."""

    def push(self, text: str) -> tuple[str, str]:
        """(thoughts, answer) that this text adds."""
        if self._over:
            return "", text
        text = self._held + text
        self._held = ""
        if not self._started:
            lead = text[: len(text) - len(text.lstrip())]
            rest = text[len(lead) :]
            if len(rest) < len(OPEN) and OPEN.startswith(rest):
                self._held = text
                return "", ""
            self._started = True
            if rest.startswith(OPEN):
                self._within = True
                text = lead + rest[len(OPEN) :]
            elif not self._within:
                self._over = True
                return "", text
        before, found, after = text.partition(CLOSE)
        if found:
            self._over = True
            return before, after
        keep = _begun(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def end(self) -> tuple[str, str]:
        """What was held back, when nothing follows: thoughts without an end, or an answer."""
        rest, self._held = self._held, ""
        return (rest, "") if self._within else ("", rest)


def thoughts_begun(prompt_end: str) -> bool:
    """Whether a prompt with this text at its end has opened thoughts that the answer is to go on with."""
    return prompt_end.rfind(OPEN) > prompt_end.rfind(CLOSE)


def thoughts_over(prompt_end: str) -> bool:
    """Whether such a prompt has thoughts, or none, behind it, so that the answer is not to begin with any."""
    return CLOSE in prompt_end and not thoughts_begun(prompt_end)


def _begun(text: str) -> int:
    """How much of CLOSE the text ends with."""
    return next((size for size in range(min(len(CLOSE) - 1, len(text)), 0, -1) if text.endswith(CLOSE[:size])), 0)
