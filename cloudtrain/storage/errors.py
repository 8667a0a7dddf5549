"""Classify the errors of the stores' client libraries by one table, and retry."""

from __future__ import annotations

import errno
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from ..errors import AuthError, CloudtrainError, LostContactError, StorageError

R = TypeVar("R")

#: The error table: a kind, its HTTP statuses and its exception names (of any base class). Names, because the back ends'
#: packages may not be installed and must not be imported to find out.
_TABLE: tuple[tuple[str, frozenset[int], frozenset[str]], ...] = (
    ("final", frozenset(), frozenset({"_FinalError"})),
    ("missing", frozenset({404, 410}), frozenset({"FileNotFoundError", "ResourceNotFoundError"})),
    (
        "taken",
        frozenset({409, 412}),
        frozenset(
            {
                "FileExistsError", "ResourceExistsError", "ResourceModifiedError",
                # obstore
                "AlreadyExistsError", "PreconditionError",
            }
        ),
    ),
    # paramiko; their base classes may be transient.
    ("auth", frozenset(), frozenset({"AuthenticationException", "BadHostKeyException"})),
    (
        "transient",
        frozenset({408, 425, 429, 500, 502, 503, 504}),
        frozenset(
            {
                # the standard library, fsspec, requests
                "ConnectionError", "TimeoutError", "FSTimeoutError", "IncompleteRead", "Timeout",
                "ChunkedEncodingError",
                # botocore
                "HTTPClientError", "IncompleteReadError", "ResponseParserError", "ResponseStreamingError",
                # aiohttp
                "ClientConnectionError", "ClientPayloadError",
                # azure-core
                "ServiceRequestError", "ServiceResponseError",
                # google-auth, gcsfs
                "TransportError", "ChecksumError",
                # paramiko, ftplib: a lost connection
                "SSHException", "NoValidConnectionsError", "EOFError",
            }
        ),
    ),
    (
        "auth",
        frozenset({401, 403, 407}),
        frozenset(
            {
                "PermissionError",
                # botocore
                "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError",
                "SSOError", "ProfileNotFound", "NoAuthTokenError",
                # azure-core, azure-identity
                "ClientAuthenticationError", "CredentialUnavailableError",
                # google-auth
                "GoogleAuthError",
                # obstore
                "PermissionDeniedError", "UnauthenticatedError",
            }
        ),
    ),
)  # fmt: skip
_DISK_ERRNOS = {errno.ENOSPC, errno.EROFS, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
#: FTP replies: no login, login refused, no such file.
_FTP = {"530": 401, "532": 401, "550": 404}
_AUTH_WORDS = ("forbidden", "credential", "expiredtoken", "accessdenied", "unauthorized", "not authorized")


_HOST = re.compile(r"""https?://(?:[^\s/@'"]*@)?([^\s/'"()<>,]+)|connect to host ([^\s'"]+)|host='([^']+)'""", re.I)
_UNREACHABLE = tuple(
    (re.compile(pattern, re.I), why)
    for pattern, why in (
        (
            "dns error|name or service not known|name resolution|nodename nor servname|fail\\w+ to resolve",
            "name not resolved",
        ),
        ("connection refused|connect call failed|actively refused", "connection refused"),
        ("network is unreachable|no route to host", "no route to host"),
        ("connect(ion)? ?time(d ?)?out", "no answer"),
    )
)
"""Messages of libraries and systems about a host without a connection, and ours."""
NAMED = 3
"""The first try that `report_retries` reports: what passes within a second is not worth a line."""
_WATCHER: ContextVar[Callable[[str], None]] = ContextVar("watcher", default=lambda text: None)


class TransientError(StorageError):
    """A call that failed for a transient reason; it may have been carried out nevertheless."""


class UnreachableError(TransientError, LostContactError):
    """A host of the store that could not be reached: a failure of the network, not of the store."""

    exit_code = LostContactError.exit_code


class FinalError(StorageError):
    """A failure that no other try can change: a missing bucket, a certificate that is not trusted."""


class CannotSwapError(StorageError):
    """A store that cannot replace a file only while it is unchanged."""


@contextmanager
def report_retries(say: Callable[[str], None]) -> Iterator[None]:
    """Report to ``say`` each call to a store, made in this thread, from its third try on, and each `report_retry`."""
    token = _WATCHER.set(say)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def report_retry(text: str) -> None:
    """Report a call of this thread that is made again, to the listener of `report_retries`, if there is one."""
    _WATCHER.get()(text)


@contextmanager
def report_wait(text: str) -> Iterator[None]:
    """Report ``text`` as `report_retry` does, if the work inside takes longer than `ClientTimings.opening`."""
    from .timings import CLIENT_TIMINGS

    timer = threading.Timer(CLIENT_TIMINGS.opening, _WATCHER.get(), [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _chain(exc: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    link: BaseException | None = exc
    while link is not None and link not in seen:
        seen.append(link)
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _status(exc: BaseException) -> int | None:
    """Return the HTTP status of a client library's exception, or the equivalent of an ftplib error."""
    if type(exc).__module__ == "ftplib":
        return _FTP.get(str(exc)[:3], 503 if str(exc).startswith("4") else None)
    response = getattr(exc, "response", None)
    if isinstance(response, Mapping):
        status: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    for name in ("status_code", "status", "code"):
        value = getattr(exc, name, None) or getattr(response, name, None)
        if str(value).isdigit() and 100 <= int(str(value)) < 600:
            return int(str(value))
    return None


def classify(exc: BaseException) -> str:
    """Return the kind of a back end's exception: missing, taken, transient, auth, disk, final or other."""
    for link in _chain(exc):
        if isinstance(link, OSError) and (
            link.errno in _DISK_ERRNOS or (isinstance(link, PermissionError) and link.filename)
        ):
            return "disk"
        if "No authentication methods" in str(link):  # paramiko without a key; its class is otherwise transient
            return "auth"
        names = {base.__name__ for base in type(link).__mro__}
        status = _status(link)
        for kind, statuses, classes in _TABLE:
            if status in statuses or names & classes:
                return kind
        if _is_bare_refusal(link):
            return "auth"
    text = str(exc).lower()
    if "socket is closed" in text:  # paramiko: another call has lost the connection
        return "transient"
    return "auth" if any(word in text for word in _AUTH_WORDS) else "other"


def _is_bare_refusal(exc: BaseException) -> bool:
    """Return whether this is S3's answer to a HEAD with an expired token: 400 without a body."""
    response = getattr(exc, "response", None)
    if isinstance(response, Mapping):
        return bool(response.get("Error", {}).get("Code") == "400")
    return _status(exc) == 400 and getattr(exc, "bare", False) is True


def translate(exc: BaseException, where: str) -> Exception:
    """Return the exception to raise for ``exc``: one line, of cloudtrain's tree, or a builtin for missing and taken."""
    reason = " ".join(str(exc).split())[:400] or type(exc).__name__
    kind = classify(exc)
    if kind == "missing":
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
    if kind == "taken":
        return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), where)
    if kind == "auth":
        hint = ""
        if any(map(_is_bare_refusal, _chain(exc))):
            hint = "sign in again: the credentials may have expired"
        if "AuthorizationPermissionMismatch" in reason:  # signed in, but without a role for the data
            hint = "give the caller the role Storage Blob Data Contributor on the container"
        return AuthError(f"{where}: no access: {reason}", hint=hint)
    if kind == "disk" and isinstance(exc, OSError):
        return StorageError(f"{exc.filename or where}: {exc.strerror or reason}")
    if kind == "transient" and (why := _unreachable(exc)):
        hint = "check the network, then run: cloudtrain doctor"
        return UnreachableError(f"cannot reach {_host(exc) or where}: {why}", hint=hint)
    hint = getattr(exc, "hint", "")
    kinds = {"transient": TransientError, "final": FinalError}
    return kinds.get(kind, StorageError)(f"{where}: {reason}", hint=hint)


def _unreachable(exc: BaseException) -> str:
    """Return why no connection was made; empty if one was, or the reason is unknown."""
    text = " ".join(f"{type(link).__name__} {link}" for link in _chain(exc))
    return next((why for pattern, why in _UNREACHABLE if pattern.search(text)), "")


def _host(exc: BaseException) -> str:
    """Return the host, and the port if any, that an exception names; "" for none."""
    found = (match for link in _chain(exc) if (match := _HOST.search(str(link))))
    return next((name for match in found for name in match.groups() if name), "")


class Retries:
    """A retry policy for a store: ``tries`` counts the first; ``sleep`` takes seconds."""

    def __init__(self, *, tries: int = 4, sleep: Callable[[float], None] = time.sleep) -> None:
        self.tries = tries
        self._sleep = sleep

    def __call__(
        self,
        where: str,
        work: Callable[[], R],
        *,
        again: bool = True,
        part: bool = False,
        renews: Callable[[Exception], bool] = lambda _: False,
    ) -> R:
        """Call ``work`` again after a transient failure or one that ``renews`` repairs; translate any other.

        Without ``again``, calls that may have been carried out are not repeated. ``part`` marks a part of a retried
        call: its permanent errors come out unchanged.
        """
        for left in range(self.tries - 1, -1, -1):
            try:
                return work()
            except (CloudtrainError, TypeError, AttributeError):
                raise
            except Exception as exc:  # back ends raise any class; the table sorts them
                if left and renews(exc):
                    continue
                transient = classify(exc) == "transient"
                if part and not transient:
                    raise
                if not (transient and left and again):
                    ours = translate(exc, where)
                    raise ours from (None if isinstance(ours, UnreachableError) else exc)
                if (number := self.tries - left + 1) >= NAMED:
                    report_retry(f"{where} does not answer (try {number} of {self.tries})")
                self.pause(self.tries - 1 - left)
        raise AssertionError("unreachable")

    def pause(self, number: int) -> None:
        """Wait after failure ``number`` (from 0): longer each time, with jitter between clients."""
        self._sleep(min(10.0, 0.5 * 2**number) * random.uniform(0.5, 1.5))
