"""Azure ML's real answers on command jobs, from the recordings of azure-sdk-for-python, read by `status_of`.

`make test-azureml-recordings` runs this. AZURE_SDK_RECORDINGS names a folder of recordings in a checkout of that
repository (sdk/ml/azure-ai-ml/tests/recordings) or of Azure/azure-sdk-assets. At least one recording contains a plain
secret. So this reads only the bodies of answers on jobs, and stores and prints nothing of them.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds.azureml.strict import STATUSES

from cloudtrain.provider_api.protocol import STATES
from cloudtrain.providers.azureml.status import status_of

pytestmark = [pytest.mark.azureml_recordings]


def jobs(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of the recording and each command job that it creates, reads or lists."""
    for path in sorted(folder.rglob("*.json")):
        try:
            entries = json.loads(path.read_bytes())["Entries"]
        except (ValueError, KeyError, TypeError):
            continue
        for entry in entries:
            if "/jobs" not in entry.get("RequestUri", "") or entry.get("RequestMethod") not in ("GET", "PUT"):
                continue
            body = entry.get("ResponseBody")
            for item in (body.get("value") or [body]) if isinstance(body, dict) else ():
                if isinstance(item, dict) and (item.get("properties") or {}).get("jobType") == "Command":
                    yield path.name, item


def test_every_command_job_that_was_ever_recorded_has_a_status() -> None:
    found = Counter[str]()
    for name, job in jobs(Path(os.environ["AZURE_SDK_RECORDINGS"])):
        status = status_of(job, {})
        assert status.state in STATES, name
        assert status.native in {*STATUSES, "Unknown", "Waiting"}, name
        found[status.native] += 1
    assert found, "the folder has no recorded command job"
