"""Call Google Cloud: jobs are created through Google's own client, all else is documented REST over google-auth.

Importing that client costs most of a second, and a status does not need it. It has no time-outs of its own; this module
adds them. google-auth's session repeats a call once with a new token. `submit` and `run` do all other retries. If a
service asks for a pause, no call goes to it until the pause ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ... import errors
from ...job.job import run_tag
from ...provider_api import catalog
from ...provider_api.protocol import Request, Shell
from ...storage import extras
from ...validate import unix_seconds, url_scheme
from .._cloud import ANOTHER_ID, Backoff, Creations, decoded, pages, pairs_of, unless_over
from . import NAME
from .machines import REGIONS, REGIONS_DATE
from .node import GCS
from .request import TAG_BODY, TAG_JOB, TAG_RUN

if TYPE_CHECKING:
    from . import Settings

TIMEOUT = 60
"""Seconds of one call."""
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
FINAL = frozenset(
    f"JOB_STATE_{word}" for word in ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")
)
FIRST_HOLD = 5.0
"""Pause in seconds if a service throttles and gives no time."""
_JOB = re.compile(r"projects/(?P<project>[^/]+)/locations/(?P<location>[^/]+)/customJobs/(?P<id>[^/]+)")
_OVERRIDE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_"
"""Prefix of gcloud's own variables for another endpoint: gcloud topic endpoint-override."""
CAPACITY = re.compile(
    r"resources are insufficient|insufficient (resources|capacity)|stock.?out|RESOURCE_POOL_EXHAUSTED"
    r"|not enough (resources|capacity)|(does not|doesn't) have enough resources|no capacity",
    re.IGNORECASE,
)
"""Before `QUOTA`: a lack of machines, too, comes as RESOURCE_EXHAUSTED (openreview-expertise #401)."""
RATE = re.compile(r"per.?(minute|second|user)\b|\brate.?limit", re.IGNORECASE)
"""A quota of calls, which is full again in a minute."""
MACHINES = re.compile(r"(custom_model|restricted_image)_training_\w+", re.IGNORECASE)
"""The metrics that machines count against (Vertex AI's page of quotas). Such a refusal is never of calls."""
_SPENT = r"(?-i:\b[qQ]uota(?:Exceeded|Failure)\b)"
"""The words of Google's older APIs, and of the details of newer ones."""
QUOTA = re.compile(rf"(?<![\w/.-])quotas?(?![\w/-])|(?-i:QUOTA_|_QUOTA)|{_SPENT}|{MACHINES.pattern}", re.IGNORECASE)
"""The word and Google's codes, but no part of a name from a user."""
CREATE, READ, LOOK = "create job", "read the log", "look at"
"""Calls that need roles of their own."""
_SIGN_IN = ("google.auth.", "google.oauth2.")
_METRIC = re.compile(r"aiplatform\.googleapis\.com/(?P<metric>\w+)")
_ACT_AS = re.compile(r"act as( service_account| service account)?|actAs|iam\.serviceAccounts\.", re.IGNORECASE)
_ACCOUNT = re.compile(r"[\w.-]+@[\w.-]+\.iam\.gserviceaccount\.com")
_NO_PROJECT = re.compile(
    r"(?<![\w-])project\b.{0,60}(not found|deleted|does not exist|invalid)|CONSUMER_INVALID", re.IGNORECASE
)
_DISABLED = re.compile(r"has not been used in project|it is disabled|SERVICE_DISABLED", re.IGNORECASE)
_API = re.compile(r"apis/api/(?P<service>[\w.-]+)/overview(\?project=(?P<project>[\w:.-]+))?")
"""Address in the message of a disabled API, which names it."""
DENIED = "USER_PROJECT_DENIED"
"""ErrorInfo's reason if the caller may not have its calls counted against the project it names."""
CONSUMER = re.compile(rf"{DENIED}|serviceusage\.services\.use", re.IGNORECASE)
"""The same of any service: Cloud Storage has a text of its own (java-storage-nio #61)."""
_NO_CONSUMER = re.compile(rf"{CONSUMER.pattern}|requires a quota project", re.IGNORECASE)
_MACHINE = re.compile(r"machine type ['\"]?(?P<machine>[a-z0-9-]+)['\"]? is not supported", re.IGNORECASE)
"""Text for an unknown machine, and for one not in this region, by Vertex AI's page of troubleshooting."""
AGENT = "service-{}@gcp-sa-aiplatform-cc.iam.gserviceaccount.com"
"""Account with which jobs pull images, by the project's number: Vertex AI's Custom Code Service Agent, never the job's
own service account (vertex-ai-samples #2176)."""
PULL = re.compile(
    r"does not have permission to access (the )?Artifact Registry|artifactregistry\.repositories\.downloadArtifacts",
    re.IGNORECASE,
)
_AGENT = re.compile(AGENT.replace(".", r"\.").format(r"\d+"))
_REPOSITORY = re.compile(r"projects/(?P<project>[^/\s]+)/locations/(?P<location>[^/\s]+)/repositories/(?P<name>[\w-]+)")
_NO_IMAGE = re.compile(r"(?<![\w/.-])image(?![\w/.-]).{0,300}\b(not found|does not exist)", re.IGNORECASE)
_LOCATION = re.compile(r"(region|location)\b.{0,80}(not supported|unsupported|invalid|not available)", re.IGNORECASE)
HELP: Mapping[str, str] = {
    "none": "sign in (gcloud auth application-default login), or set GOOGLE_APPLICATION_CREDENTIALS",
    "expired": "sign in again (gcloud auth application-default login); the submitted run continues",
    "role": "check vertex.project, and give the caller the role Vertex AI User in it (docs/vertex.md)",
    "log": "give the caller the role Logs Viewer (roles/logging.viewer) in the project (docs/vertex.md)",
    "store": "give the caller the role Storage Object Admin (roles/storage.objectAdmin) on the bucket (docs/vertex.md)",
    "consumer": "give the caller roles/serviceusage.serviceUsageConsumer (Service Usage Consumer) in the project",
    "act": "give the caller the role Service Account User on it: gcloud iam service-accounts add-iam-policy-binding",
    "quota": "ask for more on the console's page of quotas (IAM & Admin), or choose another machine or location",
    "capacity": "try another machine, location or time, a reservation, or a max_wait (FLEX_START)",
}


