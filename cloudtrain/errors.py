"""The one tree of errors; every class carries the exit code a command line ends with.

* CloudtrainError            9  anything cloudtrain itself raises on purpose
    x SpecError              2  a job, flag, setting or tree that cannot be sent; ``field`` is dotted
      x UnsupportedError     2  a provider cannot honour a field; names provider, field and why
      x ConflictError        2  the run id, or the native name, belongs to something else
      x NotFoundError        2  no such run, provider, file or checkpoint
    x AuthError              3  no or refused credentials
    x QuotaError             4  the account may not have that much
    x CapacityError          4  the platform has none to give now
    x LostContactError       7  the platform does not answer; the run, if any, goes on
    x StorageError           8  the store, or this disk, failed
      x DigestError          8  bytes that are not the bytes that were promised
    x PlatformError          9  the platform failed, or answered what it never should

A run that ended badly is no exception: it is a result (see ``EXIT_CODES``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = [
    "CATEGORIES",
    "EXIT_CODES",
    "AuthError",
    "CapacityError",
    "CloudtrainError",
    "ConflictError",
    "DigestError",
    "LostContactError",
    "NotFoundError",
    "PlatformError",
    "QuotaError",
    "SpecError",
    "StorageError",
    "UnsupportedError",
    "scrubbed",
]

#: Exit code of ``submit`` and ``wait`` by the category of a run that ended other than well.
EXIT_CODES: dict[str, int] = {
    "user_error": 1,
    "oom": 1,
    "stalled": 1,
    "spec": 2,
    "image": 2,
    "auth": 3,
    "quota": 4,
    "capacity": 4,
    "preempted": 4,
    "cancelled": 5,
    "timeout": 6,
    "storage": 8,
    "infra": 9,
}
CATEGORIES: tuple[str, ...] = tuple(EXIT_CODES)


_USER = re.compile(r"(?<=://)[^/\s@:'\"]*:(?!\d{1,5}/)[^\s@'\"]*@")
"""With slashes, though no URL may have them there: keys of AWS do. A port and a slash begin a path."""
_SIGNED = re.compile(
    r"""(?ix) ([?&] (?: sig | signature | x-(?:amz|goog)-(?:signature|credential|security-token) | awsaccesskeyid
    | googleaccessid | (?:access_?|id_?|auth_?)?token | (?:api_?|account_?|access_?)?key | password | passwd | secret
    ) = | \b (?: accountkey | sharedaccesssignature | sharedaccesskey | aws_secret_access_key | aws_session_token ) = )
    [^&;\s'"<>)\]}]+"""
)


def scrubbed(text: str) -> str:
    """``text`` whose URLs show no user's password and no signature, and whose connection strings show no key.

    Client libraries quote the URL that failed, signature and all; what they say ends in terminals, logs and records.
    """
    return _SIGNED.sub(r"\1***", _USER.sub("***@", text))


MOST = 4000
"""Characters of a message: one may quote what is wrong, and that may be all of a file."""


def _worded(message: str) -> str:
    """`scrubbed`, and less its middle where it is too long to be read."""
    text = scrubbed(message)
    return text if len(text) <= MOST else f"{text[: MOST * 2 // 3]} ... {text[-(MOST // 3) + 5 :]}"


class CloudtrainError(Exception):
    """Base class of the errors that cloudtrain raises on purpose.

    ``str()`` says what is wrong in one line of at most 4,000 characters, `scrubbed`. ``hint`` says how to fix it, with
    the exact command or the lines to paste where there are any; it may have several lines and is empty where there is
    nothing to say. A hint never repeats the message. A traceback shows both (from Python 3.11 on).
    """

    exit_code = 9
    refusals: tuple[Mapping[str, Any], ...] = ()
    """Of a job that nobody takes: what each place said."""

    def __init__(self, *args: object, hint: str = "") -> None:
        super().__init__(*(_worded(arg) if isinstance(arg, str) else arg for arg in args))
        self.hint = scrubbed(hint)
        if self.hint:
            self.__notes__ = [f"hint: {self.hint}"]


class SpecError(CloudtrainError):
    """Something in what the user asked for is wrong; nothing was sent.

    ``field`` is the dotted name of the culprit (``resources.gpu``), or ``""`` when there is none; ``message`` the rest.
    """

    exit_code = 2

    def __init__(self, message: str, *, field: str = "", hint: str = "") -> None:
        self.field, self.message = field, _worded(message)
        super().__init__(f"{field}: {message}" if field else message, hint=hint)


class UnsupportedError(SpecError):
    """``provider`` cannot honour ``field``; ``why`` says why, ``hint`` what to do instead."""

    def __init__(self, provider: str, field: str, why: str, *, hint: str = "") -> None:
        self.provider, self.why = provider, why
        super().__init__(f"not supported by provider {provider}: {why}", field=field, hint=hint)


class ConflictError(SpecError):
    """The name is taken by another job: never adopted, never overwritten."""


class NotFoundError(SpecError):
    """What was asked for does not exist."""


class AuthError(CloudtrainError):
    """Credentials are missing, expired or refused."""

    exit_code = 3


class QuotaError(CloudtrainError):
    """The account's quota does not cover the request."""

    exit_code = 4


class CapacityError(CloudtrainError):
    """The platform, or this machine, has not got what was asked for."""

    exit_code = 4


class LostContactError(CloudtrainError):
    """The platform could not be reached for too long; a submitted run goes on.

    ``passing`` is False when asking again from here cannot help. ``throttled`` is True when the platform answers that
    it was asked too often; the message says why.
    """

    exit_code = 7

    def __init__(self, message: str, *, passing: bool = True, throttled: bool = False, hint: str = "") -> None:
        self.passing, self.throttled = passing, throttled
        super().__init__(message, hint=hint)


class StorageError(CloudtrainError):
    """Reading or writing the store or the local disk failed."""

    exit_code = 8


class DigestError(StorageError):
    """Content does not have the digest it was recorded with."""


class PlatformError(CloudtrainError):
    """The platform failed or broke its own contract."""

    exit_code = 9
