"""Canaries: distinct words in the fields of secrets, and a search for them in all output.

The contract suite covers whole runs of all platforms whose script prints a secret (`test_no_secret_is_left_anywhere`).
These tests cover plans, errors, and one whole run by the command line.
"""

from __future__ import annotations

import importlib
import json
import secrets
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from earlier import Ran
from hypothesis import given
from hypothesis import strategies as st
from jobs import Jobs
from plans import PROVIDERS, STORES, sample_plans
from rows import for_each

from cloudtrain.cli import main
from cloudtrain.cli.format import plan_text
from cloudtrain.errors import CloudtrainError, LostContactError, SpecError, StorageError, UnsupportedError, scrubbed
from cloudtrain.job.job import Job
from cloudtrain.runs.submit import _record, make_plan
from cloudtrain.settings.settings import Settings
from cloudtrain.storage.errors import translate

#: Variables that clients of clouds read their credentials from.
CREDENTIALS = (
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_CLIENT_SECRET", "AZURE_STORAGE_KEY"),
    *("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_SAS_TOKEN", "GOOGLE_API_KEY", "HF_TOKEN", "WANDB_API_KEY"),
    *("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "CI_JOB_TOKEN", "GITHUB_TOKEN", "SYSTEM_ACCESSTOKEN"),
)  # fmt: skip


def canary(where: str) -> str:
    return f"canary-{where}-{secrets.token_hex(8)}"


def places(value: Any, word: str, path: str = "") -> Iterator[str]:
    """Yield the dotted paths of ``word`` in plain data, also in keys."""
    if isinstance(value, dict):
        for key, item in value.items():
            if word in key:
                yield f"{path}.{key}"
            yield from places(item, word, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for item in value:
            yield from places(item, word, path)
    elif word in str(value):
        yield path


# --------------------------------------------------------------------------------------------------------------- plans


#: Parts of a plan that may hold a user's text about the script: the job itself, and the nodes' context.
ALLOWED = {
    "env": {"job.env.PLAIN", "request.context.env.PLAIN"},
    "arg": {"job.args", "request.context.args"},
    "hp": {"job.hyperparameters.hp", "request.context.hyperparameters.hp"},
    "tag": {"job.tags.team", "request.body"},
}


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_plan_holds_what_it_must_and_no_credential(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {variable: canary(variable) for variable in CREDENTIALS}
    for variable, value in found.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    word = {where: canary(where) for where in ALLOWED}
    own = sample_plans(name)
    reference = {"local": "env:HF_TOKEN", "docker": "env:HF_TOKEN"}.get(name)
    sample = importlib.import_module(f"cloudtrain.providers.{name}").SAMPLE
    (tmp_path / "train.py").write_text(f"# {canary('code')}\n")
    job = Job.make(
        **{
            "entry_point": "train.py", "source_dir": str(tmp_path), **own.fields, "env": {"PLAIN": word["env"]},
            "args": [word["arg"]], "hyperparameters": {"hp": word["hp"]}, "tags": {"team": word["tag"]},
            "secrets": {"HF_TOKEN": reference or sample["secret"]},
        }
    )  # fmt: skip
    settings = _settings(tmp_path, name, own.settings)
    plan = make_plan(job, settings=settings, provider=name, cwd=tmp_path)
    document = json.loads(json.dumps(plan.document()))
    record = json.loads(json.dumps(_record(plan)))
    texts = [json.dumps(document), json.dumps(record), plan_text(document), json.dumps(plan.request.to_dict())]
    for variable, value in found.items():
        assert not any(value in text for text in texts), variable
    for where, value in word.items():
        for path in places(document, value):
            assert any(path == allowed or path.startswith(f"{allowed}.") for allowed in ALLOWED[where]), (where, path)
        assert list(places(record, value)) == [path for path in ALLOWED[where] if path.startswith("job.")]


def _settings(folder: Path, name: str, given: Any) -> Settings:
    store = STORES.get(name, str(folder / "store"))
    tables = "".join(f"{key} = {_toml(value)}\n" for key, value in given.items())
    (folder / "cloudtrain.toml").write_text(f"store = {json.dumps(store)}\n[{name}]\n{tables}")
    return Settings.load(cwd=folder, environ={})


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


# --------------------------------------------------------------------------------------------------------------- errors


SIGNED = (
    "https://acct.blob.core.windows.net/c/x?sv=2024&sig={0}&se=1",
    "https://b.s3.amazonaws.com/x?X-Amz-Signature={0}",
    "https://b.s3.amazonaws.com/x?a=b&X-Amz-Security-Token={0}&c=d",
    "https://storage.googleapis.com/b/x?X-Goog-Signature={0}",
    "https://user:{0}@host.example/x",
    "s3://key:{0}@bucket/x",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={0};EndpointSuffix=x",
    "https://host/x?access_token={0}",
)


@for_each("text", SIGNED)
def test_no_error_quotes_a_credential(text: str) -> None:
    word = canary("url")
    said = f"GET {text.format(word)} failed: 403 (see '{text.format(word)}')"
    raised: list[Exception] = [
        CloudtrainError(said), SpecError(said, field="store"), UnsupportedError("x", "inputs.d", said),
        LostContactError(said), StorageError(said), translate(RuntimeError(said), said),
        translate(OSError(5, said), said), translate(PermissionError(said), said),
    ]  # fmt: skip
    for exc in raised:
        assert word not in str(exc)
        assert word not in getattr(exc, "message", "")
        assert "failed: 403" in str(exc), "the rest of it stays"


@given(st.text(max_size=9), st.sampled_from(SIGNED), st.text("aB09%+/=_-", min_size=8, max_size=40))
def test_whatever_stands_around_it(around: str, text: str, word: str) -> None:
    assert f"x{word}x" not in scrubbed(f"{around} {text.format(f'x{word}x')} {around}").replace(around, "")


@for_each(
    "text",
    [
        "abfs://container@account.dfs.core.windows.net/x", "http://127.0.0.1:9000/bucket/a@b", "a=b key=value",
        "https://dev.azure.com/o/p/_build/results?buildId=5", "s3://bucket/k?x=y", "C:\\x", "user@host: x:y",
    ],
)  # fmt: skip
def test_what_is_no_credential_stays(text: str) -> None:
    assert scrubbed(text) == text


@pytest.mark.parametrize("text", [*SIGNED[:2], *SIGNED[4:6]])
def test_no_store_url_may_hold_one(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    word = canary("store")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    for verb in (
        ["plan", "train.py"],
        ["submit", "train.py"],
        ["status", "r"],
        ["list"],
        ["pull", "r", "out"],
        ["gc"],
        ["stage", "."],
    ):
        assert main([*verb, "--store", text.format(word), "--json"]) == 2
        output = capsys.readouterr()
        assert word not in output.out + output.err
        assert json.loads(output.out)["field"] == "store"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_a_credential_in_a_settings_file_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    word = canary("file")
    (tmp_path / "cloudtrain.toml").write_text(f'store = "s3://key:{word}@bucket/x"\n')
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "train.py"]) == 2
    output = capsys.readouterr()
    assert word not in output.out + output.err
    assert output.err.startswith("error: store: s3://***@bucket/x holds a password")


# -------------------------------------------------------------------------------------------------------- a whole run


SCRIPT = """
import json, os, subprocess, sys, time
token = os.environ["TOKEN"]
print("plain", token, flush=True)
print(repr(token), json.dumps({"t": token}), f"https://u:{token}@h/", flush=True)
sys.stdout.write(token[:9]); sys.stdout.flush(); time.sleep(0.2); print(token[9:])   # in two writes, one line
os.write(2, ("raw " + token + "\\n").encode())
subprocess.run([sys.executable, "-c", "import os; print('child', os.environ['TOKEN'])"])
print(os.environ["PEM"])
open(os.path.join(os.environ["CLOUDTRAIN_ARTIFACT_DIR"], "own.txt"), "w").write("nothing secret")
time.sleep(1)
raise RuntimeError(f"refused: {dict(TOKEN=token, PEM=os.environ['PEM'])}")
"""


@pytest.mark.slow
def test_a_secret_leaves_in_nothing_but_the_ranks_environment(jobs: Jobs) -> None:
    jobs.write("train.py", SCRIPT)
    token, pem = canary("token"), "-----BEGIN-----\n" + "\n".join(canary("line") for _ in range(3)) + "\n"
    plain, hidden = canary("plain"), canary("hidden")
    words = ("train.py", "--store", str(jobs.store), "--max-runtime", "2m", "--nproc-per-node", "1", "--json")
    argv = (*words, "--secret", "TOKEN=env:OF_TOKEN", "--secret", "PEM=env:OF_PEM", "--env", f"PLAIN={plain}")
    process = jobs.start("submit", *argv, "--run-id", "r", OF_TOKEN=token, OF_PEM=pem, AWS_SECRET_ACCESS_KEY=hidden)
    lines = set()
    while process.poll() is None:
        lines |= set(jobs.processes().values())
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = process.stdout.read(), process.stderr.read()
    pulled = jobs.cli("pull", "r", str(jobs.tmp / "out"), "--store", str(jobs.store))
    said = [out, err, pulled.out, pulled.err, *lines]
    for verb in ("status", "logs", "list"):
        name = [] if verb == "list" else ["r"]
        done = jobs.cli(verb, *name, "--store", str(jobs.store), *(["--json"] if verb != "logs" else []))
        said += [done.out, done.err]

    result = json.loads(out)
    assert (process.returncode, result["state"]) == (1, "failed"), err
    assert any("cloudtrain.pyz run" in line for line in lines), "processes were looked at"
    for shown in ("plain ***TOKEN***", "raw ***TOKEN***", "child ***TOKEN***", "***PEM***"):
        assert shown in err
    assert "'TOKEN': '***TOKEN***'" in result["failure"]["exception"]
    files = [path for folder in (jobs.store, jobs.tmp / "out") for path in folder.rglob("*") if path.is_file()]
    assert {"run.json", "request.json", "supervisor.log", "status.json", "own.txt"} <= {path.name for path in files}
    for secret in (token, hidden, *pem.splitlines()[1:]):
        assert [text for text in said if secret in text] == []
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
    (archive,) = jobs.store.glob("code/*/code.tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is None or token.encode() not in content.read()
    # Open text of a job is in its record and in the nodes' context, and in no other file.
    holding = {path.relative_to(jobs.tmp).as_posix() for path in files if plain.encode() in path.read_bytes()}
    assert holding == {
        "store/runs/r/run.json", "store/runs/r/attempts/0/request.json", "store/runs/r/container/context.json",
        "store/runs/r/supervisor/request.json", "out/run.json",
    }  # fmt: skip


# --------------------------------------------------------------------------------------------- another run's checkpoint


def test_a_plan_says_whose_code_a_checkpoint_brings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.pt").write_text("")
    Ran(f"file://{tmp_path}/store", "earlier").save(1)
    settings = Settings.load(cwd=tmp_path, environ={}, store=str(tmp_path / "store"))

    def notes(resume_from: str) -> str:
        job = Job.make(entry_point="train.py", source_dir=str(tmp_path), resume_from=resume_from)
        plan = make_plan(job, settings=settings, cwd=tmp_path)
        assert json.loads(json.dumps(plan.document()))["request"]["notes"] == list(plan.request.notes)
        assert all(note in plan_text(plan.document()) for note in plan.request.notes)
        return " ".join(plan.request.notes)

    assert notes("earlier") == ""
    assert "is outside this store: with write access there, anyone can run code" in notes("./elsewhere")
    assert "s3://user" not in notes(f"s3://other/{canary('x')}")
    assert canary_free(notes("https://u:canary-password@host/x"))


def canary_free(text: str) -> bool:
    return "canary-password" not in text