def job_of(native_id: str) -> tuple[str, str, str]:
    """Return (project, location, id) of a job's resource name. Raises `NotFoundError` for another text."""
    match = _JOB.fullmatch(native_id)
    if match is None:
        raise errors.NotFoundError(f"{native_id!r} is not projects/P/locations/L/customJobs/ID", field="run")
    return match["project"], match["location"], match["id"]


def quota_hint(text: str) -> str:
    """Return the hint that names the quota to request, as exactly as ``text`` does."""
    found = " and ".join(dict.fromkeys(_METRIC.findall(text)))
    if not found:
        return HELP["quota"]
    return f"ask for more of {found} on the console's page of quotas, or choose another machine or location"


def pull_hint(text: str, agent: str = "") -> str:
    """Return the hint that lets Vertex AI pull an image, as exactly as ``text`` allows."""
    named = _AGENT.search(text)
    agent = agent or (named[0] if named else AGENT.format("PROJECT_NUMBER"))
    where = _REPOSITORY.search(text)
    given = f"{where['name']} --project {where['project']} --location {where['location']}" if where else "REPOSITORY"
    return (
        f"jobs pull images as {agent}; let it: gcloud artifacts repositories add-iam-policy-binding {given} "
        f"--member serviceAccount:{agent} --role roles/artifactregistry.reader"
    )


