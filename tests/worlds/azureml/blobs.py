"""Blobs of a storage account (Azurite) as the platform moves them, growing logs, and a proxy of the account."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .wire import Answer, Call, Refusal, Wire

__all__ = ["AppendLog", "Blobs", "iso", "place"]

ACCOUNT_HOST = "core.windows.net"
BLOCK = 4 << 20
"""Most bytes of one appended block."""
CHUNK = 1 << 20


def place(url: str, containers: dict[str, str]) -> tuple[str, str]:
    """Return (container, path) of a URI as jobs and fsspec write it; ``containers`` maps datastores to containers.

    Raises `LookupError` for an unknown datastore.
    """
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    if scheme == "azureml":
        words = rest.split("/")
        at = words.index("datastores")
        if words[at + 1] not in containers:
            raise LookupError(f"Could not find datastore {words[at + 1]}")
        return containers[words[at + 1]], "/".join(words[at + 3 :])
    if scheme == "https":
        container, _, path = path.partition("/")
        return container, path
    return authority.partition("@")[0], path


class Blobs:
    """One account, as `Objects` with the URLs of jobs. ``containers`` maps each datastore to its container.

    ``at_the_end`` is the status for a range that begins at the end of a blob: 416, as the service documents, or 206
    with no bytes, as from Azurite. The SAS of a log's URL is valid for ``sas_seconds``.
    """

    def __init__(self, connection: str, wire: Wire) -> None:
        from azure.storage.blob import BlobServiceClient

        self.service = BlobServiceClient.from_connection_string(connection)
        parts = dict(part.split("=", 1) for part in connection.strip(";").split(";"))
        self.account, self.key = parts["AccountName"], parts["AccountKey"]
        self.endpoint = parts["BlobEndpoint"].rstrip("/")
        self.containers: dict[str, str] = {}
        self.at_the_end, self.sas_seconds = 416, 3600.0
        self.sent = 0
        self._wire = wire
        wire.route("GET", rf"/{self.account}/([^/]+)/(.+)", "GET blob", self._get, open=True)

    def make(self, container: str) -> None:
        """Create an empty container."""
        self.service.create_container(container)

    def close(self) -> None:
        """Close the connections."""
        self.service.close()

    # ------------------------------------------------------------------------------------------------ as nodes see it

    def names(self, url: str) -> set[str]:
        """Return the names below a URL that ends with a slash."""
        container, prefix = place(url, self.containers)
        prefix = f"{prefix.strip('/')}/"
        return {str(name)[len(prefix) :] for name in self.client(container).list_blob_names(name_starts_with=prefix)}

    def fetch(self, url: str, folder: Path) -> list[str]:
        """Download a blob, or all blobs below a folder. Return their names below ``folder``."""
        from azure.core.exceptions import ResourceNotFoundError

        container, path = place(url, self.containers)
        path = path.strip("/")
        single = self.client(container).get_blob_client(path).exists() if path else False
        found = {path.rpartition("/")[2]: path} if single else {n: f"{path}/{n}" for n in self.names(url)}
        names = []
        for name, key in found.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(ResourceNotFoundError):  # deleted since the listing
                file.write_bytes(self.client(container).download_blob(key).readall())
                names.append(name)
        return names

    def put(self, url: str, data: bytes) -> None:
        """Write one blob."""
        container, path = place(url, self.containers)
        self.client(container).upload_blob(path, data, overwrite=True)

    def send(self, url: str, path: Path) -> None:
        """Write one object from a file."""
        self.put(url, path.read_bytes())

    def delete(self, url: str) -> None:
        """Remove one blob."""
        from azure.core.exceptions import ResourceNotFoundError

        container, path = place(url, self.containers)
        with contextlib.suppress(ResourceNotFoundError):
            self.client(container).delete_blob(path)

    def client(self, container: str) -> Any:
        """Return Azure's own client of a container."""
        return self.service.get_container_client(container)

    # ------------------------------------------------------------------------------------------------ as clients see it

    def signed(self, front: str, container: str, path: str) -> str:
        """Return the URL of one blob, with a SAS to read it."""
        from azure.storage.blob import BlobSasPermissions, generate_blob_sas

        now = datetime.datetime.now(datetime.timezone.utc)
        sas = generate_blob_sas(
            account_name=self.account,
            container_name=container,
            blob_name=path,
            account_key=self.key,
            permission=BlobSasPermissions(read=True),
            start=now - datetime.timedelta(minutes=5),
            expiry=now + datetime.timedelta(seconds=self.sas_seconds),
        )
        return f"{front}/{self.account}/{container}/{urllib.parse.quote(path)}?{sas}"

    def _get(self, call: Call) -> Answer:
        """Fetch from Azurite with the caller's signature and range."""
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.endpoint).netloc)
        names = ("range", "x-ms-range", "x-ms-version", "accept")
        connection.request("GET", call.url, headers={n: call.headers[n] for n in names if n in call.headers})
        response = connection.getresponse()
        length = int(response.headers.get("Content-Length") or 0)
        if response.status >= 400:
            code = response.headers.get("x-ms-error-code", "AuthenticationFailed")
            connection.close()
            raise Refusal(
                response.status, code, "Server failed to authenticate the request.", {"x-ms-error-code": code}
            )
        if self.at_the_end == 416 and response.status == 206 and length == 0:
            size = response.headers.get("Content-Range", "/0").rpartition("/")[2]
            connection.close()
            error_headers = {"x-ms-error-code": "InvalidRange", "Content-Range": f"bytes */{size}"}
            raise Refusal(416, "InvalidRange", "The range specified is invalid for the current size.", error_headers)
        kept = ("content-type", "content-range", "etag", "last-modified", "x-ms-blob-type", "x-ms-error-code")
        headers = {name: value for name, value in response.headers.items() if name.lower() in kept}
        return Answer(self._chunks(connection, response, length), response.status, headers, length)

    def _chunks(self, connection: http.client.HTTPConnection, response: Any, length: int) -> Iterator[bytes]:
        with contextlib.closing(connection):
            while length > 0 and (data := response.read(min(CHUNK, length))):
                length -= len(data)
                self.sent += len(data)
                yield data


class AppendLog:
    """An append blob that grows with each flush. A byte waits ``lag`` seconds; one flush appends at most ``most``
    bytes."""

    def __init__(
        self, client: Any, path: str, *, lag: Callable[[], float] = lambda: 0.0, most: Callable[[], int] = lambda: 0
    ) -> None:
        self._blob = client.get_blob_client(path)
        self._blob.create_append_blob()
        self.path, self._lag, self._most = path, lag, most
        self._waiting: list[tuple[float, bytes]] = []
        self._lock = threading.Lock()

    def take(self, data: bytes) -> None:
        """Queue printed bytes."""
        with self._lock:
            self._waiting.append((time.monotonic(), data))

    def flush(self, *, whole: bool = False) -> None:
        """Append the bytes that are old enough, or all with ``whole``."""
        with self._lock:
            ready = time.monotonic() - self._lag()
            count = sum(1 for when, _ in self._waiting if whole or when <= ready)
            data = b"".join(part for _, part in self._waiting[:count])
            most = len(data) if whole or not self._most() else self._most()
            data, rest = data[:most], data[most:]
            self._waiting[:count] = [(0.0, rest)] if rest else []
            for start in range(0, len(data), BLOCK):
                self._blob.append_block(data[start : start + BLOCK])


def iso(seconds: float) -> str:
    """Format Unix seconds as Azure does."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
