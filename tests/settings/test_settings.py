"""Settings: the source of each, their precedence, and errors for unknown or ill-typed ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from foldercloud import NAME, install

from cloudtrain.cli import main
from cloudtrain.errors import NotFoundError, SpecError
from cloudtrain.settings.settings import FILE, Settings, misspelt_variables
from cloudtrain.storage.files import TransferOptions
from cloudtrain.validate import toml_loads


def load(folder: Path, toml: str | None = None, environ: dict[str, str] | None = None, **rest: Any) -> Settings:
    if toml is not None:
        (folder / FILE).write_text(toml, encoding="utf-8")
    return Settings.load(cwd=folder, environ=environ or {}, **rest)


def test_without_anything_the_defaults_hold(tmp_path: Path) -> None:
    found = load(tmp_path)
    assert (found.provider, found.store, found.max_code_mb) == ("local", "./.cloudtrain", 50)
    assert found.make_provider().settings.python == sys.executable  # type: ignore[attr-defined]


def test_how_bytes_move(tmp_path: Path) -> None:
    assert load(tmp_path).moving == TransferOptions(sse="", sse_kms_key_id="", concurrency=8)
    toml = 'sse = "aws:kms"\nsse_kms_key_id = "k"\n'
    assert load(tmp_path, toml).moving == TransferOptions(sse="aws:kms", sse_kms_key_id="k")
    assert load(tmp_path, toml, {"CLOUDTRAIN_SSE": "aws:kms:dsse"}).moving.sse == "aws:kms:dsse"
    assert load(tmp_path, "concurrency = 64\n").moving.concurrency == 64
    refused = (({"sse": "aes"}, "sse"), ({"sse": "AES256"}, "sse_kms_key_id"))
    refused += tuple(({"concurrency": text}, "concurrency") for text in ("0", "65"))
    refused += tuple(({"max_code_mb": text}, "max_code_mb") for text in ("0", "-1", "1" + "0" * 400))
    for wrong, field in refused:
        with pytest.raises(SpecError) as caught:
            _ = load(tmp_path, toml, overrides=wrong).moving
        assert caught.value.field == field


def test_each_source_wins_over_the_one_before(tmp_path: Path) -> None:
    toml = 'store = "file"\n'
    environ = {"CLOUDTRAIN_STORE": "environment"}
    overrides = {"store": "set"}
    assert load(tmp_path, toml).store == str(tmp_path / "file")  # a relative one is below the file's folder
    assert load(tmp_path, toml, environ).store == "environment"
    assert load(tmp_path, toml, environ, overrides=overrides).store == "set"
    assert load(tmp_path, toml, environ, overrides=overrides, store="given").store == "given"
    assert load(tmp_path, toml, environ, overrides=overrides, store=None).store == "set"
    assert overrides == {"store": "set"}  # the caller's own table is unchanged


def test_each_source_of_a_providers_settings_wins_over_the_one_before(tmp_path: Path) -> None:
    def python(given: dict[str, Any] | None = None, **rest: Any) -> str:
        made = load(tmp_path, '[local]\npython = "file"\n', **rest).make_provider("local", **(given or {}))
        return str(made.settings.python)  # type: ignore[attr-defined]

    environ = {"CLOUDTRAIN_LOCAL_PYTHON": "environment"}
    overrides = {"python": "set"}
    assert python() == "file"
    assert python(environ=environ) == "environment"
    assert python(environ=environ, overrides=overrides) == "set"
    assert python({"python": "given"}, environ=environ, overrides=overrides) == "given"


def test_an_entry_of_a_table_is_named_after_a_dot_and_leaves_the_others(tmp_path: Path) -> None:
    file = '[vertex.prices]\n"a" = 1.0\n"b" = 2\n"c.d" = 3\n'

    def prices(environ: dict[str, str] | None = None, **rest: Any) -> Any:
        return load(tmp_path, file, environ, **rest).make_provider("vertex").settings.prices  # type: ignore[attr-defined]

    environ = {"CLOUDTRAIN_VERTEX_PRICES": "b=20, n1-standard-4+T4:1=0.5"}
    overrides = {"prices.ml.p5.48xlarge": "98", "prices.a": "10"}
    assert prices() == {"a": 1.0, "b": 2, "c.d": 3}
    assert prices(environ) == {"a": 1.0, "b": 20.0, "c.d": 3, "n1-standard-4+T4:1": 0.5}
    assert prices(overrides=overrides) == {"a": 10.0, "b": 2, "c.d": 3, "ml.p5.48xlarge": 98.0}
    assert prices(overrides={"prices": "b=4"}) == {"a": 1.0, "b": 4.0, "c.d": 3}
    for wrong in ({"prices.x": "much"}, {"prices.x": "-1"}, {"prices": "x"}, {"pricse.x": "1"}):
        with pytest.raises(SpecError, match="prices"):
            prices(overrides=wrong)


def test_an_empty_variable_is_no_setting(tmp_path: Path) -> None:
    environ = {"CLOUDTRAIN_STORE": "", "CLOUDTRAIN_LOCAL_PYTHON": ""}
    found = load(tmp_path, 'store = "file"\n', environ)
    assert found.store == str(tmp_path / "file")
    assert found.make_provider().settings.python == sys.executable  # type: ignore[attr-defined]


def test_the_file_is_found_upwards_and_the_nearest_one_alone_counts(tmp_path: Path) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / FILE).write_text('store = "top"\nmax_code_mb = 7\n')
    assert load(below).store == str(tmp_path / "top")
    (tmp_path / "a" / FILE).write_text('store = "nearer"\n')
    assert (load(below).store, load(below).max_code_mb) == (str(tmp_path / "a" / "nearer"), 50)
    assert load(tmp_path).store == str(tmp_path / "top")


@pytest.mark.parametrize(
    ("toml", "environ", "overrides", "field", "message"),
    [
        ('stroe = "x"', {}, {}, f"{FILE} stroe", "did you mean 'store'?"),
        ("[lokal]\nx = 1", {}, {}, f"{FILE} [lokal]", "did you mean 'local'?"),
        ('max_code_mb = "much"', {}, {}, f"{FILE} max_code_mb", "must be int, not 'much'"),
        ("max_code_mb = true", {}, {}, f"{FILE} max_code_mb", "must be int"),
        ("store = 3", {}, {}, f"{FILE} store", "must be str, not 3"),
        ("", {"CLOUDTRAIN_MAX_CODE_MB": "x"}, {}, "CLOUDTRAIN_MAX_CODE_MB", "must be int, not 'x'"),
        ("", {}, {"max_code_mb": "1.5"}, "--set max_code_mb", "must be int, not '1.5'"),
    ],
)  # fmt: skip
def test_a_wrong_general_setting_is_named_with_its_source(
    tmp_path: Path, toml: str, environ: dict[str, str], overrides: dict[str, str], field: str, message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, toml, environ, overrides=overrides)
    assert caught.value.field == field
    assert message in f"{caught.value}; {caught.value.hint}"


@pytest.mark.parametrize(
    ("toml", "environ", "overrides", "field", "message"),
    [
        ('[local]\npyhton = "x"', {}, {}, f"{FILE} [local] pyhton", "did you mean 'python'?"),
        ("[local]\npython = 3", {}, {}, f"{FILE} [local] python", "must be str, not 3"),
        ("", {"CLOUDTRAIN_LOCAL_PYHTON": "x"}, {}, "CLOUDTRAIN_LOCAL_PYHTON", "mean 'CLOUDTRAIN_LOCAL_PYTHON'?"),
        ("", {}, {"role": "x"}, "--set role", "no such setting"),
        ("", {}, {"pyton": "x"}, "--set pyton", "did you mean 'python'?"),
    ],
)  # fmt: skip
def test_a_wrong_setting_of_a_provider_is_named_with_its_source(
    tmp_path: Path, toml: str, environ: dict[str, str], overrides: dict[str, str], field: str, message: str
) -> None:
    found = load(tmp_path, toml, environ, overrides=overrides)
    with pytest.raises(SpecError) as caught:
        found.make_provider("local")
    assert caught.value.field == field
    assert message in f"{caught.value}; {caught.value.hint}"


PROFILES = """
store = "base"
max_code_mb = 7

