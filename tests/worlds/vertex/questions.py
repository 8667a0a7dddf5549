"""Answers of Google Cloud for ``doctor``: permissions, service accounts, quotas, images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .wire import Answer, Call, Refusal

if TYPE_CHECKING:
    from .plane import Plane

__all__ = ["Questions"]

PAGE = 2


class Questions:
    """Answers set by a test. The caller lacks the permissions ``denied``, and the accounts ``disabled`` are disabled.

    ``images`` are those of Artifact Registry (``PROJECT/LOCATION/REPOSITORY/NAME:TAG``). The quotas are the plane's;
    with ``regional`` False they hold for all regions without quotas of their own. ``resources`` are the persistent
    resources by id.
    """

    def __init__(self, plane: Plane) -> None:
        self.denied: set[str] = set()
        self.disabled: set[str] = set()
        self.images: set[str] = set()
        self.regional = True
        self.resources: dict[str, dict[str, Any]] = {}
        self._plane = plane
        route, accounts = plane.wire.route, "/v1/projects/-/serviceAccounts"
        route("POST", r"/v1/projects/([^/:]+):testIamPermissions", "POST project permissions", self._in_project)
        route("GET", r"/v1/projects/([^/:]+)", "GET project", self._project)
        route("GET", rf"{accounts}/([^/:]+)", "GET account", self._account)
        route("POST", rf"{accounts}/([^/:]+):testIamPermissions", "POST account permissions", self._on_account)
        quotas = r"/v1/projects/([^/]+)/locations/global/services/aiplatform\.googleapis\.com/quotaInfos"
        route("GET", quotas, "GET quotas", self._quotas)
        image = r"/v1/projects/([^/]+)/locations/([^/]+)/repositories/([^/]+)/packages/([^/]+)/tags/([^/]+)"
        route("GET", image, "GET image", self._image)
        resource = r"/v1/projects/([^/]+)/locations/([^/]+)/persistentResources/([^/]+)"
        route("GET", resource, "GET persistent resource", self._resource)

    def environ(self) -> dict[str, str]:
        """Return gcloud's variables that lead a client here, in addition to `Plane.environ`."""
        names = ("CLOUDRESOURCEMANAGER", "IAM", "CLOUDQUOTAS", "ARTIFACTREGISTRY")
        return {f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}": f"{self._plane.url}/" for name in names}

    def _allowed(self, call: Call) -> Answer:
        found = [name for name in call.json()["permissions"] if name not in self.denied]
        return Answer({"permissions": found} if found else {})

    def _project(self, call: Call) -> Answer:
        if call.words[0] != self._plane.project:
            raise Refusal.denied("resourcemanager.projects.get", f"projects/{call.words[0]}")
        return Answer({"projectId": self._plane.project, "projectNumber": self._plane.number})

    def _in_project(self, call: Call) -> Answer:
        if call.words[0] != self._plane.project:
            raise Refusal.denied("resourcemanager.projects.get", f"projects/{call.words[0]}")
        return self._allowed(call)

    def _account(self, call: Call) -> Answer:
        email = call.words[0]
        if email not in self._plane.accounts:
            raise Refusal("NOT_FOUND", f"Unknown service account {email}")
        account: dict[str, Any] = {"name": f"projects/{self._plane.project}/serviceAccounts/{email}", "email": email}
        return Answer({**account, "disabled": True} if email in self.disabled else account)

    def _on_account(self, call: Call) -> Answer:
        self._account(call)
        return self._allowed(call)

    def _quotas(self, call: Call) -> Answer:
        where = {"dimensions": {"region": self._plane.location}} if self.regional else {}
        rows: list[dict[str, Any]] = [
            {"metric": "aiplatform.googleapis.com/other", "quotaId": "other", "dimensionsInfos": []},
            {"metric": "aiplatform.googleapis.com/another", "quotaId": "another", "dimensionsInfos": []},
        ]
        for metric, limit in {"custom_model_training_cpus": 20, **self._plane.quotas}.items():
            other = {"dimensions": {"region": "us-west1"}, "details": {"value": "1000"}}
            ours = {**where, "details": {"value": str(limit)}, "applicableLocations": [self._plane.location]}
            rows.append({"metric": f"aiplatform.googleapis.com/{metric}", "dimensionsInfos": [other, ours]})
        start = int(call.query.get("pageToken") or 0)
        more = {"nextPageToken": str(start + PAGE)} if start + PAGE < len(rows) else {}
        return Answer({"quotaInfos": rows[start : start + PAGE], **more})

    def _resource(self, call: Call) -> Answer:
        if call.words[2] not in self.resources:
            raise Refusal("NOT_FOUND", f"PersistentResource does not exist: {call.words[2]}")
        return Answer({"name": call.path.removeprefix("/v1/"), **self.resources[call.words[2]]})

    def _image(self, call: Call) -> Answer:
        project, location, repository, name, tag = call.words
        if f"{project}/{location}/{repository}/{name}:{tag}" not in self.images:
            raise Refusal("NOT_FOUND", "Requested entity was not found.")
        return Answer({"name": call.path, "version": "sha256:1"})
