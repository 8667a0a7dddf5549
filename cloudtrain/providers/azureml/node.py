"""Node half of provider ``azureml``: read a container's environment, secrets and notices. Standard library alone.

Paths come from the command line: Azure ML fills them in nowhere else. The variables of the topology have differed
between clusters (InnerEye-DeepLearning #801), so each has fallbacks.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from ...errors import SpecError, StorageError
from ...provider_api.node import NodeEnvironment, Topology
from ...runtime.http_json import ask
from .._cloud import paths_of

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
PORT = 29500
"""torchrun's own default, used if Azure ML names no port."""
HOLD = 120.0
"""Seconds that a node stays alive after it has saved. If a node is taken away, Azure ML restarts its job. It does not
restart a job that has ended (microsoft/ai4s-jobq, 2.5.1)."""
SHUTDOWN = "25"
"""Seconds that torchrun leaves its ranks after SIGTERM; its own default is the whole grace."""
_RANKS = ("NODE_RANK", "AZUREML_CR_NODE_RANK")
_HOSTS = ("MASTER_ADDR", "AZ_BATCHAI_JOB_MASTER_NODE_IP", "AZ_BATCH_MASTER_NODE")
DEVICES, NETWORKS = "/sys/class/infiniband", "/sys/class/net"


def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
    """Return the facts that Azure ML gave this node."""
    return NodeEnvironment(
        topology=_topology(environ),
        paths=paths_of(argv),
        scratch=(os.getcwd(), "/tmp"),  # the job's own folder is on the machine's large disk
        export_env={
            **_network(environ),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN),
        },
        stop_grace=GRACE,
        exit_code={"succeeded": 0, "failed": 1, "preempted": PREEMPTED},
        secrets=lambda reference: secret(reference.partition(":")[2], environ),
        notices=(marker, ScheduledEvents(environ.get(METADATA) or URL)),
        hold=HOLD,
        machine=environ.get("AZ_BATCH_NODE_ID", ""),
        folders={"outputs": "artifacts"},  # scripts write to ./outputs, which Azure ML keeps from its own folder alone
    )


def _topology(environ: Mapping[str, str]) -> Topology:
    given = environ.get("MASTER_PORT", "")
    port = int(given) if given.isdigit() and 0 < int(given) < 65535 else PORT
    nodes = int(environ.get(NODES) or environ.get("AZUREML_NODE_COUNT") or 1)
    if nodes == 1:
        return Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=port)
    rank = next((environ[name] for name in _RANKS if environ.get(name, "").isdigit()), None)
    if rank is None and environ.get("WORLD_SIZE") == str(nodes):  # one process a node: its rank is the node's
        rank = environ.get("RANK")
    address = next((environ[name] for name in _HOSTS if environ.get(name)), None)
    if rank is None or address is None:
        missing = " or ".join(_RANKS if rank is None else _HOSTS)
        raise SpecError(f"this node of {nodes} does not know its number: {missing} is not set", field=NODES)
    return Topology(nodes=nodes, node_rank=int(rank), master_addr=address.partition(":")[0], master_port=port)


def _network(environ: Mapping[str, str]) -> dict[str, str]:
    """Return NCCL's network settings, if the machine really has InfiniBand and the job has not set them.

    The devices decide, never a list of sizes. Images come with NCCL_IB_DISABLE=1 (azureml-examples #675), which would
    leave the fast network idle. A job's own env still wins. NCCL_TOPO_FILE is never set: a file for another size breaks
    the job (azhpc-images #327).
    """
    fast, other = _ports()
    if not fast:
        return {}
    words = {"NCCL_IB_DISABLE": "0"}
    if other and "NCCL_IB_HCA" not in environ:  # RDMA over the slow network, which NCCL would use too
        words["NCCL_IB_HCA"] = "=" + ",".join(fast)
    if "NCCL_SOCKET_IFNAME" not in environ and os.path.exists(f"{NETWORKS}/eth0"):
        words["NCCL_SOCKET_IFNAME"] = "eth0"
    return words


def _ports() -> tuple[list[str], list[str]]:
    """Return active ports (``device:number``) of InfiniBand, and of other RDMA devices."""
    found: tuple[list[str], list[str]] = ([], [])
    for here in sorted(Path(DEVICES).glob("*/ports/*")):
        if "ACTIVE" in _read(here / "state"):
            found[_read(here / "link_layer") != "InfiniBand"].append(f"{here.parts[-3]}:{here.name}")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


# -------------------------------------------------------------------------------------------------------------- secrets


VAULTS = ("vault.azure.net", "vault.azure.cn", "vault.usgovcloudapi.net")
"""Domains of Key Vault. A token is for the vault's domain, by default the first."""
VAULT_VERSION = "7.4"
IMDS = "http://169.254.169.254/metadata/identity/oauth2/token"


