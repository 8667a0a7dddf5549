"""Provider ``azureml`` over real connections: answers that break off, and discoveries without a service."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator

import pytest

from cloudtrain.errors import LostContactError, PlatformError
from cloudtrain.providers.azureml import SAMPLE, Provider

BODY = b"one\ntwo\n"
REPLIES = {
    "/whole": [b"Content-Length: 8", BODY],
    "/short": [b"Content-Length: 100", BODY],
    "/chunks": [b"Transfer-Encoding: chunked", b"8\r\n" + BODY + b"\r\n"],
    "/garbled": [b"Transfer-Encoding: chunked", b"8\r\n" + BODY + b"\r\nno length\r\n"],
    "/packed": [b"Content-Encoding: gzip\r\nContent-Length: 8", BODY],
}


class Handler(http.server.BaseHTTPRequestHandler):
    """A server that answers a path of `REPLIES` and closes the connection."""

    def do_GET(self) -> None:
        header, body = REPLIES[self.path.partition("?")[0]]
        self.wfile.write(b"HTTP/1.1 206 Partial Content\r\nConnection: close\r\n" + header + b"\r\n\r\n" + body)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def reader(url: str) -> Provider:
    """Return a provider whose history has just named one log file of job ``j``."""
    provider = Provider(**SAMPLE["settings"])  # type: ignore[arg-type]
    details = {"status": "Running", "logFiles": {"user_logs/std_log.txt": f"{url}?sig=hidden"}}
    provider.account.details["j"] = (time.monotonic(), details)
    return provider


@pytest.mark.parametrize("path", ["/short", "/chunks", "/garbled", "/packed"])
def test_a_log_that_breaks_off_is_lost_contact(server: str, path: str) -> None:
    with pytest.raises(LostContactError) as caught:
        reader(server + path).logs("j")
    assert "read user_logs/std_log.txt" in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_a_log_that_does_not_break_off_is_read(server: str) -> None:
    assert [line.text for line in reader(f"{server}/whole").logs("j").lines] == ["one", "two"]


@pytest.mark.parametrize(
    ("body", "service"),
    [
        (b'{"api": "https://a.example/", "history": "https://h.example"}', "https://a.example"),
        (b'{"history": "https://h.example"}', "https://h.example"),
    ],
)
def test_the_service_of_runs_is_the_discovery_s_api(
    body: bytes, service: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REPLIES, "/discovery", [b"Content-Length: %d" % len(body), body])
    provider = reader(server)
    assert provider.account.discovered(f"{server}/discovery") == service


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"api": "http://plain.example"}'])
def test_a_discovery_that_names_no_service(body: bytes, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REPLIES, "/discovery", [b"Content-Length: %d" % len(body), body])
    with pytest.raises(PlatformError, match="names no https service"):
        reader(server).account.discovered(f"{server}/discovery")
