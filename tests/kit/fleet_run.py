"""A run on a platform that is a folder. A fleet in this process is its nodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foldercloud
import pytest
from fleet import Fleet, Ranks

from cloudtrain.estimator import Estimator
from cloudtrain.runs.run import Run

PROCESSES = 2


class Place:
    """One run on a platform that is a folder, and the fleet that is its nodes."""

    def __init__(self, folder: Path, nodes: int, patch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
        self.nodes, self._patch, self._note = nodes, patch, request.node.user_properties
        self.folder = folder
        for name in ("jobs", "scratch"):
            (folder / name).mkdir()
        foldercloud.install(folder / "site")
        (folder / "site/foldercloud.py").unlink()  # the module comes from this process
        (folder / "train.py").write_text("print('hello')\n")
        patch.syspath_prepend(str(folder / "site"))
        patch.chdir(folder)
        self.jobs = foldercloud.Provider(folder=str(folder / "jobs"))
        estimator = Estimator(
            entry_point="train.py",
            provider=foldercloud.NAME,
            instance_count=nodes,
            nproc_per_node=PROCESSES,
            settings={"folder": str(folder / "jobs")},
        )
        self.run: Run = estimator.fit(wait=False, run_id="r")
        self.store = folder / ".cloudtrain"
        self.fleets: list[Fleet] = []

    @property
    def live(self) -> Path:
        return self.store / "runs/r/live"

    def fleet(self, train: Callable[[Ranks], None], **more: Any) -> Fleet:
        request = json.loads((self.store / "runs/r/attempts/0/request.json").read_bytes())
        [code] = self.store.glob("code/*/code.tar.gz")
        made = Fleet(
            nodes=self.nodes,
            folder=self.folder / "scratch",
            context=request["context"],
            code=code,
            live=self.live,
            train=train,
            patch=self._patch,
            **more,
        )
        self.fleets.append(made)
        return made

    def figure(self, name: str, value: object) -> None:
        """Write a line of the proof's report."""
        self._note.append((f"{name}, {self.nodes} nodes", value))

    def costs(self, fleet: Fleet) -> None:
        """Write processor time, memory and messages of each node; node 0 talks to all the others."""
        others = range(1, self.nodes)
        cpu = sum(map(fleet.world.cpu, others)) / len(others)
        self.figure("CPU of a node", f"{1000 * cpu:.1f} ms")
        self.figure("CPU of node 0", f"{1000 * fleet.world.cpu(0):.0f} ms")
        self.figure("messages of a node", f"{sum(fleet.world.sent[i] for i in others) / len(others):.1f}")
        self.figure("messages of node 0 for each node", f"{fleet.world.sent[0] / len(others):.1f}")
        self.figure("bytes of node 0 for each node", f"{fleet.world.bytes[0] / len(others):.0f}")

    def close(self) -> None:
        for fleet in self.fleets:
            fleet.world.close()
