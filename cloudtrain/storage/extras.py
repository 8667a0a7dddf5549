"""Find the missing packages of an extra, and the command that installs them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ..errors import CloudtrainError, SpecError

NAME = "cloudtrain"
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([^]]*)\])?.*?(?:;.*\bextra == [\"']([\w-]+)[\"'])?$")
_FOR_DEVELOPERS = frozenset({"dev"})


def not_installed(who: str, extra: str, *, field: str, named: Sequence[str] = (), why: str = "") -> SpecError:
    """Return the error of a provider or URL that needs packages of ``extra``, with all missing ones and the command.

    ``named`` are the packages whose import failed, for ``why``; they count if the extra is complete or empty.
    """
    found = missing_packages(extra)
    missing, reason = found or list(named), f" ({why})" if why and not found else ""
    listed = ", ".join(missing[:-1]) + " and " + missing[-1] if len(missing) > 1 else "".join(missing)
    be = "are" if len(missing) > 1 else "is"
    return SpecError(
        f"{who} needs {listed}, which {be} not installed{reason}", field=field, hint=install_command(extra, missing)
    )


def missing_packages(extra: str) -> list[str]:
    """Return the packages of ``extra`` that are not installed."""
    return [name for name in _packages(extra) if _distribution(name) is None]


def extra_of(package: str) -> str:
    """Return the extra that brings ``package`` with the fewest others, or ""."""
    own = _distribution(NAME)
    names = own.metadata.get_all("Provides-Extra") or [] if own is not None else []
    found = [name for name in names if name not in _FOR_DEVELOPERS and package in _packages(name)]
    return min(found, key=lambda name: len(_packages(name)), default="")


def install_command(extra: str, packages: Sequence[str] = ()) -> str:
    """Return the command that installs ``extra`` as this package was installed; without an extra, ``packages``."""
    prefix, target = Path(sys.prefix), _target(extra)
    with_packages = "" if extra else "".join(f" --with {shlex.quote(name)}" for name in packages)
    if (prefix / "uv-receipt.toml").exists():
        return f"uv tool install --force{with_packages} {target}"
    if (prefix / "pipx_metadata.json").exists():
        return f"pipx install --force {target}" if extra else f"pipx inject {NAME} {shlex.join(packages)}"
    if prefix.parent.name.startswith("archive-v"):  # the environment that uvx keeps in its cache
        return f"uvx{with_packages} --from {target} {NAME}"
    return f"{_pip()} {target if extra else shlex.join(packages)}"


@contextlib.contextmanager
def translated(error_of: Callable[[Exception], CloudtrainError | None], *, needs: str, extra: str) -> Iterator[None]:
    """Turn a vendor library's errors into ours by ``error_of``; raise the rest unchanged.

    Raises `SpecError` if a library is missing: the provider has the name of its ``extra`` and ``needs`` that package.
    """
    try:
        yield
    except CloudtrainError:
        raise
    except ImportError as exc:
        why = " ".join(str(exc).split())[:200]
        raise not_installed(f"provider {extra}", extra, field="", named=[needs], why=why) from None
    except Exception as exc:  # a library may raise anything
        ours = error_of(exc)
        if ours is None:
            raise
        raise ours from None


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _packages(extra: str) -> list[str]:
    """Return the packages that ``extra`` names, including those of the extras in it."""
    own, found = _distribution(NAME), dict[str, None]()
    for line in (own.requires or []) if own is not None and extra else []:
        match = _REQUIREMENT.match(line)
        if match is None or match[3] != extra:
            continue
        inner = [part.strip() for part in (match[2] or "").split(",")] if match[1] == NAME else []
        found |= dict.fromkeys([name for part in inner for name in _packages(part)] or [match[1]])
    return sorted(found)


def _pip() -> str:
    """Return the command that installs into this Python."""
    pip = shutil.which("pip")
    if pip is not None and Path(pip).parent == Path(sysconfig.get_path("scripts")):
        return "pip install"
    if importlib.util.find_spec("pip") is not None:
        return f"{shlex.quote(sys.executable)} -m pip install"
    return f"uv pip install --python {shlex.quote(sys.executable)}"


def _target(extra: str) -> str:
    """Return this package with ``extra`` ("": alone), from its original source (PEP 610)."""
    own = _distribution(NAME)
    origin = json.loads((own.read_text("direct_url.json") if own is not None else None) or "{}")
    url, folder, extras = str(origin.get("url", "")), origin.get("dir_info"), f"[{extra}]" if extra else ""
    path = url2pathname(urlsplit(url).path) if url.startswith("file:") else ""
    if path and not Path(path).exists():
        return f"'{NAME}{extras}'"
    if folder is not None:
        return ("-e " if folder.get("editable") else "") + f"'{path}{extras}'"
    if (vcs := origin.get("vcs_info")) is not None:
        return f"'{NAME}{extras} @ {vcs['vcs']}+{url}@{vcs['commit_id']}'"
    return f"'{NAME}{extras} @ {url}'" if "archive_info" in origin else f"'{NAME}{extras}'"
