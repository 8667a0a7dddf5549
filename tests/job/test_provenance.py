"""The origin of a run: read from git and CI, written in every cloud's alphabet, and never the reason for a
second job."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from foldercloud import NAME, install
from hypothesis import given
from hypothesis import strategies as st
from plans import PROVIDERS, sample_plans
from rows import for_each
from worlds.sagemaker.questions import Questions
from worlds.sagemaker.strict import broken_rules, model_errors
from worlds.sagemaker.wire import Wire

from cloudtrain.errors import ConflictError, SpecError
from cloudtrain.estimator import Estimator
from cloudtrain.job import provenance
from cloudtrain.job.job import Job
from cloudtrain.job.provenance import digest_of, in_background, origin_of
from cloudtrain.provider_api.protocol import Layout, Request
from cloudtrain.providers.azureml.api import named
from cloudtrain.runs.submit import make_plan
from cloudtrain.settings.settings import Settings
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.store.store import Store

SHA = "c0ffee" + "0" * 34
GITHUB = {
    "GITHUB_ACTIONS": "true", "GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "team/train",
    "GITHUB_RUN_ID": "123", "GITHUB_RUN_ATTEMPT": "2",
}  # fmt: skip
PAGE = "https://github.com/team/train/actions/runs/123/attempts/2"
FULL = {"revision": f"{SHA}-dirty", "branch": "main", "ci": "github", "ci_run": "123-2", "ci_url": PAGE}


# -------------------------------------------------------------------------------------------------------------- reading


@for_each(
    ("environ", "ci", "run", "url"),
    [
        (GITHUB, "github", "123-2", PAGE),
        ({"GITLAB_CI": "true", "CI_JOB_ID": "7", "CI_JOB_URL": "https://u:p@git.lab/g/p/-/jobs/7"}, "gitlab", "7",
         "https://git.lab/g/p/-/jobs/7"),
        ({"JENKINS_URL": "https://j/", "BUILD_NUMBER": "9", "BUILD_URL": "https://j/job/a%20b/9/"}, "jenkins", "9",
         "https://j/job/a%20b/9/"),
        ({"CIRCLECI": "true", "CIRCLE_BUILD_NUM": "4", "CIRCLE_BUILD_URL": "https://circleci.com/gh/t/p/4"},
         "circleci", "4", "https://circleci.com/gh/t/p/4"),
        ({"TF_BUILD": "True", "BUILD_BUILDID": "5", "SYSTEM_TEAMPROJECT": "My Project",
          "SYSTEM_COLLECTIONURI": "https://dev.azure.com/org/"}, "azure-pipelines", "5",
         "https://dev.azure.com/org/My%20Project/_build/results?buildId=5"),
        ({"BUILDKITE": "true", "BUILDKITE_BUILD_NUMBER": "3", "BUILDKITE_BUILD_URL": "https://buildkite.com/o/p/builds/3"},
         "buildkite", "3", "https://buildkite.com/o/p/builds/3"),
    ],
)  # fmt: skip
def test_each_ci_service_is_known_by_its_variables(environ: dict[str, str], ci: str, run: str, url: str) -> None:
    assert origin_of(None, environ) == {"ci": ci, "ci_run": run, "ci_url": url}


def test_what_is_not_known_is_not_there() -> None:
    assert origin_of(None, {}) == {}
    assert origin_of({"commit": None, "branch": "main", "dirty": True}, {}) == {"branch": "main"}
    assert origin_of({"commit": SHA, "branch": None, "dirty": False}, {}) == {"revision": SHA}
    assert origin_of({"commit": SHA, "branch": None, "dirty": True}, {}) == {"revision": f"{SHA}-dirty"}
    assert origin_of(None, {"GITHUB_ACTIONS": "true", "GITHUB_RUN_ID": "1"}) == {"ci": "github"}
    assert origin_of(None, {"BUILD_URL": PAGE}) == {}, "without a service's mark, any program may have set it"


@given(st.dictionaries(st.sampled_from(sorted({*GITHUB, "JENKINS_URL", "BUILD_URL", "BUILD_NUMBER"})), st.text()))
def test_no_value_of_a_variable_does_harm(environ: dict[str, str]) -> None:
    found = origin_of({"commit": SHA, "branch": environ.get("BUILD_URL"), "dirty": False}, environ)
    for value in found.values():
        assert value.isprintable()
        assert len(value.encode()) <= 4 * provenance.LONGEST
    assert re.fullmatch(r"(https?://[\x21-\x7e]+)?", found.get("ci_url", ""))


def test_the_digest_of_an_image() -> None:
    digest = "sha256:" + "ab" * 32
    assert digest_of(f"registry.example/team/x:1@{digest}") == digest
    assert [digest_of(image) for image in (None, "", "x:1", "x@sha256:ab", f"x@{digest} ")] == [None] * 5


def test_an_answer_that_does_not_come_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLIENT_TIMINGS, "provenance", 0.05)
    release = threading.Event()

    def refused() -> str:
        raise OSError("no route")

    try:
        assert in_background(lambda: "arn:x")() == "arn:x"
        assert in_background(None)() is None
        assert in_background(refused)() is None
        assert in_background(lambda: str(release.wait(30)))() is None
    finally:
        release.set()


@for_each(
    ("claims", "who"),
    [
        ({"upn": "me@example.org", "oid": "o"}, "me@example.org"),
        ({"appid": "a-1", "oid": "o"}, "a-1"),
        ({"oid": "o"}, "o"),
        ({}, None),
        ([], None),
    ],
)
def test_who_a_token_is_for(claims: Any, who: str | None) -> None:
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    assert named(f"e30.{body}.signature") == who
    assert named("opaque") is None


def test_who_calls_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use real boto3 at the wire. A caller without permission to ask can still submit."""
    wire = Wire()
    Questions(SimpleNamespace(wire=wire))  # type: ignore[arg-type]
    wire.keys["key-1"] = "secret"
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", wire.listen())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(CLIENT_TIMINGS, "provenance", 60)  # the first import of boto3 may take seconds
    try:
        own = sample_plans("sagemaker")
        provider = own.provider(**own.settings)
        assert in_background(provider.principal)() == "arn:aws:iam::123456789012:user/tester"
        assert wire.calls == ["GetCallerIdentity"]
        wire.expired.add("key-1")
        assert in_background(provider.principal)() is None
        assert not wire.crashes
    finally:
        wire.close()


