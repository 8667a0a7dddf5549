"""Settings: values of an account or a machine, never of a Job.

General settings are the top-level keys of ``cloudtrain.toml``, or of ``[tool.cloudtrain]`` in a pyproject.toml (the
nearest, in the current folder or above). Provider settings are its ``[<provider>]`` tables. A profile,
``[profiles.<name>]``, holds its differences. Rising precedence: the file, its profile, environment
(``CLOUDTRAIN_STORE``, ``CLOUDTRAIN_<PROVIDER>_<KEY>``), ``--set key=value``, constructor. No secret is ever a setting.
``fallback`` lists the profiles that a job tries next, in order: `Settings.candidates` gives the settings of each.
"""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import AuthError, SpecError
from ..provider_api.protocol import Provider, check_settings, extras_of, recorded_settings, setting
from ..provider_api.registry import find_provider, provider_names, suggested_provider
from ..storage.files import TransferOptions
from ..storage.local_disk import normalize
from ..validate import (
    did_you_mean,
    json_or_text,
    near_or_all,
    similar,
    table_of,
    text_of,
    toml_loads,
    url_scheme,
    without_secrets,
)
from .coerce import Found, is_table, over, resolve_below, typed

__all__ = [
    "AUTO", "FILE", "NO_SETTINGS", "PROJECT", "Found", "Settings", "StoreCredentials", "is_setting",
    "misspelt_variables", "setting_hint",
    "store_above",
]  # fmt: skip

FILE = "cloudtrain.toml"
PROJECT = "pyproject.toml"
PREFIX = "CLOUDTRAIN_"
AUTO = "auto"
"""In place of a provider: the cheapest of the profiles in ``fallback``."""
DEFAULT = "default"
"""The source of a value that is not set."""
_OF_CLIENT = ("max_code_mb", "concurrency")
"""Settings of this client, not of a region: ``--set`` gives them for every fallback too."""
_PROFILE, _PROFILES = "profile", "profiles"
_STORE = "store"
"""A provider's own store in its table, for the jobs that it gets."""

T = TypeVar("T")


class _Layer(NamedTuple):
    """One table of a file: its keys, and its name in messages."""

    values: Mapping[str, Any]
    file: str
    table: str

    def where(self, *names: str) -> str:
        """Return a key's place: ``cloudtrain.toml``, ``cloudtrain.toml [profiles.prod.NAME]``."""
        path = ".".join(filter(None, [self.table, *names]))
        return f"{self.file} [{path}]" if path else self.file


