"""Call ModelArts and IAM by documented REST, over the standard library.

An access key signs each call, or an IAM token comes with it.

`submit` and `run` do all retries. If a service asks for a pause, no call goes to it until the pause ends.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request as HttpRequest
from urllib.request import build_opener

from ... import errors
from ...provider_api.protocol import Request, Shell, python_command, shell_arguments
from ...storage.files import files
from ...storage.obs import HuaweiKeys, NoRedirects, find_keys
from ...validate import url_scheme
from .._cloud import ANOTHER_ID, Backoff, Creations, decoded, object_of, one_line, pairs_of, unless_over
from . import NAME
from .node import KEY_PATH, SECRETS, sealed
from .request import mark_of, unmounted, words_of
from .signing import query_string, signed_headers
from .validate import LONGEST_VALUE

if TYPE_CHECKING:
    from . import Settings

TIMEOUT = 60
"""Seconds of one call."""
FINAL = frozenset(("Completed", "Failed", "Terminated"))
"""Phases of a job that has ended."""
TOKEN = "HUAWEICLOUD_AUTH_TOKEN"
"""Variable with an IAM token, in place of an access key."""
KEYS_SECONDS = 3600 * 12
"""Life of the keys that a token buys for OBS; IAM gives 24 hours at most."""
PAGE = 50
"""Most jobs of one answer; the offset counts pages."""
FIRST_HOLD = 5.0
_ID = re.compile(r"(?P<region>[a-z0-9-]+)/(?P<project>[0-9a-f]{32})/(?P<id>[0-9a-f-]{36})")
_AGENCY = re.compile(r"agency|delegat|authori[sz]ation", re.IGNORECASE)
_QUOTA = re.compile(r"quota", re.IGNORECASE)
_QUOTA_CODE = "ModelArts.0116"
HELP: Mapping[str, str] = {
    "auth": "check the access key and its role (ModelArts CommonOperations); docs/modelarts.md has them",
    "agency": "let ModelArts use OBS and SWR: console, ModelArts, Settings, Add Authorization",
    "clock": "check the access key, and this machine's clock: it may be 15 minutes off at most",
    "quota": "ask for more: console, ModelArts, Settings, Quotas; or end other jobs",
    "region": "check modelarts.region and modelarts.project_id: a project belongs to one region",
}


def job_of(native_id: str) -> tuple[str, str, str]:
    """Return (region, project, id) of a native id. Raises `NotFoundError` for another text."""
    match = _ID.fullmatch(native_id)
    if match is None:
        raise errors.NotFoundError(f"{native_id!r} is not REGION/PROJECT/JOB", field="run")
    return match["region"], match["project"], match["id"]


def error_of(status: int, code: str, message: str, *, what: str) -> errors.CloudtrainError:
    """Return the error for an answer: its HTTP status, and ``error_code`` and ``error_msg`` of its body."""
    text = f"{what}: {one_line(message) or f'HTTP {status}'}" + (f" ({code})" if code else "")
    if code == _QUOTA_CODE or (status in (400, 403, 409) and _QUOTA.search(message)):
        return errors.QuotaError(text, hint=HELP["quota"])
    if status in (408, 429) or status >= 500:
        return errors.LostContactError(f"Huawei Cloud does not answer now: {text}")
    if status in (401, 403):
        if code.startswith("APIGW.030") or status == 401:
            return errors.AuthError(text, hint=HELP["clock"])
        return errors.AuthError(text, hint=HELP["agency" if _AGENCY.search(message) else "auth"])
    if status == 404:
        return errors.NotFoundError(text, hint=HELP["region"] if code.startswith("APIGW") else "")
    if status == 409:
        return errors.ConflictError(text, field="run_id")
    if 400 <= status < 500:
        return errors.SpecError(text, hint=HELP["agency"] if _AGENCY.search(message) else "")
    return errors.PlatformError(f"{text} (HTTP {status})")


class Account:
    """One project of a region."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.RLock()
        self._bought: tuple[float, Mapping[str, str]] | None = None
        self._backoff = Backoff(first=FIRST_HOLD)
        self.creations = Creations(self.cancel)
        self.ended: dict[str, float] = {}
        """Time at which a finished job was first seen so, on the clock of `time.monotonic`."""
        self.abnormal: dict[str, float] = {}
        """Time since which a job's phase is Abnormal, on that clock."""

    # ------------------------------------------------------------------------------------------------------- the caller

    @property
    def token(self) -> str:
        """The caller's IAM token; "" if an access key signs."""
        return os.environ.get(TOKEN, "")

    def keys(self) -> HuaweiKeys:
        """Return the caller's access key. Raises `AuthError`."""
        return find_keys(os.environ)

    def principal(self) -> str | None:
        """Return the access key's id; None for a token."""
        return None if self.token else self.keys().ak

    def storage(self, url: str) -> Mapping[str, Any]:
        """Return the options of a store in OBS: the region, and temporary keys if the caller has only a token."""
        if url_scheme(url) != "obs":
            return {}
        region = {"client_kwargs": {"region_name": self.settings.region or None}}
        if not self.token:
            return region
        with self._lock:
            if self._bought is None or time.monotonic() - self._bought[0] > KEYS_SECONDS / 2:
                identity = {"methods": ["token"], "token": {"duration_seconds": KEYS_SECONDS}}
                url = f"{iam_endpoint(self.settings.region)}/v3.0/OS-CREDENTIAL/securitytokens"
                what = "ask IAM for keys of OBS"
                found = self.rest("POST", url, what=what, body={"auth": {"identity": identity}})["credential"]
                own = {"key": found["access"], "secret": found["secret"], "token": found["securitytoken"]}
                self._bought = time.monotonic(), own
            return {**region, **self._bought[1]}

    def rest(self, method: str, url: str, *, what: str, body: Any = None, **query: Any) -> dict[str, Any]:
        """Return the answer to one call. ``what`` names it in messages. Raises the errors of `error_of`."""
        parts = urlsplit(url)
        pairs = [(name, str(value)) for name, value in query.items()]
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"Host": parts.netloc, "Content-Type": "application/json"}
        if project := self.settings.project_id:
            headers["X-Project-Id"] = project
        if self.token:
            headers["X-Auth-Token"] = self.token
        else:
            headers = signed_headers(self.keys(), method, parts.path, pairs, headers, data)
        self._backoff.check(parts.netloc, name="Huawei Cloud", what=what)
        target = url + (f"?{query_string(pairs)}" if pairs else "")
        try:
            asked = HttpRequest(target, data=data or None, headers=headers, method=method)
            with build_opener(NoRedirects).open(asked, timeout=TIMEOUT) as answer:
                raw = answer.read()
        except HTTPError as exc:
            raise self._refused(exc, parts.netloc, what) from None
        except (URLError, OSError, http.client.HTTPException) as exc:
            why = one_line(getattr(exc, "reason", "") or exc)
            hint = HELP["region"] if "resol" in why or "known" in why else ""
            raise errors.LostContactError(f"{what}: {parts.netloc} does not answer: {why}", hint=hint) from None
        return decoded(raw, what=what) if raw.strip() else {}

    def _refused(self, exc: HTTPError, host: str, what: str) -> errors.CloudtrainError:
        said: dict[str, Any] = {}
        with contextlib.suppress(OSError, http.client.HTTPException):
            said = object_of(exc.read()) or {}
        self._backoff.note(host, exc.code, exc.headers)
        message = str(said.get("error_msg") or said.get("message") or "")
        return error_of(exc.code, str(said.get("error_code") or ""), message, what=what)

    # --------------------------------------------------------------------------------------------------------- the jobs

    def call(self, method: str, path: str, *, what: str, where: Sequence[str] = (), **more: Any) -> dict[str, Any]:
        """Return ModelArts' answer below ``/v2/{project_id}``; ``where`` is (region, project), by default our own."""
        region, project = where or (self.settings.region, self.settings.project_id)
        return self.rest(method, f"{endpoint(region)}/v2/{project}/{path}", what=what, **more)

    def _call_job(self, method: str, native_id: str, path: str = "", *, what: str, body: Any = None) -> dict[str, Any]:
        """Return ModelArts' answer below the job's own path."""
        *where, job_id = job_of(native_id)
        return self.call(method, f"training-jobs/{job_id}{path}", what=what, where=where, body=body)

    def describe(self, native_id: str) -> dict[str, Any]:
        """Return the job in JSON. Raises `NotFoundError`."""
        job = self._call_job("GET", native_id, what="get job")
        phase = (job.get("status") or {}).get("phase")
        if phase in FINAL:
            self.ended.setdefault(native_id, time.monotonic())
        if phase == "Abnormal":
            self.abnormal.setdefault(native_id, time.monotonic())
        else:
            self.abnormal.pop(native_id, None)
        return job

    def log(self, native_id: str, task: str) -> dict[str, Any]:
        """Return the newest 5 MB of a task's log, with the sizes in bytes of that part and of the whole."""
        return self._call_job("GET", native_id, f"/tasks/{task}/logs/preview", what="read the log")

    def list_jobs(self, name: str, where: Sequence[str] = (), *, workspace: str = "") -> Iterator[Mapping[str, Any]]:
        """Yield the jobs whose names contain ``name``, in a workspace, by default our own."""
        filters = [{"key": "name", "operator": "like", "value": [name]}]
        body = {"limit": PAGE, "sort_by": "create_time", "order": "asc", "filters": filters}
        body["workspace_id"] = workspace or self.settings.workspace_id
        seen, page = 0, 0
        while True:
            own = {**body, "offset": page}
            answer = self.call("POST", "training-job-searches", what="list jobs", where=where, body=own)
            items = answer.get("items") or []
            yield from items
            seen, page = seen + len(items), page + 1
            if not items or seen >= int(answer.get("total") or 0):
                return

    def find(self, request: Request) -> str | None:
        """Return the first of `jobs`, or None."""
        return next(iter(self.jobs(request)), None)

    def jobs(self, request: Request) -> list[str]:
        """Return the native ids of the request's jobs, the oldest first: two clients may have created one each.

        Raises `ConflictError` if the oldest job of that name was another request.
        """
        where, own = _place(request), request.body["metadata"]
        mark = f"{mark_of(name := own['name'])}-"
        listed = self.list_jobs(mark, where, workspace=str(own["workspace_id"]))
        ours = [job["metadata"] for job in listed if str(job["metadata"].get("name")).startswith(mark)]
        found = sorted(ours, key=lambda meta: (int(meta.get("create_time") or 0), str(meta["id"])))
        if found and found[0]["name"] != name:
            why = f"ModelArts has a job {found[0]['name']} of an earlier run of that id, which was another job"
            raise errors.ConflictError(why, field="run_id", hint=ANOTHER_ID)
        return ["/".join((*where, str(meta["id"]))) for meta in found if meta["name"] == name]

    def create(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        """Return the native id of the one job of this request."""
        name, send = request.body["metadata"]["name"], partial(self._send, request, secrets)
        return self.creations.one_job(name, partial(self.jobs, request), send)

    def _send(self, request: Request, secrets: Mapping[str, str] | None) -> str:
        where = _place(request)
        body = self._with_secrets(request, secrets) if secrets else dict(request.body)
        try:
            made = self.call("POST", "training-jobs", what="create job", body=body, where=where)
            ours = "/".join((*where, str((made.get("metadata") or {}).get("id"))))
            job_of(ours)
            return ours
        except (errors.LostContactError, errors.NotFoundError, errors.PlatformError) as exc:
            if isinstance(exc, errors.NotFoundError) and exc.field != "run":
                raise
            self.creations.note_lost(request.body["metadata"]["name"])
            if isinstance(exc, errors.LostContactError):
                raise
            raise errors.LostContactError(f"create job: the answer names no job ({exc})") from None

    def _with_secrets(self, request: Request, secrets: Mapping[str, str]) -> dict[str, Any]:
        """Return the body with the values of the secrets, sealed with the run's key, in place of nothing."""
        folder, _, name = unmounted(pairs_of(words_of(request.body))[KEY_PATH]).rpartition("/")
        text = sealed(secrets, files(folder, storage=self.storage).read(name))
        if len(text) > LONGEST_VALUE:
            why = f"the values have {len(text)} characters together, sealed; a job holds {LONGEST_VALUE}"
            raise errors.SpecError(why, field="secrets", hint="pass fewer or shorter values")
        algorithm = request.body["algorithm"]
        return {
            **request.body,
            "algorithm": {**algorithm, "environments": {**algorithm["environments"], SECRETS: text}},
        }

    def cancel(self, native_id: str) -> None:
        """Request the stop. A job that has ended stays as it is."""

        def is_over() -> bool:
            return (self.describe(native_id).get("status") or {}).get("phase") in (*FINAL, "Terminating")

        if not is_over():
            with unless_over(is_over):
                self._call_job("POST", native_id, "/actions", what="stop job", body={"action_type": "terminate"})

    def shell(self, request: Request, native_id: str, node: int, command: Sequence[str], *, tty: bool) -> Shell:
        """Return ssh's command into a node. Raises `SpecError` for a job that lets no one in."""
        if "endpoints" not in request.body:
            why, hint = "the job was sent without it, and lets no shell in", "send a job with --interactive"
            raise errors.SpecError(why, field="interactive", hint=hint)
        found = ((self.describe(native_id).get("endpoints") or {}).get("ssh") or {}).get("task_urls") or ()
        url = next((str(item.get("url")) for item in found if item.get("task") == f"worker-{node}"), "")
        if not url:
            raise errors.SpecError("the node's address is not known yet", field="node", hint="try again in a minute")
        parts = urlsplit(url if "://" in url else f"ssh://{url}")
        words = python_command(shell_arguments(words_of(request.body)[4], request, node, command))
        port = ["-p", str(parts.port)] if parts.port else []
        target = f"{parts.username or 'ma-user'}@{parts.hostname}"
        return Shell(argv=["ssh", *(["-t"] if tty else []), *port, target, shlex.join(words)], install="install ssh")


def endpoint(region: str) -> str:
    """Return ModelArts' endpoint in ``region``, by the variable of Huawei's SDK for another one."""
    own = os.environ.get(f"HUAWEICLOUD_SDK_REGION_{NAME}_{region.replace('-', '_')}".upper(), "")
    return (own.partition(",")[0] or f"https://modelarts.{region}.myhuaweicloud.com").rstrip("/")


def iam_endpoint(region: str) -> str:
    """Return IAM's endpoint in ``region``, by the variable of Huawei's SDK for another one."""
    return (os.environ.get("HUAWEICLOUD_SDK_IAM_ENDPOINT") or f"https://iam.{region}.myhuaweicloud.com").rstrip("/")


def _place(request: Request) -> tuple[str, str]:
    """Return (region, project) of the request's job. The settings may have changed since the plan."""
    _, region, path = request.operation.split(" ")
    return region, path.split("/")[1]