def refusal(
    status: int, message: str, *, what: str, reason: str, metadata: Mapping[str, Any]
) -> errors.CloudtrainError:
    """Return the error for a refusal of ``what``. ``reason`` and ``metadata`` are its ErrorInfo's."""
    said = " ".join((message or reason or str(status)).split())[:600]
    text, full = f"{what}: {said}", f"{reason} {said}"
    if CAPACITY.search(full):
        return errors.CapacityError(text, hint=HELP["capacity"])
    if status == 429 and (MACHINES.search(full) or (QUOTA.search(full) and not RATE.search(full))):
        return errors.QuotaError(text, hint=quota_hint(said))
    if status == 403 and re.fullmatch(_SPENT, reason) and not RATE.search(said):
        return errors.QuotaError(text, hint=quota_hint(said))
    if status in (408, 429) or status >= 500 or reason == "ABORTED":  # of two concurrent calls, one must try again
        return errors.LostContactError(f"Google Cloud does not answer now: {text} (status {status})")
    if status == 401:
        return errors.AuthError(text, hint=HELP["expired"])
    if PULL.search(said) and status in (400, 403, 404):
        return errors.AuthError(text, hint=pull_hint(said))
    if status == 400 and (found := _MACHINE.search(said)):
        return _no_machine(found["machine"], text.rstrip("."))
    if _ACT_AS.search(said) and status in (400, 403, 404):
        return errors.AuthError(text, hint=_allow(full, what, metadata))
    if _NO_PROJECT.search(full) and status in (400, 403, 404):
        return errors.SpecError(said, field="vertex.project", hint="to list your projects, run: gcloud projects list")
    if status == 403:
        return errors.AuthError(text, hint=_allow(full, what, metadata))
    if status in (400, 404) and what == CREATE and _NO_IMAGE.search(said):
        return errors.SpecError(said, field="image")
    if status == 404:
        return errors.NotFoundError(text)
    if status in (409, 412):
        return errors.ConflictError(text, field="run_id")
    if _LOCATION.search(said):
        return errors.SpecError(said, field="vertex.location")
    return errors.SpecError(text) if 400 <= status < 500 else errors.PlatformError(text)


def _no_machine(name: str, text: str) -> errors.CloudtrainError:
    """Return the error for a machine that Vertex AI lacks. A known machine is missing in this region alone."""
    machine = catalog.machine(NAME, name)
    if machine is None:
        return errors.SpecError(text, field="resources.instance_type")
    same = [m for m in catalog.machines(NAME) if m.instance_type == name]
    # An N1 name may mean a machine without GPUs or with any of several.
    known = ", ".join(sorted(REGIONS.get(same[0].accelerator, ()))) if len({m.accelerator for m in same}) == 1 else ""
    listed = f"\nGoogle's page of {REGIONS_DATE} lists its GPUs in {known}" if known else ""
    return errors.CapacityError(f"{text}: this region has none", hint=f"try another location or machine{listed}")


def _allow(text: str, what: str, metadata: Mapping[str, Any]) -> str:
    """Return the step that lets the caller in after a refusal of ``what``."""
    if _DISABLED.search(text):  # an API is off, in the project whose calls are counted
        named = _API.search(text)
        service = metadata.get("service") or (named and named["service"]) or "aiplatform.googleapis.com"
        project = str(metadata.get("consumer") or "").removeprefix("projects/") or (named and named["project"]) or ""
        return f"switch it on: gcloud services enable {service}" + (f" --project {project}" if project else "")
    if _NO_CONSUMER.search(text):
        return HELP["consumer"]
    if _ACT_AS.search(text):
        account = _ACCOUNT.search(text)
        return f"{HELP['act']} {account[0]}" if account else HELP["act"]
    if what == READ:
        return HELP["log"]
    return HELP["store" if what.startswith(LOOK) else "role"]


def answered(body: bytes) -> tuple[str, str, Mapping[str, Any]]:
    """Return (message, reason, metadata) of an error of Google's JSON APIs; the last two are its ErrorInfo's."""
    try:
        error = json.loads(body).get("error") or {}
        details = error.get("details") or error.get("errors") or []
        info: Mapping[str, Any] = next((item for item in details if item.get("reason")), {})
        metadata = info.get("metadata")
        reason = str(info.get("reason") or error.get("status") or "")
        return str(error.get("message") or ""), reason, metadata if isinstance(metadata, dict) else {}
    except (ValueError, AttributeError, TypeError):
        return "", "", {}