[local]
python = "base-python"

[foldercloud]
folder = "base"

[profiles.prod]
provider = "foldercloud"
store = "s3://prod/x"

[profiles.prod.foldercloud]
folder = "prod"

[profiles.empty]
"""


def test_a_profile_is_what_is_different_in_the_file(tmp_path: Path, cloud: str) -> None:
    base, prod = load(tmp_path, PROFILES), load(tmp_path, profile="prod")
    assert (base.provider, base.store, base.max_code_mb) == ("local", str(tmp_path / "base"), 7)
    assert (prod.provider, prod.store, prod.max_code_mb) == (NAME, "s3://prod/x", 7)
    assert prod.make_provider().settings.folder == "prod"  # type: ignore[attr-defined]
    assert prod.make_provider("local").settings.python == "base-python"  # type: ignore[attr-defined]
    assert load(tmp_path, profile="empty").store == base.store
    # The environment names one, and its other variables win over it; a flag names another one.
    environ = {"CLOUDTRAIN_PROFILE": "prod", "CLOUDTRAIN_STORE": "environment"}
    assert (load(tmp_path, environ=environ).provider, load(tmp_path, environ=environ).store) == (NAME, "environment")
    assert load(tmp_path, environ=environ, profile="empty").provider == "local"
    # The file itself may name one.
    assert load(tmp_path, 'profile = "prod"\n' + PROFILES).provider == NAME
    assert load(tmp_path, environ={"CLOUDTRAIN_PROFILE": "empty"}).provider == "local"


@pytest.mark.parametrize(
    ("toml", "profile", "field", "message"),
    [
        (PROFILES, "prdo", "profile prdo", "did you mean 'prod'?"),
        ("", "prod", "profile prod", "has no [profiles.prod]"),
        (None, "prod", "profile prod", "there is no cloudtrain.toml"),
        ("profiles = 3", "", f"{FILE} [profiles]", "must be a table"),
        ("[profiles]\nprod = 3", "", f"{FILE} [profiles.prod]", "must be a table"),
        ("profile = 3", "", f"{FILE} profile", "must be str, not 3"),
        ('[profiles.prod]\nstroe = "x"', "prod", f"{FILE} [profiles.prod] stroe", "did you mean 'store'?"),
        ("[profiles.prod.lokal]\nx = 1", "prod", f"{FILE} [profiles.prod.lokal]", "did you mean 'local'?"),
        ("[profiles.prod.local]\npython = 1", "prod", f"{FILE} [profiles.prod.local] python", "must be str"),
    ],
)  # fmt: skip
def test_a_wrong_profile_is_named(tmp_path: Path, toml: str | None, profile: str, field: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, toml, profile=profile or None).make_provider("local")
    assert caught.value.field == field
    assert message in f"{caught.value}; {caught.value.hint}"


def test_settings_in_a_pyproject(tmp_path: Path) -> None:
    """The nearest file with settings counts. A pyproject without any does not, nor does another tool's table."""
    below = tmp_path / "below"
    below.mkdir()
    text = '[tool.cloudtrain]\nstore = "st"\n[tool.cloudtrain.local]\npython = "p"\n[tool.cloudtrain.profiles.x]\n'
    (tmp_path / "pyproject.toml").write_text(text + "max_code_mb = 3\n")
    for other in ("[project]\nname = 'x'\n", "[tool.ruff\n", "[tool]\ncloudtrain_is_not_it = 1\n"):
        (below / "pyproject.toml").write_text(other)
        found = load(below)
        assert found.store == str(tmp_path / "st"), other
        assert found.make_provider().settings.python == "p"  # type: ignore[attr-defined]
        assert load(below, profile="x").max_code_mb == 3
    (below / "pyproject.toml").write_text("[tool.cloudtrain]\nstroe = 1\n")
    with pytest.raises(SpecError, match=r"pyproject.toml \[tool.cloudtrain\] stroe: no such setting"):
        load(below)
    (below / "pyproject.toml").write_text("[tool.cloudtrain.local]\npyton = 1\n")
    with pytest.raises(SpecError, match=r"pyproject.toml \[tool.cloudtrain.local\] pyton: no such setting"):
        load(below).make_provider()
    (below / FILE).write_text("")
    with pytest.raises(SpecError, match="holds settings too"):
        load(below)