class _Read(NamedTuple):
    """A file of settings; without a path there is none."""

    path: Path | None = None
    base: _Layer = _Layer({}, FILE, "")
    profiles: Mapping[str, Any] = {}
    profile: str = ""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """General settings. ``tables`` holds the provider tables as found; `provider_settings` reads them.

    ``origins`` has the source of each: of ``store``, of ``NAME.role``; ``file`` is the file read.
    """

    provider: str = setting("provider if the command names none", "local")
    store: str = setting("URL of the store for code, data and runs", "./.cloudtrain")
    fallback: tuple[str, ...] = setting("profiles to try next, in order, if there are no machines", ())
    max_code_mb: int = setting("maximum size of the code, in MiB before compression", 50, least=1, most=1_000_000)
    concurrency: int = setting("number of files to transfer at the same time, at most 64", 8, least=1, most=64)
    sse: str = setting("encryption of files in S3", choices=("AES256", "aws:kms", "aws:kms:dsse"))
    sse_kms_key_id: str = setting("key for aws:kms; default: the key of the bucket")
    confirm_above_usd: float = setting(
        "US dollars above which submit asks on a terminal; 0: it asks for any known cost", 100.0, least=0
    )
    budget: str = setting("budget in the store from which each run reserves its limits")
    profile: str = ""
    profiles: tuple[str, ...] = ()
    file: str = ""
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict, repr=False)
    overrides: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    read: _Read = field(default=_Read(), repr=False, compare=False)

    @classmethod
    def load(
        cls,
        *,
        overrides: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        profile: str | None = None,
        **given: Any,
    ) -> Settings:
        """Return the settings of this folder, environment and command line; ``given`` override them unless None.

        ``profile`` is the file's profile to use; default: ``CLOUDTRAIN_PROFILE``, else the file's ``profile``.
        ``overrides`` are ``--set`` pairs: a general key, or one of the chosen provider's. Raises `SpecError` for an
        unknown key, with the nearest valid one, or a value of the wrong type.
        """
        environ = os.environ if environ is None else environ
        text_of(profile or "", "profile", empty=True)
        read = _read_file(cwd or Path.cwd())
        named = profile or environ.get(PREFIX + _PROFILE.upper()) or read.profile
        return cls._made(read, named, environ=environ, overrides=table_of(overrides or {}, "settings"), given=given)

    @classmethod
    def _made(
        cls,
        read: _Read,
        named: str,
        *,
        environ: Mapping[str, str],
        overrides: Mapping[str, Any],
        given: Mapping[str, Any],
    ) -> Settings:
        layers = [read.base, *([_profile(read, named)] if named else [])]
        found: dict[str, Found] = {}
        tables: dict[str, dict[str, Found]] = {}
        for layer in layers:
            _take(layer, found, tables)
        for key in _GENERAL:
            if text := environ.get(PREFIX + key.upper()):
                found[key] = Found(_general(key, text, PREFIX + key.upper()), PREFIX + key.upper())
            if key in overrides:
                found[key] = Found(_general(key, overrides[key], f"--set {key}"), "--set")
            if given.get(key) is not None:
                found[key] = Found(_general(key, given[key], f"--{key}"), f"--{key}")
        chosen = found.get("provider")
        if chosen is not None and chosen.value == AUTO and not chosen.source.startswith("--provider"):
            hint = "name a provider here, and give --provider auto to plan or submit"
            raise SpecError("'auto' is not the name of a provider", field=f"{chosen.source} provider", hint=hint)
        general: dict[str, Any] = {key: item.value for key, item in found.items()}
        made = cls(
            **general,
            profile=named or "",
            profiles=tuple(read.profiles),
            file=str(read.path or ""),
            tables={name: {key: item.value for key, item in table.items()} for name, table in tables.items()},
            origins={
                **{key: item.source for key, item in found.items()},
                **{f"{name}.{key}": item.source for name, table in tables.items() for key, item in table.items()},
            },
            overrides={key: value for key, value in overrides.items() if key not in _GENERAL},
            environ=dict(environ),
            read=read,
        )
        own = made._own_store(made.provider)
        return dataclasses.replace(made, store=made.store if own is None else own.value)

    @property
    def moving(self) -> TransferOptions:
        """The options of transfers. Raises `SpecError` for an unknown word."""
        check_settings(self, "")
        if self.sse_kms_key_id and not self.sse.startswith("aws:kms"):
            raise SpecError("needs sse = 'aws:kms'", field="sse_kms_key_id", hint="set sse to aws:kms too")
        return TransferOptions(sse=self.sse, sse_kms_key_id=self.sse_kms_key_id, concurrency=self.concurrency)

    def moving_of(self, record: Mapping[str, Any]) -> TransferOptions:
        """Return the options of transfers for a run by its run.json: encrypted as it says, else as `moving`."""
        encrypted = {key: value for key, value in (record.get("moving") or {}).items() if key.startswith("sse")}
        return self.moving._replace(**encrypted)

    def provider_of(self, record: Mapping[str, Any]) -> Provider:
        """Return the provider of a run by its run.json, with the submission's settings and this machine's identity."""
        name = str(record["provider"])
        own = self._holding(str(record.get("run", "")))._for(name)  # profiles may differ in the identity
        return own.make_provider(name, **recorded_settings(find_provider(name).Settings, record["settings"]))

    def candidates(self) -> tuple[Settings, ...]:
        """Return these settings, then those of each profile in ``fallback``: the order in which a job tries them.

        Raises `SpecError` for a profile that is unknown, in use or listed twice.
        """
        names = [self.profile, *self.fallback]
        for name in self.fallback:
            if names.count(name) > 1:
                rest = [other for other in dict.fromkeys(self.fallback) if other != self.profile]
                why = "is the profile in use" if name == self.profile else "is listed twice"
                raise SpecError(f"{name!r} {why}", field="fallback", hint=f"use --fallback={','.join(rest)}")
        return (self, *map(self.of_profile, self.fallback))

    def of_profile(self, name: str) -> Settings:
        """Return the settings with which a job continues in the profile ``name``; its own ``fallback`` does not count.

        They are those of ``--profile NAME`` alone, but variables do not override what the profile itself sets. Of
        ``--set``, only settings of this client count. Raises `SpecError` for an unknown profile.
        """
        layer = _profile(self.read, name, field=f"fallback {name}")
        own = {f"{PREFIX}{key}".upper() for key in layer.values}
        own |= {f"{PREFIX}{key}_{item}".upper() for key, table in layer.values.items()
                if isinstance(table, Mapping) for item in table}  # fmt: skip
        environ = {key: value for key, value in self.environ.items() if key.upper() not in own}
        kept = {key: getattr(self, key) for key in _OF_CLIENT if self.origins.get(key) == "--set"}
        made = self._made(self.read, name, environ=environ, overrides=kept, given={})
        if _STORE in layer.values or _STORE in layer.values.get(made.provider, {}):  # one store, by two settings
            for key in (_STORE, f"{made.provider}_{_STORE}"):
                environ.pop(f"{PREFIX}{key}".upper(), None)
            made = self._made(self.read, name, environ=environ, overrides=kept, given={})
        return dataclasses.replace(made, fallback=self.fallback)

    def _holding(self, url: str) -> Settings:
        """Return the settings whose store holds ``url``: these, else those of a profile; these if none does.

        The profiles are those of ``fallback``, and all of the file if none is in use.
        """
        if not url or self._holds(url):
            return self
        for name in dict.fromkeys((*self.fallback, *(() if self.profile else self.profiles))):
            with suppress(SpecError):
                if (own := self.of_profile(name))._holds(url):
                    return own
        return self

    def _holds(self, url: str) -> bool:
        store = self.store
        store = normalize(store, cwd=Path.cwd()) if url_scheme(store) in ("", "file") else store
        return f"{url}/".startswith(f"{store.rstrip('/')}/")

    def _for(self, name: str) -> Settings:
        """Return these settings for provider ``name``: ``--set`` pairs are those of the chosen provider."""
        return self if name == self.provider else dataclasses.replace(self, overrides={})

    def _own_store(self, name: str) -> Found | None:
        """Return the store that is set for provider ``name`` alone, unless the general one has precedence."""
        found = [Found(value, source) for key, value, source, _ in self._given(name) if key == _STORE]
        if not found or _rank(found[-1].source) < _rank(self.origins.get(_STORE, DEFAULT)):
            return None
        return Found(typed(found[-1].value, str, f"{found[-1].source} {_STORE}"), found[-1].source)

    def _given(self, name: str) -> Iterator[tuple[str, Any, str, str]]:
        """Yield what is set for provider ``name``, weakest first: key, value, source, and its place in messages.

        A ``--set`` pair may have the key of an entry (``prices.ml.p5.48xlarge``), and may begin with the provider.
        """
        for key, value in self.tables.get(name, {}).items():
            source = self.origins.get(f"{name}.{key}", f"{FILE} [{name}]")
            yield key, value, source, f"{source} {key}"
        prefix = f"{PREFIX}{name.upper()}_"
        for variable, text in self.environ.items():
            if variable.startswith(prefix) and text:
                key = variable.removeprefix(prefix)
                yield key.lower() if key == key.upper() else variable, text, variable, variable
        for path, value in self.overrides.items():
            yield path.removeprefix(f"{name}."), value, "--set", f"--set {path}"

    def callers(self, url: str) -> Iterator[StoreCredentials]:
        """Yield the identities to try for a store with only ``url`` known, likeliest first; at least one.

        The provider of the store's profile comes first, then those with settings here, if they can reach such URLs.
        """
        if url_scheme(url) in ("", "file"):
            yield StoreCredentials(None)
            return
        known, found = provider_names(), False
        there = [name for name in known if any(v.startswith(f"{PREFIX}{name.upper()}_") for v in self.environ)]
        own = self._holding(url)
        for name in dict.fromkeys((own.provider, self.provider, *own.tables, *there)):
            if url_scheme(url) in find_provider(name).schemes:
                found = True
                yield StoreCredentials(own._for(name).make_provider(name))
        if not found:
            yield StoreCredentials(None)

    def let_in(self, url: str, read: Callable[[StoreCredentials], T]) -> T:
        """Return the result of ``read`` for the store at ``url``, with the first of `callers` that has access.

        If none has access, raises the first one's `AuthError`; also the other errors of ``read``.
        """
        refused: list[tuple[StoreCredentials, AuthError]] = []
        for caller in self.callers(url):
            if any(caller.is_like(before, url) for before, _ in refused):
                continue
            try:
                return read(caller)
            except AuthError as exc:
                refused.append((caller, exc))
        raise refused[0][1]

    def make_provider(self, name: str | None = None, **given: Any) -> Provider:
        """Return the provider called ``name`` (default: the setting), made of its settings; ``given`` override them.

        Raises `SpecError` for an unknown or ill-typed key and `NotFoundError` for an unknown provider.
        """
        name = name or self.provider
        if name == AUTO:
            hint = "name a provider, or a profile: --profile NAME"
            raise SpecError("'auto' is for plan and submit of one job", field="provider", hint=hint)
        values = {key: item.value for key, item in self.of_provider(name).items()}
        kinds = typing.get_type_hints(find_provider(name).Settings)
        for key, value in given.items():
            _known(key, kinds, key)
            values[key] = typed(value, kinds[key], key)
        return find_provider(name)(**values)

    def of_provider(self, name: str) -> dict[str, Found]:
        """Return the settings that are set for provider ``name``, with their sources. Raises as `make_provider`.

        A table (``prices``) is merged by key, and one entry of it may be set: ``--set prices.ml.p5.48xlarge=98``.
        """
        kinds = typing.get_type_hints(find_provider(name).Settings)
        found: dict[str, Found] = {}
        for path, given, source, where in self._given(name):
            key, _, entry = path.partition(".") if source == "--set" else (path, "", "")
            if path == _STORE:
                continue
            if key not in kinds and source.startswith(PREFIX):
                known = [f"{PREFIX}{name}_{other}".upper() for other in (*kinds, _STORE)]
                raise SpecError(f"no such setting of {name}", field=source, hint=did_you_mean(source, known))
            _known(key, kinds, where, [*kinds, *(_GENERAL if source == "--set" else [_STORE])])
            if entry and not is_table(kinds[key]):
                raise SpecError("is not a table, so it has no entries", field=where)
            if entry:
                value = over(found.get(key), {entry: json_or_text(given)})
            else:
                value = typed(given, kinds[key], where)
                value = over(found.get(key), value) if isinstance(given, str) else value
            found[key] = Found(value, source)
        return found

    def shown(self) -> list[dict[str, Any]]:
        """Return every general setting and those of the chosen provider: ``key``, ``value``, ``source`` and
        ``description``, without possible secrets in URLs. Raises as `make_provider`."""
        own = self._own_store(self.provider)
        of_provider = self.of_provider(self.provider)
        found: dict[str, tuple[Found, str]] = {}
        for key, text in _GENERAL.items():
            source = own.source if key == _STORE and own is not None else self.origins.get(key, DEFAULT)
            found[key] = Found(getattr(self, key), source), text
        for spec in dataclasses.fields(find_provider(self.provider).Settings):
            made = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
            item = of_provider.get(spec.name, Found(made, DEFAULT))
            found[f"{self.provider}.{spec.name}"] = item, spec.metadata.get("help", "")
        return [
            {"key": key, "value": _told(item.value), "source": item.source, "description": text}
            for key, (item, text) in found.items()
        ]

    def resolved(self, url: str | None = None, *, ask: bool = True) -> str:
        """Return ``url`` (default: the store) in the form that all other code takes.

        If the scheme is a provider's name, that provider resolves the URL (``Provider.store_url``); any other stays.
        ``ask``: it may ask its platform. Raises `SpecError` for a URL that it cannot resolve, and the platform's
        errors.
        """
        url = self.store if url is None else url
        name = url_scheme(url)
        if name in ("", "file") or name not in provider_names():
            return url
        return extras_of(self._for(name).make_provider(name)).store_url(url, ask=ask)


