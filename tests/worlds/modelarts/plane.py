"""A project: its training jobs, quota and agency; with its buckets, and IAM."""

from __future__ import annotations

import json
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huawei import answered, body_errors
from signatures import check_sdk

from ..base import Platform
from ..vertex.wire import Answer, Call, Refusal, Wire
from .bucket import Obs
from .life import TrainingJob

__all__ = ["AK", "PROJECT", "REGION", "SK", "Plane", "refusal"]

PROJECT, REGION = "0123456789abcdef0123456789abcdef", "cn-north-4"
AK, SK = "AKEXAMPLE", "SKEXAMPLE"
FLAVORS = [
    {"flavor_id": "modelarts.vm.cpu.2u", "max_num": 16, "flavor_type": "CPU"},
    {"flavor_id": "modelarts.p3.large.public", "max_num": 1, "flavor_type": "GPU"},
]
PREVIEW = 5 << 20
"""Bytes of a log's newest part, by the SDK's remark on current_size."""


def refusal(status: int, code: str, message: str, **headers: str) -> Refusal:
    """Return an error as ModelArts and its gateway write it."""
    return _Refused(code, message, status=status, headers={"X-Request-Id": secrets.token_hex(8), **headers})


class _Refused(Refusal):
    def body(self) -> dict[str, Any]:
        return {"error_code": self.code, "error_msg": self.message}