def test_a_table_is_merged_by_entry_and_one_entry_may_be_set(tmp_path: Path) -> None:
    toml = "[sagemaker.prices]\na = 1.0\nb = 2.0\n[profiles.p.sagemaker.prices]\nb = 3.0\n"
    found = load(tmp_path, toml, profile="p", provider="sagemaker", overrides={"prices.ml.p5.48xlarge": "98"})
    assert found.of_provider("sagemaker")["prices"].value == {"a": 1.0, "b": 3.0, "ml.p5.48xlarge": 98}
    environ = {"CLOUDTRAIN_SAGEMAKER_PRICES": '{"c": 4}'}
    found = load(tmp_path, environ=environ, provider="sagemaker", overrides={"prices.d": "5"})
    assert found.of_provider("sagemaker")["prices"].value == {"a": 1.0, "b": 2.0, "c": 4, "d": 5}
    for wrong, field in (
        ({"environ": {"CLOUDTRAIN_SAGEMAKER_PRICES": "4"}}, "CLOUDTRAIN_SAGEMAKER_PRICES"),
        ({"overrides": {"region.x": "1"}}, "--set region.x"),
        ({"toml": "[sagemaker]\nprices = 4"}, f"{FILE} [sagemaker] prices"),
        ({"toml": "[sagemaker]\nsubnets = 4"}, f"{FILE} [sagemaker] subnets"),
        ({"toml": "[sagemaker]\nsubnets = [4]"}, f"{FILE} [sagemaker] subnets"),
    ):
        with pytest.raises(SpecError) as caught:
            load(tmp_path, **{"toml": "", **wrong}, provider="sagemaker").of_provider("sagemaker")  # type: ignore[arg-type]
        assert caught.value.field == field