def misspelt_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable of ``environ`` that is no general setting, but has nearly the name of one."""
    known = [*_GENERAL, _PROFILE]
    for name in environ:
        key = name.removeprefix(PREFIX).lower()
        near = similar(key, known, short_forms=False) if name.startswith(PREFIX) else ""
        if near and key not in known:
            yield f"{name} is not a setting; did you mean {PREFIX}{near.upper()}?"


def store_above(store: str) -> str:
    """Return a hint with the store of the nearest folder above, if ``store`` is the default one, which is not here."""
    if store != Settings.store or os.path.exists(store):
        return ""
    above = (os.path.join(folder, Path(store).name) for folder in Path.cwd().parents)
    found = next((place for place in above if os.path.isdir(os.path.join(place, "runs"))), "")
    return f"a folder above has a store: add --store {os.path.relpath(found)}" if found else ""


_GENERAL = {spec.name: spec.metadata["help"] for spec in dataclasses.fields(Settings) if "help" in spec.metadata}
"""The general settings, each with its description."""
NO_SETTINGS = Settings()
"""Settings of a run or a store that is opened without any."""


class StoreCredentials:
    """The options of a store, by ``provider`` (None: no options): a `Storage` comparable with another."""

    def __init__(self, provider: Provider | None) -> None:
        self._provider = provider
        self._first: Mapping[str, Any] | None = None  # an answer that is not used yet
        self._bare = provider is None

    def __call__(self, url: str) -> Mapping[str, Any]:
        options, self._first = self._first, None
        if options is None and self._provider is not None:
            options = self._provider.storage(url)
            self._bare = not options
        return options or {}

    def is_like(self, other: StoreCredentials, url: str) -> bool:
        """Return whether a store opened as ``other`` serves this caller: neither has options. May ask this provider."""
        if not other._bare:
            return False
        try:
            self._first = self(url)
        except Exception:  # noqa: BLE001 - opening the store raises it again, with a good message
            return False
        return self._bare

    def own(self, url: str, provider: Provider) -> StoreCredentials | None:
        """Return the caller with which to reopen the store at ``url``, opened as this one, for a run of ``provider``;
        None: it can stay."""
        if url_scheme(url) == "file" or (self._provider is not None and self._provider.name == provider.name):
            return None
        found = StoreCredentials(provider)
        return None if found.is_like(self, url) else found


def _read_file(folder: Path) -> _Read:
    """Return the nearest settings file, upwards from ``folder``. Raises `SpecError` if one folder has two."""
    for place in (folder, *folder.parents):
        own, project = _toml(place / FILE), _toml(place / PROJECT, about="cloudtrain")
        tool = project.get("tool") if project is not None else None
        ours = tool.get("cloudtrain") if isinstance(tool, Mapping) else None
        if own is not None and ours is not None:
            why = f"{FILE} in the same folder holds settings too"
            raise SpecError(why, field=str(place / PROJECT), hint="keep one of the two")
        if own is not None:
            return _split(own, place / FILE, "")
        if ours is not None:
            return _split(table_of(ours, f"{PROJECT} [tool.cloudtrain]"), place / PROJECT, "tool.cloudtrain")
    return _Read()


def _toml(path: Path, about: str = "") -> dict[str, Any] | None:
    """Return the file's tables; None if there is no such file, or its text lacks ``about``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as exc:
        if about:  # another tool's file
            return None
        raise SpecError(f"cannot be read: {exc}", field=str(path)) from None
    return toml_loads(text, where=str(path)) if about in text else None


