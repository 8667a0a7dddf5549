"""Find a provider by its name: a module of `cloudtrain.providers`, or a third party's entry point."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pkgutil
import sys
from typing import TYPE_CHECKING

from ..errors import NotFoundError
from ..validate import did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from .protocol import Provider

ENTRY_POINTS = "cloudtrain.providers"


def provider_names() -> tuple[str, ...]:
    """Return the names of all available providers, the package's own and third parties'."""
    return tuple(sorted(_own() | installed_names()))


def installed_names() -> frozenset[str]:
    """Return the names of third parties' providers."""
    return frozenset(entry.name for entry in _installed())


@functools.cache
def _own() -> frozenset[str]:
    path = importlib.import_module(ENTRY_POINTS).__path__
    return frozenset(module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_"))


def _installed() -> tuple[EntryPoint, ...]:
    """Return third parties' entry points. They are read again when a package was installed since."""
    folders = [path or "." for path in sys.path]
    return _entry_points(tuple((path, os.stat(path).st_mtime_ns) for path in folders if os.path.isdir(path)))


@functools.lru_cache(maxsize=1)
def _entry_points(folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points in these folders. With 200 packages that takes 20 ms, and a plan asks often."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=ENTRY_POINTS))


def find_provider(name: str) -> type[Provider]:
    """Return the provider class called ``name``. Raises `NotFoundError` with the nearest name."""
    known = provider_names() if not name.replace("-", "_").isidentifier() else ()
    if known:
        why = f"{name!r} is not the name of a provider"
        raise NotFoundError(why, field="provider", hint=suggested_provider(name) or _all(known))
    for module in (f"{ENTRY_POINTS}.{name}", f"{ENTRY_POINTS}._{name}"):  # _: not for users
        try:
            return importlib.import_module(module).Provider  # type: ignore[no-any-return]
        except ModuleNotFoundError as exc:
            if exc.name != module:
                raise
    for entry in _installed():
        if entry.name == name:
            return entry.load()  # type: ignore[no-any-return]
    known, hint = provider_names(), suggested_provider(name)
    raise NotFoundError(f"no provider {name!r}", field="provider", hint=hint or _all(known))


def _all(names: tuple[str, ...]) -> str:
    return f"choose from {', '.join(names)}"


def suggested_provider(name: str) -> str:
    """Return a hint for an unknown provider's name: the one that it may mean, by its ``ALIASES`` or a similar name.

    ``ALIASES`` of a provider's module are other words for its platform, in lower case.
    """
    known = provider_names()
    for other in known:
        with contextlib.suppress(ImportError, AttributeError):  # a third party's that cannot be loaded has none
            if name.lower() in getattr(sys.modules[find_provider(other).__module__], "ALIASES", ()):
                return f"the provider is called {other!r}"
    return did_you_mean(name, known)
