"""The `backhaul` command. Each subcommand imports its own program, so that the router never loads torch."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import BaseModel

from backhaul.errors import CommandError, UsageError

ModelT = TypeVar("ModelT", bound=BaseModel)

USAGE = """\
usage: backhaul COMMAND [flags]

  up        start everything on this machine: store, engines, router
  chat      talk to a model through an OpenAI-compatible base URL
  router    run the router alone
  engine    run one engine alone
  status    show what a router says of its engines, and of what turns do without
  config    print the settings a command would run with, as YAML
  version   print the version

`backhaul COMMAND --help` lists the flags of a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for a failure, 2 for a wrong command line or setting."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if not name:
        print(USAGE, end="", file=sys.stderr)
        return UsageError.exit_code
    if name in ("-V", "--version"):
        name = "version"
    prog = f"backhaul {name}"
    try:
        if name not in _COMMANDS:
            prog = "backhaul"
            raise UsageError(f"unknown command {name!r}; `backhaul --help` lists them")
        return _COMMANDS[name](rest)
    except CommandError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; without this the interpreter would complain while closing it.
        sys.stdout = None
        return 1


def _up(argv: Sequence[str]) -> int:
    from backhaul.up import UpConfig, run_up

    return run_up(_load(UpConfig, "up", argv))


def _chat(argv: Sequence[str]) -> int:
    from backhaul.chat import ChatConfig, run_chat

    return run_chat(_load(ChatConfig, "chat", argv))


def _router(argv: Sequence[str]) -> int:
    gc.disable()  # until it serves: what is made by importing stays
    from router.config import RouterConfig

    config = _load(RouterConfig, "router", argv)
    from backhaul import log
    from router.run import run_router

    log.setup(config.log_level, config.log_format, gather=True)
    return run_router(config)


def _engine(argv: Sequence[str]) -> int:
    gc.disable()  # until all is imported: what that makes stays
    from engine.config import EngineConfig

    config = _load(EngineConfig, "engine", argv)
    from backhaul import extras, log

    extras.require("engine", command="engine")
    log.setup(config.log_level, config.log_format)
    from engine.run import run_engine

    return run_engine(config)


def _status(argv: Sequence[str]) -> int:
    from backhaul.status import StatusConfig, run_status

    return run_status(_load(StatusConfig, "status", argv))


def _config(argv: Sequence[str]) -> int:
    name, *flags = argv or [""]
    if name in ("-h", "--help"):
        print(f"usage: backhaul config {{{','.join(_MODELS)}}} [flags of that command]")
        return 0
    if name not in _MODELS:
        raise UsageError(f"say whose settings: backhaul config {'|'.join(_MODELS)} [flags]")
    from backhaul.settings import to_yaml

    print(to_yaml(_load(_model(name), name, flags)), end="")
    return 0


def _version(argv: Sequence[str]) -> int:
    from importlib.metadata import version

    print(f"backhaul {version('backhaul')}")
    return 0


def _model(name: str) -> type[BaseModel]:
    module, attribute = _MODELS[name]
    model: type[BaseModel] = getattr(importlib.import_module(module), attribute)
    return model


def _load(model: type[ModelT], name: str, argv: Sequence[str]) -> ModelT:
    from backhaul.settings import load

    return load(model, argv, prog=f"backhaul {name}", env_prefix=f"BACKHAUL_{name.upper()}_")


_MODELS = {
    "up": ("backhaul.up", "UpConfig"),
    "chat": ("backhaul.chat", "ChatConfig"),
    "router": ("router.config", "RouterConfig"),
    "engine": ("engine.config", "EngineConfig"),
    "status": ("backhaul.status", "StatusConfig"),
}

_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "up": _up,
    "chat": _chat,
    "router": _router,
    "engine": _engine,
    "status": _status,
    "config": _config,
    "version": _version,
}


if __name__ == "__main__":
    sys.exit(main())
