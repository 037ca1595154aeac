"""The command line of a settings model: flags, help, and one-line errors."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from pydantic import BaseModel

from backhaul.errors import UsageError
from backhaul.fields import KeyPath, Setting


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, and without a page of usage in front of an error."""

    def __init__(self, prog: str, *, usage: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34),
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def parse_flags(
    settings: Iterable[Setting], argv: Sequence[str], *, prog: str, env_prefix: str, summary: str
) -> dict[KeyPath, object]:
    """Return what the flags say, unchecked: strings, lists of strings, and False for a `--no-…`."""
    settings = list(settings)
    parser = _parser(settings, prog=prog, env_prefix=env_prefix, summary=summary)
    known, rest = parser.parse_known_args([_kebab(argument) for argument in argv])
    if rest:
        raise UsageError(_unknown(rest[0], parser, prog))
    return {tuple(name.split(".")): value for name, value in vars(known).items()}


def _parser(settings: list[Setting], *, prog: str, env_prefix: str, summary: str) -> Parser:
    required = " ".join(f"{setting.flag} {setting.metavar}" for setting in settings if setting.required)
    parser = Parser(
        prog,
        usage=f"{prog} {required} [flags]" if required else f"{prog} [flags]",
        description=" ".join(summary.split()),
        epilog=(
            f"Every flag is also an environment variable, {env_prefix}<FLAG> in capitals, with _ for - and __ for a "
            "dot, and a key of the --config file. A flag wins over the environment, that over the file."
        ),
    )
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file with any of the settings"
    )
    groups: dict[KeyPath, argparse._ArgumentGroup] = {}
    for setting in settings:
        if setting.section:
            groups[setting.path] = parser.add_argument_group(setting.key, setting.help)
        group = groups.get(setting.path if setting.section else setting.path[:-1], parser)
        _add(group, setting)
    return parser


def _add(group: argparse._ActionsContainer, setting: Setting) -> None:
    text = "The whole section, as one JSON object." if setting.section else setting.help
    default = None if setting.section else _shown(setting.default)
    help = f"{text} [{default}]".strip() if default else text
    help = help.replace("%", "%%")
    if setting.kind == "switch":
        # A bare flag means true; "--flag false" is taken too, since charts and scripts like to write it out.
        group.add_argument(
            setting.flag,
            dest=setting.key,
            nargs="?",
            const="true",
            default=argparse.SUPPRESS,
            metavar="BOOL",
            help=help,
        )
        group.add_argument(
            setting.negative_flag,
            dest=setting.key,
            action="store_const",
            const=False,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS if not setting.default else f"Turn {setting.flag} off.",
        )
        return
    if setting.bare is not None:
        group.add_argument(
            setting.flag,
            dest=setting.key,
            nargs="?",
            const=setting.bare,
            default=argparse.SUPPRESS,
            metavar=setting.metavar,
            help=help,
        )
        return
    if setting.kind == "list":
        help = f"{help} May be repeated.".strip()
    group.add_argument(
        setting.flag,
        dest=setting.key,
        action="append" if setting.kind == "list" else "store",
        default=argparse.SUPPRESS,
        metavar=setting.metavar,
        help=help,
    )


def _shown(default: object) -> str:
    if default is None or isinstance(default, BaseModel) or default in ([], (), "", {}):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return str(default)


def _kebab(argument: str) -> str:
    """Take --max_model_len for --max-model-len; what follows an = is the user's."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _unknown(argument: str, parser: Parser, prog: str) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}; `{prog} --help` lists the flags"
    flag = argument.partition("=")[0]
    close = difflib.get_close_matches(flag, parser._option_string_actions, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else f"`{prog} --help` lists the flags"
    return f"unknown flag {flag}; {hint}"
