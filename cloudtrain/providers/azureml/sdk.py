"""Send a job through azure-ai-ml: ``load_job`` of the planned document, ``jobs.create_or_update``.

The SDK is imported for that alone: the import costs seconds, and it shows only rank 0's logs. It reads the folder's git
properties unasked, and leaves a variable and a logger's handler behind; see `_quietly`.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import ConflictError, SpecError, UnsupportedError
from ...job.job import Gpu
from ...provider_api import catalog
from ...provider_api.protocol import Request
from ...validate import duration
from . import KEEP_WARM, NAME
from .api import translated
from .request import TAG_GPU
from .status import duration_seconds
from .urls import Blob

if TYPE_CHECKING:
    from . import Settings
    from .api import Account

_ENVIRONMENT = threading.Lock()
_SET_BY_SDK = "AZUREML_CURRENT_CLOUD"
_GIT = tuple(f"AZUREML_GIT_{word}" for word in ("REPOSITORY_URI", "BRANCH", "COMMIT", "DIRTY", "BUILD_ID", "BUILD_URI"))


def create(account: Account, request: Request) -> str:
    """Return the id of this request's one job. Raises `ConflictError` if another run's job has its name."""
    if (found := account.find(request)) is not None:
        return found
    check_datastore(account, request.run)
    _check_cluster(account, request)
    name = request.body["name"]
    try:
        with _quietly():
            _put(account, request)
    except ConflictError:
        if (found := account.find(request)) is None:
            raise
        return found
    return account.native_id(name)


def check_datastore(account: Account, url: str) -> None:
    """Raise `SpecError` if the datastore is not the store's container: the job would use the wrong one."""
    name, store = account.settings.datastore, Blob.parse(url)
    datastore = account.datastore(name)
    container, owner = datastore.get("containerName") or datastore.get("filesystem"), datastore.get("accountName")
    if container != store.container or (store.host and store.host.partition(".")[0] != owner):
        why = f"{name!r} is container {container!r} of account {owner!r}, and the store is in {store.container!r}"
        how = "to find the datastore of the store's container, run: az ml datastore list -o table"
        raise SpecError(why, field="azureml.datastore", hint=how)


def _check_cluster(account: Account, request: Request) -> None:
    """Check that the cluster exists and has the GPUs. Azure ML takes a job for a missing one; the SDK does not look."""
    compute = str(request.body.get("compute", "")).removeprefix("azureml:")
    if not compute:
        return
    cluster = account.compute(compute)
    if short := short_idle(account.settings, cluster, request):
        raise UnsupportedError(NAME, "keep_warm", short[0], hint=f"to change it, run: {short[1]}")
    size = str(cluster.get("vmSize") or "")  # a cluster of Kubernetes has none
    known = next((m for m in catalog.machines(NAME) if m.instance_type.lower() == size.lower()), None)
    asked = request.body["tags"].get(TAG_GPU)
    if asked and known is not None:
        gpu = Gpu.parse(asked)
        if not (known.is_for(gpu) and known.gpu_count == gpu.count):
            why = f"cluster {compute} is of {size}, which has {known.gpus or 'no GPU'}, not {gpu}"
            raise UnsupportedError(NAME, "resources.gpu", why, hint="name the cluster's GPU, or another cluster")


def short_idle(settings: Settings, cluster: Mapping[str, Any], request: Request) -> tuple[str, str] | None:
    """Return why a cluster does not keep machines for the request's ``keep_warm``, and the command that changes it.

    Its ``scaleSettings`` have the idle time as ISO 8601. Machines below the minimum stay for ever.
    """
    wanted = int((request.body.get("properties") or {}).get(KEEP_WARM) or 0)
    scale = cluster.get("scaleSettings")
    if not scale:  # a compute that never scales down
        return None
    if int(scale.get("minNodeCount") or 0) >= int(request.body["resources"]["instance_count"]):
        return None
    idle = duration_seconds(scale.get("nodeIdleTimeBeforeScaleDown")) or 0.0
    if idle >= wanted:
        return None
    where = f"-g {settings.resource_group} -w {settings.workspace_name}"
    how = f"az ml compute update -n {settings.compute} {where} --idle-time-before-scale-down {wanted}"
    return f"cluster {settings.compute} keeps idle machines for {duration(int(idle))} of {duration(wanted)}", how


def _put(account: Account, request: Request) -> None:
    with translated("create job"):
        from azure.ai.ml import MLClient, load_job

        logging.getLogger("azure.ai.ml").setLevel(logging.ERROR)
        cloud, settings = account.cloud, account.settings
        own: dict[str, Any] = {"cloud_metadata": dict(cloud.metadata)} if cloud.metadata is not None else {}
        client = MLClient(
            account.credential,
            settings.subscription_id,
            settings.resource_group,
            settings.workspace_name,
            cloud=cloud.name,
            enable_telemetry=False,
            show_progress=False,
            retry_total=0,
            **own,
        )
        client.jobs.create_or_update(load_job(io.StringIO(json.dumps(request.body))))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep the SDK off stdout and git's properties while it works, and restore the environment."""
    with _ENVIRONMENT, contextlib.redirect_stdout(io.StringIO()):
        before = {name: os.environ.pop(name, None) for name in (*_GIT, _SET_BY_SDK)}
        before["GIT_DIR"] = os.environ.get("GIT_DIR")
        os.environ["GIT_DIR"] = os.devnull  # git sees no repository
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
