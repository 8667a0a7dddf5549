"""Fallback over the wire: between regions of AWS, between locations of Google Cloud, and from one cloud to the
other."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from earlier import Ran
from store_times import date_back
from worlds.sagemaker import wire as aws_wire
from worlds.sagemaker.world import SageMakerWorld
from worlds.vertex import wire as google_wire
from worlds.vertex.world import BUCKET, VertexWorld

from cloudtrain import cli
from cloudtrain.estimator import Estimator
from cloudtrain.runs.run import Run

pytestmark = [pytest.mark.remote]

REGIONS, LOCATIONS = ["eu-west-1", "eu-central-1"], ["europe-west4", "us-central1"]
AWS, GOOGLE = "sagemaker", "vertex"


class Clouds:
    """An account of AWS and a project of Google Cloud with two places each and no machines."""

    def __init__(self, tmp_path: Path, moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.aws = SageMakerWorld(tmp_path / "a", moto=moto, image="team/trainer:1", runs=False)
        self.google = VertexWorld(tmp_path / "g", image="team/none:1", log_drain=0)
        for plane in (self.aws.plane, self.google.plane):
            plane.capacity_seconds = 1e9
            for name, value in plane.environ().items():
                monkeypatch.setenv(name, value)
        self.aws.plane.crowded |= set(REGIONS)
        self.google.plane.crowded |= set(LOCATIONS)
        self.google.plane.others.add(LOCATIONS[1])
        self.google.plane.gcs.make("second-bucket", location="US-CENTRAL1")
        self.stores = {
            AWS: [self.aws.store, self.aws.store.replace("/store", "/second")],
            GOOGLE: [f"gs://{BUCKET}/store", "gs://second-bucket/store"],
        }
        self.code = tmp_path / "code"
        self.code.mkdir()
        (self.code / "train.py").write_text("print('hello')\n")
        aws = {"role": str(self.aws.provider.settings.role)}
        google = {"project": "contract", "log_drain": 0}
        google["service_account"] = str(self.google.provider.settings.service_account)
        profiles: dict[str, Any] = {}
        for name, key, regions in ((AWS, "region", REGIONS), (GOOGLE, "location", LOCATIONS)):
            for number, region in enumerate(regions):
                store = self.stores[name][number]
                profiles[f"{name}-{number}"] = {"provider": name, "store": store, name: {key: region}}
        (self.code / "cloudtrain.toml").write_text(tomli_w.dumps({AWS: aws, GOOGLE: google, "profiles": profiles}))
        monkeypatch.chdir(self.code)

    def words(self, provider: str, *more: str) -> list[str]:
        first, *others = [f"{name}-{number}" for name in provider.split(",") for number in (0, 1)]
        words = [
            "train.py",
            "--profile",
            first,
            "--fallback",
            ",".join(others),
            "--run-id",
            "r",
            "--max-runtime",
            "20m",
        ]
        words += ["--on", f"{AWS}.instance_type=ml.m5.xlarge", "--on", f"{GOOGLE}.image={self.google.image}", "--json"]
        return [*words, *more]

    def submit(self, provider: str, *more: str) -> int:
        return cli.main(["submit", "--detach", *self.words(provider, *more)])

    def attach(self, provider: str) -> Run:
        return Estimator.attach("r", store=self.stores[provider][0])

    def jobs(self) -> list[str]:
        """Return the places of the jobs that are not over."""
        aws = [region for (region, _), job in self.aws.plane.jobs.items() if not job.over]
        return aws + [name.split("/")[3] for name, job in self.google.plane.jobs.items() if not job.over]

    def long_ago(self, run: Run) -> None:
        date_back(run.store.files, "runs/r/attempts/0/submitted.json", 2 * 86400, self.patch)


@pytest.fixture
def clouds(tmp_path: Path, s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clouds]:
    made = Clouds(tmp_path, s3_environment, monkeypatch)
    yield made
    made.google.close()
    made.aws.close()


@pytest.mark.parametrize(("provider", "places"), [(AWS, REGIONS), (GOOGLE, LOCATIONS)])
def test_no_quota_in_one_region_leads_to_the_next(
    clouds: Clouds, provider: str, places: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (clouds.aws if provider == AWS else clouds.google).plane.capped.add(places[0])
    assert clouds.submit(provider) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert clouds.jobs() == [places[1]]
    assert answer["run"] == f"{clouds.stores[provider][1]}/runs/r"
    assert [(item["place"], item["category"]) for item in answer["refusals"]] == [(places[0], "quota")]
    assert f"{provider} {places[0]}: " in err
    run = clouds.attach(provider)
    assert (run.url, run.status().state) == (answer["run"], "pending")
    assert clouds.submit(provider) == 0, "the same command must find the run"
    assert clouds.jobs() == [places[1]]
    assert json.loads(capsys.readouterr().out)["run"] == answer["run"]
    run.cancel()
    clouds.attach(provider).wait(timeout=30, poll=0.1)
    assert clouds.jobs() == []


def test_a_type_that_a_region_lacks_leads_to_the_next(clouds: Clouds, capsys: pytest.CaptureFixture[str]) -> None:
    """Check this because AWS reports it with the code of a quota, though no quota helps."""
    clouds.aws.plane.absent.add(REGIONS[0])
    assert clouds.submit(AWS) == 0
    answer = json.loads(capsys.readouterr().out)
    assert clouds.jobs() == [REGIONS[1]]
    (refusal,) = answer["refusals"]
    assert (refusal["place"], refusal["category"]) == (REGIONS[0], "capacity")
    assert "another region or type" in refusal["reason"]


def resume_files(run: Run) -> dict[str, bytes]:
    """Return the files that the run's nodes resume from, by their paths below the checkpoint's name."""
    key = str(run.record["layout"]["resume"]).removeprefix(f"{run.store.url}/")
    (commit,) = [name for name in run.store.files.list(key) if name.endswith("/commit.json")]
    listed = json.loads(run.store.files.read(commit))["files"]
    return {path.split("/", 2)[2]: run.store.files.read(commit.replace("commit.json", path)) for path in listed}


def test_a_checkpoint_moves_along_and_a_moved_run_is_resumed_in_another_cloud(
    clouds: Clouds, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check with a client that cannot read the first run's store: only the submitting machine can."""
    theirs = clouds.code.parent / "theirs"
    saved = Ran(f"file://{theirs}").save(6)
    assert clouds.submit(GOOGLE, "--max-wait", "1h", "--resume-from", str(theirs / "runs/first")) == 0
    run = clouds.attach(GOOGLE)
    assert resume_files(run) == saved
    clouds.long_ago(run)
    shutil.rmtree(theirs)
    deadline = time.monotonic() + 60
    while not clouds.attach(GOOGLE)._handed_over:
        assert time.monotonic() < deadline
        assert cli.main(["reconcile", f"{clouds.stores[GOOGLE][0]}/runs/r"]) == 0, capsys.readouterr()
    assert clouds.jobs() == LOCATIONS[1:]
    moved = clouds.attach(GOOGLE)
    assert moved.url == f"{clouds.stores[GOOGLE][1]}/runs/r"
    assert resume_files(moved) == saved
    newer = Ran(moved.store.url, "r").save(8)
    words = [word if word != "r" else "s" for word in clouds.words(AWS)]
    first = f"{clouds.stores[GOOGLE][0]}/runs/r"
    assert cli.main(["submit", "--detach", *words, "--resume-from", first]) == 0
    resumed = Estimator.attach("s", store=clouds.stores[AWS][0])
    assert resumed.record["layout"]["resume_source"] == f"{moved.url}/live/checkpoints"
    assert resume_files(resumed) == newer


