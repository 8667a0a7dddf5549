"""Create, find, read and cancel Jobs by the Kubernetes API.

The client library is used for kubeconfig, credentials and TLS alone; plain JSON goes over its pool of connections. Its
typed models refuse what servers take, and differ by version.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import ssl
import sys
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import errors
from ...provider_api.protocol import NativeObject, Shell, python_command, shell_arguments
from ...storage.extras import not_installed
from .._cloud import ANOTHER_ID, object_of, one_line, time_of
from . import NAME
from .devices import kind_of
from .request import (
    CANCELLED,
    CONTAINER,
    ENDED,
    JOBSETS,
    LABEL_REQUEST,
    MANAGED_BY,
    OF_SET,
    POD_INDEX,
    RUN_URL,
    job_object,
    job_of_set,
    marks_of,
    native_id_of,
)  # fmt: skip
from .validate import quantity_of

if TYPE_CHECKING:
    from ...provider_api.catalog import Machine
    from ...provider_api.protocol import Request
    from . import Settings

TIMEOUT = 30.0
"""Seconds for one call."""
APPEARS = 3
"""Seconds for a JobSet's controller to make the Job of a JobSet that is cancelled."""
LINGER = 8
"""Seconds from the pods' own deadline to the Job's: less than the 10 s after which a Job starts a pod again."""
MERGE = "application/merge-patch+json"
FINAL = frozenset(("Complete", "Completed", "Failed"))
"""Conditions of a Job or a JobSet that has ended."""
_DECIDED = frozenset((*FINAL, "SuccessCriteriaMet", "FailureTarget"))
IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
HELP: Mapping[str, str] = {
    "none": "test the connection: kubectl get jobs; kubectl config get-contexts lists values of kubernetes.context",
    "login": "log in to the cluster again, then test it: kubectl get jobs",
    "auth": f"to see your rights, run: kubectl auth can-i --list -n NAMESPACE; {NAME}.namespace is the one to use",
    "namespace": f"set {NAME}.namespace to one that this lists: kubectl get namespaces",
    "quota": "to see the limits, run: kubectl describe resourcequota -n NAMESPACE",
    "jobset": f'install JobSet (https://jobset.sigs.k8s.io), or set {NAME}.kind = "job"',
    "old": "the cluster must have Kubernetes 1.29 or newer: kubectl version",
}


class ExistsError(errors.ConflictError):
    """Error: an object of this name is there already."""


def error_of(status: int, reason: str, message: str, *, what: str) -> errors.CloudtrainError:
    """Return the error for an answer of the API server: its HTTP status, and reason and message of its body."""
    text = f"{what}: {one_line(message) or f'HTTP {status}'}"
    kinds: Sequence[tuple[bool, type[errors.CloudtrainError], str]] = (
        ("exceeded quota" in message, errors.QuotaError, HELP["quota"]),
        ("admission webhook" in message and 400 <= status < 500, errors.SpecError, ""),
        (status in (401, 403), errors.AuthError, HELP["login" if status == 401 else "auth"]),
        (status == 404, errors.NotFoundError, HELP["namespace"] if message.startswith("namespaces ") else ""),
        (status == 409 and reason == "AlreadyExists", ExistsError, ""),
        (status in (400, 413, 422), errors.SpecError, HELP["old"] if "unknown field" in message else ""),
        (status in (409, 429) or status >= 500, errors.LostContactError, ""),
    )
    for holds, kind, hint in kinds:
        if holds:
            return kind(text, hint=hint)
    return errors.PlatformError(f"{text} (HTTP {status})")


def conditions_of(found: Mapping[str, Any], status: str = "True") -> dict[str, Mapping[str, Any]]:
    """Return an object's conditions of this status by their type."""
    known = found.get("status", {}).get("conditions") or ()
    return {item["type"]: item for item in known if item["status"] == status}


def is_ending(job: Mapping[str, Any]) -> bool:
    """Return whether the end of a Job is decided."""
    return not _DECIDED.isdisjoint(conditions_of(job))


def _is_over(job: Mapping[str, Any]) -> bool:
    """Return whether a Job or JobSet starts no pod any more. One that is cancelled while it is held back has no end."""
    return is_ending(job) or (CANCELLED in marks_of(job) and bool(job["spec"].get("suspend")))


