"""Azure ML's real mount engine (azureml-dataprep-rslex) against Azurite, for the files that a node writes to ``live/``.

`make test-azureml-mount` runs this. The engine needs a Python of its own, which RSLEX_PYTHON names. It calls the host
of an account, so a local proxy signs each call and forwards it to Azurite.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import http.server
import os
import ssl
import subprocess
import sys
import threading
import urllib.parse
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import AZURITE_ACCOUNT, AZURITE_KEY

from cloudtrain.provider_api.protocol import Layout
from cloudtrain.runs.listing import list_page
from cloudtrain.runtime.checkpoints import replace_file
from cloudtrain.runtime.logs import LogWriter
from cloudtrain.runtime.record import write_record
from cloudtrain.store.gc import collect
from cloudtrain.store.store import Store

pytestmark = [pytest.mark.azureml_mount, pytest.mark.remote, pytest.mark.slow]

MOUNT = """
import sys, time, types
import azureml.dataprep

def module(name, **members):  # of azureml-dataprep, which the engine asks for a token, and for nothing else here
    sys.modules["azureml.dataprep.api" + name] = made = types.ModuleType(name)
    vars(made).update(members)

for name in ("DataPrepException", "ExecutionError", "UnexpectedError", "ValidationError"):
    setattr(azureml.dataprep, name, type(name, (Exception,), {}))
module("", __path__=[])
module("._azure_access_token_resolver", _resolve_azure_access_token=lambda *_: ("token", int(time.time()) + 3600))
module("._datastore_helper", _get_auth=lambda: (None, {}))
module(".engineapi", __path__=[])
module(".engineapi.typedefinitions", AuthType=types.SimpleNamespace(SERVICEPRINCIPAL=1))
from azureml.dataprep.rslex import PyMountOptions, RslexURIMountContext, init_environment
uri, folder, logs = sys.argv[1:]
init_environment(logs, None, "INFO", False, None, None, None, None, None, None)
mount = RslexURIMountContext(folder, uri, PyMountOptions(None, None, None, None, False, 0o777, False), True)
mount.start(False)
print("mounted", flush=True)
sys.stdin.read()
mount.stop()
"""


HOST = f"{AZURITE_ACCOUNT}.blob.core.windows.net"


def certificates(folder: Path) -> tuple[Path, Path]:
    """Return an authority, and a certificate of `HOST` with its key: the engine accepts no self-signed one."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.timezone.utc)
    issuer, authority = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")]),
        ec.generate_private_key(ec.SECP256R1()),
    )

    def made(name: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        )
        return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    trusted, server = folder / "authority.pem", folder / "server.pem"
    trusted.write_bytes(made(issuer, authority, ca=True))
    server.write_bytes(private + made(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)]), key, ca=False))
    return trusted, server


