"""Turn flags, environment and a YAML file into one validated settings object.

A program declares its settings once, as a frozen pydantic model. Names are derived mechanically:

    field                 kv_transfer_config.kv_role
    flag                  --kv-transfer-config.kv-role        (underscores are taken as well)
    environment           BACKHAUL_ENGINE_KV_TRANSFER_CONFIG__KV_ROLE
    key in --config FILE  kv_transfer_config: {kv_role: …}

Precedence, for every single field: flag, then environment, then file, then default. A section can be given
whole, as JSON; its fields given singly in the same place win.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from backhaul.errors import UsageError
from backhaul.fields import KeyPath, Setting, settings_of
from backhaul.flags import parse_flags

ModelT = TypeVar("ModelT", bound=BaseModel)

CONFIG = "config"
"""The one flag every program has and no model declares: the YAML file."""

# A Kubernetes service called backhaul-router puts BACKHAUL_ROUTER_SERVICE_HOST, BACKHAUL_ROUTER_PORT=tcp://…
# and the like into every pod of its namespace. They are nobody's settings.
_SERVICE_LINK = re.compile(r"(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?)")
_SERVICE_LINK_PORT = re.compile(r"(?:tcp|udp|sctp)://")


class Settings(BaseModel):
    """Base of the settings models: frozen, strict about names, help text from the attribute docstrings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value, and where the user wrote it."""

    path: KeyPath
    value: object
    place: str


def load(
    model: type[ModelT],
    argv: Sequence[str],
    *,
    prog: str,
    env_prefix: str,
    environ: Mapping[str, str] | None = None,
) -> ModelT:
    """Return the settings of one program. Prints the help and exits on `--help`; raises UsageError."""
    environ = os.environ if environ is None else environ
    settings = {setting.path: setting for setting in settings_of(model)}
    flags = parse_flags(settings.values(), argv, prog=prog, env_prefix=env_prefix, summary=model.__doc__ or "")
    file = flags.pop((CONFIG,), environ.get(f"{env_prefix}{CONFIG.upper()}") or None)

    given: dict[KeyPath, _Given] = {}
    sources = (
        _from_file(str(file), settings) if file else (),
        _from_environment(environ, env_prefix, settings),
        _from_flags(flags, settings),
    )
    for source in sources:
        for item in source:
            given[item.path] = item
    try:
        return model.model_validate(_tree(given.values()))
    except ValidationError as error:
        raise UsageError(_describe(error, given, settings, env_prefix)) from None


def to_yaml(settings: BaseModel) -> str:
    """Return the settings as a YAML document that `--config` takes, secrets masked."""
    import yaml

    return yaml.safe_dump(_masked(settings.model_dump(mode="json", by_alias=True)), sort_keys=False, allow_unicode=True)


def _from_flags(flags: Mapping[KeyPath, object], settings: Mapping[KeyPath, Setting]) -> Iterator[_Given]:
    for path in sorted(flags, key=len):
        setting = settings[path]
        yield from _spread(setting, _decoded(setting, flags[path], setting.flag), setting.flag, settings)


def _from_environment(environ: Mapping[str, str], prefix: str, settings: Mapping[KeyPath, Setting]) -> Iterator[_Given]:
    names = {setting.env(prefix): setting for setting in settings.values()}
    found = []
    for name, text in environ.items():
        if not name.startswith(prefix) or not text or name == f"{prefix}{CONFIG.upper()}":
            continue
        rest = name.removeprefix(prefix)
        if _SERVICE_LINK.fullmatch(rest) or (rest.endswith("PORT") and _SERVICE_LINK_PORT.match(text)):
            continue
        if name not in names:
            raise UsageError(f"{name} in the environment is no setting{_nearest(name, names)}")
        found.append((names[name], text))
    for setting, text in sorted(found, key=lambda item: len(item[0].path)):
        name = setting.env(prefix)
        yield from _spread(setting, _decoded(setting, text, name), name, settings)


def _from_file(file: str, settings: Mapping[KeyPath, Setting]) -> Iterator[_Given]:
    import yaml

    try:
        with open(file, encoding="utf-8") as stream:
            document = yaml.safe_load(stream)
    except OSError as error:
        raise UsageError(f"--config {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {file}: not a text file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"--config {file}{line}: not YAML: {getattr(error, 'problem', None) or error}") from None
    if document is None:
        return
    if not isinstance(document, dict):
        raise UsageError(f"--config {file}: must be a mapping of settings, such as `port: 8000`")
    yield from _spread_section((), document, file, settings)


def _decoded(setting: Setting, value: object, place: str) -> object:
    """Read what was written as text: JSON for objects, JSON or commas for lists."""
    if setting.kind == "list":
        texts = [value] if isinstance(value, str) else list(value) if isinstance(value, list) else []
        return [item for text in texts for item in _list_items(text, place)]
    if setting.kind == "json" and isinstance(value, str):
        return _json(value, place)
    return value


def _list_items(text: str, place: str) -> list[object]:
    if text.lstrip().startswith("["):
        items = _json(text, place)
        assert isinstance(items, list)
        return items
    return [item.strip() for item in text.split(",") if item.strip()]


def _json(text: str, place: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place}: not JSON: {error.msg} at character {error.pos + 1}") from None


def _spread(setting: Setting, value: object, place: str, settings: Mapping[KeyPath, Setting]) -> Iterator[_Given]:
    """Break a section given whole into its fields, so that each has its own precedence and place."""
    if not setting.section:
        yield _Given(setting.path, value, place)
    elif isinstance(value, Mapping):
        yield from _spread_section(setting.path, value, place, settings)
    elif value is not None:
        fields = ", ".join(path[-1] for path in settings if path[:-1] == setting.path)
        raise UsageError(f"{place}: must be an object with any of {fields}")


def _spread_section(
    path: KeyPath, section: Mapping[Any, object], place: str, settings: Mapping[KeyPath, Setting]
) -> Iterator[_Given]:
    for key, value in section.items():
        field = (*path, str(key).replace("-", "_"))
        if field not in settings:
            siblings = [known[-1] for known in settings if known[:-1] == path]
            raise UsageError(f"{place}: unknown key `{key}`{_nearest(field[-1], siblings)}")
        inner = f"{place}: {key}" if not path or ": " not in place else f"{place}.{key}"
        yield from _spread(settings[field], value, inner, settings)


def _nearest(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def _tree(given: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for item in given:
        node = tree
        for name in item.path[:-1]:
            node = node.setdefault(name, {})
        node[item.path[-1]] = item.value
    return tree


def _describe(
    error: ValidationError, given: Mapping[KeyPath, _Given], settings: Mapping[KeyPath, Setting], env_prefix: str
) -> str:
    """Return one line for the first thing that is wrong: where it was written, and what is allowed."""
    problems = error.errors(include_url=False)
    problem = min(problems, key=lambda item: len(item["loc"]))
    loc = tuple(str(part) for part in problem["loc"])
    setting = next((settings[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in settings), None)
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    if setting is None:
        return message
    if problem["type"] == "missing":
        return f"{setting.flag} is required (or {setting.env(env_prefix)}, or {setting.key} in a --config file)"
    item = given.get(setting.path)
    place = item.place if item else setting.flag
    if setting.kind == "json":  # the part of it that is wrong
        place = ": ".join((place, ".".join(loc[len(setting.path) :]))) if len(loc) > len(setting.path) else place
    value = "" if setting.secret or problem["type"] == "value_error" else f", not {problem['input']!r}"
    return f"{place}: {message}{value}"


_URL_LOGIN = re.compile(r"(?<=://)[^/?]*@")
_URL_SECRET = re.compile(r"(?<=[?&])(\w*password)=[^&]*")


def _masked(value: Any) -> Any:
    """Hide the user:password part of URLs, and passwords among their options; SecretStr fields arrive masked."""
    if isinstance(value, str):
        return _URL_SECRET.sub(r"\1=***", _URL_LOGIN.sub("***@", value))
    if isinstance(value, dict):
        return {_masked(key): _masked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item) for item in value]
    return value