# ------------------------------------------------------------------------------------------------- in each cloud's tags


def planned(name: str, origin: Mapping[str, str], **fields: Any) -> Request:
    own = sample_plans(name)
    job = Job.make(**{"entry_point": "train.py", **own.fields, **fields})
    request: Request = own.provider(**own.settings).plan(job, own.layout(origin=origin))
    return request


def tags_of(request: Request) -> dict[str, str]:
    body = request.body
    if "Tags" in body:
        return {tag["Key"]: tag["Value"] for tag in body["Tags"]}
    if "nodes" in body:
        return dict(body["nodes"][0]["container"].get("Labels", {}) | body.get("tags", {}))
    return dict(body.get("labels") or body["tags"])


@for_each("name", PROVIDERS)
def test_native_tags_say_where_it_comes_from(name: str) -> None:
    tags = {re.sub(r"[.:-]", "/", key): value for key, value in tags_of(planned(name, FULL)).items()}
    page = {"vertex": "github-123-2"}.get(name, PAGE)
    assert (tags["cloudtrain/revision"], tags["cloudtrain/ci"]) == (f"{SHA}-dirty", page)
    bare = tags_of(planned(name, {}))
    assert not [key for key in bare if "revision" in key or key.endswith("ci")]


#: The legal values of a tag: AWS's pattern of a Tag, Google's rules of labels, Azure's and Docker's (any text).
LEGAL = {"sagemaker": r"[\w .:/=+@-]{1,256}", "vertex": r"[a-z0-9_-]{1,63}", "azureml": r".{1,256}"}


@pytest.mark.costly
@given(
    st.sampled_from(PROVIDERS),
    st.fixed_dictionaries(
        {},
        optional={
            "revision": st.sampled_from([SHA, f"{SHA}-dirty", "a" * 64, "f" * 64 + "-dirty"]),
            "ci": st.sampled_from(["github", "azure-pipelines"]),
            "ci_run": st.text("aZ09_.-", min_size=1, max_size=300),
            "ci_url": st.builds("https://{}".format, st.text(st.characters(min_codepoint=33, max_codepoint=126),
                                                             min_size=1, max_size=400)),
        },
    ),
)  # fmt: skip
def test_whatever_it_is_it_is_legal_there(name: str, origin: dict[str, str]) -> None:
    request = planned(name, origin)
    for key, value in tags_of(request).items():
        assert re.fullmatch(LEGAL.get(name, r"(?s).+"), value), (key, value)
    if name == "sagemaker":
        assert not model_errors("CreateTrainingJob", request.body)
        assert not broken_rules(request.body)
    if origin.get("revision", "").endswith("-dirty"):
        assert any(value.endswith("-dirty") for value in tags_of(request).values())


def test_what_aws_has_no_letters_for_is_the_number_of_the_run() -> None:
    origin = {"ci": "azure-pipelines", "ci_run": "5", "ci_url": "https://dev.azure.com/o/p/_build/results?buildId=5"}
    assert tags_of(planned("sagemaker", origin))["cloudtrain:ci"] == "5"


REFUSED = {
    "local": ({"cloudtrain.ci": "x"}, {}),
    "docker": ({"cloudtrain.ci": "x"}, {}),
    "sagemaker": ({"cloudtrain:ci": "x"}, {"a?": "x"}, {"a": "b?c"}, {"a": "x" * 257}, {"k" * 129: "x"}),
    "azureml": ({"cloudtrain.ci": "x"}, {"a?": "x"}, {"a/b": "x"}, {"a": "x" * 257}, {"k" * 513: "x"}),
    "vertex": ({"cloudtrain-ci": "x"}, {"A": "x"}, {"a": "X"}, {"a": "x" * 64}, {"1a": "x"}, {"a": "ü"}),
}


