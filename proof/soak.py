"""Real clients against all platforms at once, under faults: `test_soak` runs this for seconds, the proof for half an
hour.

Every trial is one small job with a plan drawn by the seed: its place, its nodes, the kills of its client and of a node,
and its cancel. Clients are the console script in separate processes. Proxies between them and their stores break
connections (`Proxy`), and the FakePlatforms' switches break the platforms' APIs. The checks read the FakePlatforms and
the stores directly.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from containers import left
from faulty_proxy import Proxy
from jobs import CLI, Jobs
from worlds.azureml import wire as azure_wire
from worlds.azureml.world import AzureMLWorld
from worlds.sagemaker import wire as aws_wire
from worlds.sagemaker.world import SageMakerWorld
from worlds.vertex import wire as google_wire
from worlds.vertex.world import VertexWorld

from cloudtrain.runs.run import Run, open_run
from cloudtrain.storage.local_disk import TEMP

PATIENCE = 900.0
"""Seconds until a trial counts as lost. `patiently` asks for a minute at a time. A client that dies while it creates a
job holds its lease for five; two may do so."""
TOGETHER = 3
"""Trials at a time, on two cores."""
EVERY = 10
"""Steps between two checkpoints."""
LINES = re.compile(r"line (\d+) of (\d+)")
SCRIPT = f"""
import os, sys, time
from pathlib import Path
rank, steps, pause = os.environ["NODE_RANK"], int(sys.argv[1]), float(sys.argv[2])
begun = os.environ.get("CLOUDTRAIN_RESUME_FROM")
first = int(Path(begun).name.removeprefix("step-")) if begun else 0
for step in range(first + 1, steps + 1):
    print("line", step, "of", rank, flush=True)
    if step % {EVERY} == 0:
        folder = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "step-" + str(step))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("state-" + rank)).write_text((str(step) + " of " + rank + "\\n") * 500)
    time.sleep(pause)
"""


def state(step: int, node: str) -> str:
    """Return the content that the script writes into a checkpoint."""
    return f"{step} of {node}\n" * 500


# ---------------------------------------------------------------------------------------------------------- the places


@dataclass
class Place:
    """A place for trials: ``flags`` and ``environ`` lead a client there, ``natives`` returns the ids of all its
    jobs."""

    name: str
    store: str
    flags: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    world: Any = None

    def natives(self) -> list[str]:
        """Return the ids of a FakePlatform's jobs, as the provider writes them."""
        jobs = self.world.plane.jobs
        if self.name == "sagemaker":
            return [str(job.arn) for job in jobs.values()]
        if self.name == "azureml":
            return [f"{self.world.plane.id}/jobs/{name}" for name in jobs]
        return list(jobs)

    def api_fault(self, draw: random.Random, *, creating: bool) -> str:
        """Break the next calls of some operation, perhaps the creation of a job. Return the fault's name.

        Return an empty name if calls of that operation already have a fault: too many would block it for ever.
        """
        kinds: dict[str, tuple[Any, tuple[str, ...], str]] = {
            "sagemaker": (aws_wire.Fault, ("FilterLogEvents", "DescribeTrainingJob"), "CreateTrainingJob"),
            "azureml": (azure_wire.Fault, ("GET details", "GET run", "GET job"), "PUT job"),
            "vertex": (google_wire.Fault, ("POST entries", "GET customJob"), "POST customJobs"),
        }
        fault, reads, creates = kinds[self.name]
        operation = draw.choice([*reads, reads[0], *([creates] if creating else [])])
        kind = draw.choice(["throttled", "broken", "cut", "answer lost"])
        times = draw.randrange(1, 4)
        if any(item.operation == operation and item.times > 0 for item in self.world.plane.wire.faults):
            return ""
        made = {
            "throttled": lambda: fault.throttled(operation, times),
            "broken": lambda: fault.broken(operation, times),
            "cut": lambda: fault(operation, None, times),
            "answer lost": lambda: fault(operation, None, 1, True),
        }[kind]()
        self.world.plane.wire.faults.append(made)
        what = "creation" if operation == creates else "log API" if operation == reads[0] else "status API"
        return f"{what}: {kind}"


# ---------------------------------------------------------------------------------------------------------- one trial