def secret(reference: str, environ: Mapping[str, str]) -> str:
    """Return ``VAULT/NAME[/VERSION]``; a vault with a dot is its host name. Raises `StorageError`, never with the
    value."""
    url, resource = place(reference)
    what, how = f"Key Vault {reference.partition('/')[0]}", "give it 'Key Vault Secrets User'"
    headers = {"Authorization": f"Bearer {token(resource, environ)}"}
    return _text("value", url, headers, what=what, how=how, direct=False)


def place(reference: str) -> tuple[str, str]:
    """Return the URL of a secret, and the resource of its token."""
    vault, _, name = reference.partition("/")
    host = vault if "." in vault else f"{vault}.{VAULTS[0]}"
    domain = next((d for d in VAULTS if host.partition(":")[0].endswith(f".{d}")), VAULTS[0])
    return f"https://{host}/secrets/{name}?api-version={VAULT_VERSION}", f"https://{domain}"


def token(resource: str, environ: Mapping[str, str]) -> str:
    """Return a token of the job's managed identity for ``resource``, from this machine's endpoint.

    The order is azure-identity 1.27's: App Service's endpoint, the one of Azure ML's clusters, else the machine's.
    """
    version, word = "2018-02-01", "client_id"
    if environ.get("IDENTITY_ENDPOINT") and environ.get("IDENTITY_HEADER"):
        url, headers = environ["IDENTITY_ENDPOINT"], {"X-IDENTITY-HEADER": environ["IDENTITY_HEADER"]}
        version = "2019-08-01"
    elif environ.get("MSI_ENDPOINT") and environ.get("MSI_SECRET"):
        url, headers = environ["MSI_ENDPOINT"], {"secret": environ["MSI_SECRET"]}
        version, word = "2017-09-01", "clientid"
    else:
        url, headers = IMDS, {"Metadata": "true"}
    client = environ.get("AZURE_CLIENT_ID") or environ.get("DEFAULT_IDENTITY_CLIENT_ID")
    query = urllib.parse.urlencode({"api-version": version, "resource": resource, **({word: client} if client else {})})
    what, how = "the token of the job's identity", "give the job an identity (azureml.identity)"
    return _text("access_token", f"{url}?{query}", headers, what=what, how=how, direct=True)


def _text(key: str, url: str, headers: Mapping[str, str], *, what: str, how: str, direct: bool) -> str:
    """Return the text at ``key`` of the JSON answer. Raises `StorageError`."""
    answer = ask(lambda: urllib.request.Request(url, headers=dict(headers)), what=what, how=how, direct=direct)
    try:
        return str(answer[key])
    except (KeyError, TypeError):
        raise StorageError(f"{what}: an answer without a {key.removeprefix('access_')}") from None


# -------------------------------------------------------------------------------------------------------------- notices
# A cluster or serverless machine of low priority gets no signal. Its only notice is Scheduled Events of the machine's
# metadata service, and Azure may withdraw it (microsoft/ai4s-jobq, 2.5.2). Clusters of Kubernetes make a file instead
# (azureml-examples). Cloudtrain has never seen either on a real machine.

URL = "http://169.254.169.254"
"""The metadata service of every virtual machine of Azure. It may not be asked through a proxy."""
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
MACHINE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
TYPES = ("Preempt", "Terminate")
CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 120.0
"""Longest wait for the first answer: Azure may take two minutes to turn events on for the machine."""
FILE = "/usr/share/to-be-preempted"


def marker(path: str = FILE) -> str:
    """Return why the node is about to go, by the file of a Kubernetes cluster; empty when it is not."""
    return f"{path} is there" if os.path.exists(path) else ""


class ScheduledEvents:
    """Events of the machine on which this process runs, asked at ``url``.

    A set of machines shares its events, so only one that names this machine counts.
    """

    def __init__(self, url: str = URL) -> None:
        self._url = urllib.parse.urlsplit(url)
        self._name = ""

    def __call__(self) -> str | None:
        """Return why the machine is about to go, empty when it is not, None when the service gives no answer."""
        try:
            self._name = self._name or self._get(MACHINE_NAME).strip().lower()
            events = json.loads(self._get(EVENTS))["Events"]
            ours = [event for event in events if event["EventType"] in TYPES and self._named(event)]
        except (OSError, ValueError, LookupError, TypeError, AttributeError, http.client.HTTPException):
            return None
        return f"Azure announced {ours[0]['EventType']} of its machine" if ours else ""

    def _named(self, event: dict[str, object]) -> bool:
        resources = event.get("Resources")
        return isinstance(resources, list) and self._name in [str(name).lower() for name in resources]

    def _get(self, path: str) -> str:
        """Return the answer. http.client uses no proxy. Raises OSError for any status but 200."""
        made = http.client.HTTPConnection(self._url.hostname or "", self._url.port, timeout=CONNECT_SECONDS)
        with contextlib.closing(made) as connection:
            connection.connect()
            connection.sock.settimeout(ANSWER_SECONDS)
            connection.request("GET", self._url.path + path, headers={"Metadata": "true"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(f"{path}: status {answer.status}")
            return answer.read().decode()
