"""A real cluster as the platform of the contract suite: that of ``KUBECONFIG``, in .github/workflows/kubernetes.yml.

It is made for kind, whose nodes are containers with access to the test's folder. It never ran on the authors' machines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cloudtrain.provider_api.registry import find_provider
from cloudtrain.providers.kubernetes.api import Account
from cloudtrain.providers.kubernetes.request import POD_INDEX
from cloudtrain.runs.run import Run
from cloudtrain.testing.platform import FakePlatform
from cloudtrain.testing.tables import Fields

from .world import KubernetesWorld

__all__ = ["RealCluster"]

QUOTA = "/api/v1/namespaces/default/resourcequotas"


class RealCluster(KubernetesWorld):
    """Namespace ``default`` of the cluster, whose nodes have ``folder`` at the same path."""

    def __init__(self, folder: Path) -> None:
        self.image = os.environ["CLOUDTRAIN_KUBERNETES_IMAGE"]
        volume = {"hostPath": {"path": str(folder)}}
        self.settings = {"root": str(folder), "volume": volume, "image_pull_policy": "Never", "user": os.getuid()}
        made = find_provider("kubernetes")(**self.settings)
        store = (folder / "store").as_uri()
        FakePlatform.__init__(self, folder, provider=made, store=store, nowhere="default/ct-nowhere-0")

    def close(self) -> None:
        """Leave the cluster to its owner."""

    def check(self, request: Any) -> None:
        FakePlatform.check(self, request)
        self.provider.account.test(request)

    def pod(self, run: Run, number: int) -> Mapping[str, Any]:
        submitted = run.store.submitted(run.run_id, 0)
        assert submitted is not None
        pods = self.provider.account.pods(submitted["native_id"])
        return [pod for pod in pods if pod["metadata"]["labels"][POD_INDEX] == str(number)][-1]

    def preempt(self, run: Run, number: int) -> None:
        meta = {key: self.pod(run, number)["metadata"][key] for key in ("name", "namespace")}
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/eviction"
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
        self.provider.account.call("POST", path, what="evict", body=body)

    def kill(self, run: Run, number: int) -> None:
        """Kill the container through the runtime of kind's node."""
        pod = self.pod(run, number)
        name = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        words = [
            "docker",
            "exec",
            pod["spec"]["nodeName"],
            "ctr",
            "-n",
            "k8s.io",
            "task",
            "kill",
            "-s",
            "SIGKILL",
            name,
        ]
        subprocess.run(words, check=True)

    @contextlib.contextmanager
    def fault(self, category: str) -> Iterator[Fields]:
        account = self.provider.account
        if category == "capacity":
            yield {"gpu": ("A100:1",), "max_wait": 1}
        elif category == "image":
            yield {"image": "docker.io/library/none:1"}
        elif category == "quota":
            made = {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "none"},
                "spec": {"hard": {"pods": "0"}},
            }
            account.call("POST", QUOTA, what="set a quota", body=made)
            time.sleep(2)
            yield {}
            account.call("DELETE", f"{QUOTA}/none", what="lift it")
        else:
            config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
            for user in config["users"]:
                user["user"] = {"token": "wrong"}
            file = self.folder / "kubeconfig"
            file.write_text(json.dumps(config))
            self.provider.account = Account(dataclasses.replace(account.settings, kubeconfig=str(file)))
            yield {}
            self.provider.account = account
