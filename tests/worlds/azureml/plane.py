"""A workspace: jobs, environments, computes, datastores, code, run history, quotas, capacity, and faults."""

from __future__ import annotations

import base64
import re
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cloudtrain.engine.docker_api import connect
from cloudtrain.provider_api.launch_spec import LaunchSpec

from ..base import Platform
from .blobs import ACCOUNT_HOST, Blobs, iso
from .hosts import GRACE, reading
from .life import CommandJob
from .questions import Questions
from .strict import broken_rules, model_errors
from .wire import Answer, Call, Refusal, Wire

__all__ = ["REGION", "SUBSCRIPTION", "Plane"]

SUBSCRIPTION, GROUP, WORKSPACE = "11111111-2222-3333-4444-555555555555", "training", "vision"
REGION = "westeurope"
KIND = "Microsoft.MachineLearningServices/workspaces"
PAGE = 10
Nodes = Callable[[str, Mapping[str, Any], str], LaunchSpec]


class Plane(Platform):
    """One workspace on loopback, with its storage account at ``azurite`` (a connection string).

    ``nodes`` reads what a job (name, body, image) starts; the default is `hosts.reading`. ``curated`` is the image of
    every environment of a registry. Faults:

    - ``wire.faults``, ``wire.expire`` and ``wire.signed_in``;
    - ``no_capacity``: jobs stay Queued; ``quotas``: cores by machine size; ``no_role``: jobs may not read the account;
    - ``unknown``: statuses by job; ``sync_lag``: seconds until mounted folders sync;
    - ``log_lag``: seconds until logs grow, by at most ``log_bytes`` at a time; they end ``log_late`` seconds after
      their job;
    - ``restarts``: a preempted job starts again, as documented, instead of failing, as reported;
    - ``grace``: seconds from SIGTERM to SIGKILL; ``paces``: the service's seconds in one of ours, by job;
    - ``notice``: a preempted machine gets no SIGTERM, as on real clusters. Scheduled Events announce the end this many
      seconds ahead, and the job starts again with new log files.
    """

    def __init__(
        self, folder: Path, *, azurite: str, nodes: Nodes = reading, curated: str = "", runs: bool = True
    ) -> None:
        self.folder, self.azurite, self.nodes, self.curated = folder, azurite, nodes, curated
        self.wire = Wire(folder)
        self.url, self.api, self.front = (self.wire.listen() for _ in range(3))
        self.blobs = Blobs(azurite, self.wire)
        self.log_container, self.container = (f"{word}-{uuid.uuid4().hex[:12]}" for word in ("azureml", "store"))
        self.jobs: dict[str, CommandJob] = {}
        self.environments: dict[str, dict[str, str]] = {}
        self.codes: dict[str, dict[str, Any]] = {}
        self.computes: dict[str, dict[str, Any]] = {}
        self.secrets: dict[tuple[str, str], str] = {}
        self.no_capacity = self.no_role = self.restarts = False
        self.quotas: dict[str, int] = {}
        self.unknown: dict[str, str] = {}
        self.sync_lag = self.log_lag = self.log_late = 0.0
        self.log_bytes = 0
        self.grace = GRACE
        self.notice: float | None = None
        self.paces: dict[str, float] = {}
        self._lock = threading.RLock()
        self.engine: Any = connect() if runs else None
        self.datastore("workspaceblobstore", self.container)
        self.datastore("workspaceartifactstore", self.log_container)
        self._routes()
        self.questions = Questions(self)

    # ---------------------------------------------------------------------------------------------------- its addresses

    @property
    def scope(self) -> tuple[str, str, str]:
        """Return the subscription, resource group and workspace."""
        return SUBSCRIPTION, GROUP, WORKSPACE

    @property
    def id(self) -> str:
        """Return the workspace's resource id."""
        return f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/{KIND}/{WORKSPACE}"

    @property
    def cloud(self) -> str:
        """Return a name unique to this plane: the SDK caches metadata by name for the life of a process."""
        return f"Loopback{urllib.parse.urlsplit(self.url).port}"

    @property
    def metadata(self) -> dict[str, str]:
        """Return the cloud's metadata as azure-ai-ml expects it."""
        return {
            "azure_portal": "https://portal.azure.com",
            "resource_manager": self.url,
            "active_directory": "https://login.microsoftonline.com",
            "aml_resource_id": "https://ml.azure.com",
            "storage_endpoint": ACCOUNT_HOST,
            "registry_discovery_endpoint": f"{self.api}/",
        }

    def environ(self) -> dict[str, str]:
        """Return the environment with which Azure's SDKs sign in, trust this server and find the account."""
        return {
            "IDENTITY_ENDPOINT": f"{self.api}/identity",
            "IDENTITY_HEADER": self.wire.secret,
            "REQUESTS_CA_BUNDLE": str(self.wire.pem),
            "SSL_CERT_FILE": str(self.wire.pem),
            "AZURE_STORAGE_CONNECTION_STRING": self.azurite,
        }

    def job(self, name: str) -> CommandJob:
        """Return the job of that name. Raises `KeyError` for an unknown name."""
        return self.jobs[name]

    def datastore(self, name: str, container: str) -> None:
        """Create a container and its datastore."""
        self.blobs.make(container)
        self.blobs.containers[name] = container

    def close(self) -> None:
        """End all jobs and servers, and close the connections."""
        super().close()
        self.blobs.close()

    # ------------------------------------------------------------------------------------------------------ operations

    def _routes(self) -> None:
        here, route = re.escape(self.id), self.wire.route
        self.wire.missing = self._missing
        route("GET", here, "GET workspace", self._workspace)
        route("GET", f"{here}/jobs", "GET jobs", self._list)
        route("PUT", f"{here}/jobs/([^/]+)", "PUT job", self._create)
        route("GET", f"{here}/jobs/([^/]+)", "GET job", lambda call: Answer(self._find(call).describe()))
        route("DELETE", f"{here}/jobs/([^/]+)", "DELETE job", self._delete)
        route("POST", f"{here}/jobs/([^/]+)/cancel", "POST cancel", self._cancel)
        operation = rf"/subscriptions/{SUBSCRIPTION}/providers/{KIND.partition('/')[0]}/locations/{REGION}/mfeOperation"
        route("GET", rf"{re.escape(operation)}Results/jc:([^/]+)", "GET operation", self._operation)
        route("GET", f"{here}/environments/([^/]+)", "GET environment", self._environment_container)
        route("GET", f"{here}/environments/([^/]+)/versions/([^/]+)", "GET environment version", self._environment)
        route("PUT", f"{here}/environments/([^/]+)/versions/([^/]+)", "PUT environment", self._make_environment)
        route("GET", f"{here}/computes/([^/]+)", "GET compute", self._compute)
        route("GET", f"{here}/datastores", "GET datastores", self._datastores)
        route("GET", f"{here}/datastores/([^/]+)", "GET datastore", self._datastore)
        route("POST", f"{here}/datastores/([^/]+)/listSecrets", "POST listSecrets", self._secrets)
        route("GET", f"{here}/codes/([^/]+)/versions", "GET codes", self._codes)
        route("POST", f"{here}/codes/([^/]+)/versions/([^/]+)/startPendingUpload", "POST upload", self._upload)
        route("PUT", f"{here}/codes/([^/]+)/versions/([^/]+)", "PUT code", self._make_code)
        route("GET", f"{here}/codes/([^/]+)/versions/([^/]+)", "GET code", self._code)
        route("GET", "/discovery/workspaces/w-1", "GET discovery", self._discovery, open=True)
        route("GET", rf"/history/v1\.0{here}/runs/([^/]+)/details", "GET details", self._details)
        route("GET", rf"/history/v1\.0{here}/runs/([^/]+)", "GET run", self._details)
        route("GET", "/secrets/([^/]+)(?:/[^/]+)?", "GET secret", self._secret)
        machine = r"/machines/([^/]+)/(\d+)/metadata"
        route("GET", f"{machine}/scheduledevents", "GET events", self._metadata, open=True)
        route("GET", f"{machine}/instance/compute/name", "GET machine", self._metadata, open=True)

    def _missing(self, path: str) -> Refusal:
        """Refuse a missing resource; the error names its outermost missing part."""
        words = [*path.split("/"), *[""] * 8]
        if words[2] != SUBSCRIPTION:
            return Refusal(404, "SubscriptionNotFound", f"The subscription '{words[2]}' could not be found.")
        if words[4].lower() != GROUP:
            return Refusal(404, "ResourceGroupNotFound", f"Resource group '{words[4]}' could not be found.")
        text = f"The Resource '{KIND}/{words[8]}' under resource group '{GROUP}' was not found."
        return Refusal(
            404, "ResourceNotFound", f"{text} For more details please go to https://aka.ms/ARMResourceNotFoundFix"
        )

    def _workspace(self, call: Call) -> Answer:
        account = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/Microsoft.Storage/storageAccounts"
        properties = {
            "workspaceId": "w-1",
            "discoveryUrl": f"{self.api}/discovery/workspaces/w-1",
            "storageAccount": f"{account}/{self.blobs.account}",
            "provisioningState": "Succeeded",
        }
        about = {**self._resource("", KIND, {**properties, **self.questions.about}), "location": REGION}
        return Answer({**about, "identity": self.questions.identity})

    def _resource(self, path: str, kind: str, properties: Mapping[str, Any]) -> dict[str, Any]:
        name = path.rpartition("/")[2] or WORKSPACE
        made = {"createdAt": iso(time.time()), "createdBy": "tester", "createdByType": "User"}
        return {"id": self.id + path, "name": name, "type": kind, "properties": dict(properties), "systemData": made}

    def _discovery(self, call: Call) -> Answer:
        elsewhere = dict.fromkeys(("history", "experimentation", "studio", "modelmanagement"), f"{self.api}/elsewhere")
        return Answer({"api": self.api, **elsewhere})

    # ------------------------------------------------------------------------------------------------------------ jobs

    def _create(self, call: Call) -> Answer:
        name, body = str(call.words[0]), call.body
        problems = model_errors(body) or broken_rules(name, body)
        if problems:
            raise Refusal(400, "ValidationError", "; ".join(problems))
        job = body["properties"]
        compute = (job.get("computeId") or "").rpartition("/")[2]
        if compute and compute not in self.computes:
            raise Refusal(400, "UserError", f"Unknown compute target '{compute}'.")
        if (job.get("identity") or {}).get("identityType") == "UserIdentity" and not call.headers.get(
            "x-azureml-token"
        ):
            raise Refusal(400, "UserError", "A job with the identity of its user needs a token in x-azureml-token.")
        image = self._image(job["environmentId"])
        with self._lock:
            if name in self.jobs:
                text = f"The job {name} cannot be changed."  # of this message only the codes are known
                raise Refusal(400, "UserError", text, inner=("Immutable", "JobPropertyImmutable"))
            self.jobs[name] = made = CommandJob(self, name, body, image)
        return Answer(made.describe(), 201)

    def _image(self, environment: str) -> str:
        if environment.lower().startswith("azureml://registries/"):
            return self.curated
        name, _, version = environment.lower().rpartition("/environments/")[2].partition("/versions/")
        found = self.environments.get(name, {})
        if version not in found:
            raise Refusal(400, "UserError", f"Environment {name} version {version} was not found.")
        return found[version]

    def _find(self, call: Call) -> CommandJob:
        name = str(call.words[0])
        if name not in self.jobs:
            raise Refusal(404, "NotFound", f"Job {name} is not found in workspace {WORKSPACE}.")
        return self.jobs[name]

    def _delete(self, call: Call) -> Answer:
        with self._lock:
            job = self._find(call)
            if not job.over:
                raise Refusal(409, "Conflict", f"Job {job.name} is {job.status}; only a job that has ended is deleted.")
            del self.jobs[job.name]
        return Answer(None, 200)

    def _cancel(self, call: Call) -> Answer:
        job = self._find(call)
        if job.over:
            text = f"Cannot cancel job {job.name}: it is in the terminal state {job.status}."
            raise Refusal(400, "UserError", text)
        job.stop()
        where = f"{self.url}/subscriptions/{SUBSCRIPTION}/providers/Microsoft.MachineLearningServices"
        where += f"/locations/{REGION}/mfeOperationResults/jc:{job.name}?api-version=2023-04-01-preview"
        return Answer(None, 202, {"Location": where, "Retry-After": "0"})

    def _operation(self, call: Call) -> Answer:
        job = self._find(call)
        return (
            Answer(None, 200)
            if job.over
            else Answer(None, 202, {"Location": f"{self.url}{call.url}", "Retry-After": "1"})
        )

    def _list(self, call: Call) -> Answer:
        jobs = sorted(self.jobs.values(), key=lambda job: job.created, reverse=True)
        tag = call.query.get("tag")
        found = [
            job for job in jobs if tag is None or tag.partition("=")[0] in (job.body["properties"].get("tags") or {})
        ]
        start = int(base64.b64decode(call.query["$skip"])) if "$skip" in call.query else 0
        answer: dict[str, Any] = {"value": [job.describe() for job in found[start : start + PAGE]]}
        if start + PAGE < len(found):
            token = urllib.parse.quote(base64.b64encode(str(start + PAGE).encode()))
            answer["nextLink"] = f"{self.url}{self.id}/jobs?api-version=2024-01-01-preview&$skip={token}"
        return Answer(answer)

    def _details(self, call: Call) -> Answer:
        return Answer(self._find(call).details())

    # ----------------------------------------------------------------------------------------- resources that jobs name

    def _environment_container(self, call: Call) -> Answer:
        name = str(call.words[0])
        if name.lower() not in self.environments:
            raise Refusal(404, "UserError", f"Environment {name} was not found.")
        return Answer(self._resource(f"/environments/{name}", f"{KIND}/environments", {"latestVersion": "1"}))

    def _environment(self, call: Call) -> Answer:
        name, version = map(str, call.words)
        path = f"/environments/{name}/versions/{version}"
        image = self._image(self.id + path)
        return Answer(self._resource(path, f"{KIND}/environments/versions", {"image": image, "osType": "Linux"}))

    def _make_environment(self, call: Call) -> Answer:
        name, version = map(str, call.words)
        with self._lock:
            self.environments.setdefault(name.lower(), {})[version.lower()] = str(call.body["properties"]["image"])
        return Answer(self._environment(call).value, 201)

    def _compute(self, call: Call) -> Answer:
        name = str(call.words[0])
        if name not in self.computes:
            raise Refusal(404, "ResourceNotFound", f"Compute '{name}' was not found in workspace {WORKSPACE}.")
        properties = {"computeType": "AmlCompute", "provisioningState": "Succeeded", "properties": self.computes[name]}
        return Answer({**self._resource(f"/computes/{name}", f"{KIND}/computes", properties), "location": REGION})

    def _store(self, name: str) -> dict[str, Any]:
        properties = {
            "datastoreType": "AzureBlob",
            "accountName": self.blobs.account,
            "containerName": self.blobs.containers[name],
            "endpoint": ACCOUNT_HOST,
            "protocol": "https",
            "isDefault": name == "workspaceblobstore",
            "credentials": {"credentialsType": "Sas"},
        }
        return self._resource(f"/datastores/{name}", f"{KIND}/datastores", properties)

    def _datastores(self, call: Call) -> Answer:
        return Answer({"value": [self._store(name) for name in self.blobs.containers]})

    def _datastore(self, call: Call) -> Answer:
        name = str(call.words[0])
        if name not in self.blobs.containers:
            raise Refusal(404, "UserError", f"Could not find datastore with name '{name}'.")
        return Answer(self._store(name))

    def _secrets(self, call: Call) -> Answer:
        raise Refusal(
            403, "AuthorizationFailed", "Nobody but the service itself reads the secrets of a datastore here."
        )

    def _codes(self, call: Call) -> Answer:
        """List the versions of a code; with a hash, those with that content under any name."""
        name, wanted = str(call.words[0]), call.query.get("hash")
        known = [self._version(*key.split("/")) for key in self.codes if wanted or key.startswith(f"{name}/")]
        same = [item for item in known if (item["properties"].get("properties") or {}).get("hash_sha256") == wanted]
        return Answer({"value": same if wanted else known})

    def _version(self, name: str, version: str) -> dict[str, Any]:
        item = self.codes[f"{name}/{version}"]
        return self._resource(f"/codes/{name}/versions/{version}", f"{KIND}/codes/versions", item["properties"])

    def _upload(self, call: Call) -> Answer:
        from azure.storage.blob import ContainerSasPermissions, generate_container_sas

        container = f"code-{uuid.uuid4().hex[:20]}"
        self.blobs.make(container)
        sas = generate_container_sas(
            account_name=self.blobs.account,
            container_name=container,
            account_key=self.blobs.key,
            permission=ContainerSasPermissions(read=True, write=True, list=True),
            expiry=datetime.fromtimestamp(2**32, timezone.utc),
        )
        url = f"{self.blobs.endpoint}/{container}"
        credential = {"credentialType": "SAS", "sasUri": f"{url}?{sas}"}
        reference = {"blobUri": url, "storageAccountArmId": "", "credential": credential}
        answer = {"pendingUploadId": uuid.uuid4().hex, "pendingUploadType": "TemporaryBlobReference"}
        return Answer({**answer, "blobReferenceForConsumption": reference})

    def _make_code(self, call: Call) -> Answer:
        name, version = map(str, call.words)
        self.codes[f"{name}/{version}"] = call.body
        return Answer(self._version(name, version), 201)

    def _code(self, call: Call) -> Answer:
        name, version = map(str, call.words)
        if f"{name}/{version}" not in self.codes:
            raise Refusal(404, "UserError", f"Code {name}:{version} was not found.")
        return Answer(self._version(name, version))

    def _metadata(self, call: Call) -> Answer:
        """Serve the metadata of one machine. Refuse a call that came through a proxy."""
        if call.headers.get("metadata", "").lower() != "true" or "x-forwarded-for" in call.headers:
            raise Refusal(400, "Bad Request", "Required metadata header not specified")
        job, number = self.jobs[str(call.words[0])], int(call.words[1])
        if call.operation == "GET machine":
            return Answer(job.machine(number).encode(), headers={"Content-Type": "text/plain"})
        return Answer({"DocumentIncarnation": 1, "Events": list(job.events)})

    def _secret(self, call: Call) -> Answer:
        """Serve Key Vault, whose name is in the address."""
        if self.wire.audience(call.token) != "https://vault.azure.net":
            raise Refusal(401, "Unauthorized", "AKV10022: Invalid audience.")
        vault, name = call.headers.get("host", "").partition(".")[0], str(call.words[0])
        if (vault, name) not in self.secrets:
            raise Refusal(404, "SecretNotFound", f"A secret with (name/id) {name} was not found in this key vault.")
        return Answer({"value": self.secrets[vault, name], "id": f"https://{vault}.vault.azure.net/secrets/{name}"})
