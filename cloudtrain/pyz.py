"""``cloudtrain.pyz``: this very package as one zip that any Python 3.10 runs, staged beside the code of every run.

Its digest is over names and contents, not over what zlib made of them; its dates are fixed. So a version has one digest
and is uploaded once, and both ends of a run are always the same version.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

__all__ = ["build", "digest"]

_MAIN = b"import sys\n\nfrom cloudtrain.runtime.__main__ import main\n\nsys.exit(main(sys.argv[1:]))\n"
_CLIENT_ONLY = ("testing", "cli")
_DATE = (1980, 1, 1, 0, 0, 0)


def _members() -> list[tuple[str, bytes]]:
    root = Path(__file__).parent
    members = [("__main__.py", _MAIN)]
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] not in _CLIENT_ONLY:
            members.append((f"cloudtrain/{relative.as_posix()}", path.read_bytes()))
    return members


def digest() -> str:
    """sha256 (hex) over every member's name, size and bytes."""
    total = hashlib.sha256()
    for name, data in _members():
        total.update(f"{name}\0{len(data)}\0".encode() + data)
    return total.hexdigest()


def build() -> bytes:
    """The zip's bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in _members():
            archive.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