def _split(data: Mapping[str, Any], path: Path, table: str) -> _Read:
    """Split a file's own settings and its profiles; relative stores become absolute below its folder."""
    base = dict(data)
    layer = _Layer(base, path.name, table)
    profiles = table_of(base.pop(_PROFILES, {}), layer.where(_PROFILES))
    profile = typed(base.pop(_PROFILE, ""), str, f"{layer.where()} {_PROFILE}")
    for name in profiles:
        profiles[name] = table_of(profiles[name], layer.where(_PROFILES, name))
    for values in (base, *profiles.values()):
        for key, table in list(values.items()):
            if isinstance(table, Mapping) and _STORE in table:
                values[key] = {
                    **table,
                    _STORE: resolve_below(table[_STORE], path.parent, f"{layer.where(key)} {_STORE}"),
                }
        if _STORE in values:
            values[_STORE] = resolve_below(values[_STORE], path.parent, f"{layer.where()} {_STORE}")
    return _Read(path, layer, profiles, profile)


def _profile(read: _Read, name: str, field: str = "") -> _Layer:
    """Return the file's profile ``name``. Raises `SpecError` if there is none, about ``field``."""
    field = field or f"profile {name}"
    hint = f'{name} is a provider; write a profile with provider = "{name}"' if name in provider_names() else ""
    if not read.profiles:
        where = f"{read.path} has no [{'.'.join(filter(None, [read.base.table, _PROFILES, name]))}]"
        hint = hint or ("" if read.path else "to write one, run: cloudtrain init --provider PROVIDER")
        raise SpecError(where if read.path else f"there is no {FILE} in this folder or above", field=field, hint=hint)
    if name not in read.profiles:
        raise SpecError(
            f"no such profile in {read.path}", field=field, hint=hint or near_or_all(name, sorted(read.profiles))
        )
    table = ".".join(filter(None, [read.base.table, _PROFILES, name]))
    return _Layer(read.profiles[name], read.base.file, table)


