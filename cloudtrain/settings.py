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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .errors import AuthError, SpecError
from .provider import Provider, find_provider, provider_names, recorded_settings
from .transfer import Moving
from .values import choice_of, nearest, toml_loads, url_scheme

__all__ = ["FILE", "Caller", "Settings"]

FILE = "cloudtrain.toml"
PREFIX = "CLOUDTRAIN_"
_GENERAL = ("provider", "store", "max_code_mb", "mover", "concurrency", "sse", "sse_kms_key_id")
_MOVERS = ("auto", "fsspec", "obstore")
MOST_FILES = 64
"""That move at a time: as many threads, and connections."""
_ENCRYPTIONS = ("AES256", "aws:kms", "aws:kms:dsse")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """General settings. ``tables`` holds the provider tables as they were found; `provider_settings` reads them."""

    provider: str = field(default="local", metadata={"help": "provider when none is given"})
    store: str = field(default="./.cloudtrain", metadata={"help": "URL under which code, data and runs live"})
    max_code_mb: int = field(default=50, metadata={"help": "largest source that ships, in MiB before compression"})
    mover: str = field(default="auto", metadata={"help": "what moves bytes to remote stores: auto, fsspec, obstore"})
    concurrency: int = field(default=8, metadata={"help": "files that move to or from a store at a time, at most 64"})
    sse: str = field(default="", metadata={"help": "how S3 encrypts what is written: AES256, aws:kms, aws:kms:dsse"})
    sse_kms_key_id: str = field(default="", metadata={"help": "the key of aws:kms; default: the bucket's"})
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

    @property
    def moving(self) -> Moving:
        """How bytes move. `SpecError` for a word that nobody knows."""
        choice_of(self.mover, _MOVERS, "mover")
        if self.sse:
            choice_of(self.sse, _ENCRYPTIONS, "sse")
        if self.sse_kms_key_id and not self.sse.startswith("aws:kms"):
            raise SpecError("is the key of sse = 'aws:kms'; say that too", field="sse_kms_key_id")
        if not 1 <= self.concurrency <= MOST_FILES:
            raise SpecError(f"must be a number from 1 to {MOST_FILES}, not {self.concurrency}", field="concurrency")
        return Moving(mover=self.mover, sse=self.sse, sse_kms_key_id=self.sse_kms_key_id, concurrency=self.concurrency)

    def provider_of(self, record: Mapping[str, Any]) -> Provider:
        """The provider of a run, by its run.json: the settings it was submitted with, and who calls by those here."""
        name = str(record["provider"])
        return self.make_provider(name, **recorded_settings(find_provider(name).Settings, record["settings"]))

    def callers(self, url: str) -> Iterator[Caller]:
        """Who may say as whom a store is reached of which only ``url`` is known, the likeliest first; at least one.

        The chosen provider, as for `submit`, then those that have settings here; of these, who can reach such URLs.
        """
        if url_scheme(url) in ("", "file"):
            yield Caller(None)
            return
        known, found = provider_names(), False
        there = [name for name in known if any(v.startswith(f"{PREFIX}{name.upper()}_") for v in self.environ)]
        for name in dict.fromkeys((self.provider, *self.tables, *there)):
            if url_scheme(url) in find_provider(name).schemes:
                found = True
                yield Caller(self._own(name).make_provider(name))
        if not found:
            yield Caller(None)

    def let_in(self, url: str, read: Callable[[Caller], T]) -> T:
        """What ``read`` gives that reads the store at ``url`` as the first of `callers` whom it lets in.

        Raises the first one's `AuthError` when it lets none in, and what else ``read`` raises.
        """
        refused: list[tuple[Caller, AuthError]] = []
        for caller in self.callers(url):
            if any(caller.is_like(before, url) for before, _ in refused):
                continue
            try:
                return read(caller)
            except AuthError as exc:
                refused.append((caller, exc))
        raise refused[0][1]

    def _own(self, name: str) -> Settings:
        """These settings for provider ``name``: ``--set`` pairs are the chosen one's."""
        return self if name == self.provider else dataclasses.replace(self, overrides={})

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

    def resolved(self, url: str | None = None, *, ask: bool = True) -> str:
        """``url`` (default: the store) in the form that everything else takes.

        A URL whose scheme is the name of a provider is that provider's own word for a place, and its to resolve
        (``Provider.store_url``); any other stays. ``ask``: it may ask its platform. Raises `SpecError` for one that it
        cannot resolve, and whatever the platform's answer is.
        """
        url = self.store if url is None else url
        name = url_scheme(url)
        if name in ("", "file") or name not in provider_names():
            return url
        resolve: Callable[..., str] | None = getattr(self._own(name).make_provider(name), "store_url", None)
        return url if resolve is None else resolve(url, ask=ask)


class Caller:
    """fsspec's options for a store, by ``provider``: a `Storage` that tells whether another one's would differ.

    None: none at all.
    """

    def __init__(self, provider: Provider | None) -> None:
        self._provider = provider
        self._first: Mapping[str, Any] | None = None  # an answer that nobody has used yet
        self._bare = provider is None

    def __call__(self, url: str) -> Mapping[str, Any]:
        options, self._first = self._first, None
        if options is None and self._provider is not None:
            options = self._provider.storage(url)
            self._bare = not options
        return options or {}

    def is_like(self, other: Caller, url: str) -> bool:
        """Whether a store that was opened as ``other`` serves for this one: neither has options. May ask this one."""
        if not other._bare:
            return False
        try:
            self._first = self(url)
        except Exception:  # noqa: BLE001 - opening the store meets it again, and says it well
            return False
        return self._bare

    def own(self, url: str, provider: Provider) -> Caller | None:
        """As whom the store at ``url``, which was opened as this one, is to be opened anew for a run of ``provider``;
        None: it serves as it is."""
        if url_scheme(url) == "file" or (self._provider is not None and self._provider.name == provider.name):
            return None
        found = Caller(provider)
        return None if found.is_like(self, url) else found


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
