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

import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from types import FrameType, TracebackType
from typing import Any

__all__ = [
    "CATEGORIES", "EXIT_CODES", "AuthError", "CapacityError", "CloudtrainError", "ConflictError", "DigestError",
    "LostContactError", "NotFoundError", "PlatformError", "QuotaError", "SpecError", "StorageError",
    "UnsupportedError", "reason_of", "scrubbed", "shorten_tracebacks", "warn",
]  # fmt: skip

#: Exit code of ``submit`` and ``wait`` by the category of a run that did not succeed.
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
"""The password may hold slashes, though URLs forbid them: AWS keys do. A port and a slash begin a path."""
_SIGNED = re.compile(
    r"""(?ix) ([?&] (?: sig | signature | x-(?:amz|goog)-(?:signature|credential|security-token) | awsaccesskeyid
    | googleaccessid | (?:access_?|id_?|auth_?)?token | (?:api_?|account_?|access_?)?key | password | passwd | secret
    ) = | \b (?: accountkey | sharedaccesssignature | sharedaccesskey | aws_secret_access_key | aws_session_token ) = )
    [^&;\s'"<>)\]}]+"""
)


def scrubbed(text: str) -> str:
    """Return ``text`` with passwords and signatures in URLs, and keys in connection strings, replaced.

    Client libraries quote the URL that failed with its signature; their messages reach terminals, logs and records.
    """
    return _SIGNED.sub(r"\1***", _USER.sub("***@", text))


MOST = 4000
"""Characters of a message: a quoted value may be a whole file."""


_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
_COMMAND = re.compile(r"\b(cloudtrain|aws|az|docker|gcloud|git|jupyter|kubectl|pip|uv) .*")
_KEYWORDS = {
    "--nodes": "instance_count", "--hp": "hyperparameters", "--input": "inputs", "--secret": "secrets",
    "--metric": "metrics", "--tag": "tags", "--option": "options", "--dependency": "dependencies",
    "--gpus": "total_gpus", "--checkpoint-path": "checkpoint_paths", "--webhook-header": "webhook_headers",
    "--set": "settings", "--map": "maps", "--secret-value": "secret_values",
}  # fmt: skip
"""Flags whose keyword in Python has another name."""


def _in_python(text: str) -> str:
    """Return the keywords for the flags in ``text``, as in ``in Python: --run-id is run_id``; empty without flags."""
    flags = dict.fromkeys(_FLAG.findall(_COMMAND.sub("", text)))
    words = [f"{flag} is {_KEYWORDS.get(flag) or flag[2:].replace('-', '_')}" for flag in flags]
    return f"in Python: {', '.join(words)}" if words else ""


def _worded(message: str) -> str:
    """Return `scrubbed` text, without its middle if it is too long."""
    text = scrubbed(message)
    return text if len(text) <= MOST else f"{text[: MOST * 2 // 3]} ... {text[-(MOST // 3) + 5 :]}"


class CloudtrainError(Exception):
    """Base class of the errors that cloudtrain raises on purpose.

    ``str()`` says what is wrong in one line of at most 4,000 characters, `scrubbed`. ``hint`` says how to fix it, with
    the exact command or lines to paste. It may have several lines, is empty if there is no fix to name, and never
    repeats the message. A traceback shows both (from Python 3.11 on).
    """

    exit_code = 9
    refusals: tuple[Mapping[str, Any], ...] = ()
    """The refusal of each region and provider, for a job that all of them refused."""

    def __init__(self, *args: object, hint: str = "") -> None:
        super().__init__(*(_worded(arg) if isinstance(arg, str) else arg for arg in args))
        self.hint = scrubbed(hint)
        known = _in_python(f"{self}\n{self.hint}")
        if notes := [f"hint: {self.hint}"] * bool(self.hint) + [known] * bool(known):
            self.__notes__ = notes

    def with_hint(self) -> str:
        """Return the message and its hint in one line, for a record or a log without a line for the hint."""
        return f"{str(self).rstrip('.')}; {' '.join(self.hint.split())}" if self.hint else str(self)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows: your own frames, the message and the hint."""
        from traceback import format_exception

        trace = self.__traceback__
        if not _is_debugging():
            while trace is not None and trace.tb_next is not None and _package_of(trace.tb_frame) == "IPython":
                trace = trace.tb_next
            trace = _shorten(self, trace)
        return "".join(format_exception(type(self), self, trace)).splitlines()


class SpecError(CloudtrainError):
    """A mistake in a job, flag or setting. Nothing was sent.

    ``field`` is its dotted name (``resources.gpu``), or ``""`` if there is none; ``message`` is the rest.
    """

    exit_code = 2

    def __init__(self, message: str, *, field: str = "", hint: str = "") -> None:
        self.field, self.message = field, _worded(message)
        super().__init__(f"{field}: {message}" if field else message, hint=hint)


class UnsupportedError(SpecError):
    """A ``field`` that ``provider`` does not support. ``why`` is the reason, and ``hint`` the alternative."""

    def __init__(self, provider: str, field: str, why: str, *, hint: str = "") -> None:
        self.provider, self.why = provider, why
        super().__init__(f"not supported by provider {provider}: {why}", field=field, hint=hint)


class ConflictError(SpecError):
    """An id or name that belongs to another job, which stays unchanged."""


class NotFoundError(SpecError):
    """A run, provider, file or checkpoint that does not exist."""


class AuthError(CloudtrainError):
    """Missing, expired or refused credentials."""

    exit_code = 3


class QuotaError(CloudtrainError):
    """A request beyond the account's quota."""

    exit_code = 4


