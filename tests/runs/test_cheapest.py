"""Provider auto: the cheapest profile first, and a run that exists stays where it was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from cloudtrain import cli
from cloudtrain.errors import ConflictError, SpecError
from cloudtrain.job.job import Job
from cloudtrain.runs.fallback import plan_with_fallbacks
from cloudtrain.runs.submit import Plan
from cloudtrain.runs.summary import summary
from cloudtrain.settings.settings import Settings

AWS = {
    "provider": "sagemaker",
    "store": "s3://b/x",
    "sagemaker": {
        "region": "eu-west-1", "role": "arn:aws:iam::123456789012:role/Train", "prices": {"ml.g4dn.xlarge": 0.5},
    },
}  # fmt: skip
AZURE = {
    "provider": "azureml",
    "store": "abfs://runs@account.dfs.core.windows.net/x",
    "azureml": {
        "subscription_id": "0", "resource_group": "g", "workspace_name": "w", "environment": "azureml:torch:1",
        "prices": {"Standard_NC4as_T4_v3": 0.4},
    },
}  # fmt: skip
GOOGLE = {"provider": "vertex", "store": "gs://b/x", "vertex": {"project": "p", "location": "europe-west4"}}
CLUSTER = {"provider": "slurm", "store": "/shared/runs"}


def written(folder: Path, fallback: list[str], **profiles: Any) -> None:
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "cloudtrain.toml").write_text(tomli_w.dumps({"fallback": fallback, "profiles": profiles}))


def planned(folder: Path, *, preview: bool = True, run_id: str | None = None, **fields: Any) -> Plan:
    settings = Settings.load(environ={}, cwd=folder, provider="auto")
    job = Job.make(entry_point="train.py", **fields)
    return plan_with_fallbacks(job, settings=settings, cwd=folder, preview=preview, run_id=run_id)


@pytest.fixture
def clouds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = ["cluster", "aws", "google", "azure"]
    written(tmp_path, names, aws=AWS, azure=AZURE, google=GOOGLE, cluster=CLUSTER)
    return tmp_path


def test_the_cheapest_comes_first_then_the_others_and_an_unknown_price_last(clouds: Path) -> None:
    plan = planned(clouds, gpu="T4:1", instance_count=2)
    order = [plan.provider_name, *(item.provider_name for item in plan.fallbacks.further)]
    assert order == ["azureml", "sagemaker", "slurm"]
    assert [(row["profile"], row["usd_per_hour"]) for row in plan.ranking] == [
        ("azure", 0.8), ("aws", 1.0), ("cluster", None), ("google", None),
    ]  # fmt: skip
    assert [row["reason"] is None for row in plan.ranking] == [True, True, True, False]
    assert "image" in plan.ranking[-1]["reason"]
    text = summary(plan.document())
    assert "choice 1    azure azureml: about 0.80 USD an hour" in text
    assert "choice 3    cluster slurm: price unknown" in text
    assert "left out    google vertex: provider vertex: 1 setting is missing: image" in text
    assert plan.document()["ranking"] == [dict(row) for row in plan.ranking]


def test_a_plan_of_one_provider_has_no_ranking(clouds: Path) -> None:
    settings = Settings.load(environ={}, cwd=clouds, profile="azure", fallback="aws")
    plan = plan_with_fallbacks(Job.make(entry_point="train.py"), settings=settings, cwd=clouds, preview=True)
    assert "ranking" not in plan.document()


@pytest.mark.parametrize(
    ("fields", "fallback", "field", "why"),
    [
        ({"gpu": "Q9:1"}, ["aws", "azure"], "provider", "no profile takes the job (aws: resources.gpu: "),
        ({}, [], "provider", "has no profiles to choose from"),
        ({"resume_from": "r1"}, ["aws"], "resume_from", "auto chooses between stores"),
        ({}, ["aws", "gogle"], "fallback gogle", "no such profile"),
        ({}, ["aws", "aws2"], "store", "has a store of another profile"),
    ],
)
def test_what_cannot_be_ranked_is_refused(
    tmp_path: Path, fields: dict[str, Any], fallback: list[str], field: str, why: str
) -> None:
    written(tmp_path, fallback, aws=AWS, aws2=AWS, azure=AZURE)
    with pytest.raises(SpecError) as caught:
        planned(tmp_path, **fields)
    assert caught.value.field == field
    assert why in str(caught.value)
    if not fallback:
        assert caught.value.hint == "list them: --fallback aws,aws2,azure"


def test_auto_is_no_setting_and_no_provider(tmp_path: Path) -> None:
    written(tmp_path, ["aws"], aws=AWS)
    with pytest.raises(SpecError, match="CLOUDTRAIN_PROVIDER"):
        Settings.load(environ={"CLOUDTRAIN_PROVIDER": "auto"}, cwd=tmp_path)
    with pytest.raises(SpecError, match="for plan and submit of one job"):
        Settings.load(environ={}, cwd=tmp_path, provider="auto").make_provider()


def of_machines(folder: Path, one: float, two: float) -> None:
    """Write two profiles on this machine with these prices."""
    places = {
        name: {"provider": "local", "store": str(folder / name), "local": {"prices": {"localhost": price}}}
        for name, price in (("one", one), ("two", two))
    }
    written(folder, ["one", "two"], **places)


@pytest.mark.slow
def test_a_run_starts_at_the_cheapest_and_stays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    of_machines(tmp_path, 2.0, 1.0)
    command = ["submit", "train.py", "--provider", "auto", "--run-id", "r1", "--json"]
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["run"] == f"file://{tmp_path}/two/runs/r1"
    assert "choice 1: two local: about 1.00 USD an hour" in err
    assert f"next: cloudtrain pull r1 --store file://{tmp_path}/two\n" in err
    of_machines(tmp_path, 1.0, 2.0)
    assert cli.main(command) == 0
    assert json.loads(capsys.readouterr().out)["run"] == f"file://{tmp_path}/two/runs/r1"
    assert not (tmp_path / "one" / "runs").exists()


def test_a_run_of_a_profile_that_now_refuses_is_not_started_elsewhere(tmp_path: Path) -> None:
    """Its job may still run there."""
    of_machines(tmp_path, 1.0, 2.0)
    folder = tmp_path / "one" / "runs" / "r1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    places = {name: {"provider": "local", "store": str(tmp_path / name), "local": {}} for name in ("one", "two")}
    places["one"]["local"] = {"nosuch": 1}
    written(tmp_path, ["one", "two"], **places)
    with pytest.raises(SpecError, match="profile one"):
        planned(tmp_path, preview=False, run_id="r1")
    assert planned(tmp_path, preview=False, run_id="r2").ranking[1]["reason"]


@pytest.mark.parametrize(
    ("given", "field"),
    [({"store": "s3://other/x"}, "store"), ({"overrides": {"role": "arn:aws:iam::1:role/x"}}, "--set role")],
)
def test_a_store_or_setting_of_the_command_is_refused(tmp_path: Path, given: dict[str, Any], field: str) -> None:
    written(tmp_path, ["azure"], aws=AWS, azure=AZURE)
    settings = Settings.load(environ={}, cwd=tmp_path, provider="auto", profile="aws", **given)
    with pytest.raises(SpecError, match="auto chooses between profiles") as caught:
        plan_with_fallbacks(Job.make(entry_point="train.py"), settings=settings, cwd=tmp_path, preview=True)
    assert caught.value.field == field


def test_a_profile_with_a_budget_is_no_choice(tmp_path: Path) -> None:
    written(tmp_path, ["aws", "azure"], aws={**AWS, "budget": "team"}, azure=AZURE)
    with pytest.raises(SpecError, match="profile aws has one") as caught:
        planned(tmp_path)
    assert caught.value.field == "budget"


def test_a_run_that_began_in_a_store_that_is_not_listed_is_not_started_again(tmp_path: Path) -> None:
    of_machines(tmp_path, 1.0, 2.0)
    folder = tmp_path / "two" / "runs" / "r1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"protocol": 1, "first": "s3://gone/runs/r1"}))
    with pytest.raises(ConflictError, match="began at s3://gone/runs/r1"):
        planned(tmp_path, preview=False, run_id="r1")