FALLBACK = """
provider = "vertex"
store = "gs://eu/x"
fallback = ["us", "aws"]
[vertex]
project = "p"
location = "europe-west4"
[profiles.us]
store = "gs://us/x"
fallback = ["aws"]
[profiles.us.vertex]
location = "us-central1"
[profiles.aws]
provider = "sagemaker"
store = "s3://aws/x"
[profiles.aws.sagemaker]
region = "us-east-1"
profile = "aws-team"
"""


def test_a_fallback_starts_with_the_settings_and_goes_on_with_profiles(tmp_path: Path) -> None:
    environ = {
        "CLOUDTRAIN_STORE": "gs://ci/x", "CLOUDTRAIN_VERTEX_LOCATION": "asia-east1", "CLOUDTRAIN_VERTEX_PROJECT": "ci",
    }  # fmt: skip
    pairs = {"max_code_mb": 7, "location": "europe-west1"}
    first, us, aws = load(tmp_path, FALLBACK, environ, overrides=pairs).candidates()
    assert [own.store for own in (first, us, aws)] == ["gs://ci/x", "gs://us/x", "s3://aws/x"]
    assert [own.make_provider().settings.location for own in (first, us)] == ["europe-west1", "us-central1"]  # type: ignore[attr-defined]
    assert [own.make_provider().settings.project for own in (first, us)] == ["ci", "ci"]  # type: ignore[attr-defined]
    assert (aws.provider, aws.make_provider().settings.region) == ("sagemaker", "us-east-1")  # type: ignore[attr-defined]
    assert [own.max_code_mb for own in (first, us, aws)] == [7, 7, 7]
    assert [own.profile for own in load(tmp_path, profile="us").candidates()] == ["us", "aws"]
    assert [own.profile for own in load(tmp_path, fallback="aws, us").candidates()] == ["", "aws", "us"]
    assert [own.profile for own in load(tmp_path, environ={"CLOUDTRAIN_FALLBACK": "aws"}).candidates()] == ["", "aws"]
    assert load(tmp_path, fallback="").candidates() == (load(tmp_path, fallback=""),)


