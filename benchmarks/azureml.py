"""``status`` and ``logs`` of an Azure ML job compared with azure-ai-ml, and the upload of a second submit of the same
code.

It uses the loopback workspace of `worlds.azureml` with Azurite. So no figure includes a network, and each measures the
client alone. They are CPU seconds of whole commands (user + system); the SDK's command is a script of five lines.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    CLOUDTRAIN,
    Cost,
    Figure,
    alone,
    environ,
    median_ratio,
    options,
    pairs,
    parser,
    report,
    scratch,
    sides,
    tree,
)

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("tests", "tests/kit")]

TARGET = 0.3
FILES, BYTES = 2_000, 20_000_000
LOG = b"a line of a training script, of no great length\n" * 2000
SDK = """
import json, sys
from azure.ai.ml import MLClient, command
from azure.ai.ml.entities import Environment
from azure.identity import DefaultAzureCredential
scope, cloud, metadata = json.loads(sys.argv[1])
client = MLClient(DefaultAzureCredential(), *scope, cloud=cloud, cloud_metadata=metadata, show_progress=False)
"""
OURS = """
import json, sys
from cloudtrain.provider_api.registry import find_provider
provider = find_provider("azureml")(**json.loads(sys.argv[1]))
"""
STATUS = SDK + "print(client.jobs.get(sys.argv[2]).status)\n"
STREAM = SDK + "client.jobs.stream(sys.argv[2])\n"
SUBMIT = SDK + (
    "client.jobs.create_or_update(command(name=sys.argv[2], code=sys.argv[3], command='true',"
    " environment=Environment(image='team/trainer:1'), instance_type='Standard_DS3_v2'))\n"
)


def main() -> int:
    chosen = options(parser(__doc__, count=9, quick=3))
    with scratch() as folder, workspace(folder) as place:
        figures = [*polls(place, chosen.pairs), *uploads(place)]
    return report(figures, as_json=chosen.json)


class Place:
    """A workspace whose jobs always wait for machines, and a folder with a job's script and settings."""

    def __init__(self, folder: Path, world: Any) -> None:
        self.folder, self.world, self.plane = folder, world, world.plane
        self.environ = environ(self.plane.environ())
        settings = dict(world.settings)
        metadata = settings.pop("cloud_metadata")
        lines = ["[azureml]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
        lines += ["[azureml.cloud_metadata]", *(f"{key} = {json.dumps(value)}" for key, value in metadata.items())]
        (folder / "cloudtrain.toml").write_text("\n".join(lines) + "\n")

    def cost(self, *command: str, cwd: Path | None = None) -> Cost:
        """Measure a command alone, without the servers."""
        return alone(command, cwd=cwd or self.folder, env=self.environ)

    def ours(self, *words: str, cwd: Path | None = None) -> Cost:
        return self.cost(CLOUDTRAIN, *words, "--store", self.world.store, cwd=cwd)

    def sdk(self, script: str, *words: str) -> Cost:
        scope = json.dumps([self.plane.scope, self.plane.cloud, self.plane.metadata])
        return self.cost(sys.executable, "-c", script, scope, *words)

    def provider(self, call: str, name: str) -> Cost:
        """Measure cloudtrain's provider alone, without a store, because the SDK has none."""
        native = f"{self.plane.id}/jobs/{name}"
        return self.cost(sys.executable, "-c", f"{OURS}print(provider.{call})", json.dumps(self.world.settings), native)

    def submit(self, run_id: str, cwd: Path) -> str:
        """Submit the code, and return the name of its job."""
        words = ["submit", "train.py", "--provider", "azureml", "--image", "team/trainer:1", "--run-id", run_id]
        self.ours(*words, "--detach", cwd=cwd)
        return next(name for name in self.plane.jobs if name.startswith(f"{run_id}-"))

    def stored(self, *prefixes: str) -> dict[str, tuple[str, int]]:
        """Return (version, bytes) of every blob below the store's folders, or of code that the SDK uploaded, by
        name."""
        blobs = self.plane.blobs
        if prefixes:
            found = [(b.name, b) for p in prefixes for b in blobs.client(self.plane.container).list_blobs(p)]
        else:
            found = [(f"{c}/{b.name}", b) for c in self.codes() for b in blobs.client(c).list_blobs()]
        return {name: (blob.etag, blob.size) for name, blob in found}

    def codes(self) -> Sequence[str]:
        return [item.name for item in self.plane.blobs.service.list_containers(name_starts_with="code-")]


@contextlib.contextmanager
def workspace(folder: Path) -> Iterator[Place]:
    """Start the servers, in this process and next to it."""
    from servers import AZURITE_ACCOUNT, AZURITE_KEY, azurite, free_port, served
    from worlds.azureml.world import AzureMLWorld

    program = azurite()
    if program is None:
        raise SystemExit("Azurite is not installed; run tests/azurite.sh")
    port = free_port()
    words = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder / "blobs")]
    with served([*words, "--silent", "--skipApiVersionCheck", "--disableTelemetry"], port, folder / "azurite.log"):
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName={AZURITE_ACCOUNT};AccountKey={AZURITE_KEY};"
            f"BlobEndpoint=http://127.0.0.1:{port}/{AZURITE_ACCOUNT};"
        )
        world = AzureMLWorld(folder / "world", azurite=connection, image="team/trainer:1", runs=False)
        world.plane.no_capacity = True
        try:
            yield Place(folder, world)
        finally:
            world.close()


