"""Settings: what belongs to an account or a machine, never to a Job.

General settings are the top-level keys of ``cloudtrain.toml`` (found in the current folder or above), provider settings
its ``[<provider>]`` tables. Rising precedence: cloudtrain.toml, environment (``CLOUDTRAIN_STORE``,
``CLOUDTRAIN_<PROVIDER>_<KEY>``), ``--set key=value``, constructor. No secret is ever a setting.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import SpecError
from .provider import Provider, find_provider, provider_names
from .values import nearest, toml_loads, url_scheme

__all__ = ["FILE", "Settings"]

FILE = "cloudtrain.toml"
PREFIX = "CLOUDTRAIN_"
_GENERAL = ("provider", "store", "max_code_mb")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """General settings. ``tables`` holds the provider tables as they were found; `provider_settings` reads them."""

    provider: str = field(default="local", metadata={"help": "provider when none is given"})
    store: str = field(default="./.cloudtrain", metadata={"help": "URL under which code, data and runs live"})
    max_code_mb: int = field(default=50, metadata={"help": "largest source that ships, in MiB before compression"})
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def load(
        cls,
        *,
        overrides: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **given: Any,
    ) -> Settings:
        """Settings of this folder, environment and command line; ``given`` that are not None win.

        ``overrides`` are ``--set`` pairs: a general key, or one of the chosen provider's.
        Raises `SpecError` for an unknown key, with the nearest valid one, or a value of the wrong type.
        """
        environ = os.environ if environ is None else environ
        overrides = dict(overrides or {})
        data = _read_file(cwd or Path.cwd())
        general = {f.name: f for f in dataclasses.fields(cls) if f.name not in ("tables", "overrides", "environ")}
        values: dict[str, Any] = {}
        tables: dict[str, Mapping[str, Any]] = {}
        for key, value in data.items():
            if isinstance(value, Mapping):
                if key not in provider_names():
                    raise SpecError(f"no such provider{nearest(key, provider_names())}", field=f"{FILE} [{key}]")
                tables[key] = value
            else:
                _known(key, general, f"{FILE} {key}")
                values[key] = _typed(value, int if general[key].type == "int" else str, f"{FILE} {key}")
        for key, spec in general.items():
            kind = int if spec.type == "int" else str
            if environ.get(PREFIX + key.upper()):
                values[key] = _typed(environ[PREFIX + key.upper()], kind, PREFIX + key.upper())
            if key in overrides:
                values[key] = _typed(overrides.pop(key), kind, f"--set {key}")
            if given.get(key) is not None:
                values[key] = given[key]
        return cls(**values, tables=tables, overrides=overrides, environ=dict(environ))

    def make_provider(self, name: str | None = None, **given: Any) -> Provider:
        """The provider called ``name`` (default: the setting), made of its settings; ``given`` win.

        Raises `SpecError` for an unknown or ill-typed key and `NotFoundError` for an unknown provider.
        """
        name = name or self.provider
        provider = find_provider(name)
        kinds = typing.get_type_hints(provider.Settings)
        values: dict[str, Any] = {}
        sources: list[tuple[str, Mapping[str, Any]]] = [
            (f"{FILE} [{name}] ", self.tables.get(name, {})),
            ("--set ", self.overrides),
            ("", given),
        ]
        prefix = f"{PREFIX}{name.upper()}_"
        known_env = {prefix + key.upper(): key for key in kinds}
        environ = {}
        for variable, text in self.environ.items():
            if variable.startswith(prefix) and text:
                if variable not in known_env:
                    raise SpecError(f"no such setting of {name}{nearest(variable, known_env)}", field=variable)
                environ[known_env[variable]] = text
        sources.insert(1, (prefix, environ))
        for where, table in sources:
            for key, value in table.items():
                _known(key, kinds, f"{where}{key}", [*kinds, *_GENERAL] if table is self.overrides else kinds)
                values[key] = _typed(value, kinds[key], f"{where}{key}")
        return provider(**values)


def _read_file(folder: Path) -> dict[str, Any]:
    for place in (folder, *folder.parents):
        path = place / FILE
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as exc:
            raise SpecError(f"cannot be read: {exc}", field=str(path)) from None
        data = toml_loads(text, where=str(path))
        if isinstance(store := data.get("store"), str) and not url_scheme(store):
            data["store"] = str(place / Path(store).expanduser())  # the same store from any folder below
        return data
    return {}


def _known(key: str, names: Mapping[str, Any], where: str, shown: Iterable[str] | None = None) -> None:
    if key not in names:
        shown = list(shown or names)
        raise SpecError(f"no such setting{nearest(key, shown)}; there are {', '.join(shown)}", field=where)


def _typed(value: Any, kind: Any, where: str) -> Any:
    """``value``, maybe text, as ``kind``: str, int, float, bool, list of str, or one of them optional."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) in (list, tuple):
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else tuple(value)
    if isinstance(value, str) and kind is bool and value.lower() in ("true", "1", "yes", "false", "0", "no"):
        return value.lower() in ("true", "1", "yes")
    try:
        if isinstance(value, str) and kind in (int, float):
            return kind(value)
    except ValueError:
        pass
    if kind in (str, int, float, bool) and type(value) is not kind:
        raise SpecError(f"must be {kind.__name__}, not {value!r}", field=where)
    return value
