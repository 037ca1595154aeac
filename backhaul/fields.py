"""The settings of a pydantic model, one by one: what its flags, environment names and help are derived from."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic.fields import FieldInfo

Kind = Literal["value", "switch", "list", "json"]
KeyPath = tuple[str, ...]

_COLLECTIONS = (list, tuple, set, frozenset)
_METAVARS: dict[object, str] = {int: "N", float: "X", Path: "PATH"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field, or one section of fields, of a settings model."""

    path: KeyPath
    """Field names from the root, such as ("kv_transfer_config", "kv_role")."""
    kind: Kind
    """switch: a boolean; list: a flag that may be repeated; json: an object, or a list of objects."""
    section: bool
    """True for a nested model, whose fields are settings of their own as well."""
    help: str
    default: object
    required: bool
    choices: tuple[str, ...]
    metavar: str
    secret: bool
    bare: str | None = None
    """What the flag means without a value, where it may stand alone."""

    @property
    def key(self) -> str:
        """Name in a YAML file, dotted."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def negative_flag(self) -> str:
        return "--no-" + self.key.replace("_", "-")

    def env(self, prefix: str) -> str:
        return prefix + "__".join(self.path).upper()


def settings_of(model: type[BaseModel], parents: KeyPath = ()) -> Iterator[Setting]:
    """Yield every setting of `model`, a section right before its fields."""
    for name, field in model.model_fields.items():
        path = (*parents, field.alias or name)
        kind = _core(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            help = field.description or (kind.__doc__ or "").strip()
            yield _setting(path, "json", field, section=True, help=help, metavar="JSON")
            yield from settings_of(kind, path)
        else:
            yield _leaf(path, kind, field)


def _leaf(path: KeyPath, core: Any, field: FieldInfo) -> Setting:
    origin = get_origin(core) or core
    if core is bool:
        return _setting(path, "switch", field)
    if origin is Literal:
        choices = tuple(str(choice) for choice in get_args(core))
        return _setting(path, "value", field, choices=choices, metavar="{" + ",".join(choices) + "}")
    if origin in _COLLECTIONS:
        item = _core(next(iter(get_args(core)), str))
        if isinstance(item, type) and issubclass(item, BaseModel | dict):
            return _setting(path, "json", field, metavar="JSON")
        return _setting(
            path, "list", field, metavar=_METAVARS.get(item, "TEXT"), secret=item in (SecretStr, SecretBytes)
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _setting(path, "json", field, metavar="JSON")
    return _setting(path, "value", field, metavar=_METAVARS.get(core, "TEXT"), secret=core in (SecretStr, SecretBytes))


def _setting(
    path: KeyPath,
    kind: Kind,
    field: FieldInfo,
    *,
    section: bool = False,
    help: str | None = None,
    choices: tuple[str, ...] = (),
    metavar: str = "",
    secret: bool = False,
) -> Setting:
    return Setting(
        path=path,
        kind=kind,
        section=section,
        help=" ".join((help if help is not None else field.description or "").split()),
        default=None if field.is_required() else field.get_default(call_default_factory=True),
        required=field.is_required(),
        choices=choices,
        metavar=metavar,
        secret=secret,
        bare=_bare(field),
    )


def _bare(field: FieldInfo) -> str | None:
    """Declared by the field, as `Field(json_schema_extra={"bare": …})`."""
    extra = field.json_schema_extra
    return str(extra["bare"]) if isinstance(extra, dict) and "bare" in extra else None


def _core(annotation: Any) -> Any:
    """Strip `Annotated` and `| None`; a union of several types stays as it is."""
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation = get_args(annotation)[0]
        elif origin in (Union, types.UnionType):
            members = [member for member in get_args(annotation) if member is not type(None)]
            if len(members) != 1:
                return annotation
            annotation = members[0]
        else:
            return annotation
