"""Start a container of Vertex AI: fetch cloudtrain.pyz, check its digest, and continue in it.

The request holds the text of this file as an argument of ``python -c``, because the container has no other file of
cloudtrain yet. Arguments: the gs:// URL of cloudtrain.pyz, in a folder named by its digest, then those of the pyz.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.path[:1] == [""]:
    del sys.path[0]  # the image's working directory, which may have a queue.py or json.py of its own

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
"""Seconds before each retry of a failed call."""
TIMEOUT = 30.0
AGAIN = 134
"""Exit code for a node that could not start, so that it does not count as the script's failure; see `node.AGAIN`."""


def token() -> str:
    """Return the access token of the job's service account, from the machine's metadata server."""
    host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the metadata server is not behind a proxy
    with direct.open(request, timeout=TIMEOUT) as answer:
        return str(json.loads(answer.read())["access_token"])


def fetch(bucket: str, name: str) -> bytes:
    """Return an object, by Cloud Storage's JSON API. Raises `OSError`, `ValueError` or `HTTPException`."""
    host = (os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com").rstrip("/")
    url = f"{host}/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}?alt=media"
    for pause in (*PAUSES, None):
        try:
            request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token()}"})
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return bytes(answer.read())
        except (OSError, ValueError, http.client.HTTPException):  # HTTPException: a truncated answer
            if pause is None:
                raise
            time.sleep(pause)
    raise AssertionError("unreachable")


def read(url: str, *, root: str = "/gcs", patience: float = PATIENCE) -> bytes:
    """Return the content of a gs:// URL, from the mounted bucket. If it does not appear there, use the API."""
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
    """Return the digest of a cloudtrain.pyz, over names, sizes and bytes of its sources. zipfile checks every CRC."""
    total = hashlib.sha256()
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            if not name.endswith(".pyc"):
                total.update(f"{name}\0{len(data)}\0".encode() + data)
    return total.hexdigest()


def main(url: str, arguments: list[str]) -> None:
    """Fetch cloudtrain.pyz and run `prepare.main`, which becomes the node."""
    # The kernel drops PID 1's signals without a handler. There is nothing to save yet.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(AGAIN))
    try:
        path = os.path.join(tempfile.mkdtemp(prefix="cloudtrain-"), "cloudtrain.pyz")
        with open(path, "wb") as stream:
            stream.write(read(url))
        if digest(path) != url.split("/")[-2]:
            raise ValueError("its digest is wrong")
    except Exception as exc:  # noqa: BLE001  one line for any cause
        why = f"{url}: {exc}; may the job's service account read its bucket?"
        sys.stderr.write(f"cloudtrain: this node cannot start: {why}\n")
        sys.stderr.flush()
        os._exit(AGAIN)
    if sys.version_info < (3, 10):  # noqa: UP036  an image may have any
        os.execv(sys.executable, [sys.executable, path])  # prints that Python is too old
    sys.path.insert(0, path)  # before another version in the image
    from cloudtrain.providers.vertex import prepare

    prepare.main(path, arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
