"""The names on which both halves of provider ``azureml`` agree."""

from __future__ import annotations

__all__ = [
    "GRACE", "LIVE", "METADATA", "NAME", "NODES", "OWN_INPUTS", "PREEMPTED", "RESUME", "TAG_ATTEMPT", "TAG_BODY",
    "TAG_CI", "TAG_GPU", "TAG_NAME", "TAG_REVISION", "TAG_RUN", "TAG_RUN_ID",
]  # fmt: skip

NAME = "azureml"
OWN_INPUTS = {"container": "cloudtrain_container", "runtime": "cloudtrain_runtime", "code": "cloudtrain_code"}
"""Our own inputs of a command job, all downloaded before it starts."""
RESUME, LIVE = "cloudtrain_resume", "cloudtrain_live"
NODES = "CLOUDTRAIN_NODES"
"""Variable with the number of nodes, which Azure ML documents none for."""
GRACE = 30
"""Seconds between the stop signal and the kill; unverified, no document says."""
METADATA = "CLOUDTRAIN_METADATA_URL"
"""Variable with another address of the metadata service, for tests. No job can set it: `options` refuses variables of
ours, and a job's own `env` reaches the ranks alone."""
PREEMPTED = 75
"""Exit code of a node that was told to stop: the job must fail, as one that ends with 0 counts as Completed."""
TAG_RUN, TAG_RUN_ID, TAG_ATTEMPT, TAG_NAME = (f"cloudtrain.{word}" for word in ("run", "run_id", "attempt", "name"))
TAG_REVISION, TAG_CI = "cloudtrain.revision", "cloudtrain.ci"
"""Where the run comes from: the commit, and the page of the CI run."""
TAG_BODY = "cloudtrain.request"
"""Digest of the rest of the body: a run's id may come again after its records are gone, for another job."""
TAG_GPU = "cloudtrain.gpu"
"""What a job for a cluster asked for: the request has no other place for it, and `sdk` compares it with the cluster."""
