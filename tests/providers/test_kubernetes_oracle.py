"""Plans of provider ``kubernetes`` before a real API server: 1.20.2, built from Debian's source.

It silently drops unknown fields. So each test also compares its answer with the request.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from worlds.kubernetes.world import KubernetesWorld, idle

from cloudtrain.errors import SpecError
from cloudtrain.provider_api.protocol import Request
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.providers.kubernetes.api import Account
from cloudtrain.testing.tables import PLATFORM, platform_rows, verdict

pytestmark = [pytest.mark.proof, pytest.mark.slow, pytest.mark.timeout(3600)]

SCRIPT = Path(__file__).parents[1] / "kubernetes_api.sh"
NEWER = (
    *("completionMode", "podFailurePolicy", "backoffLimitPerIndex", "maxFailedIndexes", "podReplacementPolicy"),
    "ttlSecondsAfterFinished",
)
"""Fields of a Job that 1.20 does not know, or has disabled."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "restricted": {"security": "restricted", "user": 1000},
    "pods": {
        "service_account": "trainer",
        "image_pull_secrets": ("a", "b"),
        "image_pull_policy": "Always",
        "node_selector": {"pool": "gpu"},
        "tolerations": ({"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},),
        "priority_class": "high",
        "runtime_class": "nvidia",
        "scheduler_name": "volcano",
        "host_network": True,
        "labels": {"team": "a"},
        "annotations": {"note": "two words"},
        "queue": "research",
    },
    "hami": {"hami": {"gpumem": 8192, "gpucores": 50, "use_gputype": ["A100"]}},
    "nfs": {"claim": "", "volume": {"nfs": {"server": "nas.example", "path": "/training"}}},
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    """Give an administrator of the server, which has the namespace ``team``."""
    if shutil.which("apt-get") is None:
        pytest.skip("Debian's tools build the server")
    folder = tmp_path_factory.mktemp("oracle")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {**os.environ, "PORT": str(min(port, 65000))}
    done = subprocess.run([SCRIPT, "start", folder], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    try:
        found = Account(find_provider("kubernetes").Settings(kubeconfig=done.stdout.strip(), namespace="team"))
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}}
        found.call("POST", "/api/v1/namespaces", what="create the namespace", body=space)
        yield found
    finally:
        subprocess.run([SCRIPT, "stop", folder], check=True)


@pytest.fixture
def world(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesWorld]:
    """Give a cluster for the plans; nothing is sent to it."""
    with idle(tmp_path_factory.mktemp("world"), monkeypatch) as found:
        yield found


def accepted(oracle: Account, request: Request) -> None:
    """Send each object as a dry run. Check that the answer has every field that is not newer than 1.20."""
    for item in request.body["items"]:
        path = f"/apis/{item['apiVersion']}" if "/" in item["apiVersion"] else f"/api/{item['apiVersion']}"
        path += f"/namespaces/{item['metadata']['namespace']}/{item['kind'].lower()}s"
        answer = oracle.call("POST", path, what="test it", body=item, dryRun="All")
        missing = [name for name in lost(item, answer) if name.removeprefix("spec.").partition(".")[0] not in NEWER]
        assert missing == []


def lost(sent: Any, answer: Any, at: str = "") -> Iterator[str]:
    """Yield the paths of values that the answer lacks."""
    if isinstance(sent, Mapping) and isinstance(answer, Mapping):
        for key, value in sent.items():
            yield from lost(value, answer.get(key), f"{at}.{key}".lstrip("."))
    elif isinstance(sent, list) and isinstance(answer, list) and len(sent) == len(answer):
        for number, pair in enumerate(zip(sent, answer, strict=True)):
            yield from lost(*pair, f"{at}.{number}")
    elif sent != answer and not (sent in ("", False, {}, []) and answer is None):
        yield at


@pytest.mark.parametrize("field", PLATFORM)
def test_the_request_of_a_field(oracle: Account, world: KubernetesWorld, field: str) -> None:
    row = platform_rows(type(world.provider))[field]
    reached, refused = verdict(world.provider, world.place, row, world.sample.job)
    if refused is None and "body" in reached:
        accepted(oracle, world.plan(row.base(world.place), row.change(world.place)).request)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_request_of_settings(oracle: Account, world: KubernetesWorld, settings: str, nodes: int) -> None:
    provider = find_provider("kubernetes")(**{**world.settings, **SETTINGS[settings]})
    fields = {"instance_count": nodes, "gpu": "A100:2", "secrets": {"T": "env:T"}, "memory_gb": 8, "shm_gb": 4}
    plan = world.plan(fields)
    accepted(oracle, provider.plan(plan.job, plan.layout))


def test_the_oracle_refuses(oracle: Account, world: KubernetesWorld) -> None:
    """Check that its answer lacks a misspelt field, and that it refuses a wrong value."""
    request = world.plan().request
    pod = request.body["items"][0]["spec"]["template"]["spec"]
    pod["hostNetwrok"] = True
    with pytest.raises(AssertionError, match="hostNetwrok"):
        accepted(oracle, request)
    del pod["hostNetwrok"]
    pod["containers"][0]["volumeMounts"][0]["name"] = "none"
    with pytest.raises(SpecError, match="Not found"):
        accepted(oracle, request)
