"""Custom jobs as the real Vertex AI service returned them: the shape of recorded answers, as data.

Source: cloud-custodian, tools/c7n_gcp/tests/data/flights/vertexai_custom_job_*, recorded in July 2026. None of the
three jobs ever had a machine. Each has a startTime 0.13 to 0.16 s after its creation.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from cloudtrain.validate import unix_seconds

#: (state while it waited, createTime, startTime, endTime); each ended as CANCELLED with error 1, "CANCELED".
RECORDED = [
    ("QUEUED", "2026-07-08T18:43:36.654698Z", "2026-07-08T18:43:36.811116Z", "2026-07-08T18:43:40.449827Z"),
    ("PENDING", "2026-07-08T18:43:54.039128Z", "2026-07-08T18:43:54.185943Z", "2026-07-08T18:43:57.753618Z"),
    ("QUEUED", "2026-07-08T18:43:23.250091Z", "2026-07-08T18:43:23.379923Z", "2026-07-08T18:43:26.765341Z"),
]
CANCELED = (1, "CANCELED")


def answer(state: str, created: str, started: str, ended: str = "", error: tuple[int, str] = (0, "")) -> dict[str, Any]:
    """Return a CustomJob of the recorded shape. Its name holds the project's number, as every answer's does."""
    pool = {"machineSpec": {"machineType": "n1-standard-4"}, "replicaCount": "1"}
    told: dict[str, Any] = {
        "name": "projects/123456789012/locations/us-central1/customJobs/6868698075574042624",
        "displayName": "c7n-test-custom-job",
        "jobSpec": {"workerPoolSpecs": [pool], "scheduling": {"timeout": "3600s"}},
        "state": f"JOB_STATE_{state}",
        "createTime": created,
        "startTime": started,
        "updateTime": ended or started,
    }
    if ended:
        told["endTime"] = ended
    if error[0]:
        told["error"] = {"code": error[0], "message": error[1]}
    return told


def after_waiting(hours: float, state: str, error: tuple[int, str] = (0, "")) -> dict[str, Any]:
    """Return a job of that shape that ended without a machine, ``hours`` after its creation."""
    _, created, started, _ = RECORDED[0]
    end = datetime.fromtimestamp(unix_seconds(created), timezone.utc) + timedelta(hours=hours)
    return answer(state, created, started, f"{end:%Y-%m-%dT%H:%M:%S.%fZ}", error)
