"""Job: refusals and their messages, canonical forms that round-trip, identity, and the small grammars."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from array import array
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rows import for_each

from cloudtrain.errors import SpecError
from cloudtrain.job.job import (
    FLAT_FIELDS,
    LAUNCHERS,
    MODES,
    STYLES,
    Gpu,
    Input,
    Job,
    Resources,
    Source,
)
from cloudtrain.job.run_id import check_run_id, new_run_id
from cloudtrain.validate import did_you_mean, parse_duration, similar, url_scheme


def job(**fields: Any) -> Job:
    return Job.make(**{"entry_point": "train.py", **fields})


# ------------------------------------------------------------------------------------------------------- whole jobs

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0{}"), min_size=1, max_size=12)
ids = st.from_regex(r"[a-z0-9](-?[a-z0-9]){0,12}", fullmatch=True)
env_names = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not re.match(r"PET_|TORCHELASTIC_|CLOUDTRAIN_|.*(RANK|WORLD_SIZE|MASTER)", name)
)
numbers = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), words
)
values = st.recursive(
    numbers,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=5,
)
inputs = st.dictionaries(
    st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True),
    st.builds(Input, url=words, mode=st.sampled_from(MODES), shard=st.booleans()),
    max_size=3,
)
gpus = st.lists(
    st.builds(
        Gpu,
        name=st.sampled_from(["H100", "A100", "L4", "RTX-A6000", "GH200"]),
        memory_gb=st.none() | st.integers(1, 200),
        count=st.integers(1, 16),
    ).map(str),
    max_size=3,
)
maybe_count = st.none() | st.integers(1, 512)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    entry = draw(st.sampled_from(["train.py", "pkg/train me.py", "-m pkg.mod", "run.sh", "обучение.py"]))
    env = draw(st.dictionaries(env_names, words | st.just(""), max_size=3))
    return Job(
        name=draw(ids | st.just("")),
        source=Source(
            path=draw(st.none() | words),
            entry_point=entry,
            dependencies=tuple(draw(st.lists(words, max_size=2))),
            requirements=draw(st.none() | words),
            exclude=tuple(draw(st.lists(words, max_size=2))),
        ),
        image=draw(st.none() | st.sampled_from(["repo/img:1", "r.io/a@sha256:00"])),
        launcher="" if entry.endswith(".sh") else draw(st.sampled_from(["", *LAUNCHERS])),
        hyperparameters=draw(st.dictionaries(words, values, max_size=4)),
        hyperparameter_style=draw(st.sampled_from(STYLES)),
        args=tuple(draw(st.lists(words | st.just("") | st.just("{resume_from?}"), max_size=4))),
        env=env,
        secrets={k: "env:X" for k in draw(st.sets(env_names, max_size=2)) if k not in env},
        inputs=draw(inputs),
        resources=Resources(
            instance_count=draw(st.integers(1, 64)),
            instance_type=draw(st.none() | words),
            gpu=tuple(draw(gpus)),
            total_gpus=draw(maybe_count),
            nproc_per_node=draw(maybe_count),
            cpus=draw(maybe_count),
            memory_gb=draw(maybe_count),
            disk_gb=draw(maybe_count),
            shm_gb=draw(maybe_count),
            spot=draw(st.booleans()),
        ),
        max_runtime=draw(st.integers(1, 10**6)),
        max_wait=draw(st.none() | st.integers(1, 10**6)),
        max_cost=draw(st.none() | st.floats(0.01, 1e6)),
        max_gpu_hours=draw(st.none() | st.floats(0.01, 1e6)),
        retries=draw(st.integers(0, 100)),
        stall_timeout=draw(st.integers(0, 10**5)),
        min_gpu_util=draw(st.sampled_from([None, "5% for 30m", "0.5% for 1h"])),
        node_check=draw(st.booleans()),
        keep_warm=draw(st.none() | st.integers(1, 10**6)),
        interactive=draw(st.booleans()),
        debug_nccl=draw(st.booleans()),
        resume_from=draw(st.none() | words),
        checkpoint_paths=("out/*.pt",) if draw(st.booleans()) else (),
        keep_checkpoints=draw(st.integers(0, 100)),
        metrics=dict.fromkeys(draw(st.sets(st.sampled_from(["loss", "val/loss", "step"]))), "loss ([0-9.]+)"),
        outputs=draw(st.booleans()),
        max_outputs=draw(st.integers(1, 10**14)),
        webhook="https://h/x",
        webhook_headers=draw(st.dictionaries(st.sampled_from(["X-A", "X-B"]), st.just("v"), max_size=2)),
        tags=draw(st.dictionaries(words, texts, max_size=3)),
        options=draw(st.dictionaries(ids, st.dictionaries(words, values, max_size=2), max_size=2)),
        on=draw(
            st.dictionaries(ids, st.fixed_dictionaries({}, optional={"image": st.just("x:1"), "retries": st.just(3)}))
        ),
    )


@pytest.mark.slow
@given(jobs())
def test_every_job_round_trips_through_json_toml_and_pickle(job: Job) -> None:
    assert Job.from_json(job.to_json()) == job
    assert Job.from_toml(job.to_toml()) == job
    assert Job.from_dict(job.to_dict()) == job
    assert pickle.loads(pickle.dumps(job)) == job
    assert dataclasses.asdict(job)["name"] == job.name


@pytest.mark.costly
@given(jobs(), st.randoms(use_true_random=False))
def test_the_digest_does_not_depend_on_the_order_of_keys_or_the_form(job: Job, random: Any) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            keys = list(value)
            random.shuffle(keys)
            return {k: shuffled(value[k]) for k in keys}
        return [shuffled(v) for v in value] if isinstance(value, list) else value

    assert Job.from_dict(shuffled(job.to_dict())).digest == job.digest
    assert job.replace().digest == job.digest
    assert Job.from_toml(job.to_toml()).digest == job.digest
    assert json.loads(job.to_json()) == job.to_dict()


@given(jobs(), ids)
def test_at_a_provider_without_an_on_table_only_the_on_tables_go(job: Job, provider: str) -> None:
    assume(provider not in job.on)
    assert job.at(provider) == dataclasses.replace(job, on={})


def test_the_digest_is_the_sha256_of_the_canonical_json_and_stays_as_it_is() -> None:
    simple = job(hyperparameters={"lr": 0.1}, instance_count=2)
    assert simple.to_json() == (
        '{"hyperparameters":{"lr":0.1},"launcher":"torchrun","name":"train",'
        '"resources":{"instance_count":2},"source":{"entry_point":"train.py"}}'
    )
    # Recorded runs hold this number: a change here is a change of every job's identity.
    assert simple.digest == "1f76d4ac7822d775ff726768f6c01e6808ad20c94cdc0d768007f5a02f2278e3"


def test_a_default_given_by_hand_is_no_other_job() -> None:
    assert job().digest == job(retries=0, max_runtime="24h", hyperparameter_style="flags", env={}).digest
    assert job().digest != job(retries=1).digest


def test_a_job_is_frozen_and_keeps_its_own_copy_of_tables() -> None:
    table = {"a": {"b": [1]}}
    made = job(hyperparameters=table)
    table["a"]["b"].append(2)
    assert made.hyperparameters == {"a": {"b": [1]}}
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.name = "x"  # type: ignore[misc]


# --------------------------------------------------------------------------------------------------------- refusals

REFUSED = [
    # (fields, dotted field, words of the message)
    ({"entry_point": ""}, "source.entry_point", "no script"),
    ({"entry_point": "-m pkg mod"}, "source.entry_point", "-m package.module"),
    ({"entry_point": "-m pkg.1"}, "source.entry_point", "-m package.module"),
    ({"entry_point": "x.sh", "launcher": "torchrun"}, "launcher", "'command'"),
    ({"launcher": "torchrum"}, "launcher", "did you mean 'torchrun'?"),
    ({"hyperparameter_style": "flag"}, "hyperparameter_style", "did you mean 'flags'?"),
    ({"name": "My Job"}, "name", "call it 'my-job'"),
    ({"entry_point": "nb.ipynb"}, "source.entry_point", "jupyter nbconvert --to script nb.ipynb"),
    ({"entry_point": "a.yaml"}, "source.entry_point", "TOML or JSON"),
    ({"entry_point": "data.csv"}, "source.entry_point", "--input data=data.csv"),
    ({"entry_point": "job.toml"}, "source.entry_point", "cloudtrain submit job.toml"),
    ({"name": "a" * 41}, "name", "at most 40"),
    ({"name": "a--b"}, "name", "single inner dashes"),
    ({"image": "a b"}, "image", "not the name of an image"),
    ({"image": "-v/:/"}, "image", "not the name of an image"),
    ({"args": "abc"}, "args", "must be a list of texts"),
    ({"args": ["a", 3]}, "args[1]", "must be text, not int"),
    ({"args": ["a\0b"]}, "args[0]", "NUL"),
    ({"args": ["\ud800"]}, "args[0]", "UTF-8"),
    ({"env": {"A": 1}}, "env.A", "must be text, not int"),
    ({"env": {"1A": "x"}}, "env", "'1A' is not a name"),
    ({"env": ["A=1"]}, "env", "must be a table"),
    ({"hyperparameters": {"lr": None}}, "hyperparameters.lr", "leave it out"),
    ({"hyperparameters": {"a": {"b": [float("nan")]}}}, "hyperparameters.a.b[0]", "cannot be written as JSON"),
    ({"hyperparameters": {"a": object()}}, "hyperparameters.a", "cannot be written as JSON"),
    ({"hyperparameters": {"a": array("f", [1])}}, "hyperparameters.a", "take its plain value with .tolist()"),
    ({"secrets": {"T": "plain"}}, "secrets.T", "is not a reference to a secret"),
    ({"secrets": {"T": "aws:"}}, "secrets.T", "is not a reference to a secret"),
    ({"secrets": {"T": "env:T"}, "env": {"T": "x"}}, "secrets.T", "in env too"),
    ({"inputs": {"1": "x"}}, "inputs", "not a channel name"),
    ({"inputs": {"a-b": "x", "a_b": "y"}}, "inputs", "share one variable"),
    ({"inputs": {"train": {"ulr": "x"}}}, "inputs.train.ulr", "did you mean 'url'?"),
    ({"inputs": {"train": {"mode": "copy"}}}, "inputs.train", "needs a url"),
    ({"inputs": {"train": {"url": "x", "mode": "mounted"}}}, "inputs.mode", "did you mean 'mount'?"),
    ({"instance_count": 0}, "resources.instance_count", "1 or more"),
    ({"instance_count": 5000}, "resources.instance_count", "at most 4096"),
    ({"instance_count": True}, "resources.instance_count", "whole number"),
    ({"instance_count": "2"}, "resources.instance_count", "whole number, not '2'"),
    ({"instance_count": "3:4"}, "resources.instance_count", "no smaller number that divides the larger one"),
    ({"instance_count": "4:2"}, "resources.instance_count", "write 2:4"),
    ({"instance_count": "0:2"}, "resources.min_instance_count", "1 or more"),
    ({"min_instance_count": 2}, "resources.instance_count", "write 1:2"),
    ({"nproc_per_node": 0}, "resources.nproc_per_node", "1 or more"),
    ({"gpu": "H100:0"}, "resources.gpu", "NAME[-MEM][:COUNT]"),
    ({"gpu": "8xH100"}, "resources.gpu", "NAME[-MEM][:COUNT]"),
    ({"spot": "yes"}, "resources.spot", "true or false"),
    ({"max_runtime": "12 parsecs"}, "max_runtime", "is not a duration"),
    ({"max_runtime": 0}, "max_runtime", "above zero"),
    ({"max_wait": -1}, "max_wait", "above zero"),
    ({"stall_timeout": 1.5}, "stall_timeout", "whole number of seconds"),
    ({"min_gpu_util": "5%"}, "min_gpu_util", "'5%' is not a percentage and a time; write '5% for 30m'"),
    ({"min_gpu_util": "0% for 30m"}, "min_gpu_util", "not a percentage"),
    ({"min_gpu_util": "101% for 30m"}, "min_gpu_util", "not a percentage"),
    ({"min_gpu_util": "5% for ever"}, "min_gpu_util", "'ever' is not a duration"),
    ({"min_gpu_util": 5}, "min_gpu_util", "must be text"),
    ({"node_check": "yes"}, "node_check", "true or false"),
    ({"debug_nccl": 1}, "debug_nccl", "true or false"),
    ({"keep_checkpoints": -1}, "keep_checkpoints", "0 or more"),
    ({"keep_checkpoints": 1.0}, "keep_checkpoints", "whole number"),
    ({"keep_checkpoints": True}, "keep_checkpoints", "whole number"),
    ({"outputs": "no"}, "outputs", "true or false"),
    ({"max_outputs": "10 gigabytes"}, "max_outputs", "is not a size"),
    ({"max_outputs": 0}, "max_outputs", "is not a size"),
    ({"max_outputs": "0.1B"}, "max_outputs", "is not a size"),
    ({"max_outputs": "9" * 400}, "max_outputs", "is not a size"),
    ({"max_cost": 0}, "max_cost", "above zero"),
    ({"max_cost": "5"}, "max_cost", "amount of US dollars"),
    ({"max_gpu_hours": -1}, "max_gpu_hours", "number of hours above zero"),
    ({"max_gpu_hours": True}, "max_gpu_hours", "number of hours"),
    ({"retries": 101}, "retries", "at most 100"),
    ({"checkpoint_paths": ["/abs/*"]}, "checkpoint_paths[0]", "leaves the working folder"),
    ({"checkpoint_paths": ["a", "../x"]}, "checkpoint_paths[1]", "leaves the working folder"),
    ({"metrics": ["loss"]}, "metrics", "table"),
    ({"metrics": {"loss": "loss ([0-9"}}, "metrics.loss", "'loss ([0-9' is not a regular expression: unterminated"),
    ({"metrics": {"loss": "loss [0-9]+"}}, "metrics.loss", "'loss [0-9]+' has no group, not one"),
    ({"metrics": {"loss": "(loss) ([0-9]+)"}}, "metrics.loss", "has 2 groups, not one"),
    ({"metrics": {"loss": "(a{99999999999999999999})"}}, "metrics.loss", "is not a regular expression"),
    ({"metrics": {"time": "time (.*)"}}, "metrics", "time is the time of the row itself"),
    ({"metrics": {"a=b": "(.*)"}}, "metrics", "'a=b' is not a name for a metric"),
    ({"metrics": {" a": "(.*)"}}, "metrics", "' a' is not a name for a metric"),
    ({"metrics": {"a" * 101: "(.*)"}}, "metrics", "is not a name for a metric"),
    ({"webhook": "h/x"}, "webhook", "is not a URL to post to"),
    ({"webhook": "https://h/{secrets.T}"}, "webhook", "{secrets.T} names no secret"),
    ({"webhook": "{secrets.U}", "secrets": {"T": "env:T"}}, "webhook", "{secrets.U} names no secret"),
    ({"webhook": "https://h", "webhook_headers": {"A b": "c"}}, "webhook_headers", "its name is not that of a header"),
    ({"webhook": "https://h", "webhook_headers": {"A": "b\nc"}}, "webhook_headers.A", "one line"),
    ({"webhook": "https://h", "webhook_headers": {"A": "{secrets.T}"}}, "webhook_headers.A", "names no secret"),
    ({"args": ["{inputs.trian}"], "inputs": {"train": "x"}}, "args", "did you mean 'train'?"),
    ({"env": {"D": "{inputs.val}"}}, "env", "{inputs.val} names no input"),
    ({"hyperparameters": {"d": "{inputs.val}"}}, "hyperparameters", "{inputs.val} names no input"),
    ({"instance_cuont": 2}, "instance_cuont", "did you mean 'instance_count'?"),
    ({"nodes": 2}, "nodes", "did you mean 'instance_count'?"),
    ({"resources": {"nodes": 2}}, "resources.nodes", "did you mean 'instance_count'?"),
    ({"hp": {"lr": 1}}, "hp", "did you mean 'hyperparameters'?"),
    ({"hyperparams": {}}, "hyperparams", "did you mean 'hyperparameters'?"),
    ({"source": {"entrypoint": "x.py"}}, "source.entrypoint", "did you mean 'entry_point'?"),
    ({"resources": {"gpus": "H100"}}, "resources.gpus", "did you mean 'gpu'?"),
    ({"on": {"sagemaker": {"imgae": "x"}}}, "on.sagemaker.imgae", "did you mean 'image'?"),
    ({"on": {"sagemaker": {"name": "x"}}}, "on.sagemaker.name", "no field that can differ"),
    ({"on": {"sagemaker": {"instance_count": 0}}}, "on.sagemaker", "resources.instance_count"),
    ({"on": {"sagemaker": {"env": "x"}}}, "on.sagemaker.env", "must be a table"),
    ({"options": {"sagemaker": [1]}}, "options.sagemaker", "must be a table"),
]  # fmt: skip


@for_each(("fields", "field", "message"), REFUSED)
def test_a_refusal_names_the_dotted_field_and_what_would_do(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(**fields)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert message in f"{caught.value}; {caught.value.hint}"
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_secret_in_place_of_its_reference_is_not_shown() -> None:
    for value in ("hunter2", "hunter2:x", "gcp:"):
        with pytest.raises(SpecError) as caught:
            job(secrets={"T": value})
        assert str(caught.value) == "secrets.T: its value is not a reference to a secret"
        assert "hunter2" not in caught.value.hint


@for_each(
    "name",
    ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PET_NNODES",
     "TORCHELASTIC_RUN_ID", "CLOUDTRAIN_RUN_ID"],
)  # fmt: skip
def test_names_that_every_rank_gets_are_refused_in_env_and_secrets(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name} is set by torchrun or cloudtrain"):
        job(env={name: "1"})
    with pytest.raises(SpecError, match=f"{name} is set by torchrun or cloudtrain"):
        job(secrets={name: "env:X"})
    assert job(env={f"MY_{name}": "1"}).env


@for_each("text", ["{", "}", "{}", "{resume_from}x", "{inputs}", '{"a": {"b": 1}}', "{{inputs.a}", "{Inputs.a}"])
def test_braces_that_are_no_placeholder_are_nobodys_business(text: str) -> None:
    if "{inputs.a}" in text:
        with pytest.raises(SpecError):
            job(args=[text])
    assert job(args=[text], env={"A": text}, hyperparameters={"a": text}, inputs={"a": "x"}).args == (text,)


def test_every_known_placeholder_stays_literal_in_the_job() -> None:
    args = ("{checkpoint_dir}", "{artifact_dir}", "{resume_from}", "{run_id}", "{inputs.train}", "{resume_from?}")
    assert Job.from_json(job(args=args, inputs={"train": "x"}).to_json()).args == args


def test_not_json_and_not_toml_are_said_so() -> None:
    with pytest.raises(SpecError, match="not JSON"):
        Job.from_json("{")
    with pytest.raises(SpecError, match="must be a table"):
        Job.from_json("[]")
    with pytest.raises(SpecError, match="line 1"):
        Job.from_toml("a = = 1")


# ---------------------------------------------------------------------------------------------------- on, flat, toml


def test_on_replaces_fields_and_merges_tables() -> None:
    made = job(
        image="a:1",
        env={"A": "1", "B": "1"},
        hyperparameters={"lr": 1, "wd": 2},
        inputs={"train": "x"},
        args=["1", "2"],
        on={"vertex": {"image": "b:2", "env": {"B": "2"}, "hyperparameters": {"lr": 3}, "args": ["9"],
                       "inputs": {"train": {"url": "gs://b/x", "mode": "mount"}}, "instance_type": "n1", "gpu": "L4"}},
    )  # fmt: skip
    there = made.at("vertex")
    assert (there.image, there.args, there.resources.instance_type) == ("b:2", ("9",), "n1")
    assert there.env == {"A": "1", "B": "2"}
    assert there.hyperparameters == {"lr": 3, "wd": 2}
    assert there.inputs == {"train": Input(url="gs://b/x", mode="mount")}
    assert there.resources.gpu == ("L4:1",)
    assert there.on == {}
    here = made.at("local")
    assert (here.image, here.args, here.env) == ("a:1", ("1", "2"), {"A": "1", "B": "1"})
    assert made.at("vertex").digest != here.digest


def test_flat_words_cover_every_field_once_and_nested_forms_mean_the_same() -> None:
    nested = Job.from_dict({"source": {"entry_point": "a.py", "path": "p"}, "resources": {"instance_count": 3}})
    assert nested == Job.make(entry_point="a.py", source_dir="p", instance_count=3)
    owners = {"": Job, "source": Source, "resources": Resources}
    count = sum(len(dataclasses.fields(kind)) for kind in owners.values()) - 2
    assert len(FLAT_FIELDS) == count
    for owner, name in FLAT_FIELDS.values():
        assert name in {f.name for f in dataclasses.fields(owners[owner])}


def test_toml_paths_are_below_the_folder_of_the_file(tmp_path: Path) -> None:
    text = 'entry_point = "t.py"\ndependencies = ["lib"]\n[inputs]\na = "d/x"\nb = "s3://b/k"\n[inputs.c]\nurl = "e"\n'
    made = Job.from_toml(text, folder=tmp_path)
    assert made.source.path == str(tmp_path)
    assert made.source.dependencies == (str(tmp_path / "lib"),)
    assert {k: v.url for k, v in made.inputs.items()} == {
        "a": str(tmp_path / "d/x"), "b": "s3://b/k", "c": str(tmp_path / "e"),
    }  # fmt: skip


def test_the_default_name_is_the_scripts() -> None:
    assert job(entry_point="sub/Train_Me.py").name == "train-me"
    assert job(entry_point="-m pkg.Fine_Tune").name == "fine-tune"
    assert job(entry_point="обучение.py").name == "job"
    assert job(entry_point="x.sh").launcher == "command"


# -------------------------------------------------------------------------------------------------------- grammars


@for_each(
    ("text", "name", "memory", "count"),
    [("H100", "H100", None, 1), ("h100:8", "H100", None, 8), ("A100-80GB:4", "A100", 80, 4), (" L4 ", "L4", None, 1),
     ("RTX-A6000:2", "RTX-A6000", None, 2), ("V100-16GB", "V100", 16, 1), ("GH200-96GB:1", "GH200", 96, 1)],
)  # fmt: skip
def test_gpus(text: str, name: str, memory: int | None, count: int) -> None:
    parsed = Gpu.parse(text)
    assert (parsed.name, parsed.memory_gb, parsed.count) == (name, memory, count)
    assert Gpu.parse(str(parsed)) == parsed


@for_each("text", ["", "100", "H100:", "H100:-1", "H100:x", "A100-80:4", "H100 :8", "H_100"])
def test_not_gpus(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        Gpu.parse(text)
    assert caught.value.field == "resources.gpu"


def test_gpus_in_order_of_preference_decide_the_processes() -> None:
    made = job(gpu=["H100:8", "A100-80GB:4"])
    assert [made.resources.processes(i) for i in (0, 1)] == [8, 4]
    assert job(gpu="H100:8,A100:4").resources.gpu == ("H100:8", "A100:4")
    assert job(gpu="H100:8", nproc_per_node=2).resources.processes() == 2
    assert job().resources.processes() == 1


@for_each(
    ("value", "seconds"),
    [(90, 90), ("90", 90), ("90s", 90), ("45m", 2700), ("12h", 43200), ("2d", 172800), ("1h30m", 5400),
     ("1D2H3M4S", 93784), (" 5m ", 300), (60.0, 60), (timedelta(minutes=2), 120)],
)  # fmt: skip
def test_durations(value: Any, seconds: int) -> None:
    assert parse_duration(value, field="x") == seconds


@for_each("value", ["", "h", "1.5h", "m5", "5m1h", "-1", -1, 0, "0", "0s", 1.5, True, None, float("inf"), "1y"])
def test_not_durations(value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        parse_duration(value, field="max_runtime")
    assert caught.value.field == "max_runtime"


@given(st.integers(0, 40), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_durations_add_up(d: int, h: int, m: int, s: int) -> None:
    assume(d or h or m or s)
    text = "".join(f"{n}{u}" for n, u in ((d, "d"), (h, "h"), (m, "m"), (s, "s")) if n)
    assert parse_duration(text, field="x") == int(timedelta(days=d, hours=h, minutes=m, seconds=s).total_seconds())


@for_each("run_id", ["a", "0", "a-b", "20260101-101010-x-0a1b", "a" * 40])
def test_run_ids(run_id: str) -> None:
    assert check_run_id(run_id) == run_id


@for_each("run_id", ["", "-a", "a-", "a--b", "A", "a_b", "a.b", "a/b", "..", "a" * 41, "é", "a\n", "a b"])
def test_not_run_ids(run_id: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_run_id(run_id)
    assert caught.value.field == "run_id"


@given(st.from_regex(r"[a-z0-9](-?[a-z0-9]){0,39}", fullmatch=True).filter(lambda n: len(n) <= 40))
def test_every_name_makes_a_run_id_that_sorts_by_time(name: str) -> None:
    early, late = new_run_id(name, now=0, token="00ff"), new_run_id(name, now=10**9, token="0000")
    assert check_run_id(early).startswith("19700101-000000-")
    assert early < late
    assert len({new_run_id(name) for _ in range(4)}) > 1


@for_each(
    ("url", "scheme"),
    [("s3://b/k", "s3"), ("GS://b", "gs"), ("azureml:data:1", "azureml"), ("./x", ""), ("/a:b", ""), ("C:\\x", ""),
     ("C:/x", ""), ("file:///x", "file"), ("name", "")],
)  # fmt: skip
def test_schemes(url: str, scheme: str) -> None:
    assert url_scheme(url) == scheme


@for_each(
    ("word", "choices", "found"),
    [
        ("alpa", ["alpha", "beta"], "alpha"),
        ("tarin.py", ["test.py", "train.py"], "train.py"),
        ("H10", ["A10", "H100", "P100"], "H100"),
        ("REGION", ["store", "region"], "region"),
        ("hyperparams", ["hyperparameters"], "hyperparameters"),
        ("zzz", ["alpha", "beta"], ""),
        ("NOPE", ["HOME", "PATH"], ""),
        ("region", ["on", "name"], ""),
        ("epochs", ["detach", "env"], ""),
        ("ps", ["gpus", "ls"], ""),
        (".", ["w"], ""),
        ("", ["a"], ""),
    ],
)
def test_only_a_slip_of_the_keyboard_is_similar(word: str, choices: list[str], found: str) -> None:
    assert similar(word, choices) == found
    assert did_you_mean(word, choices) == (f"did you mean {found!r}?" if found else "")
