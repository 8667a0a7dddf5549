"""Find a run's origin: the commit of its code, the CI run, the caller's identity, the image.

Facts of this machine (`origin_of`) are part of the plan and thus of the native tags. The caller's identity takes a
network request: `in_background` makes it while the store is being filled, and does not wait long.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from ..errors import scrubbed
from ..storage.timings import CLIENT_TIMINGS

LONGEST = 1000
"""Characters; a longer text is not a CI run's URL or a branch."""


class _Service(NamedTuple):
    """A CI service: the variable that marks it, and its run's URL and number, made of its variables."""

    mark: str
    url: str
    run: str


# From each service's page of predefined variables.
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
    """Return the known facts of a run's origin on this machine; unknown ones are left out.

    ``revision`` is the commit, with ``-dirty`` if files differ from it; ``branch`` is the branch checked out. ``ci`` is
    the service, ``ci_run`` its number of the run, ``ci_url`` its page. ``git`` is that of a bundle.
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
            found["ci_url"] = url if _URL.fullmatch(url) and scrubbed(url) == url else ""  # the number is enough
            break
    return {key: value for key, value in found.items() if value and len(value) <= LONGEST and _is_text(value)}


def _filled(pattern: str, environ: Mapping[str, str]) -> str:
    """Return ``pattern`` with its variables filled in; empty if one has no value."""
    names = _VARIABLE.findall(pattern)
    if not all(environ.get(name) for name in names):
        return ""
    # Names of projects and repositories may hold spaces; complete URLs are left as they are.
    return _VARIABLE.sub(lambda match: quote(environ[match[1]], safe="/:@?&=%#+,;~!$'()*[]", errors="replace"), pattern)


def _is_text(value: str) -> bool:
    return value.isprintable()  # neither control characters nor invalid UTF-8


def digest_of(image: str | None) -> str | None:
    """Return ``sha256:…`` of an image that is named by its digest, else None."""
    match = _DIGEST.search(image or "")
    return match[1] if match else None


def in_background(question: Callable[[], str | None] | None) -> Callable[[], str | None]:
    """Ask in the background; the returned function gives the answer, or None after `ClientTimings.provenance`.

    An error gives None too: a run never fails because the caller's identity is unknown.
    """
    if question is None:
        return lambda: None
    answers: list[str | None] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception:  # noqa: BLE001  the submission itself reports any such error better
            answers.append(None)

    thread = threading.Thread(target=ask, name="caller", daemon=True)
    thread.start()

    def answer() -> str | None:
        thread.join(CLIENT_TIMINGS.provenance)
        return next(iter(answers), None)

    return answer