@pytest.mark.parametrize("variable", ["CLOUDTRAIN_STORE", "CLOUDTRAIN_SAGEMAKER_STORE"])
@pytest.mark.parametrize("table", ["[profiles.aws]", "[profiles.aws.sagemaker]"])
def test_a_fallback_keeps_the_store_that_its_profile_sets(tmp_path: Path, table: str, variable: str) -> None:
    """A profile may set its store in two tables, and a variable of either name does not override it."""
    text = f"""
provider = "sagemaker"
store = "s3://first/x"
fallback = ["aws", "other"]
[profiles.other.sagemaker]
region = "eu-west-1"
{table}
store = "s3://aws/x"
"""
    first, aws, other = load(tmp_path, text, {variable: "s3://ci/x"}).candidates()
    assert [own.store for own in (first, aws, other)] == ["s3://ci/x", "s3://aws/x", "s3://ci/x"]


def test_a_run_in_a_fallback_is_reached_with_that_profile_s_identity(tmp_path: Path) -> None:
    record = {"provider": "sagemaker", "settings": {"region": "eu-west-1"}, "run": "s3://aws/x/runs/r"}
    first, us, _ = load(tmp_path, FALLBACK).candidates()
    for own in (first, us, load(tmp_path, fallback="")):
        assert own.provider_of(record).settings.profile == "aws-team"  # type: ignore[attr-defined]
        assert own.provider_of({**record, "run": "s3://other/runs/r"}).settings.profile == ""  # type: ignore[attr-defined]


def test_a_run_keeps_its_encryption_where_it_continues(tmp_path: Path) -> None:
    found = load(tmp_path, 'concurrency = 3\nsse = "AES256"')
    recorded = {
        "moving": {"sse": "aws:kms", "sse_kms_key_id": "k", "concurrency": 9, "mover": "auto"}
    }  # of an earlier version
    assert found.moving_of(recorded) == TransferOptions(sse="aws:kms", sse_kms_key_id="k", concurrency=3)
    assert found.moving_of({}) == found.moving


@pytest.mark.parametrize(
    ("given", "error", "hint"),
    [
        ({"fallback": "awss"}, "fallback awss: no such profile in {file}", "did you mean 'aws'?"),
        ({"fallback": ["sagemaker"]}, "fallback sagemaker: no such profile in {file}",
         'sagemaker is a provider; write a profile with provider = "sagemaker"'),
        ({"fallback": "us,aws,us"}, "fallback: 'us' is listed twice", "use --fallback=us,aws"),
        ({"profile": "us", "fallback": "us,aws"}, "fallback: 'us' is the profile in use", "use --fallback=aws"),
        ({"profile": "us", "fallback": "us"}, "fallback: 'us' is the profile in use", "use --fallback="),
    ],
)  # fmt: skip
def test_a_wrong_fallback_is_refused(tmp_path: Path, given: dict[str, Any], error: str, hint: str) -> None:
    found = load(tmp_path, FALLBACK, **given)  # other verbs need no fallback
    with pytest.raises(SpecError) as caught:
        found.candidates()
    assert str(caught.value) == error.format(file=tmp_path / FILE)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    "line", ['provider = ["vertex"]', 'store = ["gs://us", "gs://eu"]', "[vertex]\nlocation = ['a', 'b']"]
)
def test_a_list_in_place_of_one_value_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(SpecError, match=r"must be one value, not the list \[") as caught:
        load(tmp_path, line).make_provider("vertex")
    assert "write a profile for each" in caught.value.hint


