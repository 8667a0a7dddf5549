"""Post the end of an attempt to the job's webhook. Nothing here changes how the attempt ends."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from .timings import TIMINGS

_SECRET = re.compile(r"\{secrets\.([^}]*)\}")
_BY_SCRIPT = ("user_error", "oom", "stalled")
"""Categories after which only the job's own retries bring another attempt; a platform may start the others again."""

Secrets = Callable[[str], str]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects: they would turn the post into a GET, and hand its headers to another host."""

    def redirect_request(self, *args: Any) -> None:
        return None


def begin(
    context: Mapping[str, Any],
    record: Mapping[str, Any],
    *,
    attempt: int,
    secrets: Secrets | None,
    say: Callable[[str], None],
) -> threading.Thread:
    """Start to post the exit ``record`` to the context's webhook. The thread does not hold up an exit.

    ``say`` gets a line if the post fails. No secret and no part of the URL but its host is in it.
    """
    body = json.dumps(payload(context, record, attempt=attempt)).encode()

    def run() -> None:
        try:
            _post(_request(context["webhook"], context["secrets"], secrets, body))
        except Exception as exc:  # noqa: BLE001  a provider's client for secrets may raise anything
            say(f"the webhook was not reached, which changes nothing else: {_reason(exc)}")

    thread = threading.Thread(target=run, name="webhook", daemon=True)
    thread.start()
    return thread


def payload(context: Mapping[str, Any], record: Mapping[str, Any], *, attempt: int) -> dict[str, Any]:
    """Return what node 0 knows at the end of an attempt, with the names and values of result.json.

    ``text`` is one line for a chat. ``over`` is false if another attempt may follow.
    """
    state = "succeeded" if record["outcome"] == "succeeded" else "failed"
    category = record["category"] or None
    over = state == "succeeded" or (category in _BY_SCRIPT and attempt >= context["webhook"]["retries"])
    word = f"{state} ({category})" if category else state
    return {
        "text": f"{context['run_id']}: {word}" + (f": {record['reason']}" if record["reason"] else ""),
        "over": over,
        "run": context["run"],
        "run_id": context["run_id"],
        "provider": context["provider"],
        "state": state,
        "category": category,
        "reason": record["reason"],
        "failure": record["failure"],
        "attempt": record["attempt"],
        "started": _iso(record["started"]),
        "ended": _iso(time.time()),
        "resumed_from": record["resumed_from"],
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _request(
    wanted: Mapping[str, Any], references: Mapping[str, str], secrets: Secrets | None, body: bytes
) -> urllib.request.Request:
    """Return the post with its secrets filled in."""

    def fill(text: str) -> str:
        return _SECRET.sub(lambda match: value(match[1]), text)

    def value(name: str) -> str:
        if secrets is None:
            raise LookupError
        return secrets(references[name]).strip()

    headers = {name: fill(text) for name, text in wanted["headers"].items()}
    url = fill(wanted["url"])
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise http.client.InvalidURL
    return urllib.request.Request(url, body, {"Content-Type": "application/json", **headers}, method="POST")


def _post(request: urllib.request.Request) -> None:
    """Send the request, once more after a failure of the service. Raises `OSError` or `HTTPException`."""
    opener = urllib.request.build_opener(_NoRedirect)
    for pause in (*TIMINGS.webhook_pauses, None):
        try:
            opener.open(request, timeout=TIMINGS.webhook_answer).close()
            return
        except urllib.error.HTTPError as exc:
            exc.close()
            if pause is None or not (exc.code >= 500 or exc.code == 429):
                raise
        except (OSError, http.client.HTTPException):
            if pause is None:
                raise
        time.sleep(pause)


def _reason(exc: Exception) -> str:
    """Return the reason without any text that may hold the URL or a header."""
    if isinstance(exc, urllib.error.HTTPError):
        return f"it answered {exc.code}"
    if isinstance(exc, urllib.error.URLError):
        return str(exc.reason)
    return "it did not answer in time" if isinstance(exc, TimeoutError) else type(exc).__name__
