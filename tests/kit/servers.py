"""Object stores on loopback, one a test session: S3 (moto), Azure Blob (Azurite) and a small GCS.

A pytest plugin: register it with ``pytest_plugins = ["servers"]``. A test that asks for a server finds its credentials
and endpoint in the environment, as a user would set them.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from worlds.vertex.gcs import Gcs
from worlds.vertex.wire import Wire

AZURITE = Path.home() / ".cache" / "cloudtrain-azurite" / "node_modules" / ".bin" / "azurite-blob"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # public
AZURITE_ACCOUNT = "devstoreaccount1"


def free_port() -> int:
    """Return a free port of 127.0.0.1."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def certificates() -> tuple[bytes, bytes]:
    """Return the certificate of an authority, and a key and certificate of 127.0.0.1 that it signed, as PEM."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now, keys = datetime.datetime.now(datetime.timezone.utc), [ec.generate_private_key(ec.SECP256R1()) for _ in "12"]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("authority", "server")]
    made = []
    for number in range(2):
        builder = x509.CertificateBuilder().subject_name(names[number]).issuer_name(names[0])
        builder = builder.public_key(keys[number].public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=2))
        builder = builder.add_extension(x509.BasicConstraints(ca=number == 0, path_length=None), critical=True)
        own = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = builder.add_extension(own, critical=False)
        made.append(builder.sign(keys[0], hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    kind = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return made[0], keys[1].private_bytes(*kind) + made[1]


def wait_for_port(port: int, process: subprocess.Popen[bytes], *, seconds: float = 30) -> None:
    """Return once a server listens; fail as soon as the process has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}: {process.args}"
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on {port} after {seconds} s: {process.args}")


@contextmanager
def served(command: list[str], port: int, log: Path) -> Iterator[None]:
    """Run the server process ``command``, with its output in ``log``."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_for_port(port, process)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def race(code: str, *args: str, count: int) -> list[Any]:
    """Run ``code`` in ``count`` processes at once. Return the JSON that each prints. ``sys.argv`` holds ``args`` and
    the process's number. Each process calls ``ready()`` when it is about to begin."""
    start = "import json, sys\ndef ready(): print('ready', flush=True); sys.stdin.readline()\n"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen([sys.executable, "-c", start + code, *args, str(i)], **pipes) for i in range(count)]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        found = [json.loads(racer.communicate(timeout=60)[0]) for racer in racers]
        assert [racer.returncode for racer in racers] == [0] * count
        return found
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle SIGINT here: a shell starts background commands with SIGINT ignored, and this suite may be one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------------------------------------------------- S3