def translated(what: str) -> AbstractContextManager[None]:
    """Translate errors of Google's libraries into one line; ``what`` names the action."""
    return extras.translated(partial(error_of, what=what), needs="google-cloud-aiplatform", extra="vertex")


def error_of(exc: Exception, *, what: str) -> errors.CloudtrainError | None:
    """Return the error for an exception of Google's libraries, or None for any other."""
    import google.auth.exceptions as auth
    import requests.exceptions as http

    text = " ".join(str(exc).split())
    # By name: a status does not import the exceptions of a creation.
    names = {base.__name__ for base in type(exc).__mro__}
    if isinstance(exc, auth.DefaultCredentialsError):
        return errors.AuthError("no Google Cloud credentials", hint=HELP["none"])
    if (
        isinstance(exc, (auth.TransportError, http.RequestException, ConnectionError, TimeoutError))
        or (isinstance(exc, auth.RefreshError) and exc.retryable)
        or "RetryError" in names
    ):
        return errors.LostContactError(f"Google Cloud does not answer: {what}: {text[:300]}")
    if isinstance(exc, auth.GoogleAuthError):
        return errors.AuthError(f"{what}: the credentials are refused ({text[:200]})", hint=HELP["expired"])
    if isinstance(exc, (TypeError, AttributeError)) and (module := _raised_in(exc)).startswith(_SIGN_IN):
        if module == "google.oauth2._client":  # it looks for a token in any 200, also a proxy's page
            return errors.LostContactError(f"Google Cloud does not answer: {what}: the answer to a sign-in is not JSON")
        why = f"{what}: the credentials cannot be used ({type(exc).__name__}: {text[:200]})"
        return errors.AuthError(why, hint=HELP["none"])
    if "GoogleAPICallError" in names:
        return _refused(exc, what)
    if "ParseError" in names:
        why = f"the installed google-cloud-aiplatform does not know this request: {text}"
        return errors.SpecError(why, field="options", hint="run: pip install --upgrade google-cloud-aiplatform")
    if "GoogleAPIError" in names:
        return errors.PlatformError(f"{what}: {type(exc).__name__}: {text[:300]}")
    return None


