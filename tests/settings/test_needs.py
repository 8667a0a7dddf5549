"""Missing settings before a submit: one error names them, with the lines to paste. A plan works without them."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from cloudtrain import Estimator, cli
from cloudtrain.errors import SpecError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import needs_of
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.settings.needs import snippet, stand_ins
from cloudtrain.settings.settings import Settings
from cloudtrain.validate import toml_loads

WANTED = {
    "sagemaker": ["store", "sagemaker.region", "sagemaker.role"],
    "azureml": [
        "store", "azureml.subscription_id", "azureml.resource_group", "azureml.workspace_name", "azureml.environment",
    ],
    "vertex": ["store", "vertex.project", "vertex.location", "image"],
    "slurm": ["store"],
    "kubernetes": ["store", "kubernetes.claim", "kubernetes.root", "image"],
    "modelarts": ["store", "modelarts.region", "modelarts.project_id", "image"],
}  # fmt: skip
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter a folder with a script, and with no settings anywhere."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    (tmp_path / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(tmp_path)


def pasted(hint: str) -> str:
    """Return the TOML lines of the hint."""
    return "\n".join(line for line in hint.splitlines() if re.match(r"\[|[a-z_]+ = ", line))


@pytest.mark.parametrize("provider", WANTED)
def test_one_error_names_all_that_is_missing(provider: str, capsys: Capture) -> None:
    assert cli.main(["submit", "train.py", "--provider", provider, "--json"]) == 2
    output = json.loads(capsys.readouterr().out)
    short = ", ".join(name.rpartition(".")[2] for name in WANTED[provider])
    many = {1: "1 setting is"}.get(len(WANTED[provider]), f"{len(WANTED[provider])} settings are")
    assert output["error"] == f"provider {provider}: {many} missing: {short}"
    table = toml_loads(pasted(output["hint"]), where="hint")
    found = {"store": table.pop("store"), **table.pop(provider, {})}
    assert {*found, *table} == set(short.split(", "))
    assert output["hint"].endswith(f"cloudtrain init --provider {provider}")
    assert not Path(".cloudtrain").exists()


@pytest.mark.parametrize("provider", WANTED)
def test_the_pasted_lines_are_all_it_takes(provider: str, capsys: Capture) -> None:
    assert cli.main(["submit", "train.py", "--provider", provider, "--json"]) == 2
    lines = pasted(json.loads(capsys.readouterr().out)["hint"]).splitlines()
    image = [line for line in lines if line.startswith("image")]
    Path("cloudtrain.toml").write_text("\n".join(line for line in lines if line not in image))
    Path("job.toml").write_text("\n".join(['entry_point = "train.py"', *image]))
    assert cli.main(["plan", "job.toml", "--provider", provider, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == []


@pytest.mark.parametrize("provider", WANTED)
def test_a_plan_has_placeholders_and_is_never_sent(provider: str, capsys: Capture) -> None:
    assert cli.main(["plan", "train.py", "--provider", provider, "--json"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^warning: .* settings? (is|are) missing: .*; this plan cannot be sent$", err, re.MULTILINE)
    assert "to send exactly this" not in err
    output = json.loads(out)
    assert output["missing"] == WANTED[provider]
    assert "missing-" not in json.dumps(output["request"])
    assert output["run"].partition("://")[2].removeprefix("/").startswith("<")
    Path("plan.json").write_text(out)
    assert cli.main(["submit", "--plan", "plan.json"]) == 2
    assert " missing: store" in capsys.readouterr().err


def test_placeholders_stand_where_the_values_would() -> None:
    plan = Estimator(entry_point="train.py", provider="sagemaker").plan()
    body = plan.document()["request"]["body"]
    assert body["RoleArn"] == "<role>"
    assert body["AlgorithmSpecification"]["TrainingImage"].startswith("763104351884.dkr.ecr.<region>.amazonaws.com/")
    assert body["CheckpointConfig"]["S3Uri"] == "s3://<bucket>/runs/train-plan/live/"
    assert plan.missing == ("store", "sagemaker.region", "sagemaker.role")


def test_a_plan_with_placeholders_is_refused_in_python() -> None:
    from cloudtrain.runs.submit import send_plan

    plan = Estimator(entry_point="train.py", provider="sagemaker").plan()
    with pytest.raises(SpecError, match="3 settings are missing"):
        send_plan(plan, environ={})


def test_only_what_is_missing_is_named(capsys: Capture) -> None:
    Path("cloudtrain.toml").write_text('store = "s3://b/p"\n[sagemaker]\nregion = "eu-west-1"\n')
    assert cli.main(["plan", "train.py", "--provider", "sagemaker", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "1 setting is missing: role" in err
    output = json.loads(out)
    assert output["run"] == "s3://b/p/runs/train-plan"
    assert "ecr.eu-west-1." in output["request"]["body"]["AlgorithmSpecification"]["TrainingImage"]


@pytest.mark.parametrize("provider", WANTED)
def test_a_store_that_stands_for_none_is_refused(provider: str, capsys: Capture) -> None:
    """No node would see the folder, and no account has the bucket."""
    need = needs_of(find_provider(provider))["store"]
    for store in (need.stand_in, f"{need.stand_in}/more", f"file://{need.stand_in}"):
        if "://" in need.stand_in and store.startswith("file:"):
            continue
        assert cli.main(["plan", "train.py", "--provider", provider, "--store", store]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == f"error: store: {store!r} is what a plan shows if no store is set"
        assert lines[1].startswith(f'hint: for example store = "{need.example}"')


def test_an_image_does_for_an_environment(capsys: Capture) -> None:
    assert cli.main(["plan", "train.py", "--provider", "azureml", "--image", "team/i:1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == WANTED["azureml"][:-1]


def test_a_fallback_says_what_it_lacks(capsys: Capture) -> None:
    Path("cloudtrain.toml").write_text('provider = "sagemaker"\n[profiles.gcp]\nprovider = "vertex"\n')
    assert cli.main(["plan", "train.py", "--fallback", "gcp", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [item["missing"] for item in json.loads(out)["fallbacks"]] == [WANTED["vertex"]]
    assert err.count("this plan cannot be sent") == 2
    assert "[profiles.gcp]\n      store =" in err
    assert "[profiles.gcp.vertex]\n" in err


def test_lines_for_a_pyproject_are_in_its_table() -> None:
    lines = snippet("sagemaker", WANTED["sagemaker"], file="/x/pyproject.toml").splitlines()
    assert lines[0] == "add to pyproject.toml:"
    tool = toml_loads(pasted("\n".join(lines)), where="hint")["tool"]
    assert set(tool["cloudtrain"]) == {"store", "sagemaker"}


@pytest.mark.parametrize("provider", WANTED)
def test_stand_ins_are_not_examples(provider: str) -> None:
    """A value that the user pasted must not be shown as a placeholder."""
    needs = needs_of(find_provider(provider))
    settings, made, job = stand_ins(Settings(), provider, Job.make(entry_point="t.py"), list(needs))
    for name, need in needs.items():
        owner = {"store": settings, "image": job}.get(name, made.settings)
        assert getattr(owner, name.rpartition(".")[2]) not in ("", None, need.example)


# ---------------------------------------------------------------------------------------------------------------- init


@pytest.mark.costly
def test_init_writes_what_a_plan_needs(capsys: Capture) -> None:
    flags = ["--set", "region=eu-west-1", "--set", "role=arn:aws:iam::123456789012:role/T"]
    assert cli.main(["init", "--provider", "sagemaker", "--store", "s3://b/p", *flags, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in output["files"]] == ["wrote"] * 3
    assert output["missing"] == []
    assert cli.main(["plan", "job.toml", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["provider"], plan["missing"], plan["run"]) == ("sagemaker", [], "s3://b/p/runs/train-plan")


@pytest.mark.parametrize("provider", [*WANTED, pytest.param("local", marks=pytest.mark.slow), "docker"])
def test_init_without_values_writes_them_as_comments(provider: str, capsys: Capture) -> None:
    assert cli.main(["init", "--provider", provider, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == WANTED.get(provider, [])
    for name in ("cloudtrain.toml", "job.toml"):
        toml_loads(Path(name).read_text(), where=name)
        bare = re.sub(r"(?m)^# (?=\w+ = )", "", Path(name).read_text())
        Path(name).write_text(re.sub(r"(?m)^gpu = .*", "", bare))
    assert cli.main(["plan", "job.toml", "--json", *(["--image", "i:1"] if provider == "docker" else [])]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == [], "each comment becomes a right line"


@pytest.mark.slow
def test_init_keeps_what_is_there(capsys: Capture) -> None:
    Path("pyproject.toml").write_text('[tool.cloudtrain]\nprovider = "local"\n')
    Path("job.toml").write_text('entry_point = "mine.py"\n')
    assert cli.main(["init", "--json"]) == 0
    rows = {row["path"]: row["status"] for row in json.loads(capsys.readouterr().out)["files"]}
    assert rows == {"pyproject.toml": "kept", "job.toml": "kept", ".cloudtrainignore": "wrote"}
    assert Path("job.toml").read_text() == 'entry_point = "mine.py"\n'
    assert not Path("cloudtrain.toml").exists()


def test_init_asks_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    answers = "\n".join(["sagmaker", "sagemaker", "gs://b", "s3://b/p", "eu-west-1", ""]) + "\n"
    terminal = io.StringIO(answers)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["init"]) == 0
    err = capsys.readouterr().err
    assert "no provider 'sagmaker'" in err
    assert "'gs://b' is not of the form s3://BUCKET/PREFIX" in err
    text = Path("cloudtrain.toml").read_text()
    table = toml_loads(text, where="cloudtrain.toml")
    assert table == {"provider": "sagemaker", "store": "s3://b/p", "sagemaker": {"region": "eu-west-1"}}
    assert "\n# role = " in text


def test_init_refuses_a_wrong_value_before_it_writes(capsys: Capture) -> None:
    assert cli.main(["init", "--provider", "vertex", "--set", "location=us"]) == 2
    assert "'us' is not a region" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["train.py"]


# -------------------------------------------------------------------------------------------------------------- doctor


@pytest.mark.slow
def test_doctor_looks_at_this_job(capsys: Capture) -> None:
    Path("job.toml").write_text('entry_point = "nope.py"\n')
    assert cli.main(["doctor", "job.toml", "--json"]) == 2
    failed = [row for row in json.loads(capsys.readouterr().out)["checks"] if row["status"] == "failed"]
    assert [row["name"] for row in failed] == ["plan"]
    assert "nope.py" in failed[0]["detail"]


@pytest.mark.parametrize("provider", [name for name in WANTED if name != "slurm"])  # slurm asks this machine's too
def test_doctor_has_one_finding_for_all_that_is_missing(provider: str, capsys: Capture) -> None:
    assert cli.main(["doctor", "train.py", "--provider", provider, "--json"]) == 2
    failed = [row for row in json.loads(capsys.readouterr().out)["checks"] if row["status"] == "failed"]
    assert [row["name"] for row in failed] == ["settings"]
    assert "settings are missing" in failed[0]["detail"]
    assert "settings are missing" not in failed[0]["fix"]
    assert failed[0]["fix"].startswith("add to cloudtrain.toml:\nstore = ")


@pytest.mark.parametrize(
    ("argv", "hint"), [(["sagmaker"], "doctor sagemaker"), (["trian"], "doctor train.py"), (["xyzzy"], "name one of")]
)
def test_doctor_of_what_there_is_none(argv: list[str], hint: str, capsys: Capture) -> None:
    assert cli.main(["doctor", *argv]) == 2
    err = capsys.readouterr().err
    assert f"{argv[0]!r} is neither a provider nor a file here" in err
    assert hint in err
