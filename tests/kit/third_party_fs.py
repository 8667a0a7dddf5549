"""A file system of a third party, scheme ``plain``. A pytest plugin."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

#: Every method that fsspec requires of a file system, and no more.
PLAIN = """
import os
from fsspec import AbstractFileSystem

class PlainFileSystem(AbstractFileSystem):
    protocol = "plain"

    def _at(self, path):
        return os.path.join(os.environ["PLAIN_ROOT"], self._strip_protocol(path).strip("/"))

    def ls(self, path, detail=True, **kwargs):
        path, found = self._strip_protocol(path).rstrip("/"), []
        if not os.path.isdir(self._at(path)):
            raise FileNotFoundError(path)
        for item in os.scandir(self._at(path)):
            kind = "directory" if item.is_dir() else "file"
            found.append({"name": f"{path}/{item.name}".lstrip("/"), "size": item.stat().st_size, "type": kind})
        return found if detail else [item["name"] for item in found]

    def _open(self, path, mode="rb", **kwargs):
        if mode != "rb":
            os.makedirs(os.path.dirname(self._at(path)), exist_ok=True)
        return open(self._at(path), mode)

    def _rm(self, path):
        (os.rmdir if os.path.isdir(self._at(path)) else os.remove)(self._at(path))
"""
#: Methods that make a better file system of it.
EXCLUSIVE = """
    def _place(self, path, value, put):
        os.makedirs(os.path.dirname(self._at(path)), exist_ok=True)
        temp = self._at("tmp-" + os.urandom(8).hex())
        with open(temp, "wb") as file:
            file.write(value)
        try:
            put(temp, self._at(path))
        finally:
            if os.path.exists(temp):
                os.remove(temp)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._place(path, value, os.link if mode == "create" else os.replace)

    def put_file(self, lpath, rpath, **kwargs):
        with open(lpath, "rb") as file:
            self._place(rpath, file.read(), os.replace)
"""
#: A file system that writes like fsspec's own file objects: a closed file is complete. It can lose its server in
#: between.
BUFFERED = """
    cut = False

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        os.makedirs(os.path.dirname(self._at(path)), exist_ok=True)
        with open(self._at(path), "xb" if mode == "create" else "wb") as file:
            file.write(value)

    def _open(self, path, mode="rb", block_size=1 << 20, **kwargs):
        return open(self._at(path), mode) if mode == "rb" else Part(self, path, mode, block_size)

from fsspec.spec import AbstractBufferedFile

class Part(AbstractBufferedFile):
    def _initiate_upload(self):
        self.parts = []

    def _upload_chunk(self, final=False):
        self.parts.append(self.buffer.getvalue())
        if self.fs.cut and len(self.parts) == 2:
            raise ConnectionError("cut")
        if final:
            self.fs.pipe_file(self.path, b"".join(self.parts))
"""


def install_plain(site: Path, text: str) -> None:
    """Write the package into the folder ``site``, registered as pip registers one."""
    (site / "plainfs-1.dist-info").mkdir(parents=True)
    (site / "plainfs.py").write_text(text)
    (site / "plainfs-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: plainfs\nVersion: 1\n")
    (site / "plainfs-1.dist-info/entry_points.txt").write_text("[fsspec.specs]\nplain = plainfs:PlainFileSystem\n")


@pytest.fixture
def plain(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that registers the file system of a source and gives the URL of an empty folder in it.
    ``PLAIN_ROOT`` names its folder. Processes need ``PLAIN_SITE`` in their ``PYTHONPATH``."""

    def made(text: str) -> str:
        from fsspec.registry import _registry

        folder = tmp_path_factory.mktemp("plain")
        monkeypatch.setenv("PLAIN_ROOT", str(folder / "root"))
        monkeypatch.setenv("PLAIN_SITE", str(folder / "site"))
        install_plain(folder / "site", text)
        spec = importlib.util.spec_from_file_location("plainfs", folder / "site/plainfs.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setitem(_registry, "plain", module.PlainFileSystem)
        return f"plain://team-{uuid.uuid4().hex[:8]}/store"  # a new URL each time: supervisors cache by URL

    return made
