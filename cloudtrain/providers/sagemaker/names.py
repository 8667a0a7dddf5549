"""Names on which both halves of provider ``sagemaker`` agree."""

from __future__ import annotations

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
"""Not /opt/ml/checkpoints: that folder is the script's own, watched like CLOUDTRAIN_CHECKPOINT_DIR."""
CHANNELS = {"container": "cloudtrain-container", "runtime": "cloudtrain-runtime", "code": "cloudtrain-code"}
"""Our own channels. Their files carry the job's facts: a value of Environment has at most 512 characters."""
RESUME = "cloudtrain-resume"
CONTEXT = f"{INPUTS}/{CHANNELS['container']}/context.json"
FAILURE = f"{ROOT}/output/failure"
"""File whose first 1024 characters become the FailureReason of a job that fails."""
FAILURE_VARIABLE = "CLOUDTRAIN_FAILURE_FILE"
"""Variable with that file's path, for a node that can read nothing else: `cloudtrain.runtime.__main__` reads it."""
MARK = ".sagemaker"
"""The syncing agent puts ``x.sagemaker-uploading`` and ``x.sagemaker-uploaded`` beside a file ``x``. It skips
``x.sagemaker-ignore`` (aws/sagemaker-xgboost-container, ``checkpointing.py``)."""
UPLOADING, UPLOADED, IGNORED = (f"{MARK}-{word}" for word in ("uploading", "uploaded", "ignore"))
GRACE = 120
"""Seconds between SIGTERM and SIGKILL."""
TAGS = tuple(f"cloudtrain:{word}" for word in ("run", "run-id", "attempt", "name"))
TAG_RUN = TAGS[0]
TAG_REVISION, TAG_CI = "cloudtrain:revision", "cloudtrain:ci"
"""Origin of the run: the commit, and the CI run as its URL, or as its number if the URL is no legal value."""
