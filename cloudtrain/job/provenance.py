"""Where a run comes from: the commit of its code, the CI run that sends it, who calls, which image.

What this machine knows by itself (`origin_of`) is part of the plan, so the native tags hold it too. Who calls is known
over the network alone: `asked` asks while the store is being filled, and does not wait for long.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from ..errors import scrubbed

__all__ = ["PATIENCE", "asked", "digest_of", "origin_of"]

PATIENCE = 1.0
"""Seconds for which an answer is waited for once all else is done; without one the record says null."""
LONGEST = 1000
"""Characters; what is longer is no URL of a CI run, and no name of a branch."""


class _Service(NamedTuple):
    """A CI service: the variable that says it is there, and where its run is, made of its own variables."""

    mark: str
    url: str
    run: str


# Each service's page of predefined variables has these.
_SERVICES: Mapping[str, _Service] = {
    "github": _Service(
        "GITHUB_ACTIONS",
        "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}/actions/runs/{GITHUB_RUN_ID}/attempts/{GITHUB_RUN_ATTEMPT}",
        "{GITHUB_RUN_ID}-{GITHUB_RUN_ATTEMPT}",
    ),
    "gitlab": _Service("GITLAB_CI", "{CI_JOB_URL}", "{CI_JOB_ID}"),
    "circleci": _Service("CIRCLECI", "{CIRCLE_BUILD_URL}", "{CIRCLE_BUILD_NUM}"),
    "azure-pipelines": _Service(
        "TF_BUILD",
        "{SYSTEM_COLLECTIONURI}{SYSTEM_TEAMPROJECT}/_build/results?buildId={BUILD_BUILDID}",
        "{BUILD_BUILDID}",
    ),
    "buildkite": _Service("BUILDKITE", "{BUILDKITE_BUILD_URL}", "{BUILDKITE_BUILD_NUMBER}"),
    "jenkins": _Service("JENKINS_URL", "{BUILD_URL}", "{BUILD_NUMBER}"),
}
_VARIABLE = re.compile(r"\{([A-Z_]+)\}")
_URL = re.compile(r"https?://[\x21-\x7e]+")
_USER = re.compile(r"(?<=://)[^/@]*@")
_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")


def origin_of(git: Mapping[str, Any] | None, environ: Mapping[str, str]) -> dict[str, str]:
    """What is known of a run's origin on this machine; what is not known is not there.

    ``revision`` is the commit, with ``-dirty`` when files differ from it, ``branch`` the branch that is checked out;
    ``ci`` is the service, ``ci_run`` its number of the run, ``ci_url`` the page of it. ``git`` is that of a bundle.
    """
    found: dict[str, str] = {}
    if git and git.get("commit"):
        found["revision"] = f"{git['commit']}-dirty" if git.get("dirty") else str(git["commit"])
    if git and git.get("branch"):
        found["branch"] = str(git["branch"])
    for name, service in _SERVICES.items():
        if environ.get(service.mark):
            run, url = _filled(service.run, environ), _filled(service.url, environ)
            found["ci"] = name
            found["ci_run"] = re.sub(r"[^A-Za-z0-9_.-]", "-", run)
            url = _USER.sub("", url)
            found["ci_url"] = url if _URL.fullmatch(url) and scrubbed(url) == url else ""  # the number tells, too
            break
    return {key: value for key, value in found.items() if value and len(value) <= LONGEST and _is_text(value)}


def _filled(pattern: str, environ: Mapping[str, str]) -> str:
    """``pattern`` with its variables; empty when one has no value."""
    names = _VARIABLE.findall(pattern)
    if not all(environ.get(name) for name in names):
        return ""
    # Names of projects and repositories hold spaces; a URL that comes whole is what it is.
    return _VARIABLE.sub(lambda match: quote(environ[match[1]], safe="/:@?&=%#+,;~!$'()*[]", errors="replace"), pattern)


def _is_text(value: str) -> bool:
    return value.isprintable()  # neither are control characters, nor what is no UTF-8


def digest_of(image: str | None) -> str | None:
    """``sha256:…`` of an image that is named by its digest, else None."""
    match = _DIGEST.search(image or "")
    return match[1] if match else None


def asked(question: Callable[[], str | None] | None) -> Callable[[], str | None]:
    """Ask in the background; the function that is returned gives the answer, None for none within `PATIENCE`.

    Nobody is kept from a run by not knowing who he is: an error is no answer either.
    """
    if question is None:
        return lambda: None
    answers: list[str | None] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception:  # noqa: BLE001  whatever it is, the call that matters says it better
            answers.append(None)

    thread = threading.Thread(target=ask, name="who calls", daemon=True)
    thread.start()

    def answer() -> str | None:
        thread.join(PATIENCE)
        return next(iter(answers), None)

    return answer
