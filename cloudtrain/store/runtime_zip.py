"""Build ``cloudtrain.pyz``: this package as one zip that any Python 3.10 runs, staged with every run's code.

Its digest is over names and contents, not zlib's output, and its dates are fixed. So a version has one digest, is
uploaded once, and is the same at both ends of a run. Sources that a node imports come with their compiled form: a node
with the same minor version of Python need not compile them; any other uses the source.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import marshal
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..provider_api.protocol import Provider

_MAIN = b"""import sys

if sys.version_info < (3, 10):
    sys.stderr.write("cloudtrain: this image has Python %d.%d; 3.10 or newer is needed\\n" % sys.version_info[:2])
    sys.exit(127)

from cloudtrain.runtime.__main__ import leave

leave(sys.argv[1:])
"""
_PROVIDER = ("__init__", "node", "s3", "bootstrap", "prepare")
_NODE = (
    "__init__.py",
    "_version.py",
    "errors.py",
    "validate.py",
    "runtime/*.py",
    "provider_api/*.py",
    "job/__init__.py",
    "job/options.py",
    "engine/__init__.py",
    "engine/supervised.py",
    "storage/__init__.py",
    "storage/timings.py",
    "providers/*.py",
    *(f"providers/*/{name}.py" for name in _PROVIDER),
)
"""The files that a node imports, below the package. Their compiled form is in the zip, too."""
_RARE = (
    *(f"runtime/{name}.py" for name in ("node_check", "preflight", "shell", "webhook", "worker")),
    *(f"provider_api/{name}.py" for name in ("catalog", "checks", "limits", "node_count")),
    "providers/_rehearsal.py",
)
"""Files of `_NODE` that no node imports, or only nodes of some jobs: as source alone, to keep the zip small."""
_SCRIPT = (
    "estimator.py",
    "job/*.py",
    "settings/*.py",
    "storage/*.py",
    "store/*.py",
    "runs/*.py",
    "runs/sweeps/*.py",
    "engine/fault_injection.py",
    "engine/url_map.py",
)
"""The files that a script can import that submits itself by `Estimator` and trains: as source alone."""
_DATE = (1980, 1, 1, 0, 0, 0)


def _members(provider: type[Provider] | None) -> list[tuple[str, bytes]]:
    root = Path(__file__).parents[1]
    members = [("__main__.py", _MAIN)]
    for path in sorted({path for pattern in (*_NODE, *_SCRIPT) for path in root.glob(pattern)}):
        members.append((f"cloudtrain/{path.relative_to(root).as_posix()}", path.read_bytes()))
    if provider is not None and not provider.__module__.startswith("cloudtrain.providers."):
        members += _third_party(provider)
    return members


def _third_party(provider: type[Provider]) -> list[tuple[str, bytes]]:
    """Return the members of a provider that is registered by entry point, placed among our own."""
    module = sys.modules[provider.__module__]
    file = Path(str(module.__file__))
    home = f"cloudtrain/providers/{provider.name}"
    if not hasattr(module, "__path__"):
        return [(f"{home}.py", file.read_bytes())]
    files = sorted(file.parent.rglob("*.py"))
    return [(f"{home}/{path.relative_to(file.parent).as_posix()}", path.read_bytes()) for path in files]


def digest(provider: type[Provider] | None = None) -> str:
    """Return the SHA-256 (hex) over every member's name, size and bytes; ``provider`` is added if it is not our own."""
    total = hashlib.sha256()
    for name, data in _members(provider):
        total.update(f"{name}\0{len(data)}\0".encode() + data)
    return total.hexdigest()


def build(provider: type[Provider] | None = None) -> bytes:
    """Return the zip's bytes."""
    import zipfile  # a plan needs the digest alone

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in _members(provider):
            archive.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_DEFLATED, 9)
            if _is_compiled(name, provider):
                archive.writestr(zipfile.ZipInfo(f"{name}c", _DATE), _compiled(name, data), zipfile.ZIP_DEFLATED, 9)
    return buffer.getvalue()


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a path below the package fits one of ``patterns``, in which a star stands within one folder."""
    return any(name.count("/") == pattern.count("/") and fnmatchcase(name, pattern) for pattern in patterns)


def _is_compiled(name: str, provider: type[Provider] | None) -> bool:
    """Return whether nodes of ``provider`` import the member ``name``; other providers' nodes compile their own."""
    ours, _, inner = name.partition("/")
    if inner in _RARE:
        return False
    if ours != "cloudtrain" or not inner.startswith("providers/"):
        return _matches(inner, _NODE)
    owner = inner.split("/")[1].removesuffix(".py")
    return provider is None or owner in ("__init__", "_cloud", provider.name)


def _compiled(name: str, source: bytes) -> bytes:
    """Return a .pyc (PEP 552, unchecked: the source in the same zip cannot change).

    It has no columns, with which a traceback underlines a part of a line: they are a quarter of its size.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.stmt)):
            node.col_offset = node.end_col_offset = -1
    code = compile(tree, f"cloudtrain.pyz/{name}", "exec", dont_inherit=True)
    flags, digest = (1).to_bytes(4, "little"), importlib.util.source_hash(source)
    return importlib.util.MAGIC_NUMBER + flags + digest + marshal.dumps(code)
