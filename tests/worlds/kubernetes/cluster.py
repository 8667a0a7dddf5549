"""The API server of the fake cluster, and its objects."""

from __future__ import annotations

import base64
import json
import re
import threading
import time
import traceback
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..base import Fault, Platform, due
from .life import Job
from .pods import Pod, stamp
from .shells import serve
from .strict import Refusal, check_job, check_jobset, check_name

__all__ = ["Cluster", "Refusal"]

TOKEN, NAMESPACE = "a-token-of-the-fake", "team"
_QUEUE = re.compile(r"/apis/kueue.x-k8s.io/([^/]+)/namespaces/([^/]+)/localqueues/([^/]+)")
_JOBS = re.compile(r"/apis/batch/v1/namespaces/([^/]+)/jobs(?:/([^/]+))?")
_JOBSETS = re.compile(r"/apis/jobset.x-k8s.io/v1alpha2(?:/namespaces/([^/]+)/jobsets(?:/([^/]+))?)?")
_LISTED = re.compile(r"/apis?/(?:[^/]+/)?v1[a-z0-9]*/namespaces/([^/]+)/(jobs|jobsets|services|secrets)")
_NAMED = re.compile(_LISTED.pattern + r"/([^/]+)")
_CORE = re.compile(
    r"/api/v1/namespaces/([^/]+)/(services|secrets|configmaps|persistentvolumeclaims|serviceaccounts)(?:/([^/]+))?"
)
_PODS = re.compile(r"/api/v1/namespaces/([^/]+)/pods(?:/([^/]+)(?:/(log|eviction))?)?")
_EVENTS = re.compile(r"/api/v1/namespaces/([^/]+)/events")


LAG = 0.3
"""Seconds until a controller handles a new JobSet."""


def _missing(kind: str, name: str) -> Refusal:
    return Refusal(404, "NotFound", f'{kind} "{name}" not found')


class Wire:
    """A server on loopback. ``faults`` are of operations like ``POST jobs``; ``calls`` counts them."""

    def __init__(self, cluster: Cluster) -> None:
        self.crashes: list[str] = []
        self.faults: list[Fault] = []
        self.calls: list[str] = []
        wire = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                wire.answer(cluster, self)

            do_GET = do_POST = do_PATCH = do_DELETE = _answer

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def answer(self, cluster: Cluster, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        data = handler.rfile.read(length)
        path, _, query = handler.path.partition("?")
        operation = f"{handler.command} {_kind(path)}"
        self.calls.append(operation)
        fault = due(self.faults, operation, "*")
        status, body = 200, b""
        try:
            if fault is not None and not fault.done and fault.error is not None:
                raise fault.error
            if fault is None or fault.done:
                if handler.headers.get("Authorization") != f"Bearer {TOKEN}":
                    raise Refusal(401, "Unauthorized", "Unauthorized")
                if operation == "GET pods/exec":
                    serve(handler, cluster.container(path), query)
                    return
                parameters = dict(urllib.parse.parse_qsl(query))
                found = cluster.handle(handler.command, path, parameters, json.loads(data) if data else None)
                body = found if isinstance(found, bytes) else json.dumps(found).encode()
                status = 201 if handler.command == "POST" else 200
            if fault is not None:
                if fault.error is not None:
                    raise fault.error
                handler.close_connection = True
                handler.connection.close()
                return
        except Refusal as exc:
            status = exc.status
            answer = {"kind": "Status", "status": "Failure", "reason": exc.reason, "message": exc.message}
            body = json.dumps({**answer, "code": exc.status}).encode()
        except Exception:  # noqa: BLE001  an error of the fake: `Platform.close` raises it
            self.crashes.append(traceback.format_exc())
            status, body = 500, b"{}"
        try:
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)
        except OSError:  # a client that was killed
            return


def _kind(path: str) -> str:
    words = [word for word in path.split("/") if word]
    if "namespaces" in words and len(words) > words.index("namespaces") + 2:
        words = words[words.index("namespaces") + 2 :]
        return "/".join(words[::2]) if len(words) > 2 else words[0]
    return words[-1] if words else ""


