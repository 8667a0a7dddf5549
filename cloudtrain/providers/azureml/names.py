"""Names on which both halves of provider ``azureml`` agree."""

from __future__ import annotations

NAME = "azureml"
OWN_INPUTS = {"container": "cloudtrain_container", "runtime": "cloudtrain_runtime", "code": "cloudtrain_code"}
"""Our own inputs of a command job, all downloaded before it starts."""
RESUME, LIVE = "cloudtrain_resume", "cloudtrain_live"
NODES = "CLOUDTRAIN_NODES"
"""Variable with the number of nodes. Azure ML documents none."""
GRACE = 30
"""Seconds between the stop signal and the kill; unverified: no document gives them."""
METADATA = "CLOUDTRAIN_METADATA_URL"
"""Variable with another address of the metadata service, for tests. No job can set it: `options` refuses cloudtrain's
variables, and a job's own `env` reaches the ranks alone."""
PREEMPTED = 75
"""Exit code of a node after a stop with notice. The job must fail: a job that ends with 0 counts as Completed."""
TAGS = tuple(f"cloudtrain.{word}" for word in ("run", "run_id", "attempt", "name"))
TAG_RUN = TAGS[0]
TAG_REVISION, TAG_CI = "cloudtrain.revision", "cloudtrain.ci"
"""Origin of the run: the commit, and the page of the CI run."""
TAG_BODY = "cloudtrain.request"
"""Digest of the rest of the body. A run's id may return for another job after its records are gone."""
TAG_GPU = "cloudtrain.gpu"
"""GPU that a job for a cluster requests. The request has no other place for it; `sdk` compares it with the cluster."""
