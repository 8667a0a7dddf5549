"""Uploads and downloads compared with s3fs, s5cmd and adlfs: many small files, a checkpoint, one large file; CPU and
memory.

S3 is Ceph's radosgw (`ceph`), Azure is Azurite. Both are on loopback and on this machine's own cores, without round
trips and TLS, so only the ratios mean something. The time of a library starts after its imports and one listing, that
of s5cmd, and of cloudtrain next to it, at the start of the program. The peers have separate venvs. Every side lists the
files that it fetches. cloudtrain flushes each file to the disk, the peers do not. Contents are checked after each
download.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from ceph import KEY, SECRET, radosgw
from common import (
    Cost,
    Figure,
    Pair,
    alone,
    environ,
    median_ratio,
    options,
    pairs,
    parser,
    peer,
    report,
    scratch,
    sides,
)

from cloudtrain.storage.timings import CLIENT_TIMINGS

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("tests", "tests/kit")]

SMALL, SMALL_BYTES = 2_000, 8 << 10
LARGE, LARGE_BYTES = 64, 8 << 20
BIG = 1 << 30
MEMORY = 300e6
SPREAD = 20e6
S5CMD = "0.3.3"
FSSPEC_PEERS = {"s3fs": "2026.9.0", "adlfs": "2026.8.0"}
CLOCK = """
import json, resource, sys, time
def usage(): u = resource.getrusage(resource.RUSAGE_SELF); return u.ru_utime + u.ru_stime
def begin(): global began, spent; began, spent = time.perf_counter(), usage()
def end():
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"wall": time.perf_counter() - began, "cpu": usage() - spent, "rss": rss}))
verb, url, path = sys.argv[1:4]
"""
OURS = """
from pathlib import Path
from cloudtrain.storage.files import files, parallel
from cloudtrain.storage.local_disk import walk
tree = files(url)
tree.names("nothing")
begin()
if verb == "up": parallel(lambda item: tree.upload(item[1], f"t/{item[0]}"), list(walk(Path(path)).items()))
elif verb == "down": tree.download_tree("t", Path(path))
elif verb == "put": tree.upload(Path(path), sys.argv[4])
else: tree.download(sys.argv[4], Path(path), size=int(sys.argv[5]))
end()
"""
BUNDLE = """
from pathlib import Path
from cloudtrain.job.bundle import build_bundle
from cloudtrain.job.job import Source
from cloudtrain.storage.files import files
tree = files(url)
tree.names("nothing")
begin()
bundle = build_bundle(Source(path=path, entry_point="train.py"), cwd=Path(path))
tree.write(f"code/{bundle.digest}/code.tar.gz", bundle.archive())
end()
"""
AGAIN = """
from pathlib import Path
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout
from cloudtrain.store.store import Store
store = Store(url)
job = Job.make(entry_point="train.py", inputs={"train": path})
def stage():
    _, trees = store.inputs(job, frozenset({"s3"}), run_id="r", cwd=Path(path))
    layout = Layout(store=store.url, run_id="r", code_digest="c", runtime_digest="d")
    return store.stage(layout, archive=lambda: b"code", pyz=b"pyz", trees=trees)
