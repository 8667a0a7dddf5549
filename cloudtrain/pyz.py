"""``cloudtrain.pyz``: this very package as one zip that any Python 3.10 runs, staged beside the code of every run.

Its digest is over names and contents, not over what zlib made of them; its dates are fixed. So a version has one digest
and is uploaded once, and both ends of a run are always the same version.
"""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .provider import Provider

__all__ = ["build", "digest"]

_MAIN = b"import sys\n\nfrom cloudtrain.runtime.__main__ import main\n\nsys.exit(main(sys.argv[1:]))\n"
_CLIENT_ONLY = ("testing", "cli")
_DATE = (1980, 1, 1, 0, 0, 0)


def _members(provider: type[Provider] | None) -> list[tuple[str, bytes]]:
    root = Path(__file__).parent
    members = [("__main__.py", _MAIN)]
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] not in _CLIENT_ONLY:
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
    return buffer.getvalue()
