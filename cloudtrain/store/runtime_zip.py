"""``cloudtrain.pyz``: this very package as one zip that any Python 3.10 runs, staged beside the code of every run.

Its digest is over names and contents, not over what zlib made of them; its dates are fixed. So a version has one digest
and is uploaded once, and both ends of a run are always the same version. Beside each source that a node imports lies
what this Python makes of it: a node whose Python is of the same minor version need not compile all that; any other
takes the source.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import marshal
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..provider_api.protocol import Provider

__all__ = ["build", "digest"]

_MAIN = b"""import sys

if sys.version_info < (3, 10):
    sys.stderr.write("cloudtrain: this image has Python %d.%d; 3.10 or newer is needed\\n" % sys.version_info[:2])
    sys.exit(127)

from cloudtrain.runtime.__main__ import leave

leave(sys.argv[1:])
"""
_CLIENT_ONLY = frozenset(
    (
        "testing",
        "cli",
        "compat",
        "checks",
        "doctor",
        "needs",
        "packages",
        "preflight",
        "schema",
        "schemas",
        "seen",
        "curves",
        "markup",
        "report",
        "submit",
        "retry",
        "provenance",
        "carry",
        "resume",
        "fallback",
        "listing",
        "reconcile",
        "relay",
        "rehearse",
        "retention",
        "cautions",
        "entry_point",
        "needs",
        "summary",
    )
)
"""What no script can want of ours: it may import `Estimator`, in a file that both submits itself and trains."""
_CLIENT_FILES = frozenset(("checks.py", "network.py", "prices.py"))
"""The same, of a provider, or an engine."""
_HERE = frozenset("cloudtrain/engine/" + name for name in ("drills.py", "places.py", "sync.py"))
"""What a rehearsal does on this machine: nodes import at most their names."""
_CLIENT_HALF = frozenset(
    ("account.py", "images.py", "pages.py", "plan.py", "preflight.py", "simulation.py", "states.py")
)
"""Modules of a provider that plan, send and ask: no node imports them, so they stay at home."""
_ON_NODES = frozenset(
    (
        "__init__",
        "_version",
        "ask",
        "catalog",
        "engine",
        "errors",
        "job",
        "options",
        "provider",
        "providers",
        "runtime",
        "segments",
        "values",
    )
)
"""What nodes of some provider import: the rest is there as source alone, as nobody reads what would be half the zip."""
_DATE = (1980, 1, 1, 0, 0, 0)


def _members(provider: type[Provider] | None) -> list[tuple[str, bytes]]:
    root = Path(__file__).parents[1]
    members = [("__main__.py", _MAIN)]
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        inner = len(relative.parts) > 1 and relative.name in _CLIENT_FILES
        inner = inner or (relative.parts[0] == "providers" and relative.name in _CLIENT_HALF)
        if relative.parts[0].removesuffix(".py") not in _CLIENT_ONLY and not inner:
            members.append((f"cloudtrain/{relative.as_posix()}", path.read_bytes()))
    if provider is not None and not provider.__module__.startswith("cloudtrain.providers."):
        members += _third_party(provider)
    return members


def _third_party(provider: type[Provider]) -> list[tuple[str, bytes]]:
    """A provider that is registered by entry point, as the node will find it: among our own."""
    module = sys.modules[provider.__module__]
    file = Path(str(module.__file__))
    home = f"cloudtrain/providers/{provider.name}"
    if not hasattr(module, "__path__"):
        return [(f"{home}.py", file.read_bytes())]
    files = sorted(file.parent.rglob("*.py"))
    return [(f"{home}/{path.relative_to(file.parent).as_posix()}", path.read_bytes()) for path in files]


def digest(provider: type[Provider] | None = None) -> str:
    """sha256 (hex) over every member's name, size and bytes; ``provider`` is added when it is none of our own."""
    total = hashlib.sha256()
    for name, data in _members(provider):
        total.update(f"{name}\0{len(data)}\0".encode() + data)
    return total.hexdigest()


def build(provider: type[Provider] | None = None) -> bytes:
    """The zip's bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in _members(provider):
            archive.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_DEFLATED)
            if _is_compiled(name, provider):
                archive.writestr(zipfile.ZipInfo(f"{name}c", _DATE), _compiled(name, data), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _is_compiled(name: str, provider: type[Provider] | None) -> bool:
    """Whether nodes import it; of providers, those of this one. (Another's, of the same store, then compile theirs.)"""
    if name == "__main__.py" or name in _HERE:
        return name not in _HERE
    top, _, rest = name.removeprefix("cloudtrain/").partition("/")
    mine = provider is None or not rest or rest.split("/")[0].removesuffix(".py") in ("__init__", provider.name)
    return top.removesuffix(".py") in _ON_NODES and (top != "providers" or mine)


def _compiled(name: str, source: bytes) -> bytes:
    """A .pyc (PEP 552, unchecked: the source in the same zip cannot change behind it)."""
    code = compile(source, f"cloudtrain.pyz/{name}", "exec", dont_inherit=True)
    flags, digest = (1).to_bytes(4, "little"), importlib.util.source_hash(source)
    return importlib.util.MAGIC_NUMBER + flags + digest + marshal.dumps(code)