class Account:
    """The caller's view of one cluster."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._known: tuple[Any, Any] | None = None
        self._ahead = 0.0  # seconds by which the server's clock is ahead of this machine's

    # --------------------------------------------------------------------------------------------------- the connection

    def _connection(self) -> tuple[Any, Any]:
        """Return the client's configuration and its pool of connections."""
        with self._lock:
            if self._known is None:
                self._known = self._connect()
            return self._known

    def _connect(self) -> tuple[Any, Any]:
        try:
            from kubernetes import client, config
        except ModuleNotFoundError:
            raise not_installed(f"provider {NAME!r}", NAME, field="provider", named=["kubernetes"]) from None
        own, found = self.settings, client.Configuration()
        file = own.kubeconfig or os.environ.get("KUBECONFIG", "")
        logging.root.addHandler(quiet := logging.NullHandler())  # else the client prints what it raises
        try:
            if IN_POD.exists() and not (file or own.context):
                config.load_incluster_config(client_configuration=found)
            else:
                config.load_kube_config(
                    file or None, own.context or None, client_configuration=found, persist_config=False
                )
            pool = client.ApiClient(found).rest_client.pool_manager
            if found.verify_ssl:  # Python 3.13 refuses the authorities of EKS and others, which kubectl takes (#2394)
                pool.connection_pool_kw["ssl_context"] = context = ssl.create_default_context(cafile=found.ssl_ca_cert)
                context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        except Exception as exc:  # noqa: BLE001  the client does not check the form of a file
            text = f"no cluster in {file or '~/.kube/config'}: {one_line(exc)}"
            raise errors.AuthError(text, hint=HELP["none"]) from None
        finally:
            logging.root.removeHandler(quiet)
        return found, pool

    def call(self, method: str, path: str, *, what: str, body: Any = None, **query: Any) -> Any:
        """Return the object of an answer. ``what`` is the action for messages. Raises the errors of `error_of`."""
        kind = MERGE if method == "PATCH" else "application/json"
        return json.loads(self.raw(method, path, what=what, body=body, kind=kind, **query))

    def raw(
        self, method: str, path: str, *, what: str, body: Any = None, kind: str = "application/json", **query: Any
    ) -> bytes:
        """Return the bytes of an answer; see `call`."""
        found, pool = self._connection()
        from urllib3.exceptions import HTTPError

        try:
            headers = {"Accept": "application/json, */*", "Content-Type": kind, **_identity(found)}
            url = found.host + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
            data = None if body is None else json.dumps(body).encode()
            answer = pool.request(method, url, headers=headers, body=data, retries=False, timeout=TIMEOUT)
        except (HTTPError, OSError, ValueError) as exc:
            if "CERTIFICATE_VERIFY_FAILED" in str(exc):  # no later try can change that
                raise errors.AuthError(f"{what}: {found.host}: {one_line(exc)}", hint=HELP["none"]) from None
            text = f"{what}: {found.host} does not answer: {one_line(exc)}"
            raise errors.LostContactError(text, hint=HELP["none"]) from None
        with contextlib.suppress(KeyError, ValueError, TypeError):
            self._ahead = parsedate_to_datetime(answer.headers["Date"]).timestamp() - time.time()
        if answer.status < 300:
            return bytes(answer.data)
        if (said := object_of(answer.data)) is None:
            said = {"message": answer.data[:300].decode("utf-8", "replace")}
        raise error_of(answer.status, str(said.get("reason", "")), str(said.get("message", "")), what=what)

    # --------------------------------------------------------------------------------------------------------- the jobs

    def create(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        """Create the request's objects, unless they are there; return the native id.

        The Job comes first: only one client can create its name. Its pods wait for the rest.
        """
        wanted, native = request.body["items"][0], native_id_of(job_object(request))
        kind, name = wanted["kind"], wanted["metadata"]["name"]
        try:
            job = self._post(wanted)
        except ExistsError:
            job = self.get(kind, wanted["metadata"]["namespace"], name)
            if not _is_same(job, wanted):
                text = f"{kind} {native_id_of(wanted)} is of another request"
                raise errors.ConflictError(text, field="run_id", hint=ANOTHER_ID) from None
            if is_ending(job):
                return native
        except errors.NotFoundError as exc:
            if kind == "Job" or "requested resource" not in str(exc):
                raise
            raise errors.SpecError("the cluster has no JobSet", field=f"{NAME}.kind", hint=HELP["jobset"]) from None
        owner = {"apiVersion": wanted["apiVersion"], "kind": kind, "name": name, "uid": job["metadata"]["uid"]}
        for item in _owned(request, secrets or {}):
            with contextlib.suppress(ExistsError):
                self._post({**item, "metadata": {**item["metadata"], "ownerReferences": [owner]}})
        return native

    def _post(self, item: Mapping[str, Any], *, what: str = "create", **query: str) -> Any:
        where = path_of(item["kind"], item["metadata"]["namespace"])
        return self.call("POST", where, what=f"{what} the {item['kind']}", body=item, fieldValidation="Strict", **query)

    def test(self, request: Request) -> str:
        """Let the API server judge the Job or JobSet of a request without creating it. Raises `SpecError`."""
        self._post(item := request.body["items"][0], what="test", dryRun="All")
        return f"the API server takes the {item['kind']}"

    def find(self, request: Request) -> str | None:
        """Return the native id if the cluster has the request's Job with all that it owns.

        A client may have died after it created the Job.
        """
        wanted = request.body["items"][0]
        try:
            job = self.get(wanted["kind"], wanted["metadata"]["namespace"], wanted["metadata"]["name"])
            if not _is_same(job, wanted):
                return None
            for item in () if is_ending(job) else _owned(request, {}):
                with contextlib.suppress(errors.AuthError):  # a role may create secrets, and not read them
                    self.get(item["kind"], item["metadata"]["namespace"], item["metadata"]["name"])
        except errors.NotFoundError:
            return None
        return native_id_of(job_object(request))

    def get(self, kind: str, namespace: str, name: str) -> Mapping[str, Any]:
        """Return an object. Raises `NotFoundError`."""
        found: Mapping[str, Any] = self.call("GET", path_of(kind, namespace, name), what=f"ask for the {kind}")
        return found

    def job(self, native_id: str) -> Mapping[str, Any]:
        """Return a Job. Raises `NotFoundError`.

        One that its JobSet holds back also has the JobSet's annotations: a user may cancel it before it is made. One
        that its JobSet has still to make has no uid.
        """
        namespace, name = job_of(native_id)
        job = None
        try:
            job = self.get("Job", namespace, name)
        except errors.NotFoundError:
            if not name.endswith(OF_SET):
                raise
        if job is not None and not (name.endswith(OF_SET) and job["spec"].get("suspend")):
            return job
        made = {**self.get("JobSet", namespace, name.removesuffix(OF_SET)), "kind": "JobSet"}
        job = job or {**job_of_set(made), "status": {}}
        meta = {**job["metadata"], "annotations": {**marks_of(job), **marks_of(made)}}
        return {**job, "metadata": meta, "spec": {**job["spec"], "suspend": made["spec"].get("suspend", False)}}

    def describe(self, native_id: str) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
        """Return a Job and its pods, the oldest first."""
        return self.job(native_id), self.pods(native_id)

    def pods(self, native_id: str) -> list[Mapping[str, Any]]:
        """Return the pods of a Job, the oldest first."""
        namespace, name = job_of(native_id)
        query = {"labelSelector": f"batch.kubernetes.io/job-name={name}"}
        found = self.call("GET", path_of("Pod", namespace), what="ask for the pods", **query)
        return sorted(found["items"], key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))

    def shell(self, request: Request, native_id: str, node: int, command: Sequence[str], *, tty: bool) -> Shell:
        """Return the program that runs ``command`` in a node's pod. Raises `SpecError` if it has none now."""
        for pod in reversed(self.pods(native_id)):
            if marks_of(pod).get(POD_INDEX) == str(node) and pod["status"].get("phase") == "Running":
                break
        else:
            raise errors.SpecError("the node has no running pod now", field="node", hint="try again")
        pyz = job_object(request)["spec"]["template"]["spec"]["containers"][0]["args"][1]
        own = {name: getattr(self.settings, name) for name in ("kubeconfig", "context", "namespace")}
        facts = json.dumps({"settings": own, "pod": pod["metadata"]["name"], "tty": tty})
        words = python_command(shell_arguments(pyz, request, node, command))
        return Shell(argv=[sys.executable, "-m", f"{__package__}.shell", facts, *words])

    def exec(self, pod: str, command: Sequence[str], *, tty: bool) -> Any:
        """Return the official client's websocket of a command that it starts in a pod's container."""
        found, _ = self._connection()
        from kubernetes.stream.ws_client import WSClient
        from websocket import WebSocketBadStatusException, WebSocketException

        words = [("container", CONTAINER), ("stdin", True), ("stdout", True), ("stderr", not tty), ("tty", tty)]
        query = urllib.parse.urlencode(
            [*((name, str(on).lower()) for name, on in words), *(("command", word) for word in command)]
        )
        url = f"{found.host}{path_of('Pod', self.settings.namespace, pod)}/exec?{query}"
        headers = {name.lower(): value for name, value in _identity(found).items()}
        try:
            return WSClient(found, url.replace("http", "ws", 1), headers, capture_all=False, binary=True)
        except WebSocketBadStatusException as exc:
            raise error_of(exc.status_code, "", str(exc), what="open a shell") from None
        except (WebSocketException, OSError) as exc:
            raise errors.LostContactError(f"open a shell: {one_line(exc)}", hint=HELP["none"]) from None

    def events(self, kind: str, item: Mapping[str, Any], reasons: Sequence[str]) -> list[Mapping[str, Any]]:
        """Return an object's events with these reasons, the oldest first; of one second, the first reason's last."""
        meta = item["metadata"]
        query = {"fieldSelector": f"involvedObject.kind={kind},involvedObject.name={meta['name']}"}
        found = self.call("GET", path_of("Event", meta["namespace"]), what="ask for the events", **query)
        own = [event for event in found["items"] if event["reason"] in reasons]
        own = [event for event in own if event["involvedObject"].get("uid") in (None, meta.get("uid"))]
        # The name may have been an earlier object's. Times are whole seconds.
        return sorted(own, key=lambda event: (_moment(event), event["reason"] == reasons[0]))

    def log(self, namespace: str, pod: str, **query: Any) -> bytes:
        """Return the log of a pod's container."""
        return self.raw("GET", f"{path_of('Pod', namespace, pod)}/log", what="read the log", **query)

    def cancel(self, native_id: str, *, why: str = "") -> None:
        """Stop the pods by their own deadline, so that their logs stay, and then the Job before it starts others.

        ``why`` is the annotation `ENDED` of a Job that cloudtrain itself ends; empty: a user cancels it.
        """
        namespace, name = job_of(native_id)
        job = self.job(native_id)
        if is_ending(job) or {CANCELLED, ENDED} & set(marks_of(job)):
            return
        mark: dict[str, Any] = {"metadata": {"annotations": {ENDED: why} if why else {CANCELLED: "true"}}}
        if "uid" not in job["metadata"]:  # its JobSet's controller makes it suspended then, so it has no pod
            path = path_of("JobSet", namespace, name.removesuffix(OF_SET))
            self.call("PATCH", path, what="cancel the JobSet", body={**mark, "spec": {"suspend": True}})
            for _ in range(APPEARS):  # a queue that lets the JobSet start later finds the Job's deadline
                if "uid" in (job := self.job(native_id))["metadata"]:
                    break
                time.sleep(1)
            else:
                return
        stopped = False
        for pod in self.pods(native_id):
            if pod["status"].get("phase") in ("Pending", "Running") and pod["spec"].get("nodeName"):
                path = path_of("Pod", namespace, pod["metadata"]["name"])
                with contextlib.suppress(errors.NotFoundError):
                    self.call("PATCH", path, what="stop the pod", body={"spec": {"activeDeadlineSeconds": 1}})
                    stopped = True
        began = time_of(job["status"].get("startTime"))
        deadline = max(0, int(time.time() + self._ahead - began)) + LINGER if began and stopped else 0
        change = {**mark, "spec": {"activeDeadlineSeconds": deadline}}
        self.call("PATCH", path_of("Job", namespace, name), what="cancel the Job", body=change)

    def objects(self) -> list[NativeObject]:
        """Return the namespace's objects of runs, without those that another one owns and jobs that are not over.

        Another store may have the same path on another volume, so a job that may still run is left out.
        """
        found, query = [], {"labelSelector": f"{MANAGED_BY}=cloudtrain"}
        for kind in ("Job", "JobSet", "Service", "Secret"):
            path = path_of(kind, self.settings.namespace)
            try:
                items = self.call("GET", path, what=f"list {kind.lower()}s", **query)["items"]
            except errors.NotFoundError:  # a cluster without JobSet
                continue
            except errors.AuthError:  # so does one whose Roles name no JobSets
                if kind != "JobSet" or self.settings.kind == "jobset":
                    raise
                continue
            for item in items:
                meta = item["metadata"]
                run, at = marks_of(item).get(RUN_URL), time_of(meta.get("creationTimestamp"))
                if run and at and not meta.get("ownerReferences") and ("Job" not in kind or _is_over(item)):
                    key = f"{path}/{meta['name']}"
                    found.append(NativeObject(kind=kind.lower(), key=key, run=run, created=at))
        return found

    def remove(self, found: NativeObject) -> None:
        """Delete one of `objects`, with its pods and what it owns."""
        with contextlib.suppress(errors.NotFoundError):
            self.call("DELETE", found.key, what=f"delete the {found.kind}", propagationPolicy="Background")

    # ------------------------------------------------------------------------------------------------------ the cluster

    def nodes(self) -> list[Mapping[str, Any]]:
        """Return the cluster's nodes."""
        found: list[Mapping[str, Any]] = self.call("GET", "/api/v1/nodes", what="ask for the nodes")["items"]
        return found

    def machines(self) -> list[Machine]:
        """Return the kinds of nodes, by their instance type."""
        from ...provider_api.catalog import Machine

        found: dict[tuple[Any, ...], Machine] = {}
        for node in self.nodes():
            labels, size = node["metadata"].get("labels") or {}, node["status"].get("allocatable") or {}
            count = int(size.get(self.settings.gpu_resource, 0))
            gpu = kind_of(self.settings, labels) if count else ""
            kind = labels.get("node.kubernetes.io/instance-type") or "node"
            found[(kind, gpu, count)] = Machine(
                instance_type=kind,
                gpu=gpu,
                gpu_count=count,
                vcpus=int(quantity_of(size.get("cpu", 0), "cpu")) or None,
                memory_gib=round(float(quantity_of(size.get("memory", 0), "memory")) / (1 << 30), 1) or None,
                arch="arm64" if labels.get("kubernetes.io/arch") == "arm64" else "x86_64",
            )
        return [found[key] for key in sorted(found)]

    def principal(self) -> str:
        """Return the user's name by a SelfSubjectReview, which needs no right."""
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        path = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
        found = self.call("POST", path, what="ask who calls", body=body)
        return f"{found['status']['userInfo'].get('username', 'unknown')} on {self._connection()[0].host}"

    def may(self, verb: str, group: str, resource: str, *, namespace: str) -> bool:
        """Return whether the caller has this right, by a SelfSubjectAccessReview, which needs no right."""
        kind, _, sub = resource.partition("/")
        asked = {"namespace": namespace, "verb": verb, "group": group, "resource": kind, "subresource": sub}
        spec = {"resourceAttributes": {key: value for key, value in asked.items() if value}}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec}
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return bool(self.call("POST", path, what="ask for the rights", body=body)["status"].get("allowed"))