@pytest.mark.parametrize("provider", [AWS, GOOGLE])
def test_a_user_error_moves_no_run(clouds: Clouds, provider: str, capsys: pytest.CaptureFixture[str]) -> None:
    if provider == AWS:
        role = str(clouds.aws.provider.settings.role)
        clouds.aws.plane.wire.faults.append(aws_wire.Fault.denied("CreateTrainingJob", "iam:PassRole", role, times=9))
    else:
        clouds.google.plane.accounts.clear()
    assert clouds.submit(f"{AWS},{GOOGLE}" if provider == AWS else GOOGLE) == 3
    assert "refusals" not in json.loads(capsys.readouterr().out)
    assert clouds.jobs() == []


def test_a_create_whose_answer_is_lost_is_no_second_job_elsewhere(clouds: Clouds) -> None:
    """Check also that this holds when that very job has used up the quota for the second call."""
    plane = clouds.google.plane
    plane.wire.faults.append(google_wire.Fault("POST customJobs", done=True))
    assert clouds.submit(GOOGLE) == 0
    plane.capped.add(LOCATIONS[0])
    assert clouds.submit(GOOGLE) == 0
    assert clouds.jobs() == LOCATIONS[:1]
    assert clouds.attach(GOOGLE).url.startswith(clouds.stores[GOOGLE][0])


def test_a_plan_has_every_place_and_needs_no_network(clouds: Clouds, capsys: pytest.CaptureFixture[str]) -> None:
    before = [*clouds.aws.plane.wire.calls], [*clouds.google.plane.wire.calls]
    texts = []
    for _ in range(2):
        assert cli.main(["plan", *clouds.words(f"{AWS},{GOOGLE}")]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    plans = [json.loads(texts[0]), *json.loads(texts[0])["fallbacks"]]
    assert [plan["run"] for plan in plans] == [
        f"{store}/runs/r" for store in clouds.stores[AWS] + clouds.stores[GOOGLE]
    ]
    assert [plan["settings"].get("region") or plan["settings"]["location"] for plan in plans] == REGIONS + LOCATIONS
    assert before == ([*clouds.aws.plane.wire.calls], [*clouds.google.plane.wire.calls])
    (clouds.code.parent / "plan.json").write_text(texts[0])
    clouds.aws.plane.capped |= set(REGIONS)
    assert cli.main(["submit", "--plan", str(clouds.code.parent / "plan.json"), "--detach", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["provider"], [item["place"] for item in answer["refusals"]]) == (GOOGLE, REGIONS)
    assert clouds.jobs() == LOCATIONS[:1]
    assert clouds.attach(AWS).url == answer["run"], "the first URL must lead to the new place"