stage()
begin()
assert stage().data_bytes == 0
end()
"""
FSSPEC = """
import fsspec.core
fs, root = fsspec.core.url_to_fs(url)
with __import__("contextlib").suppress(FileNotFoundError): fs.ls(root + "/nothing")
begin()
if verb == "up": fs.put(path + "/", root + "/t/", recursive=True)
else: fs.get(root + "/t/", path + "/", recursive=True)
end()
"""


class Place:
    """A server's URL, the environment that leads to it, and a folder for uploads and downloads."""

    def __init__(self, folder: Path, url: str, words: Mapping[str, str]) -> None:
        self.folder, self.url = folder, url
        self.environ = {k: v for k, v in environ(words).items() if k not in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")}
        self._count = 0

    def fresh(self) -> str:
        """Return a new, empty URL."""
        self._count += 1
        return f"{self.url}/{self._count}"

    def cost(self, code: str, *words: str, python: str | Path = sys.executable) -> Cost:
        """Measure the time between ``begin`` and ``end``."""
        command = [str(python), "-c", CLOCK + code, *words]
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return Cost(**json.loads(done.stdout))

    def whole(self, command: Sequence[str]) -> Cost:
        """Measure a program from its start."""
        return alone(command, env=self.environ)

    def fetched(self, source: Path, fetch: Callable[[Path], Cost]) -> Cost:
        """Measure ``fetch`` into an empty folder, and check that it brings the content of ``source``.

        Nothing is deleted meanwhile: ext4 skips inodes that were deleted in the last seconds, but scans all of them for
        every new file. The disk has written all earlier data.
        """
        target = self.folder / f"fetched{self._count}"
        self._count += 1
        target.mkdir()
        os.sync()
        cost = fetch(target)
        names = sorted(path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
        _, wrong, missing = filecmp.cmpfiles(source, target, names, shallow=False)
        if wrong or missing:
            raise RuntimeError(f"fetched {len(wrong)} files wrong, {len(missing)} not at all")
        for name in names:
            os.truncate(target / name, 0)  # the next download needs the memory
        return cost


def main() -> int:
    flags = parser(__doc__, count=5, quick=1)
    flags.add_argument("--only", choices=ROWS, action="append", help="some of the rows")
    chosen = options(flags)
    rows = chosen.only or ROWS
    figures: list[Figure] = []
    with scratch() as folder:
        for name in rows:
            if name in S3_ROWS:
                with s3(folder / name) as place:
                    figures += S3_ROWS[name](place, chosen.pairs)
        if "azure" in rows:
            figures += azure_rows(folder, chosen.pairs)
        if "memory" in rows:
            figures += memory(folder, (1,) if chosen.quick else (1, 4, 20))
    return report(figures, as_json=chosen.json)


# -------------------------------------------------------------------------------------------------------------- servers


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[Place]:
    """Give a separate server for each row: it keeps all uploads in memory, at most 13 GiB."""
    with radosgw(folder / "ceph", memory=16 << 30) as endpoint:
        place = Place(folder / "s3", "s3://bucket", {**account(folder, endpoint), "S3_ENDPOINT_URL": endpoint})
        place.folder.mkdir(parents=True)
        make = "import boto3; boto3.client('s3').create_bucket(Bucket='bucket')"
        subprocess.run([sys.executable, "-c", make], env=place.environ, check=True)
        yield place


def account(folder: Path, endpoint: str) -> dict[str, str]:
    """Return the environment of a caller with none of this machine's own credentials."""
    nowhere = str(folder / "none")
    words = {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET, "DEFAULT_REGION": "us-east-1"}
    words |= {"EC2_METADATA_DISABLED": "true", "CONFIG_FILE": nowhere, "SHARED_CREDENTIALS_FILE": nowhere}
    return {f"AWS_{name}": value for name, value in words.items()}


@contextlib.contextmanager
def azure(folder: Path) -> Iterator[Place]:
    from servers import AZURITE_ACCOUNT, AZURITE_KEY, azurite, free_port, served

    program, port = azurite(), free_port()
    if program is None:
        raise SystemExit("Azurite is not installed; run tests/azurite.sh")
    where = folder / "azurite"
    where.mkdir(parents=True)
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(where), "--silent"]
    endpoint = f"http://127.0.0.1:{port}/{AZURITE_ACCOUNT}"
    string = (
        f"DefaultEndpointsProtocol=http;AccountName={AZURITE_ACCOUNT};AccountKey={AZURITE_KEY};BlobEndpoint={endpoint};"
    )
    with served([*command, "--skipApiVersionCheck", "--disableTelemetry"], port, where / "log"):
        place = Place(folder / "azure", "abfs://held", {"AZURE_STORAGE_CONNECTION_STRING": string})
        place.folder.mkdir()
        make = "import os; from azure.storage.blob import BlobServiceClient as B\n"
        make += "B.from_connection_string(os.environ['AZURE_STORAGE_CONNECTION_STRING']).create_container('held')"
        subprocess.run([sys.executable, "-c", make], env=place.environ, check=True)
        yield place


# ----------------------------------------------------------------------------------------------------------------- rows


def made(folder: Path, count: int, size: int) -> Path:
    """Make a tree of files, the same for both sides."""
    if not folder.exists():
        for i in range(count):
            path = folder / f"part{i % 20:02d}" / f"{i:04d}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(size))
        (folder / "train.py").write_text("print('hello')\n")
    return folder


def tree(
    place: Place, count: int, *, what: str, files: int, size: int, other: str, up: float, down: float
) -> list[Figure]:
    """Compare ``files`` files of ``size`` bytes up and down with fsspec's file system ``other``."""
    source = made(place.folder / what, files, size)
    return [
        *sent(place, count, source, files=files, size=size, other=other, target=up),
        *came(place, count, source, files=files, size=size, other=other, target=down),
    ]


def python_of(other: str) -> Path:
    """Return the Python with fsspec's file system ``other``."""
    return peer(other, FSSPEC_PEERS[other]) / "bin" / "python"


def sent(place: Place, count: int, source: Path, *, files: int, size: int, other: str, target: float) -> list[Figure]:
    python = python_of(other)
    found = pairs(
        lambda: place.cost(OURS, "up", place.fresh(), str(source)),
        lambda: place.cost(FSSPEC, "up", place.fresh(), str(source), python=python),
        count=count,
    )
    cpu = 0.25 if files == SMALL and other == "s3fs" else None
    return ratios(f"{files:,} x {size >> 10:,} KiB up / {other}", found, target, cpu=cpu)


def came(place: Place, count: int, source: Path, *, files: int, size: int, other: str, target: float) -> list[Figure]:
    there, python = place.fresh(), python_of(other)
    place.cost(OURS, "up", there, str(source))
    found = pairs(
        lambda: place.fetched(source, lambda target: place.cost(OURS, "down", there, str(target))),
        lambda: place.fetched(source, lambda target: place.cost(FSSPEC, "down", there, str(target), python=python)),
        count=count,
    )
    return ratios(f"{files:,} x {size >> 10:,} KiB down / {other}", found, target)


def ratios(name: str, found: Sequence[Pair], target: float | None, *, cpu: float | None = None) -> list[Figure]:
    return [
        Figure(
            name=f"wall of {name}",
            value=median_ratio(found, "wall"),
            target=target,
            note=sides(found, "wall"),
            pairs=found,
        ),
        Figure(name=f"CPU of {name}", value=median_ratio(found, "cpu"), target=cpu, note=sides(found, "cpu")),
    ]


def bundle(place: Place, count: int) -> list[Figure]:
    source, python = made(place.folder / "small", SMALL, SMALL_BYTES), python_of("s3fs")
    found = pairs(
        lambda: place.cost(BUNDLE, "up", place.fresh(), str(source)),
        lambda: place.cost(FSSPEC, "up", place.fresh(), str(source), python=python),
        count=count,
    )
    return ratios(f"{SMALL:,} files as code, bundled, up / s3fs", found, 1 / 10)


def big(place: Place, count: int) -> list[Figure]:
    """Compare with s5cmd, both as whole programs."""
    program = str(peer("s5cmd", S5CMD) / "bin" / "s5cmd")
    source = place.folder / "big" / "file"
    source.parent.mkdir(exist_ok=True)
    with open(source, "wb") as out:
        for _ in range(BIG >> 20):
            out.write(os.urandom(1 << 20))
    ours = [sys.executable, "-c", CLOCK + OURS]
    sent = pairs(
        lambda: place.whole([*ours, "put", place.fresh(), str(source), "file"]),
        lambda: place.whole([program, "cp", str(source), f"{place.fresh()}/file"]),
        count=count,
    )
    there = place.fresh()
    place.whole([*ours, "put", there, str(source), "file"])
    came = pairs(
        lambda: place.fetched(
            source.parent, lambda to: place.whole([*ours, "get", there, str(to / "file"), "file", str(BIG)])
        ),
        lambda: place.fetched(source.parent, lambda to: place.whole([program, "cp", f"{there}/file", f"{to}/file"])),
        count=count,
    )
    source.unlink()
    return [*ratios("1 GiB up / s5cmd", sent, 1 / 0.9), *ratios("1 GiB down / s5cmd", came, 1 / 0.9)]


def again(place: Place, count: int) -> list[Figure]:
    """Measure the check of unchanged data before a second submit: seconds, after imports."""
    found = []
    for files, target in ((SMALL, 0.05), (10 * SMALL, 0.5)):
        source = made(place.folder / f"data{files}", files, SMALL_BYTES // 8)
        time.sleep(CLIENT_TIMINGS.digest_settled + 1)  # cloudtrain trusts no digest of a file written just now
        costs = [place.cost(AGAIN, "up", place.fresh(), str(source)) for _ in range(count)]
        value = statistics.median(cost.wall for cost in costs)
        found.append(Figure(name=f"unchanged {files:,} files staged again", value=value, target=target, unit="s"))
    return found


def azure_rows(folder: Path, count: int) -> list[Figure]:
    """Run each half on a separate server.

    Azurite scans all its blobs for each request. The remains of all pairs' uploads would be nine tenths of the cost of
    the downloads, for both sides alike.
    """
    found = []
    for what, files, size in (("small", SMALL, SMALL_BYTES), ("large", LARGE, LARGE_BYTES)):
        for half in (sent, came):
            with azure(folder / f"azure-{what}-{half.__name__}") as place:
                source = made(place.folder / what, files, size)
                found += half(place, count, source, files=files, size=size, other="adlfs", target=1 / 1.2)
    return found


@contextlib.contextmanager
def sink(folder: Path) -> Iterator[Place]:
    """Give a server that keeps nothing."""
    command = [sys.executable, "-c", "import sink; sink.serve()"]
    server = subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        place = Place(folder / "memory", "s3://bucket", account(folder, server.stdout.readline().strip()))
        place.folder.mkdir()
        yield place
    finally:
        server.kill()
        server.communicate()


def memory(folder: Path, sizes: Sequence[int]) -> list[Figure]:
    """Measure the peak memory of one file of so many GiB, up and down."""
    figures: list[Figure] = []
    peaks: dict[str, list[int]] = {"up": [], "down": []}
    with sink(folder) as place:
        path = place.folder / "sparse"
        for gib in sizes:
            with open(path, "wb") as out:
                out.truncate(gib << 30)
            size = str(gib << 30)
            peaks["up"].append(place.cost(OURS, "put", place.url, str(path), f"zeros-{size}").rss)
            peaks["down"].append(place.cost(OURS, "get", place.url, str(path), f"zeros-{size}", size).rss)
            path.unlink()
    for way, found in peaks.items():
        for gib, rss in zip(sizes, found, strict=True):
            figures.append(
                Figure(name=f"peak memory of {gib} GiB {way}", value=rss / 1e6, target=MEMORY / 1e6, unit="MB")
            )
        if len(found) > 1:
            spread = (max(found) - min(found)) / 1e6
            figures.append(Figure(name=f"its spread over sizes, {way}", value=spread, target=SPREAD / 1e6, unit="MB"))
    return figures


S3_ROWS: dict[str, Callable[[Place, int], list[Figure]]] = {
    "small": partial(tree, what="small", files=SMALL, size=SMALL_BYTES, other="s3fs", up=1 / 2.0, down=1 / 2.5),
    "bundle": bundle,
    "large": partial(tree, what="large", files=LARGE, size=LARGE_BYTES, other="s3fs", up=1 / 1.4, down=1 / 1.0),
    "big": big,
    "again": again,
}
ROWS = [*S3_ROWS, "azure", "memory"]


if __name__ == "__main__":
    sys.exit(main())