@pytest.mark.parametrize(
    "text", ["subnet-1,subnet-2", "subnet-1, subnet-2", '["subnet-1", "subnet-2"]', ' ["subnet-1","subnet-2"]']
)
def test_a_list_is_json_or_has_commas(tmp_path: Path, text: str) -> None:
    """Once, a list in JSON went into the request as text. AWS's pattern refused it without naming a setting."""
    for given in ({"overrides": {"sagemaker.subnets": text}}, {"environ": {"CLOUDTRAIN_SAGEMAKER_SUBNETS": text}}):
        found = load(tmp_path, provider="sagemaker", **given)  # type: ignore[arg-type]
        assert found.of_provider("sagemaker")["subnets"].value == ("subnet-1", "subnet-2")


def test_a_list_of_tables_from_every_source(tmp_path: Path) -> None:
    taint = {"key": "team", "operator": "Exists", "effect": "NoSchedule"}
    (tmp_path / FILE).write_text(
        '[kubernetes]\ntolerations = [{ key = "team", operator = "Exists", effect = "NoSchedule" }]'
    )
    text = json.dumps([taint])
    for given in (
        {},
        {"overrides": {"kubernetes.tolerations": text}},
        {"environ": {"CLOUDTRAIN_KUBERNETES_TOLERATIONS": text}},
    ):
        found = load(tmp_path, provider="kubernetes", **given)  # type: ignore[arg-type]
        assert found.of_provider("kubernetes")["tolerations"].value == (taint,)
    with pytest.raises(SpecError, match="must be a list of tables, not 'team'"):
        load(tmp_path, provider="kubernetes", overrides={"kubernetes.tolerations": "team"}).of_provider("kubernetes")


@pytest.mark.parametrize("text", ["[subnet-1]", '["subnet-1"', "[1]"])
def test_a_list_that_is_no_json_is_refused_at_once(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, provider="sagemaker", overrides={"sagemaker.subnets": text}).of_provider("sagemaker")
    assert caught.value.field == "--set sagemaker.subnets"
    assert '["one", "two"]' in str(caught.value) or "list of texts" in str(caught.value)


def test_config_says_each_value_and_where_it_was_found(
    tmp_path: Path, cloud: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FILE).write_text(PROFILES.replace("s3://prod/x", "s3://me:secret@prod/x?sig=abc"))
    monkeypatch.setenv("CLOUDTRAIN_MAX_CODE_MB", "9")
    assert main(["config", "--profile", "prod", "--set", "folder=set", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["file"], output["profile"], output["profiles"]) == (str(tmp_path / FILE), "prod", ["prod", "empty"])
    rows = {row["key"]: (row["value"], row["source"]) for row in output["settings"]}
    assert rows["provider"] == (NAME, f"{FILE} [profiles.prod]")
    assert rows["store"] == ("s3://prod/x", f"{FILE} [profiles.prod]")
    assert rows["max_code_mb"] == (9, "CLOUDTRAIN_MAX_CODE_MB")
    assert rows["concurrency"] == (8, "default")
    assert output["settings"][-1]["description"] == ""
    assert rows[f"{NAME}.folder"] == ("set", "--set")
    assert main(["config", f"{NAME}.folder", "--profile", "prod"]) == 0
    assert capsys.readouterr() == ("prod\n", "")
    assert main(["config", "concurrency"]) == 0
    assert capsys.readouterr() == ("8\n", "number of files to transfer at the same time, at most 64\n")
    assert main(["config"]) == 0
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()][:3] == [
        ["key", "value", "source"], ["provider", "local", "default"], ["store", str(tmp_path / "base"), FILE]
    ]  # fmt: skip
    assert err == f"read {tmp_path / FILE}\nother profiles: prod, empty\n"
    assert main(["config", "stor"]) == 2
    assert "did you mean 'store'?" in capsys.readouterr().err