def _take(layer: _Layer, found: dict[str, Found], tables: dict[str, dict[str, Found]]) -> None:
    """Merge ``layer`` over earlier values; a provider's table by key, and a table in it (prices) too."""
    for key, value in layer.values.items():
        if isinstance(value, Mapping):
            if key not in provider_names():
                raise SpecError("no such provider", field=layer.where(key), hint=suggested_provider(key))
            table = tables.setdefault(key, {})
            for name, item in value.items():
                old = table[name].value if name in table else None
                merged = {**old, **item} if isinstance(old, Mapping) and isinstance(item, Mapping) else item
                table[name] = Found(merged, layer.where(key))
        else:
            if key not in _GENERAL:
                from ..job.job import FLAT_FIELDS

                field = f"{key} is a field of a job: write it into the job file, or give its flag"
                hint = field if key in FLAT_FIELDS else setting_hint(key, value)
                _known(key, _GENERAL, f"{layer.where()} {key}", hint=hint)
            found[key] = Found(_general(key, value, f"{layer.where()} {key}"), layer.where())


def _general(key: str, value: Any, where: str) -> Any:
    """Return the value of a general setting, found at ``where``."""
    if key == "fallback":
        names = typed(value, tuple[str, ...], where)
        return tuple(filter(None, names))
    kind = {"int": int, "float": float}.get(str(Settings.__dataclass_fields__[key].type), str)
    return typed(value, kind, where)