@for_each("name", PROVIDERS)
def test_an_illegal_tag_is_refused_by_name(name: str) -> None:
    for tags in filter(None, REFUSED[name]):
        with pytest.raises(SpecError) as caught:
            planned(name, FULL, tags=tags)
        (key,) = tags
        assert caught.value.field == f"tags.{key}"
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "most"), [("sagemaker", 44), ("azureml", 42), ("vertex", 56)])
def test_tags_have_room_beside_ours(name: str, most: int) -> None:
    tags = {f"t{number}": "x" for number in range(most)}
    limit = {"sagemaker": 50, "azureml": 50, "vertex": 64}[name]
    assert len(tags_of(planned(name, FULL, tags=tags))) <= limit
    with pytest.raises(SpecError, match=f"at most {most}"):
        planned(name, {}, tags={**tags, "one-more": "x"})


# ---------------------------------------------------------------------------------------------------------- in a record


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a script in a git repository, on foldercloud."""
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in [*os.environ]:
        if name in GITHUB or name in {service.mark for service in provenance._SERVICES.values()}:
            monkeypatch.delenv(name)
    code = tmp_path / "code"
    code.mkdir()
    (tmp_path / "cloud").mkdir()
    (code / "train.py").write_text("print('hello')\n")
    commands = (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "x"])
    for words in commands:
        who = ["-c", "user.name=x", "-c", "user.email=x@y"]
        subprocess.run(["git", "-C", str(code), *who, *words], check=True, stdin=subprocess.DEVNULL)
    return tmp_path


def send(place: Path, **fields: Any) -> Any:
    estimator = Estimator(
        entry_point="train.py", source_dir=place / "code", provider=NAME, store=str(place / "store"),
        settings={"folder": str(place / "cloud")}, **{"max_runtime": 600, **fields},
    )  # fmt: skip
    return estimator.fit(wait=False, run_id="r")


def test_a_step_of_ci_that_is_run_again_finds_its_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GITHUB.items():
        monkeypatch.setenv(name, value)
    first = send(place, exclude=["notes.txt"])
    store = Store(str(place / "store"))
    recorded, request = store.run("r"), store.attempt_request("r", 0)
    assert request is not None
    origin = recorded["layout"]["origin"]
    assert origin == request.body["origin"]
    assert (origin["ci_url"], origin["branch"], origin["revision"][40:]) == (PAGE, "main", "")
    assert recorded["origin"] == {**origin, "principal": None, "image": None, "image_digest": None}

    monkeypatch.setenv("GITHUB_RUN_ATTEMPT", "3")
    (place / "code/notes.txt").write_text("no part of the code; git calls the tree dirty")
    again = send(place, exclude=["notes.txt"])
    assert (again.run_id, store.run("r")) == (first.run_id, recorded)
    assert store.attempt_request("r", 0) == request
    assert len(list((place / "cloud").iterdir())) == 1, "one native job"
    assert again.status().state == "pending"

    with pytest.raises(ConflictError, match="another job") as caught:
        send(place, args=["other"])
    assert caught.value.exit_code == 2
    assert len(list((place / "cloud").iterdir())) == 1


def test_a_client_that_was_overtaken_goes_on_with_what_is_recorded(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client records the run, with another origin, between this client's check and its record."""
    create = Store.create_run

    def overtaken(self: Store, layout: Layout, record: Mapping[str, Any]) -> bool:
        other = {**record, "layout": {**record["layout"], "origin": {"ci": "other"}}}
        assert create(self, layout, other)
        return create(self, layout, record)

    monkeypatch.setattr(Store, "create_run", overtaken)
    run = send(place)
    request = run.store.attempt_request("r", 0)
    assert request is not None
    assert request.body["origin"] == {"ci": "other"}


def test_an_older_record_has_no_origin_and_is_the_same_run(place: Path) -> None:
    run = send(place)
    path = place / "store/runs/r/run.json"
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps({**record, "layout": {k: v for k, v in record["layout"].items() if k != "origin"}}))
    (place / "store/runs/r/attempts/0/request.json").unlink()
    assert send(place).store.attempt_request("r", 0).body["origin"] == {}
    assert run.status().state == "pending"


def test_the_record_of_this_machine_says_who_and_a_plan_does_not(place: Path) -> None:
    settings = Settings.load(cwd=place, environ={}, store=str(place / "store"))
    job = Job.make(entry_point="train.py", source_dir=str(place / "code"))
    plan = make_plan(job, settings=settings, provider="local", cwd=place)
    assert re.fullmatch(r"[^@]+@.+", plan.provider.principal())  # type: ignore[attr-defined]
    assert "principal" not in json.dumps(plan.document())
    assert plan.document()["layout"]["origin"]["revision"]