@pytest.mark.costly
def test_every_verb_takes_a_profile(
    tmp_path: Path, cloud: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f'[profiles.team]\nprovider = "{NAME}"\nstore = "teams"\n[profiles.team.{NAME}]\nfolder = "{cloud}"\n'
    (tmp_path / FILE).write_text(text)
    team = ["--profile", "team"]
    assert main(["submit", "train.py", "--run-id", "r", "--detach", *team]) == 0
    out, err = capsys.readouterr()
    assert out == f"file://{tmp_path}/teams/runs/r\n"
    assert "next: cloudtrain logs -f r --profile team\n" in err
    for words in (
        ["status", "r"],
        ["list"],
        ["reconcile", "--json"],
        ["gc"],
        ["logs", "r"],
        ["pull", "r"],
        ["cancel", "r"],
    ):
        assert main([*words, *team]) == 0, capsys.readouterr().err
    assert main(["wait", "r", *team]) == 5
    assert main(["status", "r"]) == 2


def test_numbers_from_text(tmp_path: Path) -> None:
    assert load(tmp_path, environ={"CLOUDTRAIN_MAX_CODE_MB": "9"}).max_code_mb == 9
    assert load(tmp_path, overrides={"max_code_mb": "8"}).max_code_mb == 8
    assert load(tmp_path, "max_code_mb = 7").max_code_mb == 7


def test_an_unknown_provider_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"did you mean 'local'\?"):
        load(tmp_path, provider="locla").make_provider()


def test_a_file_that_is_not_toml_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"line 2") as caught:
        load(tmp_path, 'store = "x"\nmax = = 1\n')
    assert caught.value.field == str(tmp_path / FILE)
    (tmp_path / FILE).write_bytes(b"store = '\xff'")
    with pytest.raises(SpecError, match="cannot be read"):
        load(tmp_path)
    with pytest.raises(SpecError, match="here: not TOML"):
        toml_loads("=", where="here")