def _rank(source: str) -> int:
    """Return the precedence of a source: file, profile, variables, ``--set``, then the command or the caller."""
    if source.startswith("--"):
        return 3 if source == "--set" else 4
    return 2 if source.startswith(PREFIX) else int(f"{_PROFILES}." in source)


def _known(
    key: str, names: Mapping[str, Any], where: str, shown: Iterable[str] | None = None, *, hint: str = ""
) -> None:
    if key not in names:
        shown = list(shown or names)
        near = did_you_mean(key, shown) or (_owner_hint(key) if where.startswith("--set ") else "")
        raise SpecError("no such setting", field=where, hint=hint or near or near_or_all(key, shown))


def _owners() -> dict[str, list[str]]:
    """Return the keys of all providers' settings, each with the providers that have it."""
    found: dict[str, list[str]] = {}
    for name in provider_names():
        with suppress(ImportError, AttributeError):  # a third party's that cannot be loaded has none
            for item in dataclasses.fields(find_provider(name).Settings):
                found.setdefault(item.name, []).append(name)
    return found


def is_setting(key: str) -> bool:
    """Return whether ``key`` is a setting, of any provider or of all."""
    return key in _GENERAL or key in _owners()


def _owner_hint(key: str) -> str:
    """Return a hint with the provider that has a setting ``key``, or a similar one; empty for none."""
    owners = _owners()
    real = key if key in owners else similar(key, owners)
    if not real:
        return ""
    names = owners[real]
    what = "is a setting" if real == key else f"may be {real!r}, a setting"
    others = f" (or {', '.join(names[1:])})" if names[1:] else ""
    return f"{key!r} {what} of provider {names[0]}{others}: add --provider {names[0]}"


def setting_hint(key: str, value: Any) -> str:
    """Return where ``key`` belongs if it is in a job file but is a setting; empty if it is not a setting."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if key in _GENERAL:
        return f"{key} is a setting; put it into {FILE}: {key} = {text}"
    if key in provider_names():
        how = f"settings of {key} go into {FILE}, and fields of the job that differ there under [on.{key}]"
        return f"[{key}] is no part of a job: {how}"
    names = _owners().get(key, [])
    others = f" (or [{'], ['.join(names[1:])}])" if names[1:] else ""
    return f"{key} is a setting; put it into {FILE}: [{names[0]}]{others} {key} = {text}" if names else ""


def _told(value: Any) -> Any:
    """Return ``value`` as JSON, without possible secrets in its URLs."""
    if isinstance(value, str):
        return without_secrets(value) if "://" in value else value
    if isinstance(value, Mapping):
        return {key: _told(item) for key, item in value.items()}
    return [_told(item) for item in value] if isinstance(value, (list, tuple)) else value
