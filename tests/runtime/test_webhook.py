"""The post at the end of an attempt: its content, and a broken webhook that costs only a log line."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cloudtrain.runtime.timings import TIMINGS
from cloudtrain.runtime.webhook import begin, payload

RECORD = {
    "attempt": "0.0", "outcome": "succeeded", "category": "", "reason": "", "failure": None, "started": 1.0,
    "resumed_from": "",
}  # fmt: skip
SECRET = "s3cret\nvalue"


class Hook(http.server.ThreadingHTTPServer):
    """A webhook that answers with ``codes`` in turn, then 200, after ``slow`` seconds. It keeps each post."""

    daemon_threads = True

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.codes: list[int] = []
        self.slow = 0.0
        self.posts: list[tuple[str, dict[str, str], Any]] = []
        super().__init__((address, 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posts.append((self.path, dict(self.headers), body))
        time.sleep(self.server.slow)
        self.send_response(self.server.codes.pop(0) if self.server.codes else 200)
        self.send_header("Location", f"{self.server.url}/elsewhere")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Hook]:
    with Hook() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIMINGS, "webhook_pauses", (0.01,))
    monkeypatch.setattr(TIMINGS, "webhook_answer", 0.5)


def posted(url: str, headers: dict[str, str] | None = None, *, secret: str = "s3cret") -> list[str]:
    """Post the record and return the log lines."""
    context = {
        "run": "file:///s/runs/r", "run_id": "r", "provider": "local", "secrets": {"TOKEN": "env:TOKEN"},
        "webhook": {"url": url, "headers": headers or {}, "retries": 0},
    }  # fmt: skip
    messages: list[str] = []
    thread = begin(context, RECORD, attempt=0, secrets={"env:TOKEN": secret}.__getitem__, say=messages.append)
    thread.join(20)
    assert not thread.is_alive()
    return messages


def test_the_record_is_posted_with_its_secret_header(hook: Hook) -> None:
    assert posted(f"{hook.url}/x?a=1", {"Authorization": "Bearer {secrets.TOKEN}"}) == []
    ((path, headers, body),) = hook.posts
    assert (path, headers["Authorization"], headers["Content-Type"]) == ("/x?a=1", "Bearer s3cret", "application/json")
    assert (body["state"], body["over"], body["text"]) == ("succeeded", True, "r: succeeded")
    assert (body["run"], body["attempt"], body["started"]) == ("file:///s/runs/r", "0.0", "1970-01-01T00:00:01Z")


def test_the_url_itself_may_be_a_secret(hook: Hook) -> None:
    assert posted("{secrets.TOKEN}", secret=f"{hook.url}/secret\n") == []
    assert hook.posts[0][0] == "/secret"


@pytest.mark.parametrize(("codes", "posts"), [([500], 2), ([429], 2), ([500, 503], 2), ([400], 1), ([302], 1)])
def test_a_failure_of_the_service_is_tried_once_more_and_a_refusal_is_not(
    hook: Hook, codes: list[int], posts: int
) -> None:
    last, fails = codes[-1], len(codes) == 2 or codes[0] < 429
    hook.codes = codes
    lines = posted(hook.url, {"X-Token": "{secrets.TOKEN}"})
    assert [path for path, *_ in hook.posts] == ["/"] * posts or posts == len(hook.posts)
    assert lines == ([f"the webhook was not reached, which changes nothing else: it answered {last}"] if fails else [])
    assert not any(path == "/elsewhere" for path, *_ in hook.posts)


def test_a_slow_webhook_is_left(hook: Hook) -> None:
    hook.slow = 2.0
    began = time.monotonic()
    (line,) = posted(hook.url)
    assert "timed out" in line or "in time" in line
    assert time.monotonic() - began < 10


def test_a_webhook_that_is_down_is_a_line() -> None:
    (line,) = posted("http://127.0.0.1:9/x")
    assert "Connection refused" in line


@pytest.mark.parametrize(
    ("url", "headers", "secret"),
    [
        ("http://127.0.0.1:9/x", {"X": "{secrets.TOKEN}"}, SECRET),  # a line break would add a header
        ("{secrets.TOKEN}", {}, "ftp://s3cret"),
        ("{secrets.TOKEN}", {}, "https://[s3cret"),
        ("http://127.0.0.1:9/{secrets.OTHER}", {}, "s3cret"),
    ],
)
def test_no_secret_is_in_the_line(url: str, headers: dict[str, str], secret: str) -> None:
    (line,) = posted(url, headers, secret=secret)
    assert "s3cret" not in line


@pytest.mark.parametrize(
    ("outcome", "category", "attempt", "over"),
    [
        ("succeeded", "", 0, True), ("failed", "user_error", 0, False), ("failed", "user_error", 1, True),
        ("failed", "infra", 1, False), ("preempted", "preempted", 1, False),
    ],
)  # fmt: skip
def test_over_is_true_only_if_no_attempt_can_follow(outcome: str, category: str, attempt: int, over: bool) -> None:
    context = {"run": "u", "run_id": "r", "provider": "p", "webhook": {"retries": 1}}
    record = {**RECORD, "outcome": outcome, "category": category, "reason": "because"}
    found = payload(context, record, attempt=attempt)
    assert found["over"] is over
    assert (found["state"] == "succeeded") is (outcome == "succeeded")
    assert found["text"].startswith("r: succeeded" if over and not category else f"r: failed ({category}): because")