@pytest.mark.slow
def test_the_command_line_reads_all_four(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("pass\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "t.py").write_text("pass\n")
    (tmp_path / FILE).write_text('[local]\npython = "from-file"\n')

    def python(*flags: str, **environ: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "cloudtrain", "plan", "t.py", "--json", *flags],
            cwd=tmp_path / "below", env={**os.environ, **environ},
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return str(json.loads(done.stdout)["settings"]["python"])

    assert python() == "from-file"
    assert python(CLOUDTRAIN_LOCAL_PYTHON="from-env") == "from-env"
    assert python("--set", "python=from-set", CLOUDTRAIN_LOCAL_PYTHON="from-env") == "from-set"


# ------------------------------------------------------------------------------------ a provider's own word for a store


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a provider with its own scheme of stores, and return its folder. The current folder has a script."""
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").write_text("print('hello')")
    (tmp_path / "cloud").mkdir()
    monkeypatch.chdir(tmp_path / "code")
    return str(tmp_path / "cloud")


def test_a_url_of_a_provider_s_own_scheme_is_its_to_resolve(tmp_path: Path, cloud: str) -> None:
    """This holds for any chosen provider and any of its settings."""
    for overrides in ({}, {"python": "python3"}):
        found = Settings(store=f"{NAME}://team", tables={NAME: {"folder": cloud}}, overrides=overrides)
        assert found.resolved() == f"file://{cloud}-team"
        assert found.resolved(f"{NAME}://other/runs/r") == f"file://{cloud}-other/runs/r"
        with pytest.raises(SpecError, match="asks nobody"):
            found.resolved(ask=False)
    for url in ("./.cloudtrain", "file:///x", "s3://bucket/prefix", "local://x", "nosuch://x"):
        assert Settings(store=url).resolved(ask=False) == url


def test_every_verb_takes_such_a_store(
    cloud: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"CLOUDTRAIN_{NAME.upper()}_FOLDER", cloud)
    store = ["--store", f"{NAME}://team"]
    words = ["train.py", "--provider", NAME, "--run-id", "r", *store]
    assert main(["plan", *words]) == 2
    assert capsys.readouterr().err == f"error: store: a plan asks nobody where {NAME}://team is\n"
    assert not Path(f"{cloud}-team").exists()
    assert main(["submit", *words, "--detach"]) == 0
    output = capsys.readouterr()
    assert output.out == f"file://{cloud}-team/runs/r\n"
    assert f"cloudtrain logs -f r --store {NAME}://team" in output.err
    for verb in (["status", "r", *store], ["status", f"{NAME}://team/runs/r"], ["list", *store]):
        assert main(verb) == 0, capsys.readouterr().err
        assert "pending" in capsys.readouterr().out
    for target in (["r", *store], [f"{NAME}://team"], [f"{NAME}://team/runs/r"], store):
        assert main(["reconcile", *target, "--json"]) == 0
        assert [row["run_id"] for row in json.loads(capsys.readouterr().out)["runs"]] == ["r"], target
    assert main(["cancel", "r", *store]) == 0


def test_a_variable_in_small_letters_is_no_setting(tmp_path: Path) -> None:
    environ = {"CLOUDTRAIN_SAGEMAKER_region": "eu-west-1", "CLOUDTRAIN_PROVIDER": "sagemaker"}
    with pytest.raises(SpecError, match="no such setting of sagemaker") as refused:
        Settings.load(cwd=tmp_path, environ=environ).make_provider()
    assert "CLOUDTRAIN_SAGEMAKER_region" in str(refused.value)
    assert "CLOUDTRAIN_SAGEMAKER_REGION" in refused.value.hint


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("max_cost = 5", "max_cost is a field of a job: write it into the job file, or give its flag"),
        ('queue = "q"', 'queue is a setting; put it into cloudtrain.toml: [kubernetes] queue = "q"'),
        ('stroe = "x"', "did you mean 'store'?"),
    ],
)
def test_a_key_at_the_top_of_the_file_that_belongs_elsewhere(tmp_path: Path, line: str, hint: str) -> None:
    (tmp_path / "cloudtrain.toml").write_text(line)
    with pytest.raises(SpecError, match="no such setting") as refused:
        Settings.load(environ={}, cwd=tmp_path)
    assert refused.value.hint == hint


def test_a_variable_with_nearly_the_name_of_a_general_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = (Path(__file__).parents[2] / "docs").glob("*.md")
    names = {name for page in pages for name in re.findall(r"CLOUDTRAIN_[A-Z_]+", page.read_text(encoding="utf-8"))}
    assert "CLOUDTRAIN_STATE" in names
    names.remove("CLOUDTRAIN_PROVIDERS")  # an argument of an image's build
    assert [*misspelt_variables(dict.fromkeys(names, "x"))] == []
    given = {"CLOUDTRAIN_STROE": "x", "CLOUDTRAIN_PROVIDR": "", "STROE": "x", "CLOUDTRAIN_MINE": "x"}
    assert [*misspelt_variables(given)] == [
        "CLOUDTRAIN_STROE is not a setting; did you mean CLOUDTRAIN_STORE?",
        "CLOUDTRAIN_PROVIDR is not a setting; did you mean CLOUDTRAIN_PROVIDER?",
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLOUDTRAIN_STROE", "x")
    assert main(["list"]) == 0
    assert "warning: CLOUDTRAIN_STROE is not a setting; did you mean CLOUDTRAIN_STORE?\n" in capsys.readouterr().err