class CapacityError(CloudtrainError):
    """A lack of the requested machines on the platform, or on this machine."""

    exit_code = 4


class LostContactError(CloudtrainError):
    """A platform or store that did not answer for too long. A submitted run continues.

    ``passing`` is False if asking again from here cannot help. ``throttled`` is True if the platform answers that there
    were too many requests.
    """

    exit_code = 7

    def __init__(self, message: str, *, passing: bool = True, throttled: bool = False, hint: str = "") -> None:
        self.passing, self.throttled = passing, throttled
        super().__init__(message, hint=hint)


class StorageError(CloudtrainError):
    """A failure to read or write the store or the local disk."""

    exit_code = 8


class DigestError(StorageError):
    """Damaged content: it differs from its recorded digest."""


class PlatformError(CloudtrainError):
    """A failure of the platform, or an answer in a wrong form."""

    exit_code = 9


def reason_of(exc: Exception) -> str:
    """Return what is wrong and the way out. An `OSError` gives the system's words and the path, without its number."""
    if isinstance(exc, CloudtrainError):
        return exc.with_hint()
    if isinstance(exc, OSError) and exc.strerror:
        return f"{exc.strerror}: {exc.filename}" if exc.filename else exc.strerror
    return str(exc)


def warn(texts: Iterable[str]) -> None:
    """Issue each text as a `UserWarning` of your own line, the last one before cloudtrain's."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _package_of(frame) == "cloudtrain":
        frame, level = frame.f_back, level + 1
    for text in texts:
        known = _in_python(text)
        warnings.warn(text + f" ({known})" * bool(known), stacklevel=level)


def shorten_tracebacks() -> None:
    """Let a `CloudtrainError` that ends the program show your frames alone; ``CLOUDTRAIN_DEBUG=1`` shows all.

    A hook of another tool stays, and gets the whole error: it may report errors to a service.
    """
    python = sys.__excepthook__
    if sys.excepthook is not python:
        return

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, CloudtrainError) and not _is_debugging():
            error.__traceback__ = trace = _shorten(error, trace)
        python(kind, error, trace)

    sys.excepthook = show


def _shorten(error: CloudtrainError, trace: TracebackType | None) -> TracebackType | None:
    """Return `_own_frames`. Keep of the errors before ``error`` only one that your own code was handling."""
    short = _own_frames(trace)
    if short is not trace:
        before = error.__cause__ or error.__context__
        while before is not None and (
            before.__traceback__ is None or _package_of(before.__traceback__.tb_frame) == "cloudtrain"
        ):
            before = before.__cause__ or before.__context__
        error.__cause__, error.__context__ = None, before
        error.__suppress_context__ = before is None
    return short


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the frames before cloudtrain's first one; all of them if cloudtrain's is the first, or there is none."""
    entries, entry = [], trace
    while entry is not None and _package_of(entry.tb_frame) != "cloudtrain":
        entries.append(entry)
        entry = entry.tb_next
    if entry is None or not entries:
        return trace
    short: TracebackType | None = None
    for own in reversed(entries):
        short = TracebackType(short, own.tb_frame, own.tb_lasti, own.tb_lineno)
    return short


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_debugging() -> bool:
    return os.environ.get("CLOUDTRAIN_DEBUG") == "1"