class Cluster(Platform):
    """A namespace ``team`` with a claim, with or without a quota and machines. ``volume`` is the shared folder."""

    def __init__(self, folder: Path, *, volume: Path) -> None:
        self.folder, self.volume = folder, volume
        folder.mkdir(parents=True)
        self.jobs: dict[tuple[str, str], Job] = {}
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.no_capacity = self.quota = False
        self.node: dict[str, Any] = {}
        """Spec of the one node that the API shows."""
        self.jobset: bool | None = True
        """True: JobSet is installed. None: installed, but its controller does nothing. False: not installed."""
        self._due: list[tuple[float, tuple[str, str, str]]] = []
        self.denied: set[str] = set()
        self.queues: dict[tuple[str | Any, ...], str] = {}  # Kueue's, by version of its API, namespace and name
        self.grace, self.restart_seconds, self.silence_seconds = 40.0, 1.0, 2.0
        self.environment: dict[str, str] = {}
        """Variables for the store's own client."""
        self._lock = threading.RLock()
        self.wire = Wire(self)
        claim = {"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
        self.objects["persistentvolumeclaims", "team", "training"] = claim
        self.kubeconfig = folder / "kubeconfig"
        named = {"name": "fake", "cluster": {"server": self.wire.url}}
        user = {"name": "me", "user": {"token": TOKEN}}
        context = {"name": "fake", "context": {"cluster": "fake", "user": "me", "namespace": "team"}}
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "fake"}
        found = {**config, "clusters": [named], "users": [user], "contexts": [context]}
        self.kubeconfig.write_text(json.dumps(found))

    def environ(self) -> dict[str, str]:
        return {"KUBECONFIG": str(self.kubeconfig), **self.environment}

    def local(self, url: str, pod: str) -> Path:
        """Return the folder that stands for a volume of a pod."""
        if url.startswith("volume:"):
            return self.volume
        path = self.folder / "scratch" / pod / url.partition("://")[2]
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
        return path

    def container(self, path: str) -> str:
        """Return the engine's id of the container of a pod whose exec is at ``path``."""
        with self._lock:
            words = path.split("/")
            found = [pod.node for _, pod in self._of(words[4]) if pod.name == words[6] and pod.phase == "Running"]
            if not found or found[0] is None:
                raise _missing("pods", words[6])
            return found[0].id

    def event(self, job: Job, reason: str, message: str) -> None:
        with self._lock:
            about = {"kind": "Job", "name": job.name, "namespace": job.namespace}
            about["uid"] = job.made["metadata"]["uid"]
            times = {"lastTimestamp": stamp(), "metadata": {"creationTimestamp": stamp()}}
            self.events.append({"involvedObject": about, "reason": reason, "message": message, **times})

    def secret_of(self, job: Job) -> Mapping[str, str] | None:
        """Return the values of the Job's Secret; None if it needs a missing one."""
        for volume in job.made["spec"]["template"]["spec"]["volumes"]:
            if "secret" in volume:
                found = self.objects.get(("secrets", job.namespace, volume["secret"]["secretName"]))
                if found is None:
                    return None
                return {key: base64.b64decode(value).decode() for key, value in found["data"].items()}
        return {}

    # ---------------------------------------------------------------------------------------------------------- answers

    def handle(self, method: str, path: str, query: Mapping[str, str], body: Any) -> Any:
        with self._lock:
            self._make_jobs()
            if f"{method} {_kind(path)}" in self.denied:
                raise Refusal(403, "Forbidden", f'User "me" cannot {method} resource "{_kind(path)}"')
            if method == "POST" and "/namespaces/" in path and f"/{NAMESPACE}/" not in path:
                raise _missing("namespaces", path.split("/namespaces/")[1].partition("/")[0])
            if method == "DELETE" and (match := _NAMED.fullmatch(path)):
                return self._delete(match[1], match[2], match[3])
            if method == "GET" and (match := _LISTED.fullmatch(path)) and (match[2] != "jobsets" or self.jobset):
                return self._list(match[1], match[2], query)
            if match := _JOBS.fullmatch(path):
                return self._job(method, match[1], match[2], query, body)
            if self.jobset is not False and (match := _JOBSETS.fullmatch(path)):
                return self._jobset(method, match[1], match[2], query, body)
            if match := _CORE.fullmatch(path):
                return self._core(method, match[2], match[1], match[3], body)
            if match := _PODS.fullmatch(path):
                return self._pod(method, match[1], match[2], match[3], query, body)
            if match := _EVENTS.fullmatch(path):
                wanted = dict(word.split("=") for word in query["fieldSelector"].split(","))
                return {"items": [item for item in self.events if _fits(item, wanted)]}
            return self._rest(path, body)

    def _rest(self, path: str, body: Any) -> Any:
        if path == "/version":
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.2"}
        if path.endswith("/selfsubjectreviews"):
            return {"status": {"userInfo": {"username": "me"}}}
        if path.endswith("/selfsubjectaccessreviews"):
            attributes = body["spec"]["resourceAttributes"]
            return {"status": {"allowed": f"{attributes['verb']} {attributes['resource']}" not in self.denied}}
        if path == "/api/v1/nodes":
            labels = {"node.kubernetes.io/instance-type": "a2", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
            size = {"nvidia.com/gpu": "8", "cpu": "95900m", "memory": "1048576000Ki"}
            return {"items": [{"metadata": {"labels": labels}, "spec": self.node, "status": {"allocatable": size}}]}
        if (match := _QUEUE.fullmatch(path)) and match.groups() in self.queues:
            return {"spec": {"clusterQueue": self.queues[match[1], match[2], match[3]]}}
        raise Refusal(404, "NotFound", "the server could not find the requested resource")

    def metas(self, kind: str) -> dict[tuple[str, str], Any]:
        """Return the metadata of all objects of a kind, by namespace and name."""
        jobs = {key: job.made["metadata"] for key, job in self.jobs.items()} if kind == "jobs" else {}
        return jobs | {key[1:]: item.get("metadata", {}) for key, item in self.objects.items() if key[0] == kind}

    def _list(self, namespace: str, kind: str, query: Mapping[str, str]) -> Any:
        key, _, value = query["labelSelector"].partition("=")
        found = [(name, meta) for (at, name), meta in self.metas(kind).items() if at == namespace]
        fitting = [(name, meta) for name, meta in found if meta.get("labels", {}).get(key) == value]
        read = {"jobs": self._job, "jobsets": self._jobset}.get(kind)
        return {
            "items": [read("GET", namespace, name, {}, None) if read else {"metadata": meta} for name, meta in fitting]
        }

    def _delete(self, namespace: str, kind: str, name: str) -> Any:
        """Delete an object, and then the objects that it owns."""
        meta = self.metas(kind).get((namespace, name))
        if meta is None:
            raise _missing(kind, name)
        if kind == "jobs":
            job = self.jobs.pop((namespace, name))
            job.stop()
            self.jobs["deleted", f"{name} {meta['uid']}"] = job  # its pods end
        else:
            del self.objects[kind, namespace, name]
        for other in ("jobs", "services", "secrets"):
            for (at, owned), its in [*self.metas(other).items()]:
                if meta.get("uid") in [owner["uid"] for owner in its.get("ownerReferences", ())]:
                    self._delete(at, other, owned)
        return {"kind": "Status", "status": "Success"}

    def _job(self, method: str, namespace: str, name: str | None, query: Mapping[str, str], body: Any) -> Any:
        if method == "POST":
            strict = query.get("fieldValidation") == "Strict"
            return self._create_job(namespace, body, dry="dryRun" in query, strict=strict)
        job = self.jobs.get((namespace, str(name)))
        if job is None:
            raise _missing("jobs.batch", str(name))
        if method == "PATCH":
            job.made["metadata"].setdefault("annotations", {}).update(body["metadata"].get("annotations", {}))
            job.made["spec"].update(body.get("spec", {}))
        return job.made

    def _create_job(self, namespace: str, body: Any, *, dry: bool, strict: bool) -> Any:
        name = str(body["metadata"]["name"])
        check_job(body, strict=strict)
        if (namespace, name) in self.jobs:
            raise Refusal(409, "AlreadyExists", f'jobs.batch "{name}" already exists')
        made = json.loads(json.dumps(body))
        made["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": stamp()}
        if not dry:
            self.jobs[namespace, name] = Job(self, made)
        return made

    def _jobset(self, method: str, namespace: str, name: str | None, query: Mapping[str, str], body: Any) -> Any:
        if namespace is None:
            return {"kind": "APIResourceList", "groupVersion": "jobset.x-k8s.io/v1alpha2"}
        if method == "POST":
            check_jobset(body)
            key = "jobsets", namespace, str(body["metadata"]["name"])
            if key in self.objects:
                raise Refusal(409, "AlreadyExists", f'jobsets.jobset.x-k8s.io "{key[2]}" already exists')
            made = json.loads(json.dumps(body))
            made["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": stamp()}
            if "dryRun" not in query:
                self.objects[key] = made
                self._due.append((time.monotonic() + LAG, key))
            return made
        found = self.objects.get(("jobsets", namespace, str(name)))
        if found is None:
            raise _missing("jobsets.jobset.x-k8s.io", str(name))
        job = self.jobs.get((namespace, f"{name}-node-0"))
        if method == "PATCH":
            found["metadata"].setdefault("annotations", {}).update(body["metadata"].get("annotations", {}))
            found["spec"].update(body.get("spec", {}))
            if job:
                job.made["spec"]["suspend"] = found["spec"]["suspend"]
        known = {"Complete": "Completed", "Failed": "Failed"}
        over = [item for item in job.made["status"]["conditions"] if item["type"] in known] if job else []
        return {**found, "status": {"conditions": [{**item, "type": known[item["type"]]} for item in over]}}

    def _make_jobs(self) -> None:
        """Create the Jobs and Services of the JobSets that their controller has handled by now."""
        while self.jobset and self._due and self._due[0][0] <= time.monotonic():
            kind, namespace, name = self._due.pop(0)[1]
            made = self.objects[kind, namespace, name]
            owner = {"apiVersion": made["apiVersion"], "kind": "JobSet", "name": name, "uid": made["metadata"]["uid"]}
            service = {"metadata": {"name": made["spec"]["network"]["subdomain"], "ownerReferences": [owner]}}
            self.objects["services", namespace, service["metadata"]["name"]] = service
            job = json.loads(json.dumps(check_jobset(made)))
            job["metadata"]["ownerReferences"] = [owner]
            job["spec"]["suspend"] = made["spec"].get("suspend", False)
            self._create_job(namespace, job, dry=False, strict=False)

    def _core(self, method: str, kind: str, namespace: str, name: str | None, body: Any) -> Any:
        if method == "POST":
            name = str(body["metadata"]["name"])
            check_name(str(body["kind"]), name)
            if (kind, namespace, name) in self.objects:
                raise Refusal(409, "AlreadyExists", f'{kind} "{name}" already exists')
            self.objects[kind, namespace, name] = json.loads(json.dumps(body))
        found = self.objects.get((kind, namespace, str(name)))
        if found is None:
            raise _missing(kind, str(name))
        return found

    def _of(self, namespace: str) -> Iterator[tuple[Job, Pod]]:
        for job in self.jobs.values():
            if job.namespace == namespace:
                for pod in list(job.pods):
                    yield job, pod

    def _pod(
        self, method: str, namespace: str, name: str | None, verb: str | None, query: Mapping[str, str], body: Any
    ) -> Any:
        if name is None:
            key, _, value = query["labelSelector"].partition("=")
            return {
                "items": [p.object for _, p in self._of(namespace) if p.object["metadata"]["labels"].get(key) == value]
            }
        found = next(((job, pod) for job, pod in self._of(namespace) if pod.name == name), None)
        if found is None:
            raise _missing("pods", name)
        job, pod = found
        if verb == "log":
            return _log(pod, query)
        if verb == "eviction":
            job.evict(pod.index)
            return {}
        if method == "PATCH":
            limit, now = body["spec"]["activeDeadlineSeconds"], pod.object["spec"].get("activeDeadlineSeconds")
            if now is not None and limit > now:
                raise Refusal(
                    422, "Invalid", "spec.activeDeadlineSeconds: must be less than or equal to previous value"
                )
            pod.object["spec"] = {**pod.object["spec"], "activeDeadlineSeconds": limit}
        return pod.object


def _fits(event: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    about = event["involvedObject"]
    known = {"involvedObject.kind": about["kind"], "involvedObject.name": about["name"], "reason": event["reason"]}
    return all(known[key] == value for key, value in wanted.items())


def _log(pod: Pod, query: Mapping[str, str]) -> bytes:
    """Return the log with times; ``sinceTime`` counts in whole seconds."""
    if pod.phase == "Pending":
        raise Refusal(400, "BadRequest", f'container "node" in pod "{pod.name}" is waiting to start: ContainerCreating')
    lines = []
    for at, text in list(pod.lines):
        moment = stamp(at)
        if moment >= query.get("sinceTime", ""):
            lines.append(f"{moment[:-1]}.{int(at % 1 * 1e9):09d}Z ".encode() + text + b"\n")
    return b"".join(lines)[: int(query.get("limitBytes", 1 << 40))]
