"""Claim the creation of a job: one client at a time, by an object of the store that is created once.

The API of custom jobs takes no id from its caller, so two clients that create at once would make two jobs. A claim is a
lease: if its client dies, another client can take it.
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import json
import secrets
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlencode

from ...errors import ConflictError, NotFoundError, PlatformError
from ...validate import unix_seconds
from .._cloud import decoded

CLAIM = "claim the creation of the job"
LEASE = 300.0
"""Seconds for which a claim holds. They exceed the one call that creates: `FRESH`, 60 s to connect, 60 s between two
bytes of the answer, and both again after a rejected token."""
FRESH = 30.0
"""Seconds for which our claim need not be renewed before use."""


class Claim:
    """Right to create one job. ``url`` is gs://…; ``call`` is a signed call to Cloud Storage at ``endpoint``."""

    def __init__(self, url: str, call: Callable[..., Any], *, endpoint: str) -> None:
        self._bucket, _, self._name = url.removeprefix("gs://").partition("/")
        self._call, self._endpoint = call, endpoint
        self._generation, self._since = "", 0.0
        self._body = json.dumps({"client": secrets.token_hex(16)}).encode()
        """Identifies our claim after a lost answer."""

    def take(self) -> bool:
        """Claim it, or renew our own claim. Return False while another client has it."""
        if self._generation and time.monotonic() - self._since < FRESH:
            return True
        if self._create(self._generation or "0"):
            return True
        old, age, ours = self._held()
        return bool(old) and (ours or age >= LEASE) and self._create(old)

    def drop(self) -> None:
        """Give the claim back: no job was created."""
        generation, self._generation = self._generation, ""
        if generation:
            self._ask("DELETE", f"{self._object}?ifGenerationMatch={generation}")

    @property
    def _object(self) -> str:
        return f"/storage/v1/b/{self._bucket}/o/{quote(self._name, safe='')}"

    def _create(self, generation: str) -> bool:
        """Write it over that ``generation`` (0: none). Return False if there is another one by now."""
        query = urlencode({"uploadType": "media", "name": self._name, "ifGenerationMatch": generation})
        began, self._generation = time.monotonic(), ""
        try:
            told = self._ask("POST", f"/upload/storage/v1/b/{self._bucket}/o?{query}", data=self._body)
        except ConflictError:
            return False
        self._generation, self._since = _of(told, "generation"), began
        return True

    def _held(self) -> tuple[str, float, bool]:
        """Return the stored claim's generation, its age in seconds by the service's clock, and True if it is ours."""
        try:
            told = self._ask("GET", self._object)
        except NotFoundError:
            return "", 0.0, False
        try:
            now = email.utils.parsedate_to_datetime(told.headers["Date"]).timestamp()
        except (KeyError, ValueError):
            raise PlatformError(f"{CLAIM}: the answer has no Date") from None
        digest = base64.b64encode(hashlib.md5(self._body, usedforsecurity=False).digest()).decode()
        ours = decoded(told.content, what=CLAIM).get("md5Hash") == digest
        return _of(told, "generation"), now - unix_seconds(_of(told, "timeCreated")), ours

    def _ask(self, method: str, path: str, **more: Any) -> Any:
        return self._call(method, f"{self._endpoint}{path}", what=CLAIM, **more)


def _of(told: Any, key: str) -> str:
    try:
        return str(decoded(told.content, what=CLAIM)[key])
    except KeyError:
        raise PlatformError(f"{CLAIM}: the answer has no {key}") from None