def polls(place: Place, count: int) -> Iterator[Figure]:
    """Measure the CPU of ``status`` and of ``logs`` for a running job that has printed `LOG`."""
    code = place.folder / "code"
    code.mkdir()
    (code / "train.py").write_text("print('hello')\n")
    name = place.submit("polled", code)
    log = place.plane.job(name).log(0)
    log.take(LOG)
    log.flush(whole=True)
    found = pairs(partial(place.ours, "status", "polled"), partial(place.sdk, STATUS, name), count=count)
    yield figure("cloudtrain status / jobs.get", found)
    found = pairs(partial(place.provider, "status(sys.argv[2])", name), partial(place.sdk, STATUS, name), count=count)
    yield figure("Provider.status / jobs.get", found)

    def stream() -> Cost:
        """Measure the SDK's stream, which follows until the end. The job ends before its second poll."""
        polls, wire = place.plane.wire.count("GET details"), place.plane.wire
        place.plane.unknown[name] = "Running"

        def end() -> None:
            while wire.count("GET details") == polls:
                time.sleep(0.05)
            place.plane.unknown[name] = "Completed"

        threading.Thread(target=end, daemon=True).start()
        return place.sdk(STREAM, name)

    found = pairs(partial(place.ours, "logs", "polled"), stream, count=count)
    yield figure("cloudtrain logs / jobs.stream, one poll", found)
    found = pairs(partial(place.provider, "logs(sys.argv[2])", name), stream, count=count)
    yield figure("Provider.logs / jobs.stream, one poll", found)


def figure(what: str, found: Sequence[Any]) -> Figure:
    return Figure(
        name=f"CPU of {what}", value=median_ratio(found, "cpu"), target=TARGET, note=sides(found, "cpu"), pairs=found
    )


def uploads(place: Place) -> Iterator[Figure]:
    """Compare the bytes of code that a second submit of the same files uploads, by cloudtrain and by the SDK."""
    code = tree(place.folder / "many", files=FILES, size=BYTES, script="print('hello')\n")
    place.submit("first", code)
    before = place.stored("store/code/", "store/runtime/")
    place.submit("second", code)
    after = place.stored("store/code/", "store/runtime/")
    if not before:
        raise SystemExit("the first submit uploaded nothing")
    place.sdk(SUBMIT, "sdk-first", str(code))
    sdk_before = place.stored()
    place.sdk(SUBMIT, "sdk-second", str(code))
    sdk = changed(sdk_before, place.stored())
    yield Figure(
        name=f"bytes of code that a second submit of {FILES:,} files uploads",
        value=changed(before, after),
        target=0,
        unit="bytes",
        note=f"azure-ai-ml {sdk}; first time {total(before)} and {total(sdk_before)}",
    )


def changed(before: dict[str, tuple[str, int]], after: dict[str, tuple[str, int]]) -> int:
    return sum(size for name, (etag, size) in after.items() if before.get(name, ("", 0))[0] != etag)


def total(stored: dict[str, tuple[str, int]]) -> int:
    return sum(size for _, size in stored.values())


if __name__ == "__main__":
    sys.exit(main())
