"""One check of ``cloudtrain doctor``: what was looked at, how it stands, and the fix where it does not.

A provider may have a method ``checks(store, request)`` that yields such values: the store's URL, empty where it could
not be told, and the planned request of a job of one node, or None. See `doctor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import AuthError, CloudtrainError, LostContactError, NotFoundError, PlatformError, SpecError
from ..storage.extras import not_installed

__all__ = ["STATUSES", "Check", "failed", "failure", "gravest", "installed", "ok", "skipped", "tried", "unknown"]

STATUSES = ("ok", "failed", "skipped", "unknown")
GRAVEST = (3, 7, 9, 8, 2, 4)
"""Exit codes, the gravest first: without credentials, or an answer, nothing else can be told; quotas come last."""
REFUSED = "the caller may not look"


@dataclass(frozen=True, kw_only=True)
class Check:
    """``status``: ok; failed (``fix`` says what to do, ``exit_code`` is that of the error which a submit would end
    with); skipped, as nothing asks for it or something before it failed; unknown, as the platform does not tell."""

    name: str
    status: str
    detail: str = ""
    fix: str = ""
    exit_code: int = 0


def ok(name: str, detail: str) -> Check:
    """It is as it must be."""
    return Check(name=name, status="ok", detail=_line(detail))


def failed(name: str, detail: str, *, fix: str, code: int) -> Check:
    """It is not, and ``fix`` is what to do."""
    return Check(
        name=name, status="failed", detail=_line(detail), fix="\n".join(map(_line, fix.splitlines())), exit_code=code
    )


def skipped(name: str, why: str) -> Check:
    """Nothing asks for it, or what it needs has failed."""
    return Check(name=name, status="skipped", detail=_line(why))


def unknown(name: str, why: str) -> Check:
    """Nobody tells."""
    return Check(name=name, status="unknown", detail=_line(why))


def failure(name: str, exc: CloudtrainError, *, fix: str = "") -> Check:
    """Return the failed check for an error of ours: its message as the problem, ``fix`` or its hint as the fix.

    An error without a hint gets one by its class, or the last clause of its message; the fix never repeats the problem.
    """
    problem, general = str(exc), ""
    if isinstance(exc, (LostContactError, PlatformError)):
        general = "check your network, your proxy and the platform's status page; then try again"
    elif isinstance(exc, SpecError) and exc.field:
        general = f"change {exc.field}"
    if not (fix or exc.hint or general):
        head, _, last = problem.rpartition(": ")
        problem, general = (head, last) if head else (problem, "change what the message names, and try again")
    return failed(name, problem, fix=fix or exc.hint or general, code=exc.exit_code)


def tried(name: str, look: Callable[[], Iterable[Check] | Check], *, extra: bool = False) -> Iterator[Check]:
    """The checks that ``look`` makes; an error that it raises is a failed one.

    ``extra``: it is a look that no run needs, so that being refused it, or finding no such API, tells nothing.
    """
    try:
        found = look()
        yield from (found,) if isinstance(found, Check) else found
    except CloudtrainError as exc:
        if extra and not (isinstance(exc, SpecError) and not isinstance(exc, NotFoundError)):
            why = REFUSED if isinstance(exc, AuthError) else "no answer"
            yield unknown(name, f"{why}: {exc}")
        else:
            yield failure(name, exc)
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
    ) as exc:  # none of these was seen on a true cloud
        said = f"an answer that nobody documents: {type(exc).__name__}: {exc}"
        yield unknown(name, said) if extra else failure(name, PlatformError(said))


def installed(packages: Sequence[str], *, extra: str) -> Check:
    """Check that the packages are there, and return their versions."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return ok("sdk", ", ".join(f"{name} {version(name)}" for name in packages))
    except PackageNotFoundError:
        return failure("sdk", not_installed(f"provider {extra}", extra, field=""))


def gravest(checks: Iterable[Check]) -> int:
    """The exit code: 0 when nothing failed, else that of the gravest."""
    codes = {check.exit_code for check in checks if check.status == "failed"}
    known = [code for code in GRAVEST if code in codes]
    return known[0] if known else max(codes, default=0)


def _line(text: str) -> str:
    return " ".join(text.split())
