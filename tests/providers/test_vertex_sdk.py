"""Provider ``vertex`` sends jobs through Google's own client: checks that nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds.vertex.world import VertexWorld

from cloudtrain.errors import SpecError
from cloudtrain.provider_api.protocol import Request

pytestmark = [pytest.mark.remote]

EVERYTHING: dict[str, Any] = {
    "network": "projects/123456789/global/networks/vpc",
    "tensorboard": "projects/1/locations/europe-west4/tensorboards/7",
    "encryption_key": "projects/contract/locations/europe-west4/keyRings/r/cryptoKeys/k",
    "debug_shell": True,
}


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VertexWorld]:
    """Give a project whose jobs never start."""
    world = VertexWorld(tmp_path, image="team/none:1", log_drain=0, **EVERYTHING)
    for name, value in world.plane.environ().items():
        monkeypatch.setenv(name, value)
    world.plane.no_capacity, world.plane.capacity_seconds = True, 1e9
    yield world
    world.close()


def plain(message: Any) -> dict[str, Any]:
    from google.protobuf import json_format

    document: dict[str, Any] = json_format.MessageToDict(message)
    return document


def test_the_service_gets_the_planned_request(idle: VertexWorld) -> None:
    """Check all of it: enums go as numbers, and 64 bits as text."""
    options = {"jobSpec": {"workerPoolSpecs": {"*": {"diskSpec": {"bootDiskType": "pd-ssd"}}}, "experiment": "e"}}
    fields = {
        "gpu": "L4:2",
        "instance_count": 3,
        "max_wait": 3600,
        "disk_gb": 200,
        "tags": {"team": "vision"},
        "options": {"vertex": options},
    }
    request = idle.plan(fields, run_id="whole").request
    native = idle.provider.submit(request)
    arrived = plain(idle.plane.jobs[native].record)
    assert {key: arrived[key] for key in request.body} == request.body
    # All other members are the service's own.
    assert set(arrived) - set(request.body) <= {"name", "state", "createTime", "updateTime"}


def test_a_field_that_the_installed_sdk_does_not_know_is_one_line(idle: VertexWorld) -> None:
    """Check a saved plan of a newer version."""
    request = idle.plan(run_id="newer").request
    body = {**request.body, "jobSpec": {**request.body["jobSpec"], "ofNextYear": True}}
    with pytest.raises(SpecError, match="does not know this request") as caught:
        idle.provider.submit(Request.from_dict({**request.to_dict(), "body": body}))
    assert caught.value.field == "options"
    assert "\n" not in str(caught.value)
    assert idle.plane.jobs == {}


def test_googles_own_high_level_client_reads_the_job(idle: VertexWorld, tmp_path: Path) -> None:
    """Check in a process of its own: the client caches answers for the life of a process."""
    native = idle.provider.submit(idle.plan(run_id="seen").request)
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from google.cloud import aiplatform\n"
        "aiplatform.init(project='contract', location='europe-west4', api_transport='rest', api_endpoint=sys.argv[1])\n"
        "job = aiplatform.CustomJob.get(sys.argv[2])\n"
        "print(job.state.name, job.display_name)\n"
    )
    words = [sys.executable, "-c", code, idle.plane.url, native]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["JOB_STATE_PENDING", idle.plane.jobs[native].record.display_name]


def test_without_the_package_one_line_gives_the_install_command(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('google', 'gcsfs'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "sys.modules.pop('google', None)\n"
        "from cloudtrain.errors import SpecError\n"
        "from cloudtrain.provider_api.registry import find_provider\n"
        "made = find_provider('vertex')(project='p', location='europe-west4')\n"
        "for call in (lambda: made.status('projects/p/locations/l/customJobs/1'), lambda: made.storage('gs://b/x')):\n"
        "    try:\n"
        "        call()\n"
        "    except SpecError as exc:\n"
        "        print(exc, exc.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("provider vertex needs " in line and "pip install" in line and "[vertex]'" in line for line in lines)