class Plane(Platform):
    """A project on loopback.

    Faults:

    - ``wire.faults``; ``quota``: jobs at a time; ``agency`` False: ModelArts reaches neither OBS nor SWR;
    - ``no_machines``: jobs wait; ``abnormal``: ids of jobs whose phase is Abnormal;
    - ``preview``: bytes of a log's newest part; ``list_lag``: seconds until a search has a job.

    ``images`` are this machine's images by their names in SWR. ``keys`` are the access keys that sign, ``tokens`` the
    valid IAM tokens.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys: dict[str, tuple[str, str]] = {AK: (SK, "")}
        self.tokens: set[str] = set()
        self.wire = Wire()
        self.jobs: dict[str, TrainingJob] = {}
        self.images: dict[str, str] = {}
        self.abnormal: set[str] = set()
        self.quota, self.agency, self.no_machines = 100, True, False
        self.preview, self.list_lag, self.grace = PREVIEW, 0.0, float("inf")
        self._lock = threading.RLock()
        base = rf"/v2/{PROJECT}"
        job = rf"{base}/training-jobs/([^/]+)"
        for method, path, name, handler in (
            ("POST", rf"{base}/training-jobs", "create", self._create),
            ("POST", rf"{base}/training-job-searches", "list", self._list),
            ("GET", job, "get", self._get),
            ("POST", rf"{job}/actions", "stop", self._stop),
            ("GET", rf"{job}/tasks/([^/]+)/logs/preview", "log", self._log),
            ("GET", rf"{base}/authorizations", "authorizations", self._authorizations),
            ("GET", rf"{base}/training-quotas", "quotas", self._quotas),
            ("GET", rf"{base}/training-job-flavors", "flavors", self._flavors),
            ("GET", r"/v2/[^/]+/.*", "elsewhere", self._elsewhere),
            ("POST", r"/v3.0/OS-CREDENTIAL/securitytokens", "securitytokens", self._buy),
        ):
            self.wire.route(method, path, name, self._signed(handler), open=True)
        self.obs = Obs(folder, self.wire, self.keys)

    @property
    def url(self) -> str:
        """Return the base URL of all its APIs."""
        return self.wire.listen()

    def environ(self) -> dict[str, str]:
        """Return the environment that leads Huawei's clients and cloudtrain here, with an access key."""
        return {
            "HUAWEICLOUD_SDK_AK": AK,
            "HUAWEICLOUD_SDK_SK": SK,
            f"HUAWEICLOUD_SDK_REGION_MODELARTS_{REGION.replace('-', '_').upper()}": self.url,
            "HUAWEICLOUD_SDK_IAM_ENDPOINT": self.url,
            "OBS_ENDPOINT": self.url,
        }

    def job(self, native_id: str) -> TrainingJob:
        """Return the job of a native id."""
        return self.jobs[native_id.rpartition("/")[2]]

    def temporary(self) -> tuple[str, str, str]:
        """Return new temporary keys: an access key, its secret and its security token."""
        ak, sk, token = f"TMP{secrets.token_hex(8).upper()}", secrets.token_hex(16), secrets.token_hex(32)
        self.keys[ak] = (sk, token)
        return ak, sk, token

    # ------------------------------------------------------------------------------------------------------ operations

    def _signed(self, handler: Callable[[Call], Answer]) -> Callable[[Call], Answer]:
        """Wrap a handler to refuse callers without an access key or a token."""

        def served(call: Call) -> Answer:
            if token := call.headers.get("x-auth-token"):
                if token not in self.tokens:
                    raise refusal(401, "APIGW.0301", "Incorrect IAM authentication information: token expires")
            elif why := check_sdk(call, self.keys):
                raise refusal(401, "APIGW.0301", f"Incorrect IAM authentication information: {why}")
            return handler(call)

        return served

    def _elsewhere(self, call: Call) -> Answer:
        raise refusal(403, "APIGW.0302", "The caller has no such project")

    def _create(self, call: Call) -> Answer:
        body = json.loads(call.body)
        problems = body_errors(body)
        name = str(body["metadata"].get("name", ""))
        if problems or not 0 < len(name) <= 64 or len(body["metadata"].get("description", "")) > 256:
            raise refusal(400, "ModelArts.0104", f"Invalid parameter: {'; '.join(problems) or 'metadata'}")
        if not self.agency:
            raise refusal(400, "ModelArts.0110", "The user has no agency authorization for ModelArts")
        with self._lock:
            if sum(not job.over for job in self.jobs.values()) >= self.quota:
                raise refusal(403, "ModelArts.0116", "The quota of training jobs is exceeded")
            made = TrainingJob(self, str(uuid.uuid4()), body)
            self.jobs[made.id] = made
        return Answer(answered(made.describe(), "CreateTrainingJobResponse"), 201)

    def _found(self, call: Call) -> TrainingJob:
        if call.words[0] not in self.jobs:
            raise refusal(404, "ModelArts.2757", f"Training job {call.words[0]} not found")
        return self.jobs[call.words[0]]

    def _get(self, call: Call) -> Answer:
        return Answer(answered(self._found(call).describe(), "ShowTrainingJobDetailsResponse"))

    def _stop(self, call: Call) -> Answer:
        job = self._found(call)
        if call.json() != {"action_type": "terminate"}:
            raise refusal(400, "ModelArts.0104", "Invalid action_type")
        if job.over:
            raise refusal(400, "ModelArts.2760", f"A job in phase {job.phase} cannot be terminated")
        job.stop()
        return Answer(answered(job.describe(), "StopTrainingJobResponse"), 202)

    def _list(self, call: Call) -> Answer:
        """List jobs: ``offset`` counts pages, and the newest is first unless ``order`` is asc."""
        wanted = call.json()
        limit, page = int(wanted.get("limit", 10)), int(wanted.get("offset", 0))
        if not 1 <= limit <= 50:
            raise refusal(400, "ModelArts.0104", "limit is from 1 to 50")
        names = [row["value"][0] for row in wanted.get("filters") or () if row["key"] == "name"]
        with self._lock:
            rows = [job for job in self.jobs.values() if time.time() - job.created >= self.list_lag]
        where = wanted.get("workspace_id", "0")
        rows = [job for job in rows if job.body["metadata"].get("workspace_id", "0") == where]
        rows = [job for job in rows if all(name in job.body["metadata"]["name"] for name in names)]
        rows.sort(key=lambda job: job.created, reverse=wanted.get("order", "desc") == "desc")
        items = [job.describe() for job in rows[page * limit : (page + 1) * limit]]
        found = {"total": len(rows), "count": len(items), "limit": limit, "offset": page, "items": items}
        return Answer(answered({**found, "sort_by": "create_time"}, "ListTrainingJobsResponse"))

    def _log(self, call: Call) -> Answer:
        job, task = self._found(call), call.words[1]
        data = job.printed(task)
        if data is None:
            raise refusal(404, "ModelArts.2758", f"The task {task} has no log")
        part = data[-self.preview :]
        while part and part[0] & 0xC0 == 0x80:  # no half of a character
            part = part[1:]
        found = {"content": part.decode("utf-8", "replace"), "current_size": len(part), "full_size": len(data)}
        return Answer(answered(found, "ShowTrainingJobLogsPreviewResponse"))

    def _authorizations(self, call: Call) -> Answer:
        rows = [{"user_id": "1", "type": "agency", "content": "modelarts_agency"}] if self.agency else []
        return Answer(answered({"total_count": len(rows), "auth": rows}, "GetAuthorizationsResponse"))

    def _quotas(self, call: Call) -> Answer:
        used = sum(not job.over for job in self.jobs.values())
        row = {"resource": "job-num", "quota": self.quota, "used": used}
        return Answer(answered({"quotas": [row]}, "ShowTrainingQuotasResponse"))

    def _flavors(self, call: Call) -> Answer:
        return Answer(answered({"total_count": len(FLAVORS), "flavors": FLAVORS}, "ShowTrainingJobFlavorsResponse"))

    def _buy(self, call: Call) -> Answer:
        """Answer a token with temporary keys, as IAM does."""
        if call.json()["auth"]["identity"]["methods"] != ["token"]:
            raise refusal(400, "IAM.0011", "Request body is invalid.")
        ak, sk, token = self.temporary()
        found = {"access": ak, "secret": sk, "securitytoken": token, "expires_at": "2030-01-01T00:00:00.000000Z"}
        return Answer({"credential": found}, 201)
