"""Runs from before a test: with checkpoints for another run, or with the records of earlier versions."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from pathlib import Path

from cloudtrain.storage.files import files

__all__ = ["Ran", "recorded_with_lists", "recorded_with_shared_copies"]


def recorded_with_lists(folder: Path) -> None:
    """Write the stores and jobs of four runs of the last version whose settings listed two fallback providers.

    - ``waits`` waits for machines at the first one.
    - ``moved`` waits at the second one.
    - ``ended`` has succeeded at the second one.
    - ``refused`` waits at the first one with the second GPU of its list.

    Their jobs were submitted just now.
    """
    for path, data in _recorded("earlier_fallbacks.json", folder).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def recorded_with_shared_copies(folder: Path) -> None:
    """Write the store and the job of the run ``r`` of the last version that shared copies between runs. It waits at
    ``folder``/cloud-0. Its remote input and another store's checkpoint lie below ``data/`` of memory://bucket/store-0.
    Both sources are gone. Its fallback is memory://bucket/store-1."""
    bucket = files("memory://bucket")
    for path, data in _recorded("earlier_copies.json", folder).items():
        if path.startswith("store-0/"):
            bucket.write(path, data)
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    record = json.loads(bucket.read("store-0/runs/r/run.json"))
    bucket.write(f"store-0/runtime/{record['runtime']}/cloudtrain.pyz", b"the runtime of then")


def _recorded(name: str, folder: Path) -> dict[str, bytes]:
    found = {}
    for path, text in json.loads((Path(__file__).parents[1] / "data" / name).read_text()).items():
        if path.endswith("/submitted.json"):
            text = re.sub(r'"time": [\d.]+', f'"time": {time.time()}', text)
        plain = base64.b64decode(text[7:]) if text.startswith("base64:") else None
        found[path] = text.replace("{folder}", str(folder)).encode() if plain is None else plain
    return found


class Ran:
    """A run in the store at ``url``, created if missing, with checkpoints as node 0 commits them."""

    def __init__(self, url: str, run_id: str = "first") -> None:
        self.files, self.url, self.key = files(url), f"{url}/runs/{run_id}", f"runs/{run_id}"
        self.files.create(f"{self.key}/run.json", b'{"protocol": 1}')

    def save(self, step: int, attempt: str = "0.0", size: int = 5) -> dict[str, bytes]:
        """Write a checkpoint of two nodes. Return the files of a node that resumes from it."""
        name, key = f"step-{step}", f"{self.key}/live/checkpoints/step-{step}/{attempt}-{step}"
        data = {f"node-{n}/{name}/shard-{n}.pt": os.urandom(size * (n + 1)) for n in (0, 1)}
        data[f"node-0/{name}/a b%+.json"] = b""
        for path, content in data.items():
            self.files.write(f"{key}/{path}", content)
        entries = {path: {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for path, c in data.items()}
        commit = {"protocol": 1, "name": name, "place": None, "attempt": attempt, "seq": step, "nodes": 2}
        commit |= {"saved": 100.0 + step, "time": 101.0 + step, "files": entries}
        self.files.write(f"{key}/commit.json", json.dumps(commit).encode())
        return {path.partition("/")[2].partition("/")[2]: content for path, content in data.items()}

    def spoil(self, step: int, attempt: str = "0.0") -> None:
        """Change one byte of a shard, but not its size."""
        key = f"{self.key}/live/checkpoints/step-{step}/{attempt}-{step}/node-1/step-{step}/shard-1.pt"
        data = self.files.read(key)
        self.files.write(key, data[:-1] + bytes([data[-1] ^ 1]))
