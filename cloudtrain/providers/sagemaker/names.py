"""The names on which both halves of provider ``sagemaker`` agree."""

from __future__ import annotations

__all__ = [
    "CHANNELS", "CONTEXT", "DNS", "FAILURE", "FAILURE_VARIABLE", "GRACE", "IGNORED", "INPUTS", "LIVE", "MARK", "NAME",
    "RESUME", "ROOT",
    "TAG_ATTEMPT", "TAG_CI", "TAG_NAME", "TAG_REVISION", "TAG_RUN", "TAG_RUN_ID", "UPLOADED", "UPLOADING",
]  # fmt: skip

NAME = "sagemaker"
ROOT = "/opt/ml"
DNS = {
    "aws": "amazonaws.com",
    "aws-cn": "amazonaws.com.cn",
    "aws-us-gov": "amazonaws.com",
    "aws-eusc": "amazonaws.eu",
    "aws-iso": "c2s.ic.gov",
    "aws-iso-b": "sc2s.sgov.gov",
    "aws-iso-e": "cloud.adc-e.uk",
    "aws-iso-f": "csp.hci.ic.gov",
}
"""End of the services' host names by partition, which is the second part of an ARN: botocore's partitions.json."""
INPUTS = f"{ROOT}/input/data"
LIVE = f"{ROOT}/cloudtrain/live"
"""Not /opt/ml/checkpoints: what scripts write there is theirs, and is watched like CLOUDTRAIN_CHECKPOINT_DIR."""
CHANNELS = {"container": "cloudtrain-container", "runtime": "cloudtrain-runtime", "code": "cloudtrain-code"}
"""Our own channels. What a job is told travels in files: a value of Environment has at most 512 characters."""
RESUME = "cloudtrain-resume"
CONTEXT = f"{INPUTS}/{CHANNELS['container']}/context.json"
FAILURE = f"{ROOT}/output/failure"
"""The first 1024 characters of it become the FailureReason of a job that fails."""
FAILURE_VARIABLE = "CLOUDTRAIN_FAILURE_FILE"
"""Where a node that cannot read anything else finds that file: `cloudtrain.runtime.__main__` reads it."""
MARK = ".sagemaker"
"""The agent that syncs the checkpoint folder puts ``x.sagemaker-uploading`` and ``x.sagemaker-uploaded`` beside a file
``x``, and leaves ``x.sagemaker-ignore`` alone (aws/sagemaker-xgboost-container, ``checkpointing.py``)."""
UPLOADING, UPLOADED, IGNORED = (f"{MARK}-{word}" for word in ("uploading", "uploaded", "ignore"))
GRACE = 120
"""Seconds between SIGTERM and SIGKILL."""
TAG_RUN, TAG_RUN_ID, TAG_ATTEMPT, TAG_NAME = (f"cloudtrain:{word}" for word in ("run", "run-id", "attempt", "name"))
TAG_REVISION, TAG_CI = "cloudtrain:revision", "cloudtrain:ci"
"""Where the run comes from: the commit, and the CI run as its URL, or as its number where that is no legal value."""
