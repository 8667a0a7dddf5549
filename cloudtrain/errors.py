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

import contextlib
from collections.abc import Callable, Iterator

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
    "translated",
]

#: Exit code of ``submit`` and ``wait`` by the category of a run that ended other than well.
EXIT_CODES: dict[str, int] = {
    "user_error": 1,
    "oom": 1,
    "stalled": 1,
    "image": 2,
    "auth": 3,
    "quota": 4,
    "capacity": 4,
    "preempted": 4,
    "cancelled": 5,
    "timeout": 6,
    "infra": 9,
}
CATEGORIES: tuple[str, ...] = tuple(EXIT_CODES)


class CloudtrainError(Exception):
    """Base of everything cloudtrain raises on purpose; ``str()`` is one line a user can act on."""

    exit_code = 9


class SpecError(CloudtrainError):
    """Something in what the user asked for is wrong; nothing was sent.

    ``field`` is the dotted name of the culprit (``resources.gpu``), or ``""`` when there is none; ``message`` the rest.
    """

    exit_code = 2

    def __init__(self, message: str, *, field: str = "") -> None:
        self.field, self.message = field, message
        super().__init__(f"{field}: {message}" if field else message)


class UnsupportedError(SpecError):
    """``provider`` cannot honour ``field``; ``why`` says why and what to do instead."""

    def __init__(self, provider: str, field: str, why: str) -> None:
        self.provider, self.why = provider, why
        super().__init__(f"not supported by provider {provider}: {why}", field=field)


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

    ``passing`` is False when asking again from here cannot help.
    """

    exit_code = 7

    def __init__(self, message: str, *, passing: bool = True) -> None:
        self.passing = passing
        super().__init__(message)


class StorageError(CloudtrainError):
    """Reading or writing the store or the local disk failed."""

    exit_code = 8


class DigestError(StorageError):
    """Content does not have the digest it was recorded with."""


class PlatformError(CloudtrainError):
    """The platform failed or broke its own contract."""

    exit_code = 9


@contextlib.contextmanager
def translated(error_of: Callable[[Exception], CloudtrainError | None], *, needs: str, extra: str) -> Iterator[None]:
    """What a vendor's library raises becomes ours, as ``error_of`` says; what is none of its own goes on as it is.

    `SpecError` where a library is missing: the package that it ``needs`` comes with our ``extra``.
    """
    try:
        yield
    except CloudtrainError:
        raise
    except ImportError as exc:
        why = " ".join(str(exc).split())[:200]
        raise SpecError(f"needs {needs}: pip install 'cloudtrain[{extra}]' ({why})", field="provider") from None
    except Exception as exc:  # a library may raise anything
        ours = error_of(exc)
        if ours is None:
            raise
        raise ours from None
