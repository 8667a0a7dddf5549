"""Predict ModelArts' containers for a request, as data for an engine, a FakePlatform and the contract suite. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...job.job import Gpu
from ...provider_api import catalog
from ...provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec
from ...provider_api.protocol import Request
from .._cloud import pairs_of, size_of
from . import NAME
from .node import CLOCK_PATH, DEVICE_PATH, GRACE, KEY_PATH, LIMIT_PATH, MOUNT
from .request import POOL_FLAVORS, RETRY_NUM, unmounted, words_of

if TYPE_CHECKING:
    from . import Settings

_FACTS = (LIMIT_PATH, CLOCK_PATH, DEVICE_PATH, KEY_PATH)


def launch_spec(settings: Settings, request: Request) -> LaunchSpec:
    """Return one container a node."""
    body = request.body
    words, count = words_of(body), int(body["spec"]["resource"]["node_count"])
    retries = int(body["metadata"].get("annotations", {}).get(RETRY_NUM, 0))
    name = body["metadata"]["name"]
    hosts = [f"modelarts-job-{name[-8:]}-worker-{number}.modelarts-job" for number in range(count)]
    own = body["algorithm"].get("environments") or {}
    flavor = str(body["spec"]["resource"].get("flavor_id"))
    machine = catalog.machine(NAME, flavor)
    size = size_of(machine) if machine else {"gpus": _cards(settings, flavor)}
    nodes = [
        NodeSpec(
            image=body["algorithm"]["engine"]["image_url"],
            entrypoint=words[:4],
            command=words[4:],
            env={**_environment(hosts, number, size["gpus"]), **own},
            mounts=list(_mounts(body, words)),
            hostname=hosts[number],
            **size,
        )
        for number in range(count)
    ]
    limit = float(pairs_of(words)[LIMIT_PATH])
    rules = LaunchRules(time_limit=limit, preemptions=retries, losses=retries, stop_grace=GRACE)
    return LaunchSpec(nodes=nodes, rules=rules)


def _cards(settings: Settings, flavor: str) -> int:
    """Return the cards of a node whose flavor is in the settings, or a dedicated pool's; 0 for any other."""
    known = {name: Gpu.parse(gpu).count for gpu, name in settings.flavors.items()}
    return {name: count for count, name in POOL_FLAVORS.items()}.get(flavor) or known.get(flavor, 0)


def _environment(hosts: list[str], number: int, gpus: int) -> dict[str, str]:
    """Return the platform's own variables: Huawei's page on those of training containers."""
    return {
        "HOME": "/home/ma-user",
        "MA_NUM_HOSTS": str(len(hosts)),
        "MA_NUM_GPUS": str(gpus),
        "MA_TASK_NAME": "worker",
        "MA_SCHEDULE_CNT": "1",
        "MA_PROC_START_CNT": "1",
        "VC_TASK_INDEX": str(number),
        "VC_WORKER_NUM": str(len(hosts)),
        "VC_WORKER_HOSTS": ",".join(hosts),
    }


def _mounts(body: Mapping[str, Any], words: list[str]) -> Iterator[Mount]:
    """Yield each part of a bucket that the command names, by itself, and the downloads. Volumes are whole folders."""
    copies = {item["local_dir"]: item["remote"]["obs"]["obs_url"] for item in body["algorithm"].get("inputs") or ()}
    servers = {
        item["nfs"]["local_path"]: item["nfs"]["nfs_server_path"] for item in body["spec"]["volumes"] if "nfs" in item
    }
    runtime, context = words[4], words[words.index("--context") + 1]
    native = body["spec"]["log_export_path"]["obs_url"].rstrip("/")
    for path in (runtime.rpartition("/")[0], context, f"{context.rpartition('/')[0]}/key"):
        yield Mount(url=unmounted(path), path=path, kind="mount")
    yield Mount(url=native, path=f"{MOUNT}/{native.removeprefix('obs://')}", kind="sync")
    for name, path in pairs_of(words).items():
        if name in _FACTS:
            continue
        if path in copies:
            yield Mount(url=f"obs:/{copies[path].rstrip('/')}", path=path, kind="copy")
        elif path in servers:
            yield Mount(url="nfs://" + servers[path].replace(":", "", 1), path=path, kind="mount")
        else:
            place = path.rpartition("/")[0] if name == "code" else path
            yield Mount(url=unmounted(place), path=place, kind="sync" if name == "live" else "mount")
