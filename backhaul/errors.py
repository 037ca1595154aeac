"""What ends a command with one line instead of a traceback."""

from __future__ import annotations


class CommandError(Exception):
    """The command cannot go on; the message is one line that says what to do."""

    exit_code = 1


class UsageError(CommandError):
    """The command line, the environment or a configuration file is wrong."""

    exit_code = 2
