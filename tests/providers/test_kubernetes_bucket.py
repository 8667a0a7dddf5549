"""The node half of provider ``kubernetes`` on a mounted bucket that cannot rename: no container, no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Jobs
from worlds.kubernetes.world import BucketWorld

from cloudtrain.providers._cloud import Clock
from cloudtrain.providers.kubernetes import node
from cloudtrain.providers.kubernetes.request import job_object

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/fuse") or os.geteuid() != 0, reason="needs root and FUSE")

SCRIPT = """
import json, os, time
from pathlib import Path
start = os.environ["CLOUDTRAIN_RESUME_FROM"]
step = int(Path(start, "step.txt").read_text()) if start else 0
data = Path(os.environ["CLOUDTRAIN_INPUT_DATA"], "x.txt").read_text()
for step in range(step + 1, step + 4):
    with open(os.environ["CLOUDTRAIN_METRICS_FILE"], "a") as stream:
        stream.write(json.dumps({"step": step, "loss": 1 / step}) + chr(10))
    folder = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], f"step-{step}")
    folder.mkdir()
    (folder / "step.txt").write_text(str(step))
    (folder / "weights").write_bytes(bytes(3_000_000))
    print("step", step, data, os.environ["CLOUDTRAIN_CHECKPOINT_URL"], flush=True)
while not start and not os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
    time.sleep(0.05)
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketWorld]:
    """Give a cluster without machines. Its bucket is mounted where local nodes see it too."""
    made = BucketWorld(tmp_path, image="team/none:1", root=str(tmp_path / "mounted"))
    for name, value in made.plane.environ().items():
        monkeypatch.setenv(name, value)
    made.plane.no_capacity = True
    yield made
    made.close()


@pytest.mark.slow
def test_a_node_saves_and_resumes_through_a_bucket_without_rename(world: BucketWorld, tmp_path: Path) -> None:
    code, data = tmp_path / "code", tmp_path / "data"
    for folder in (code, data):
        folder.mkdir()
    (code / "train.py").write_text(SCRIPT)
    (data / "x.txt").write_text("here")
    fields = {"source_dir": str(code), "entry_point": "train.py", "launcher": "python", "inputs": {"data": str(data)}}
    plan = world.plan(fields, {"keep_checkpoints": 1}, run_id="r")
    world.send(plan)
    container = job_object(plan.request)["spec"]["template"]["spec"]["containers"][0]
    env = {**os.environ, **{item["name"]: item.get("value", "node-a") for item in container["env"]}, node.INDEX: "0"}

    def start() -> subprocess.Popen[str]:
        words = [*container["command"], *container["args"]]
        return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    gcs, run = world.google.gcs, "store/runs/r"

    def commits() -> list[str]:
        return [name for name in gcs.names("training", f"{run}/live/") if name.endswith("commit.json")]

    first = start()
    Jobs.wait_for(lambda: any("step-3" in name for name in commits()) or first.poll() is not None, 60)
    first.send_signal(signal.SIGTERM)
    out, _ = first.communicate(timeout=60)
    assert first.returncode == node.AGAIN, out
    assert "step 3 here gs://training/store/runs/r/checkpoints" in out
    second = start()
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0, out
    assert "step 6 here" in out
    assert "step 3" not in out, "it resumed"
    names = gcs.names("training")
    assert [name for name in names if ".part" in name] == []
    assert any("step-6" in name for name in commits()), names
    metrics = [gcs.read("training", name) for name in names if name.startswith(f"{run}/live/metrics/0")]
    assert {json.loads(line)["step"] for data in metrics for line in data.splitlines()} == {1, 2, 3, 4, 5, 6}


def test_the_running_time_is_written_without_rename(world: BucketWorld, tmp_path: Path) -> None:
    clock = Clock(tmp_path / "mounted" / "native" / "used", 60, {}, node.TIME_UP, 0.1)
    for _ in range(3):
        assert clock() == ""
        time.sleep(0.2)
    assert 0.3 < float(world.google.gcs.read("training", "native/used")) < 60
    assert world.google.gcs.names("training", "native/") == ["native/", "native/used"]
