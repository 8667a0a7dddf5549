"""The result of one check of ``cloudtrain doctor``: its subject, its status, and the fix if it failed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import AuthError, CloudtrainError, LostContactError, NotFoundError, PlatformError, SpecError
from ..storage.extras import not_installed

STATUSES = ("ok", "failed", "skipped", "unknown")
GRAVEST = (3, 7, 9, 8, 2, 4)
"""Exit codes, most severe first: a lack of credentials or of an answer hides all other faults; quotas come last."""
REFUSED = "the caller may not look"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check. ``status`` is ok, failed, skipped (not needed, or an earlier check failed) or unknown (no answer).
    ``exit_code`` is that of the error with which a submit would end."""

    name: str
    status: str
    detail: str = ""
    fix: str = ""
    exit_code: int = 0


def ok(name: str, detail: str) -> Check:
    """Return a check that passed."""
    return Check(name=name, status="ok", detail=_line(detail))


def failed(name: str, detail: str, *, fix: str, code: int) -> Check:
    """Return a check that failed, and its ``fix``."""
    fix = "\n".join(map(_line, fix.splitlines()))
    return Check(name=name, status="failed", detail=_line(detail), fix=fix, exit_code=code)


def skipped(name: str, why: str) -> Check:
    """Return a check that is not needed, or that depends on one that failed."""
    return Check(name=name, status="skipped", detail=_line(why))


def unknown(name: str, why: str) -> Check:
    """Return a check without an answer."""
    return Check(name=name, status="unknown", detail=_line(why))


def failure(name: str, exc: CloudtrainError, *, fix: str = "") -> Check:
    """Return the failed check for an error of ours: its message as the problem, ``fix`` or its hint as the fix.

    An error without a hint gets one from its class or its last clause. The fix never repeats the problem.
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
    """Yield the checks of ``look``; an error that it raises becomes a failed check.

    ``extra``: no run needs this check, so a refusal or a missing API makes it unknown.
    """
    try:
        found = look()
        yield from (found,) if isinstance(found, Check) else found
    except CloudtrainError as exc:
        if extra and not (isinstance(exc, SpecError) and not isinstance(exc, NotFoundError)):
            why = REFUSED if isinstance(exc, AuthError) else "no answer"
            yield unknown(name, f"{why}: {exc.with_hint()}")
        else:
            yield failure(name, exc)
    except (LookupError, TypeError, ValueError, AttributeError) as exc:  # an answer without its documented form
        said = f"an undocumented answer: {type(exc).__name__}: {exc}"
        yield unknown(name, said) if extra else failure(name, PlatformError(said))


def passed(*groups: Iterable[Check]) -> Generator[Check, None, bool]:
    """Yield the checks of ``groups`` up to the first that does not pass. Return True if all passed."""
    for check in itertools.chain.from_iterable(groups):
        yield check
        if check.status != "ok":
            return False
    return True


def installed(packages: Sequence[str], *, extra: str) -> Check:
    """Check that the packages are installed, and return their versions."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return ok("sdk", ", ".join(f"{name} {version(name)}" for name in packages))
    except PackageNotFoundError:
        return failure("sdk", not_installed(f"provider {extra}", extra, field=""))


def gravest(checks: Iterable[Check]) -> int:
    """Return the exit code: 0 if nothing failed, else the most severe failure's."""
    codes = {check.exit_code for check in checks if check.status == "failed"}
    known = [code for code in GRAVEST if code in codes]
    return known[0] if known else max(codes, default=0)


def _line(text: str) -> str:
    return " ".join(text.split())