def _identity(found: Any) -> dict[str, str]:
    """Return the headers of who calls. Asked for each call: this renews a token."""
    return {a["key"]: a["value"] for a in found.auth_settings().values() if a["in"] == "header" and a["value"]}


def _moment(event: Mapping[str, Any]) -> str:
    """Return when an event was last seen, in whole seconds of UTC as text."""
    found = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or ""
    return str(found)[:19]


def path_of(kind: str, namespace: str, name: str = "") -> str:
    """Return the API's path of an object, or of all objects of a kind."""
    group = {"Job": "apis/batch/v1", "JobSet": f"apis/{JOBSETS}/v1alpha2"}.get(kind, "api/v1")
    return f"/{group}/namespaces/{namespace}/{kind.lower()}s" + (f"/{name}" if name else "")


def _owned(request: Request, secrets: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Return what belongs to the Job or JobSet of a request: a Service, and a Secret with the values ``secrets``."""
    found, (first, *rest) = job_object(request), request.body["items"]
    others: list[Mapping[str, Any]] = [*rest]
    if any(volume["name"] == "secrets" for volume in found["spec"]["template"]["spec"]["volumes"]):
        meta = {key: first["metadata"][key] for key in ("namespace", "labels")} | {"name": found["metadata"]["name"]}
        data = {name: base64.b64encode(value.encode()).decode() for name, value in secrets.items()}
        others.append({"apiVersion": "v1", "kind": "Secret", "immutable": True, "metadata": meta, "data": data})
    return others


def _is_same(job: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return bool((job["metadata"].get("labels") or {}).get(LABEL_REQUEST) == wanted["metadata"]["labels"][LABEL_REQUEST])


def job_of(native_id: str) -> tuple[str, str]:
    """Return (namespace, name). Raises `NotFoundError`."""
    namespace, slash, name = native_id.partition("/")
    if not (namespace and slash and name) or "/" in name:
        raise errors.NotFoundError(f"{native_id!r} is not an id of {NAME}, NAMESPACE/JOB")
    return namespace, name