class Trial:
    """One run, from its first client to its result."""

    def __init__(self, soak: Soak, number: int, place: Place) -> None:
        draw = self.draw = random.Random(f"{soak.seed} trial {number}")
        self.soak, self.place, self.id = soak, place, f"t{number}-{place.name}"
        self.nodes, self.steps = draw.choice([1, 1, 2]), draw.choice([20, 40, 60])
        if soak.short:
            self.nodes, self.steps = 1, 40
        words = ["--nodes", str(self.nodes), "--launcher", "python", "--retries", "3", "--max-runtime", "20m"]
        words += ["--provider", place.name, "--store", place.store, "--run-id", self.id, "--json", *place.flags]
        script = ["--", str(self.steps), str(draw.choice([0.05, 0.2]))]
        self.words = ["submit", "train.py", *words, *(["--detach"] if draw.random() < 0.3 else []), *script]
        self.began = time.monotonic()
        kills, latest = (1, 1) if soak.short else (draw.choice([0, 1, 1, 2, 3]), 25)
        self.client_kills = sorted(draw.uniform(0, latest) for _ in range(kills))
        self.node_kill = draw.uniform(0.0, 8.0) if draw.random() < 0.35 and not soak.short else None
        self.cancel_at = draw.uniform(0, 20) if draw.random() < 0.1 else None
        self.running: float | None = None
        self.killed_nodes = 0
        self.cancelled = False
        self.client: subprocess.Popen[str] | None = None
        self.follower: subprocess.Popen[str] | None = None
        self.said = ""
        self.started = 0
        self._next = 0.0

    @property
    def age(self) -> float:
        return time.monotonic() - self.began

    @property
    def _clock(self) -> float:
        """Return the time by which clients are killed. A short trial's time starts with its job."""
        if not self.soak.short:
            return self.age
        return 0.0 if self.running is None else time.monotonic() - self.running

    def handle(self) -> Run | None:
        """Return the run once it is recorded, read past all faults."""
        with contextlib.suppress(Exception):
            return open_run(self.id, store_url=self.place.store)
        return None

    def step(self) -> bool:
        """Take the steps that are due. Return True if the trial is over."""
        if self.client is not None and self.client.poll() is None:
            if self.client_kills and self._clock > self.client_kills[0] and not self.soak.calm:
                self.client_kills.pop(0)
                os.killpg(self.client.pid, signal.SIGKILL)
                self._end_client()
                self.soak.count["client killed"] += 1
        elif self.client is not None:
            self._end_client()
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + 0.5
        run = self.handle()
        result = run.store.result(self.id) if run is not None else None
        if self.client is None and result is not None:
            return self.follower is None or self.follower.poll() is not None
        if self.client is None:
            self._begin(run)
        if run is not None:
            self._strike(run)
        if self.age > PATIENCE:
            raise AssertionError(f"{self.id}: no result after {PATIENCE:.0f} s; its client: {self.said[-1500:]}")
        return False

    def _begin(self, run: Run | None) -> None:
        """Start the next client: the same command again, or a command for an existing run.

        A run that was never sent gets no `wait`, which would only ask for the same command for ten minutes.
        """
        again = [["wait", self.id, "--store", self.place.store, "--json"], ["reconcile", self._url, "--json"]]
        if run is None or not self.started:
            again = []
        elif run.store.submitted(self.id, 0) is None:
            again = again[1:]
        self.client = self._start(*self.draw.choice([self.words, *again]))
        self.started += 1
        if run is not None and self.follower is None and self.draw.random() < 0.5:
            self.follower = self._start("logs", "-f", self.id, "--store", self.place.store, "--json")

    @property
    def _url(self) -> str:
        return f"{self.place.store}/runs/{self.id}"

    def _start(self, *words: str) -> subprocess.Popen[str]:
        out = open(self.soak.folder / "out" / f"{self.id}-{uuid.uuid4().hex[:6]}", "w+")  # noqa: SIM115 - closed below
        environ = {**self.soak.jobs.environ, **self.place.environ, "SOAK_RUN": self.id}
        process = subprocess.Popen(
            [*CLI, *words], cwd=self.soak.jobs.code, env=environ, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        out.close()
        process.args = out.name  # path of its output
        return process

    def _end_client(self) -> None:
        assert self.client is not None
        self.client.wait()
        self.said += Path(str(self.client.args)).read_text(errors="replace")
        self.client = None
        self._next = time.monotonic() + self.draw.choice([0.0, 0.5, 3.0])

    def _strike(self, run: Run) -> None:
        if self.soak.calm:
            return
        if self.cancel_at is not None and self.age > self.cancel_at:
            self.cancel_at, self.cancelled = None, True
            subprocess.run(
                [*CLI, "cancel", self.id, "--store", self.place.store], cwd=self.soak.jobs.code, check=False,
                env={**self.soak.jobs.environ, **self.place.environ}, capture_output=True, timeout=PATIENCE,
            )  # fmt: skip
            self.cancelled = run.store.cancelled(self.id)
            self.soak.count["cancelled"] += self.cancelled
        if self.running is None and run.store.files.list(f"runs/{self.id}/live/attempts"):
            self.running = time.monotonic()
        if self.node_kill is None or self.running is None:
            return
        if time.monotonic() - self.running > self.node_kill:
            self.node_kill = None
            if self._kill_node(run, self.draw.randrange(self.nodes)):
                self.killed_nodes += 1
                self.soak.count["node killed"] += 1

    def _kill_node(self, run: Run, number: int) -> bool:
        """Kill a node. Return True if there was one."""
        if self.place.name == "local":
            for pid, line in self.soak.jobs.processes().items():
                theirs = (Jobs.variable(pid, "SOAK_RUN"), Jobs.variable(pid, "CLOUDTRAIN_ENGINE_NODE"))
                if "cloudtrain.pyz run " in line and theirs == (self.id, str(number)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        return True
            return False
        if self.place.name == "docker":
            found = self.soak.engine.containers(filters={"label": f"cloudtrain.run={self._url}"})
            for item in found[number : number + 1]:
                with contextlib.suppress(Exception):  # it may have ended just now
                    self.soak.engine.kill(item["Id"])
                    return True
            return False
        with contextlib.suppress(AssertionError, IndexError, KeyError):
            job = self.place.world.job(run, max(run.store.attempts(self.id)))
            if not job.over and job.containers[number].poll() is None:
                job.lose(number)
                return True
        return False

    # ----------------------------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        run = self.handle()
        assert run is not None, self.id
        result = run.result()
        wanted = ("succeeded", "cancelled") if self.cancelled else ("succeeded",)
        assert result["state"] in wanted, f"{self.id}: {json.dumps(result, indent=1)}\n{self.said[-2000:]}"
        self._check_checkpoints(run)
        lines = [vars(line) for line in run.logs()]
        self._check_lines(run, lines, whole=result["state"] == "succeeded")
        if self.follower is not None:
            text = Path(str(self.follower.args)).read_text()
            rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"attempt"')]
            self.soak.count["followers that saw it to its end"] += self.follower.wait() == 0
            self._check_lines(run, rows, whole=self.follower.wait() == 0 and result["state"] == "succeeded")

    def _check_checkpoints(self, run: Run) -> None:
        found = run.store.checkpoints(self.id)
        folder = self.soak.folder / "pulled" / self.id
        run.pull(folder)
        for item in found:
            for path, (size, digest) in item.files.items():
                data = run.store.files.read(f"{item.key}/{path}")
                assert (len(data), hashlib.sha256(data).hexdigest()) == (size, digest), f"{self.id}: {path}"
            there = {path.name: path.read_text() for path in (folder / "checkpoints" / item.name).iterdir()}
            wanted = {f"state-{n}": state(item.step or 0, str(n)) for n in range(self.nodes)}
            assert there == wanted, f"{self.id}: {item.name} has {sorted(there)}"
        self.soak.count["checkpoints verified"] += len(found)

    def _check_lines(self, run: Run, lines: Sequence[Mapping[str, Any]], *, whole: bool) -> None:
        """Check that each node of each attempt has every number once and in order, and as many as its exit record
        counts."""
        numbers: dict[tuple[str, str], list[int]] = defaultdict(list)
        steps: dict[tuple[str, str], list[int]] = defaultdict(list)
        for line in lines:
            if not line["attempt"]:
                continue
            key = (line["attempt"], str(line["node"]))
            assert line["seq"] or self.killed_nodes, f"{self.id}: {line['text']}"
            numbers[key] += [line["seq"]] if line["seq"] else []
            if match := LINES.fullmatch(line["text"]):
                steps[key].append(int(match[1]))
        for key, seen in numbers.items():
            assert seen == list(range(1, len(seen) + 1)), f"{self.id}: lines of {key} are {_gaps(seen)}"
        for key, seen in steps.items():
            assert seen == list(range(seen[0], seen[0] + len(seen))), f"{self.id}: steps of {key} are {_gaps(seen)}"
        for record in run.store.exits(self.id) if whole else ():
            key = (str(record["attempt"]), str(record["node"]))
            assert len(numbers[key]) == record["lines"], f"{self.id}: {key} wrote {record['lines']} lines"
        if whole:
            last = [seen[-1] for key, seen in steps.items() if seen]
            assert max(last) == self.steps, f"{self.id}: {steps}"
        self.soak.count["lines seen once"] += sum(map(len, numbers.values()))

    def close(self) -> None:
        for process in (self.client, self.follower):
            if process is not None:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _gaps(seen: Sequence[int]) -> str:
    wrong = [(a, b) for a, b in itertools.pairwise(seen) if b != a + 1]
    return f"{len(seen)} from {seen[0]}, then {wrong[:5]}"


# ------------------------------------------------------------------------------------------------------------- the soak


class Soak:
    """Trials on all ``places`` until time is up, and until their ends. ``count`` is the report.

    ``short`` trials have one node, a few steps, and a client that is killed while the job runs. No creation of a job
    gets a fault: a client that cannot tell if its job exists waits five minutes, too long for the suite.
    """

    def __init__(self, folder: Path, seed: str, engine: Any, *, short: bool = False) -> None:
        self.folder, self.seed, self.engine, self.short = folder, seed, engine, short
        self.draw, self.count, self.calm = random.Random(f"{seed} soak"), Counter[str](), False
        self.jobs = Jobs(folder)
        self.jobs.write("train.py", SCRIPT)
        self.scratch = Path(tempfile.mkdtemp(prefix="ct-soak-"))
        self.jobs.environ |= {"TMPDIR": str(self.scratch), "XDG_STATE_HOME": str(folder / "state")}
        (folder / "out").mkdir()
        self.places: list[Place] = []
        self.proxies: list[Proxy] = []
        self.trials: list[Trial] = []

    def proxy(self, target: str, one_in: int = 40) -> str:
        self.proxies.append(Proxy(target, random.Random(f"{self.seed} {target}"), one_in))
        return self.proxies[-1].url

    def run(self, seconds: float, least: int = 0) -> None:
        """Start trials for ``seconds``, and at least ``least`` of them. Wait for all of them."""
        until, number, active = time.monotonic() + seconds, 0, list[Trial]()
        next_fault = time.monotonic() + 1
        try:
            while active or time.monotonic() < until or number < least:
                more = time.monotonic() < until or number < least
                if more and len(active) < TOGETHER:
                    order = random.Random(f"{self.seed} places {number // len(self.places)}")
                    place = order.sample(self.places, len(self.places))[number % len(self.places)]
                    active.append(Trial(self, number, place))
                    self.trials.append(active[-1])
                    number += 1
                if not self.calm and time.monotonic() > next_fault:
                    next_fault = time.monotonic() + self.draw.uniform(0.5, 4.0)
                    worlds = [place for place in self.places if place.world is not None]
                    if kind := self.draw.choice(worlds).api_fault(self.draw, creating=not self.short):
                        self.count[kind] += 1
                for trial in [trial for trial in active if trial.step()]:
                    active.remove(trial)
                    trial.check()
                    self.count["runs"] += 1
                time.sleep(0.05)
            self.calm = True
            self._check_all()
        finally:
            for trial in self.trials:
                trial.close()

    def _check_all(self) -> None:
        for place in self.places:
            runs = [open_run(t.id, store_url=place.store) for t in self.trials if t.place is place]
            noted = [(run.run_id, k, run.store.submitted(run.run_id, k)) for run in runs for k in _numbers(run)]
            ids = [(run_id, str(item["native_id"])) for run_id, _, item in noted if item]
            if place.world is None:  # one supervisor has all attempts of a run
                ids = list(dict.fromkeys(ids))
                assert len({run_id for run_id, _ in ids}) == len(ids), ids
            natives = [native for _, native in ids]
            assert len(set(natives)) == len(natives), f"{place.name}: one job of two attempts: {ids}"
            if place.world is not None:
                there = place.natives()
                assert sorted(natives) == sorted(there), f"{place.name}: {ids} recorded, {there} exist"
            self.count["native jobs"] += len(ids)
            store = runs[0].store if runs else None
            keys = store.files.list() if store is not None else {}
            assert not [key for key in keys if TEMP in key or key.endswith(".tmp")], place.name
        self.jobs.gone(60)

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()
            self.count.update(proxy.count)
        self.jobs.close()

    def left(self) -> list[str]:
        """Return the remains after all ends: containers, networks, temporary files."""
        found = [f"{path}" for path in self.folder.rglob(f"{TEMP}*")]
        return found + [str(path) for path in self.scratch.iterdir()] + left(self.engine, self.folder)


def _numbers(run: Run) -> list[int]:
    return run.store.attempts(run.run_id)


def _settings(world: AzureMLWorld) -> str:
    """Return the cloudtrain.toml of a user with a cloud of their own."""
    settings = dict(world.settings)
    metadata = settings.pop("cloud_metadata")
    lines = ["[azureml]", *(f'{key} = "{value}"' for key, value in settings.items())]
    lines += ["[azureml.cloud_metadata]", *(f'{key} = "{value}"' for key, value in metadata.items())]
    return "\n".join(lines) + "\n"


def few_places(soak: Soak, *, image: str) -> Iterator[Callable[[], None]]:
    """Make the places that need no further server. Yield functions that close them."""
    draw = random.Random(f"{soak.seed} few habits")
    google = VertexWorld(soak.folder / "google", image=image)
    entries = google.plane.entries
    entries.delay, entries.repeats, entries.page_entries = (lambda t, m: draw.choice([0, 0, 1.5])), 2, 40
    flags = ["--image", image, *(w for k, v in google.settings.items() for w in ("--set", f"{k}={v}"))]
    environ = {**google.plane.environ(), "STORAGE_EMULATOR_HOST": soak.proxy(google.plane.url)}
    soak.places.append(Place("vertex", google.store, flags, environ, google))
    yield google.close
    soak.places.append(Place("local", str(soak.folder / "local"), []))


def places(soak: Soak, *, moto: str, azurite: str, image: str) -> Iterator[Callable[[], None]]:
    """Make every place, with FakePlatforms whose logs come late and repeat. Yield functions that close them."""
    draw = random.Random(f"{soak.seed} habits")
    yield from few_places(soak, image=image)
    aws = SageMakerWorld(soak.folder / "aws", moto=moto, image=image)
    logs = aws.plane.logs()
    logs.delay, logs.repeats, logs.page_events, logs.empty_every = (lambda s, m: draw.choice([0, 0, 2.0])), 2, 40, 3
    aws.plane.sync_lag = 0.5
    flags = ["--image", aws.image, "--set", f"role={aws.provider.settings.role}"]
    there = {**aws.plane.environ(), "AWS_ENDPOINT_URL": soak.proxy(moto)}
    soak.places.append(Place("sagemaker", aws.store, flags, there, aws))
    yield aws.plane.close
    azure = AzureMLWorld(soak.folder / "azure", azurite=azurite, image=image)
    azure.plane.log_lag, azure.plane.log_bytes = 1.0, 2000
    found = re.search(r"BlobEndpoint=(http://[^/;]+)", azurite)
    assert found is not None
    broken = azurite.replace(found[1], soak.proxy(found[1]))
    environ = {**azure.plane.environ(), "AZURE_STORAGE_CONNECTION_STRING": broken}
    (soak.folder / "cloudtrain.toml").write_text(_settings(azure))
    soak.places.append(Place("azureml", azure.store, ["--image", azure.image], environ, azure))
    yield azure.close
    elsewhere = aws.store.rpartition("/")[0]
    soak.places.append(Place("docker", str(soak.folder / "docker"), ["--image", image]))
    soak.places.append(Place("local", f"{elsewhere}/local", [], there))
