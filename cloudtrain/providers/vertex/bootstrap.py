"""What a container of Vertex AI starts: fetch cloudtrain.pyz, prove it, and go on in it.

The request holds this file's text, as an argument of ``python -c``: nothing else is there yet. Arguments: the gs:// URL
of cloudtrain.pyz, in a folder named by its digest, then those of ``cloudtrain.pyz`` itself.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.path[:1] == [""]:
    del sys.path[0]  # of ``python -c``: the image's working directory, with who knows what queue.py or json.py

import hashlib
import http.client
import json
import os
import signal
import tempfile
import time
import urllib.parse
import urllib.request
import zipfile

PATIENCE = 30.0
"""Seconds that the mount of a bucket may take to appear."""
PAUSES = (0.5, 2.0, 5.0)
"""Seconds before a call that failed is made again."""
TIMEOUT = 30.0
AGAIN = 134
"""Of `words`, which is not here yet: what keeps a node from its start is no failure of the script's."""


def token() -> str:
    """The access token of the job's service account, from the machine's metadata server."""
    host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy reaches this machine's own address
    with direct.open(request, timeout=TIMEOUT) as answer:
        return str(json.loads(answer.read())["access_token"])


def fetch(bucket: str, name: str) -> bytes:
    """An object, by Cloud Storage's JSON API. Raises `OSError`, `ValueError` or `HTTPException`."""
    host = (os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com").rstrip("/")
    url = f"{host}/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}?alt=media"
    for pause in (*PAUSES, None):
        try:
            request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token()}"})
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return bytes(answer.read())
        except (OSError, ValueError, http.client.HTTPException):  # the last: an answer cut short
            if pause is None:
                raise
            time.sleep(pause)
    raise AssertionError("unreachable")


def read(url: str, *, root: str = "/gcs", patience: float = PATIENCE) -> bytes:
    """What is at a gs:// URL: from the mounted bucket or, where that does not show it, by the API."""
    bucket, _, name = url[len("gs://") :].partition("/")
    end = time.monotonic() + patience
    while True:
        try:
            with open(f"{root}/{bucket}/{name}", "rb") as stream:
                return stream.read()
        except OSError:
            if time.monotonic() > end:
                return fetch(bucket, name)
        time.sleep(0.5)


def digest(path: str) -> str:
    """That of a cloudtrain.pyz: over its sources' names, sizes and bytes. Of all else zipfile checks the CRC."""
    total = hashlib.sha256()
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            if not name.endswith(".pyc"):
                total.update(f"{name}\0{len(data)}\0".encode() + data)
    return total.hexdigest()


def main(url: str, arguments: list[str]) -> None:
    """Ends in `prepare.main`, which becomes the node."""
    # The kernel keeps from PID 1 every signal that it has no handler for. There is nothing to save yet.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(AGAIN))
    try:
        path = os.path.join(tempfile.mkdtemp(prefix="cloudtrain-"), "cloudtrain.pyz")
        with open(path, "wb") as stream:
            stream.write(read(url))
        if digest(path) != url.split("/")[-2]:
            raise ValueError("it is damaged")
    except Exception as exc:  # noqa: BLE001  whatever it is, one line says it
        why = f"{url}: {exc}; may the job's service account read its bucket?"
        sys.stderr.write(f"cloudtrain: this node cannot start: {why}\n")
        sys.stderr.flush()
        os._exit(AGAIN)
    if sys.version_info < (3, 10):  # noqa: UP036  an image may have any
        os.execv(sys.executable, [sys.executable, path])  # which says so
    sys.path.insert(0, path)  # an image may have another version
    from cloudtrain.providers.vertex import prepare

    prepare.main(path, arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