def _raised_in(exc: Exception) -> str:
    """Return the module whose code raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(exc.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")) if frames else ""


def _refused(exc: Any, what: str) -> errors.CloudtrainError:
    message, reason, metadata = answered(getattr(exc.response, "content", b""))
    reason = reason or str(exc.reason or "")
    return refusal(int(exc.code or 0), message or str(exc.message), what=what, reason=reason, metadata=metadata)


class Account:
    """One project and location."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.RLock()
        self._session: Any = None
        self._own_quota = True
        self._clients: dict[str, Any] = {}
        self.backoff = Backoff(first=FIRST_HOLD)
        self.creations = Creations(self.cancel)
        self._places: dict[str, tuple[str, str]] = {}
        self.ended: dict[str, float] = {}
        """Time at which a finished job ended, on the clock of `time.monotonic`."""
        self.alive: dict[str, float] = {}
        """Time at which a poll last found a job not ended, on that clock."""

    # ------------------------------------------------------------------------------------------ credentials and clients

    @property
    def session(self) -> Any:
        """Return google-auth's session, with the application default credentials.

        Its calls are counted against our own project: a user's credentials often name another, in which the API is off
        (python-aiplatform #2563). `call` changes that if the caller may not do so.
        """
        with self._lock:
            if self._session is None:
                from google.auth.transport.requests import AuthorizedSession

                self._session = AuthorizedSession(credentials(self.settings.project if self._own_quota else ""))
            return self._session

    def principal(self) -> str | None:
        """Return the calling service account, or the user if gcloud has recorded the name; else None."""
        known = self.session.credentials
        if name_of(known) == "default":  # the machine's; its token has the name
            known.refresh(self.session._auth_request)
        return name_of(known) or None

    def storage(self, url: str) -> Mapping[str, Any]:
        """Return a store's options. gcsfs's own lookup would end anonymous, and with a refusal without a reason."""
        return {"token": credentials()} if url_scheme(url) == "gs" else {}

    def _forget(self) -> None:
        """Drop the session, so that the next call signs in again."""
        with self._lock:
            self._session, self._clients = None, {}

    def _client(self, location: str) -> Any:
        """Return Google's client of the jobs in ``location``, over REST: it goes through proxies, and needs no grpc."""
        with self._lock:
            if location not in self._clients:
                from google.cloud.aiplatform_v1.services.job_service import JobServiceClient
                from google.cloud.aiplatform_v1.services.job_service.transports.rest import JobServiceRestTransport

                url, known = urlsplit(endpoint("aiplatform", location=location)), self.session.credentials
                transport = JobServiceRestTransport(host=url.netloc, url_scheme=url.scheme, credentials=known)
                self._clients[location] = JobServiceClient(transport=transport)
            return self._clients[location]

    @contextlib.contextmanager
    def _calling(self, service: str, what: str) -> Iterator[None]:
        """Guard one call: raise before it while the service is held, and translate its errors."""
        self.backoff.check(service, name="Google Cloud", what=what)
        with translated(what):
            try:
                yield
            except Exception as exc:  # recorded here, and raised unchanged
                if (answer := getattr(exc, "response", None)) is not None:
                    self.backoff.note(service, answer.status_code, answer.headers)
                if type(exc).__name__ == "RefreshError":  # google-auth's, which may be absent
                    self._forget()
                raise

    def call(self, service: str, method: str, url: str, *, what: str, body: Any = None, **more: Any) -> dict[str, Any]:
        """Return the JSON object of the answer to a call over REST. Raises only cloudtrain's errors."""
        with self._calling(service, what):
            answer = self.session.request(method, url, json=body, timeout=TIMEOUT, **more)
        if answer.status_code >= 400:
            self.backoff.note(service, answer.status_code, answer.headers)
            message, reason, metadata = answered(answer.content)
            if self._own_quota and CONSUMER.search(f"{reason} {message}"):
                self._own_quota = False
                self._forget()
                return self.call(service, method, url, what=what, body=body, **more)
            raise refusal(answer.status_code, message, what=what, reason=reason, metadata=metadata)
        return decoded(answer.content, what=what)

    # ------------------------------------------------------------------------------------------------------------- jobs

    def ask(self, method: str, name: str, *, what: str, **more: Any) -> dict[str, Any]:
        """Return the answer of Vertex AI; ``name`` is a resource name (``projects/P/locations/L/…``) or begins so."""
        where = endpoint("aiplatform", location=name.split("/")[3])
        return self.call("jobs", method, f"{where}/v1/{name}", what=what, **more)

    def describe(self, native_id: str) -> dict[str, Any]:
        """Return the CustomJob in JSON. Raises `NotFoundError`."""
        job_of(native_id)
        job = self.ask("GET", native_id, what="get job")
        if job.get("state") not in FINAL:
            self.alive[native_id] = time.monotonic()
        elif native_id not in self.ended:
            from .status import over_for

            # If we saw the job alive, the monotonic clock is enough: this machine's wall clock may be fast.
            self.ended[native_id] = time.monotonic() - (0.0 if native_id in self.alive else over_for(job))
        return job

    def find(self, request: Request) -> str | None:
        """Return the first of `jobs`, or None."""
        return next(iter(self.jobs(request)), None)

    def jobs(self, request: Request) -> list[str]:
        """Return the resource names of the request's jobs, the oldest first: two clients may have created one each.

        Raises `ConflictError` if the oldest labelled job was another request.
        """
        name = request.body["displayName"]

        def page(token: str) -> dict[str, Any]:
            query = {"filter": f'labels.{TAG_JOB}="{name}"', "pageToken": token}
            return self.ask("GET", f"{_parent(request)}/customJobs", what="list jobs", params=query)

        jobs = [job for found in pages(page, "nextPageToken") for job in found.get("customJobs") or ()]
        ours = [job for job in jobs if (job.get("labels") or {}).get(TAG_RUN) == run_tag(request.run)]
        found = sorted(ours, key=lambda job: (unix_seconds(job["createTime"]), job["name"]))
        same = [job for job in found if job["labels"].get(TAG_BODY) == request.body["labels"][TAG_BODY]]
        if found[:1] != same[:1]:
            why = f"Vertex AI has a job {name} of an earlier run of that id, which was another job"
            raise errors.ConflictError(why, field="run_id", hint=ANOTHER_ID)
        return [str(job["name"]) for job in same]

    def create(self, request: Request) -> str:
        """Return the resource name of the one job of this request."""
        self._check_buckets(request)
        send = self._prepared(request)
        return self.creations.one_job(request.body["displayName"], partial(self.jobs, request), send)

    def _prepared(self, request: Request) -> Callable[[], str]:
        """Prepare the creation up to its one call: the import of Google's client alone can take ten seconds."""
        name, parent = request.body["displayName"], _parent(request)
        with translated("create job"):
            from google.cloud.aiplatform_v1.types import CustomJob
            from google.protobuf import json_format

            job = CustomJob.wrap(json_format.ParseDict(dict(request.body), CustomJob.pb(CustomJob())))
            self._client(_location(request))

        def send() -> str:
            client = self._client(_location(request))  # the search for the job may have changed the sign-in
            with self._calling("jobs", "create job"):
                try:
                    made = str(client.create_custom_job(parent=parent, custom_job=job, timeout=TIMEOUT).name)
                    if not _JOB.fullmatch(made):
                        raise ValueError(f"no job has the name {made!r}")
                    return made
                except Exception as exc:  # raised unchanged; after some of them a job may exist
                    if _open(exc):
                        self.creations.note_lost(name)
                    if isinstance(exc, (json_format.ParseError, ValueError)) or getattr(exc, "code", 0) == 409:
                        text = " ".join(str(exc).split())[:300]
                        raise errors.LostContactError(f"create job: the answer names no job: {text}") from None
                    raise

        return send

    def cancel(self, native_id: str) -> None:
        """Request the cancellation. A job that has ended stays as it is."""
        job_of(native_id)
        with unless_over(lambda: self.describe(native_id).get("state") in (*FINAL, "JOB_STATE_CANCELLING")):
            self.ask("POST", f"{native_id}:cancel", what="cancel job", body={})

    def shell(self, request: Request, native_id: str, node: int, command: Sequence[str], *, tty: bool) -> Shell:
        """Return the page of a node's shell. Raises `SpecError` for a job that has none."""
        if not request.body["jobSpec"].get("enableWebAccess"):
            why, hint = "the job was sent without it, and lets no shell in", "send a job with --interactive"
            raise errors.SpecError(why, field="interactive", hint=hint)
        if command:
            raise errors.UnsupportedError(
                NAME, "shell", "its shell is a page, which takes no command", hint="leave it out"
            )
        pages = self.describe(native_id).get("webAccessUris") or {}
        name = f"workerpool1-{node - 1}" if node else "workerpool0-0"
        if name not in pages:
            raise errors.SpecError("the node's shell is not ready yet", field="node", hint="try again in a minute")
        return Shell(url=str(pages[name]))

    # ---------------------------------------------------------------------------------------------------- Cloud Storage

    def _check_buckets(self, request: Request) -> None:
        """Raise `SpecError` for a bucket that the jobs cannot use. Jobs mount buckets of one region.

        The store's must be in the jobs' own: other regions are slow and cost money. Others may be in any single region.
        """
        store, location = urlsplit(request.run).netloc, _location(request)
        make = f"gcloud storage buckets create gs://NAME --location={location}"
        for field, bucket in (("store", store), *_others(request)):
            there, kind = self.place(bucket, missing=field == "store")
            if kind != "region":
                why = f"gs://{bucket} is a {kind} bucket ({there}), which no job can mount"
                fix = f"copy the data into a bucket in {location}"
                raise errors.SpecError(why, field=field, hint=f"run: {make}" if field == "store" else fix)
            if field == "store" and there not in (location, ""):
                why = f"gs://{bucket} is in {there}, and the jobs are in {location}"
                raise errors.SpecError(why, field=field, hint=f"set vertex.location to {there}, or run: {make}")

    def place(self, bucket: str, *, missing: bool = False) -> tuple[str, str]:
        """Return (location, kind) of a bucket; ("", "region") if the caller may not look at it."""
        if bucket not in self._places:
            what = f"{LOOK} gs://{bucket}"
            try:
                url = f"{storage_endpoint()}/storage/v1/b/{bucket}?fields=location,locationType"
                answer = self.call("storage", "GET", url, what=what)
            except errors.NotFoundError:
                if missing:
                    raise errors.SpecError(f"there is no bucket {bucket}", field="store") from None
                return "", "region"
            except errors.AuthError:
                return "", "region"  # a caller with write access may lack read access to the bucket's metadata
            where, kind = str(answer.get("location") or "").lower(), str(answer.get("locationType") or "region")
            self._places[bucket] = where, kind
        return self._places[bucket]


