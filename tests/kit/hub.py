"""A Hugging Face hub on loopback, with the requests that the real client makes for data sets. Commits are numbered
trees; a branch names one. Errors are in ``X-Error-Code``, as on the real hub."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PAGE = 3
"""Entries of one page of a tree; the real hub's pages have 1,000."""
LFS = 1000
"""Bytes from which a file lies in LFS."""
_API = re.compile(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.*))?)?")
_FILE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.*)")


class Hub:
    """Data sets by name, each with its revisions; ``asked`` holds the path and the authorization of every request."""

    def __init__(self) -> None:
        self.sets: dict[str, dict[str, dict[str, bytes]]] = {}
        self.gated: set[str] = set()
        self.token = ""
        self.asked: list[tuple[str, str]] = []
        self.url = ""
        #: Statuses of the next requests for files. After these, requests succeed.
        self.faults: list[int] = []

    def commit(self, name: str, files: dict[str, bytes], revision: str = "main") -> None:
        self.sets.setdefault(name, {})[revision] = dict(files)

    def files_asked(self) -> list[str]:
        """Return the files whose content was requested."""
        return [found[3] for path, _ in self.asked if (found := _FILE.fullmatch(path))]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")  # quoted: a revision may have slashes
        self.hub.asked.append((urllib.parse.unquote(path), self.headers.get("Authorization", "")))
        if path.startswith("/cdn/"):
            self._content(self._known(path.removeprefix("/cdn/")))
        elif found := _API.fullmatch(path):
            name, kind, revision, below = map(urllib.parse.unquote, found.groups(""))
            self._api(name, kind, revision or "main", below, query)
        elif found := _FILE.fullmatch(path):
            self._file(*map(urllib.parse.unquote, found.groups()))
        else:
            self._refuse(404, "", "no such page")

    def _known(self, digest: str) -> bytes:
        trees = [tree for revisions in self.hub.sets.values() for tree in revisions.values()]
        return next(data for tree in trees for data in tree.values() if _digest(data) == digest)

    def _tree(self, name: str, revision: str) -> dict[str, bytes] | None:
        """Return the files of a revision; None after a refusal."""
        given = self.headers.get("Authorization", "")
        if self.hub.token and given not in ("", f"Bearer {self.hub.token}"):
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif name not in self.hub.sets:
            # The hub hides from an anonymous client whether the repository exists.
            self._refuse(404 if given else 401, "RepoNotFound", "Repository not found")
        elif name in self.hub.gated and not given:
            self._refuse(401, "GatedRepo", f"Access to dataset {name} is restricted. You must be authenticated.")
        elif revision not in self.hub.sets[name]:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return self.hub.sets[name][revision]
        return None

    def _api(self, name: str, kind: str, revision: str, below: str, query: str) -> None:
        tree = self._tree(name, revision)
        if tree is None:
            return
        if kind != "tree":
            sha = hashlib.sha1(str(sorted((path, _digest(data)) for path, data in tree.items())).encode()).hexdigest()
            self._json({"id": name, "sha": sha, "private": False, "gated": False, "tags": [], "siblings": []})
            return
        words = urllib.parse.parse_qs(query)
        entries = _entries(tree, below, recursive=words.get("recursive", ["False"])[0].lower() in ("true", "1"))
        if below and not entries:
            self._refuse(404, "EntryNotFound", f"{below} does not exist on {revision}")
            return
        start = int(words.get("cursor", ["0"])[0])
        page, more = entries[start : start + PAGE], start + PAGE < len(entries)
        plain = {name: value[0] for name, value in words.items()}
        place = f"{self.hub.url}{urllib.parse.quote(self.path.partition('?')[0], safe='/%')}"
        link = f"{place}?{urllib.parse.urlencode({**plain, 'cursor': start + PAGE})}"
        self._json(page, **({"Link": f'<{link}>; rel="next"'} if more else {}))

    def _file(self, name: str, revision: str, path: str) -> None:
        if self.hub.faults:
            self._refuse(self.hub.faults.pop(0), "", "not now")
            return
        tree = self._tree(name, revision)
        if tree is None:
            return
        if path not in tree:
            self._refuse(404, "EntryNotFound", f"{path} does not exist")
        elif len(data := tree[path]) >= LFS:
            self._answer(302, b"", Location=f"{self.hub.url}/cdn/{_digest(data)}", ETag=f'"{_digest(data)}"')
        else:
            self._content(data)

    def _content(self, data: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            self._answer(200, data, ETag=f'"{_digest(data)}"')
            return
        start, end = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        self._answer(206, data[start : end + 1], **{"Content-Range": f"bytes {start}-{end}/{len(data)}"})

    def _json(self, value: Any, **headers: str) -> None:
        self._answer(200, json.dumps(value).encode(), **headers)

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message} if code else {"X-Error-Message": message}
        self._answer(status, json.dumps({"error": message}).encode(), **headers)

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64
    daemon_threads = True


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _entries(tree: dict[str, bytes], below: str, *, recursive: bool) -> list[dict[str, Any]]:
    prefix = f"{below}/" if below else ""
    files, folders = [], set()
    for path, data in sorted(tree.items()):
        if not path.startswith(prefix):
            continue
        inside = path[len(prefix) :].split("/")
        depths = range(1, len(inside)) if recursive else range(1, min(2, len(inside)))
        folders |= {prefix + "/".join(inside[:depth]) for depth in depths}
        if recursive or len(inside) == 1:
            entry = {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": path}
            if len(data) >= LFS:
                entry["lfs"] = {"oid": _digest(data), "size": len(data), "pointerSize": 130}
            files.append(entry)
    return [*({"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in sorted(folders)), *files]


@contextmanager
def served_hub() -> Iterator[Hub]:
    """Yield a hub that answers requests."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with _Server(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield hub
        server.shutdown()
