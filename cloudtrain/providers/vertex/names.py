"""Names on which both halves of provider ``vertex`` agree."""

from __future__ import annotations

NAME = "vertex"
GCS = "/gcs"
"""Folder in which every container sees Cloud Storage, by bucket."""
NFS = "/mnt/nfs"
NODES = "CLOUDTRAIN_NODES"
"""Variable with the number of nodes. CLUSTER_SPEC gives it too, but only for several nodes."""
PORT, LINK_PORT = 2222, 3333
"""torchrun's store and the node link. The port of CLUSTER_SPEC's addresses is the first."""
FORWARDED = (2222, 3333, 6000)
"""The only ports at which the chief's name answers: it is a Kubernetes Service. Variables of real jobs name them
(``CMLE_TRAINING_WORKERPOOL0_…_SERVICE_PORT_…``). At its own address a node answers on every port."""
JOIN_TIMEOUT = 3600.0
"""Seconds that nodes wait for each other. Without FLEX_START a job's machines come one by one. Users have seen nodes
start 45 minutes apart."""
GRACE, SPOT_GRACE = 30, 15
"""Seconds between SIGTERM and SIGKILL, and on spot machines. Jobs are pods of Google Kubernetes Engine, which leaves 15
of a spot machine's 30 s to pods that are not its own. Unverified for Vertex AI."""
GRACE_PATH, FABRIC_PATH = "grace", "fabric"
"""The ``--path`` with a node's grace, and the one with its machine's transport to others. They are arguments, which
options cannot change."""
AGAIN = 134
"""Exit code (SIGABRT) of a failure that may pass: Vertex starts the whole job again, at most 3 times."""


def grace_of(strategy: str) -> int:
    """Return the grace of a job with this scheduling strategy."""
    return SPOT_GRACE if strategy == "SPOT" else GRACE