#: moto's server. It checks the conditions of a write and writes in two steps. A lock serves one request an object at a
#: time, because S3 decides atomically. moto looks at the folders of all its services for each request: once is enough.
_MOTO = """
import functools, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler
from moto.s3.responses import S3Response
from moto.server import main

find = DomainDispatcherApplication.get_backend_for_host
DomainDispatcherApplication.get_backend_for_host = functools.cache(find)
MotoRequestHandler.log_request = lambda self, *given: None

respond, one_at_a_time = S3Response._key_response, threading.Lock()

def decided(self, *args):
    with one_at_a_time:
        return respond(self, *args)

S3Response._key_response = decided
main()
"""


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the endpoint of a moto server."""
    port = free_port()
    command = [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", str(port)]
    with served(command, port, tmp_path_factory.mktemp("moto") / "log"):
        yield f"http://127.0.0.1:{port}"


def point_aws_at(url: str, monkeypatch: pytest.MonkeyPatch, folder: Path, **more: str) -> None:
    """Point this test's AWS variables at the server ``url``, and at no account of this machine. ``folder`` has no AWS
    configuration. ``more`` are further variables, without ``AWS_``."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    values = {
        "ENDPOINT_URL": url,
        "ACCESS_KEY_ID": "testing",
        "SECRET_ACCESS_KEY": "testing",
        "DEFAULT_REGION": "us-east-1",
        "EC2_METADATA_DISABLED": "true",
        "CONFIG_FILE": str(folder / "no-aws-config"),
        "SHARED_CREDENTIALS_FILE": str(folder / "no-aws-credentials"),
    }
    for name, value in {**values, **more}.items():
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.fixture
def s3_environment(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the endpoint, with this test's environment pointing at it."""
    point_aws_at(s3_server, monkeypatch, tmp_path)
    return s3_server


@pytest.fixture
def s3_url(s3_environment: str) -> str:
    """Return the URL of a new, empty folder in a new bucket."""
    bucket = f"b-{uuid.uuid4().hex[:12]}"
    request = urllib.request.Request(f"{s3_environment}/{bucket}", method="PUT", headers={"Authorization": _UNCHECKED})
    with urllib.request.urlopen(request):
        return f"s3://{bucket}/some/store"


@pytest.fixture(scope="session")
def s3fs() -> str:
    """Return a folder for ``PYTHONPATH`` with s3fs, as in a script's image. Its botocore is too old for boto3."""
    folder = os.environ.get("S3FS_FOLDER", "")
    if not os.path.isdir(os.path.join(folder, "s3fs")):
        pytest.skip("no folder with s3fs in S3FS_FOLDER; make test sets it")
    return folder


#: moto reads the region and service from it and checks nothing.
_UNCHECKED = "AWS4-HMAC-SHA256 Credential=testing/20250101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


# ----------------------------------------------------------------------------------------------------------- Azure Blob


def azurite() -> str | None:
    """Return the path of Azurite, if ``tests/azurite.sh`` or a package manager installed it."""
    return str(AZURITE) if AZURITE.exists() else shutil.which("azurite-blob")


def required() -> bool:
    """Return True if a server that is not installed fails the tests instead of skipping them."""
    return os.environ.get("CLOUDTRAIN_REQUIRE_ALL") == "1"


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the connection string of an Azurite server. Without Azurite, skip, or fail when
    CLOUDTRAIN_REQUIRE_ALL=1."""
    program = azurite()
    if program is None:
        (pytest.fail if required() else pytest.skip)("Azurite is not installed; run tests/azurite.sh")
    port, folder = free_port(), tmp_path_factory.mktemp("azurite")
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent"]
    command += ["--skipApiVersionCheck", "--disableTelemetry"]
    with served(command, port, folder / "log"):
        yield (
            f"DefaultEndpointsProtocol=http;AccountName={AZURITE_ACCOUNT};AccountKey={AZURITE_KEY};"
            f"BlobEndpoint=http://127.0.0.1:{port}/{AZURITE_ACCOUNT};"
        )


@pytest.fixture
def azure_environment(azure_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the connection string, also in this test's environment."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure_server)
    return azure_server


@pytest.fixture
def azure_url(azure_environment: str) -> str:
    """Return the URL of a new, empty folder in a new container."""
    from azure.storage.blob import BlobServiceClient

    container = f"c-{uuid.uuid4().hex[:12]}"
    with BlobServiceClient.from_connection_string(azure_environment) as client:
        client.create_container(container)
    return f"abfs://{container}/some/store"


# ------------------------------------------------------------------------------------------------------------------ GCS


@pytest.fixture
def gcs_server(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gcs]:
    """Yield a public Cloud Storage with the bucket ``bucket``, and this test's environment pointing at it."""
    wire = Wire()
    gcs = Gcs(tmp_path_factory.mktemp("gcs"), wire, open=True)
    gcs.make("bucket")
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "GCSFS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", wire.listen())
    yield gcs
    wire.close()
    assert wire.crashes == []


@pytest.fixture
def gcs_url(gcs_server: Gcs) -> str:
    """Return the URL of an empty folder."""
    return "gs://bucket/some/store"


# ------------------------------------------------------------------------------------------------------------------ OBS


@pytest.fixture
def obs_url(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of an empty folder. OBS can only create exclusively."""
    from worlds.modelarts.plane import Plane

    with Plane(tmp_path_factory.mktemp("huawei")) as plane:
        for name, value in plane.environ().items():
            monkeypatch.setenv(name, value)
        plane.obs.make("bucket")
        yield "obs://bucket/some/store"


# ------------------------------------------------------------------------------------------------------------------ web


class Web:
    """A folder over HTTP by Python's own server: no ranges, but the time of the last change."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url

    def write(self, path: str, data: bytes) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


@pytest.fixture
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    """Yield a web server with a folder of its own."""
    folder = tmp_path_factory.mktemp("web")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    make: Callable[..., Any] = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), make) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield Web(folder, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
