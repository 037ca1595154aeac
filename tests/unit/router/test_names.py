"""Names of models as they are shown."""

from __future__ import annotations

from router.names import MAX_CHARS, listed, shown


def test_short_names_are_shown_whole_and_long_ones_cut() -> None:
    assert shown("n" * MAX_CHARS) == "n" * MAX_CHARS
    assert shown("n" * (MAX_CHARS + 1)) == "n" * (MAX_CHARS - 1) + "…"


def test_few_of_many_are_listed_and_none_is_for_the_terminal() -> None:
    assert listed([]) == "no model"
    assert listed(["a", "\x1b[2J"]) == "a, '\\x1b[2J'"
    assert listed(f"m{n}" for n in range(7)) == "m0, m1, m2, m3, m4 and 2 more"
