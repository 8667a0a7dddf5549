"""A first submit to Vertex AI compared with ``aiplatform.CustomJob.from_local_script(...).submit()``, and ``status``.

It uses the loopback project of `worlds.vertex`, without any network, and no job gets a machine. Both sides are one
process from its start to the accepted job, including the peer's staging of its script: CPU seconds (user + system) and
peak memory. Google's own high-level classes are a script of a few lines.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    CLOUDTRAIN,
    Cost,
    Figure,
    Pair,
    cost_of,
    environ,
    median_ratio,
    options,
    pairs,
    parser,
    report,
    scratch,
    sides,
)

SUBMIT_CPU, SUBMIT_RSS, STATUS_CPU = 0.65, 0.75, 0.5
"""Targets, as shares of the peer's cost."""
IMAGE = "team/trainer:1"
SDK = """
import os, sys
from google.cloud import aiplatform
project, location, bucket, account, *words = sys.argv[1:]
aiplatform.init(
    project=project, location=location, staging_bucket=bucket, api_transport="rest",
    api_endpoint=os.environ["CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM"].rstrip("/"),
)
"""
SUBMIT = SDK + (
    "aiplatform.CustomJob.from_local_script(display_name='bench', script_path=words[0], container_uri=words[1],"
    " machine_type='n1-standard-4').submit(service_account=account)\n"
)
STATUS = SDK + "print(aiplatform.CustomJob.get(words[0]).state)\n"
OURS = """
import json, sys
from cloudtrain.provider_api.registry import find_provider
print(find_provider("vertex")(**json.loads(sys.argv[1])).status(sys.argv[2]).state)
"""


def serve(folder: Path) -> None:
    """Serve a project until stdin ends. The first line on stdout gives its address; each line on stdin is answered with
    its jobs."""
    sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("tests", "tests/kit")]
    from worlds.vertex.world import BUCKET, VertexWorld

    world = VertexWorld(folder, image=IMAGE)
    world.plane.no_capacity, world.plane.capacity_seconds = True, 1e9
    facts = {"environ": world.plane.environ(), "settings": world.settings, "bucket": f"gs://{BUCKET}"}
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        print(json.dumps(list(world.plane.jobs)), flush=True)
    world.close()


class Project:
    """`serve` in a separate process: this one stays small, since a child's peak memory begins with its parent's."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, __file__, "--serve", str(folder)]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        project = self._ask("")
        self.folder, self.settings, self.bucket = folder, project["settings"], project["bucket"]
        self.environ = environ({**project["environ"], "PYTHONWARNINGS": "ignore"})
        # google-cloud-storage calls an emulator anonymously, and this one takes no anonymous writes.
        self.environ["API_ENDPOINT_OVERRIDE"] = self.environ["STORAGE_EMULATOR_HOST"]
        self._count = 0
        self.script = folder / "code" / "train.py"
        self.script.parent.mkdir()
        self.script.write_text("print('hello')\n")

    def _ask(self, line: str) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(line)
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the project ended with {self._server.wait()}")
        return json.loads(answer)

    def jobs(self) -> list[str]:
        """Return the names of all jobs, oldest first."""
        found: list[str] = self._ask("jobs\n")
        return found

    def _cost(self, *command: str, without: str = "") -> Cost:
        env = {name: value for name, value in self.environ.items() if name != without}
        return cost_of(command, cwd=self.script.parent, env=env, alone=True)  # this server is a child too

    def submit(self) -> Cost:
        """Measure cloudtrain's submit into a new store, without any earlier upload."""
        before, self._count = len(self.jobs()), self._count + 1
        words = [word for name, value in self.settings.items() for word in ("--set", f"{name}={value}")]
        words += ["--provider", "vertex", "--image", IMAGE, "--max-runtime", "1h", "--detach"]
        cost = self._cost(CLOUDTRAIN, "submit", "train.py", *words, "--store", f"{self.bucket}/store{self._count}")
        self._check(before)
        return cost

    def sdk(self, script: str, *words: str) -> Cost:
        """Measure a script with Google's SDK."""
        where = [self.settings["project"], self.settings["location"], self.bucket, self.settings["service_account"]]
        return self._cost(sys.executable, "-c", script, *where, *words, without="STORAGE_EMULATOR_HOST")

    def sdk_submit(self) -> Cost:
        """Measure the peer's submit, whose staging has a new name each time."""
        before = len(self.jobs())
        cost = self.sdk(SUBMIT, str(self.script), IMAGE)
        self._check(before)
        return cost

    def status(self, name: str) -> Cost:
        """Measure cloudtrain's provider alone, without a store, because the SDK has none."""
        return self._cost(sys.executable, "-c", OURS, json.dumps(self.settings), name)

    def _check(self, before: int) -> None:
        if (made := len(self.jobs()) - before) != 1:
            raise RuntimeError(f"a submit made {made} jobs")

    def close(self) -> None:
        """End the server."""
        self._server.communicate(timeout=60)


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
        return 0
    chosen = options(parser(__doc__, count=7, quick=2))
    with scratch() as folder:
        project = Project(folder)
        sent = pairs(project.submit, project.sdk_submit, count=chosen.pairs)
        name = project.jobs()[0]
        asked = pairs(partial(project.status, name), partial(project.sdk, STATUS, name), count=chosen.pairs)
        project.close()
    figures = [
        figure("CPU of a first submit / CustomJob.submit", sent, "cpu", SUBMIT_CPU),
        figure("peak memory of a first submit / CustomJob.submit", sent, "rss", SUBMIT_RSS),
        figure("wall of a first submit / CustomJob.submit", sent, "wall", None),
        figure("CPU of Provider.status / CustomJob.get", asked, "cpu", STATUS_CPU),
    ]
    return report(figures, as_json=chosen.json)


def figure(name: str, found: Sequence[Pair], what: str, target: float | None) -> Figure:
    return Figure(name=name, value=median_ratio(found, what), target=target, note=sides(found, what), pairs=found)


if __name__ == "__main__":
    sys.exit(main())
