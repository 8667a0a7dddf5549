"""Ask a service for JSON from a node, with the standard library alone: images need no SDK."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import StorageError
from .timings import TIMINGS

_LONGEST = 300


def ask(
    make: Callable[[], urllib.request.Request], *, what: str, how: str, silent: str = "", direct: bool = False
) -> Any:
    """Return the JSON answer to ``make()``, which is called for each try because a signature expires.

    Raises `StorageError` without the content of the request. If the service refused, the message has ``what`` and the
    fix ``how``; if it did not answer, its name and the likely cause ``silent``. ``direct`` bypasses any proxy, for
    addresses of this machine.
    """
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if direct else []))
    for pause in (*TIMINGS.http_pauses, None):
        request = make()
        try:
            with opener.open(request, timeout=TIMINGS.http_answer) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as exc:
            code, reason = _error_of(exc)
            passing = exc.code >= 500 or exc.code == 429 or "Throttl" in code
            why = f"{what} was refused ({code or exc.code}): {reason}; {how}"
        except (OSError, ValueError, http.client.HTTPException) as exc:  # the last: a truncated answer
            passing = True
            why = f"{what}: {urllib.parse.urlsplit(request.full_url).netloc} does not answer: {exc}{silent}"
        if not passing or pause is None:
            raise StorageError(why)
        time.sleep(pause)
    raise AssertionError("unreachable")


def _error_of(exc: urllib.error.HTTPError) -> tuple[str, str]:
    """Return the service's error code (or "") and message, in the formats of AWS, Azure and Google."""
    code, message = "", None
    try:
        answer = json.loads(exc.read())
        code = str(answer.get("__type", "")).rpartition("#")[2]
        error = answer.get("error")
        message = error.get("message") if isinstance(error, Mapping) else answer.get("error_description") or error
        message = message or answer.get("message") or answer.get("Message")
    except (OSError, ValueError, AttributeError, http.client.HTTPException):
        pass
    return code, " ".join(str(message or "no reason").split())[:_LONGEST]