def _others(request: Request) -> list[tuple[str, str]]:
    """Return (field, bucket) of a job's reads outside the store, by the paths of its command line."""
    words = request.body["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["args"]
    found = []
    for name, path in pairs_of(words).items():
        bucket = path.removeprefix(f"{GCS}/").partition("/")[0]
        if path.startswith(f"{GCS}/") and bucket != urlsplit(request.run).netloc:
            found.append(("resume_from" if name == "resume" else f"inputs.{name.partition('.')[2]}", bucket))
    return found


def _open(exc: Exception) -> bool:
    """Return True if the job may exist although its creation raised this. An answer of 4xx rules that out."""
    from google.auth.exceptions import GoogleAuthError

    status = getattr(exc, "code", None)
    refused = isinstance(status, int) and 400 <= status < 500 and status != 408
    return not refused and not isinstance(exc, GoogleAuthError)


def credentials(quota_project: str = "") -> Any:
    """Return the application default credentials: a named file, gcloud's, or the machine's. Raises `AuthError`.

    If GOOGLE_CLOUD_QUOTA_PROJECT is not set, calls are counted against ``quota_project`` (empty: as the file says).
    """
    with translated("sign in"):
        import google.auth

        own = None if os.environ.get("GOOGLE_CLOUD_QUOTA_PROJECT") else quota_project or None
        return google.auth.default(scopes=[SCOPE], quota_project_id=own)[0]


def name_of(known: Any) -> str:
    """Return the identity of google-auth's credentials: a service account, or the user that gcloud recorded; or ""."""
    return str(getattr(known, "service_account_email", "") or getattr(known, "account", "") or "")


def endpoint(service: str, *, location: str = "") -> str:
    """Return a service's endpoint, in a location if it has one there, unless gcloud's own variable names another."""
    host = f"{location}-{service}" if location else service
    return (os.environ.get(_OVERRIDE + service.upper()) or f"https://{host}.googleapis.com").rstrip("/")


def storage_endpoint() -> str:
    """Return the endpoint of Cloud Storage, by the variable that gcsfs reads too."""
    return (os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com").rstrip("/")


def _parent(request: Request) -> str:
    """Return the parent of the request's job. The settings may have changed since the plan."""
    return request.operation.removeprefix("POST v1/").removesuffix("/customJobs")


def _location(request: Request) -> str:
    return _parent(request).split("/")[3]