class Relay(http.server.BaseHTTPRequestHandler):
    """A proxy for `HOST` that answers itself: it signs each call and forwards it to Azurite."""

    protocol_version = "HTTP/1.1"
    azurite = ""
    signature = ""
    tls: ssl.SSLContext

    def do_CONNECT(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.connection = self.tls.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
        self.close_connection = False

    def finish(self) -> None:
        super().finish()
        self.connection.close()

    def _relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urllib.parse.urlsplit(self.path)
        query = "&".join(part for part in (parts.query, self.signature) if part)
        skipped = {"host", "authorization", "connection", "proxy-connection", "accept-encoding"}
        headers = {name: text for name, text in self.headers.items() if name.lower() not in skipped}
        with contextlib.closing(http.client.HTTPConnection(self.azurite)) as connection:
            connection.request(self.command, f"/{AZURITE_ACCOUNT}{parts.path}?{query}", body, headers)
            answer = connection.getresponse()
            data = answer.read().replace(b"<Marker/>", b"")  # the service leaves it out
        self.send_response_only(answer.status)
        for name, text in answer.headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, text)
        length = answer.headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        self.wfile.write(data if self.command != "HEAD" else b"")

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _relay

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy(azure_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

    signature = generate_account_sas(
        AZURITE_ACCOUNT,
        AZURITE_KEY,
        ResourceTypes(service=True, container=True, object=True),
        AccountSasPermissions(read=True, write=True, delete=True, list=True, add=True, create=True),
        datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1),
    )
    endpoint = azure_server.partition("BlobEndpoint=http://")[2].partition("/")[0]
    trusted, server_pem = certificates(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_pem)
    handler = type("Handler", (Relay,), {"azurite": endpoint, "signature": signature, "tls": context})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the engine cuts its connections
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextlib.contextmanager
def mounted(url: str, folder: Path, proxy: str, logs: Path) -> Iterator[Path]:
    """Mount ``abfs://CONTAINER/PATH`` at ``folder`` in a process of the engine. At the end it has uploaded
    everything."""
    folder.mkdir(exist_ok=True)
    container, _, path = url.removeprefix("abfs://").partition("/")
    uri = f"wasbs://{container}@{HOST}/{path}"
    words = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"), proxy)
    command = [os.environ["RSLEX_PYTHON"], "-c", MOUNT, uri, str(folder), str(logs)]
    with subprocess.Popen(
        command,
        env={**os.environ, **words},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "mounted\n"
        try:
            yield folder
        finally:
            process.stdin.close()
            process.wait(60)
            subprocess.run(["fusermount", "-uz", str(folder)], capture_output=True, check=False)


def mark(url: str) -> None:
    """Create the empty blob of a folder, as the platform does before it mounts an output."""
    from azure.storage.blob import BlobClient

    container, _, path = url.removeprefix("abfs://").partition("/")
    with BlobClient.from_connection_string(os.environ["AZURE_STORAGE_CONNECTION_STRING"], container, path) as blob:
        blob.upload_blob(b"", metadata={"hdi_isfolder": "true"})


def test_files_of_a_node_reach_the_store_and_can_be_deleted(azure_url: str, proxy: str, tmp_path: Path) -> None:
    store = Store(f"{azure_url}/{uuid.uuid4().hex[:8]}")
    layout = Layout(store=store.url, run_id="kept", code_digest="a" * 64, runtime_digest="b" * 64)
    store.create_run(layout, {"protocol": 1, "layout": {"code_digest": "a" * 64, "runtime_digest": "b" * 64}})
    source = tmp_path / "weights"
    source.write_bytes(os.urandom(3 << 20))
    mark(f"{store.url}/runs/dead/live")
    with mounted(f"{store.url}/runs/dead/live", tmp_path / "live", proxy, tmp_path / "logs") as live:
        (live / "checkpoints/step-1/0.0-1/node-0").mkdir(parents=True)
        replace_file(source, live / "checkpoints/step-1/0.0-1/node-0/weights", lambda *_: None)
        log = LogWriter(node=0, out=os.open(os.devnull, os.O_WRONLY))
        log.begin("0.0", live / "logs/0.0/node-0")
        log.say("hello")
        log.flush()
        write_record(live, "0.0-node-0", {"failure": None, "reason": ""})
    names = set(store.files.entries("runs/dead"))
    assert names == {
        "runs/dead/live/checkpoints/step-1/0.0-1/node-0/weights",
        "runs/dead/live/exit/0.0-node-0.json",
        "runs/dead/live/logs/0.0/node-0/000000001.log",
    }
    assert store.files.read("runs/dead/live/checkpoints/step-1/0.0-1/node-0/weights") == source.read_bytes()
    with mounted(f"{store.url}/runs/dead/live", tmp_path / "again", proxy, tmp_path / "logs") as live:
        assert (live / "checkpoints/step-1/0.0-1/node-0/weights").read_bytes() == source.read_bytes()
    assert [row["run_id"] for row in list_page(store, limit=None).rows] == ["kept", "dead"]
    assert [item.key for item in collect(store, older_than=0, delete=True).found] == ["runs/dead"]
    assert [row["run_id"] for row in list_page(store, limit=None).rows] == ["kept"], (
        "the mount's folder markers are listed as runs"
    )
    assert "runs/dead" not in store.files.names("runs")
